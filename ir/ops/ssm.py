"""The ops of a Mamba mixer: scans, causal convolution, decode steps and the gated norm, with explicit backward ops.

Shapes and semantics are those of :mod:`latentscan.kernels.reference.ssm` and the files beside it. In short:

    chunk_scan       x [b,L,H,P], dt [b,L,H], A [H], B and C [b,L,G,N] -> y as x, final_state fp32 [b,H,P,N]
    selective_scan   u and delta [b,D,L], A [D,N], B and C [b,N,L] or [b,G,N,L] -> y as u, final_state fp32 [b,D,N]
    causal_conv1d    x [b,L,D], weight [D,W] -> y as x, final_state [b,D,W-1]
    conv_update      x [b,D], conv_state [b,D,S], S >= W-1 -> y as x, new_state as conv_state
    state_update     state [b,H,P,N], x [b,H,P], dt [b,H] -> y as x, new_state as state
    gated_rms_norm   x [...,D], weight [D] -> as x

Nothing is mutated: whoever keeps a state copies the new one into it. ``<op>_backward`` takes the gradients of the
outputs (None for zero), then the op's own arguments; it returns one tensor for every differentiable argument, an empty
one where the argument was None. Under autocast all inputs keep their dtype; states and sums are fp32 (fp64 for fp64).

The ``axes`` of ``D`` and of ``A`` in state_update name the leading axis only (a second one is head_dim or d_state);
those of B and C in selective_scan are of the three-dimensional form.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from latentscan.ir.errors import KernelError
from latentscan.ir.ops.base import Cost, OpInfo, define
from latentscan.kernels.reference import selective as selective_ref
from latentscan.kernels.reference import ssm as ssm_ref
from latentscan.kernels.reference import ssm_conv as conv_ref
from latentscan.kernels.reference import ssm_norm as norm_ref

Axes = dict[str, tuple[str, ...]]

_HEADS: Axes = {"A": ("heads",), "D": ("heads",), "dt_bias": ("heads",)}
CHUNK_SCAN_AXES: Axes = {
    "x": ("batch", "seq", "heads", "head_dim"),
    "dt": ("batch", "seq", "heads"),
    "B": ("batch", "seq", "groups", "d_state"),
    "C": ("batch", "seq", "groups", "d_state"),
    "z": ("batch", "seq", "heads", "head_dim"),
    "init_state": ("batch", "heads", "head_dim", "d_state"),
    "seq_idx": ("batch", "seq"),
    "cu_seqlens": ("sequences",),
    **_HEADS,
}
_STATE_UPDATE: Axes = {
    "state": ("batch", "heads", "head_dim", "d_state"),
    "x": ("batch", "heads", "head_dim"),
    "dt": ("batch", "heads"),
    "B": ("batch", "groups", "d_state"),
    "C": ("batch", "groups", "d_state"),
    "z": ("batch", "heads", "head_dim"),
    **_HEADS,
}
_SELECTIVE_SCAN: Axes = {
    "u": ("batch", "channels", "seq"),
    "delta": ("batch", "channels", "seq"),
    "A": ("channels", "d_state"),
    "B": ("batch", "d_state", "seq"),
    "C": ("batch", "d_state", "seq"),
    "D": ("channels",),
    "z": ("batch", "channels", "seq"),
    "delta_bias": ("channels",),
    "init_state": ("batch", "channels", "d_state"),
}
_CONV: Axes = {
    "x": ("batch", "seq", "channels"),
    "weight": ("channels", "conv_width"),
    "bias": ("channels",),
    "init_state": ("batch", "channels", "conv_tail"),
    "seq_idx": ("batch", "seq"),
}
_CONV_UPDATE: Axes = {
    "x": ("batch", "channels"),
    "conv_state": ("batch", "channels", "conv_tail"),
    "weight": ("channels", "conv_width"),
    "bias": ("channels",),
}
_NORM: Axes = {"x": ("...", "channels"), "z": ("...", "channels"), "weight": ("channels",)}

# Arguments that may have one more axis than ``axes`` says, per op: the whole of that form.
_OTHER_FORMS: dict[str, Axes] = {
    "chunk_scan": {"D": ("heads", "head_dim")},
    "state_update": {"D": ("heads", "head_dim"), "A": ("heads", "d_state")},
    "selective_scan": dict.fromkeys("BC", ("batch", "groups", "d_state", "seq")),
}


# --- checks ----------------------------------------------------------------------------------------------------------


def _check(op: str, axes: Axes, names: tuple[str, ...], tensors: tuple[Tensor | None, ...]) -> None:
    """Raise KernelError where one axis has two sizes or a tensor the wrong number of them; unknown sizes pass."""
    known_sizes: dict[str, tuple[str, Any]] = {}
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is None:
            continue
        form, other = axes[name], _OTHER_FORMS.get(op, {}).get(name)
        if other is not None and tensor.dim() == len(other):
            form = other
        if form[0] == "...":
            form = tuple(f"axis {i}" for i in range(tensor.dim() - 1)) + form[1:]
        if tensor.dim() != len(form):
            expected = f"[{', '.join(form)}]" + (f" or [{', '.join(other)}]" if other else "")
            raise KernelError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}", where=op)
        for axis, size in zip(form, tensor.shape, strict=True):
            first, known = known_sizes.setdefault(axis, (name, size))
            if statically_known_true(known != size):
                raise KernelError(f"{axis} is {known} in {first} and {size} in {name}", where=op)
    if "seq" in known_sizes and statically_known_true(known_sizes["seq"][1] == 0):
        raise KernelError("the sequence is empty", where=op, remedy="give at least one token")
    if "groups" in known_sizes and "heads" in known_sizes:
        heads, groups = known_sizes["heads"][1], known_sizes["groups"][1]
        if statically_known_true(heads % groups != 0):
            raise KernelError(f"{heads} heads cannot share {groups} groups evenly", where=op)


def _kernel(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with autocast off inside, and its ValueError told as a KernelError of the op."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        device = next(t for t in args if isinstance(t, torch.Tensor)).device.type
        try:
            with torch.autocast(device, enabled=False):
                return function(*args, **kwargs)
        except ValueError as error:
            raise KernelError(str(error), where=op) from error

    return run


# --- cost ------------------------------------------------------------------------------------------------------------


def sizes(*values: Any) -> list[sympy.Expr]:
    """Sizes as sympy expressions: symbolic sizes keep their symbols."""
    return [v.node.expr if isinstance(v, torch.SymInt) else sympy.Integer(int(v)) for v in values]


def _bytes(*tensors: Tensor | None) -> sympy.Expr:
    return sum((sympy.Mul(*sizes(*t.shape)) * t.element_size() for t in tensors if t is not None), sympy.Integer(0))


def _traffic(flops: sympy.Expr, read: tuple[Any, ...], written: Any) -> Cost:
    written = written if isinstance(written, tuple) else (written,)
    return Cost(flops, _bytes(*read), _bytes(*written))


def _chunk_scan_flops(x: Tensor, B: Tensor, chunk_size: int, *, square: int, square_groups: int, states: int) -> Any:
    """Matmul work: ``square`` products of [Q, Q] with x per head, ``square_groups`` per group, ``states`` with h."""
    b, length, heads, head_dim = sizes(*x.shape)
    groups, d_state, chunk = sizes(B.shape[2], B.shape[3], chunk_size)
    chunk = sympy.Min(chunk, length)
    inside = square * heads * head_dim + square_groups * groups * d_state
    return 2 * b * length * (chunk * inside + states * heads * head_dim * d_state)


# --- declaration -----------------------------------------------------------------------------------------------------


def define_with_backward(
    name: str,
    arguments: str,
    options: str,
    outputs: tuple[str, ...],
    *,
    axes: Axes,
    out_axes: tuple[tuple[str, ...], ...],
    reference: Callable[..., Any],
    reference_backward: Callable[..., Any],
    fake: Callable[..., Any],
    flops: Callable[..., sympy.Expr],
    flops_backward: Callable[..., sympy.Expr],
    constant: tuple[str, ...] = (),
) -> tuple[OpInfo, OpInfo]:
    """Declare ``name`` and ``name_backward``.

    Args:
        arguments, options: the positional tensors and the keyword-only options of the schema.
        fake: the op's fake on checked arguments; returns a tuple, one tensor for each of ``outputs``.
        flops, flops_backward: called with the op's own arguments.
        constant: arguments that have no gradient.
    """
    declared = [part.split() for part in arguments.split(", ")]
    names = tuple(part[1].split("=")[0] for part in declared)
    differentiable = tuple(i for i, n in enumerate(names) if n not in constant)
    several = len(outputs) > 1

    def op_fake(*args: Any, **kwargs: Any) -> Any:
        args += (None,) * (len(names) - len(args))
        _check(name, axes, names, args)
        out = fake(*args, **kwargs)
        return out if several else out[0]

    def backward_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        own = args[len(outputs) :] + (None,) * (len(names) - len(args) + len(outputs))
        like = next(t for t in own if t is not None)

        def gradient(t: Tensor | None) -> Tensor:
            return like.new_empty(0) if t is None else t.new_empty(t.shape)

        return tuple(gradient(own[i]) for i in differentiable)

    def cost(*args: Any, **kwargs: Any) -> Cost:
        args += (None,) * (len(names) - len(args))
        return _traffic(flops(*args, **kwargs), args, op_fake(*args, **kwargs))

    def backward_cost(*args: Any, **kwargs: Any) -> Cost:
        args += (None,) * (len(names) + len(outputs) - len(args))
        return _traffic(flops_backward(*args[len(outputs) :], **kwargs), args, backward_fake(*args, **kwargs))

    grads = ", ".join(f"Tensor? d{out}" for out in outputs)
    results = ", ".join(f"Tensor d{names[i]}" for i in differentiable)
    backward_info = define(
        f"{name}_backward({grads}, {arguments}, *, {options}) -> ({results})",
        reference=_kernel(f"{name}_backward", reference_backward),
        fake=backward_fake,
        cost=backward_cost,
        axes={
            **{f"d{out}": form for out, form in zip(outputs, out_axes, strict=True)},
            **axes,
            **{f"out{k}": axes[names[i]] for k, i in enumerate(differentiable)},
        },
        tags=(torch.Tag.pt2_compliant_tag,),
    )

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.options = keyword_only_inputs
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        gradients: list[Tensor | None] = [None] * len(saved)
        if any(g is not None for g in grads):
            found = backward_info.op(*grads, *saved, **ctx.options)
            for i, gradient in zip(differentiable, found, strict=True):
                gradients[i] = None if saved[i] is None else gradient
        return tuple(gradients)

    result = f"({', '.join(f'Tensor {out}' for out in outputs)})" if several else "Tensor"
    out_names = tuple(f"out{i}" for i in range(len(outputs))) if several else ("out",)
    info = define(
        f"{name}({arguments}, *, {options}) -> {result}",
        reference=_kernel(name, reference),
        fake=op_fake,
        cost=cost,
        axes={**axes, **dict(zip(out_names, out_axes, strict=True))},
        backward=backward,
        setup_context=setup_context,
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    return info, backward_info


def state_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


LIMITS = "bool dt_softplus, float dt_min, float dt_max"
_MIXED = "Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None"

chunk_scan, chunk_scan_backward = define_with_backward(
    "chunk_scan",
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, "
    f"{_MIXED}, Tensor? init_state=None, Tensor? seq_idx=None, Tensor? cu_seqlens=None",
    f"int chunk_size, {LIMITS}",
    ("y", "final_state"),
    axes=CHUNK_SCAN_AXES,
    out_axes=(CHUNK_SCAN_AXES["x"], CHUNK_SCAN_AXES["init_state"]),
    reference=ssm_ref.chunk_scan,
    reference_backward=ssm_ref.chunk_scan_backward,
    fake=lambda x, dt, A, B, *_, **__: (
        x.new_empty(x.shape),
        x.new_empty((x.shape[0], *x.shape[2:], B.shape[-1]), dtype=state_dtype(x)),
    ),
    flops=lambda x, dt, A, B, *_, chunk_size, **__: _chunk_scan_flops(
        x, B, chunk_size, square=1, square_groups=1, states=2
    ),
    flops_backward=lambda x, dt, A, B, *_, chunk_size, **__: _chunk_scan_flops(
        x, B, chunk_size, square=2, square_groups=3, states=6
    ),
    constant=("seq_idx", "cu_seqlens"),
)

state_update, state_update_backward = define_with_backward(
    "state_update",
    f"Tensor state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, {_MIXED}",
    LIMITS,
    ("y", "new_state"),
    axes=_STATE_UPDATE,
    out_axes=(_STATE_UPDATE["x"], _STATE_UPDATE["state"]),
    reference=ssm_ref.state_update,
    reference_backward=ssm_ref.state_update_backward,
    fake=lambda state, x, *_, **__: (x.new_empty(x.shape), state.new_empty(state.shape)),
    flops=lambda state, *_, **__: 5 * sympy.Mul(*sizes(*state.shape)),
    flops_backward=lambda state, *_, **__: 14 * sympy.Mul(*sizes(*state.shape)),
)

selective_scan, selective_scan_backward = define_with_backward(
    "selective_scan",
    "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, "
    "Tensor? D=None, Tensor? z=None, Tensor? delta_bias=None, Tensor? init_state=None",
    "bool delta_softplus",
    ("y", "final_state"),
    axes=_SELECTIVE_SCAN,
    out_axes=(_SELECTIVE_SCAN["u"], _SELECTIVE_SCAN["init_state"]),
    reference=selective_ref.selective_scan,
    reference_backward=selective_ref.selective_scan_backward,
    fake=lambda u, delta, A, *_, **__: (
        u.new_empty(u.shape),
        u.new_empty((u.shape[0], *A.shape), dtype=state_dtype(u)),
    ),
    flops=lambda u, delta, A, *_, **__: 9 * sympy.Mul(*sizes(*u.shape, A.shape[1])),
    flops_backward=lambda u, delta, A, *_, **__: 25 * sympy.Mul(*sizes(*u.shape, A.shape[1])),
)

causal_conv1d, causal_conv1d_backward = define_with_backward(
    "causal_conv1d",
    "Tensor x, Tensor weight, Tensor? bias=None, Tensor? init_state=None, Tensor? seq_idx=None",
    "str activation",
    ("y", "final_state"),
    axes=_CONV,
    out_axes=(_CONV["x"], _CONV["init_state"]),
    reference=conv_ref.causal_conv1d,
    reference_backward=conv_ref.causal_conv1d_backward,
    fake=lambda x, weight, *_, **__: (
        x.new_empty(x.shape),
        x.new_empty((x.shape[0], x.shape[2], weight.shape[1] - 1)),
    ),
    flops=lambda x, weight, *_, **__: 2 * sympy.Mul(*sizes(*x.shape, weight.shape[1])),
    flops_backward=lambda x, weight, *_, **__: 6 * sympy.Mul(*sizes(*x.shape, weight.shape[1])),
    constant=("seq_idx",),
)

conv_update, conv_update_backward = define_with_backward(
    "conv_update",
    "Tensor x, Tensor conv_state, Tensor weight, Tensor? bias=None",
    "str activation",
    ("y", "new_state"),
    axes=_CONV_UPDATE,
    out_axes=(_CONV_UPDATE["x"], _CONV_UPDATE["conv_state"]),
    reference=conv_ref.conv_update,
    reference_backward=conv_ref.conv_update_backward,
    fake=lambda x, conv_state, *_, **__: (x.new_empty(x.shape), conv_state.new_empty(conv_state.shape)),
    flops=lambda x, conv_state, weight, *_, **__: 2 * sympy.Mul(*sizes(*x.shape, weight.shape[1])),
    flops_backward=lambda x, conv_state, weight, *_, **__: 6 * sympy.Mul(*sizes(*x.shape, weight.shape[1])),
)

gated_rms_norm, gated_rms_norm_backward = define_with_backward(
    "gated_rms_norm",
    "Tensor x, Tensor? z, Tensor weight",
    "float eps, int group_size, bool norm_before_gate",
    ("y",),
    axes=_NORM,
    out_axes=(_NORM["x"],),
    reference=norm_ref.gated_rms_norm,
    reference_backward=norm_ref.gated_rms_norm_backward,
    fake=lambda x, *_, **__: (x.new_empty(x.shape),),
    flops=lambda x, *_, **__: 9 * sympy.Mul(*sizes(*x.shape)),
    flops_backward=lambda x, *_, **__: 25 * sympy.Mul(*sizes(*x.shape)),
)
