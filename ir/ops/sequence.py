"""Differentiable collectives along the sequence, for values of which each rank holds some tokens.

Rank r of W holds tokens ``r L .. r L + L - 1`` of n, with L = ceil(n / W): all ranks the same number, the last ones
filled up with zeros, because a gather of uneven parts is wrong without an error. What is computed from filled-up tokens
is cut off by the next gather, and their gradient is zero.

Lengths may be symbolic: sizes come from ``arange``, which adds no guard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latentscan.ir.ops.collectives import gather_rows, scatter_rows
from latentscan.ir.ops.orders import first_order

# What an autograd.Function gives is a value of its own, never a view of one that it made: before torch 2.13 AOTAutograd
# loses the gradient of such a view without a word. So these work on tokens first [n, ..], and layouts are made outside.


def _fill_up(x: Tensor, size: int) -> Tensor:
    """x [n, ..] -> [W L, ..]."""
    n = x.shape[0]
    length = (n + size - 1) // size
    return x.new_zeros((length * size, *x.shape[1:])).index_copy(0, torch.arange(n, device=x.device), x)


def _own(x: Tensor, size: int, rank: int) -> Tensor:
    rows = _fill_up(x, size)
    length = (x.shape[0] + size - 1) // size
    return rows.index_select(0, torch.arange(length, device=x.device) + rank * length)


def _gather(x: Tensor, n: Any, size: int, group: str) -> Tensor:
    return gather_rows(x, size, group).index_select(0, torch.arange(n, device=x.device))


def _scatter(x: Tensor, size: int, group: str) -> Tensor:
    return scatter_rows(_fill_up(x, size), size, group)


class _GatherIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: Any, size: int, group: str) -> Tensor:
        ctx.where = size, group
        return _gather(x, n, size, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _scatter(grad, *ctx.where), None, None, None


class _ScatterOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.where = x.shape[0], size, group
        return _scatter(x, size, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _gather(grad, *ctx.where), None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: Any, size: int, rank: int, group: str) -> Tensor:
        ctx.where = size, rank
        return _gather(x, n, size, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _own(grad, *ctx.where), None, None, None, None


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, rank: int, group: str) -> Tensor:
        ctx.where = x.shape[0], size, group
        return _own(x, size, rank)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _gather(grad, *ctx.where), None, None, None


def gather_tokens(x: Tensor, dim: int, n: Any, size: int, axis: str, group: str) -> Tensor:
    """Into a region that is split otherwise: all tokens; the gradient, partial on each rank, is summed and cut."""
    return _GatherIn.apply(x.movedim(dim, 0), n, size, group).movedim(0, dim).contiguous()


def scatter_tokens(x: Tensor, dim: int, size: int, axis: str, group: str) -> Tensor:
    """Out of such a region: partial sums are summed and cut; the gradient is gathered."""
    return _ScatterOut.apply(x.movedim(dim, 0), size, group).movedim(0, dim).contiguous()


def unshard_tokens(x: Tensor, dim: int, n: Any, size: int, rank: int, axis: str, group: str) -> Tensor:
    """For work that every rank does on all tokens: gathered; the gradient, which all ranks hold, is cut."""
    return _Unshard.apply(x.movedim(dim, 0), n, size, rank, group).movedim(0, dim).contiguous()


def shard_tokens(x: Tensor, dim: int, size: int, rank: int, axis: str, group: str) -> Tensor:
    """The rank's tokens of what all ranks hold; the gradient is gathered."""
    return _Shard.apply(x.movedim(dim, 0), size, rank, group).movedim(0, dim).contiguous()


SEQUENCE = (gather_tokens, scatter_tokens, unshard_tokens, shard_tokens)
