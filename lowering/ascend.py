"""The ascend target: our Triton kernels on an NPU, and the vendor's attention where it is present.

Each kernel is an op ``latentscan_ascend::<name>`` with the schema, fake kernel and gradient of the canonical op. On an
NPU it launches; on the CPU it runs only where the checking tool has put the vendor's IR behind the launches.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from latentscan.ir.errors import KernelError
from latentscan.ir.graph import Graph
from latentscan.ir.ops import attention as _attention_ops  # noqa: F401  (registers the canonical ops)
from latentscan.ir.ops import ssm as _ssm  # noqa: F401
from latentscan.ir.ops import ssm_mixer as _mixer  # noqa: F401
from latentscan.ir.ops.orders import first_order_op
from latentscan.kernels.triton_ascend import chunk_scan as _scan
from latentscan.kernels.triton_ascend import launch
from latentscan.kernels.triton_ascend.mixer import WIDTHS
from latentscan.kernels.triton_ascend.tiles import DEFAULT_CHIP, update_tile
from latentscan.lowering import ascend_vendor, npu, reference
from latentscan.lowering.select import length_flags

NAMESPACE = "latentscan_ascend"
KERNEL_MODULES = {
    "chunk_scan": "chunk_scan",
    "chunk_scan_backward": "chunk_scan_backward",
    "causal_conv1d": "mixer",
    "gated_rms_norm": "mixer",
    "state_update": "mixer",
}
OF_A_CHIP = ("chunk_scan", "chunk_scan_backward", "state_update", "latent_attention")  # their tiles depend on it
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def _device(values: Iterable[Any]) -> torch.device:
    return next(v.device for v in values if isinstance(v, torch.Tensor))


def placed(name: str, values: Iterable[Any]) -> dict[str, str]:
    """The argument ``chip`` of a kernel whose tiles depend on it: that of the NPU which the tensors are on."""
    device = _device(values)
    return {"chip": npu.chip(device.index)} if name in OF_A_CHIP and device.type == "npu" else {}


def _canonical(name: str) -> Any:
    return getattr(torch.ops.latentscan, name).default


def _own(name: str) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _define(name: str, function: Callable[..., Any]) -> None:
    """An op with the canonical schema; what the kernel refuses with ValueError is a KernelError."""
    schema = str(_canonical(name)._schema).split("::", 1)[1]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def run(*args: Any, **kwargs: Any) -> Any:
        device = _device(args)
        if device.type != "npu" and launch.runner is None:
            raise KernelError(
                f"the tensors are on {device.type}", where=f"{NAMESPACE}::{name}", remedy="use target=reference"
            )
        try:
            with torch.autocast(device.type, enabled=False):
                return function(*args, **kwargs, **placed(name, args))
        except ValueError as error:
            raise KernelError(str(error), where=f"{name} (ascend)", remedy="use target=reference") from error

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _canonical(name), lib=_LIBRARY)
    if name.endswith("_backward"):
        first_order_op(f"{NAMESPACE}::{name}", _LIBRARY)


def _kernel(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        module = importlib.import_module(f"latentscan.kernels.triton_ascend.{KERNEL_MODULES[name]}")
        return getattr(module, name)(*args, **kwargs)

    return call


def _define_gradient(name: str, *, own: bool) -> None:
    """Autograd by our own backward op, or by the canonical one."""
    backward_op = _own(f"{name}_backward") if own else _canonical(f"{name}_backward")
    names = [a.name for a in _canonical(name)._schema.arguments if not a.kwarg_only]
    places = [names.index(r.name[1:]) for r in _canonical(f"{name}_backward")._schema.returns]  # dx: gradient of x

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.options = keyword_only_inputs
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        found: list[Any] = [None] * len(saved)
        if any(g is not None for g in grads):
            for place, gradient in zip(places, backward_op(*grads, *saved, **ctx.options), strict=True):
                found[place] = None if saved[place] is None else gradient
        return tuple(found)

    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_LIBRARY)


for _name in KERNEL_MODULES:
    _define(_name, _kernel(_name))
_define("latent_attention", ascend_vendor.latent_attention)
for _name in KERNEL_MODULES:
    if not _name.endswith("_backward"):
        _define_gradient(_name, own=f"{_name}_backward" in KERNEL_MODULES)


def unserved(name: str, *args: Any, chip: str = DEFAULT_CHIP, **kwargs: Any) -> str | None:
    """Why a call of a canonical op has no kernel of this target (it then runs as its reference), or None.

    Args:
        args, kwargs: its own arguments, tensors being fake.
    """
    if name not in KERNEL_MODULES and name != "latent_attention":
        return "the target has no kernel for it"
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
    if wrong := sorted({str(t.dtype) for t in tensors if t.dtype not in DTYPES}):
        return f"no kernel computes {', '.join(wrong)}"
    if name == "chunk_scan":
        return _scan.refusal(args[0], args[3], chip)
    if name == "causal_conv1d" and args[1].shape[1] not in WIDTHS:
        return f"filter width {args[1].shape[1]} is none of {', '.join(map(str, WIDTHS))}"
    if name == "state_update" and update_tile(args[0].shape[2], args[0].shape[3], chip) is None:
        return f"d_state {args[0].shape[3]} fits no tile of {chip}"
    return None


def _rule(name: str) -> Callable[[Graph, fx.Node], fx.Node | None]:
    def lower(graph: Graph, node: fx.Node) -> fx.Node | None:
        values = [graph.value(a) for a in node.args]  # type: ignore[arg-type]
        if unserved(name, *values, **placed(name, values), **node.kwargs) is not None:
            return None
        return graph.call_like(node, _own(name), *node.args, **node.kwargs)

    return lower


def _attention(graph: Graph, node: fx.Node) -> fx.Node:
    flags = length_flags(graph, graph.shape(node.args[0])[2], graph.shape(node.args[1])[2])  # type: ignore[arg-type]
    return graph.call_like(node, ascend_vendor.attention, *node.args, **node.kwargs, **flags)


def _latent_attention(graph: Graph, node: fx.Node) -> fx.Node | None:
    if graph.training or unserved("latent_attention", *map(graph.value, node.args), **node.kwargs) is not None:
        return reference.KERNELS["latent_attention"](graph, node)
    return graph.call_like(node, _own("latent_attention"), *node.args, **node.kwargs)


KERNELS: dict[str, Callable[[Graph, fx.Node], fx.Node | None]] = {
    **reference.KERNELS,
    **{name: _rule(name) for name in KERNEL_MODULES if not name.endswith("_backward")},
    "attention": _attention,
    "latent_attention": _latent_attention,
}
