"""A program as a callable: chooses the form for the call's shapes, binds weights and arenas, runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from latentscan.ir.graph import Graph
from latentscan.lowering.cache import ArenaBinder, lower_cache_appends
from latentscan.lowering.checkpoint import outline_checkpoints
from latentscan.lowering.inductor import inductor_options
from latentscan.lowering.overlap import Agree, Tell, compile_overlapped
from latentscan.lowering.parts import join_products
from latentscan.lowering.places import name_groups
from latentscan.lowering.select import lower, resolve_target
from latentscan.lowering.states import share_final_states
from latentscan.lowering.swap import Swapping, lower_swaps
from latentscan.lowering.tiles import tiles_at
from latentscan.lowering.unread import without_unread
from latentscan.passes.pipeline import Program
from latentscan.runtime.binding import OwnedWeights, RecipeWeights
from latentscan.runtime.options import Options


class Executable:
    """What a backend returns to Dynamo.

    Args:
        program: a finished program, or one with a choice of two forms; each form is lowered when it is first wanted.
        inputs: the names of the graph's inputs in calling order.
        on_form: called with the finished graph of each form when it is first made.
        tell, agree: of :func:`compile_overlapped`, for graphs whose collectives are scheduled.
        groups: the process group that stands for each axis of the mesh, by the name of the axis' own.
    """

    def __init__(
        self,
        program: Program,
        inputs: Sequence[str],
        options: Options,
        weights: RecipeWeights | OwnedWeights,
        on_form: Callable[[Program, Graph], None] | None = None,
        tell: Tell = lambda _: None,
        agree: Agree | None = None,
        groups: Mapping[str, str] | None = None,
    ) -> None:
        self._groups = groups or {}
        self._tell, self._agree = tell, agree
        self._program, self._options, self._weights, self._on_form = program, options, weights, on_form
        self._forms: dict[bool, Callable[..., Any]] = {}
        self._decide = _condition(program, inputs)

    @property
    def forms(self) -> int:
        """How many forms have been compiled so far."""
        return len(self._forms)

    def __call__(self, *args: Any) -> Any:
        absorbed = self._decide(args)
        form = self._forms.get(absorbed)
        if form is None:
            form = self._forms[absorbed] = self._make(self._program.forced(absorbed))
        return form(*args)

    def _make(self, program: Program) -> Callable[..., Any]:
        graph = program.graph
        assert graph is not None
        if self._on_form:
            self._on_form(program, graph)
        self._weights.serve(graph)
        graph = graph.copy()
        device = next((w.value.device.type for w in graph.weights.values()), "cpu")
        target = resolve_target(self._options.target, device)
        inductor = self._options.use_inductor(device)
        share_final_states(graph)
        join_products(graph)
        swaps = lower_swaps(graph, inductor=inductor)
        lower(graph, target, None if self._options.tiles is None else tiles_at(self._options.tiles))
        name_groups(graph, self._groups)
        outline_checkpoints(graph, higher_order=inductor or graph.overlap is not None)
        records = lower_cache_appends(graph.module)
        graph.clean()
        bind = self._weights.bind(graph) if graph.added else None
        forget_weights(graph)
        module = graph.module
        run: Callable[..., Any] = module.forward
        if graph.overlap is not None:
            run = compile_overlapped(
                module, growth=graph.overlap, inductor=inductor, tell=self._tell, agree=self._agree
            )  # fmt: skip
        elif inductor:
            run = torch.compile(module, dynamic=True, fullgraph=True, options=inductor_options())
        if graph.training and (inductor or graph.overlap is not None):
            run = without_unread(run, module.graph)
        if swaps:
            run = Swapping(run)
        if not records:
            if bind is None:
                return run
            return lambda *args: run(*args, *bind(args))
        binder = ArenaBinder(run, records)
        if bind is None:
            return binder

        def with_weights(*args: Any) -> Any:
            return run(*args, *bind(args), *binder.bind(args))

        return with_weights


def forget_weights(graph: Graph) -> None:
    """A finished graph keeps no weight alive: at run time they arrive as arguments."""
    graph.weights = {}
    graph._by_path = {}


def _condition(program: Program, inputs: Sequence[str]) -> Callable[[Sequence[Any]], bool]:
    """The program's choice as a function of the call's arguments."""
    if program.choice is None:
        return lambda args: True
    condition = program.choice.condition
    symbols = sorted(condition.free_symbols, key=str)
    at = {name: i for i, name in enumerate(inputs)}
    where = [at[program.symbols[s]] for s in symbols]
    function = sympy.lambdify(symbols, condition, modules="math")
    return lambda args: bool(function(*[args[i] for i in where]))
