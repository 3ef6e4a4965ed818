"""What a graph costs, in sympy expressions over its shape symbols: floating point operations, bytes moved, bytes held.

Counted are matrix products, convolutions, embeddings and canonical ops; a multiply-add is two operations. Elementwise
work, norms and softmax outside canonical ops are not counted: a compiler fuses them, and next to the products they
are small.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from latentscan.ir.graph import REGION, VALUE, Graph
from latentscan.ir.ops.base import REGISTRY, Cost
from latentscan.ir.sizes import expression

Values = Mapping[sympy.Symbol, int]
_MATMULS = {
    torch.matmul: "matmul", operator.matmul: "matmul", torch.mm: "matmul", torch.bmm: "bmm",
    "matmul": "matmul", "__matmul__": "matmul", "mm": "matmul", "bmm": "bmm",
}  # fmt: skip
_LINEARS = {F.linear, torch._C._nn.linear}
_ADDED = {torch.addmm: "addmm", torch.baddbmm: "bmm", "addmm": "addmm", "baddbmm": "bmm"}
_GROUPED = {getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None)} - {None}
_CONVOLUTIONS = {torch.conv1d, F.conv1d, torch.conv2d, F.conv2d}
_SDPA = {F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention}


def _size(tensor: Any) -> sympy.Expr:
    """Elements of a fake tensor."""
    return sympy.Mul(*(expression(s) for s in tensor.shape))


def bytes_expression(tensor: Any) -> sympy.Expr:
    """Bytes of a fake tensor's elements."""
    return _size(tensor) * tensor.element_size()


def _moved(graph: Graph, node: fx.Node, inputs: list[Any] | None = None) -> tuple[sympy.Expr, sympy.Expr]:
    """Bytes of a node's inputs and of its output."""
    given = [graph.value(n) for n in (node.all_input_nodes if inputs is None else inputs)]
    read = sympy.Add(*(bytes_expression(v) for v in given if isinstance(v, torch.Tensor)))
    value = graph.value(node)
    outputs = value if isinstance(value, (tuple, list)) else (value,)
    return read, sympy.Add(*(bytes_expression(v) for v in outputs if isinstance(v, torch.Tensor)))


def einsum_flops(equation: str, *operands: Any) -> sympy.Expr:
    """Operations of ``torch.einsum``: two operands at a time, from the left.

    An ellipsis counts as the dimensions that it stands for.
    """
    left, _, right = equation.replace(" ", "").partition("->")
    sizes: dict[str, sympy.Expr] = {}
    terms: list[set[str]] = []
    for text, operand in zip(left.split(","), operands, strict=True):
        named = len(text.replace("...", ""))
        dots = [f"{i}" for i in range(len(operand.shape) - named)][::-1] if "..." in text else []
        before, _, after = text.partition("...")
        letters = [*before, *dots, *after] if dots or "..." in text else list(text)
        for letter, size in zip(letters, operand.shape, strict=True):
            known = sizes.get(letter)
            sizes[letter] = expression(size) if known is None or known == 1 else known
        terms.append(set(letters))
    result = set(right.replace("...", "")) if "->" in equation else {x for t in terms for x in t if left.count(x) == 1}
    result |= {x for t in terms for x in t if x.isdigit()}
    flops = sympy.Integer(0)
    current = terms[0]
    for index, other in enumerate(terms[1:], start=1):
        kept = result.union(*terms[index + 1 :]) if index + 1 < len(terms) else result
        every = current | other
        summed = every - kept
        flops += sympy.Mul(*(sizes[x] for x in every)) * (2 if summed else 1)
        current = every & kept
    return flops


def node_cost(graph: Graph, node: fx.Node) -> tuple[str, Cost] | None:
    """The kind of a node and what it costs, or None for a node that is not counted."""
    target: Any = node.target
    if node.op not in ("call_function", "call_method"):
        return None
    info = REGISTRY.get(target)
    if info is not None:
        args = fx.map_arg(node.args, graph.value)
        kwargs = fx.map_arg(node.kwargs, graph.value)
        with graph.fake_mode, enable_python_dispatcher(), torch.no_grad():
            return info.name, info.cost(*args, **kwargs)
    value = graph.value(node)

    def shape(position: int, *names: str) -> Any:
        if len(node.args) > position:
            return graph.value(node.args[position]).shape
        return graph.value(next(node.kwargs[n] for n in names if n in node.kwargs)).shape

    if target in _LINEARS:
        flops, kind = 2 * _size(value) * expression(shape(1, "weight")[-1]), "linear"
    elif target in _MATMULS:
        flops, kind = 2 * _size(value) * expression(shape(0, "input", "mat1")[-1]), _MATMULS[target]
    elif target in _ADDED:
        flops, kind = 2 * _size(value) * expression(shape(1, "mat1", "batch1")[-1]), _ADDED[target]
    elif target in _GROUPED:
        flops, kind = 2 * _size(value) * expression(shape(0, "input", "mat_a")[-1]), "grouped_mm"
    elif target is torch.einsum:
        operands = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        flops, kind = einsum_flops(str(node.args[0]), *(graph.value(n) for n in operands)), "einsum"
    elif target in _CONVOLUTIONS:
        weight = shape(1, "weight")
        flops, kind = 2 * _size(value) * sympy.Mul(*(expression(s) for s in weight[1:])), "conv"
    elif target in _SDPA:
        query, key, wide = shape(0, "query"), shape(1, "key"), shape(2, "value")
        rows = sympy.Mul(*(expression(s) for s in query[:-1]))
        flops = 2 * rows * expression(key[-2]) * (expression(query[-1]) + expression(wide[-1]))
        kind = "attention"
    elif target in (F.embedding, torch.embedding):
        moved = bytes_expression(value)
        return "embedding", Cost(sympy.Integer(0), moved, moved)
    else:
        return None
    return kind, Cost(flops, *_moved(graph, node))


class Total:
    """A sum of expressions in which equal ones are counted instead of added: layers repeat."""

    def __init__(self) -> None:
        self._terms: Counter[sympy.Expr] = Counter()

    def add(self, term: sympy.Expr, times: int = 1) -> None:
        if term != 0:
            self._terms[term] += times

    @property
    def expression(self) -> sympy.Expr:
        return sympy.Add(*(count * term for term, count in self._terms.items()))

    def at(self, values: Values) -> int:
        """The sum for given sizes."""
        return sum((count * evaluate(term, values) for term, count in self._terms.items()), 0)


def evaluate(term: sympy.Expr, values: Values) -> int:
    """An expression as a number. Raises KeyError with the symbols that ``values`` lacks."""
    result = term.xreplace({s: sympy.Integer(v) for s, v in values.items()})
    if result.free_symbols:
        raise KeyError(", ".join(sorted(s.name for s in result.free_symbols)))
    return int(result)


@dataclass
class Kind:
    """Nodes of one kind: how many, and what they cost together."""

    nodes: int = 0
    flops: Total = field(default_factory=Total)
    read: Total = field(default_factory=Total)
    written: Total = field(default_factory=Total)


def cost_by_kind(graph: Graph, *, backward: bool = False) -> dict[str, Kind]:
    """What a graph costs, by kind of node, in the order of their first node.

    Args:
        backward: add what the gradients cost: for a product twice its forward, for a canonical op what its own
            backward op costs. Nodes of a recompute region count once more.
    """
    kinds: dict[str, Kind] = {}

    def count(name: str, cost: Cost, times: int = 1) -> None:
        kind = kinds.setdefault(name, Kind())
        kind.nodes += 1
        for total, term in ((kind.flops, cost.flops), (kind.read, cost.read), (kind.written, cost.written)):
            total.add(term, times)

    for node in graph.graph.nodes:
        found = node_cost(graph, node)
        if found is None:
            continue
        name, cost = found
        count(name, cost, 2 if backward and REGION in node.meta else 1)
        if backward:
            gradient = _backward_cost(graph, node)
            count(f"{name} backward", gradient if gradient is not None else cost, 1 if gradient is not None else 2)
    return kinds


def _backward_cost(graph: Graph, node: fx.Node) -> Cost | None:
    """What an op's own backward op costs, or None if it has none."""
    info = REGISTRY.get(node.target)
    if info is None:
        return None
    if not info.differentiable:
        return Cost()
    backward = next(i for i in REGISTRY.values() if i.name == f"{info.name}_backward")
    value = graph.value(node)
    outputs = value if isinstance(value, (tuple, list)) else (value,)
    args = fx.map_arg(node.args, graph.value)
    kwargs = fx.map_arg(node.kwargs, graph.value)
    if info.name == "rope":  # its gradient needs no x
        args = args[1:]
    with graph.fake_mode, enable_python_dispatcher(), torch.no_grad():
        return backward.cost(*outputs, *args, **kwargs)


# -- cache ----------------------------------------------------------------------------------------------------------


def cache_bytes_per_token(graph: Graph) -> int:
    """Bytes that one more token of one batch row takes in all caches that the graph appends to."""
    total = 0
    for node in graph.graph.nodes:
        if getattr(node.target, "_opname", "") != "cache_append":
            continue
        for tensor, seq_dim in zip(node.args[1], node.args[2], strict=True):
            value = graph.value(tensor)
            dim = seq_dim % value.dim()
            sizes = [expression(s) for i, s in enumerate(value.shape) if i not in (0, dim)]
            total += int(sympy.Mul(*sizes)) * value.element_size()
    return total


# -- activations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """Memory that a node's value takes: its bytes, and between which nodes somebody still reads it."""

    size: sympy.Expr
    first: int
    last: int


def held(graph: Graph) -> list[Held]:
    """The storages that a graph's calls allocate. Views share one; weights, inputs and caches are not counted."""
    position: dict[fx.Node, int] = {n: i for i, n in enumerate(graph.graph.nodes)}
    found: dict[int, list[Any]] = {}
    given: set[int] = set()
    for node, at in position.items():
        for tensor in _tensors(node.meta.get(VALUE)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if node.op == "placeholder" or getattr(node.target, "_opname", "") == "cache_append":
                given.add(key)
            if key in given or node.op == "output":
                continue
            last = max([at, *(position[u] for u in node.users)])
            if key in found:
                found[key][2] = max(found[key][2], last)
            else:
                found[key] = [expression(storage.nbytes()), at, last]
    return [Held(*parts) for parts in found.values()]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (tuple, list)) else []


def peak_bytes(graph: Graph, values: Values) -> int:
    """Most bytes alive at once when the nodes run one after another and each value is freed after its last reader."""
    sizes = Memo(values)
    changes: Counter[int] = Counter()
    for h in held(graph):
        size = sizes(h.size)
        changes[h.first] += size
        changes[h.last + 1] -= size
    peak = current = 0
    for at in sorted(changes):
        current += changes[at]
        peak = max(peak, current)
    return peak


class Memo:
    """Terms evaluated at given values, each once."""

    def __init__(self, values: Values) -> None:
        self.values, self.known = values, dict[sympy.Expr, int]()

    def __call__(self, term: sympy.Expr) -> int:
        if term not in self.known:
            self.known[term] = evaluate(term, self.values)
        return self.known[term]
