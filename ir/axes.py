"""Which logical unit (head, KV group, channel) each index of a value belongs to, found from the graph.

A *placement* names the one dimension of a value along which units lie, and the unit of each index of it. Placements are
carried from a value to its neighbours: through layout nodes by executing them on element numbers (so any way of
fusing, splitting and interleaving is followed), through canonical ops by their logical axes, and through pointwise
functions by broadcasting. Nothing is known of any model.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from latentscan.ir.graph import VALUE, Graph
from latentscan.ir.layout import SmallNumbers
from latentscan.ir.mesh import shares

UNKNOWN = -1
DRAWS = "draws random numbers, which would differ from one process"  # in the reason of a refusal
SPLITS = {torch.split, torch.functional.split, torch.chunk, "split", "chunk"}
POINTWISE = {
    "add", "sub", "mul", "truediv", "true_divide", "div", "neg", "pow", "rsqrt", "sqrt", "exp", "log", "log1p", "silu",
    "gelu", "relu", "relu2", "sigmoid", "tanh", "softplus", "clamp", "abs", "square", "where", "maximum", "minimum",
    "to", "float", "type_as", "type", "half", "bfloat16", "masked_fill", "sin", "cos", "eq", "ne", "gt", "ge", "lt",
    "le", "leaky_relu", "elu", "hardswish", "mish", "rsub", "logical_and", "logical_or", "logical_not", "dropout",
    "erf", "expm1", "reciprocal", "bool", "long", "int", "detach", "invert", "bitwise_not",
    "elementwise_function",
}  # fmt: skip
REDUCTIONS = {"mean", "sum", "var", "std", "softmax", "log_softmax", "amax", "amin", "norm", "cumsum"}
RANDOM = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial",
    "normal", "uniform", "exponential", "gumbel_softmax", "random",
}  # fmt: skip
NORMS = {"layer_norm", "rms_norm"}


class AxisError(Exception):
    """Units cannot be followed through a node.

    Args:
        node: where; the text says why.
    """

    def __init__(self, node: fx.Node, why: str) -> None:
        super().__init__(why)
        self.node = node


@dataclass(frozen=True, eq=False)
class Placement:
    """Units along one dimension of a value.

    Attributes:
        dim: the dimension, counted from 0.
        labels: int64 [size of the dimension], the label of each index; UNKNOWN where it is not known yet.
    """

    dim: int
    labels: torch.Tensor

    @property
    def complete(self) -> bool:
        return bool((self.labels >= 0).all())


class Units:
    """The units of a region and their distribution.

    Labels ``0 .. count - 1`` are the units themselves; further labels stand for sets of units that need the same thing
    (a key head that several query heads read).

    Args:
        count: how many there are; rank r gets ``shares(count, size)[r]`` consecutive ones.
        common: whether what every unit needs has a label as well (B and C of a scan with one group, which lie beside
            the heads in one projection). Without one it is not split, and enters a region from outside.
    """

    def __init__(self, count: int, *, common: bool = False) -> None:
        self.count, self.common = count, common
        self._sets: list[frozenset[int]] = []

    def members(self, label: int) -> frozenset[int]:
        return frozenset((label,)) if label < self.count else self._sets[label - self.count]

    def union(self, labels: Iterable[int]) -> int | None:
        """The label of all units of the given ones; None if that is every unit, unless that has one."""
        found = frozenset().union(*(self.members(i) for i in labels))
        if len(found) == self.count and not self.common:
            return None
        if len(found) == 1:
            return next(iter(found))
        if found not in self._sets:
            self._sets.append(found)
        return self.count + self._sets.index(found)

    def all_common(self, labels: torch.Tensor) -> bool:
        """Whether every unit needs everything that is known of these: along which dimension then means nothing."""
        seen = [i for i in labels.unique().tolist() if i >= 0]
        return bool(seen) and all(len(self.members(i)) == self.count for i in seen)

    def owned(self, labels: torch.Tensor, size: int, rank: int) -> list[int]:
        """The indices that a rank holds: those whose label has a unit of the rank."""
        counts = shares(self.count, size)
        first = sum(counts[:rank])
        mine = range(first, first + counts[rank])
        table = torch.zeros(self.count + len(self._sets), dtype=torch.bool)
        table[first : first + counts[rank]] = True
        for i, members in enumerate(self._sets):
            table[self.count + i] = any(u in mine for u in members)
        return table[labels].nonzero().flatten().tolist()

    def held(self, labels: torch.Tensor, size: int) -> list[list[int]]:
        """:meth:`owned` of every rank."""
        return [self.owned(labels, size, rank) for rank in range(size)]


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get(VALUE), torch.Tensor)


def producer(node: fx.Node) -> fx.Node:
    """The node whose result this is: itself, or for an item of a tuple the node that gives the tuple."""
    while node.target is operator.getitem and not is_tensor(node.args[0]):
        node = node.args[0]  # type: ignore[assignment]
    return node


def results(op: fx.Node) -> list[tuple[tuple[int, ...], fx.Node]]:
    """The tensors that a node gives, each with its place in the (nested) tuple; the empty place for a tensor."""
    if is_tensor(op):
        return [((), op)]
    found: list[tuple[tuple[int, ...], fx.Node]] = []
    for user in op.users:
        if user.target is operator.getitem and isinstance(user.args[1], int):
            found.extend(((user.args[1], *place), leaf) for place, leaf in results(user))
    return found


def tensor_inputs(op: fx.Node) -> list[fx.Node]:
    return [n for n in op.all_input_nodes if is_tensor(n)]


def name_of(node: fx.Node) -> str:
    """The plain name of what a node calls."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return name.strip("_")


def is_pointwise(node: fx.Node) -> bool:
    if node.op == "call_method" and str(node.target).endswith("_"):
        return False
    return node.op in ("call_function", "call_method") and name_of(node) in POINTWISE and is_tensor(node)


def draws(node: fx.Node) -> bool:
    """Whether a node is a dropout that drops something."""
    if not name_of(node).endswith("dropout"):
        return False
    given = dict(zip(("input", "p", "training"), node.args, strict=False)) | dict(node.kwargs)
    return bool(given.get("p", 0.5)) and bool(given.get("training", True))


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = getattr(node.target, "_opname", name_of(node))
    if name in RANDOM:
        return True
    if name.endswith("attention"):
        given = node.kwargs.get("dropout_p", 0.0)
        if hasattr(node.target, "_schema"):
            places = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
            given = dict(zip(places, node.args, strict=False)).get("dropout_p", given)
        elif len(node.args) > 4:
            given = node.args[4]
        return bool(given)
    return name.endswith("dropout") and draws(node)


# -- layout ---------------------------------------------------------------------------------------------------------


def execute(op: fx.Node, small: SmallNumbers, inputs: dict[fx.Node, torch.Tensor]) -> Any:
    """Run a layout node on other tensors; sizes are small numbers for their symbols."""

    def number(value: Any) -> Any:
        return small(value) if isinstance(value, torch.SymInt) else value

    def get(node: fx.Node) -> Any:
        if node in inputs:
            return inputs[node]
        return fx.node.map_aggregate(node.meta[VALUE], number)

    args = fx.node.map_aggregate(fx.map_arg(op.args, get), number)
    kwargs = fx.node.map_aggregate(fx.map_arg(op.kwargs, get), number)
    if op.op == "call_method":
        return getattr(args[0], str(op.target))(*args[1:], **kwargs)
    return op.target(*args, **kwargs)  # type: ignore[operator]


def item(value: Any, place: Sequence[int]) -> torch.Tensor:
    for index in place:
        value = value[index]
    return value


def numbered(graph: Graph, op: fx.Node, small: SmallNumbers) -> dict[fx.Node, torch.Tensor]:
    """Distinct element numbers for the inputs of a layout node."""
    found, total = {}, 0
    for node in tensor_inputs(op):
        shape = [small(s) for s in graph.shape(node)]
        count = int(torch.tensor(shape).prod()) if shape else 1
        found[node] = torch.arange(total, total + count).reshape(shape)
        total += count
    return found


def along_one_dim(elements: torch.Tensor, node: fx.Node, units: Units) -> Placement | None:
    """The dimension that labels [as the value's shape] lie along, and the labels; None if nothing is known.

    What every unit needs lies along the last dimension, and is nothing yet while a part of it is not known.

    Raises AxisError if they lie along none or more than one.
    """
    known = elements >= 0
    if not bool(known.any()):
        return None
    if units.count > 1 and units.all_common(elements):
        last = elements.dim() - 1
        return Placement(last, elements.movedim(last, 0).flatten(1)[:, 0]) if bool(known.all()) and last >= 0 else None
    top = int(elements.max()) + 1
    fits = []
    for dim in range(elements.dim()):
        rows = elements.movedim(dim, 0).reshape(elements.shape[dim], -1)
        high = rows.amax(1)
        low = torch.where(rows < 0, top, rows).amin(1)
        if bool((low == high)[high >= 0].all()):
            fits.append(Placement(dim, high))
    if len(fits) != 1:
        raise AxisError(node, f"the units of {node.name} lie along {len(fits) or 'no'} dimensions")
    return fits[0]


def through_layout(
    graph: Graph, op: fx.Node, known: dict[fx.Node, Placement], units: Units, small: SmallNumbers
) -> dict[fx.Node, Placement]:
    """What the known placements around a layout node say about its other inputs and results."""
    inputs = numbered(graph, op, small)
    given = execute(op, small, inputs)
    leaves = [(item(given, place), leaf) for place, leaf in results(op)]
    for node, ids in (*inputs.items(), *((leaf, ids) for ids, leaf in leaves)):
        if node in known and ids.shape[known[node].dim] != known[node].labels.numel():  # a symbol that tracing fixed
            raise AxisError(op, f"the units of {node.name} lie along a dimension of no fixed size in {op.name}")
    total = sum(t.numel() for t in inputs.values())
    labels = torch.full((total,), UNKNOWN, dtype=torch.int64)
    for node, ids in inputs.items():
        if node in known:
            labels[ids.flatten()] = spread(known[node], ids.shape).flatten()
    found: dict[fx.Node, Placement] = {}
    if bool((labels >= 0).any()):
        for ids, leaf in leaves:
            placement = along_one_dim(labels[ids], leaf, units)
            if placement is not None:
                found[leaf] = placement
    placed = [(ids, leaf) for ids, leaf in leaves if leaf in known]
    if placed:
        at = torch.cat([ids.flatten() for ids, _ in placed])
        what = torch.cat([spread(known[leaf], ids.shape).flatten() for ids, leaf in placed])
        at, what = at[what >= 0], what[what >= 0]
        high = torch.full((total,), UNKNOWN, dtype=torch.int64).scatter_reduce(0, at, what, "amax")
        low = torch.full((total,), torch.iinfo(torch.int64).max).scatter_reduce(0, at, what, "amin")
        shared = bool((low < high).any())
        for node, ids in inputs.items():
            placement = _unions(node, ids, at, what, units) if shared else along_one_dim(high[ids], node, units)
            if placement is not None:
                found[node] = placement
    return found


def _unions(node: fx.Node, ids: torch.Tensor, at: torch.Tensor, what: torch.Tensor, units: Units) -> Placement | None:
    """The placement of a value whose elements are read by several units; None if every unit reads all of it."""
    first, count = int(ids.flatten()[0]), ids.numel()
    mine = (at >= first) & (at < first + count)
    if not bool(mine.any()):
        return None
    places, labels = torch.unravel_index(at[mine] - first, ids.shape), what[mine]
    best: tuple[int, Placement | None] | None = None
    for dim, coordinates in enumerate(places):
        pairs = torch.stack([coordinates, labels]).unique(dim=1)
        sets = [units.union(pairs[1, pairs[0] == i].tolist()) for i in range(ids.shape[dim])]
        if all(s is None or len(units.members(s)) == units.count for s in sets):
            continue
        if any(s is None for s in sets):
            raise AxisError(node, f"some of {node.name} is read by all units and some is not")
        if best is None or pairs.shape[1] < best[0]:
            best = pairs.shape[1], Placement(dim, torch.tensor(sets, dtype=torch.int64))
    return None if best is None else best[1]


def spread(placement: Placement, shape: Sequence[int]) -> torch.Tensor:
    """Labels of every element of a value."""
    view = [1] * len(shape)
    view[placement.dim] = -1
    return placement.labels.reshape(view).expand(tuple(shape))


# -- pointwise, reductions, matmul ----------------------------------------------------------------------------------


def through_pointwise(graph: Graph, op: fx.Node, known: dict[fx.Node, Placement]) -> dict[fx.Node, Placement]:
    """Broadcasting: inputs that have the whole dimension share its placement."""
    rank = len(graph.shape(op))
    source = next((n for n in (op, *tensor_inputs(op)) if n in known), None)
    if source is None:
        return {}
    placement = known[source]
    at = placement.dim - len(graph.shape(source)) + rank
    if source is not op and graph.shape(op)[at] != placement.labels.numel():
        raise AxisError(op, f"{op.name} broadcasts the units of {source.name}")
    if not isinstance(graph.shape(op)[at], int):
        raise AxisError(op, f"the units of {source.name} lie along a dimension of no fixed size")
    found = {}
    for node in (op, *tensor_inputs(op)):
        shape = graph.shape(node)
        dim = at - rank + len(shape)
        if dim >= 0 and isinstance(shape[dim], int) and shape[dim] == placement.labels.numel():
            found[node] = Placement(dim, placement.labels)
    return found


def reduced_dims(graph: Graph, op: fx.Node) -> tuple[set[int], bool]:
    """The dimensions that a reduction works along, and whether they stay."""
    rank = len(graph.shape(tensor_inputs(op)[0]))
    if name_of(op) in NORMS:
        shape = op.args[1] if len(op.args) > 1 else op.kwargs["normalized_shape"]
        return set(range(rank - len(shape), rank)), True  # type: ignore[arg-type]
    dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
    dims = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    keeps = name_of(op) in ("softmax", "log_softmax", "cumsum")
    keeps = keeps or bool(op.kwargs.get("keepdim", op.args[2] if len(op.args) > 2 else False))
    return {d % rank for d in dims}, keeps  # type: ignore[union-attr]


def through_reduction(graph: Graph, op: fx.Node, known: dict[fx.Node, Placement]) -> dict[fx.Node, Placement]:
    """Units pass along dimensions that are not reduced. Raises AxisError where they are."""
    x = tensor_inputs(op)[0]
    dims, keeps = reduced_dims(graph, op)
    if x in known:
        placement = known[x]
        if placement.dim in dims:
            raise AxisError(op, f"{op.name} ({name_of(op)}) works across the units")
        dim = placement.dim if keeps else placement.dim - sum(d < placement.dim for d in dims)
        return {op: Placement(dim, placement.labels)}
    placement = known[op]
    left = [d for d in range(len(graph.shape(x))) if keeps or d not in dims]
    if left[placement.dim] in dims:
        raise AxisError(op, f"{op.name} ({name_of(op)}) works across the units")
    return {x: Placement(left[placement.dim], placement.labels)}


def is_reduction(node: fx.Node) -> bool:
    return is_tensor(node) and name_of(node) in REDUCTIONS | NORMS and node.op in ("call_function", "call_method")


def is_matmul(node: fx.Node) -> bool:
    return is_tensor(node) and name_of(node) in ("matmul", "bmm") and len(tensor_inputs(node)) == 2


def through_matmul(graph: Graph, op: fx.Node, known: dict[fx.Node, Placement]) -> dict[fx.Node, Placement]:
    """``x @ y`` [.., n, k] [.., k, m]: batch dimensions broadcast, n and m pass; k must not carry units."""
    x, y = op.args[:2]
    ranks = {n: len(graph.shape(n)) for n in (x, y, op)}  # type: ignore[arg-type]
    if min(ranks.values()) < 2:
        raise AxisError(op, f"{op.name} multiplies vectors")
    found: dict[fx.Node, Placement] = {}

    def put(node: Any, from_end: int, labels: torch.Tensor) -> None:
        dim = ranks[node] - from_end
        if dim >= 0 and graph.shape(node)[dim] == labels.numel():
            found[node] = Placement(dim, labels)

    for node in (x, y, op):
        placement = known.get(node)  # type: ignore[arg-type]
        if placement is None:
            continue
        from_end = ranks[node] - placement.dim  # type: ignore[index]
        if from_end > 2:
            for other in (x, y, op):
                put(other, from_end, placement.labels)
        elif node is op:
            put(x if from_end == 2 else y, from_end, placement.labels)
        elif (node is x) == (from_end == 2):
            put(op, from_end, placement.labels)
        else:
            raise AxisError(op, f"{op.name} sums over the units")
    return found


def is_einsum(node: fx.Node) -> bool:
    """Whether a node is an einsum of plain letters."""
    return is_tensor(node) and node.target is torch.einsum and "..." not in str(node.args[0])


def through_einsum(op: fx.Node, known: dict[fx.Node, Placement]) -> dict[fx.Node, Placement]:
    """Values that have the letter of the units share its placement. Raises AxisError if the result has it not."""
    inputs, result = str(op.args[0]).replace(" ", "").split("->")
    operands = op.args[1] if isinstance(op.args[1], (tuple, list)) else op.args[1:]
    letters = dict(zip((*operands, op), (*inputs.split(","), result), strict=True))
    source = next((n for n in letters if n in known), None)
    if source is None:
        return {}
    letter = letters[source][known[source].dim]  # type: ignore[index]
    if letter not in result:
        raise AxisError(op, f"{op.name} sums over the units")
    return {
        n: Placement(form.index(letter), known[source].labels)  # type: ignore[index, misc]
        for n, form in letters.items()
        if letter in form
    }
