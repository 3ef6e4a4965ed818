"""The chunk scan's kernels under Triton's interpreter, in a process of their own: ``python -m ... fast`` or ``slow``.

Prints one JSON object: case -> {output: error against fp64}, and of each sabotage the worst error. The interpreter's
bf16 products are wrong, so dtypes are fp32 and fp16.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are declared

import torch

from latentscan.kernels.triton import chunk_common
from latentscan.kernels.triton import chunk_scan as ours
from latentscan.kernels.triton.chunk_configs import Backward, Forward
from latentscan.tests.kernels.chunk_scan_checks import Case, errors

FP32, FP16 = torch.float32, torch.float16
SMALL = Forward(chunk=16, segments=3, state_p=16, state_n=16, out_p=16)
# One chunk's states a segment, one head a run: every loop goes round more than once.
SMALL_BACK = Backward(
    chunk=16, workspace=1, heads=1, group_heads=1, block_p=16, group_p=16, group_n=16, walk_p=16, walk_n=16,
    state_p=16, state_n=16,
)  # fmt: skip
BASE = (2, 37, 4, 16, 2, 16)

FAST: dict[str, Case] = {
    "shipped": Case((2, 70, 4, 16, 2, 16), FP32),
    "small tiles": Case(BASE, FP32, SMALL, SMALL_BACK),
    "half precision": Case(BASE, FP16, SMALL, SMALL_BACK),
    "one token": Case((2, 1, 2, 16, 1, 16), FP32),
    "odd sizes, D per channel": Case((2, 20, 2, 24, 1, 40), FP32, SMALL, SMALL_BACK, channels=True),
    "nothing optional": Case(BASE, FP32, SMALL, SMALL_BACK, ("D", "z", "dt_bias", "init_state")),
    "limits": Case(BASE, FP32, SMALL, None, options=(("dt_softplus", False), ("dt_min", 0.1), ("dt_max", 0.8))),
    "seq_idx": Case(BASE, FP32, SMALL, SMALL_BACK, packed="seq_idx"),
    "cu_seqlens": Case((1, 37, 4, 16, 2, 16), FP32, SMALL, SMALL_BACK, packed=(0, 0, 3, 16, 17, 30)),
    "cu_seqlens without 0": Case((1, 37, 2, 16, 1, 16), FP32, SMALL, None, packed=(3, 32)),
    "views of one line": Case((2, 37, 3, 16, 1, 16), FP32, SMALL, SMALL_BACK, strided=True),
    "extreme A and dt": Case((1, 37, 24, 16, 1, 16), FP32, SMALL, None, extreme=True),
    "three heads a group in runs of two": Case(
        (2, 20, 6, 16, 2, 16), FP32, SMALL, Backward(chunk=16, heads=2, group_heads=2)
    ),
}


def random_cases(count: int) -> dict[str, Case]:
    """Shapes, packings and tiles by chance, from one seed."""
    chance = random.Random(7)
    found = {}
    for i in range(count):
        G, share, b = chance.choice([1, 2]), chance.choice([1, 2, 3]), chance.choice([1, 2, 3])
        shape = (b, chance.randint(1, 90), G * share, chance.choice([16, 20, 48, 64]), G, chance.choice([16, 24, 32]))
        absent = tuple(n for n in ("D", "z", "dt_bias", "init_state") if chance.random() < 0.3)
        tile = chance.choice([16, 32])
        found[f"random {i}"] = Case(
            shape, chance.choice([FP32, FP16]),
            Forward(chunk=tile, segments=chance.randint(1, 4), out_p=16, state_p=16, state_n=16),
            Backward(chunk=tile, workspace=chance.choice([1, 1 << 17, 1 << 30]), heads=chance.randint(1, 3),
                     group_heads=chance.randint(1, 3), block_p=chance.choice([16, 32]), walk_p=16, walk_n=16),
            absent, chance.choice([None, "seq_idx"]), chance.random() < 0.5, chance.random() < 0.5, seed=i,
        )  # fmt: skip
    return found


def sabotage(case: Case) -> dict[str, float]:
    """kernel -> the worst error where its launches are left out; nan where memory was never written."""
    names: list[str] = []

    def run(kernel: Any, grid: int, args: Any, meta: Any) -> None:
        names.append(kernel.__name__)
        kernel[(grid,)](*args, **meta)

    chunk_common.recorder = run
    errors(case, "cpu")
    found = {}
    for left_out in dict.fromkeys(names):

        def skip(kernel: Any, grid: int, args: Any, meta: Any, left_out: str = left_out) -> None:
            if kernel.__name__ != left_out:
                run(kernel, grid, args, meta)

        chunk_common.recorder = skip
        found[left_out] = max(errors(case, "cpu").values(), key=lambda v: v if v == v else float("inf"))
    chunk_common.recorder = None
    return found


def wide_view() -> dict[str, float]:
    """x and z with 2^31 elements between two tokens, in memory that is never touched elsewhere."""
    L, H, P = 3, 1, 16
    stride = 1 << 31
    g = torch.Generator().manual_seed(0)
    line = torch.empty(stride * (L - 1) + H * P, dtype=torch.float16)
    x = line.as_strided((1, L, H, P), (0, stride, P, 1))
    x.copy_(torch.randn(x.shape, generator=g))
    dt, B, C = (torch.randn(1, L, *s, generator=g).half() for s in ((H,), (1, 16), (1, 16)))
    A = -torch.ones(H)
    want = ours.chunk_scan(x.contiguous(), dt, A, B, C, chunk_size=16, dt_softplus=True)
    got = ours.chunk_scan(x, dt, A, B, C, chunk_size=16, dt_softplus=True)
    dy = torch.ones(1, L, H, P, dtype=torch.float16)
    want += ours.chunk_scan_backward(dy, None, x.contiguous(), dt, A, B, C, chunk_size=16, dt_softplus=True)
    got += ours.chunk_scan_backward(dy, None, x, dt, A, B, C, chunk_size=16, dt_softplus=True)
    return {"different": float(sum(not torch.equal(a, b) for a, b in zip(want, got, strict=True)))}


def pieces(units: int, NC: int, K: int, J: int, G: int = 1) -> float:
    """The worst error of the states at the starts of pieces that carry_pieces_kernel makes of what pieces add.

    What pieces add is made here from one addition and decay for every pair of chunks; nan where nothing is to be read.
    """
    from latentscan.kernels.triton.chunk_scan_gluon import carry_pieces_kernel

    PN, heads = 512, 2 * units
    UG, share = units // G, 2 * units // G
    T = units * NC
    g = torch.Generator().manual_seed(units + K)
    init = torch.randn(1, heads, PN, generator=g)
    adds, decay = torch.randn(units, NC // 2, 2, PN, generator=g), -torch.rand(units, NC // 2, 2, generator=g)
    begins = [(k * (T // 2) // K) * 2 for k in range(K + 1)]
    want = torch.full((K, 2, PN), float("nan"))
    for u in range(units):
        state = init[0, 2 * u : 2 * u + 2].clone()
        for c in range(NC // 2):
            if c and u * NC + 2 * c in begins:
                want[begins.index(u * NC + 2 * c)] = state
            state = state * 2 ** decay[u, c][:, None] + adds[u, c]
    added, decays = torch.full((K * J, 2, PN), float("nan")), torch.full((K * J, 2), float("nan"))
    for k in range(K):
        u = (begins[k + 1] - 1) // NC
        first, last = max(begins[k] - u * NC, 0) // 2, (begins[k + 1] - u * NC) // 2
        for j in range(J if 2 * last < NC else 0):
            run = range(first + (last - first) * j // J, first + (last - first) * (j + 1) // J)
            state = torch.zeros(2, PN)
            for c in run:
                state = state * 2 ** decay[u, c][:, None] + adds[u, c]
            if run:
                added[k * J + j], decays[k * J + j] = state, decay[u, run.start : run.stop].sum(0)
    starts = torch.full((K, 2, PN), float("nan"))
    chunk_common.launch(
        carry_pieces_kernel, units * 2, added, decays, init, starts, NC, G, UG, share, heads, T, K,
        PN=PN, BLOCK=PN, HAS_INIT=True, J=J, num_warps=4,
    )  # fmt: skip
    inside = ~want.isnan()
    return (starts - want)[inside].abs().max().item() if inside.any() else 0.0


def main() -> None:
    torch.set_num_threads(1)
    fast = sys.argv[1] == "fast"
    cases = FAST if fast else random_cases(30)
    told: dict[str, Any] = {name: errors(case, "cpu", repeat=True, condition=not fast) for name, case in cases.items()}
    if fast:
        told["sabotage"] = sabotage(Case((1, 33, 2, 16, 1, 16), FP32, SMALL, SMALL_BACK))
        told["wide view"] = wide_view()
        shapes = (
            (2, 8, 5, 1),
            (2, 8, 5, 3),
            (3, 4, 7, 2),
            (1, 6, 3, 4),
            (6, 4, 4, 2),
            (4, 10, 16, 4),
            (6, 8, 10, 3, 3),
        )
        told["pieces"] = {str(shape): pieces(*shape) for shape in shapes}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
