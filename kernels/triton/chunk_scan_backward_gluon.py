"""The chunk scan, backward, for Hopper in Gluon; deterministic, as the portable form.

The sequence is cut into segments, worked on from the last to the first, so that memory is bounded. In each:

    ends, carry      the state before each piece of the walk, then reads; the adjoint after each piece, then pulls
    reads            the walk forward: dC of every two heads, what each token reads
    pulls            the walk back: dx, dB of every two heads, how each token is read
    slabs            dC and dB: the sums over a group's pairs of heads
    cross            what flows from before a chunk to after it
    flows            ddt, and what dA, dD and ddt_bias are the sums of

With y and dy alone, nothing is kept of the states but every fourth, which `cross` multiplies with its adjoint; between
two of these the flow is counted on by what joins and leaves it. With z, y is computed again first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentscan.kernels.triton import chunk_scan_backward_walks as walks
from latentscan.kernels.triton import chunk_scan_gluon
from latentscan.kernels.triton.chunk_common import HEADS_A_PROGRAM, Sizes, Steps, launch, prepare, time_step
from latentscan.kernels.triton.chunk_configs import Forward, Hopper, HopperBackward
from latentscan.kernels.triton.chunk_scan_forward import segment_scores, segment_states
from latentscan.kernels.triton.chunk_scan_gluon import CHUNK, WIDTH, carry_pieces_kernel, copyable, descriptor


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
    hs, gs, begin, final, vec, seen, pulled, across, H, NC, batch, first, SC,
    Q: tl.constexpr, PN: tl.constexpr, SPLIT: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """across fp32 [b, H, SC]: h g, summed, of the state before a chunk and its adjoint after it, with the decay.

    At every R-th chunk state and adjoint are there; from it on what leaves the flow (seen) is taken away and what
    joins it (pulled) added. Where a chunk forgets all but 2^-24, nothing flows: no rounding error stands for it.
    """
    pid = tl.program_id(0).to(tl.int64)
    windows = tl.cdiv(SC, R)
    i, rest = pid % windows, pid // windows
    h, b = rest % H, rest // H
    o = tl.arange(0, PN)
    if i == 0:
        at = (b * H + h) * PN
        flow = tl.sum(tl.load(begin + at + o) * tl.load(final + at + o))
    else:
        at = ((i * batch + b) * H + h) * PN
        flow = tl.sum(tl.load(hs + at + o).to(tl.float32) * tl.load(gs + at + o).to(tl.float32))
    q = tl.arange(0, Q)
    for r in tl.static_range(R):
        c = i * R + r
        inside = c < SC
        v = vec + ((b * (H // SPLIT) + h // SPLIT) * NC + first + c) * (2 * Q)
        token = (b * H + h) * SC * Q + c * Q + q
        end = tl.load(v + Q - 1, mask=inside, other=0.0)
        step = tl.load(v + Q + q, mask=(q < Q) & inside, other=0.0)
        gone = tl.sum(tl.load(seen + token, mask=(q < Q) & inside, other=0.0))
        joined = tl.sum(tl.load(pulled + token, mask=(q < Q) & inside, other=0.0) * step)
        flow = tl.where(end < -24.0, 0.0, flow - gone)
        tl.store(across + (b * H + h) * SC + c, flow, mask=inside)
        flow += joined


@triton.jit
def flows_kernel(
    dt, A, bias, starts, vec, reads, inside, itself, pulled, same, across, ddt, dA, dbias, dD, L, H, NC, first, SC,
    dt_min, dt_max, s_b, s_l, s_h,
    Q: tl.constexpr, BH: tl.constexpr, SPLIT: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
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
        f = (b * H * SPLIT + h * SPLIT + i)[:, None] * (SC * Q) + (k * Q + q)[None, :]
        read += tl.load(reads + f, mask=heads[:, None], other=0.0)
        later += tl.load(inside + f, mask=heads[:, None], other=0.0)
        own += tl.load(itself + f, mask=heads[:, None], other=0.0)
        after += tl.load(pulled + f, mask=heads[:, None], other=0.0)
        before += tl.load(pulled + f - 1, mask=heads[:, None] & (q > 0)[None, :], other=0.0)
        product += tl.sum(tl.load(same + f, mask=heads[:, None], other=0.0), 1)
        through += tl.load(across + (b * H * SPLIT + h * SPLIT + i) * SC + k, mask=heads, other=0.0)
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


def segment_chunks(s: Sizes, NC: int, element: int, k: HopperBackward) -> int:
    """Chunks a segment, a multiple of ``every``: as many as ``workspace`` allows."""
    pairs = s.b * s.G * triton.cdiv(s.H // s.G * (s.P // WIDTH), 2)
    a_chunk = pairs * CHUNK * s.N * element  # a slab
    a_chunk += 2 * s.b * s.H * s.P * s.N * element // k.every  # states and adjoints that are kept
    a_chunk += 6 * s.b * s.H * (s.P // WIDTH) * CHUNK * 4  # flows
    if k.segments:
        best = -(-NC // k.segments)
    else:
        state = s.b * s.H * s.P * s.N * 4
        best = next(
            (-(-NC // S) for S in range(1, NC + 1) if -(-NC // S) * a_chunk + S * state <= k.workspace), k.every
        )  # fmt: skip
    return -(-best // k.every) * k.every


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
    SC = segment_chunks(s, NC, x.element_size(), k)
    S = triton.cdiv(NC, SC)
    vec = prepare(steps, s, chunks=NC)
    scores = segment_scores(B, C, s, x.dtype, chunks=NC).view(s.b, s.G * NC * CHUNK, 1, CHUNK)

    def states() -> Tensor:
        return torch.empty(s.b, heads, WIDTH, s.N, device=device, dtype=f32)

    if S > 1:
        begins = segment_states(x, B, vec, init_state, s, SC, Forward(), NC)
    else:
        begins = torch.zeros(s.b, 1, s.H, s.P, s.N, device=device, dtype=f32)
        if init_state is not None:
            begins[:, 0] = init_state
    adjoint, following = states(), states()
    adjoint.zero_() if dfinal is None else adjoint.copy_(dfinal.reshape(adjoint.shape))
    windows = triton.cdiv(SC, k.every)
    hs = torch.empty(windows * s.b, heads * WIDTH, 1, s.N, device=device, dtype=x.dtype)
    gs = torch.empty_like(hs)
    slab = torch.empty(UG * s.b, SC * CHUNK, s.G, s.N, device=device, dtype=x.dtype)
    names = ("reads", "seen", "inside", "itself", "pulled", "same")
    sums = torch.empty(3, s.b * NC, s.H, device=device, dtype=f32)
    dx = torch.empty(x.shape, device=device, dtype=x.dtype)
    dB = torch.empty(B.shape, device=device, dtype=B.dtype)
    dC = torch.empty(C.shape, device=device, dtype=C.dtype)
    ddt = torch.empty(steps.dt.shape, device=device, dtype=steps.dt.dtype)
    xw, dyw, dxw = (t.view(s.b, s.L, heads, WIDTH) if split > 1 else t for t in (x, dy, dx))
    cut: dict[str, Any] = {"Q": CHUNK, "P": WIDTH, "N": s.N, "SPLIT": split}
    tiles = tuple(
        descriptor(t, CHUNK, width)
        for t, width in ((xw, WIDTH), (dyw, WIDTH), (B, s.N), (C, s.N), (scores, CHUNK))
    )  # fmt: skip
    kept = [descriptor(t, WIDTH, s.N) for t in (hs, gs)]
    for segment in reversed(range(S)):
        first = segment * SC
        here = min(SC, NC - first)
        T = units * here
        K = min(k.pieces, T // 2)
        flat = slab.view(-1)[: UG * s.b * here * CHUNK * s.G * s.N].view(UG * s.b, here * CHUNK, s.G, s.N)
        into = descriptor(flat, CHUNK, s.N)
        flow = dict(zip(names, torch.empty(len(names), s.b, heads, here * CHUNK, device=device), strict=True))
        begin = begins[:, segment].contiguous()
        sizes = (s.L, NC, s.G, UG, share, heads, T, K, here, first)

        def piece_starts(v: Tensor, M: Tensor, start: Tensor, reverse: bool, K: int = K, sizes: Any = sizes) -> Tensor:
            J = k.state_parts
            found = torch.empty(K, 2, WIDTH, s.N, device=device, dtype=f32)
            if units == K:
                return found
            added = torch.empty(K * J, 2, WIDTH, s.N, device=device, dtype=f32)
            decays = torch.empty(K * J, 2, device=device, dtype=f32)
            launch(
                walks.ends_kernel, K * J, descriptor(v, 2 * CHUNK, WIDTH), descriptor(M, 2 * CHUNK, s.N), vec, added,
                decays, *sizes, **cut, ST=k.state_stages, RC=k.state_registers, RP=24, J=J, REV=reverse, num_warps=4,
            )  # fmt: skip
            launch(
                carry_pieces_kernel, units * 2 * (WIDTH * s.N // 512), added, decays, start, found, sizes[8],
                *sizes[2:8], PN=WIDTH * s.N, BLOCK=512, HAS_INIT=True, J=J, num_warps=4,
            )  # fmt: skip
            return found

        def sum_slab(out: Tensor, here: int = here, first: int = first, flat: Tensor = flat) -> None:
            launch(
                slabs_kernel, s.b * triton.cdiv(here * CHUNK * s.G * s.N, 1024), flat, out, s.L, s.b, first * CHUNK,
                here * CHUNK, s.G * s.N, UG, BLOCK=1024, num_warps=4,
            )  # fmt: skip

        common = {**cut, "ST": k.stages, "RC": k.registers, "RP": 24, "R": k.every, "num_warps": 4}
        launch(
            walks.reads_kernel, K, *tiles, into, kept[0], vec, piece_starts(xw, B, begin, False), begin,
            flow["reads"], flow["seen"], *sizes, s.b, **common,
        )  # fmt: skip
        sum_slab(dC)
        launch(
            walks.pulls_kernel, K, *tiles, into, kept[1], descriptor(dxw, CHUNK, WIDTH), vec,
            piece_starts(dyw, C, adjoint, True), adjoint, following, x if D is None else D,
            *[flow[n] for n in names[2:]], *sizes, s.b, **common, HAS_D=D is not None,
        )  # fmt: skip
        sum_slab(dB)
        across = torch.empty(s.b, heads, here, device=device, dtype=f32)
        launch(
            cross_kernel, s.b * heads * triton.cdiv(here, k.every), hs, gs, begin, following, vec, flow["seen"],
            flow["pulled"], across, heads, NC, s.b, first, here,
            Q=CHUNK, PN=WIDTH * s.N, SPLIT=split, R=k.every, num_warps=4,
        )  # fmt: skip
        launch(
            flows_kernel, s.b * here * triton.cdiv(s.H, HEADS_A_PROGRAM), *steps.arguments, vec, flow["reads"],
            *[flow[n] for n in names[2:]], across, ddt, *sums, s.L, s.H, NC, first, here, *steps.limits,
            Q=CHUNK, BH=HEADS_A_PROGRAM, SPLIT=split, **steps.flags, num_warps=4,
        )  # fmt: skip
        adjoint, following = following, adjoint
    dA, dbias, dD = sums.view(3, s.b, NC, s.H)[:, :, : s.NC].sum((1, 2))
    return (
        dx, ddt, dA.to(steps.A.dtype), dB, dC, None if D is None else dD.to(D.dtype), dz,
        None if steps.dt_bias is None else dbias.to(steps.dt_bias.dtype),
        None if init_state is None else adjoint.view(init_state.shape).to(init_state.dtype),
    )  # fmt: skip
