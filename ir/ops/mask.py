"""``packing_mask``: several sequences in one row, told by position ids that do not follow on.

``fit_padding``: a padding mask of another length than the keys.
"""

from __future__ import annotations

from typing import Any

import torch

from latentscan.ir.ops.base import Cost, define
from latentscan.kernels.reference.masks import fit_padding as _fit_padding
from latentscan.kernels.reference.masks import packing_mask as _reference


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
