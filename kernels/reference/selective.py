"""Mamba-1's selective scan in plain torch: the recurrence, a chunk-vectorised form and its explicit backward.

Per channel, with ``dt'`` the time step after bias and softplus::

    h_t = exp(A dt'_t) h_{t-1} + dt'_t B_t u_t          y_t = (C_t·h_t + D u_t) · silu(z_t)

Shapes: b batch, D channels, L tokens, N d_state, G groups (B and C are shared by D/G channels).
Source: Gu and Dao 2023, "Mamba", algorithm 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from latentscan.kernels.reference.ssm_common import (
    absent,
    heads_of,
    math_dtype,
    silu_backward,
    time_step,
    time_step_backward,
)

_CHUNK = 64  # tokens whose [channels, d_state] terms are held at once
_NO_LIMIT = {"minimum": float("-inf"), "maximum": float("inf")}


def selective_scan_recurrence(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None,
    init_state: Tensor | None = None, *, delta_softplus: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition, token by token; differentiable. Arguments as for :func:`selective_scan`."""
    dtype = math_dtype(u)
    us, step, As, Bs, Cs, state, _ = _inputs(u, delta, A, B, C, delta_bias, init_state, delta_softplus, dtype)
    ys = []
    for t in range(u.shape[2]):
        decay = torch.exp(As * step[:, t, ..., None])
        state = decay * state + (step[:, t] * us[:, t])[..., None] * Bs[:, t, :, None]
        ys.append((state * Cs[:, t, :, None]).sum(-1))
    y = torch.stack(ys, 1).flatten(2).transpose(1, 2)
    if D is not None:
        y = y + u.to(dtype) * D.to(dtype)[:, None]
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(u.dtype), state.flatten(1, 2)


def _inputs(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, delta_bias: Tensor | None,
    init_state: Tensor | None, softplus: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Everything in the math dtype with tokens second and channels as (g, r).

    Returns u and dt' [b, L, g, r], A [g, r, N], B and C [b, L, g, N], the initial state [b, g, r, N], and the bias
    shaped to broadcast against delta [D, 1].
    """
    batch, channels, _ = u.shape
    if B.dim() == 3:
        B, C = B[:, None], C[:, None]
    groups, d_state = B.shape[1], A.shape[1]
    share = heads_of(groups, channels)
    bias = None if delta_bias is None else delta_bias[:, None]
    step = time_step(delta, bias, dtype, softplus=softplus, **_NO_LIMIT)
    shape = (batch, groups, share, d_state)
    return (
        u.to(dtype).transpose(1, 2).unflatten(2, (groups, share)),
        step.transpose(1, 2).unflatten(2, (groups, share)),
        A.to(dtype).reshape(groups, share, d_state),
        B.to(dtype).permute(0, 3, 1, 2),
        C.to(dtype).permute(0, 3, 1, 2),
        u.new_zeros(shape, dtype=dtype) if init_state is None else init_state.to(dtype).reshape(shape),
        bias,
    )


def _terms(us: Tensor, step: Tensor, As: Tensor, Bs: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Decay and added term of each token of a chunk, [b, q, g, r, N]."""
    decay = torch.exp(step[:, part, ..., None] * As)
    return decay, (step[:, part] * us[:, part])[..., None] * Bs[:, part, :, None]


def _states(decay: Tensor, added: Tensor, state: Tensor) -> Tensor:
    """States after each token of a chunk, [b, q, g, r, N]."""
    states = []
    for t in range(decay.shape[1]):
        state = torch.addcmul(added[:, t], decay[:, t], state)
        states.append(state)
    return torch.stack(states, 1)


def _parts(length: int) -> list[slice]:
    return [slice(start, min(start + _CHUNK, length)) for start in range(0, length, _CHUNK)]


def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None,
    init_state: Tensor | None = None, *, delta_softplus: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Selective scan forward; a loop over tokens for the state alone.

    Args:
        u, delta: [b, D, L], L >= 1. A: [D, N], not positive. B, C: [b, N, L] or [b, G, N, L].
        D: [D]. z: as u. delta_bias: [D]. init_state: [b, D, N], the state before token 0.
        delta_softplus: whether softplus is applied to ``delta + delta_bias``.

    Returns:
        y: as u, in its dtype. final_state: fp32 (fp64 for fp64 u) [b, D, N].
    """
    dtype = math_dtype(u)
    us, step, As, Bs, Cs, state, _ = _inputs(u, delta, A, B, C, delta_bias, init_state, delta_softplus, dtype)
    ys = []
    for part in _parts(u.shape[2]):
        states = _states(*_terms(us, step, As, Bs, part), state)
        ys.append((states @ Cs[:, part, :, :, None])[..., 0])
        state = states[:, -1]
    y = torch.cat(ys, 1).flatten(2).transpose(1, 2)
    if D is not None:
        y = y + u.to(dtype) * D.to(dtype)[:, None]
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(u.dtype).contiguous(), state.flatten(1, 2).clone(memory_format=torch.contiguous_format)


def selective_scan_backward(
    dy: Tensor | None, dfinal_state: Tensor | None,
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None,
    init_state: Tensor | None = None, *, delta_softplus: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of :func:`selective_scan`; keeps one state per chunk and recomputes the rest.

    Returns:
        (du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinit_state), each as its input; empty where that was None.
    """
    dtype = math_dtype(u)
    us, step, As, Bs, Cs, state, bias = _inputs(u, delta, A, B, C, delta_bias, init_state, delta_softplus, dtype)
    parts = _parts(u.shape[2])
    entering = []
    for part in parts:
        entering.append(state)
        state = _states(*_terms(us, step, As, Bs, part), state)[:, -1]

    def tokens_first(t: Tensor) -> Tensor:
        return t.to(dtype).transpose(1, 2).unflatten(2, us.shape[2:])

    dgated = torch.zeros_like(us) if dy is None else tokens_first(dy)
    gate = None if z is None else tokens_first(z)
    skip = None if D is None else D.to(dtype).reshape(us.shape[2:])
    dout = dgated if gate is None else dgated * F.silu(gate)
    du, dstep, dz = torch.zeros_like(us), torch.zeros_like(us), torch.zeros_like(us)
    dA, dB, dC = torch.zeros_like(As), torch.zeros_like(Bs), torch.zeros_like(Cs)
    adjoint = torch.zeros_like(state) if dfinal_state is None else dfinal_state.to(dtype).reshape(state.shape)
    for part, start in zip(reversed(parts), reversed(entering), strict=True):
        decay, added = _terms(us, step, As, Bs, part)
        states = _states(decay, added, start)
        if gate is not None:
            y = (states @ Cs[:, part, :, :, None])[..., 0]
            y = y if skip is None else y + us[:, part] * skip
            dz[:, part] = silu_backward(dgated[:, part] * y, gate[:, part])
        dC[:, part] = torch.einsum("bqgr,bqgrn->bqgn", dout[:, part], states)
        seen = dout[:, part, ..., None] * Cs[:, part, :, None]
        adjoints = []
        for t in reversed(range(states.shape[1])):
            adjoint = seen[:, t] + adjoint
            adjoints.append(adjoint)
            adjoint = adjoint * decay[:, t]
        dstate = torch.stack(adjoints[::-1], 1)  # [b, q, g, r, N]
        before = torch.cat([start[:, None], states[:, :-1]], 1)
        dexponent = dstate * before * decay
        dA += (dexponent * step[:, part, ..., None]).sum((0, 1))
        from_B = (dstate @ Bs[:, part, :, :, None])[..., 0]
        du[:, part] = from_B * step[:, part]
        dstep[:, part] = (dexponent * As).sum(-1) + from_B * us[:, part]
        dB[:, part] = torch.einsum("bqgrn,bqgr->bqgn", dstate, step[:, part] * us[:, part])
    dD = absent(u)
    if D is not None:
        dD = (dout * us).sum((0, 1)).flatten().to(D.dtype)
        du = du + dout * skip

    def tokens_last(t: Tensor, like: Tensor) -> Tensor:  # [b, L, g, r] -> [b, D, L]
        return t.flatten(2).transpose(1, 2).to(like.dtype).contiguous()

    ddelta = time_step_backward(dstep.flatten(2).transpose(1, 2), delta, bias, softplus=delta_softplus, **_NO_LIMIT)
    return (
        tokens_last(du, u),
        ddelta.to(delta.dtype).contiguous(),
        dA.reshape(A.shape).to(A.dtype),
        dB.permute(0, 2, 3, 1).reshape(B.shape).to(B.dtype).contiguous(),
        dC.permute(0, 2, 3, 1).reshape(C.shape).to(C.dtype).contiguous(),
        dD,
        absent(u) if z is None else tokens_last(dz, z),
        absent(u) if delta_bias is None else ddelta.sum((0, 2)).to(delta_bias.dtype),
        absent(u) if init_state is None else adjoint.reshape(init_state.shape).to(init_state.dtype),
    )
