"""Differentiable collectives along the sequence, for values of which each rank holds some tokens.

Rank r of W holds tokens ``r L .. r L + L - 1`` of n, with L = ceil(n / W): all ranks the same number, the last ones
filled up with zeros, because a gather of uneven parts is wrong without an error. What is computed from filled-up tokens
is cut off by the next gather, and their gradient is zero.

Lengths may be symbolic: sizes come from ``arange``, which adds no guard.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives
from torch import Tensor

from latentscan.ir.ops.waiting import wait

_OPS = torch.ops._c10d_functional


def _fill_up(x: Tensor, size: int) -> Tensor:
    """x [n, ..] -> [W L, ..]."""
    n = x.shape[0]
    length = (n + size - 1) // size
    return x.new_zeros((length * size, *x.shape[1:])).index_copy(0, torch.arange(n, device=x.device), x)


def _own(x: Tensor, dim: int, size: int, rank: int) -> Tensor:
    rows = _fill_up(x.movedim(dim, 0), size)
    length = (x.shape[dim] + size - 1) // size
    index = torch.arange(length, device=x.device) + rank * length
    return rows.index_select(0, index).movedim(0, dim).contiguous()


def _gather(x: Tensor, dim: int, n: Any, size: int, group: str) -> Tensor:
    every = wait(_OPS.all_gather_into_tensor(x.movedim(dim, 0).contiguous(), size, group), group, "all_gather")
    return every.index_select(0, torch.arange(n, device=x.device)).movedim(0, dim).contiguous()


def _scatter(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    rows = _fill_up(x.movedim(dim, 0), size)
    own = wait(_OPS.reduce_scatter_tensor(rows, "sum", size, group), group, "reduce_scatter")
    return own.movedim(0, dim).contiguous()


class _GatherIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, n: Any, size: int, group: str) -> Tensor:
        ctx.where = dim, size, group
        return _gather(x, dim, n, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        dim, size, group = ctx.where
        return _scatter(grad, dim, size, group), None, None, None, None


class _ScatterOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, group: str) -> Tensor:
        ctx.where = dim, x.shape[dim], size, group
        return _scatter(x, dim, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        dim, n, size, group = ctx.where
        return _gather(grad, dim, n, size, group), None, None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, n: Any, size: int, rank: int, group: str) -> Tensor:
        ctx.where = dim, size, rank
        return _gather(x, dim, n, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _own(grad, *ctx.where), None, None, None, None, None


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, rank: int, group: str) -> Tensor:
        ctx.where = dim, x.shape[dim], size, group
        return _own(x, dim, size, rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        dim, n, size, group = ctx.where
        return _gather(grad, dim, n, size, group), None, None, None, None


def gather_tokens(x: Tensor, dim: int, n: Any, size: int, axis: str, group: str) -> Tensor:
    """Into a region that is split otherwise: all tokens; the gradient, partial on each rank, is summed and cut."""
    return _GatherIn.apply(x, dim, n, size, group)


def scatter_tokens(x: Tensor, dim: int, size: int, axis: str, group: str) -> Tensor:
    """Out of such a region: partial sums are summed and cut; the gradient is gathered."""
    return _ScatterOut.apply(x, dim, size, group)


def unshard_tokens(x: Tensor, dim: int, n: Any, size: int, rank: int, axis: str, group: str) -> Tensor:
    """For work that every rank does on all tokens: gathered; the gradient, which all ranks hold, is cut."""
    return _Unshard.apply(x, dim, n, size, rank, group)


def shard_tokens(x: Tensor, dim: int, size: int, rank: int, axis: str, group: str) -> Tensor:
    """The rank's tokens of what all ranks hold; the gradient is gathered."""
    return _Shard.apply(x, dim, size, rank, group)


SEQUENCE = (gather_tokens, scatter_tokens, unshard_tokens, shard_tokens)
