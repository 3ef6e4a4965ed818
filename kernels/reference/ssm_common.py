"""What the state-space references share: the dtype of the mathematics, the time step, sequence boundaries, gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SOFTPLUS_THRESHOLD = 20.0  # above it softplus is linear, as in torch
ACTIVATIONS = ("none", "silu")


def math_dtype(x: Tensor) -> torch.dtype:
    """The dtype that states and accumulations have: fp32, or fp64 if ``x`` is fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_limits(dt_min: float, dt_max: float) -> None:
    """Refuse limits that would let the state of a scan with ``A <= 0`` grow.

    Raises:
        ValueError: not ``0 <= dt_min <= dt_max``.
    """
    if not 0.0 <= dt_min <= dt_max:
        raise ValueError(f"dt_min {dt_min} and dt_max {dt_max} must satisfy 0 <= dt_min <= dt_max")


def time_step(
    dt: Tensor, dt_bias: Tensor | None, dtype: torch.dtype, *, softplus: bool, minimum: float, maximum: float
) -> Tensor:
    """``clamp(softplus(dt + dt_bias), minimum, maximum)`` in ``dtype``; the softplus only if asked for.

    Args:
        dt: any shape. dt_bias: broadcastable to it, or None.
        minimum, maximum: the limits of the step.
    """
    step = dt.to(dtype)
    if dt_bias is not None:
        step = step + dt_bias.to(dtype)
    if softplus:
        step = F.softplus(step, threshold=SOFTPLUS_THRESHOLD)
    return step.clamp(minimum, maximum)


def time_step_backward(
    grad: Tensor, dt: Tensor, dt_bias: Tensor | None, *, softplus: bool, minimum: float, maximum: float
) -> Tensor:
    """Gradient of :func:`time_step` with respect to ``dt + dt_bias``, in the dtype and shape of ``grad``."""
    raw = dt.to(grad.dtype)
    if dt_bias is not None:
        raw = raw + dt_bias.to(grad.dtype)
    step = F.softplus(raw, threshold=SOFTPLUS_THRESHOLD) if softplus else raw
    grad = torch.where((step >= minimum) & (step <= maximum), grad, 0.0)
    if softplus:
        grad = torch.where(raw > SOFTPLUS_THRESHOLD, grad, grad * torch.sigmoid(raw))
    return grad


def segment_numbers(
    seq_idx: Tensor | None, cu_seqlens: Tensor | None, batch: int, length: int, device: torch.device
) -> Tensor | None:
    """Number of the packed sequence that each token belongs to, counted from 0 in every row.

    Args:
        seq_idx: integer [batch, length]; a new sequence starts where the value changes (values may repeat later).
        cu_seqlens: integer [S + 1] cumulative lengths of sequences packed in one row, with or without the leading 0.
            Tokens after the last one form a sequence of their own.

    Returns:
        int64 [batch, length], or None if nothing is packed.

    Raises:
        ValueError: shapes do not fit, or ``cu_seqlens`` with more than one row.
    """
    if seq_idx is None and cu_seqlens is None:
        return None
    starts = torch.zeros(batch, length, dtype=torch.bool, device=device)
    if seq_idx is not None:
        if tuple(seq_idx.shape) != (batch, length):
            raise ValueError(f"seq_idx has shape {tuple(seq_idx.shape)}, expected {(batch, length)}")
        starts[:, 1:] |= seq_idx[:, 1:] != seq_idx[:, :-1]
    if cu_seqlens is not None:
        if batch != 1 or cu_seqlens.dim() != 1:
            raise ValueError(
                f"cu_seqlens is one-dimensional and needs one packed row, got shape {tuple(cu_seqlens.shape)} "
                f"and {batch} rows"
            )
        ends = cu_seqlens.to(device=device, dtype=torch.int64)
        number = torch.searchsorted(ends, torch.arange(length, device=device), right=True)
        starts[0, 1:] |= number[1:] != number[:-1]
    return starts.long().cumsum(1)


def silu_backward(grad: Tensor, pre: Tensor) -> Tensor:
    """Gradient of ``silu(pre)``."""
    gate = torch.sigmoid(pre)
    return grad * gate * (1 + pre * (1 - gate))


def heads_of(groups: int, heads: int) -> int:
    """Heads that share one group of B and C.

    Raises:
        ValueError: the heads cannot be shared out evenly.
    """
    if heads % groups:
        raise ValueError(f"{heads} heads cannot share {groups} groups evenly")
    return heads // groups


def absent(like: Tensor) -> Tensor:
    """The empty tensor that a backward function returns for an input that was not given."""
    return like.new_empty(0)
