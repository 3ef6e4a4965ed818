"""``swap_out``: training keeps this value in host memory; one that ``stays`` only calls the one before it back.

The value itself is unchanged. What autograd saved of its storage, before or after, is held by the host until the
backward pass asks for it (:mod:`latentscan.lowering.swap`). Executed as it stands it is a copy; its backward,
``swap_out_backward``, hands the gradient on.
"""

from __future__ import annotations

from typing import Any

import torch

from latentscan.ir.cost import bytes_expression
from latentscan.ir.ops.base import Cost, define


def _fake(x: torch.Tensor, stays: bool = False) -> torch.Tensor:
    return torch.empty_like(x)


def _cost(x: torch.Tensor, stays: bool = False) -> Cost:
    """The copy to the host reads the value once; the host's memory is not counted."""
    return Cost() if stays else Cost(read=bytes_expression(x))


SWAP_OUT_BACKWARD = define(
    "swap_out_backward(Tensor grad) -> Tensor",
    reference=lambda grad: grad.clone(),
    fake=_fake,
    cost=_cost,
    axes={"grad": ("batch", "seq", "hidden"), "out": ("batch", "seq", "hidden")},
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Nothing is saved."""


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return SWAP_OUT_BACKWARD.op(grad), None


SWAP_OUT = define(
    "swap_out(Tensor x, bool stays=False) -> Tensor",
    reference=lambda x, stays=False: x.clone(),
    fake=_fake,
    cost=_cost,
    axes={"x": ("batch", "seq", "hidden"), "out": ("batch", "seq", "hidden")},
    backward=_backward,
    setup_context=_setup_context,
)
