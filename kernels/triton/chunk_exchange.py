"""What context parallelism sends of a chunk scan: the state pass of the scan's forward alone.

Same signatures as :mod:`latentscan.kernels.reference.ssm_exchange`. The gradient of the entering state is the same sum
as the final state, of other weights: those of a token are what is left of an entering state there. On Hopper the sums
are those of :mod:`latentscan.kernels.triton.chunk_exchange_gluon` where the tensors allow it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentscan.kernels.reference.ssm_common import check_limits, heads_of
from latentscan.kernels.triton.chunk_common import Sizes, Steps, launch, pad, precision, prepare, rows_of, wide
from latentscan.kernels.triton.chunk_common import sequence_starts as starts_of
from latentscan.kernels.triton.chunk_configs import Device, Forward, forward_config, gluon_works, refusal
from latentscan.kernels.triton.chunk_scan import _on as on_device
from latentscan.kernels.triton.chunk_scan_forward import carry_kernel, states_kernel

_CHUNKS = 16  # a program of entry_kernel


@triton.jit
def entry_kernel(vec, sums, L, NC, Q: tl.constexpr, BC: tl.constexpr, FOLD: tl.constexpr):
    """In place: vec [b H, NC, 2, Q] of prep_kernel to the weights of an entering state, ``sums`` [b H, NC] being the
    decays up to each chunk's end: no decay within or across chunks, and for the step what is left at a token."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(NC, BC)
    row = pid // blocks
    c = (pid % blocks) * BC + tl.arange(0, BC)
    q = tl.arange(0, Q)
    inside = (c < NC)[:, None]
    at = vec + (row * NC + c)[:, None] * (2 * Q) + q[None, :]
    before = tl.load(sums + row * NC + c - 1, mask=(c > 0) & (c < NC), other=0.0)
    left = tl.load(at, mask=inside, other=0.0) + before[:, None]
    if FOLD:
        second = -left
    else:
        second = tl.where(c[:, None] * Q + q[None, :] < L, tl.exp2(left), 0.0)
    tl.store(at, tl.zeros([BC, Q], tl.float32), mask=inside)
    tl.store(at + Q, second, mask=inside)


def weigh_entering(vec: Tensor, s: Sizes, *, fold: bool) -> None:
    """:func:`entry_kernel` of a ``vec`` that was made without folding."""
    chunks = vec.shape[2]
    sums = vec[:, :, :, 0, -1].cumsum(2)
    launch(
        entry_kernel, s.b * s.H * triton.cdiv(chunks, _CHUNKS), vec, sums, s.L, chunks,
        Q=s.Q, BC=_CHUNKS, FOLD=fold, num_warps=4,
    )  # fmt: skip


def portable(x: Tensor, steps: Steps, B: Tensor, k: Forward, *, entering: bool) -> tuple[Tensor, Tensor]:
    """The sum over all chunks [b, H, P, N] and, if it is the state's, the decay [b, H]; fp32."""
    s = Sizes.of(x, B, k.chunk)
    chunks = triton.cdiv(s.NC, min(k.segments, s.NC))
    S = triton.cdiv(s.NC, chunks)
    vec = prepare(steps, s, chunks=S * chunks)  # the kernel reads whole segments
    if entering:
        weigh_entering(vec, s, fold=False)
    states = torch.empty(s.b, S + 1, s.H, s.P, s.N, device=x.device, dtype=torch.float32)
    states[:, 0].zero_()
    decays = torch.empty(s.b, S + 1, s.H, device=x.device, dtype=torch.float32)
    BP, BN = min(pad(s.P), k.state_p), min(pad(s.N), k.state_n)
    launch(
        states_kernel, s.b * S * s.H * triton.cdiv(s.P, BP) * triton.cdiv(s.N, BN),
        x, B, vec, states, decays, s.L, s.H, s.G, S * chunks, s.P, s.N, S + 1, chunks, *x.stride()[:3],
        *B.stride()[:3], Q=s.Q, BP=BP, BN=BN, EVEN_P=s.P % BP == 0, EVEN_N=s.N % BN == 0, PREC=precision(x.dtype),
        WIDE=wide(s.Q, x, B), STAGES=k.state_stages, num_warps=k.state_warps,
    )  # fmt: skip
    block = min(1024, triton.next_power_of_2(s.P * s.N))
    launch(
        carry_kernel, s.b * s.H * triton.cdiv(s.P * s.N, block), states, decays, s.H, S + 1, s.P * s.N, BLOCK=block
    )  # fmt: skip
    return states[:, S].contiguous(), vec[:, :, :, 0, -1].sum(2).exp2()


def _summed(
    x: Tensor, B: Tensor, dt: Tensor, A: Tensor, dt_bias: Tensor | None, seq_idx: Tensor | None,
    limits: dict[str, Any], *, entering: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_limits(limits["dt_min"], limits["dt_max"])
    heads_of(B.shape[2], x.shape[2])
    if reason := refusal(x, B):
        raise ValueError(reason)
    x, B = rows_of(x), rows_of(B)
    bias = None if dt_bias is None else dt_bias.contiguous()
    starts = starts_of(seq_idx, None, *x.shape[:2])
    steps = Steps(dt, A.contiguous(), bias, starts, limits["dt_softplus"], limits["dt_min"], limits["dt_max"])
    device = Device.of(x.device)
    if x.is_cuda and device.capability == (9, 0) and gluon_works():
        from latentscan.kernels.triton import chunk_exchange_gluon, chunk_scan_gluon

        if chunk_scan_gluon.refusal(x, B, B, None, None) is None:
            return chunk_exchange_gluon.summed(x, steps, B, device, entering=entering)
    chunks = triton.cdiv(x.shape[1], 64)
    rows = x.shape[0] * x.shape[2]
    k = forward_config(pad(x.shape[3]), pad(B.shape[3]), x.dtype, rows, chunks, device)
    return portable(x, steps, B, k, entering=entering)


def chunk_state(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None = None, seq_idx: Tensor | None = None,
    *, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The state from zero [b, H, P, N] and the decay [b, H] over all tokens, fp32."""
    limits = {"dt_softplus": dt_softplus, "dt_min": dt_min, "dt_max": dt_max}
    with on_device(x):
        return _summed(x, B, dt, A, dt_bias, seq_idx, limits, entering=False)


def output_state(
    dy: Tensor, C: Tensor, dt: Tensor, A: Tensor, dt_bias: Tensor | None = None, seq_idx: Tensor | None = None,
    *, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
) -> Tensor:  # fmt: skip
    """The gradient of the entering state through the outputs, fp32 [b, H, P, N]."""
    limits = {"dt_softplus": dt_softplus, "dt_min": dt_min, "dt_max": dt_max}
    with on_device(dy):
        return _summed(dy, C, dt, A, dt_bias, seq_idx, limits, entering=True)[0]
