"""``torch.compile(model, backend="latentscan")``: the plain door."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from latentscan.ir.frontends import register_all
from latentscan.ir.frontends.base import MARK
from latentscan.runtime.options import Options

# Registering is what loading this module is for: the entry point names it, and it must happen before the first trace.
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
    from latentscan.ir.capture import from_dynamo
    from latentscan.passes.base import Context
    from latentscan.passes.pipeline import parse, run
    from latentscan.runtime.binding import RecipeWeights
    from latentscan.runtime.executable import Executable

    chosen = Options.of(options)
    graph = from_dynamo(module, example_inputs)
    inputs = list(graph.inputs)
    program = run(graph, parse(chosen.pipeline), Context())
    return Executable(program, inputs, chosen, RecipeWeights())


setattr(latentscan, MARK, True)
