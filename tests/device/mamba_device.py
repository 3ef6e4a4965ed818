"""The Mamba kernels beside the chunk scan on a real GPU: numbers against fp64, then times. ``python3 mamba_device.py``.

Times are medians of CUDA-graph replays. Prints at most 6000 characters. First it starts a few processes of itself that
fill Triton's cache, so that compiling takes a few seconds of wall time.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
if importlib.util.find_spec("latentscan") is None:
    link = Path(tempfile.mkdtemp()) / "latentscan"
    link.symlink_to(Path(__file__).resolve().parents[2])
    sys.path.insert(0, str(link.parent))

import torch  # noqa: E402

from latentscan.kernels.reference import selective, ssm, ssm_conv, ssm_norm  # noqa: E402
from latentscan.kernels.triton import causal_conv1d as conv  # noqa: E402
from latentscan.kernels.triton import gated_rms_norm as norm  # noqa: E402
from latentscan.kernels.triton import selective_scan as scan  # noqa: E402
from latentscan.kernels.triton import selective_scan_backward as scan_backward  # noqa: E402
from latentscan.kernels.triton import state_update as update  # noqa: E402

WARM = "--warm" in sys.argv
QUICK = "--quick" in sys.argv  # shipped choices only
BF16, FP32 = torch.bfloat16, torch.float32
LIMIT = 75.0  # seconds of wall time after which no case begins
COPY = [4.2e12]  # bytes a second, measured below
LINES: list[str] = []


def say(line: str) -> None:
    LINES.append(line)
    if not WARM:
        print(line, flush=True)


def rnd(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=FP32).to(dtype)


def median(call: Callable[[], Any], launches: int = 10, replays: int = 5) -> float:
    """Milliseconds of one call, by graph replay; nothing but the first call where the caches are only warmed."""
    call()
    torch.cuda.synchronize()
    if WARM:
        return 1.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / launches)
    return sorted(times)[replays // 2]


def eager(call: Callable[[], Any]) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 200


class poisoned:
    """Fresh tensors hold NaN: what a kernel does not write shows."""

    def __enter__(self) -> None:
        self.empty = torch.empty

        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = self.empty(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        torch.empty = empty

    def __exit__(self, *_: Any) -> None:
        torch.empty = self.empty


def exact(values: Any) -> list[Any]:
    return [v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values]


def worst(got: Any, want: Any) -> tuple[float, float]:
    """Relative RMS error of y (or the first output) and the worst of the others; NaN where one is not finite."""
    got, want = ((v,) if isinstance(v, torch.Tensor) else v for v in (got, want))
    errors = []
    for a, b in zip(got, want, strict=True):
        if b.numel():
            errors.append(float((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-30)))
        else:
            errors.append(0.0)
    rest = max(errors[1:], default=0.0)
    return errors[0], rest if all(e == e for e in errors) else float("nan")


# --- numbers ---------------------------------------------------------------------------------------------------------


def numbers(name: str, ours: Callable[..., Any], reference: Callable[..., Any], *args: Any, **options: Any) -> None:
    with poisoned():
        got = ours(*args, **options)
        again = ours(*args, **options)
    if WARM:
        return
    pairs = zip(*((v,) if isinstance(v, torch.Tensor) else v for v in (got, again)), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    first, rest = worst(got, reference(*exact(args), **options))
    kinds = {a.dtype for a in args if isinstance(a, torch.Tensor)}
    bound = 5e-3 if BF16 in kinds else 1e-3 if torch.float16 in kinds else 2e-5
    verdict = "ok" if max(first, rest) < bound and same else "WRONG" if same else "NOT REPEATABLE"
    say(f"{name:34} {first:.1e} {rest:.1e} {verdict}")


def conv_numbers(dtype: torch.dtype, packed: bool) -> None:
    b, length, d = 2, 301, 72
    x = rnd(b, length, d + 40, dtype=dtype)[..., 8 : 8 + d]
    w, bias, init = rnd(d, 4, dtype=dtype), rnd(d, dtype=dtype), rnd(b, d, 3, dtype=dtype)
    seq = (torch.rand(b, length, device="cuda") < 0.1).int().cumsum(1, dtype=torch.int32) if packed else None
    args = (x, w, bias, init if packed else None, seq)
    dy, dfinal = rnd(b, length, d, dtype=dtype), rnd(b, d, 3, dtype=dtype) if packed else None
    tag = f"{str(dtype)[6:]}{' packed+state' if packed else ''}"
    numbers(f"conv {tag}", conv.causal_conv1d, ssm_conv.causal_conv1d, *args, activation="silu")
    numbers(
        f"conv bwd {tag}", conv.causal_conv1d_backward, ssm_conv.causal_conv1d_backward, dy, dfinal, *args,
        activation="silu",
    )  # fmt: skip


def norm_numbers(dtype: torch.dtype, first: bool, group: int) -> None:
    x, z, w = rnd(3, 37, 640, dtype=dtype), rnd(3, 37, 700, dtype=dtype)[..., 60:], rnd(640, dtype=dtype)
    options = {"eps": 1e-5, "group_size": group, "norm_before_gate": first}
    tag = f"{str(dtype)[6:]} {'norm first' if first else 'gate first'} {group}"
    numbers(f"norm {tag}", norm.gated_rms_norm, ssm_norm.gated_rms_norm, x, z, w, **options)
    numbers(
        f"norm bwd {tag}", norm.gated_rms_norm_backward, ssm_norm.gated_rms_norm_backward,
        rnd(3, 37, 640, dtype=dtype), x, z, w, **options,
    )  # fmt: skip


def update_numbers(dtype: torch.dtype, heads: int, dim: int, groups: int, states: int) -> None:
    per_state = dim == 1
    args = (
        rnd(3, heads, dim, states, dtype=FP32), rnd(3, heads, dim, dtype=dtype), rnd(3, heads, dtype=dtype),
        -rnd(*((heads, states) if per_state else (heads,)), dtype=FP32).abs(),
        rnd(3, groups, states, dtype=dtype), rnd(3, groups, states, dtype=dtype),
        rnd(heads, dtype=FP32), rnd(3, heads, dim, dtype=dtype), rnd(heads, dtype=FP32),
    )  # fmt: skip
    numbers(f"step {str(dtype)[6:]} P{dim} N{states}", update.state_update, ssm.state_update, *args, dt_softplus=True)


def conv_update_numbers() -> None:
    numbers(
        "conv step bf16", conv.conv_update, ssm_conv.conv_update, rnd(3, 72), rnd(3, 72, 4), rnd(72, 4), rnd(72),
        activation="silu",
    )  # fmt: skip


def scan_numbers(dtype: torch.dtype, everything: bool, states: int) -> None:
    b, d, length = 2, 72, 301
    u, delta, z = (rnd(b, length, d, dtype=dtype).transpose(1, 2) for _ in range(3))
    B, C = (rnd(b, length, states + 16, dtype=dtype)[..., 16:].transpose(1, 2) for _ in range(2))
    args = (
        u, delta, -rnd(d, states, dtype=FP32).abs(), B, C, rnd(d, dtype=FP32), z if everything else None,
        rnd(d, dtype=FP32), rnd(b, d, states, dtype=FP32) if everything else None,
    )  # fmt: skip
    grads = (rnd(b, d, length, dtype=dtype), rnd(b, d, states, dtype=FP32) if everything else None)
    tag = f"{str(dtype)[6:]} N{states}{' z+state' if everything else ''}"
    numbers(f"scan {tag}", scan.selective_scan, selective.selective_scan, *args, delta_softplus=True)
    numbers(
        f"scan bwd {tag}", scan_backward.selective_scan_backward, selective.selective_scan_backward, *grads, *args,
        delta_softplus=True,
    )  # fmt: skip


# --- times -----------------------------------------------------------------------------------------------------------


def rated(name: str, ms: float, moved: float, note: str = "") -> None:
    say(f"{name:34} {ms:8.4f} ms  {moved / ms * 1e3 / COPY[0]:5.0%} of copy {note}")


def copy_speed() -> None:
    """The ceiling: 4 GB read, 4 GB written, after the clocks have risen."""
    x = rnd(1 << 12, 1 << 12)
    for _ in range(200):
        x @ x
    x = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    y = torch.empty_like(x)
    ms = median(lambda: torch.add(x, 1.0, out=y), 4)  # copy_ becomes a memcpy node, which is slower
    COPY[0] = 2 * x.nbytes / ms * 1e3 if not WARM else COPY[0]
    say(f"copy {COPY[0] / 1e12:.2f} TB/s; {torch.cuda.get_device_name()}")


def sweep(module: Any, name: str, choices: list[dict[str, int]], run: Callable[[], float]) -> tuple[float, str]:
    """The shipped choice's time; the others' as text."""
    shipped = getattr(module, name)
    told = []
    for choice in [] if QUICK else choices:
        if choice == shipped:
            continue
        setattr(module, name, choice)
        try:
            told.append("/".join(map(str, choice.values())) + f" {run():.3f}")
        except Exception as error:  # noqa: BLE001  one bad choice is no reason to lose the rest
            told.append(f"{choice} {type(error).__name__}")
        finally:
            setattr(module, name, shipped)
    return run(), ("; " if told else "") + ", ".join(told)


def conv_times(backward: bool) -> None:
    length, channels, wide = 32768, 5376, 10576
    x = rnd(1, length, wide)[..., 5120 : 5120 + channels]
    w, bias, dy = rnd(channels, 4), rnd(channels), rnd(1, length, channels) if backward else None
    if backward:
        choices = [(4, 32, 64, 2), (4, 128, 64, 2), (4, 64, 128, 2), (2, 64, 64, 1), (4, 64, 128, 4)]
        sizes = [dict(zip(("S", "T", "BD", "num_warps"), c, strict=True)) for c in choices]
        ms, rest = sweep(
            conv, "BACKWARD", sizes,
            lambda: median(lambda: conv.causal_conv1d_backward(dy, None, x, w, bias, activation="silu"), 4, 3),
        )  # fmt: skip
        rated("conv bwd 2.7B L32768", ms, 3 * 2 * length * channels, rest)
    else:
        choices = [(16, 2, 128, 4), (16, 32, 128, 4), (8, 16, 128, 2), (8, 8, 256, 4), (8, 16, 256, 8), (16, 8, 64, 2)]
        sizes = [dict(zip(("BL", "NB", "BD", "num_warps"), c, strict=True)) for c in choices]
        ms, rest = sweep(
            conv, "FORWARD", sizes,
            lambda: median(lambda: conv.causal_conv1d(x, w, bias, activation="silu"), 4, 3),
        )  # fmt: skip
        rated("conv fwd 2.7B L32768", ms, 2 * 2 * length * channels, rest)


def conv_packed_times() -> None:
    length, channels = 32768, 5376
    x = rnd(1, length, 10576)[..., 5120 : 5120 + channels]
    w, bias, dy = rnd(channels, 4), rnd(channels), rnd(1, length, channels)
    seq = (torch.arange(length, device="cuda") // 1000).int()[None]
    ms = median(lambda: conv.causal_conv1d(x, w, bias, None, seq, activation="silu"), 4, 3)
    rated("conv fwd packed", ms, 2 * 2 * length * channels)
    ms = median(lambda: conv.causal_conv1d_backward(dy, None, x, w, bias, None, seq, activation="silu"), 4, 3)
    rated("conv bwd packed", ms, 3 * 2 * length * channels)


def norm_times(backward: bool, channels: int, group: int) -> None:
    length = 32768
    y, z, w = rnd(1, length, channels), rnd(1, length, 2 * channels + 336)[..., :channels], rnd(channels)
    options = {"eps": 1e-5, "group_size": group, "norm_before_gate": False}
    shipped = norm.block_sizes(group, backward=backward)
    told = []
    call = (
        (lambda: norm.gated_rms_norm_backward(y, y, z, w, **options))
        if backward
        else (lambda: norm.gated_rms_norm(y, z, w, **options))
    )
    original = norm.block_sizes
    choices: list[dict[str, Any]] = [{"num_warps": n} for n in (2, 4, 8, 16, 32)]
    if backward:
        choices += [{"num_warps": n, "STAGES": 4 - shipped["STAGES"]} for n in (2, 4, 8, 16)]
        choices += [{"num_warps": 16, "STAGES": 1, "AGAIN": not shipped["AGAIN"]}]
    for choice in () if QUICK else choices:
        if choice == {"num_warps": shipped["num_warps"]}:
            continue
        if not 8 <= shipped["BR"] * shipped["BD"] // choice["num_warps"] // 32 <= 32:
            continue
        norm.block_sizes = lambda *_, choice=choice, **__: {**shipped, **choice}
        try:
            told.append(f"{'w/'.join(map(str, choice.values()))} {median(call, 4, 3):.3f}")
        except Exception as error:  # noqa: BLE001  one bad choice is no reason to lose the rest
            told.append(f"{choice} {type(error).__name__}")
        finally:
            norm.block_sizes = original
    moved = (5 if backward else 3) * 2 * length * channels
    rated(f"norm {'bwd' if backward else 'fwd'} D{channels}/{group} L32768", median(call, 4, 3), moved, ", ".join(told))


def step_times() -> None:
    heads, dim, states = 80, 64, 128
    per_head = rnd(heads, dtype=FP32)
    for batch in (1, 8, 32, 64, 128, 256):
        state = rnd(batch, heads, dim, states, dtype=FP32)
        x, dt, B, C = rnd(batch, heads, dim), rnd(batch, heads), rnd(batch, 1, states), rnd(batch, 1, states)

        a = -per_head.abs()

        def step(state=state, x=x, dt=dt, B=B, C=C, a=a) -> Any:
            return update.state_update(state, x, dt, a, B, C, per_head, None, per_head, dt_softplus=True, inplace=True)

        note = ""
        if batch == 64 and not QUICK:
            shipped = update._BLOCK
            for block in (1024, 4096, 8192):
                update._BLOCK = block
                note += f"{block} {median(step):.4f} "
            update._BLOCK = shipped
        if batch in (1, 64) and not WARM:
            note += f"eager {eager(step):.3f}"
        rated(f"step 2.7B batch {batch} (fp32 state)", median(step), 2 * state.nbytes + 4 * x.nbytes, note)
        if batch == 64:
            half = state.to(BF16)
            rated("  bf16 state", median(lambda s=half: step(s)), 2 * half.nbytes + 4 * x.nbytes)
    state = rnd(64, 5120, 1, 16, dtype=FP32)
    x, dt, A, B, D = rnd(64, 5120, 1), rnd(64, 5120), -rnd(5120, 16, dtype=FP32).abs(), rnd(64, 1, 16), rnd(5120)
    ms = median(lambda: update.state_update(state, x, dt, A, B, B, D, x, D, dt_softplus=True, inplace=True))
    rated("step mamba-2.8b batch 64", ms, 2 * state.nbytes + 4 * x.nbytes)
    x, kept, w = rnd(64, 5376), rnd(64, 5376, 4), rnd(5376, 4)
    ms = median(lambda: conv.conv_update(x, kept, w, activation="silu", inplace=True))
    rated("conv step 2.7B batch 64", ms, 2 * kept.nbytes + 2 * x.nbytes)


def scan_inputs(length: int, *, delta_last: bool = True) -> tuple[Any, ...]:
    d, n = 5120, 16
    u, delta = (rnd(1, length, d).transpose(1, 2) for _ in range(2))
    delta = delta if delta_last else delta.contiguous()  # as the library projects it
    z = rnd(1, length, 2 * d)[..., d:].transpose(1, 2)
    mixed = rnd(1, length, 192)
    B, C = mixed[..., 160:176].transpose(1, 2), mixed[..., 176:].transpose(1, 2)
    A = -torch.arange(1, n + 1, device="cuda", dtype=FP32).expand(d, n).contiguous()
    return u, delta, A, B, C, rnd(d, dtype=FP32), z, rnd(d, dtype=FP32) - 4


def scan_times(length: int) -> None:
    args = scan_inputs(length)
    dy = rnd(1, length, 5120).transpose(1, 2)
    told = []
    original = scan.Sizes.chunk
    for chunk in () if QUICK else (16, 32, 64, 128):
        scan.Sizes.chunk = lambda *_, chunk=chunk: chunk
        told.append(f"c{chunk} {median(lambda: scan.selective_scan(*args, delta_softplus=True), 4, 3):.3f}")
    scan.Sizes.chunk = original
    forward = median(lambda: scan.selective_scan(*args, delta_softplus=True), 4, 3)
    rated(f"scan fwd mamba-2.8b L{length}", forward, 4 * 2 * length * 5120, ", ".join(told))
    told = []
    shipped = scan_backward.CHUNK
    for chunk in () if QUICK else (16, 64):
        scan_backward.CHUNK = chunk
        call = lambda: scan_backward.selective_scan_backward(dy, None, *args, delta_softplus=True)  # noqa: E731
        told.append(f"c{chunk} {median(call, 2, 3):.3f}")
    scan_backward.CHUNK = shipped
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    scan_backward.selective_scan_backward(dy, None, *args, delta_softplus=True)
    peak = (torch.cuda.max_memory_allocated() - held) >> 20
    backward = median(
        lambda: scan_backward.selective_scan_backward(dy, None, *args, delta_softplus=True), 2, 3
    )  # fmt: skip
    rated(f"scan bwd mamba-2.8b L{length}", backward, 7 * 2 * length * 5120, f"peak {peak} MiB {', '.join(told)}")


def scan_layout() -> None:
    """What the rule delta-channels-last of fuse-mamba is for."""
    args = scan_inputs(2048, delta_last=False)
    dy = rnd(1, 2048, 5120).transpose(1, 2)
    forward = median(lambda: scan.selective_scan(*args, delta_softplus=True), 4, 3)
    backward = median(lambda: scan_backward.selective_scan_backward(dy, None, *args, delta_softplus=True), 2, 3)
    say(f"scan L2048, time step channels first: forward {forward:.4f} ms, backward {backward:.4f} ms")


def library_scan() -> None:
    if WARM:
        return
    from transformers.models.mamba import modeling_mamba

    function = modeling_mamba.mamba_selective_scan
    function = getattr(function, "__wrapped__", function)
    u, delta, A, B, C, D, z, bias = scan_inputs(2048)
    leaves = [t.detach().clone().requires_grad_() for t in (u, delta, A, B, C, D, z, bias)]
    u, delta, A, B, C, D, z, bias = leaves
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        y = function(u, delta, A, B, C, D, z, bias, True)
        y = y[0] if isinstance(y, tuple) else y
        torch.cuda.synchronize()
        middle = time.perf_counter()
        y.float().square().sum().backward()
        torch.cuda.synchronize()
        end = time.perf_counter()
    say(
        f"library's scan L2048 (eager): forward {(middle - start) * 1e3:.1f} ms, backward {(end - middle) * 1e3:.1f} ms"
    )


def mixer_times() -> None:
    """A 2.7B mixer between its projections, forward and backward: one op, and separate ones with joined pieces."""
    from latentscan.kernels.triton import mamba_mixer as mixer

    heads, dim, states, length = 80, 64, 128, 32768
    inner = heads * dim
    row = rnd(1, length, 2 * inner + 2 * states + heads)
    w, bias, norm_weight = rnd(inner + 2 * states, 4), rnd(inner + 2 * states), rnd(inner)
    A, D, dt_bias = -rnd(heads, dtype=FP32).abs(), rnd(heads, dtype=FP32), rnd(heads, dtype=FP32) - 4
    steps = {"chunk_size": 256, "dt_softplus": True, "dt_min": 0.0, "dt_max": float("inf")}
    o = {"eps": 1e-5, "group_size": inner, "norm_before_gate": False}
    shape = {"heads": heads, "head_dim": dim, "groups": 1, "d_state": states, "activation": "silu"}
    args, dout = (row, w, bias, A, D, dt_bias, norm_weight, None), rnd(1, length, inner)
    parts = mixer.parts(keep_starts=True)

    def fused() -> Any:
        out, _, y, kept = mixer.mamba_mixer(*args, **shape, **steps, **o, keep_starts=True)
        return mixer.mamba_mixer_backward(dout, None, y, *args, **shape, **steps, **o, starts=kept), out

    def separate() -> Any:
        z, mixed, dt = row.split([inner, inner + 2 * states, heads], -1)
        conved, _ = parts.conv(mixed, w, bias, activation="silu")
        x, B, C = conved.split([inner, states, states], -1)
        scanned = (x.unflatten(-1, (heads, dim)), dt, A, B[:, :, None], C[:, :, None], D, None, dt_bias)
        y, _, kept = parts.scan(*scanned, None, None, None, **steps)
        out = parts.norm(y.flatten(2), z, norm_weight, **o)
        dy, dz, _ = parts.norm_backward(dout, y.flatten(2), z, norm_weight, **o)
        dy = dy.unflatten(-1, (heads, dim))
        dx, ddt, _, dB, dC, *_ = parts.scan_backward(dy, None, *scanned, **steps, starts=kept)
        joined = torch.cat([dx.flatten(2), dB.flatten(2), dC.flatten(2)], -1)
        dmixed = parts.conv_backward(joined, None, mixed, w, bias, activation="silu")[0]
        return torch.cat([dz, dmixed, ddt], -1), out

    ours, theirs = median(fused, 2, 3), median(separate, 2, 3)
    say(f"mixer 2.7B L{length} forward + backward: one op {ours:.3f} ms, separate {theirs:.3f} ms")


def far_offsets() -> None:
    """A row of tokens whose strides pass 2^31 elements: views of one 9 GB buffer (bf16)."""
    if WARM:
        return
    length, stride = 3, (1 << 31) + 64
    memory = torch.empty(2 * stride + 4096, dtype=BF16, device="cuda")
    x = memory.as_strided((1, length, 64), (0, stride, 1))
    x.copy_(rnd(1, length, 64))
    w = rnd(64, 4)
    got, want = conv.causal_conv1d(x, w), conv.causal_conv1d(x.contiguous(), w)
    say(f"offsets beyond 2^31: {'ok' if all(map(torch.equal, got, want)) else 'WRONG'}")


def many_blocks() -> None:
    """More than 65 535 blocks of batch x heads."""
    batch, heads = 20000, 5
    args = (rnd(batch, heads, 2, 4, dtype=FP32), rnd(batch, heads, 2), rnd(batch, heads), -rnd(heads).abs())
    B = rnd(batch, 1, 4)
    numbers("step of 100 000 heads", update.state_update, ssm.state_update, *args, B, B, dt_softplus=True)


def cases() -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
    yield copy_speed, ()
    yield conv_numbers, (BF16, True)
    yield conv_numbers, (FP32, False)
    yield norm_numbers, (BF16, False, 640)
    yield norm_numbers, (FP32, True, 160)
    yield update_numbers, (BF16, 6, 64, 2, 128)
    yield update_numbers, (FP32, 70, 1, 1, 16)
    yield conv_update_numbers, ()
    yield scan_numbers, (BF16, True, 16)
    yield scan_numbers, (FP32, False, 20)
    yield many_blocks, ()
    yield far_offsets, ()
    yield step_times, ()
    yield scan_times, (2048,)
    yield conv_times, (False,)
    yield conv_times, (True,)
    yield conv_packed_times, ()
    yield mixer_times, ()
    yield norm_times, (False, 5120, 5120)
    yield norm_times, (True, 5120, 5120)
    yield norm_times, (False, 8192, 1024)
    yield norm_times, (True, 8192, 1024)
    yield scan_times, (32768,)
    yield scan_layout, ()
    yield library_scan, ()


def run(chosen: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    for function, args in chosen:
        if time.monotonic() - BEGAN > LIMIT:
            say(f"{function.__name__} {args} left out: {LIMIT:.0f} s are over")
            continue
        torch.manual_seed(0)
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001  the other cases still count
            say(f"{function.__name__} {args}: {type(error).__name__}: {str(error)[:200]}")
        torch.cuda.empty_cache()


def main() -> None:
    everything = list(cases())
    if WARM:
        index, count = (int(v) for v in sys.argv[sys.argv.index("--warm") + 1 :][:2])
        run(everything[index::count])
        return
    count = min(10, max(1, (os.cpu_count() or 4) - 4))
    flags = ["--quick"] if QUICK else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, *flags, "--warm", str(i), str(count)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
        )
        for i in range(count)
    ]  # fmt: skip
    for worker in workers:
        try:
            worker.wait(timeout=max(1.0, 45 - (time.monotonic() - BEGAN)))
        except subprocess.TimeoutExpired:
            worker.kill()
    import triton

    say(f"triton {triton.__version__}, torch {torch.__version__}; caches filled after {time.monotonic() - BEGAN:.0f} s")
    say("relative RMS errors against fp64: first output, worst of the others")
    run(everything)
    say(f"{time.monotonic() - BEGAN:.0f} s")


if __name__ == "__main__":
    main()
