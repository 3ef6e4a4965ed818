"""The triton target: fused kernels for CUDA tensors. What is not named here is lowered as for the reference target.

Each kernel is an op ``latentscan_triton::<name>`` with the schema, fake kernel and gradient of the canonical op, so
that compilers see one call. Triton itself is imported when a kernel runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from latentscan.ir.errors import KernelError
from latentscan.ir.graph import Graph
from latentscan.ir.ops import ssm as _ssm  # noqa: F401  (registers the canonical ops)
from latentscan.ir.ops import ssm_exchange as _exchange  # noqa: F401
from latentscan.ir.ops.orders import first_order_op
from latentscan.kernels.triton.chunk_configs import refusal, starts_shape
from latentscan.lowering import reference, triton_mamba
from latentscan.lowering.tiles import starts_apart, with_starts, with_tiles, without_tiles

NAMESPACE = "latentscan_triton"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def _define(
    name: str, module: str, *, schema: Callable[[str], str] = str, fake: Callable[..., Any] | None = None, **fixed: Any
) -> Any:  # fmt: skip
    """The op of a kernel: function ``name`` of a module of kernels/triton, described by the canonical op ``name``.

    Args:
        schema: of the canonical op's schema, the kernel's own. fake: its own, if it is not the canonical op's.
        fixed: arguments of the function that no caller gives.
    """
    canonical = getattr(torch.ops.latentscan, name).default
    _LIBRARY.define(schema(str(canonical._schema).split("::", 1)[1]), tags=(torch.Tag.pt2_compliant_tag,))

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kept = starts_apart(canonical, args)
        given = next(t for t in args if isinstance(t, torch.Tensor))
        try:
            with torch.autocast(given.device.type, enabled=False):
                return getattr(importlib.import_module(module), name)(*args, **kwargs, **kept, **fixed)
        except ValueError as error:
            raise KernelError(str(error), where=name, remedy="use target=reference for such tensors") from error

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise KernelError("the tensors are on the CPU", where=f"{NAMESPACE}::{name}", remedy="use target=reference")

    _LIBRARY.impl(name, run, "CUDA")
    _LIBRARY.impl(name, refuse, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake or without_tiles(canonical), lib=_LIBRARY)
    if name.endswith("_backward"):
        first_order_op(f"{NAMESPACE}::{name}", _LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _define_chunk_scan() -> Any:
    """The scan, which takes a user's tiles, and whose third result saves its backward a pass."""
    name, module = "chunk_scan", "latentscan.kernels.triton.chunk_scan"
    canonical = torch.ops.latentscan.chunk_scan.default

    def fake(x: Any, dt: Any, A: Any, B: Any, *args: Any, **kwargs: Any) -> Any:
        y, state = without_tiles(canonical)(x, dt, A, B, *args, **kwargs)
        b, length, _, P = x.shape
        kept = x.new_empty(starts_shape(x.device, x.dtype, b * length, P, B.shape[3]), dtype=torch.float32)
        return y, state, kept

    op = _define(name, module, schema=lambda s: with_starts(with_tiles(s)), fake=fake, keep_starts=True)
    backward_op = _define(f"{name}_backward", module, schema=lambda s: with_starts(with_tiles(s), backward=True))

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[2])
        ctx.mark_non_differentiable(output[2])
        ctx.options = keyword_only_inputs
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        *saved, starts = ctx.saved_tensors
        if all(g is None for g in grads[:2]):
            return (None,) * len(saved)
        found = backward_op(*grads[:2], *saved, starts, **ctx.options)
        # Arguments without a gradient (seq_idx, cu_seqlens) come last.
        gradients = [None if t is None else g for t, g in zip(saved, found, strict=False)]
        return (*gradients, *(None,) * (len(saved) - len(found)))

    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    return op


CHUNK_SCAN = _define_chunk_scan()
CHUNK_STATE = _define("chunk_state", "latentscan.kernels.triton.chunk_exchange")
OUTPUT_STATE = _define("output_state", "latentscan.kernels.triton.chunk_exchange")


def _chunk_scan(graph: Graph, node: fx.Node) -> fx.Node | None:
    x, B = (graph.value(node.args[i]) for i in (0, 3))  # type: ignore[arg-type]
    if refusal(x, B) is not None:
        return None  # fp64, or wider than a tile: the reference computes it
    return graph.call_like(node, CHUNK_SCAN, *node.args, **node.kwargs)


def _chunk_state(graph: Graph, node: fx.Node) -> fx.Node | None:
    x, B = (graph.value(node.args[i]) for i in (0, 3))  # type: ignore[arg-type]
    return None if refusal(x, B) is not None else graph.call_like(node, CHUNK_STATE, *node.args, **node.kwargs)


def _scan_gradient(graph: Graph, node: fx.Node) -> fx.Node | None:
    """The two ends of a scan whose states are exchanged: their backward's ops become kernels."""
    at = (0, 3)  # x and B, or y and C: one has the heads' width, the other the state's
    x, wide = (graph.value(node.args[i]) for i in at)  # type: ignore[arg-type]
    if refusal(x, wide) is not None:
        return None
    return graph.call_like(node, node.target, *node.args, **{**node.kwargs, "kernels": NAMESPACE})  # type: ignore


KERNELS: dict[str, Any] = {
    **reference.KERNELS,
    "chunk_scan": _chunk_scan, "chunk_state": _chunk_state, "scan_enter": _scan_gradient, "scan_leave": _scan_gradient,
}  # fmt: skip
triton_mamba.register(KERNELS)
