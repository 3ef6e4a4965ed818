"""The final state of a scan is a fresh tensor: a library's copy of it to memory of its own is not needed."""

from __future__ import annotations

import operator

import torch
from torch import fx

from latentscan.ir.graph import Graph
from latentscan.ir.sizes import same

SCANS = ("chunk_scan", "selective_scan", "mamba_mixer")


def share_final_states(graph: Graph) -> int:
    """Replace ``zeros_like(state).copy_(state)`` by the state itself, where it serves nobody else; in place.

    For graphs without gradients (a cache keeps no gradient either). Saves two launches and three times the state's
    bytes a layer.

    Returns:
        how many copies went.
    """
    if graph.training:
        return 0
    gone = 0
    for scan in graph.nodes:
        if scan.op != "call_function" or getattr(scan.target, "_opname", "") not in SCANS:
            continue
        state = next((u for u in scan.users if u.target is operator.getitem and u.args[1] == 1), None)
        for copy in list(state.users) if state is not None else ():
            fresh = copy.args[0]
            if _is_private(graph, copy, fresh, state):
                copy.replace_all_uses_with(state)
                graph.graph.erase_node(copy)
                fresh.replace_all_uses_with(state)
                graph.graph.erase_node(fresh)
                gone += 1
    return gone


def _is_private(graph: Graph, copy: fx.Node, fresh: fx.Node, state: fx.Node | None) -> bool:
    """Whether the copy goes to memory made for it, of the same kind, and only it reads the state and writes there."""
    if copy.target != "copy_" or copy.args[1] is not state or not isinstance(fresh, fx.Node) or state is None:
        return False
    if fresh.target not in (torch.zeros_like, torch.empty_like) or fresh.args[0] is not state:
        return False
    if set(state.users) != {copy, fresh} or any(str(u.target).endswith("_") for u in fresh.users if u is not copy):
        return False
    a, b = graph.value(fresh), graph.value(state)
    return a.dtype == b.dtype and a.device == b.device and all(map(same, a.shape, b.shape))
