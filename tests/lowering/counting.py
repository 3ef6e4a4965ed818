"""Launches, bytes moved and bytes kept for the backward of a training step, counted instead of timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from latentscan.ir.ops.base import REGISTRY
from latentscan.runtime.executable import Executable

_FREE = {"detach", "alias", "empty", "empty_like", "new_empty", "empty_strided", "_local_scalar_dense"}


@dataclass
class Counts:
    """What ran. A canonical op counts as one launch and moves what its cost says; a view moves nothing."""

    launches: int = 0
    moved: int = 0
    kept: int = 0
    by_name: dict[str, int] = field(default_factory=dict)


class _Counting(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._opname
        returns = func._schema.returns
        view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if view or name in _FREE or func.is_view:
            return out
        self.counts.launches += 1
        self.counts.by_name[name] = self.counts.by_name.get(name, 0) + 1
        if func in REGISTRY:
            cost = REGISTRY[func].cost(*args, **(kwargs or {}))
            self.counts.moved += int(cost.read + cost.written)
        else:
            tensors = [t for t in tree_flatten((args, kwargs, out))[0] if isinstance(t, torch.Tensor)]
            self.counts.moved += sum(t.numel() * t.element_size() for t in tensors)
        return out


@contextmanager
def _kept_bytes(counts: Counts) -> Iterator[None]:
    """Bytes of the storages that autograd saves, each counted once; parameters and inputs are there anyway."""
    seen: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and not isinstance(tensor, torch.nn.Parameter):
            seen[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield
    counts.kept = sum(t.untyped_storage().nbytes() for t in seen.values())


def count(step: Callable[[], torch.Tensor]) -> Counts:
    """Counts of a step of a wrapped model (which returns the loss; compiled before) and of its backward.

    Dynamo does not run under a dispatch mode: the mode is on only while a finished graph runs.
    """
    counts = Counts()
    original = Executable.__call__

    def counted(self: Executable, *args: Any) -> Any:
        with _Counting(counts):
            return original(self, *args)

    Executable.__call__ = counted  # type: ignore[method-assign]
    try:
        with _kept_bytes(counts):
            loss = step()
    finally:
        Executable.__call__ = original  # type: ignore[method-assign]
    with _Counting(counts):
        loss.backward()
    return counts
