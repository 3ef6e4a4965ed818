"""Differentiable collectives on a named mesh axis, as functions that a graph can call.

Each is a module-level function that calls an ``autograd.Function``, whose forward and backward end in
``_c10d_functional`` start and ``wait_tensor`` nodes: AOTAutograd traces through it, the partitioner and Inductor know
that namespace, and starts and waits stay apart. (The library's own gradients are those of a partial loss; here the
loss is the same on all ranks.)

``group`` is the name of a process group of torch.distributed; empty where nothing is sent (planning, one rank, or a
measurement of what communication costs): every rank then takes what it has for what the others would send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives
from torch import Tensor

from latentscan.ir.ops.orders import first_order
from latentscan.ir.ops.waiting import wait

_OPS = torch.ops._c10d_functional


def indices_on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """Numbers as an index there, int64. Built there directly, a device would first do all that it has to do, in every
    call, and its queue would be empty."""
    return torch.tensor(list(numbers), dtype=torch.long).to(device, non_blocking=True)


def start_sum(x: Tensor, group: str) -> Tensor:
    """Start a sum over a group's ranks; a copy where nothing is sent."""
    return _OPS.all_reduce(x.contiguous(), "sum", group) if group else x.clone(memory_format=torch.contiguous_format)


def sum_over(x: Tensor, group: str) -> Tensor:
    """The sum over a group's ranks, without gradients."""
    return wait(start_sum(x, group), group, "all_reduce") if group else start_sum(x, group)


def gather_rows(x: Tensor, size: int, group: str) -> Tensor:
    """What the ranks have [n, ..] one after the other, [W n, ..], without gradients."""
    if not group:
        return x.repeat(size, *(1,) * (x.ndim - 1))
    return wait(_OPS.all_gather_into_tensor(x.contiguous(), size, group), group, "all_gather")


def scatter_rows(x: Tensor, size: int, group: str) -> Tensor:
    """The sum over the ranks of [W n, ..], of which each gets its [n, ..], without gradients."""
    if not group:
        return x.narrow(0, 0, x.shape[0] // size).clone()
    return wait(_OPS.reduce_scatter_tensor(x.contiguous(), "sum", size, group), group, "reduce_scatter")


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return sum_over(grad, ctx.group), None


class _ReduceStart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return start_sum(x, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


class _SumStart(torch.autograd.Function):
    """A sum that every rank goes on with in its own way: its gradient is a sum too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return start_sum(x, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return sum_over(grad, ctx.group), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return wait(x, group, "all_reduce") if group else x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


class _GatherRows(torch.autograd.Function):
    """Of values whose first dimension is split. (What a Function gives is no view of what it made: see sequence.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], rank: int, group: str) -> Tensor:
        ctx.own = sum(sizes[:rank]), sizes[rank]
        rows = x
        if sizes[rank] < max(sizes):  # an uneven gather is wrong without an error
            rows = torch.cat([rows, rows.new_zeros(max(sizes) - sizes[rank], *rows.shape[1:])])
        every = gather_rows(rows, len(sizes), group)
        if min(sizes) < max(sizes):
            every = torch.cat([every[i * max(sizes) : i * max(sizes) + n] for i, n in enumerate(sizes)])
        return every

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad.narrow(0, *ctx.own), None, None, None


class _ShareRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, total: int, own: list[int], rows: list[int], group: str) -> Tensor:
        ctx.where = dim, total, own, rows, group
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        dim, total, own, rows, group = ctx.where
        here = indices_on(grad.device, rows)
        part = grad.index_select(dim, here)
        if own == list(range(total)):
            part = sum_over(part, group)
        else:
            index, shape = indices_on(grad.device, own), list(grad.shape)
            shape[dim] = total
            part = sum_over(grad.new_zeros(shape).index_copy(dim, index, part), group).index_select(dim, index)
        return grad.index_copy(dim, here, part), None, None, None, None, None


def copy_to(x: Tensor, axis: str, group: str) -> Tensor:
    """Enter a sharded region with a value that all ranks hold: identity; its gradient is summed over the ranks."""
    return _CopyTo.apply(x, group)


def reduce_from(x: Tensor, axis: str, group: str) -> Tensor:
    """Leave a sharded region: partial sums are summed over the ranks; the gradient passes as it is."""
    return _Wait.apply(_ReduceStart.apply(x, group), group)


def share_rows(
    x: Tensor, dim: int, total: int, own: Sequence[int], rows: Sequence[int], axis: str, group: str
) -> Tensor:  # fmt: skip
    """A shard some of whose rows other ranks hold too: identity; gradients of one row are summed over its holders.

    Args:
        x: this rank's rows along ``dim``.
        total: rows that several ranks hold, which alone are sent. own: which of these this rank has. rows: where in x.
    """
    return _ShareRows.apply(x, dim, total, list(own), list(rows), group)


def gather_last(x: Tensor, sizes: Sequence[int], rank: int, axis: str, group: str) -> Tensor:
    """The whole of a value whose last dimension is split; the gradient, which all ranks hold, is cut again.

    Args:
        x: [.., sizes[rank]]. sizes: of every rank; shorter ones are padded on the way.
    """
    return _GatherRows.apply(x.movedim(-1, 0), list(sizes), rank, group).movedim(0, -1).contiguous()


def embed_rows(
    ids: Tensor, weight: Tensor, start: int, stop: int, padding: int | None, axis: str, group: str
) -> Tensor:
    """``F.embedding`` of a table whose rows ``start`` to ``stop`` are here: other ids give zeros, then a sum.

    Args:
        ids: any shape. weight: [stop - start, features]. padding: number of a row (of the whole) without gradient.
    """
    here = (ids >= start) & (ids < stop)
    own = padding - start if padding is not None and start <= padding < stop else None
    rows = torch.nn.functional.embedding(torch.where(here, ids - start, 0), weight, own)
    return reduce_from(torch.where(here.unsqueeze(-1), rows, 0.0), axis, group)


class _SplitNorm(torch.autograd.Function):
    """Keeps x, z and a number a token and group; all else is made again in the backward, in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor | None, weight: Tensor, eps: float, size: int, groups: list[int], count: int,
        before: bool, group: str,
    ) -> Tensor:  # fmt: skip
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        value, gate = x.to(wide), None if z is None else torch.nn.functional.silu(z.to(wide))
        if gate is not None and not before:
            value = value * gate
        inverse = torch.rsqrt(sum_over(value.square() @ _members(groups, count, value), group) / size + eps)
        out = value * (inverse @ _members(groups, count, value).t()) * weight.to(wide)
        if gate is not None and before:
            out = out * gate
        ctx.save_for_backward(x, z, weight, inverse)
        ctx.of = size, groups, count, before, group
        return out.to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, z, weight, inverse = ctx.saved_tensors
        size, groups, count, before, group = ctx.of
        wide = inverse.dtype
        member = _members(groups, count, inverse)
        value, through, gate, slope = x.to(wide), grad.to(wide), None, None
        if z is not None:
            raised = torch.sigmoid(z.to(wide))
            gate = raised * z.to(wide)
            slope = raised * (1 + z.to(wide) * (1 - raised))
            value, through = (value, through * gate) if before else (value * gate, through)
        unit = value * (inverse @ member.t())  # the normalised value
        dweight = (through * unit).flatten(0, -2).sum(0).to(weight.dtype)
        dunit = through * weight.to(wide)
        shared = sum_over((dunit * unit) @ member, group) / size
        dvalue = (dunit - unit * (shared @ member.t())) * (inverse @ member.t())
        dz = None
        if gate is not None and slope is not None and z is not None:
            dz = grad.to(wide) * unit * weight.to(wide) * slope if before else dvalue * x.to(wide) * slope
            dz = dz.to(z.dtype)
            dvalue = dvalue if before else dvalue * gate
        return dvalue.to(x.dtype), dz, dweight, None, None, None, None, None, None


def _members(groups: Sequence[int], count: int, like: Tensor) -> Tensor:
    """[local channels, groups]: 1 where a channel is of a group."""
    of = indices_on(like.device, groups)
    return (of[:, None] == torch.arange(count, device=like.device)).to(like.dtype)


def split_gated_norm(
    x: Tensor, z: Tensor | None, weight: Tensor, eps: float, group_size: int, groups: Sequence[int], count: int,
    norm_before_gate: bool, axis: str, group: str,
) -> Tensor:  # fmt: skip
    """A gated RMS norm whose groups of channels lie on several ranks: one all-reduce of the sums of squares (fp32).

    Args:
        x, z: [.., local channels]; weight: [local channels].
        group_size: channels of a whole group. groups: the group of each local channel; count: groups in all.
    """
    return _SplitNorm.apply(x, z, weight, eps, group_size, list(groups), count, norm_before_gate, group)


# What a graph's node that communicates can call; each takes the axis and the group as its last arguments.
COLLECTIVES = (copy_to, reduce_from, share_rows, gather_last, embed_rows, split_gated_norm)


def gather_shards(x: Tensor, dim: int, held: Sequence[Sequence[int]], total: int, group: str) -> Tensor:
    """The whole of a tensor of which rank r holds the slices ``held[r]`` along ``dim``. No gradients.

    Every rank of the group must call it. Shards may differ in size and overlap (then they are equal there).
    """
    if not group or len(held) == 1:
        return x.clone()
    most = max(len(h) for h in held)
    rows = x.movedim(dim, 0).contiguous()
    if rows.shape[0] < most:
        rows = torch.cat([rows, rows.new_zeros(most - rows.shape[0], *rows.shape[1:])])
    every = wait(_OPS.all_gather_into_tensor(rows, len(held), group), group, "all_gather")
    every = every.unflatten(0, (len(held), most))
    whole = x.new_empty((total, *rows.shape[1:]))
    for part, indices in zip(every, held, strict=True):
        whole[torch.tensor(list(indices), dtype=torch.long, device=x.device)] = part[: len(indices)]
    return whole.movedim(0, dim).contiguous()


def first_holds(x: Tensor | None, like: Tensor, shape: Sequence[int], group: str) -> Tensor:
    """A tensor that only the group's first rank holds, on every rank. Every rank must call it. No gradients."""
    mine = like.new_zeros(tuple(shape)) if x is None else x.detach()
    return sum_over(mine, group) if group else mine.clone()
