"""ulysses: attention over a split sequence: each rank attends with some of the heads over all tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.graph import Graph, module_path
from latentscan.ir.layout import LayoutError
from latentscan.ir.mesh import Axis
from latentscan.ir.mla import Operand, argument, latent_source, only_columns, operand, same_latent
from latentscan.ir.normalize import ATTENTION, CAUSAL_MASK, LATENT_ATTENTION
from latentscan.ir.ops import exchange
from latentscan.ir.ops.mask import packing_mask
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier
from latentscan.passes.context_parallel import GRADIENTS, cp_axis, ends_here, finish, sums_site, whole_graph

PACKING_MASK = packing_mask.op


@dataclass(frozen=True)
class Ulysses(Pass):
    """Head/sequence all-to-all around attention, over the mesh's axis ``cp`` (MATH 6)."""

    name: ClassVar[str] = "ulysses"
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    after: ClassVar[tuple[str, ...]] = ("tensor-parallel", "mamba-context-parallel", "mla-mm-split", "mla-absorb")
    summary: ClassVar[str] = "attention over a sequence split along cp: tokens against heads, all-to-all"
    math: ClassVar[str] = (
        "q, k and v of a shard, all heads, become this rank's heads of all tokens; the result goes back. Causal and "
        "balanced. Rotary positions were applied before and are those of the whole sequence. n_h must be divisible by "
        "the ranks; n_kv too, or the ranks by n_kv: then KV heads are sent to all ranks that read them. Volume a rank: "
        "(R - 1)/R (L/R) b (2 n_h d + 2 max(n_kv, R) d) elements. Where K and V come of a latent, it is gathered and "
        "each rank expands its own heads if R (d_c + d_r) < n_kv (d_k + d_v); the absorbed form always gathers it. "
        "Source: Jacobs et al. 2023, DeepSpeed-Ulysses."
    )

    gradients: str = field(default="sum", metadata={"choices": GRADIENTS})

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        axis = cp_axis(context.mesh)
        if axis.size == 1:
            return [Refusal("", "one-rank", "the mesh has one rank along cp", "give a mesh such as cp=2")]
        all_of_them = graph.calls(ATTENTION, LATENT_ATTENTION)
        refusals = [r for n in all_of_them if (r := _refused(graph, n, axis))]
        if all_of_them:
            refusals += whole_graph(graph, context)
        if refusals or not all_of_them:
            return list(refusals)
        found: list[Site | Refusal] = [_site(graph, n, axis) for n in all_of_them]
        return [*found, sums_site(axis, self.gradients)] if ends_here(self.name, context) else found

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        axis = cp_axis(context.mesh)
        if site.rule == "sums":
            finish(graph, axis, self.name, self.gradients)
            return
        node = graph.node(site.anchor)
        where = (axis.name, axis.size, axis.group)
        heads, kv_heads = int(graph.shape(node.args[0])[1]), site.facts["whole_kv_heads"]  # type: ignore[arg-type]
        users = list(node.users)
        shared = _latents(graph, node) if site.facts["latent"] else None
        with graph.before(node, self.name):
            if node.target is LATENT_ATTENTION:
                for position in range(4):
                    x: Any = node.args[position]
                    if isinstance(x, fx.Node) and position < 2:
                        node.update_arg(position, graph.call(exchange.to_heads, x, *where))
                    elif isinstance(x, fx.Node):
                        node.update_arg(position, _k_rope(graph, x, position - 1, axis))
            else:
                if shared is not None:
                    for position, made in zip((1, 2), _expanded(graph, node, shared, axis), strict=True):
                        node.update_arg(position, made)
                for position in range(1 if shared is not None else 3):
                    x = node.args[position]
                    if position and kv_heads % axis.size:
                        x = graph.method("repeat_interleave", x, axis.size // kv_heads, 1)
                    node.update_arg(position, graph.call(exchange.to_heads, x, *where))
            for name, of_mask in (("mask", _whole_mask), ("padding", _gathered), ("sinks", _own_heads)):
                given = argument(node, name)
                if isinstance(given, fx.Node):
                    _put(node, name, of_mask(graph, given, axis, heads))
        node.meta["example_value"] = graph.evaluate(node)
        with graph.after(node, self.name):
            back = graph.call(exchange.to_tokens, node, *where)
        for user in users:
            user.replace_input_with(node, back)


@dataclass(frozen=True)
class _Latents:
    """K and V as maps of a latent: one linear map each, and what all heads share of K."""

    key: Operand
    value: Operand
    latent: fx.Node
    rope: fx.Node | None  # [b, 1, L, r]
    rope_first: bool


def _latents(graph: Graph, node: fx.Node) -> _Latents | None:
    """How K and V come out of one latent, or None if they do not, or not in a form that can be made again."""
    if node.target is LATENT_ATTENTION:
        return None
    try:
        key, value = (operand(graph, node.args[i]) for i in (1, 2))  # type: ignore[arg-type]
        if key.linear is None or value.linear is None or not same_latent(key.linear, value.linear) or value.other:
            return None
        if any(p.linear.bias is not None or p.linear.transposed for p in (key, value)):  # type: ignore[union-attr]
            return None
        rope = None
        if key.other:
            rope, turned = only_columns(key, key.other)
            if turned or graph.shape(rope)[1] != 1:
                return None
        latent = latent_source(graph, key.linear.x)
        width = graph.shape(node.args[1])[3]  # type: ignore[arg-type]
    except LayoutError:
        return None
    rope_first = bool(key.other) and key.other[0] == 0
    order = [*key.other, *key.columns] if rope_first else [*key.columns, *key.other]
    return _Latents(key, value, latent, rope, rope_first) if order == list(range(int(width))) else None


def _expanded(graph: Graph, node: fx.Node, found: _Latents, axis: Axis) -> list[fx.Node]:
    """This rank's heads of K and V over all tokens, made of the gathered latent."""
    where = (axis.name, axis.size, axis.group)
    share = found.key.rows.shape[0] // axis.size
    mine = slice(axis.rank * share, (axis.rank + 1) * share)
    dim = len(graph.shape(found.latent)) - 2
    latent = graph.call(exchange.gather_shared, found.latent, dim, *where)
    if dim == 2:
        latent = graph.method("squeeze", latent, 1)
    made = []
    for part in (found.key, found.value):
        assert part.linear is not None
        rows = [int(r) for r in part.rows[mine].flatten()]
        x = graph.call(F.linear, latent, graph.call(exchange.take_rows, part.linear.weight, rows), None)
        made.append(graph.method("transpose", graph.method("unflatten", x, -1, (share, -1)), 1, 2))
    if found.rope is not None:
        rope = graph.method("expand", graph.call(exchange.gather_shared, found.rope, 2, *where), -1, share, -1, -1)
        both = (rope, made[0]) if found.rope_first else (made[0], rope)
        made[0] = graph.call(torch.cat, both, -1)
    return made


def _k_rope(graph: Graph, x: fx.Node, dim: int, axis: Axis) -> fx.Node:
    """The absorbed form's latent, or its rotated keys; of those with a head for each KV head, the ones in use here."""
    made = graph.call(exchange.gather_shared, x, dim, axis.name, axis.size, axis.group)
    groups = int(graph.shape(x)[1]) if dim == 2 else 1
    if groups == 1:
        return made
    share = max(1, groups // axis.size)
    return graph.method("narrow", made, 1, axis.rank * groups // axis.size, share)


def _site(graph: Graph, node: fx.Node, axis: Axis) -> Site:
    q, k = (graph.shape(node.args[i]) for i in (0, 1))  # type: ignore[arg-type]
    heads, size = int(q[1]), axis.size
    module = module_path(node)
    if node.target is LATENT_ATTENTION:
        c, r = int(q[3]), int(k[3]) if node.args[1] is not None else 0
        facts = {"ranks": size, "heads": heads // size, "kv_heads": 1, "whole_kv_heads": 1, "latent": False}
        note = f"{heads // size} of {heads} heads a rank; {heads * (2 * c + r)} elements a token change rank, and "
        return Site(module, "heads-for-tokens", node.name, facts, f"{note}the latent ({c} + {r}) goes to all")
    v = graph.shape(node.args[2])  # type: ignore[arg-type]
    kv_heads = int(k[1])
    found = _latents(graph, node)
    swapped = max(kv_heads, size) * (int(k[3]) + int(v[3]))  # K and V of a token, (R - 1) / R of which leave the rank
    narrow = 0
    if found is not None:
        narrow = int(graph.shape(found.latent)[-1]) + (int(graph.shape(found.rope)[3]) if found.rope is not None else 0)
    latent = found is not None and size * narrow < swapped
    facts = {
        "ranks": size, "heads": heads // size, "kv_heads": max(1, kv_heads // size), "whole_kv_heads": kv_heads,
        "latent": latent,
    }  # fmt: skip
    sent = heads * (int(q[3]) + int(v[3])) + (0 if latent else swapped)
    note = f"{facts['heads']} of {heads} heads a rank; {sent} elements a token change rank"
    if found is not None:
        compared = f"R (d_c + d_r) = {size * narrow} {'<' if latent else '>='} n_kv (d_k + d_v) = {swapped}"
        note += f"; {'the latent goes to all' if latent else 'keys and values, not the latent,'} ({compared})"
    return Site(module, "heads-for-tokens", node.name, facts, note)


def _refused(graph: Graph, node: fx.Node, axis: Axis) -> Refusal | None:
    module = module_path(node)
    heads = int(graph.shape(node.args[0])[1])  # type: ignore[arg-type]
    absorbed = node.target is LATENT_ATTENTION
    kv_heads = 1 if absorbed else int(graph.shape(node.args[1])[1])  # type: ignore[arg-type]
    if absorbed and isinstance(node.args[3], fx.Node):
        kv_heads = int(graph.shape(node.args[3])[1])
    if heads % axis.size or (kv_heads % axis.size and axis.size % kv_heads):
        what = f"{heads} heads and {kv_heads} KV heads cannot be shared by {axis.size} ranks"
        return Refusal(module, "heads-not-divisible", what, f"use a divisor of {heads} that fits {kv_heads}")
    if argument(node, "cu_seqlens") is not None:
        return Refusal(module, "cu-seqlens", "cu_seqlens count from the row's start", "give position_ids instead")
    mask = argument(node, "mask")
    if isinstance(mask, fx.Node) and _mask_parts(mask) is None:
        return Refusal(
            module, "mask-unknown", f"the mask {mask.name} is not made of lengths and position ids", "leave it out"
        )
    return None


def _mask_parts(mask: fx.Node) -> tuple[fx.Node, fx.Node | None] | None:
    """A mask's causal part and the position ids that tell packed sequences."""
    if mask.target is CAUSAL_MASK:
        return mask, None
    if mask.target is PACKING_MASK and mask.args[0].target is CAUSAL_MASK:  # type: ignore[union-attr]
        return mask.args[0], mask.args[1]  # type: ignore[return-value]
    return None


def _gathered(graph: Graph, x: fx.Node, axis: Axis, heads: int) -> fx.Node:
    made = next((n for n in graph.calls(exchange.gather_tokens) if n.args[0] is x), None)
    return made or graph.call(exchange.gather_tokens, x, axis.name, axis.size, axis.group)


def _whole_mask(graph: Graph, mask: fx.Node, axis: Axis, heads: int) -> fx.Node:
    """The mask again, over all tokens."""
    parts = _mask_parts(mask)
    assert parts is not None
    causal, positions = parts
    like, padding, batch, queries, keys, *rest = causal.args
    longer = [graph.call(_times, n, axis.size) for n in (queries, keys)]
    padding = _gathered(graph, padding, axis, heads) if isinstance(padding, fx.Node) else padding
    made = graph.call(CAUSAL_MASK, like, padding, batch, *longer, *rest, **causal.kwargs)
    if positions is None:
        return made
    return graph.call(PACKING_MASK, made, _gathered(graph, positions, axis, heads))


def _times(size: int, ranks: int) -> int:
    """A length of the whole sequence."""
    return size * ranks


def _own_heads(graph: Graph, sinks: fx.Node, axis: Axis, heads: int) -> fx.Node:
    share = heads // axis.size
    return graph.method("narrow", sinks, 0, axis.rank * share, share)


def _put(node: fx.Node, name: str, value: Any) -> None:
    position = next(i for i, a in enumerate(node.target._schema.arguments) if a.name == name)  # type: ignore[union-attr]
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.kwargs = {**node.kwargs, name: value}
