"""Model -> Graph, through Dynamo.

:func:`from_dynamo` turns what a Dynamo backend is given into a :class:`Graph`; :func:`capture` traces a model with
small inputs, without computing anything, for planning and dumping (it works on the meta device too).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from latentscan.ir.errors import CaptureError
from latentscan.ir.frontends import register_all
from latentscan.ir.frontends.base import MARK
from latentscan.ir.frontends.huggingface import install_recording_hooks
from latentscan.ir.graph import VALUE, Graph, normal_path
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
            weights[node.name] = Weight(normal_path(name), node.name, value, node.meta.get(VALUE))
    owner = fx.GraphModule(module, copied)
    graph = Graph(owner, weights, training=torch.is_grad_enabled() if training is None else training)
    normalize(graph)
    return graph


@contextlib.contextmanager
def trace_settings(**more: Any) -> Iterator[None]:
    """Dynamo's settings for our own traces; nothing of it leaks into other ones.

    Floats such as scale and eps stay constants, sizes that happen to be equal stay different symbols (two cached
    positions and a batch of two, say), and warnings that a library logs while it is traced are dropped: they would
    break the graph.

    Args:
        more: further settings of ``torch._dynamo.config``.
    """
    from torch.fx.experimental import _config as symbolic

    config = torch._dynamo.config
    name = "ignore_logging_functions" if hasattr(config, "ignore_logging_functions") else "ignore_logger_methods"
    logger = logging.Logger
    methods = [v for k, v in vars(logger).items() if callable(v) and re.match(r"(debug|info|warning|error)(_|$)", k)]
    # optimize_ddp would hand the graph over in pieces.
    settings = {name: set(getattr(config, name)).union(methods), "specialize_float": True, "optimize_ddp": False} | more
    with config.patch(**settings), symbolic.patch(use_duck_shape=False), _no_word_of_metrics():  # type: ignore[attr-defined]
        yield


@contextlib.contextmanager
def _no_word_of_metrics() -> Iterator[None]:
    """Before torch 2.13, Dynamo's metrics sort the set of functions above and log the failure with a traceback."""
    logger = logging.getLogger("torch._dynamo.metrics_context")
    logger.addFilter(_said_of_metrics)
    try:
        yield
    finally:
        logger.removeFilter(_said_of_metrics)


def _said_of_metrics(record: logging.LogRecord) -> bool:
    return "logging compilation metrics" not in record.getMessage()


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a Python function (or bound method) that shares everything with it but its code object.

    Dynamo keeps what it compiled with the code object, and Hugging Face decorates the forward of every model with the
    same few functions: without this, all models of a process, wrapped or not, would count against one recompile limit,
    and what was compiled could not be dropped for one of them (:func:`forget_compiled`).
    """
    if isinstance(function, types.MethodType):
        return types.MethodType(with_own_code(function.__func__), function.__self__)
    if not isinstance(function, types.FunctionType):
        return function
    code, name, defaults = function.__code__.replace(), function.__name__, function.__defaults__
    copy = types.FunctionType(code, function.__globals__, name, defaults, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    return copy


def forget_compiled(function: Callable[..., Any]) -> None:
    """Drop what Dynamo compiled for a function of :func:`with_own_code`; else it stays until torch._dynamo.reset().

    (Dynamo's table of code objects keeps the code alive through what was compiled from it.)
    """
    code = getattr(function, "__code__", None)  # a method has its function's
    if code is not None:
        torch._dynamo.eval_frame.reset_code(code)


@contextlib.contextmanager
def _plain_indices(model: torch.nn.Module) -> Iterator[None]:
    """For a model on the meta device: ``x[..., [-2], :]`` makes a plain meta index, which a fake mode takes for a leak.

    Nothing real can leak out of such a model; elsewhere the check of the fake mode stays.
    """
    from torch._subclasses.fake_tensor import fake_tensor_tls as state

    if not any(p.device.type == "meta" for p in model.parameters()):
        yield
        return
    saved, state.allow_non_fake_inputs_override = state.allow_non_fake_inputs_override, True
    try:
        yield
    finally:
        state.allow_non_fake_inputs_override = saved


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
    own = with_own_code(target)
    install_recording_hooks(model, given)
    try:
        with trace_settings(), _plain_indices(model), torch.set_grad_enabled(training):
            torch.compile(own, backend=backend, fullgraph=True, dynamic=True)(**given)
    except _Captured:
        return seen.pop()
    except CaptureError:
        raise
    except Exception as error:  # Dynamo raises many types; all mean the same to a user
        raise CaptureError(
            f"could not be traced as one graph: {reason_of(error)}",
            where=type(model).__name__,
            remedy="run the model eagerly on the same inputs first; if that works, report the model class",
        ) from error
    finally:
        if own is not target:
            forget_compiled(own)
    raise CaptureError("the traced call returned without running a graph", where=type(model).__name__)


def default_inputs(model: torch.nn.Module, target: Callable[..., Any]) -> dict[str, Any]:
    """Small inputs for a causal language model: ids [2, 6], no cache."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    names = inspect.signature(target).parameters
    given: dict[str, Any] = {"input_ids": torch.ones(2, 6, dtype=torch.long, device=device)}
    if "use_cache" in names:
        given["use_cache"] = False
    return given


_OF_THE_MODEL = re.compile(r"(?:raised exception|got) (\w+)\((['\"])(.*?)\2\)\s*$", re.MULTILINE | re.DOTALL)
_PROSE = ("Hint:", "Developer debug context", "For more details", "Set TORCHDYNAMO", "from user code")


def reason_of(error: BaseException, characters: int = 600) -> str:
    """Why a trace failed, on one line: the model's own error, where one is at the bottom of it, else what Dynamo says
    without its advice."""
    below: BaseException | None = error
    while below is not None:
        for line in str(below).splitlines():
            if found := _OF_THE_MODEL.search(line):
                return f"{found[1]}: {found[3]}"[:characters]
        below = below.__cause__
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(_PROSE)]
    return f"{type(error).__name__}: {' / '.join(lines)}"[:characters]
