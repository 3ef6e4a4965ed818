"""The storage of one cache layer, and the tokens that stand for it in a graph.

An :class:`Arena` holds whatever the final graph of a layer caches: K and V, or one latent, or anything else with a
sequence dimension. Graphs never see an arena, they see its *token*: an int64 CPU tensor with stride 0 that holds the
arena's id and whose length is the number of cached positions plus one. (Plus one, because a tensor of length 0 could
not carry the id.) The token makes a cache look to a compiler like a tensor that grows along one dimension.

In memory the sequence dimension comes first: a ``[batch, heads, seq, dim]`` tensor is stored as
``[capacity, batch, heads, dim]``. So the strides of its valid prefix do not depend on the capacity (growing never
recompiles anything), a prefix is one contiguous block, and growing is one copy.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from latentscan.ir.errors import CacheError

_IDS = itertools.count(1)
_ARENAS: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()
_SMALLEST = 64  # positions; the capacity of the first allocation is at least this


@dataclass(frozen=True)
class Layout:
    """The form of one cached tensor, apart from its length.

    Attributes:
        sizes: its sizes without the sequence dimension; the first one is the batch.
        seq_dim: where the sequence dimension stands in the logical tensor, at least 1.
        dtype, device: of the stored elements.
    """

    sizes: tuple[int, ...]
    seq_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor, seq_dim: int) -> Layout:
        """The layout in which ``tensor`` is cached along ``seq_dim``."""
        dim = sequence_dim(tensor.dim(), seq_dim)
        sizes = tuple(tensor.shape[:dim]) + tuple(tensor.shape[dim + 1 :])
        return cls(sizes, dim, tensor.dtype, tensor.device)

    def __str__(self) -> str:
        sizes: list[object] = list(self.sizes)
        sizes.insert(self.seq_dim, "seq")
        return f"{sizes} {str(self.dtype).removeprefix('torch.')} on {self.device}"


def sequence_dim(dims: int, seq_dim: int) -> int:
    """``seq_dim`` counted from the front. The first dimension of a cached tensor is the batch, so it is refused."""
    dim = seq_dim + dims if seq_dim < 0 else seq_dim
    if not 1 <= dim < dims:
        raise CacheError(
            f"a tensor of {dims} dimensions cannot be cached along dimension {seq_dim}",
            remedy="put the batch first and the sequence after it",
        )
    return dim


class Arena:
    """The tensors that one layer caches, all of the same length.

    Args:
        max_length: most positions; the storage is then allocated once, at the first write. None: grow by doubling.
        max_batch: most batch rows (beams count). None: any.
        where: the layer, for messages.
    """

    def __init__(self, *, max_length: int | None = None, max_batch: int | None = None, where: str = "") -> None:
        self.id = next(_IDS)
        self.max_length, self.max_batch, self.where = max_length, max_batch, where
        self.length = 0
        self.layouts: tuple[Layout, ...] = ()
        self._storage: list[torch.Tensor] = []
        _ARENAS[self.id] = self

    def __repr__(self) -> str:
        held = ", ".join(map(str, self.layouts))
        return f"Arena({self.id}, {self.length} of {self.capacity} positions: {held or 'empty'})"

    def __reduce__(self):  # a copy, in this process or another, is another arena
        tensors = [s[: self.length].clone() for s in self._storage]
        return _rebuild, (self.max_length, self.max_batch, self.where, self.length, self.layouts, tensors)

    @property
    def capacity(self) -> int:
        """Positions that fit without another allocation."""
        return self._storage[0].shape[0] if self._storage else 0

    @property
    def batch(self) -> int | None:
        """Batch rows held, None before the first write."""
        return self.layouts[0].sizes[0] if self.layouts else None

    def ensure(self, layouts: Sequence[Layout], past: int, length: int) -> None:
        """Make room for positions ``past`` to ``length``; what is held before ``past`` stays, the rest is forgotten.

        Raises:
            CacheError: ``past`` positions are not here, they have another form, or a limit is exceeded.
        """
        layouts = tuple(layouts)
        if past > self.length:
            raise CacheError(
                f"a graph reads {past} cached positions but only {self.length} are held",
                where=self.where,
                remedy="use each cache with the model that filled it, and copy caches with copy.deepcopy",
            )
        if past and layouts != self.layouts:
            raise CacheError(
                f"the cache holds {_text(self.layouts)} but the graph appends {_text(layouts)}",
                where=self.where,
                remedy="start with a fresh cache, or call reset()",
            )
        if self.max_length is not None and length > self.max_length:
            raise CacheError(
                f"{length} positions do not fit a cache of at most {self.max_length}",
                where=self.where,
                remedy="make the cache with a larger max_len, or without one",
            )
        if self.max_batch is not None and layouts and layouts[0].sizes[0] > self.max_batch:
            raise CacheError(
                f"{layouts[0].sizes[0]} batch rows do not fit a cache of at most {self.max_batch}",
                where=self.where,
                remedy="make the cache with a larger max_batch (beams count as rows), or without one",
            )
        if layouts != self.layouts:
            self._storage, self.layouts, self.length = [], layouts, 0
        if length > self.capacity or not self._storage:
            capacity = self.max_length or max(_SMALLEST, 1 << (length - 1).bit_length())
            self._reallocate(capacity, past)
        self.length = length

    def _reallocate(self, capacity: int, keep: int) -> None:
        old, self._storage = self._storage, []
        for i, layout in enumerate(self.layouts):
            self._storage.append(_empty(capacity, layout))
            if keep:
                self._storage[i][:keep].copy_(old[i][:keep])

    def prefix(self, index: int, length: int | None = None) -> torch.Tensor:
        """The first ``length`` positions of tensor ``index``, sequence dimension in its logical place: a view."""
        length = self.length if length is None else length
        return self._storage[index][:length].movedim(0, self.layouts[index].seq_dim)

    def tensors(self) -> list[torch.Tensor]:
        """The valid prefix of every tensor held: views, overwritten when the cache is cropped and filled again."""
        return [self.prefix(i) for i in range(len(self._storage))]

    def reorder(self, rows: torch.Tensor) -> None:
        """Batch row ``i`` becomes what row ``rows[i]`` was; ``rows`` has shape ``[new batch]``."""
        for i, storage in enumerate(self._storage):
            chosen = storage[: self.length].index_select(1, rows.to(storage.device))
            self._replace_rows(i, chosen)

    def batch_select(self, indices: torch.Tensor) -> None:
        """Keep the batch rows that ``indices`` (integers or a bool mask, ``[batch]``) names."""
        for i, storage in enumerate(self._storage):
            self._replace_rows(i, storage[: self.length][:, indices.to(storage.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every batch row becomes ``repeats`` neighbouring rows."""
        for i, storage in enumerate(self._storage):
            self._replace_rows(i, storage[: self.length].repeat_interleave(repeats, dim=1))

    def _replace_rows(self, index: int, rows: torch.Tensor) -> None:
        layout = self.layouts[index]
        if rows.shape[1] != layout.sizes[0]:
            layout = Layout((rows.shape[1], *layout.sizes[1:]), layout.seq_dim, layout.dtype, layout.device)
            self._storage[index] = _empty(self.capacity, layout)
            self.layouts = (*self.layouts[:index], layout, *self.layouts[index + 1 :])
        self._storage[index][: self.length].copy_(rows)

    def crop(self, length: int) -> None:
        """Forget the positions from ``length`` on."""
        self.length = min(self.length, max(length, 0))

    def reset(self) -> None:
        """Forget everything and free the storage, except where ``max_length`` asked for it once and for all."""
        self.length = 0
        if self.max_length is None:
            self._storage, self.layouts = [], ()

    def bytes_held(self) -> int:
        """Bytes of the valid positions."""
        return self.length * self.bytes_per_position()

    def bytes_per_position(self) -> int:
        """Bytes of one position of all batch rows; 0 before the first write."""
        return sum(s[0].numel() * s.element_size() for s in self._storage)

    def bytes_allocated(self) -> int:
        """Bytes of the storage, used or not."""
        return sum(s.numel() * s.element_size() for s in self._storage)


def _empty(capacity: int, layout: Layout) -> torch.Tensor:
    with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
        return torch.empty((capacity, *layout.sizes), dtype=layout.dtype, device=layout.device)


def _rebuild(max_length, max_batch, where, length, layouts, tensors) -> Arena:
    arena = Arena(max_length=max_length, max_batch=max_batch, where=where)
    if tensors:
        arena.ensure(layouts, 0, length)
        for storage, tensor in zip(arena._storage, tensors, strict=True):
            storage[:length].copy_(tensor)
    return arena


def _text(layouts: Sequence[Layout]) -> str:
    return " and ".join(map(str, layouts)) or "nothing"


# -- tokens --------------------------------------------------------------------------------------------------------


def make_token(arena: Arena | int, length: int) -> torch.Tensor:
    """A token for ``length`` cached positions: int64, CPU, shape ``[length + 1]``, stride 0."""
    id_ = arena.id if isinstance(arena, Arena) else arena
    with torch.inference_mode(False):
        return torch.full((), id_, dtype=torch.int64, device="cpu").expand(length + 1)


def token_length(token: torch.Tensor) -> int:
    """How many positions are cached, as the token says; symbolic where the token is."""
    return token.shape[0] - 1


def arena_of(token: torch.Tensor) -> Arena:
    """The arena that a token stands for.

    Raises:
        CacheError: it was freed, or the token comes from another process.
    """
    arena = _ARENAS.get(int(token[0]))
    if arena is None:
        raise CacheError(
            f"the cache of token {int(token[0])} does not exist (any more)",
            remedy="keep the GraphCache alive while it is used, and copy it with copy.deepcopy",
        )
    return arena
