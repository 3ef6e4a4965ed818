"""The walks of the chunk scan's backward for Hopper, in Gluon: a producer warp, and two warpgroups with a head each.

Both walk the chunks of a piece with the fp32 state of their head in registers, read each tile once, and share tiles of
B and C between their two heads. See :mod:`latentscan.kernels.triton.chunk_scan_backward_gluon`.

    ends      what a piece adds to the state (x, B), or to its adjoint (dy, C; REV: from the last chunk to the first)
    reads     forward, with the state h: dC of two heads, and what each token reads, of what came before its chunk
    pulls     from the last chunk to the first, with the adjoint g: dx; dB of two heads, and how each token is read,
              of what comes after its chunk; the flow h g where h was kept

The two heads' dB or dC are summed on the chip: one warpgroup gives its own, the other adds and writes: to a slab of the
pair's own, which one pass sums, or, ADD, by the copy engine to what is there. A processor adds 13 bytes a nanosecond in
that way, whatever the others do; a round of `reads` is shorter than its tile takes, so it adds every other chunk. What
pairs of tokens in a chunk need is in :mod:`latentscan.kernels.triton.chunk_scan_backward_pairs`, but for dx.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from latentscan.kernels.triton.chunk_scan_gluon import barrier, piece, unit_of


@gluon.jit
def chunk_at(c, first, SC, REV: gl.constexpr):
    """The chunk that is the ``c``-th of the walk over a segment of ``SC`` chunks from ``first`` on."""
    if REV:
        return first + SC - 1 - c
    return first + c


@gluon.jit
def ends_producer(
    v, K, sV, sK, full, empty, row, n, k_column, v_column,
    Q: gl.constexpr, P: gl.constexpr, N: gl.constexpr, ST: gl.constexpr, REV: gl.constexpr,
):  # fmt: skip
    for i in range(n):
        s = i % ST
        mbarrier.wait(empty.index(s), ((i // ST) & 1) ^ 1)
        bar = full.index(s)
        mbarrier.expect(bar, (Q * N + 2 * Q * P) * 4)
        tma.async_copy_global_to_shared(v, [row, v_column], bar, sV.index(s * 2))
        tma.async_copy_global_to_shared(v, [row, v_column + P], bar, sV.index(s * 2 + 1))
        tma.async_copy_global_to_shared(K, [row, k_column], bar, sK.index(s))
        if REV:
            row += 2 * Q
        else:
            row -= 2 * Q


@gluon.jit
def ends_consumer(
    w: gl.constexpr, sV, sK, full, empty, vec, added, decays, n, low, b, h0, slot, NC, H,
    Q: gl.constexpr, P: gl.constexpr, N: gl.constexpr, ST: gl.constexpr, SPLIT: gl.constexpr, REV: gl.constexpr,
):  # fmt: skip
    """Two chunks at a time, from the last of the walk to its first, so that the sum needs no rescaling."""
    dtype: gl.constexpr = sV.dtype
    mn: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mn, 2)
    pr = gl.arange(0, P, layout=gl.SliceLayout(1, mn))
    nn = gl.arange(0, N, layout=gl.SliceLayout(0, mn))
    q = gl.arange(0, 2 * Q, layout=gl.SliceLayout(0, left))
    at = gl.where(q < Q, q, q + Q)
    h = min(h0 + w, H - 1)
    pv = vec + ((b * (H // SPLIT) + h // SPLIT).to(gl.int64) * NC + low) * (2 * Q)
    S = gl.zeros([P, N], gl.float32, layout=mn)
    after = 0.0
    cum = gl.load(pv + at)
    e0 = gl.load(pv + (Q - 1))
    e1 = gl.load(pv + (3 * Q - 1))
    if not REV:
        step = gl.load(pv + Q + at)
    for i in range(n):
        k = i % ST
        if REV:
            weight = gl.exp2(gl.where(q < Q, after, after + e0) + cum)
        else:
            weight = gl.exp2(gl.where(q < Q, after + e1 + e0, after + e1) - cum) * step
        after += e0 + e1
        if REV:
            pv += gl.where(i + 1 < n, 4 * Q, 0)
        else:
            pv -= gl.where(i + 1 < n, 4 * Q, 0)
            step = gl.load(pv + Q + at)
        cum = gl.load(pv + at)
        e0 = gl.load(pv + (Q - 1))
        e1 = gl.load(pv + (3 * Q - 1))
        mbarrier.wait(full.index(k), (i // ST) & 1)
        vs = (sV.index(k * 2 + w).permute((1, 0)).load(left).to(gl.float32) * weight[None, :]).to(dtype)
        S = warpgroup_mma(vs, sK.index(k), S, is_async=True)
        S = warpgroup_mma_wait(0, deps=[S])
        barrier()
        mbarrier.arrive(empty.index(k), count=1)
    gl.store(added + (slot * 2 + w).to(gl.int64) * (P * N) + pr[:, None] * N + nn[None, :], S)
    gl.store(decays + slot * 2 + w, after)


@gluon.jit
def ends_kernel(
    v, K, vec, added, decays, L, NC, G, UG, share, H, T, pieces, SC, first,
    Q: gl.constexpr, P: gl.constexpr, N: gl.constexpr, ST: gl.constexpr, RC: gl.constexpr, RP: gl.constexpr,
    SPLIT: gl.constexpr, J: gl.constexpr, REV: gl.constexpr,
):  # fmt: skip
    """added fp32 [pieces J, 2, P, N], decays [pieces J, 2]: what each piece's part of its last unit adds.

    Pieces that end a unit are left out. J programs share a piece; one that is left without chunks writes nothing.
    """
    slot = gl.program_id(0)
    pid = slot // J
    j = slot % J
    f1 = piece(pid + 1, pieces, T)
    u = (f1 - 1) // SC
    b, g, h0 = unit_of(u, G, UG, share)
    cs = max(piece(pid, pieces, T) - u * SC, 0)
    pairs = (f1 - u * SC - cs) // 2
    begin = pairs * j // J
    c1 = cs + (pairs * (j + 1) // J) * 2
    n = gl.where(f1 - u * SC == SC, 0, pairs * (j + 1) // J - begin)
    low = first + c1 - 2
    if REV:
        low = first + SC - c1
    if n > 0:
        sV = gl.allocate_shared_memory(v.dtype, [ST * 2, 2 * Q, P], v.layout)
        sK = gl.allocate_shared_memory(K.dtype, [ST, 2 * Q, N], K.layout)
        full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
        for k in gl.static_range(ST):
            mbarrier.init(full.index(k), count=1)
            mbarrier.init(empty.index(k), count=2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (ends_consumer, (0, sV, sK, full, empty, vec, added, decays, n, low, b, h0, slot, NC, H, Q, P, N, ST, SPLIT, REV)),  # noqa: E501
                (ends_consumer, (1, sV, sK, full, empty, vec, added, decays, n, low, b, h0, slot, NC, H, Q, P, N, ST, SPLIT, REV)),  # noqa: E501
                (ends_producer, (v, K, sV, sK, full, empty, b * L + low * Q, n, g * N, h0 * P, Q, P, N, ST, REV)),
            ],
            [4, 1],
            [RC, RP],
        )  # fmt: skip


@gluon.jit
def walk_producer(
    x, dy, B, C, vec, scores, sX, sD, sB, sC, sV, sG, full, empty, f0, f1, first, L, NC, SC, G, UG, share, H,
    Q: gl.constexpr, P: gl.constexpr, N: gl.constexpr, ST: gl.constexpr, SPLIT: gl.constexpr, REV: gl.constexpr,
):  # fmt: skip
    u = f0 // SC
    c = f0 % SC
    b, g, h0 = unit_of(u, G, UG, share)
    for i in range(f1 - f0):
        s = i % ST
        mbarrier.wait(empty.index(s), ((i // ST) & 1) ^ 1)
        bar = full.index(s)
        if REV:
            mbarrier.expect(bar, (2 * Q * N + 4 * Q * P + Q * Q) * 2 + 16 * Q)
        else:
            mbarrier.expect(bar, (2 * Q * N + 4 * Q * P) * 2 + 16 * Q)
        chunk = chunk_at(c, first, SC, REV)
        row = b * L + chunk * Q
        tma.async_copy_global_to_shared(x, [row, h0 * P], bar, sX.index(s * 2))
        tma.async_copy_global_to_shared(x, [row, (h0 + 1) * P], bar, sX.index(s * 2 + 1))
        tma.async_copy_global_to_shared(dy, [row, h0 * P], bar, sD.index(s * 2))
        tma.async_copy_global_to_shared(dy, [row, (h0 + 1) * P], bar, sD.index(s * 2 + 1))
        tma.async_copy_global_to_shared(B, [row, g * N], bar, sB.index(s))
        tma.async_copy_global_to_shared(C, [row, g * N], bar, sC.index(s))
        if REV:
            tma.async_copy_global_to_shared(scores, [((b * G + g) * NC + chunk) * Q, 0], bar, sG.index(s))
        for w in gl.static_range(2):
            h = min(h0 + w, H - 1)
            line = (b * (H // SPLIT) + h // SPLIT) * NC + chunk
            tma.async_copy_global_to_shared(vec, [line, 0], bar, sV.index(s * 2 + w))
        c += 1
        if c == SC:
            c = 0
            u += 1
            b, g, h0 = unit_of(u, G, UG, share)


@builtin
def async_add_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """As ``tma.async_copy_shared_to_global``, but what is there is added to."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def give(n, acc, sE, ready, spare):
    """The first warpgroup's part of a sum of two, to a buffer of two; of fp32 there is one."""
    count: gl.constexpr = sE.shape[0]
    mbarrier.wait(spare.index(n % count), ((n // count) & 1) ^ 1)
    sE.index(n % count).store(acc.to(sE.dtype))
    barrier()
    mbarrier.arrive(ready.index(n % count), count=1)


@gluon.jit
def take(n, acc, sE, ready, layout: gl.constexpr):
    """(the sum of both warpgroups' parts, the buffer that the other's came in)."""
    count: gl.constexpr = sE.shape[0]
    buffer = sE.index(n % count)
    mbarrier.wait(ready.index(n % count), (n // count) & 1)
    return acc + buffer.load(layout).to(gl.float32), buffer


@gluon.jit
def write(total, buffer, to, row, column, ADD: gl.constexpr):
    """To a tensor of the buffer's dtype; ADD: to what is there."""
    buffer.store(total.to(buffer.dtype))
    fence_async_shared()
    if ADD:
        async_add_shared_to_global(to, [row, column], buffer)
    else:
        tma.async_copy_shared_to_global(to, [row, column], buffer)


@gluon.jit
def reads_consumer(
    w: gl.constexpr, slab, total, hs, sX, sD, sB, sC, sS, sE, sF, sV, full, empty, ready, spare, starts, begin,
    final, seen, f0, f1, pid, first, NC, SC, G, UG, share, H, batch,
    Q: gl.constexpr, P: gl.constexpr, N: gl.constexpr, ST: gl.constexpr, SPLIT: gl.constexpr, R: gl.constexpr,
    ADD: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = sX.dtype
    mn: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mn, 2)
    qi = gl.arange(0, Q, layout=gl.SliceLayout(1, mn))
    pr = gl.arange(0, P, layout=gl.SliceLayout(1, mn))
    nn = gl.arange(0, N, layout=gl.SliceLayout(0, mn))
    pn = pr[:, None] * N + nn[None, :]
    sVs = sV._reinterpret(gl.float32, [ST * 2, 2 * Q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sSw = sS.index(w)
    n = 0
    for u in range(f0 // SC, (f1 - 1) // SC + 1):
        b, g, h0 = unit_of(u, G, UG, share)
        h = min(h0 + w, H - 1)
        valid = h0 + w < (g + 1) * share
        one = gl.where(valid, 1.0, 0.0)
        keep = qi < gl.where(valid, Q, 0)
        cs = max(f0 - u * SC, 0)
        ce = min(f1 - u * SC, SC)
        if cs > 0:
            S = gl.load(starts + (pid * 2 + w).to(gl.int64) * (P * N) + pn)
        else:
            S = gl.load(begin + (b * H + h).to(gl.int64) * (P * N) + pn)
        flow = (b * H + h).to(gl.int64) * (NC * Q) + first * Q
        for c in range(cs, ce):
            k = n % ST
            sVk = sVs.index(k * 2 + w)
            sXk = sX.index(k * 2 + w)
            sSw.store(S.to(dtype))
            fence_async_shared()
            if (first + c) % R == 0:
                if valid:
                    tma.async_copy_shared_to_global(hs, [(((first + c) // R) * batch + b) * H * P + h * P, 0], sSw)
            mbarrier.wait(full.index(k), (n // ST) & 1)
            acc = warpgroup_mma(
                sD.index(k * 2 + w), sSw, gl.zeros([Q, N], gl.float32, layout=mn), use_acc=False, is_async=True
            )
            end = sVk.slice(Q - 1, 1).load(gl.SliceLayout(0, left))
            out = gl.exp2(end - sVk.slice(0, Q).load(gl.SliceLayout(0, left)))
            out = out * sVk.slice(Q, Q).load(gl.SliceLayout(0, left))
            xs = (sXk.permute((1, 0)).load(left).to(gl.float32) * out[None, :]).to(dtype)
            S = S * gl.exp2(sVk.slice(Q - 1, 1).load(gl.SliceLayout(1, mn)))[:, None]
            S = warpgroup_mma(xs, sB.index(k), S, is_async=True)
            into = gl.exp2(sVk.slice(0, Q).load(gl.SliceLayout(1, mn)))
            acc = warpgroup_mma_wait(1, deps=[acc])
            got = gl.sum(acc * sC.index(k).load(mn).to(gl.float32), 1) * into
            gl.store(seen + flow + c * Q + qi, got, mask=keep)
            acc = acc * (into * one)[:, None]
            if not ADD:
                # The second warpgroup gives the last round's buffer back once it is written.
                tma.store_wait(0)
            S = warpgroup_mma_wait(0, deps=[S])
            barrier()
            mbarrier.arrive(empty.index(k), count=1)
            row = (u % UG) * batch + b
            if ADD:
                # Every other chunk is added to what is there, which takes longer than a round: nobody waits for it.
                if w == 0:
                    tma.store_wait(0)
                    give(n, acc, sE, ready, spare)
                else:
                    acc, buffer = take(n, acc, sE, ready, mn)
                    if n & 1:
                        write(acc, buffer, slab, row * (SC // 2 * Q) + c // 2 * Q, g * N, False)
                    else:
                        tma.store_wait(0)
                        barrier()
                        mbarrier.arrive(spare.index(0), count=1)
                        if n > 0:
                            mbarrier.arrive(spare.index(1), count=1)
                        write(acc, sF, total, b * (NC * Q) + (first + c) * Q, g * N, True)
            else:
                if w == 1:
                    if n > 0:
                        mbarrier.arrive(spare.index((n - 1) & 1), count=1)
                if w == 0:
                    give(n, acc, sE, ready, spare)
                else:
                    acc, buffer = take(n, acc, sE, ready, mn)
                    write(acc, buffer, slab, row * (SC * Q) + c * Q, g * N, False)
            n += 1
        if valid & (ce == SC):
            gl.store(final + (b * H + h).to(gl.int64) * (P * N) + pn, S)
    tma.store_wait(0)


@gluon.jit
def reads_kernel(
    x, dy, B, C, slab, total, hs, vec, starts, begin, final, seen,
    L, NC, G, UG, share, H, T, pieces, SC, first, batch,
    Q: gl.constexpr, P: gl.constexpr, N: gl.constexpr, ST: gl.constexpr, RC: gl.constexpr, RP: gl.constexpr,
    SPLIT: gl.constexpr, R: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """dC: slab 16 bits [UG, b, SC Q, G, N] of each unit, or, ADD, [UG, b, SC Q / 2, G, N] of every other chunk from the
    second on, and the others added to total fp32 [b, NC Q, G, N]. seen fp32 [b, H, NC Q]. hs [NC/R, b, H, P, N].

    Both of what came before the chunk only. seen: what each token reads, summed over channels, times dy. hs: the state
    before every R-th chunk. final fp32 [b, H, P, N]: the state after the segment.
    """
    pid = gl.program_id(0)
    f0 = piece(pid, pieces, T)
    f1 = piece(pid + 1, pieces, T)
    sX = gl.allocate_shared_memory(x.dtype, [ST * 2, Q, P], x.layout)
    sD = gl.allocate_shared_memory(x.dtype, [ST * 2, Q, P], dy.layout)
    sB = gl.allocate_shared_memory(x.dtype, [ST, Q, N], B.layout)
    sC = gl.allocate_shared_memory(x.dtype, [ST, Q, N], C.layout)
    sS = gl.allocate_shared_memory(x.dtype, [2, P, N], hs.layout)
    sE = gl.allocate_shared_memory(x.dtype, [2, Q, N], slab.layout)
    sF = sE
    if ADD:
        sF = gl.allocate_shared_memory(gl.float32, [Q, N], total.layout)
    sV = gl.allocate_shared_memory(gl.float32, [ST * 2, 1, 2 * Q], vec.layout)
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    spare = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(ST):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=2)
    for k in gl.static_range(2):
        mbarrier.init(ready.index(k), count=1)
        mbarrier.init(spare.index(k), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (reads_consumer, (0, slab, total, hs, sX, sD, sB, sC, sS, sE, sF, sV, full, empty, ready, spare, starts, begin, final, seen, f0, f1, pid, first, NC, SC, G, UG, share, H, batch, Q, P, N, ST, SPLIT, R, ADD)),  # noqa: E501
            (reads_consumer, (1, slab, total, hs, sX, sD, sB, sC, sS, sE, sF, sV, full, empty, ready, spare, starts, begin, final, seen, f0, f1, pid, first, NC, SC, G, UG, share, H, batch, Q, P, N, ST, SPLIT, R, ADD)),  # noqa: E501
            (walk_producer, (x, dy, B, C, vec, x, sX, sD, sB, sC, sV, sX, full, empty, f0, f1, first, L, NC, SC, G, UG, share, H, Q, P, N, ST, SPLIT, False)),  # noqa: E501
        ],
        [4, 1],
        [RC, RP],
    )  # fmt: skip


@gluon.jit
def pulls_consumer(
    w: gl.constexpr, slab, hs, dx, sX, sD, sB, sC, sS, sE, sY, sV, sG, full, empty, ready, spare, moved, starts, begin,
    final, D, pulled, known, f0, f1, pid, first, L, NC, SC, G, UG, share, H, batch, W,
    Q: gl.constexpr, P: gl.constexpr, N: gl.constexpr, ST: gl.constexpr, SPLIT: gl.constexpr, R: gl.constexpr,
    HAS_D: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = sX.dtype
    mm: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Q, 16])
    mp: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 16])
    mn: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mn, 2)
    left_p: gl.constexpr = gl.DotOperandLayout(0, mp, 2)
    qj = gl.arange(0, Q, layout=gl.SliceLayout(1, mm))  # rows: the tokens read from
    qi = gl.arange(0, Q, layout=gl.SliceLayout(0, mm))
    qp = gl.arange(0, Q, layout=gl.SliceLayout(1, mp))
    pr = gl.arange(0, P, layout=gl.SliceLayout(1, mn))
    nn = gl.arange(0, N, layout=gl.SliceLayout(0, mn))
    pn = pr[:, None] * N + nn[None, :]
    sVs = sV._reinterpret(gl.float32, [ST * 2, 2 * Q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sSw = sS.index(w)
    sYw = sY.index(w)
    n = 0
    m = 0
    for u in range(f0 // SC, (f1 - 1) // SC + 1):
        b, g, h0 = unit_of(u, G, UG, share)
        h = min(h0 + w, H - 1)
        valid = h0 + w < (g + 1) * share
        one = gl.where(valid, 1.0, 0.0)
        keep = qp < gl.where(valid, Q, 0)
        cs = max(f0 - u * SC, 0)
        ce = min(f1 - u * SC, SC)
        if cs > 0:
            S = gl.load(starts + (pid * 2 + w).to(gl.int64) * (P * N) + pn)
        else:
            S = gl.load(begin + (b * H + h).to(gl.int64) * (P * N) + pn)
        if HAS_D:
            d = gl.load(D + h // SPLIT).to(gl.float32)
        flow = (b * H + h).to(gl.int64) * (SC * Q)
        for c in range(cs, ce):
            at = SC - 1 - c  # the chunk, counted from the segment's first
            k = n % ST
            sVk = sVs.index(k * 2 + w)
            sXk = sX.index(k * 2 + w)
            sDk = sD.index(k * 2 + w)
            sSw.store(S.to(dtype))
            fence_async_shared()
            mbarrier.wait(full.index(k), (n // ST) & 1)
            du = warpgroup_mma(
                sB.index(k), sSw.permute((1, 0)), gl.zeros([Q, P], gl.float32, layout=mp), use_acc=False, is_async=True
            )
            into = gl.exp2(sVk.slice(0, Q).load(gl.SliceLayout(0, left)))
            dyw = (sDk.permute((1, 0)).load(left).to(gl.float32) * into[None, :]).to(dtype)
            S = S * gl.exp2(sVk.slice(Q - 1, 1).load(gl.SliceLayout(1, mn)))[:, None]
            S = warpgroup_mma(dyw, sC.index(k), S, is_async=True)
            if ADD:
                if w == 1:
                    # The one buffer is given back once it is written, early enough for this round.
                    tma.store_wait(0)
                    barrier()
                    if n > 0:
                        mbarrier.arrive(spare.index(0), count=1)
            cj = sVk.slice(0, Q).load(gl.SliceLayout(1, mm)) - gl.log2(sVk.slice(Q, Q).load(gl.SliceLayout(1, mm)))
            ci = sVk.slice(0, Q).load(gl.SliceLayout(0, mm))
            # Above the diagonal the score is 0 and the exponent positive: bounded, so that the product is 0, not NaN.
            e = gl.exp2(gl.minimum(ci[None, :] - cj[:, None], 80.0)) * sG.index(k).load(mm).to(gl.float32)
            if HAS_D:
                e = gl.where(qj[:, None] == qi[None, :], e + d, e)
            mixed = gl.convert_layout(e.to(dtype), left_p)
            end_p = sVk.slice(Q - 1, 1).load(gl.SliceLayout(1, mp))
            out_p = gl.exp2(end_p - sVk.slice(0, Q).load(gl.SliceLayout(1, mp)))
            du = warpgroup_mma_wait(1, deps=[du])
            pull = gl.sum(du * sXk.load(mp).to(gl.float32), 1) * out_p
            gl.store(pulled + flow + at * Q + qp, pull, mask=keep)
            du = du * (out_p * sVk.slice(Q, Q).load(gl.SliceLayout(1, mp)))[:, None]
            acc = warpgroup_mma(sXk, sSw, gl.zeros([Q, N], gl.float32, layout=mn), use_acc=False, is_async=True)
            du = warpgroup_mma(mixed, sDk, du, is_async=True)
            end = sVk.slice(Q - 1, 1).load(gl.SliceLayout(1, mn))
            out = gl.exp2(end - sVk.slice(0, Q).load(gl.SliceLayout(1, mn)))
            out = out * sVk.slice(Q, Q).load(gl.SliceLayout(1, mn)) * one
            S, acc = warpgroup_mma_wait(1, deps=[S, acc])
            acc = acc * out[:, None]
            # The second warpgroup gives the last round's buffer back once it is written.
            tma.store_wait(0)
            du = warpgroup_mma_wait(0, deps=[du])
            barrier()
            mbarrier.arrive(empty.index(k), count=1)
            if not ADD:
                if w == 1:
                    if n > 0:
                        mbarrier.arrive(spare.index((n - 1) & 1), count=1)
            sYw.store(du.to(dtype))
            fence_async_shared()
            if valid:
                tma.async_copy_shared_to_global(dx, [b * L + (first + at) * Q, (h0 + w) * P], sYw)
            there = (first + at) % R == 0
            window = (first + at) // R
            if there:
                # The state that was kept here comes where the adjoint was for the products.
                mbarrier.expect(moved.index(w), P * N * 2)
                tma.async_copy_global_to_shared(hs, [(window * batch + b) * H * P + h * P, 0], moved.index(w), sSw)
            if w == 0:
                give(n, acc, sE, ready, spare)
            else:
                acc, buffer = take(n, acc, sE, ready, mn)
                if ADD:
                    row = b * (NC * Q) + (first + at) * Q
                else:
                    row = ((u % UG) * batch + b) * (SC * Q) + at * Q
                write(acc, buffer, slab, row, g * N, ADD)
            if there:
                mbarrier.wait(moved.index(w), m & 1)
                to = known + ((b * H + h).to(gl.int64) * (W + 1) + window) * P + pr
                gl.store(to, gl.sum(sSw.load(mn).to(gl.float32) * S, 1), mask=pr < gl.where(valid, P, 0))
                m += 1
                barrier()
            n += 1
        if valid & (ce == SC):
            gl.store(final + (b * H + h).to(gl.int64) * (P * N) + pn, S)
    tma.store_wait(0)


@gluon.jit
def pulls_kernel(
    x, dy, B, C, slab, hs, dx, vec, scores, starts, begin, final, D, pulled, known,
    L, NC, G, UG, share, H, T, pieces, SC, first, batch, W,
    Q: gl.constexpr, P: gl.constexpr, N: gl.constexpr, ST: gl.constexpr, RC: gl.constexpr, RP: gl.constexpr,
    SPLIT: gl.constexpr, R: gl.constexpr, HAS_D: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """dx; slab: dB of each unit, as in reads_kernel, or, ADD, fp32 [b, NC Q, G, N] that it is added
    to; final fp32 [b, H, P, N]: the adjoint before the segment.

    pulled fp32 [b, H, SC Q]: how each token is read after its chunk, summed over channels, per unit of step.
    scores [b, G, NC, Q, Q]: B Cᵀ. hs: the state before every R-th chunk; known fp32 [b, H, W + 1, P]: that times its
    adjoint, summed over N.
    """
    pid = gl.program_id(0)
    f0 = piece(pid, pieces, T)
    f1 = piece(pid + 1, pieces, T)
    sX = gl.allocate_shared_memory(x.dtype, [ST * 2, Q, P], x.layout)
    sD = gl.allocate_shared_memory(x.dtype, [ST * 2, Q, P], dy.layout)
    sB = gl.allocate_shared_memory(x.dtype, [ST, Q, N], B.layout)
    sC = gl.allocate_shared_memory(x.dtype, [ST, Q, N], C.layout)
    sG = gl.allocate_shared_memory(x.dtype, [ST, Q, Q], scores.layout)
    sS = gl.allocate_shared_memory(x.dtype, [2, P, N], hs.layout)
    if ADD:
        sE = gl.allocate_shared_memory(gl.float32, [1, Q, N], slab.layout)
    else:
        sE = gl.allocate_shared_memory(x.dtype, [2, Q, N], slab.layout)
    sY = gl.allocate_shared_memory(x.dtype, [2, Q, P], dx.layout)
    sV = gl.allocate_shared_memory(gl.float32, [ST * 2, 1, 2 * Q], vec.layout)
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    spare = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    moved = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(ST):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=2)
    for k in gl.static_range(2):
        mbarrier.init(ready.index(k), count=1)
        mbarrier.init(spare.index(k), count=1)
        mbarrier.init(moved.index(k), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (pulls_consumer, (0, slab, hs, dx, sX, sD, sB, sC, sS, sE, sY, sV, sG, full, empty, ready, spare, moved, starts, begin, final, D, pulled, known, f0, f1, pid, first, L, NC, SC, G, UG, share, H, batch, W, Q, P, N, ST, SPLIT, R, HAS_D, ADD)),  # noqa: E501
            (pulls_consumer, (1, slab, hs, dx, sX, sD, sB, sC, sS, sE, sY, sV, sG, full, empty, ready, spare, moved, starts, begin, final, D, pulled, known, f0, f1, pid, first, L, NC, SC, G, UG, share, H, batch, W, Q, P, N, ST, SPLIT, R, HAS_D, ADD)),  # noqa: E501
            (walk_producer, (x, dy, B, C, vec, scores, sX, sD, sB, sC, sV, sG, full, empty, f0, f1, first, L, NC, SC, G, UG, share, H, Q, P, N, ST, SPLIT, True)),  # noqa: E501
        ],
        [4, 1],
        [RC, RP],
    )  # fmt: skip
