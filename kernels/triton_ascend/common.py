"""What the device code of this folder shares. It imports Triton alone, as the vendor's may be where torch is not."""

from __future__ import annotations

import inspect
from typing import Any

import triton
import triton.language as tl

GONE = tl.constexpr(-111.0)  # log of a decay that is 0 in fp32


def kernel(fn: Any) -> Any:
    """``triton.jit`` without specialisation on values: what runs is what was checked, whatever an argument is."""
    names = [p.name for p in inspect.signature(fn).parameters.values() if "constexpr" not in str(p.annotation)]
    return triton.jit(fn, do_not_specialize=names)


@triton.jit
def load_rows(ptr, rows, row_stride, row_mask, cols, COLS: tl.constexpr, EVEN: tl.constexpr):
    """[rows, cols] of a matrix with neighbouring columns; zero outside. ``ptr`` is at its first row already."""
    at = ptr + rows[:, None] * row_stride + cols[None, :]
    if EVEN:
        return tl.load(at, mask=row_mask[:, None], other=0.0)
    return tl.load(at, mask=row_mask[:, None] & (cols < COLS)[None, :], other=0.0)


@triton.jit
def softplus(v):
    """log(1 + exp(v)) to full precision, linear above 20."""
    e = tl.exp(tl.minimum(v, 20.0))
    u = 1.0 + e
    near = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(v > 20.0, v, near)


@triton.jit
def sigmoid(v):
    """1 / (1 + exp(-v)) without an exponential that overflows."""
    return 1.0 / (1.0 + tl.exp(tl.minimum(-v, 88.0)))
