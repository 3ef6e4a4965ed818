"""``swap_out`` at run time: saved activations of marked storages go to the host and come back for the backward pass.

The graph says which values are swapped; what autograd saved of their storages, whichever call saved it and whether
before or after, is found by saved-tensor hooks around the whole call. A storage is copied to the host on a stream of
its own as soon as anything saved it; its device memory is then free once its last reader is done. In the backward pass
the gradient's way through one mark starts the copy back of the mark before it, so that it is there when its layer's
backward begins.

Works where the graph runs call by call. A graph that Inductor compiles hands all its saved activations over at once, at
the end of its forward and again at the start of its backward, so that nothing would be gained: refused.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from latentscan.ir.errors import RefusedError
from latentscan.ir.graph import Graph
from latentscan.ir.ops.swap import SWAP_OUT

_CURRENT: contextvars.ContextVar[Swaps | None] = contextvars.ContextVar("latentscan_swaps", default=None)


class HostCopy:
    """One storage on the host. ``prefetch`` starts the way back, ``fetch`` ends it.

    Attributes:
        host: its bytes, in pinned memory for an accelerator.
    """

    def __init__(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        self._device = device
        self._again: torch.Tensor | None = None
        self._event: Any = None
        whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # type: ignore[call-overload]
        if device.type == "cpu":
            self.host = whole.clone()
            return
        self.host = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=True)
        stream = side_stream(device)
        stream.wait_stream(torch.get_device_module(device).current_stream(device))
        with torch.get_device_module(device).stream(stream):
            self.host.copy_(whole, non_blocking=True)
        whole.record_stream(stream)

    def prefetch(self) -> None:
        if self._again is not None:
            return
        if self._device.type == "cpu":
            self._again = self.host.clone()
            return
        module, stream = torch.get_device_module(self._device), side_stream(self._device)
        self._again = torch.empty(self.host.shape, dtype=torch.uint8, device=self._device)
        stream.wait_stream(module.current_stream(self._device))  # the memory may have had another reader
        with module.stream(stream):
            self._again.copy_(self.host, non_blocking=True)
            self._event = stream.record_event()

    def fetch(self) -> torch.Tensor:
        """All bytes on the device again."""
        self.prefetch()
        assert self._again is not None
        if self._event is not None:
            current = torch.get_device_module(self._device).current_stream(self._device)
            current.wait_event(self._event)
            self._again.record_stream(current)
        return self._again


_STREAMS: dict[torch.device, Any] = {}


def side_stream(device: torch.device) -> Any:
    """The stream that copies between a device and the host; one for each device of the process."""
    if device not in _STREAMS:
        _STREAMS[device] = torch.get_device_module(device).Stream(device)
    return _STREAMS[device]


class Saved:
    """What stands for a saved tensor: itself, or a view of a storage that is on the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: Any = tensor
        self.copy: HostCopy | None = None
        self._view: tuple[Any, ...] = ()
        self._unpack: Callable[[Any], torch.Tensor] | None = None  # of the caller's own hooks

    def move(self, copy: HostCopy) -> None:
        t = self.tensor
        self._view = (t.dtype, t.shape, t.stride(), t.storage_offset())
        self.tensor, self.copy = None, copy

    def hand_on(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        """Let the caller's own hooks hold the tensor; what is swapped is the host's already."""
        if self.copy is None:
            self.tensor, self._unpack = pack(self.tensor), unpack

    def get(self) -> torch.Tensor:
        if self.copy is None:
            return self.tensor if self._unpack is None else self._unpack(self.tensor)
        dtype, shape, stride, offset = self._view
        return self.copy.fetch().view(dtype).as_strided(shape, stride, offset)


class Swaps:
    """The swapped storages of one call of a graph; also the hooks around that call.

    Saved-tensor hooks of the caller are given what is not swapped, once the call is over.
    """

    def __init__(self) -> None:
        self.copies: list[HostCopy] = []  # in the order of the forward pass
        self._marked: dict[int, tuple[StorageWeakRef, list[HostCopy]]] = {}
        self._saved: list[weakref.ref[Saved]] = []  # in the order of saving

    def mark(self, x: torch.Tensor) -> None:
        """From here on, whatever is saved of the storage of ``x`` is held by the host."""
        storage = x.untyped_storage()
        # While the weak reference lives, no other storage can have this one's number.
        self._marked.setdefault(storage._cdata, (StorageWeakRef(storage), []))
        for saved in self.alive():
            if saved.tensor is not None and saved.tensor.untyped_storage()._cdata == storage._cdata:
                self._move(saved)

    def alive(self) -> list[Saved]:
        """What was saved and is still wanted."""
        return [saved for r in self._saved if (saved := r()) is not None]

    def pack(self, tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor)
        self._saved.append(weakref.ref(saved))
        if tensor.untyped_storage()._cdata in self._marked:
            self._move(saved)
        return saved

    def _move(self, saved: Saved) -> None:
        storage = saved.tensor.untyped_storage()
        held = self._marked[storage._cdata][1]
        if not held:
            held.append(HostCopy(storage, saved.tensor.device))
            self.copies.append(held[0])
        saved.move(held[0])

    def prefetch(self, before: int) -> None:
        """Start the way back of the last of the first ``before`` copies."""
        if before:
            self.copies[before - 1].prefetch()


class _Mark(torch.autograd.Function):
    """The identity; its backward starts the way back of the mark before it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, swaps: Swaps, stays: bool) -> torch.Tensor:
        ctx.swaps, ctx.before = swaps, len(swaps.copies)
        if not stays:
            swaps.mark(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.swaps.prefetch(ctx.before)
        return grads[0], None, None


def swap_out(x: torch.Tensor, stays: bool = False) -> torch.Tensor:
    """``x``, marked (if it does not stay). Outside of a call that swaps, or without gradients, it is ``x`` itself."""
    swaps = _CURRENT.get()
    if swaps is None or not torch.is_grad_enabled() or not x.requires_grad:
        return x
    return _Mark.apply(x, swaps, stays)


class Swapping:
    """A graph's callable that runs under the hooks of a fresh :class:`Swaps`."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._run(*args)
        swaps = Swaps()
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        token = _CURRENT.set(swaps)
        try:
            with torch.autograd.graph.saved_tensors_hooks(swaps.pack, Saved.get):
                result = self._run(*args)
        finally:
            _CURRENT.reset(token)
        if outer is not None:
            for saved in swaps.alive():
                saved.hand_on(*outer)
        return result


def lower_swaps(graph: Graph, *, inductor: bool) -> int:
    """Give every ``swap_out`` of a graph its run-time form, in place; without gradients it goes.

    Returns:
        the number of marks that are left. With any, the graph has to run as :class:`Swapping`.

    Raises:
        RefusedError: the graph trains and Inductor is to compile it.
    """
    nodes = graph.calls(SWAP_OUT.op)
    if nodes and graph.training and inductor:
        raise RefusedError(
            "a graph that Inductor compiles takes all saved activations back at once when its backward starts",
            where="mla-swap-core-attn-out",
            remedy="pass inductor=False, or leave the swap out",
        )
    for node in nodes:
        if graph.training:
            node.target = swap_out
        else:
            graph.replace(node, node.args[0])  # type: ignore[arg-type]
            graph.graph.erase_node(node)
    return len(nodes) if graph.training else 0
