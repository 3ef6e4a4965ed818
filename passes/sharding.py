"""Rewriting one region for one rank: local weights, local sizes, and collectives at its borders."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from latentscan.ir.axes import SPLITS, execute, item, name_of, numbered, results
from latentscan.ir.errors import VerifyError
from latentscan.ir.graph import LOCAL, PRODUCED_BY, VALUE, Graph, module_path
from latentscan.ir.layout import SmallNumbers
from latentscan.ir.mesh import Axis
from latentscan.ir.mla import argument
from latentscan.ir.ops.collectives import share_rows, split_gated_norm
from latentscan.ir.region import (
    ATTENTION,
    CANONICAL,
    COLUMN,
    CONTRACT,
    CREATE,
    LAYOUT,
    ROW,
    SCANS,
    Region,
    attention_operands,
    op_name,
)
from latentscan.ir.weights import Recipe
from latentscan.passes.borders import Borders
from latentscan.passes.shards import column_recipe, row_recipe, weight_recipe

_SHAPED = {"view", "reshape", "expand", "new_empty", "new_zeros"}


def differentiable(graph: Graph) -> set[fx.Node]:
    """Nodes whose value depends on something that may want a gradient."""
    found: set[fx.Node] = set()
    if not graph.training:
        return found
    for node in graph.graph.nodes:
        value = node.meta.get(VALUE)
        if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
            continue
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            weight = graph.weight(node)
            ours = any(a.placeholder == node.name for a in graph.added)
            if ours or (value.requires_grad if weight is None else weight.value.requires_grad):
                found.add(node)
        elif name_of(node) != "detach" and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def lone_biases(graph: Graph, region: Region) -> bool:
    """Whether the bias of a sum over the ranks trains and its weight does not.

    On the first rank alone, as a bias of a sum otherwise is, it would be the only thing there that wants a gradient:
    the other ranks' backward passes might not send what the first waits for. So every rank holds it.
    """
    for op in region.ops(ROW):
        linear = region.linears[op]
        if linear.bias is None:
            continue
        weight, bias = graph.weight(linear.weight), graph.weight(linear.bias)
        if weight is not None and bias is not None and bias.value.requires_grad and not weight.value.requires_grad:
            return True
    return False


def add_parts(graph: Graph, recipe: Recipe) -> list[fx.Node]:
    """Placeholders for a rank's parts of weights."""
    weights = [graph.weight_at(path) for path in recipe.sources]
    values = [graph.value(graph.node(w.placeholder)) for w in weights if w is not None]
    return graph.add_weights(recipe, [v.new_empty(s) for v, s in zip(values, recipe.keep["shapes"], strict=False)])


class Split:
    """One region as one rank of an axis computes it.

    Args:
        maker, site: the pass and the module, for provenance and recipes.
        whole_biases: whether all ranks hold the biases of sums, and add them behind the sum (see :func:`lone_biases`).
    """

    def __init__(
        self, graph: Graph, region: Region, axis: Axis, maker: str, site: str, *, whole_biases: bool = False
    ) -> None:
        self.graph, self.region, self.axis, self.maker, self.site = graph, region, axis, maker, site
        self.whole_biases = whole_biases
        self.behind: dict[fx.Node, fx.Node] = {}  # sum -> the bias that is added behind it
        self.small = SmallNumbers()
        self.gradients = differentiable(graph)
        self.borders = Borders(graph, axis, maker, self.gradients)

    def own(self, node: fx.Node) -> list[int]:
        """The indices of a placed value that this rank holds."""
        return self.region.units.owned(self.region.placed[node].labels, self.axis.size, self.axis.rank)

    def run(self) -> None:
        ops = self.region.ops()
        for op in ops:
            for entry in self.region.entries(op):
                self.enter(op, entry)
        for op in self.region.ops(LAYOUT):  # while their inputs are still the whole weights
            self.localize(op)
        for weight in self.region.weights(self.graph):
            self.split_weight(weight)
        for op in ops:
            role = self.region.roles[op]
            if role == COLUMN:
                self.split_column(op)
            elif role == ROW:
                self.split_row(op)
            elif role == CREATE:
                self.local_size(op)
            elif role == ATTENTION:
                keys = attention_operands(op)[1]
                self.match_heads(op, op, list(dict.fromkeys(keys)), 1)
                if op in self.region.cut:
                    self.cut_mask(op, self.region.cut[op])
            elif role == CANONICAL and op_name(op) in SCANS:
                heads = next(leaf for place, leaf in results(op) if place == (0,))
                shared = [argument(op, "B"), argument(op, "C")]
                self.match_heads(op, heads, shared, len(self.graph.shape(shared[0])) - 2)  # type: ignore[arg-type]
            elif role == CANONICAL and op_name(op) == "gated_rms_norm":
                self.split_norm(op)
        self.evaluate(ops)
        for op in self.region.ops(ROW, CONTRACT):
            self.reduce(op)

    # -- borders ----------------------------------------------------------------------------------------------------

    def enter(self, op: fx.Node, entry: fx.Node) -> None:
        """Let a node read a value that all ranks hold, such that its gradient is summed over them."""
        self.borders.enter(op, entry, lift=bool(self.region.ops(CONTRACT)))

    def reduce(self, op: fx.Node) -> None:
        total = self.borders.leave(op)
        bias = self.behind.get(op)
        if bias is None:
            return
        if total.args[0] is not op:
            raise VerifyError(f"the bias of {op.name} is scaled before it is summed over the ranks", where=self.site)
        dtype = self.graph.value(op).dtype
        with self.graph.after(total, self.maker):
            if self.graph.value(bias).dtype != dtype:  # under autocast
                bias = self.graph.method("to", bias, dtype)
            made = self.graph.call(torch.add, total, bias)
        total.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)

    # -- weights ----------------------------------------------------------------------------------------------------

    def shared(self, weight: fx.Node, dim: int, labels: torch.Tensor, op: fx.Node) -> fx.Node:
        """A split weight as a node may read it: rows that other ranks hold too get the sum of their gradients."""
        held = self.region.units.held(labels, self.axis.size)
        if not self.graph.training or sum(map(len, held)) == labels.numel():
            return weight
        holders = Counter(row for rows in held for row in rows)
        place = {row: i for i, row in enumerate(r for r in sorted(holders) if holders[r] > 1)}
        here = [(place[row], i) for i, row in enumerate(held[self.axis.rank]) if row in place]
        own, rows = [a for a, _ in here], [i for _, i in here]
        with self.graph.before(op, self.maker):
            return self.graph.call(share_rows, weight, dim, len(place), own, rows, self.axis.name, self.axis.group)

    def split_column(self, op: fx.Node) -> None:
        linear, labels = self.region.linears[op], self.region.placed[op].labels
        held = self.region.units.held(labels, self.axis.size)
        dim = 1 if linear.transposed else 0
        sources = [self.graph.weight(n) for n in (linear.weight, linear.bias) if n is not None]
        recipe = column_recipe(sources, dim, held, self.axis, self.maker, self.site)  # type: ignore[arg-type]
        nodes = add_parts(self.graph, recipe)
        op.replace_input_with(linear.weight, self.shared(nodes[0], dim, labels, op))
        if linear.bias is not None:
            op.replace_input_with(linear.bias, self.shared(nodes[1], 0, labels, op))

    def split_row(self, op: fx.Node) -> None:
        linear, labels = self.region.linears[op], self.region.placed[self.region.linears[op].x].labels
        held = self.region.units.held(labels, self.axis.size)
        if self.whole_biases and linear.bias is not None:
            self.behind[op] = linear.bias
        split = (linear.weight,) if op in self.behind else (linear.weight, linear.bias)
        sources = [self.graph.weight(n) for n in split if n is not None]
        dim = 0 if linear.transposed else 1
        recipe = row_recipe(sources, dim, held, self.axis, self.maker, self.site)  # type: ignore[arg-type]
        nodes = add_parts(self.graph, recipe)
        op.replace_input_with(linear.weight, nodes[0])
        if linear.bias is None:
            return
        if len(nodes) > 1:  # the first rank's: added once, before the sum
            op.replace_input_with(linear.bias, nodes[1])
        elif linear.transposed:  # addmm(bias, x, weight)
            op.target, op.args, op.kwargs = torch.mm, tuple(op.args[1:]), {}
        else:
            op.args = tuple(None if a is linear.bias else a for a in op.args)
            op.kwargs = {k: None if v is linear.bias else v for k, v in op.kwargs.items()}

    def split_weight(self, node: fx.Node) -> None:
        """A weight that is no linear map's, such as one number a head."""
        placement, weight = self.region.placed[node], self.graph.weight(node)
        held = self.region.units.held(placement.labels, self.axis.size)
        recipe = weight_recipe(weight, placement.dim, held, self.axis, self.maker, self.site)  # type: ignore[arg-type]
        (new,) = add_parts(self.graph, recipe)
        for user in list(node.users):
            user.replace_input_with(node, self.shared(new, placement.dim, placement.labels, user))

    # -- nodes inside -------------------------------------------------------------------------------------------------

    def match_heads(self, op: fx.Node, heads: fx.Node, keys: Sequence[Any], dim: int) -> None:
        """Repeat key heads (or groups of B and C) where the rank's heads do not share them evenly.

        Args:
            heads: a value with one unit label a head. keys: what is shared, along ``dim``.
        """
        mine = self.own(heads)
        total = self.region.placed[heads].labels.numel()
        for key in keys:
            if key not in self.region.placed:
                continue
            held = self.own(key)
            group = total // self.region.placed[key].labels.numel()
            reads = [held.index(h // group) for h in mine]
            each = max(1, len(mine) // len(held))
            if len(mine) % len(held) == 0 and reads == [i // each for i in range(len(mine))]:
                continue
            with self.graph.before(op, self.maker):
                index = (*[slice(None)] * dim, reads)
                repeated = self.graph.graph.call_function(operator.getitem, (key, index))
                repeated.meta = {**op.meta, VALUE: None, PRODUCED_BY: self.maker}
            op.replace_input_with(key, repeated)
            self.repeated.append(repeated)

    def cut_mask(self, op: fx.Node, mask: fx.Node) -> None:
        """Let an attention read its own heads' part [b, heads, q, k] of a mask that all ranks make."""
        own = self.own(op)
        with self.graph.before(op, self.maker):
            index = (slice(None), slice(own[0], own[-1] + 1))
            part = self.graph.graph.call_function(operator.getitem, (mask, index))
            part.meta = {**op.meta, VALUE: None, PRODUCED_BY: self.maker}
        op.replace_input_with(mask, part)
        self.repeated.append(part)

    def split_norm(self, op: fx.Node) -> None:
        """Leave a gated norm as it is if each of its groups is on one rank; else sum squares over the ranks."""
        labels = self.region.placed[op].labels
        size, total = int(argument(op, "group_size")), labels.numel()  # type: ignore[call-overload]
        held = self.region.units.held(labels, self.axis.size)
        count = total // size
        at = [{rank for rank, h in enumerate(held) for i in h if i // size == g} for g in range(count)]
        if all(len(ranks) == 1 for ranks in at):
            return
        z = argument(op, "z")
        groups = [i // size for i in held[self.axis.rank]]
        weight, eps, before = (argument(op, name) for name in ("weight", "eps", "norm_before_gate"))
        op.args = (op.args[0], z, weight, eps, size, groups, count, before, self.axis.name, self.axis.group)  # type: ignore
        op.target, op.kwargs = split_gated_norm, {}

    def local_size(self, op: fx.Node) -> None:
        """A new tensor of this rank's size."""
        if name_of(op) == "zeros" and op in self.region.placed:
            shape = list(op.args[0])  # type: ignore[arg-type]
            shape[self.region.placed[op].dim] = len(self.own(op))
            op.args = (tuple(shape), *op.args[1:])
        elif name_of(op) in ("new_zeros", "new_empty"):
            self._local_shape(op, op, name_of(op))

    @property
    def repeated(self) -> list[fx.Node]:
        return self.__dict__.setdefault("_repeated", [])

    def localize(self, op: fx.Node) -> None:
        """Give a layout node the sizes of this rank, and check by execution that it moves the right elements."""
        inputs = numbered(self.graph, op, self.small)
        leaves = results(op)
        before = execute(op, self.small, inputs)
        self._local_arguments(op)
        mine = {n: self._select(n, ids) for n, ids in inputs.items()}
        try:
            after = execute(op, self.small, mine)
            right = all(
                torch.equal(item(after, place), self._select(leaf, item(before, place))) for place, leaf in leaves
            )
        except (RuntimeError, IndexError, ValueError) as error:
            raise VerifyError(f"{op.name} does not run on a rank's part: {error}", where=module_path(op)) from error
        if not right:
            raise VerifyError(f"{op.name} moves other elements on a rank's part", where=module_path(op))

    def _select(self, node: fx.Node, ids: torch.Tensor) -> torch.Tensor:
        if node not in self.region.placed:
            return ids
        return ids.index_select(self.region.placed[node].dim, torch.tensor(self.own(node)))

    def _local_arguments(self, op: fx.Node) -> None:
        placed = self.region.placed
        leaves = [leaf for _, leaf in results(op)]
        name = name_of(op)
        if name in _SHAPED | {"unflatten"} and leaves[0] in placed:
            self._local_shape(op, leaves[0], name)
        source: Any = op.args[0]
        if not isinstance(source, fx.Node) or source not in placed:
            return
        dim, rank = placed[source].dim, len(self.graph.shape(source))
        given = op.kwargs.get("dim", op.args[2] if len(op.args) > 2 and op.target in SPLITS else None)
        if op.target in SPLITS:
            along = 0 if given is None else int(given)  # type: ignore[call-overload]
            if along % rank == dim:
                parts = self._sections(op, source, dim)
                op.target = "split" if op.op == "call_method" else torch.split
                op.args, op.kwargs = (source, parts), {"dim": dim}
        elif op.target is operator.getitem:
            op.args = (source, self._local_index(op, op.args[1], dim, rank))
        elif name == "narrow":
            where, start, length = (int(a) for a in op.args[1:])  # type: ignore[arg-type, call-overload]
            if where % rank == dim:
                start, stop = self._bounds(source, start, start + length)
                op.args = (source, dim, start, stop - start)

    def _bounds(self, source: fx.Node, start: int, stop: int) -> tuple[int, int]:
        own = self.own(source)
        return sum(i < start for i in own), sum(i < stop for i in own)

    def _sections(self, op: fx.Node, source: fx.Node, dim: int) -> list[int]:
        """The sizes into which a split cuts this rank's part."""
        pieces = execute(op, self.small, {source: self._small_ids(source)})
        edges, found = 0, []
        for piece in pieces:
            start, stop = self._bounds(source, edges, edges + piece.shape[dim])
            found.append(stop - start)
            edges += piece.shape[dim]
        return found

    def _small_ids(self, node: fx.Node) -> torch.Tensor:
        return torch.empty([self.small(s) for s in self.graph.shape(node)], dtype=torch.int8)

    def _local_index(self, op: fx.Node, index: Any, dim: int, rank: int) -> Any:
        parts = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in parts:
            at = parts.index(Ellipsis)
            missing = rank - sum(p is not None and p is not Ellipsis for p in parts)
            parts[at : at + 1] = [slice(None)] * missing
        at = -1
        for position, part in enumerate(parts):
            at += part is not None
            if part is None or at != dim:
                continue
            if not isinstance(part, slice):
                raise VerifyError(f"{op.name} picks single indices along the units", where=module_path(op))
            if part != slice(None):
                source: Any = op.args[0]
                start, stop, step = part.indices(int(self.graph.shape(source)[dim]))
                mine = [i for i, own in enumerate(self.own(source)) if own in range(start, stop, step)]
                first = mine[0] if mine else 0
                step = mine[1] - first if len(mine) > 1 else 1
                parts[position] = slice(first, mine[-1] + 1 if mine else 0, None if step == 1 else step)
        return tuple(parts)

    def _local_shape(self, op: fx.Node, leaf: fx.Node, name: str) -> None:
        dim, count = self.region.placed[leaf].dim, len(self.own(leaf))
        args = list(op.args)
        first = 1
        if name == "unflatten":
            rank = len(self.graph.shape(op.args[0]))  # type: ignore[arg-type]
            dim, first = dim - int(args[1]) % rank, 2  # type: ignore[call-overload]
            if dim < 0 or dim >= len(args[2]):  # type: ignore[arg-type]
                return
        if isinstance(args[first], fx.Node) and args[first].target is torch.Size:  # type: ignore[union-attr]
            args[first] = args[first].args[0]  # type: ignore[union-attr]
        if isinstance(args[first], (tuple, list)):
            sizes = list(args[first])  # type: ignore[arg-type]
            if isinstance(sizes[dim], int) and sizes[dim] != -1:
                sizes[dim] = count
            args[first] = tuple(sizes)
        elif isinstance(args[first + dim], int) and args[first + dim] != -1:
            args[first + dim] = count
        op.args = tuple(args)

    def evaluate(self, ops: Sequence[fx.Node]) -> None:
        """Record the local shapes of everything inside, in order."""
        inside = {n for op in ops for n in (op, *(leaf for _, leaf in results(op)))} | set(self.repeated)
        inside |= {u for op in ops for u in op.users if u.target is operator.getitem}
        for node in self.graph.graph.nodes:
            if node in inside:
                if node in self.region.placed:
                    node.meta[LOCAL] = self.axis.name
                node.meta[VALUE] = self.graph.evaluate(node)
