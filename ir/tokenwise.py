"""Nodes that work on each token alone: where tokens lie in their inputs, and how to run them on more tokens.

A *place* is (batch dimension, sequence dimension) of a value; both are the same number where they are flattened.

Linear maps and views are followed everywhere. Rotations, norms and other maps of single tokens only where a pass has
marked them (:data:`ON_READ`): running them again on everything that is cached costs time at every step, so that is
somebody's decision. A rotation is followed to its tables and these to the position ids, one whole number a token.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from latentscan.ir.graph import VALUE, Graph
from latentscan.ir.layout import is_layout, linear_of
from latentscan.ir.ops.rope import ROPE
from latentscan.ir.sizes import is_static, number, numbers, same

Place = tuple[int, int]

_SPLITS = {torch.split, torch.functional.split, torch.chunk, "split", "chunk"}
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "t", torch.flatten, torch.unflatten,
             torch.squeeze, torch.unsqueeze, torch.reshape}  # fmt: skip

ON_READ = "latentscan_on_read"  # node.meta: the node may be run again on all cached tokens instead of being cached
_POINTWISE: set[Any] = {
    operator.mul, operator.add, operator.sub, operator.truediv, operator.neg, operator.pow, torch.mul, torch.add,
    torch.sub, torch.div, torch.neg, torch.pow, torch.rsqrt, torch.sqrt, torch.cos, torch.sin, torch.square,
    "mul", "add", "sub", "div", "neg", "pow", "rsqrt", "sqrt", "cos", "sin", "square", "float", "to", "type_as", "type",
    "half", "bfloat16", "double",
}  # fmt: skip
_MATMULS: set[Any] = {torch.matmul, operator.matmul, torch.bmm, "matmul", "bmm"}


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


def input_places(graph: Graph, node: fx.Node, place: Place, *, on_read: bool = False) -> dict[fx.Node, Place]:
    """The inputs of a token-wise node that carry tokens, and where.

    Args:
        place: of the node's value; for a node that gives a tuple, of each item.
        on_read: follow what only a marked node is followed through.

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
        if on_read or node.meta.get(ON_READ):
            return _single_token_places(graph, node, place)
        raise NotTokenwise(f"{node.name} is neither linear nor a view")
    source: Any = node.args[0]
    if node.target in (torch.cat, torch.concat, torch.concatenate):
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
    if node.target in ("repeat_interleave", torch.repeat_interleave):
        dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else None)
        if dim is None or dim % len(before) in place:
            raise NotTokenwise(f"{node.name} repeats tokens")
        return {source: place}
    if before == after:  # contiguous, clone, casts
        return {source: place}
    raise NotTokenwise(f"{node.name} ({node.target}) is not followed")


def _single_token_places(graph: Graph, node: fx.Node, place: Place) -> dict[fx.Node, Place]:
    """:func:`input_places` of a rotation, a norm over features, a pointwise map, or a product with a constant."""
    value = graph.value(node)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or place[0] == place[1]:
        raise NotTokenwise(f"{node.name} is no map of single tokens")
    rank = value.dim()
    if node.target is ROPE.op:
        if place != (0, 3 - node.kwargs.get("unsqueeze_dim", 1)):
            raise NotTokenwise(f"{node.name} rotates along another dimension")
        x, cos, sin = node.args[:3]
        return {x: place, cos: (0, 1), sin: (0, 1)}  # type: ignore[dict-item]
    if node.target in ("mean", torch.mean):
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        keeps = node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False)
        if dim in (-1, rank - 1, [-1], (-1,)) and keeps and rank - 1 not in place:
            return {node.args[0]: place}  # type: ignore[dict-item]
        raise NotTokenwise(f"{node.name} averages over more than the features")
    if node.target in (torch.nn.functional.layer_norm, torch.nn.functional.rms_norm, torch.rms_norm):
        if len(node.args[1]) == 1 and rank - 1 not in place:  # type: ignore[arg-type]
            return {node.args[0]: place}  # type: ignore[dict-item]
        raise NotTokenwise(f"{node.name} norms over more than the features")
    if node.target in _MATMULS:
        if place[1] < rank - 2 or place[0] != 0 or rank < 3:
            raise NotTokenwise(f"{node.name} multiplies token by token")
        mine, other = node.args[:2] if place[1] == rank - 2 else node.args[1::-1]
        static = all(is_static(s) for s in graph.shape(other)[-2:])  # type: ignore[arg-type]
        if graph.value(mine).dim() != rank or not static or not _is_constant(graph, other):  # type: ignore[arg-type]
            raise NotTokenwise(f"{node.name} multiplies tokens with what differs from call to call")
        return {mine: place}  # type: ignore[dict-item]
    if node.target not in _POINTWISE:
        raise NotTokenwise(f"{node.name} ({getattr(node.target, '__name__', node.target)}) is not followed")
    found: dict[fx.Node, Place] = {}
    casts = {"to", "type_as", "type"}  # what else they are given says only which dtype
    for source in node.all_input_nodes[:1] if node.target in casts else node.all_input_nodes:
        given = graph.value(source)
        if not isinstance(given, torch.Tensor):
            raise NotTokenwise(f"{node.name} depends on the size {source.name}")
        at = place[0] - rank + given.dim(), place[1] - rank + given.dim()
        if at[1] >= 0 and same(given.shape[at[1]], value.shape[place[1]]):
            if at[0] < 0:
                raise NotTokenwise(f"{source.name} has tokens and no rows")
            found[source] = at
        elif not _is_constant(graph, source):
            raise NotTokenwise(f"{source.name} differs from call to call")
    return found


def _is_constant(graph: Graph, node: fx.Node) -> bool:
    """Whether a value comes from weights alone: the same when a token is read as when it was cached."""
    stack, seen = [node], set()
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op == "placeholder" and graph.weight(current) is None:
            return False
        stack.extend([current.args[0]] if current.target == "expand" else current.all_input_nodes)  # type: ignore[list-item]
    return True


def again_on_read(graph: Graph, node: fx.Node, place: Place) -> tuple[list[fx.Node], set[fx.Node], set[fx.Node]]:
    """What has to run again on all cached tokens if not ``node`` itself but its linear maps' inputs are cached.

    Returns:
        the nodes to mark with :data:`ON_READ`, the linear maps found on the way, and the position ids (whole numbers,
        one a token).

    Raises:
        NotTokenwise: something else is reached; the text says what.
    """
    marked: list[fx.Node] = []
    linears: set[fx.Node] = set()
    positions: set[fx.Node] = set()
    stack, seen = [(node, place)], set()
    while stack:
        current, at = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        value = graph.value(current)
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and not is_layout(current):
            if width(graph, current, at) != 1:
                raise NotTokenwise(f"{current.name} holds {width(graph, current, at)} whole numbers a token")
            positions.add(current)
        elif linear_of(graph, current) is not None:
            linears.add(current)
        else:
            stack.extend(input_places(graph, current, at, on_read=True).items())
            if not is_layout(current):
                marked.append(current)
    return marked, linears, positions


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


__all__ = ["ON_READ", "VALUE", "NotTokenwise", "Place", "again_on_read", "input_places", "regroup", "rerun", "width"]
