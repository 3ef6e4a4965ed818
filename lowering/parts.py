"""Products that a pass took apart get their gradients in one tensor, see :mod:`latentscan.ir.ops.parts`."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.graph import Graph
from latentscan.ir.ops.exchange import fork_tail
from latentscan.ir.ops.parts import linear_part


@dataclass(frozen=True)
class _Product:
    """A linear map of a forked value: rows ``first`` to ``first + count`` of ``weight`` and ``bias``; ``keep`` tokens
    (0: all)."""

    node: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    first: int
    count: int
    keep: int


def join_products(graph: Graph) -> int:
    """Chain the products of each :func:`latentscan.ir.ops.exchange.fork_tail`, in place, in a graph that trains.

    Returns:
        how many forks went; one whose products are not all of one weight stays.
    """
    if not graph.training:
        return 0
    done = 0
    for fork in graph.calls(fork_tail):
        products = _products(graph, fork)
        if products is not None:
            _chain(graph, fork, products)
            done += 1
    return done


def _products(graph: Graph, fork: fx.Node) -> list[_Product] | None:
    found = []
    for item in fork.users:
        if item.target is not operator.getitem:
            return None
        keep = int(fork.args[1]) if item.args[1] == 1 else 0  # type: ignore[call-overload]
        for user in item.users:
            product = _product(graph, user, item, keep)
            if product is None:
                return None
            found.append(product)
    at = {n: i for i, n in enumerate(graph.graph.nodes)}
    found.sort(key=lambda p: at[p.node])
    same = len({(p.weight, p.bias) for p in found}) == 1
    return found if same and len(found) > 1 else None


def _product(graph: Graph, node: fx.Node, x: fx.Node, keep: int) -> _Product | None:
    if node.target is not F.linear or node.kwargs or node.args[0] is not x or len(node.args) < 2:
        return None
    rows = _rows(graph, node.args[1])
    bias = node.args[2] if len(node.args) > 2 else None
    of_bias = None if bias is None else _rows(graph, bias)
    if rows is None or (bias is not None and (of_bias is None or of_bias[1:] != rows[1:])):
        return None
    return _Product(node, rows[0], None if of_bias is None else of_bias[0], *rows[1:], keep)


def _rows(graph: Graph, node: Any) -> tuple[fx.Node, int, int] | None:
    """The tensor that a node is rows of, the first of them, and how many."""
    if not isinstance(node, fx.Node):
        return None
    if node.target == "narrow" and node.args[1] == 0:
        inner = _rows(graph, node.args[0])
        return None if inner is None else (inner[0], inner[1] + int(node.args[2]), int(node.args[3]))  # type: ignore
    if node.target is operator.getitem and getattr(node.args[0], "target", None) is torch.split:
        split: Any = node.args[0]
        sizes = split.args[1]
        if not isinstance(sizes, (list, tuple)) or len(split.args) < 3 or split.args[2] != 0:
            return None
        place: Any = node.args[1]
        return split.args[0], sum(sizes[:place]), sizes[place]
    size = graph.shape(node)[0]
    return (node, 0, size) if isinstance(size, int) else None


def _chain(graph: Graph, fork: fx.Node, products: list[_Product]) -> None:
    x, tokens = fork.args[0], None  # type: ignore[var-annotated]
    for i, p in enumerate(products):
        after = products[i + 1 :]
        again = any(p.first < q.first + q.count and q.first < p.first + p.count for q in after)
        rest = not after and _partition(products, int(graph.shape(p.weight)[0]))
        with graph.before(p.node, "lower"):
            made = graph.call(linear_part, x, p.weight, p.bias, tokens, p.first, p.count, p.keep, again, rest)
            out, *tokens = (graph.call(operator.getitem, made, k) for k in range(3 if p.bias is None else 4))
        graph.replace(p.node, out)
        graph.graph.erase_node(p.node)


def _partition(products: list[_Product], rows: int) -> bool:
    """Whether the products that no later one overlaps cover every row exactly once, and the others lie within one."""
    spans: list[tuple[int, int]] = []
    for p in reversed(products):
        over = [s for s in spans if p.first < s[1] and s[0] < p.first + p.count]
        if not over:
            spans.append((p.first, p.first + p.count))
        elif not any(s[0] <= p.first and p.first + p.count <= s[1] for s in over):
            return False
    return sum(b - a for a, b in spans) == rows
