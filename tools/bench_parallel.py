"""``latentscan bench parallel``: training steps over a mesh, beside one process and without communication."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from latentscan import __version__
from latentscan.ir.errors import MeshError, PipelineError
from latentscan.ir.mesh import parse_mesh
from latentscan.passes.pipeline import parse, to_text
from latentscan.runtime.batch import split_batch
from latentscan.runtime.door import session_of
from latentscan.runtime.mesh import PARALLEL, SEQUENCE
from latentscan.runtime.tiny import choose_experts
from latentscan.runtime.wrap import wrap
from latentscan.tools.bench_models import builder, config_of

SCHEMA = 1  # of the dict that `bench_parallel` returns; raised when a field changes its meaning or goes
OVERLAP = "overlap-collectives"
# In this order; the silent ones send nothing, so that their numbers are wrong and only their time counts.
VARIANTS = ("one", "plain", "overlap", "plain-silent", "overlap-silent")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """What is measured. Sizes are tokens and rows of the whole batch, before any axis cuts it.

    Attributes:
        model: a class of :mod:`bench_models` or any model that the command takes; random weights.
        mesh: text such as ``tp=2,cp=2,dp=2``: as many processes as torchrun started.
        pipeline: with the parallel passes; ``overlap-collectives`` is added and left out by the variants.
        layers: the first so many; None: all.
        steps, warmup: optimiser steps that are timed, and those before them, the first of which compiles.
        recompute: ``none`` or ``full``: gradient checkpointing of every layer.
        optimizer: ``adamw``, ``sgd`` or ``none`` (forward and backward only).
        variants: names of VARIANTS.
    """

    model: str
    mesh: str
    pipeline: str
    layers: int | None = None
    seq: int = 8192
    batch: int = 1
    steps: int = 5
    warmup: int = 2
    dtype: str = "auto"
    recompute: str = "none"
    optimizer: str = "adamw"
    inductor: str = "auto"
    target: str = "auto"
    variants: tuple[str, ...] = VARIANTS
    seed: int = 0

    def check(self) -> None:
        for name, value, known in (
            ("dtype", self.dtype, ("auto", *_DTYPES)),
            ("recompute", self.recompute, ("none", "full")),
            ("optimizer", self.optimizer, ("adamw", "sgd", "none")),
            *(("variants", v, VARIANTS) for v in self.variants),
        ):
            if value not in known:
                raise PipelineError(f"{name}={value!r} is not one of {', '.join(known)}", remedy="use one of these")
        passes = parse(self.pipeline)
        if not any(p.name in PARALLEL + SEQUENCE for p in passes):
            raise PipelineError(
                f"no pass of {self.pipeline!r} uses a mesh", remedy=f"add one of {', '.join(PARALLEL + SEQUENCE)}"
            )
        if self.seq % parse_mesh(self.mesh).axis("cp").size:
            raise MeshError(
                f"{self.seq} tokens cannot be shared evenly by mesh {self.mesh}", remedy="give another --seq"
            )


def bench_parallel(case: Case, *, step: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure; every rank calls it, started by torchrun. The same dict on all ranks.

    Returns:
        the case, and "variants": by name "ms" (median of the steps, of the slowest rank), "ms_every" (of the slowest
        rank), "peak_bytes" and "weight_bytes" by rank, "compile_s" (the first step), "losses" (of every step, warm-up
        included), "tokens_per_second", "collectives" (of a step) and "scheduled" (starts, and computing nodes between
        start and wait before and after, of forward and backward).
        "exposed": by variant, (ms - ms of the same without communication) / ms.
        "parity": by variant, the largest difference of a step's loss from one process's, relative to it.
        "speedup": by variant, over one process. "machine": device and number of processes.

    Raises:
        MeshError: started with another number of processes. PipelineError: a bad option.
    """
    import torch.distributed as dist

    case.check()
    device = _start(case)
    mesh = _device_mesh(case, device)
    dtype = _DTYPES.get(case.dtype) or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    build = builder(config_of(case.model, case.layers), dtype, device, case.seed)
    found: dict[str, Any] = {}
    for name in [v for v in VARIANTS if v in case.variants]:
        step(name)
        mine = _measure(name, case, build, mesh, device) if name != "one" or dist.get_rank() == 0 else None
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        found[name] = _joined([e for e in every if e is not None], case)
        step(f"{name}: {found[name]['ms']} ms")
        _forget(device)
    return {
        "schema": SCHEMA,
        "latentscan": __version__,
        "torch": torch.__version__,
        **{k: getattr(case, k) for k in ("model", "mesh", "pipeline", "layers", "seq", "batch", "steps", "recompute")},
        **{k: getattr(case, k) for k in ("optimizer", "inductor", "target")},
        "dtype": str(dtype).removeprefix("torch."),
        "machine": {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "processes": dist.get_world_size(),
            "backend": dist.get_backend(),
        },
        "variants": found,
        **_compared(found),
    }


def count_parallel(case: Case, *, step: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The same case counted instead of measured: one process stands for ranks all over the mesh, none computes.

    Returns:
        the case, and what :func:`latentscan.tools.rank_graphs.everywhere` counts of a training step.

    Raises:
        MeshError: two ranks would wait for each other for ever. PipelineError: a bad option.
    """
    from transformers import AutoModelForCausalLM

    from latentscan.runtime.phases import traced_phases
    from latentscan.tools.rank_graphs import everywhere

    case.check()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config_of(case.model, case.layers), dtype=_DTYPES.get(case.dtype, torch.bfloat16)
        )  # fmt: skip
    choose_experts(model)
    if case.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    step("tracing")
    traced = traced_phases(model, batch=case.batch, seq=case.seq, train=True)[0]
    step("counting")
    told = everywhere(
        traced.graph, parse(_pipelines(case.pipeline, "overlap")), parse_mesh(case.mesh), traced.phases[0]
    )
    names = ("model", "mesh", "pipeline", "layers", "seq", "batch", "recompute")
    return {"schema": SCHEMA, "latentscan": __version__, **{k: getattr(case, k) for k in names}, **told}


def show_counted(data: dict[str, Any], console: Any) -> None:
    """What was counted, for people."""
    console.print(
        f"{data['model']}, mesh {data['mesh']}, {data['pipeline']}: {len(data['ranks'])} ranks tried, the same order "
        "on all of them", highlight=False, markup=False,
    )  # fmt: skip
    for phase in ("forward", "backward"):
        row = data[phase]
        kinds = ", ".join(f"{count} {name}" for name, count in row["by_kind"].items())
        low, high = row["bytes_sent"]
        console.print(
            f"{phase}: {row['collectives']} collectives ({kinds}), a rank sends {low:,} to {high:,} bytes, computing "
            f"nodes between start and wait {row['between'][0]} -> {row['between'][1]}",
            highlight=False, markup=False,
        )  # fmt: skip


def _start(case: Case) -> torch.device:
    """Join the job that torchrun started; gives this rank's device."""
    import torch.distributed as dist

    size, started = parse_mesh(case.mesh).size, int(os.environ.get("WORLD_SIZE", "1"))
    if size != started:
        raise MeshError(
            f"mesh {case.mesh} has {size} ranks, and {started} processes were started",
            where="bench parallel",
            remedy=f"torchrun --standalone --nproc-per-node {size} -m latentscan.tools.cli bench parallel ..., "
            "or --fake for order and volumes without processes",
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


def _device_mesh(case: Case, device: torch.device) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    axes = parse_mesh(case.mesh).axes
    return init_device_mesh(
        device.type, tuple(a.size for a in axes), mesh_dim_names=tuple(a.name for a in axes)
    )  # fmt: skip


def _pipelines(text: str, name: str) -> str:
    """The pipeline of a variant."""
    passes = [p for p in parse(text) if p.name != OVERLAP]
    if name == "one":
        return to_text([p for p in passes if p.name not in PARALLEL + SEQUENCE])
    given = next((p.text() for p in parse(text) if p.name == OVERLAP), OVERLAP)
    return ",".join([to_text(passes), given] if name.startswith("overlap") else [to_text(passes)])


def _measure(name: str, case: Case, build: Callable[[], Any], mesh: Any, device: torch.device) -> dict[str, Any]:
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = build()
    if case.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    one = name == "one"
    wrap(
        model, _pipelines(case.pipeline, name), mesh=None if one else mesh, inductor=case.inductor, target=case.target
    )  # fmt: skip
    session = session_of(model)
    assert session is not None
    if name.endswith("silent"):
        silence(session)
    called = model
    dp = 1 if one else parse_mesh(case.mesh).axis("dp").size
    if dp > 1:
        torch._dynamo.config.optimize_ddp = False
        called = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    optimizer = _optimizer(case.optimizer, model)
    times: list[float] = []
    losses: list[float] = []
    compile_s = 0.0
    for number in range(case.warmup + case.steps):
        batch = _batch(case, model, number, device)
        if not one:
            batch = _part(batch, mesh, dp)
            dist.barrier()
        ms, loss = _timed(lambda b=batch: _step(called, optimizer, b), device)  # type: ignore[misc]
        compile_s = compile_s or ms / 1e3
        losses.append(loss)
        times += [ms] if number >= case.warmup else []
    traced = session.graphs[-1]
    return {
        "times": times,
        "losses": losses,
        "compile_s": round(compile_s, 2),
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "collectives": traced.collectives,
        "scheduled": [
            {
                "phase": s.phase,
                "starts": len(s.collectives),
                "before": sum(c.before for c in s.collectives),
                "after": sum(c.after for c in s.collectives),
                "peak_before": s.peak_before,
                "peak_after": s.peak_after,
            }
            for s in traced.scheduled
        ],
    }


def _optimizer(name: str, model: torch.nn.Module) -> Any:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-4)
    return torch.optim.SGD(parameters, lr=1e-3) if name == "sgd" else None


def _batch(case: Case, model: Any, number: int, device: torch.device) -> dict[str, Any]:
    """The same rows for every rank and variant."""
    vocabulary = model.config.get_text_config().vocab_size
    g = torch.Generator().manual_seed(1000 * case.seed + number % 2)  # two batches in turn: the loss has to fall
    ids = torch.randint(0, vocabulary, (case.batch, case.seq), generator=g).to(device)
    return {"input_ids": ids, "labels": ids}


def _part(batch: dict[str, Any], mesh: Any, dp: int) -> dict[str, Any]:
    """This rank's rows along dp and tokens along cp."""
    if dp > 1:
        rank = mesh.get_local_rank("dp")
        batch = {k: v.chunk(dp)[rank] for k, v in batch.items()}
    return split_batch(batch, mesh) if "cp" in mesh.mesh_dim_names else batch


def _step(model: Any, optimizer: Any, batch: dict[str, Any]) -> torch.Tensor:
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    else:
        for p in model.parameters():
            p.grad = None
    return loss.detach()


def _timed(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, float]:
    """Milliseconds on the device, and the loss."""
    if device.type == "cpu":
        began = time.perf_counter()
        loss = call()
        return (time.perf_counter() - began) * 1e3, float(loss)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    loss = call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last), float(loss)


def silence(session: Any) -> None:
    """Let a session's collectives send nothing: every rank takes what it has for what the others would send. Values
    stay of their usual size (with garbage or zeros, matrix products take less power and run faster)."""
    session.silence({a.group: "" for a in session.mesh.axes})


def _forget(device: torch.device) -> None:
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _joined(every: list[dict[str, Any]], case: Case) -> dict[str, Any]:
    """What the ranks found as one: the slowest rank's times, every rank's memory."""
    slowest = max(every, key=lambda e: statistics.median(e["times"]))
    ms = statistics.median(slowest["times"])
    return {
        "ms": round(ms, 3),
        "ms_every": [round(t, 3) for t in slowest["times"]],
        "tokens_per_second": round(case.batch * case.seq / ms * 1e3, 1),
        "peak_bytes": [e["peak_bytes"] for e in every],
        "weight_bytes": [e["weight_bytes"] for e in every],
        "compile_s": max(e["compile_s"] for e in every),
        "losses": [statistics.fmean(step) for step in zip(*(e["losses"] for e in every), strict=True)],  # dp: own rows
        "collectives": every[0]["collectives"],
        "scheduled": every[0]["scheduled"],
    }


def _compared(found: dict[str, Any]) -> dict[str, Any]:
    exposed, parity, speedup = {}, {}, {}
    for name in ("plain", "overlap"):
        if name not in found:
            continue
        mine = found[name]
        silent = found.get(f"{name}-silent") or found.get("plain-silent") or found.get("overlap-silent")
        if silent is not None:
            exposed[name] = round((mine["ms"] - silent["ms"]) / mine["ms"], 4)
        if "one" in found:
            pairs = list(zip(mine["losses"], found["one"]["losses"], strict=True))
            parity[name] = max(abs(a - b) / abs(b) for a, b in pairs)
            speedup[name] = round(found["one"]["ms"] / mine["ms"], 3)
    return {"exposed": exposed, "parity": parity, "speedup": speedup}


def show(data: dict[str, Any], console: Any) -> None:
    """The figures for people."""
    from rich.table import Table

    machine = data["machine"]
    console.print(
        f"{data['model']}, {data['layers'] or 'all'} layers, {data['dtype']}, {data['batch']} x {data['seq']} tokens, "
        f"mesh {data['mesh']}, {data['pipeline']}; {machine['processes']} x {machine['device']}, {machine['backend']}",
        highlight=False, markup=False,
    )  # fmt: skip
    table = Table(box=None, pad_edge=False)
    for column in ("", "step ms", "tokens/s", "speed-up", "exposed", "peak GiB", "loss from one"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in data["variants"].items():
        peaks = [p for p in row["peak_bytes"] if p is not None]
        table.add_row(
            name, f"{row['ms']:.2f}", f"{row['tokens_per_second']:,.0f}",
            f"{data['speedup'][name]:.2f}" if name in data["speedup"] else "",
            f"{data['exposed'][name]:.1%}" if name in data["exposed"] else "",
            ", ".join(f"{p / 2**30:.2f}" for p in peaks),
            f"{data['parity'][name]:.1e}" if name in data["parity"] else "",
        )  # fmt: skip
    console.print(table)
    for row in data["variants"].get("overlap", {}).get("scheduled", []):
        console.print(
            f"{row['phase']}: {row['starts']} collectives, computing nodes between start and wait "
            f"{row['before']} -> {row['after']}, bytes alive at once {row['peak_before']:,} -> {row['peak_after']:,}",
            highlight=False,
        )  # fmt: skip
