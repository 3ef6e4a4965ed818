"""The chunk scan, backward, for Hopper in Gluon; with ``atomic=False`` deterministic, as the portable form.

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

Unless a fixed order is wanted, dB and half of dC are added to fp32 sums in memory, which takes no slab; so a segment is
longer. Where the forward kept the states before its pieces, the first ends and carry are left out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
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
)
from latentscan.kernels.triton.chunk_configs import Hopper, HopperBackward
from latentscan.kernels.triton.chunk_scan_backward_pairs import join_kernel, pairs_kernel
from latentscan.kernels.triton.chunk_scan_backward_sums import counts_kernel, flows_kernel, gate_kernel, slabs_kernel
from latentscan.kernels.triton.chunk_scan_forward import segment_scores
from latentscan.kernels.triton.chunk_scan_gluon import CHUNK, WIDTH, carry_pieces_kernel, copyable, descriptor

LITTLE = 160 << 20  # bytes


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


class Room:
    """Memory for what is gone before a tensor is written, in that tensor while there is room."""

    def __init__(self, free: Tensor | None, device: torch.device) -> None:
        self.free, self.device = free, device

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.free is not None:
            words = math.prod(shape) * dtype.itemsize // self.free.element_size()
            if words <= self.free.numel():
                found, self.free = self.free[:words].view(dtype).view(shape), self.free[words:]
                return found
        return torch.empty(shape, device=self.device, dtype=dtype)


def backward(
    dy: Tensor, dfinal: Tensor | None, x: Tensor, steps: Steps, B: Tensor, C: Tensor, D: Tensor | None,
    z: Tensor | None, init_state: Tensor | None, k: HopperBackward, starts: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinit_state) of inputs that :func:`refusal` accepts.

    Args:
        starts: the states before the pieces, of a forward with the same ``pieces``; used where the walk forward is
            in one segment.
    """
    s = Sizes.of(x, B, CHUNK)
    device, f32 = x.device, torch.float32
    dz = None
    if z is not None:
        if starts is None:  # found here for both
            starts = torch.empty(k.pieces, 2, WIDTH, s.N, device=device, dtype=f32)
            told = {"keep": starts}
        else:
            told = {"starts": starts}
        y, _ = chunk_scan_gluon.forward(x, steps, B, C, D, None, init_state, Hopper(pieces=k.pieces), **told)
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

    def empty_like(t: Tensor) -> Tensor:
        return torch.empty(t.shape, device=device, dtype=t.dtype)

    xw, dyw = (t.view(s.b, s.L, heads, WIDTH) if split > 1 else t for t in (x, dy))
    cut: dict[str, Any] = {"Q": CHUNK, "P": WIDTH, "N": s.N, "SPLIT": split}
    common = {**cut, "ST": k.stages, "RC": k.registers, "RP": 24, "R": k.every, "ADD": k.atomic, "num_warps": 4}
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

    def slab_of(SC: int) -> tuple[int, ...]:
        return UG * s.b, SC * CHUNK, s.G, s.N

    def sum_slab(slab: Tensor, parts: int, base: Tensor, out: Tensor, first: int, SC: int) -> None:
        launch(
            slabs_kernel, s.b * triton.cdiv(SC * CHUNK * s.G * s.N, 1024), slab, base, out, s.L, base.shape[1], s.b,
            first, SC * CHUNK, s.G * s.N, parts, BLOCK=1024, Q=CHUNK, ODD=k.atomic, num_warps=4,
        )  # fmt: skip

    size = x.element_size()
    slab_chunk, dx_chunk = units * CHUNK * s.N, s.b * heads * CHUNK * WIDTH  # elements
    kept_chunk = s.b * heads * WIDTH * s.N // k.every
    if k.atomic:
        slab_chunk, cost = 0, kept_chunk * size
        workspace = k.workspace or max(LITTLE // 8, x.numel() * size // 16)
    else:
        cost = (slab_chunk + kept_chunk) * size + 4 * s.b * heads * CHUNK
        workspace = k.workspace or (LITTLE if NC * cost <= LITTLE else x.numel() * size * 9 // 32)
    most = workspace // cost
    # The states that are kept lie where dx comes later, half as dense or less: a segment of dx is written when all that
    # lay there has been read. The first segment's are moved away in time. What they leave free is lent to the slabs.
    shared = s.b == 1 and (k.segments > 1 or (k.segments == 0 and most < NC)) and 2 * kept_chunk <= dx_chunk
    if k.atomic and not shared:
        most = NC
    kept = W * s.b, heads * WIDTH, 1, s.N
    parts = triton.cdiv(share, k.together)
    summed, weighed = (s.b, NC * CHUNK, s.G, s.N), (2 * parts, s.b, s.G, NC, CHUNK, CHUNK)
    # So does the sum of dC, and what pairs weigh, if both fit; dx comes after the latter else.
    before_dx = math.prod(weighed) * 4 + (math.prod(summed) * 4 if k.atomic else 0) + math.prod(kept) * size
    early = shared and before_dx <= x.numel() * size
    dx = empty_like(x) if early else None
    room = Room(None if dx is None else dx.view(-1), device)
    hs = room.take(kept, x.dtype) if early else None

    # Pairs of tokens in a chunk.
    flow, joined, products, seen = (empty(s.b, heads, NC * CHUNK) for _ in range(4))
    scores = segment_scores(B, C, s, x.dtype, chunks=NC)
    turned = empty(s.b, s.G * NC * CHUNK, 1, CHUNK, dtype=x.dtype)

    sum_C, sum_B = (room.take(summed, f32), empty(*summed)) if k.atomic else (empty_like(C), empty_like(B))
    weights = Room(room.free, device).take(weighed, f32)
    launch(
        pairs_kernel, s.b * NC * s.G * parts, *tiles[:2], lines, scores, flow, joined, products, weights, s.L, heads,
        s.G, NC, share, parts, s.b, Q=CHUNK, P=WIDTH, ST=k.pair_stages, RC=k.pair_registers, RP=24, SPLIT=split,
        num_warps=4,
    )  # fmt: skip
    launch(
        join_kernel, s.b * NC * s.G, B, C, scores, weights, turned, sum_B, sum_C, s.L, sum_B.shape[1], s.G, NC,
        2 * parts, s.b, *B.stride()[:3], *C.stride()[:3], Q=CHUNK, N=s.N, PREC=precision(x.dtype), num_warps=4,
    )  # fmt: skip
    dD = products.view(s.b, s.H, split, NC * CHUNK).sum((0, 2, 3))
    del scores, weights, products

    if hs is None:
        dx = empty_like(x) if shared else None
        room = Room(None if dx is None else dx.view(-1), device)
        hs = room.take(kept, x.dtype)

    # The walk forward; its slab may be as large as dx where dx is not there yet.
    at_once = NC if room.free is None or k.atomic else max(most, room.free.numel() // slab_chunk)
    forth = segment_chunks(NC, at_once, k.segments, k.every)
    dC = empty_like(C) if k.atomic else sum_C
    state, following = empty(s.b, heads, WIDTH, s.N), empty(s.b, heads, WIDTH, s.N)
    state.zero_() if init_state is None else state.copy_(init_state.reshape(state.shape))
    for first in range(0, NC, forth):
        here = min(forth, NC - first)
        pieces = sizes(first, here)[7]
        if starts is None or here < NC or starts.shape[0] < pieces:
            found = piece_starts(xw, B, state, first, here, False)
        else:
            found = starts
        slab = Room(room.free, device).take(slab_of(here // 2 if k.atomic else here), x.dtype)
        launch(
            walks.reads_kernel, pieces, *tiles, descriptor(slab, CHUNK, s.N), descriptor(sum_C, CHUNK, s.N),
            descriptor(hs, WIDTH, s.N), lines, found, state, following, seen, *sizes(first, here), s.b, **common,
        )  # fmt: skip
        sum_slab(slab, UG, sum_C, dC, first, here)
        del slab, found
        state, following = following, state
    del sum_C, starts

    # The walk back, in segments.
    if dx is None:
        dx = empty_like(x)
    dxw = dx.view(s.b, s.L, heads, WIDTH) if split > 1 else dx
    ddt = torch.empty(steps.dt.shape, device=device, dtype=steps.dt.dtype)
    sums = empty(2, s.b * NC, s.H)
    dB = empty_like(B) if k.atomic else sum_B
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
        lent = dx.view(-1)[windows * k.every * kept_chunk : first * dx_chunk] if shared else None
        if shared and first == 0:
            hs = hs[:windows].clone()
        found = piece_starts(dyw, C, adjoint, first, here, True)
        slab = sum_B if k.atomic else Room(lent, device).take(slab_of(here), x.dtype)
        pulled = empty(s.b, heads, here * CHUNK)
        launch(
            walks.pulls_kernel, sizes(first, here)[7], *tiles, descriptor(slab, CHUNK, s.N), descriptor(hs, WIDTH, s.N),
            descriptor(dxw, CHUNK, WIDTH), lines, descriptor(turned, CHUNK, CHUNK), found, adjoint, following,
            x if D is None else D, pulled, known, *sizes(first, here), s.b, W, **common, HAS_D=D is not None,
        )  # fmt: skip
        sum_slab(slab, 0 if k.atomic else UG, sum_B, dB, first, here)
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
