"""The chunk scan on a GPU, in one command: numbers against fp64 with poisoned memory, then times and peak memory.

    PYTHONPATH=<folder that holds latentscan> python3 -m latentscan.tests.device.ssd_device [--quick] [--only TEXT]

One failure does not stop the rest. Kernels are compiled in worker processes, as many as there are cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from latentscan.kernels.triton import chunk_common
from latentscan.kernels.triton import chunk_scan as ours
from latentscan.kernels.triton.chunk_configs import Backward, Forward, Hopper, HopperBackward
from latentscan.tests.kernels.chunk_scan_checks import Case, draw, errors

DEVICE = "cuda"
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16

# A config of None is the shipped choice.
NUMERICS: dict[str, Case] = {
    "plain P128 N256 fp32": Case((1, 150, 2, 128, 1, 256), FP32),
    "P256 N256": Case((1, 150, 2, 256, 1, 256), BF16),
    "plain bf16": Case((2, 777, 8, 64, 2, 128), BF16, Forward(segments=3), Backward(workspace=1 << 22), ("z",)),
    "plain z init packed": Case((2, 500, 8, 64, 2, 128), BF16, Forward(segments=3), packed="seq_idx"),
    "plain fp32": Case((2, 300, 4, 64, 2, 64), FP32, Forward(segments=2, out_stages=1), packed="seq_idx"),
    "plain fp16 in_proj D[H,P]": Case((2, 257, 6, 64, 1, 128), FP16, strided=True, channels=True),
    "plain P80 N48": Case((2, 130, 4, 80, 2, 48), BF16, Forward(segments=2, out_p=32)),
    "one token": Case((2, 1, 8, 64, 2, 128), BF16),
    "gluon": Case((2, 1024, 8, 64, 2, 128), BF16, Hopper(pieces=11, state_parts=3), None, ("z", "init_state")),
    "gluon back": Case((2, 1024, 32, 64, 2, 128), BF16, None, HopperBackward(pieces=23, segments=3), ("z",)),
    "gluon back, plain": Case((2, 1024, 32, 64, 2, 128), BF16, None, Backward(), ("z",)),
    "gluon back, one program": Case((1, 256, 16, 64, 1, 128), BF16, None, HopperBackward(pieces=1, segments=1)),
    "gluon back cu_seqlens": Case(
        (1, 777, 32, 64, 2, 128),
        BF16,
        None,
        HopperBackward(pieces=23, segments=2, state_parts=2),
        ("z",),
        packed=(0, 5, 64, 65, 400, 777),
    ),
    "gluon back, slabs in dx": Case((1, 2000, 32, 64, 2, 128), BF16, None, HopperBackward(workspace=2 << 20), ("z",)),
    "gluon back odd share": Case((2, 384, 27, 64, 3, 128), BF16, None, HopperBackward(pieces=17, segments=2), ("z",)),
    "gluon back P128 N64 line": Case(
        (2, 512, 16, 128, 2, 64), FP16, None, HopperBackward(pieces=7, segments=2, every=4), ("z",), strided=True
    ),
    "gluon z init cu_seqlens": Case(
        (1, 777, 6, 64, 2, 128), BF16, Hopper(pieces=11, state_parts=4), packed=(0, 5, 64, 65, 400, 777)
    ),
    "gluon in_proj P128 N64": Case((2, 512, 4, 128, 2, 64), FP16, Hopper(pieces=7), strided=True),
    "gluon odd share": Case((2, 384, 9, 64, 3, 128), BF16, Hopper(pieces=13, state_parts=2)),
    "shipped large": Case((1, 4096, 80, 64, 1, 128), BF16, absent=("z",)),
    "shipped long": Case((1, 8500, 16, 64, 2, 128), BF16, absent=("z",)),
    "shipped long, z": Case((1, 8500, 16, 64, 2, 128), BF16, packed="seq_idx"),
    "shipped many units": Case((40, 256, 16, 64, 1, 128), BF16, absent=("z",)),
    "extreme A dt": Case((2, 400, 8, 64, 2, 128), BF16, Forward(segments=2), None, ("z",), extreme=True),
    "extreme A dt, 10000 heads": Case((1, 192, 10000, 16, 1, 16), BF16, None, None, ("z",), extreme=True),
    "extreme gluon": Case((1, 400, 512, 64, 2, 128), BF16, Hopper(pieces=5), HopperBackward(), ("z",), extreme=True),
    "70000 heads": Case((2, 33, 35000, 16, 1, 16), BF16, None, None, ("z",)),
}

# Name -> choice, to compare on the device before the shipped table is changed; "shipped" is what users get.
FORWARDS: dict[str, Forward | Hopper | None] = {"shipped": None, "plain": Forward(segments=16)}
BACKWARDS: dict[str, Backward | HopperBackward | None] = {
    "shipped": None,
    "one segment": HopperBackward(segments=1),
    "fixed order": HopperBackward(atomic=False),
}
SHAPES = {"2.7B": (80, 64, 1, 128), "Nemotron-H": (128, 64, 8, 128)}


def numerics(name: str) -> str:
    found = errors(NUMERICS[name], DEVICE, repeat=True, condition=True)
    shown = {k: v for k, v in found.items() if k != "changed" and not k.startswith("floor d")}
    # Sums over tokens may nearly cancel: how far the inputs' last bits move them.
    loose = {k: v for k, v in found.items() if k.startswith("floor d") and v > 2e-3}
    told = " ".join(f"{k} {v:.1e}" for k, v in {**shown, **loose}.items())
    return told + ("  NOT DETERMINISTIC" if found["changed"] else "")


def graph_ms(run: Callable[[], Any], inner: int = 3, repeats: int = 7) -> float:
    """Median of CUDA-graph replays, milliseconds a run."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            run()
    times = []
    for i in range(repeats + 1):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        if i:
            times.append(a.elapsed_time(b) / inner)
    return sorted(times)[len(times) // 2]


def peak_mib(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def parts(run: Callable[[], Any]) -> str:
    """Milliseconds of each kernel by graph replay of each launch alone; the sums of launches of a name."""
    total: dict[str, float] = {}

    def record(kernel: Any, grid: int, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        took = graph_ms(lambda: kernel[(grid,)](*args, **meta), inner=3, repeats=3)
        total[kernel.__name__] = total.get(kernel.__name__, 0.0) + took

    chunk_common.recorder = record
    try:
        run()
    finally:
        chunk_common.recorder = None
    return " ".join(f"{k.removesuffix('_kernel')} {v:.3f}" for k, v in total.items())


def layer(shape: tuple[int, ...], L: int, more: str = "") -> tuple[list[Any], dict[str, Any], torch.Tensor]:
    """Inputs, other arguments and dy of a layer with D, dt_bias and softplus; ``more``: z, init or packed."""
    absent = tuple(n for n, word in (("z", "z"), ("init_state", "init")) if word != more)
    case = Case((1, L, *shape), BF16, absent=absent, packed=tuple(range(0, L + 1, 1000)) if more == "packed" else None)  # type: ignore[arg-type]
    ins, other = draw(case, DEVICE)
    return ins, other, torch.randn(ins[0].shape, device=DEVICE).to(BF16)  # type: ignore[union-attr]


def timing(job: tuple[str, str, int, str], *, warm: bool = False) -> str:
    """One row: kind (forward, both), shape, tokens, config."""
    kind, shape, L, name = job
    ins, other, dy = layer(SHAPES[shape], L, name)
    fc = FORWARDS.get(name) if kind == "forward" else None
    bc = BACKWARDS.get(name)

    def forward() -> Any:
        return ours.chunk_scan(*ins, **other, config=fc)

    def backward(starts: torch.Tensor) -> Any:
        return ours.chunk_scan_backward(dy, None, *ins, **other, config=bc, starts=starts)

    def both() -> Any:
        # y is gone by the backward, as where a layer's output is not kept.
        return backward(ours.chunk_scan(*ins, **other, keep_starts=True)[2])

    run = forward if kind == "forward" else both
    if warm:
        run()
        torch.cuda.synchronize()
        return "warm"
    row = f"{graph_ms(run):.4f} ms"
    if L == 32768:
        row += f"  {peak_mib(run):.0f} MiB"
        if kind == "forward":
            row += "  " + parts(forward)
        else:
            starts = ours.chunk_scan(*ins, **other, keep_starts=True)[2]
            row += "  " + parts(lambda: backward(starts))
    return row


def peer(shape: str, L: int, both: bool) -> str:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    ins, _, dy = layer(SHAPES[shape], L)
    x, dt, A, B, C, D, _, bias, _ = ins
    leaves = [t.detach().requires_grad_(both) for t in (x, dt, A, B, C, D, bias)]

    def run() -> Any:
        y = mamba_chunk_scan_combined(*leaves[:5], 128, D=leaves[5], dt_bias=leaves[6], dt_softplus=True)
        return torch.autograd.grad(y, leaves, dy) if both else y

    return f"{graph_ms(run):.4f} ms  {peak_mib(run):.0f} MiB"


def jobs(quick: bool) -> list[tuple[str, str, int, str]]:
    rows = [("forward", "2.7B", 32768, name) for name in FORWARDS]
    rows += [("both", "2.7B", 32768, name) for name in BACKWARDS]
    rows += [("forward", "2.7B", L, "shipped") for L in (2048, 8192)]
    rows += [(kind, "Nemotron-H", 32768, "shipped") for kind in ("forward", "both")]
    rows += [("forward", "2.7B", 32768, name) for name in ("z", "init", "packed")]
    if not quick:
        rows += [("forward", "2.7B", 131072, "shipped"), ("both", "2.7B", 2048, "shipped")]
        rows += [("both", "2.7B", 8192, "shipped"), ("both", "2.7B", 32768, "z")]
    return rows


def attempt(run: Callable[[], str]) -> str:
    try:
        return run()
    except Exception as e:  # noqa: BLE001  (the other rows still run)
        text = " ".join(str(e).split())
        return f"FAILED {type(e).__name__}: {text[:160]}"


def worker(item: list[Any]) -> str:
    """In its own process, so that an illegal access there does not end the others."""
    command = [sys.executable, "-m", "latentscan.tests.device.ssd_device", "--worker", json.dumps(item)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "FAILED: more than 60 s"
    lines = (done.stdout.strip() or done.stderr.strip() or "died").splitlines()
    return lines[-1][:400]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("ssd_device: no CUDA device")
    if args.worker:
        item = json.loads(args.worker)
        run = (lambda: numerics(item[1])) if item[0] == "numerics" else (lambda: timing(tuple(item[1]), warm=True))
        print(attempt(run))
        return
    begun = time.time()
    import triton

    print(f"{torch.cuda.get_device_name()} torch {torch.__version__} triton {triton.__version__}", flush=True)
    names = [n for n in NUMERICS if args.only in n]
    rows = [j for j in jobs(args.quick) if args.only in " ".join(map(str, j))]
    items = [["numerics", n] for n in names] + [["warm", list(j)] for j in rows if j[2] <= 32768]
    with ThreadPoolExecutor(min(14, max(2, (os.cpu_count() or 4) - 2))) as pool:
        told = list(pool.map(worker, items))
    for name, text in zip(names, told, strict=False):
        print(f"{name:26s} {text}")
    bad = [f"{i}: {t}" for i, t in zip(items, told, strict=True) if t.startswith("FAILED")]
    print(*bad, f"[{time.time() - begun:.0f} s]", sep="\n", flush=True)
    for row in rows:
        if time.time() - begun > (58 if args.quick else 112):
            print("out of time")
            break
        print(f"{row[0]:8s}{row[1]:11s}{row[2]:7d} {row[3]:14s} {attempt(lambda: timing(row))}", flush=True)  # noqa: B023
        torch.cuda.empty_cache()
    for shape, L, both in (("2.7B", 32768, False), ("2.7B", 32768, True), ("2.7B", 2048, False)):
        if args.only or attempt(lambda: str(__import__("mamba_ssm"))).startswith("FAILED"):
            break
        print(f"mamba_ssm {shape} {L} {'both' if both else 'forward'} {attempt(lambda: peer(shape, L, both))}")  # noqa: B023
    print(f"[{time.time() - begun:.0f} s]")


if __name__ == "__main__":
    main()
