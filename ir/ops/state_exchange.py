"""How ranks of a context-parallel axis pass on the states of a Mamba-2 layer (MATH 6), by one of two algorithms.

Rank r's shard has the decay ``D_r`` and gives the state ``S_r`` from zero; what enters is ``h_{r+1} = D_r h_r + S_r``.

    all-gather  every rank sends its (D, S) to all; one step; (R - 1) states leave a rank
    log-scan    in step k to the rank 2^k further on; ceil(log2 R) steps and states

Forward:  ``chunk_state`` - :func:`state_start` - other work - :func:`state_wait` - :func:`entering_state` - scan.
Backward: a scan whose final state has the gradient ``dS_r = sum_{q>r} (prod_{r<j<q} D_j) G_q``, with ``G_q`` what the
outputs of rank q give to the state that entered there. G needs little work, so its exchange can start as soon as the
outputs' gradient is there and be waited for later, once the gradients of other work are done. Autograd would do the
whole local backward first; so the scan itself runs without autograd, between two nodes:

    :func:`scan_enter`  before what hides the exchange; its backward waits, and then does the scan's whole backward
    :func:`scan_leave`  after the scan; its backward starts the exchange

``scan_enter`` gives tokens (zeros without storage) that ``scan_leave`` takes; what flows back in place of the tokens'
gradients is what the scan's backward needs. All is ``_c10d_functional``; every rank takes part with the same sizes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives
from torch import Tensor

from latentscan.ir.ops.exchange import ring
from latentscan.ir.ops.opaque import only_if
from latentscan.ir.ops.orders import first_order
from latentscan.ir.ops.waiting import wait

_OPS = torch.ops._c10d_functional
ALGORITHMS = ("all-gather", "log-scan")


def steps_of(size: int) -> int:
    """Steps of a log-scan over ``size`` ranks: the least k with 2^k >= size."""
    return (size - 1).bit_length()


def cheaper(size: int) -> str:
    """The algorithm by which fewer states leave a rank."""
    return "log-scan" if steps_of(size) < size - 1 else "all-gather"


def pack_state(state: Tensor, decay: Tensor, ids: Tensor | None, rank: int) -> Tensor:
    """One message a rank: [1, b, H, 1 + P N], the decay first, fp32; no decay is left where a sequence starts.

    Args:
        ids: of :func:`latentscan.ir.ops.exchange.edge_ids`, for packed sequences.
    """
    if ids is not None:
        decay = decay * goes_on(ids, rank)[..., 0, 0]
    return torch.cat([decay[..., None], state.flatten(2)], -1)[None].detach()


def goes_on(ids: Tensor, rank: int) -> Tensor:
    """Whether the sequence at the end of the shard before goes on in this one, [b, 1, 1, 1]; false on rank 0, before
    which a whole row's initial state belongs to its first sequence, true there."""
    same = ids[(rank - 1) % ids.shape[0], :, -1] == ids[rank, :, 0]
    return (same | torch.full_like(same, rank == 0))[:, None, None, None]


# -- forward ----------------------------------------------------------------------------------------------------------


def state_start(message: Tensor, algorithm: str, axis: str, size: int, rank: int, group: str) -> Tensor:
    """Start the exchange of :func:`pack_state`'s message; for :func:`state_wait` alone."""
    message = message.detach()
    if not group:
        return message.expand(size, *message.shape[1:]).clone() if algorithm == "all-gather" else message.flatten()
    if algorithm == "all-gather":
        return _OPS.all_gather_into_tensor(message.contiguous(), size, group)
    return ring(message, 1, size, rank, group)


def state_wait(started: Tensor, message: Tensor, algorithm: str, axis: str, size: int, rank: int, group: str) -> Tensor:
    """What :func:`state_start` started: all messages [R, b, H, 1 + P N], or by log-scan that of the ranks before
    together, [1, b, H, 1 + P N]."""
    if not group:
        return started.clone() if algorithm == "all-gather" else before(started, message, 1, size, rank, group)
    if algorithm == "all-gather":
        return wait(started, group, "all_gather")
    return before(started, message, 1, size, rank, group)


def before(started: Tensor, own: Tensor, way: int, size: int, rank: int, group: str) -> Tensor:
    """The messages of all ranks before this one (``way`` 1) or after it (-1) as one, like ``own``; steps after the
    first, which is started, wait for each other."""
    place = rank if way > 0 else size - 1 - rank
    outside, inside, distance = None, own, 1
    while distance < size:
        got = (wait(started, group, "send") if group else started).view(own.shape)
        there = place >= distance  # ring ends are closed: what comes round is masked
        got = only_if(got, there)
        got = torch.cat([got[..., :1] + (not there), got[..., 1:]], -1)
        outside = got if outside is None else _joined(got, outside)
        inside = _joined(got, inside)
        distance *= 2
        if distance < size:
            started = ring(inside, way * distance, size, rank, group) if group else inside.flatten()
    assert outside is not None
    return outside


def _joined(first: Tensor, then: Tensor) -> Tensor:
    """Two messages as one: ``h -> D2 (D1 h + S1) + S2``."""
    decay, state = first[..., :1], first[..., 1:]
    return torch.cat([then[..., :1] * decay, then[..., :1] * state + then[..., 1:]], -1)


def _forward(messages: Tensor, upto: int, start: Tensor | None, head_dim: int) -> Tensor:
    """``h -> D h + S`` of the first ``upto`` messages, from ``start`` [b, H, P, N] or zero; a tensor of its own."""
    state = None if start is None else start.to(messages.dtype)
    for message in messages.unbind(0)[:upto]:
        added = message[..., 1:].unflatten(-1, (head_dim, -1))
        state = added if state is None else torch.addcmul(added, message[..., :1, None], state)
    if upto == 0:  # of what nobody reads a compiler drops the exchange, on this rank alone
        nothing = only_if(messages[0, ..., 1:].unflatten(-1, (head_dim, -1)), False)
        state = nothing if state is None else state + nothing
    assert state is not None
    return state.clone(memory_format=torch.contiguous_format)


def _back(
    decays: Tensor, into: Tensor, rank: int, last: Tensor | None, *, initial: bool
) -> list[Tensor | None]:  # fmt: skip
    """The adjoint of :func:`_forward`: the gradients of the states *after* each rank, from what this rank's outputs
    give to the state before it (``into``) and ``last`` of the state after all. None stands for zero.

    Args:
        decays: [R, b, H]. initial: whether the gradient of the state before all ranks is wanted, too.

    Returns:
        those of the ranks in their order; before them, if wanted, that of the state before all.
    """
    found: list[Tensor | None] = [last]
    grad = last
    for place in reversed(range(0 if initial else 1, decays.shape[0])):
        if grad is not None:
            grad = _times(decays[place], grad)
        if place == rank:
            grad = into if grad is None else grad + into
        found.append(grad)
    return found[::-1]


def _times(factor: Tensor, state: Tensor) -> Tensor:
    return factor[..., None, None] * state


def entering_state(
    messages: Tensor, init: Tensor | None, ids: Tensor | None, head_dim: int, algorithm: str, rank: int
) -> Tensor:
    """The state before this rank's first token, [b, H, P, N] in the messages' dtype. No gradient.

    Args:
        messages: of :func:`state_wait`. init: [b, H, P, N] before the whole sequence. ids: of ``edge_ids``: the state
            becomes zero where a shard starts a packed sequence.
    """
    # By log-scan the one message is that of the ranks before: nothing of rank 0, whose decay is 1.
    state = _forward(messages, rank if algorithm == "all-gather" else 1, init, head_dim)
    return (state if ids is None else state * goes_on(ids, rank)).detach()


def whole_state(
    messages: Tensor, own: Tensor, init: Tensor | None, head_dim: int, algorithm: str,
    axis: str, size: int, rank: int, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The state after the whole sequence [b, H, P, N], on every rank, and its decay [b, H]. No gradient.

    By log-scan only the last rank knows it, and one sum more tells the others.
    """
    if algorithm == "all-gather":
        decay = messages[..., 0].prod(0)
        return _forward(messages, size, init, head_dim).detach(), decay.detach()
    whole = only_if(_joined(messages, own), rank == size - 1)
    if group:
        whole = wait(_OPS.all_reduce(whole.contiguous(), "sum", group), group, "all_reduce")
    return _forward(whole, 1, init, head_dim).detach(), whole[0, ..., 0].detach().clone()


def decays_of(messages: Tensor, own: Tensor, whole: Tensor | None, algorithm: str) -> Tensor:
    """What the backward needs of the decays: of every rank [R, b, H], or by log-scan this rank's, those before it, and
    all of them, [3, b, H]."""
    if algorithm == "all-gather":
        return messages[..., 0].detach().clone()
    ones = own[0, ..., 0]
    return torch.stack([ones, messages[0, ..., 0], ones if whole is None else whole]).detach()


# -- backward ---------------------------------------------------------------------------------------------------------


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, dt, A, B, C, D, dt_bias, seq_idx, options, where) -> tuple[Tensor, ...]:  # type: ignore
        ctx.save_for_backward(x, dt, A, B, C, D, dt_bias, seq_idx)
        ctx.options, ctx.where = options, where
        ctx.set_materialize_grads(False)
        algorithm, state = where["algorithm"], (x.shape[0], *x.shape[2:], B.shape[3])
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        rows, heads, width, states = state
        message = (1, rows, heads, 1 + width * states)
        zero = x.new_empty((), dtype=wide)  # nobody reads what a token holds
        sent = zero.expand(state) if algorithm == "all-gather" else zero.expand(rows * heads * message[3])
        return x.new_empty(()).expand(x.shape), sent, zero.expand(message), zero.expand(state), zero.expand(state)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy, sent, own, entering, dwhole) -> Any:  # type: ignore[no-untyped-def, override]
        x, dt, A, B, C, D, dt_bias, seq_idx = ctx.saved_tensors
        where, group = ctx.where, ctx.where["group"]
        if where["algorithm"] == "all-gather":
            dstate = (wait(sent, group, "reduce_scatter") if group else sent).view(entering.shape)
        else:
            after = before(sent, own, -1, where["size"], where["rank"], group)
            dstate = after[0, ..., 1:].unflatten(-1, entering.shape[-2:])
            if where["final"]:
                dwhole = wait(dwhole, group, "all_reduce") if group else dwhole
                dstate = dstate + _times(after[0, ..., 0], dwhole)
        found = _kernel(where, "chunk_scan_backward")(
            dy, dstate.contiguous(), x, dt, A, B, C, D, None, dt_bias, entering, seq_idx, None, **ctx.options
        )
        dx, ddt, dA, dB, dC, dD, _, dbias, _ = found
        none = None if D is None else dD, None if dt_bias is None else dbias
        return dx, ddt, dA, dB, dC, *none, None, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y, final, t_y, t_sent, t_own, t_state, t_final, C, dt, A, dt_bias, seq_idx, decays, entering,
                init, ids, limits, where) -> Any:  # type: ignore[no-untyped-def]  # fmt: skip
        ctx.save_for_backward(C, dt, A, dt_bias, seq_idx, decays, entering, ids)
        ctx.limits, ctx.where, ctx.init = limits, where, None if init is None else init.dtype
        ctx.set_materialize_grads(False)
        return y.view_as(y), final.view_as(final)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy, dfinal) -> Any:  # type: ignore[no-untyped-def, override]
        C, dt, A, dt_bias, seq_idx, decays, entering, ids = ctx.saved_tensors
        where, rank, size, group = ctx.where, *(ctx.where[k] for k in ("rank", "size", "group"))
        if dy is None:
            dy = C.new_zeros(()).expand(*dt.shape, entering.shape[2])
        if not where["final"]:  # nobody reads it; a compiler may give zeros for its gradient nevertheless
            dfinal = None
        elif dfinal is None:
            dfinal = torch.zeros_like(entering)
        into = _kernel(where, "output_state")(dy, C, dt, A, dt_bias, seq_idx, **ctx.limits)
        if ids is not None:
            into = into * goes_on(ids, rank)
        own = dwhole = before_all = None
        if where["algorithm"] == "all-gather":
            grads = _back(decays, into, rank, dfinal, initial=ctx.init is not None)
            before_all = grads.pop(0) if ctx.init is not None else None
            given = torch.stack([only_if(into, False) if g is None else g for g in grads])
            sent = given[rank].clone()
            if group:
                sent = _OPS.reduce_scatter_tensor(given, "sum", size, group).view(into.shape)
        else:
            mine, through, all_of_them = decays
            own = torch.cat([mine[..., None], into.flatten(2)], -1)[None]
            sent = ring(own, -1, size, rank, group) if group else own.flatten()
            if ctx.init is not None:
                before_all = _times(through, into)
            if dfinal is not None:
                dwhole = _OPS.all_reduce(dfinal.contiguous(), "sum", group) if group else dfinal.clone()
                before_all = before_all if before_all is None else before_all + _times(all_of_them, dfinal)
        dinit = None if ctx.init is None or before_all is None else before_all.to(ctx.init)
        return None, None, dy, sent, own, entering, dwhole, *(None,) * 7, dinit, None, None, None


def _kernel(where: dict[str, Any], name: str) -> Any:
    return getattr(getattr(torch.ops, where["kernels"]), name).default


def scan_enter(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    seq_idx: Tensor | None, algorithm: str, axis: str, size: int, rank: int, group: str,
    *, chunk_size: int, dt_softplus: bool, dt_min: float, dt_max: float, final: bool = False,
    kernels: str = "latentscan",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Tokens for :func:`scan_leave`: gradients of a scan of these arguments, which itself runs on detached ones.

    Args:
        final: whether the state after the whole sequence is read. kernels: the namespace of the backward's ops.
    """
    options = {"chunk_size": chunk_size, "dt_softplus": dt_softplus, "dt_min": dt_min, "dt_max": dt_max}
    where = {"algorithm": algorithm, "size": size, "rank": rank, "group": group, "kernels": kernels, "final": final}
    return _Enter.apply(x, dt, A, B, C, D, dt_bias, seq_idx, options, where)


def scan_leave(
    y: Tensor, final: Tensor | None, tokens: Any, C: Tensor, dt: Tensor, A: Tensor, dt_bias: Tensor | None,
    seq_idx: Tensor | None, decays: Tensor, entering: Tensor, init: Tensor | None, ids: Tensor | None,
    algorithm: str, axis: str, size: int, rank: int, group: str,
    *, dt_softplus: bool, dt_min: float, dt_max: float, kernels: str = "latentscan",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The scan's y, and the state after the whole sequence, with gradients on all ranks.

    Args:
        y: of the scan from ``entering``. final: of :func:`whole_state`, or None where nobody reads it.
        tokens: of :func:`scan_enter`. decays: of :func:`decays_of`.
    """
    limits = {"dt_softplus": dt_softplus, "dt_min": dt_min, "dt_max": dt_max}
    where = {"algorithm": algorithm, "size": size, "rank": rank, "group": group, "kernels": kernels}
    where["final"] = final is not None
    final = entering.new_empty(0) if final is None else final  # one tensor may not be given twice
    return _Leave.apply(
        y, final, *tokens, C.detach(), dt.detach(), A.detach(), None if dt_bias is None else dt_bias.detach(), seq_idx,
        decays, entering, init, ids, limits, where,
    )  # fmt: skip


STATES = (pack_state, state_start, state_wait, entering_state, whole_state, decays_of, scan_enter, scan_leave)
TALKING = (state_start, state_wait, whole_state, scan_enter, scan_leave)
