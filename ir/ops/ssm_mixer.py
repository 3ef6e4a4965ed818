"""``mamba_mixer``: what a Mamba-2 mixer does between its two projections, as one op; made by the pass fuse-mamba.

Shapes and semantics are those of :mod:`latentscan.kernels.reference.ssm_mixer`. Besides the result it returns the final
state and the scan's output y, which is kept for the backward (it has no gradient of its own). The convolution's output
is not kept: ``mamba_mixer_backward`` computes it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latentscan.ir.errors import KernelError
from latentscan.ir.ops import ssm
from latentscan.ir.ops.base import Cost, define
from latentscan.ir.ops.ssm import _bytes, _kernel
from latentscan.kernels.reference import ssm_mixer as reference

_ARGUMENTS = (
    "Tensor projected, Tensor conv_weight, Tensor? conv_bias, Tensor A, Tensor? D, Tensor? dt_bias, "
    "Tensor? norm_weight, Tensor? seq_idx=None"
)
_OPTIONS = (
    "int heads, int head_dim, int groups, int d_state, str activation, int chunk_size, bool dt_softplus, "
    "float dt_min, float dt_max, float eps, int group_size, bool norm_before_gate"
)
_GRADIENTS = ("projected", "conv_weight", "conv_bias", "A", "D", "dt_bias", "norm_weight")
_AXES = {
    "projected": ("batch", "seq", "features"),
    "conv_weight": ("channels", "conv_width"),
    "conv_bias": ("channels",),
    "A": ("heads",),
    "D": ("heads",),
    "dt_bias": ("heads",),
    "norm_weight": ("inner",),
    "seq_idx": ("batch", "seq"),
}
_SHAPE = ("heads", "head_dim", "groups", "d_state")


def _fake(projected: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    heads, head_dim, groups, d_state = (options[name] for name in _SHAPE)
    try:
        reference.pieces(projected, heads, head_dim, groups, d_state)
    except ValueError as error:
        raise KernelError(str(error), where="mamba_mixer") from error
    batch, length = projected.shape[:2]
    normed = len(args) > 5 and args[5] is not None
    state = torch.float64 if projected.dtype == torch.float64 else torch.float32
    return (
        projected.new_empty((batch, length, heads * head_dim)),
        projected.new_empty((batch, heads, head_dim, d_state), dtype=state),
        projected.new_empty((batch, length, heads, head_dim) if normed else (0,)),
    )


def _parts_cost(projected: Tensor, args: tuple[Any, ...], options: dict[str, Any], *, backward: bool) -> Cost:
    """The sum of the parts' costs; in the backward the convolution's forward counts once more."""
    args += (None,) * (7 - len(args))
    conv_weight, conv_bias, A, D, dt_bias, norm_weight, seq_idx = args
    shape = tuple(options[name] for name in _SHAPE)
    z, mixed, dt = reference.pieces(projected, *shape)
    x, B, C = reference.scan_inputs(mixed, *shape)
    gate = x if norm_weight is None else None  # of the gate's size
    steps = {name: options[name] for name in ("chunk_size", "dt_softplus", "dt_min", "dt_max")}
    norm = {name: options[name] for name in ("eps", "group_size", "norm_before_gate")}
    conv = (mixed, conv_weight, conv_bias, None, seq_idx)
    scan = (x, dt, A, B, C, D, gate, dt_bias, None, seq_idx, None)
    total = ssm.causal_conv1d.cost(*conv, activation=options["activation"])
    if not backward:
        total += ssm.chunk_scan.cost(*scan, **steps)
        return total if norm_weight is None else total + ssm.gated_rms_norm.cost(z, z, norm_weight, **norm)
    total += ssm.causal_conv1d_backward.cost(mixed, None, *conv, activation=options["activation"])
    total += ssm.chunk_scan_backward.cost(x, None, *scan, **steps)
    joined = _bytes(mixed)
    total += Cost(read=joined, written=joined)
    if norm_weight is not None:
        total += ssm.gated_rms_norm_backward.cost(z, z, z, norm_weight, **norm)
    return total


def _backward_fake(dout: Any, dfinal_state: Any, y: Tensor, *args: Any, **_: Any) -> tuple[Tensor, ...]:
    return tuple(y.new_empty(0) if t is None else t.new_empty(t.shape) for t in args[: len(_GRADIENTS)])


mamba_mixer_backward = define(
    f"mamba_mixer_backward(Tensor? dout, Tensor? dfinal_state, Tensor y, {_ARGUMENTS}, *, {_OPTIONS}) -> "
    f"({', '.join(f'Tensor d{name}' for name in _GRADIENTS)})",
    reference=_kernel("mamba_mixer_backward", reference.mamba_mixer_backward),
    fake=_backward_fake,
    cost=lambda dout, dfinal_state, y, projected, *args, **options: _parts_cost(
        projected, args, options, backward=True
    ),
    axes={
        "dout": ("batch", "seq", "inner"),
        "dfinal_state": ("batch", "heads", "head_dim", "d_state"),
        "y": ("batch", "seq", "heads", "head_dim"),
        **_AXES,
        **{f"out{i}": _AXES[name] for i, name in enumerate(_GRADIENTS)},
    },
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, output[2])
    ctx.options = keyword_only_inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dfinal_state: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    *inputs, y = ctx.saved_tensors
    gradients: list[Tensor | None] = [None] * len(inputs)
    if dout is not None or dfinal_state is not None:
        found = mamba_mixer_backward.op(dout, dfinal_state, y, *inputs, **ctx.options)
        for i, gradient in enumerate(found):
            gradients[i] = None if inputs[i] is None else gradient
    return tuple(gradients)


mamba_mixer = define(
    f"mamba_mixer({_ARGUMENTS}, *, {_OPTIONS}) -> (Tensor out, Tensor final_state, Tensor y)",
    reference=_kernel("mamba_mixer", reference.mamba_mixer),
    fake=_fake,
    cost=lambda projected, *args, **options: _parts_cost(projected, args, options, backward=False),
    axes={
        **_AXES,
        "out0": ("batch", "seq", "inner"),
        "out1": ("batch", "heads", "head_dim", "d_state"),
        "out2": ("batch", "seq", "heads", "head_dim"),
    },
    backward=_backward,
    setup_context=_setup_context,
    tags=(torch.Tag.pt2_compliant_tag,),
)
