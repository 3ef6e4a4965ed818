"""Nodes that work on each token alone: where tokens lie in their inputs, and how to run them on more tokens.

A *place* is (batch dimension, sequence dimension) of a value; both are the same number where they are flattened.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from latentscan.ir.graph import VALUE, Graph
from latentscan.ir.layout import is_layout, linear_of
from latentscan.ir.sizes import number, numbers

Place = tuple[int, int]

_SPLITS = {torch.split, torch.functional.split, torch.chunk, "split", "chunk"}
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "t", torch.flatten, torch.unflatten,
             torch.squeeze, torch.unsqueeze, torch.reshape}  # fmt: skip


class NotTokenwise(Exception):  # noqa: N818  a reason, not a failure
    """A node mixes tokens, or it cannot be told where they lie; the text says why."""


def regroup(before: tuple[int, ...], after: tuple[int, ...], place: Place) -> Place:
    """Where the dimensions ``place`` of ``after`` lie in ``before``, a reshape of the same elements.

    Raises NotTokenwise if a token dimension is merged with a feature dimension.
    """
    if place[0] == place[1]:
        return _split_place(before, after, place[0])
    prefixes = [math.prod(before[:i]) for i in range(len(before) + 1)]
    candidates: list[list[int]] = []
    for dim in place:
        low = math.prod(after[:dim])
        high = low * after[dim]
        exact = [i for i in range(len(before)) if prefixes[i] == low and prefixes[i + 1] == high]
        around = [i for i in range(len(before)) if prefixes[i] <= low and prefixes[i + 1] >= high and before[i] > 1]
        if exact or after[dim] == 1:
            candidates.append(exact)  # none: one token, flattened away
        elif len(around) == 1:
            candidates.append(around)
        else:
            raise NotTokenwise(f"a reshape from {list(before)} to {list(after)} mixes tokens and features")
    if not candidates[0] and not candidates[1]:
        raise NotTokenwise(f"a reshape from {list(before)} to {list(after)} loses both batch and sequence")
    candidates = [c or candidates[1 - i] for i, c in enumerate(candidates)]
    # Dimensions of size 1 are alike. A reshape keeps the order of dimensions, so batch and sequence stay apart and in
    # order if they can, and move as little as they can.
    forward = place[0] < place[1]
    first, second = min(
        ((i, j) for i in candidates[0] for j in candidates[1]),
        key=lambda p: (p[0] == p[1], (p[0] < p[1]) != forward, abs(p[0] - place[0]) + abs(p[1] - place[1])),
    )
    counts = after[place[0]], after[place[1]]
    if first != second:
        whole = (before[first], before[second]) == counts
    else:  # flattened means batch outside: token (b, s) is number b S + s
        whole = before[first] == counts[0] * counts[1] and (forward or 1 in counts)
    if not whole:
        raise NotTokenwise(f"a reshape from {list(before)} to {list(after)} merges tokens with features or rows")
    return first, second


def _split_place(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> Place:
    """Where a dimension of ``after`` that holds batch and sequence lies in ``before``: two dimensions, or still one."""
    low = math.prod(after[:dim])
    for i in range(len(before) - 1):
        if math.prod(before[:i]) == low and before[i] * before[i + 1] == after[dim]:
            return i, i + 1
    for i in range(len(before)):
        if math.prod(before[:i]) == low and before[i] == after[dim]:
            return i, i
    raise NotTokenwise(f"a reshape from {list(before)} to {list(after)} takes tokens apart")


def input_places(graph: Graph, node: fx.Node, place: Place) -> dict[fx.Node, Place]:
    """The inputs of a token-wise node that carry tokens, and where.

    Args:
        place: of the node's value; for a node that gives a tuple, of each item.

    Raises:
        NotTokenwise: the node is an end: it has to be taken as it is.
    """
    linear = linear_of(graph, node)
    if linear is not None:
        rank = len(graph.shape(node))
        if rank - 1 in place:
            raise NotTokenwise(f"{node.name} is linear along the sequence")
        return {linear.x: place}
    if not is_layout(node):
        raise NotTokenwise(f"{node.name} is neither linear nor a view")
    source: Any = node.args[0]
    if node.target in (torch.cat, torch.concat):
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        if dim % len(graph.shape(node)) in place:
            raise NotTokenwise(f"{node.name} joins tokens")
        return dict.fromkeys(source, place)
    if not isinstance(source, fx.Node):
        raise NotTokenwise(f"{node.name} has no single input")
    value = graph.value(source)
    if not isinstance(value, torch.Tensor):  # an item of a split
        return {source: place}
    before = numbers(value.shape)
    if node.target in _SPLITS:
        dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
        if dim % len(before) in place:
            raise NotTokenwise(f"{node.name} splits the sequence")
        return {source: place}
    after = numbers(graph.value(node).shape)
    if node.target in ("transpose", "swapaxes", torch.transpose) or node.target in ("t", torch.t):
        a, b = (0, 1) if node.target in ("t", torch.t) else (node.args[1] % len(before), node.args[2] % len(before))  # type: ignore
        swap = {a: b, b: a}
        return {source: (swap.get(place[0], place[0]), swap.get(place[1], place[1]))}
    if node.target in ("permute", torch.permute):
        dims = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        return {source: (dims[place[0]] % len(before), dims[place[1]] % len(before))}  # type: ignore[operator, return-value]
    if node.target in _RESHAPES:
        return {source: regroup(before, after, place)}
    if node.target is operator.getitem:
        return {source: _through_index(node.args[1], place, len(before))}
    if node.target == "expand":
        shift = len(after) - len(before)
        moved = (place[0] - shift, place[1] - shift)
        if min(moved) < 0 or any(before[m] != after[p] for m, p in zip(moved, place, strict=True)):
            raise NotTokenwise(f"{node.name} repeats tokens")
        return {source: moved}
    if before == after:  # contiguous, clone, casts
        return {source: place}
    raise NotTokenwise(f"{node.name} ({node.target}) is not followed")


def _through_index(index: Any, place: Place, rank: int) -> Place:
    """Place before ``x[index]``; token dimensions must be taken whole."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        missing = rank - sum(1 for p in parts if p is not None and p is not Ellipsis)
        parts[at : at + 1] = [slice(None)] * missing
    sources: list[int | None] = []
    dim = 0
    whole: set[int] = set()
    for part in parts:
        if part is None:
            sources.append(None)
            continue
        if isinstance(part, slice):
            if part == slice(None):
                whole.add(dim)
            sources.append(dim)
        dim += 1
    while dim < rank:
        sources.append(dim)
        whole.add(dim)
        dim += 1
    found = [sources[p] for p in place]
    if any(f is None or f not in whole for f in found):
        raise NotTokenwise("an index takes only some of the tokens")
    return found[0], found[1]  # type: ignore[return-value]


def width(graph: Graph, node: fx.Node, place: Place) -> int:
    """Elements per token and batch item."""
    shape = graph.shape(node)
    return math.prod(number(s) for i, s in enumerate(shape) if i not in place)


def rerun(graph: Graph, node: fx.Node, place: Place, made: dict[fx.Node, fx.Node], sizes: Place | Any) -> fx.Node:
    """The node again, on inputs with another number of tokens.

    Args:
        made: input -> its longer version.
        sizes: nodes of the batch size and the new number of tokens.
    """
    args = fx.map_arg(node.args, lambda n: made.get(n, n))
    kwargs = fx.map_arg(node.kwargs, lambda n: made.get(n, n))
    if node.target in ("view", "reshape", torch.reshape, "expand", "unflatten", torch.unflatten):
        batch, length = sizes
        shape: list[Any] = list(graph.shape(node))
        if place[0] == place[1]:
            shape[place[0]] = -1
        else:
            shape[place[0]], shape[place[1]] = batch, length
        if any(not isinstance(s, (int, fx.Node)) for s in shape):
            raise NotTokenwise(f"{node.name} has a symbolic feature dimension")
        return graph.method("expand" if node.target == "expand" else "reshape", args[0], *shape)
    if node.op == "call_method":
        return graph.method(str(node.target), *args, **kwargs)
    return graph.call(node.target, *args, **kwargs)  # type: ignore[arg-type]


__all__ = ["VALUE", "NotTokenwise", "Place", "input_places", "regroup", "rerun", "width"]
