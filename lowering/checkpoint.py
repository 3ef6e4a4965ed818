"""Gradient checkpointing regions, which capture inlined, become regions again."""

from __future__ import annotations

import operator

import torch
import torch.utils.checkpoint
from torch import fx

from latentscan.ir.graph import REGION, VALUE, Graph


def outline_checkpoints(graph: Graph, *, higher_order: bool) -> int:
    """Put each marked region into a submodule that is recomputed in the backward pass.

    Args:
        higher_order: use the operator that AOTAutograd understands instead of ``torch.utils.checkpoint``.

    Returns:
        the number of regions.
    """
    regions: dict[int, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if REGION in node.meta and node.op in ("call_function", "call_method"):
            regions.setdefault(node.meta[REGION], []).append(node)
    if not graph.training:
        return 0
    for number, nodes in regions.items():
        _outline(graph, number, nodes, higher_order)
    graph.graph.lint()
    graph.module.recompile()
    return len(regions)


def _outline(graph: Graph, number: int, nodes: list[fx.Node], higher_order: bool) -> None:
    inside = set(nodes)
    inputs: list[fx.Node] = []
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in inside and source not in inputs:
                inputs.append(source)
    outputs = [n for n in nodes if any(u not in inside for u in n.users)]
    body = fx.Graph()
    mapping = {source: body.placeholder(source.name) for source in inputs}
    for source in inputs:
        mapping[source].meta = dict(source.meta)
    for node in nodes:
        mapping[node] = body.node_copy(node, lambda n: mapping[n])
    body.output(tuple(mapping[n] for n in outputs))
    name = f"latentscan_region_{number}"
    graph.module.add_submodule(name, fx.GraphModule(graph.module, body))
    # Everything that a region reads stands before its first node only if nothing outside comes in between: the call
    # goes where the last of its inputs is available.
    order = {n: i for i, n in enumerate(graph.graph.nodes)}
    last = max(inputs, key=lambda n: order[n])
    anchor = last if order[last] > order[nodes[0]] else nodes[0]
    after = _readers_before(nodes, anchor) if anchor is last else []
    with graph.graph.inserting_before(anchor) if anchor is nodes[0] else graph.graph.inserting_after(anchor):
        holder = graph.graph.get_attr(name)
    with graph.graph.inserting_after(holder):
        if higher_order:
            call = graph.graph.call_function(torch.ops.higher_order.tag_activation_checkpoint, (holder, *inputs))
        else:
            call = graph.graph.call_function(
                torch.utils.checkpoint.checkpoint, (holder, *inputs), {"use_reentrant": False}
            )
    call.meta[VALUE] = tuple(n.meta.get(VALUE) for n in outputs)
    following = call.next
    for index, old in enumerate(outputs):
        with graph.graph.inserting_before(following):
            item = graph.graph.call_function(operator.getitem, (call, index))
        item.meta = {k: v for k, v in old.meta.items() if k != REGION}
        for user in list(old.users):
            if user not in inside:
                user.replace_input_with(old, item)
    place = following.prev
    for node in reversed(nodes):
        graph.graph.erase_node(node)
    for node in after:  # what read a value of the region before the region had all its inputs
        place.append(node)
        place = node


def _readers_before(nodes: list[fx.Node], anchor: fx.Node) -> list[fx.Node]:
    """What stands outside a region and before ``anchor``, and needs the region's values, directly or not."""
    inside, found, node = set(nodes), [], nodes[0]
    late = set(nodes)
    while node is not anchor:
        if node not in inside and any(n in late for n in node.all_input_nodes):
            found.append(node)
            late.add(node)
        node = node.next
    return found
