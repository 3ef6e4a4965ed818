"""The chunk scan, forward, in portable Triton: two passes over segments of chunks.

prep      decay and step of every token                               (chunk_common)
scores    C·Bᵀ of every chunk, once per group
states    what each segment but the last adds to the state            (one program a head, slice and segment)
carry     the state before each segment, by a scan over segments
output    y, keeping the fp32 state of the segment in registers; the final state
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentscan.kernels.triton.chunk_common import (
    Sizes,
    Steps,
    launch,
    load_tile,
    pad,
    precision,
    prepare,
    tokens_of,
    wide,
)
from latentscan.kernels.triton.chunk_configs import Forward


@triton.jit
def scores_kernel(
    B, C, scores, L, G, NC, N, b_sb, b_sl, b_sg, c_sb, c_sl, c_sg,
    Q: tl.constexpr, BN: tl.constexpr, SLICES: tl.constexpr, EVEN_N: tl.constexpr, PREC: tl.constexpr,
    WIDE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """scores [b, G, NC, Q, Q] = C·Bᵀ on and below the diagonal, 0 above."""
    pid = tl.program_id(0).to(tl.int64)
    c, rest = pid % NC, pid // NC
    g, b = rest % G, rest // G
    q = tokens_of(Q, WIDE)
    mask = q < L - c * Q
    Bp = B + b * b_sb + g * b_sg + c * Q * b_sl
    Cp = C + b * c_sb + g * c_sg + c * Q * c_sl
    acc = tl.zeros([Q, Q], tl.float32)
    for i in tl.static_range(SLICES):
        n = i * BN + tl.arange(0, BN)
        Ct = load_tile(Cp, q, c_sl, mask, n, n < N, EVEN_N).to(DTYPE)
        Bt = load_tile(Bp, q, b_sl, mask, n, n < N, EVEN_N).to(DTYPE)
        acc = tl.dot(Ct, tl.trans(Bt), acc, input_precision=PREC)
    acc = tl.where(q[:, None] >= q[None, :], acc, 0.0)
    at = scores + pid * (Q * Q) + (q[:, None] * Q + q[None, :])
    tl.store(at, acc.to(scores.dtype.element_ty))


@triton.jit
def states_kernel(
    x, B, vec, states, decays, L, H, G, NC, P, N, S, CPS, x_sb, x_sl, x_sh, b_sb, b_sl, b_sg,
    Q: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, EVEN_P: tl.constexpr, EVEN_N: tl.constexpr,
    PREC: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """states [b, S, H, P, N], slot s + 1: the state after segment s if it began with 0; decays [b, S, H] of segment s.

    From the last chunk to the first, so that the sum needs no rescaling.
    """
    pid = tl.program_id(0).to(tl.int64)
    ns, ps = tl.cdiv(N, BN), tl.cdiv(P, BP)
    i_n, rest = pid % ns, pid // ns
    i_p, rest = rest % ps, rest // ps
    h, rest = rest % H, rest // H
    s, b = rest % (S - 1), rest // (S - 1)
    g = h // (H // G)
    q = tokens_of(Q, WIDE)
    p = (i_p * BP + tl.arange(0, BP)).to(tl.int32)
    n = (i_n * BN + tl.arange(0, BN)).to(tl.int32)
    xp = x + b * x_sb + h * x_sh
    Bp = B + b * b_sb + g * b_sg
    first = s * CPS
    vp = vec + (b * H + h) * NC * (2 * Q)
    after = 0.0
    state = tl.zeros([BP, BN], tl.float32)
    for k in tl.range(0, CPS, num_stages=STAGES):
        c = first + CPS - 1 - k
        row = pid * 0 + c * Q
        mask = q < L - row
        xt = load_tile(xp + row * x_sl, q, x_sl, mask, p, p < P, EVEN_P)
        Bt = load_tile(Bp + row * b_sl, q, b_sl, mask, n, n < N, EVEN_N).to(xt.dtype)
        v = vp + row * 2
        end = tl.load(v + Q - 1)
        weight = tl.exp2(after + end - tl.load(v + q)) * tl.load(v + Q + q)
        after += end
        state = tl.dot((tl.trans(xt) * weight[None, :]).to(xt.dtype), Bt, state, input_precision=PREC)
    to = states + ((b * S + s + 1) * H + h) * (P * N) + (p[:, None] * N + n[None, :])
    tl.store(to, state, mask=(p < P)[:, None] & (n < N)[None, :])
    if (i_n == 0) & (i_p == 0):
        tl.store(decays + (b * S + s) * H + h, after)


@triton.jit
def carry_kernel(states, decays, H, S, PN, BLOCK: tl.constexpr):
    """In place: states[b, s] becomes the state before segment s; slot 0 holds the initial state already."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(PN, BLOCK)
    i, rest = pid % blocks, pid // blocks
    h, b = rest % H, rest // H
    o = i * BLOCK + tl.arange(0, BLOCK)
    state = tl.load(states + (b * S * H + h) * PN + o, mask=o < PN, other=0.0)
    for s in range(1, S):
        at = states + ((b * S + s) * H + h) * PN + o
        decay = tl.exp2(tl.load(decays + (b * S + s - 1) * H + h))
        state = state * decay + tl.load(at, mask=o < PN, other=0.0)
        tl.store(at, state, mask=o < PN)


@triton.jit
def output_kernel(
    x, B, C, z, D, scores, vec, states, y, final, L, H, G, NC, P, N, S, CPS,
    x_sb, x_sl, x_sh, b_sb, b_sl, b_sg, c_sb, c_sl, c_sg, z_sb, z_sl, z_sh,
    Q: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, EVEN_P: tl.constexpr, EVEN_N: tl.constexpr,
    HAS_D: tl.constexpr, D_CHANNELS: tl.constexpr, HAS_Z: tl.constexpr, PREC: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """y of one segment, one head and a slice of its channels, chunk after chunk; BN holds the whole state dimension."""
    pid = tl.program_id(0).to(tl.int64)
    ps = tl.cdiv(P, BP)
    i_p, rest = pid % ps, pid // ps
    h, rest = rest % H, rest // H
    s, b = rest % S, rest // S
    g = h // (H // G)
    q = tokens_of(Q, WIDE)
    p = (i_p * BP + tl.arange(0, BP)).to(tl.int32)
    n = tl.arange(0, BN)
    pn = p[:, None] * N + n[None, :]
    pn_mask = (p < P)[:, None] & (n < N)[None, :]
    state = tl.load(states + ((b * S + s) * H + h) * (P * N) + pn, mask=pn_mask, other=0.0)
    if HAS_D:
        if D_CHANNELS:
            d = tl.load(D + h * P + p, mask=p < P, other=0.0).to(tl.float32)
        else:
            d = tl.zeros([BP], tl.float32) + tl.load(D + h).to(tl.float32)
    xp = x + b * x_sb + h * x_sh
    Bp = B + b * b_sb + g * b_sg
    Cp = C + b * c_sb + g * c_sg
    vp = vec + (b * H + h) * NC * (2 * Q)
    sp = scores + (b * G + g) * NC * (Q * Q)
    causal = q[:, None] >= q[None, :]
    for c in tl.range(s * CPS, tl.minimum(s * CPS + CPS, NC), num_stages=STAGES):
        row = pid * 0 + c * Q
        mask = q < L - row
        xt = load_tile(xp + row * x_sl, q, x_sl, mask, p, p < P, EVEN_P)
        Ct = load_tile(Cp + row * c_sl, q, c_sl, mask, n, n < N, EVEN_N).to(xt.dtype)
        Bt = load_tile(Bp + row * b_sl, q, b_sl, mask, n, n < N, EVEN_N).to(xt.dtype)
        score = tl.load(sp + row * Q + (q[:, None] * Q + q[None, :])).to(tl.float32)
        v = vp + row * 2
        cum = tl.load(v + q)
        step = tl.load(v + Q + q)
        end = tl.load(v + Q - 1)
        folded = cum - tl.log2(step)
        # Differences, not quotients of exponentials; what is masked never reaches exp2.
        weights = tl.exp2(tl.where(causal, cum[:, None] - folded[None, :], float("-inf"))) * score
        acc = tl.dot(Ct, tl.trans(state.to(xt.dtype)), input_precision=PREC) * tl.exp2(cum)[:, None]
        acc = tl.dot(weights.to(xt.dtype), xt, acc, input_precision=PREC)
        added = (tl.trans(xt) * (tl.exp2(end - cum) * step)[None, :]).to(xt.dtype)
        state = tl.dot(added, Bt, state * tl.exp2(end), input_precision=PREC)
        if HAS_D:
            acc += xt.to(tl.float32) * d[None, :]
        if HAS_Z:
            zt = load_tile(z + b * z_sb + h * z_sh + row * z_sl, q, z_sl, mask, p, p < P, EVEN_P).to(tl.float32)
            acc *= zt * tl.sigmoid(zt)
        to = y + ((b * L + row) * H + h) * P + (q[:, None] * (H * P) + p[None, :])
        tl.store(to, acc.to(y.dtype.element_ty), mask=mask[:, None] & (p < P)[None, :])
    if s == S - 1:
        tl.store(final + (b * H + h) * (P * N) + pn, state, mask=pn_mask)


def segment_scores(B: Tensor, C: Tensor, s: Sizes, dtype: torch.dtype, chunks: int | None = None) -> Tensor:
    """scores [b, G, NC, Q, Q], see :func:`scores_kernel`; ``chunks``: NC, if more than hold the tokens."""
    NC = chunks or s.NC
    scores = torch.empty(s.b, s.G, NC, s.Q, s.Q, device=B.device, dtype=dtype)
    BN = min(pad(s.N), 64)
    launch(
        scores_kernel, s.b * s.G * NC, B, C, scores, s.L, s.G, NC, s.N, *B.stride()[:3], *C.stride()[:3],
        Q=s.Q, BN=BN, SLICES=triton.cdiv(s.N, BN), EVEN_N=s.N % BN == 0, PREC=precision(dtype),
        WIDE=wide(s.Q, B, C), DTYPE=tl_dtype(dtype), num_warps=4,
    )  # fmt: skip
    return scores


def tl_dtype(dtype: torch.dtype) -> Any:
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def segment_states(
    x: Tensor, B: Tensor, vec: Tensor, init_state: Tensor | None, s: Sizes, chunks: int, k: Forward
) -> Tensor:
    """fp32 [b, S, H, P, N]: the state before each segment of ``chunks`` chunks."""
    S = triton.cdiv(s.NC, chunks)
    states = torch.empty(s.b, S, s.H, s.P, s.N, device=x.device, dtype=torch.float32)
    states[:, 0].zero_() if init_state is None else states[:, 0].copy_(init_state)
    if S == 1:
        return states
    decays = torch.empty(s.b, S, s.H, device=x.device, dtype=torch.float32)
    BP, BN = min(pad(s.P), k.state_p), min(pad(s.N), k.state_n)
    grid = s.b * (S - 1) * s.H * triton.cdiv(s.P, BP) * triton.cdiv(s.N, BN)
    launch(
        states_kernel, grid, x, B, vec, states, decays, s.L, s.H, s.G, s.NC, s.P, s.N, S, chunks,
        *x.stride()[:3], *B.stride()[:3], Q=s.Q, BP=BP, BN=BN, EVEN_P=s.P % BP == 0, EVEN_N=s.N % BN == 0,
        PREC=precision(x.dtype), WIDE=wide(s.Q, x, B), STAGES=k.state_stages, num_warps=k.state_warps,
    )  # fmt: skip
    block = 1024
    launch(
        carry_kernel, s.b * s.H * triton.cdiv(s.P * s.N, block), states, decays, s.H, S, s.P * s.N,
        BLOCK=block, num_warps=4,
    )  # fmt: skip
    return states


def forward(
    x: Tensor, steps: Steps, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, init_state: Tensor | None,
    k: Forward,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y and the final state; the inputs are checked and have neighbouring elements in their last axis."""
    s = Sizes.of(x, B, k.chunk)
    vec = prepare(steps, s)
    scores = segment_scores(B, C, s, x.dtype)
    chunks = triton.cdiv(s.NC, min(k.segments, s.NC))
    states = segment_states(x, B, vec, init_state, s, chunks, k)
    S = states.shape[1]
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    final = torch.empty(s.b, s.H, s.P, s.N, device=x.device, dtype=torch.float32)
    BP, BN = min(pad(s.P), k.out_p), pad(s.N)
    zt = x if z is None else z
    launch(
        output_kernel, s.b * S * s.H * triton.cdiv(s.P, BP),
        x, B, C, zt, x if D is None else D, scores, vec, states, y, final, s.L, s.H, s.G, s.NC, s.P, s.N, S, chunks,
        *x.stride()[:3], *B.stride()[:3], *C.stride()[:3], *zt.stride()[:3],
        Q=s.Q, BP=BP, BN=BN, EVEN_P=s.P % BP == 0, EVEN_N=s.N == BN, HAS_D=D is not None,
        D_CHANNELS=D is not None and D.dim() == 2, HAS_Z=z is not None, PREC=precision(x.dtype),
        WIDE=wide(s.Q, x, B, C, zt, y), STAGES=k.out_stages, num_warps=k.out_warps,
    )  # fmt: skip
    return y, final
