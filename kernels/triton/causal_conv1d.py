"""Causal depthwise convolution of a Mamba mixer as Triton kernels: sequence form, backward, single step.

Shapes and meaning are those of :mod:`latentscan.kernels.reference.ssm_conv`; widths 2 to 4, math in fp32. Any strides:
a slice of one in_proj output is read in place. No atomics: sums over tokens are made of one partial sum a block of
tokens, added in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentscan.kernels.triton.mamba_common import (
    absent,
    cdiv,
    check_activation,
    check_shape,
    check_tensors,
    on_device,
    power_of_two,
    sigmoid,
    silu_gradient,
)

WIDTHS = (2, 3, 4)
FORWARD = {"BL": 16, "NB": 8, "BD": 128, "num_warps": 4}  # NB blocks, one after another, of tokens and channels
FORWARD_MORE = {"BL": 8, "NB": 16, "BD": 128, "num_warps": 4}  # with packing or an initial state
BACKWARD = {"S": 4, "T": 64, "BD": 64, "num_warps": 2}  # S runs of T tokens, each walked by its own rows of threads
UPDATE = {"BD": 128, "num_warps": 2}


@triton.jit
def _forward_kernel(
    x_ptr, w_ptr, bias_ptr, init_ptr, seq_ptr, y_ptr, final_ptr,
    length, channels,
    sxb, sxl, sxd, swd, sww, sib, sid, sit, ssb, ssl,
    W: tl.constexpr, ACTIVE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INIT: tl.constexpr, HAS_SEQ: tl.constexpr,
    BL: tl.constexpr, NB: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """NB blocks of BL tokens x BD channels; the last program of a row also writes the final state."""
    d_blocks = tl.cdiv(channels, BD)
    l_blocks = tl.cdiv(length, BL * NB)
    pid = tl.program_id(0)
    d = (pid % d_blocks) * BD + tl.arange(0, BD)
    block = (pid // d_blocks) % l_blocks
    b = (pid // d_blocks // l_blocks).to(tl.int64)
    in_d = d < channels
    d64 = d.to(tl.int64)
    x_row = x_ptr + b * sxb + d64[None, :] * sxd
    init_row = init_ptr + b * sib + d64[None, :] * sid
    y_row = y_ptr + b * length * channels + d64[None, :]
    # Taps by their distance from the token; they stay in registers.
    w0 = tl.load(w_ptr + d64 * swd + (W - 1) * sww, mask=in_d, other=0.0).to(tl.float32)[None, :]
    w1 = tl.load(w_ptr + d64 * swd + (W - 2) * sww, mask=in_d, other=0.0).to(tl.float32)[None, :]
    w2 = w1
    w3 = w1
    if W > 2:
        w2 = tl.load(w_ptr + d64 * swd + (W - 3) * sww, mask=in_d, other=0.0).to(tl.float32)[None, :]
    if W > 3:
        w3 = tl.load(w_ptr + d64 * swd + (W - 4) * sww, mask=in_d, other=0.0).to(tl.float32)[None, :]
    bias = tl.zeros([1, BD], tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
    for i in range(NB):
        t = (block * NB + i) * BL + tl.arange(0, BL)
        in_l = t < length
        acc = tl.zeros([BL, BD], tl.float32) + bias
        same = in_l
        for lag in tl.static_range(0, W):
            at = t - lag
            if HAS_SEQ and lag > 0:  # the token at `at` belongs to the sequence of t: no change in between
                later = tl.load(seq_ptr + b * ssb + (at + 1).to(tl.int64) * ssl, mask=in_l & (at >= 0), other=0)
                here = tl.load(seq_ptr + b * ssb + at.to(tl.int64) * ssl, mask=in_l & (at >= 0), other=0)
                same = same & ((later == here) | (at < 0))
            ok = (same & (at >= 0))[:, None] & in_d[None, :]
            value = tl.load(x_row + at.to(tl.int64)[:, None] * sxl, mask=ok, other=0.0).to(tl.float32)
            if HAS_INIT and lag > 0:
                if block * NB + i == 0:
                    before = (same & (at < 0))[:, None] & in_d[None, :]
                    value += tl.load(init_row + (at + W - 1)[:, None] * sit, mask=before, other=0.0).to(tl.float32)
            if lag == 0:
                acc += value * w0
            elif lag == 1:
                acc += value * w1
            elif lag == 2:
                acc += value * w2
            else:
                acc += value * w3
        if ACTIVE:
            acc = acc * sigmoid(acc)
        y = y_row + t.to(tl.int64)[:, None] * channels
        tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=in_l[:, None] & in_d[None, :])
    if block == l_blocks - 1:
        x_last = x_ptr + b * sxb + d64 * sxd
        init_last = init_ptr + b * sib + d64 * sid
        final = final_ptr + (b * channels + d64) * (W - 1)
        whole = 1
        for back in tl.static_range(0, W - 1):  # from the last token to older ones
            place = length - 1 - back
            if HAS_SEQ and back > 0:
                after = tl.load(seq_ptr + b * ssb + tl.cast(place + 1, tl.int64) * ssl, mask=place >= 0, other=0)
                own = tl.load(seq_ptr + b * ssb + tl.cast(place, tl.int64) * ssl, mask=place >= 0, other=0)
                whole = tl.where((after == own) | (place < 0), whole, 0)
            keep = in_d & (whole == 1)
            last = tl.load(x_last + tl.cast(place, tl.int64) * sxl, mask=keep & (place >= 0), other=0.0).to(tl.float32)
            if HAS_INIT:
                older = keep & (place < 0) & (place + W - 1 >= 0)
                last += tl.load(init_last + (place + W - 1) * sit, mask=older, other=0.0).to(tl.float32)
            tl.store(final + (W - 2 - back), last.to(final_ptr.dtype.element_ty), mask=in_d)


@triton.jit
def _changed(seq_row, ssl, t, length, HAS_SEQ: tl.constexpr):
    """Whether a new sequence starts at each token t; false outside the row."""
    changed = t < t
    if HAS_SEQ:
        inside = (t >= 1) & (t < length)
        here = tl.load(seq_row + t.to(tl.int64) * ssl, mask=inside, other=0)
        before = tl.load(seq_row + (t - 1).to(tl.int64) * ssl, mask=inside, other=0)
        changed = here != before
    return changed


@triton.jit
def _ahead(at, t, length, in_d):
    """Values at tokens t [S], whose addresses are ``at``, in their own dtype; zero outside the row."""
    return tl.load(at, mask=((t >= 0) & (t < length))[:, None] & in_d, other=0.0)


@triton.jit
def _extended(x_row, init_row, t, length, in_d, sxl, sit, W: tl.constexpr, HAS_INIT: tl.constexpr):
    """Inputs at tokens t [S] of the channels of the row pointers; before the row, those of the initial state."""
    ok = ((t >= 0) & (t < length))[:, None] & in_d
    value = tl.load(x_row + t.to(tl.int64)[:, None] * sxl, mask=ok, other=0.0).to(tl.float32)
    if HAS_INIT:
        before = ((t < 0) & (t + W - 1 >= 0))[:, None] & in_d
        value += tl.load(init_row + (t + W - 1)[:, None] * sit, mask=before, other=0.0).to(tl.float32)
    return value


@triton.jit
def _backward_kernel(
    dy_ptr, dfinal_ptr, x_ptr, w_ptr, bias_ptr, init_ptr, seq_ptr, dx_ptr, dinit_ptr, part_ptr,
    length, channels, sob, sol, sod,
    syb, syl, syd, sfb, sfd, sft, sxb, sxl, sxd, swd, sww, sib, sid, sit, ssb, ssl,
    W: tl.constexpr, ACTIVE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INIT: tl.constexpr, HAS_SEQ: tl.constexpr,
    HAS_DY: tl.constexpr, HAS_DFINAL: tl.constexpr,
    S: tl.constexpr, T: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """S runs of T positions, walked at the same time; inputs and their gradients wait in registers.

    A run reads three tokens beyond its end. Narrower filters are filters of width 4 with zeros. Gradients of an initial
    state are complete in a row's first three steps. part [blocks, 5, channels] takes the sums for four weights and the
    bias.
    """
    d_blocks = tl.cdiv(channels, BD)
    t_blocks = tl.cdiv(length, S * T)
    pid = tl.program_id(0)
    d = (pid % d_blocks) * BD + tl.arange(0, BD)
    block = pid // d_blocks
    b = (block // t_blocks).to(tl.int64)
    start = (block % t_blocks) * (S * T) + tl.arange(0, S) * T  # first position of each run
    in_d = (d < channels)[None, :]
    d64 = d.to(tl.int64)
    x_row = x_ptr + b * sxb + d64[None, :] * sxd
    dy_row = dy_ptr + b * syb + d64[None, :] * syd
    init_row = init_ptr + b * sib + d64[None, :] * sid
    seq_row = seq_ptr + b * ssb
    w_row = w_ptr + d64 * swd
    only = d < channels
    w0 = tl.load(w_row + (W - 1) * sww, mask=only, other=0.0).to(tl.float32)[None, :]
    w1 = tl.load(w_row + (W - 2) * sww, mask=only, other=0.0).to(tl.float32)[None, :]
    w2 = tl.zeros([1, BD], tl.float32)
    w3 = tl.zeros([1, BD], tl.float32)
    if W > 2:
        w2 += tl.load(w_row + (W - 3) * sww, mask=only, other=0.0).to(tl.float32)[None, :]
    if W > 3:
        w3 += tl.load(w_row + (W - 4) * sww, mask=only, other=0.0).to(tl.float32)[None, :]
    bias = tl.zeros([1, BD], tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + d, mask=only, other=0.0).to(tl.float32)[None, :]
    # Inputs before the run, as far as they are of the same sequence as the position before it.
    c1 = _changed(seq_row, ssl, start - 1, length, HAS_SEQ)
    c2 = _changed(seq_row, ssl, start - 2, length, HAS_SEQ)
    x1 = _extended(x_row, init_row, start - 1, length, in_d, sxl, sit, W, HAS_INIT)
    x2 = _extended(x_row, init_row, start - 2, length, in_d, sxl, sit, W, HAS_INIT)
    x3 = _extended(x_row, init_row, start - 3, length, in_d, sxl, sit, W, HAS_INIT)
    x2 = tl.where(c1[:, None], 0.0, x2)
    x3 = tl.where((c1 | c2)[:, None], 0.0, x3)
    a1 = tl.zeros([S, BD], tl.float32)  # gradients of the inputs at t-1, t-2, t-3 so far
    a2 = tl.zeros([S, BD], tl.float32)
    a3 = tl.zeros([S, BD], tl.float32)
    s0 = tl.zeros([S, BD], tl.float32)
    s1 = tl.zeros([S, BD], tl.float32)
    s2 = tl.zeros([S, BD], tl.float32)
    s3 = tl.zeros([S, BD], tl.float32)
    sb = tl.zeros([S, BD], tl.float32)
    out_row = dx_ptr + b * sob + d64[None, :] * sod
    # Loads run two tokens ahead: one token at a time does not fill the way to memory. Addresses move on by strides.
    start64 = start.to(tl.int64)[:, None]
    x_at = x_row + start64 * sxl
    dy_at = dy_row + start64 * syl
    out_at = out_row + (start64 - 3) * sol
    xa = _ahead(x_at, start, length, in_d)
    xb = _ahead(x_at + sxl, start + 1, length, in_d)
    x_at += 2 * tl.cast(sxl, tl.int64)
    ga = xa
    gb = xb
    if HAS_DY:
        ga = _ahead(dy_at, start, length, in_d)
        gb = _ahead(dy_at + syl, start + 1, length, in_d)
        dy_at += 2 * tl.cast(syl, tl.int64)
    for i in range(T + 3):
        t = start + i
        c0 = _changed(seq_row, ssl, t, length, HAS_SEQ)
        x0 = xa.to(tl.float32)
        g = tl.zeros([S, BD], tl.float32)
        if HAS_DY:
            g = ga.to(tl.float32)
        xa = xb
        ga = gb
        xb = _ahead(x_at, t + 2, length, in_d)
        x_at += sxl
        gb = xb
        if HAS_DY:
            gb = _ahead(dy_at, t + 2, length, in_d)
            dy_at += syl
        if HAS_SEQ:
            x1 = tl.where(c0[:, None], 0.0, x1)
            x2 = tl.where(c0[:, None], 0.0, x2)
            x3 = tl.where(c0[:, None], 0.0, x3)
        if ACTIVE:
            g = g * silu_gradient(bias + x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3)
        own = tl.where(i < T, g, 0.0)
        s0 += own * x0
        s1 += own * x1
        s2 += own * x2
        s3 += own * x3
        sb += own
        if HAS_SEQ:
            a1 += tl.where(c0[:, None], 0.0, g * w1)
            a2 += tl.where((c0 | c1)[:, None], 0.0, g * w2)
            a3 += tl.where((c0 | c1 | c2)[:, None], 0.0, g * w3)
        else:
            a1 += g * w1
            a2 += g * w2
            a3 += g * w3
        q = t - 3  # whose gradient is complete
        mine = (i >= 3) & (q < length)
        if HAS_INIT:
            mine = ((i >= 3) | (start == 0)) & (q < length)
        if HAS_DFINAL:
            tail = q - (length - (W - 1))
            ok = (mine & (tail >= 0))[:, None] & in_d
            last = tl.load(
                dfinal_ptr + b * sfb + d64[None, :] * sfd + tail[:, None] * sft, mask=ok, other=0.0
            ).to(tl.float32)  # fmt: skip
            a3 += tl.where((c1 | c2)[:, None], 0.0, last)
        tl.store(
            out_at, a3.to(dx_ptr.dtype.element_ty),
            mask=(mine & (q >= 0))[:, None] & in_d,
        )  # fmt: skip
        if HAS_INIT:
            if i < 3:
                tl.store(
                    dinit_ptr + (b * channels + d64[None, :]) * (W - 1) + (q + W - 1)[:, None],
                    a3.to(dinit_ptr.dtype.element_ty),
                    mask=((start == 0) & (q < length) & (q + W - 1 >= 0))[:, None] & in_d,
                )  # fmt: skip
        out_at += sol
        a3, a2, a1 = a2, a1, g * w0
        x3, x2, x1 = x2, x1, x0
        c2, c1 = c1, c0
    part = part_ptr + block.to(tl.int64) * 5 * channels + d
    tl.store(part, tl.sum(s0, 0), mask=only)
    tl.store(part + channels, tl.sum(s1, 0), mask=only)
    tl.store(part + 2 * channels, tl.sum(s2, 0), mask=only)
    tl.store(part + 3 * channels, tl.sum(s3, 0), mask=only)
    tl.store(part + 4 * channels, tl.sum(sb, 0), mask=only)


@triton.jit
def _update_kernel(
    x_ptr, state_ptr, w_ptr, bias_ptr, index_ptr, y_ptr, new_ptr,
    channels, sxb, sxd, ssb, ssd, sst, snb, snd, snt, swd, sww,
    W: tl.constexpr, KEPT: tl.constexpr, KEPT2: tl.constexpr, ACTIVE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_INDEX: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One token of BD channels; the kept inputs move on by one place."""
    d_blocks = tl.cdiv(channels, BD)
    pid = tl.program_id(0)
    b = (pid // d_blocks).to(tl.int64)
    d = (pid % d_blocks) * BD + tl.arange(0, BD)
    in_d = d < channels
    d64 = d.to(tl.int64)
    row = b
    if HAS_INDEX:
        row = tl.load(index_ptr + b).to(tl.int64)
        in_d = in_d & (row >= 0)
    j = tl.arange(0, KEPT2)
    x = tl.load(x_ptr + b * sxb + d64 * sxd, mask=in_d, other=0.0)
    old = state_ptr + row * ssb + d64[:, None] * ssd
    new = tl.load(old + (j + 1)[None, :] * sst, mask=in_d[:, None] & (j < KEPT - 1)[None, :], other=0.0)
    new = tl.where((j == KEPT - 1)[None, :], x[:, None].to(new_ptr.dtype.element_ty), new)
    tap = j - (KEPT - W)  # the weight of each kept input
    w = tl.load(
        w_ptr + d64[:, None] * swd + tap[None, :] * sww,
        mask=in_d[:, None] & ((tap >= 0) & (j < KEPT))[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    # The newest input counts in its own dtype, whatever the state keeps of it.
    value = tl.where((j == KEPT - 1)[None, :], x[:, None].to(tl.float32), new.to(tl.float32))
    y = tl.sum(value * w, 1)
    if KEPT == W - 1:
        first = tl.load(state_ptr + row * ssb + d64 * ssd, mask=in_d, other=0.0).to(tl.float32)
        y += first * tl.load(w_ptr + d64 * swd, mask=in_d, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + d, mask=in_d, other=0.0).to(tl.float32)
    if ACTIVE:
        y = y * sigmoid(y)
    tl.debug_barrier()  # where new is old, everything was read
    tl.store(y_ptr + b * channels + d64, y.to(y_ptr.dtype.element_ty), mask=d < channels)
    tl.store(new_ptr + row * snb + d64[:, None] * snd + j[None, :] * snt, new, mask=in_d[:, None] & (j < KEPT)[None, :])


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, init_state: Tensor | None, seq_idx: Tensor | None, activation: str
) -> None:
    check_activation(activation)
    check_tensors(x, weight, bias, init_state)
    batch, length, channels = x.shape
    width = weight.shape[1]
    if width not in WIDTHS:
        raise ValueError(f"the filter has width {width}; these kernels take {', '.join(map(str, WIDTHS))}")
    if length < 1:
        raise ValueError("the sequence is empty")
    check_shape("weight", weight, (channels, width))
    check_shape("bias", bias, (channels,))
    if init_state is not None and init_state.shape[-1] != width - 1:
        raise ValueError(
            f"init_state holds {init_state.shape[-1]} values per channel, the convolution needs {width - 1}"
        )
    check_shape("init_state", init_state, (batch, channels, width - 1))
    check_shape("seq_idx", seq_idx, (batch, length))


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer for an argument that the kernel will not read."""
    return other if tensor is None else tensor


def _strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if tensor is None else tuple(tensor.stride())


@on_device
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, init_state: Tensor | None = None,
    seq_idx: Tensor | None = None, *, activation: str = "none",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``y_t = act(bias + sum_k weight[:, W-1-k] x_{t-k})``, per channel; one launch.

    Args:
        x: [b, L, D], any strides. weight: [D, W], W from 2 to 4. bias: [D]. init_state: [b, D, W-1].
        seq_idx: integer [b, L]; nothing crosses the places where it changes.

    Returns:
        y: [b, L, D], contiguous, in x's dtype. final_state: [b, D, W-1] in x's dtype.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
    """
    _check(x, weight, bias, init_state, seq_idx, activation)
    batch, length, channels = x.shape
    width = weight.shape[1]
    y = torch.empty((batch, length, channels), dtype=x.dtype, device=x.device)
    final = torch.empty((batch, channels, width - 1), dtype=x.dtype, device=x.device)
    bias = None if bias is None else bias.contiguous()
    size = FORWARD if init_state is None and seq_idx is None else FORWARD_MORE
    if batch and channels:
        grid = (batch * cdiv(length, size["BL"] * size["NB"]) * cdiv(channels, size["BD"]),)
        _forward_kernel[grid](
            x, weight, _or(bias, x), _or(init_state, x), _or(seq_idx, x), y, final, length, channels,
            *x.stride(), *weight.stride(), *_strides(init_state, 3), *_strides(seq_idx, 2),
            W=width, ACTIVE=activation == "silu", HAS_BIAS=bias is not None, HAS_INIT=init_state is not None,
            HAS_SEQ=seq_idx is not None, **size,
        )  # fmt: skip
    return y, final


@on_device
def causal_conv1d_backward(
    dy: Tensor | None, dfinal_state: Tensor | None,
    x: Tensor, weight: Tensor, bias: Tensor | None = None, init_state: Tensor | None = None,
    seq_idx: Tensor | None = None, *, activation: str = "none", out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients (dx, dweight, dbias, dinit_state) of :func:`causal_conv1d`; empty where the input was None.

    One launch that recomputes the convolution, and a sum over [blocks of tokens, 5, D]. ``out``: where to write dx,
    [b, L, D] of any strides; a new contiguous tensor if None.
    """
    _check(x, weight, bias, init_state, seq_idx, activation)
    batch, length, channels = x.shape
    width = weight.shape[1]
    check_shape("dy", dy, x.shape)
    check_shape("dfinal_state", dfinal_state, (batch, channels, width - 1))
    check_shape("out", out, x.shape)
    dx = torch.empty((batch, length, channels), dtype=x.dtype, device=x.device) if out is None else out
    dinit = absent(x)
    if init_state is not None:
        dinit = torch.empty(init_state.shape, dtype=init_state.dtype, device=x.device)
    contiguous_bias = None if bias is None else bias.contiguous()
    size = BACKWARD
    blocks = batch * cdiv(length, size["S"] * size["T"])
    part = torch.empty((blocks, 5, channels), dtype=torch.float32, device=x.device)
    if batch and channels:
        _backward_kernel[(blocks * cdiv(channels, size["BD"]),)](
            _or(dy, x), _or(dfinal_state, x), x, weight, _or(contiguous_bias, x), _or(init_state, x), _or(seq_idx, x),
            dx, dinit, part, length, channels, *dx.stride(),
            *_strides(dy, 3), *_strides(dfinal_state, 3), *x.stride(), *weight.stride(),
            *_strides(init_state, 3), *_strides(seq_idx, 2),
            W=width, ACTIVE=activation == "silu", HAS_BIAS=bias is not None, HAS_INIT=init_state is not None,
            HAS_SEQ=seq_idx is not None, HAS_DY=dy is not None, HAS_DFINAL=dfinal_state is not None, **size,
        )  # fmt: skip
    sums = part.sum(0)
    dweight = sums[:width].flip(0).t().to(weight.dtype).contiguous()
    return dx, dweight, absent(x) if bias is None else sums[4].to(bias.dtype), dinit


@on_device
def conv_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "none",
    inplace: bool = False, state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One decode step of :func:`causal_conv1d`; one launch.

    Args:
        x: [b, D], one token. weight: [D, W]. bias: [D].
        conv_state: [b, D, S] with S >= W - 1, the last S inputs, oldest first; [rows, D, S] with ``state_indices``.
        inplace: write the new state over the old one.
        state_indices: integer [b], the row of ``conv_state`` of each token, all different; a negative one stands for
            no sequence, which reads and writes no state (its y is that of zeros). Needs ``inplace``.

    Returns:
        y: [b, D] in x's dtype. new_state: as conv_state, ``conv_state`` itself with ``inplace``.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
    """
    check_activation(activation)
    check_tensors(x, conv_state, weight, bias, state_indices)
    batch, channels = x.shape
    width, kept = weight.shape[1], conv_state.shape[-1]
    if width not in WIDTHS:
        raise ValueError(f"the filter has width {width}; these kernels take {', '.join(map(str, WIDTHS))}")
    if kept < width - 1:
        raise ValueError(f"conv_state holds {kept} values per channel, the step needs {width - 1}")
    check_shape("weight", weight, (channels, width))
    check_shape("bias", bias, (channels,))
    check_shape("state_indices", state_indices, (batch,))
    check_shape("conv_state", conv_state, (batch if state_indices is None else conv_state.shape[0], channels, kept))
    if state_indices is not None and not inplace:
        raise ValueError("state_indices need inplace=True")
    y = torch.empty((batch, channels), dtype=x.dtype, device=x.device)
    new = conv_state if inplace else torch.empty(conv_state.shape, dtype=conv_state.dtype, device=x.device)
    bias = None if bias is None else bias.contiguous()
    index = None if state_indices is None else state_indices.contiguous()
    if batch and channels:
        _update_kernel[(batch * cdiv(channels, UPDATE["BD"]),)](
            x, conv_state, weight, _or(bias, x), _or(index, x), y, new, channels,
            *x.stride(), *conv_state.stride(), *new.stride(), *weight.stride(),
            W=width, KEPT=kept, KEPT2=power_of_two(kept), ACTIVE=activation == "silu", HAS_BIAS=bias is not None,
            HAS_INDEX=index is not None, **UPDATE,
        )  # fmt: skip
    return y, new
