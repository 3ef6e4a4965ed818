"""sequence-parallel: between the regions that tensor-parallel splits, each rank works on its own tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
from torch import fx

from latentscan.ir.axes import NORMS, draws, is_pointwise, is_reduction, is_tensor, name_of, reduced_dims, tensor_inputs
from latentscan.ir.graph import LOCAL, VALUE, Graph, written_by
from latentscan.ir.kept import storage_of
from latentscan.ir.mesh import Axis
from latentscan.ir.ops.collectives import copy_to, reduce_from
from latentscan.ir.ops.sequence import gather_tokens, scatter_tokens, shard_tokens, unshard_tokens
from latentscan.ir.sizes import expression, hint_of, same
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier
from latentscan.passes.sharding import differentiable
from latentscan.passes.tensor_parallel import tp_axis


@dataclass(frozen=True)
class SequenceParallel(Pass):
    """Norms and residual sums on the rank's own tokens (MATH 5)."""

    name: ClassVar[str] = "sequence-parallel"
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    after: ClassVar[tuple[str, ...]] = ("tensor-parallel",)
    needs: ClassVar[tuple[str, ...]] = ("tensor-parallel",)
    may_be_empty: ClassVar[bool] = True
    summary: ClassVar[str] = "norms and residual sums on the rank's own tokens; gathers in, reduce-scatters out"
    math: ClassVar[str] = (
        "The sum at the end of a split region becomes a reduce-scatter along the sequence, the copy at the start of "
        "one an all-gather, and what lies between (additions, norms, casts: nodes that work on each token alone) runs "
        "on the rank's tokens; gradients of its weights are summed over the ranks. A length that the ranks do not "
        "divide is filled up with zeros, which the next gather cuts off. Work that needs all tokens of such a value "
        "gathers it. A graph for one token is left as it is."
    )

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        axis = tp_axis(context)
        if axis.size == 1:
            return [Refusal("", "one-rank", "the mesh has one rank along tp", "give a mesh such as tp=2")]
        found = stream(graph)
        if isinstance(found, Refusal):
            return [found]
        nodes, holder = found
        tokens = hint_of(graph.value(holder))
        if 0 < tokens <= axis.size:  # a dimension of one token would be traced as fixed
            reason = f"traced with {tokens} tokens, at most one for each of {axis.size} ranks"
            return [Refusal("", "one-token", reason, "nothing to do: there is nothing to split")]
        most = graph.largest(holder)
        if most is not None and most <= 2 * axis.size:  # a prompt shorter than a convolution's kernel
            reason = f"the graph is for at most {most} tokens, over {axis.size} ranks"
            return [Refusal("", "one-token", reason, "nothing to do: there is next to nothing to split")]
        exits = sum(n.target is reduce_from for n in nodes)
        whole = sum(any(u not in nodes and u.target is not copy_to for u in n.users) for n in nodes)
        note = f"{len(nodes)} nodes on own tokens, {exits} reduce-scatters; {whole} values are also needed whole"
        anchor = next(n for n in graph.nodes if n in nodes)
        return [Site("", "tokens", anchor.name, {"ranks": axis.size}, note)]

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        found = stream(graph)
        assert not isinstance(found, Refusal)
        _Tokens(graph, tp_axis(context), *found).run()


def stream(graph: Graph) -> tuple[dict[fx.Node, None], fx.Node] | Refusal:
    """The nodes that can work on a rank's own tokens, and the placeholder of the sequence length; or why none can."""
    exits = [n for n in graph.nodes if n.target is reduce_from and len(graph.shape(n)) == 3]
    if not exits:
        reason = "tensor-parallel split nothing that gives [batch, tokens, features]"
        return Refusal("", "no-regions", reason, "leave it out")
    shape = graph.shape(exits[0])[:2]
    length = expression(shape[1])
    if not isinstance(length, sympy.Symbol):
        return Refusal("", "one-token", f"the graph is for {length} tokens", "nothing to do: there is nothing to split")
    holder = graph.symbols().get(length)
    if holder is None:
        return Refusal("", "no-length", f"the length {length} is no input of the graph", "report it with a dump")
    inside: dict[fx.Node, None] = {}
    writes = [written_by(n) for n in graph.nodes]
    written = {storage_of(n) for n in writes if n is not None}  # a reader of all tokens would write a copy of its own
    for node in graph.nodes:
        if not is_tensor(node) or not _fits(graph, node, shape) or storage_of(node) in written:
            continue
        if node.target is reduce_from or (node.op != "placeholder" and _tokenwise(graph, node, shape, inside)):
            inside[node] = None
    return inside, graph.node(holder)


def _fits(graph: Graph, node: fx.Node, shape: tuple[Any, ...]) -> bool:
    mine = graph.shape(node)
    return len(mine) == 3 and all(same(a, b) for a, b in zip(mine[:2], shape, strict=True))


def _tokenwise(graph: Graph, node: fx.Node, shape: tuple[Any, ...], inside: dict[fx.Node, None]) -> bool:
    """Whether a node of the stream works on each token alone."""
    inputs = tensor_inputs(node)
    if not any(n in inside for n in inputs):
        return False
    for given in inputs:
        if given not in inside and not _fits(graph, given, shape) and len(graph.shape(given)) > 1:
            return False
    if is_pointwise(node):
        return not draws(node)
    if is_reduction(node) or name_of(node) in NORMS:
        dims, keeps = reduced_dims(graph, node)
        return keeps and dims == {2}
    return False


class _Tokens:
    def __init__(self, graph: Graph, axis: Axis, inside: dict[fx.Node, None], length: fx.Node) -> None:
        self.graph, self.axis, self.inside, self.length = graph, axis, inside, length
        self.gradients = differentiable(graph)
        self.made: dict[tuple[Any, fx.Node], fx.Node] = {}

    def run(self) -> None:
        for node in self.inside:
            if node.target is reduce_from:
                node.target = scatter_tokens
                node.args = (node.args[0], 1, self.axis.size, self.axis.name, self.axis.group)
            else:
                self.localize(node)
            node.meta[VALUE] = self.graph.evaluate(node)
            node.meta[LOCAL] = self.axis.name
        for node in self.inside:
            for user in list(node.users):
                if user not in self.inside and user.target not in (unshard_tokens,):
                    self.leave(node, user)

    def localize(self, node: fx.Node) -> None:
        """Let a node read tokens of this rank alone, and weights whose gradient is summed."""
        for given in tensor_inputs(node):
            if given in self.inside:
                continue
            if len(self.graph.shape(given)) == 3:
                new = self.once(shard_tokens, given, node, 1, self.axis.size, self.axis.rank)
            elif given in self.gradients:
                new = self.once(copy_to, given, node)
            else:
                continue
            node.replace_input_with(given, new)

    def leave(self, node: fx.Node, user: fx.Node) -> None:
        """Give a reader outside all tokens."""
        if user.target is copy_to:
            user.target = gather_tokens
            user.args = (node, 1, self.length, self.axis.size, self.axis.name, self.axis.group)
        else:
            where = 1, self.length, self.axis.size, self.axis.rank
            user.replace_input_with(node, self.once(unshard_tokens, node, user, *where))

    def once(self, function: Any, value: fx.Node, before: fx.Node, *more: Any) -> fx.Node:
        """The value, once: before the first node that reads it, whatever the order of its users."""
        key = function, value
        if key not in self.made:
            before = min((before, *value.users))
            with self.graph.before(before, SequenceParallel.name):
                self.made[key] = self.graph.call(function, value, *more, self.axis.name, self.axis.group)
        return self.made[key]
