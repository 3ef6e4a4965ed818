"""The canonical ops as functions with defaults, for direct use: differentiable, traceable, on any device.

They run the ops' reference implementation; kernels of a target come in through the compiled doors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from latentscan.ir.ops import attention as _attention  # noqa: F401  (registers the ops)
from latentscan.ir.ops import ssm as _ssm  # noqa: F401


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, padding: Tensor | None = None,
    sinks: Tensor | None = None, cu_seqlens: Tensor | None = None, kind: str = "causal", window: int | None = None,
    scale: float | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Grouped attention: q [B, H, S, Dk], k [B, Hkv, T, Dk], v [B, Hkv, T, Dv] -> [B, H, S, Dv].

    ``kind="causal"`` is aligned at the bottom right: the last query sees the last key. ``scale`` defaults to
    Dk^-1/2. See :mod:`latentscan.kernels.reference.attention` for masks, windows, sinks and packing.

    Raises:
        KernelError: shapes or options that do not fit, with the values.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.latentscan.attention.default(
        q, k, v, mask, padding, sinks, cu_seqlens, kind=kind, window=window, scale=scale, softcap=softcap
    )


def latent_attention(
    q_latent: Tensor, q_rope: Tensor | None, latent: Tensor, k_rope: Tensor | None, *, scale: float,
    mask: Tensor | None = None, padding: Tensor | None = None, sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None, kind: str = "causal", window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Absorbed latent attention: q_latent [B, H, S, C], q_rope [B, H, S, R], latent [B, T, C] (also the value),
    k_rope [B, 1 or Hkv, T, R] -> [B, H, S, C]. ``scale`` is the one of the un-absorbed attention.

    Raises:
        KernelError: shapes or options that do not fit, with the values.
    """
    return torch.ops.latentscan.latent_attention.default(
        q_latent, q_rope, latent, k_rope, mask, padding, sinks, cu_seqlens,
        kind=kind, window=window, scale=scale, softcap=softcap,
    )  # fmt: skip


def chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, init_state: Tensor | None = None, chunk_size: int | None = None,
    seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The Mamba-2 scan (SSD): x [b, L, H, P], dt [b, L, H], A [H] (<= 0), B, C [b, L, G, N] -> y like x.

    Args:
        D: [H] or [H, P]. z: gate like x. dt_bias: [H]. init_state: [b, H, P, N], fp32.
        chunk_size: free; it changes only speed and rounding. Default 64.
        seq_idx: [b, L] number of the sequence of each token; cu_seqlens: [n + 1], batch 1. At most one of them.
        dt_softplus, dt_limit: dt' = clamp(softplus(dt + dt_bias), limit).
        return_final_state: also return the state after the last token, [b, H, P, N], fp32, differentiable.

    Raises:
        KernelError: shapes or options that do not fit, with the values.
    """
    y, state = torch.ops.latentscan.chunk_scan.default(
        x, dt, A, B, C, D, z, dt_bias, init_state, seq_idx, cu_seqlens,
        chunk_size=64 if chunk_size is None else chunk_size, dt_softplus=dt_softplus,
        dt_min=float(dt_limit[0]), dt_max=float(dt_limit[1]),
    )  # fmt: skip
    return (y, state) if return_final_state else y


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, init_state: Tensor | None = None,
    seq_idx: Tensor | None = None, activation: str | None = None, return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Depthwise causal convolution over tokens: x [b, L, D], weight [D, W] -> y [b, L, D].

    Args:
        init_state: [b, D, W - 1], the inputs before the first token. activation: None or "silu".
        return_final_state: also return [b, D, W - 1], the last inputs.
    """
    y, state = torch.ops.latentscan.causal_conv1d.default(
        x, weight, bias, init_state, seq_idx, activation=activation or "none"
    )
    return (y, state) if return_final_state else y


def state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One decode step of the scan: state [b, H, P, N], x [b, H, P], dt [b, H], B, C [b, G, N] -> (y, new state)."""
    return torch.ops.latentscan.state_update.default(
        state, x, dt, A, B, C, D, z, dt_bias,
        dt_softplus=dt_softplus, dt_min=float(dt_limit[0]), dt_max=float(dt_limit[1]),
    )  # fmt: skip


def gated_rms_norm(
    x: Tensor, weight: Tensor, *, z: Tensor | None = None, eps: float = 1e-5, group_size: int | None = None,
    norm_before_gate: bool = False,
) -> Tensor:  # fmt: skip
    """RMS norm over groups of ``group_size`` features (default: all of them), gated by silu(z) before or after."""
    return torch.ops.latentscan.gated_rms_norm.default(
        x, z, weight, eps=eps, group_size=x.shape[-1] if group_size is None else group_size,
        norm_before_gate=norm_before_gate,
    )  # fmt: skip
