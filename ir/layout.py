"""Where the features of a value come from, through any chain of views, splits, transposes and concatenations.

Instead of recognising each model's way of reshaping, the layout nodes are *executed* on small integer tensors that
carry element numbers. The result says, for every head and feature of an attention operand, which feature of which
source it is, whatever the layout: interleaved per head, stacked, transposed, fused.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.graph import VALUE, Graph
from latentscan.ir.sizes import expression, is_static

_METHODS = {
    "view", "reshape", "transpose", "permute", "contiguous", "expand", "flatten", "unflatten", "squeeze", "unsqueeze",
    "split", "chunk", "narrow", "select", "clone", "t", "swapaxes", "movedim", "unbind", "expand_as", "size",
    "repeat_interleave",
}  # fmt: skip
_FUNCTIONS = {
    operator.getitem, torch.cat, torch.concat, torch.concatenate, torch.split, torch.functional.split, torch.chunk,
    torch.transpose,
    torch.permute, torch.flatten, torch.unflatten, torch.squeeze, torch.unsqueeze, torch.stack, torch.reshape,
    torch.narrow, torch.select, torch.clone, torch.t, torch.unbind, torch.repeat_interleave,
}  # fmt: skip
_CASTS = {"to", "type_as", "float", "type", "half", "bfloat16"}
_SIZE_ARITHMETIC = {
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.neg, operator.mod, torch.sym_sum, sympy.Mul,
}  # fmt: skip
_LIMIT = 1 << 27  # elements of a traced operand; beyond, a static shape is too large to be traced this way


class LayoutError(Exception):
    """The features of a value cannot be followed; the text says at which node."""


def is_layout(node: fx.Node) -> bool:
    """Whether a node only moves, repeats or drops elements (a cast counts if it keeps the dtype)."""
    if node.op == "call_method" and node.target in _CASTS:
        before, after = node.args[0].meta.get(VALUE), node.meta.get(VALUE)  # type: ignore[union-attr]
        return isinstance(after, torch.Tensor) and before.dtype == after.dtype
    if node.op == "call_method":
        return node.target in _METHODS
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        if not isinstance(source.meta.get(VALUE), torch.Tensor):  # an item of a tuple: as its producer
            return is_layout(source)
        nodes = [i for i in _flat(node.args[1]) if isinstance(i, fx.Node)]
        return not any(isinstance(n.meta.get(VALUE), torch.Tensor) for n in nodes)
    return node.target in _FUNCTIONS


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [x for v in value for x in _flat(v)]
    return [value.start, value.stop, value.step] if isinstance(value, slice) else [value]


@dataclass(frozen=True)
class Features:
    """The origin of an operand's features.

    Attributes:
        sources: nodes that are no layout nodes.
        source: [heads, features] index into ``sources``.
        feature: [heads, features] index of the feature within its source.
        widths: number of features per token of each source.
        ids: element numbers of every node on the way, [.., as the node's shape with small symbols].
        own: element numbers of the operand itself.
    """

    sources: tuple[fx.Node, ...]
    source: torch.Tensor
    feature: torch.Tensor
    widths: tuple[int, ...]
    ids: dict[fx.Node, torch.Tensor] = field(repr=False)
    own: torch.Tensor = field(repr=False)

    def used(self) -> list[int]:
        """Indices of the sources that the operand really takes features from."""
        return [int(i) for i in self.source.unique()]

    def columns(self, index: int) -> list[int]:
        """Feature positions (the same for every head) that come from source ``index``; LayoutError if heads differ."""
        mine = self.source == index
        if not bool((mine == mine[:1]).all()):
            raise LayoutError("heads take their features from different sources")
        return [int(i) for i in mine[0].nonzero().flatten()]


class SmallNumbers:
    """Every shape symbol as a small distinct prime, so that layout nodes can be executed on small tensors."""

    def __init__(self) -> None:
        self._values: dict[sympy.Symbol, int] = {}
        self._primes = iter((2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37))

    def fix(self, size: Any, value: int) -> None:
        """Let a size that is one symbol have this value."""
        self._values[expression(size)] = value  # type: ignore[index]

    def __call__(self, size: Any) -> int:
        expr = expression(size)
        for symbol in sorted(expr.free_symbols, key=lambda s: s.name):
            if symbol not in self._values:
                self._values[symbol] = next(self._primes)
        return int(expr.subs(self._values))


def trace(graph: Graph, node: fx.Node, *, batch_dim: int, seq_dim: int, feature_dims: tuple[int, int]) -> Features:
    """Follow an operand back to its sources.

    Args:
        node: for example an attention's key [B, heads, T, D].
        batch_dim, seq_dim: which dimensions of it are batch and sequence.
        feature_dims: (head dimension, feature dimension) of it.

    Raises:
        LayoutError: a source mixes tokens, or its features cannot be told from its tokens.
    """
    small = SmallNumbers()
    cache: dict[fx.Node, Any] = {}
    sources: list[fx.Node] = []
    offsets: list[int] = []
    total = 0

    def source_ids(leaf: fx.Node) -> torch.Tensor:
        nonlocal total
        shape = [small(s) for s in graph.shape(leaf)]
        count = math.prod(shape)
        if count > _LIMIT:
            raise LayoutError(f"{leaf.name} has static shape {shape}, too large to follow; trace with dynamic shapes")
        ids = torch.arange(total, total + count).reshape(shape)
        sources.append(leaf)
        offsets.append(total)
        total += count
        return ids

    def value_of(arg: Any) -> Any:
        if isinstance(arg, torch.SymInt):
            return small(arg)
        return arg

    order = _layout_ancestors(node)
    for current in order:
        fake = current.meta.get(VALUE)
        if _is_size(fake):
            cache[current] = fx.node.map_aggregate(fake, value_of)
        elif not is_layout(current):
            if not isinstance(fake, torch.Tensor):
                raise LayoutError(f"{current.name} is not a tensor")
            cache[current] = source_ids(current)
        else:
            if current.op == "call_method" and current.target in _CASTS:
                cache[current] = cache[current.args[0]]  # type: ignore[index]
                continue
            args = fx.map_arg(current.args, lambda n: cache[n])
            kwargs = fx.map_arg(current.kwargs, lambda n: cache[n])
            args, kwargs = fx.node.map_aggregate(args, value_of), fx.node.map_aggregate(kwargs, value_of)
            if current.op == "call_method":
                cache[current] = getattr(args[0], str(current.target))(*args[1:], **kwargs)
            else:
                cache[current] = current.target(*args, **kwargs)  # type: ignore[operator]
    heads_dim, features_dim = feature_dims
    ids = cache[node].permute(batch_dim, seq_dim, heads_dim, features_dim).contiguous()
    starts = torch.tensor(offsets)
    which = torch.bucketize(ids, starts, right=True) - 1
    if not bool((which == which[:1, :1]).all()):
        raise LayoutError("tokens take their features from different sources")
    local = ids - starts[which]
    first = local[0, 0]
    feature = torch.zeros_like(first)
    widths = []
    for index, leaf in enumerate(sources):
        shape = [small(s) for s in graph.shape(leaf)]
        mine = which[0, 0] == index
        token_dims = _token_dims(local, mine, shape)
        keep = [d for d in range(len(shape)) if d not in token_dims]
        coordinates = torch.unravel_index(first[mine], shape)
        flat = torch.zeros_like(first[mine])
        for d in range(len(shape)):
            if d in token_dims:
                if bool((coordinates[d] != 0).any()):
                    raise LayoutError(f"{leaf.name} gives a token features of another token")
            elif not is_static(graph.shape(leaf)[d]):
                raise LayoutError(f"only some tokens or rows of {leaf.name} are read")
            else:
                flat = flat * shape[d] + coordinates[d]
        feature[mine] = flat
        widths.append(math.prod(shape[d] for d in keep))
    tensors = {n: v for n, v in cache.items() if isinstance(v, torch.Tensor)}
    return Features(tuple(sources), which[0, 0], feature, tuple(widths), tensors, cache[node])


def _token_dims(local: torch.Tensor, mine: torch.Tensor, shape: list[int]) -> set[int]:
    """Dimensions of a source that batch and sequence move along.

    Raises LayoutError unless token (b, s) of the operand takes every feature from token (b, s) of the source, or from
    the one token there is along a dimension of size 1.
    """
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    counts = (local.shape[0], local.shape[1])
    moves: list[int] = []
    for axis, count in enumerate(counts):
        steps = (local.narrow(axis, 1, count - 1) - local.narrow(axis, 0, count - 1))[..., mine]
        if steps.numel() and not bool((steps == steps.flatten()[0]).all()):
            raise LayoutError("tokens do not move through the source in even steps")
        moves.append(int(steps.flatten()[0]) if steps.numel() else 0)
    along = [d for d in range(len(shape)) if shape[d] == math.prod(counts)]
    flat = [d for d in along if moves == [counts[1] * strides[d], strides[d]]]
    if flat:  # batch and sequence flattened into one dimension of the source
        return {flat[0]}
    found: set[int] = set()
    for move, count in zip(moves, counts, strict=True):
        if move == 0:
            continue  # one token, or broadcast over this axis
        fits = [d for d in range(len(shape)) if strides[d] == move and shape[d] == count]
        if not fits:
            raise LayoutError("tokens do not move along one whole dimension of the source")
        found.add(fits[0])
    return found


def _is_size(value: Any) -> bool:
    """Whether a node's value is a size or a shape, known without executing anything."""
    if isinstance(value, (tuple, list)):
        return all(isinstance(v, (int, torch.SymInt)) for v in value)
    return isinstance(value, (int, torch.SymInt))


def _layout_ancestors(node: fx.Node) -> list[fx.Node]:
    """The layout nodes above ``node`` and their first non-layout inputs, inputs first."""
    order: list[fx.Node] = []
    seen: set[fx.Node] = set()
    stack: list[tuple[fx.Node, bool]] = [(node, False)]
    while stack:
        current, done = stack.pop()
        if done:
            order.append(current)
            continue
        if current in seen:
            continue
        seen.add(current)
        stack.append((current, True))
        if _is_size(current.meta.get(VALUE)):
            continue
        if is_layout(current):
            inputs = current.all_input_nodes
            if current.op == "call_method" and current.target in _CASTS:
                inputs = inputs[:1]  # the others say only which dtype
            stack.extend((n, False) for n in inputs)
    return order


def strip_layout(node: fx.Node) -> fx.Node:
    """The value before reshapes that keep the order of elements (``view``, ``contiguous`` and the like)."""
    keeps = {"view", "reshape", "contiguous", "flatten", "unflatten", "squeeze", "unsqueeze", "clone"}
    while node.op == "call_method" and (node.target in keeps or (node.target in _CASTS and is_layout(node))):
        node = node.args[0]  # type: ignore[assignment]
    return node


@dataclass(frozen=True)
class Linear:
    """``y = x W^T + b`` as found in a graph.

    Attributes:
        node: the call.
        x: its input node.
        weight: placeholder of the weight.
        transposed: the weight is stored [in, out].
        bias: placeholder of the bias, or None.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    transposed: bool
    bias: fx.Node | None


def linear_of(graph: Graph, node: fx.Node) -> Linear | None:
    """The linear map that a node is, or None: ``F.linear``, or ``addmm``/``matmul`` with a weight [in, out]."""
    if node.op == "call_function" and node.target in (F.linear, torch._C._nn.linear):
        given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | dict(node.kwargs)
        x, weight, bias, transposed = given["input"], given["weight"], given.get("bias"), False
    elif node.op == "call_function" and node.target is torch.addmm and not node.kwargs:
        bias, x, weight = node.args
        transposed = True
    else:
        return None
    if not isinstance(weight, fx.Node) or weight.op != "placeholder":
        return None
    if bias is not None and (not isinstance(bias, fx.Node) or bias.op != "placeholder"):
        return None
    return Linear(node, x, weight, transposed, bias)


def as_slice(indices: list[int]) -> slice | None:
    """The slice that a list of ascending consecutive indices is, or None."""
    if indices and indices == list(range(indices[0], indices[0] + len(indices))):
        return slice(indices[0], indices[0] + len(indices))
    return None


def check_rows(total: int, rows: torch.Tensor) -> tuple[int, int]:
    """Start and stride of the heads' row blocks in a weight of ``total`` rows; LayoutError if a view cannot reach them.

    Args:
        rows: [heads, features] row numbers.
    """
    heads, width = rows.shape
    start = int(rows[0, 0])
    if not bool((rows == rows[:, :1] + torch.arange(width)).all()):
        raise LayoutError("rows of the weight are not consecutive within a head")
    if heads == 1:
        return start, width
    stride = int(rows[1, 0] - rows[0, 0])
    if stride < width or not bool((rows[:, 0] == start + stride * torch.arange(heads)).all()):
        raise LayoutError("heads are not at regular distances in the weight")
    low = (start // stride) * stride
    if stride != width and (start - low + width > stride or low + heads * stride > total):
        raise LayoutError("heads cross the stride of the weight")
    return start, stride


def rows_of(graph: Graph, weight: fx.Node, rows: torch.Tensor, *, transposed: bool) -> fx.Node:
    """Nodes for ``W[rows]`` of a [out, in] weight, as views: [heads, features, in] (a bias: [heads, features]).

    Args:
        weight: node of the weight ([in, out] if ``transposed``) or of a bias [out].
        rows: [heads, features] row numbers.

    Raises:
        LayoutError: the rows are in no regular order, so that a view cannot reach them.
    """
    if transposed:
        weight = graph.method("t", weight)
    total = int(graph.shape(weight)[0])
    start, stride = check_rows(total, rows)
    heads, width = rows.shape
    low = start if stride == width else (start // stride) * stride
    block = weight
    if (low, heads * stride) != (0, total):
        block = graph.call(operator.getitem, weight, slice(low, low + heads * stride))
    block = graph.method("unflatten", block, 0, (heads, stride))
    if stride == width:
        return block
    return graph.call(operator.getitem, block, (slice(None), slice(start - low, start - low + width)))
