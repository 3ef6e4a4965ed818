"""The decode step of a Mamba-2 or Mamba-1 layer as one Triton kernel: reads the state once, writes it once.

Shapes and meaning are those of :func:`latentscan.kernels.reference.ssm.state_update`; math in fp32, the state in any
dtype. A layer whose heads have one channel (Mamba-1) takes a block of heads at a time, any other a block of one head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentscan.kernels.triton.mamba_common import (
    cdiv,
    check_shape,
    check_tensors,
    on_device,
    power_of_two,
    sigmoid,
    softplus,
)

_BLOCK = 2048  # elements of the state that a program holds


def block_sizes(head_dim: int, d_state: int, heads: int) -> dict[str, int]:
    """Rows (channels of a head, or heads of one channel) and states of a block, and its warps."""
    states = power_of_two(d_state)
    rows = max(1, min(power_of_two(heads if head_dim == 1 else head_dim), _BLOCK // states))
    return {"BR": rows, "BN": states, "num_warps": min(8, max(1, rows * states // 512))}


@triton.jit
def _kernel(
    state_ptr, x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, bias_ptr, index_ptr, y_ptr, new_ptr,
    heads, head_dim, d_state, share, dt_min, dt_max,
    shb, shh, shp, shn, snb, snh, snp, snn, sxb, sxh, sxp, stb, sth, sah, san, sbb, sbg, sbn, scb, scg, scn,
    sdh, sdp, szb, szh, szp,
    CHANNELS: tl.constexpr, A_STATES: tl.constexpr, ONE_GROUP: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_INDEX: tl.constexpr, SOFTPLUS: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A block of BR rows x all states. CHANNELS: the rows are heads of one channel; else channels of one head."""
    pid = tl.program_id(0)
    rows = tl.arange(0, BR)
    n = tl.arange(0, BN)
    in_n = n < d_state
    if CHANNELS:
        blocks = tl.cdiv(heads, BR)
        h = (pid % blocks) * BR + rows
        p = rows * 0
        b = (pid // blocks).to(tl.int64)
        ok = h < heads
    else:
        blocks = tl.cdiv(head_dim, BR)
        h = rows * 0 + (pid // blocks) % heads
        p = (pid % blocks) * BR + rows
        b = (pid // blocks // heads).to(tl.int64)
        ok = p < head_dim
    given = ok
    row = b
    if HAS_INDEX:
        row = tl.load(index_ptr + b).to(tl.int64)
        ok = ok & (row >= 0)
    h64 = h.to(tl.int64)
    p64 = p.to(tl.int64)
    n64 = n.to(tl.int64)
    both = ok[:, None] & in_n[None, :]
    old = tl.load(
        state_ptr + row * shb + (h64 * shh + p64 * shp)[:, None] + n64[None, :] * shn, mask=both, other=0.0
    ).to(tl.float32)  # fmt: skip
    x = tl.load(x_ptr + b * sxb + h64 * sxh + p64 * sxp, mask=ok, other=0.0).to(tl.float32)
    if CHANNELS:
        step = tl.load(dt_ptr + b * stb + h64 * sth, mask=ok, other=0.0).to(tl.float32)
        if HAS_BIAS:
            step += tl.load(bias_ptr + h, mask=ok, other=0.0).to(tl.float32)
        g = h64 // share
    else:  # one head: its scalars are read once
        head = (pid // blocks) % heads
        one = tl.load(dt_ptr + b * stb + tl.cast(head, tl.int64) * sth).to(tl.float32)
        if HAS_BIAS:
            one += tl.load(bias_ptr + head).to(tl.float32)
        step = tl.zeros([BR], tl.float32) + one
        g = h64 // share
    if SOFTPLUS:
        step = softplus(step)
    step = tl.minimum(tl.maximum(step, dt_min), dt_max)
    if CHANNELS:
        if A_STATES:
            a = tl.load(a_ptr + h64[:, None] * sah + n64[None, :] * san, mask=both, other=0.0).to(tl.float32)
        else:
            a = tl.load(a_ptr + h64 * sah, mask=ok, other=0.0).to(tl.float32)[:, None]
    else:
        if A_STATES:
            a = tl.load(a_ptr + tl.cast(head, tl.int64) * sah + n64 * san, mask=in_n, other=0.0).to(tl.float32)[None, :]
        else:
            a = tl.zeros([1, 1], tl.float32) + tl.load(a_ptr + tl.cast(head, tl.int64) * sah).to(tl.float32)
    if CHANNELS and not ONE_GROUP:
        bs = tl.load(b_ptr + b * sbb + (g * sbg)[:, None] + n64[None, :] * sbn, mask=both, other=0.0).to(tl.float32)
        cs = tl.load(c_ptr + b * scb + (g * scg)[:, None] + n64[None, :] * scn, mask=both, other=0.0).to(tl.float32)
    else:
        first = b * 0
        if not CHANNELS:
            first += head // share
        bs = tl.load(b_ptr + b * sbb + first * sbg + n64 * sbn, mask=in_n, other=0.0).to(tl.float32)[None, :]
        cs = tl.load(c_ptr + b * scb + first * scg + n64 * scn, mask=in_n, other=0.0).to(tl.float32)[None, :]
    new = tl.exp(step[:, None] * a) * old + (step * x)[:, None] * bs
    y = tl.sum(new * cs, 1)
    if HAS_D:
        y += x * tl.load(d_ptr + h64 * sdh + p64 * sdp, mask=ok, other=0.0).to(tl.float32)
    if HAS_Z:
        z = tl.load(z_ptr + b * szb + h64 * szh + p64 * szp, mask=ok, other=0.0).to(tl.float32)
        y = y * (z * sigmoid(z))
    tl.store(
        new_ptr + row * snb + (h64 * snh + p64 * snp)[:, None] + n64[None, :] * snn,
        new.to(new_ptr.dtype.element_ty), mask=both,
    )  # fmt: skip
    tl.store(y_ptr + (b * heads + h64) * head_dim + p64, y.to(y_ptr.dtype.element_ty), mask=given)


@on_device
def state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    *, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
    inplace: bool = False, state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One decode step; one launch.

    Args:
        state: [b, H, P, N], any strides; [rows, H, P, N] with ``state_indices``.
        x: [b, H, P]. dt: [b, H]. A: [H] or [H, N], not positive. B, C: [b, G, N].
        D: [H] or [H, P]. z: as x. dt_bias: [H].
        inplace: write the new state over the old one.
        state_indices: integer [b], the row of ``state`` of each sequence, all different; a negative one stands for no
            sequence: it touches no state, and its y is zero. Needs ``inplace``.

    Returns:
        y: [b, H, P] in x's dtype. new_state: as state, ``state`` itself with ``inplace``.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
    """
    check_tensors(state, x, dt, A, B, C, D, z, dt_bias, state_indices)
    if not 0.0 <= dt_min <= dt_max:
        raise ValueError(f"dt_min {dt_min} and dt_max {dt_max} must satisfy 0 <= dt_min <= dt_max")
    batch, heads, head_dim = x.shape
    groups, d_state = B.shape[1:]
    if heads % groups:
        raise ValueError(f"{heads} heads cannot share {groups} groups evenly")
    check_shape("dt", dt, (batch, heads))
    check_shape("A", A, (heads,) if A.dim() == 1 else (heads, d_state))
    check_shape("B", B, (batch, groups, d_state))
    check_shape("C", C, (batch, groups, d_state))
    if D is not None:
        check_shape("D", D, (heads,) if D.dim() == 1 else (heads, head_dim))
    check_shape("z", z, x.shape)
    check_shape("dt_bias", dt_bias, (heads,))
    check_shape("state_indices", state_indices, (batch,))
    check_shape("state", state, (batch if state_indices is None else state.shape[0], heads, head_dim, d_state))
    if state_indices is not None and not inplace:
        raise ValueError("state_indices need inplace=True")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new = state if inplace else torch.empty(state.shape, dtype=state.dtype, device=x.device)
    if not y.numel():
        return y, new
    size = block_sizes(head_dim, d_state, heads)
    blocks = batch * (cdiv(heads, size["BR"]) if head_dim == 1 else heads * cdiv(head_dim, size["BR"]))

    def given(t: Tensor | None) -> Tensor:
        return x if t is None else t

    _kernel[(blocks,)](
        state, x, dt, A, B, C, given(D), given(z), given(None if dt_bias is None else dt_bias.contiguous()),
        given(None if state_indices is None else state_indices.contiguous()), y, new,
        heads, head_dim, d_state, heads // groups, float(dt_min), float(dt_max),
        *state.stride(), *new.stride(), *x.stride(), *dt.stride(), *((*A.stride(), 0)[:2]), *B.stride(), *C.stride(),
        *((0, 0) if D is None else (*D.stride(), 0)[:2]), *((0, 0, 0) if z is None else z.stride()),
        CHANNELS=head_dim == 1, A_STATES=A.dim() == 2, ONE_GROUP=groups == 1, HAS_D=D is not None, HAS_Z=z is not None,
        HAS_BIAS=dt_bias is not None, HAS_INDEX=state_indices is not None, SOFTPLUS=dt_softplus, **size,
    )  # fmt: skip
    return y, new
