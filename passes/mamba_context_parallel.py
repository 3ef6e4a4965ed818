"""mamba-context-parallel: the sequence split over ranks; convolution tails and scan states are exchanged."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from latentscan.ir.graph import Graph, module_path
from latentscan.ir.mesh import Axis
from latentscan.ir.mla import argument
from latentscan.ir.ops import exchange, ssm_exchange
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier
from latentscan.passes.context_parallel import CONV, SCAN, cp_axis, ends_here, finish, sums_site, whole_graph


@dataclass(frozen=True)
class MambaContextParallel(Pass):
    """Split the sequence of Mamba-2 layers over the mesh's axis ``cp`` (MATH 6)."""

    name: ClassVar[str] = "mamba-context-parallel"
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    after: ClassVar[tuple[str, ...]] = ("tensor-parallel",)
    summary: ClassVar[str] = "the sequence over the ranks of the axis cp: convolution tails and states exchanged"
    math: ClassVar[str] = (
        "Each rank holds L/R consecutive tokens. A scan from zero gives S_r, the decay over the shard is Lambda_r; "
        "both are gathered in fp32 while the local output is computed, h_r = sum_{i<r} (prod_{i<j<r} Lambda_j) S_i, "
        "and exp(A_cum) C h_r is added. The convolution's first d_conv - 1 tokens need the previous rank's last ones. "
        "Gradients of weights and the loss are summed over the ranks. Refused unless all else keeps tokens apart."
    )

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        axis = cp_axis(context.mesh)
        if axis.size == 1:
            return [Refusal("", "one-rank", "the mesh has one rank along cp", "give a mesh such as cp=2")]
        scans = graph.calls(SCAN)
        refusals = [r for n in (*scans, *graph.calls(CONV)) if (r := _refused(n))]
        if scans:
            refusals += whole_graph(graph, context)
        if refusals or not scans:
            return list(refusals)
        found: list[Site | Refusal] = []
        for node in (*graph.calls(CONV), *scans):
            found.append(_scan_site(graph, node, axis) if node.target is SCAN else _conv_site(graph, node, axis))
        return [*found, sums_site(axis)] if ends_here(self.name, context) else found

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        axis = cp_axis(context.mesh)
        if site.rule == "sums":
            finish(graph, axis, self.name)
            return
        node = graph.node(site.anchor)
        if node.target is SCAN:
            _split_scan(graph, node, axis, self.name)
        else:
            _exchange_tail(graph, node, axis, self.name)


def _refused(node: fx.Node) -> Refusal | None:
    if node.target is SCAN and argument(node, "cu_seqlens") is not None:
        return Refusal(module_path(node), "cu-seqlens", "cu_seqlens count from the row's start", "give seq_idx instead")
    if node.target is CONV and argument(node, "init_state") is not None:
        return Refusal(module_path(node), "conv-state", "the convolution starts from a given state", "leave it out")
    return None


def _conv_site(graph: Graph, node: fx.Node, axis: Axis) -> Site:
    channels, width = (int(s) for s in graph.shape(node.args[1]))  # type: ignore[arg-type]
    facts = {"ranks": axis.size, "elements": channels * (width - 1)}
    note = f"sends the last {width - 1} tokens of {channels} channels to the next rank"
    return Site(module_path(node), "tail-exchange", node.name, facts, note)


def _scan_site(graph: Graph, node: fx.Node, axis: Axis) -> Site:
    _, _, heads, width = graph.shape(node.args[0])  # type: ignore[arg-type]
    d_state = graph.shape(node.args[3])[3]  # type: ignore[arg-type]
    facts = {"ranks": axis.size, "bytes_per_row": 4 * int(heads) * (int(width) * int(d_state) + 1)}
    note = f"gathers {facts['bytes_per_row']} bytes a batch row and rank: decay and state of {heads} heads, fp32"
    return Site(module_path(node), "state-exchange", node.name, facts, note)


def _ids(graph: Graph, seq_idx: Any, x: Any, keep: int, axis: Axis, name: str) -> Any:
    """The node of the shards' edge sequence numbers, made once a graph (for the widest tail that asks)."""
    if not isinstance(seq_idx, fx.Node):
        return None
    for made in graph.calls(exchange.edge_ids):
        if made.args[0] is seq_idx and made.args[2] >= keep:  # type: ignore[operator]
            return made
    keep = max([keep] + [int(graph.shape(n.args[1])[1]) - 1 for n in graph.calls(CONV)])  # type: ignore[arg-type]
    with graph.after(x, name):
        return graph.call(exchange.edge_ids, seq_idx, x, keep, axis.name, axis.size, axis.group)


def _exchange_tail(graph: Graph, node: fx.Node, axis: Axis, name: str) -> None:
    x, weight = node.args[:2]
    keep = int(graph.shape(weight)[1]) - 1  # type: ignore[arg-type]
    where = (axis.name, axis.size, axis.rank, axis.group)
    ids = _ids(graph, argument(node, "seq_idx"), x, keep, axis, name)
    with graph.after(x, name):  # type: ignore[arg-type]
        started = graph.call(exchange.tail_start, x, keep, *where)
    with graph.before(node, name):
        tail = graph.call(exchange.tail_wait, started, x, keep, ids, *where)
    node.update_arg(3, tail) if len(node.args) > 3 else _set(node, "init_state", tail)


def _set(node: fx.Node, name: str, value: Any) -> None:
    node.kwargs = {**node.kwargs, name: value}


def _split_scan(graph: Graph, node: fx.Node, axis: Axis, name: str) -> None:
    """Local scan from zero; its state is gathered meanwhile, and what the entering state adds comes last."""
    x, dt, A, B, C = node.args[:5]
    get = {k: argument(node, k) for k in ("D", "z", "dt_bias", "init_state", "seq_idx")}
    limits = {k: v for k, v in node.kwargs.items() if k in ("dt_softplus", "dt_min", "dt_max")}
    head_dim = graph.shape(x)[3]  # type: ignore[arg-type]
    z = get["z"]
    ids = _ids(graph, get["seq_idx"], x, 1, axis, name)
    with graph.before(node, name):
        both = graph.call(ssm_exchange.chunk_state.op, x, dt, A, B, get["dt_bias"], get["seq_idx"], **limits)
        message = graph.call(exchange.pack_state, _item(graph, both, 0), _item(graph, both, 1))
        started = graph.call(exchange.gather_start, message, axis.name, axis.size, axis.group)
        local = graph.call(
            SCAN, x, dt, A, B, C, get["D"], None, get["dt_bias"], None, get["seq_idx"], None,
            chunk_size=node.kwargs["chunk_size"], **limits,
        )  # fmt: skip
        own = _item(graph, local, 0)
        messages = graph.call(exchange.gather_wait, started, axis.name, axis.size, axis.group)
        states = graph.call(exchange.entering_state, messages, get["init_state"], ids, head_dim, axis.rank)
        entering = _item(graph, states, 0)
        more = graph.call(ssm_exchange.state_output.op, C, dt, A, entering, get["dt_bias"], get["seq_idx"], **limits)
        y = graph.call(operator.add, own, more)
        if z is not None:
            y = graph.call(operator.mul, y, graph.call(torch.nn.functional.silu, z))
        final = _item(graph, states, 1)
    for user in list(node.users):
        graph.replace(user, (y, final)[user.args[1]])  # type: ignore[index]


def _item(graph: Graph, node: fx.Node, index: int) -> fx.Node:
    return graph.call(operator.getitem, node, index)
