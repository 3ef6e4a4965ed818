"""The sums of :mod:`latentscan.kernels.triton.chunk_exchange` for Hopper, by the state pass of the forward in Gluon.

Pieces (see :mod:`latentscan.kernels.triton.chunk_scan_gluon`) are whole parts of a unit here, and all of them count.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentscan.kernels.triton.chunk_common import Sizes, Steps, launch, prepare
from latentscan.kernels.triton.chunk_configs import Device, Hopper
from latentscan.kernels.triton.chunk_exchange import weigh_entering
from latentscan.kernels.triton.chunk_scan_gluon import CHUNK, WIDTH, descriptor, states_gluon_kernel

_PARTS = 8  # pieces of a unit at most
_BLOCK = 512


@triton.jit
def total_kernel(
    added, decays, state, decay, G, UG, share, H, PARTS, PN: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr
):
    """state [b, H, PN] and decay [b, H / SPLIT] of a unit's two heads, over its pieces in their order."""
    pid = tl.program_id(0).to(tl.int64)
    i, rest = pid % (PN // BLOCK), pid // (PN // BLOCK)
    w, u = rest % 2, rest // 2
    o = i * BLOCK + tl.arange(0, BLOCK)
    bg = u // UG
    inside = (u % UG) * 2 + w
    h = (bg // G) * H + (bg % G) * share + inside
    found = tl.zeros([BLOCK], tl.float32)
    whole = 0.0
    for j in range(PARTS):
        at = (u * PARTS + j) * 2 + w
        d = tl.load(decays + at)
        found = found * tl.exp2(d) + tl.load(added + at * PN + o)
        whole += d
    if inside < share:  # the last unit of a group may hold one head only
        tl.store(state + h * PN + o, found)
        if (i == 0) & (h % SPLIT == 0):
            tl.store(decay + h // SPLIT, tl.exp2(whole))


def parts(units: int, chunks: int, processors: int) -> int:
    """Pieces of a unit: of the numbers up to eight, the one with which the last wave of programs wastes least."""
    best = min(range(1, _PARTS + 1), key=lambda m: (-(-units * m // processors) / m, m))
    return min(best, max(1, chunks // 2))


def summed(x: Tensor, steps: Steps, B: Tensor, device: Device, *, entering: bool) -> tuple[Tensor, Tensor]:
    """The sum over all tokens fp32 [b, H, P, N] and, if it is the state's, the decay [b, H]; of tensors that the
    forward's ``refusal`` accepts."""
    s = Sizes.of(x, B, CHUNK)
    split = s.P // WIDTH
    heads, share = s.H * split, s.H // s.G * split
    NC, UG = -(-s.L // (2 * CHUNK)) * 2, triton.cdiv(share, 2)
    units = s.b * s.G * UG
    m, k = parts(units, NC, device.processors), Hopper()
    vec = prepare(steps, s, chunks=NC, fold=not entering)
    if entering:
        weigh_entering(vec, s, fold=True)

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, device=x.device, dtype=torch.float32)

    added, decays = empty(units * m, 2, WIDTH, s.N), empty(units * m, 2)
    state, decay = empty(s.b, s.H, s.P, s.N), empty(s.b, s.H)
    xw = x.view(s.b, s.L, heads, WIDTH) if split > 1 else x
    launch(
        states_gluon_kernel, units * m, descriptor(xw, 2 * CHUNK, WIDTH), descriptor(B, 2 * CHUNK, s.N), vec, added,
        decays, s.L, NC, s.G, UG, share, heads, units * NC, units * m, Q=CHUNK, P=WIDTH, N=s.N, SPLIT=split,
        ST=k.state_stages, RC=k.state_registers, RP=24, J=1, ALL=True, num_warps=4,
    )  # fmt: skip
    launch(
        total_kernel, units * 2 * (WIDTH * s.N // _BLOCK), added, decays, state, decay, s.G, UG, share, heads, m,
        PN=WIDTH * s.N, BLOCK=_BLOCK, SPLIT=split, num_warps=4,
    )  # fmt: skip
    return state, decay
