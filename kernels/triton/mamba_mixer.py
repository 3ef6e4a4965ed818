"""A Mamba-2 mixer between its two projections by Triton kernels, composed as in the reference.

:mod:`latentscan.kernels.reference.ssm_mixer` says what is computed. Gradients of gate and convolution are written where
they belong in the projection's gradient.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from torch import Tensor

from latentscan.kernels.reference import ssm, ssm_mixer
from latentscan.kernels.triton.causal_conv1d import causal_conv1d, causal_conv1d_backward
from latentscan.kernels.triton.gated_rms_norm import gated_rms_norm, gated_rms_norm_backward


def _scan(tiles: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The chunk scan's kernels; the reference for sizes that they refuse, and where this build has none."""
    if importlib.util.find_spec("latentscan.kernels.triton.chunk_scan") is None:
        return ssm.chunk_scan, ssm.chunk_scan_backward
    module: Any = importlib.import_module("latentscan.kernels.triton.chunk_scan")

    def forward(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *args: Any, **options: Any) -> Any:
        if module.refusal(x, B):
            return ssm.chunk_scan(x, dt, A, B, *args, **options)
        return module.chunk_scan(x, dt, A, B, *args, **options, tiles=tiles)

    def backward(dy: Any, dstate: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *args: Any, **options: Any) -> Any:
        if module.refusal(x, B):
            return ssm.chunk_scan_backward(dy, dstate, x, dt, A, B, *args, **options)
        return module.chunk_scan_backward(dy, dstate, x, dt, A, B, *args, **options, tiles=tiles)

    return forward, backward


@functools.cache
def parts(tiles: str = "") -> ssm_mixer.Parts:
    """``tiles``: a user's table for the scan, as its kernels take it."""
    scan, scan_backward = _scan(tiles)
    return ssm_mixer.Parts(
        causal_conv1d, causal_conv1d_backward, scan, scan_backward, gated_rms_norm, gated_rms_norm_backward, writes=True
    )


def mamba_mixer(*args: Any, tiles: str = "", **options: Any) -> Any:
    """See :func:`latentscan.kernels.reference.ssm_mixer.mamba_mixer`."""
    return ssm_mixer.mamba_mixer(*args, **options, parts=parts(tiles))


def mamba_mixer_backward(*args: Any, tiles: str = "", **options: Any) -> Any:
    """See :func:`latentscan.kernels.reference.ssm_mixer.mamba_mixer_backward`."""
    return ssm_mixer.mamba_mixer_backward(*args, **options, parts=parts(tiles))
