"""The collectives of a graph in order, what they send, and the check that all ranks agree on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from latentscan.ir.errors import MeshError
from latentscan.ir.graph import Graph, module_path
from latentscan.ir.mesh import Mesh
from latentscan.ir.ops import collectives as ops
from latentscan.ir.ops import exchange
from latentscan.ir.ops import state_exchange as states
from latentscan.ir.ops.sequence import SEQUENCE
from latentscan.ir.sizes import expression

# function -> what it sends in the forward and in the backward pass
_TOKENS = {
    "gather_tokens": ("all_gather", "reduce_scatter"),
    "scatter_tokens": ("reduce_scatter", "all_gather"),
    "unshard_tokens": ("all_gather", ""),
    "shard_tokens": ("", "all_gather"),
}


@dataclass(frozen=True)
class Collective:
    """One communication of one node.

    Attributes:
        name: of the primitive: all_reduce, all_gather, reduce_scatter, all_to_all or send (to the next rank).
        phase: forward or backward.
        axis: the mesh axis.
        elements: of the value that is reduced, or of one rank's (padded) part; a sympy expression. dtype: of it.
        caller, module, node: where it comes from.
    """

    name: str
    phase: str
    axis: str
    elements: sympy.Expr
    dtype: torch.dtype
    caller: str
    module: str
    node: str

    def sent(self, size: int) -> sympy.Expr:
        """Bytes that leave one of ``size`` ranks, by ring algorithms."""
        payload = self.elements * self.dtype.itemsize
        part = sympy.Rational(size - 1, size)
        times = {"all_reduce": 2 * part, "all_to_all": part, "send": sympy.Integer(1)}
        return payload * times.get(self.name, size - 1)  # the others: elements are those of one part

    def key(self) -> tuple[str, ...]:
        """What has to be the same on every rank."""
        return self.name, self.phase, self.axis, str(self.elements), str(self.dtype), self.module


def collectives(graph: Graph) -> list[Collective]:
    """All communications: those of the forward pass in the graph's order, then the backward pass's (if the graph
    trains), which autograd runs from the last node to the first."""
    nodes = [n for n in graph.nodes if n.target in (*ops.COLLECTIVES, *SEQUENCE, *_EXCHANGES, *states.STATES)]
    forward = [c for n in nodes for c in _of(graph, n, "forward")]
    backward = [c for n in reversed(nodes) for c in _of(graph, n, "backward")] if graph.training else []
    return forward + backward


# exchange -> (primitive forward, primitive backward, place of the axis among the arguments)
_EXCHANGES: dict[Any, tuple[str, str, int]] = {
    exchange.tail_start: ("send", "send", -4),
    exchange.edge_ids: ("all_gather", "", -3),
    exchange.gather_tokens: ("all_gather", "", -3),
    exchange.gather_shared: ("all_gather", "reduce_scatter", -3),
    exchange.to_heads: ("all_to_all", "all_to_all", -3),
    exchange.to_tokens: ("all_to_all", "all_to_all", -3),
    exchange.sum_partial: ("all_reduce", "", -2),
}


def _of_states(graph: Graph, node: fx.Node, phase: str) -> list[Collective]:
    """What the exchange of a scan's states sends; see :mod:`latentscan.ir.ops.state_exchange`."""
    at = next((i for i, a in enumerate(node.args) if a in states.ALGORITHMS), None)
    if at is None or node.target is states.entering_state or node.target is states.decays_of:
        return []
    algorithm, axis, size = node.args[at : at + 3]  # type: ignore[misc]
    again = states.steps_of(size) - 1  # type: ignore[arg-type]
    names: dict[tuple[str, Any], list[str]] = {
        ("forward", states.state_start): ["all_gather"],
        ("backward", states.scan_leave): ["reduce_scatter"],
    }
    if algorithm == "log-scan":
        whole = ["all_reduce"] if node.target is states.scan_leave and node.args[1] is not None else []
        names = {
            ("forward", states.state_start): ["send"],
            ("forward", states.state_wait): ["send"] * again,
            ("forward", states.whole_state): ["all_reduce"],
            ("backward", states.scan_leave): ["send", *whole],
            ("backward", states.scan_enter): ["send"] * again,
        }
    if node.target in (states.scan_enter, states.scan_leave):
        rows, heads, width, d_state = (
            graph.value(node.args[9]).shape if node.target is states.scan_leave  # type: ignore[arg-type]
            else (*graph.shape(node.args[0])[:1], *graph.shape(node.args[0])[2:], graph.shape(node.args[3])[3])  # type: ignore
        )  # fmt: skip
        dtype = torch.float64 if graph.value(node.args[0]).dtype == torch.float64 else torch.float32  # type: ignore
        state = _count((rows, heads, width, d_state))
    else:
        message = graph.value(node.args[1 if node.target is states.whole_state else 0])  # type: ignore[arg-type]
        message = graph.value(node.args[1]) if node.target is states.state_wait else message  # type: ignore[arg-type]
        state, dtype = _count(message.shape), message.dtype
        rows, heads = 0, 0
    made = []
    for name in names.get((phase, node.target), []):
        elements = state
        if node.target in (states.scan_enter, states.scan_leave) and name == "send":  # with the decays
            elements = state + _count((rows, heads))
        where = module_path(node)
        made.append(Collective(name, phase, str(axis), elements, dtype, node.target.__name__, where, node.name))  # type: ignore
    return made


def _of(graph: Graph, node: fx.Node, phase: str) -> list[Collective]:
    if node.target in states.STATES:
        return _of_states(graph, node, phase)
    x, target = graph.value(node.args[0]), node.target
    if target in _EXCHANGES:
        name, back, at = _EXCHANGES[target]
        name = name if phase == "forward" else back
        size = _count(graph.value(node).shape if target is exchange.tail_start else x.shape)
        made = Collective(name, phase, str(node.args[at]), size, x.dtype, target.__name__, module_path(node), node.name)
        return [made] if name else []
    size, dtype = _count(x.shape), x.dtype
    name = "all_reduce"
    if target is ops.gather_last:
        if phase == "backward":
            return []
        name, size = "all_gather", _count(x.shape[:-1]) * max(node.args[1])  # type: ignore[arg-type]
    elif (target is ops.copy_to) == (phase == "forward") and target in (ops.copy_to, ops.reduce_from, ops.embed_rows):
        return []
    elif target is ops.embed_rows:
        value = graph.value(node)
        size, dtype = _count(value.shape), value.dtype
    elif target is ops.share_rows:
        if phase == "forward":
            return []
        dim, total = node.args[1:3]
        size = sympy.Integer(total) * _count([s for i, s in enumerate(x.shape) if i != dim])  # type: ignore[arg-type]
    elif target in SEQUENCE:
        name = _TOKENS[target.__name__][phase == "backward"]  # type: ignore[union-attr]
        if not name:
            return []
        part = x if target.__name__ in ("gather_tokens", "unshard_tokens") else graph.value(node)  # type: ignore[union-attr]
        size = _count(part.shape)
    elif target is ops.split_gated_norm:
        size, dtype = _count(x.shape[:-1]) * node.args[6], torch.float32  # type: ignore[operator]
    return [Collective(name, phase, str(node.args[-2]), size, dtype, target.__name__, module_path(node), node.name)]  # type: ignore


def _count(shape: Sequence[Any]) -> sympy.Expr:
    return sympy.Mul(*(expression(s) for s in shape))


def check_order(orders: Mapping[int, Sequence[tuple[str, ...]]], axis: str) -> None:
    """Raise MeshError unless every rank issues the same collectives in the same order.

    Args:
        orders: rank -> keys (:meth:`Collective.key`) in order.
    """
    first, reference = next(iter(orders.items()))
    for rank, mine in orders.items():
        for number, (a, b) in enumerate(zip(reference, mine, strict=False)):
            if tuple(a) != tuple(b):
                raise MeshError(
                    f"collective {number} of rank {rank} is {_text(b)}, of rank {first} {_text(a)}: they would wait "
                    "for each other for ever",
                    where=f"axis {axis}",
                    remedy="give every rank the same model, inputs of the same shape, and the same mode",
                )
        if len(mine) != len(reference):
            odd = (mine if len(mine) > len(reference) else reference)[min(len(mine), len(reference))]
            raise MeshError(
                f"rank {rank} issues {len(mine)} collectives, rank {first} {len(reference)}; the first one without a "
                f"partner is {_text(odd)}",
                where=f"axis {axis}",
                remedy="give every rank the same model, inputs of the same shape, and the same mode",
            )


def _text(key: Sequence[str]) -> str:
    name, phase, _, elements, dtype, module = key
    size = f" of {elements} {dtype}" if elements else ""
    return f"{name}{size} in the {phase} pass at {module or 'the model itself'}"


def ranks_to_try(mesh: Mesh, axis: str, most: int = 8) -> list[int]:
    """Ranks of an axis that between them have every kind of share: the first and last ones, and some between."""
    size = mesh.axis(axis).size
    if size <= most:
        return list(range(size))
    return sorted({0, 1, size - 2, size - 1, *(size * i // (most - 3) for i in range(1, most - 3))})
