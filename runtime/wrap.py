"""``latentscan.wrap``: a user's model, rewritten and compiled, still the user's model."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch

from latentscan.ir.capture import capture
from latentscan.ir.errors import LatentscanError, PipelineError, RefusedError
from latentscan.ir.frontends import register_all
from latentscan.ir.graph import Graph
from latentscan.ir.weights import Recipe
from latentscan.passes.base import Context
from latentscan.passes.pipeline import Program, facts_of, parse, run, to_text
from latentscan.runtime.binding import refresh_folded
from latentscan.runtime.cache import GraphCache, cache_argument
from latentscan.runtime.door import check_free, install, remove, session_of
from latentscan.runtime.inspection import inspection
from latentscan.runtime.materialise import is_empty, materialise
from latentscan.runtime.mesh import PARALLEL, SEQUENCE, axis_names, bind_mesh, check_alike, device_for, set_timeout
from latentscan.runtime.models import check_model, drop_input_hook, make_tables
from latentscan.runtime.options import Options
from latentscan.runtime.own import make_parameters, refuse_tied, release, restore
from latentscan.runtime.plan import ModelPlan
from latentscan.runtime.session import Session
from latentscan.runtime.source import quantisation
from latentscan.runtime.stored import Stored


def wrap(
    model: torch.nn.Module,
    pipeline: str = "",
    *,
    mesh: Any = None,
    target: str = "auto",
    calibration: Any = None,
    check: Any = False,
    dump: str | None = None,
    inductor: Any = "auto",
    timeout: float | None = None,
    weights: Any = None,
    tiles: Any = None,
) -> torch.nn.Module:
    """Rewrite a model by a pipeline of passes and compile it. The same object comes back.

    Args:
        model: a Hugging Face causal language model. Its class, ``generate``, ``state_dict``, ``train``/``eval``,
            autocast, gradient checkpointing and ``save_pretrained`` stay.
        pipeline: passes as text, e.g. ``"mla-mm-split,latent-cache,mla-absorb"``; empty: canonical form only.
        mesh: what parallel passes split over: text such as ``tp=2``, of which torch.distributed's ranks are then the
            members in order, or a DeviceMesh with axes named ``dp``, ``tp``, ``cp``. Every rank calls ``wrap`` with
            the same model, and from then on makes the same calls in the same order. ``dp`` is left to
            DistributedDataParallel or ``fully_shard`` around the wrapped model.
        target: ``auto`` or ``reference``.
        calibration: a path, a list of strings or a token tensor [N, L], for passes that need statistics.
        check: compare the numbers after every pass on seeded inputs: True, or a dict of tolerances.
        dump: a folder to write every pass's graphs to.
        inductor: ``auto`` (on for GPUs), True or False.
        timeout: seconds that a rank waits for the others of the mesh in a collective before it raises MeshError, with
            the rank, the collective, its module and where the others are. None: what the process groups were made with.
        weights: for a model on the meta device, the directory of safetensors files that holds its weights. With a mesh
            each rank reads its part only.
        tiles: the file of a table of tiles for the chunk scan on this kind of GPU, as ``latentscan bench ssd --tune``
            writes it; what it does not name has the shipped ones.

    Returns:
        ``model``, with ``model.report`` added.

    Raises:
        PipelineError: a bad pipeline or option. RefusedError: a pass found nothing, or the model is of a kind that
        is not served. CaptureError: the model does not trace. NumericsError: ``check`` failed. MeshError: the mesh
        does not fit the model or the ranks. In every case the model is as it was.
    """
    options = Options.of(
        {
            "pipeline": pipeline, "mesh": mesh, "target": target, "calibration": calibration,
            "check": check, "dump": dump, "inductor": inductor, "timeout": timeout,
            "weights": weights, "tiles": tiles,
        }
    )  # fmt: skip
    passes = parse(options.pipeline)
    check_model(model)
    if session_of(model) is not None:
        raise RefusedError("the model is wrapped already", where=type(model).__name__, remedy="unwrap(model) first")
    check_free(model)
    register_all()
    wanted = any(getattr(p, "wants_statistics", False) for p in passes)
    if options.calibration is not None and not wanted:
        raise PipelineError(
            "calibration is given, but no pass of the pipeline uses it",
            remedy="leave it out, or give mha-to-mla a rank",
        )
    empty = is_empty(model)
    _check_weights(model, options, empty, wanted)
    statistics = None
    if wanted:
        from latentscan.runtime.calibration import statistics_for

        statistics = statistics_for(model, passes, options.calibration)
    if axis_names(options.mesh) not in ((), ("dp",)) and not any(p.name in PARALLEL + SEQUENCE for p in passes):
        raise PipelineError(
            f"mesh {options.mesh!r} is given, but no pass of the pipeline uses it",
            remedy=f"add one of {', '.join(PARALLEL + SEQUENCE)}, or leave mesh out",
        )
    mesh = bind_mesh(options.mesh, model)
    if mesh is not None:
        if options.timeout is not None:
            set_timeout(mesh, options.timeout)
        check_alike(mesh, model, options.pipeline)
    stored = Stored(options.weights, model) if empty else None
    plan = make_plan(model, options, Context(statistics=statistics, own_parameters=True, mesh=mesh, meta=empty))
    refuse_tied(model, plan.recipes, plan.released)
    if stored is not None:
        with contextlib.closing(stored):
            materialise(model, plan, stored, device_for(options.mesh, model))
        install(model, Session(model, passes, plan, options, mesh))
        return model
    make_parameters(model, plan.recipes)
    try:
        install(model, Session(model, passes, plan, options, mesh))
        release(model, plan.released)
    except BaseException:
        remove(model)
        restore(model, plan.recipes, ())
        raise
    return model


def _check_weights(model: torch.nn.Module, options: Options, empty: bool, wanted: bool) -> None:
    """Raise unless ``weights`` is given for a model on the meta device, and for no other."""
    if not empty and options.weights is not None:
        raise PipelineError(
            "weights is given, but the model has its weights",
            where=type(model).__name__,
            remedy="leave it out, or build the model under torch.device('meta')",
        )
    if empty and options.weights is None:
        raise RefusedError(
            "its weights are on the meta device",
            where=type(model).__name__,
            remedy="give their directory: wrap(model, ..., weights=DIRECTORY)",
        )
    if empty and (method := quantisation(model.config)):
        raise RefusedError(
            f"its weights are quantised ({method})",
            where=str(options.weights),
            remedy="dequantise the checkpoint first",
        )
    if empty and wanted:
        raise PipelineError(
            "the pipeline has a pass that is calibrated on the whole model, and weights= is to hold a part only",
            remedy="convert the model in one process first: latentscan convert MODEL OUT --pipeline ...",
        )


def planning_graph(model: torch.nn.Module, *, batch: int = 2, length: int = 6, cached: bool = True) -> Graph:
    """The graph that decisions are made on: evaluation, dynamic batch and length, filling an empty GraphCache."""
    device = next(model.parameters()).device
    make_tables(model)
    ids = torch.ones(batch, length, dtype=torch.long, device=device)
    modes = {m: m.training for m in model.modules()}
    inputs: dict[str, Any] = {"input_ids": ids}
    inputs["use_cache"] = False
    if cached:
        with contextlib.suppress(LatentscanError):
            inputs |= {cache_argument(model): GraphCache.for_model(model), "use_cache": True}
    hooked = drop_input_hook(model)
    try:
        model.eval()
        return capture(model, inputs=inputs)
    finally:
        if hooked:
            model.enable_input_require_grads()  # type: ignore[operator]
        for module, training in modes.items():
            module.training = training


def make_plan(model: torch.nn.Module, options: Options, context: Context) -> ModelPlan:
    """Decide once, on a capture that computes nothing."""
    passes = parse(options.pipeline)
    graph = planning_graph(model, cached=not any(p.name in SEQUENCE for p in passes))
    with inspection(model, graph, options, context) as hooks:
        program = run(graph, passes, context, hooks=hooks)
        plan = plan_of(program, to_text(passes))
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}  # the model's own; no state to free
    return replace(plan, released=tuple(path for path in plan.released if path not in buffers))


def plan_of(program: Program, pipeline: str) -> ModelPlan:
    """The plan of a program; weights are released only if no form reads them."""
    forms = [program] if program.choice is None else [program.forced(True), program.forced(False)]
    graphs = [form.graph for form in forms]
    recipes: list[Recipe] = []
    for graph in graphs:
        assert graph is not None
        for added in graph.added:
            if all(added.recipe.targets != r.targets for r in recipes):
                recipes.append(added.recipe)
    made = {t for r in recipes for t in r.targets}
    sources = {s for r in recipes for s in r.sources}
    released = []
    for path in sorted(sources):
        if all(not _is_read(graph, path) for graph in graphs):  # type: ignore[arg-type]
            released.append(path)
    twice = (sources & made) - set(released)  # what nobody reads is a step on the way
    if twice:
        raise PipelineError(
            f"{', '.join(sorted(twice))} would be made and rewritten again",
            remedy="put the pass that rewrites first, or leave one of the two out",
        )
    facts = facts_of(program.records)
    gone = set(released)
    required = frozenset((r.maker, r.module) for r in recipes if gone & set(r.sources) and not r.keep.get("optional"))
    required |= {(name, module) for name, module in facts if name in SEQUENCE}  # a shard is never taken for the whole
    return ModelPlan(pipeline, facts, tuple(recipes), tuple(released), required, tuple(forms[0].records))


def _is_read(graph: Graph, path: str) -> bool:
    weight = graph.weight_at(path)
    return weight is not None and bool(graph.node(weight.placeholder).users)


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Give back the model as it was before :func:`wrap`, with its present weights.

    Raises:
        RefusedError: the model is not wrapped, or released weights cannot be rebuilt.
    """
    session = session_of(model)
    if session is None:
        raise RefusedError("the model is not wrapped", where=type(model).__name__, remedy="nothing to do")
    restore(model, session.plan.recipes, session.plan.released)
    remove(model)
    return model


def refresh(model: torch.nn.Module) -> None:
    """Forget what was computed from a model's weights, so that it is computed again from what they hold now.

    Needed only after writes through ``tensor.data``, which nothing else can notice. (Optimiser steps,
    ``load_state_dict``, ``.to()`` and other writes in place are noticed.)

    Args:
        model: wrapped, or compiled with ``torch.compile(model, backend="latentscan")``.

    Raises:
        RefusedError: it is neither.
    """
    session = session_of(model)
    folds = refresh_folded(model)
    if session is not None:
        session.weights.refresh()
        session.reset()
    elif not folds:
        raise RefusedError(
            "the model is not wrapped, and nothing is compiled by the backend",
            where=type(model).__name__,
            remedy="wrap(model, ...) or torch.compile(model, backend='latentscan') first",
        )
