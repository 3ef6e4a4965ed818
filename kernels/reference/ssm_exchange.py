"""The parts of an SSD scan that context parallelism takes apart (MATH 6), in plain torch, each with its backward.

A shard of a sequence gives ``S``, its final state from zero, and ``decay``, what it multiplies an entering state by.
Once the entering state ``h`` is known, the shard's output lacks only ``exp(A_cum_t) C_t h``::

    chunk_state(x, dt, A, B)  -> S, decay            state_output(C, dt, A, h) -> exp(sum_{s<=t} A dt'_s) C_t h

Shapes: as in :mod:`latentscan.kernels.reference.ssm`. Packed sequences: the entering state reaches the first one only,
and a shard in which a sequence starts after the first token has decay 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latentscan.kernels.reference.ssm import chunk_scan_backward
from latentscan.kernels.reference.ssm_common import (
    absent,
    check_limits,
    heads_of,
    math_dtype,
    segment_numbers,
    time_step,
    time_step_backward,
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


def chunk_state_backward(
    dstate: Tensor | None, ddecay: Tensor | None,
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None = None, seq_idx: Tensor | None = None,
    *, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients (dx, ddt, dA, dB, ddt_bias) of :func:`chunk_state`; empty where the input was None."""
    dtype = math_dtype(x)
    dx, ddt, dA, dB, _, _, _, ddt_bias, _ = chunk_scan_backward(
        None, dstate, x.to(dtype), dt.to(dtype), A.to(dtype), B.to(dtype), torch.zeros_like(B, dtype=dtype), None, None,
        dt_bias if dt_bias is None else dt_bias.to(dtype), None, seq_idx,
        chunk_size=_CHUNK, dt_softplus=dt_softplus, dt_min=dt_min, dt_max=dt_max,
    )  # fmt: skip
    if ddecay is not None:
        step, _, across = _decays(x, dt, A, dt_bias, seq_idx, dt_softplus, dt_min, dt_max)
        pull = ddecay.to(dtype) * across
        dA = dA + (pull * step.sum(1)).sum(0)
        dstep = (pull * A.to(dtype))[:, None].expand_as(step)
        more = time_step_backward(dstep, dt, dt_bias, softplus=dt_softplus, minimum=dt_min, maximum=dt_max)
        ddt = ddt + more
        if dt_bias is not None:
            ddt_bias = ddt_bias + more.sum((0, 1))
    return (
        dx.to(x.dtype), ddt.to(dt.dtype), dA.to(A.dtype), dB.to(B.dtype),
        absent(x) if dt_bias is None else ddt_bias.to(dt_bias.dtype),
    )  # fmt: skip


def state_output(
    C: Tensor, dt: Tensor, A: Tensor, state: Tensor, dt_bias: Tensor | None = None, seq_idx: Tensor | None = None,
    *, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
) -> Tensor:  # fmt: skip
    """What a state that enters before the first token adds to the output of every token.

    Args:
        C: [b, L, G, N]. dt: [b, L, H]. A: [H]. state: [b, H, P, N]. dt_bias: [H]. seq_idx: [b, L].

    Returns:
        [b, L, H, P] in the dtype of C.
    """
    check_limits(dt_min, dt_max)
    step, seen, Cs = _seen(C, dt, A, dt_bias, seq_idx, dt_softplus, dt_min, dt_max)
    del step
    return (torch.einsum("blhn,bhpn->blhp", Cs, state.to(Cs.dtype)) * seen[..., None]).to(C.dtype).contiguous()


def _seen(
    C: Tensor, dt: Tensor, A: Tensor, dt_bias: Tensor | None, seq_idx: Tensor | None,
    softplus: bool, minimum: float, maximum: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dt' and the decay of the entering state until each token, both [b, L, H]; C per head [b, L, H, N]."""
    dtype = math_dtype(C)
    step = time_step(dt, dt_bias, dtype, softplus=softplus, minimum=minimum, maximum=maximum)
    seen = (step * A.to(dtype)).cumsum(1).clamp(max=0).exp()
    segment = segment_numbers(seq_idx, None, C.shape[0], C.shape[1], C.device)
    if segment is not None:
        seen = seen * (segment == 0)[..., None]
    return step, seen, C.to(dtype).repeat_interleave(heads_of(C.shape[2], dt.shape[2]), 2)


def state_output_backward(
    dy: Tensor | None,
    C: Tensor, dt: Tensor, A: Tensor, state: Tensor, dt_bias: Tensor | None = None, seq_idx: Tensor | None = None,
    *, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients (dC, ddt, dA, dstate, ddt_bias) of :func:`state_output`; empty where the input was None."""
    step, seen, Cs = _seen(C, dt, A, dt_bias, seq_idx, dt_softplus, dt_min, dt_max)
    grad = (torch.zeros_like(seen)[..., None] if dy is None else dy.to(seen.dtype)) * seen[..., None]
    grad = grad.expand(*seen.shape, state.shape[2])
    into = torch.einsum("blhp,bhpn->blhn", grad, state.to(seen.dtype))
    dstate = torch.einsum("blhp,blhn->bhpn", grad, Cs)
    dcum = (into * Cs).sum(-1)
    da = dcum.flip(1).cumsum(1).flip(1)
    ddt = time_step_backward(da * A.to(da.dtype), dt, dt_bias, softplus=dt_softplus, minimum=dt_min, maximum=dt_max)
    groups = C.shape[2]
    return (
        into.unflatten(2, (groups, -1)).sum(3).to(C.dtype).contiguous(),
        ddt.to(dt.dtype).contiguous(),
        (da * step).sum((0, 1)).to(A.dtype),
        dstate.to(state.dtype).contiguous(),
        absent(C) if dt_bias is None else ddt.sum((0, 1)).to(dt_bias.dtype),
    )
