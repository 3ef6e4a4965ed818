"""A Mamba-2 mixer between its two projections by Triton kernels, composed as in the reference.

:mod:`latentscan.kernels.reference.ssm_mixer` says what is computed. Gradients of gate and convolution are written where
they belong in the projection's gradient.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from latentscan.kernels.reference import ssm, ssm_mixer
from latentscan.kernels.triton.causal_conv1d import causal_conv1d, causal_conv1d_backward
from latentscan.kernels.triton.chunk_configs import starts_shape
from latentscan.kernels.triton.gated_rms_norm import gated_rms_norm, gated_rms_norm_backward


def _scan(tiles: str, keep: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The chunk scan's kernels; the reference for sizes that they refuse."""
    module: Any = importlib.import_module("latentscan.kernels.triton.chunk_scan")

    def forward(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *args: Any, **options: Any) -> Any:
        if not module.refusal(x, B):
            return module.chunk_scan(x, dt, A, B, *args, **options, tiles=tiles, keep_starts=keep)
        y, state = ssm.chunk_scan(x, dt, A, B, *args, **options)
        if not keep:
            return y, state
        shape = starts_shape(x.device, x.dtype, x.shape[0] * x.shape[1], x.shape[3], B.shape[3])
        return y, state, torch.empty(shape, device=x.device, dtype=torch.float32)

    def backward(
        dy: Any, dstate: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *args: Any,
        starts: Tensor | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        if module.refusal(x, B):
            return ssm.chunk_scan_backward(dy, dstate, x, dt, A, B, *args, **options)
        return module.chunk_scan_backward(dy, dstate, x, dt, A, B, *args, **options, tiles=tiles, starts=starts)

    return forward, backward


@functools.cache
def parts(tiles: str = "", keep_starts: bool = False) -> ssm_mixer.Parts:
    """``tiles``: a user's table for the scan, as its kernels take it. ``keep_starts``: as its forward takes it."""
    scan, scan_backward = _scan(tiles, keep_starts)
    return ssm_mixer.Parts(
        causal_conv1d, causal_conv1d_backward, scan, scan_backward, gated_rms_norm, gated_rms_norm_backward,
        writes=True, keeps=True,
    )  # fmt: skip


def mamba_mixer(*args: Any, tiles: str = "", keep_starts: bool = False, **options: Any) -> Any:
    """See :func:`latentscan.kernels.reference.ssm_mixer.mamba_mixer`; ``keep_starts``: a fourth result."""
    return ssm_mixer.mamba_mixer(*args, **options, parts=parts(tiles, keep_starts))


def mamba_mixer_backward(*args: Any, tiles: str = "", **options: Any) -> Any:
    """See :func:`latentscan.kernels.reference.ssm_mixer.mamba_mixer_backward`."""
    return ssm_mixer.mamba_mixer_backward(*args, **options, parts=parts(tiles))
