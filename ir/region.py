"""A region that can be split over ranks: everything between column-split and row-split weights, found by growing.

From seeds (the heads of an attention, the inner features of an MLP) placements are carried to all neighbours until
they end: upwards at linear maps whose rows are split (columns in Megatron's words), weights, and values that all units
share; downwards at linear maps that sum over the units (rows), whose results are partial sums.
"""

from __future__ import annotations

import operator
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from latentscan.ir.axes import (
    DRAWS,
    AxisError,
    Placement,
    Units,
    draws,
    is_einsum,
    is_matmul,
    is_pointwise,
    is_reduction,
    is_tensor,
    name_of,
    producer,
    results,
    tensor_inputs,
    through_einsum,
    through_layout,
    through_matmul,
    through_pointwise,
    through_reduction,
)
from latentscan.ir.graph import Graph, is_impure
from latentscan.ir.layout import Linear, SmallNumbers, is_layout, linear_of
from latentscan.ir.mla import argument
from latentscan.ir.ops import base
from latentscan.ir.ops.rope import ROPE
from latentscan.ir.ops.ssm import _OTHER_FORMS
from latentscan.ir.sizes import is_static

COLUMN, ROW, CARRY, LAYOUT, POINTWISE, REDUCTION, MATMUL, ATTENTION, CANONICAL, CREATE, CONTRACT, OUTSIDE = (
    "column", "row", "carry", "layout", "pointwise", "reduction", "matmul", "attention", "canonical", "create",
    "contract", "outside",
)  # fmt: skip
CREATES = {"zeros", "zeros_like", "new_zeros", "empty_like", "new_empty"}  # recurrent states are made so, and written
SCANS = ("chunk_scan", "state_update")
_ATTENTIONS = {"attention", "latent_attention", "scaled_dot_product_attention"}
_MASKS = ("causal_mask", "packing_mask", "fit_padding")  # read values for their form alone
_KEYS = {"attention": ("k", "v"), "latent_attention": ("k_rope",), "scaled_dot_product_attention": ("key", "value")}


_NONE = Placement(-1, torch.empty(0))


@dataclass
class Region:
    """What has to be rewritten together.

    Attributes:
        units: what is distributed.
        placed: placements of values and weights inside.
        roles: the nodes inside, and what each is.
        linears: of the nodes with role column, row or carry.
        cut: of an attention, a mask for each head that all ranks make and of which each reads its heads' part.
    """

    units: Units
    placed: dict[fx.Node, Placement] = field(default_factory=dict)
    roles: dict[fx.Node, str] = field(default_factory=dict)
    linears: dict[fx.Node, Linear] = field(default_factory=dict)
    cut: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def ops(self, *roles: str) -> list[fx.Node]:
        """Nodes of the given roles (all by default), in the order of the graph."""
        wanted = {n for n, r in self.roles.items() if not roles or r in roles}
        if not wanted:
            return []
        graph = next(iter(wanted)).graph
        return [n for n in graph.nodes if n in wanted]

    def entries(self, op: fx.Node) -> list[fx.Node]:
        """Values that all ranks hold and that a node inside reads."""
        role = self.roles[op]
        if role in (ROW, CONTRACT) or (role == CANONICAL and name_of(op).startswith("cache_append")):
            return []
        inputs = tensor_inputs(op)
        if role == COLUMN:
            inputs = [self.linears[op].x]
        if role == CREATE:
            return []
        if role == LAYOUT and not any(leaf in self.placed for _, leaf in results(op)):
            return []
        return [n for n in inputs if n not in self.placed and n is not self.cut.get(op)]

    def weights(self, graph: Graph) -> list[fx.Node]:
        """Parameters that are split as they are (not as the weight of a linear map)."""
        return [n for n in self.placed if n.op == "placeholder" and graph.weight(n) is not None]


class _Growth:
    def __init__(self, graph: Graph, units: Units) -> None:
        self.graph, self.region, self.small = graph, Region(units), SmallNumbers()
        self.queue: deque[fx.Node] = deque()

    def put(self, node: fx.Node, placement: Placement) -> None:
        old = self.region.placed.get(node)
        if old is not None:
            units = self.region.units
            if units.all_common(old.labels) and units.all_common(placement.labels):
                return
            if old.dim != placement.dim:
                raise AxisError(node, f"{node.name} would be split along dimensions {old.dim} and {placement.dim}")
            both = (old.labels >= 0) & (placement.labels >= 0)
            if not torch.equal(old.labels[both], placement.labels[both]):
                raise AxisError(node, f"two readers of {node.name} would split it differently")
            merged = torch.maximum(old.labels, placement.labels)
            if torch.equal(merged, old.labels):
                return
            placement = Placement(old.dim, merged)
        self.region.placed[node] = placement
        around = [node if node.op == "placeholder" else producer(node), *node.users]
        for op in around:
            if op not in self.queue:
                self.queue.append(op)

    def run(self) -> Region:
        while self.queue:
            op = self.queue.popleft()
            role, found = self.relate(op)
            if role != OUTSIDE:
                self.region.roles[op] = role
            for node, placement in found.items():
                self.put(node, placement)
        region = self.region
        for node, placement in region.placed.items():
            if not placement.complete:
                raise AxisError(node, f"only a part of {node.name} belongs to units")
        for op, role in region.roles.items():
            if role == LAYOUT and any(n in region.placed for n in tensor_inputs(op)):
                odd = next((leaf for _, leaf in results(op) if leaf not in region.placed), None)
                if odd is not None:
                    raise AxisError(odd, f"{odd.name} mixes the units of {op.all_input_nodes[0].name}")
        if not region.ops(ROW, CONTRACT):
            raise AxisError(next(iter(region.placed)), "no linear map sums over the units")
        return region

    def relate(self, op: fx.Node) -> tuple[str, dict[fx.Node, Placement]]:
        """What a node is to the region, and what follows for its neighbours."""
        placed, graph = self.region.placed, self.graph
        if op.op == "output":
            odd = next((n for n in op.all_input_nodes if n in placed and name_of(n) not in CREATES), None)
            if odd is not None:
                raise AxisError(odd, f"the model returns {odd.name}, which would be split")
            return OUTSIDE, {}
        if op.op == "placeholder":
            if graph.weight(op) is None and is_static(graph.shape(op)[placed[op].dim]):
                raise AxisError(op, f"{op.name} is an input that would be split")
            return OUTSIDE, {}
        if name_of(op) in CREATES or op.target == "copy_":
            return CREATE, self.create(op)
        linear = linear_of(graph, op)
        if linear is not None:
            return self.linear(op, linear)
        if op.op == "call_function" and getattr(op.target, "namespace", "") == "latentscan":
            return self.canonical(op)
        if name_of(op) in _ATTENTIONS:
            return ATTENTION, self.attention(op)
        if is_pointwise(op):
            if draws(op):
                raise AxisError(op, f"{op.name} {DRAWS}")
            return POINTWISE, through_pointwise(graph, op, placed)
        if op.target == "transpose" and graph.weight(op.args[0]) is not None:  # as it is: it may be large
            return CARRY, self.transpose(op)
        if is_layout(op):
            return LAYOUT, through_layout(graph, op, placed, self.region.units, self.small)
        if is_reduction(op):
            return REDUCTION, through_reduction(graph, op, placed)
        if is_matmul(op):
            return self.matmul(op)
        if is_grouped(op):
            return self.grouped(op)
        if is_einsum(op):
            return MATMUL, through_einsum(op, placed)
        if name_of(op) in ("pad", "constant_pad_nd"):
            return CARRY, self.pad(op)
        if picks_rows(graph, op):
            return CARRY, self.gather(op)
        if op.target == "size" and op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None) is not None:
            dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
            source: Any = op.args[0]
            if dim % len(graph.shape(source)) != placed[source].dim:  # type: ignore[operator]
                return CARRY, {}
        what = "writes memory" if is_impure(op) else "has no rule for units"
        raise AxisError(op, f"{op.name} ({name_of(op)}) {what}")

    def linear(self, op: fx.Node, linear: Linear) -> tuple[str, dict[fx.Node, Placement]]:
        self.region.linears[op] = linear
        placed = self.region.placed
        last = len(self.graph.shape(op)) - 1
        if op in placed and placed[op].dim == last:
            if linear.x in placed:
                raise AxisError(op, f"both input and result of {op.name} would be split")
            if self.graph.weight(linear.weight) is None:
                raise AxisError(op, f"the weight of {op.name} is no parameter of the model")
            return COLUMN, {}
        if linear.x in placed and placed[linear.x].dim == last:
            if self.graph.weight(linear.weight) is None:
                raise AxisError(op, f"the weight of {op.name} is no parameter of the model")
            return ROW, {}
        placement = placed.get(op) or placed[linear.x]
        return CARRY, {op: placement, linear.x: placement}

    def matmul(self, op: fx.Node) -> tuple[str, dict[fx.Node, Placement]]:
        """A product: it sums over the units if they lie along the dimension that both operands share."""
        x, y = op.args[:2]
        for node, other, from_end in ((x, y, 1), (y, x, 2)):
            placement = self.region.placed.get(node)  # type: ignore[arg-type]
            if placement is None or placement.dim != len(self.graph.shape(node)) - from_end:  # type: ignore[arg-type]
                continue
            if op in self.region.placed:
                raise AxisError(op, f"both an input and the result of {op.name} would be split")
            dim = len(self.graph.shape(other)) - (3 - from_end)  # type: ignore[arg-type]
            return CONTRACT, {other: Placement(dim, placement.labels)}  # type: ignore[dict-item]
        return MATMUL, through_matmul(self.graph, op, self.region.placed)

    def grouped(self, op: fx.Node) -> tuple[str, dict[fx.Node, Placement]]:
        """Rows [pairs, k] times the weight [experts, k, m] of their group."""
        x, weight = op.args[:2]
        placed = self.region.placed
        if any(n in placed and placed[n].dim == 0 for n in (x, weight, op)):  # type: ignore[index]
            raise AxisError(op, f"{op.name} would be split along its groups")
        inner = placed.get(x) or (placed.get(weight) if placed.get(weight, _NONE).dim == 1 else None)  # type: ignore
        if inner is not None:
            if op in placed:
                raise AxisError(op, f"both an input and the result of {op.name} would be split")
            return CONTRACT, {x: Placement(1, inner.labels), weight: Placement(1, inner.labels)}  # type: ignore
        labels = (placed.get(op) or placed[weight]).labels  # type: ignore[index]
        return MATMUL, {op: Placement(1, labels), weight: Placement(2, labels)}  # type: ignore[dict-item]

    def transpose(self, op: fx.Node) -> dict[fx.Node, Placement]:
        """A weight with two dimensions exchanged."""
        source: Any = op.args[0]
        rank = len(self.graph.shape(source))
        first, second = (int(d) % rank for d in op.args[1:])  # type: ignore[call-overload]
        known = source if source in self.region.placed else op
        dim, labels = self.region.placed[known].dim, self.region.placed[known].labels
        moved = {first: second, second: first}.get(dim, dim)
        return {(op if known is source else source): Placement(moved, labels)}

    def pad(self, op: fx.Node) -> dict[fx.Node, Placement]:
        """Numbers before or behind other dimensions (a conv state of a prompt that is shorter than the kernel)."""
        x: Any = op.args[0]
        placement = self.region.placed.get(op) or self.region.placed[x]
        widths: Any = op.args[1] if len(op.args) > 1 else op.kwargs["pad"]
        mode = op.args[2] if len(op.args) > 2 else op.kwargs.get("mode", "constant")
        if mode != "constant" or placement.dim >= len(self.graph.shape(x)) - len(widths) // 2:
            raise AxisError(op, f"{op.name} would be split along a dimension that it pads")
        return {op: placement, x: placement}

    def gather(self, op: fx.Node) -> dict[fx.Node, Placement]:
        """Whole rows of a weight by number, such as the weights of chosen experts."""
        source: Any = op.args[0]
        shift = len(self.graph.shape(op)) - len(self.graph.shape(source))
        placed = self.region.placed
        if source in placed:
            if placed[source].dim == 0:
                raise AxisError(op, f"{op.name} picks among the units of {source.name}")
            return {op: Placement(placed[source].dim + shift, placed[source].labels)}
        if placed[op].dim - shift < 1:
            raise AxisError(op, f"the units of {op.name} are what it picks")
        return {source: Placement(placed[op].dim - shift, placed[op].labels)}

    def attention(self, op: fx.Node) -> dict[fx.Node, Placement]:
        """Heads of queries and result; keys and values belong to the units of the query heads that read them."""
        if _given(op, "dropout_p"):
            raise AxisError(op, f"{op.name} {DRAWS}")
        q, keys, rest = attention_operands(op)
        source = next((n for n in (op, q) if n in self.region.placed), None)
        units = self.region.units
        if source is None:
            return {}
        placement = self.region.placed[source]
        if placement.dim != 1:
            raise AxisError(op, f"{op.name} would be split along dimension {placement.dim}, not along heads")
        found = {op: placement, q: placement, **dict.fromkeys(rest, placement)}
        heads = placement.labels.numel()
        for key in keys:
            count = int(self.graph.shape(key)[1])
            if count == 1 and heads > 1:
                continue  # one head that all share
            sets = [units.union(part) for part in placement.labels.reshape(count, -1).tolist()]
            if any(s is None for s in sets):
                raise AxisError(op, f"every unit reads every key of {op.name}")
            found[key] = Placement(1, torch.tensor(sets, dtype=torch.int64))
        for name in ("mask", "attn_mask"):
            mask = _given(op, name)
            if is_tensor(mask) and len(self.graph.shape(mask)) == 4 and self.graph.shape(mask)[1] == heads:  # type: ignore
                if self.trains(mask):  # type: ignore[arg-type]
                    found[mask] = placement  # type: ignore[index]
                else:
                    self.region.cut[op] = mask  # type: ignore[assignment]
        sinks = _given(op, "sinks")
        if is_tensor(sinks):
            found[sinks] = Placement(0, placement.labels)  # type: ignore[index]
        return found

    def trains(self, value: fx.Node) -> bool:
        """Whether a value is made of weights (as a bias of positions may be), and not of numbers alone (alibi)."""
        seen, stack = set(), [value]
        while stack:
            node = stack.pop()
            if node in seen or op_name(node) in _MASKS or not is_tensor(node):
                continue
            seen.add(node)
            if self.graph.weight(node) is not None:
                return True
            stack.extend(node.all_input_nodes)
        return False

    def canonical(self, op: fx.Node) -> tuple[str, dict[fx.Node, Placement]]:
        placed = self.region.placed
        name = op_name(op)
        if name in _ATTENTIONS:
            return ATTENTION, self.attention(op)
        if op.target is ROPE.op:
            x: Any = op.args[0]
            placement = placed.get(op) or placed.get(x)
            if placement is None or placement.dim in (0, 3):
                raise AxisError(op, f"{op.name} would be split along its features")
            return CANONICAL, {op: placement, x: placement}
        if name == "cache_append":
            leaves = {place[1]: leaf for place, leaf in results(op) if len(place) == 2}
            found = {}
            for index, tensor in enumerate(op.args[1]):  # type: ignore[arg-type]
                leaf = leaves.get(index)
                for a, b in ((tensor, leaf), (leaf, tensor)):
                    if a in placed and b is not None:
                        found[b] = placed[a]
            return CANONICAL, found
        return CANONICAL, self.by_axes(op, base.REGISTRY[op.target])

    def by_axes(self, op: fx.Node, info: base.OpInfo) -> dict[fx.Node, Placement]:
        """Any other canonical op: tensors that share a logical axis share its placement.

        Groups of B and C belong to the units of the heads that read them.
        """
        forms = forms_of(self.graph, op, info)
        placed, units = self.region.placed, self.region.units
        known = next((n for n in forms if n in placed and not units.all_common(placed[n].labels)), None)
        if known is None:
            return {}
        placement = placed[known]
        axis = forms[known][placement.dim]
        if axis not in ("heads", "channels", "groups"):
            raise AxisError(op, f"{op.name} would be split along {axis}")
        if axis == "groups":
            return {}  # its heads say more, and they are always reached
        found = {}
        for node, form in forms.items():
            if axis in form:
                found[node] = Placement(form.index(axis), placement.labels)
            elif axis == "heads" and "groups" in form:
                dim = form.index("groups")
                count = int(self.graph.shape(node)[dim])
                sets = [units.union(part) for part in placement.labels.reshape(count, -1).tolist()]
                if all(s is not None for s in sets):
                    found[node] = Placement(dim, torch.tensor(sets, dtype=torch.int64))
        return found

    def create(self, op: fx.Node) -> dict[fx.Node, Placement]:
        """A new tensor, or a write into one: it has the placement of what is written."""
        inputs = tensor_inputs(op)
        source = next((n for n in (op, *inputs) if n in self.region.placed), None)
        return {} if source is None else dict.fromkeys((op, *inputs), self.region.placed[source])


def is_grouped(node: fx.Node) -> bool:
    """Whether a node is a product of groups of rows, each with a weight of its own."""
    return is_tensor(node) and (name_of(node) == "grouped_mm" or op_name(node) == "grouped_mm_fallback")


def picks_rows(graph: Graph, op: fx.Node) -> bool:
    """Whether a node is ``weight[numbers]`` with a tensor of row numbers."""
    if op.op != "call_function" or op.target is not operator.getitem or graph.weight(op.args[0]) is None:
        return False
    index = op.args[1]
    return is_tensor(index) and not graph.value(index).is_floating_point() and graph.value(index).dtype != torch.bool


def forms_of(graph: Graph, op: fx.Node, info: base.OpInfo) -> dict[fx.Node, tuple[str, ...]]:
    """The logical axes of a canonical op's tensors and results."""
    found: dict[fx.Node, tuple[str, ...]] = {}
    for spec in op.target._schema.arguments:  # type: ignore[union-attr]
        node = argument(op, spec.name)
        if not is_tensor(node) or spec.name not in info.axes:
            continue
        rank = len(graph.shape(node))  # type: ignore[arg-type]
        form = info.axes[spec.name]
        other = _OTHER_FORMS.get(info.name, {}).get(spec.name)
        form = other if other is not None and len(other) == rank else form
        found[node] = _whole(form, rank)  # type: ignore[index]
    for place, leaf in results(op):
        name = "out" if not place and "out" in info.axes else f"out{place[0] if place else 0}"
        found[leaf] = _whole(info.axes[name], len(graph.shape(leaf)))
    return found


def _whole(form: tuple[str, ...], rank: int) -> tuple[str, ...]:
    """``("...", "channels")`` with as many axes as there are."""
    return (*(f"axis {i}" for i in range(rank - len(form) + 1)), *form[1:]) if form[0] == "..." else form


def _given(op: fx.Node, name: str) -> Any:
    if hasattr(op.target, "_schema"):
        try:
            return argument(op, name)
        except KeyError:
            return None
    names = ("query", "key", "value", "attn_mask", "dropout_p")
    return (dict(zip(names, op.args, strict=False)) | dict(op.kwargs)).get(name)


def op_name(op: fx.Node) -> str:
    """The name of a canonical op, without namespace and overload."""
    return getattr(op.target, "_opname", "")


def attention_operands(op: fx.Node) -> tuple[fx.Node, list[fx.Node], list[fx.Node]]:
    """Of an attention: the queries, the keys and values that have heads, and further tensors with query heads."""
    name = name_of(op) if not hasattr(op.target, "_schema") else op.target._opname  # type: ignore[union-attr]
    first = {"attention": "q", "latent_attention": "q_latent"}.get(name, "query")
    keys = [n for n in (_given(op, key) for key in _KEYS[name]) if n is not None]
    rest = [_given(op, "q_rope")] if name == "latent_attention" and _given(op, "q_rope") is not None else []
    return _given(op, first), keys, rest


def grow(graph: Graph, units: Units, seeds: dict[fx.Node, Placement]) -> Region:
    """The region around the seeds.

    Raises:
        AxisError: units cannot be followed to weights on every side; it names the node.
    """
    growth = _Growth(graph, units)
    for node, placement in seeds.items():
        growth.put(node, placement)
    return growth.run()
