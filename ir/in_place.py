"""Writes in place become values of their own, so that what reads a node reads what it is at that point."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from latentscan.ir.graph import VALUE, Graph

# Elementwise only: out of place they cost one more tensor, where the others (index_add_ in a loop) may cost many.
_METHODS = {
    "add_", "sub_", "mul_", "div_", "neg_", "pow_", "square_", "sqrt_", "rsqrt_", "exp_", "abs_", "tanh_", "sigmoid_",
    "relu_", "clamp_", "clamp_min_", "clamp_max_", "masked_fill_", "nan_to_num_",
}  # fmt: skip
_OPERATORS = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv, operator.ipow: operator.pow,
}  # fmt: skip
_FUNCTIONS = {torch.clamp_: torch.clamp, torch.relu_: torch.relu, torch.exp_: torch.exp, torch.tanh_: torch.tanh}


def _out_of_place(node: fx.Node) -> Any:
    """What computes the same without writing; None for what does not write, or is not known."""
    if node.op == "call_method" and node.target in _METHODS:
        return str(node.target)[:-1]
    if node.op == "call_function":
        return _OPERATORS.get(node.target) or _FUNCTIONS.get(node.target)  # type: ignore[arg-type]
    return None


def _storage(node: Any) -> Any:
    value = node.meta.get(VALUE) if isinstance(node, fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def functionalize_in_place(graph: Graph) -> int:
    """``x.clamp_(...)`` and its like become ``y = x.clamp(...)``, and what reads ``x`` later reads ``y``.

    Only where ``x`` was computed by the graph and nothing that shares its memory is read later. Other writes stay.

    Returns:
        how many were changed.
    """
    writes = [n for n in graph.graph.nodes if _out_of_place(n) is not None]
    changed = 0
    for node in writes:
        target, x = _out_of_place(node), node.args[0]
        place = _storage(x)
        if not isinstance(x, fx.Node) or place is None or x.op not in ("call_function", "call_method"):
            continue
        order = {n: i for i, n in enumerate(graph.graph.nodes)}
        sharing = [n for n in graph.graph.nodes if n is not x and order[n] < order[node] and _storage(n) == place]
        if any(n.op in ("placeholder", "get_attr") or any(order[u] > order[node] for u in n.users) for n in sharing):
            continue
        with graph.before(node, "normalize"):
            make = graph.method if isinstance(target, str) else graph.call
            new = make(target, *node.args, **node.kwargs)
        if not _alike(graph.value(new), graph.value(x)):
            graph.graph.erase_node(new)
            continue
        x.replace_all_uses_with(new, delete_user_cb=lambda u: order.get(u, -1) > order[node])  # noqa: B023
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
        changed += 1
    return changed


def _alike(new: Any, old: Any) -> bool:
    return isinstance(new, torch.Tensor) and new.dtype == old.dtype and new.dim() == old.dim()
