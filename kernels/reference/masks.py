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


def fit_padding(padding: torch.Tensor, keys: int) -> torch.Tensor:
    """A padding mask [B, n] as [B, keys]: what is missing at the end is padding, what is too much is cut off.

    This is what transformers does with a mask that does not cover the keys; it is never broadcast.
    """
    given = padding.shape[1]
    if given >= keys:
        return padding[:, :keys].clone()
    return torch.nn.functional.pad(padding, (0, keys - given))


def token_positions(positions: torch.Tensor, like: torch.Tensor, batch_dim: int, seq_dim: int) -> torch.Tensor:
    """Position ids [B or 1, S] as they are cached: int32 [B, S], with B and S those of ``like``."""
    shape = like.shape[batch_dim], like.shape[seq_dim]
    return positions.to(torch.int32).expand(shape).clone(memory_format=torch.contiguous_format)
