"""What context parallelism sends of a chunk scan, on a GPU: errors against fp64, times beside the portable form.

python -m latentscan.tests.device.exchange_device
"""

from __future__ import annotations

import sys

import torch

from latentscan.kernels.reference import ssm_exchange as ref
from latentscan.kernels.triton import chunk_exchange as ours
from latentscan.kernels.triton.chunk_common import Steps
from latentscan.kernels.triton.chunk_configs import Device, forward_config

SHAPES = {  # b, L, H, P, G, N, packed
    "2.7B": (2, 2048, 80, 64, 1, 128, False),
    "packed": (1, 3000, 6, 64, 2, 128, True),
    "wide heads, odd groups": (2, 1280, 10, 128, 2, 64, False),
    "ragged": (1, 777, 3, 64, 1, 128, False),
    "short": (1, 65, 8, 64, 8, 128, False),
    "rows without 128": (3, 200, 4, 64, 1, 128, False),  # portable
    "small": (2, 150, 4, 16, 2, 24, True),  # portable
}
OPTIONS = {"dt_softplus": True, "dt_min": 0.0, "dt_max": float("inf")}


def inputs(b: int, L: int, H: int, P: int, G: int, N: int, packed: bool, *, device: str = "cuda") -> tuple:
    g = torch.Generator().manual_seed(5)
    row = torch.randn(b, L, H * P + G * N, generator=g).to(device, torch.bfloat16)
    x, B = row.split([H * P, G * N], -1)  # views of one row, as a convolution gives them
    dt = torch.randn(b, L, H, generator=g).to(device, torch.bfloat16)
    A, bias = -torch.rand(H, generator=g).to(device), (torch.randn(H, generator=g) - 4).to(device)
    seq = (torch.rand(b, L, generator=g) < 0.002).int().cumsum(1).int().to(device) if packed else None
    return x.unflatten(-1, (H, P)), dt, A, B.unflatten(-1, (G, N)), bias, seq


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


def milliseconds(call: object) -> float:
    for _ in range(3):
        call()  # type: ignore[operator]
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(20):
        call()  # type: ignore[operator]
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 20


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("exchange_device: no CUDA device")
    bad = 0
    for name, shape in SHAPES.items():
        x, dt, A, B, bias, seq = inputs(*shape)
        wide = [t.double() for t in (x, dt, A, B, bias)]
        state, decay = ours.chunk_state(x, dt, A, B, bias, seq, **OPTIONS)
        into = ours.output_state(x, B, dt, A, bias, seq, **OPTIONS)
        want, want_decay = ref.chunk_state(*wide, seq, **OPTIONS)
        want_into = ref.output_state(wide[0], wide[3], wide[1], wide[2], wide[4], seq, **OPTIONS)
        errors = relative(state, want), relative(into, want_into), float((decay.double() - want_decay).abs().max())
        fine = errors[0] < 5e-3 and errors[1] < 5e-3 and errors[2] < 1e-5  # bf16 products: 2^-9 a factor, at random
        bad += not fine
        print(f"{name:26s} state {errors[0]:.1e} into {errors[1]:.1e} decay {errors[2]:.1e} {'' if fine else 'BAD'}")
    x, dt, A, B, bias, _ = inputs(2, 16384, 80, 64, 1, 128, False)
    steps = Steps(dt, A, bias, None, True, 0.0, float("inf"))
    k = forward_config(64, 128, x.dtype, 160, 256, Device.of(x.device))
    for name, entering, call in (
        ("chunk_state", False, lambda: ours.chunk_state(x, dt, A, B, bias, None, **OPTIONS)),
        ("output_state", True, lambda: ours.output_state(x, B, dt, A, bias, None, **OPTIONS)),
    ):
        portable = milliseconds(lambda: ours.portable(x, steps, B, k, entering=entering))  # noqa: B023
        print(f"2.7B, 2 x 16384: {name} {milliseconds(call):.3f} ms, portable {portable:.3f} ms")
    sys.exit(bad)


if __name__ == "__main__":
    main()
