"""What every graph goes through once after tracing, so that passes see one form of each thing."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.eager_attention import canonical_eager, canonical_linear
from latentscan.ir.functions import name_elementwise_functions
from latentscan.ir.graph import REGION, VALUE, Graph, module_path
from latentscan.ir.in_place import functionalize_in_place
from latentscan.ir.ops import attention as _attention  # noqa: F401  (registers the ops)
from latentscan.ir.ops import mask as _mask  # noqa: F401
from latentscan.ir.sizes import same

ATTENTION = torch.ops.latentscan.attention.default
LATENT_ATTENTION = torch.ops.latentscan.latent_attention.default
CAUSAL_MASK = torch.ops.latentscan.causal_mask.default
PACKING_MASK = torch.ops.latentscan.packing_mask.default


def normalize(graph: Graph) -> None:
    """Inline recompute regions, name autograd functions of single elements, drop logging calls, make writes functional,
    give masks their structure."""
    inline_checkpoints(graph)
    name_elementwise_functions(graph)
    detach_without_grad(graph)
    name_overloads(graph)
    drop_logging(graph)
    functionalize_slice_writes(graph)
    functionalize_in_place(graph)
    canonical_linear(graph)
    canonical_sdpa(graph)
    canonical_eager(graph)
    structure_masks(graph)
    graph.clean()
    graph.graph.lint()


# -- gradient checkpointing ---------------------------------------------------------------------------------------


CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def inline_checkpoints(graph: Graph) -> None:
    """Put the body of each ``tag_activation_checkpoint`` in place of its call, marked with the region's number.

    A region inside a region becomes part of the outer one, which is recomputed as a whole.
    """
    for region, call in enumerate(graph.calls(CHECKPOINT), 1):
        with graph.graph.inserting_before(call):
            results = _inline(graph, call, list(call.args[1:]), graph.module, region)
        if isinstance(results, (tuple, list)):
            for user in list(call.users):
                if user.op == "call_function" and user.target is operator.getitem:
                    user.replace_all_uses_with(results[user.args[1]])
                    graph.graph.erase_node(user)
        else:
            call.replace_all_uses_with(results)
        body = call.args[0]
        graph.graph.erase_node(call)
        if isinstance(body, fx.Node) and not body.users:
            graph.graph.erase_node(body)
    graph.module.delete_all_unused_submodules()


def _inline(graph: Graph, call: fx.Node, inputs: list[Any], owner: torch.nn.Module, region: int) -> Any:
    """Copies of the nodes that a checkpoint call of ``owner`` runs; returns what stands for its result."""
    body: Any = owner.get_submodule(str(call.args[0].target))  # type: ignore[union-attr]
    given = iter(inputs)
    mapping: dict[fx.Node, Any] = {}
    for node in body.graph.nodes:
        if node.op == "placeholder":
            mapping[node] = next(given)
        elif node.op == "output":
            return fx.map_arg(node.args[0], lambda n: mapping[n])
        elif node.op == "call_function" and node.target == CHECKPOINT:
            mapping[node] = _inline(graph, node, [mapping.get(n, n) for n in node.args[1:]], body, region)
        elif node.target is operator.getitem and type(mapping[node.args[0]]) in (list, tuple):
            mapping[node] = mapping[node.args[0]][node.args[1]]
        elif node.op == "get_attr":
            if all(u.target == CHECKPOINT and u.args[0] is node for u in node.users):
                continue
            mapping[node] = _carry(graph, node, body, region)
        else:
            mapping[node] = graph.graph.node_copy(node, lambda n: mapping[n])
            mapping[node].meta = {**node.meta, REGION: region}
    return None


def _carry(graph: Graph, node: fx.Node, owner: torch.nn.Module, region: int) -> fx.Node:
    """A node for an attribute of a region's body, which moves to the graph's own module."""
    value: Any = owner
    for part in str(node.target).split("."):
        value = getattr(value, part)
    name = f"latentscan_of_region_{region}_{str(node.target).replace('.', '_')}"
    if not hasattr(graph.module, name):
        setattr(graph.module, name, value)
    new = graph.graph.get_attr(name)
    new.meta = {**node.meta, REGION: region}
    return new


# -- parts without gradients ----------------------------------------------------------------------------------------


def detach_without_grad(graph: Graph) -> None:
    """Values that leave a part traced under ``torch.no_grad`` are detached; the switches themselves go.

    A switch governs whatever happens to stand after it, which passes could not move; what is detached stays detached.
    """
    switches = graph.calls(torch._C._set_grad_enabled)
    enabled, inside = True, set()
    for node in graph.graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        elif not enabled or (node.target is operator.getitem and node.args[0] in inside and _is_tuple(graph, node)):
            inside.add(node)
    tainted: set[fx.Node] = set()  # what would take a gradient
    for node in graph.nodes:
        if node not in inside or not graph.training:
            continue
        if any(n in tainted or getattr(graph.value(n), "requires_grad", False) for n in node.all_input_nodes):
            tainted.add(node)
            value = graph.value(node)
            readers = [u for u in node.users if u not in inside]
            if readers and isinstance(value, torch.Tensor) and value.is_floating_point():
                with graph.after(node, "normalize"):
                    detached = graph.method("detach", node)
                for reader in readers:
                    reader.replace_input_with(node, detached)
    for node in switches:
        graph.graph.erase_node(node)


def _is_tuple(graph: Graph, item: fx.Node) -> bool:
    return isinstance(graph.value(item.args[0]), (tuple, list))


def name_overloads(graph: Graph) -> None:
    """Calls of an op by its packet become calls of its default overload."""
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverloadPacket) and "default" in node.target.overloads():
            node.target = node.target.default


def drop_logging(graph: Graph) -> None:
    for node in graph.calls(torch._C._log_api_usage_once):
        graph.graph.erase_node(node)


# -- writes into slices ---------------------------------------------------------------------------------------------


def _last_dim_slice(index: Any) -> slice | None:
    """The slice of an index that only narrows the last dimension, or None."""
    if not isinstance(index, tuple) or not index or not isinstance(index[-1], slice):
        return None
    full = slice(None, None, None)
    if not all(part is Ellipsis or part == full for part in index[:-1]):
        return None
    last = index[-1]
    bounds = (last.start, last.stop)
    if last.step not in (None, 1) or not all(b is None or isinstance(b, int) for b in bounds):
        return None
    return last


def functionalize_slice_writes(graph: Graph) -> None:
    """``t = new_empty(...); t[..., :a].copy_(x); t[..., a:].copy_(y)`` becomes ``cat([x, y], -1)``.

    Only if the slices cover the last dimension exactly once and nothing reads ``t`` before the last write.
    """
    for base in graph.calls("new_empty", torch.empty):
        width = graph.shape(base)[-1]
        if not isinstance(width, int):
            continue
        parts: list[tuple[int, int, Any, fx.Node, fx.Node]] = []
        readers: list[fx.Node] = []
        order = {n: i for i, n in enumerate(graph.graph.nodes)}
        for user in base.users:
            part = _last_dim_slice(user.args[1]) if user.target is operator.getitem else None
            writes = [w for w in user.users if w.op == "call_method" and w.target == "copy_" and w.args[0] is user]
            if part is not None and len(user.users) == 1 and len(writes) == 1 and not writes[0].users:
                start, stop, _ = part.indices(width)
                parts.append((start, stop, writes[0].args[1], user, writes[0]))
            else:
                readers.append(user)
        parts.sort(key=lambda p: p[0])
        edges = [p[0] for p in parts] + [width]
        covered = bool(parts) and edges[0] == 0 and all(p[1] == edges[i + 1] for i, p in enumerate(parts))
        last = max((order[p[4]] for p in parts), default=0)
        lead = graph.shape(base)[:-1]
        whole = all(
            isinstance(p[2], fx.Node)
            and len(graph.shape(p[2])) == len(lead) + 1
            and all(same(a, b) for a, b in zip(graph.shape(p[2])[:-1], lead, strict=True))
            for p in parts
        )
        if not (covered and whole) or any(order[r] < last for r in readers):
            continue
        anchor = max((p[4] for p in parts), key=lambda n: order[n])
        with graph.after(anchor, "normalize"):
            joined = graph.call(torch.cat, [p[2] for p in parts], dim=-1)
        base.replace_all_uses_with(joined, delete_user_cb=readers.__contains__)
        for _, _, _, view, write in parts:
            graph.graph.erase_node(write)
            graph.graph.erase_node(view)
        if not base.users:
            graph.graph.erase_node(base)


# -- attention ------------------------------------------------------------------------------------------------------


def canonical_sdpa(graph: Graph) -> None:
    """Plain ``F.scaled_dot_product_attention`` without dropout becomes the canonical op."""
    for node in graph.calls(F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention):
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        query, key, value = given["query"], given["key"], given["value"]
        mask, causal = given.get("attn_mask"), given.get("is_causal", False)
        if given.get("dropout_p", 0.0) != 0.0 or not all(len(graph.shape(x)) == 4 for x in (query, key, value)):
            continue
        q_heads, k_heads = graph.shape(query)[1], graph.shape(key)[1]
        if not same(q_heads, k_heads):
            grouped = isinstance(q_heads, int) and isinstance(k_heads, int) and q_heads % k_heads == 0
            if not (grouped and (given.get("enable_gqa") or k_heads == 1)):  # one head is broadcast
                continue
        if causal and not same(graph.shape(query)[2], graph.shape(key)[2]):
            continue  # the library aligns the triangle at the top left; ours is at the bottom right
        if not isinstance(causal, bool):
            continue
        scale = given.get("scale")
        if scale is None:
            width = graph.shape(query)[-1]
            if not isinstance(width, int):
                continue  # the scale would be a number that is known only at run time
            scale = width**-0.5
        with graph.before(node, "normalize"):
            new = graph.call(ATTENTION, query, key, value, mask, kind="causal" if causal else "full", scale=scale)
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)


def structure_masks(graph: Graph) -> None:
    """An attention whose dense mask comes from ``causal_mask`` gets the structure instead of the tensor."""
    for node in graph.calls(PACKING_MASK):
        mask, positions = node.args
        if follows_on(graph, positions):
            node.replace_all_uses_with(mask)
            graph.graph.erase_node(node)
    for node in graph.calls(ATTENTION, LATENT_ATTENTION):
        names = [a.name for a in node.target._schema.arguments]
        mask_at = names.index("mask")
        mask = node.args[mask_at] if len(node.args) > mask_at else None
        if not (isinstance(mask, fx.Node) and mask.target == CAUSAL_MASK and node.kwargs.get("kind") == "full"):
            continue
        _, padding, _, _, _, window = mask.args
        args = list(node.args) + [None] * (names.index("padding") + 1 - len(node.args))
        args[mask_at], args[names.index("padding")] = None, padding
        node.args = tuple(args)
        node.kwargs = {**node.kwargs, "kind": "causal", "window": window}


def follows_on(graph: Graph, positions: Any) -> bool:
    """Whether position ids are made by ``arange`` (plus a constant), so that they cannot jump."""
    seen = 0
    while isinstance(positions, fx.Node) and seen < 16:
        seen += 1
        if positions.target is torch.arange:
            return True
        if positions.op == "call_method" and positions.target in ("unsqueeze", "expand", "to", "long", "view"):
            positions = positions.args[0]
        elif positions.target is operator.getitem:
            index = positions.args[1]
            index = index if isinstance(index, tuple) else (index,)
            full = slice(None, None, None)
            if not all(part is None or part is Ellipsis or part == full for part in index):
                return False
            positions = positions.args[0]
        elif positions.target in (operator.add, torch.add):
            left, right = positions.args[:2]
            tensors = [a for a in (left, right) if isinstance(graph.value(a), torch.Tensor)]
            if len(tensors) != 1:
                return False
            positions = tensors[0]
        else:
            return False
    return False


__all__ = ["ATTENTION", "CAUSAL_MASK", "LATENT_ATTENTION", "VALUE", "module_path", "normalize"]
