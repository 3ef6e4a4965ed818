"""The part of a plan that is about ranks: what each holds, and what they send to each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from latentscan.ir.errors import PipelineError
from latentscan.ir.graph import Graph
from latentscan.ir.mesh import Mesh
from latentscan.ir.order import check_order, collectives, ranks_to_try
from latentscan.ir.weights import bytes_of
from latentscan.passes.base import Context, Pass
from latentscan.passes.pipeline import Program, run, to_text
from latentscan.runtime.own import get
from latentscan.runtime.phases import Traced, values_of
from latentscan.runtime.wrap import plan_of
from latentscan.tools.break_even import sequence_ranks, shard_length
from latentscan.tools.rank_graphs import Times, alone_in, graphs_of, timed

FLOPS = 400e12  # operations a second of a device, where none are stated


def rate(text: str | None, name: str) -> float | None:
    """A number a second from text such as ``450G`` or ``4e14``; None for None.

    Raises:
        PipelineError: it is none, or not above 0.
    """
    if text is None:
        return None
    scale = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}.get(text[-1:].upper(), 1.0)
    try:
        found = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise PipelineError(f"--{name} {text!r} is no number above 0", remedy=f"write --{name} 450G")
    return found


def mesh_plan(
    model: torch.nn.Module, passes: tuple[Pass, ...], mesh: Mesh, traced: Sequence[tuple[Traced, Graph]],
    *, bandwidth: float | None = None, flops: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Bytes of weights of the ranks of ``tp``, and every collective with what one rank sends, ring algorithms.

    Of large meshes only some ranks are planned: the first, the last and a few between them; the ranks in a row between
    two that hold the same hold that too.

    Args:
        traced: the phases and their graphs before any pass.
        bandwidth: bytes a second that leave a rank; with it comes "estimate": for each phase what the first rank
            computes and sends and what of that it waits for, in seconds (``rank_graphs.timed`` says what is counted).
        flops: operations a second of a rank; FLOPS if not stated.

    Raises:
        MeshError: the ranks would not issue the same collectives in the same order.
    """
    size = mesh.axis("tp").size
    programs: dict[int, list[Program]] = {}
    for rank in ranks_to_try(mesh, "tp"):
        context = Context(own_parameters=True, meta=True, mesh=mesh.at(tp=rank) if size > 1 else mesh)
        programs[rank] = [run(graph.copy(), passes, context, strict=False) for _, graph in traced]
    rows = []
    for rank, made in programs.items():
        split, whole, trained = weight_bytes(model, made[0], to_text(passes))
        row = {"rank": rank, "bytes": split + whole, "split_bytes": split, "whole_bytes": whole}
        rows.append(row | {"gradient_bytes": trained, "optimizer_bytes": 2 * trained})  # AdamW: two moments
    sends: Counter[tuple[str, ...]] = Counter()
    counts: Counter[tuple[str, ...]] = Counter()
    for index, (item, _) in enumerate(traced):
        for phase in item.phases:
            ends = {rank: collectives(_graph(p[index])) for rank, p in programs.items()}
            check_order({rank: [c.key() for c in found] for rank, found in ends.items()}, "tp")
            graph = _graph(programs[0][index])
            cp = mesh.axis("cp").size
            new = shard_length(graph, cp, phase.new) if sequence_ranks(graph) else phase.new
            values = values_of(graph, replace(phase, new=new))
            for one in ends[0]:
                key = phase.name, one.phase, one.name, one.caller, one.axis
                counts[key] += 1
                sends[key] += int(one.sent(mesh.axis(one.axis).size).subs(dict(values)))
    columns = ("phase", "pass", "collective", "caller", "axis")
    estimate = {}
    if bandwidth is not None:
        estimate["estimate"] = estimated(passes, mesh, traced, bandwidth, flops or FLOPS)
    return {
        **estimate,
        "mesh": mesh.text(),
        "ranks": rows,
        "collectives": [
            {**dict(zip(columns, key, strict=True)), "count": counts[key], "bytes_sent": sends[key]} for key in counts
        ],
    }


def _graph(program: Program) -> Graph:
    """The graph of a program; of two forms the one that absorbs (they communicate alike)."""
    graph = program.forced(True).graph
    assert graph is not None
    return graph


def estimated(
    passes: tuple[Pass, ...], mesh: Mesh, traced: Sequence[tuple[Traced, Graph]], bandwidth: float, flops: float
) -> dict[str, Any]:
    """Seconds that the first rank computes, that its collectives take, and that it waits for them, by phase."""
    phases: dict[str, Any] = {}
    with alone_in(mesh) as here:
        for item, graph in traced:
            for phase in item.phases:
                total = Times()
                for _, made, _ in graphs_of(graph, passes, here, phase):
                    total += timed(made, here, bandwidth=bandwidth, flops=flops)
                hidden = max(0.0, 1 - total.exposed / total.sending) if total.sending else 1.0
                phases[phase.name] = {
                    "compute_s": total.compute, "sending_s": total.sending, "exposed_s": total.exposed,
                    "hidden": round(hidden, 4),
                    "exposed_share": round(total.exposed / (total.compute + total.exposed or 1.0), 4),
                }  # fmt: skip
    return {"bandwidth": bandwidth, "flops": flops, "phases": phases}


def weight_bytes(model: torch.nn.Module, program: Program, text: str) -> tuple[int, int, int]:
    """Bytes of weights that are a rank's part of something, of those that it holds whole, and of all that trains."""
    plan, graph = plan_of(program, text), _graph(program)
    made = {t: r for r in plan.recipes for t in r.targets}
    values = {a.path: graph.weights[a.placeholder].value for a in graph.added}
    gone = set(plan.released)
    split = sum(bytes_of(values[t]) for t, r in made.items() if r.group and t in values)
    new = sum(bytes_of(values[t]) for t, r in made.items() if not r.group and t in values and t not in gone)
    held = {id(p): p for _, p in (*model.named_parameters(), *model.named_buffers())}
    for path in gone - made.keys():
        held.pop(id(get(model, path)), None)
    trained = sum(bytes_of(p) for p in held.values() if p.requires_grad)
    return split, new + sum(bytes_of(p) for p in held.values()), split + new + trained
