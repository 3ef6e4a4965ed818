"""Mamba-2's state-space dual (SSD) in plain torch: the recurrence, the chunked form and its explicit backward.

Per head, with ``dt'`` the time step after bias, softplus and limits::

    h_t = exp(A dt'_t) h_{t-1} + dt'_t x_t B_tᵀ          y_t = (h_t C_t + D x_t) · silu(z_t)

Shapes: b batch, L tokens, H heads, P head_dim, G groups (B and C are shared by H/G heads), N d_state.
``A <= 0`` is a precondition. Source: Dao and Gu 2024, "Transformers are SSMs", section 6.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from latentscan.kernels.reference.ssm_common import (
    absent,
    check_limits,
    heads_of,
    math_dtype,
    segment_numbers,
    silu_backward,
    time_step,
    time_step_backward,
)

_BLOCK_ELEMENTS = 1 << 24  # score-matrix elements held at once


def chunk_scan_recurrence(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    init_state: Tensor | None = None, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None,
    *, chunk_size: int = 0, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition, token by token; differentiable. The oracle when its inputs are fp64.

    Arguments as for :func:`chunk_scan`; ``chunk_size`` is ignored.
    """
    del chunk_size
    check_limits(dt_min, dt_max)
    dtype = math_dtype(x)
    batch, length, heads, head_dim = x.shape
    share = heads_of(B.shape[2], heads)
    step = time_step(dt, dt_bias, dtype, softplus=dt_softplus, minimum=dt_min, maximum=dt_max)
    segment = segment_numbers(seq_idx, cu_seqlens, batch, length, x.device)
    xs, Bs, Cs = (t.to(dtype) for t in (x, B.repeat_interleave(share, 2), C.repeat_interleave(share, 2)))
    state = xs.new_zeros(batch, heads, head_dim, B.shape[-1]) if init_state is None else init_state.to(dtype)
    ys = []
    for t in range(length):
        if segment is not None and t > 0:
            state = torch.where((segment[:, t] == segment[:, t - 1])[:, None, None, None], state, 0.0)
        decay = torch.exp(A.to(dtype) * step[:, t])
        state = decay[..., None, None] * state + torch.einsum("bh,bhp,bhn->bhpn", step[:, t], xs[:, t], Bs[:, t])
        ys.append(torch.einsum("bhpn,bhn->bhp", state, Cs[:, t]))
    y = torch.stack(ys, 1)
    if D is not None:
        y = y + xs * (D[:, None] if D.dim() == 1 else D).to(dtype)
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(x.dtype), state


@dataclass(frozen=True)
class _Chunks:
    """The inputs cut into c chunks of q tokens; heads are (g, r): r heads share group g. All in the math dtype."""

    length: int
    x: Tensor  # [b, c, g, r, q, p]
    step: Tensor  # [b, c, g, r, q]; 0 in the padding
    cum: Tensor  # [b, c, g, r, q] running sum of A dt' within the chunk
    B: Tensor  # [b, c, g, q, n]
    C: Tensor  # [b, c, g, q, n]
    init: Tensor  # [b, g, r, p, n]
    segment: Tensor | None  # [b, c, q]
    entry: Tensor | None  # [b, c] segment of the token before the chunk

    @property
    def count(self) -> int:
        return self.x.shape[1]

    def to_end(self) -> Tensor:
        """[b, c, g, r, q] decay of each token's contribution to the state at the end of its chunk."""
        decay = (self.cum[..., -1:] - self.cum).clamp(max=0).exp()
        return decay if self.segment is None else decay * _mask(self.segment == self.segment[..., -1:])

    def from_start(self) -> Tensor:
        """[b, c, g, r, q] decay of the state that enters the chunk, seen from each token."""
        decay = self.cum.clamp(max=0).exp()
        return (
            decay
            if self.segment is None or self.entry is None
            else decay * _mask(self.segment == self.entry[..., None])
        )

    def across(self) -> Tensor:
        """[b, c, g, r] decay of the state over a whole chunk."""
        return self.from_start()[..., -1]

    def scores(self, part: slice) -> tuple[Tensor, Tensor]:
        """C·B [b, c', g, q, q] and the causal decay between tokens [b, c', g, r, q, q] for some of the chunks."""
        cum = self.cum[:, part]
        size = cum.shape[-1]
        keep = torch.ones(size, size, dtype=torch.bool, device=cum.device).tril()
        if self.segment is not None:
            segment = self.segment[:, part]
            keep = (keep & (segment[..., :, None] == segment[..., None, :]))[:, :, None, None]
        # Differences, not quotients of exponentials; what is masked never reaches exp.
        difference = (cum[..., :, None] - cum[..., None, :]).clamp(max=0).masked_fill(~keep, float("-inf"))
        return self.C[:, part] @ self.B[:, part].mT, difference.exp()

    def parts(self) -> Iterator[slice]:
        """Slices over the chunks that bound the memory of :meth:`scores`."""
        batch, count, groups, share, size = self.cum.shape
        block = max(1, _BLOCK_ELEMENTS // max(1, batch * groups * share * size * size))
        return (slice(start, start + block) for start in range(0, count, block))


def _mask(keep: Tensor) -> Tensor:
    return keep[:, :, None, None, :]


def _cut(
    x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, init_state: Tensor | None,
    seq_idx: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> _Chunks:  # fmt: skip
    if chunk_size < 1:
        raise ValueError(f"chunk_size {chunk_size} must be at least 1")
    dtype = step.dtype
    batch, length, heads, head_dim = x.shape
    groups, d_state = B.shape[2:]
    share = heads_of(groups, heads)
    size = min(chunk_size, length)
    padding = -length % size
    count = (length + padding) // size

    def cut(t: Tensor, *rest: int) -> Tensor:  # [b, L, g·r..., rest] -> [b, c, q, ...]
        t = F.pad(t.to(dtype), (0, 0) * (t.dim() - 2) + (0, padding))
        return t.reshape(batch, count, size, *rest)

    steps = cut(step, groups, share).permute(0, 1, 3, 4, 2)
    segment = segment_numbers(seq_idx, cu_seqlens, batch, length, x.device)
    entry = None
    if segment is not None:
        segment = torch.cat([segment, segment[:, -1:].expand(batch, padding)], 1).reshape(batch, count, size)
        entry = torch.cat([segment[:, :1, 0], segment[:, :-1, -1]], 1)
    shape = (batch, groups, share, head_dim, d_state)
    return _Chunks(
        length=length,
        x=cut(x, groups, share, head_dim).permute(0, 1, 3, 4, 2, 5),
        step=steps,
        cum=(steps * A.to(dtype).reshape(groups, share, 1)).cumsum(-1),
        B=cut(B, groups, d_state).transpose(2, 3),
        C=cut(C, groups, d_state).transpose(2, 3),
        init=x.new_zeros(shape, dtype=dtype) if init_state is None else init_state.to(dtype).reshape(shape),
        segment=segment,
        entry=entry,
    )


def _join(t: Tensor, length: int) -> Tensor:
    """[b, c, g, r, q, ...] -> [b, L, H, ...]."""
    t = t.movedim(4, 2)
    return t.flatten(3, 4).flatten(1, 2)[:, :length]


def _entering_states(k: _Chunks) -> tuple[Tensor, Tensor]:
    """States before each chunk [b, c, g, r, p, n] and after the last one [b, g, r, p, n]."""
    added = (k.x * (k.step * k.to_end())[..., None]).mT @ k.B[:, :, :, None]
    across = k.across()[..., None, None]
    state, entering = k.init, []
    for c in range(k.count):
        entering.append(state)
        state = across[:, c] * state + added[:, c]
    return torch.stack(entering, 1), state


def _ungated(k: _Chunks, entering: Tensor) -> Tensor:
    """``h_t C_t`` of every token, [b, c, g, r, q, p]."""
    y = (k.C[:, :, :, None] @ entering.mT) * k.from_start()[..., None]
    scaled = k.x * k.step[..., None]
    for part in k.parts():
        score, decay = k.scores(part)
        y[:, part] += (score[:, :, :, None] * decay) @ scaled[:, part]
    return y


def _per_head(D: Tensor, dtype: torch.dtype) -> Tensor:
    return (D[:, None] if D.dim() == 1 else D).to(dtype)


def chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    init_state: Tensor | None = None, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None,
    *, chunk_size: int, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """SSD forward, vectorised over chunks.

    Args:
        x: [b, L, H, P], L >= 1. dt: [b, L, H]. A: [H], not positive. B, C: [b, L, G, N].
        D: [H] or [H, P]. z: as x. dt_bias: [H].
        init_state: [b, H, P, N], the state before token 0. It belongs to the first packed sequence of each row.
        seq_idx, cu_seqlens: see :func:`~latentscan.kernels.reference.ssm_common.segment_numbers`.
        chunk_size: tokens per chunk, any number >= 1; it does not change the result.
        dt_softplus, dt_min, dt_max: see :func:`~latentscan.kernels.reference.ssm_common.time_step`.

    Returns:
        y: as x, in its dtype. final_state: fp32 (fp64 for fp64 x) [b, H, P, N], of the last packed sequence.

    Raises:
        ValueError: limits, chunk size, groups or packing do not fit.
    """
    check_limits(dt_min, dt_max)
    dtype = math_dtype(x)
    step = time_step(dt, dt_bias, dtype, softplus=dt_softplus, minimum=dt_min, maximum=dt_max)
    k = _cut(x, step, A, B, C, init_state, seq_idx, cu_seqlens, chunk_size)
    entering, final = _entering_states(k)
    y = _join(_ungated(k, entering), k.length)
    if D is not None:
        y = y + x.to(dtype) * _per_head(D, dtype)
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(x.dtype).contiguous(), final.flatten(1, 2).clone(memory_format=torch.contiguous_format)


def chunk_scan_backward(
    dy: Tensor | None, dfinal_state: Tensor | None,
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    init_state: Tensor | None = None, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None,
    *, chunk_size: int, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of :func:`chunk_scan`; keeps one state per chunk, recomputed from the inputs.

    Args:
        dy: gradient of y, or None for zero. dfinal_state: gradient of the final state, or None for zero.

    Returns:
        (dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinit_state), each in the shape and dtype of its input; an empty
        tensor where the input was None.
    """
    check_limits(dt_min, dt_max)
    dtype = math_dtype(x)
    step = time_step(dt, dt_bias, dtype, softplus=dt_softplus, minimum=dt_min, maximum=dt_max)
    k = _cut(x, step, A, B, C, init_state, seq_idx, cu_seqlens, chunk_size)
    entering, _ = _entering_states(k)
    xs = x.to(dtype)

    dout = torch.zeros_like(xs) if dy is None else dy.to(dtype)
    dz = absent(x)
    if z is not None:
        zs = z.to(dtype)
        ungated = _join(_ungated(k, entering), k.length)
        if D is not None:
            ungated = ungated + xs * _per_head(D, dtype)
        dz = silu_backward(dout * ungated, zs).to(z.dtype)
        dout = dout * F.silu(zs)
    dx = torch.zeros_like(xs)
    dD = absent(x)
    if D is not None:
        dx += dout * _per_head(D, dtype)
        dD = (dout * xs).sum((0, 1) if D.dim() == 2 else (0, 1, 3)).to(D.dtype)

    dfinal = torch.zeros_like(k.init) if dfinal_state is None else dfinal_state.to(dtype).reshape(k.init.shape)
    du, dcum, dB, dC, dinit = _scan_gradients(k, entering, dout, dfinal)
    da = dcum.flip(-1).cumsum(-1).flip(-1)
    dx += _join(du * k.step[..., None], k.length)
    heads_A = A.to(dtype).reshape(k.cum.shape[2:4])[..., None]
    dstep = _join((da * heads_A + (du * k.x).sum(-1)), k.length)
    dA = (da * k.step).sum((0, 1, 4)).flatten()
    ddt = time_step_backward(dstep, dt, dt_bias, softplus=dt_softplus, minimum=dt_min, maximum=dt_max)

    def join_groups(t: Tensor, like: Tensor) -> Tensor:
        return t.transpose(2, 3).flatten(1, 2)[:, : k.length].to(like.dtype).contiguous()

    return (
        dx.to(x.dtype),
        ddt.to(dt.dtype).contiguous(),
        dA.to(A.dtype),
        join_groups(dB, B),
        join_groups(dC, C),
        dD,
        dz,
        absent(x) if dt_bias is None else ddt.sum((0, 1)).to(dt_bias.dtype),
        absent(x) if init_state is None else dinit.reshape(init_state.shape).to(init_state.dtype),
    )


def _scan_gradients(k: _Chunks, entering: Tensor, dout: Tensor, dfinal: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the ungated scan with respect to ``u = dt' x``, the running sum, B, C and the initial state."""
    batch, count, groups, share, size, head_dim = k.x.shape
    dout = F.pad(dout, (0, 0, 0, 0, 0, count * size - k.length))
    dout = dout.reshape(batch, count, size, groups, share, head_dim).permute(0, 1, 3, 4, 2, 5)
    B, C = k.B[:, :, :, None], k.C[:, :, :, None]
    u = k.x * k.step[..., None]

    # Adjoint of the state after each chunk, from the last chunk to the first.
    dout_start = dout * k.from_start()[..., None]
    seen = dout_start.mT @ C
    across = k.across()
    adjoint, after = dfinal, []
    for c in reversed(range(count)):
        after.append(adjoint)
        adjoint = seen[:, c] + across[:, c, :, :, None, None] * adjoint
    leaving = torch.stack(after[::-1], 1)  # [b, c, g, r, p, n]

    # Output from the entering state: exp(cum_l) C_l h.
    dC = (dout_start @ entering).sum(3)
    dcum = (dout_start * (C @ entering.mT)).sum(-1)
    # Chunk state: sum over s of exp(cum_q - cum_s) u_s B_sᵀ, and the decay of the entering state.
    to_end = k.to_end()[..., None]
    from_adjoint = to_end * (B @ leaving.mT)
    du = from_adjoint.clone()  # added to below, and the gradients of this function need it as it is
    dB = ((u * to_end) @ leaving).sum(3)
    pull = (u * from_adjoint).sum(-1)
    dcum = dcum - pull
    dcum[..., -1] += pull.sum(-1) + across * (entering * leaving).sum((-1, -2))
    # Within a chunk.
    for part in k.parts():
        score, decay = k.scores(part)
        dscore = (dout[:, part] @ u[:, part].mT) * decay
        flow = dscore * score[:, :, :, None]
        dcum[:, part] += flow.sum(-1) - flow.sum(-2)
        du[:, part] += (score[:, :, :, None] * decay).mT @ dout[:, part]
        dscore = dscore.sum(3)
        dC[:, part] += dscore @ k.B[:, part]
        dB[:, part] += dscore.mT @ k.C[:, part]
    return du, dcum, dB, dC, adjoint


def state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    *, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One decode step of a Mamba-2 or, with P = 1 and one head per channel, a Mamba-1 layer.

    Args:
        state: [b, H, P, N]. x: [b, H, P]. dt: [b, H]. A: [H] or [H, N]. B, C: [b, G, N].
        D: [H] or [H, P]. z: as x. dt_bias: [H].

    Returns:
        y: as x. new_state: as state, a fresh tensor in its dtype.
    """
    check_limits(dt_min, dt_max)
    dtype = math_dtype(x)
    share = heads_of(B.shape[1], x.shape[1])
    step = time_step(dt, dt_bias, dtype, softplus=dt_softplus, minimum=dt_min, maximum=dt_max)
    xs, Bs, Cs = x.to(dtype), B.to(dtype).repeat_interleave(share, 1), C.to(dtype).repeat_interleave(share, 1)
    decay = torch.exp(step[..., None] * (A[:, None] if A.dim() == 1 else A).to(dtype))[:, :, None]
    new = decay * state.to(dtype) + (step[..., None] * xs)[..., None] * Bs[:, :, None]
    y = (new @ Cs[..., None])[..., 0]
    if D is not None:
        y = y + xs * _per_head(D, dtype)
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(x.dtype).contiguous(), new.to(state.dtype).contiguous()


def state_update_backward(
    dy: Tensor | None, dnew_state: Tensor | None,
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    *, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients (dstate, dx, ddt, dA, dB, dC, dD, dz, ddt_bias) of :func:`state_update`; empty where that was None."""
    check_limits(dt_min, dt_max)
    dtype = math_dtype(x)
    groups = B.shape[1]
    share = heads_of(groups, x.shape[1])
    step = time_step(dt, dt_bias, dtype, softplus=dt_softplus, minimum=dt_min, maximum=dt_max)
    old, xs, As = state.to(dtype), x.to(dtype), (A[:, None] if A.dim() == 1 else A).to(dtype)
    Bs, Cs = (t.to(dtype).repeat_interleave(share, 1)[:, :, None] for t in (B, C))  # [b, h, 1, n]
    decay = torch.exp(step[..., None] * As)[:, :, None]
    scaled = (step[..., None] * xs)[..., None]
    new = decay * old + scaled * Bs
    dout = torch.zeros_like(xs) if dy is None else dy.to(dtype)
    dz, dD, dx = absent(x), absent(x), torch.zeros_like(xs)
    if z is not None:
        y = (new * Cs).sum(-1) + (0 if D is None else xs * _per_head(D, dtype))
        dz = silu_backward(dout * y, z.to(dtype)).to(z.dtype).contiguous()
        dout = dout * F.silu(z.to(dtype))
    if D is not None:
        dx = dout * _per_head(D, dtype)
        dD = (dout * xs).sum((0,) if D.dim() == 2 else (0, 2)).to(D.dtype)
    dnew = dout[..., None] * Cs
    if dnew_state is not None:
        dnew = dnew + dnew_state.to(dtype)
    dexponent = (dnew * old * decay).sum(2)  # [b, h, n]
    from_B = (dnew * Bs).sum(-1)
    dstep = (dexponent * As).sum(-1) + (from_B * xs).sum(-1)
    dA = (dexponent * step[..., None]).sum(0)
    ddt = time_step_backward(dstep, dt, dt_bias, softplus=dt_softplus, minimum=dt_min, maximum=dt_max)

    def of_groups(t: Tensor, like: Tensor) -> Tensor:  # [b, h, n] -> [b, g, n]
        return t.unflatten(1, (groups, share)).sum(2).to(like.dtype)

    return (
        (dnew * decay).to(state.dtype).contiguous(),
        (dx + from_B * step[..., None]).to(x.dtype).contiguous(),
        ddt.to(dt.dtype).contiguous(),
        (dA.sum(-1) if A.dim() == 1 else dA).to(A.dtype),
        of_groups((dnew * scaled).sum(2), B),
        of_groups((dout[..., None] * new).sum(2), C),
        dD,
        dz,
        absent(x) if dt_bias is None else ddt.sum(0).to(dt_bias.dtype),
    )
