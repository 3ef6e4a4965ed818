"""Attention blocks: what lies between the one value that feeds an attention's query, key and value, and its output.

A block is found from the graph alone. An *activation* is a floating value that descends from a parameter; the block's
input is the nearest activation that every way to the attention passes (its immediate dominator), whatever the modules
are called. In DeepSeek's MLA that is the normed hidden state; rotary tables, masks and positions come in from the side.
Where it is a fused projection's result (query, key and value in one), that projection belongs to the block as well, and
its input is the block's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import fx

from latentscan.ir.capture import source_name
from latentscan.ir.graph import _RANDOM, VALUE, Graph, is_impure
from latentscan.ir.layout import is_layout, linear_of
from latentscan.ir.mla import attention_like
from latentscan.ir.normalize import LATENT_ATTENTION
from latentscan.ir.ops.base import REGISTRY


class BlockError(Exception):
    """An attention has no block that could be taken as a whole.

    Attributes:
        rule: what stands in the way, in kebab-case. remedy: what to do.
    """

    def __init__(self, rule: str, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.rule, self.remedy = rule, remedy


@dataclass(frozen=True)
class Block:
    """An attention block.

    Attributes:
        attention: the attention. input: the value that feeds it all.
        nodes: every node between the two, the attention included, in the graph's order.
        tail: what follows the attention alone: views and, last, the output projection, if there is one.
        sides: values from outside that are read as well (rotary tables, masks, packing, weights), without the input.
    """

    attention: fx.Node
    input: fx.Node
    nodes: tuple[fx.Node, ...]
    tail: tuple[fx.Node, ...]
    sides: tuple[fx.Node, ...]


def every_attention(graph: Graph) -> list[fx.Node]:
    """Attentions in any form, in the graph's order."""
    found = {*attention_like(graph), *graph.calls(LATENT_ATTENTION), *graph.calls(*_more())}
    return [n for n in graph.graph.nodes if n in found]


def _more() -> list[Any]:
    return [op for op, info in REGISTRY.items() if info.name == "sparse_latent_attention"]


def is_parameter(graph: Graph, node: fx.Node) -> bool:
    """Whether a placeholder is a parameter of the model (not a buffer), old or new."""
    return node.name in graph.weights and "_buffers" not in source_name(node)


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_of(v)] if isinstance(value, (tuple, list)) else []


class Activations:
    """The activations of a graph and which of them dominates which. Valid until the graph changes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: set[fx.Node] = set()
        flow = nx.DiGraph()
        weights: set[fx.Node] = set()  # parameters, and what is made of parameters alone
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                if is_parameter(graph, node):
                    weights.add(node)
                elif _is_fed(graph, node):
                    self.nodes.add(node)
                    flow.add_edge("start", node)
                continue
            inputs = node.all_input_nodes
            if node.op not in ("call_function", "call_method") or not _is_floating(node):
                continue
            if inputs and all(n in weights for n in inputs):
                weights.add(node)
                continue
            sources = [n for n in inputs if n in self.nodes]
            if not sources and not any(n in weights for n in inputs):
                continue
            self.nodes.add(node)
            flow.add_edges_from((n, node) for n in sources or ["start"])
        self._dominator = nx.immediate_dominators(flow, "start") if len(flow) else {}

    def block(self, attention: fx.Node) -> Block:
        """The block of an attention. Raises BlockError."""
        start = self._dominator.get(attention, "start")
        while isinstance(start, fx.Node) and not isinstance(self.graph.value(start), torch.Tensor):
            start = self._dominator.get(start, "start")  # several values are no input: what they are parts of is
        if not isinstance(start, fx.Node):
            raise BlockError(
                "no-common-input",
                "query, key and value do not all descend from one value",
                "nothing to do: there is no block that one saved value could rebuild",
            )
        block = block_between(self.graph, start, attention)
        fused = self._projection(start)
        if fused is not None and not any(linear_of(self.graph, n) for n in block.nodes):
            return block_between(self.graph, fused, attention)
        return block

    def _projection(self, node: fx.Node) -> fx.Node | None:
        """The input of the linear map that ``node`` is a view or a part of; None if it is none."""
        while (linear := linear_of(self.graph, node)) is None:
            before = self._dominator.get(node)
            if not is_layout(node) or before not in node.all_input_nodes:
                return None
            node = before
        return linear.x if linear.x in self.nodes else None


def block_between(graph: Graph, start: fx.Node, attention: fx.Node) -> Block:
    """The block of an attention whose input is known."""
    span = _span(start, attention)
    reached: set[fx.Node] = {start}
    for node in span:
        if any(n in reached for n in node.all_input_nodes):
            reached.add(node)
    wanted: set[fx.Node] = {attention}
    for node in reversed(span):
        if node in reached and any(u in wanted for u in node.users):
            wanted.add(node)
    nodes = tuple(n for n in span if n in reached and n in wanted)
    return Block(attention, start, nodes, tail_of(graph, attention), sides_of(nodes, start))


def _span(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The calls after ``first`` up to ``last``, in the graph's order."""
    found, node = [], first.next
    while node is not last:
        if node.op not in ("placeholder", "output"):
            found.append(node)
        node = node.next
    return [*found, last]


def tail_of(graph: Graph, attention: fx.Node) -> tuple[fx.Node, ...]:
    """Views, swaps and per-head products after an attention, read by nobody else, and the linear map that ends them."""
    tail: list[fx.Node] = []
    node = attention
    while len(node.users) == 1 and len(tail) < 12:
        before, (node,) = node, node.users
        if any(n is not before and not from_weights(graph, n) for n in node.all_input_nodes):
            break
        tail.append(node)
        if linear_of(graph, node) is not None:
            return tuple(tail)
        name = getattr(node.target, "__name__", "")
        if not (is_layout(node) or name in ("einsum", "add") or getattr(node.target, "_opname", "") == "swap_out"):
            break
    return ()


def from_weights(graph: Graph, node: fx.Node) -> bool:
    """Whether a value is a size, or made of parameters alone."""
    if not tensors_of(node.meta.get(VALUE)) or is_parameter(graph, node):
        return True
    return (
        node.op != "placeholder"
        and bool(inputs := node.all_input_nodes)
        and all(from_weights(graph, n) for n in inputs)
    )


def _is_fed(graph: Graph, node: fx.Node) -> bool:
    """Whether a placeholder is an activation that is given from outside: floating, no weight, read by a linear map."""
    if node.name in graph.weights or not _is_floating(node):
        return False
    return any((linear := linear_of(graph, user)) is not None and linear.x is node for user in node.users)


def _is_floating(node: fx.Node) -> bool:
    info = REGISTRY.get(node.target)
    if info is not None and not info.differentiable and info.name != "cache_append":
        return False
    return any(t.is_floating_point() for t in tensors_of(node.meta.get(VALUE)))


def sides_of(nodes: tuple[fx.Node, ...], start: fx.Node | None = None) -> tuple[fx.Node, ...]:
    """What ``nodes`` read from outside, in the order of reading, without ``start``."""
    inside = {*nodes, start}
    found: dict[fx.Node, None] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in inside:
                found[source] = None
    return tuple(found)


def leaving(nodes: tuple[fx.Node, ...]) -> list[fx.Node]:
    """Those of ``nodes`` that somebody else reads."""
    inside = set(nodes)
    return [n for n in nodes if any(u not in inside for u in n.users)]


def check_repeatable(graph: Graph, nodes: tuple[fx.Node, ...]) -> None:
    """Raise BlockError unless ``nodes`` can be computed again from what they read, as one call in one place."""
    order = {n: i for i, n in enumerate(graph.graph.nodes)}
    for node in nodes:
        if getattr(node.target, "_opname", "") == "cache_append":
            raise BlockError(
                "cache-in-block",
                f"{node.name} appends to a cache inside the block, and the cached positions take no gradient",
                "train with use_cache=False",
            )
        name = getattr(node.target, "__name__", "")
        if is_impure(node) and name not in _RANDOM:
            raise BlockError("writes-memory", f"{node.name} ({name or node.target}) writes memory", "report the model")
    for node in leaving(nodes):
        if not isinstance(node.meta.get(VALUE), torch.Tensor):
            raise BlockError("size-leaves-block", f"{node.name} is no tensor and is read outside", "report the model")
    sides = {t.untyped_storage()._cdata for n in sides_of(nodes) for t in tensors_of(n.meta.get(VALUE))}
    for node in graph.graph.nodes:
        written = node.args[0] if is_impure(node) and node.args and isinstance(node.args[0], fx.Node) else None
        if written is not None and any(
            t.untyped_storage()._cdata in sides for t in tensors_of(written.meta.get(VALUE))
        ):
            raise BlockError(
                "input-is-written",
                f"{node.name} writes what the block reads, {written.name}: computing it again could read other numbers",
                "train without a cache of fixed size (use_cache=False)",
            )
    inside, late = set(nodes), set(nodes)
    last = max((order[n] for n in sides_of(nodes)), default=-1)
    node = nodes[0]
    while order[node] < last:  # what needs a value of the block and stands before its call has to move behind it
        if node not in inside and any(n in late for n in node.all_input_nodes):
            late.add(node)
            if is_impure(node):
                raise BlockError(
                    "interleaved",
                    f"{node.name} writes memory before everything that the block needs is there",
                    "report the model: its order of calls is new",
                )
        node = node.next
