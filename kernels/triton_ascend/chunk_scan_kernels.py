"""Device code of the chunk scan, forward: decay (cumsum), states of the chunks, the pass over chunks, the output.

Decay is kept per token as ``cum``, the running sum of ``A step`` within its chunk, every term clamped to [-111, 0]. The
first token of a packed sequence has the term -111: the state before it vanishes, and no other kernel knows of packing.
These terms are counted apart and added at the end, since small terms would lose their bits beside a sum of many.
A program serves one unit; units are numbered from ``first``, because one launch may not have more than 65 535.
"""

from __future__ import annotations

import triton.language as tl

from latentscan.kernels.triton_ascend.common import GONE, kernel, load_rows, sigmoid, softplus


@kernel
def cumsum_kernel(
    dt, A, bias, starts, cum, step, first, L, NC, s_b, s_l, dt_min, dt_max,
    H: tl.constexpr, Q: tl.constexpr, BH: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """cum, step fp32 [b, H, NC, Q] from dt [b, L, H]; tokens past L have step 0. Unit: (b, chunk, BH heads)."""
    pid = tl.program_id(0).to(tl.int64) + first
    block = pid % ((H + BH - 1) // BH)
    rest = pid // ((H + BH - 1) // BH)
    c = rest % NC
    b = rest // NC
    q = tl.arange(0, Q)
    h = block * BH + tl.arange(0, BH)
    mask = (q < L - c * Q)[:, None] & (h < H)[None, :]
    at = dt + (b * s_b + c * Q * s_l) + q[:, None] * s_l + h[None, :]
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
    if SOFTPLUS:
        value = softplus(value)
    value = tl.minimum(tl.maximum(value, dt_min), dt_max)
    value = tl.where(mask, value, 0.0)
    decay = value * tl.load(A + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
    decay = tl.minimum(tl.maximum(decay, GONE), 0.0)
    if PACKED:
        start = tl.load(starts + b * L + c * Q + q, mask=q < L - c * Q, other=0.0)
        decay = tl.where((start > 0.0)[:, None], 0.0, decay)
    total = tl.cumsum(decay, axis=0)
    if PACKED:
        total += (tl.cumsum(start, axis=0) * GONE)[:, None]
    to = ((b * H + h)[:, None] * NC + c) * Q + q[None, :]
    tl.store(cum + to, tl.trans(total), mask=(h < H)[:, None])
    tl.store(step + to, tl.trans(value), mask=(h < H)[:, None])


@kernel
def state_kernel(
    x, B, cum, step, states, first, L, NC, x_sb, x_sl, x_sh, b_sb, b_sl, b_sg,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    Q: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """states fp32 [b, NC, H, P, N]: what each chunk adds to the state. Unit: (b, chunk, head).

    REVERSE: what it adds to the adjoint of the state before it; x is then the gradient of the output, B is C.
    """
    pid = tl.program_id(0).to(tl.int64) + first
    h = pid % H
    c = (pid // H) % NC
    b = pid // H // NC
    g = h // (H // G)
    q = tl.arange(0, Q)
    p = tl.arange(0, BP)
    n = tl.arange(0, BN)
    mask = q < L - c * Q
    xt = load_rows(x + (b * x_sb + c * Q * x_sl + h * x_sh), q, x_sl, mask, p, P, P == BP)
    Bt = load_rows(B + (b * b_sb + c * Q * b_sl + g * b_sg), q, b_sl, mask, n, N, N == BN)
    v = ((b * H + h) * NC + c) * Q
    if REVERSE:
        weight = tl.exp(tl.load(cum + v + q))
    else:
        weight = tl.exp(tl.load(cum + v + Q - 1) - tl.load(cum + v + q)) * tl.load(step + v + q)
    scaled = (xt.to(tl.float32) * weight[:, None]).to(xt.dtype)
    added = tl.dot(tl.trans(scaled), Bt)
    to = states + pid * (P * N) + p[:, None] * N + n[None, :]
    if P == BP and N == BN:
        tl.store(to, added)
    else:
        tl.store(to, added, mask=(p < P)[:, None] & (n < N)[None, :])


@kernel
def pass_kernel(
    states, cum, start, entering, end, first, NC,
    H: tl.constexpr, PN: tl.constexpr, Q: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The recurrence over chunks: entering [b, NC, H, PN] the state before each chunk, end fp32 [b, H, PN] after all.

    REVERSE: the adjoint after each chunk, from the last to the first; ``start`` is then that of the final state and
    ``end`` becomes that of the initial state. Unit: (b, head, BLOCK elements of a state).
    """
    pid = tl.program_id(0).to(tl.int64) + first
    blocks = (PN + BLOCK - 1) // BLOCK
    i = pid % blocks
    h = (pid // blocks) % H
    b = pid // blocks // H
    o = i * BLOCK + tl.arange(0, BLOCK)
    mask = o < PN
    state = tl.load(start + (b * H + h) * PN + o, mask=mask, other=0.0)
    for k in range(NC):
        c = k
        if REVERSE:
            c = NC - 1 - k
        at = ((b * NC + c) * H + h) * PN + o
        tl.store(entering + at, state.to(entering.dtype.element_ty), mask=mask)
        decay = tl.exp(tl.load(cum + ((b * H + h) * NC + c) * Q + Q - 1))
        state = state * decay + tl.load(states + at, mask=mask, other=0.0)
    tl.store(end + (b * H + h) * PN + o, state, mask=mask)


@kernel
def scan_kernel(
    x, B, C, z, D, cum, step, entering, y, first, L, NC,
    x_sb, x_sl, x_sh, b_sb, b_sl, b_sg, c_sb, c_sl, c_sg, z_sb, z_sl, z_sh,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    Q: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    HAS_D: tl.constexpr, D_CHANNELS: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """y [b, L, H, P]. Unit: (b, chunk, head)."""
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
    Bt = load_rows(B + (b * b_sb + c * Q * b_sl + g * b_sg), q, b_sl, mask, n, N, N == BN)
    Cp = C + (b * c_sb + c * Q * c_sl + g * c_sg)
    order = q.to(tl.float32)  # comparing numbers is cheaper than comparing integers
    difference = tl.where(order[:, None] >= order[None, :], cum_t[:, None] - cum_t[None, :], -1.0e4)
    score = tl.dot(load_rows(Cp, q, c_sl, mask, n, N, N == BN), tl.trans(Bt))
    weights = score * tl.exp(tl.minimum(difference, 0.0)) * step_t[None, :]
    xt = load_rows(x + (b * x_sb + c * Q * x_sl + h * x_sh), q, x_sl, mask, p, P, P == BP)
    acc = tl.dot(weights.to(xt.dtype), xt)
    at = entering + pid * (P * N) + p[:, None] * N + n[None, :]
    if P == BP and N == BN:
        state = tl.load(at)
    else:
        state = tl.load(at, mask=(p < P)[:, None] & (n < N)[None, :], other=0.0)
    # Loaded again: the first dot may have overwritten its left operand.
    before = tl.dot(load_rows(Cp, q, c_sl, mask, n, N, N == BN), tl.trans(state))
    acc += before * tl.exp(cum_t)[:, None]
    if HAS_D:
        if D_CHANNELS:
            skip = tl.load(D + h * P + p, mask=p < P, other=0.0).to(tl.float32)
            acc += xt.to(tl.float32) * skip[None, :]
        else:
            acc += xt.to(tl.float32) * tl.load(D + h).to(tl.float32)
    if HAS_Z:
        zt = load_rows(z + (b * z_sb + c * Q * z_sl + h * z_sh), q, z_sl, mask, p, P, P == BP).to(tl.float32)
        acc = acc * zt * sigmoid(zt)
    to = y + ((b * L + c * Q) * H + h) * P + q[:, None] * (H * P) + p[None, :]
    if P == BP:
        tl.store(to, acc.to(y.dtype.element_ty), mask=mask[:, None])
    else:
        tl.store(to, acc.to(y.dtype.element_ty), mask=mask[:, None] & (p < P)[None, :])
