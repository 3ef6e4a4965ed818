"""A Mamba-2 mixer between its two projections in one function: convolution, scan, gated norm; and its backward.

The parts are arguments, so that every target composes its own kernels in the same way. The backward keeps the
projection's output and the scan's, and computes the convolution again: one cheap kernel instead of a tensor that waits
from forward to backward. Its gradient is one tensor in the layout of the projection's output, never joined from pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from latentscan.kernels.reference import ssm, ssm_conv, ssm_norm
from latentscan.kernels.reference.ssm_common import absent


@dataclass(frozen=True)
class Parts:
    """Kernels of a target, with the signatures of :mod:`latentscan.kernels.reference`.

    ``writes``: the backward of convolution and norm take ``out``, a strided view to write dx (or dz) to. ``keeps``: the
    scan's backward takes ``starts``, which its forward may give as a third result.
    """

    conv: Callable[..., Any] = ssm_conv.causal_conv1d
    conv_backward: Callable[..., Any] = ssm_conv.causal_conv1d_backward
    scan: Callable[..., Any] = ssm.chunk_scan
    scan_backward: Callable[..., Any] = ssm.chunk_scan_backward
    norm: Callable[..., Any] = ssm_norm.gated_rms_norm
    norm_backward: Callable[..., Any] = ssm_norm.gated_rms_norm_backward
    writes: bool = False
    keeps: bool = False


REFERENCE = Parts()


def pieces(projected: Tensor, heads: int, head_dim: int, groups: int, d_state: int) -> tuple[Tensor, Tensor, Tensor]:
    """z [b, L, H·P], the convolution's input [b, L, H·P + 2·G·N] and dt [b, L, H]: views.

    Raises:
        ValueError: the projection has another width.
    """
    inner = heads * head_dim
    sizes = [inner, inner + 2 * groups * d_state, heads]
    if projected.shape[-1] != sum(sizes):
        raise ValueError(f"projected has {projected.shape[-1]} features, expected {' + '.join(map(str, sizes))}")
    z, mixed, dt = projected.split(sizes, -1)
    return z, mixed, dt


def scan_inputs(mixed: Tensor, heads: int, head_dim: int, groups: int, d_state: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [b, L, H, P], B and C [b, L, G, N]: views of the convolution's output."""
    x, B, C = mixed.split([heads * head_dim, groups * d_state, groups * d_state], -1)
    return x.unflatten(-1, (heads, head_dim)), B.unflatten(-1, (groups, d_state)), C.unflatten(-1, (groups, d_state))


def mamba_mixer(
    projected: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, A: Tensor, D: Tensor | None,
    dt_bias: Tensor | None, norm_weight: Tensor | None, seq_idx: Tensor | None = None,
    *, heads: int, head_dim: int, groups: int, d_state: int, activation: str, chunk_size: int, dt_softplus: bool,
    dt_min: float, dt_max: float, eps: float, group_size: int, norm_before_gate: bool, parts: Parts = REFERENCE,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``norm(scan(conv(xBC), dt), z)`` of ``projected = [z | x B C | dt]``.

    Args:
        projected: [b, L, H·P + (H·P + 2·G·N) + H]. conv_weight: [H·P + 2·G·N, W]. conv_bias: the same width.
        A, D, dt_bias: as for :func:`~latentscan.kernels.reference.ssm.chunk_scan`.
        norm_weight: [H·P]; None for a plain gate ``y · silu(z)``.
        seq_idx: [b, L], packed sequences.

    Returns:
        out: [b, L, H·P]. final_state: fp32 [b, H, P, N]. y: [b, L, H, P], the scan's output, which the backward wants;
        empty without a norm. Where ``parts`` keep it, what the scan's backward takes as ``starts``.
    """
    shape = (heads, head_dim, groups, d_state)
    z, mixed, dt = pieces(projected, *shape)
    x, B, C = scan_inputs(parts.conv(mixed, conv_weight, conv_bias, None, seq_idx, activation=activation)[0], *shape)
    gate = z.unflatten(-1, (heads, head_dim)) if norm_weight is None else None
    steps = {"chunk_size": chunk_size, "dt_softplus": dt_softplus, "dt_min": dt_min, "dt_max": dt_max}
    y, final, *kept = parts.scan(x, dt, A, B, C, D, gate, dt_bias, None, seq_idx, None, **steps)
    if norm_weight is None:
        return y.flatten(2), final, absent(projected), *kept
    norm = {"eps": eps, "group_size": group_size, "norm_before_gate": norm_before_gate}
    return parts.norm(y.flatten(2), z, norm_weight, **norm), final, y, *kept


def mamba_mixer_backward(
    dout: Tensor | None, dfinal_state: Tensor | None, y: Tensor,
    projected: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, A: Tensor, D: Tensor | None,
    dt_bias: Tensor | None, norm_weight: Tensor | None, seq_idx: Tensor | None = None,
    *, heads: int, head_dim: int, groups: int, d_state: int, activation: str, chunk_size: int, dt_softplus: bool,
    dt_min: float, dt_max: float, eps: float, group_size: int, norm_before_gate: bool, parts: Parts = REFERENCE,
    starts: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients (dprojected, dconv_weight, dconv_bias, dA, dD, ddt_bias, dnorm_weight); empty for what was None."""
    shape = (heads, head_dim, groups, d_state)
    z, mixed, dt = pieces(projected, *shape)
    dprojected = torch.empty(projected.shape, dtype=projected.dtype, device=projected.device)
    dz, dmixed, ddt = pieces(dprojected, *shape)
    x, B, C = scan_inputs(parts.conv(mixed, conv_weight, conv_bias, None, seq_idx, activation=activation)[0], *shape)
    gate, dy, dnorm = None, dout, absent(projected)
    if norm_weight is None:
        gate = z.unflatten(-1, (heads, head_dim))
    else:
        norm = {"eps": eps, "group_size": group_size, "norm_before_gate": norm_before_gate}
        more = {"out": dz} if parts.writes else {}
        dy, made, dnorm = parts.norm_backward(dout, y.flatten(2), z, norm_weight, **norm, **more)
        if not parts.writes:
            dz.copy_(made)
    dy = None if dy is None else dy.unflatten(-1, (heads, head_dim))
    steps = {"chunk_size": chunk_size, "dt_softplus": dt_softplus, "dt_min": dt_min, "dt_max": dt_max}
    found = {"starts": starts} if parts.keeps else {}
    dx, dstep, dA, dB, dC, dD, dgate, dbias, _ = parts.scan_backward(
        dy, dfinal_state, x, dt, A, B, C, D, gate, dt_bias, None, seq_idx, None, **steps, **found
    )
    if norm_weight is None:
        dz.copy_(dgate.flatten(2))
    ddt.copy_(dstep)
    joined = torch.cat([dx.flatten(2), dB.flatten(2), dC.flatten(2)], -1)
    more = {"out": dmixed} if parts.writes else {}
    made, dweight, dconv_bias, _ = parts.conv_backward(
        joined, None, mixed, conv_weight, conv_bias, None, seq_idx, activation=activation, **more
    )
    if not parts.writes:
        dmixed.copy_(made)
    return dprojected, dweight, dconv_bias, dA, dD, dbias, dnorm
