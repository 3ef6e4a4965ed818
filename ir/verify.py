"""The invariants that hold after every pass.

Only what a pass changed is re-propagated; :func:`verify_all` re-propagates the whole graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from latentscan.ir.errors import VerifyError
from latentscan.ir.graph import LOCAL, VALUE, Graph, is_impure, module_path
from latentscan.ir.sizes import expression


def verify(graph: Graph, *, before: Graph | None, name: str) -> None:
    """Lint; recorded values equal to re-propagated ones around new nodes; impure nodes and inputs kept.

    Args:
        before: the graph before the pass; None checks every node.
        name: the pass, for messages.

    Raises:
        VerifyError: with the place and the values.
    """
    try:
        graph.graph.lint()
    except Exception as error:
        raise VerifyError(f"the graph is malformed: {error}", where=name) from error
    known = {} if before is None else {n.name: n for n in before.graph.nodes}
    evaluated: dict[Any, Any] = {}
    for node in graph.graph.nodes:
        if node.op in ("call_function", "call_method") and _changed(node, known.get(node.name)):
            _check_value(graph, node, name, evaluated)
    if before is not None:
        _check_inputs(graph, before, name)
        _check_impure(graph, before, name)
        _check_outputs(graph, before, name)
    _check_weights(graph, before, name)


def verify_all(graph: Graph, name: str = "verify") -> None:
    """Check every node of the graph."""
    verify(graph, before=None, name=name)


def _signature(node: fx.Node) -> Any:
    return node.target, str(node.args), str(node.kwargs)


def _changed(node: fx.Node, old: fx.Node | None) -> bool:
    return old is None or _signature(node) != _signature(old)


def _form(value: Any) -> Any:
    """All that a form depends on: forms of tensors, and constants. Layers repeat, so looking it up often hits."""
    if isinstance(value, fx.Node):
        return _form(value.meta.get(VALUE))
    if isinstance(value, torch.Tensor):
        sizes = tuple(expression(s) for s in (*value.shape, *value.stride()))
        return sizes, value.dtype, value.device, value.requires_grad
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(_form(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _form(v)) for k, v in value.items())
    if isinstance(value, slice):
        return "slice", _form(value.start), _form(value.stop), _form(value.step)
    return expression(value) if isinstance(value, torch.SymInt) else (type(value).__name__, repr(value))


def _check_value(graph: Graph, node: fx.Node, name: str, evaluated: dict[Any, Any]) -> None:
    if is_impure(node) or isinstance(node.target, torch._ops.HigherOrderOperator):
        return
    if VALUE not in node.meta:
        raise VerifyError(f"{node.name} has no recorded value", where=f"{name} at {module_path(node)}")
    key = node.op, node.target, _form(node.args), _form(node.kwargs)
    try:
        want = evaluated[key] if key in evaluated else graph.evaluate(node)
        evaluated[key] = want
    except Exception as error:
        raise VerifyError(
            f"{node.name} does not run on its recorded inputs: {type(error).__name__}: {error}",
            where=f"{name} at {module_path(node)}",
        ) from error
    _compare(node, node.meta[VALUE], want, name)


def _compare(node: fx.Node, have: Any, want: Any, name: str) -> None:
    if isinstance(want, (tuple, list)):
        if not isinstance(have, (tuple, list)) or len(have) != len(want):
            raise VerifyError(f"{node.name} should give {len(want)} values", where=name)
        for a, b in zip(have, want, strict=True):
            _compare(node, a, b, name)
        return
    if not isinstance(want, torch.Tensor):
        return
    same_shape = len(have.shape) == len(want.shape) and all(
        expression(a) == expression(b) or statically_known_true(a == b)
        for a, b in zip(have.shape, want.shape, strict=True)
    )
    if not same_shape or have.dtype != want.dtype or have.device != want.device:
        raise VerifyError(
            f"{node.name} is recorded as {list(have.shape)} {have.dtype} on {have.device}, "
            f"but computes {list(want.shape)} {want.dtype} on {want.device}",
            where=f"{name} at {module_path(node)}",
        )


def _check_inputs(graph: Graph, before: Graph, name: str) -> None:
    have = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
    want = before.inputs + [a.placeholder for a in graph.added]
    if have != want:
        odd = [n for n in have if n not in want] or [n for n in want if n not in have]
        raise VerifyError(
            f"the graph's inputs changed: {odd[:3]}", where=name, remedy="add weights by graph.add_weights"
        )


def _check_impure(graph: Graph, before: Graph, name: str) -> None:
    """No new mutation, and none lost. Appends to a cache may change what they store, not how many there are."""

    def impure(g: Graph) -> list[str]:
        return sorted(str(getattr(n.target, "__name__", n.target)) for n in g.graph.nodes if is_impure(n))

    have, want = impure(graph), impure(before)
    if have != want:
        gone = [w for w in want if have.count(w) < want.count(w)]
        new = [h for h in have if want.count(h) < have.count(h)]
        raise VerifyError(f"writes changed: lost {sorted(set(gone))}, new {sorted(set(new))}", where=name)


def _check_outputs(graph: Graph, before: Graph, name: str) -> None:
    have = next(n for n in graph.graph.nodes if n.op == "output").all_input_nodes
    want = next(n for n in before.graph.nodes if n.op == "output").all_input_nodes
    if len(have) != len(want):
        raise VerifyError(f"the graph has {len(have)} outputs instead of {len(want)}", where=name)
    for a, b in zip(have, want, strict=True):
        if LOCAL in a.meta and LOCAL not in b.meta:  # a recurrent state: each rank keeps its part
            continue
        _compare(b, graph.value(a), before.value(b), name)


def _check_weights(graph: Graph, before: Graph | None, name: str) -> None:
    """Every weight that this pass added is read, and its sources exist. (A later pass may make one superfluous.)"""
    old = {a.path for a in before.added} if before is not None else set()
    for added in graph.added:
        if added.path in old:
            continue
        if not graph.node(added.placeholder).users:
            raise VerifyError(f"the new weight {added.path} is never read", where=name)
        for source in added.recipe.sources:
            if graph.weight_at(source) is None:
                raise VerifyError(f"the new weight {added.path} comes from {source}, which the model lacks", where=name)
