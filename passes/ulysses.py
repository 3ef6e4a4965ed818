"""ulysses: attention over a split sequence: each rank attends with some of the heads over all tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from latentscan.ir.graph import Graph, module_path
from latentscan.ir.mesh import Axis
from latentscan.ir.mla import argument, attentions
from latentscan.ir.normalize import CAUSAL_MASK, LATENT_ATTENTION
from latentscan.ir.ops import exchange
from latentscan.ir.ops.mask import packing_mask
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier
from latentscan.passes.context_parallel import cp_axis, ends_here, finish, sums_site, whole_graph

PACKING_MASK = packing_mask.op


@dataclass(frozen=True)
class Ulysses(Pass):
    """Head/sequence all-to-all around attention, over the mesh's axis ``cp`` (MATH 6)."""

    name: ClassVar[str] = "ulysses"
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    after: ClassVar[tuple[str, ...]] = ("tensor-parallel", "mamba-context-parallel")
    summary: ClassVar[str] = "attention over a sequence split along cp: tokens against heads, all-to-all"
    math: ClassVar[str] = (
        "q, k and v of a shard, all heads, become this rank's heads of all tokens; the result goes back. Causal and "
        "balanced. Rotary positions were applied before and are those of the whole sequence. n_h must be divisible by "
        "the ranks; n_kv too, or the ranks by n_kv: then KV heads are sent to all ranks that read them. Volume a rank: "
        "(R - 1)/R (L/R) b (2 n_h d + 2 max(n_kv, R) d) elements. Source: Jacobs et al. 2023, DeepSpeed-Ulysses."
    )

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        axis = cp_axis(context.mesh)
        if axis.size == 1:
            return [Refusal("", "one-rank", "the mesh has one rank along cp", "give a mesh such as cp=2")]
        latent = graph.calls(LATENT_ATTENTION)
        refusals = [r for n in (*attentions(graph), *latent) if (r := _refused(graph, n, axis))]
        if attentions(graph):
            refusals += whole_graph(graph, context)
        if refusals or not attentions(graph):
            return list(refusals)
        found: list[Site | Refusal] = [_site(graph, n, axis) for n in attentions(graph)]
        return [*found, sums_site(axis)] if ends_here(self.name, context) else found

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        axis = cp_axis(context.mesh)
        if site.rule == "sums":
            finish(graph, axis, self.name)
            return
        node = graph.node(site.anchor)
        where = (axis.name, axis.size, axis.group)
        heads, kv_heads = (int(graph.shape(node.args[i])[1]) for i in (0, 1))  # type: ignore[arg-type]
        users = list(node.users)
        with graph.before(node, self.name):
            for position in range(3):
                x: Any = node.args[position]
                if position and kv_heads % axis.size:
                    x = graph.method("repeat_interleave", x, axis.size // kv_heads, 1)
                node.update_arg(position, graph.call(exchange.to_heads, x, *where))
            for name, of in (("mask", _whole_mask), ("padding", _gathered), ("sinks", _own_heads)):
                given = argument(node, name)
                if isinstance(given, fx.Node):
                    _put(node, name, of(graph, given, axis, heads))
        node.meta["example_value"] = graph.evaluate(node)
        with graph.after(node, self.name):
            back = graph.call(exchange.to_tokens, node, *where)
        for user in users:
            user.replace_input_with(node, back)


def _site(graph: Graph, node: fx.Node, axis: Axis) -> Site:
    q, k = (graph.shape(node.args[i]) for i in (0, 1))  # type: ignore[arg-type]
    heads, kv_heads = int(q[1]), int(k[1])
    facts = {"ranks": axis.size, "heads": heads // axis.size, "kv_heads": max(1, kv_heads // axis.size)}
    sent = 2 * heads * int(q[3]) + 2 * max(kv_heads, axis.size) * int(k[3])
    note = f"{facts['heads']} of {heads} heads a rank; {sent} elements a token change rank"
    return Site(module_path(node), "heads-for-tokens", node.name, facts, note)


def _refused(graph: Graph, node: fx.Node, axis: Axis) -> Refusal | None:
    module = module_path(node)
    if node.target is LATENT_ATTENTION:
        return Refusal(module, "latent", "the absorbed form has one latent for all heads", "leave out mla-absorb")
    heads, kv_heads = (int(graph.shape(node.args[i])[1]) for i in (0, 1))  # type: ignore[arg-type]
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
