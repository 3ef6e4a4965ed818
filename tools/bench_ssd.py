"""``latentscan bench ssd``: the chunk scan's time, floors, peak memory and error on this machine's GPU, beside peers.

Times are medians of CUDA-graph replays, peers alike and on the same inputs; peak memory leaves out the inputs and the
incoming gradient. The byte floor is x, y, B, C and dt once each (forward), with dy, dx, dB, dC and ddt more (both), at
the bandwidth that a copy reaches here; the FLOP floor is the work of the op's cost at what a bf16 product reaches.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from latentscan.ir.errors import KernelError
from latentscan.tools import tune_ssd

SCHEMA = 1
SHAPES: dict[str, tuple[int, int, int, int]] = {
    "mamba2-2.7b": (80, 64, 1, 128),
    "nemotron-h-8b": (128, 64, 8, 128),
    "bamba-9b": (128, 64, 1, 128),
}


def bench_ssd(
    shape: str = "mamba2-2.7b", *, seq: int = 32768, batch: int = 1, tune: Path | None = None,
    table: Path | None = None, step: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Measure forward, and forward with backward.

    Args:
        shape: a name of ``SHAPES`` or four numbers H,P,G,N.
        tune: a table of tiles; those near the shipped ones are tried first, and the best are written there and used.
        table: a table of tiles to use.
        step: told what is being done.

    Raises:
        KernelError: no GPU, a shape that is none, or a file that is no table.
    """
    sizes = parse_shape(shape)
    if tune is not None and table is not None:
        raise KernelError("a table is both made and given", where="bench ssd", remedy="give --tune or --table")
    tiles = tune_ssd.table_at(table) if table is not None else None
    if not torch.cuda.is_available():
        raise KernelError("there is no CUDA device on this machine", where="bench ssd", remedy="run it on one that has")
    from latentscan.kernels.triton import chunk_scan as ours

    ins = inputs(batch, seq, *sizes)
    dy = torch.randn_like(ins["x"])
    options: dict[str, Any] = {"chunk_size": 128, "dt_softplus": True}

    tuned = tune_ssd.tune(tune, ins, graph_ms, step) if tune is not None else []
    if tune is not None:
        tiles = tune_ssd.table_at(tune)
    chosen = [None, None] if tiles is None else [way(ins["x"], ins["B"]) for way in (tiles.forward, tiles.backward)]
    text = "" if tiles is None else tiles.text()

    def forward() -> Any:
        return ours.chunk_scan(**ins, **options, tiles=text)

    def both() -> Any:
        kept = ours.chunk_scan(**ins, **options, tiles=text, keep_starts=True)[2]  # as in training; y is gone
        return ours.chunk_scan_backward(dy, None, **ins, **options, tiles=text, starts=kept)

    step("what this device can do")
    bandwidth, arithmetic = device_limits()
    rows = []
    for name, run in (("forward", forward), ("forward+backward", both)):
        step(f"ours, {name}")
        moved, flops = floors(ins, backward=run is both)
        ms = graph_ms(run)
        rows.append(
            {
                "what": "latentscan", "pass": name, "ms": ms, "eager_ms": eager_ms(run), "peak_mib": peak_mib(run),
                "byte_floor_ms": moved / bandwidth * 1e3, "flop_floor_ms": flops / arithmetic * 1e3,
                "of_bandwidth": moved / bandwidth * 1e3 / ms, "of_flops": flops / arithmetic * 1e3 / ms,
            }
        )  # fmt: skip
    for peer, make in PEERS.items():
        if importlib.util.find_spec(peer.split(".")[0]) is None:
            continue
        for name, backward in (("forward", False), ("forward+backward", True)):
            step(f"{peer}, {name}")
            rows.append({"what": peer, "pass": name, **attempt(make, ins, dy, backward)})
    step("error against fp64")
    return {
        "schema": SCHEMA, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "shape": shape,
        "batch": batch, "seq": seq, "heads": sizes[0], "head_dim": sizes[1], "groups": sizes[2], "d_state": sizes[3],
        "bandwidth_tb_s": bandwidth / 1e12, "bf16_tflop_s": arithmetic / 1e12, "rows": rows,
        "error": fp64_error(sizes, options), "tuned": tuned, "tiles": [repr(c) if c else "shipped" for c in chosen],
    }  # fmt: skip


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """H, P, G, N of a known name or of ``80,64,1,128``."""
    if text in SHAPES:
        return SHAPES[text]
    try:
        H, P, G, N = (int(part) for part in text.split(","))
    except ValueError:
        known = ", ".join(SHAPES)
        raise KernelError(
            f"{text!r} is no shape", where="bench ssd", remedy=f"use {known}, or heads,head_dim,groups,d_state"
        ) from None
    if min(H, P, G, N) < 1 or H % G or max(P, N) > 256:
        raise KernelError(
            f"heads {H}, head_dim {P}, groups {G}, d_state {N} do not fit the kernels", where="bench ssd",
            remedy="groups divide heads; head_dim and d_state are 1 to 256",
        )  # fmt: skip
    return H, P, G, N


def inputs(b: int, L: int, H: int, P: int, G: int, N: int, device: str = "cuda") -> dict[str, Tensor]:
    """bf16 inputs of a Mamba-2 layer with D and dt_bias, from one seed."""
    g = torch.Generator(device=device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    half = torch.bfloat16
    return {
        "x": randn(b, L, H, P).to(half), "dt": randn(b, L, H).to(half),
        "A": -torch.exp(torch.rand(H, generator=g, device=device) * 2.7), "B": randn(b, L, G, N).to(half),
        "C": randn(b, L, G, N).to(half), "D": torch.ones(H, device=device), "dt_bias": randn(H) - 4,
    }  # fmt: skip


def floors(ins: dict[str, Tensor], *, backward: bool) -> tuple[float, float]:
    """Bytes that must move at least, and floating-point operations, of forward or of forward and backward."""
    once = sum(ins[n].numel() * ins[n].element_size() for n in ("x", "dt", "B", "C"))
    y = ins["x"].numel() * ins["x"].element_size()
    b, L, H, P = ins["x"].shape
    G, N = ins["B"].shape[2:]
    chunk = 64
    work = 2 * b * L * (chunk * (H * P + G * N) + 2 * H * P * N)
    if not backward:
        return once + y, work
    more = 2 * b * L * (chunk * (2 * H * P + 3 * G * N) + 6 * H * P * N)
    return (once + y) + (once + y) + once, work + more


def device_limits() -> tuple[float, float]:
    """Bytes a second of a large copy, and FLOP a second of a large bf16 product, as measured here."""
    a = torch.empty(1 << 28, dtype=torch.bfloat16, device="cuda")
    b = torch.empty_like(a)
    copied = 4 * a.numel() / (graph_ms(lambda: b.copy_(a)) * 1e-3)
    m = torch.randn(8192, 8192, device="cuda").to(torch.bfloat16)
    out = torch.empty_like(m)
    multiplied = 2 * 8192**3 / (graph_ms(lambda: torch.mm(m, m, out=out)) * 1e-3)
    return copied, multiplied


def graph_ms(run: Callable[[], Any], *, inner: int = 3, repeats: int = 9) -> float:
    """Median of graph replays, milliseconds a run."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            run()
    graph.replay()
    return _median(graph.replay, repeats) / inner


def eager_ms(run: Callable[[], Any], *, repeats: int = 9) -> float:
    """Median of single calls, with what it costs to launch them."""
    return _median(run, repeats)


def _median(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def peak_mib(run: Callable[[], Any]) -> float:
    """MiB that a run allocates at most, beyond what was there before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def attempt(make: Callable[..., Callable[[], Any]], ins: dict[str, Tensor], dy: Tensor, backward: bool) -> dict:
    """A peer's row; a peer that fails says how."""
    try:
        run = make(ins, dy, backward)
        return {"ms": graph_ms(run), "eager_ms": eager_ms(run), "peak_mib": peak_mib(run)}
    except Exception as error:  # noqa: BLE001  (another project's; the other rows still count)
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def _mamba_ssm(ins: dict[str, Tensor], dy: Tensor, backward: bool) -> Callable[[], Any]:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    leaves = {n: t.detach().requires_grad_(backward) for n, t in ins.items()}

    def run() -> Any:
        y = mamba_chunk_scan_combined(
            leaves["x"], leaves["dt"], leaves["A"], leaves["B"], leaves["C"], 128, D=leaves["D"],
            dt_bias=leaves["dt_bias"], dt_softplus=True,
        )  # fmt: skip
        return torch.autograd.grad(y, list(leaves.values()), dy) if backward else y

    return run


def _fla(ins: dict[str, Tensor], dy: Tensor, backward: bool) -> Callable[[], Any]:
    """The scan alone: heads are expanded, and steps and D applied, before the clock starts."""
    from fla.ops.simple_gla import chunk_simple_gla

    step = torch.nn.functional.softplus(ins["dt"].float() + ins["dt_bias"])
    share = ins["x"].shape[2] // ins["B"].shape[2]
    q, k = (ins[n].repeat_interleave(share, 2).requires_grad_(backward) for n in ("C", "B"))
    v = (ins["x"] * step[..., None]).to(ins["x"].dtype).requires_grad_(backward)
    decay = (step * ins["A"]).requires_grad_(backward)

    def run() -> Any:
        y = chunk_simple_gla(q, k, v, decay, scale=1.0)[0]
        return torch.autograd.grad(y, [q, k, v, decay], dy) if backward else y

    return run


PEERS: dict[str, Callable[..., Callable[[], Any]]] = {"mamba_ssm": _mamba_ssm, "fla": _fla}


def fp64_error(sizes: tuple[int, int, int, int], options: dict[str, Any]) -> dict[str, float]:
    """Relative RMSE of y, state and gradients; ``floor`` is what rounding the exact y to bf16 costs.

    Of 3,000 tokens, by the kernels that longer sequences of such shapes have.
    """
    from latentscan.kernels.reference import ssm
    from latentscan.kernels.triton import chunk_scan as ours

    ins = inputs(1, 3000, *sizes)
    exact = {n: t.double() for n, t in ins.items()}
    y0, state0 = ssm.chunk_scan(**exact, **options)
    dy = torch.randn_like(ins["x"])
    y, state = ours.chunk_scan(**ins, **options)
    found = {"floor": relative(y0.to(y.dtype), y0), "y": relative(y, y0), "state": relative(state, state0)}
    grads = ours.chunk_scan_backward(dy, None, **ins, **options)
    grads0 = ssm.chunk_scan_backward(dy.double(), None, **exact, **options)
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "init_state")
    found.update({f"d{n}": relative(a, b) for n, a, b in zip(names, grads, grads0, strict=True) if b.numel()})
    return found


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


def show(data: dict[str, Any], console: Any) -> None:
    """The same as a table."""
    from rich.table import Table

    console.print(
        f"{data['device']}, torch {data['torch']}: {data['shape']} (H {data['heads']}, P {data['head_dim']}, "
        f"G {data['groups']}, N {data['d_state']}), batch {data['batch']}, {data['seq']} tokens, bf16; copies reach "
        f"{data['bandwidth_tb_s']:.2f} TB/s, products {data['bf16_tflop_s']:.0f} TFLOP/s",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for column in ("", "pass", "ms", "eager ms", "peak MiB", "byte floor ms", "FLOP floor ms", "of bytes", "of FLOPs"):
        table.add_column(column, justify="left" if column in ("", "pass") else "right")
    for row in data["rows"]:
        if "failed" in row:
            table.add_row(row["what"], row["pass"], row["failed"])
            continue
        cells = [f"{row['ms']:.3f}", f"{row['eager_ms']:.3f}", f"{row['peak_mib']:.0f}"]
        if "byte_floor_ms" in row:
            cells += [f"{row['byte_floor_ms']:.3f}", f"{row['flop_floor_ms']:.3f}"]
            cells += [f"{row['of_bandwidth']:.0%}", f"{row['of_flops']:.0%}"]
        table.add_row(row["what"], row["pass"], *cells)
    console.print(table, highlight=False)
    for row in data.get("tuned", ()):
        console.print(
            f"{row['way']}: {row['ms']:.3f} ms with {row['config']}, {row['shipped_ms']:.3f} as shipped "
            f"({row['tried']} tried, {len(row['failed'])} do not run here)",
            highlight=False,
        )
        for config, why in row["failed"]:
            console.print(f"  {config}: {why}", highlight=False)
    words = ", ".join(f"{name} {value:.1e}" for name, value in data["error"].items())
    console.print(f"relative RMSE against fp64: {words}", highlight=False)
