"""Mamba-1's selective scan as Triton kernels, forward.

Shapes and meaning are those of :mod:`latentscan.kernels.reference.selective`; math in fp32. A thread owns one channel
and all its states in registers and walks the tokens of a chunk. Chunks run side by side: a first kernel finds what each
adds to the state, a second passes states on from chunk to chunk, a third walks again from the right state. Memory
beside the results is one state a chunk. The backward is in :mod:`latentscan.kernels.triton.selective_scan_backward`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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

BD = 32  # channels of a block: the lanes of a warp, so that sums over states stay inside a thread
MAX_STATES = 256
_WALKERS = 8192  # programs that fill a large device, about


@triton.jit
def ahead(row, t, end, stride, mask):
    """What a row of pointers holds at token t, in its own dtype; zero from ``end`` on."""
    return tl.load(row + tl.cast(t, tl.int64) * stride, mask=mask & (t < end), other=0.0)


@triton.jit
def local_kernel(
    u_ptr, delta_ptr, a_ptr, b_ptr, c_ptr, z_ptr, bias_ptr, dy_ptr, state_ptr, sum_ptr, adjoint_ptr,
    length, per_group, d_state, chunk, chunks, channels,
    sub, sud, sul, stb, std, stl, sad, san, sbb, sbg, sbn, sbl, scb, scg, scn, scl, szb, szd, szl, syb, syd, syl,
    HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, ADJOINT: tl.constexpr, HAS_DY: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """What a chunk adds to the state [b, chunks, N, D], the sum of its time steps [b, chunks, D], and with ADJOINT what
    it adds to the gradient of the state that enters it [b, chunks, N, D]."""
    per = tl.cdiv(per_group, BD)
    groups = channels // per_group
    pid = tl.program_id(0)
    block = pid % (per * groups)
    g = block // per
    r = (block % per) * BD + tl.arange(0, BD)
    in_d = r < per_group
    d = g * per_group + r
    rest = pid // (per * groups)
    c = rest % chunks
    b = (rest // chunks).to(tl.int64)
    n = tl.arange(0, BN)
    in_n = n < d_state
    d64, n64, g64 = d.to(tl.int64), n.to(tl.int64), tl.cast(g, tl.int64)
    both = in_n[:, None] & in_d[None, :]
    a = tl.load(a_ptr + d64[None, :] * sad + n64[:, None] * san, mask=both, other=0.0).to(tl.float32)
    a = a * 1.4426950408889634
    bias = tl.zeros([BD], tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + d, mask=in_d, other=0.0).to(tl.float32)
    h = tl.zeros([BN, BD], tl.float32)
    whole = tl.zeros([BD], tl.float32)
    decay = tl.full([BN, BD], 1.0, tl.float32)
    adjoint = tl.zeros([BN, BD], tl.float32)
    u_row = u_ptr + b * sub + d64 * sud
    step_row = delta_ptr + b * stb + d64 * std
    b_row = b_ptr + b * sbb + g64 * sbg + n64 * sbn
    c_row = c_ptr + b * scb + g64 * scg + n64 * scn
    z_row = z_ptr + b * szb + d64 * szd
    dy_row = dy_ptr + b * syb + d64 * syd
    first = c * chunk
    end = tl.minimum(first + chunk, length)
    # Loads run one token ahead.
    u1, step1 = ahead(u_row, first, end, sul, in_d), ahead(step_row, first, end, stl, in_d)
    b1 = ahead(b_row, first, end, sbl, in_n)
    z1, dy1, c1 = u1, u1, b1
    if ADJOINT and HAS_DY:
        dy1, c1 = ahead(dy_row, first, end, syl, in_d), ahead(c_row, first, end, scl, in_n)
        if HAS_Z:
            z1 = ahead(z_row, first, end, szl, in_d)
    for t in range(first, end):
        u, bs = u1.to(tl.float32), b1.to(tl.float32)
        step = step1.to(tl.float32) + bias
        z, dout, cs = z1, dy1, c1
        u1, step1 = ahead(u_row, t + 1, end, sul, in_d), ahead(step_row, t + 1, end, stl, in_d)
        b1 = ahead(b_row, t + 1, end, sbl, in_n)
        if ADJOINT and HAS_DY:
            dy1, c1 = ahead(dy_row, t + 1, end, syl, in_d), ahead(c_row, t + 1, end, scl, in_n)
            if HAS_Z:
                z1 = ahead(z_row, t + 1, end, szl, in_d)
        if SOFTPLUS:
            step = softplus(step)
        one = tl.exp2(a * step[None, :])
        h = one * h + (step * u)[None, :] * bs[:, None]
        whole += step
        if ADJOINT:
            decay = decay * one
            if HAS_DY:
                seen = dout.to(tl.float32)
                if HAS_Z:
                    gate = z.to(tl.float32)
                    seen = seen * (gate * sigmoid(gate))
                adjoint += decay * (cs.to(tl.float32)[:, None] * seen[None, :])
    out = ((b * chunks + c) * d_state + n64[:, None]) * channels + d64[None, :]
    tl.store(state_ptr + out, h, mask=both)
    tl.store(sum_ptr + (b * chunks + c) * channels + d64, whole, mask=in_d)
    if ADJOINT:
        tl.store(adjoint_ptr + out, adjoint, mask=both)


@triton.jit
def pass_kernel(
    a_ptr, init_ptr, dfinal_ptr, dinit_ptr, state_ptr, sum_ptr, adjoint_ptr, d_state, chunks, channels,
    sad, san, sib, sid, sin, sfb, sfd, sfn,
    HAS_INIT: tl.constexpr, ADJOINT: tl.constexpr, HAS_DFINAL: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Replace what each chunk adds by the state that enters it; with ADJOINT what it adds to the gradient by the
    gradient of the state that leaves it. BE of the N x D states of a row."""
    blocks = tl.cdiv(d_state * channels, BE)
    pid = tl.program_id(0)
    e = (pid % blocks) * BE + tl.arange(0, BE)
    ok = e < d_state * channels
    b = (pid // blocks).to(tl.int64)
    n, d = (e // channels).to(tl.int64), (e % channels).to(tl.int64)
    a = tl.load(a_ptr + d * sad + n * san, mask=ok, other=0.0).to(tl.float32) * 1.4426950408889634
    size = tl.cast(d_state, tl.int64) * channels
    h = tl.zeros([BE], tl.float32)
    if HAS_INIT:
        h += tl.load(init_ptr + b * sib + d * sid + n * sin, mask=ok, other=0.0).to(tl.float32)
    for c in range(chunks):
        at = state_ptr + (b * chunks + c) * size + e
        added = tl.load(at, mask=ok, other=0.0)
        step = tl.load(sum_ptr + (b * chunks + c) * channels + d, mask=ok, other=0.0)
        tl.store(at, h, mask=ok)
        h = tl.exp2(a * step) * h + added
    if ADJOINT:
        g = tl.zeros([BE], tl.float32)
        if HAS_DFINAL:
            g += tl.load(dfinal_ptr + b * sfb + d * sfd + n * sfn, mask=ok, other=0.0).to(tl.float32)
        for back in range(chunks):
            c = chunks - 1 - back
            at = adjoint_ptr + (b * chunks + c) * size + e
            added = tl.load(at, mask=ok, other=0.0)
            step = tl.load(sum_ptr + (b * chunks + c) * channels + d, mask=ok, other=0.0)
            tl.store(at, g, mask=ok)
            g = tl.exp2(a * step) * g + added
        if HAS_INIT:
            tl.store(dinit_ptr + (b * channels + d) * d_state + n, g.to(dinit_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _output_kernel(
    u_ptr, delta_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, bias_ptr, enter_ptr, y_ptr, final_ptr,
    length, per_group, d_state, chunk, chunks, channels,
    sub, sud, sul, stb, std, stl, sad, san, sbb, sbg, sbn, sbl, scb, scg, scn, scl, szb, szd, szl, seb, sec, sen, sed,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ENTER: tl.constexpr, SOFTPLUS: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """y [b, L, D] of a chunk, from the state that enters it; the last chunk also gives the final state [b, D, N]."""
    per = tl.cdiv(per_group, BD)
    groups = channels // per_group
    pid = tl.program_id(0)
    block = pid % (per * groups)
    g = block // per
    r = (block % per) * BD + tl.arange(0, BD)
    in_d = r < per_group
    d = g * per_group + r
    rest = pid // (per * groups)
    c = rest % chunks
    b = (rest // chunks).to(tl.int64)
    n = tl.arange(0, BN)
    in_n = n < d_state
    d64, n64, g64 = d.to(tl.int64), n.to(tl.int64), tl.cast(g, tl.int64)
    both = in_n[:, None] & in_d[None, :]
    a = tl.load(a_ptr + d64[None, :] * sad + n64[:, None] * san, mask=both, other=0.0).to(tl.float32)
    a = a * 1.4426950408889634
    bias = tl.zeros([BD], tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + d, mask=in_d, other=0.0).to(tl.float32)
    skip = tl.zeros([BD], tl.float32)
    if HAS_D:
        skip += tl.load(d_ptr + d, mask=in_d, other=0.0).to(tl.float32)
    h = tl.zeros([BN, BD], tl.float32)
    if HAS_ENTER:
        enter = enter_ptr + b * seb + c * tl.cast(sec, tl.int64) + n64[:, None] * sen + d64[None, :] * sed
        h += tl.load(enter, mask=both, other=0.0).to(tl.float32)
    u_row = u_ptr + b * sub + d64 * sud
    step_row = delta_ptr + b * stb + d64 * std
    b_row = b_ptr + b * sbb + g64 * sbg + n64 * sbn
    c_row = c_ptr + b * scb + g64 * scg + n64 * scn
    z_row = z_ptr + b * szb + d64 * szd
    y_row = y_ptr + b * length * channels + d64
    first = c * chunk
    end = tl.minimum(first + chunk, length)
    u1, step1 = ahead(u_row, first, end, sul, in_d), ahead(step_row, first, end, stl, in_d)
    b1, c1 = ahead(b_row, first, end, sbl, in_n), ahead(c_row, first, end, scl, in_n)
    z1 = u1
    if HAS_Z:
        z1 = ahead(z_row, first, end, szl, in_d)
    for t in range(first, end):
        u, bs, cs = u1.to(tl.float32), b1.to(tl.float32), c1.to(tl.float32)
        step = step1.to(tl.float32) + bias
        z = z1
        u1, step1 = ahead(u_row, t + 1, end, sul, in_d), ahead(step_row, t + 1, end, stl, in_d)
        b1, c1 = ahead(b_row, t + 1, end, sbl, in_n), ahead(c_row, t + 1, end, scl, in_n)
        if HAS_Z:
            z1 = ahead(z_row, t + 1, end, szl, in_d)
        if SOFTPLUS:
            step = softplus(step)
        h = tl.exp2(a * step[None, :]) * h + (step * u)[None, :] * bs[:, None]
        y = tl.sum(h * cs[:, None], 0) + skip * u
        if HAS_Z:
            gate = z.to(tl.float32)
            y = y * (gate * sigmoid(gate))
        tl.store(y_row + tl.cast(t, tl.int64) * channels, y.to(y_ptr.dtype.element_ty), mask=in_d)
    if c == chunks - 1:
        tl.store(final_ptr + (b * channels + d64[None, :]) * d_state + n64[:, None], h, mask=both)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call; ``blocks`` of BD channels, none across two groups."""

    batch: int
    channels: int
    length: int
    d_state: int
    groups: int

    @property
    def blocks(self) -> int:
        return self.groups * cdiv(self.channels // self.groups, BD)

    @property
    def launch(self) -> dict[str, int]:
        states = power_of_two(self.d_state)
        return {"BN": states, "BD": BD, "num_warps": max(1, min(8, states // 16))}

    def chunk(self, programs: int, least: int, most: int) -> int:
        """Tokens a chunk: a power of two between two limits that gives about so many programs."""
        chunk = least
        while chunk < most and self.batch * self.blocks * cdiv(self.length, 2 * chunk) >= programs:
            chunk *= 2
        return chunk


def check(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    delta_bias: Tensor | None, init_state: Tensor | None,
) -> tuple[Tensor, Tensor, Sizes]:  # fmt: skip
    """B and C as [b, G, N, L], and the sizes. Raises ValueError: shapes or dtypes that do not fit."""
    check_tensors(u, delta, A, B, C, D, z, delta_bias, init_state)
    batch, channels, length = u.shape
    if B.dim() == 3:
        B, C = B[:, None], C[:, None]
    groups, d_state = B.shape[1], A.shape[1]
    if length < 1:
        raise ValueError("the sequence is empty")
    if channels % groups:
        raise ValueError(f"{channels} heads cannot share {groups} groups evenly")
    if d_state > MAX_STATES:
        raise ValueError(f"d_state {d_state} is above {MAX_STATES}, which one block of these kernels holds")
    check_shape("delta", delta, u.shape)
    check_shape("A", A, (channels, d_state))
    check_shape("B", B, (batch, groups, d_state, length))
    check_shape("C", C, (batch, groups, d_state, length))
    check_shape("D", D, (channels,))
    check_shape("z", z, u.shape)
    check_shape("delta_bias", delta_bias, (channels,))
    check_shape("init_state", init_state, (batch, channels, d_state))
    return B, C, Sizes(batch, channels, length, d_state, groups)


def strides(tensor: Tensor | None, count: int) -> tuple[Any, ...]:
    return (0,) * count if tensor is None else tuple(tensor.stride())


@on_device
def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None,
    init_state: Tensor | None = None, *, delta_softplus: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Selective scan forward; one launch for a short sequence, three for a long one.

    Args:
        u, delta: [b, D, L], any strides; fastest where the channels are adjacent. A: [D, N], not positive, N <= 256.
        B, C: [b, N, L] or [b, G, N, L]. D: [D]. z: as u. delta_bias: [D]. init_state: [b, D, N].

    Returns:
        y: [b, D, L] in u's dtype, a transposed [b, L, D]. final_state: fp32 [b, D, N].

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    B, C, sizes = check(u, delta, A, B, C, D, z, delta_bias, init_state)
    batch, channels, length, d_state = sizes.batch, sizes.channels, sizes.length, sizes.d_state
    y = torch.empty((batch, length, channels), dtype=u.dtype, device=u.device)
    final = torch.empty((batch, channels, d_state), dtype=torch.float32, device=u.device)
    if not y.numel():
        return y.transpose(1, 2), final.zero_() if init_state is None else final.copy_(init_state)
    chunk = sizes.chunk(_WALKERS, 64, 1024)
    chunks = cdiv(length, chunk)
    D, delta_bias = (None if t is None else t.contiguous() for t in (D, delta_bias))

    def given(t: Tensor | None) -> Tensor:
        return u if t is None else t

    common = (length, channels // sizes.groups, d_state, chunk, chunks, channels)
    inputs = (*u.stride(), *delta.stride(), *A.stride(), *B.stride(), *C.stride(), *strides(z, 3))
    flags = {"HAS_Z": z is not None, "HAS_BIAS": delta_bias is not None, "SOFTPLUS": delta_softplus, **sizes.launch}
    grid = (batch * chunks * sizes.blocks,)
    entering, entering_strides = init_state, (*strides(init_state, 3)[:1], 0, *strides(init_state, 3)[:0:-1])
    if chunks > 1:
        entering = torch.empty((batch, chunks, d_state, channels), dtype=torch.float32, device=u.device)
        sums = torch.empty((batch, chunks, channels), dtype=torch.float32, device=u.device)
        entering_strides = entering.stride()
        local_kernel[grid](
            u, delta, A, B, C, given(z), given(delta_bias), u, entering, sums, entering, *common, *inputs, 0, 0, 0,
            ADJOINT=False, HAS_DY=False, **flags,
        )  # fmt: skip
        pass_kernel[(batch * cdiv(d_state * channels, 256),)](
            A, given(init_state), A, entering, entering, sums, entering, d_state, chunks, channels,
            *A.stride(), *strides(init_state, 3), 0, 0, 0,
            HAS_INIT=init_state is not None, ADJOINT=False, HAS_DFINAL=False, BE=256, num_warps=4,
        )  # fmt: skip
    _output_kernel[grid](
        u, delta, A, B, C, given(D), given(z), given(delta_bias), given(entering), y, final, *common, *inputs,
        *entering_strides, HAS_D=D is not None, HAS_ENTER=entering is not None, **flags,
    )  # fmt: skip
    return y.transpose(1, 2), final
