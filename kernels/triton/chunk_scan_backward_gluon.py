"""The chunk scan, backward, for Hopper in Gluon; deterministic, as the portable form.

    scores           C·Bᵀ of every chunk, once per group                                     (chunk_scan_forward)
    pairs, join      what pairs of tokens in a chunk are for dB, dC, ddt and dD              (chunk_scan_backward_pairs)
    ends, carry      the state before each piece of the walk forward
    reads            the walk forward: dC of every two heads, what each token reads from before its chunk
    slabs            dC: the sum over a group's pairs of heads

then, for each segment of the sequence from the last to the first, so that memory is bounded:

    ends, carry      the adjoint after each piece of the walk back
    pulls            the walk back: dx; dB of every two heads, how each token is read after its chunk, and what flows
                     across every fourth chunk's start
    slabs            dB: the sum over a group's pairs of heads
    counts           that flow, counted on to the other chunks
    flows            ddt, and what dA and ddt_bias are the sums of

Of the states nothing is kept but every fourth, which `pulls` multiplies with its adjoint; between two of these the flow
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
from latentscan.kernels.triton.chunk_common import (
    HEADS_A_PROGRAM,
    Sizes,
    Steps,
    launch,
    precision,
    prepare,
    time_step,
)
from latentscan.kernels.triton.chunk_configs import Hopper, HopperBackward
from latentscan.kernels.triton.chunk_scan_backward_pairs import join_kernel, pairs_kernel
from latentscan.kernels.triton.chunk_scan_forward import segment_scores
from latentscan.kernels.triton.chunk_scan_gluon import CHUNK, WIDTH, carry_pieces_kernel, copyable, descriptor

LITTLE = 160 << 20  # bytes


@triton.jit
def slabs_kernel(slab, out, L, batch, first_token, tokens, GN, PARTS, BLOCK: tl.constexpr):
    """out [b, L, G N] of a segment: slab [PARTS, b, tokens, G N], summed, is added."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(tokens * GN, BLOCK)
    i, b = pid % blocks, pid // blocks
    o = i * BLOCK + tl.arange(0, BLOCK)
    mask = (o < tokens * GN) & (o < (pid * 0 + L - first_token) * GN)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.range(0, PARTS, num_stages=4):
        total += tl.load(slab + (part * batch + b) * tokens * GN + o, mask=mask, other=0.0).to(tl.float32)
    to = (b * L + first_token) * GN + o
    total += tl.load(out + to, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=mask)


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


def segment_chunks(NC: int, most: int, segments: int, every: int) -> int:
    """Chunks a segment, a multiple of ``every``: NC in as few equal segments of ``most`` as there can be."""
    segments = segments or triton.cdiv(NC, max(every, min(NC, most)))
    return triton.cdiv(triton.cdiv(NC, segments), every) * every


def segments_back(NC: int, most: int, kept: float | None, slab: float, every: int) -> list[tuple[int, int]]:
    """(first chunk, chunks) of the segments of the walk back, which goes from the last to the first.

    A segment has ``most`` chunks, or as many as find room in dx before it. All but the last begin at a multiple of
    ``every``.

    Args:
        kept: what a chunk's kept states take of a chunk of dx, where they lie in it: those of a segment and of what
            comes before it lie before the segment. None: they do not.
        slab: what a chunk's part of a slab takes of a chunk of dx.
    """
    spans = []
    end = NC
    while end:
        first = max(0, end - max(most, every))
        if kept is not None and first:
            first = max(min(first, math.ceil(end * (slab + kept) / (1.0 + slab))), math.ceil(end * kept))
        first = min(triton.cdiv(first, every), triton.cdiv(end, every) - 1) * every
        spans.append((first, end - first))
        end = first
    return spans


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

    def slab_of(SC: int, place: Tensor | None = None) -> Tensor:
        shape = UG * s.b, SC * CHUNK, s.G, s.N
        if place is None or place.numel() < math.prod(shape):
            return empty(*shape, dtype=x.dtype)
        return place[: math.prod(shape)].view(shape)

    def sum_slab(slab: Tensor, out: Tensor, first: int, SC: int) -> None:
        launch(
            slabs_kernel, s.b * triton.cdiv(SC * CHUNK * s.G * s.N, 1024), slab, out, s.L, s.b, first * CHUNK,
            SC * CHUNK, s.G * s.N, UG, BLOCK=1024, num_warps=4,
        )  # fmt: skip

    # Pairs of tokens in a chunk.
    parts = triton.cdiv(share, k.together)
    flow, joined, products, seen = (empty(s.b, heads, NC * CHUNK) for _ in range(4))
    scores = segment_scores(B, C, s, x.dtype, chunks=NC)
    turned = empty(s.b, s.G * NC * CHUNK, 1, CHUNK, dtype=x.dtype)
    dB, dC = (torch.empty(t.shape, device=device, dtype=t.dtype) for t in (B, C))
    weights = empty(2 * parts, s.b, s.G, NC, CHUNK, CHUNK)
    launch(
        pairs_kernel, s.b * NC * s.G * parts, *tiles[:2], lines, scores, flow, joined, products, weights, s.L, heads,
        s.G, NC, share, parts, s.b, Q=CHUNK, P=WIDTH, ST=k.pair_stages, RC=k.pair_registers, RP=24, SPLIT=split,
        num_warps=4,
    )  # fmt: skip
    launch(
        join_kernel, s.b * NC * s.G, B, C, scores, weights, turned, dB, dC, s.L, s.G, NC, 2 * parts, s.b,
        *B.stride()[:3], *C.stride()[:3], Q=CHUNK, N=s.N, PREC=precision(x.dtype), num_warps=4,
    )  # fmt: skip
    dD = products.view(s.b, s.H, split, NC * CHUNK).sum((0, 2, 3))
    del scores, weights, products

    slab_chunk, dx_chunk = units * CHUNK * s.N, s.b * heads * CHUNK * WIDTH  # elements
    kept_chunk = s.b * heads * WIDTH * s.N // k.every
    size = x.element_size()
    cost = (slab_chunk + kept_chunk) * size + 4 * s.b * heads * CHUNK
    workspace = k.workspace or (LITTLE if NC * cost <= LITTLE else x.numel() * size * 9 // 32)
    most = workspace // cost
    # The states that are kept lie where dx comes later, half as dense or less: a segment of dx is written when all that
    # lay there has been read. The first segment's are moved away in time. What they leave free is lent to the slabs.
    shared = s.b == 1 and (k.segments > 1 or (k.segments == 0 and most < NC)) and 2 * kept_chunk <= dx_chunk
    kept = W * s.b, heads * WIDTH, 1, s.N
    dx = torch.empty(x.shape, device=device, dtype=x.dtype) if shared else None
    whole = None if dx is None else dx.view(-1)
    hs = whole[: math.prod(kept)].view(kept) if whole is not None else empty(*kept, dtype=x.dtype)
    free = None if whole is None else whole[math.prod(kept) :]

    # The walk forward; its slab may be as large as dx where dx is not there yet.
    at_once = NC if free is None else max(most, free.numel() // slab_chunk)
    forth = segment_chunks(NC, at_once, k.segments, k.every)
    state, following = empty(s.b, heads, WIDTH, s.N), empty(s.b, heads, WIDTH, s.N)
    state.zero_() if init_state is None else state.copy_(init_state.reshape(state.shape))
    for first in range(0, NC, forth):
        here = min(forth, NC - first)
        found = piece_starts(xw, B, state, first, here, False)
        slab = slab_of(here, free)
        launch(
            walks.reads_kernel, sizes(first, here)[7], *tiles, descriptor(slab, CHUNK, s.N),
            descriptor(hs, WIDTH, s.N), lines, found, state, following, seen, *sizes(first, here), s.b, **common,
        )  # fmt: skip
        sum_slab(slab, dC, first, here)
        del slab, found
        state, following = following, state

    # The walk back, in segments.
    if dx is None:
        dx = torch.empty(x.shape, device=device, dtype=x.dtype)
    dxw = dx.view(s.b, s.L, heads, WIDTH) if split > 1 else dx
    ddt = torch.empty(steps.dt.shape, device=device, dtype=steps.dt.dtype)
    sums = empty(2, s.b * NC, s.H)
    known, counted = empty(s.b, heads, W + 1, WIDTH), empty(s.b, heads, NC)
    adjoint, following = following, state
    adjoint.zero_() if dfinal is None else adjoint.copy_(dfinal.reshape(adjoint.shape))
    torch.sum(state * adjoint, 3, out=known[:, :, W])
    if k.segments:
        SC = segment_chunks(NC, NC, k.segments, k.every)
        spans = [(first, min(SC, NC - first)) for first in reversed(range(0, NC, SC))]
    else:
        spans = segments_back(NC, most, kept_chunk / dx_chunk if shared else None, slab_chunk / dx_chunk, k.every)
    for first, here in spans:
        windows = triton.cdiv(first + here, k.every)
        free = None if whole is None else whole[windows * k.every * kept_chunk : first * dx_chunk]
        if shared and first == 0:
            hs = hs[:windows].clone()
        found = piece_starts(dyw, C, adjoint, first, here, True)
        slab = slab_of(here, free)
        pulled = empty(s.b, heads, here * CHUNK)
        launch(
            walks.pulls_kernel, sizes(first, here)[7], *tiles, descriptor(slab, CHUNK, s.N), hs,
            descriptor(dxw, CHUNK, WIDTH), lines, descriptor(turned, CHUNK, CHUNK), found, adjoint, following,
            x if D is None else D, pulled, known, *sizes(first, here), s.b, W, **common, HAS_D=D is not None,
        )  # fmt: skip
        sum_slab(slab, dB, first, here)
        launch(
            counts_kernel, s.b * heads * triton.cdiv(here, k.every), vec, seen, pulled, counted, heads, NC, first, here,
            Q=CHUNK, SPLIT=split, R=k.every, num_warps=1,
        )  # fmt: skip
        launch(
            flows_kernel, s.b * here * triton.cdiv(s.H, HEADS_A_PROGRAM), *steps.arguments, vec, flow, joined, seen,
            pulled, known, counted, ddt, *sums, s.L, s.H, NC, first, here, W, *steps.limits,
            Q=CHUNK, P=WIDTH, BH=HEADS_A_PROGRAM, SPLIT=split, R=k.every, NOISE=noise(x.dtype), **steps.flags,
            num_warps=4,
        )  # fmt: skip
        del slab, pulled, found
        adjoint, following = following, adjoint
    dA, dbias = sums.view(2, s.b, NC, s.H)[:, :, : s.NC].sum((1, 2))
    return (
        dx, ddt, dA.to(steps.A.dtype), dB, dC, None if D is None else dD.to(D.dtype), dz,
        None if steps.dt_bias is None else dbias.to(steps.dt_bias.dtype),
        None if init_state is None else adjoint.view(init_state.shape).to(init_state.dtype),
    )  # fmt: skip
