"""Names each collective's group after the module that it is for, so that a failed wait can tell the place."""

from __future__ import annotations

from collections.abc import Mapping

from latentscan.ir.graph import Graph, module_path
from latentscan.ir.ops.waiting import alias


def name_groups(graph: Graph, groups: Mapping[str, str]) -> int:
    """Let the last argument of each communicating node, its group, carry the module.

    Args:
        groups: name of each group of the mesh -> name of the one to use in its place (the same, but for measurements).

    Returns:
        how many nodes communicate.
    """
    found = 0
    for node in graph.nodes:
        group = node.args[-1] if node.op == "call_function" and node.args else None
        if isinstance(group, str) and group in groups:
            node.args = (*node.args[:-1], alias(groups[group], module_path(node)))
            found += 1
    if found:
        graph.module.recompile()
    return found
