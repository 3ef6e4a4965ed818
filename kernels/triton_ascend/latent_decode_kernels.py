"""Device code of latent attention for one query token: the keys in splits, then the splits joined."""

from __future__ import annotations

import triton.language as tl

from latentscan.kernels.triton_ascend.common import kernel


@kernel
def split_kernel(
    q_latent, q_rope, latent, k_rope, visible, part, best, mass, first, H, T, PER, SPLITS, scale,
    q_sb, q_sh, r_sb, r_sh, l_sb, l_st, k_sb, k_st,
    C: tl.constexpr, R: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """One split of PER keys: part fp32 [b, SPLITS, H, C] the weighted sum, best and mass fp32 [b, SPLITS, H].

    visible fp32 [b, T] marks real keys, if PADDED. Unit: (b, split, BH heads).
    """
    pid = tl.program_id(0).to(tl.int64) + first
    blocks = (H + BH - 1) // BH
    i = pid % blocks
    s = (pid // blocks) % SPLITS
    b = pid // blocks // SPLITS
    h = i * BH + tl.arange(0, BH)
    t = tl.arange(0, BT)
    c = tl.arange(0, BC)
    r = tl.arange(0, BR)
    q_at = q_latent + b * q_sb + h[:, None] * q_sh + c[None, :]
    q_mask = (h < H)[:, None] & (c < C)[None, :]
    r_at = q_rope + b * r_sb + h[:, None] * r_sh + r[None, :]
    r_mask = (h < H)[:, None] & (r < R)[None, :]
    top = tl.zeros([BH], tl.float32) - 1.0e30
    weight = tl.zeros([BH], tl.float32)
    total = tl.zeros([BH, BC], tl.float32)
    for k in range(0, PER, BT):
        start = s * PER + k
        there = t < T - start
        keys = tl.load(
            latent + (b * l_sb + start * l_st) + t[:, None] * l_st + c[None, :],
            mask=there[:, None] & (c < C)[None, :], other=0.0,
        )  # fmt: skip
        turned = tl.load(
            k_rope + (b * k_sb + start * k_st) + t[:, None] * k_st + r[None, :],
            mask=there[:, None] & (r < R)[None, :], other=0.0,
        )  # fmt: skip
        # The queries are loaded for every product: a left operand may be overwritten.
        score = tl.dot(tl.load(q_at, mask=q_mask, other=0.0), tl.trans(keys))
        score += tl.dot(tl.load(r_at, mask=r_mask, other=0.0), tl.trans(turned))
        seen = tl.where(there, 1.0, 0.0)
        if PADDED:
            seen = tl.load(visible + b * T + start + t, mask=there, other=0.0)
        score = tl.where((seen > 0.0)[None, :], score * scale, -1.0e30)
        higher = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp(top - higher)
        p = tl.exp(score - higher[:, None]) * seen[None, :]
        weight = weight * shrink + tl.sum(p, 1)
        total = total * shrink[:, None] + tl.dot(p.to(keys.dtype), keys)
        top = higher
    at = (b * SPLITS + s) * H + h
    tl.store(best + at, top, mask=h < H)
    tl.store(mass + at, weight, mask=h < H)
    tl.store(part + at[:, None] * C + c[None, :], total, mask=q_mask)


@kernel
def join_kernel(part, best, mass, out, first, H, SPLITS, C: tl.constexpr, BC: tl.constexpr):
    """out [b, H, C] from the splits; zeros where no key is visible. Unit: (b, head)."""
    pid = tl.program_id(0).to(tl.int64) + first
    h = pid % H
    b = pid // H
    c = tl.arange(0, BC)
    top = -1.0e30
    for s in range(SPLITS):
        top = tl.maximum(top, tl.load(best + (b * SPLITS + s) * H + h))
    weight = 0.0
    total = tl.zeros([BC], tl.float32)
    for s in range(SPLITS):
        at = (b * SPLITS + s) * H + h
        factor = tl.exp(tl.load(best + at) - top)
        weight += tl.load(mass + at) * factor
        total += tl.load(part + at * C + c, mask=c < C, other=0.0) * factor
    total = total / tl.maximum(weight, 1.0e-30)
    tl.store(out + pid * C + c, total.to(out.dtype.element_ty), mask=c < C)
