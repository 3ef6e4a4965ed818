"""Waiting for a collective, with an error that says who waited for what, and where the other ranks are.

The time-out is the process group's (``wrap(..., timeout=)`` sets it). Whoever waits in vain writes to the store that
torch.distributed keeps for the job where it is, and reads what the others wrote there.

The name of a group may carry the module that a collective is for: ``0@model.layers.1.mlp`` is group ``0``
(:func:`alias`). So the place survives every compiler in between, down to the calls that Inductor writes.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed._functional_collectives
from torch import Tensor

from latentscan.ir.errors import MeshError
from latentscan.ir.ops import watching

_OPS = torch.ops._c10d_functional
ANSWER = 5.0  # seconds that the others are given to say where they are
_SEPARATOR = "@"


def alias(group: str, place: str) -> str:
    """A group's name that also tells what it is used for; the group itself is the same."""
    if not group or not place:
        return group
    name = f"{group}{_SEPARATOR}{place}"
    from torch._C import _distributed_c10d as c10d

    pg = _resolve(group)
    with contextlib.suppress(RuntimeError):  # there is none of that name, or its group is gone
        if _resolve(name) is pg:
            return name
    with contextlib.suppress(RuntimeError):
        c10d._unregister_process_group(name)
    c10d._register_process_group(name, pg)
    return name


def plain(group: str) -> str:
    """The group's own name."""
    return group.partition(_SEPARATOR)[0]


def place_of(group: str) -> str:
    """What a group's name says that it is used for; empty if nothing."""
    return group.partition(_SEPARATOR)[2]


def _resolve(group: str) -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(group)


def wait(x: Tensor, group: str, what: str, sent: Tensor | None = None) -> Tensor:
    """``x`` once the collective that makes it is done.

    Args:
        group: of the collective. what: its name.
        sent: what it sends, where work runs in between: a device reads it until the wait, so nothing may take its
            memory before (a start does not hold it).

    Raises:
        MeshError: the other ranks did not come in time, or one ended.
    """
    if torch.compiler.is_compiling():  # a compiler sees the wait alone
        return _OPS.wait_tensor(x)
    try:
        made = _OPS.wait_tensor(x)
    except RuntimeError as error:
        raise lost(group, what, error) from error
    watching.waited(made, plain(group), group, what)
    return made


def late(group: str, what: str, answer: float = ANSWER) -> str:
    """What :mod:`latentscan.ir.ops.watching` says of a collective that a device waits for."""
    # What was started last has a later number than what is waited for.
    return str(lost(group, what, RuntimeError("the time-out is near"), counted=False, answer=answer))


def is_transport(error: BaseException) -> bool:
    """Whether an error is one of a process group's backend: a time-out, or a connection that broke."""
    text = f"{type(error).__name__} {error}"
    return any(word in text for word in ("gloo", "CCL", "DistBackendError", "Connection closed", "Timed out waiting"))


def lost(
    group: str, what: str, error: BaseException, *, counted: bool = True, answer: float = ANSWER
) -> MeshError:  # fmt: skip
    """The error of a wait that failed: this rank, the collective, the module, and where the others say they are.

    Args:
        counted: it is the group's last collective, whose number can be told. answer: seconds that the others are given.
    """
    import torch.distributed as dist

    name, place = plain(group), place_of(group)
    here = f"{what} for {place}" if place else what
    rank, told = 0, "nothing is known of the others"
    with contextlib.suppress(Exception):
        pg = _resolve(name)
        rank = dist.get_rank()
        with contextlib.suppress(RuntimeError):  # not every backend counts
            if counted:
                here = f"{here}, collective {pg._get_sequence_number_for_group()} of its group"
        told = _others(name, pg, rank, here, answer)
    ended = "closed" in str(error) or "reset" in str(error)
    why = "another rank ended" if ended else "the others did not come in time"
    return MeshError(
        f"rank {rank} waited at {here}: {why} ({_short(error)}). {told}",
        where=place,
        remedy="see the ranks that gave no sign; start the job again from its last checkpoint",
    )


def _short(error: BaseException) -> str:
    text = str(error).split("] ", 1)[-1].split(". ")[0]
    return text[:160]


def _others(group: str, pg: Any, rank: int, here: str, answer: float) -> str:
    """Tell the store where this rank is, and read where the others of the group are."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    store.set(f"latentscan/{group}/{rank}", here)
    deadline, lines = time.monotonic() + answer, []
    for other in dist.get_process_group_ranks(pg):
        if other == rank:
            continue
        key = f"latentscan/{group}/{other}"
        try:
            left = deadline - time.monotonic()
            if left > 0.005:  # of less than a millisecond a store makes none, and waits for ever
                store.wait([key], timedelta(seconds=left))
            elif not store.check([key]):
                raise TimeoutError
            lines.append(f"rank {other} waits at {store.get(key).decode()}")
        except Exception:  # noqa: BLE001  the wait's own time-out, or a store that went with its rank
            lines.append(f"rank {other} gave no sign: it ended, or computes, or waits for a shorter time")
    return "; ".join(lines)
