"""The op ``rope``: rotary position embedding, with its layout explicit. Its backward is ``rope_backward``.

``x`` [B,H,S,D] (or [B,S,H,D] with ``unsqueeze_dim`` 2), ``cos``/``sin`` [B or 1,S,R], R <= D even. Layouts and dtypes
are those of :mod:`latentscan.kernels.reference.rope`: computed in what ``x`` and ``cos`` promote to, returned in the
dtype of ``x``. ``cos`` and ``sin`` get no gradient. The axes are named for ``unsqueeze_dim`` 1; with 2,
heads and seq of ``x`` and ``out`` change places.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from latentscan.ir.errors import KernelError
from latentscan.ir.ops.base import Cost, define
from latentscan.kernels.reference import rope as ref

_ARGUMENTS = "Tensor cos, Tensor sin, *, str layout, int unsqueeze_dim=1"


def _check(op: str, x: Tensor, cos: Tensor, sin: Tensor, layout: str, unsqueeze_dim: int) -> None:
    """Raise KernelError for arguments that the op cannot mean."""

    def differ(a: Any, b: Any) -> bool:
        return statically_known_true(a != b)

    if layout not in ref.LAYOUTS:
        raise KernelError(f"layout is {layout!r}", where=op, remedy=f"use one of {', '.join(ref.LAYOUTS)}")
    if unsqueeze_dim not in (1, 2):
        raise KernelError(f"unsqueeze_dim is {unsqueeze_dim}", where=op, remedy="use 1 for [B,H,S,D], 2 for [B,S,H,D]")
    if x.dim() != 4 or cos.dim() != 3 or sin.dim() != 3:
        dims = f"{x.dim()}, {cos.dim()} and {sin.dim()}"
        raise KernelError(f"x, cos and sin have {dims} dimensions", where=op, remedy="use 4, 3 and 3")
    shapes = f"x {tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
    if any(differ(a, b) for a, b in zip(cos.shape, sin.shape, strict=True)) or cos.dtype != sin.dtype:
        raise KernelError(f"cos and sin differ: {shapes}, {cos.dtype}, {sin.dtype}", where=op)
    if differ(cos.shape[2] % 2, 0) or statically_known_true(cos.shape[2] > x.shape[3]):
        raise KernelError(f"the rotary dim is odd or exceeds the head dim: {shapes}", where=op)
    if differ(cos.shape[1], x.shape[3 - unsqueeze_dim]) and differ(cos.shape[1], 1):
        raise KernelError(f"positions do not fit: {shapes}", where=op, remedy=f"unsqueeze_dim is {unsqueeze_dim}")
    if differ(cos.shape[0], x.shape[0]) and differ(cos.shape[0], 1):
        raise KernelError(f"batch sizes do not fit: {shapes}", where=op)


def _rope(x: Tensor, cos: Tensor, sin: Tensor, *, layout: ref.Layout, unsqueeze_dim: int = 1) -> Tensor:
    _check("rope", x, cos, sin, layout, unsqueeze_dim)
    return ref.rope(x, cos, sin, layout=layout, unsqueeze_dim=unsqueeze_dim)


def _rope_backward(grad: Tensor, cos: Tensor, sin: Tensor, *, layout: ref.Layout, unsqueeze_dim: int = 1) -> Tensor:
    _check("rope_backward", grad, cos, sin, layout, unsqueeze_dim)
    return ref.rope_backward(grad, cos, sin, layout=layout, unsqueeze_dim=unsqueeze_dim)


def _fake(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str, unsqueeze_dim: int = 1) -> Tensor:
    _check("rope", x, cos, sin, layout, unsqueeze_dim)
    return x.new_empty(x.shape)


def _cost(x: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> Cost:
    def size(*shape: Any) -> sympy.Expr:
        return sympy.Mul(*(n.node.expr if isinstance(n, torch.SymInt) else sympy.Integer(n) for n in shape))

    # two products and one sum for every rotated feature
    moved = size(*x.shape) * x.element_size()
    return Cost(3 * size(*x.shape[:3], cos.shape[2]), moved + 2 * size(*cos.shape) * cos.element_size(), moved)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])
    ctx.options = dict(keyword_only_inputs)


def _rope_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.latentscan.rope_backward(grad, *ctx.saved_tensors, **ctx.options), None, None


def _rope_backward_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.latentscan.rope(grad, *ctx.saved_tensors, **ctx.options), None, None


_TABLE = ("batch", "seq", "rope_dim")
_X = ("batch", "heads", "seq", "head_dim")

ROPE = define(
    f"rope(Tensor x, {_ARGUMENTS}) -> Tensor",
    reference=_rope,
    fake=_fake,
    cost=_cost,
    axes={"x": _X, "cos": _TABLE, "sin": _TABLE, "out": _X},
    backward=_rope_grad,
    setup_context=_setup_context,
)

ROPE_BACKWARD = define(
    f"rope_backward(Tensor grad, {_ARGUMENTS}) -> Tensor",
    reference=_rope_backward,
    fake=_fake,
    cost=_cost,
    axes={"grad": _X, "cos": _TABLE, "sin": _TABLE, "out": _X},
    backward=_rope_backward_grad,
    setup_context=_setup_context,
)
