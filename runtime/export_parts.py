"""What an exported attention is made of: read from a converted model's graph, whichever pass made it.

An attention whose key is [features linear in a latent | rotated features] is latent attention of the DeepSeek kind: the
rotated features of all KV heads side by side are *one* rotated head that all query heads share, if a query head has
zeros where another KV head's features lie. So any number of rotated KV heads fits; more of them only cost query rows.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from latentscan.ir.errors import RefusedError
from latentscan.ir.graph import Graph, module_path
from latentscan.ir.layout import LayoutError, Linear, linear_of, strip_layout
from latentscan.ir.mla import Operand, argument, operand, same_latent
from latentscan.ir.ops.rope import ROPE as ROPE_INFO
from latentscan.passes.mha_to_mla import find
from latentscan.runtime.own import get

ROPE = ROPE_INFO.op
DIRECT = "load the model with latentscan.load, which reads every form"  # no conversion would fit
INDIRECT = f"give mha-to-mla a rank, or {DIRECT}"  # the low-rank form would


@dataclass(frozen=True)
class Parts:
    """One attention as latent attention, in fp64. H query heads, D hidden, d_c latent, d_n/d_v per head.

    Attributes:
        module: its path.
        scale: what scores are multiplied by.
        query: [H, d_n, D]. key_up: [H, d_n, d_c]. value_up: [H, d_v, d_c]. down: [d_c, D].
        query_rope, key_rope: rotated pairs as [H, pairs, 2, D] and [pairs, 2, D], every KV head's among them.
        key_bias: [H, d_n]. value_bias: [H, d_v]. key_rope_bias: [pairs, 2].
        group: [pairs] which KV head a pair belongs to. frequencies: [pairs] radians per token, fp32.
    """

    module: str
    scale: float
    query: Tensor
    key_up: Tensor
    value_up: Tensor
    down: Tensor
    query_rope: Tensor
    key_rope: Tensor
    key_bias: Tensor
    value_bias: Tensor
    key_rope_bias: Tensor
    group: Tensor
    frequencies: Tensor


def parts_of(model: nn.Module, graph: Graph, node: fx.Node) -> Parts:
    """Read one attention.

    Args:
        model: holds the weights. graph: its planning graph after the conversion; its weights may be on the meta device.

    Raises:
        RefusedError: it has something that this form lacks.
    """
    module = module_path(node)
    try:
        return _parts(model, graph, node, module)
    except LayoutError as error:
        raise RefusedError(f"its layout is not understood: {error}", where=module, remedy=DIRECT) from None


def _parts(model: nn.Module, graph: Graph, node: fx.Node, module: str) -> Parts:
    for name in ("window", "softcap", "sinks"):
        value = argument(node, name)
        if value is not None and value != 0:
            told = "" if isinstance(value, fx.Node) else f" ({value})"
            raise RefusedError(
                f"its attention has {name}{told}, which DeepSeek-V3's lacks", where=module, remedy=DIRECT
            )
    found = find(graph, node)
    query, key, value_part = (operand(graph, n) for n in (found.query, found.key, found.value))
    if value_part.linear is None or value_part.other:
        raise RefusedError("its values are not linear in the layer's input", where=module, remedy=INDIRECT)
    if query.columns != key.columns or query.other != key.other:
        raise RefusedError("queries and keys are rotated in different places", where=module, remedy=INDIRECT)
    if not key.other:
        raise RefusedError(
            "its keys have no rotated part (positions come from elsewhere), and DeepSeek-V3's always have one",
            where=module,
            remedy=DIRECT,
        )
    if key.columns and (key.linear is None or query.linear is None):
        raise RefusedError("its keys or queries are not linear in the layer's input", where=module, remedy=INDIRECT)
    query_rope, query_table = _rotated(graph, query, module)
    key_rope, key_table = _rotated(graph, key, module)
    assert query_rope.linear and key_rope.linear
    x = key_rope.linear.x
    inputs = [query_rope.linear, *([query.linear] if query.linear else [])]
    if not all(same_latent(one, key_rope.linear) for one in inputs):
        raise RefusedError("queries and rotated keys are made from different inputs", where=module, remedy=INDIRECT)

    def weight(linear: Linear) -> tuple[Tensor, Tensor]:
        """[out, in] and the bias [out] (zeros if there is none), in fp64."""
        known = [graph.weight(n) for n in (linear.weight, linear.bias)]
        if known[0] is None or (linear.bias is not None and known[1] is None):
            raise RefusedError("a projection is computed, not a parameter", where=module, remedy="dequantise it first")
        matrix = get(model, known[0].path).detach().double()
        matrix = matrix.t() if linear.transposed else matrix
        bias = None if known[1] is None else get(model, known[1].path).detach().double()
        return matrix, matrix.new_zeros(len(matrix)) if bias is None else bias

    def of_query(linear: Linear) -> Tensor:
        """[out, in]; refuses a bias that is not zero."""
        matrix, bias = weight(linear)
        if bool(bias.any()):
            raise RefusedError(
                f"{graph.weight(linear.bias).path} is a bias of queries, and DeepSeek-V3's have none",  # type: ignore
                where=module, remedy=DIRECT,
            )  # fmt: skip
        return matrix

    heads = int(graph.shape(found.query)[1])
    hidden = int(graph.shape(strip_layout(x))[-1])
    down, key_up, value_up, key_bias, value_bias = _latent(graph, key, value_part, x, weight, module)
    kv_heads = value_part.features.source.shape[0]
    if key.features.source.shape[0] != kv_heads or heads % kv_heads:
        raise RefusedError(
            f"{heads} query, {key.features.source.shape[0]} key and {kv_heads} value heads do not match", where=module,
            remedy=DIRECT,
        )  # fmt: skip
    group_of_head = torch.arange(heads) // (heads // kv_heads)
    plain = None
    if key.columns and query.linear is not None:
        plain = of_query(query.linear)[query.rows.flatten()].reshape(heads, -1, hidden)

    # The rotated pairs: rows [KV heads, pairs, 2] of the key's weight and [H, pairs, 2] of the query's.
    layout = _layout(graph, key, module)
    members = _pair_members(len(key.other), layout)
    rows_k, rows_q = key_rope.rows[:, members], query_rope.rows[:, members]
    shared = bool((rows_k == rows_k[:1]).all())
    (wk, bk), wq = weight(key_rope.linear), of_query(query_rope.linear)
    groups = 1 if shared else kv_heads
    pairs = members.shape[0]
    merged_q = wq.new_zeros(heads, groups, pairs, 2, hidden)
    rotated_q = wq[rows_q.flatten()].reshape(heads, pairs, 2, hidden)
    if shared:
        merged_q[:, 0] = rotated_q
    else:
        merged_q[torch.arange(heads), group_of_head] = rotated_q
    frequencies = _frequencies(model, graph, key_table, pairs, module)
    if not torch.equal(frequencies, _frequencies(model, graph, query_table, pairs, module)):
        raise RefusedError("queries and keys are rotated by different angles", where=module, remedy=DIRECT)
    return Parts(
        module,
        float(argument(node, "scale") or len(key.columns + key.other) ** -0.5),  # type: ignore[arg-type]
        plain if plain is not None else wq.new_zeros(heads, 0, hidden),
        key_up[group_of_head],
        value_up[group_of_head],
        down,
        merged_q.flatten(1, 2),
        wk[rows_k[:groups].flatten()].reshape(groups * pairs, 2, hidden),
        key_bias[group_of_head],
        value_bias[group_of_head],
        bk[rows_k[:groups].flatten()].reshape(groups * pairs, 2),
        torch.arange(groups).repeat_interleave(pairs),
        frequencies.repeat(groups),
    )


def _rotated(graph: Graph, part: Operand, module: str) -> tuple[Operand, fx.Node]:
    """The rotated features of a query or key as a linear map with rows [heads, features], and their cosine table."""
    sources = {int(i) for i in part.features.source[:, part.other].unique()}
    if len(sources) != 1:
        raise RefusedError("its rotated features come from several places", where=module, remedy=INDIRECT)
    node = part.features.sources[sources.pop()]
    if node.target is not ROPE or node.kwargs.get("unsqueeze_dim", 1) != 1:
        name = getattr(node.target, "__name__", str(node.target))
        raise RefusedError(
            f"part of its keys or queries comes from {name}, neither linear nor rotated (a norm?)", where=module,
            remedy=DIRECT,
        )  # fmt: skip
    before = operand(graph, node.args[0])  # type: ignore[arg-type]
    if before.linear is None or before.other:
        raise RefusedError(
            "its rotated keys or queries are not linear in the layer's input (a norm?)", where=module, remedy=DIRECT
        )
    width = before.rows.shape[1]
    taken = part.features.feature[:, part.other]  # of the rotation's output, [heads, features]
    rows = before.rows[taken // width, taken % width]
    if not bool((taken % width == torch.arange(width)).all()):
        raise RefusedError("its rotated features are taken out of order", where=module, remedy=INDIRECT)
    return Operand(before.linear, rows, before.columns, [], before.features), node.args[1]  # type: ignore[return-value]


def _layout(graph: Graph, key: Operand, module: str) -> str:
    node = key.features.sources[int(key.features.source[0, key.other[0]])]
    layout = str(node.kwargs["layout"])
    if layout not in ("half", "interleaved"):
        raise RefusedError(f"rotation layout {layout!r} is not served", where=module, remedy=DIRECT)
    return layout


def _pair_members(width: int, layout: str) -> Tensor:
    """[pairs, 2] which features a rotation turns together."""
    index = torch.arange(width)
    return index.reshape(2, -1).t() if layout == "half" else index.reshape(-1, 2)


def _latent(
    graph: Graph, key: Operand, value: Operand, x: fx.Node, weight: Any, module: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """down [d_c, D], key_up [KV heads, d_n, d_c], value_up [KV heads, d_v, d_c], and the biases of the last two."""
    assert value.linear is not None
    kv_heads, d_v = value.rows.shape
    from_x = strip_layout(value.linear.x) is strip_layout(x)
    if key.linear is not None and not same_latent(key.linear, value.linear):
        raise RefusedError("keys and values are made from different inputs", where=module, remedy=INDIRECT)
    d_n = len(key.columns)

    def rows(part: Operand) -> tuple[Tensor, Tensor]:
        matrix, bias = weight(part.linear)
        return matrix[part.rows.flatten()], bias[part.rows.flatten()]

    w_v, b_v = rows(value)
    w_k, b_k = rows(key) if key.linear is not None else (w_v[:0], b_v[:0])
    if not from_x:
        source = linear_of(graph, strip_layout(value.linear.x))
        if source is None or strip_layout(source.x) is not strip_layout(x):
            raise RefusedError("its latent is not linear in the layer's input", where=module, remedy=INDIRECT)
        down, constant = weight(source)
        up, bias = torch.cat([w_k, w_v]), torch.cat([b_k + w_k @ constant, b_v + w_v @ constant])
    else:
        joint, bias = torch.cat([w_k, w_v]), torch.cat([b_k, b_v])
        one = torch.eye(min(joint.shape), dtype=joint.dtype)
        # [K | V] itself is the latent, or else the layer's input is
        up, down = (one, joint) if joint.shape[0] < joint.shape[1] else (joint, one)
    keys, values = up.split([kv_heads * d_n, kv_heads * d_v])
    of_keys, of_values = bias.split([kv_heads * d_n, kv_heads * d_v])
    return (
        down, keys.reshape(kv_heads, d_n, len(down)), values.reshape(kv_heads, d_v, len(down)),
        of_keys.reshape(kv_heads, d_n), of_values.reshape(kv_heads, d_v),
    )  # fmt: skip


def _frequencies(model: nn.Module, graph: Graph, table: fx.Node, pairs: int, module: str) -> Tensor:
    """[pairs] radians per token behind a cosine table, from the buffer ``inv_freq`` and the features taken of it."""
    taken: Any = None
    if table.target is operator.getitem and isinstance(table.args[1], tuple):
        taken, table = table.args[1][-1], table.args[0]  # type: ignore[assignment]
    stack, seen = [table], set()
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        weight = graph.weight(current)
        if weight is not None and weight.path.endswith("inv_freq"):
            values = get(model, weight.path).detach().reshape(-1).float().cpu()
            both = torch.cat([values, values])  # a table holds every angle twice, whatever the layout
            if taken is not None:
                both = both[taken]
            return both[:pairs].clone()
        stack.extend(current.all_input_nodes)
    raise RefusedError("the angles of its rotation are not found", where=module, remedy=DIRECT)


__all__ = ["DIRECT", "INDIRECT", "Parts", "parts_of"]
