"""What ranks of a context-parallel axis tell each other: convolution tails, heads against tokens, sums.

The states of scans are in :mod:`latentscan.ir.ops.state_exchange`.

Starts and waits are apart, in forward and, by their gradients, in backward: a start's gradient waits for what the
wait's gradient started. So whatever a graph has between a start and its wait hides the transfer, and what autograd runs
between their gradients hides the way back. As in :mod:`latentscan.ir.ops.collectives`, all is ``_c10d_functional``.

Every rank takes part with the same sizes (a closed ring whose wrong end is masked), so no rank's compiler can drop a
collective that another rank keeps. The loss is the sum over the ranks of what each gives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives
from torch import Tensor

from latentscan.ir.errors import MeshError
from latentscan.ir.ops.collectives import sum_over
from latentscan.ir.ops.opaque import only_if
from latentscan.ir.ops.orders import first_order
from latentscan.ir.ops.waiting import wait

_OPS = torch.ops._c10d_functional


def ring(x: Tensor, step: int, size: int, rank: int, group: str) -> Tensor:
    """Start to send all of ``x`` to the rank ``step`` further on; gives a flat tensor of the same size."""
    to, source = (rank + step) % size, (rank - step) % size
    counts_in = [x.numel() if q == to else 0 for q in range(size)]
    counts_out = [x.numel() if q == source else 0 for q in range(size)]
    return _OPS.all_to_all_single(x.reshape(-1).contiguous(), counts_out, counts_in, group)


class _TailStart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, rank: int, group: str) -> Tensor:
        ctx.shape, ctx.group = x.shape, group
        return ring(x, 1, size, rank, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return wait(grad, ctx.group, "send").view(ctx.shape), None, None, None


class _TailWait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, rank: int, group: str) -> Tensor:
        ctx.where = size, rank, group
        return only_if(wait(x, group, "send"), rank > 0)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        size, rank, group = ctx.where
        return ring(only_if(grad, rank > 0), -1, size, rank, group), None, None, None


class _SumPartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return sum_over(x, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


def last_tokens(x: Tensor, keep: int, axis: str) -> Tensor:
    """The last ``keep`` tokens of ``x`` [b, L, D].

    Raises:
        MeshError: the shard is shorter than that.
    """
    if x.shape[1] < keep:
        raise MeshError(
            f"a shard of {x.shape[1]} tokens is shorter than the {keep} that the next rank's convolution needs",
            remedy=f"use fewer ranks on {axis}, or longer sequences",
        )
    return x[:, x.shape[1] - keep :]


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: int) -> Any:
        ctx.keep = keep
        return x.view_as(x), x.narrow(1, x.shape[1] - keep, keep).clone()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor, tail: Tensor) -> Any:  # type: ignore[override]
        # In place: only products read the first output, and autograd has summed their gradients in memory of its own.
        grad.narrow(1, grad.shape[1] - ctx.keep, ctx.keep).add_(tail)
        return grad, None


def fork_tail(x: Tensor, keep: int, axis: str) -> tuple[Tensor, Tensor]:
    """``x`` [b, L, D] for products alone, and its :func:`last_tokens`, whose gradient is added where it belongs (by
    autograd's rule for a slice, a value of x's size would be filled with zeros and added whole)."""
    last_tokens(x, keep, axis)  # long enough
    return _Fork.apply(x, keep)


def tail_start(tail: Tensor, axis: str, size: int, rank: int, group: str) -> Tensor:
    """Start to send :func:`last_tokens` to the next rank."""
    return _TailStart.apply(tail, size, rank, group) if group else tail.reshape(-1).clone()


def tail_wait(
    started: Tensor, like: Tensor, keep: int, ids: Tensor | None, axis: str, size: int, rank: int, group: str
) -> Tensor:
    """The previous rank's last tokens as a convolution's initial state [b, D, keep]; zeros on the first rank.

    Args:
        started: of :func:`tail_start`. like: [b, L, D], for the shape.
        ids: of :func:`edge_ids`, for packed sequences: tokens of another sequence than this rank's first become zero.
    """
    got = _TailWait.apply(started, size, rank, group) if group else started * (rank > 0)
    tail = got.view(like.shape[0], keep, like.shape[2])
    if ids is not None:
        same = ids[(rank - 1) % size, :, -keep:] == ids[rank, :, :1]
        tail = tail * same[..., None]
    return tail.transpose(1, 2)


def edge_ids(seq_idx: Tensor, like: Tensor, keep: int, axis: str, size: int, group: str) -> Tensor:
    """Sequence numbers at the edges of every rank's shard: its first token's, then its last ``keep`` tokens'.

    Args:
        seq_idx: [b, L], numbered over the whole row, not from 0 on every rank. like: any value with the batch first.

    Returns:
        int64 [size, b, 1 + keep].
    """
    rows = torch.arange(like.shape[0], device=seq_idx.device)
    seq_idx = seq_idx.index_select(0, rows)  # the same rows, but the compiler need not learn that
    last = seq_idx[:, seq_idx.shape[1] - keep :]
    mine = torch.cat([seq_idx[:, :1], last], 1).long().contiguous()
    if not group:
        return mine.expand(size, *mine.shape).clone()
    return wait(_OPS.all_gather_into_tensor(mine, size, group), group, "all_gather").view(size, *mine.shape)


def sum_partial(x: Tensor, axis: str, group: str) -> Tensor:
    """The sum of what each rank gives; the gradient passes to each rank as it is."""
    return _SumPartial.apply(x, group) if group else x.clone()


class _Swap(torch.autograd.Function):
    """[rank, ..], a part for each, to the parts that each has for this rank."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, size: int, group: str) -> Tensor:
        ctx.shape, ctx.where = parts.shape, (size, group)
        return _swap(parts, size, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _swap(grad, *ctx.where).view(ctx.shape), None, None


def _swap(parts: Tensor, size: int, group: str) -> Tensor:
    """Flat: what an autograd.Function gives is no view of what it made (see :mod:`latentscan.ir.ops.sequence`)."""
    if not group:
        return parts.flatten().clone()
    even = [parts.numel() // size] * size
    return wait(_OPS.all_to_all_single(parts.contiguous().view(-1), even, even, group), group, "all_to_all")


def to_heads(x: Tensor, axis: str, size: int, group: str) -> Tensor:
    """[b, H, L/R, d], all heads of this rank's tokens -> [b, H/R, L, d], this rank's heads of all tokens."""
    parts = x.unflatten(1, (size, x.shape[1] // size)).transpose(0, 1)  # one part a rank, outermost
    parts = _Swap.apply(parts, size, group).view(parts.shape)
    return parts.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [rank, b, H/R, L/R, d]


def to_tokens(x: Tensor, axis: str, size: int, group: str) -> Tensor:
    """[b, H/R, L, d] -> [b, H, L/R, d]: the way back from :func:`to_heads`."""
    parts = x.unflatten(2, (size, x.shape[2] // size)).movedim(2, 0)
    parts = _Swap.apply(parts, size, group).view(parts.shape)
    return parts.permute(1, 0, 2, 3, 4).flatten(1, 2)  # [rank, b, H/R, L/R, d]


class _GatherShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.where = size, group
        if not group:
            return x[None].repeat(size, *(1,) * x.ndim)
        return wait(_OPS.all_gather_into_tensor(x.contiguous()[None], size, group), group, "all_gather")

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        size, group = ctx.where
        if not group:
            return grad.sum(0), None, None
        own = wait(_OPS.reduce_scatter_tensor(grad.contiguous(), "sum", size, group), group, "reduce_scatter")
        return own.view(grad.shape[1:]), None, None


def gather_shared(x: Tensor, dim: int, axis: str, size: int, group: str) -> Tensor:
    """A value that all heads share, of all tokens (which lie along ``dim``); its gradient is summed over the ranks."""
    return _GatherShared.apply(x, size, group).movedim(0, dim).flatten(dim, dim + 1)


def must_be_zero(count: int) -> int:
    """A number that a split sequence allows to be 0 only, such as ``logits_to_keep``.

    Raises:
        MeshError: it is another one.
    """
    if count != 0:
        raise MeshError(
            f"{count} tokens are asked for at the end of the sequence, and every rank has an end of its own",
            remedy="leave logits_to_keep out",
        )
    return count


def take_rows(weight: Tensor, rows: list[int]) -> Tensor:
    """Some rows of a weight; those that lie side by side as a view. No index is sent to a device for it: a copy of a
    list waits for all that the device has to do."""
    runs: list[list[int]] = []  # first row, count
    for row in rows:
        if runs and row == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([row, 1])
    parts = [weight.narrow(0, *run) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def gather_tokens(x: Tensor, axis: str, size: int, group: str) -> Tensor:
    """[b, L/R] -> [b, L], for masks and position ids. No gradients."""
    x = x.contiguous()
    if not group:
        return x.repeat(1, size)
    every = wait(_OPS.all_gather_into_tensor(x[None], size, group), group, "all_gather")
    return every.transpose(0, 1).flatten(1, 2)


SWAPS = (to_heads, to_tokens, gather_shared)
MESSAGES = (last_tokens, fork_tail, tail_start, tail_wait, edge_ids, gather_tokens)
