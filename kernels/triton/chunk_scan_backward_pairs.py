"""What the chunk scan's backward needs of pairs of tokens within a chunk, in the form for Hopper.

Heads of a group share B and C, so that what their pairs weigh is summed over heads before it meets B and C. Each
product of a pair is made twice, once in a row of its reader and once in a row of its source, with the same bits: rows
are summed without a barrier, and the differences of running sums of these sums are exact.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from latentscan.kernels.triton.chunk_scan_gluon import barrier


@gluon.jit
def pairs_producer(
    x, dy, vec, sX, sD, sV, full, empty, row, first, n, line, NC, H,
    Q: gl.constexpr, P: gl.constexpr, ST: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    for i in range(n):
        s = i % ST
        mbarrier.wait(empty.index(s), ((i // ST) & 1) ^ 1)
        bar = full.index(s)
        mbarrier.expect(bar, 8 * Q * P + 16 * Q)
        for w in gl.static_range(2):
            h = min(first + 2 * i + w, H - 1)
            tma.async_copy_global_to_shared(x, [row, h * P], bar, sX.index(s * 2 + w))
            tma.async_copy_global_to_shared(dy, [row, h * P], bar, sD.index(s * 2 + w))
            tma.async_copy_global_to_shared(vec, [line + (h // SPLIT) * NC, 0], bar, sV.index(s * 2 + w))


@gluon.jit
def pairs_consumer(
    w: gl.constexpr, sX, sD, sV, full, empty, scores, flow, joined, products, weights, at, to, first, last, n, c, b,
    NC, H, Q: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    """Every second head; ``at`` and ``to``: the chunk's place in scores and in weights."""
    mm: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Q, 16])
    row = gl.arange(0, Q, layout=gl.SliceLayout(1, mm))
    column = gl.arange(0, Q, layout=gl.SliceLayout(0, mm))
    sVs = sV._reinterpret(gl.float32, [ST * 2, 2 * Q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    to_source = gl.load(scores + at + row[:, None] * Q + column[None, :]).to(gl.float32)
    to_source = gl.where(row[:, None] > column[None, :], to_source, 0.0)
    to_reader = gl.load(scores + at + column[None, :] * Q + row[:, None]).to(gl.float32)
    own = row[:, None] == column[None, :]
    itself = gl.sum(gl.where(own, to_reader, 0.0), 1)
    to_reader = gl.where(row[:, None] < column[None, :], to_reader, 0.0)
    total = gl.zeros([Q, Q], gl.float32, layout=mm)
    for i in range(n):
        k = i % ST
        h = first + 2 * i + w
        keep = row < gl.where(h < last, Q, 0)
        sVk = sVs.index(k * 2 + w)
        sXk = sX.index(k * 2 + w)
        sDk = sD.index(k * 2 + w)
        mbarrier.wait(full.index(k), (i // ST) & 1)
        reader = warpgroup_mma(
            sDk, sXk.permute((1, 0)), gl.zeros([Q, Q], gl.float32, layout=mm), use_acc=False, is_async=True
        )
        source = warpgroup_mma(
            sXk, sDk.permute((1, 0)), gl.zeros([Q, Q], gl.float32, layout=mm), use_acc=False, is_async=True
        )
        here = sVk.slice(0, Q).load(gl.SliceLayout(1, mm))
        there = sVk.slice(0, Q).load(gl.SliceLayout(0, mm))
        step = sVk.slice(Q, Q).load(gl.SliceLayout(1, mm))
        other = sVk.slice(Q, Q).load(gl.SliceLayout(0, mm))
        # Where it is bounded the score is 0.
        e = gl.exp2(gl.minimum(here[:, None] - there[None, :], 0.0)) * to_source
        reader = warpgroup_mma_wait(1, deps=[reader])
        reads = gl.sum(reader * e * other[None, :], 1)
        e = gl.exp2(gl.minimum(there[None, :] - here[:, None], 0.0))
        source = warpgroup_mma_wait(0, deps=[source])
        barrier()
        mbarrier.arrive(empty.index(k), count=1)
        same = gl.sum(gl.where(own, source, 0.0), 1)
        total += source * e * gl.where(h < last, step, 0.0)[:, None]
        later = gl.sum(source * (e * to_reader), 1)
        out = (b * H + h).to(gl.int64) * (NC * Q) + c * Q + row
        gl.store(flow + out, reads - later * step, mask=keep)
        gl.store(joined + out, later + same * itself, mask=keep)
        gl.store(products + out, same, mask=keep)
    gl.store(weights + to + row[:, None] * Q + column[None, :], total)


@gluon.jit
def pairs_kernel(
    x, dy, vec, scores, flow, joined, products, weights, L, H, G, NC, share, parts, batch,
    Q: gl.constexpr, P: gl.constexpr, ST: gl.constexpr, RC: gl.constexpr, RP: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """A program has a chunk, and one of ``parts`` of a group's heads. scores [b, G, NC, Q, Q]: C Bᵀ, lower triangles.

    Of each head, fp32 [b, H, NC Q]: flow, what each token reads of earlier ones of its chunk, less what it is read by
    later ones; joined, what it is read by others of its chunk and itself, per unit of step; products, x dy.
    weights fp32 [parts, 2, b, G, NC, Q, Q]: what dB and dC are made of, [source, reader].
    """
    pid = gl.program_id(0)
    part = pid % parts
    rest = pid // parts
    g = rest % G
    rest = rest // G
    c = rest % NC
    b = rest // NC
    first = g * share + share * part // parts
    last = g * share + share * (part + 1) // parts
    n = (last - first + 1) // 2
    at = ((b * G + g).to(gl.int64) * NC + c) * (Q * Q)
    more = (pid.to(gl.int64) * 0 + batch) * G * NC * (Q * Q)
    to = part * 2 * more + at
    line = b * (H // SPLIT) * NC + c
    sX = gl.allocate_shared_memory(x.dtype, [ST * 2, Q, P], x.layout)
    sD = gl.allocate_shared_memory(x.dtype, [ST * 2, Q, P], dy.layout)
    sV = gl.allocate_shared_memory(gl.float32, [ST * 2, 1, 2 * Q], vec.layout)
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(ST):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (pairs_consumer, (0, sX, sD, sV, full, empty, scores, flow, joined, products, weights, at, to, first, last, n, c, b, NC, H, Q, ST)),  # noqa: E501
            (pairs_consumer, (1, sX, sD, sV, full, empty, scores, flow, joined, products, weights, at, to + more, first, last, n, c, b, NC, H, Q, ST)),  # noqa: E501
            (pairs_producer, (x, dy, vec, sX, sD, sV, full, empty, b * L + c * Q, first, n, line, NC, H, Q, P, ST, SPLIT)),  # noqa: E501
        ],
        [4, 1],
        [RC, RP],
    )  # fmt: skip


@triton.jit
def join_kernel(
    B, C, scores, weights, turned, dB, dC, L, rows, G, NC, parts, batch, B_sb, B_sl, B_sg, C_sb, C_sl, C_sg,
    Q: tl.constexpr, N: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dB, dC [b, rows, G, N], of the pairs alone. turned [b, G, NC, Q, Q]: B Cᵀ, 0 below the diagonal."""
    pid = tl.program_id(0).to(tl.int64)
    g, rest = pid % G, pid // G
    c, b = rest % NC, rest // NC
    q = tl.arange(0, Q)
    n = tl.arange(0, N)
    token = c * Q + q
    there = (token < L)[:, None]
    at = ((b * G + g) * NC + c) * (Q * Q) + q[:, None] * Q + q[None, :]
    tl.store(turned + at, tl.trans(tl.load(scores + at)))
    weight = tl.zeros([Q, Q], tl.float32)
    for part in range(parts):
        weight += tl.load(weights + (pid * 0 + part) * batch * G * NC * (Q * Q) + at)
    weight = tl.where(q[:, None] <= q[None, :], weight, 0.0).to(B.dtype.element_ty)  # [source, reader]
    to = ((b * rows + token) * G + g)[:, None] * N + n[None, :]
    Bt = tl.load(B + b * B_sb + token[:, None] * B_sl + g * B_sg + n[None, :], mask=there, other=0.0)
    tl.store(dC + to, tl.dot(tl.trans(weight), Bt, input_precision=PREC).to(dC.dtype.element_ty), mask=there)
    Ct = tl.load(C + b * C_sb + token[:, None] * C_sl + g * C_sg + n[None, :], mask=there, other=0.0)
    got = tl.dot(weight, Ct, input_precision=PREC)
    tl.store(dB + to, got.to(dB.dtype.element_ty), mask=there)
