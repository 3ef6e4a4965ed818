"""Which dimension of every value runs over the tokens of the sequence, and which nodes would look beyond a shard.

A node *keeps* tokens if what it computes for a token depends on that token alone: then each rank may compute its own
tokens of a split sequence. Layout nodes are judged by executing them on token numbers, canonical ops by their axes,
everything else by a list of functions that are known to; what is not known is an end.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from latentscan.ir.axes import (
    execute,
    is_matmul,
    is_pointwise,
    is_reduction,
    is_tensor,
    item,
    name_of,
    producer,
    reduced_dims,
    results,
    tensor_inputs,
)
from latentscan.ir.graph import Graph, module_path
from latentscan.ir.layout import SmallNumbers, is_layout, linear_of
from latentscan.ir.ops import base
from latentscan.ir.ops.collectives import COLLECTIVES
from latentscan.ir.ops.exchange import SWAPS, fork_tail
from latentscan.ir.ops.sequence import SEQUENCE
from latentscan.ir.ops.state_exchange import scan_leave
from latentscan.ir.sizes import hint_of, is_symbol, same

PARTIAL = -1  # in place of a dimension: a sum over the tokens of this rank
_FILLS = {
    "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty",
    "zeros_like", "ones_like", "full_like", "empty_like",
}  # fmt: skip
_MOVES = {"pad", "flip", "roll", "repeat"}  # in general; along other dimensions they are not followed either
_ALONG_OTHERS = {"topk", "sort", "argsort", "gather", "scatter", "cumsum", "cumprod"}
_IN_PLACE = {"itruediv", "iadd", "isub", "imul", "add_", "sub_", "mul_", "div_"}
_MASKS = ("causal_mask", "packing_mask", "fit_padding")


@dataclass(frozen=True)
class End:
    """A node that looks at other tokens than its own, or may: ``rule`` in kebab-case, ``why`` with values."""

    node: fx.Node
    rule: str
    why: str

    @property
    def module(self) -> str:
        return module_path(self.node)


@dataclass
class Tokens:
    """Where tokens lie.

    Attributes:
        dims: value -> the dimension that runs over tokens (alone, or with the batch outside it), or PARTIAL.
        each: value -> how many places along that dimension a token has, side by side; 1 where it is not said.
        ends: nodes that mix tokens. masks: attention masks made of the lengths alone or of position ids.
        positions: nodes that count the tokens from 0, which is right on the first rank only.
        zeros: whole numbers that were 0 while tracing and are taken for it (``logits_to_keep``: all of them).
        alike: inputs whose number of tokens was another's while tracing and is taken for it, though nothing in the
            graph ties them (at a batch of one a mask's, of which the library cuts the last L) -> the other input.
    """

    dims: dict[fx.Node, int] = field(default_factory=dict)
    each: dict[fx.Node, int] = field(default_factory=dict)
    ends: list[End] = field(default_factory=list)
    masks: set[fx.Node] = field(default_factory=set)
    positions: list[fx.Node] = field(default_factory=list)
    zeros: list[fx.Node] = field(default_factory=list)
    alike: dict[fx.Node, fx.Node] = field(default_factory=dict)


def follow_tokens(graph: Graph, handled: set[fx.Node]) -> Tokens:
    """Follow the tokens from the graph's inputs to its outputs.

    Args:
        handled: nodes that something else takes care of: their results have tokens where their axes say "seq".
    """
    return _Walk(graph, handled).run()


class _Walk:
    def __init__(self, graph: Graph, handled: set[fx.Node]) -> None:
        self.graph, self.handled = graph, handled
        self.small, self.tokens = SmallNumbers(), Tokens()
        self.lengths: set[Any] = set()  # symbols of the number of tokens
        self.counts: list[int] = []  # the small numbers that stand for them

    def run(self) -> Tokens:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._seed(node)
            elif node.op in ("call_function", "call_method"):
                self._visit(node)
                self._inherit(node)
        if self.tokens.dims and not self.lengths:
            first = next(iter(self.tokens.dims))
            why = f"the graph was traced for {self.graph.shape(first)[1]} tokens alone, so what counts them is not seen"
            self.tokens.ends.insert(0, End(first, "length-fixed", why))  # the others may be for that reason
        return self.tokens

    def _seed(self, node: fx.Node) -> None:
        value = self.graph.value(node)
        if isinstance(value, torch.SymInt) and node.users and hint_of(value) == 0 and is_symbol(value):
            self.tokens.zeros.append(node)
            self.small.fix(value, 0)
        if self.graph.weight(node) is not None or not isinstance(value, torch.Tensor) or value.dim() < 2:
            return
        first = next(iter(self.tokens.dims), node)
        self.tokens.dims[node] = 1
        size, expected = value.shape[1], self.graph.shape(first)[1]
        if is_symbol(size) and not same(size, expected) and hint_of(size) == hint_of(expected):
            self.tokens.alike[node] = first
            self.small.fix(size, self.small(expected))
        if isinstance(size, torch.SymInt):
            self.lengths |= size.node.expr.free_symbols
        if self.small(size) not in self.counts:
            self.counts.append(self.small(size))

    def _end(self, node: fx.Node, rule: str, why: str) -> None:
        self.tokens.ends.append(End(node, rule, why))
        for _, leaf in results(node):  # go on as if it had kept them, to find further ends
            dim = next(
                (self.tokens.dims[n] for n in tensor_inputs(node) if self.tokens.dims.get(n, PARTIAL) >= 0), None
            )
            if dim is not None and dim < len(self.graph.shape(leaf)):
                self.tokens.dims[leaf] = dim

    def _inherit(self, op: fx.Node) -> None:
        """Results have as many places for a token as the inputs, unless the visit said otherwise."""
        dims, each = self.tokens.dims, self.tokens.each
        leaves = [n for _, n in results(op) if dims.get(n, PARTIAL) != PARTIAL and n not in each]
        found = {each.get(n, 1) for n in tensor_inputs(op) if dims.get(n, PARTIAL) != PARTIAL}
        if not leaves or producer(op) is not op or found <= {1}:
            return
        if len(found) > 1:
            self._end(op, "tokens-crossed", f"{op.name} combines values with {sorted(found)} places for a token")
        each.update(dict.fromkeys(leaves, max(found)))

    def _visit(self, op: fx.Node) -> None:
        dims = self.tokens.dims
        name = getattr(op.target, "_opname", name_of(op))
        inputs = [n for n in tensor_inputs(op) if n in dims]
        if producer(op) is not op:  # an item of a tuple: followed with its producer
            return
        if name in _FILLS:  # the same for every token
            return
        if op.target is operator.setitem or op.target == "copy_":
            self._write(op)
            return
        if name in _MASKS:
            self.tokens.masks.add(op)
            if name == "fit_padding" and (other := self._of_other_length(inputs)):  # the caller's mask
                self._end(op, "length-differs", other)
        elif op in self.handled or getattr(op.target, "_opname", "") in _RULES:
            self._canonical(op)
        elif self.tokens.masks.intersection(op.all_input_nodes):
            self._end(op, "mask-read", f"{op.name} reads an attention mask, which spans the whole sequence")
        elif not inputs:
            self._made(op, name)
        elif any(dims[n] == PARTIAL for n in inputs):
            self._of_sums(op, name, inputs)
        elif name == "cross_entropy":
            self._loss(op)
        elif linear_of(self.graph, op) is not None or name == "linear":
            self._linear(op, inputs)
        elif is_layout(op) and not is_pointwise(op):  # a cast may name another device than that of the numbers
            self._layout(op, inputs)
        elif op.target in SEQUENCE:
            self._shared_out(op, inputs[0])
        elif name in _ALONG_OTHERS:
            self._along(op, name, inputs)
        elif name == "getitem" and self._chosen_rows(op, inputs):
            dims[op] = dims[op.args[1]]  # type: ignore[index]
        elif name == "embedding" or op.target in COLLECTIVES:  # over other axes of the mesh, which have all tokens
            dims[op] = dims[inputs[0]]
        elif op.target in base.REGISTRY:
            self._canonical(op)
        elif is_pointwise(op) or name in _IN_PLACE or op.target in _IN_PLACE:
            self._pointwise(op, inputs)
        elif is_reduction(op):
            self._reduction(op, inputs)
        elif name == "einsum" and isinstance(op.args[0], str):
            self._einsum(op, inputs)
        elif is_matmul(op):
            self._matmul(op, inputs)
        elif name in _MOVES:
            self._end(op, "tokens-moved", f"{op.name} ({name}) drops, repeats or reorders tokens")
        elif is_tensor(op) or results(op):
            self._end(op, "unknown-node", f"{op.name} ({name}) is not known to keep tokens apart")

    def _made(self, op: fx.Node, name: str) -> None:
        """A value that depends on no token: weights, or something made from the sequence's length."""
        if not is_tensor(op):
            return
        sizes = [s for s in self.graph.shape(op) if isinstance(s, torch.SymInt)]
        if not any(s.node.expr.free_symbols & self.lengths for s in sizes):
            return
        if name == "arange" and len(op.args) <= 2 and (len(op.args) == 1 or op.args[0] == 0):
            self.tokens.positions.append(op)
            self.tokens.dims[op] = 0
        else:
            self._end(
                op, "positions-from-length",
                f"{op.name} ({name}) counts from 0 on every rank; positions must come in as position_ids",
            )  # fmt: skip

    def _write(self, op: fx.Node) -> None:
        """``target[index] = value`` or ``target.copy_(value)``: of every token, or of those that a mask of tokens says.

        What a write of single places (``x[:, 0] = 1``) is for another rank nobody can tell from the index.
        """
        target, index, value = (op.args[0], ..., op.args[1]) if op.target == "copy_" else op.args[:3]
        if not is_tensor(target):
            return
        dims, shape = self.tokens.dims, self.graph.shape(target)  # type: ignore[arg-type]
        counts = [d for d, s in enumerate(shape) if isinstance(s, torch.SymInt) and self._counts(s)]
        dim = dims.get(target, counts[0] if len(counts) == 1 else None)  # type: ignore[arg-type]
        given = dims.get(value) if is_tensor(value) else None  # type: ignore[arg-type]
        if (dim is None and not counts and given is None) or not is_tensor(target):
            return
        why = ""
        if dim is None or PARTIAL in (dim, given):
            why = "and where its tokens lie is not known"
        elif is_tensor(index):  # a mask, of as many places as there are tokens
            if self.graph.value(index).dtype != torch.bool or dims.get(index) != dim or given is not None:  # type: ignore
                why = f"at the places that {index} says"
        else:
            why = self._misses(op, index, dim, value if given is not None else None)
        if why:
            self._end(op, "tokens-moved", f"{op.name} writes into {target}, {why}")
        dims[target] = dims[op] = dim if dim is not None else 0  # type: ignore[index]

    def _counts(self, size: torch.SymInt) -> bool:
        """Whether a size counts tokens."""
        return bool(size.node.expr.free_symbols & self.lengths)

    def _misses(self, op: fx.Node, index: Any, dim: int, value: Any) -> str:
        """Why a write does not give every token its own value; empty if it does.

        Args:
            dim: where tokens lie in what is written. value: what is written, if it has tokens.
        """
        if any(isinstance(a, fx.Node) and is_tensor(a) for a in (index if isinstance(index, tuple) else (index,))):
            return "at places that are computed"
        shape = self._small_shape(op.args[0])  # type: ignore[arg-type]
        view = [1] * len(shape)
        view[dim] = shape[dim]
        labels = self._numbers(shape[dim], self.tokens.each.get(op.args[0], 1)).reshape(view).expand(shape).contiguous()
        number = fx.node.map_aggregate(
            index, lambda a: self.small(self.graph.value(a)) if isinstance(a, fx.Node) else a
        )
        try:
            written = labels[number]
        except (IndexError, TypeError, ValueError) as error:
            return f"which could not be followed ({error})"
        fits = [d for d in range(written.dim()) if self._runs_along(written, d)]
        if len(fits) != 1 or written.shape[fits[0]] != shape[dim]:
            return "not for every token alike"
        if value is not None and len(self.graph.shape(value)) - self.tokens.dims[value] != written.dim() - fits[0]:
            return "whose tokens lie along another dimension"
        return ""

    def _of_sums(self, op: fx.Node, name: str, inputs: list[fx.Node]) -> None:
        """Partial sums stay partial under scaling and adding up."""
        dims = self.tokens.dims
        partial = [n for n in inputs if dims[n] == PARTIAL]
        others = [a for a in op.args if a not in partial]
        scaled = name in ("mul", "truediv", "div", "true_divide", "to", "float", "neg") and len(partial) == 1
        if name in ("truediv", "div", "true_divide"):
            scaled = scaled and op.args[0] in partial
        added = name in ("add", "sub") and not others
        if not any(dims[n] >= 0 for n in inputs) and (scaled or added):
            dims[op] = PARTIAL
        else:
            self._end(op, "not-a-sum", f"{op.name} ({name}) is no scaling or sum of what each rank's tokens give")

    def _loss(self, op: fx.Node) -> None:
        reduction = op.kwargs.get("reduction", op.args[6] if len(op.args) > 6 else "mean")
        if reduction == "sum":
            self.tokens.dims[op] = PARTIAL
        elif reduction == "none":
            self.tokens.dims[op] = self.tokens.dims[op.args[0]]  # type: ignore[index]
        else:
            self._end(op, "loss-averaged", f"{op.name} divides by the tokens of this rank instead of all ranks'")
            self.tokens.dims[op] = PARTIAL

    def _linear(self, op: fx.Node, inputs: list[fx.Node]) -> None:
        dims, rank = self.tokens.dims, len(self.graph.shape(op))
        linear = linear_of(self.graph, op)
        x = linear.x if linear is not None else op.args[0]
        others = [n for n in inputs if n is not x]
        if others or dims[x] == len(self.graph.shape(x)) - 1:  # type: ignore[index, arg-type]
            self._end(op, "linear-in-tokens", f"{op.name} is linear along the sequence")
        else:
            dims[op] = dims[x] if rank == len(self.graph.shape(x)) else 0  # type: ignore[index, arg-type]

    def _shared_out(self, op: fx.Node, x: fx.Node) -> None:
        """Tokens shared out once more, over another axis of the mesh, or gathered from it."""
        dim = self.tokens.dims[x]
        if op.args[1] != dim:
            self._end(op, "tokens-crossed", f"{op.name} cuts dimension {op.args[1]}, and tokens lie along {dim}")
            return
        self.tokens.dims[op] = dim
        if self.small(self.graph.shape(op)[dim]) not in self.counts:
            self.counts.append(self.small(self.graph.shape(op)[dim]))

    def _along(self, op: fx.Node, name: str, inputs: list[fx.Node]) -> None:
        """Choosing, sorting and adding up along one dimension keeps tokens apart along another."""
        dims = self.tokens.dims
        place = 2 if name == "topk" else 1
        over = op.kwargs.get("dim", op.args[place] if len(op.args) > place else -1)
        rank = len(self.graph.shape(inputs[0]))
        where = {(dims[n], len(self.graph.shape(n))) for n in inputs}
        if not isinstance(over, int) or len(where) > 1 or over % rank == dims[inputs[0]]:
            self._end(op, "mixes-tokens", f"{op.name} ({name}) works along the sequence")
            return
        for _, leaf in results(op):
            dims[leaf] = dims[inputs[0]]
        if op.target == "scatter_":  # what was the same for every token no longer is
            dims[op.args[0]] = dims[inputs[0]]  # type: ignore[index]

    def _chosen_rows(self, op: fx.Node, inputs: list[fx.Node]) -> bool:
        """Whether each token takes rows of a value that all tokens share (the weights of its experts)."""
        return len(op.args) == 2 and op.args[1] in inputs and op.args[0] not in inputs

    def _labels(self, node: fx.Node) -> torch.Tensor:
        """Token numbers of every element."""
        shape = [self.small(s) for s in self.graph.shape(node)]
        dim = self.tokens.dims[node]
        view = [1] * len(shape)
        view[dim] = shape[dim]
        return self._numbers(shape[dim], self.tokens.each.get(node, 1)).reshape(view).expand(shape)

    def _numbers(self, size: int, each: int = 1) -> torch.Tensor:
        """0, 1, ... for each batch row, each number ``each`` times: ``size`` has the tokens of one row or of all."""
        tokens = size // each
        length = tokens if tokens in self.counts else next((n for n in self.counts if tokens % n == 0), tokens)
        return torch.arange(tokens).repeat_interleave(each) % length

    def _layout(self, op: fx.Node, inputs: list[fx.Node]) -> None:
        given = {
            n: (self._labels(n) if n in inputs else torch.full(self._small_shape(n), -1)) for n in tensor_inputs(op)
        }
        value = execute(op, self.small, {n: t.contiguous() for n, t in given.items()})
        for place, leaf in results(op):
            labels = item(value, place)
            fits = [(d, e) for d in range(labels.dim()) if (e := self._runs_along(labels, d))]
            if len(fits) == 1:
                self.tokens.dims[leaf], self.tokens.each[leaf] = fits[0]
            else:
                self._moved(op, inputs)
                return

    def _moved(self, op: fx.Node, inputs: list[fx.Node]) -> None:
        """Why a layout node is an end: an input that is longer than the sequence, or what it does."""
        if other := self._of_other_length([n for n in inputs if n.op == "placeholder"]):
            self._end(op, "length-differs", f"{other}, and {op.name} takes some of them")
        else:
            self._end(op, "tokens-moved", f"{op.name} ({name_of(op)}) drops, repeats or reorders tokens")

    def _of_other_length(self, inputs: list[fx.Node]) -> str:
        """A sentence on an input of other length than the sequence; empty if there is none."""
        first = next(iter(self.tokens.dims))
        length = hint_of(self.graph.shape(first)[1])
        for node in inputs:
            dim = self.tokens.dims[node]
            if dim != PARTIAL and (given := hint_of(self.graph.shape(node)[dim])) != length:
                return f"{node.name} has {given} tokens a row, {first.name} has {length}"
        return ""

    def _small_shape(self, node: fx.Node) -> list[int]:
        return [self.small(s) for s in self.graph.shape(node)]

    def _runs_along(self, labels: torch.Tensor, dim: int) -> int:
        """How many places side by side every token has along a dimension; 0 if the tokens do not lie along it."""
        size = labels.shape[dim]
        view = [1] * labels.dim()
        view[dim] = size
        first = labels.movedim(dim, 0).reshape(size, -1)[:, 0]
        each = int((first == first[0]).long().cumprod(0).sum())
        if size % each or not any(size // each % n == 0 for n in self.counts):
            return 0
        return each if bool((labels == self._numbers(size, each).reshape(view)).all()) else 0

    def _canonical(self, op: fx.Node) -> None:
        """An op whose axes say where the tokens are; unless handled it must do nothing along them."""
        info = base.REGISTRY.get(op.target)
        name = getattr(op.target, "_opname", "")
        leaves = results(op)
        if op not in self.handled and name not in _TOKENWISE_OPS:
            self._end(
                op, _RULES.get(name, "mixes-tokens"), f"{op.name} ({name or name_of(op)}) looks at the whole sequence"
            )
        if info is None:  # an exchange: heads against tokens lie as before, messages hold no tokens
            for place, leaf in leaves:
                if op.target in SWAPS:  # heads against tokens, or a shared value: [b, h, L, d] or [b, L, d]
                    self.tokens.dims[leaf] = len(self.graph.shape(leaf)) - 2
                elif op.target in (scan_leave, fork_tail) and place == (0,):
                    self.tokens.dims[leaf] = 1
            return
        for place, leaf in leaves:
            axes = info.axes.get(f"out{place[0]}" if place else "out", ())
            if axes and axes[0] == "...":
                self.tokens.dims[leaf] = self.tokens.dims[tensor_inputs(op)[0]]
            elif "seq" in axes:
                self.tokens.dims[leaf] = axes.index("seq")

    def _pointwise(self, op: fx.Node, inputs: list[fx.Node]) -> None:
        dims, rank = self.tokens.dims, len(self.graph.shape(op))
        from_end = {len(self.graph.shape(n)) - dims[n] for n in inputs}
        if len(from_end) > 1:
            self._end(op, "tokens-crossed", f"{op.name} combines values whose tokens lie along different dimensions")
            return
        dims[op] = rank - from_end.pop()

    def _reduction(self, op: fx.Node, inputs: list[fx.Node]) -> None:
        dims = self.tokens.dims
        over, keeps = reduced_dims(self.graph, op)
        dim = dims[inputs[0]]
        if dim not in over:
            dims[op] = dim if keeps else dim - sum(d < dim for d in over)
        elif name_of(op) == "sum":
            dims[op] = PARTIAL
        else:
            self._end(op, "mixes-tokens", f"{op.name} ({name_of(op)}) works along the sequence")

    def _einsum(self, op: fx.Node, inputs: list[fx.Node]) -> None:
        terms, out = str(op.args[0]).replace(" ", "").split("->") if "->" in str(op.args[0]) else ("", "")
        given = list(zip(op.args[1:], terms.split(","), strict=False))  # a value may be given twice
        letters = {t[self.tokens.dims[n]] for n, t in given if n in inputs and "." not in t}  # type: ignore[index]
        elsewhere = "".join(t for n, t in given if n not in inputs)
        if len(letters) == 1 and "." not in terms and (letter := letters.pop()) in out and letter not in elsewhere:
            self.tokens.dims[op] = out.index(letter)
        else:
            self._end(op, "mixes-tokens", f"{op.name} ({op.args[0]}) works along the sequence")

    def _matmul(self, op: fx.Node, inputs: list[fx.Node]) -> None:
        dims, rank = self.tokens.dims, len(self.graph.shape(op))
        found = set()
        for side, node in enumerate(op.args[:2]):
            if node not in inputs:
                continue
            from_end = len(self.graph.shape(node)) - dims[node]  # type: ignore[index, arg-type]
            if from_end == (1, 2)[side]:
                self._end(op, "mixes-tokens", f"{op.name} sums along the sequence")
                return
            found.add(rank - from_end)
        if len(found) == 1:
            dims[op] = found.pop()
        else:
            self._end(op, "mixes-tokens", f"{op.name} multiplies tokens with tokens")


_TOKENWISE_OPS = {"rope", "gated_rms_norm", "as_many_tokens"}
_RULES = {"attention": "attention", "latent_attention": "attention", "selective_scan": "selective-scan"}
