"""Mixtures of experts whose ranks hold whole experts, found from the graph.

A mixture computes *pairs* of a token and an expert that it chose. Its weights have the experts along their first
dimension; they are read by number (``weight[experts]``, one product a pair) or by products of groups of rows that were
sorted by expert (``grouped_mm``). From there every node works on each pair alone, until the pairs of a token are
weighted and added up.

A rank that holds some of the experts computes all pairs by number, those of other experts with one of its own, and puts
zeros in their place; sorted ones it sorts so that its own come first, and the products leave the rest out. What the
ranks have is then summed behind the sum over a token's pairs.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from latentscan.ir.axes import (
    DRAWS,
    SPLITS,
    AxisError,
    draws,
    is_matmul,
    is_pointwise,
    is_tensor,
    name_of,
    tensor_inputs,
)
from latentscan.ir.graph import VALUE, Graph
from latentscan.ir.mesh import Axis, shares
from latentscan.ir.region import is_grouped, picks_rows
from latentscan.ir.sizes import same
from latentscan.passes.borders import Borders, takes_rows
from latentscan.passes.sharding import add_parts, differentiable
from latentscan.passes.shards import weight_recipe

_NUMBERS = {"floordiv", "ge", "lt", "clamp", "unsqueeze", "float", "int", "to", "histc", "cumsum", "empty_like", "long"}
_MOVES = {"unsqueeze", "squeeze", "transpose", "contiguous", "clone"}


@dataclass
class Mixture:
    """What has to be rewritten together for a rank to hold whole experts.

    Attributes:
        experts: how many there are.
        numbers: [pairs], the expert of each pair as the router chose it.
        weights: placeholders with the experts along dimension 0.
        inside: nodes on pairs, in order. out: the last of them, in the order in which the router gave the pairs.
        products: those of sorted pairs; none if weights are read by number. edges: where each expert's pairs end.
        sort: what sorts pairs by expert.
    """

    experts: int
    numbers: fx.Node
    weights: list[fx.Node]
    inside: dict[fx.Node, None] = field(default_factory=dict)
    out: fx.Node | None = None
    products: list[fx.Node] = field(default_factory=list)
    edges: fx.Node | None = None
    sort: fx.Node | None = None


def mixture_at(graph: Graph, product: fx.Node) -> Mixture:
    """The mixture that a product with experts' weights belongs to. Raises AxisError if it cannot be told."""
    found = _sorted(graph, product) if is_grouped(product) else _by_number(graph, product)
    for weight in found.weights:
        if int(graph.shape(weight)[0]) != found.experts:
            raise AxisError(product, f"{weight.name} has {graph.shape(weight)[0]} experts, not {found.experts}")
    if len(graph.shape(found.numbers)) != 1:
        raise AxisError(product, f"{found.numbers.name} is no list of pairs")
    _Walk(graph, found).run()
    return found


def _by_number(graph: Graph, product: fx.Node) -> Mixture:
    pick = next(n for n in tensor_inputs(product) if picks_rows(graph, n))
    numbers: Any = pick.args[1]
    picks = [n for n in numbers.users if picks_rows(graph, n) and n.args[1] is numbers]
    weights = list(dict.fromkeys(n.args[0] for n in picks))
    for weight in weights:
        _only_read_by(graph, weight, set(picks))
    return Mixture(int(graph.shape(weights[0])[0]), numbers, weights)  # type: ignore[arg-type]


def _sorted(graph: Graph, product: fx.Node) -> Mixture:
    edges = _given(product, 2, "offs")
    node: Any = edges
    for name in ("cumsum", "histc", "", "getitem"):
        if not isinstance(node, fx.Node) or (name and name_of(node) != name):
            raise AxisError(product, f"the groups of {product.name} do not come of sorted numbers")
        node = node.args[0]
    if name_of(node) != "sort" or node.kwargs or len(node.args) > 1:
        raise AxisError(product, f"the groups of {product.name} do not come of sorted numbers")
    products = [n for n in edges.users if is_grouped(n)]
    found = Mixture(0, node.args[0], [], products=products, edges=edges, sort=node)
    for one in products:
        weight = _given(one, 1, "mat_b")
        readers = {one}
        if isinstance(weight, fx.Node) and weight.target == "transpose" and 0 not in _dims(graph, weight):
            readers.add(weight)
            weight = weight.args[0]
        if graph.weight(weight) is None:
            raise AxisError(one, f"the weight of {one.name} is no parameter of the model")
        found.weights.append(weight)
        for reader in readers - {one}:
            _only_read_by(graph, reader, {one})
        _only_read_by(graph, weight, readers)
    found.experts = int(graph.shape(found.weights[0])[0])
    return found


def _dims(graph: Graph, node: fx.Node) -> set[int]:
    return {int(d) % len(graph.shape(node)) for d in node.args[1:]}  # type: ignore[call-overload]


def _given(op: fx.Node, place: int, name: str) -> Any:
    return op.args[place] if len(op.args) > place else op.kwargs.get(name, op.kwargs.get("weight"))


def _only_read_by(graph: Graph, value: fx.Node, readers: set[fx.Node]) -> None:
    other = next((u for u in value.users if u not in readers), None)
    if other is not None:
        weight = graph.weight(value)
        raise AxisError(other, f"{value.name if weight is None else weight.path} is also read by {other.name}")


class _Walk:
    """Follow the pairs from the numbers to where they are in the router's order and nothing else is read."""

    def __init__(self, graph: Graph, found: Mixture) -> None:
        self.graph, self.found = graph, found
        self.pairs: dict[fx.Node, None] = {}
        self.order: set[fx.Node] = set()  # values that tell how pairs are sorted
        self.inverse: set[fx.Node] = set()
        self.count = graph.shape(found.numbers)[0]

    def run(self) -> None:
        found = self.found
        if found.sort is not None:
            self.order.add(found.sort)
        waiting = set(found.numbers.users) if found.sort is None else set(found.products)
        waiting = {n for n in waiting if found.sort is not None or picks_rows(self.graph, n)}
        for node in self.graph.graph.nodes:
            inputs = node.all_input_nodes
            if node in self.order or not (node in waiting or any(n in self.pairs or n in self.order for n in inputs)):
                continue
            if found.sort is not None and takes_rows(node) and node.args[1] in self.inverse:
                if node.args[0] not in self.pairs:
                    raise AxisError(node, f"{node.name} sorts back what was not sorted")
                self.pairs[node] = None
                break
            self.visit(node)
            waiting.discard(node)
            if found.sort is None and not waiting and is_tensor(node) and self.open() == [node]:
                break
        else:
            raise AxisError(found.numbers, "the pairs of tokens and experts do not come together again")
        out = next(reversed(self.pairs))
        if waiting or self.open() != [out]:
            raise AxisError(out, f"pairs are also read elsewhere than by {out.name}")
        found.inside, found.out = self.pairs, out

    def open(self) -> list[fx.Node]:
        """Pairs that something not visited reads."""
        return [n for n in self.pairs if any(u not in self.pairs and u not in self.order for u in n.users)]

    def visit(self, node: fx.Node) -> None:
        graph, name = self.graph, name_of(node)
        hot = [n for n in node.all_input_nodes if n in self.pairs]
        if picks_rows(graph, node) and node.args[1] is self.found.numbers and self.found.sort is None:
            self.pairs[node] = None
        elif not hot and self.found.sort is not None and self.numbers(node, name):
            self.order.add(node)
        elif not hot and takes_rows(node) and node.args[1] in self.order:
            if picks_rows(graph, node) and node.args[0] not in self.found.weights:  # a bias of the experts
                _only_read_by(graph, node.args[0], {node})  # type: ignore[arg-type]
                self.found.weights.append(node.args[0])  # type: ignore[arg-type]
            self.pairs[node] = None
        elif hot and self.keeps(node, name, hot):
            self.pairs[node] = None
        else:
            raise AxisError(node, f"{node.name} ({name}) is not known to keep pairs of tokens and experts apart")

    def numbers(self, node: fx.Node, name: str) -> bool:
        """Whether a node only says where pairs are."""
        if name == "setitem":
            made, index, what = node.args
            if name_of(made) != "empty_like" or index not in self.order or name_of(what) != "arange":  # type: ignore
                return False
            self.inverse.add(made)  # type: ignore[arg-type]
            return True
        if node.target is operator.getitem and not takes_rows(node):
            return node.args[0] is self.found.sort
        return name in _NUMBERS

    def keeps(self, node: fx.Node, name: str, hot: list[fx.Node]) -> bool:
        """Whether a node works on each pair alone, with the pairs along dimension 0 of what it reads and gives."""
        graph = self.graph
        if node in self.found.products:
            return node.args[0] in hot and len(hot) == 1
        if node.target is operator.getitem and not is_tensor(node.args[0]):
            return True
        if node.op == "call_method" and str(node.target).endswith("_"):
            return False
        if is_pointwise(node):
            if draws(node):
                raise AxisError(node, f"{node.name} {DRAWS}")
            rank = len(graph.shape(node))
            if not same(graph.shape(node)[0], self.count) or any(len(graph.shape(n)) != rank for n in hot):
                return False
            for given in tensor_inputs(node):
                whole = len(graph.shape(given)) == rank and not same(graph.shape(given)[0], 1)
                if whole and given not in hot and given not in self.order and self.found.sort is not None:
                    return False  # in another order
            return True
        if is_matmul(node):
            return self.found.sort is None and all(len(graph.shape(n)) == 3 for n in tensor_inputs(node))
        if node.target in SPLITS:
            at = 2 if len(node.args) > 2 else None
            dim = node.args[2] if at else node.kwargs.get("dim", 0)
            return bool(int(dim) % len(graph.shape(hot[0])))  # type: ignore[call-overload]
        if node.target is operator.getitem:
            index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            kept = index[0] is Ellipsis and len(index) < len(graph.shape(hot[0])) + 1
            return (kept or index[0] == slice(None)) and all(isinstance(i, slice) or i is Ellipsis for i in index)
        if name not in _MOVES:
            return False
        rank = len(graph.shape(hot[0])) + (name == "unsqueeze")
        given = [*node.args[1:], *(v for k, v in node.kwargs.items() if k.startswith("dim"))]
        dims = {d % rank for d in given if isinstance(d, int)}
        return name in ("contiguous", "clone") or (bool(dims) and 0 not in dims)


class WholeExperts:
    """A mixture as a rank computes it that holds some of the experts.

    Args:
        maker, site: the pass and the module, for provenance and recipes.
    """

    def __init__(self, graph: Graph, mixture: Mixture, axis: Axis, maker: str, site: str) -> None:
        self.graph, self.mixture, self.axis, self.maker, self.site = graph, mixture, axis, maker, site
        self.borders = Borders(graph, axis, maker, differentiable(graph))
        counts = shares(mixture.experts, axis.size)
        self.first, self.own = sum(counts[: axis.rank]), counts[axis.rank]
        self.held = [list(range(sum(counts[:r]), sum(counts[: r + 1]))) for r in range(axis.size)]

    def run(self) -> None:
        mixture, graph = self.mixture, self.graph
        assert mixture.out is not None
        weights = {*mixture.weights, *(u for w in mixture.weights for u in w.users)} - set(mixture.inside)
        for op in mixture.inside:
            for given in tensor_inputs(op):
                if given not in mixture.inside and given not in weights:
                    self.borders.enter(op, given, lift=True)
        for weight in mixture.weights:
            recipe = weight_recipe(graph.weight(weight), 0, self.held, self.axis, self.maker, self.site)  # type: ignore
            (new,) = add_parts(graph, recipe)
            for user in list(weight.users):
                user.replace_input_with(weight, new)
                if user not in mixture.inside:
                    user.meta[VALUE] = graph.evaluate(user)
        out = self.sorted() if mixture.sort is not None else self.by_number()
        self.borders.leave(out)

    def by_number(self) -> fx.Node:
        mixture, graph = self.mixture, self.graph
        picks = [n for n in mixture.inside if takes_rows(n) and n.args[1] is mixture.numbers]
        with graph.before(picks[0], self.maker):
            place = graph.call(torch.sub, mixture.numbers, self.first)
            low, high = graph.call(torch.ge, place, 0), graph.call(torch.lt, place, self.own)
            mine = graph.call(torch.logical_and, low, high)
            place = graph.call(torch.where, mine, place, 0)
        for pick in picks:
            pick.replace_input_with(mixture.numbers, place)
        return self.masked(mixture.out, mine)  # type: ignore[arg-type]

    def sorted(self) -> fx.Node:
        mixture, graph = self.mixture, self.graph
        with graph.before(mixture.sort, self.maker):  # type: ignore[arg-type]
            place = graph.call(torch.remainder, graph.call(torch.sub, mixture.numbers, self.first), mixture.experts)
        mixture.sort.replace_input_with(mixture.numbers, place)  # type: ignore[union-attr]
        number = next(u for u in mixture.sort.users if u.args[1] == 0)  # type: ignore[union-attr]
        with graph.after(number, self.maker):
            mine = graph.call(torch.lt, number, self.own)
            behind = graph.method("cumsum", graph.method("new_ones", number, (self.own,)), 0)
            edges = graph.call(torch.searchsorted, number, behind, out_int32=True)
            row = graph.call(torch.where, mine, number, 0)
        assert mixture.edges is not None
        mixture.edges.replace_all_uses_with(edges)
        for product in mixture.products:  # rows behind its last group are not computed, nor are their gradients
            x: Any = product.args[0]
            with graph.before(product, self.maker):
                product.replace_input_with(x, self.mask(x, mine))
            self.masked(product, mine)
        for pick in mixture.inside:
            if picks_rows(graph, pick):
                pick.replace_input_with(pick.args[1], row)  # type: ignore[arg-type]
        back: Any = mixture.out
        last = back.args[0]
        with graph.before(back, self.maker):  # a bias was added to all rows
            back.replace_input_with(last, self.mask(last, mine))
        return back

    def mask(self, value: fx.Node, mine: fx.Node) -> fx.Node:
        """Zeros in the place of other ranks' pairs."""
        rank = len(self.graph.shape(value))
        if rank > 1:
            mine = self.graph.method("view", mine, -1, *[1] * (rank - 1))
        return self.graph.call(torch.where, mine, value, 0.0)

    def masked(self, value: fx.Node, mine: fx.Node) -> fx.Node:
        with self.graph.after(value, self.maker):
            made = self.mask(value, mine)
        value.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
        return made


__all__ = ["Mixture", "WholeExperts", "is_grouped", "mixture_at"]
