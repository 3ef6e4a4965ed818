"""Compile the Mamba kernels for GPUs that need not be there: ``python -m latentscan.tests.kernels.mamba_aot``.

The library's own functions are called with tensors on the meta device, and every launch is compiled instead, so that
what is compiled is what a user's call would launch. ``--write`` renews the table in docs/kernels-mamba.md; without it
the table goes to the standard output as JSON; ``--smallest`` compiles the smallest sizes and counts them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGETS = (80, 90)
DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels-mamba.md"
BEGIN, END = "<!-- registers: begin -->", "<!-- registers: end -->"
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Row:
    """What ptxas made of one launch: registers a thread, bytes of local memory a thread, bytes of shared memory."""

    call: str
    kernel: str
    sm: int
    warps: int
    registers: int
    local: int
    shared: int


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def slice_of(width: int, left: int, *shape: int) -> torch.Tensor:
    """[..., D] inside rows of ``width``, as a mixer cuts its in_proj output."""
    return meta(*shape[:-1], width)[..., left : left + shape[-1]]


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every shipped choice of block sizes, at shapes of published models."""
    from latentscan.kernels.triton.causal_conv1d import causal_conv1d, causal_conv1d_backward, conv_update
    from latentscan.kernels.triton.gated_rms_norm import gated_rms_norm, gated_rms_norm_backward
    from latentscan.kernels.triton.selective_scan import selective_scan
    from latentscan.kernels.triton.selective_scan_backward import selective_scan_backward
    from latentscan.kernels.triton.state_update import state_update

    x = slice_of(10576, 5120, 1, 32768, 5376)  # Mamba-2 2.7B
    w, bias, dy = meta(5376, 4), meta(5376), meta(1, 32768, 5376)
    seq, init = meta(1, 32768, dtype=torch.int32), meta(1, 5376, 3)
    yield "conv 2.7B", lambda: causal_conv1d(x, w, bias, activation="silu")
    yield "conv 2.7B packed, state", lambda: causal_conv1d(x, w, bias, init, seq, activation="silu")
    yield "conv 2.7B backward", lambda: causal_conv1d_backward(dy, None, x, w, bias, activation="silu")
    yield (
        "conv 2.7B backward packed, state",
        lambda: causal_conv1d_backward(dy, init, x, w, bias, init, seq, activation="silu"),
    )
    yield "conv step", lambda: conv_update(meta(64, 5376), meta(64, 5376, 4), w, bias, activation="silu", inplace=True)
    for name, channels, group in (("2.7B", 5120, 5120), ("Nemotron-H", 8192, 1024), ("130M", 1536, 1536)):
        y, z, weight = meta(1, 4096, channels), slice_of(2 * channels + 336, 0, 1, 4096, channels), meta(channels)
        options = {"eps": 1e-5, "group_size": group, "norm_before_gate": False}
        yield f"norm {name}", lambda y=y, z=z, w=weight, o=options: gated_rms_norm(y, z, w, **o)
        yield (
            f"norm {name} backward",
            lambda y=y, z=z, w=weight, o=options: gated_rms_norm_backward(y, y, z, w, **o),
        )
    for name, dtype in (("fp32 weight", BF16), ("fp32", FP32)):
        y, weight = meta(1, 4096, 5120, dtype=dtype), meta(5120, dtype=FP32)
        options = {"eps": 1e-5, "group_size": 5120, "norm_before_gate": True}
        yield (
            f"norm 2.7B backward, {name}",
            lambda y=y, w=weight, o=options: gated_rms_norm_backward(y, y, y, w, **o),
        )
    heads = meta(80, dtype=FP32)
    for name, state in (("fp32", FP32), ("bf16", BF16)):
        args = (meta(64, 80, 64, 128, dtype=state), meta(64, 80, 64), meta(64, 80), heads, meta(64, 1, 128))
        yield (
            f"step 2.7B {name} state",
            lambda a=args: state_update(*a, a[4], heads, None, heads, dt_softplus=True, inplace=True),
        )
    channel = meta(5120, dtype=FP32)
    one = (meta(64, 5120, 1, 16, dtype=FP32), meta(64, 5120, 1), meta(64, 5120), meta(5120, 16, dtype=FP32))
    bc = meta(64, 1, 16)
    yield (
        "step mamba-2.8b",
        lambda: state_update(*one, bc, bc, channel, one[1], channel, dt_softplus=True, inplace=True),
    )
    u, z1 = meta(1, 2048, 5120).transpose(1, 2), slice_of(10240, 5120, 1, 2048, 5120).transpose(1, 2)
    b1, c1 = (slice_of(192, left, 1, 2048, 16).transpose(1, 2) for left in (160, 176))
    given = (u, u, meta(5120, 16, dtype=FP32), b1, c1, channel, z1, channel)
    yield "scan mamba-2.8b", lambda: selective_scan(*given, delta_softplus=True)
    yield "scan mamba-2.8b backward", lambda: selective_scan_backward(u, None, *given, delta_softplus=True)


def smallest() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Sizes of one, which Triton makes constants of: what is a tensor elsewhere is a number here."""
    from latentscan.kernels.triton.causal_conv1d import causal_conv1d, causal_conv1d_backward, conv_update
    from latentscan.kernels.triton.gated_rms_norm import gated_rms_norm, gated_rms_norm_backward
    from latentscan.kernels.triton.selective_scan import selective_scan
    from latentscan.kernels.triton.selective_scan_backward import selective_scan_backward
    from latentscan.kernels.triton.state_update import state_update

    for width in (2, 3, 4):
        x, w, bias, init, seq = meta(1, 1, 1), meta(1, width), meta(1), meta(1, 1, width - 1), meta(1, 1).int()
        yield "conv", lambda a=(x, w, bias, init, seq): causal_conv1d(*a, activation="silu")
        yield "conv", lambda a=(x, init, x, w, bias, init, seq): causal_conv1d_backward(*a, activation="silu")
        yield "conv", lambda a=(x[0], init, w, bias): conv_update(*a, activation="silu")
    index = meta(1, dtype=torch.int64)
    yield "conv", lambda: conv_update(x[0], init, w, bias, inplace=True, state_indices=index)
    for first in (False, True):
        options = {"eps": 1e-5, "group_size": 1, "norm_before_gate": first}
        yield "norm", lambda o=options: gated_rms_norm(x, x, bias, **o)
        yield "norm", lambda o=options: gated_rms_norm_backward(x, x, x, bias, **o)
        yield "norm", lambda o=options: gated_rms_norm(x, None, bias, **o)
    for dim, states in ((1, 1), (2, 1), (1, 3)):
        s, v, b = meta(1, 1, dim, states), meta(1, 1, dim), meta(1, 1, states)
        for A, D in ((bias, bias), (meta(1, states), meta(1, dim))):
            args = (s, v, meta(1, 1), A, b, b, D, v, bias)
            yield "step", lambda a=args: state_update(*a, dt_softplus=True)
            yield "step", lambda a=args: state_update(*a, inplace=True, state_indices=index)
    two = meta(1, 2, 1, 1)
    args = (two, meta(1, 2, 1), meta(1, 2), meta(2), meta(1, 2, 1), meta(1, 2, 1))
    yield "step", lambda: state_update(*args)
    for length in (1, 33, 300):
        u, b = meta(1, 1, length), meta(1, 1, length)
        scanned = (u, u, meta(1, 1), b, b, bias, u, bias, meta(1, 1, 1))
        yield "scan", lambda a=scanned: selective_scan(*a, delta_softplus=True)
        yield "scan", lambda a=scanned, u=u: selective_scan_backward(u, a[-1], *a, delta_softplus=True)
        yield "scan", lambda a=scanned[:5]: selective_scan(*a)
        yield "scan", lambda a=scanned[:5], u=u: selective_scan_backward(None, meta(1, 1, 1), *a)


# --- compiling -------------------------------------------------------------------------------------------------------

_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64"}


def source(kernel: JITFunction, args: tuple[Any, ...], constants: dict[str, Any]) -> ASTSource:
    """The specialisation that Triton would compile for a call: ones are constants, multiples of 16 are known."""
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = args[index] if index < len(args) else constants[name]
        if index >= len(args) or (isinstance(value, int) and value == 1):
            signature[name], constexprs[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = f"*{_TYPES[value.dtype]}", [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constexprs, attributes)


@contextmanager
def launches() -> Iterator[list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]]]:
    """Kernels are recorded instead of launched."""
    seen: list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]] = []
    original = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert len(grid) == 1 and grid[0] < 2**31, grid  # y and z end at 65 535
        seen.append((self, args, kwargs))

    JITFunction.run = run  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        JITFunction.run = original  # type: ignore[method-assign]


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory a thread, spills and stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told)
    assert found is not None, told
    return int(found[1]), int(found[2]) + int(found[3])


def compile_all(which: Iterator[tuple[str, Callable[[], Any]]]) -> list[Row]:
    rows: list[Row] = []
    done: set[tuple[Any, ...]] = set()
    for label, call in which:
        with launches() as seen:
            call()
        for kernel, args, kwargs in seen:
            warps = kwargs.pop("num_warps")
            made = source(kernel, args, kwargs)
            key = (kernel.fn.__name__, str(made.signature), str(made.constants), str(made.attrs), warps)
            if key in done:
                continue
            done.add(key)
            for sm in TARGETS:
                compiled = triton.compile(made, target=GPUTarget("cuda", sm, 32), options={"num_warps": warps})
                registers, local = resources(compiled.asm["cubin"])
                name = kernel.fn.__name__.strip("_").removesuffix("_kernel")
                rows.append(Row(label, name, sm, warps, registers, local, compiled.metadata.shared))
    return rows


def table(rows: list[Row]) -> str:
    lines = [f"Triton {triton.__version__}, bf16 unless it says otherwise; local memory is spills and stack.", ""]
    lines += [
        "| call | kernel | warps | registers sm_80 | sm_90 | local bytes sm_80 | sm_90 | shared bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for a, b in zip(rows[::2], rows[1::2], strict=True):
        shared = str(a.shared) if a.shared == b.shared else f"{a.shared} / {b.shared}"
        lines.append(
            f"| {a.call} | {a.kernel} | {a.warps} | {a.registers} | {b.registers} | {a.local} | {b.local} | {shared} |"
        )
    return "\n".join(lines)


def written() -> str:
    """The table that the document holds."""
    return DOCUMENT.read_text().split(BEGIN)[1].split(END)[0].strip()


def main() -> None:
    if "--smallest" in sys.argv:
        print(len(compile_all(smallest())))
        return
    rows = compile_all(calls())
    if "--write" in sys.argv:
        text = DOCUMENT.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        DOCUMENT.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")
    else:
        print(json.dumps({"table": table(rows), "rows": [asdict(r) for r in rows]}))


if __name__ == "__main__":
    main()
