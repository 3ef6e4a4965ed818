"""The kernels of context parallelism's states against the reference in fp64, under Triton's interpreter.

Started by ``test_chunk_exchange.py`` in a process of its own: the interpreter is chosen when triton is imported.
Prints one JSON object: case -> largest error of a value over the largest value.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from latentscan.kernels.reference import ssm_exchange as ref
from latentscan.kernels.triton import chunk_exchange as triton

CASES = {  # b, L, H, P, G, N, packed, strong decay
    "ragged": (2, 150, 4, 16, 2, 24, False, False),
    "one-token": (1, 1, 2, 8, 1, 16, False, False),
    "packed": (2, 140, 2, 16, 1, 16, True, False),
    "several-segments": (1, 900, 2, 16, 1, 16, False, False),
    "gone": (1, 200, 2, 16, 2, 16, False, True),
}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-30))


def main() -> None:
    found = {}
    for name, (b, L, H, P, G, N, packed, strong) in CASES.items():
        g = torch.Generator().manual_seed(3)
        x, dt, bias = (torch.randn(*s, generator=g) for s in ((b, L, H, P), (b, L, H), (H,)))
        A = -torch.rand(H, generator=g) * (50 if strong else 0.05)
        B = torch.randn(b, L, G, N, generator=g)
        seq_idx = (torch.rand(b, L, generator=g) < 0.02).int().cumsum(1).int() if packed else None
        if seq_idx is not None:
            seq_idx[0] = 7  # one row without a border
        wide = [t.double() for t in (x, dt, A, B, bias)]
        options = {"dt_softplus": True, "dt_min": 0.0, "dt_max": 2.0}
        state, decay = triton.chunk_state(x, dt, A, B, bias, seq_idx, **options)
        want, want_decay = ref.chunk_state(*wide, seq_idx, **options)
        into = triton.output_state(x, B, dt, A, bias, seq_idx, **options)
        want_into = ref.output_state(wide[0], wide[3], wide[1], wide[2], wide[4], seq_idx, **options)
        found[name] = {
            "state": error(state, want), "output_state": error(into, want_into),
            "decay": float((decay.double() - want_decay).abs().max()),
            "swapped": error(into, want),  # a sabotage: the two sums are not the same
        }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
