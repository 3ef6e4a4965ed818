"""The chunk scan, backward, for Hopper in Gluon; deterministic, as the portable form.

    ends, carry      the state before each piece of the walk forward
    reads            the walk forward: dC of every two heads, what each token reads
    slabs            dC: the sum over a group's pairs of heads

then, for each segment of the sequence from the last to the first, so that memory is bounded:

    ends, carry      the adjoint after each piece of the walk back
    pulls            the walk back: dx, dB of every two heads, how each token is read
    slabs            dB: the sum over a group's pairs of heads
    cross            what flows from before a chunk to after it
    flows            ddt, and what dA, dD and ddt_bias are the sums of

Of the states nothing is kept but every fourth, which `cross` multiplies with its adjoint; between two of these the flow
is counted on by what joins and leaves it. With z, y is computed again first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from latentscan.kernels.triton import chunk_scan_backward_walks as walks
from latentscan.kernels.triton import chunk_scan_gluon
from latentscan.kernels.triton.chunk_common import HEADS_A_PROGRAM, Sizes, Steps, launch, prepare, time_step
from latentscan.kernels.triton.chunk_configs import Hopper, HopperBackward
from latentscan.kernels.triton.chunk_scan_gluon import CHUNK, WIDTH, carry_pieces_kernel, copyable, descriptor

LITTLE = 160 << 20  # bytes


@triton.jit
def slabs_kernel(slab, out, L, batch, first_token, tokens, GN, PARTS, BLOCK: tl.constexpr):
    """out [b, L, G N] of a segment: the sum of slab [PARTS, b, tokens, G N]."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(tokens * GN, BLOCK)
    i, b = pid % blocks, pid // blocks
    o = i * BLOCK + tl.arange(0, BLOCK)
    mask = (o < tokens * GN) & (o < (pid * 0 + L - first_token) * GN)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.range(0, PARTS, num_stages=4):
        total += tl.load(slab + (part * batch + b) * tokens * GN + o, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + (b * L + first_token) * GN + o, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def cross_kernel(
    hs, gs, final, vec, seen, pulled, known, steps, H, NC, batch, first, SC, W,
    Q: tl.constexpr, PN: tl.constexpr, SPLIT: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """What flows from before a chunk to after it: h g, summed, of the state before it and its adjoint after it.

    known fp32 [b, H, W + 1]: before every R-th chunk, where both are there, and at the end. steps [b, H, NC]: from
    there to within a chunk; what leaves the flow (seen) is taken away, what joins it (pulled) added. The rounding
    errors of that are a random walk, whose end is known too: at r chunks of R, r/R of the way back to it is taken
    (flows_kernel adds the two ends).
    """
    pid = tl.program_id(0).to(tl.int64)
    windows = tl.cdiv(SC, R)
    i, rest = pid % windows, pid // windows
    h, b = rest % H, rest // H
    w = first // R + i
    o = tl.arange(0, PN)
    state = tl.load(hs + ((w * batch + b) * H + h) * PN + o).to(tl.float32)
    if i == 0:
        adjoint = tl.load(final + (b * H + h) * PN + o)
    else:
        adjoint = tl.load(gs + ((i * batch + b) * H + h) * PN + o).to(tl.float32)
    tl.store(known + (b * H + h) * (W + 1) + w, tl.sum(state * adjoint))
    r = tl.arange(0, R)
    q = tl.arange(0, Q)
    c = i * R + r
    token = c[:, None] * Q + q[None, :]
    inside = (c < SC)[:, None] & (q < Q)[None, :]
    v = vec + ((b * (H // SPLIT) + h // SPLIT) * NC + first + c[:, None]) * (2 * Q) + Q + q[None, :]
    gone = tl.sum(tl.load(seen + ((b * H + h) * NC + first) * Q + token, mask=inside, other=0.0), 1)
    step = tl.load(v, mask=inside, other=0.0)
    joined = tl.sum(tl.load(pulled + (b * H + h) * SC * Q + token, mask=inside, other=0.0) * step, 1)
    ahead = tl.cumsum(joined - gone, axis=0) - joined
    part = (r + 0.5) / tl.minimum(R, NC - w * R)
    delta = ahead - part * tl.sum(joined - gone)
    tl.store(steps + (b * H + h) * NC + first + c, delta, mask=c < SC)


@triton.jit
def flows_kernel(
    dt, A, bias, starts, vec, reads, inside, itself, pulled, same, known, steps, ddt, dA, dbias, dD,
    L, H, NC, first, SC, W, dt_min, dt_max, s_b, s_l, s_h,
    Q: tl.constexpr, BH: tl.constexpr, SPLIT: tl.constexpr, R: tl.constexpr, NOISE: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """ddt [b, L, H]; dA, dbias, dD fp32 [b, NC, H]: the sums over a chunk."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(H, BH)
    block, rest = pid % blocks, pid // blocks
    k, b = rest % SC, rest // SC
    c = first + k
    q = tl.arange(0, Q)
    token = c * Q + q
    h = block * BH + tl.arange(0, BH)
    heads = h < H
    mask = (token < L)[:, None] & heads[None, :]
    at = b * s_b + token[:, None] * s_l + h[None, :] * s_h
    raw, free, step = time_step(dt, bias, at, h, mask, heads, dt_min, dt_max, SOFTPLUS, HAS_BIAS)
    read = tl.zeros([BH, Q], tl.float32)
    later = tl.zeros([BH, Q], tl.float32)
    own = tl.zeros([BH, Q], tl.float32)
    after = tl.zeros([BH, Q], tl.float32)
    before = tl.zeros([BH, Q], tl.float32)  # `after` of the token before: sums without a difference
    through = tl.zeros([BH], tl.float32)
    product = tl.zeros([BH], tl.float32)
    for i in tl.static_range(SPLIT):
        hs = b * H * SPLIT + h * SPLIT + i
        f = hs[:, None] * (SC * Q) + (k * Q + q)[None, :]
        read += tl.load(reads + hs[:, None] * (NC * Q) + (c * Q + q)[None, :], mask=heads[:, None], other=0.0)
        later += tl.load(inside + f, mask=heads[:, None], other=0.0)
        own += tl.load(itself + f, mask=heads[:, None], other=0.0)
        after += tl.load(pulled + f, mask=heads[:, None], other=0.0)
        before += tl.load(pulled + f - 1, mask=heads[:, None] & (q > 0)[None, :], other=0.0)
        product += tl.sum(tl.load(same + f, mask=heads[:, None], other=0.0), 1)
        w = c // R
        part = (c % R + 0.5) / tl.minimum(R, NC - w * R)
        through += tl.load(known + hs * (W + 1) + w, mask=heads, other=0.0) * (1.0 - part)
        through += tl.load(known + hs * (W + 1) + w + 1, mask=heads, other=0.0) * part
        through += tl.load(steps + hs * NC + c, mask=heads, other=0.0)
    # That flow is of the size of the chunk's decay, its rounding error of the states': it counts by its share in both.
    end = tl.load(vec + ((b * H + h) * NC + c) * (2 * Q) + Q - 1, mask=heads, other=0.0)
    size = tl.exp2(2.0 * end)
    through *= size / (size + NOISE)
    v = vec + ((b * H + h)[:, None] * NC + c) * (2 * Q) + Q + q[None, :]
    before *= tl.load(v - 1, mask=heads[:, None] & (q > 0)[None, :], other=0.0)
    later, own, after = tl.trans(later), tl.trans(own), tl.trans(after)
    # A token's term is in every decay from a token before it to this one or a later one.
    term = tl.cumsum(tl.trans(read) - later * step, axis=0, reverse=True) + tl.cumsum(tl.trans(before), axis=0)
    term += through[None, :]
    if PACKED:
        starting = tl.load(starts + b * L + token, mask=token < L, other=0)
        term = tl.where((starting != 0)[:, None], 0.0, term)
    rate = tl.load(A + h, mask=heads, other=0.0).to(tl.float32)
    grad = term * rate[None, :] + later + own + after
    grad = tl.where(mask & (free >= dt_min) & (free <= dt_max), grad, 0.0)
    if SOFTPLUS:
        grad = tl.where(raw > 20.0, grad, grad * tl.sigmoid(raw))
    tl.store(ddt + ((b * L + token) * H)[:, None] + h[None, :], grad.to(ddt.dtype.element_ty), mask=mask)
    to = (b * NC + c) * H + h
    tl.store(dA + to, tl.sum(tl.where(mask, term * step, 0.0), 0), mask=heads & (c * Q < L))
    tl.store(dbias + to, tl.sum(grad, 0), mask=heads & (c * Q < L))
    tl.store(dD + to, product, mask=heads & (c * Q < L))


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


def refusal(dy: Tensor, x: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None) -> str | None:
    """Why this form cannot take such tensors; None if it can."""
    if reason := chunk_scan_gluon.refusal(x, B, C, D, z):
        return reason
    if dy.dtype != x.dtype:
        return f"dy is {dy.dtype} and x {x.dtype}"
    if not copyable(dy):
        return "dy is not laid out in rows of one stride and 16-byte alignment"
    return None


def noise(dtype: torch.dtype) -> float:
    """The square of the relative rounding error of a number in ``dtype``."""
    return (torch.finfo(dtype).eps / 4) ** 2


def segment_chunks(NC: int, cost: int, workspace: int, segments: int, every: int) -> int:
    """Chunks a segment, a multiple of ``every``: as many as ``workspace`` allows at ``cost`` bytes a chunk."""
    if not segments:
        segments = triton.cdiv(NC, max(every, min(NC, workspace // cost)))
    return triton.cdiv(triton.cdiv(NC, segments), every) * every


def backward(
    dy: Tensor, dfinal: Tensor | None, x: Tensor, steps: Steps, B: Tensor, C: Tensor, D: Tensor | None,
    z: Tensor | None, init_state: Tensor | None, k: HopperBackward,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinit_state) of inputs that :func:`refusal` accepts."""
    s = Sizes.of(x, B, CHUNK)
    device, f32 = x.device, torch.float32
    dz = None
    if z is not None:
        y, _ = chunk_scan_gluon.forward(x, steps, B, C, D, None, init_state, Hopper(pieces=k.pieces))
        inner, dz = torch.empty_like(y), torch.empty(z.shape, device=device, dtype=z.dtype)
        launch(
            gate_kernel, s.b * s.L * triton.cdiv(s.H * s.P, 1024), dy, z, y, inner, dz, s.L, s.H, s.P,
            *dy.stride()[:3], *z.stride()[:3], BLOCK=1024, num_warps=4,
        )  # fmt: skip
        dy = inner
        del y, inner
    split = s.P // WIDTH
    heads, share = s.H * split, s.H // s.G * split
    UG = triton.cdiv(share, 2)
    units = s.b * s.G * UG
    NC = -(-s.L // (2 * CHUNK)) * 2
    W = triton.cdiv(NC, k.every)
    vec = prepare(steps, s, chunks=NC)

    def empty(*shape: int, dtype: torch.dtype = f32) -> Tensor:
        return torch.empty(*shape, device=device, dtype=dtype)

    xw, dyw = (t.view(s.b, s.L, heads, WIDTH) if split > 1 else t for t in (x, dy))
    cut: dict[str, Any] = {"Q": CHUNK, "P": WIDTH, "N": s.N, "SPLIT": split}
    common = {**cut, "ST": k.stages, "RC": k.registers, "RP": 24, "R": k.every, "num_warps": 4}
    tiles = tuple(descriptor(t, CHUNK, width) for t, width in ((xw, WIDTH), (dyw, WIDTH), (B, s.N), (C, s.N)))

    lines = TensorDescriptor(
        vec, [s.b * s.H * NC, 2 * CHUNK], [2 * CHUNK, 1], [1, 2 * CHUNK], gl.NVMMASharedLayout(0, 32, 2)
    )

    def sizes(first: int, SC: int) -> tuple[int, ...]:
        T = units * SC
        return s.L, NC, s.G, UG, share, heads, T, min(k.pieces, T // 2), SC, first

    def piece_starts(v: Tensor, M: Tensor, start: Tensor, first: int, SC: int, reverse: bool) -> Tensor:
        at = sizes(first, SC)
        K, J = at[7], k.state_parts
        found = empty(K, 2, WIDTH, s.N)
        if units == K:
            return found
        added, decays = empty(K * J, 2, WIDTH, s.N), empty(K * J, 2)
        launch(
            walks.ends_kernel, K * J, descriptor(v, 2 * CHUNK, WIDTH), descriptor(M, 2 * CHUNK, s.N), vec, added,
            decays, *at, **cut, ST=k.state_stages, RC=k.state_registers, RP=24, J=J, REV=reverse, num_warps=4,
        )  # fmt: skip
        launch(
            carry_pieces_kernel, units * 2 * (WIDTH * s.N // 512), added, decays, start, found, SC, *at[2:8],
            PN=WIDTH * s.N, BLOCK=512, HAS_INIT=True, J=J, num_warps=4,
        )  # fmt: skip
        return found

    def slab_of(SC: int) -> Tensor:
        return empty(UG * s.b, SC * CHUNK, s.G, s.N, dtype=x.dtype)

    def sum_slab(slab: Tensor, out: Tensor, first: int, SC: int) -> None:
        launch(
            slabs_kernel, s.b * triton.cdiv(SC * CHUNK * s.G * s.N, 1024), slab, out, s.L, s.b, first * CHUNK,
            SC * CHUNK, s.G * s.N, UG, BLOCK=1024, num_warps=4,
        )  # fmt: skip

    slab_bytes = units * CHUNK * s.N * x.element_size()
    cost = slab_bytes + s.b * s.H * s.P * (s.N * x.element_size() // k.every) + 4 * s.b * heads * CHUNK * 4
    size = x.numel() * x.element_size()
    workspace = k.workspace or (LITTLE if NC * cost <= LITTLE else size // 4)
    SC = segment_chunks(NC, cost, workspace, k.segments, k.every)
    # The states that are kept lie where dx comes later, half as dense or less: a segment of dx is written when all that
    # lay there has been read. The first segment's are moved away in time.
    shared = s.b == 1 and SC < NC and k.every * CHUNK >= 2 * s.N
    kept = W * s.b, heads * WIDTH, 1, s.N
    dx = torch.empty(x.shape, device=device, dtype=x.dtype) if shared else None
    hs = dx.view(-1)[: math.prod(kept)].view(kept) if dx is not None else empty(*kept, dtype=x.dtype)

    # The walk forward; its slab may be as large as dx where dx is not there yet.
    reads, seen = empty(s.b, heads, NC * CHUNK), empty(s.b, heads, NC * CHUNK)
    dC = torch.empty(C.shape, device=device, dtype=C.dtype)
    state, following = empty(s.b, heads, WIDTH, s.N), empty(s.b, heads, WIDTH, s.N)
    state.zero_() if init_state is None else state.copy_(init_state.reshape(state.shape))
    forth = segment_chunks(NC, slab_bytes, workspace if shared else size, k.segments, k.every)
    for first in range(0, NC, forth):
        here = min(forth, NC - first)
        found = piece_starts(xw, B, state, first, here, False)
        slab = slab_of(here)
        launch(
            walks.reads_kernel, sizes(first, here)[7], *tiles, descriptor(slab, CHUNK, s.N),
            descriptor(hs, WIDTH, s.N), lines, found, state, following,
            reads, seen, *sizes(first, here), s.b, **common,
        )  # fmt: skip
        sum_slab(slab, dC, first, here)
        del slab, found
        state, following = following, state

    # The walk back, in segments.
    if dx is None:
        dx = torch.empty(x.shape, device=device, dtype=x.dtype)
    dxw = dx.view(s.b, s.L, heads, WIDTH) if split > 1 else dx
    dB = torch.empty(B.shape, device=device, dtype=B.dtype)
    ddt = torch.empty(steps.dt.shape, device=device, dtype=steps.dt.dtype)
    sums = empty(3, s.b * NC, s.H)
    known, deltas = empty(s.b, heads, W + 1), empty(s.b, heads, NC)
    adjoint, following = following, state
    adjoint.zero_() if dfinal is None else adjoint.copy_(dfinal.reshape(adjoint.shape))
    torch.sum(state * adjoint, (2, 3), out=known[:, :, W])
    names = ("inside", "itself", "pulled", "same")
    for first in reversed(range(0, NC, SC)):
        here = min(SC, NC - first)
        if shared and first == 0:
            hs = hs[: triton.cdiv(here, k.every)].clone()
        found = piece_starts(dyw, C, adjoint, first, here, True)
        slab = slab_of(here)
        gs = empty(triton.cdiv(here, k.every) * s.b, heads * WIDTH, 1, s.N, dtype=x.dtype)
        flow = dict(zip(names, empty(len(names), s.b, heads, here * CHUNK), strict=True))
        launch(
            walks.pulls_kernel, sizes(first, here)[7], *tiles, descriptor(slab, CHUNK, s.N),
            descriptor(gs, WIDTH, s.N), descriptor(dxw, CHUNK, WIDTH), lines,
            found, adjoint, following, x if D is None else D,
            *flow.values(), *sizes(first, here), s.b, **common, HAS_D=D is not None,
        )  # fmt: skip
        sum_slab(slab, dB, first, here)
        launch(
            cross_kernel, s.b * heads * triton.cdiv(here, k.every), hs, gs, following, vec, seen,
            flow["pulled"], known, deltas, heads, NC, s.b, first, here, W,
            Q=CHUNK, PN=WIDTH * s.N, SPLIT=split, R=k.every, num_warps=4,
        )  # fmt: skip
        launch(
            flows_kernel, s.b * here * triton.cdiv(s.H, HEADS_A_PROGRAM), *steps.arguments, vec, reads,
            *flow.values(), known, deltas, ddt, *sums, s.L, s.H, NC, first, here, W, *steps.limits,
            Q=CHUNK, BH=HEADS_A_PROGRAM, SPLIT=split, R=k.every, NOISE=noise(x.dtype), **steps.flags, num_warps=4,
        )  # fmt: skip
        del slab, gs, flow, found
        adjoint, following = following, adjoint
    dA, dbias, dD = sums.view(3, s.b, NC, s.H)[:, :, : s.NC].sum((1, 2))
    return (
        dx, ddt, dA.to(steps.A.dtype), dB, dC, None if D is None else dD.to(D.dtype), dz,
        None if steps.dt_bias is None else dbias.to(steps.dt_bias.dtype),
        None if init_state is None else adjoint.view(init_state.shape).to(init_state.dtype),
    )  # fmt: skip
