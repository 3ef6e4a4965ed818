"""How a canonical op is declared: schema, fake kernel, reference, explicit backward, cost, axes and autocast rule.

A family of ops is one file beside this one. Each op is declared by one call of :func:`define`; everything that
the rest of latentscan wants to know of an op is in the :class:`OpInfo` that it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch

NAMESPACE = "latentscan"

# One library for the process. It is made when `latentscan.ir.ops` is first imported and never torn down.
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


@dataclass(frozen=True)
class Cost:
    """What one call of an op costs: floating point operations and bytes read and written, as sympy expressions."""

    flops: sympy.Expr = sympy.Integer(0)
    read: sympy.Expr = sympy.Integer(0)
    written: sympy.Expr = sympy.Integer(0)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.read + other.read, self.written + other.written)


@dataclass(frozen=True)
class OpInfo:
    """Facts about one canonical op.

    Attributes:
        name: the op's name without the namespace.
        op: the ``torch.ops.latentscan.<name>.default`` overload.
        reference: plain torch implementation from ``latentscan.kernels.reference`` (in fp64 it is the oracle).
        cost: ``cost(*args, **kwargs) -> Cost``; called with the op's own arguments, tensors being fake.
        axes: logical axes of each tensor argument and output, e.g. ``{"q": ("batch", "heads", "seq", "head_dim")}``;
            the outputs are named ``"out"`` (or ``"out0"``, ``"out1"``, ...).
        autocast: ``"cast"``: floating inputs are cast to the autocast dtype, as torch does for matmul;
            ``"keep"``: inputs keep their dtype, accumulation inside is fp32.
        differentiable: False for ops that have no gradient (masks, cache writes).
    """

    name: str
    op: Any
    reference: Callable[..., Any]
    cost: Callable[..., Cost]
    axes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    autocast: Literal["cast", "keep"] = "keep"
    differentiable: bool = True


REGISTRY: dict[Any, OpInfo] = {}


def define(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    cost: Callable[..., Cost],
    axes: dict[str, tuple[str, ...]] | None = None,
    autocast: Literal["cast", "keep"] = "keep",
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    tags: Sequence[torch.Tag] = (),
    constant: bool = False,
) -> OpInfo:
    """Declare one canonical op ``latentscan::<schema>``.

    Args:
        schema: name and signature without the namespace, e.g. ``"rope(Tensor x, ...) -> Tensor"``.
        reference: called with the op's arguments. It must return fresh tensors, never views of its inputs.
        fake: the same signature; allocates outputs of the right (symbolic) shape, dtype and stride.
        cost: the same signature; see :class:`OpInfo`.
        backward, setup_context: as for ``torch.library.register_autograd``. ``backward`` must itself call a canonical
            op (``<name>_backward``): autograd inside an op's implementation does not work.
        constant: the result depends on no value that could take a gradient (a mask), whatever it is given: without
            this, torch gives it a history, asks for its gradient, and warns when it gets there.

    Returns:
        The op's :class:`OpInfo`, also found under ``REGISTRY[info.op]``.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=tuple(tags))
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    qualified = f"{NAMESPACE}::{name}"
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_LIBRARY)
    if constant or (name.endswith("_backward") and backward is None):  # a backward's reference is differentiable itself
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    info = OpInfo(name, overload, reference, cost, axes or {}, autocast, backward is not None)
    if autocast == "cast":
        _register_autocast(name, overload)
    REGISTRY[overload] = info
    return info


def _register_autocast(name: str, overload: Any) -> None:
    """Cast floating tensor arguments to the autocast dtype, on every device type that has autocast here."""

    def make(device: str, key: str):
        exclude = torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[key])

        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype = torch.get_autocast_dtype(device)

            def cast(value: Any) -> Any:
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64:
                    return value.to(dtype)
                return value

            with torch._C._ExcludeDispatchKeyGuard(exclude):
                return overload(*map(cast, args), **{k: cast(v) for k, v in kwargs.items()})

        return kernel

    _LIBRARY.impl(name, make("cpu", "AutocastCPU"), "AutocastCPU")
    _LIBRARY.impl(name, make("cuda", "AutocastCUDA"), "AutocastCUDA")
