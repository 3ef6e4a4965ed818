"""Beside the walks of the chunk scan's backward for Hopper, in plain Triton: sums of slabs, and ddt of flows."""

from __future__ import annotations

import triton
import triton.language as tl

from latentscan.kernels.triton.chunk_common import time_step


@triton.jit
def slabs_kernel(
    slab, base, out, L, rows, batch, first, tokens, GN, PARTS,
    BLOCK: tl.constexpr, Q: tl.constexpr, ODD: tl.constexpr,
):  # fmt: skip
    """out [b, L, G N] of a segment of ``tokens`` from chunk ``first`` on: base [b, rows, G N], and the sum of a slab.

    slab [PARTS, b, tokens, G N]; ODD: of every other chunk, from the second on. BLOCK divides Q G N.
    """
    pid = tl.program_id(0).to(tl.int64)
    tokens += pid * 0  # 64 bits: a segment may have more elements than 32 count
    blocks = tl.cdiv(tokens * GN, BLOCK)
    i, b = pid % blocks, pid // blocks
    o = i * BLOCK + tl.arange(0, BLOCK)
    mask = (o < tokens * GN) & (o < (pid * 0 + L - first * Q) * GN)
    total = tl.load(base + (b * rows + first * Q) * GN + o, mask=mask, other=0.0).to(tl.float32)
    if ODD:
        chunk = i * BLOCK // (Q * GN)
        if chunk % 2 == 1:
            at = slab + (pid * 0 + chunk // 2 * Q - chunk * Q) * GN + o
            for part in tl.range(0, PARTS, num_stages=4):
                total += tl.load(at + (part * batch + b) * (tokens // 2) * GN, mask=mask, other=0.0).to(tl.float32)
    else:
        for part in tl.range(0, PARTS, num_stages=4):
            total += tl.load(slab + (part * batch + b) * tokens * GN + o, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + (b * L + first * Q) * GN + o, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def counts_kernel(
    vec, seen, pulled, counted, H, NC, first, SC,
    Q: tl.constexpr, SPLIT: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """How what flows across chunks changes from the start of a window of R chunks to within each of its chunks.

    counted [b, H, NC]: what leaves the flow (seen) is taken away, what joins it (pulled) added. The rounding errors of
    that are a random walk, whose end is known too: at r chunks of R, r/R of the way back to it is taken (flows_kernel
    adds the two ends).
    """
    pid = tl.program_id(0).to(tl.int64)
    windows = tl.cdiv(SC, R)
    i, rest = pid % windows, pid // windows
    h, b = rest % H, rest // H
    w = first // R + i
    q = tl.arange(0, Q)
    r = tl.arange(0, R)
    c = i * R + r
    token = c[:, None] * Q + q[None, :]
    inside = (c < SC)[:, None] & (q < Q)[None, :]
    v = vec + ((b * (H // SPLIT) + h // SPLIT) * NC + first + c[:, None]) * (2 * Q) + Q + q[None, :]
    gone = tl.sum(tl.load(seen + ((b * H + h) * NC + first) * Q + token, mask=inside, other=0.0), 1)
    step = tl.load(v, mask=inside, other=0.0)
    joined = tl.sum(tl.load(pulled + (b * H + h) * SC * Q + token, mask=inside, other=0.0) * step, 1)
    ahead = tl.cumsum(joined - gone, axis=0) - joined
    part = (r + 0.5) / tl.minimum(R, NC - w * R)
    tl.store(counted + (b * H + h) * NC + first + c, ahead - part * tl.sum(joined - gone), mask=c < SC)


@triton.jit
def flows_kernel(
    dt, A, bias, starts, vec, flow, joined, seen, pulled, known, counted, ddt, dA, dbias,
    L, H, NC, first, SC, W, dt_min, dt_max, s_b, s_l, s_h,
    Q: tl.constexpr, P: tl.constexpr, BH: tl.constexpr, SPLIT: tl.constexpr, R: tl.constexpr, NOISE: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """ddt [b, L, H]; dA, dbias fp32 [b, NC, H]: the sums over a chunk.

    A flow below its own rounding error counts for less (it is at most the chunk's decay).
    """
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(H, BH)
    block, rest = pid % blocks, pid // blocks
    k, b = rest % SC, rest // SC
    c = first + k
    q = tl.arange(0, Q)
    p = tl.arange(0, P)
    token = c * Q + q
    h = block * BH + tl.arange(0, BH)
    heads = h < H
    mask = (token < L)[:, None] & heads[None, :]
    at = b * s_b + token[:, None] * s_l + h[None, :] * s_h
    raw, free, step = time_step(dt, bias, at, h, mask, heads, dt_min, dt_max, SOFTPLUS, HAS_BIAS)
    ahead = tl.zeros([BH, Q], tl.float32)
    direct = tl.zeros([BH, Q], tl.float32)
    before = tl.zeros([BH, Q], tl.float32)  # `pulled` of the token before: sums without a difference
    through = tl.zeros([BH], tl.float32)
    for i in tl.static_range(SPLIT):
        hs = b * H * SPLIT + h * SPLIT + i
        f = hs[:, None] * (SC * Q) + (k * Q + q)[None, :]
        whole = hs[:, None] * (NC * Q) + (c * Q + q)[None, :]
        ahead += tl.load(flow + whole, mask=heads[:, None], other=0.0)
        ahead += tl.load(seen + whole, mask=heads[:, None], other=0.0)
        direct += tl.load(joined + whole, mask=heads[:, None], other=0.0)
        direct += tl.load(pulled + f, mask=heads[:, None], other=0.0)
        before += tl.load(pulled + f - 1, mask=heads[:, None] & (q > 0)[None, :], other=0.0)
        w = c // R
        part = (c % R + 0.5) / tl.minimum(R, NC - w * R)
        ends = known + (hs * (W + 1) + w)[:, None] * P + p[None, :]
        through += tl.sum(tl.load(ends, mask=heads[:, None], other=0.0), 1) * (1.0 - part)
        through += tl.sum(tl.load(ends + P, mask=heads[:, None], other=0.0), 1) * part
        through += tl.load(counted + hs * NC + c, mask=heads, other=0.0)
    # That flow is of the size of the chunk's decay, its rounding error of the states': it counts by its share in both.
    end = tl.load(vec + ((b * H + h) * NC + c) * (2 * Q) + Q - 1, mask=heads, other=0.0)
    size = tl.exp2(2.0 * end)
    through *= size / (size + NOISE)
    v = vec + ((b * H + h)[:, None] * NC + c) * (2 * Q) + Q + q[None, :]
    before *= tl.load(v - 1, mask=heads[:, None] & (q > 0)[None, :], other=0.0)
    # A token's term is in every decay from a token before it to this one or a later one.
    term = tl.cumsum(tl.trans(ahead), axis=0, reverse=True) + tl.cumsum(tl.trans(before), axis=0)
    term += through[None, :]
    if PACKED:
        starting = tl.load(starts + b * L + token, mask=token < L, other=0)
        term = tl.where((starting != 0)[:, None], 0.0, term)
    rate = tl.load(A + h, mask=heads, other=0.0).to(tl.float32)
    grad = term * rate[None, :] + tl.trans(direct)
    grad = tl.where(mask & (free >= dt_min) & (free <= dt_max), grad, 0.0)
    if SOFTPLUS:
        grad = tl.where(raw > 20.0, grad, grad * tl.sigmoid(raw))
    tl.store(ddt + ((b * L + token) * H)[:, None] + h[None, :], grad.to(ddt.dtype.element_ty), mask=mask)
    to = (b * NC + c) * H + h
    tl.store(dA + to, tl.sum(tl.where(mask, term * step, 0.0), 0), mask=heads & (c * Q < L))
    tl.store(dbias + to, tl.sum(grad, 0), mask=heads & (c * Q < L))


@triton.jit
def gate_kernel(
    dy, z, y, inner, dz, L, H, P, dy_sb, dy_sl, dy_sh, z_sb, z_sl, z_sh, BLOCK: tl.constexpr,
):  # fmt: skip
    """inner [b, L, H, P]: dy silu(z), the gradient before the gate; dz: dy y silu'(z)."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(H * P, BLOCK)
    i, row = pid % blocks, pid // blocks
    t, b = row % L, row // L
    o = i * BLOCK + tl.arange(0, BLOCK)
    mask = o < H * P
    h, p = o // P, o % P
    g = tl.load(dy + b * dy_sb + t * dy_sl + h * dy_sh + p, mask=mask, other=0.0).to(tl.float32)
    zt = tl.load(z + b * z_sb + t * z_sl + h * z_sh + p, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(y + row * H * P + o, mask=mask, other=0.0).to(tl.float32)
    gate = tl.sigmoid(zt)
    tl.store(inner + row * H * P + o, (g * zt * gate).to(inner.dtype.element_ty), mask=mask)
    slope = gate * (1.0 + zt * (1.0 - gate))
    tl.store(dz + row * H * P + o, (g * out * slope).to(dz.dtype.element_ty), mask=mask)
