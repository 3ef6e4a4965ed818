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
from latentscan.kernels.triton import chunk_common, chunk_exchange_gluon
from latentscan.kernels.triton import chunk_exchange as triton
from latentscan.kernels.triton.chunk_common import Steps, sequence_starts
from latentscan.kernels.triton.chunk_configs import H200

CASES = {  # b, L, H, P, G, N, packed, strong decay
    "ragged": (2, 150, 4, 16, 2, 24, False, False),
    "one-token": (1, 1, 2, 8, 1, 16, False, False),
    "packed": (2, 140, 2, 16, 1, 16, True, False),
    "several-segments": (1, 900, 2, 16, 1, 16, False, False),
    "gone": (1, 200, 2, 16, 2, 16, False, True),
}


PIECES = {  # b, L, H, P, G, N, packed: shapes of the form in Gluon, whose state pass torch stands in for
    "odd share": (2, 256, 6, 64, 2, 64, False),
    "wide heads, ragged": (1, 300, 2, 128, 1, 64, False),
    "packed pieces": (1, 640, 2, 64, 1, 64, True),
}


def added_by_pieces(x, B, vec, added, decays, L, NC, G, UG, share, H, T, K, *, SPLIT, Q, **_):
    """What states_gluon_kernel says that it writes where all pieces count."""
    x, B, parts = x.base.float(), B.base.float(), K // (T // NC)
    for u in range(T // NC):
        b, g = u // UG // G, u // UG % G
        for j in range(parts):
            first, end = (((u * parts + i) * (T // 2) // K) * 2 - u * NC for i in (j, j + 1))
            for w in range(2):
                h = min(g * share + (u % UG) * 2 + w, H - 1)
                after, total = 0.0, torch.zeros(x.shape[3], B.shape[3])
                for c in reversed(range(first, end)):
                    cum, second = vec[b, h // SPLIT, c]
                    rows = slice(c * Q, min((c + 1) * Q, L))
                    weight = (after + cum[-1] - second).exp2()[: max(0, rows.stop - rows.start)]
                    total += (x[b, rows, h] * weight[:, None]).T @ B[b, rows, g]
                    after = after + cum[-1]
                added[u * parts + j, w], decays[u * parts + j, w] = total, after


def pieces(b: int, L: int, H: int, P: int, G: int, N: int, packed: bool) -> dict[str, float]:
    """The kernels around the state pass of chunk_exchange_gluon: errors of both sums and of the decay."""
    g = torch.Generator().manual_seed(4)
    x, B = (torch.randn(*s, generator=g).bfloat16() for s in ((b, L, H, P), (b, L, G, N)))
    dt, bias = torch.randn(b, L, H, generator=g), torch.randn(H, generator=g) - 4
    A = -torch.rand(H, generator=g)
    seq_idx = (torch.rand(b, L, generator=g) < 0.005).int().cumsum(1).int() if packed else None
    steps = Steps(dt, A, bias, sequence_starts(seq_idx, None, b, L), True, 0.0, 2.0)
    launch = chunk_common.launch

    def stand_in(kernel, grid, *args, **meta):
        named = kernel is chunk_exchange_gluon.states_gluon_kernel
        return added_by_pieces(*args, **meta) if named else launch(kernel, grid, *args, **meta)

    chunk_exchange_gluon.launch = stand_in
    try:
        state, decay = chunk_exchange_gluon.summed(x, steps, B, H200, entering=False)
        into, _ = chunk_exchange_gluon.summed(x, steps, B, H200, entering=True)
    finally:
        chunk_exchange_gluon.launch = launch
    wide = [t.double() for t in (x, dt, A, B, bias)]
    options = {"dt_softplus": True, "dt_min": 0.0, "dt_max": 2.0}
    want, want_decay = ref.chunk_state(*wide, seq_idx, **options)
    want_into = ref.output_state(wide[0], wide[3], wide[1], wide[2], wide[4], seq_idx, **options)
    return {
        "state": error(state, want), "output_state": error(into, want_into),
        "decay": float((decay.double() - want_decay).abs().max()), "swapped": error(into, want),
    }  # fmt: skip


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
    for name, shape in PIECES.items():
        found[name] = pieces(*shape)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
