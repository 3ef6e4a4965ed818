"""mamba-context-parallel: the sequence split over ranks; convolution tails and scan states are exchanged."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from latentscan.ir.graph import Graph, module_path
from latentscan.ir.mesh import Axis
from latentscan.ir.mla import argument
from latentscan.ir.ops import exchange, ssm_exchange
from latentscan.ir.ops import state_exchange as states
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier
from latentscan.passes.context_parallel import CONV, GRADIENTS, SCAN, cp_axis, ends_here, finish, sums_site, whole_graph
from latentscan.passes.mamba_projection import HIDES, projection_of, take_apart


@dataclass(frozen=True)
class MambaContextParallel(Pass):
    """Split the sequence of Mamba-2 layers over the mesh's axis ``cp`` (MATH 6)."""

    name: ClassVar[str] = "mamba-context-parallel"
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    after: ClassVar[tuple[str, ...]] = ("tensor-parallel",)
    summary: ClassVar[str] = "the sequence over the ranks of the axis cp: convolution tails and states exchanged"
    math: ClassVar[str] = (
        "Each rank holds L/R consecutive tokens. A scan from zero gives S_r, the decay over the shard is Lambda_r; "
        "h_r = sum_{i<r} (prod_{i<j<r} Lambda_j) S_i enters the scan. Backward: G_r = sum_t exp(A_cum) dy_t C_t^T, "
        "dS_r = sum_{q>r} (prod_{r<j<q} Lambda_j) G_q. S and G are exchanged in fp32 while the gate's rows of the "
        "in-projection, or their gradients, are computed. A state has s = 4 b H (P N + 1) bytes; all-gather sends "
        "(R - 1) s in one step, log-scan ceil(log2 R) s in as many steps, of which the first is hidden: by default "
        "log-scan where ceil(log2 R) < R - 1. The convolution's first d_conv - 1 tokens need the previous rank's last "
        "ones: their rows of the in-projection are computed first and sent during the rest of it. "
        "The loss and, unless gradients=partial leaves that to an optimiser that is sharded over dp x cp, the weights' "
        "gradients are summed over the ranks. Refused unless all else keeps tokens apart."
    )

    algorithm: str = field(default="auto", metadata={"choices": ("auto", *states.ALGORITHMS)})
    gradients: str = field(default="sum", metadata={"choices": GRADIENTS})

    def chosen(self, size: int) -> str:
        """How states are exchanged between ``size`` ranks."""
        return states.cheaper(size) if self.algorithm == "auto" else self.algorithm

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
            found.append(self._scan_site(graph, node, axis) if node.target is SCAN else _conv_site(graph, node, axis))
        return [*found, sums_site(axis, self.gradients)] if ends_here(self.name, context) else found

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        axis = cp_axis(context.mesh)
        if site.rule == "sums":
            finish(graph, axis, self.name, self.gradients)
            return
        node = graph.node(site.anchor)
        if node.target is SCAN:
            _split_scan(graph, node, axis, self.chosen(axis.size), self.name)
        else:
            _exchange_tail(graph, node, axis, self.name)

    def _scan_site(self, graph: Graph, node: fx.Node, axis: Axis) -> Site:
        _, _, heads, width = graph.shape(node.args[0])  # type: ignore[arg-type]
        d_state = graph.shape(node.args[3])[3]  # type: ignore[arg-type]
        algorithm, steps = self.chosen(axis.size), states.steps_of(axis.size)
        size = 4 * int(heads) * (int(width) * int(d_state) + 1)
        sent = (steps if algorithm == "log-scan" else axis.size - 1) * size
        facts = {"ranks": axis.size, "bytes_per_row": size, "algorithm": algorithm, "sent_per_row": sent}
        rule = (
            f"ceil(log2 {axis.size}) = {steps} {'<' if steps < axis.size - 1 else '>='} R - 1 = {axis.size - 1} states"
        )
        why = rule if self.algorithm == "auto" else "as the option says"
        note = f"{algorithm} ({why}) of decay and state of {heads} heads, fp32: a rank sends {sent} bytes a row, twice"
        return Site(module_path(node), "state-exchange", node.name, facts, note)


def _refused(node: fx.Node) -> Refusal | None:
    if node.target is SCAN and argument(node, "cu_seqlens") is not None:
        return Refusal(module_path(node), "cu-seqlens", "cu_seqlens count from the row's start", "give seq_idx instead")
    if node.target is CONV and argument(node, "init_state") is not None:
        return Refusal(module_path(node), "conv-state", "the convolution starts from a given state", "leave it out")
    return None


def _conv_site(graph: Graph, node: fx.Node, axis: Axis) -> Site:
    channels, width = (int(s) for s in graph.shape(node.args[1]))  # type: ignore[arg-type]
    facts = {"ranks": axis.size, "elements": channels * (width - 1)}
    found = projection_of(graph, node)
    behind = "behind nothing" if found is None else "behind the other tokens' projection"
    late = sum(found.sizes[i] for i in found.late) if found is not None else 0
    facts |= {"hidden": found is not None, "hides_states": late}
    note = f"sends the last {width - 1} tokens of {channels} channels to the next rank, {behind}; "
    note += f"the scan's state goes behind the projection of {late} features" if late else "nothing hides the states"
    return Site(module_path(node), "tail-exchange", node.name, facts, note)


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
    found = projection_of(graph, node)
    if found is None:
        with graph.after(x, name):  # type: ignore[arg-type]
            started = graph.call(exchange.tail_start, graph.call(exchange.last_tokens, x, keep, axis.name), *where)
    else:
        rows = take_apart(graph, node, found, keep, axis.name, name)
        x = node.args[0]
        with graph.after(rows, name):
            started = graph.call(exchange.tail_start, rows, *where)
    with graph.before(node, name):
        tail = graph.call(exchange.tail_wait, started, x, keep, ids, *where)
    node.update_arg(3, tail) if len(node.args) > 3 else _set(node, "init_state", tail)


def _set(node: fx.Node, name: str, value: Any) -> None:
    node.kwargs = {**node.kwargs, name: value}


def _split_scan(graph: Graph, node: fx.Node, axis: Axis, algorithm: str, name: str) -> None:
    """The local state is sent while other work is done; the scan then starts from what enters."""
    x, dt, A, B, C = node.args[:5]
    get = {k: argument(node, k) for k in ("D", "z", "dt_bias", "init_state", "seq_idx")}
    limits = {k: v for k, v in node.kwargs.items() if k in ("dt_softplus", "dt_min", "dt_max")}
    options = {"chunk_size": node.kwargs["chunk_size"], **limits}
    head_dim, z, init, seq_idx = graph.shape(x)[3], get["z"], get["init_state"], get["seq_idx"]  # type: ignore[arg-type]
    where = (algorithm, axis.name, axis.size, axis.rank, axis.group)
    ids = _ids(graph, seq_idx, x, 1, axis, name)
    users = {n.args[1]: n for n in node.users}
    hiding = graph.node(node.meta[HIDES]) if HIDES in node.meta else node
    with graph.before(hiding, name):
        inputs = [None if t is None else graph.method("detach", t) for t in (x, dt, A, B, C, get["D"], get["dt_bias"])]
        both = graph.call(ssm_exchange.chunk_state.op, *inputs[:4], inputs[6], seq_idx, **limits)
        own = graph.call(states.pack_state, _item(graph, both, 0), _item(graph, both, 1), ids, axis.rank)
        started = graph.call(states.state_start, own, *where)
        tokens = None
        if graph.training:
            given = (x, dt, A, B, C, get["D"], get["dt_bias"], seq_idx)
            tokens = graph.call(states.scan_enter, *given, *where, **options, final=1 in users)
    with graph.before(node, name):
        messages = graph.call(states.state_wait, started, own, *where)
        entering = graph.call(states.entering_state, messages, init, ids, head_dim, algorithm, axis.rank)
        local = graph.call(SCAN, *inputs[:6], None, inputs[6], entering, seq_idx, None, **options)
        y, final, decay = _item(graph, local, 0), None, None
        if 1 in users:
            whole = graph.call(states.whole_state, messages, own, init, head_dim, *where)
            final, decay = _item(graph, whole, 0), _item(graph, whole, 1)
        if tokens is not None:
            decays = graph.call(states.decays_of, messages, own, decay, algorithm)
            passed = [_item(graph, tokens, i) for i in range(5)]
            taken = (y, final, passed, C, dt, A, get["dt_bias"], seq_idx, decays, entering, init, ids)
            left = graph.call(states.scan_leave, *taken, *where, **limits)
            y, final = _item(graph, left, 0), _item(graph, left, 1) if 1 in users else None
        if z is not None:
            y = graph.call(operator.mul, y, graph.call(torch.nn.functional.silu, z))
    for index, made in ((0, y), (1, final)):
        if index in users:
            assert made is not None
            graph.replace(users[index], made)


def _item(graph: Graph, node: fx.Node, index: int) -> fx.Node:
    return graph.call(operator.getitem, node, index)
