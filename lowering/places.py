"""Names each collective's group after the module that it is for, so that a failed wait can tell the place."""

from __future__ import annotations

from collections.abc import Mapping

from latentscan.ir.graph import Graph, module_path
from latentscan.ir.ops import collectives, exchange, sequence, state_exchange
from latentscan.ir.ops.waiting import alias

_TALKING = {
    *collectives.COLLECTIVES, *sequence.SEQUENCE, *exchange.MESSAGES, *exchange.SWAPS, exchange.sum_partial,
    *state_exchange.TALKING,
} - {exchange.last_tokens}  # fmt: skip


def name_groups(graph: Graph, instead: Mapping[str, str] | None = None) -> int:
    """Let the last argument of each communicating node, its group, carry the module.

    Args:
        instead: groups to use in place of others, by name.

    Returns:
        how many nodes communicate.
    """
    found = 0
    for node in graph.nodes:
        if node.target in _TALKING and node.args and isinstance(node.args[-1], str) and node.args[-1]:
            group = (instead or {}).get(node.args[-1], node.args[-1])
            node.args = (*node.args[:-1], alias(group, module_path(node)))
            found += 1
    if found:
        graph.module.recompile()
    return found
