"""Masks from position ids, in plain torch."""

from __future__ import annotations

import torch


def packing_mask(mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Forbid attention between sequences that are packed in one row.

    A new sequence starts wherever a position is not its predecessor plus one. Inside a sequence ``mask`` stays as it
    is (positions that follow on keep the order of the row).

    Args:
        mask: [B, 1, S, S], bool (True = attend) or additive.
        positions: [B or 1, S] integers.

    Returns:
        a new mask of the same shape and dtype.
    """
    jump = positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1
    sequence = jump.cumsum(-1).expand(mask.shape[0], -1)
    together = (sequence[:, :, None] == sequence[:, None, :])[:, None]
    if mask.dtype == torch.bool:
        return mask & together
    return mask.masked_fill(~together, torch.finfo(mask.dtype).min)
