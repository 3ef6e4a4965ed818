"""What the passes of a context-parallel axis share: the check of the whole graph, and the sums over the ranks."""

from __future__ import annotations

import operator

from torch import fx

from latentscan.ir.axes import is_tensor
from latentscan.ir.graph import Graph
from latentscan.ir.kept import storage_of
from latentscan.ir.mesh import Axis, Mesh
from latentscan.ir.normalize import ATTENTION, LATENT_ATTENTION
from latentscan.ir.ops import exchange, ssm, ssm_exchange, state_exchange
from latentscan.ir.ops.collectives import copy_to
from latentscan.ir.ops.mask import as_many_tokens
from latentscan.ir.tokens import PARTIAL, follow_tokens
from latentscan.passes.base import Context, Refusal, Site

SCAN, CONV = ssm.chunk_scan.op, ssm.causal_conv1d.op
GRADIENTS = ("sum", "partial")  # of weights: summed over the ranks, or left to a sharded optimiser
NAMES = ("mamba-context-parallel", "ulysses")
_REMEDIES = {
    "attention": "add ulysses to the pipeline",
    "positions-from-length": "give what is counted with the batch, as position_ids",
    "loss-averaged": "give shift_labels and num_items_in_batch: latentscan.split_batch does",
    "length-fixed": "give every rank two tokens at least, of any number",
    "length-differs": "give masks of as many tokens as there are ids",
    "tokens-moved": "give shift_labels instead of labels that the model shifts: latentscan.split_batch does",
}


def cp_axis(mesh: Mesh | None) -> Axis:
    return (mesh or Mesh()).axis("cp")


def ends_here(name: str, context: Context) -> bool:
    """Whether a pass is the pipeline's last one over the axis: it sums what all of them leave partial."""
    mine = [n for n in context.pipeline if n in NAMES]
    return not mine or mine[-1] == name


def handled(graph: Graph, names: tuple[str, ...]) -> set[fx.Node]:
    """Nodes that look beyond their own token and are taken care of, before or after the rewrite."""
    taken = set(graph.calls(*exchange.SWAPS, *exchange.MESSAGES, *state_exchange.STATES))
    if "mamba-context-parallel" in names:
        taken |= set(graph.calls(SCAN, CONV, ssm_exchange.chunk_state.op))
    if "ulysses" in names:
        taken |= set(graph.calls(ATTENTION, LATENT_ATTENTION))
    return taken


def whole_graph(graph: Graph, context: Context) -> list[Refusal]:
    """Everything that would look beyond a shard. One is enough: a sequence is split for all nodes or for none."""
    if _fills_cache(graph):
        return [Refusal("", "cached", "the graph fills a cache, which would hold a shard only", "use_cache=False")]
    given = {p.name: p.gradients for p in context.passes if p.name in NAMES}  # type: ignore[attr-defined]
    if len(set(given.values())) > 1:
        said = " and ".join(f"{n} gradients={g}" for n, g in given.items())
        return [Refusal("", "gradients-differ", f"{said} cannot both be", "give both passes the same")]
    found = []
    for end in follow_tokens(graph, handled(graph, context.pipeline)).ends:
        module = "" if end.rule == "length-fixed" else end.module
        remedy = _REMEDIES.get(end.rule, "leave this pass out; the layer needs all tokens")
        found.append(Refusal(module, end.rule, end.why, remedy))
    return found


def _fills_cache(graph: Graph) -> bool:
    """Whether a graph appends to a cache of ours, or writes a recurrent state: memory that it was given (a filled
    cache) or gives back (a new one). What it copies within itself is no cache."""
    copies = graph.calls("copy_")
    if any(getattr(n.target, "_opname", "") == "cache_append" for n in graph.nodes):
        return True
    if not copies:
        return False
    output = next(n for n in graph.nodes if n.op == "output")
    outside = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
    kept = {storage_of(n) for n in (*outside, *output.all_input_nodes) if is_tensor(n)}
    return any(storage_of(n.args[0]) in kept for n in copies)


def sums_site(axis: Axis, gradients: str) -> Site:
    """The site of what the last pass over the axis sums."""
    what = "gradients of weights and the loss are summed over cp"
    if gradients == "partial":
        what = "the loss is summed over cp; gradients of weights are each rank's part, for an optimiser over dp x cp"
    return Site("", "sums", "", {"ranks": axis.size, "gradients": gradients}, what)


def finish(graph: Graph, axis: Axis, name: str, gradients: str = "sum") -> None:
    """Sum the gradients of weights, and outputs that are sums over tokens, over the ranks; count positions from the
    shard's first token."""
    tokens = follow_tokens(graph, handled(graph, NAMES))
    for node in tokens.zeros:
        users = list(node.users)
        with graph.after(node, name):
            checked = graph.call_like(node, exchange.must_be_zero, node)
        for user in users:
            user.replace_input_with(node, checked)
    for node, other in tokens.alike.items():
        if graph.value(node).is_floating_point() and not graph.value(other).is_floating_point():
            node, other = other, node  # what is checked is copied: rather ids than embeddings
        users = list(node.users)
        with graph.after(node, name):
            checked = graph.call(as_many_tokens.op, node, other)
        for user in users:
            user.replace_input_with(node, checked)
    for node in tokens.positions:
        length = node.args[0] if len(node.args) == 1 else node.args[1]
        users = list(node.users)
        with graph.after(node, name):
            first = graph.call(operator.mul, length, axis.rank)
            shifted = graph.call(operator.add, node, first)
        for user in users:
            user.replace_input_with(node, shifted)
    if graph.training and gradients == "sum":
        made = {a.placeholder for a in graph.added}  # new weights have fake values until they are Parameters
        for weight in [n for n in graph.nodes if n.op == "placeholder" and graph.weight(n) is not None]:
            value = graph.weight(weight).value  # type: ignore[union-attr]
            trained = value.requires_grad or (weight.name in made and value.is_floating_point())
            if not trained or not weight.users:
                continue
            users = list(weight.users)
            with graph.after(weight, name):
                summed = graph.call(copy_to, weight, axis.name, axis.group)
            for user in users:
                user.replace_input_with(weight, summed)
    output = next(n for n in graph.nodes if n.op == "output")
    for node in list(output.all_input_nodes):
        if tokens.dims.get(node) == PARTIAL:
            with graph.before(output, name):
                total = graph.call(exchange.sum_partial, node, axis.name, axis.group)
            output.replace_input_with(node, total)
