"""Appending to a cache.

``cache_append`` is what a graph says: these tensors follow what the token's arena holds, give me all of it. It is
functional in the IR, so passes may change what is appended. Executed as it stands it is correct but copies the whole
cache; the last step of every pipeline (``latentscan.lowering.cache``) turns it into ``arena_write`` and a slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from latentscan.ir.arena import Layout, arena_of, make_token, sequence_dim, token_length
from latentscan.ir.errors import CacheError
from latentscan.ir.ops.base import Cost, define
from latentscan.ir.sizes import expression


def _append(token: torch.Tensor, tensors: Sequence[torch.Tensor], seq_dims: Sequence[int]):
    """Write ``tensors`` behind the token's positions and return copies of all that is then cached, and a new token."""
    past, count = token_length(token), _count(tensors, seq_dims)
    arena = arena_of(token)
    layouts = [Layout.of(t, d) for t, d in zip(tensors, seq_dims, strict=True)]
    arena.ensure(layouts, past, past + count)
    full = []
    for i, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
        view = arena.prefix(i, past + count)
        view.narrow(layout.seq_dim, past, count).copy_(tensor)
        full.append(view.clone(memory_format=torch.contiguous_format))
    return full, make_token(arena, past + count)


def _append_fake(token: torch.Tensor, tensors: Sequence[torch.Tensor], seq_dims: Sequence[int]):
    length = token_length(token) + _count(tensors, seq_dims)
    full = []
    for tensor, seq_dim in zip(tensors, seq_dims, strict=True):
        shape = list(tensor.shape)
        shape[sequence_dim(tensor.dim(), seq_dim)] = length
        full.append(tensor.new_empty(shape))
    return full, token.new_empty_strided((length + 1,), (0,))


def _count(tensors: Sequence[torch.Tensor], seq_dims: Sequence[int]) -> int:
    if not tensors or len(tensors) != len(seq_dims):
        raise CacheError(f"cache_append got {len(tensors)} tensors and {len(seq_dims)} sequence dimensions")
    counts = [t.shape[sequence_dim(t.dim(), d)] for t, d in zip(tensors, seq_dims, strict=True)]
    if any(c != counts[0] for c in counts[1:]):
        raise CacheError(f"cache_append got tensors of different lengths: {counts}")
    return counts[0]


def _append_cost(token: torch.Tensor, tensors: Sequence[torch.Tensor], seq_dims: Sequence[int]) -> Cost:
    """What the lowered form costs: the new positions are read and written once (reading the rest is the consumer's)."""
    moved = sum((expression(t.numel()) * t.element_size() for t in tensors), sympy.Integer(0))
    return Cost(read=moved, written=moved)


def _write(arena: torch.Tensor, position: int, x: torch.Tensor, *, seq_dim: int) -> None:
    """Write ``x`` into ``arena`` at ``position`` along ``seq_dim``; both have the same shape otherwise."""
    arena.narrow(seq_dim, position, x.shape[seq_dim]).copy_(x)


def _write_fake(arena: torch.Tensor, position: int, x: torch.Tensor, *, seq_dim: int) -> None:
    return None


def _write_cost(arena: torch.Tensor, position: int, x: torch.Tensor, *, seq_dim: int) -> Cost:
    moved = expression(x.numel()) * x.element_size()
    return Cost(read=moved, written=moved)


CACHE_APPEND = define(
    "cache_append(Tensor token, Tensor[] tensors, int[] seq_dims) -> (Tensor[] full, Tensor token)",
    reference=_append,
    fake=_append_fake,
    cost=_append_cost,
)

# The position is a number, not the token: on a GPU the kernel then needs no CPU tensor.
ARENA_WRITE = define(
    "arena_write(Tensor(a!) arena, SymInt position, Tensor x, *, int seq_dim) -> ()",
    reference=_write,
    fake=_write_fake,
    cost=_write_cost,
)
