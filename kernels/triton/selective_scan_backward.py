"""Backward of Mamba-1's selective scan as Triton kernels: keeps nothing of the forward, recomputes chunk by chunk.

One kernel finds what each chunk adds to the state that leaves it and to the gradient of the state that enters it, one
passes both along, and one walks each chunk forward and back. On its way back it reads the states of the way there from
a scratch area of its own, of one chunk, which is used again for every chunk that the program walks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentscan.kernels.triton.mamba_common import (
    absent,
    cdiv,
    check_shape,
    on_device,
    sigmoid,
    silu_gradient,
    softplus,
)
from latentscan.kernels.triton.selective_scan import BD, ahead, check, local_kernel, pass_kernel, strides

CHUNK = 32  # tokens
_SCRATCH = 1 << 26  # bytes, about, of all programs' scratch areas together


@triton.jit
def _walk_kernel(
    dy_ptr, u_ptr, delta_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, bias_ptr, enter_ptr, leave_ptr, scratch_ptr,
    du_ptr, ddelta_ptr, dz_ptr, da_ptr, db_ptr, dc_ptr, dd_ptr, dbias_ptr,
    length, per_group, d_state, chunk, chunks, channels, batch, programs,
    sub, sud, sul, stb, std, stl, sad, san, sbb, sbg, sbn, sbl, scb, scg, scn, scl, szb, szd, szl, syb, syd, syl,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_DY: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Every ``programs``-th chunk of a block of channels, over all rows.

    du, ddelta, dz: [b, L, D]. db, dc: [blocks, b, L, N]. da: [programs, N, D]; dd, dbias: [programs, D].
    """
    per = tl.cdiv(per_group, BD)
    groups = channels // per_group
    blocks = per * groups
    pid = tl.program_id(0)
    block = pid % blocks
    k = pid // blocks
    g = block // per
    r = (block % per) * BD + tl.arange(0, BD)
    in_d = r < per_group
    d = g * per_group + r
    n = tl.arange(0, BN)
    in_n = n < d_state
    d64, n64, g64 = d.to(tl.int64), n.to(tl.int64), tl.cast(g, tl.int64)
    both = in_n[:, None] & in_d[None, :]
    a = tl.load(a_ptr + d64[None, :] * sad + n64[:, None] * san, mask=both, other=0.0).to(tl.float32)
    a = a * 1.4426950408889634  # powers of two
    bias = tl.zeros([BD], tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + d, mask=in_d, other=0.0).to(tl.float32)
    skip = tl.zeros([BD], tl.float32)
    if HAS_D:
        skip += tl.load(d_ptr + d, mask=in_d, other=0.0).to(tl.float32)
    own = scratch_ptr + tl.cast(pid, tl.int64) * chunk * (BN * BD) + n[:, None] * BD + tl.arange(0, BD)[None, :]
    da = tl.zeros([BN, BD], tl.float32)
    dd = tl.zeros([BD], tl.float32)
    dbias = tl.zeros([BD], tl.float32)
    for task in range(k, batch * chunks, programs):
        b = tl.cast(task // chunks, tl.int64)
        c = task % chunks
        state = ((b * chunks + c) * d_state + n64[:, None]) * channels + d64[None, :]
        h = tl.load(enter_ptr + state, mask=both, other=0.0)
        first = c * chunk
        count = tl.minimum(chunk, length - first)
        end = first + count
        u_row = u_ptr + b * sub + d64 * sud
        step_row = delta_ptr + b * stb + d64 * std
        b_row = b_ptr + b * sbb + g64 * sbg + n64 * sbn
        c_row = c_ptr + b * scb + g64 * scg + n64 * scn
        z_row = z_ptr + b * szb + d64 * szd
        dy_row = dy_ptr + b * syb + d64 * syd
        # Loads run one token ahead, here and on the way back.
        u1, step1 = ahead(u_row, first, end, sul, in_d), ahead(step_row, first, end, stl, in_d)
        b1 = ahead(b_row, first, end, sbl, in_n)
        for i in range(count):
            t = first + i
            tl.store(own + i * (BN * BD), h)
            u, bs = u1.to(tl.float32), b1.to(tl.float32)
            step = step1.to(tl.float32) + bias
            u1, step1 = ahead(u_row, t + 1, end, sul, in_d), ahead(step_row, t + 1, end, stl, in_d)
            b1 = ahead(b_row, t + 1, end, sbl, in_n)
            if SOFTPLUS:
                step = softplus(step)
            h = tl.exp2(a * step[None, :]) * h + (step * u)[None, :] * bs[:, None]
        tl.debug_barrier()
        adjoint = tl.load(leave_ptr + state, mask=both, other=0.0)
        last = end - 1
        u1, step1 = ahead(u_row, last, end, sul, in_d), ahead(step_row, last, end, stl, in_d)
        b1, c1 = ahead(b_row, last, end, sbl, in_n), ahead(c_row, last, end, scl, in_n)
        z1, dy1 = u1, u1
        if HAS_DY:
            dy1 = ahead(dy_row, last, end, syl, in_d)
        if HAS_Z:
            z1 = ahead(z_row, last, end, szl, in_d)
        for back in range(count):
            i = count - 1 - back
            t = first + i
            at = tl.cast(t, tl.int64)
            before = tl.load(own + i * (BN * BD))
            u, bs, cs = u1.to(tl.float32), b1.to(tl.float32), c1.to(tl.float32)
            raw = step1.to(tl.float32) + bias
            z, dout = z1.to(tl.float32), tl.zeros([BD], tl.float32)
            if HAS_DY:
                dout = dy1.to(tl.float32)
            earlier = tl.maximum(t - 1, first)
            u1, step1 = ahead(u_row, earlier, end, sul, in_d), ahead(step_row, earlier, end, stl, in_d)
            b1, c1 = ahead(b_row, earlier, end, sbl, in_n), ahead(c_row, earlier, end, scl, in_n)
            if HAS_DY:
                dy1 = ahead(dy_row, earlier, end, syl, in_d)
            if HAS_Z:
                z1 = ahead(z_row, earlier, end, szl, in_d)
            step = raw
            if SOFTPLUS:
                step = softplus(raw)
            decay = tl.exp2(a * step[None, :])
            h = decay * before + (step * u)[None, :] * bs[:, None]
            place = (b * length + at) * channels + d64
            if HAS_Z:
                y = tl.sum(h * cs[:, None], 0) + skip * u
                tl.store(dz_ptr + place, (dout * y * silu_gradient(z)).to(dz_ptr.dtype.element_ty), mask=in_d)
                dout = dout * (z * sigmoid(z))
            adjoint += cs[:, None] * dout[None, :]
            sums = ((block * batch + b) * length + at) * d_state + n64
            tl.store(dc_ptr + sums, tl.sum(h * dout[None, :], 1), mask=in_n)
            tl.store(db_ptr + sums, tl.sum(adjoint * (step * u)[None, :], 1), mask=in_n)
            from_b = tl.sum(adjoint * bs[:, None], 0)
            carried = adjoint * decay
            exponent = carried * before
            da += exponent * step[None, :]
            dstep = tl.sum(exponent * a, 0) * 0.6931471805599453 + from_b * u
            if SOFTPLUS:
                dstep = tl.where(raw > 20.0, dstep, dstep * sigmoid(raw))
            du = from_b * step + dout * skip
            tl.store(du_ptr + place, du.to(du_ptr.dtype.element_ty), mask=in_d)
            tl.store(ddelta_ptr + place, dstep.to(ddelta_ptr.dtype.element_ty), mask=in_d)
            dbias += dstep
            dd += dout * u
            adjoint = carried
        tl.debug_barrier()
    part = (tl.cast(k, tl.int64) * d_state + n64[:, None]) * channels + d64[None, :]
    tl.store(da_ptr + part, da, mask=both)
    tl.store(dd_ptr + tl.cast(k, tl.int64) * channels + d64, dd, mask=in_d)
    tl.store(dbias_ptr + tl.cast(k, tl.int64) * channels + d64, dbias, mask=in_d)


@on_device
def selective_scan_backward(
    dy: Tensor | None, dfinal_state: Tensor | None,
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None,
    init_state: Tensor | None = None, *, delta_softplus: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of :func:`latentscan.kernels.triton.selective_scan.selective_scan`; the same every time.

    Memory beside the results: two fp32 states for every 32 tokens, and partial sums of dB and dC for every 32 channels.

    Returns:
        (du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinit_state); empty where the input was None. du, ddelta and dz
        are [b, D, L], transposed [b, L, D].

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    B4, C4, sizes = check(u, delta, A, B, C, D, z, delta_bias, init_state)
    batch, channels, length, d_state = sizes.batch, sizes.channels, sizes.length, sizes.d_state
    check_shape("dy", dy, u.shape)
    check_shape("dfinal_state", dfinal_state, (batch, channels, d_state))
    chunks, blocks = cdiv(length, CHUNK), sizes.blocks
    skip, bias = (None if t is None else t.contiguous() for t in (D, delta_bias))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=u.device)

    def given(t: Tensor | None) -> Tensor:
        return u if t is None else t

    du, ddelta = empty(batch, length, channels, dtype=u.dtype), empty(batch, length, channels, dtype=delta.dtype)
    dz = absent(u) if z is None else empty(batch, length, channels, dtype=z.dtype)
    dinit = absent(u) if init_state is None else empty(*init_state.shape, dtype=init_state.dtype)
    entering, leaving = (empty(batch, chunks, d_state, channels) for _ in range(2))
    sums = empty(batch, chunks, channels)
    launch = sizes.launch
    area = CHUNK * launch["BN"] * BD
    programs = max(1, min(batch * chunks, _SCRATCH // 4 // area // max(1, blocks)))
    scratch = empty(max(1, programs * blocks) * area)
    dA, dD, dbias = empty(programs, d_state, channels), empty(programs, channels), empty(programs, channels)
    dB, dC = (empty(sizes.groups, blocks // sizes.groups, batch, length, d_state) for _ in range(2))
    common = (length, channels // sizes.groups, d_state, CHUNK, chunks, channels)
    inputs = (
        *u.stride(), *delta.stride(), *A.stride(), *B4.stride(), *C4.stride(), *strides(z, 3), *strides(dy, 3)
    )  # fmt: skip
    flags = {
        "HAS_Z": z is not None, "HAS_BIAS": bias is not None, "SOFTPLUS": delta_softplus, "HAS_DY": dy is not None,
        **launch,
    }  # fmt: skip
    if not du.numel():
        for part in (dA, dD, dbias, dB, dC):
            part.zero_()
    else:
        local_kernel[(batch * chunks * blocks,)](
            u, delta, A, B4, C4, given(z), given(bias), given(dy), entering, sums, leaving, *common, *inputs,
            ADJOINT=True, **flags,
        )  # fmt: skip
        pass_kernel[(batch * cdiv(d_state * channels, 256),)](
            A, given(init_state), given(dfinal_state), dinit, entering, sums, leaving, d_state, chunks, channels,
            *A.stride(), *strides(init_state, 3), *strides(dfinal_state, 3),
            HAS_INIT=init_state is not None, ADJOINT=True, HAS_DFINAL=dfinal_state is not None, BE=256, num_warps=4,
        )  # fmt: skip
        _walk_kernel[(programs * blocks,)](
            given(dy), u, delta, A, B4, C4, given(skip), given(z), given(bias), entering, leaving, scratch,
            du, ddelta, dz, dA, dB, dC, dD, dbias, *common, batch, programs, *inputs,
            HAS_D=D is not None, **flags,
        )  # fmt: skip

    def of_groups(part: Tensor, like: Tensor) -> Tensor:  # [G, blocks, b, L, N] -> [b, G, N, L]
        return part.sum(1).permute(1, 0, 3, 2).reshape(like.shape).to(like.dtype).contiguous()

    return (
        du.transpose(1, 2),
        ddelta.transpose(1, 2),
        dA.sum(0).t().to(A.dtype).contiguous(),
        of_groups(dB, B),
        of_groups(dC, C),
        absent(u) if D is None else dD.sum(0).to(D.dtype),
        absent(u) if z is None else dz.transpose(1, 2),
        absent(u) if delta_bias is None else dbias.sum(0).to(delta_bias.dtype),
        dinit,
    )
