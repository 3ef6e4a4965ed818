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

from latentscan.kernels.reference import ssm
from latentscan.kernels.triton import chunk_common
from latentscan.kernels.triton import chunk_scan as ours
from latentscan.kernels.triton.chunk_configs import Backward, Forward, Hopper

NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "init_state")
DEVICE = "cuda"
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16

# name -> (shape b L H P G N, dtype, options, forward config, backward config); None: the shipped choice.
NUMERICS: dict[str, tuple[Any, ...]] = {
    "plain bf16": ((2, 777, 8, 64, 2, 128), BF16, {"absent": ("z",)}, Forward(segments=3), Backward(workspace=1 << 22)),
    "plain z init packed": ((2, 500, 8, 64, 2, 128), BF16, {"packed": True}, Forward(segments=3), None),
    "plain fp32": ((2, 300, 4, 64, 2, 64), FP32, {"packed": True}, Forward(segments=2, out_stages=1), None),
    "plain fp16 in_proj D[H,P]": ((2, 257, 6, 64, 1, 128), FP16, {"strided": True, "channels": True}, None, None),
    "plain P80 N48": ((2, 130, 4, 80, 2, 48), BF16, {}, Forward(segments=2, out_p=32), None),
    "plain P128 N256 fp32": ((1, 150, 2, 128, 1, 256), FP32, {}, None, None),
    "shipped P256 N256": ((1, 150, 2, 256, 1, 256), BF16, {}, None, None),
    "shipped bf16 L1": ((2, 1, 8, 64, 2, 128), BF16, {}, None, None),
    "gluon": ((2, 1024, 8, 64, 2, 128), BF16, {"absent": ("z", "init_state")}, Hopper(pieces=11), None),
    "gluon z init packed": ((1, 777, 6, 64, 2, 128), BF16, {"packed": True}, Hopper(pieces=11), None),
    "gluon in_proj P128 N64": ((2, 512, 4, 128, 2, 64), FP16, {"strided": True}, Hopper(pieces=7), None),
    "gluon large": ((1, 4096, 80, 64, 1, 128), BF16, {"absent": ("z",)}, Hopper(), Backward()),
    "extreme A dt": ((2, 400, 8, 64, 2, 128), BF16, {"extreme": True, "absent": ("z",)}, None, None),
    "extreme gluon": ((1, 400, 8, 64, 2, 128), BF16, {"extreme": True, "absent": ("z",)}, Hopper(pieces=5), None),
}

FORWARDS: dict[str, Forward | Hopper | None] = {
    "shipped": None,
    "gluon 120": Hopper(pieces=120),
    "plain s12": Forward(segments=12),
    "plain s16": Forward(segments=16),
    "plain s24": Forward(segments=24),
}
BACKWARDS: dict[str, Backward | None] = {
    "shipped": None,
    "s2": Backward(stages=2),
    "w8": Backward(warps=8),
    "w8 s2": Backward(warps=8, stages=2),
    "r5": Backward(heads=5),
    "r20": Backward(heads=20),
    "g128 h10": Backward(group_heads=10),
    "g128 h40": Backward(group_heads=40),
    "g128 w8": Backward(group_warps=8),
    "g64 h20": Backward(group_n=64, group_stages=4),
    "walk64": Backward(walk_n=64),
    "walk w8": Backward(walk_warps=8),
    "walk p32": Backward(walk_p=32),
    "walk s4": Backward(walk_stages=4),
    "q128": Backward(chunk=128, warps=8, group_warps=8, walk_warps=8, walk_stages=2, group_stages=2),
    "96M": Backward(workspace=96 << 20),
    "512M": Backward(workspace=512 << 20),
}
SHAPES = {"2.7B": (80, 64, 1, 128), "Nemotron-H": (128, 64, 8, 128)}


def draw(shape: tuple[int, ...], dtype: torch.dtype, *, absent: Any = (), packed: bool = False, strided: bool = False,
         channels: bool = False, extreme: bool = False) -> tuple[dict[str, Any], torch.Tensor | None]:  # fmt: skip
    """Inputs by name and seq_idx, as a Mamba-2 layer sees them."""
    b, L, H, P, G, N = shape
    g = torch.Generator(device=DEVICE).manual_seed(0)

    def randn(*s: int) -> torch.Tensor:
        return torch.randn(*s, generator=g, device=DEVICE)

    if strided:
        line = randn(b, L, 2 * H * P + 2 * G * N + H + 7 - (H + 7) % 8).to(dtype)
        z, x, B, C, dt, _ = line.split([H * P, H * P, G * N, G * N, H, 7 - (H + 7) % 8], -1)
        z, x, B, C = z.unflatten(-1, (H, P)), x.unflatten(-1, (H, P)), B.unflatten(-1, (G, N)), C.unflatten(-1, (G, N))
    else:
        x, z, dt = (randn(*s).to(dtype) for s in ((b, L, H, P), (b, L, H, P), (b, L, H)))
        B, C = (randn(b, L, G, N).to(dtype) for _ in range(2))
    A, bias = -torch.exp(torch.rand(H, generator=g, device=DEVICE) * 2.7), randn(H) - 4
    if extreme:
        A, bias = -torch.exp(randn(H) * 8), randn(H) * 8
    values = {
        "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": randn(H, P) if channels else randn(H), "z": z, "dt_bias": bias,
        "init_state": randn(b, H, P, N),
    }  # fmt: skip
    seq_idx = None
    if packed:
        seq_idx = (torch.rand(b, L, generator=g, device=DEVICE) < 0.02).cumsum(1).int()
    return {n: None if n in absent else t for n, t in values.items()}, seq_idx


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative RMSE; nan and inf stay visible."""
    return ((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item()


class Poisoned:
    """New memory is full of NaN, so that what a kernel forgets to write is seen."""

    def __enter__(self) -> None:
        self.empty, self.empty_like = torch.empty, torch.empty_like

        def poison(t: torch.Tensor) -> torch.Tensor:
            return t.fill_(float("nan")) if t.is_floating_point() else t

        torch.empty = lambda *a, **k: poison(self.empty(*a, **k))  # type: ignore[assignment]
        torch.empty_like = lambda *a, **k: poison(self.empty_like(*a, **k))  # type: ignore[assignment]

    def __exit__(self, *_: Any) -> None:
        torch.empty, torch.empty_like = self.empty, self.empty_like  # type: ignore[assignment]


OPTIONS = {"chunk_size": 64, "dt_softplus": True}


def numerics(name: str) -> str:
    shape, dtype, how, forward, backward = NUMERICS[name]
    ins, seq = draw(shape, dtype, **how)
    exact = {k: None if t is None else t.double() for k, t in ins.items()}
    y0, f0 = ssm.chunk_scan(*exact.values(), seq, **OPTIONS)
    dy = torch.randn(y0.shape, device=DEVICE).to(dtype)
    df = torch.randn(f0.shape, device=DEVICE)
    g0 = ssm.chunk_scan_backward(dy.double(), df.double(), *exact.values(), seq, **OPTIONS)
    with Poisoned():
        y, f = ours.chunk_scan(*ins.values(), seq, **OPTIONS, config=forward)
        g1 = ours.chunk_scan_backward(dy, df, *ins.values(), seq, **OPTIONS, config=backward)
        again = ours.chunk_scan_backward(dy, df, *ins.values(), seq, **OPTIONS, config=backward)
    same = all(torch.equal(a, b) for a, b in zip(g1, again, strict=True))
    floor = error(y0.to(dtype), y0)
    words = [f"y {error(y, y0):.1e} (floor {floor:.1e})", f"state {error(f, f0):.1e}"]
    words += [f"d{n} {error(a, b):.1e}" for n, a, b in zip(NAMES, g1, g0, strict=True) if b.numel()]
    return " ".join(words) + ("" if same else "  NOT DETERMINISTIC")


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


def layer(shape: tuple[int, ...], L: int, *, z: bool = False) -> tuple[dict[str, Any], torch.Tensor]:
    absent = ("init_state",) if z else ("init_state", "z")
    ins, _ = draw((1, L, *shape), BF16, absent=absent)
    return ins, torch.randn(ins["x"].shape, device=DEVICE).to(BF16)


def timing(job: tuple[str, str, int, str], *, warm: bool = False) -> str:
    """One row: kind (forward, both), shape, tokens, config."""
    kind, shape, L, name = job
    ins, dy = layer(SHAPES[shape], L, z=name == "z")
    fc = FORWARDS.get(name) if kind == "forward" else None
    bc = BACKWARDS.get(name)

    def forward() -> Any:
        return ours.chunk_scan(*ins.values(), **OPTIONS, config=fc)

    def both() -> Any:
        forward()
        return ours.chunk_scan_backward(dy, None, *ins.values(), **OPTIONS, config=bc)

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
            row += "  " + parts(lambda: ours.chunk_scan_backward(dy, None, *ins.values(), **OPTIONS, config=bc))
    return row


def peer(shape: str, L: int, both: bool) -> str:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    ins, dy = layer(SHAPES[shape], L)
    x, dt, A, B, C, D, _, bias, _ = ins.values()
    leaves = [t.detach().requires_grad_(both) for t in (x, dt, A, B, C, D, bias)]

    def run() -> Any:
        y = mamba_chunk_scan_combined(*leaves[:5], 128, D=leaves[5], dt_bias=leaves[6], dt_softplus=True)
        return torch.autograd.grad(y, leaves, dy) if both else y

    return f"{graph_ms(run):.4f} ms  {peak_mib(run):.0f} MiB"


def jobs(quick: bool) -> list[tuple[str, str, int, str]]:
    rows = [("forward", "2.7B", 32768, name) for name in FORWARDS]
    rows += [("both", "2.7B", 32768, name) for name in BACKWARDS]
    rows += [("forward", "2.7B", L, "shipped") for L in (2048, 8192)]
    rows += [("forward", "2.7B", 32768, "z"), ("both", "2.7B", 8192, "shipped")]
    rows += [(kind, "Nemotron-H", 32768, "shipped") for kind in ("forward", "both")]
    if not quick:
        rows += [("forward", "2.7B", 131072, "shipped"), ("both", "2.7B", 2048, "shipped")]
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
    names = sorted(names, key=lambda n: "256" not in n)  # what takes longest to compile comes first
    items = [["numerics", n] for n in names] + items[len(names) :]
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
