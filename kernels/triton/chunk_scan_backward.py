"""The chunk scan, backward, in portable Triton; deterministic: every sum has one order, nothing is added atomically.

The states before the chunks and their adjoints are made again, for one segment of the sequence at a time from the last
to the first, so that memory is bounded; in 16 bits for 16-bit inputs, the running ones in fp32.

    prep, states, carry   as forward: the state before every segment
    for each segment:
      walk        h before and the adjoint g after every chunk            (one program a head, slice and direction)
      chunk       dx, dz; gradients of decay and step of every token; that of C·Bᵀ, summed over a run of heads
      groups      dB and dC, summed over the heads of a group  (sums: of its parts)
      steps       ddt, and what dA, dD and ddt_bias are the sums of
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentscan.kernels.triton.chunk_common import (
    HEADS_A_PROGRAM,
    Sizes,
    Steps,
    launch,
    load_tile,
    pad,
    precision,
    prepare,
    time_step,
    tokens_of,
    wide,
)
from latentscan.kernels.triton.chunk_configs import Backward, Forward
from latentscan.kernels.triton.chunk_scan_forward import segment_states


@triton.jit
def gated(dy, z, DTYPE: tl.constexpr):
    """(gradient before the gate, in DTYPE; derivative of silu)."""
    zt = z.to(tl.float32)
    gate = tl.sigmoid(zt)
    return (dy.to(tl.float32) * zt * gate).to(DTYPE), gate * (1.0 + zt * (1.0 - gate))


@triton.jit
def walk_kernel(
    x, B, C, dy, z, vec, starts, adjoint, hs, gs, L, H, G, NC, P, N, S, batch, segment, first, count,
    x_sb, x_sl, x_sh, b_sb, b_sl, b_sg, c_sb, c_sl, c_sg, dy_sb, dy_sl, dy_sh, z_sb, z_sl, z_sh,
    Q: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, EVEN_P: tl.constexpr, EVEN_N: tl.constexpr,
    HAS_Z: tl.constexpr, PREC: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """hs, gs [count, b, H, P, N]: the state before and its adjoint after each chunk of the segment.

    ``adjoint`` fp32 [b, H, P, N] holds the adjoint after the segment and is moved to its start.
    """
    pid = tl.program_id(0).to(tl.int64)
    way, rest = pid % 2, pid // 2
    ns, ps = tl.cdiv(N, BN), tl.cdiv(P, BP)
    i_n, rest = rest % ns, rest // ns
    i_p, rest = rest % ps, rest // ps
    h, b = rest % H, rest // H
    g = h // (H // G)
    q = tokens_of(Q, WIDE)
    p = (i_p * BP + tl.arange(0, BP)).to(tl.int32)
    n = (i_n * BN + tl.arange(0, BN)).to(tl.int32)
    pn = p[:, None] * N + n[None, :]
    pn_mask = (p < P)[:, None] & (n < N)[None, :]
    vp = vec + (b * H + h) * NC * (2 * Q)
    place = (b * H + h) * (P * N)
    plane = (pid * 0 + batch) * H * (P * N)  # in int64; k is not, and an argument that is 1 is no tensor
    if way == 0:
        xp = x + b * x_sb + h * x_sh
        Bp = B + b * b_sb + g * b_sg
        state = tl.load(starts + ((b * S + segment) * H + h) * (P * N) + pn, mask=pn_mask, other=0.0)
        for k in tl.range(0, count, num_stages=STAGES):
            c = first + k
            row = pid * 0 + c * Q
            mask = q < L - row
            xt = load_tile(xp + row * x_sl, q, x_sl, mask, p, p < P, EVEN_P)
            Bt = load_tile(Bp + row * b_sl, q, b_sl, mask, n, n < N, EVEN_N).to(xt.dtype)
            v = vp + row * 2
            end = tl.load(v + Q - 1)
            weight = tl.exp2(end - tl.load(v + q)) * tl.load(v + Q + q)
            tl.store(hs + (k * plane + place) + pn, state.to(hs.dtype.element_ty), mask=pn_mask)
            added = (tl.trans(xt) * weight[None, :]).to(xt.dtype)
            state = tl.dot(added, Bt, state * tl.exp2(end), input_precision=PREC)
    else:
        dp = dy + b * dy_sb + h * dy_sh
        zp = z + b * z_sb + h * z_sh
        Cp = C + b * c_sb + g * c_sg
        state = tl.load(adjoint + place + pn, mask=pn_mask, other=0.0)
        for i in tl.range(0, count, num_stages=STAGES):
            k = count - 1 - i
            c = first + k
            row = pid * 0 + c * Q
            mask = q < L - row
            dt = load_tile(dp + row * dy_sl, q, dy_sl, mask, p, p < P, EVEN_P)
            if HAS_Z:
                zt = load_tile(zp + row * z_sl, q, z_sl, mask, p, p < P, EVEN_P)
                dt, _ = gated(dt, zt, hs.dtype.element_ty)
            dt = dt.to(hs.dtype.element_ty)
            Ct = load_tile(Cp + row * c_sl, q, c_sl, mask, n, n < N, EVEN_N).to(dt.dtype)
            v = vp + row * 2
            end = tl.load(v + Q - 1)
            weight = tl.exp2(tl.load(v + q))
            tl.store(gs + (k * plane + place) + pn, state.to(gs.dtype.element_ty), mask=pn_mask)
            added = (tl.trans(dt) * weight[None, :]).to(dt.dtype)
            state = tl.dot(added, Ct, state * tl.exp2(end), input_precision=PREC)
        tl.store(adjoint + place + pn, state, mask=pn_mask)


@triton.jit
def between(
    xp, yp, zp, hs, gs, f, dD, place, p, q, n, mask, inner, same, x_sl, dy_sl, z_sl, P, N,
    Q: tl.constexpr, EVEN_P: tl.constexpr, HAS_D: tl.constexpr, D_CHANNELS: tl.constexpr, HAS_Z: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """A slice of channels: its part of what tokens have in common (inner, same), and what was loaded for it."""
    dtype = hs.dtype.element_ty
    pn = p[:, None] * N + n[None, :]
    gt = tl.load(gs + place + pn, mask=(p < P)[:, None] & (n < N)[None, :], other=0.0)
    ht = tl.load(hs + place + pn, mask=(p < P)[:, None] & (n < N)[None, :], other=0.0)
    tl.store(f + 6 * Q + p, tl.sum(ht.to(tl.float32) * gt.to(tl.float32), 1), mask=p < P)
    xt = load_tile(xp, q, x_sl, mask, p, p < P, EVEN_P)
    raw = load_tile(yp, q, dy_sl, mask, p, p < P, EVEN_P)
    dt = raw.to(dtype)
    slope = 0.0
    if HAS_Z:
        dt, slope = gated(raw, load_tile(zp, q, z_sl, mask, p, p < P, EVEN_P), dtype)
    if HAS_D:
        products = dt.to(tl.float32) * xt.to(tl.float32)
        if D_CHANNELS:
            tl.store(dD + p, tl.sum(products, 0), mask=p < P)
        else:
            same += tl.sum(products, 1)
    return tl.dot(xt, tl.trans(dt), inner, input_precision=PREC), same, xt, raw, dt, slope, gt, ht


@triton.jit
def chunk_kernel(
    x, B, C, dy, z, D, vec, hs, gs, dx, dz, pairs, flow, dD, L, H, G, NC, P, N, batch, first, count, RUN, RUNS,
    x_sb, x_sl, x_sh, b_sb, b_sl, b_sg, c_sb, c_sl, c_sg, dy_sb, dy_sl, dy_sh, z_sb, z_sl, z_sh,
    Q: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, SLICES: tl.constexpr, EVEN_P: tl.constexpr,
    EVEN_N: tl.constexpr, HAS_D: tl.constexpr, D_CHANNELS: tl.constexpr, HAS_Z: tl.constexpr, PREC: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk, one run of heads of a group: everything but what the states give to dB and dC.

    pairs [RUNS, count, b, G, Q, Q]: gradient of B·Cᵀ, summed over the run.
    flow [count, b, H, 6 Q + P]: what steps_kernel makes the gradients of decay and step from. Of each token, summed
    over channels: what it reads of earlier ones in the chunk; what it reads of the state before the chunk; how it is
    read by later ones in the chunk, by itself, after the chunk, all per unit of step; how D reads it. Then h g of
    every channel, summed over N.
    dD [b, NC, H, P], if D is per channel.
    """
    pid = tl.program_id(0).to(tl.int64)
    run, rest = pid % RUNS, pid // RUNS
    g, rest = rest % G, rest // G
    b, k = rest % batch, rest // batch
    c = first + k
    q = tokens_of(Q, WIDE)
    n = tl.arange(0, BN)
    row0 = c * Q
    mask = q < L - row0
    dtype = hs.dtype.element_ty
    Bt = load_tile(B + b * b_sb + g * b_sg + row0 * b_sl, q, b_sl, mask, n, n < N, EVEN_N).to(dtype)
    Ct = load_tile(C + b * c_sb + g * c_sg + row0 * c_sl, q, c_sl, mask, n, n < N, EVEN_N).to(dtype)
    causal = q[:, None] <= q[None, :]  # rows are the tokens read from, columns those that read
    share = H // G
    h0 = g * share + run * RUN
    pair = tl.zeros([Q, Q], tl.float32)
    for h in tl.range(h0, tl.minimum(h0 + RUN, (g + 1) * share), num_stages=STAGES):
        xp = x + b * x_sb + h * x_sh + row0 * x_sl
        yp = dy + b * dy_sb + h * dy_sh + row0 * dy_sl
        zp = z + b * z_sb + h * z_sh + row0 * z_sl
        v = vec + ((b * H + h) * NC + c) * (2 * Q)
        f = flow + ((k * batch + b) * H + h) * (6 * Q + P)
        place = ((k * batch + b) * H + h) * (P * N)
        token = ((b * L + row0) * H + h) * P
        cum = tl.load(v + q)
        step = tl.load(v + Q + q)
        end = tl.load(v + Q - 1)
        inner = tl.zeros([Q, Q], tl.float32)
        same = tl.zeros([Q], tl.float32)
        # One slice stays in registers; many are a loop, for unrolled they take ptxas minutes.
        if SLICES == 1:
            p = tl.arange(0, BP)
            inner, same, xt, raw, dt, slope, gt, ht = between(
                xp, yp, zp, hs, gs, f, dD + ((b * NC + c) * H + h) * P, place, p, q, n, mask, inner, same, x_sl, dy_sl,
                z_sl, P, N, Q, EVEN_P, HAS_D, D_CHANNELS, HAS_Z, PREC,
            )  # fmt: skip
        else:
            for i in tl.range(0, SLICES, num_stages=1):
                inner, same, _, _, _, _, _, _ = between(
                    xp, yp, zp, hs, gs, f, dD + ((b * NC + c) * H + h) * P, place, i * BP + tl.arange(0, BP), q, n,
                    mask, inner, same, x_sl, dy_sl, z_sl, P, N, Q, EVEN_P, HAS_D, D_CHANNELS, HAS_Z, PREC,
                )  # fmt: skip
        if HAS_D and not D_CHANNELS:
            tl.store(f + 5 * Q + q, same)
        # Few matrices may be alive at once: what is between the tokens comes first, and is done with.
        decay = tl.exp2(tl.where(causal, cum[None, :] - cum[:, None], float("-inf")))
        # Once a head again: kept, it would cost registers; loaded, it would have the wrong layout.
        score = tl.dot(Bt, tl.trans(Ct), input_precision=PREC)
        inner *= decay
        mixed = (decay * score).to(dtype)
        pair += inner * step[:, None]
        # Without the diagonal, which no decay is in: A may be so large that its rounding errors would be all of ddt.
        tl.store(f + 3 * Q + q, tl.sum(tl.where(q[:, None] == q[None, :], inner * score, 0.0), 1))
        inner = tl.where(q[:, None] < q[None, :], inner * score, 0.0)
        tl.store(f + q, tl.sum(inner * step[:, None], 0))
        tl.store(f + 2 * Q + q, tl.sum(inner, 1))
        to_end = tl.exp2(end - cum)
        seen = tl.zeros([Q], tl.float32)
        pulled = tl.zeros([Q], tl.float32)
        for i in tl.range(0, SLICES, num_stages=1):
            p = i * BP + tl.arange(0, BP)
            if SLICES > 1:
                xt = load_tile(xp, q, x_sl, mask, p, p < P, EVEN_P)
                raw = load_tile(yp, q, dy_sl, mask, p, p < P, EVEN_P)
                dt = raw.to(dtype)
                if HAS_Z:
                    dt, slope = gated(raw, load_tile(zp, q, z_sl, mask, p, p < P, EVEN_P), dtype)
                pn = p[:, None] * N + n[None, :]
                gt = tl.load(gs + place + pn, mask=(p < P)[:, None] & (n < N)[None, :], other=0.0)
                ht = tl.load(hs + place + pn, mask=(p < P)[:, None] & (n < N)[None, :], other=0.0)
            to = q[:, None] * (H * P) + p[None, :]
            to_mask = mask[:, None] & (p < P)[None, :]
            du = tl.dot(Bt, tl.trans(gt), input_precision=PREC) * to_end[:, None]
            pulled += tl.sum(du * xt.to(tl.float32), 1)
            du = tl.dot(mixed, dt, du, input_precision=PREC) * step[:, None]
            if HAS_D:
                if D_CHANNELS:
                    d = tl.load(D + h * P + p, mask=p < P, other=0.0).to(tl.float32)
                else:
                    d = tl.zeros([BP], tl.float32) + tl.load(D + h).to(tl.float32)
                du += dt.to(tl.float32) * d[None, :]
            tl.store(dx + token + to, du.to(dx.dtype.element_ty), mask=to_mask)
            before = tl.dot(Ct, tl.trans(ht), input_precision=PREC) * tl.exp2(cum)[:, None]
            seen += tl.sum(before * dt.to(tl.float32), 1)
            if HAS_Z:
                u = (xt.to(tl.float32) * step[:, None]).to(dtype)
                out = tl.dot(tl.trans(mixed), u, before, input_precision=PREC)
                if HAS_D:
                    out += xt.to(tl.float32) * d[None, :]
                tl.store(dz + token + to, (raw.to(tl.float32) * out * slope).to(dz.dtype.element_ty), mask=to_mask)
        tl.store(f + Q + q, seen)
        tl.store(f + 4 * Q + q, pulled)
    to = pairs + (((run * count + k) * batch + b) * G + g) * (Q * Q) + (q[:, None] * Q + q[None, :])
    tl.store(to, pair)


@triton.jit
def groups_kernel(
    x, B, C, dy, z, vec, hs, gs, pairs, dB, dC, L, H, G, NC, P, N, batch, first, count, RUNS, HEADS, PARTS,
    x_sb, x_sl, x_sh, b_sb, b_sl, b_sg, c_sb, c_sl, c_sg, dy_sb, dy_sl, dy_sh, z_sb, z_sl, z_sh,
    Q: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, SLICES: tl.constexpr, EVEN_P: tl.constexpr,
    EVEN_N: tl.constexpr, HAS_Z: tl.constexpr, PREC: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dB or dC of one chunk, a slice of N: a product over heads and channels of the group.

    WHOLE: over all heads, into dB, dC [b, L, G, N]; else over ``HEADS`` of them, into fp32 [PARTS, b, count Q, G, N].
    """
    pid = tl.program_id(0).to(tl.int64)
    way, rest = pid % 2, pid // 2
    part, rest = rest % PARTS, rest // PARTS
    ns = tl.cdiv(N, BN)
    i_n, rest = rest % ns, rest // ns
    g, rest = rest % G, rest // G
    b, k = rest % batch, rest // batch
    c = first + k
    q = tokens_of(Q, WIDE)
    n = (i_n * BN + tl.arange(0, BN)).to(tl.int32)
    row = c * Q
    mask = q < L - row
    dtype = hs.dtype.element_ty
    pair = tl.zeros([Q, Q], tl.float32)
    if part == 0:
        for run in range(RUNS):
            at = (((run * count + k) * batch + b) * G + g) * (Q * Q)
            pair += tl.load(pairs + at + (q[:, None] * Q + q[None, :]))
    share = H // G
    vp = vec + c * (2 * Q)
    h0 = g * share + part * HEADS
    heads = tl.minimum(HEADS, share - part * HEADS)
    if WHOLE:
        to = ((b * L + row) * G + g) * N + (q[:, None] * (G * N) + n[None, :])
        to_mask = mask[:, None] & (n < N)[None, :]
    else:
        to = (((part * batch + b) * count + k) * Q * G + g) * N + (q[:, None] * (G * N) + n[None, :])
        to_mask = (q < Q)[:, None] & (n < N)[None, :]
    if way == 0:
        Bt = load_tile(B + b * b_sb + g * b_sg + row * b_sl, q, b_sl, mask, n, n < N, EVEN_N).to(dtype)
        acc = tl.dot(tl.trans(pair.to(dtype)), Bt, input_precision=PREC)
        for i in tl.range(0, heads * SLICES, num_stages=STAGES):
            h = h0 + i // SLICES
            p = (i % SLICES) * BP + tl.arange(0, BP)
            dt = load_tile(dy + b * dy_sb + h * dy_sh + row * dy_sl, q, dy_sl, mask, p, p < P, EVEN_P)
            if HAS_Z:
                zt = load_tile(z + b * z_sb + h * z_sh + row * z_sl, q, z_sl, mask, p, p < P, EVEN_P)
                dt, _ = gated(dt, zt, dtype)
            place = ((k * batch + b) * H + h) * (P * N)
            pn = p[:, None] * N + n[None, :]
            ht = tl.load(hs + place + pn, mask=(p < P)[:, None] & (n < N)[None, :], other=0.0)
            weight = tl.exp2(tl.load(vp + (b * H + h) * NC * (2 * Q) + q))
            acc = tl.dot((dt.to(tl.float32) * weight[:, None]).to(dtype), ht, acc, input_precision=PREC)
        tl.store(dC + to, acc.to(dC.dtype.element_ty), mask=to_mask)
    else:
        Ct = load_tile(C + b * c_sb + g * c_sg + row * c_sl, q, c_sl, mask, n, n < N, EVEN_N).to(dtype)
        acc = tl.dot(pair.to(dtype), Ct, input_precision=PREC)
        for i in tl.range(0, heads * SLICES, num_stages=STAGES):
            h = h0 + i // SLICES
            p = (i % SLICES) * BP + tl.arange(0, BP)
            xt = load_tile(x + b * x_sb + h * x_sh + row * x_sl, q, x_sl, mask, p, p < P, EVEN_P)
            place = ((k * batch + b) * H + h) * (P * N)
            pn = p[:, None] * N + n[None, :]
            gt = tl.load(gs + place + pn, mask=(p < P)[:, None] & (n < N)[None, :], other=0.0)
            v = vp + (b * H + h) * NC * (2 * Q)
            weight = tl.exp2(tl.load(v + Q - 1) - tl.load(v + q)) * tl.load(v + Q + q)
            acc = tl.dot((xt.to(tl.float32) * weight[:, None]).to(dtype), gt, acc, input_precision=PREC)
        tl.store(dB + to, acc.to(dB.dtype.element_ty), mask=to_mask)


@triton.jit
def sums_kernel(parts_B, parts_C, dB, dC, L, batch, first_token, tokens, GN, PARTS, BLOCK: tl.constexpr):
    """dB, dC [b, L, G, N] of a segment: the sum of the parts [PARTS, b, tokens, G N]."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(tokens * GN, BLOCK)
    i, b = pid % blocks, pid // blocks
    o = i * BLOCK + tl.arange(0, BLOCK)
    mask = (o < tokens * GN) & (o < (pid * 0 + L - first_token) * GN)
    sum_B = tl.zeros([BLOCK], tl.float32)
    sum_C = tl.zeros([BLOCK], tl.float32)
    for part in range(PARTS):
        at = (part * batch + b) * tokens * GN + o
        sum_B += tl.load(parts_B + at, mask=mask, other=0.0)
        sum_C += tl.load(parts_C + at, mask=mask, other=0.0)
    to = (b * L + first_token) * GN + o
    tl.store(dB + to, sum_B.to(dB.dtype.element_ty), mask=mask)
    tl.store(dC + to, sum_C.to(dC.dtype.element_ty), mask=mask)


@triton.jit
def steps_kernel(
    dt, A, bias, starts, vec, flow, ddt, dA, dbias, dD, L, H, NC, P, batch, first, count,
    dt_min, dt_max, s_b, s_l, s_h,
    Q: tl.constexpr, BH: tl.constexpr, BP: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr, HAS_D: tl.constexpr,
):  # fmt: skip
    """ddt [b, L, H]; dA, dbias, dD fp32 [b, NC, H]: the sums over a chunk. ``flow`` is that of chunk_kernel."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(H, BH)
    block, rest = pid % blocks, pid // blocks
    b, k = rest % batch, rest // batch
    c = first + k
    q = tl.arange(0, Q)
    p = tl.arange(0, BP)
    token = c * Q + q
    h = block * BH + tl.arange(0, BH)
    heads = h < H
    mask = (token < L)[:, None] & heads[None, :]
    at = b * s_b + token[:, None] * s_l + h[None, :] * s_h
    raw, free, step = time_step(dt, bias, at, h, mask, heads, dt_min, dt_max, SOFTPLUS, HAS_BIAS)
    f = flow + ((k * batch + b) * H + h)[:, None] * (6 * Q + P)
    reads = tl.load(f + q[None, :], mask=heads[:, None], other=0.0)
    reads += tl.load(f + Q + q[None, :], mask=heads[:, None], other=0.0)
    inside = tl.trans(tl.load(f + 2 * Q + q[None, :], mask=heads[:, None], other=0.0))
    itself = tl.trans(tl.load(f + 3 * Q + q[None, :], mask=heads[:, None], other=0.0))
    pulled = tl.trans(tl.load(f + 4 * Q + q[None, :], mask=heads[:, None], other=0.0))
    across = tl.sum(tl.load(f + 6 * Q + p[None, :], mask=heads[:, None] & (p < P)[None, :], other=0.0), 1)
    end = tl.load(vec + ((b * H + h) * NC + c) * (2 * Q) + Q - 1, mask=heads, other=0.0)
    # What the tokens before are pulled by: loaded one token on, for a sum less its last term would be all rounding
    # where the others are forgotten.
    earlier = heads[:, None] & (q > 0)[None, :]
    pull = tl.load(f + 4 * Q - 1 + q[None, :], mask=earlier, other=0.0)
    v = vec + ((b * H + h)[:, None] * NC + c) * (2 * Q) + Q - 1 + q[None, :]
    pull *= tl.load(v, mask=earlier, other=0.0)
    # A token's term is in every decay from a token before it to this one or a later one.
    term = tl.cumsum(tl.trans(reads) - inside * step, axis=0, reverse=True) + tl.cumsum(tl.trans(pull), axis=0)
    term += (across * tl.exp2(end))[None, :]
    if PACKED:
        starting = tl.load(starts + b * L + token, mask=token < L, other=0)
        term = tl.where((starting != 0)[:, None], 0.0, term)
    rate = tl.load(A + h, mask=heads, other=0.0).to(tl.float32)
    grad = term * rate[None, :] + inside + itself + pulled
    grad = tl.where(mask & (free >= dt_min) & (free <= dt_max), grad, 0.0)
    if SOFTPLUS:
        grad = tl.where(raw > 20.0, grad, grad * tl.sigmoid(raw))
    tl.store(ddt + ((b * L + token) * H)[:, None] + h[None, :], grad.to(ddt.dtype.element_ty), mask=mask)
    to = (b * NC + c) * H + h
    tl.store(dA + to, tl.sum(tl.where(mask, term * step, 0.0), 0), mask=heads)
    tl.store(dbias + to, tl.sum(grad, 0), mask=heads)
    if HAS_D:
        tl.store(dD + to, tl.sum(tl.load(f + 5 * Q + q[None, :], mask=heads[:, None], other=0.0), 1), mask=heads)


def chunks_a_segment(s: Sizes, element: int, workspace: int) -> int:
    """How many chunks' states are made at once: those of the segments and of one segment's chunks fit ``workspace``."""
    states = s.b * s.H * s.P * s.N
    best = 1
    for chunks in range(1, s.NC + 1):
        if states * (chunks * 2 * element + -(-s.NC // chunks) * 4) <= workspace:
            best = chunks
    if best == 1:  # nothing fits: what needs least
        best = max(1, round((s.NC * 4 / (2 * element)) ** 0.5))
    return -(-s.NC // -(-s.NC // best))  # segments of even length


def backward(
    dy: Tensor, dfinal: Tensor | None, x: Tensor, steps: Steps, B: Tensor, C: Tensor, D: Tensor | None,
    z: Tensor | None, init_state: Tensor | None, k: Backward,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinit_state) of checked inputs; None where the input is None."""
    s = Sizes.of(x, B, k.chunk)
    device, f32 = x.device, torch.float32
    vec = prepare(steps, s)
    count = chunks_a_segment(s, x.element_size(), k.workspace)
    passes = Forward(
        chunk=k.chunk, state_p=k.state_p, state_n=k.state_n, state_warps=k.state_warps, state_stages=k.state_stages
    )
    starts = segment_states(x, B, vec, init_state, s, count, passes)
    S = starts.shape[1]
    adjoint = torch.empty(s.b, s.H, s.P, s.N, device=device, dtype=f32)
    adjoint.zero_() if dfinal is None else adjoint.copy_(dfinal)
    hs = torch.empty(count, s.b, s.H, s.P, s.N, device=device, dtype=x.dtype)
    gs = torch.empty_like(hs)
    share = s.H // s.G
    run = min(k.heads, share)
    runs = triton.cdiv(share, run)
    pairs = torch.empty(runs, count, s.b, s.G, s.Q, s.Q, device=device, dtype=f32)
    heads = min(k.group_heads, share)
    n_parts = triton.cdiv(share, heads)
    parts = torch.empty(2, n_parts, s.b, count * s.Q, s.G, s.N, device=device, dtype=f32) if n_parts > 1 else None
    flow = torch.empty(count, s.b, s.H, 6 * s.Q + s.P, device=device, dtype=f32)
    sums = torch.empty(3, s.b * s.NC, s.H, device=device, dtype=f32)
    dx = torch.empty(x.shape, device=device, dtype=x.dtype)
    dz = x if z is None else torch.empty(z.shape, device=device, dtype=z.dtype)
    dB = torch.empty(B.shape, device=device, dtype=B.dtype)
    dC = torch.empty(C.shape, device=device, dtype=C.dtype)
    ddt = torch.empty(steps.dt.shape, device=device, dtype=steps.dt.dtype)
    channels = D is not None and D.dim() == 2
    dD = torch.empty(s.b * s.NC, *D.shape, device=device, dtype=f32) if D is not None and channels else sums[2]
    Dt, zt = x if D is None else D, dy if z is None else z
    common = {"Q": s.Q, "HAS_Z": z is not None, "PREC": precision(x.dtype), "WIDE": wide(s.Q, x, B, C, dy, zt, dx)}
    strides = (*x.stride()[:3], *B.stride()[:3], *C.stride()[:3], *dy.stride()[:3], *zt.stride()[:3])
    WP, WN = min(pad(s.P), k.walk_p), min(pad(s.N), k.walk_n)
    BP, BN = min(pad(s.P), k.block_p), pad(s.N)
    GP, GN = min(pad(s.P), k.group_p), min(pad(s.N), k.group_n)
    for segment in reversed(range(S)):
        first = segment * count
        here = min(count, s.NC - first)
        launch(
            walk_kernel, 2 * s.b * s.H * triton.cdiv(s.P, WP) * triton.cdiv(s.N, WN),
            x, B, C, dy, zt, vec, starts, adjoint, hs, gs, s.L, s.H, s.G, s.NC, s.P, s.N, S, s.b, segment, first, here,
            *strides, **common, BP=WP, BN=WN, EVEN_P=s.P % WP == 0, EVEN_N=s.N % WN == 0,
            STAGES=k.walk_stages, num_warps=k.walk_warps,
        )  # fmt: skip
        launch(
            chunk_kernel, runs * s.b * s.G * here,
            x, B, C, dy, zt, Dt, vec, hs, gs, dx, dz, pairs, flow, dD,
            s.L, s.H, s.G, s.NC, s.P, s.N, s.b, first, here, run, runs, *strides, **common,
            BP=BP, BN=BN, SLICES=triton.cdiv(s.P, BP), EVEN_P=s.P % BP == 0, EVEN_N=s.N == BN,
            HAS_D=D is not None, D_CHANNELS=channels, STAGES=k.stages, num_warps=k.warps,
        )  # fmt: skip
        into = (dB, dC) if parts is None else (parts[0], parts[1])
        launch(
            groups_kernel, 2 * n_parts * s.b * s.G * here * triton.cdiv(s.N, GN),
            x, B, C, dy, zt, vec, hs, gs, pairs, *into, s.L, s.H, s.G, s.NC, s.P, s.N, s.b, first, here, runs, heads,
            n_parts, *strides, **common, BP=GP, BN=GN, SLICES=triton.cdiv(s.P, GP), EVEN_P=s.P % GP == 0,
            EVEN_N=s.N % GN == 0, STAGES=k.group_stages, WHOLE=parts is None, num_warps=k.group_warps,
        )  # fmt: skip
        if parts is not None:
            block = 1024
            launch(
                sums_kernel, s.b * triton.cdiv(here * s.Q * s.G * s.N, block), parts[0], parts[1], dB, dC,
                s.L, s.b, first * s.Q, here * s.Q, s.G * s.N, n_parts, BLOCK=block, num_warps=4,
            )  # fmt: skip
        launch(
            steps_kernel, s.b * here * triton.cdiv(s.H, HEADS_A_PROGRAM), *steps.arguments, vec, flow, ddt, *sums,
            s.L, s.H, s.NC, s.P, s.b, first, here, *steps.limits, Q=s.Q, BH=HEADS_A_PROGRAM, BP=pad(s.P),
            **steps.flags, HAS_D=D is not None and not channels, num_warps=4,
        )  # fmt: skip
    dA, dbias, _ = sums.sum(1)
    if D is not None:
        dD = dD.sum(0).to(D.dtype)
    return (
        dx, ddt, dA.to(steps.A.dtype), dB, dC, None if D is None else dD,
        None if z is None else dz, None if steps.dt_bias is None else dbias.to(steps.dt_bias.dtype),
        None if init_state is None else adjoint.to(init_state.dtype),
    )  # fmt: skip
