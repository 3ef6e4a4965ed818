"""What happens between passes on request: the numbers are compared, and everything is dumped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import sympy
import torch

from latentscan.ir.capture import capture, default_inputs
from latentscan.ir.errors import NumericsError, PipelineError
from latentscan.ir.graph import Graph
from latentscan.passes.base import Context, Pass, Tier
from latentscan.passes.pipeline import Hooks, PassRecord, apply_pass, nearest, parse, run
from latentscan.runtime.dumping import Dump
from latentscan.runtime.numerics import Comparison, Probe, Run, compare, compare_gradients, default_tolerance
from latentscan.runtime.options import Options

DEFAULT, GRADIENTS = "default", "gradients"  # keys of Options.check that are no pass names


@contextmanager
def inspection(
    model: torch.nn.Module,
    graph: Graph,
    options: Options,
    context: Context = Context(),  # noqa: B008  frozen
) -> Iterator[Hooks]:
    """Hooks that check and dump every pass as ``options`` ask; use them inside the ``with`` block.

    With ``options.check`` the graph is run before the first pass and after each one, on seeded token ids and a fresh
    cache, and all outputs and values of one name are compared. A model in training mode (or ``"gradients": True`` in
    the dict) also has the gradients of all parameters compared, on a graph of its own, when the block ends. A pass
    whose choice leaves it out on this graph (absorption, where it does not pay) is checked on a copy. Errors and
    tolerances are written into the passes' records.

    Args:
        graph: the planning graph, before any pass.
        options: ``check`` is a bool or ``{pass name or "default": tolerance, "gradients": bool}``. Without a tolerance
            an exact pass must agree bitwise, a re-associating one up to rounding, and an approximate one is measured.
        context: what the passes are given.

    Raises:
        NumericsError: names the pass and the first module that diverges. A dump is still written, up to the pass that
        failed, whatever the error.
        PipelineError: ``check`` names a pass that is not in the pipeline.
        CheckpointError: the dump's folder exists and is not ours.
    """
    if options.check is False and not options.dump:
        yield Hooks()
        return
    passes = parse(options.pipeline)
    tolerances = _tolerances(options.check, passes)
    dump = Dump(options.dump, options.pipeline) if options.dump else None
    probe = Probe(model, graph) if options.check is not False else None
    inspector = Inspector(probe, dump, tolerances, context)
    try:
        yield inspector.hooks
        if probe is not None and _wants_gradients(model, options.check):
            check_gradients(model, passes, context, tolerances, dump)
    except BaseException as error:
        if dump is not None:
            dump.close(stopped=str(error) or type(error).__name__)
        raise
    if dump is not None:
        dump.close()


def _wants_gradients(model: torch.nn.Module, check: Any) -> bool:
    asked = check.get(GRADIENTS) if isinstance(check, dict) else None
    return model.training if asked is None else bool(asked)


def _tolerances(check: Any, passes: Sequence[Pass]) -> dict[str, float]:
    """The tolerances that were given, by pass name."""
    if not isinstance(check, dict):
        return {}
    known = [DEFAULT, GRADIENTS, *(p.name for p in passes)]
    for name, value in check.items():
        if name not in known:
            raise PipelineError(
                f"check names {name!r}, which is not in the pipeline",
                remedy=f"its keys are {', '.join(known)}{nearest(str(name), known)}",
            )
        if name != GRADIENTS and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
            raise PipelineError(f"check: the tolerance of {name} is {value!r}", remedy="give a number, 0 or larger")
    return {name: float(value) for name, value in check.items() if name != GRADIENTS}


class Inspector:
    """Compares and dumps after each pass of one run.

    Args:
        probe: inputs to compare on; None: only dump.
        dump: where to write; None: only compare.
        gradients: compare gradients instead of values.
    """

    def __init__(
        self,
        probe: Probe | None,
        dump: Dump | None,
        tolerances: dict[str, float],
        context: Context,
        *,
        gradients: bool = False,
    ) -> None:
        self._probe, self._dump, self._tolerances, self._context = probe, dump, tolerances, context
        self._gradients = gradients
        # The graph before a pass and its run. A pass with two forms comes back here twice, each time with a copy of
        # its record; both copies hold the same list of sites, which is what tells them from other passes' records.
        self._before: dict[int, tuple[PassRecord, Graph, Run | None]] = {}
        self._latest: tuple[Graph, Run] | None = None

    @property
    def hooks(self) -> Hooks:
        return Hooks(self.before, self.after)

    def before(self, index: int, current: Pass, graph: Graph, record: PassRecord) -> None:
        run_before = None
        if self._probe is not None:
            known = self._latest is not None and self._latest[0] is graph
            run_before = self._latest[1] if known else self._run(graph)  # type: ignore[index]
        self._before[id(record.sites)] = record, graph if self._dump is None else graph.copy(), run_before

    def after(self, index: int, current: Pass, graph: Graph, record: PassRecord) -> None:
        _, before, reference = self._before[id(record.sites)]
        if record.choice is None:
            del self._before[id(record.sites)]
        shown = graph
        if _left_out_here(record):
            shown = graph.copy()
            trial = replace(record)
            apply_pass(shown, current, trial, self._context)
            record.nodes_after, record.seconds = trial.nodes_after, trial.seconds
        found, failure = None, None
        if reference is not None and record.sites:
            found = self._compare(current, before, reference, shown, record)
            failure = _failure(current, found, self._gradients) if found.failed else None
            if shown is not graph:
                self._latest = graph, reference
        if self._dump is not None:
            self._dump.add(index, before, shown, record, found, gradients=self._gradients)
        if failure is not None:
            raise failure

    def _run(self, graph: Graph, like: Run | None = None) -> Run:
        assert self._probe is not None
        return self._probe.backward(graph) if self._gradients else self._probe.forward(graph, like)

    def _compare(self, current: Pass, before: Graph, reference: Run, after: Graph, record: PassRecord) -> Comparison:
        assert self._probe is not None
        tolerance = self._tolerances.get(current.name)
        if tolerance is None:
            tolerance = default_tolerance(before, current.tier, len(record.sites), self._probe.sizes)
            if tolerance is not None:
                tolerance = self._tolerances.get(DEFAULT, tolerance)
        run_after = self._run(after, reference)
        self._latest = after, run_after
        found = (compare_gradients if self._gradients else compare)(reference, run_after, tolerance)
        record.error = found.output_error if current.tier is Tier.APPROXIMATE else found.error
        record.tolerance = tolerance
        return found


def _left_out_here(record: PassRecord) -> bool:
    """Whether a pass was left out because it does not pay for this graph's shapes (not because an option says so)."""
    choice = record.choice
    if choice is None or not record.sites:
        return False
    return choice.condition == sympy.false and not choice.rule.startswith("option ")


def _failure(current: Pass, found: Comparison, gradients: bool) -> NumericsError:
    what = "the gradient" if gradients else "the value"
    return NumericsError(
        f"{what} of {found.node} moved by {found.error:.2e} of its largest magnitude, the {current.tier.value} pass "
        f"may move it by {found.tolerance:.2e}",
        where=f"{current.name} at {found.module or 'the model itself'}",
        remedy="dump the passes (dump=DIR) and look at this module in its diff.txt, leave the pass out, or give "
        f'check={{"{current.name}": tolerance}} if this much is fine',
    )


def check_gradients(
    model: torch.nn.Module,
    passes: Sequence[Pass],
    context: Context,
    tolerances: dict[str, float],
    dump: Dump | None = None,
) -> list[PassRecord]:
    """Run the passes over a graph without a cache and compare the gradients of all parameters after each.

    Passes that find nothing to do without a cache are skipped. The model is traced in evaluation mode: dropout would
    make every run another one.

    Returns:
        the passes' records; ``error`` and ``tolerance`` are those of the gradients.

    Raises:
        NumericsError: names the pass and the module whose parameter's gradient diverges, seen from the output.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        inputs = default_inputs(model, type(model).forward.__get__(model))
        graph = capture(model, inputs=inputs, training=True)
    finally:
        for module, training in modes.items():
            module.training = training
    inspector = Inspector(Probe(model, graph), dump, tolerances, context, gradients=True)
    program = run(graph, passes, context, strict=False, hooks=inspector.hooks)
    if program.choice is not None:
        program.forced(False)
        program = program.forced(True)
    return program.records
