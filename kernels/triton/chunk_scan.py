"""The Mamba-2 chunk scan (SSD) on CUDA devices. Same signatures as :mod:`latentscan.kernels.reference.ssm`.

Tensors are bf16, fp16 or fp32 with any strides; P and N from 1 to 256; sums, states and decays are fp32. Results do not
depend on ``chunk_size``: tiles are chosen from shape and device. Every run gives the same bits, but for dB and dC on
Hopper, whose sums over heads have no fixed order unless ``torch.use_deterministic_algorithms(True)`` asks for one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from latentscan.kernels.reference.ssm_common import absent, check_limits, heads_of
from latentscan.kernels.triton import chunk_scan_backward as plain_backward
from latentscan.kernels.triton import chunk_scan_forward as plain_forward
from latentscan.kernels.triton.chunk_common import Steps, pad, rows_of, sequence_starts
from latentscan.kernels.triton.chunk_configs import (
    Backward,
    Device,
    Forward,
    Hopper,
    HopperBackward,
    backward_config,
    forward_config,
    gluon_works,
    hopper_config,
    refusal,
    starts_shape,
)
from latentscan.kernels.triton.chunk_tuning import parse_table


def _checked(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    seq_idx: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int, dt_softplus: bool, dt_min: float, dt_max: float,
) -> tuple[Tensor, Steps, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    check_limits(dt_min, dt_max)
    if chunk_size < 1:
        raise ValueError(f"chunk_size {chunk_size} must be at least 1")
    batch, length, heads, _ = x.shape
    heads_of(B.shape[2], heads)
    if length == 0:
        raise ValueError("the sequence is empty")
    if reason := refusal(x, B):
        raise ValueError(reason)
    if seq_idx is not None and tuple(seq_idx.shape) != (batch, length):
        raise ValueError(f"seq_idx has shape {tuple(seq_idx.shape)}, expected {(batch, length)}")
    if cu_seqlens is not None and (batch != 1 or cu_seqlens.dim() != 1):
        raise ValueError(
            f"cu_seqlens is one-dimensional and needs one packed row, got shape {tuple(cu_seqlens.shape)} "
            f"and {batch} rows"
        )
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(x.device)
    steps = Steps(
        dt, A.contiguous(), None if dt_bias is None else dt_bias.contiguous(),
        sequence_starts(seq_idx, cu_seqlens, batch, length), dt_softplus, dt_min, dt_max,
    )  # fmt: skip
    return (
        rows_of(x), steps, rows_of(B), rows_of(C), None if D is None else D.contiguous(),
        None if z is None else rows_of(z),
    )  # fmt: skip


def chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    init_state: Tensor | None = None, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None,
    *, chunk_size: int, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
    config: Forward | Hopper | None = None, tiles: str = "", keep_starts: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """y like x and the fp32 final state [b, H, P, N]; see :func:`latentscan.kernels.reference.ssm.chunk_scan`.

    Args:
        config: tile sizes; by default those of :mod:`latentscan.kernels.triton.chunk_configs`.
        tiles: the text of a :class:`latentscan.kernels.triton.chunk_tuning.Table`, read where ``config`` is None; what
            it does not know, or what these tensors cannot take, is left to the shipped choice.
        keep_starts: return as a third what saves the backward a pass, for its ``starts``; of ``starts_shape``.

    Raises:
        ValueError: limits, chunk size, groups, packing, dtype or sizes do not fit, with the values.
    """
    x, steps, B, C, D, z = _checked(
        x, dt, A, B, C, D, z, dt_bias, seq_idx, cu_seqlens, chunk_size, dt_softplus, dt_min, dt_max
    )
    if keep_starts and config is not None:
        raise ValueError("keep_starts is for the shipped choice or tiles, which the backward knows; config was given")
    with _on(x):
        x, B, C, z, _ = _laid_out(x, B, C, D, z)
        config = config or _told(tiles, x, B, C, D, z) or choose_forward(x, B, C, D, z)
        starts = None
        if keep_starts:
            shape = starts_shape(x.device, x.dtype, x.shape[0] * x.shape[1], x.shape[3], B.shape[3])
            starts = torch.empty(shape, device=x.device, dtype=torch.float32)
        if isinstance(config, Forward):
            y, state = plain_forward.forward(x, steps, B, C, D, z, init_state, config)
            # Nobody reads them then.
            return (y, state) if starts is None else (y, state, starts.fill_(float("nan")))
        from latentscan.kernels.triton import chunk_scan_gluon

        if reason := chunk_scan_gluon.refusal(x, B, C, D, z):
            raise ValueError(reason)
        y, state = chunk_scan_gluon.forward(x, steps, B, C, D, z, init_state, config, keep=starts)
        return (y, state) if starts is None else (y, state, starts)


def chunk_scan_backward(
    dy: Tensor | None, dfinal_state: Tensor | None,
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    init_state: Tensor | None = None, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None,
    *, chunk_size: int, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
    config: Backward | HopperBackward | None = None, tiles: str = "", starts: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of :func:`chunk_scan`; see :func:`latentscan.kernels.reference.ssm.chunk_scan_backward`.

    Args:
        starts: what the forward of the same inputs and ``tiles`` returned for ``keep_starts``.

    Returns:
        (dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinit_state), each in the shape and dtype of its input; an empty
        tensor where the input was None.
    """
    x, steps, B, C, D, z = _checked(
        x, dt, A, B, C, D, z, dt_bias, seq_idx, cu_seqlens, chunk_size, dt_softplus, dt_min, dt_max
    )
    dy = torch.zeros_like(x, memory_format=torch.contiguous_format) if dy is None else rows_of(dy)
    with _on(x):
        x, B, C, z, dy = _laid_out(x, B, C, D, z, dy)
        config = config or _told_back(tiles, x, B, C, D, z, dy) or choose_backward(x, B, C, D, z, dy)
        grads: Any
        if isinstance(config, Backward):
            grads = plain_backward.backward(dy, dfinal_state, x, steps, B, C, D, z, init_state, config)
        else:
            from latentscan.kernels.triton import chunk_scan_backward_gluon as gluon_backward

            if reason := gluon_backward.refusal(dy, x, B, C, D, z):
                raise ValueError(reason)
            if torch.are_deterministic_algorithms_enabled():
                config = replace(config, atomic=False)
            if starts is not None:
                told = _told(tiles, x, B, C, D, z) or choose_forward(x, B, C, D, z)
                starts = starts if isinstance(told, Hopper) and told.pieces == config.pieces else None
            grads = gluon_backward.backward(dy, dfinal_state, x, steps, B, C, D, z, init_state, config, starts)
    return tuple(absent(x) if grad is None else grad for grad in grads)


def choose_forward(x: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None) -> Forward | Hopper:
    """The shipped choice: Gluon on Hopper for the shapes it takes and the Triton it is known to work with."""
    batch, length, heads, P = x.shape
    device = Device.of(x.device)
    if x.is_cuda and device.capability == (9, 0) and gluon_works():
        from latentscan.kernels.triton import chunk_scan_gluon

        if chunk_scan_gluon.refusal(x, B, C, D, z) is None:
            G, N = B.shape[2:]
            units = batch * G * -(-(heads // G * (P // 64)) // 2)
            return hopper_config(units, batch * length * G * (2 * N + 64) * 2, device)
    return forward_config(pad(P), pad(B.shape[-1]), x.dtype, batch * heads, -(-length // 64), device)


def _laid_out(x: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dy: Tensor | None = None) -> Any:
    """(x, B, C, z, dy), on Hopper copied where only their layout keeps them from the form in Gluon.

    A copy costs less than the other form; and the backward gets the same form, however saved tensors came back.
    """
    if not x.is_cuda or Device.of(x.device).capability != (9, 0) or not gluon_works():
        return x, B, C, z, dy
    from latentscan.kernels.triton import chunk_scan_gluon as gluon

    if gluon.refusal(x, B, C, D, z, layout=False) is not None:
        return x, B, C, z, dy

    def dense(t: Any) -> Any:
        return t if t is None or gluon.copyable(t) else t.clone(memory_format=torch.contiguous_format)

    return dense(x), dense(B), dense(C), dense(z), dense(dy)


def _told(tiles: str, x: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None) -> Any:
    """A user's choice for the forward, or None."""
    config = parse_table(tiles).forward(x, B) if tiles else None
    if not isinstance(config, Hopper):
        return config
    from latentscan.kernels.triton import chunk_scan_gluon

    return config if gluon_works() and chunk_scan_gluon.refusal(x, B, C, D, z) is None else None


def _told_back(
    tiles: str, x: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dy: Tensor
) -> Any:  # fmt: skip
    """A user's choice for the backward, or None."""
    config = parse_table(tiles).backward(x, B) if tiles else None
    if not isinstance(config, HopperBackward):
        return config
    from latentscan.kernels.triton import chunk_scan_backward_gluon

    return config if gluon_works() and chunk_scan_backward_gluon.refusal(dy, x, B, C, D, z) is None else None


def choose_backward(
    x: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dy: Tensor
) -> Backward | HopperBackward:
    """The shipped choice: Gluon as for the forward, where there are chunks enough to keep all processors at work.

    For few it is no faster, and the portable form's dA is more exact.
    """
    batch, length, heads, P = x.shape
    device = Device.of(x.device)
    if x.is_cuda and device.capability == (9, 0) and gluon_works():
        from latentscan.kernels.triton import chunk_scan_backward_gluon

        pairs = batch * B.shape[2] * -(-(heads // B.shape[2] * (P // 64)) // 2)
        enough = pairs * (length // 64) >= 8 * device.processors
        if enough and chunk_scan_backward_gluon.refusal(dy, x, B, C, D, z) is None:
            like = hopper_config(pairs, batch * length * B.shape[2] * 4 * B.shape[3], device)
            # Of a short sequence dA has few windows to sum over, and their noise costs more than their states.
            every = 8 if length >= 8192 else 4
            # With few heads a group, sums in memory are more than the slabs that they save.
            few = heads // B.shape[2] * (P // 64) <= 4
            return HopperBackward(pieces=like.pieces, state_parts=like.state_parts, every=every, atomic=not few)
    return backward_config(pad(P), pad(B.shape[-1]), x.dtype, heads // B.shape[2], device)


def _on(x: Tensor) -> Any:
    """The tensor's device as the current one, for launches."""
    import contextlib

    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
