"""The borders of a region that a rank computes a part of: copies in and sums out, both where least is sent."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from latentscan.ir.axes import is_tensor, name_of, tensor_inputs
from latentscan.ir.graph import VALUE, Graph
from latentscan.ir.layout import is_layout
from latentscan.ir.mesh import Axis
from latentscan.ir.ops.collectives import copy_to, reduce_from

_MOVES = {
    "view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "transpose", "contiguous", "repeat_interleave",
}  # fmt: skip
_CASTS = {"to", "type_as", "float", "type", "half", "bfloat16"}


def takes_rows(node: fx.Node) -> bool:
    """Whether a node is ``value[numbers]`` with whole numbers in a tensor."""
    if node.op != "call_function" or node.target is not operator.getitem or not is_tensor(node.args[0]):
        return False
    index: Any = node.args[1]
    return is_tensor(index) and index.meta[VALUE].dtype in (torch.int64, torch.int32)


def moves(node: fx.Node) -> bool:
    """Whether a node takes rows of its first argument, repeats, rearranges or casts it: a linear map."""
    if node.op not in ("call_function", "call_method") or not is_tensor(node) or not node.args:
        return False
    if not is_tensor(node.args[0]) or takes_rows(node):
        return takes_rows(node)
    if name_of(node) in _CASTS:
        return node.meta[VALUE].is_floating_point() and node.args[0].meta[VALUE].is_floating_point()  # type: ignore
    return name_of(node) in _MOVES and is_layout(node) and len(tensor_inputs(node)) == 1


class Borders:
    """Collectives at the border of a region.

    Args:
        gradients: the values that may want a gradient.
    """

    def __init__(self, graph: Graph, axis: Axis, maker: str, gradients: set[fx.Node]) -> None:
        self.graph, self.axis, self.maker, self.gradients = graph, axis, maker, gradients
        self.copies: dict[fx.Node, fx.Node] = {}

    def enter(self, op: fx.Node, entry: fx.Node, *, lift: bool = False) -> None:
        """Let a node read a value that all ranks hold, such that its gradient is summed over them.

        Args:
            lift: sum the gradient of what the entry was made of, which may be smaller (a token for its experts).
        """
        if entry in self.gradients:
            op.replace_input_with(entry, self._copy(op, entry, lift))

    def _copy(self, op: fx.Node, entry: fx.Node, lift: bool) -> fx.Node:
        if entry in self.copies:
            return self.copies[entry]
        if lift and moves(entry) and entry.args[0] in self.gradients:
            source: Any = entry.args[0]
            copy = self._copy(op, source, lift)
            with self.graph.graph.inserting_before(op):
                made = self.graph.graph.node_copy(entry, lambda n: copy if n is source else n)
            made.meta = dict(entry.meta)
        else:
            here = self.axis.name, self.axis.group
            known = (n for n in entry.users if n.target is copy_to and n.args[1:] == here and n < op)
            made = next(known, None)  # another region's
            if made is None:
                with self.graph.before(op, self.maker):
                    made = self.graph.call(copy_to, entry, *here)
        self.copies[entry] = made
        return made

    def leave(self, partial: fx.Node) -> fx.Node:
        """Sum a value over the ranks and let its readers read the sum.

        Where one reader after the other only moves, weights and at last adds up parts of it (what a token's experts
        gave), the sum over the ranks comes behind these.
        """
        end, factors = self._end(partial)
        for op, factor in factors:
            self.enter(op, factor, lift=True)
        with self.graph.after(end, self.maker):
            total = self.graph.call(reduce_from, end, self.axis.name, self.axis.group)
        end.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
        return total

    def _end(self, partial: fx.Node) -> tuple[fx.Node, list[tuple[fx.Node, fx.Node]]]:
        at, added, factors = partial, False, []
        while len(at.users) == 1:
            (user,) = at.users
            others = [a for a in user.args if isinstance(a, fx.Node) and a is not at]
            name = name_of(user)
            if moves(user) and user.args[0] is at:
                pass
            elif name == "mul" and is_tensor(user) and len(others) == 1 and len(user.args) == 2:
                factors += [(user, n) for n in others if is_tensor(n)]
            elif name == "sum" and user.args[0] is at and is_tensor(user):
                added = True
            else:
                break
            at = user
        return (at, factors) if added else (partial, [])


__all__ = ["Borders", "moves", "takes_rows"]
