"""Weights that only outputs read which nobody reads get no gradient from a compiled graph, as they get none in eager.

AOTAutograd takes a gradient that did not come for one of zeros, and sends zeros to every weight. The optimiser would
then decay weights that a step has nothing to do with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from latentscan.ir.graph import written_by

Places = frozenset[int]


def without_unread(run: Callable[..., Any], graph: fx.Graph) -> Callable[..., Any]:
    """``run`` with that mended.

    Args:
        run: what a compiler made of a graph: called with the placeholders' values, in order, it gives its outputs.
        graph: the graph. If all outputs read the same, or something in it writes in place, ``run`` is given back.
    """
    reads = read_by(graph)
    module = graph.owning_module
    parts = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)] if module is not None else [graph]
    if len(set(reads)) < 2 or any(written_by(n) is not None for part in parts for n in part.nodes):
        return run

    def watched(*args: Any) -> Any:
        found = run(*args)
        if torch.is_grad_enabled() and isinstance(found, (tuple, list)):
            _watch(found, args, reads)
        return found

    return watched


def read_by(graph: fx.Graph) -> list[Places]:
    """For each output the places of the placeholders that it is computed from; nothing for what is no tensor."""
    places = {n: frozenset((i,)) for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    found: dict[fx.Node, Places] = {}
    for node in graph.nodes:
        if node.op == "output":
            given = node.args[0]
            outputs = given if isinstance(given, (tuple, list)) else (given,)
            return [found[n] if isinstance(n, fx.Node) else frozenset() for n in outputs]
        found[node] = places.get(node, frozenset()).union(*(found[n] for n in node.all_input_nodes))
    return []


def _watch(outputs: Sequence[Any], args: Sequence[Any], reads: Sequence[Places]) -> None:
    """Have the backward of the outputs, which is one call, leave out what only outputs without a gradient read."""
    call: Any = None
    known: dict[int, Places] = {}  # number of a result of the call -> what it is computed from
    for value, places in zip(outputs, reads, strict=True):
        if not isinstance(value, torch.Tensor) or value.grad_fn is None:
            continue
        call = value.grad_fn if call is None else call
        if value.grad_fn is not call:  # a view that was made afterwards
            return
        known[value.output_nr] = known.get(value.output_nr, frozenset()) | places
    if len(set(known.values())) < 2:
        return
    place = {id(a): i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_leaf}
    leaves = [place.get(id(getattr(source, "variable", None))) for source, _ in call.next_functions]
    call.register_hook(partial(_leave_out, known, leaves))


def _leave_out(
    known: dict[int, Places], leaves: Sequence[int | None], sent: Sequence[Any], came: Sequence[Any]
) -> tuple[Any, ...] | None:
    """The gradients that are sent on, given those that came; None leaves them as they are."""
    some = {number for number, gradient in enumerate(came) if gradient is not None}
    if len(sent) != len(leaves) or some.issuperset(known) or not some.issubset(known):
        return None
    live = frozenset().union(*(known[number] for number in some))
    return tuple(g if leaf is None or leaf in live else None for g, leaf in zip(sent, leaves, strict=True))
