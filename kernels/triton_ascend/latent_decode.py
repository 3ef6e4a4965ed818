"""Latent attention of one query token on an Ascend NPU; the function is that of kernels/reference/attention.py."""

from __future__ import annotations

import torch
from torch import Tensor

from latentscan.kernels.triton_ascend.launch import Kernel, launch
from latentscan.kernels.triton_ascend.tiles import DEFAULT_CHIP, DecodeTiles, decode_tiles, power

SPLIT = Kernel("latent_decode_kernels", "split_kernel")
JOIN = Kernel("latent_decode_kernels", "join_kernel")
UNITS = 48  # enough splits to give every vector core one


def refusal(q_latent: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, chip: str = DEFAULT_CHIP) -> str | None:
    """Why the kernel does not take such tensors, or None."""
    if q_latent.dtype not in (torch.float16, torch.bfloat16):
        return f"queries are {q_latent.dtype}; the Ascend kernels take float16 and bfloat16"
    if q_latent.shape[2] != 1:
        return f"{q_latent.shape[2]} query tokens; the decode kernel takes one"
    if k_rope.shape[1] != 1:
        return f"the rotary key has {k_rope.shape[1]} heads; the decode kernel takes one"
    if decode_tiles(latent.shape[2], k_rope.shape[3], chip) is None:
        return f"latent {latent.shape[2]} and rope_dim {k_rope.shape[3]} fit no tile of {chip}"
    return None


def _near(t: Tensor, count: int) -> Tensor:
    """``t`` with neighbouring elements in its last axis, and ``count`` rows of it within 2^31 elements."""
    return t if t.stride(-1) == 1 and count * t.stride(1) < 1 << 31 else t.contiguous()


def latent_decode(
    q_latent: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, padding: Tensor | None = None,
    *, scale: float, chip: str = DEFAULT_CHIP, tiles: DecodeTiles | None = None, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """[b, H, 1, C] of q_latent [b, H, 1, C], q_rope [b, H, 1, R], latent [b, T, C], k_rope [b, 1, T, R].

    Args:
        padding: [b, T], nonzero at real keys. A row without any gives zeros.
        splits: of the keys; by default enough for every core.

    Raises:
        ValueError: see :func:`refusal`.
    """
    if reason := refusal(q_latent, q_rope, latent, k_rope, chip):
        raise ValueError(reason)
    b, H, _, C = q_latent.shape
    T, R = latent.shape[1], k_rope.shape[3]
    tiles = tiles or decode_tiles(C, R, chip)
    assert tiles is not None
    # What is multiplied in 32 bits, the step between heads and between keys of a tile, is kept within them.
    q, r = (_near(t[:, :, 0], max(H, tiles.heads)) for t in (q_latent, q_rope))
    k = k_rope[:, 0]
    k, latent = (_near(t, tiles.keys) for t in (k, latent))
    blocks = -(-H // tiles.heads)
    splits = splits or max(1, min(-(-T // tiles.keys), UNITS // (b * blocks) or 1))
    per = -(-T // (splits * tiles.keys)) * tiles.keys
    splits = max(1, -(-T // per)) if per else 1
    part = torch.empty(b, splits, H, C, dtype=torch.float32, device=q.device)
    best, mass = torch.empty(2, b, splits, H, dtype=torch.float32, device=q.device)
    out = torch.empty(b, H, C, dtype=q_latent.dtype, device=q.device)
    visible = best if padding is None else (padding != 0).float().contiguous()
    launch(
        SPLIT, b * splits * blocks, q_latent=q, q_rope=r, latent=latent, k_rope=k, visible=visible, part=part,
        best=best, mass=mass, H=H, T=T, PER=per, SPLITS=splits, scale=float(scale), q_sb=q.stride(0), q_sh=q.stride(1),
        r_sb=r.stride(0), r_sh=r.stride(1), l_sb=latent.stride(0), l_st=latent.stride(1), k_sb=k.stride(0),
        k_st=k.stride(1), C=C, R=R, BH=tiles.heads, BT=tiles.keys, BC=tiles.latent, BR=tiles.rope,
        PADDED=padding is not None,
    )  # fmt: skip
    launch(JOIN, b * H, part=part, best=best, mass=mass, out=out, H=H, SPLITS=splits, C=C, BC=power(C))
    return out[:, :, None]
