"""Device code of the rest of a Mamba mixer: causal convolution, gated RMS norm, one step of the state."""

from __future__ import annotations

import triton.language as tl

from latentscan.kernels.triton_ascend.common import kernel, sigmoid, softplus


@kernel
def conv_kernel(
    x, before, weight, bias, reach, y, first, L, x_sb, x_sl,
    D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """y [b, L, D] of x [b, L, D], with ``before`` [b, W - 1, D] in front; weight [W, D], the last row for the token.

    reach fp32 [b, L], if PACKED: how many tokens before each one belong to its sequence, at most W - 1.
    Unit: (b, BT tokens, BD channels).
    """
    pid = tl.program_id(0).to(tl.int64) + first
    channels = (D + BD - 1) // BD
    i = pid % channels
    rest = pid // channels
    blocks = (L + BT - 1) // BT
    c = rest % blocks
    b = rest // blocks
    t = tl.arange(0, BT)
    d = i * BD + tl.arange(0, BD)
    there = (t < L - c * BT)[:, None] & (d < D)[None, :]
    total = tl.zeros([BT, BD], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    if PACKED:
        behind = tl.load(reach + b * L + c * BT + t, mask=t < L - c * BT, other=0.0)
    for k in tl.static_range(W):  # the token k before
        at = c * BT + t - k
        value = tl.load(
            x + (b * x_sb + (c * BT - k) * x_sl) + t[:, None] * x_sl + d[None, :], mask=there & (at >= 0)[:, None],
            other=0.0,
        ).to(tl.float32)  # fmt: skip
        if k > 0:
            value += tl.load(
                before + (b * (W - 1) + W - 1 + at)[:, None] * D + d[None, :], mask=there & (at < 0)[:, None], other=0.0
            ).to(tl.float32)
            if PACKED:
                value = tl.where((behind > k - 0.5)[:, None], value, 0.0)
        tap = tl.load(weight + (W - 1 - k) * D + d, mask=d < D, other=0.0).to(tl.float32)
        total += value * tap[None, :]
    if SILU:
        total = total * sigmoid(total)
    to = y + (b * L + c * BT) * D + t[:, None] * D + d[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=there)


@kernel
def norm_kernel(
    x, z, weight, y, first, x_sl, z_sl, eps,
    D: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_Z: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """y [rows, D]: RMS norm over groups of SIZE channels; the gate silu(z) after it (BEFORE) or before it.

    Unit: (row, group).
    """
    pid = tl.program_id(0).to(tl.int64) + first
    g = pid % (D // SIZE)
    row = pid // (D // SIZE)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in range((SIZE + BLOCK - 1) // BLOCK):
        o = i * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_sl + g * SIZE + o, mask=o < SIZE, other=0.0).to(tl.float32)
        if HAS_Z and not BEFORE:
            zt = tl.load(z + row * z_sl + g * SIZE + o, mask=o < SIZE, other=0.0).to(tl.float32)
            value = value * zt * sigmoid(zt)
        squares += value * value
    scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / SIZE + eps)
    for i in range((SIZE + BLOCK - 1) // BLOCK):
        o = i * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_sl + g * SIZE + o, mask=o < SIZE, other=0.0).to(tl.float32)
        if HAS_Z:
            zt = tl.load(z + row * z_sl + g * SIZE + o, mask=o < SIZE, other=0.0).to(tl.float32)
            value = value * zt * sigmoid(zt)
        value = value * scale * tl.load(weight + g * SIZE + o, mask=o < SIZE, other=0.0).to(tl.float32)
        tl.store(y + row * D + g * SIZE + o, value.to(y.dtype.element_ty), mask=o < SIZE)


@kernel
def update_kernel(
    state, x, dt, A, B, C, D, z, bias, new, y, first, dt_min, dt_max,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    A_STATES: tl.constexpr, HAS_D: tl.constexpr, D_CHANNELS: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """One decode step: new [b, H, P, N] and y [b, H, P] of state, x [b, H, P], dt [b, H], B and C [b, G, N].

    A is [H], or [H, N] with A_STATES. Unit: (b, head, BP channels).
    """
    pid = tl.program_id(0).to(tl.int64) + first
    blocks = (P + BP - 1) // BP
    i = pid % blocks
    h = (pid // blocks) % H
    b = pid // blocks // H
    g = h // (H // G)
    p = i * BP + tl.arange(0, BP)
    n = tl.arange(0, BN)
    step = tl.load(dt + b * H + h + tl.arange(0, 1)).to(tl.float32)
    if HAS_BIAS:
        step += tl.load(bias + h + tl.arange(0, 1)).to(tl.float32)
    if SOFTPLUS:
        step = softplus(step)
    step = tl.minimum(tl.maximum(step, dt_min), dt_max)
    if A_STATES:
        rate = tl.load(A + h * N + n, mask=n < N, other=0.0).to(tl.float32)
    else:
        rate = tl.zeros([BN], tl.float32) + tl.load(A + h).to(tl.float32)
    xt = tl.load(x + (b * H + h) * P + p, mask=p < P, other=0.0).to(tl.float32)
    Bt = tl.load(B + (b * G + g) * N + n, mask=n < N, other=0.0).to(tl.float32)
    Ct = tl.load(C + (b * G + g) * N + n, mask=n < N, other=0.0).to(tl.float32)
    at = (b * H + h) * (P * N) + p[:, None] * N + n[None, :]
    mask = (p < P)[:, None] & (n < N)[None, :]
    st = tl.load(state + at, mask=mask, other=0.0).to(tl.float32)
    st = st * tl.exp(step * rate)[None, :] + (xt * step)[:, None] * Bt[None, :]
    tl.store(new + at, st.to(new.dtype.element_ty), mask=mask)
    out = tl.sum(st * Ct[None, :], 1)
    if HAS_D:
        if D_CHANNELS:
            out += xt * tl.load(D + h * P + p, mask=p < P, other=0.0).to(tl.float32)
        else:
            out += xt * tl.load(D + h).to(tl.float32)
    if HAS_Z:
        zt = tl.load(z + (b * H + h) * P + p, mask=p < P, other=0.0).to(tl.float32)
        out = out * zt * sigmoid(zt)
    tl.store(y + (b * H + h) * P + p, out.to(y.dtype.element_ty), mask=p < P)
