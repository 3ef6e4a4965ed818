"""Latent structure of an attention: which part of K and V is linear in which latent, and which part is rotated."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.graph import Graph
from latentscan.ir.layout import Features, LayoutError, Linear, linear_of, strip_layout, trace
from latentscan.ir.normalize import ATTENTION


@dataclass(frozen=True)
class Operand:
    """K or V of an attention as a map from sources.

    Attributes:
        linear: the one linear map that feeds it, or None.
        rows: [kv_heads, n] rows of that map's weight, for the features in ``columns``.
        columns: feature positions that are linear in the latent.
        other: positions of the remaining features.
        features: where every feature comes from.
    """

    linear: Linear | None
    rows: torch.Tensor
    columns: list[int]
    other: list[int]
    features: Features


def operand(graph: Graph, node: fx.Node) -> Operand:
    """Follow K or V [B, heads, T, D] of an attention. Raises LayoutError."""
    features = trace(graph, node, batch_dim=0, seq_dim=2, feature_dims=(1, 3))
    width = features.source.shape[1]
    linear, columns = None, []
    for index in features.used():
        source = features.sources[index]
        found = linear_of(graph, source)
        if found is not None:
            if linear is not None:
                raise LayoutError(f"features come from two linear maps, {linear.node.name} and {source.name}")
            if features.widths[index] != int(graph.shape(found.weight)[1 if found.transposed else 0]):
                raise LayoutError(f"the features of {source.name} cannot be told from its tokens")
            linear, columns = found, features.columns(index)
    other = [i for i in range(width) if i not in set(columns)]
    return Operand(linear, features.feature[:, columns], columns, other, features)


def computed_weight(graph: Graph, features: Features) -> fx.Node | None:
    """A linear map above an operand whose weight is no plain parameter but computed (quantised, say), or None."""
    for index in features.used():
        source = features.sources[index]
        if source.op != "call_function" or source.target not in (F.linear, torch._C._nn.linear, torch.addmm):
            continue
        if linear_of(graph, source) is None:
            return source
    return None


def only_columns(part: Operand, columns: list[int]) -> tuple[fx.Node, bool]:
    """The node on the way to an operand that holds just these of its features in order, and whether heads come last.

    It is [B, 1 or heads, T, n], or [B, T, 1 or heads, n]; of several the one with the fewest heads. Raises LayoutError.
    """
    want = part.features.own[..., columns]
    found: list[tuple[int, bool, fx.Node]] = []
    for node, ids in part.features.ids.items():
        if ids.dim() != 4:
            continue
        for turned in (False, True):
            seen = ids.transpose(1, 2) if turned else ids
            fits = seen.shape[1] in (1, want.shape[1]) and (seen.shape[0], *seen.shape[2:]) == (
                want.shape[0], *want.shape[2:]
            )  # fmt: skip
            if fits and bool((seen == want).all()):
                found.append((seen.shape[1], turned, node))
    if not found:
        raise LayoutError(f"no value holds just the {len(columns)} rotated key features of a head in order")
    _, turned, node = min(found, key=lambda f: f[:2])
    return node, turned


def columns_node(graph: Graph, part: Operand, columns: list[int]) -> fx.Node:
    """What :func:`only_columns` finds as [B, 1 or heads, T, n]; inserts a node only if heads come last."""
    node, turned = only_columns(part, columns)
    return graph.method("transpose", node, 1, 2) if turned else node


def latent_source(graph: Graph, x: fx.Node) -> fx.Node:
    """The latent behind a linear map's input: a node [B, T, C] or [B, 1, T, C]. Raises LayoutError."""
    if len(graph.shape(x)) < 3:
        x = strip_layout(x)
    shape = graph.shape(x)
    if len(shape) == 3 or (len(shape) == 4 and shape[1] == 1):
        return x
    raise LayoutError(f"the latent {x.name} has shape {list(shape)}, neither [B, T, C] nor [B, 1, T, C]")


def latent_node(graph: Graph, x: fx.Node) -> fx.Node:
    """The latent [B, T, C]; inserts a node only if a dimension has to go."""
    source = latent_source(graph, x)
    return source if len(graph.shape(source)) == 3 else graph.method("squeeze", source, 1)


def same_latent(a: Linear, b: Linear) -> bool:
    return a.x is b.x or strip_layout(a.x) is strip_layout(b.x)


def attentions(graph: Graph) -> list[fx.Node]:
    return graph.calls(ATTENTION)


def attention_like(graph: Graph) -> list[fx.Node]:
    """Canonical attentions, and plain ones that kept their dropout; query, key and value are their first arguments."""
    plain = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)
    return [n for n in graph.calls(ATTENTION, *plain) if len(n.args) >= 3]


def dropout_of(node: fx.Node) -> float:
    """The dropout of an attention of :func:`attention_like`; canonical ones have none."""
    if node.target == ATTENTION:
        return 0.0
    return float(node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0))  # type: ignore[arg-type]


def ungrouped(graph: Graph, node: fx.Node) -> fx.Node:
    """Keys or values [B, kv_heads, T, D] before the library repeats each head for its group; else the node itself."""
    spread = node.args[0] if node.op == "call_method" and node.target == "reshape" else None
    if not isinstance(spread, fx.Node) or spread.target != "expand" or len(graph.shape(spread)) != 5:
        return node
    single: Any = spread.args[0]
    if single.target is not operator.getitem or not isinstance(single.args[1], tuple):
        return node
    full = slice(None, None, None)
    new_axis_third = single.args[1][:3] == (full, full, None) and all(i == full for i in single.args[1][3:])
    source = single.args[0]
    return source if new_axis_third and len(graph.shape(source)) == 4 else node


def given_cache(graph: Graph, node: fx.Node) -> fx.Node | None:
    """The input that keys or values [B, heads, T, D] are joined with: what a library's cache holds; None if none is.

    Such a cache is filled by whoever calls the graph, so that nothing is known of its features.
    """
    stack, seen = [node], set()
    while stack:
        current = stack.pop()
        if current in seen or linear_of(graph, current) is not None:
            continue
        seen.add(current)
        if current.op == "placeholder":
            value = graph.value(current)
            cached = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 4
            if cached and graph.weight(current) is None:
                return current
        stack.extend(current.all_input_nodes)
    return None


def argument(node: fx.Node, name: str) -> object:
    """An argument of a canonical op call by its name, with the schema's default; None where a plain one lacks it."""
    if not hasattr(node.target, "_schema"):
        return node.kwargs.get(name)
    for position, spec in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if spec.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            return node.args[position] if position < len(node.args) and not spec.kwarg_only else spec.default_value
    raise KeyError(name)
