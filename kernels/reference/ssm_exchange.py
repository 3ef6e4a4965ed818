"""The parts of an SSD scan that context parallelism sends (MATH 6), in plain torch.

A shard of a sequence gives ``S``, its final state from zero, and ``decay``, what it multiplies an entering state by.
Its outputs give ``G`` to the gradient of the state that entered it::

    chunk_state(x, dt, A, B)  -> S, decay
    output_state(dy, C, dt, A) -> G = sum_t exp(sum_{s<=t} A dt'_s) dy_t C_t^T

Shapes: as in :mod:`latentscan.kernels.reference.ssm`. Packed sequences: the entering state reaches the first one only,
and a shard in which a sequence starts after the first token has decay 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latentscan.kernels.reference.ssm_common import (
    check_limits,
    heads_of,
    math_dtype,
    segment_numbers,
    time_step,
)

_CHUNK = 64  # tokens at a time; any number gives the same result


def chunk_state(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None = None, seq_idx: Tensor | None = None,
    *, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Final state from zero, and the decay of a state over all tokens.

    Args:
        x: [b, L, H, P]. dt: [b, L, H]. A: [H]. B: [b, L, G, N]. dt_bias: [H]. seq_idx: [b, L].

    Returns:
        state: [b, H, P, N], of the last packed sequence. decay: [b, H]. Both fp32 (fp64 for fp64 x).
    """
    check_limits(dt_min, dt_max)
    dtype = math_dtype(x)
    step, to_end, across = _decays(x, dt, A, dt_bias, seq_idx, dt_softplus, dt_min, dt_max)
    share = heads_of(B.shape[2], x.shape[2])
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[3], dtype=dtype)
    for start in range(0, x.shape[1], _CHUNK):
        part = slice(start, start + _CHUNK)
        weighted = x[:, part].to(dtype) * (step * to_end)[:, part, :, None]
        state += torch.einsum("blhp,blhn->bhpn", weighted, B[:, part].to(dtype).repeat_interleave(share, 2))
    return state, across


def _decays(
    x: Tensor, dt: Tensor, A: Tensor, dt_bias: Tensor | None, seq_idx: Tensor | None,
    softplus: bool, minimum: float, maximum: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dt' [b, L, H], the decay of each token's part until the end [b, L, H], and over everything [b, H]."""
    step = time_step(dt, dt_bias, math_dtype(x), softplus=softplus, minimum=minimum, maximum=maximum)
    rate = step * A.to(step.dtype)
    after = rate.flip(1).cumsum(1).flip(1) - rate  # sum over the tokens behind each one
    to_end, across = after.clamp(max=0).exp(), rate.sum(1).clamp(max=0).exp()
    segment = segment_numbers(seq_idx, None, x.shape[0], x.shape[1], x.device)
    if segment is not None:
        last = segment[:, -1:]
        to_end = to_end * (segment == last)[..., None]
        across = across * (segment[:, :1] == last)
    return step, to_end, across


def output_state(
    dy: Tensor, C: Tensor, dt: Tensor, A: Tensor, dt_bias: Tensor | None = None, seq_idx: Tensor | None = None,
    *, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
) -> Tensor:  # fmt: skip
    """The gradient of a state that enters before the first token, through the outputs alone (MATH 6's G).

    Args:
        dy: [b, L, H, P]. C: [b, L, G, N]. dt: [b, L, H]. A: [H]. dt_bias: [H]. seq_idx: [b, L].

    Returns:
        [b, H, P, N], fp32 (fp64 for fp64 dy).
    """
    check_limits(dt_min, dt_max)
    dtype = math_dtype(dy)
    step = time_step(dt, dt_bias, dtype, softplus=dt_softplus, minimum=dt_min, maximum=dt_max)
    seen = (step * A.to(dtype)).cumsum(1).clamp(max=0).exp()  # what is left of the entering state at each token
    segment = segment_numbers(seq_idx, None, dy.shape[0], dy.shape[1], dy.device)
    if segment is not None:
        seen = seen * (segment == 0)[..., None]
    share = heads_of(C.shape[2], dy.shape[2])
    state = dy.new_zeros(dy.shape[0], dy.shape[2], dy.shape[3], C.shape[3], dtype=dtype)
    for start in range(0, dy.shape[1], _CHUNK):
        part = slice(start, start + _CHUNK)
        weighted = dy[:, part].to(dtype) * seen[:, part, :, None]
        state += torch.einsum("blhp,blhn->bhpn", weighted, C[:, part].to(dtype).repeat_interleave(share, 2))
    return state
