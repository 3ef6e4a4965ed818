"""Model -> Graph, through Dynamo.

:func:`from_dynamo` turns what a Dynamo backend is given into a :class:`Graph`; :func:`capture` traces a model with
small inputs, without computing anything, for planning and dumping (it works on the meta device too).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from latentscan.ir.errors import CaptureError
from latentscan.ir.frontends import register_all
from latentscan.ir.frontends.base import MARK
from latentscan.ir.graph import Graph, normal_path
from latentscan.ir.normalize import normalize
from latentscan.ir.weights import Weight


def source_name(node: fx.Node) -> str:
    """Dynamo's source expression of a placeholder, such as ``L['self']._modules['lm_head']._parameters['weight']``."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return ""
    name = source.name
    return name() if callable(name) else name


def from_dynamo(module: fx.GraphModule, example_inputs: Sequence[Any], *, training: bool | None = None) -> Graph:
    """The Graph of what Dynamo hands to a backend.

    The given graph is copied: Dynamo reads its placeholders' metadata again after the backend returns.

    Args:
        module: Dynamo's graph module.
        example_inputs: one for each placeholder; parameters and buffers are the model's own tensors.
        training: whether gradients are wanted; by default whether autograd is on.
    """
    copied = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = copied.graph_copy(module.graph, mapping)
    copied.output(output)
    for old, new in mapping.items():
        new.meta = dict(old.meta)
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    weights: dict[str, Weight] = {}
    placeholders = [n for n in copied.nodes if n.op == "placeholder"]
    for node, value in zip(placeholders, example_inputs, strict=True):
        name = source_name(node)
        if isinstance(value, torch.Tensor) and ("_parameters" in name or "_buffers" in name):
            weights[node.name] = Weight(normal_path(name), node.name, value)
    owner = fx.GraphModule(module, copied)
    graph = Graph(owner, weights, training=torch.is_grad_enabled() if training is None else training)
    normalize(graph)
    return graph


class _Captured(Exception):  # noqa: N818  control flow, not an error
    """Raised by the captured callable instead of computing."""


def capture(
    model: torch.nn.Module,
    *,
    inputs: dict[str, Any] | None = None,
    function: Callable[..., Any] | None = None,
    training: bool = False,
) -> Graph:
    """Trace a model to one Graph with dynamic batch and length, computing nothing.

    Args:
        model: a causal language model (or any module if ``inputs`` is given).
        inputs: keyword arguments of the traced call; by default ``input_ids`` of shape [2, 6] and ``use_cache=False``.
        function: what to trace; by default ``model.forward`` as its class defines it.
        training: trace with gradients enabled and in the model's present train/eval mode.

    Raises:
        CaptureError: the model cannot be traced as one graph; the message names Dynamo's reason.
    """
    register_all()
    seen: list[Graph] = []

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(from_dynamo(module, example_inputs, training=training))

        def stop(*_: Any) -> Any:
            raise _Captured

        return stop

    setattr(backend, MARK, True)
    target = function if function is not None else type(model).forward.__get__(model)
    given = inputs if inputs is not None else default_inputs(model, target)
    try:
        # No latentscan option may leak into other traces, so Dynamo's settings hold for this call only.
        with torch._dynamo.config.patch(specialize_float=True), torch.set_grad_enabled(training):
            torch.compile(target, backend=backend, fullgraph=True, dynamic=True)(**given)
    except _Captured:
        return seen[0]
    except CaptureError:
        raise
    except Exception as error:  # noqa: BLE001  Dynamo raises many types; all mean the same to a user
        raise CaptureError(
            f"could not be traced as one graph: {type(error).__name__}: {_first_lines(error)}",
            where=type(model).__name__,
            remedy="run the model eagerly on the same inputs first; if that works, report the model class",
        ) from error
    raise CaptureError("the traced call returned without running a graph", where=type(model).__name__)


def default_inputs(model: torch.nn.Module, target: Callable[..., Any]) -> dict[str, Any]:
    """Small inputs for a causal language model: ids [2, 6], no cache."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    names = inspect.signature(target).parameters
    given: dict[str, Any] = {"input_ids": torch.ones(2, 6, dtype=torch.long, device=device)}
    if "use_cache" in names:
        given["use_cache"] = False
    return given


def _first_lines(error: Exception, lines: int = 6) -> str:
    return " / ".join(line.strip() for line in str(error).splitlines() if line.strip())[: 160 * lines]
