"""A kernel that is not shipped, to check the check: it fits a 910B3 only if dt is contiguous along tokens."""

from __future__ import annotations

import triton.language as tl

from latentscan.kernels.triton_ascend.common import kernel


@kernel
def fused_kernel(
    x, dt, A, B, C, start, y, state, first, L, H, NC,
    Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    """Decay, state and output of a chunk at once; dt is [L, H] (STRIDED: one head's steps lie H apart) or [H, L]."""
    pid = tl.program_id(0).to(tl.int64) + first
    h = pid % H
    c = pid // H
    q = tl.arange(0, Q)
    p = tl.arange(0, P)
    n = tl.arange(0, N)
    row = c * Q + q
    mask = row < L
    if STRIDED:
        step = tl.load(dt + row * H + h, mask=mask, other=0.0)  # lint: allow strided-load
    else:
        step = tl.load(dt + h * L + row, mask=mask, other=0.0)
    cum = tl.cumsum(step * tl.load(A + h), 0)
    xt = tl.load(x + (row * H + h)[:, None] * P + p[None, :], mask=mask[:, None], other=0.0)
    Bt = tl.load(B + row[:, None] * N + n[None, :], mask=mask[:, None], other=0.0)
    Ct = tl.load(C + row[:, None] * N + n[None, :], mask=mask[:, None], other=0.0)
    score = tl.dot(Ct + 0.0, tl.trans(Bt))
    causal = q[:, None] >= q[None, :]
    weights = tl.where(causal, score * tl.exp(cum[:, None] - cum[None, :]) * step[None, :], 0.0)
    out = tl.dot(weights.to(xt.dtype), xt)
    at = (c * H + h) * N * P + n[:, None] * P + p[None, :]
    before = tl.load(start + at)
    out += tl.dot(Ct, before.to(xt.dtype)) * tl.exp(cum)[:, None]
    tl.store(y + (row * H + h)[:, None] * P + p[None, :], out, mask=mask[:, None])
    weight = tl.exp(tl.sum(step * tl.load(A + h), 0) - cum) * step
    scaled = (Bt * weight[:, None]).to(xt.dtype)
    tl.store(state + at, tl.dot(tl.trans(scaled), xt))
