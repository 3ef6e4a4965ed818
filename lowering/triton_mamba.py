"""The ops of a Mamba mixer beside the chunk scan, on target ``triton``: which kernel serves which op, and when.

Each kernel is an op of its own in the namespace ``latentscan_triton``, with the schema and the backward of the
canonical op, so that autograd, AOTAutograd and Inductor take it as one piece. A decode step that ends in
``state.copy_(new_state)`` becomes an op that writes the state where it is.

``register(table)`` adds the rules to a target's table; see :mod:`latentscan.lowering.select`.
"""

from __future__ import annotations

import importlib
import operator
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from latentscan.ir.errors import KernelError
from latentscan.ir.graph import Graph
from latentscan.ir.ops import ssm as _ssm  # noqa: F401  (registers the ops)
from latentscan.ir.ops import ssm_mixer as _mixer  # noqa: F401
from latentscan.ir.ops.orders import first_order_op
from latentscan.kernels.triton.chunk_configs import starts_shape
from latentscan.lowering.tiles import starts_apart, with_starts, with_tiles, without_tiles

NAMESPACE = "latentscan_triton"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_MODULES = {
    "causal_conv1d": "causal_conv1d",
    "causal_conv1d_backward": "causal_conv1d",
    "conv_update": "causal_conv1d",
    "gated_rms_norm": "gated_rms_norm",
    "gated_rms_norm_backward": "gated_rms_norm",
    "mamba_mixer": "mamba_mixer",
    "mamba_mixer_backward": "mamba_mixer",
    "selective_scan": "selective_scan",
    "selective_scan_backward": "selective_scan_backward",
    "state_update": "state_update",
}
_TUNED = ("mamba_mixer", "mamba_mixer_backward")  # these take a user's table of tiles, and what the scan keeps
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# --- ops -------------------------------------------------------------------------------------------------------------


def _kernel(name: str, **fixed: Any) -> Callable[..., Any]:
    """The kernel of that name, imported when it is first called; its ValueError becomes a KernelError."""

    def run(*args: Any, **kwargs: Any) -> Any:
        module = importlib.import_module(f"latentscan.kernels.triton.{_MODULES[name]}")
        args, kept = starts_apart(_canonical(name), args)
        device = next(a for a in args if isinstance(a, torch.Tensor)).device.type
        try:
            with torch.autocast(device, enabled=False):
                return getattr(module, name)(*args, **kwargs, **kept, **fixed)
        except ValueError as error:
            raise KernelError(str(error), where=f"{name} (triton)") from error

    return run


def _canonical(name: str) -> Any:
    return getattr(torch.ops.latentscan, name).default


def _tokens_last(tensor: Tensor) -> Tensor:
    """Fake of a [b, D, L] that lies in memory as [b, L, D]."""
    if tensor.dim() != 3:
        return tensor
    return tensor.new_empty((tensor.shape[0], tensor.shape[2], tensor.shape[1])).transpose(1, 2)


def _fake(name: str) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        out = without_tiles(_canonical(name))(*args, **kwargs)
        if name == "selective_scan":
            return _tokens_last(out[0]), out[1]
        if name == "mamba_mixer":
            return *out, _starts(*args, **kwargs)
        if name == "selective_scan_backward":  # du, ddelta and dz
            return tuple(_tokens_last(t) if i in (0, 1, 6) else t for i, t in enumerate(out))
        return out

    return fake


def _starts(projected: Tensor, *_: Any, head_dim: int, d_state: int, **__: Any) -> Tensor:
    """Fake of what the mixer's scan keeps."""
    tokens = projected.shape[0] * projected.shape[1]
    shape = starts_shape(projected.device, projected.dtype, tokens, head_dim, d_state)
    return projected.new_empty(shape, dtype=torch.float32)


def _define(name: str) -> None:
    schema = str(_canonical(name)._schema).split("::", 1)[1]
    if name in _TUNED:
        schema = with_starts(with_tiles(schema), backward=name.endswith("_backward"))
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    fixed = {"keep_starts": True} if name == "mamba_mixer" else {}
    _LIBRARY.impl(name, _kernel(name, **fixed), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _fake(name), lib=_LIBRARY)
    if name.endswith("_backward"):
        first_order_op(f"{NAMESPACE}::{name}", _LIBRARY)


def _define_gradient(name: str) -> None:
    """Autograd of ``name`` by ``name_backward``: the kernel where there is one, else the canonical op.

    An output that the backward takes (the mixer's y, what its scan keeps) is saved beside the inputs and has no
    gradient of its own.
    """
    backward_name = f"{name}_backward"
    backward_op = getattr(
        torch.ops.latentscan_triton if backward_name in _MODULES else torch.ops.latentscan, backward_name
    ).default
    outputs = [r.name for r in getattr(torch.ops.latentscan_triton, name).default._schema.returns]
    taken = [a.name for a in backward_op._schema.arguments]
    kept = [i for i, output in enumerate(outputs) if output in taken]
    names = [a.name for a in _canonical(name)._schema.arguments if not a.kwarg_only]
    gradients = [r.name for r in _canonical(backward_name)._schema.returns]
    places = [names.index(g[1:]) for g in gradients]  # dx is the gradient of x

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        extra = [output[i] for i in kept]
        ctx.save_for_backward(*inputs, *extra)
        ctx.options = keyword_only_inputs
        if extra:
            ctx.mark_non_differentiable(*extra)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        held = ctx.saved_tensors  # once: a recomputed region unpacks each tensor a single time
        saved, extra = held[: len(names)], held[len(names) :]
        grads = tuple(g for i, g in enumerate(grads) if i not in kept)
        found: list[Tensor | None] = [None] * len(saved)
        if any(g is not None for g in grads):
            told = dict(zip((outputs[i] for i in kept), extra, strict=True))
            last = [told.pop("starts")] if "starts" in told else []
            made = backward_op(*grads, *told.values(), *saved, *last, **ctx.options)
            for place, gradient in zip(places, made, strict=True):
                found[place] = None if saved[place] is None else gradient
        return tuple(found)

    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_LIBRARY)


def _define_in_place(name: str, state: str) -> None:
    """``name_``: the step that writes its state; returns y."""
    schema = str(_canonical(name)._schema).split("::", 1)[1]
    head, _ = schema.split(" -> ")
    head = head.replace(f"{name}(", f"{name}_(", 1).replace(f"Tensor {state}", f"Tensor(a!) {state}", 1)
    _LIBRARY.define(f"{head} -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    step = _kernel(name, inplace=True)
    _LIBRARY.impl(f"{name}_", lambda *args, **kwargs: step(*args, **kwargs)[0], "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"{NAMESPACE}::{name}_", lambda *args, **kwargs: _canonical(name)(*args, **kwargs)[0], lib=_LIBRARY
    )


for _name in _MODULES:
    _define(_name)
for _name in _MODULES:
    if not _name.endswith("_backward"):
        _define_gradient(_name)
STATES = {"conv_update": ("conv_state", 1), "state_update": ("state", 0)}  # op -> name and place of its state
for _name, (_state, _) in STATES.items():
    _define_in_place(_name, _state)


# --- rules -----------------------------------------------------------------------------------------------------------


def unserved(name: str, *args: Any, **kwargs: Any) -> str | None:
    """Why a call has no kernel of this target (it then runs as its reference), or None.

    Args:
        name: the canonical op. args, kwargs: its own arguments, tensors being fake.
    """
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    device = tensors[0].device.type
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"tensors are on {device}"
    dtypes = {t.dtype for t in tensors if t.is_floating_point()} - set(_DTYPES)
    if dtypes:
        return f"no kernel computes {', '.join(sorted(map(str, dtypes)))}"
    limits: list[tuple[str, Any, int, int]] = []
    if name in ("causal_conv1d", "conv_update"):
        limits.append(("filter width", args[1 if name == "causal_conv1d" else 2].shape[1], 2, 4))
    if name == "mamba_mixer":
        limits.append(("filter width", args[1].shape[1], 2, 4))
    if name == "conv_update":
        limits.append(("width of the state", args[1].shape[2], 1, 64))
    if name in ("gated_rms_norm", "mamba_mixer"):
        limits.append(("group_size", kwargs["group_size"], 1, 16384))
    if name == "selective_scan":
        limits.append(("d_state", args[2].shape[1], 1, 256))
    for what, value, least, most in limits:
        if isinstance(value, int) and not least <= value <= most:
            return f"{what} {value} is outside {least} to {most}"
    return None


def _rule(name: str) -> Callable[[Graph, fx.Node], fx.Node | None]:
    def lower(graph: Graph, node: fx.Node) -> fx.Node | None:
        if unserved(name, *map(graph.value, node.args), **node.kwargs) is not None:
            return None
        if name in STATES and not graph.training:
            written = _written_state(node, STATES[name][1])
            if written is not None:
                return _in_place(graph, node, name, *written)
        op = getattr(torch.ops.latentscan_triton, name).default
        return graph.call_like(node, op, *node.args, **node.kwargs)

    return lower


_AXIS_ADDED = (slice(None), slice(None), None)
_AXIS_TAKEN = (slice(None), slice(None), 0)


def _written_state(node: fx.Node, place: int) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(y, new state, copy): the step's results and the ``copy_`` that puts the new state where the old one is.

    None unless that copy is all that becomes of the new state, and nobody reads the old one between step and copy.
    """
    results = {n.args[1]: n for n in node.users if n.target is operator.getitem}
    if len(results) != len(node.users) or set(results) != {0, 1} or len(results[1].users) != 1:
        return None
    state, new = node.args[place], results[1]
    (copy,) = new.users
    memory = state
    if copy.target is operator.getitem and copy.args[1] == _AXIS_TAKEN:  # Mamba-1: heads of one channel
        if not isinstance(state, fx.Node) or state.target is not operator.getitem or state.args[1] != _AXIS_ADDED:
            return None
        if len(copy.users) != 1:
            return None
        memory, (copy,) = state.args[0], copy.users
    if copy.target != "copy_" or copy.args[0] is not memory or not isinstance(memory, fx.Node):
        return None
    following, between = node.next, set()
    while following is not copy:
        between.add(following)
        following = following.next
    readers = set(memory.users) | {u for view in memory.users for u in view.users} - {node}
    chain = {n for n in between if n is results[0] or n is new or n in new.users}
    return (results[0], new, copy) if not (readers & (between - chain)) else None


def _in_place(graph: Graph, node: fx.Node, name: str, y: fx.Node, new: fx.Node, copy: fx.Node) -> fx.Node:
    op = getattr(torch.ops.latentscan_triton, f"{name}_").default
    step = graph.call_like(node, op, *node.args, **node.kwargs)
    step.meta["example_value"] = graph.value(y)
    y.replace_all_uses_with(step)
    copy.replace_all_uses_with(copy.args[0])  # type: ignore[arg-type]
    for dead in (copy, *[u for u in new.users if u is not copy], new, y):
        graph.graph.erase_node(dead)
    return step


KERNELS: dict[str, Callable[[Graph, fx.Node], fx.Node | None]] = {
    name: _rule(name) for name in _MODULES if not name.endswith("_backward")
}


def register(table: dict[str, Callable[[Graph, fx.Node], fx.Node | None]]) -> None:
    """Add these rules to a target's table; a name that is there already is an error (two kernels for one op)."""
    taken = sorted(set(table) & set(KERNELS))
    if taken:
        raise KernelError(f"{', '.join(taken)} has a kernel already", where="lowering.triton_mamba")
    table.update(KERNELS)
