"""What the kernels of the chunk scan share: launching, the per-token decay vectors, the layout of the inputs.

Decay is kept per token as ``cum``, the running sum of ``A dt' log2(e)`` within its chunk, so that the decay between two
tokens of a chunk is ``exp2(cum_i - cum_j) <= 1``. Each token's term is clamped to [-160, 0]: 2^-160 is 0 in fp32, and
the sum stays small enough to be exact to a few 1e-4 whatever A and dt are. The first token of a packed sequence has the
term -160: the state before it vanishes, and no other kernel needs to know of packing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

GONE = tl.constexpr(-160.0)  # log2 of a decay that is 0 in fp32
LOG2E = tl.constexpr(math.log2(math.e))

# Called instead of launching, by who compiles ahead of time (aot.py) or times the launches.
recorder: Callable[[Any, int, tuple[Any, ...], dict[str, Any]], None] | None = None


def launch(kernel: Any, grid: int, *args: Any, **meta: Any) -> None:
    """Start ``grid`` programs (one axis: 2^31 - 1 of them are allowed there, 65 535 elsewhere)."""
    if grid == 0:
        return
    if recorder is not None:
        recorder(kernel, grid, args, meta)
        return
    kernel[(grid,)](*args, **meta)


@dataclass(frozen=True)
class Sizes:
    """b batch, L tokens, H heads, P head_dim, G groups, N d_state; Q tokens a chunk, NC chunks."""

    b: int
    L: int
    H: int
    P: int
    G: int
    N: int
    Q: int

    @property
    def NC(self) -> int:
        return -(-self.L // self.Q)

    @staticmethod
    def of(x: Tensor, B: Tensor, Q: int) -> Sizes:
        b, L, H, P = x.shape
        return Sizes(b, L, H, P, B.shape[2], B.shape[3], Q)


def pad(n: int) -> int:
    """The power of two, at least 16, that a tile of n has."""
    return max(16, triton.next_power_of_2(n))


def rows_of(t: Tensor) -> Tensor:
    """``t`` with neighbouring elements in its last axis; any other strides are read as they are."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def wide(Q: int, *tensors: Tensor) -> bool:
    """Whether a chunk of ``Q`` tokens spans 2^31 elements of a tensor [b, L, ...] or more."""
    return any(Q * t.stride(1) >= 1 << 31 for t in tensors)


def precision(dtype: torch.dtype) -> str:
    """How tl.dot treats fp32 operands: three tf32 products, which is fp32 up to a few ulp."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def sequence_starts(seq_idx: Tensor | None, cu_seqlens: Tensor | None, b: int, L: int) -> Tensor | None:
    """uint8 [b, L]: 1 where a packed sequence starts (never token 0), or None. No value is read by the host."""
    if seq_idx is None and cu_seqlens is None:
        return None
    device = seq_idx.device if seq_idx is not None else cu_seqlens.device  # type: ignore[union-attr]
    starts = torch.zeros(b, L + 1, dtype=torch.uint8, device=device)
    if seq_idx is not None:
        starts[:, 1:L] = seq_idx[:, 1:] != seq_idx[:, :-1]
    if cu_seqlens is not None:
        starts.index_fill_(1, cu_seqlens.to(torch.int64).clamp(0, L), 1)
        starts[:, 0] = 0
    return starts[:, :L].contiguous()


@triton.jit
def load_tile(ptr, rows, row_stride, row_mask, cols, col_mask, EVEN: tl.constexpr):
    """[rows, cols] of a matrix with neighbouring columns; zero outside. ``rows`` is int64 where 32 bits are too few."""
    at = ptr + (rows[:, None] * row_stride + cols[None, :])
    if EVEN:
        return tl.load(at, mask=row_mask[:, None], other=0.0)
    return tl.load(at, mask=row_mask[:, None] & col_mask[None, :], other=0.0)


@triton.jit
def tokens_of(Q: tl.constexpr, WIDE: tl.constexpr):
    """Offsets of the tokens in a chunk; int64 where a chunk spans 2^31 elements of a view."""
    q = tl.arange(0, Q)
    if WIDE:
        q = q.to(tl.int64)
    return q


@triton.jit
def softplus(v):
    """log(1 + exp(v)) to full precision, linear above 20."""
    e = tl.exp(tl.minimum(v, 20.0))
    u = 1.0 + e
    near = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(v > 20.0, v, near)


@triton.jit
def time_step(dt, bias, at, h, mask, head_mask, dt_min, dt_max, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """(raw, step before the limits, step) of a tile [tokens, heads], fp32."""
    raw = tl.load(dt + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        raw += tl.load(bias + h, mask=head_mask, other=0.0).to(tl.float32)[None, :]
    free = raw
    if SOFTPLUS:
        free = softplus(raw)
    step = tl.maximum(free, dt_min, propagate_nan=tl.PropagateNan.ALL)
    step = tl.minimum(step, dt_max, propagate_nan=tl.PropagateNan.ALL)
    return raw, free, tl.where(mask, step, 0.0)


@triton.jit
def prep_kernel(
    dt, A, bias, starts, vec, L, H, NC, dt_min, dt_max, s_b, s_l, s_h,
    Q: tl.constexpr, BH: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
    FOLD: tl.constexpr,
):  # fmt: skip
    """vec [b, H, NC, 2, Q]: cum, and the step; with FOLD ``cum - log2(step)`` in place of the step."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(H, BH)
    block, rest = pid % blocks, pid // blocks
    c, b = rest % NC, rest // NC
    q = tl.arange(0, Q)
    token = c * Q + q
    h = block * BH + tl.arange(0, BH)
    mask = (token < L)[:, None] & (h < H)[None, :]
    at = b * s_b + token[:, None] * s_l + h[None, :] * s_h
    _, _, step = time_step(dt, bias, at, h, mask, h < H, dt_min, dt_max, SOFTPLUS, HAS_BIAS)
    decay = step * (tl.load(A + h, mask=h < H, other=0.0).to(tl.float32) * LOG2E)[None, :]
    decay = tl.minimum(tl.maximum(decay, GONE), 0.0)
    if PACKED:
        first = tl.load(starts + b * L + token, mask=token < L, other=0)
        decay = tl.where((first != 0)[:, None], GONE, decay)
    cum = tl.cumsum(decay, axis=0)
    second = step
    if FOLD:
        second = cum - tl.log2(step)
    to = ((b * H + h)[:, None] * NC + c) * (2 * Q) + q[None, :]
    tl.store(vec + to, tl.trans(cum), mask=(h < H)[:, None])
    tl.store(vec + to + Q, tl.trans(second), mask=(h < H)[:, None])


@dataclass(frozen=True)
class Steps:
    """The arguments from which the time step is made."""

    dt: Tensor
    A: Tensor
    dt_bias: Tensor | None
    starts: Tensor | None
    softplus: bool
    minimum: float
    maximum: float

    @property
    def arguments(self) -> tuple[Any, ...]:
        none = self.A  # a pointer that is not read
        bias = none if self.dt_bias is None else self.dt_bias
        return self.dt, self.A, bias, none if self.starts is None else self.starts

    @property
    def limits(self) -> tuple[Any, ...]:
        return self.minimum, self.maximum, *self.dt.stride()

    @property
    def flags(self) -> dict[str, bool]:
        return {"SOFTPLUS": self.softplus, "HAS_BIAS": self.dt_bias is not None, "PACKED": self.starts is not None}


HEADS_A_PROGRAM = 16


def prepare(steps: Steps, s: Sizes, *, chunks: int | None = None, fold: bool = False) -> Tensor:
    """vec [b, H, NC, 2, Q] fp32, see :func:`prep_kernel`; ``chunks``: NC, if more than hold the tokens."""
    NC = chunks or s.NC
    vec = torch.empty(s.b, s.H, NC, 2, s.Q, device=steps.dt.device, dtype=torch.float32)
    grid = s.b * NC * triton.cdiv(s.H, HEADS_A_PROGRAM)
    launch(
        prep_kernel, grid, *steps.arguments, vec, s.L, s.H, NC, *steps.limits,
        Q=s.Q, BH=HEADS_A_PROGRAM, **steps.flags, FOLD=fold, num_warps=4,
    )  # fmt: skip
    return vec
