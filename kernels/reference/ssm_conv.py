"""Causal depthwise convolution of a Mamba mixer in plain torch: sequence form, backward, single step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from latentscan.kernels.reference.ssm_common import ACTIVATIONS, absent, math_dtype, segment_numbers, silu_backward


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")


def _extended(x: Tensor, init_state: Tensor | None, tail: int, dtype: torch.dtype) -> Tensor:
    """The input after the ``tail`` values before it, [b, tail + L, D]."""
    if init_state is None:
        return F.pad(x.to(dtype), (0, 0, tail, 0))
    if init_state.shape[-1] != tail:
        raise ValueError(f"init_state holds {init_state.shape[-1]} values per channel, the convolution needs {tail}")
    return torch.cat([init_state.to(dtype).transpose(1, 2), x.to(dtype)], 1)


def _segments(x: Tensor, seq_idx: Tensor | None, tail: int) -> Tensor | None:
    """Segment of each extended position, [b, tail + L]; what precedes the row belongs to its first sequence."""
    segment = segment_numbers(seq_idx, None, x.shape[0], x.shape[1], x.device)
    return None if segment is None else F.pad(segment, (tail, 0))


def _tap(extended: Tensor, segments: Tensor | None, tap: int, tail: int) -> tuple[Tensor, Tensor | None]:
    """What weight column ``tap`` multiplies at each token [b, L, D], and where it is the same sequence [b, L, 1]."""
    length = extended.shape[1] - tail
    keep = None
    if segments is not None:
        keep = (segments[:, tap : tap + length] == segments[:, tail:])[..., None]
    window = extended[:, tap : tap + length]
    return (window if keep is None else window * keep), keep


def _convolve(extended: Tensor, segments: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    tail = weight.shape[1] - 1
    out = sum(_tap(extended, segments, tap, tail)[0] * weight[:, tap] for tap in range(tail + 1))
    return out if bias is None else out + bias.to(extended.dtype)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, init_state: Tensor | None = None,
    seq_idx: Tensor | None = None, *, activation: str = "none",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``y_t = act(bias + sum_k weight[:, W-1-k] x_{t-k})``, per channel.

    Args:
        x: [b, L, D] channels last, L >= 1. weight: [D, W]. bias: [D].
        init_state: [b, D, W-1], the inputs before token 0, oldest first; zeros if None. It belongs to the first
            packed sequence of each row.
        seq_idx: integer [b, L]; nothing crosses the places where it changes.
        activation: "none" or "silu".

    Returns:
        y: as x. final_state: [b, D, W-1] in x's dtype, the last inputs of the last packed sequence.
    """
    _check_activation(activation)
    dtype, tail = math_dtype(x), weight.shape[1] - 1
    extended, segments = _extended(x, init_state, tail, dtype), _segments(x, seq_idx, tail)
    y = _convolve(extended, segments, weight.to(dtype), bias)
    if activation == "silu":
        y = F.silu(y)
    last = extended[:, x.shape[1] :]
    if segments is not None:
        last = last * (segments[:, x.shape[1] :] == segments[:, -1:])[..., None]
    return y.to(x.dtype).contiguous(), last.transpose(1, 2).to(x.dtype).clone(memory_format=torch.contiguous_format)


def causal_conv1d_backward(
    dy: Tensor | None, dfinal_state: Tensor | None,
    x: Tensor, weight: Tensor, bias: Tensor | None = None, init_state: Tensor | None = None,
    seq_idx: Tensor | None = None, *, activation: str = "none",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients (dx, dweight, dbias, dinit_state) of :func:`causal_conv1d`; empty where the input was None."""
    _check_activation(activation)
    dtype, tail, length = math_dtype(x), weight.shape[1] - 1, x.shape[1]
    extended, segments = _extended(x, init_state, tail, dtype), _segments(x, seq_idx, tail)
    w = weight.to(dtype)
    dpre = torch.zeros_like(x, dtype=dtype) if dy is None else dy.to(dtype)
    if activation == "silu":
        dpre = silu_backward(dpre, _convolve(extended, segments, w, bias))
    dextended, dweight = torch.zeros_like(extended), torch.zeros_like(w)
    for tap in range(tail + 1):
        window, keep = _tap(extended, segments, tap, tail)
        flow = dpre * w[:, tap]
        dextended[:, tap : tap + length] += flow if keep is None else flow * keep
        dweight[:, tap] = (window * dpre).sum((0, 1))
    if dfinal_state is not None:
        dlast = dfinal_state.to(dtype).transpose(1, 2)
        if segments is not None:
            dlast = dlast * (segments[:, length:] == segments[:, -1:])[..., None]
        dextended[:, length:] += dlast
    return (
        dextended[:, tail:].to(x.dtype).clone(memory_format=torch.contiguous_format),
        dweight.to(weight.dtype),
        absent(x) if bias is None else dpre.sum((0, 1)).to(bias.dtype),
        absent(x)
        if init_state is None
        else dextended[:, :tail].transpose(1, 2).to(init_state.dtype).clone(memory_format=torch.contiguous_format),
    )


def conv_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "none"
) -> tuple[Tensor, Tensor]:
    """One decode step of :func:`causal_conv1d`.

    Args:
        x: [b, D], one token. weight: [D, W]. bias: [D].
        conv_state: [b, D, S] with S >= W - 1, the last S inputs, oldest first.

    Returns:
        y: as x. new_state: as conv_state, shifted by one token; a fresh tensor.
    """
    _check_activation(activation)
    dtype, width = math_dtype(x), weight.shape[1]
    if conv_state.shape[-1] < width - 1:
        raise ValueError(f"conv_state holds {conv_state.shape[-1]} values per channel, the step needs {width - 1}")
    full = torch.cat([conv_state.to(dtype), x.to(dtype)[..., None]], -1)
    y = (full[..., -width:] * weight.to(dtype)).sum(-1)
    if bias is not None:
        y = y + bias.to(dtype)
    if activation == "silu":
        y = F.silu(y)
    new = full[..., full.shape[-1] - conv_state.shape[-1] :]
    return y.to(x.dtype), new.to(conv_state.dtype).clone(memory_format=torch.contiguous_format)


def conv_update_backward(
    dy: Tensor | None, dnew_state: Tensor | None,
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "none",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients (dx, dconv_state, dweight, dbias) of :func:`conv_update`; dbias is empty without a bias."""
    dtype, kept = math_dtype(x), conv_state.shape[-1]
    tail = weight.shape[1] - 1
    dx, dweight, dbias, dtail = causal_conv1d_backward(
        None if dy is None else dy.to(dtype)[:, None], None,
        x.to(dtype)[:, None], weight, bias, conv_state.to(dtype)[..., kept - tail :], activation=activation,
    )  # fmt: skip
    dfull = F.pad(dtail, (kept - tail, 1))
    dfull[..., -1] += dx[:, 0]
    if dnew_state is not None:
        dfull[..., 1:] += dnew_state.to(dtype)
    dstate, dx = dfull[..., :kept], dfull[..., kept]
    fresh = torch.contiguous_format
    dbias = dbias if bias is not None else absent(x)
    return (
        dx.to(x.dtype).clone(memory_format=fresh),
        dstate.to(conv_state.dtype).clone(memory_format=fresh),
        dweight,
        dbias,
    )
