"""``packing_mask``: several sequences in one row, told by position ids that do not follow on.

``fit_padding``: a padding mask of another length than the keys.

``as_many_tokens``: an input of which the graph does not know, but needs, that it is as long as another.

``token_positions``: position ids in the form in which a cache holds them. An op, because position ids are an input
whose sizes a graph need not know to be those of its other inputs.
"""

from __future__ import annotations

from typing import Any

import torch

from latentscan.ir.errors import MeshError
from latentscan.ir.ops.base import Cost, define
from latentscan.kernels.reference.masks import fit_padding as _fit_padding
from latentscan.kernels.reference.masks import packing_mask as _reference
from latentscan.kernels.reference.masks import token_positions as _token_positions


def _fake(mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(mask, memory_format=torch.contiguous_format)


def _cost(mask: Any, positions: Any) -> Cost:
    return Cost()


packing_mask = define(
    "packing_mask(Tensor mask, Tensor positions) -> Tensor",
    reference=_reference,
    fake=_fake,
    cost=_cost,
    axes={
        "mask": ("batch", "one", "seq", "keys"),
        "positions": ("batch", "seq"),
        "out": ("batch", "one", "seq", "keys"),
    },
)


def _fit_fake(padding: torch.Tensor, keys: int) -> torch.Tensor:
    return padding.new_empty((padding.shape[0], keys))


fit_padding = define(
    "fit_padding(Tensor padding, SymInt keys) -> Tensor",
    reference=_fit_padding,
    fake=_fit_fake,
    cost=_cost,
    axes={"padding": ("batch", "given"), "out": ("batch", "keys")},
)


def _positions_fake(positions: torch.Tensor, like: torch.Tensor, batch_dim: int, seq_dim: int) -> torch.Tensor:
    return positions.new_empty((like.shape[batch_dim], like.shape[seq_dim]), dtype=torch.int32)


def _positions_cost(positions: Any, like: Any, batch_dim: int, seq_dim: int) -> Cost:
    return Cost()


token_positions = define(
    "token_positions(Tensor positions, Tensor like, int batch_dim, int seq_dim) -> Tensor",
    reference=_token_positions,
    fake=_positions_fake,
    cost=_positions_cost,
    axes={"positions": ("batch", "seq"), "out": ("batch", "seq")},
)


def _as_many(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy of ``x`` [b, L, ..], which has as many tokens as ``like`` [b, L, ..].

    Raises:
        MeshError: it has not. A split sequence has no place for a mask that is longer than the ids, say.
    """
    if x.shape[1] != like.shape[1]:
        raise MeshError(
            f"an input of {x.shape[1]} tokens a row came with one of {like.shape[1]} to a split sequence",
            where="a call of the model",
            remedy="give masks of as many tokens as there are ids: latentscan.split_batch cuts both alike",
        )
    return x.clone(memory_format=torch.contiguous_format)


def _as_many_fake(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)  # sizes are not compared: that would be a guard


def _as_many_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gradient, None


as_many_tokens = define(
    "as_many_tokens(Tensor x, Tensor like) -> Tensor",
    reference=_as_many,
    fake=_as_many_fake,
    cost=_cost,
    axes={"x": ("...",), "like": ("...",), "out": ("...",)},
    backward=_as_many_backward,
)
