"""Gated RMS normalisation of a Mamba mixer in plain torch, and its backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from latentscan.kernels.reference.ssm_common import absent, math_dtype, silu_backward


def _grouped(x: Tensor, group_size: int) -> Tensor:
    if group_size < 1 or x.shape[-1] % group_size:
        raise ValueError(f"group_size {group_size} does not divide {x.shape[-1]} channels")
    return x.unflatten(-1, (-1, group_size))


def gated_rms_norm(
    x: Tensor, z: Tensor | None, weight: Tensor, *, eps: float, group_size: int, norm_before_gate: bool
) -> Tensor:
    """RMS norm over groups of channels, gated by ``silu(z)`` before or after it.

    ``norm_before_gate``: ``weight · rms(x) · silu(z)``; otherwise ``weight · rms(x · silu(z))``.

    Args:
        x: [..., D]. z: as x, or None for no gate. weight: [D].
        eps: added to the mean square. group_size: channels that share one mean square; divides D.

    Returns:
        as x, in its dtype.
    """
    dtype = math_dtype(x)
    gate = None if z is None else F.silu(z.to(dtype))
    value = x.to(dtype)
    if gate is not None and not norm_before_gate:
        value = value * gate
    groups = _grouped(value, group_size)
    out = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight.to(dtype)
    if gate is not None and norm_before_gate:
        out = out * gate
    return out.to(x.dtype).contiguous()


def gated_rms_norm_backward(
    dy: Tensor | None, x: Tensor, z: Tensor | None, weight: Tensor,
    *, eps: float, group_size: int, norm_before_gate: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients (dx, dz, dweight) of :func:`gated_rms_norm`; dz is empty without a gate."""
    dtype = math_dtype(x)
    xs, w = x.to(dtype), weight.to(dtype)
    dout = torch.zeros_like(xs) if dy is None else dy.to(dtype)
    zs = None if z is None else z.to(dtype)
    value = xs if zs is None or norm_before_gate else xs * F.silu(zs)
    groups = _grouped(value, group_size)
    inverse = torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    unit = (groups * inverse).flatten(-2)
    dz = absent(x)
    if zs is not None and norm_before_gate:
        dz = silu_backward(dout * unit * w, zs)
        dout = dout * F.silu(zs)
    dweight = (dout * unit).flatten(0, -2).sum(0) if x.dim() > 1 else dout * unit
    dunit = _grouped(dout * w, group_size)
    shared = (dunit * groups).mean(-1, keepdim=True) * inverse.square()
    dvalue = ((dunit - groups * shared) * inverse).flatten(-2)
    if zs is not None and not norm_before_gate:
        dz = silu_backward(dvalue * xs, zs)
        dvalue = dvalue * F.silu(zs)
    dz = dz if z is None else dz.to(z.dtype).contiguous()
    return dvalue.to(x.dtype).contiguous(), dz, dweight.to(weight.dtype)
