"""latent-cache: move linear up-projections past the cache, so that only what they are made of is stored."""

from __future__ import annotations

import collections
import operator
from dataclasses import dataclass
from typing import ClassVar

import networkx as nx
import torch
from torch import fx

from latentscan.ir.errors import VerifyError
from latentscan.ir.graph import Graph, module_path
from latentscan.ir.layout import linear_of
from latentscan.ir.mla import attention_like
from latentscan.ir.ops.mask import token_positions
from latentscan.ir.tokenwise import NotTokenwise, Place, input_places, rerun, width
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier, foreign_cache

TOKEN_POSITIONS = token_positions.op


@dataclass(frozen=True)
class LatentCache(Pass):
    """Store the narrowest values from which the cached tensors are made token by token (MATH 1)."""

    name: ClassVar[str] = "latent-cache"
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    after: ClassVar[tuple[str, ...]] = ("mha-to-mla", "mla-mm-split")
    before: ClassVar[tuple[str, ...]] = ("mla-absorb",)
    phases: ClassVar[str] = "cached"
    summary: ClassVar[str] = "stores the latent instead of what is expanded from it"
    math: ClassVar[str] = (
        "An up-projection works on each token alone, so W cat(c_past, c) = cat(W c_past, W c). Above each pair of "
        "cached tensors lies a network of linear maps, views and concatenations that work token by token; its minimum "
        "cut, with elements per token as capacities, is the least that must be stored; of equal cuts the one with the "
        "fewest tensors, then the one from which the fewest matmuls are computed again. Rotated and normalised values "
        "are ends of the network and stored as they are, unless mha-to-mla has decided that they are made on read: "
        "then position ids (one int32 a token) are stored beside what they are made of."
    )

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        ours = [self._plan_one(graph, node) for node in appends(graph)]
        return ours or [foreign_cache(module_path(node)) for node in attention_like(graph) if _leaves(graph, node)]

    def _plan_one(self, graph: Graph, node: fx.Node) -> Site | Refusal:
        module = module_path(node)
        tensors = _tensors(node)
        now = sum(width(graph, t, p) for t, p in tensors)
        cut = minimum_cut(graph, tensors)
        least = sum(width(graph, n, p) for n, p in cut)
        tie = least == now and len(cut) < len(tensors) and not _computes(graph, tensors, cut)
        if least >= now and not tie:
            parts = ", ".join(f"{t.name} ({width(graph, t, p)})" for t, p in tensors)
            return Refusal(
                module,
                "already-least",
                f"{now} elements per token are cached ({parts}), and no narrower value gives them token by token",
                "convert with mha-to-mla{rank=...,rope_dim=...} to cache less, which is approximate",
            )
        names = " + ".join(f"{n.name} ({width(graph, n, p)})" for n, p in cut)
        facts = {"before": int(now), "after": int(least)}
        return Site(module, "minimum-cut", node.name, facts, f"{now} -> {least} elements per token: {names}")

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        node = graph.node(site.anchor)
        tensors = _tensors(node)
        cut = minimum_cut(graph, tensors)
        with graph.before(node, self.name):
            stored = [_storable(graph, n, p, tensors[0]) for n, p in cut]
            new = graph.call(node.target, node.args[0], stored, [p[1] for _, p in cut])  # type: ignore[arg-type]
            full = graph.call(operator.getitem, new, 0)
            grown = {n: graph.call(operator.getitem, full, i) for i, (n, _) in enumerate(cut)}
            token = graph.call(operator.getitem, new, 1)
            first, place = cut[0]
            sizes = tuple(graph.method("size", grown[first], d) for d in place)
            for n, _ in cut:
                if graph.value(grown[n]).dtype != graph.value(n).dtype:
                    grown[n] = graph.method("to", grown[n], graph.value(n).dtype)
            made = dict(grown)
            rebuilt = [_replay(graph, t, p, made, sizes) for t, p in tensors]
        for user in list(node.users):
            if user.args[1] == 1:
                graph.replace(user, token)
            else:
                for item in list(user.users):
                    again = rebuilt[item.args[1]]  # type: ignore[index]
                    if len(graph.shape(item)) != len(graph.shape(again)):
                        raise VerifyError(f"{item.name} would change shape", where=f"{self.name} at {site.module}")
                    graph.replace(item, again)
                    graph.graph.erase_node(item)
            graph.graph.erase_node(user)
        graph.graph.erase_node(node)


def _leaves(graph: Graph, attention: fx.Node) -> bool:
    """Whether keys or values of an attention leave the graph: somebody else's cache takes them as they are."""
    output = next(n for n in graph.graph.nodes if n.op == "output")
    return not graph.training and any(kept in output.all_input_nodes for kept in attention.args[1:3])


def appends(graph: Graph) -> list[fx.Node]:
    """Nodes that append to a cache."""
    return [n for n in graph.graph.nodes if getattr(n.target, "_opname", "") == "cache_append"]


def _tensors(node: fx.Node) -> list[tuple[fx.Node, Place]]:
    """What an append stores, and where batch and sequence lie in it."""
    return [(t, (0, d)) for t, d in zip(node.args[1], node.args[2], strict=True)]  # type: ignore[arg-type]


def _storable(graph: Graph, node: fx.Node, place: Place, like: tuple[fx.Node, Place]) -> fx.Node:
    """A value in the form in which it is stored: batch first; position ids as int32, a row for each of ``like``'s."""
    if place[0] != 0 or place[0] == place[1]:
        raise VerifyError(f"{node.name} has batch and sequence at {place}; only batch-first values can be cached")
    if _is_positions(graph, node, place):
        return graph.call(TOKEN_POSITIONS, node, like[0], *like[1])
    return node


def _is_positions(graph: Graph, node: fx.Node, place: Place) -> bool:
    value = graph.value(node)
    whole = isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)
    return whole and value.dim() == 2 and place == (0, 1)


def _cuttable(graph: Graph, node: fx.Node, place: Place) -> bool:
    """Whether a value can be cached as it is, or (position ids) as int32."""
    value = graph.value(node)
    if not isinstance(value, torch.Tensor) or place[0] != 0 or place[0] == place[1]:
        return False
    return value.is_floating_point() or value.is_complex() or _is_positions(graph, node, place)


def minimum_cut(graph: Graph, tensors: list[tuple[fx.Node, Place]]) -> list[tuple[fx.Node, Place]]:
    """The least per token from which ``tensors`` can be made token by token: nodes and their places.

    Only values that can be cached as they are (a tensor, batch first, sequence apart) may be cut.
    """
    places: dict[fx.Node, Place] = {}
    network = nx.DiGraph()
    queue = collections.deque((t, p, 0) for t, p in tensors)
    for tensor, _ in tensors:
        network.add_edge((tensor, "out"), "sink")
    while queue:
        node, place, depth = queue.popleft()
        if node in places:
            continue
        places[node] = place
        cuttable = _cuttable(graph, node, place)
        # Ties: fewer tensors win, then position ids (not what is made of them), then fewer matmuls on the way.
        last = min(depth, 15) + (0 if _is_positions(graph, node, place) else 16)
        capacity = {"capacity": (width(graph, node, place) << 20) + (1 << 10) + last} if cuttable else {}
        network.add_edge((node, "in"), (node, "out"), **capacity)
        try:
            inputs = input_places(graph, node, place)
        except NotTokenwise:
            inputs = {}
        if not inputs:
            network.add_edge("source", (node, "in"))
        deeper = depth + (linear_of(graph, node) is not None)
        for source, source_place in inputs.items():
            network.add_edge((source, "out"), (node, "in"))
            queue.append((source, source_place, deeper))
    try:
        _, (reachable, _) = nx.minimum_cut(network, "source", "sink")
    except nx.NetworkXUnbounded:
        return tensors
    cut = [n for n in places if (n, "in") in reachable and (n, "out") not in reachable]
    order = {n: i for i, n in enumerate(graph.graph.nodes)}
    return [(n, places[n]) for n in sorted(cut, key=lambda n: order[n])]


def _computes(graph: Graph, tensors: list[tuple[fx.Node, Place]], cut: list[tuple[fx.Node, Place]]) -> bool:
    """Whether a linear map lies between the cut and the cached tensors, to be computed again at every step."""
    ends, stack = {n for n, _ in cut}, list(tensors)
    while stack:
        node, place = stack.pop()
        if node in ends:
            continue
        if linear_of(graph, node) is not None:
            return True
        stack.extend(input_places(graph, node, place).items())
    return False


def _replay(
    graph: Graph, node: fx.Node, place: Place, made: dict[fx.Node, fx.Node], sizes: tuple[fx.Node, ...]
) -> fx.Node:
    """The nodes between the cut and a cached tensor again, on all tokens instead of the new ones."""
    if node in made:
        return made[node]
    inputs = input_places(graph, node, place)
    for source, source_place in inputs.items():
        made[source] = _replay(graph, source, source_place, made, sizes)
    made[node] = rerun(graph, node, place, made, sizes)
    return made[node]
