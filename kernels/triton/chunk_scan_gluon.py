"""The chunk scan, forward, for Hopper in Gluon: one producer warp that copies tiles, two warpgroups with a head each.

    prep      decay of every token, with the step folded into the exponent      (chunk_common)
    scores    C·Bᵀ of every chunk, once per group                               (chunk_scan_forward)
    states    what each piece but a unit's last adds to the state
    carry     the state at the start of each piece
    output    y, the fp32 state in registers; the final state

A *unit* is two heads of a group, side by side over the sequence; all units' chunks are laid end to end and cut into
as many pieces as there are processors. Heads of more than 64 channels count as several heads of 64.
The copies see rows as two axes [b L, columns], so that batch > 1 needs L to be a multiple of two chunks.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from latentscan.kernels.triton.chunk_common import Sizes, Steps, launch, prepare
from latentscan.kernels.triton.chunk_configs import Hopper
from latentscan.kernels.triton.chunk_scan_forward import segment_scores

WIDTH = 64  # channels of a head, as the kernels see it
CHUNK = 64
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # 3.7, 3.6


@gluon.jit
def piece(pid, K, T):
    """The first of the ``T`` chunks that piece ``pid`` of ``K`` holds; even."""
    return ((pid.to(gl.int64) * (T // 2) // K) * 2).to(gl.int32)


@gluon.jit
def unit_of(u, G, UG, share):
    """(batch row, group, first head) of a unit; ``UG`` units and ``share`` heads a group."""
    bg = u // UG
    g = bg % G
    return bg // G, g, g * share + (u % UG) * 2


@gluon.jit
def output_producer(
    x, B, C, scores, z, sX, sB, sC, sG, sZ, full, empty, f0, f1, L, NC, G, UG, share,
    Q: gl.constexpr, P: gl.constexpr, N: gl.constexpr, ST: gl.constexpr, HAS_Z: gl.constexpr,
):  # fmt: skip
    u = f0 // NC
    c = f0 % NC
    b, g, h0 = unit_of(u, G, UG, share)
    for i in range(f1 - f0):
        s = i % ST
        mbarrier.wait(empty.index(s), ((i // ST) & 1) ^ 1)
        bar = full.index(s)
        if HAS_Z:
            mbarrier.expect(bar, (2 * Q * N + 4 * Q * P + Q * Q) * 2)
        else:
            mbarrier.expect(bar, (2 * Q * N + 2 * Q * P + Q * Q) * 2)
        row = b * L + c * Q
        tma.async_copy_global_to_shared(scores, [((b * G + g) * NC + c) * Q, 0], bar, sG.index(s))
        tma.async_copy_global_to_shared(C, [row, g * N], bar, sC.index(s))
        tma.async_copy_global_to_shared(x, [row, h0 * P], bar, sX.index(s * 2))
        tma.async_copy_global_to_shared(x, [row, (h0 + 1) * P], bar, sX.index(s * 2 + 1))
        tma.async_copy_global_to_shared(B, [row, g * N], bar, sB.index(s))
        if HAS_Z:
            tma.async_copy_global_to_shared(z, [row, h0 * P], bar, sZ.index(s * 2))
            tma.async_copy_global_to_shared(z, [row, (h0 + 1) * P], bar, sZ.index(s * 2 + 1))
        c += 1
        if c == NC:
            c = 0
            u += 1
            b, g, h0 = unit_of(u, G, UG, share)


@gluon.jit
def output_consumer(
    w: gl.constexpr, y, sX, sB, sC, sG, sZ, sS, sY, sV, full, empty, vec, starts, init, final, D,
    f0, f1, pid, L, NC, G, UG, share, H,
    Q: gl.constexpr, P: gl.constexpr, N: gl.constexpr, ST: gl.constexpr, SPLIT: gl.constexpr,
    HAS_INIT: gl.constexpr, HAS_D: gl.constexpr, HAS_Z: gl.constexpr,
):  # fmt: skip
    """Head ``w`` of each unit."""
    dtype: gl.constexpr = sX.dtype
    mm: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Q, 16])
    mp: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 16])
    mn: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mp, 2)
    left_n: gl.constexpr = gl.DotOperandLayout(0, mn, 2)
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    qi = gl.arange(0, Q, layout=gl.SliceLayout(1, mm))
    qj = gl.arange(0, Q, layout=gl.SliceLayout(0, mm))
    vi = gl.arange(0, 2 * Q, layout=flat)
    pr = gl.arange(0, P, layout=gl.SliceLayout(1, mn))
    nn = gl.arange(0, N, layout=gl.SliceLayout(0, mn))
    zero = gl.zeros([Q, P], gl.float32, layout=mp)
    pn = pr[:, None] * N + nn[None, :]
    sSw = sS.index(w)
    sYw = sY.index(w)
    n = 0
    for u in range(f0 // NC, (f1 - 1) // NC + 1):
        b, g, h0 = unit_of(u, G, UG, share)
        h = min(h0 + w, H - 1)
        valid = h0 + w < (g + 1) * share
        cs = max(f0 - u * NC, 0)
        ce = min(f1 - u * NC, NC)
        S = gl.zeros([P, N], gl.float32, layout=mn)
        if cs > 0:
            S = gl.load(starts + (pid * 2 + w).to(gl.int64) * (P * N) + pn)
        else:
            if HAS_INIT:
                S = gl.load(init + (b * H + h).to(gl.int64) * (P * N) + pn)
        if HAS_D:
            d = gl.load(D + h // SPLIT).to(gl.float32)
        pv = vec + (b * (H // SPLIT) + h // SPLIT).to(gl.int64) * NC * (2 * Q) + vi
        sV.index(w * 2 + (n & 1)).store(gl.load(pv + cs * 2 * Q))
        following = gl.load(pv + min(cs + 1, ce - 1) * (2 * Q))
        for c in range(cs, ce):
            k = n % ST
            sVk = sV.index(w * 2 + (n & 1))
            sXk = sX.index(k * 2 + w)
            ci = sVk.slice(0, Q).load(gl.SliceLayout(1, mm))
            cj = sVk.slice(Q, Q).load(gl.SliceLayout(0, mm))
            ej = sVk.slice(Q - 1, 1).load(gl.SliceLayout(0, mm))
            whole = gl.exp2(sVk.slice(Q - 1, 1).load(gl.SliceLayout(1, mn)))
            sSw.store(S.to(dtype))
            S = S * whole[:, None]
            fence_async_shared()
            mbarrier.wait(full.index(k), (n // ST) & 1)
            acc = warpgroup_mma(sC.index(k), sSw.permute((1, 0)), zero, use_acc=False, is_async=True)
            # Above the diagonal the score is 0 and the exponent positive: bounded, so that the product is 0, not NaN.
            m = gl.exp2(gl.minimum(ci[:, None] - cj[None, :], 80.0)) * sG.index(k).load(mm).to(gl.float32)
            if HAS_D:
                m = gl.where(qi[:, None] == qj[None, :], m + d, m)
            mb = gl.convert_layout(m.to(dtype), left)
            scale = gl.convert_layout(gl.exp2(ci), gl.SliceLayout(1, mp))
            weight = gl.convert_layout(gl.exp2(ej - cj), gl.SliceLayout(0, left_n))
            acc = warpgroup_mma_wait(0, deps=[acc])
            out = warpgroup_mma(mb, sXk, acc * scale[:, None], is_async=True)
            xs = (sXk.permute((1, 0)).load(left_n).to(gl.float32) * weight[None, :]).to(dtype)
            out = warpgroup_mma_wait(0, deps=[out])
            S = warpgroup_mma(xs, sB.index(k), S, is_async=True)
            sV.index(w * 2 + ((n + 1) & 1)).store(following)
            following = gl.load(pv + min(c + 2, ce - 1) * (2 * Q))
            if HAS_Z:
                gate = sZ.index(k * 2 + w).load(mp).to(gl.float32)
                out = out * (gate / (1.0 + gl.exp2(gate * -1.4426950408889634)))
            tma.store_wait(0)
            sYw.store(out.to(dtype))
            fence_async_shared()
            if valid:
                tma.async_copy_shared_to_global(y, [b * L + c * Q, (h0 + w) * P], sYw)
            S = warpgroup_mma_wait(0, deps=[S])
            barrier()
            mbarrier.arrive(empty.index(k), count=1)
            n += 1
        if valid & (ce == NC):
            gl.store(final + (b * H + h).to(gl.int64) * (P * N) + pn, S)
    tma.store_wait(0)


@gluon.jit
def output_gluon_kernel(
    x, B, C, scores, y, z, vec, starts, init, final, D, L, NC, G, UG, share, H, T, K,
    Q: gl.constexpr, P: gl.constexpr, N: gl.constexpr, ST: gl.constexpr, RC: gl.constexpr, RP: gl.constexpr,
    SPLIT: gl.constexpr, HAS_INIT: gl.constexpr, HAS_D: gl.constexpr, HAS_Z: gl.constexpr,
):  # fmt: skip
    """y and the final state. ``SPLIT`` heads of the kernel are one head of the model."""
    pid = gl.program_id(0)
    f0 = piece(pid, K, T)
    f1 = piece(pid + 1, K, T)
    sX = gl.allocate_shared_memory(x.dtype, [ST * 2, Q, P], x.layout)
    sB = gl.allocate_shared_memory(B.dtype, [ST, Q, N], B.layout)
    sC = gl.allocate_shared_memory(C.dtype, [ST, Q, N], C.layout)
    sG = gl.allocate_shared_memory(scores.dtype, [ST, Q, Q], scores.layout)
    sZ = sX
    if HAS_Z:
        sZ = gl.allocate_shared_memory(x.dtype, [ST * 2, Q, P], z.layout)
    sS = gl.allocate_shared_memory(x.dtype, [2, P, N], B.layout)
    sY = gl.allocate_shared_memory(x.dtype, [2, Q, P], y.layout)
    sV = gl.allocate_shared_memory(gl.float32, [4, 2 * Q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(ST):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=2)
    fence_async_shared()
    # Arguments are written in place: a tuple in a variable would turn constants into tensors.
    gl.warp_specialize(
        [
            (output_consumer, (0, y, sX, sB, sC, sG, sZ, sS, sY, sV, full, empty, vec, starts, init, final, D, f0, f1, pid, L, NC, G, UG, share, H, Q, P, N, ST, SPLIT, HAS_INIT, HAS_D, HAS_Z)),  # noqa: E501
            (output_consumer, (1, y, sX, sB, sC, sG, sZ, sS, sY, sV, full, empty, vec, starts, init, final, D, f0, f1, pid, L, NC, G, UG, share, H, Q, P, N, ST, SPLIT, HAS_INIT, HAS_D, HAS_Z)),  # noqa: E501
            (output_producer, (x, B, C, scores, z, sX, sB, sC, sG, sZ, full, empty, f0, f1, L, NC, G, UG, share, Q, P, N, ST, HAS_Z)),  # noqa: E501
        ],
        [4, 1],
        [RC, RP],
    )  # fmt: skip


@gluon.jit
def states_producer(
    x, B, sX, sB, full, empty, last, n, b_column, x_column,
    Q: gl.constexpr, P: gl.constexpr, N: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    for i in range(n):
        s = i % ST
        mbarrier.wait(empty.index(s), ((i // ST) & 1) ^ 1)
        bar = full.index(s)
        mbarrier.expect(bar, (Q * N + 2 * Q * P) * 4)
        row = last - i * 2 * Q
        tma.async_copy_global_to_shared(x, [row, x_column], bar, sX.index(s * 2))
        tma.async_copy_global_to_shared(x, [row, x_column + P], bar, sX.index(s * 2 + 1))
        tma.async_copy_global_to_shared(B, [row, b_column], bar, sB.index(s))


@gluon.jit
def states_consumer(
    w: gl.constexpr, sX, sB, full, empty, vec, added, decays, n, c1, b, h0, pid, NC, H,
    Q: gl.constexpr, P: gl.constexpr, N: gl.constexpr, ST: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Two chunks at a time, from the last to the first, so that the sum needs no rescaling."""
    dtype: gl.constexpr = sX.dtype
    mn: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    left_n: gl.constexpr = gl.DotOperandLayout(0, mn, 2)
    row: gl.constexpr = gl.SliceLayout(0, left_n)
    pr = gl.arange(0, P, layout=gl.SliceLayout(1, mn))
    nn = gl.arange(0, N, layout=gl.SliceLayout(0, mn))
    q = gl.arange(0, 2 * Q, layout=row)
    at = gl.where(q < Q, q + Q, q + 2 * Q)
    h = min(h0 + w, H - 1)
    pv = vec + (b * (H // SPLIT) + h // SPLIT).to(gl.int64) * NC * (2 * Q) + (c1 - 2) * (2 * Q)
    S = gl.zeros([P, N], gl.float32, layout=mn)
    after = 0.0
    cj = gl.load(pv + at)
    e0 = gl.load(pv + (Q - 1))
    e1 = gl.load(pv + (3 * Q - 1))
    for i in range(n):
        k = i % ST
        weight = gl.exp2(gl.where(q < Q, after + e1 + e0, after + e1) - cj)
        after += e0 + e1
        pv -= gl.where(i + 1 < n, 4 * Q, 0)
        cj = gl.load(pv + at)
        e0 = gl.load(pv + (Q - 1))
        e1 = gl.load(pv + (3 * Q - 1))
        mbarrier.wait(full.index(k), (i // ST) & 1)
        xs = (sX.index(k * 2 + w).permute((1, 0)).load(left_n).to(gl.float32) * weight[None, :]).to(dtype)
        S = warpgroup_mma(xs, sB.index(k), S, is_async=True)
        S = warpgroup_mma_wait(0, deps=[S])
        barrier()
        mbarrier.arrive(empty.index(k), count=1)
    gl.store(added + (pid * 2 + w).to(gl.int64) * (P * N) + pr[:, None] * N + nn[None, :], S)
    gl.store(decays + pid * 2 + w, after)


@gluon.jit
def states_gluon_kernel(
    x, B, vec, added, decays, L, NC, G, UG, share, H, T, K,
    Q: gl.constexpr, P: gl.constexpr, N: gl.constexpr, ST: gl.constexpr, RC: gl.constexpr, RP: gl.constexpr,
    SPLIT: gl.constexpr, J: gl.constexpr, ALL: gl.constexpr,
):  # fmt: skip
    """added fp32 [K J, 2, P, N], decays [K J, 2]: what each piece's part of its last unit adds.

    Pieces that end a unit are left out, but for ALL. J programs share a piece; one that is left without chunks writes
    nothing.
    """
    slot = gl.program_id(0)
    pid = slot // J
    j = slot % J
    f1 = piece(pid + 1, K, T)
    u = (f1 - 1) // NC
    b, g, h0 = unit_of(u, G, UG, share)
    cs = max(piece(pid, K, T) - u * NC, 0)
    pairs = (f1 - u * NC - cs) // 2
    begin = pairs * j // J
    c1 = cs + (pairs * (j + 1) // J) * 2
    n = pairs * (j + 1) // J - begin
    if not ALL:
        n = gl.where(f1 - u * NC == NC, 0, n)
    last = b * L + (c1 - 2) * Q
    if n > 0:
        sX = gl.allocate_shared_memory(x.dtype, [ST * 2, 2 * Q, P], x.layout)
        sB = gl.allocate_shared_memory(B.dtype, [ST, 2 * Q, N], B.layout)
        full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
        for k in gl.static_range(ST):
            mbarrier.init(full.index(k), count=1)
            mbarrier.init(empty.index(k), count=2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (states_consumer, (0, sX, sB, full, empty, vec, added, decays, n, c1, b, h0, slot, NC, H, Q, P, N, ST, SPLIT)),  # noqa: E501
                (states_consumer, (1, sX, sB, full, empty, vec, added, decays, n, c1, b, h0, slot, NC, H, Q, P, N, ST, SPLIT)),  # noqa: E501
                (states_producer, (x, B, sX, sB, full, empty, last, n, g * N, h0 * P, Q, P, N, ST)),
            ],
            [4, 1],
            [RC, RP],
        )  # fmt: skip


@triton.jit
def carry_pieces_kernel(
    added, decays, init, starts, NC, G, UG, share, H, T, K,
    PN: tl.constexpr, BLOCK: tl.constexpr, HAS_INIT: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """starts fp32 [K, 2, P, N]: the state at the start of each piece that begins inside a unit."""
    pid = tl.program_id(0).to(tl.int64)
    i, rest = pid % (PN // BLOCK), pid // (PN // BLOCK)
    w, u = rest % 2, rest // 2
    o = i * BLOCK + tl.arange(0, BLOCK)
    bg = u // UG
    h = tl.minimum((bg % G) * share + (u % UG) * 2 + w, H - 1)
    state = tl.zeros([BLOCK], tl.float32)
    if HAS_INIT:
        state = tl.load(init + ((bg // G) * H + h) * PN + o)
    k = u * NC * K // T
    if ((k + 1) * (T // 2) // K) * 2 <= u * NC:
        k += 1
    start = (k * (T // 2) // K) * 2
    while start < (u + 1) * NC:
        following = ((k + 1) * (T // 2) // K) * 2
        if start > u * NC:
            tl.store(starts + (k * 2 + w) * PN + o, state)
        if following < (u + 1) * NC:
            pairs = (following - tl.maximum(start, u * NC)) // 2
            for j in tl.static_range(J):
                if pairs * (j + 1) // J > pairs * j // J:
                    at = (k * J + j) * 2 + w
                    state = state * tl.exp2(tl.load(decays + at)) + tl.load(added + at * PN + o)
        start = following
        k += 1


def descriptor(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Copies of [rows, columns] of ``t``, whose axes but the last two are rows and whose last two are columns."""
    shape = [t.shape[0] * t.shape[1], t.shape[2] * t.shape[3]]
    return TensorDescriptor(t, shape, [t.stride(1), 1], [rows, columns], layout_of(rows, columns, t.dtype))


@functools.cache
def layout_of(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a tile lies in shared memory; making it takes longer than a launch's other arguments."""
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for([rows, columns], kinds[dtype])


def copyable(t: Tensor) -> bool:
    """Whether ``descriptor`` can describe [b, L, heads, width]: rows at one stride, aligned to 16 bytes."""
    b, L, _, width = t.shape
    return (
        t.stride(3) == 1
        and (t.shape[2] == 1 or t.stride(2) == width)
        and (b == 1 or t.stride(0) == L * t.stride(1))
        and t.stride(1) * t.element_size() % 16 == 0
        and t.data_ptr() % 16 == 0
        and t.shape[0] * L < 1 << 31
    )


def refusal(x: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, *, layout: bool = True) -> str | None:
    """Why this form cannot take such tensors; None if it can. ``layout``: as they lie, not after a copy."""
    b, L, _, P = x.shape
    if x.dtype not in (torch.bfloat16, torch.float16) or B.dtype != x.dtype or C.dtype != x.dtype:
        return "x, B and C are not all bfloat16 or all float16"
    if P % WIDTH or B.shape[3] not in (64, 128):
        return f"head_dim {P} is no multiple of {WIDTH} or d_state {B.shape[3]} is neither 64 nor 128"
    if b > 1 and L % (2 * CHUNK):
        return f"{b} rows of {L} tokens, which is no multiple of {2 * CHUNK}"
    if D is not None and D.dim() == 2:
        return "D is per channel"
    if z is not None and z.dtype != x.dtype:
        return f"z is {z.dtype} and x {x.dtype}"
    if layout and not all(copyable(t) for t in (x, B, C, x if z is None else z)):
        return "x, B, C or z is not laid out in rows of one stride and 16-byte alignment"
    return None


def forward(
    x: Tensor, steps: Steps, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, init_state: Tensor | None,
    k: Hopper, *, starts: Tensor | None = None, keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y and the final state of inputs that :func:`refusal` accepts.

    Args:
        starts: the states before the pieces fp32 [K or more, 2, 64, N], of a forward with the same ``pieces``.
        keep: written to be such, if it has room for them.
    """
    s = Sizes.of(x, B, CHUNK)
    even = Sizes(s.b, -(-s.L // (2 * CHUNK)) * 2 * CHUNK, s.H, s.P, s.G, s.N, CHUNK)
    split = s.P // WIDTH
    heads, share = s.H * split, s.H // s.G * split
    NC, UG = even.NC, triton.cdiv(share, 2)
    units = s.b * s.G * UG
    T = units * NC
    K = min(k.pieces, T // 2)
    device, f32 = x.device, torch.float32
    vec = prepare(steps, s, chunks=NC, fold=True)
    scores = segment_scores(B, C, s, x.dtype, chunks=NC)
    y = torch.empty(x.shape, device=device, dtype=x.dtype)
    final = torch.empty(s.b, s.H, s.P, s.N, device=device, dtype=f32)
    J = k.state_parts
    init = final if init_state is None else init_state.to(f32).contiguous()
    sizes = (s.L, NC, s.G, UG, share, heads, T, K)
    cut = {"Q": CHUNK, "P": WIDTH, "N": s.N, "SPLIT": split}
    xw = x.view(s.b, s.L, heads, WIDTH) if split > 1 else x
    yw = y.view(s.b, s.L, heads, WIDTH)
    known = starts is not None and starts.shape[0] >= K
    if not known:
        starts = keep
        if keep is None or keep.shape[0] < K:
            starts = torch.empty(K, 2, WIDTH, s.N, device=device, dtype=f32)
    if units != K and not known:
        added = torch.empty(K * J, 2, WIDTH, s.N, device=device, dtype=f32)
        decays = torch.empty(K * J, 2, device=device, dtype=f32)
        launch(
            states_gluon_kernel, K * J, descriptor(xw, 2 * CHUNK, WIDTH), descriptor(B, 2 * CHUNK, s.N), vec, added,
            decays, *sizes, **cut,
            ST=k.state_stages, RC=k.state_registers, RP=24, J=J, ALL=False, num_warps=4,
        )  # fmt: skip
        block = 512
        launch(
            carry_pieces_kernel, units * 2 * (WIDTH * s.N // block), added, decays, init, starts, *sizes[1:],
            PN=WIDTH * s.N, BLOCK=block, HAS_INIT=init_state is not None, J=J, num_warps=4,
        )  # fmt: skip
    flat = scores.view(s.b, s.G * NC * CHUNK, 1, CHUNK)
    zw = xw if z is None else z.view(s.b, s.L, heads, WIDTH)
    launch(
        output_gluon_kernel, K, descriptor(xw, CHUNK, WIDTH), descriptor(B, CHUNK, s.N), descriptor(C, CHUNK, s.N),
        descriptor(flat, CHUNK, CHUNK), descriptor(yw, CHUNK, WIDTH), descriptor(zw, CHUNK, WIDTH), vec, starts,
        init, final, x if D is None else D, *sizes, **cut, ST=k.out_stages if z is None else k.gated_stages,
        RC=k.out_registers, RP=24, HAS_INIT=init_state is not None, HAS_D=D is not None, HAS_Z=z is not None,
        num_warps=4,
    )  # fmt: skip
    return y, final
