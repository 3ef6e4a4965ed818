"""Every shipped choice of the chunk scan's kernels, compiled without a device: registers, spills, shared memory.

``python -m latentscan.tests.kernel_table`` writes docs/kernels.md; tests/kernels/test_kernel_table.py keeps it true.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import triton

from latentscan.kernels.triton import chunk_scan as ours
from latentscan.kernels.triton.aot import Compiled, compile_launches
from latentscan.kernels.triton.chunk_common import pad
from latentscan.kernels.triton.chunk_configs import (
    A100,
    H200,
    Device,
    HopperBackward,
    backward_config,
    forward_config,
    hopper_config,
)

PAGE = Path(__file__).parent.parent / "docs" / "kernels.md"
DEVICES = {"sm_90": H200, "sm_80": A100}
SHARED = {"sm_90": 227 << 10, "sm_80": 163 << 10}  # bytes that a program may have

# name -> (L, H, P, G, N), dtype, optional inputs
CLASSES: dict[str, tuple[tuple[int, int, int, int, int], torch.dtype, tuple[str, ...]]] = {
    "Mamba-2 2.7B: H 80, P 64, G 1, N 128, bf16": ((32768, 80, 64, 1, 128), torch.bfloat16, ("D",)),
    "the same with z and an initial state": ((32768, 80, 64, 1, 128), torch.bfloat16, ("D", "z", "init_state")),
    "H 24, P 80, G 2, N 48, bf16": ((8192, 24, 80, 2, 48), torch.bfloat16, ("D",)),
    "H 24, P 64, G 1, N 64, fp32": ((8192, 24, 64, 1, 64), torch.float32, ("D",)),
}

HEAD = """# The chunk scan's kernels, as compiled

Shipped choices of tiles (`kernels/triton/chunk_configs.py`) by class of shape, compiled ahead of time with
Triton {version}: warps of a program, registers a thread, bytes of stack a thread (spills), bytes of shared memory a
program. Kernels in Gluon are for Hopper alone. Written by `python -m latentscan.tests.kernel_table`; a test keeps it
true for this version of Triton, and compiles everything with any other.
"""


def meta(sizes: tuple[int, int, int, int, int], dtype: torch.dtype, more: tuple[str, ...]) -> dict[str, Any]:
    """Inputs on the meta device."""
    L, H, P, G, N = sizes

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    f32 = torch.float32
    optional = {"D": empty(H, dtype=f32), "z": empty(1, L, H, P), "init_state": empty(1, H, P, N, dtype=f32)}
    return {
        "x": empty(1, L, H, P), "dt": empty(1, L, H), "A": empty(H, dtype=f32), "B": empty(1, L, G, N),
        "C": empty(1, L, G, N), "dt_bias": empty(H, dtype=f32), **{n: optional[n] for n in more},
    }  # fmt: skip


def compiled(name: str, architecture: str) -> list[Compiled]:
    """The kernels of a class on an architecture: portable forward and backward, and on sm_90 those in Gluon."""
    sizes, dtype, more = CLASSES[name]
    device: Device = DEVICES[architecture]
    L, H, P, G, N = sizes
    ins = meta(sizes, dtype, more)
    options = {"chunk_size": 64, "dt_softplus": True}
    plain = forward_config(pad(P), pad(N), dtype, H, L // 64, device)
    back = backward_config(pad(P), pad(N), dtype, H // G, device)

    def run() -> None:
        y, state = ours.chunk_scan(**ins, **options, config=plain)
        ours.chunk_scan_backward(y, state, **ins, **options, config=back)
        if architecture == "sm_90" and ours.gluon_works():
            from latentscan.kernels.triton import chunk_scan_gluon

            if chunk_scan_gluon.refusal(ins["x"], ins["B"], ins["C"], ins.get("D"), ins.get("z")) is None:
                units = G * -(-(H // G * (P // 64)) // 2)
                hopper = hopper_config(units, L * G * (2 * N + 64) * 2, device)
                ours.chunk_scan(**ins, **options, config=hopper)
                for atomic in (True, False):
                    k = HopperBackward(atomic=atomic)
                    ours.chunk_scan_backward(ins["x"], state, **ins, **options, config=k)
        exchanged(ins, plain, device)

    return compile_launches(run, int(architecture.removeprefix("sm_")))


def exchanged(ins: dict[str, Any], plain: Any, device: Device) -> None:
    """What context parallelism sends: both sums, in each form that takes the inputs."""
    from latentscan.kernels.triton import chunk_exchange, chunk_exchange_gluon, chunk_scan_gluon
    from latentscan.kernels.triton.chunk_common import Steps

    x, B = ins["x"], ins["B"]
    steps = Steps(ins["dt"], ins["A"], ins["dt_bias"], None, True, 0.0, float("inf"))
    for entering in (False, True):
        chunk_exchange.portable(x, steps, B, plain, entering=entering)
        if device is H200 and ours.gluon_works() and chunk_scan_gluon.refusal(x, B, B, None, None) is None:
            chunk_exchange_gluon.summed(x, steps, B, device, entering=entering)


def rows(architecture: str, kernels: list[Compiled]) -> list[str]:
    """Lines of the table, one a kernel; the worst of those that were compiled for several segment lengths."""
    worst: dict[str, Compiled] = {}
    for k in kernels:
        if k.kernel not in worst or (k.spill, k.registers) > (worst[k.kernel].spill, worst[k.kernel].registers):
            worst[k.kernel] = k
    return [
        f"| {architecture} | {k.kernel.removesuffix('_kernel')} | {k.warps} | {k.registers} | {k.spill} | {k.shared} |"
        for k in worst.values()
    ]


def section(name: str) -> str:
    """A class's part of the page."""
    lines = [f"\n## {name}\n", "| for | kernel | warps | registers | spill | shared |", "|---|---|---|---|---|---|"]
    for architecture in DEVICES:
        lines += rows(architecture, compiled(name, architecture))
    return "\n".join(lines) + "\n"


def page() -> str:
    return HEAD.format(version=triton.__version__) + "".join(map(section, CLASSES))


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
