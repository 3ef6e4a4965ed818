"""``torch.compile(model, backend="latentscan")``: the plain door."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import ShortenTraceback, TensorifyScalarRestartAnalysis

from latentscan.ir.errors import LatentscanError, PipelineError, RefusedError
from latentscan.ir.frontends import register_all
from latentscan.ir.frontends.base import MARK
from latentscan.runtime.options import Options

# Before the first trace, if it can be; what is imported later costs one trace more.
register_all()


def latentscan(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """A Dynamo backend: Dynamo's graph and its inputs to a callable.

    Rewrites that need new Parameters are refused here, for an optimiser may already hold the old ones.

    Args:
        options: see :class:`latentscan.runtime.options.Options`.
    """
    if register_all():
        trace_again("model files were imported after the backend, and their functions were traced as they are")
    try:
        return _compile(module, example_inputs, options)
    except LatentscanError as error:
        raise through_dynamo(error) from error.__cause__


def _compile(
    module: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any] | None
) -> Callable[..., Any]:
    from latentscan.ir.capture import from_dynamo
    from latentscan.passes.base import Context
    from latentscan.passes.pipeline import parse, run
    from latentscan.runtime.binding import RecipeWeights
    from latentscan.runtime.executable import Executable

    chosen = Options.of(options)
    for name in ("check", "dump", "calibration", "weights"):
        if getattr(chosen, name):
            raise PipelineError(
                f"option {name} is not served by torch.compile's door", remedy=f"use latentscan.wrap(model, {name}=...)"
            )
    if chosen.mesh is not None:
        raise PipelineError(
            "mesh is not served by torch.compile's door: the parameters are the caller's, and every rank would keep "
            "the whole model",
            remedy="use latentscan.wrap(model, mesh=...) before the optimiser is built",
        )
    passes = parse(chosen.pipeline)
    for current in passes:
        if getattr(current, "wants_statistics", False):
            raise RefusedError(
                "it makes new Parameters, and an optimiser may already hold the old ones",
                where=current.text(),
                remedy="use latentscan.wrap(model, ...) before the optimiser is built",
            )
    refuse_pieces()
    graph = from_dynamo(module, example_inputs)
    inputs = list(graph.inputs)
    if passes and not graph.weights:
        warnings.warn(
            "latentscan: Dynamo broke the graph and hands it over in pieces; a piece without weights is left as it is. "
            "latentscan.wrap(model, ...) traces a model in one piece",
            stacklevel=2,
        )
    program = run(graph, passes, Context(), strict=bool(graph.weights), one_phase=True)
    return Executable(program, inputs, chosen, RecipeWeights())


def refuse_pieces() -> None:
    """Raise RefusedError where DistributedDataParallel has Dynamo cut the graph at its buckets of gradients."""
    if not torch.distributed.is_available():
        return
    inside = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if inside is not None and torch._dynamo.config.optimize_ddp in (True, "ddp_optimizer"):
        raise RefusedError(
            "DistributedDataParallel cuts the graph in pieces, which cannot be rewritten one by one",
            where="torch.compile(DistributedDataParallel(model))",
            remedy="set torch._dynamo.config.optimize_ddp = False, or wrap the model before DistributedDataParallel",
        )


def trace_again(reason: str) -> None:
    """Let Dynamo trace the present frame from its start, because what functions stand for has changed."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        InstructionTranslator.current_tx().speculation_log.clear()  # the new trace takes another way
    except AttributeError:
        warnings.warn(
            f"latentscan: {reason}; call torch._dynamo.reset() and the model again to have them rewritten", stacklevel=2
        )
        return
    # Of the errors that start a trace again, the one that a backend may raise.
    raise TensorifyScalarRestartAnalysis(restart_reason=f"latentscan: {reason}")


def through_dynamo(error: LatentscanError) -> LatentscanError:
    """The same error, of a class that Dynamo lets through as it is instead of wrapping it in one of its own."""
    kind: Any = type(type(error).__name__, (ShortenTraceback, type(error)), {"__module__": type(error).__module__})
    made = kind.__new__(kind)
    made.__dict__.update(error.__dict__)
    made.args, made.first_useful_frame = error.args, None
    return made


setattr(latentscan, MARK, True)
