"""``packing_mask``: several sequences in one row, told by position ids that do not follow on."""

from __future__ import annotations

from typing import Any

import torch

from latentscan.ir.ops.base import Cost, define
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
