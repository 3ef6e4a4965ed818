"""Gradients of the first order alone: what a backward computes here has no gradient of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from latentscan.ir.errors import RefusedError


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """An autograd.Function's backward that refuses ``create_graph=True``.

    A collective's gradient is a collective of another kind: torch's own for an all-reduce sums once more, and gradients
    of gradients came out too large by the number of ranks.

    Raises:
        RefusedError: its own gradients are asked for.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            raise RefusedError(
                "gradients of gradients (create_graph=True) are asked for, and a model that is split over ranks, or "
                "whose products were taken apart, has none",
                where=backward.__qualname__.partition(".")[0].strip("_"),
                remedy="take them from the model that is not wrapped, on one process",
            )
        return backward(ctx, *grads)

    return run


def first_order_op(name: str, library: torch.library.Library) -> None:
    """Refuse gradients of a kernel's backward op, ``namespace::name``: nothing of what it computes is recorded.

    Without this torch warns and goes on without them, and gradients of gradients lack a part.
    """

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise RefusedError(
            "gradients of gradients (create_graph=True) are asked for, and a kernel's backward has none",
            where=name,
            remedy="use target=reference and inductor=False",
        )

    torch.library.register_autograd(name, refuse, lib=library)
