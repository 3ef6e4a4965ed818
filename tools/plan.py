"""``latentscan plan``: what a pipeline would do to a model and what it costs, without weights and without computing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from latentscan import __version__
from latentscan.ir.cost import Kind, Values, cache_bytes_per_token, cost_by_kind, peak_bytes
from latentscan.ir.errors import PipelineError, VerifyError
from latentscan.ir.graph import Graph
from latentscan.ir.kept import training_bytes
from latentscan.ir.mesh import Mesh, parse_mesh
from latentscan.ir.weights import bytes_of
from latentscan.passes.base import Context, Pass, Refusal, Site
from latentscan.passes.pipeline import (
    Hooks,
    PassRecord,
    Program,
    first_remedy,
    no_site_text,
    parse,
    run,
    to_text,
)  # fmt: skip
from latentscan.runtime.mesh import PARALLEL, SEQUENCE
from latentscan.runtime.own import get
from latentscan.runtime.phases import Phase, Traced, traced_phases, values_of
from latentscan.runtime.plan import ModelPlan
from latentscan.runtime.source import Source
from latentscan.runtime.wrap import plan_of, planning_graph
from latentscan.tools.break_even import exchange_plan, sequence_ranks, shard_length
from latentscan.tools.fold import fold
from latentscan.tools.plan_mesh import mesh_plan, rate

SCHEMA = 1  # of the dict that `plan` returns; raised when a field changes its meaning or goes


def plan(
    source: Source,
    pipeline: str,
    *,
    batch: int = 1,
    seq: int = 32768,
    train: bool = False,
    explain: bool = False,
    mesh: str | None = None,
    bandwidth: str | None = None,
    flops: str | None = None,
    step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """What a pipeline would do to a model, as plain data.

    Args:
        source: the model; only its configuration is read.
        batch, seq: rows, and tokens a row: the prompt's length, what is cached at a decode step, or a training step's.
        train: a training step instead of prefill and decode.
        explain: every refusal and site on its own beside the folded ones.
        mesh: text such as ``tp=8``: the figures are those of its first rank, which has the largest share, and "mesh"
            tells the weights of every rank and the collectives. No process group is needed.
        bandwidth, flops: bytes that leave a rank and operations that it does a second, such as ``450G`` and ``400T``:
            "mesh" then has an estimate of what communication the ranks wait for.
        step: told what is being done.

    Returns:
        Strings, numbers, lists and dicts, the same for the same input. Sizes are bytes.
        "schema": raised when a key changes its meaning or goes. "model": name, class, parameters, dtype, layers, notes.
        "passes": a row a pass, with its rule, the form that it takes in each phase, and the bytes of the weights that
        it makes and of those that they replace. "sites", "refusals": with
        repeated layers folded. "weights": before, after, made, released. "cache": bytes_per_token of one row before and
        after, state_bytes_per_row, bytes_at_seq. "phases": by name, tokens, past, forms, and before and after each with
        flops, activation_bytes (peak, an upper estimate; or kept for the backward pass on a GPU, without the loss),
        nodes and kinds of nodes; with a sequence split over ranks, "after" is one rank's, tokens_a_rank what it
        computes, and "exchange" what it sends for each kind of layer, one way, beside an all-to-all on heads and
        recomputation, with the formulas.
        "errors": passes that find nothing, as ``wrap`` would raise them; and of a training step on a mesh what its
        first call would raise, where it cannot be split as ``wrap`` decides.

    Raises:
        PipelineError, RefusedError, CheckpointError, CaptureError: bad input. A pass that finds no site is no error
        here: it is told under "errors", and wrap would raise it.
    """
    passes = parse(pipeline)
    planned = None if mesh is None else parse_mesh(mesh)
    rates = {"bandwidth": rate(bandwidth, "bandwidth"), "flops": rate(flops, "flops")}
    if planned is None and (bandwidth or flops):
        raise PipelineError("bandwidth and flops are for a mesh", remedy="add --mesh tp=8, or leave them out")
    if flops and not bandwidth:
        raise PipelineError("flops without a bandwidth estimate nothing", remedy="add --bandwidth 450G")
    step("building the model on the meta device")
    model = source.on_meta()
    step("tracing")
    traced = traced_phases(model, batch=batch, seq=seq, train=train)
    untouched = None if planned is None else [(t, t.graph.copy()) for t in traced]
    decided = None
    if planned is not None and train:
        step("deciding as wrap does")
        decided = _decided(model, passes, planned)
    parts = [_run(model, item, passes, step, planned, decided) for item in traced]
    records = _merged([p["records"] for p in parts])
    step("summing up")
    weights, by_pass = _weights(model, parts[0]["program"], to_text(passes))
    cache = {"before": parts[0]["cache"][0], "after": parts[-1]["cache"][1]}
    state = traced[0].state_bytes
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "latentscan": __version__,
        "model": {
            "name": source.text,
            "class": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "layers": getattr(source.config.get_text_config(decoder=True), "num_hidden_layers", None),
            "notes": [
                *source.notes, *(_idle_notes(passes, records) if train else []), *_mesh_notes(passes, planned)
            ],
        },
        "pipeline": to_text(passes),
        "batch": batch,
        "seq": seq,
        "train": train,
        "passes": [_pass_row(r, parts, by_pass) for r in records],
        "sites": [
            {"pass": r.name, "module": f.module, "count": len(f.items), "rule": f.first.rule, "note": f.first.note}
            for r in records
            for f in fold(r.sites, _module, _rule, lambda s: s.note)
        ],
        "refusals": [
            {"pass": r.name, "module": f.module, "count": len(f.items), "rule": f.first.rule,
             "reason": f.first.reason, "remedy": f.first.remedy}
            for r in records
            for f in fold(r.refusals, _module, _rule, lambda s: s.reason)
        ],
        "weights": weights,
        "cache": {
            "bytes_per_token": cache,
            "state_bytes_per_row": state,
            "bytes_at_seq": {k: batch * (seq * v + state) for k, v in cache.items()},
        },
        "phases": {name: data for p in parts for name, data in p["phases"].items()},
        "errors": [e for p in parts[:1] for e in p["errors"]],
    }  # fmt: skip
    if planned is not None and untouched is not None:
        step("the other ranks")
        result["mesh"] = mesh_plan(model, passes, planned, untouched, **rates)
    if explain:
        result["all_sites"] = [
            {"pass": r.name, "module": s.module, "rule": s.rule, "note": s.note} for r in records for s in r.sites
        ]
        result["all_refusals"] = [
            {"pass": r.name, "module": s.module, "rule": s.rule, "reason": s.reason, "remedy": s.remedy}
            for r in records
            for s in r.refusals
        ]
    return result


def _decided(model: torch.nn.Module, passes: tuple[Pass, ...], mesh: Mesh) -> ModelPlan:
    """What wrap decides, on a graph of evaluation, and a training step has to do alike on every rank."""
    graph = planning_graph(model, cached=not any(p.name in SEQUENCE for p in passes))
    return plan_of(
        run(graph, passes, Context(own_parameters=True, meta=True, mesh=mesh), strict=False), to_text(passes)
    )


def _rests(current: Pass, record: PassRecord) -> bool:
    """Whether a pass that finds nothing in a training step may find something in evaluation, where wrap decides."""
    if record.refusals:
        return all(r.rule == "attention-dropout" for r in record.refusals)
    return current.phases == "cached"


def _mesh_notes(passes: tuple[Pass, ...], mesh: Mesh | None) -> list[str]:
    """That nothing is split, where wrap would refuse the mesh."""
    if mesh is None or not any(a.name != "dp" for a in mesh.axes) or any(p.name in PARALLEL + SEQUENCE for p in passes):
        return []
    words = ", ".join(PARALLEL + SEQUENCE)
    return [f"no pass uses the mesh {mesh.text()}, so every rank holds and computes all: add one of {words}"]


def _idle_notes(passes: tuple[Pass, ...], records: list[PassRecord]) -> list[str]:
    """What a training step says of passes that rest in it."""
    return [
        f"{p.name} has nothing to do in this training step"
        + (f" ({r.refusals[0].reason})" if r.refusals else ", which fills no cache")
        + "; plan without --train to see what it does"
        for p, r in zip(passes, records, strict=True)
        if not r.sites and _rests(p, r)
    ]


def _module(item: Site | Refusal) -> str:
    return item.module


def _rule(item: Site | Refusal) -> str:
    return item.rule


def _run(
    model: torch.nn.Module, traced: Traced, passes: tuple[Pass, ...], step: Callable[[str], None], mesh: Mesh | None,
    decided: ModelPlan | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One traced graph before and after the pipeline.

    Args:
        decided: what the graph has to agree with; if it cannot, "errors" says so and the rest is of the graph alone.
    """
    graph = traced.graph
    per_token = cache_bytes_per_token(graph)
    values = {phase: values_of(graph, phase) for phase in traced.phases}
    phases: dict[str, Any] = {}
    step("counting what the model costs")
    costs = cost_by_kind(graph, backward=traced.phases[0].name == "train")
    for phase in traced.phases:
        phases[phase.name] = {
            "tokens": phase.tokens, "past": phase.past, "before": _figures(graph, costs, phase, values[phase])
        }  # fmt: skip
    hooks = Hooks(before=lambda index, current, graph, record: step(current.name))
    context = Context(own_parameters=True, meta=True, mesh=mesh)
    train = traced.phases[0].name == "train"

    def finish(graph: Graph, context: Context) -> tuple[Program, dict[Phase, Program]]:
        program = run(graph, passes, context, strict=False, hooks=hooks)
        return program, {phase: _form(program, values[phase]) for phase in traced.phases}

    unlike: VerifyError | None = None
    try:
        alike = replace(context, facts=decided.facts, required=decided.required) if decided is not None else context
        program, finished = finish(graph.copy() if decided is not None else graph, alike)
    except VerifyError as error:
        if decided is None:
            raise
        unlike = error
        program, finished = finish(graph, context)
    counted: dict[int, dict[str, Kind]] = {}
    for phase, end in finished.items():
        assert end.graph is not None
        if id(end) not in counted:
            step(f"counting what {phase.name} costs")
            counted[id(end)] = cost_by_kind(end.graph, backward=phase.name == "train")
        mine = values[phase]
        if sequence_ranks(end.graph):  # a rank's graph: its part of the tokens
            ranks = mesh.axis("cp").size if mesh is not None else 1
            share = shard_length(end.graph, ranks, phase.new)
            phases[phase.name]["tokens_a_rank"] = phase.batch * share
            mine = values_of(end.graph, replace(phase, new=share))
        phases[phase.name]["after"] = _figures(end.graph, counted[id(end)], phase, mine)
        if sequence_ranks(end.graph):
            forward = sum(k.flops.at(mine) for name, k in counted[id(end)].items() if not name.endswith(" backward"))
            phases[phase.name]["exchange"] = exchange_plan(end.graph, ranks, phase.batch, phase.new, forward)
        phases[phase.name]["forms"] = {
            r.name: _taken(r, values[phase]) for r in end.records if r.choice is not None and r.sites
        }
    last = list(finished.values())[-1]
    assert last.graph is not None
    errors = [
        {"pass": r.name, "message": no_site_text(p, r), "remedy": first_remedy(r)}
        for p, r in zip(passes, last.records, strict=True)
        if not r.sites and not p.may_be_empty and not (train and _rests(p, r))
    ]
    if unlike is not None:
        place, _, what = str(unlike.where).partition(" at ")
        message = f"the first step would raise: {what}: {unlike.what}" if what else unlike.what
        errors.append({"pass": place, "message": message, "remedy": unlike.remedy})
    return {
        "program": program, "records": last.records, "phases": phases, "errors": errors,
        "cache": (per_token, cache_bytes_per_token(last.graph)),
    }  # fmt: skip


def _form(program: Program, values: Values) -> Program:
    """The form that a program takes for given sizes."""
    while program.choice is not None:
        make = program.yes if bool(program.choice.condition.subs(dict(values))) else program.no
        assert make is not None
        program = make()
    return program


def _taken(record: PassRecord, values: Values) -> str:
    assert record.choice is not None
    return record.choice.yes if bool(record.choice.condition.subs(dict(values))) else record.choice.no


def _figures(graph: Graph, kinds: dict[str, Kind], phase: Phase, values: Values) -> dict[str, Any]:
    """Costs of one phase: operations, bytes moved by what is counted, memory of activations."""
    rows = {
        name: {
            "nodes": k.nodes,
            "flops": k.flops.at(values),
            "read": k.read.at(values),
            "written": k.written.at(values),
        }
        for name, k in kinds.items()
    }
    activations = training_bytes(graph, values) if phase.name == "train" else peak_bytes(graph, values)
    return {
        "flops": sum(r["flops"] for r in rows.values()),
        "activation_bytes": activations,
        "nodes": len(graph.nodes),
        "kinds": rows,
    }


def _merged(lists: list[list[PassRecord]]) -> list[PassRecord]:
    """Records of several graphs as one: a place that one graph lacks is taken from another."""
    merged = []
    for records in zip(*lists, strict=True):
        first = PassRecord(
            **{**records[0].__dict__, "sites": list(records[0].sites), "refusals": list(records[0].refusals)}
        )
        for other in records[1:]:
            known = {s.module for s in first.sites} | {r.module for r in first.refusals}
            first.sites += [s for s in other.sites if s.module not in known]
            first.refusals += [r for r in other.refusals if r.module not in known]
            first.choice = first.choice or other.choice
        merged.append(first)
    return merged


def _pass_row(record: PassRecord, parts: list[dict[str, Any]], by_pass: dict[str, tuple[int, int]]) -> dict[str, Any]:
    forms = {
        name: phase["forms"][record.name]
        for p in parts
        for name, phase in p["phases"].items()
        if record.name in phase["forms"]
    }
    return {
        "pass": record.text,
        "name": record.name,
        "tier": record.tier,
        "sites": len(record.sites),
        "refusals": len(record.refusals),
        "nodes": record.nodes_after - record.nodes_before,
        "new_weight_bytes": by_pass.get(record.name, (0, 0))[0],
        "released_weight_bytes": by_pass.get(record.name, (0, 0))[1],
        "rule": record.choice.rule if record.choice is not None else None,
        "forms": forms,
    }


def _weights(model: torch.nn.Module, program: Program, text: str) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """Bytes of the model's weights before and after, and what each pass makes and replaces."""
    decided = plan_of(program, text)
    forms = [program] if program.choice is None else [program.forced(True), program.forced(False)]
    values = {a.path: f.graph.weights[a.placeholder].value for f in forms if f.graph is not None for a in f.graph.added}
    made = {t: bytes_of(values[t]) for r in decided.recipes for t in r.targets}
    before = sum(bytes_of(t) for t in (*model.parameters(), *model.buffers()))
    return weight_bytes(before, decided, made, {path: bytes_of(get(model, path)) for path in decided.released})


def weight_bytes(
    before: int, decided: ModelPlan, made: dict[str, int], released: dict[str, int]
) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """Totals, and (made, released) by pass; a released weight counts for the first pass that reads it.

    Args:
        before: bytes of all weights. made, released: bytes by path.
    """
    by_pass: dict[str, tuple[int, int]] = {}
    left = dict(released)
    for recipe in decided.recipes:
        new, old = by_pass.get(recipe.maker, (0, 0))
        new += sum(made[t] for t in recipe.targets)
        old += sum(left.pop(s, 0) for s in recipe.sources)
        by_pass[recipe.maker] = new, old
    total_made, total_released = sum(made.values()), sum(released.values())
    totals = {
        "before": before, "after": before + total_made - total_released, "made": total_made, "released": total_released
    }  # fmt: skip
    return totals, by_pass
