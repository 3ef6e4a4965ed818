"""What autograd keeps for the backward pass, storage by storage, from the formulas of the calls' derivatives.

Symbolic in the graph's sizes. Views share their base's storage and are counted once; parameters and inputs are not
counted, as everywhere in :mod:`latentscan.ir.cost`. Calls whose derivative is not listed here count with everything
that they read and make, an upper bound.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.axes import draws, name_of
from latentscan.ir.block import from_weights, is_parameter, sides_of, tensors_of
from latentscan.ir.cost import Memo, Values, bytes_expression
from latentscan.ir.functions import ElementwiseFunction
from latentscan.ir.graph import REGION, VALUE, Graph
from latentscan.ir.layout import is_layout, linear_of
from latentscan.ir.ops.base import REGISTRY
from latentscan.ir.ops.collectives import copy_to, split_gated_norm
from latentscan.ir.ops.exchange import MESSAGES, gather_shared, sum_partial, to_heads, to_tokens
from latentscan.ir.ops.state_exchange import STATES, scan_enter, scan_leave
from latentscan.ir.ops.swap import SWAP_OUT
from latentscan.ir.sizes import expression

Sizes = dict[Any, sympy.Expr]  # storage (or a node, for what has no node of its own) -> bytes

_NOTHING = {
    operator.add, operator.sub, operator.neg, torch.add, torch.sub, torch.neg, torch.mean, torch.sum, torch.where,
    "add", "sub", "neg", "mean", "sum", "to", "float", "half", "bfloat16", "type_as", "detach", "size",
    torch._C._nn.pad, torch.stack, torch.view_as_complex, torch.view_as_real,
    "new_ones", "new_zeros", "scatter", "topk", "expand", torch.arange, F.pad, torch.sym_min, torch.sym_max,
}  # fmt: skip
_PLAIN_ATTENTION = {F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention}
_TO_LAST = ("transpose", "permute", "contiguous", "reshape", "flatten", "view")
_EMBEDDINGS = {F.embedding, torch.embedding}
_NORMS = {
    F.layer_norm: 2,
    torch.layer_norm: 2,
    F.rms_norm: 1,
    torch.rms_norm: 1,
}  # -> numbers a row: mean, 1 / deviation
_EXCHANGES = {*STATES, *MESSAGES, copy_to, gather_shared, to_heads, to_tokens, sum_partial}
_PRODUCTS = {
    operator.mul, torch.mul, "mul", operator.matmul, torch.matmul, torch.bmm, torch.mm, torch.einsum, "matmul", "bmm",
    operator.truediv, torch.div, "div",
}  # fmt: skip
_OF_INPUT = {
    operator.pow, torch.pow, "pow", F.silu, F.gelu, "square", torch.square, "sin", "cos", torch.sin, torch.cos,
}  # fmt: skip
_OF_OUTPUT = {
    torch.rsqrt, "rsqrt", torch.sqrt, "sqrt", torch.exp, "exp", torch.sigmoid, "sigmoid", torch.tanh, "tanh",
    torch.softmax, F.softmax, "softmax", F.relu, torch.relu, "relu",
}  # fmt: skip


def storage_of(node: fx.Node) -> Any:
    """The key of a node's storage: nodes that are views of each other have the same."""
    tensors = tensors_of(node.meta.get(VALUE))
    return tensors[0].untyped_storage()._cdata if tensors else None


def _size(node: fx.Node) -> sympy.Expr:
    return expression(tensors_of(node.meta.get(VALUE))[0].untyped_storage().nbytes())


def _trained(graph: Graph, node: Any) -> bool:
    if not isinstance(node, fx.Node):
        return False
    weight = graph.weights.get(node.name)
    if weight is not None:
        real = isinstance(weight.value, torch.nn.Parameter)
        return weight.value.requires_grad if real else is_parameter(graph, node)
    waiting, seen = [node], {node}
    while waiting:  # what descends from no parameter and no input (a table of angles, a mask) takes none
        found = waiting.pop()
        if not _continuous(found) or found.target == "detach":
            continue
        if found.op == "placeholder" and (found.name not in graph.weights or _trained(graph, found)):
            return True
        new = set(found.all_input_nodes) - seen
        seen |= new
        waiting += new
    return False


def _continuous(node: fx.Node) -> bool:
    """Whether a value can have a gradient: floating or complex, and of no op without one."""
    info = REGISTRY.get(node.target)
    if info is not None and not info.differentiable and info.name != "cache_append":
        return False
    return any(t.is_floating_point() or t.is_complex() for t in tensors_of(node.meta.get(VALUE)))


def kept_by(graph: Graph, node: fx.Node, derived: set[fx.Node] | None = None) -> Sizes:
    """What one call keeps: storage -> bytes.

    Args:
        derived: values that take a gradient; None: all floating point values are taken to.
    """
    found: Sizes = {}

    def keep(*values: Any) -> None:
        for value in values:
            if isinstance(value, fx.Node) and value.op != "placeholder" and not from_weights(graph, value):
                found[storage_of(value)] = _size(value)

    target, inputs = node.target, node.all_input_nodes
    calls = node.op in ("call_function", "call_method")
    if not calls or not _trained(graph, node):
        return found
    info = REGISTRY.get(target)
    linear = linear_of(graph, node)
    if linear is not None:
        if _trained(graph, linear.weight):
            keep(linear.x)
    elif target is operator.getitem and _without_gradients(node.args[0]):
        pass
    elif target is F.linear:  # rows of a weight
        keep(node.args[0])
    elif target is split_gated_norm:  # and a number a token and group
        keep(*node.args[:2])
        value = graph.value(node.args[0])  # type: ignore[arg-type]
        each = sympy.Mul(*(expression(n) for n in value.shape[:-1]))
        found[node, "inverse"] = each * node.args[6] * max(4, value.element_size())  # type: ignore[operator]
    elif target in _EXCHANGES:
        if target is scan_enter:
            keep(*inputs)
        elif target is scan_leave:
            keep(node.args[8], node.args[9])  # decays and the entering state; the rest the scan's other end keeps
    elif _without_gradients(node):
        pass
    elif info is not None:
        _canonical(graph, node, info.name, found, keep)
    elif name_of(node).endswith("dropout"):
        _dropped(graph, node, found)
    elif target in ("masked_fill", torch.masked_fill):
        keep(node.args[1])
    elif target in _PLAIN_ATTENTION:
        _plain_attention(graph, node, found, keep)
    elif target in _EMBEDDINGS:  # the rows' numbers: of input and weight, in either order
        keep(*(n for n in inputs if not graph.value(n).is_floating_point()))
    elif target in _NORMS:
        x: Any = node.args[0]
        features = sympy.Mul(*(expression(n) for n in node.args[1]))  # type: ignore[union-attr]
        rows = sympy.Mul(*(expression(n) for n in graph.shape(x))) / features
        keep(x)
        found[node, "rows"] = _NORMS[target] * rows * max(4, graph.value(x).element_size())
    elif isinstance(target, ElementwiseFunction):
        keep(*(node.args[i] for i in target.reads))
        found.update({(node, i): bytes_expression(graph.value(node)) for i in range(target.makes)})
    elif target in _NOTHING or is_layout(node):
        pass
    elif target in _PRODUCTS:
        operands = [n for n in inputs if tensors_of(n.meta.get(VALUE))]
        if len(operands) == 2:
            pairs = (operands, operands[::-1])
            keep(*[a for a, b in pairs if _trained(graph, b) and (derived is None or b in derived)])
        elif len(operands) > 2:
            keep(*operands)
    elif target in _OF_INPUT:
        keep(*inputs[:1])
    elif target in _OF_OUTPUT:
        keep(node)
    else:
        keep(*inputs, node)
    return found


def _dropped(graph: Graph, node: fx.Node, found: Sizes) -> None:
    """What a dropout keeps of its draw: a GPU's one byte an element, a CPU's the factors in the values' own dtype."""
    value = graph.value(node)
    if draws(node):
        item = value.element_size() if value.device.type == "cpu" else 1
        found[node, "drawn"] = sympy.Mul(*(expression(n) for n in value.shape)) * item


def _plain_attention(graph: Graph, node: fx.Node, found: Sizes, keep: Any) -> None:
    """The library's attention with a dropout (one without is canonical): on a CPU two products, which copy their
    operands, and the probabilities before the draw, the factors drawn, and what comes of both, each [B, H, S, T]."""
    names = ("query", "key", "value", "attn_mask", "dropout_p")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if graph.value(node).device.type != "cpu" or not given.get("dropout_p"):
        keep(*node.all_input_nodes, node)
        return
    query, key = (graph.value(given[n]) for n in names[:2])
    for name in names[:3]:
        found[node, name] = sympy.Mul(*(expression(n) for n in graph.value(given[name]).shape)) * query.element_size()
    rows = sympy.Mul(*(expression(n) for n in query.shape[:-1]))
    found[node, "probabilities"] = 3 * rows * expression(key.shape[-2]) * query.element_size()


def _explicit_attention(graph: Graph, node: fx.Node, given: dict[str, Any], found: Sizes, keep: Any) -> None:
    """Attention with a softcap or sinks, whose scores [B, H, S, T] no fused call takes: held whole, in fp32."""
    query, key = graph.value(given["q"]), graph.value(given["k"])
    batch, heads, queries, width = (expression(n) for n in query.shape)
    rows, keys, acc = batch * heads * queries, expression(key.shape[2]), max(4, query.element_size())
    held = (given.get("softcap") is not None) + 2 * (given.get("sinks") is not None)  # tanh; scores, and their sum
    found[node, "scaled"] = rows * width * acc
    found[node, "scores"] = (1 + held) * rows * keys * acc
    alone = given.get("padding") is None and given.get("mask") is None
    if not alone or given.get("kind") != "full":
        found[node, "mask"] = queries * (keys + acc) * (1 if alone else batch)
    if acc == query.element_size():
        keep(given["k"], given["v"])
    else:
        for name in ("k", "v"):
            found[node, name] = sympy.Mul(*(expression(n) for n in graph.value(given[name]).shape)) * acc


def _without_gradients(node: Any) -> bool:
    """An exchange, or a scan on detached values, whose gradients are :func:`scan_enter`'s."""
    if not isinstance(node, fx.Node) or not node.args:
        return False
    return node.target in _EXCHANGES or (node.target in REGISTRY and getattr(node.args[0], "target", "") == "detach")


def _canonical(graph: Graph, node: fx.Node, name: str, found: Sizes, keep: Any) -> None:
    """Canonical ops as the reference target computes them."""
    given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False))  # type: ignore[union-attr]
    if name == "rope":
        keep(given["cos"], given["sin"])
    elif name == "attention" and any((given | dict(node.kwargs)).get(n) is not None for n in ("softcap", "sinks")):
        _explicit_attention(graph, node, given | dict(node.kwargs), found, keep)
    elif name == "attention":
        query, value = given["q"], given["v"]
        rows = sympy.Mul(*(expression(s) for s in graph.shape(query)[:3]))
        width, wide = graph.shape(query)[-1], graph.shape(value)[-1]
        item = graph.value(value).element_size()
        on_cpu = graph.value(node).device.type == "cpu"
        keep(query, given["k"])
        if on_cpu and width != wide:  # the fused CPU kernel wants one head dim: the narrower ones are padded
            batch, groups, keys, _ = (expression(n) for n in graph.shape(value))
            found[node, "value"] = batch * groups * keys * expression(width) * item
        else:
            keep(value)
        of_head, of_token = (expression(n) for n in graph.value(query).stride()[1:3])
        numbers = of_head.is_number and of_token.is_number  # else a token's stride of heads first depends on S
        heads_last = numbers and bool(of_head <= of_token)  # laid out as [B, S, H, D]
        if on_cpu and width != wide:
            found[node, "out"] = rows * expression(width) * item
        elif on_cpu and not heads_last:  # it gives what it makes the query's layout, and bringing heads last copies
            found[node, "out"] = bytes_expression(graph.value(node))
        else:
            found[_result(graph, node)] = bytes_expression(graph.value(node))
        found[node, "logsumexp"] = rows * max(4, item)
        mask = given.get("mask")
        if given.get("padding") is not None or mask is not None:  # the additive mask [B, 1, S, T], or one for each head
            batch, _, queries, keys = (expression(s) for s in (*graph.shape(query)[:3], graph.shape(value)[2]))
            alike = 1 if mask is None or len(graph.shape(mask)) < 3 else expression(graph.shape(mask)[-3])
            found[node, "mask"] = batch * alike * queries * keys * item
    elif name in ("latent_attention", "sparse_latent_attention"):
        keep(*(given.get(n) for n in ("q_latent", "q_rope", "latent", "k_rope", "indices", "allowed")))
        rows = sympy.Mul(*(expression(s) for s in graph.shape(given["q_latent"])[:3]))
        if name == "latent_attention":  # the probabilities [B, H, S, T]
            keys = expression(graph.shape(given["latent"])[1])
            batch, _, queries = (expression(s) for s in graph.shape(given["q_latent"])[:3])
            alone = given.get("padding") is None and given.get("mask") is None
            item = max(4, graph.value(node).element_size())
            found[node, "probabilities"] = rows * keys * item
            found[node, "mask"] = queries * (keys + item) * (1 if alone else batch)  # and whether a query sees a key
    elif name == "swap_out":
        pass
    elif REGISTRY[node.target].differentiable:
        keep(*node.all_input_nodes, node)


def _result(graph: Graph, attention: fx.Node) -> Any:
    """The storage of an attention's output: kernels lay it out [B, S, H, D], so that bringing heads last is free."""
    node, moved = attention, False
    while len(node.users) == 1:
        (user,) = node.users
        if user.op != "call_method" or user.target not in _TO_LAST:
            break
        moved = moved or user.target in ("transpose", "permute")
        if not moved and user.target != "contiguous":
            break  # heads and rows as one, which copies
        node = user
    return storage_of(node)


def kept(graph: Graph, nodes: Iterable[fx.Node]) -> Sizes:
    """What the calls of ``nodes`` keep together."""
    found: Sizes = {}
    for node in nodes:
        found.update(kept_by(graph, node))
    return found


def total(sizes: Sizes) -> sympy.Expr:
    """Bytes of all storages."""
    return sympy.Add(*sizes.values())


# -- with recomputed regions and swapped values ---------------------------------------------------------------------


def host_keys(graph: Graph) -> set[Any]:
    """The storages that ``swap_out`` marks: they are held by the host."""
    found: set[Any] = set()
    for node in graph.calls(SWAP_OUT.op):
        if len(node.args) < 2 or not node.args[1]:
            found |= _keys(graph, node.args[0]) | {storage_of(node)}
    return found


def _keys(graph: Graph, node: Any) -> set[Any]:
    """The storage of a value, and what an attention keeps of its own output."""
    return {storage_of(node), (node, "out")}


def moved(graph: Graph, *values: fx.Node) -> sympy.Expr:
    """Bytes that training keeps now of the storages of ``values``."""
    keys = set().union(*(_keys(graph, v) for v in values))
    return sympy.Add(*(size for key, size in training(graph).items() if key in keys))


def training(graph: Graph) -> Sizes:
    """What a training step holds on the device between its forward and its backward: storage -> bytes.

    A recompute region keeps what it reads from outside, and nothing else. What descends from no parameter and no input
    that may take a gradient (tables of angles, masks) has no backward.
    """
    found: Sizes = {}
    regions: dict[int, list[fx.Node]] = {}
    derived: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder" and _trained(graph, node):
            derived.add(node)
        if node.op not in ("call_function", "call_method") or derived.isdisjoint(node.all_input_nodes):
            continue
        derived.add(node)
        if REGION in node.meta:
            regions.setdefault(node.meta[REGION], []).append(node)
        else:
            found.update(kept_by(graph, node, derived))
    for nodes in regions.values():
        found.update(region_keeps(graph, nodes))
    away = host_keys(graph) | {storage_of(n) for n in graph.graph.nodes if n.op == "placeholder"}
    return {key: size for key, size in found.items() if key not in away}


def region_keeps(graph: Graph, nodes: Iterable[fx.Node]) -> Sizes:
    """What a call that is computed again keeps: what it reads from outside, but for weights and inputs."""
    sides = [n for n in sides_of(tuple(nodes)) if n.op != "placeholder" and not from_weights(graph, n)]
    return {storage_of(n): _size(n) for n in sides}


def training_bytes(graph: Graph, values: Values) -> int:
    """Bytes of :func:`training` at given sizes."""
    at = Memo(values)
    return sum(at(size) for size in training(graph).values())
