"""What ranks of a context-parallel axis tell each other about a Mamba layer: convolution tails and states.

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

_OPS = torch.ops._c10d_functional


def _ring(x: Tensor, step: int, size: int, rank: int, group: str) -> Tensor:
    """Start to send all of ``x`` to the rank ``step`` further on; gives a flat tensor of the same size."""
    to, source = (rank + step) % size, (rank - step) % size
    counts_in = [x.numel() if q == to else 0 for q in range(size)]
    counts_out = [x.numel() if q == source else 0 for q in range(size)]
    return _OPS.all_to_all_single(x.reshape(-1).contiguous(), counts_out, counts_in, group)


class _TailStart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, rank: int, group: str) -> Tensor:
        ctx.shape = x.shape
        return _ring(x, 1, size, rank, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _OPS.wait_tensor(grad).view(ctx.shape), None, None, None


class _TailWait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, rank: int, group: str) -> Tensor:
        ctx.where = size, rank, group
        return _OPS.wait_tensor(x) * (rank > 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        size, rank, group = ctx.where
        return _ring(grad * (rank > 0), -1, size, rank, group), None, None, None


class _GatherStart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        return _OPS.all_gather_into_tensor(x.contiguous(), size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _OPS.wait_tensor(grad[:1]), None, None


class _GatherWait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.where = size, group
        return _OPS.wait_tensor(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        size, group = ctx.where
        started = _OPS.reduce_scatter_tensor(grad.contiguous(), "sum", size, group)
        return started.expand(grad.shape), None, None  # autograd wants the gathered shape


class _Entering(torch.autograd.Function):
    """Explicit, so that every rank gives a gradient for what it gathered, also where that is zero: else the ranks'
    backward collectives would not match."""

    @staticmethod
    def forward(ctx: Any, messages: Tensor, init: Tensor, ids: Tensor | None, rank: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(messages, init, ids)
        ctx.rank = rank
        entering, final = _fold(messages, init, ids)
        return entering[rank].clone(), final.clone()

    @staticmethod
    def backward(ctx: Any, dmine: Tensor, dfinal: Tensor) -> Any:  # type: ignore[override]
        messages, init, ids = ctx.saved_tensors
        entering, _ = _fold(messages, init, ids)
        grad, found = dfinal, []
        for r in reversed(range(messages.shape[0])):
            ddecay = (entering[r] * grad).sum((-1, -2))[..., None]
            found.append(torch.cat([ddecay, grad.flatten(2)], -1))
            grad = messages[r, ..., :1, None] * grad
            if r == ctx.rank:
                grad = grad + dmine
            if ids is not None and r:
                grad = grad * _goes_on(ids, r)
        return torch.stack(found[::-1]), grad, None, None


def _goes_on(ids: Tensor, r: int) -> Tensor:
    """Whether the sequence at the end of shard r - 1 goes on in shard r, [b, 1, 1, 1]."""
    return (ids[r - 1, :, -1] == ids[r, :, 0])[:, None, None, None]


def _fold(messages: Tensor, h: Tensor, ids: Tensor | None) -> tuple[list[Tensor], Tensor]:
    """The state that enters each shard, and the one after the last."""
    entering = []
    for r in range(messages.shape[0]):
        if ids is not None and r:
            h = h * _goes_on(ids, r)
        entering.append(h)
        h = messages[r, ..., :1, None] * h + messages[r, ..., 1:].unflatten(-1, h.shape[-2:])
    return entering, h


class _SumPartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return sum_over(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


def tail_start(x: Tensor, keep: int, axis: str, size: int, rank: int, group: str) -> Tensor:
    """Start to send the last ``keep`` tokens of ``x`` [b, L, D] to the next rank.

    Raises:
        MeshError: the shard is shorter than that.
    """
    if x.shape[1] < keep:
        raise MeshError(
            f"a shard of {x.shape[1]} tokens is shorter than the {keep} that the next rank's convolution needs",
            remedy=f"use fewer ranks on {axis}, or longer sequences",
        )
    tail = x[:, x.shape[1] - keep :]
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
    return _OPS.wait_tensor(_OPS.all_gather_into_tensor(mine, size, group)).view(size, *mine.shape)


def pack_state(state: Tensor, decay: Tensor) -> Tensor:
    """One message a rank: [1, b, H, 1 + P N], the decay first. Both fp32."""
    return torch.cat([decay[..., None], state.flatten(2)], -1)[None]


def gather_start(x: Tensor, axis: str, size: int, group: str) -> Tensor:
    """Start to gather [1, ...] from every rank to [size, ...]."""
    return _GatherStart.apply(x, size, group) if group else x.expand(size, *x.shape[1:]).clone()


def gather_wait(x: Tensor, axis: str, size: int, group: str) -> Tensor:
    """Wait for :func:`gather_start`."""
    return _GatherWait.apply(x, size, group) if group else x.clone()


def entering_state(
    messages: Tensor, init: Tensor | None, ids: Tensor | None, head_dim: int, rank: int
) -> tuple[Tensor, Tensor]:
    """The state before this rank's first token, and the one after the last rank's last token.

    ``h_0 = init``, ``h_{r+1} = decay_r h_r + S_r`` (MATH 6); with packed sequences ``h`` becomes zero where a shard
    starts a sequence.

    Args:
        messages: [R, b, H, 1 + P N] of :func:`pack_state`. init: [b, H, P, N]. ids: of :func:`edge_ids`.

    Returns:
        Two fresh tensors [b, H, P, N].
    """
    zero = messages.new_zeros(*messages.shape[1:3], head_dim, (messages.shape[3] - 1) // head_dim)
    return _Entering.apply(messages, zero if init is None else init.to(messages.dtype), ids, rank)


def sum_partial(x: Tensor, axis: str, group: str) -> Tensor:
    """The sum of what each rank gives; the gradient passes to each rank as it is."""
    return _SumPartial.apply(x, group) if group else x.clone()


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: bool, size: int, group: str) -> Tensor:
        ctx.where = heads, size, group
        return _swap(x, heads, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        heads, size, group = ctx.where
        return _swap(grad, not heads, size, group), None, None, None


def _swap(x: Tensor, heads: bool, size: int, group: str) -> Tensor:
    h, s = x.shape[1:3]
    parts = x.unflatten(1, (size, h // size)) if heads else x.unflatten(2, (size, s // size)).transpose(1, 2)
    parts = parts.transpose(0, 1).contiguous()  # one part a rank, outermost
    if group:
        even = [parts.numel() // size] * size
        parts = _OPS.wait_tensor(_OPS.all_to_all_single(parts.view(-1), even, even, group)).view(parts.shape)
    if heads:  # [rank, b, h/R, s, d] -> [b, h/R, R s, d]
        return parts.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return parts.permute(1, 0, 2, 3, 4).flatten(1, 2)  # [rank, b, h, s/R, d] -> [b, R h, s/R, d]


def to_heads(x: Tensor, axis: str, size: int, group: str) -> Tensor:
    """[b, H, L/R, d], all heads of this rank's tokens -> [b, H/R, L, d], this rank's heads of all tokens."""
    return _Swap.apply(x, True, size, group)


def to_tokens(x: Tensor, axis: str, size: int, group: str) -> Tensor:
    """[b, H/R, L, d] -> [b, H, L/R, d]: the way back from :func:`to_heads`."""
    return _Swap.apply(x, False, size, group)


def gather_tokens(x: Tensor, axis: str, size: int, group: str) -> Tensor:
    """[b, L/R] -> [b, L], for masks and position ids. No gradients."""
    x = x.contiguous()
    if not group:
        return x.repeat(1, size)
    every = _OPS.wait_tensor(_OPS.all_gather_into_tensor(x[None], size, group))
    return every.transpose(0, 1).flatten(1, 2)


SWAPS = (to_heads, to_tokens)
MESSAGES = (tail_start, tail_wait, edge_ids, pack_state, gather_start, gather_wait, entering_state, gather_tokens)
