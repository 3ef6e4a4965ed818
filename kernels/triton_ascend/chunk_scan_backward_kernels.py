"""Device code of the chunk scan, backward; the states of the chunks and their passes are those of the forward.

Within a chunk, token t reads token j <= t with weight ``exp(cum_t - cum_j) step_j (C_t . B_j)``; h is the state before
the chunk and g the adjoint of the state after it.
"""

from __future__ import annotations

import triton.language as tl

from latentscan.kernels.triton_ascend.common import GONE, kernel, load_rows, sigmoid, softplus


@kernel
def gate_kernel(dy, z, y, dout, dz, first, n, BLOCK: tl.constexpr):
    """dout, dz of ``y silu(z)``, all of n neighbouring elements. Unit: BLOCK of them."""
    pid = tl.program_id(0).to(tl.int64) + first
    o = pid * BLOCK + tl.arange(0, BLOCK)
    mask = o < n
    grad = tl.load(dy + o, mask=mask, other=0.0).to(tl.float32)
    zt = tl.load(z + o, mask=mask, other=0.0).to(tl.float32)
    gate = sigmoid(zt)
    tl.store(dout + o, (grad * zt * gate).to(dout.dtype.element_ty), mask=mask)
    slope = gate * (1.0 + zt * (1.0 - gate))
    yt = tl.load(y + o, mask=mask, other=0.0).to(tl.float32)
    tl.store(dz + o, (grad * yt * slope).to(dz.dtype.element_ty), mask=mask)


@kernel
def kept_kernel(entering, adjoint, kept, first, NC, H: tl.constexpr, PN: tl.constexpr, BLOCK: tl.constexpr):
    """kept fp32 [b, H, NC]: the state before each chunk times the adjoint after it, summed. Unit: (b, chunk, head)."""
    pid = tl.program_id(0).to(tl.int64) + first
    h = pid % H
    c = (pid // H) % NC
    b = pid // H // NC
    total = 0.0
    for i in range((PN + BLOCK - 1) // BLOCK):
        o = i * BLOCK + tl.arange(0, BLOCK)
        before = tl.load(entering + pid * PN + o, mask=o < PN, other=0.0).to(tl.float32)
        total += tl.sum(before * tl.load(adjoint + pid * PN + o, mask=o < PN, other=0.0).to(tl.float32), 0)
    tl.store(kept + (b * H + h) * NC + c, total)


@kernel
def token_kernel(
    x, B, C, dout, D, cum, step, entering, adjoint, kept, dx, dcum, dstep, dD, first, L, NC,
    x_sb, x_sl, x_sh, b_sb, b_sl, b_sg, c_sb, c_sl, c_sg, d_sb, d_sl, d_sh,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    Q: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, HAS_D: tl.constexpr, D_CHANNELS: tl.constexpr,
):  # fmt: skip
    """dx [b, L, H, P]; dcum, dstep fp32 [b, H, NC, Q], the gradients of cum and (beside it) of step; with D its
    gradient per chunk and channel dD fp32 [b, NC, H, P]. Unit: (b, chunk, head)."""
    pid = tl.program_id(0).to(tl.int64) + first
    h = pid % H
    c = (pid // H) % NC
    b = pid // H // NC
    g = h // (H // G)
    q = tl.arange(0, Q)
    p = tl.arange(0, BP)
    n = tl.arange(0, BN)
    mask = q < L - c * Q
    v = ((b * H + h) * NC + c) * Q
    cum_t = tl.load(cum + v + q)
    step_t = tl.load(step + v + q)
    end = tl.load(cum + v + Q - 1)
    Bp = B + (b * b_sb + c * Q * b_sl + g * b_sg)
    Cp = C + (b * c_sb + c * Q * c_sl + g * c_sg)
    xp = x + (b * x_sb + c * Q * x_sl + h * x_sh)
    dp = dout + (b * d_sb + c * Q * d_sl + h * d_sh)
    pn = pid * (P * N) + p[:, None] * N + n[None, :]
    pn_mask = (p < P)[:, None] & (n < N)[None, :]

    # What the states give. Each left operand is loaded for its product alone.
    gt = tl.load(adjoint + pn, mask=pn_mask, other=0.0)
    ht = tl.load(entering + pn, mask=pn_mask, other=0.0)
    du = tl.dot(load_rows(Bp, q, b_sl, mask, n, N, N == BN), tl.trans(gt)) * tl.exp(end - cum_t)[:, None]
    xt = load_rows(xp, q, x_sl, mask, p, P, P == BP)
    pulled = tl.sum(du * xt.to(tl.float32), 1) * step_t
    before = tl.dot(load_rows(Cp, q, c_sl, mask, n, N, N == BN), tl.trans(ht))
    dt = load_rows(dp, q, d_sl, mask, p, P, P == BP)
    seen = tl.sum(before * dt.to(tl.float32), 1) * tl.exp(cum_t)

    # Within the chunk: rows are the tokens read, columns those that read.
    order = q.to(tl.float32)
    difference = tl.where(order[:, None] <= order[None, :], cum_t[None, :] - cum_t[:, None], -1.0e4)
    Ct = load_rows(Cp, q, c_sl, mask, n, N, N == BN)
    mixed = tl.dot(load_rows(Bp, q, b_sl, mask, n, N, N == BN), tl.trans(Ct))
    mixed = mixed * tl.exp(tl.minimum(difference, 0.0))
    inner = tl.dot(load_rows(xp, q, x_sl, mask, p, P, P == BP), tl.trans(dt))
    # Without the diagonal, which no decay is in.
    flow = tl.where(order[:, None] < order[None, :], inner * mixed * step_t[:, None], 0.0)
    change = seen - pulled + tl.sum(flow, 0) - tl.sum(flow, 1)
    change += tl.where(q == Q - 1, tl.sum(pulled, 0) + tl.load(kept + (b * H + h) * NC + c) * tl.exp(end), 0.0)
    tl.store(dcum + v + q, change)
    du += tl.dot(mixed.to(xt.dtype), dt)
    tl.store(dstep + v + q, tl.sum(du * xt.to(tl.float32), 1))
    du = du * step_t[:, None]
    if HAS_D:
        if D_CHANNELS:
            du += dt.to(tl.float32) * tl.load(D + h * P + p, mask=p < P, other=0.0).to(tl.float32)[None, :]
        else:
            du += dt.to(tl.float32) * tl.load(D + h).to(tl.float32)
        tl.store(dD + pid * P + p, tl.sum(dt.to(tl.float32) * xt.to(tl.float32), 0), mask=p < P)
    to = dx + ((b * L + c * Q) * H + h) * P + q[:, None] * (H * P) + p[None, :]
    tl.store(to, du.to(dx.dtype.element_ty), mask=mask[:, None] & (p < P)[None, :])


@kernel
def pair_kernel(
    x, dout, cum, step, pairs, first, L, NC, x_sb, x_sl, x_sh, d_sb, d_sl, d_sh,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """pairs fp32 [b, NC, G, Q, Q]: the gradient of C_t . B_j (t before j), over the heads. Unit: (b, chunk, group)."""
    pid = tl.program_id(0).to(tl.int64) + first
    g = pid % G
    c = (pid // G) % NC
    b = pid // G // NC
    q = tl.arange(0, Q)
    p = tl.arange(0, BP)
    mask = q < L - c * Q
    order = q.to(tl.float32)
    total = tl.zeros([Q, Q], tl.float32)
    for r in range(H // G):
        h = g * (H // G) + r
        v = ((b * H + h) * NC + c) * Q
        cum_t = tl.load(cum + v + q)
        step_t = tl.load(step + v + q)
        xt = load_rows(x + (b * x_sb + c * Q * x_sl + h * x_sh), q, x_sl, mask, p, P, P == BP)
        inner = tl.dot(
            load_rows(dout + (b * d_sb + c * Q * d_sl + h * d_sh), q, d_sl, mask, p, P, P == BP), tl.trans(xt)
        )
        difference = tl.where(order[:, None] >= order[None, :], cum_t[:, None] - cum_t[None, :], -1.0e4)
        total += inner * tl.exp(tl.minimum(difference, 0.0)) * step_t[None, :]
    tl.store(pairs + pid * (Q * Q) + q[:, None] * Q + q[None, :], total)


@kernel
def group_kernel(
    x, B, states, cum, step, pairs, dB, first, L, NC, x_sb, x_sl, x_sh, b_sb, b_sl, b_sg,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    Q: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, OF_C: tl.constexpr,
):  # fmt: skip
    """dB [b, L, G, N] from x, C (as B) and the adjoints after the chunks (as states); OF_C: dC from the gradient of
    the output (as x), B and the states before the chunks. Unit: (b, chunk, group)."""
    pid = tl.program_id(0).to(tl.int64) + first
    g = pid % G
    c = (pid // G) % NC
    b = pid // G // NC
    q = tl.arange(0, Q)
    p = tl.arange(0, BP)
    n = tl.arange(0, BN)
    mask = q < L - c * Q
    pn_mask = (p < P)[:, None] & (n < N)[None, :]
    Bt = load_rows(B + (b * b_sb + c * Q * b_sl + g * b_sg), q, b_sl, mask, n, N, N == BN)
    pair = tl.load(pairs + pid * (Q * Q) + q[:, None] * Q + q[None, :]).to(Bt.dtype)
    if OF_C:
        total = tl.dot(pair, Bt)
    else:
        total = tl.dot(tl.trans(pair), Bt)
    for r in range(H // G):
        h = g * (H // G) + r
        v = ((b * H + h) * NC + c) * Q
        if OF_C:
            weight = tl.exp(tl.load(cum + v + q))
        else:
            weight = tl.exp(tl.load(cum + v + Q - 1) - tl.load(cum + v + q)) * tl.load(step + v + q)
        xt = load_rows(x + (b * x_sb + c * Q * x_sl + h * x_sh), q, x_sl, mask, p, P, P == BP)
        at = states + ((b * NC + c) * H + h) * (P * N) + p[:, None] * N + n[None, :]
        st = tl.load(at, mask=pn_mask, other=0.0)
        total += tl.dot((xt.to(tl.float32) * weight[:, None]).to(xt.dtype), st)
    to = dB + ((b * L + c * Q) * G + g) * N + q[:, None] * (G * N) + n[None, :]
    tl.store(to, total.to(dB.dtype.element_ty), mask=mask[:, None] & (n < N)[None, :])


@kernel
def step_kernel(
    dt, A, bias, starts, dcum, dstep, ddt, dA, dbias, first, L, NC, s_b, s_l, dt_min, dt_max,
    H: tl.constexpr, Q: tl.constexpr, BH: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """ddt fp32 [b, L, H]; dA, dbias fp32 [b, NC, H]: what A's and the bias' gradient are the sums of.

    Unit: (b, chunk, BH heads).
    """
    pid = tl.program_id(0).to(tl.int64) + first
    block = pid % ((H + BH - 1) // BH)
    rest = pid // ((H + BH - 1) // BH)
    c = rest % NC
    b = rest // NC
    q = tl.arange(0, Q)
    h = block * BH + tl.arange(0, BH)
    mask = (q < L - c * Q)[:, None] & (h < H)[None, :]
    value = tl.load(dt + (b * s_b + c * Q * s_l) + q[:, None] * s_l + h[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
    free = value
    if SOFTPLUS:
        free = softplus(value)
    clamped = tl.where(mask, tl.minimum(tl.maximum(free, dt_min), dt_max), 0.0)
    At = tl.load(A + h, mask=h < H, other=0.0).to(tl.float32)
    at = ((b * H + h)[:, None] * NC + c) * Q + q[None, :]
    # The gradient of every term of the running sum: a running sum from the end.
    change = tl.trans(tl.load(dcum + at, mask=(h < H)[:, None], other=0.0))
    term = tl.sum(change, 0)[None, :] - tl.cumsum(change, axis=0) + change
    term = tl.where(clamped * At[None, :] < GONE, 0.0, term)
    if PACKED:
        start = tl.load(starts + b * L + c * Q + q, mask=q < L - c * Q, other=0.0)
        term = tl.where((start > 0.0)[:, None], 0.0, term)
    grad = term * At[None, :] + tl.trans(tl.load(dstep + at, mask=(h < H)[:, None], other=0.0))
    grad = tl.where(free < dt_min, 0.0, grad)
    grad = tl.where(free > dt_max, 0.0, grad)
    if SOFTPLUS:
        grad = grad * tl.where(value > 20.0, 1.0, sigmoid(value))
    grad = tl.where(mask, grad, 0.0)
    tl.store(ddt + (b * L + c * Q + q)[:, None] * H + h[None, :], grad, mask=mask)
    tl.store(dA + (b * NC + c) * H + h, tl.sum(tl.where(mask, term * clamped, 0.0), 0), mask=h < H)
    tl.store(dbias + (b * NC + c) * H + h, tl.sum(grad, 0), mask=h < H)
