"""A Mamba mixer's in-projection taken apart, so that an exchange has something to hide behind.

``[gate | x B C | dt] = W u`` is one product. Its rows of the last tokens that the next rank's convolution waits for are
made first, and the gate's rows, which nobody reads before the scan is done, last.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.graph import VALUE, Graph
from latentscan.ir.layout import is_layout
from latentscan.ir.ops import exchange, ssm

_SPLITS = (torch.split, torch.functional.split, "split")
_MULTIPLY = (operator.mul, torch.mul)
HIDES = "latentscan_hides"  # on a scan's node: the name of the first node of work that can hide its exchange


@dataclass(frozen=True)
class Projection:
    """The nodes of an in-projection.

    Attributes:
        linear, split: the product and its cut into pieces of ``sizes`` features.
        scale: a vector of weights between the two (Falcon-H1), or None.
        conv: number of the piece that the convolution reads. late: pieces that are read after the scan only.
    """

    linear: fx.Node
    split: fx.Node
    scale: fx.Node | None
    sizes: tuple[int, ...]
    conv: int
    late: frozenset[int]


def scan_after(graph: Graph, conv: fx.Node) -> fx.Node | None:
    """The scan that reads a convolution: the first one after it."""
    following = conv.next
    while following.op != "root":
        if following.target is ssm.chunk_scan.op:
            return following
        if following.target is ssm.causal_conv1d.op:
            return None
        following = following.next
    return None


def projection_of(graph: Graph, conv: fx.Node) -> Projection | None:
    """The in-projection whose piece a convolution reads as it is, or None."""
    item, turned = conv.args[0], False
    while isinstance(item, fx.Node) and item.target == "transpose" and set(item.args[1:]) == {1, 2}:
        item, turned = item.args[0], not turned
    if turned or not isinstance(item, fx.Node) or item.target is not operator.getitem:
        return None
    split = item.args[0]
    assert isinstance(split, fx.Node)
    sizes = split.args[1] if len(split.args) > 1 else None
    dim = split.kwargs.get("dim", split.args[2] if len(split.args) > 2 else 0)
    if split.target not in _SPLITS or not isinstance(sizes, (list, tuple)) or dim not in (-1, 2):
        return None
    if not all(isinstance(s, int) for s in sizes) or any(u.target is not operator.getitem for u in split.users):
        return None
    linear, scale = split.args[0], None
    if isinstance(linear, fx.Node) and linear.target in _MULTIPLY and len(linear.users) == 1:
        linear, scale = linear.args
        if not isinstance(scale, fx.Node) or scale.op != "placeholder" or graph.shape(scale)[-1] != sum(sizes):
            return None
    if not isinstance(linear, fx.Node) or linear.target is not F.linear or len(linear.users) != 1 or linear.kwargs:
        return None
    scan = scan_after(graph, conv)
    if scan is None:
        return None
    at = {n: i for i, n in enumerate(graph.graph.nodes)}
    items = {u.args[1]: u for u in split.users}
    late = {i for i, n in items.items() if all(at[u] > at[scan] for u in n.users)}
    return Projection(linear, split, scale, tuple(sizes), int(item.args[1]), frozenset(late))  # type: ignore[arg-type]


def take_apart(graph: Graph, conv: fx.Node, found: Projection, keep: int, axis: str, name: str) -> fx.Node:
    """Rewrite; the tail's rows of the product come first, the late pieces before the scan.

    Returns:
        the tail [b, keep, channels] that the next rank needs.
    """
    scan = scan_after(graph, conv)
    assert scan is not None
    x, weight, *rest = found.linear.args
    bias = rest[0] if rest else None
    runs = [list(run) for _, run in groupby(range(len(found.sizes)), lambda i: i in found.late)]
    widths = [sum(found.sizes[i] for i in run) for run in runs]
    with graph.before(found.linear, name):
        parts = [_pieces(graph, p, widths, dim) for p, dim in ((weight, 0), (bias, 0), (found.scale, -1))]
        own = next(i for i, run in enumerate(runs) if found.conv in run)
        start = sum(found.sizes[i] for i in runs[own] if i < found.conv)
        rows = [
            None if p is None else graph.method("narrow", p[own], d, start, found.sizes[found.conv])
            for p, d in zip(parts, (0, 0, -1), strict=True)
        ]
        fork = graph.call(exchange.fork_tail, x, keep, axis)
        x, last = (graph.call(operator.getitem, fork, i) for i in range(2))
        tail = _product(graph, last, *rows)
    items = {u.args[1]: u for u in found.split.users}
    changed: set[fx.Node] = set()
    for index, run in enumerate(runs):
        late = run[0] in found.late
        with graph.before(scan if late else found.linear, name):
            made = _product(graph, x, *(None if p is None else p[index] for p in parts))
            if late and HIDES not in scan.meta:
                scan.meta[HIDES] = next(n for n in (made, made.args[0]) if n.target is F.linear).name  # type: ignore
            pieces = _pieces(graph, made, [found.sizes[i] for i in run], -1)
        assert pieces is not None
        for i, piece in zip(run, pieces, strict=True):
            if i in items:
                graph.replace(items[i], piece)
                changed.add(piece)
    for node in graph.nodes:  # views of the pieces share their storage now
        if is_layout(node) and changed.intersection(node.all_input_nodes):
            node.meta[VALUE] = graph.evaluate(node)
            changed.add(node)
    return tail


def _pieces(graph: Graph, node: Any, sizes: list[int], dim: int) -> list[fx.Node] | None:
    if not isinstance(node, fx.Node):
        return None
    if len(sizes) == 1:
        return [node]
    split = graph.call(torch.split, node, sizes, dim)
    return [graph.call(operator.getitem, split, i) for i in range(len(sizes))]


def _product(graph: Graph, x: Any, weight: Any, bias: Any, scale: Any) -> fx.Node:
    made = graph.call(F.linear, x, weight, bias)
    return made if scale is None else graph.call(operator.mul, made, scale)
