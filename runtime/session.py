"""What a wrapped model carries: its plan, its compiled forward and its graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from latentscan.ir.axes import is_random
from latentscan.ir.capture import forget_compiled, from_dynamo, reason_of, trace_settings, with_own_code
from latentscan.ir.errors import CaptureError, LatentscanError, RefusedError, VerifyError
from latentscan.ir.frontends.base import MARK
from latentscan.ir.frontends.packing import packed_forward
from latentscan.ir.graph import Graph, module_path
from latentscan.ir.mesh import Mesh
from latentscan.ir.ops.waiting import is_transport, lost
from latentscan.lowering.schedule import Scheduled
from latentscan.passes.base import Context, Pass
from latentscan.passes.pipeline import PassRecord, Program, is_cached, run
from latentscan.runtime.binding import OwnedWeights
from latentscan.runtime.executable import Executable
from latentscan.runtime.mesh import agree_on_numbers, agree_on_order, agree_on_starts, check_call
from latentscan.runtime.models import FSDP_FLAG, drop_input_hook, prepare_sharded, refuse_inner_shards
from latentscan.runtime.options import Options
from latentscan.runtime.own import (
    TIES,
    alone_in_training,
    check_places,
    get,
    shrink_tombstones,
    trained_weights,
    trains_alone,
)
from latentscan.runtime.plan import ModelPlan

# The recompile limit's error is no TorchDynamoException.
_DYNAMO_ERRORS = (
    torch._dynamo.exc.TorchDynamoException,
    getattr(torch._dynamo.exc, "FailOnRecompileLimitHit", torch._dynamo.exc.TorchDynamoException),
)
RECOMPILE_LIMIT = 64  # beyond, a call raises: falling back to eager would run on released weights


@dataclass
class TracedGraph:
    """One graph that a wrapped model was traced to."""

    training: bool
    cached: bool
    records: list[PassRecord]
    operations: list[dict[str, int]] = field(default_factory=list)  # canonical ops of each form made so far
    executable: Executable | None = field(default=None, repr=False)
    mesh: Mesh | None = field(default=None, repr=False)
    drawing: torch.device | None = None  # where it draws random numbers that all ranks must draw alike
    draws: dict[str, bool] = field(default_factory=dict)  # modules that draw; whether in evaluation, too
    trains: Sequence[tuple[str, bool]] = ()  # weights, and whether they train, of a graph with gradients
    collectives: int = 0  # communications of one call, backward pass included
    scheduled: list[Scheduled] = field(default_factory=list)  # what overlap-collectives did, forward and backward

    def note(self, program: Program, graph: Graph) -> None:
        """Count the canonical ops of a form that is about to be lowered; on a mesh, see that all ranks do the same."""
        found: dict[str, int] = {}
        for node in graph.graph.nodes:
            if node.op == "call_function" and getattr(node.target, "namespace", "") == "latentscan":
                found[node.target._opname] = found.get(node.target._opname, 0) + 1
        self.operations.append(found)
        if self.mesh is not None:
            from latentscan.ir.order import collectives

            self.collectives = agree_on_order(self.mesh, collectives(graph), self.trains)
            if any(map(is_random, graph.nodes)) and self.mesh.axis("tp").size > 1:
                self.drawing = next((w.value.device for w in graph.weights.values()), torch.device("cpu"))
                agree_on_numbers(self.mesh, self.drawing)

    def may_draw(self, model: torch.nn.Module) -> bool:
        """Whether a call in the model's present mode may draw random numbers as this graph does."""
        return self.drawing is not None and any(
            always or _draws(_module(model, path)) for path, always in self.draws.items()
        )


def _module(model: torch.nn.Module, path: str) -> torch.nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _draws(module: torch.nn.Module | None) -> bool:
    """Whether a module that has drawn random numbers may do so again in its present mode; True if it is not known."""
    if module is None:
        return True
    dropout = torch.nn.modules.dropout._DropoutNd
    return module.training and not (isinstance(module, dropout) and module.p == 0)


def drawing_modules(graph: Graph, model: torch.nn.Module) -> dict[str, bool]:
    """Paths of the modules that draw random numbers in a graph of the model in its present mode -> whether they draw
    in evaluation, too."""
    paths = {module_path(n) for n in graph.nodes if is_random(n)}
    return {path: not _draws(_module(model, path)) for path in sorted(paths)}


class Session:
    """The state of one wrapped model. The model is held weakly; ``copy.deepcopy(model)`` gets a session of its own."""

    def __init__(
        self,
        model: torch.nn.Module,
        passes: Sequence[Pass],
        plan: ModelPlan,
        options: Options,
        mesh: Mesh | None = None,
    ) -> None:
        self.model_reference = weakref.ref(model)
        self.mesh = mesh
        self.passes, self.plan, self.options = tuple(passes), plan, options
        self.source: str | None = None  # what the model was converted from, as the command takes it
        self.graphs: list[TracedGraph] = []
        self.weights = OwnedWeights(model)
        self.silent: dict[str, str] = {}  # group -> one that sends nothing; empty but for measurements
        self._compiled: dict[bool, Callable[..., Any]] = {}  # the forward, and the one of packed sequences
        self._forget: list[weakref.finalize[..., Any]] = []  # drop what Dynamo compiled

    @property
    def model(self) -> torch.nn.Module:
        model = self.model_reference()
        if model is None:
            raise RefusedError("the wrapped model is gone", remedy="keep a reference to it")
        return model

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        model = memo.get(id(self.model))
        if model is None:
            raise RefusedError("a session is copied only together with its model", remedy="copy.deepcopy(model)")
        copy = Session(model, self.passes, self.plan, self.options, self.mesh)
        copy.source = self.source
        memo[id(self)] = copy
        return copy

    def __reduce__(self):
        raise RefusedError(
            "a wrapped model cannot be pickled", remedy="save it with save_pretrained and read it with latentscan.load"
        )

    # -- compiling --------------------------------------------------------------------------------------------------

    def backend(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        check_places(self.model, self.plan.recipes, self.plan.released)
        graph = from_dynamo(module, example_inputs)
        for path in self.plan.released:  # a tied weight is planned under one of its names
            for other in getattr(self.model, TIES, {}).get(path, ()):
                graph.rename_weight(other, path)
        inputs = list(graph.inputs)
        draws = drawing_modules(graph, self.model)
        context = Context(facts=self.plan.facts, own_parameters=True, required=self.plan.required, mesh=self.mesh)
        training, cached = graph.training, is_cached(graph)
        program = run(graph, self.passes, context, strict=False)
        self._check_released(program)
        traced = TracedGraph(training, cached, program.records, mesh=self.mesh)
        if self.mesh is not None:
            traced.draws = draws
            traced.trains = trained_weights(self.model, self.plan.recipes) if training else ()
        traced.executable = Executable(
            program, inputs, self.options, self.weights, traced.note, traced.scheduled.append,
            agree=partial(agree_on_starts, self.mesh) if self.mesh is not None and not self.silent else None,
            groups=self.groups,
        )  # fmt: skip
        self.graphs.append(traced)
        return traced.executable

    def _check_released(self, program: Program) -> None:
        """Raise VerifyError if a graph still reads a weight that is gone: it would compute with NaN."""
        graph = program.forced(False).graph
        assert graph is not None
        for path in self.plan.released:
            weight = graph.weight_at(path)
            if weight is not None and graph.node(weight.placeholder).users:
                raise VerifyError(
                    f"this graph reads {path}, which other graphs of this model were rewritten to do without",
                    where=path.rpartition(".")[0],
                    remedy="call it as it was wrapped, or unwrap it",
                )

    @property
    def groups(self) -> dict[str, str]:
        """The process group that stands for each axis of the mesh, by the name of the axis' own."""
        axes = self.mesh.axes if self.mesh is not None else ()
        return {a.group: self.silent.get(a.group, a.group) for a in axes if a.group}

    def silence(self, groups: dict[str, str]) -> None:
        """Compile what is called from now on with other groups, only to measure what communication costs.

        Args:
            groups: name of a mesh's group -> name of one in which nothing is sent. Results are then wrong.
        """
        self.reset()
        self.silent = groups

    def compiled(self, *, packed: bool = False) -> Callable[..., Any]:
        if packed not in self._compiled:
            model, session = self.model, weakref.ref(self)

            # Dynamo keeps the backend in places that the garbage collector does not look into: through a strong
            # reference the session, its graphs and the model would stay for good.
            def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
                mine = session()
                assert mine is not None  # its forward is being called
                return mine.backend(module, example_inputs)

            setattr(backend, MARK, True)
            function = packed_forward if packed else type(model).forward
            forward: Any = with_own_code(function.__get__(model))
            forget = weakref.finalize(self, forget_compiled, forward.__func__)  # which does not hold the model
            forget.atexit = False
            self._forget.append(forget)
            self._compiled[packed] = torch.compile(forward, backend=backend, fullgraph=True, dynamic=True)
        return self._compiled[packed]

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, compiled. Errors of ours come out as they are."""
        return self._call(False, args, kwargs)

    def call_packed(self, segments: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The same with several sequences in a row: ``segments`` [b, L] changes where a new one starts."""
        return self._call(True, (segments, *args), kwargs)

    def _call(self, packed: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.plan.released:
            first = get(self.model, self.plan.released[0])
            if any(first.stride()):
                shrink_tombstones(self.model)
        drop_input_hook(self.model)
        if getattr(self.model, FSDP_FLAG, False):
            prepare_sharded(self.model)
        if self.mesh is not None:
            model, recipes, gradients = self.model, self.plan.recipes, torch.is_grad_enabled()
            drawing = next((g.drawing for g in self.graphs if g.may_draw(model)), None)
            alone = alone_in_training(model, recipes) if gradients else ""
            trains = trained_weights(model, recipes) if gradients else ()
            check_call(self.mesh, args, kwargs, model.training, drawing, alone, trains)
            if alone:
                raise trains_alone(alone)
        limits = {"recompile_limit": RECOMPILE_LIMIT, "accumulated_recompile_limit": 4 * RECOMPILE_LIMIT}
        try:
            with trace_settings(**limits):
                return self.compiled(packed=packed)(*args, **kwargs)
        except LatentscanError:
            raise
        except _DYNAMO_ERRORS as error:
            inner = getattr(error, "inner_exception", None) or error.__cause__
            if isinstance(inner, LatentscanError):
                raise inner from None
            refuse_inner_shards(self.model)
            raise CaptureError(
                f"this call could not be traced as one graph: {reason_of(error)}",
                where=type(self.model).__name__,
                remedy="call it as the unwrapped model can be called; unwrap(model) gives it back",
            ) from error
        except RuntimeError as error:
            axis = next((a for a in self.mesh.axes if a.size > 1), None) if self.mesh is not None else None
            if axis is None or not is_transport(error):
                raise
            raise lost(axis.group, "a collective of compiled code", error) from error

    def reset(self) -> None:
        """Forget every compiled graph (after the model's structure changed)."""
        for forget in self._forget:
            forget()
        self._compiled.clear()
        self._forget.clear()
        self.graphs.clear()
