"""The last step of every pipeline: ``cache_append`` becomes a write into an arena tensor and a plain slice.

An op that returned views of a hidden buffer would be overwritten, dropped or merged by a later compiler. So each cached
tensor becomes an extra graph input, the *prefix* of its arena that is valid after the call (past and new positions),
which ``arena_write`` mutates in the open. The prefix's sizes and strides are expressions in the sizes of the other
inputs: no new symbol, no guard, and growing the arena recompiles nothing. :class:`ArenaBinder` makes the room and
passes the prefixes at each call.

The position of a write is the length of the token, so that running a step twice, or recomputing an append, changes
nothing. When the graph is for an empty cache only, what is appended is used directly instead of being read back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from latentscan.ir.arena import Layout, arena_of, sequence_dim, token_length
from latentscan.ir.errors import CacheError
from latentscan.ir.ops.cache import ARENA_WRITE, CACHE_APPEND
from latentscan.ir.sizes import expression, is_static, same

VALUE = "example_value"

# Operations through which a full tensor reaches a consumer as a view, and after which `view` may meet its strides.
_VIEWS = {"transpose", "permute", "unsqueeze", "squeeze", "expand", "narrow", "movedim", "view", "reshape", "flatten"}


@dataclass(frozen=True)
class Size:
    """A size that is known when the graph is called.

    Attributes:
        expr: in the symbols of the trace, or a number.
        sources: symbol -> (argument, dimension) to read it from; dimension None: the argument is the number.
    """

    expr: sympy.Expr
    sources: dict[sympy.Symbol, tuple[int, int | None]] = field(compare=False)
    _fast: Any = field(init=False, compare=False, default=None)

    def __post_init__(self) -> None:
        symbols = sorted(self.expr.free_symbols, key=str)
        where = [self.sources[s] for s in symbols]
        if not symbols:
            fast: Any = int(self.expr)
        else:
            function = sympy.lambdify(symbols, self.expr, modules="math")

            def fast(args: Sequence[Any]) -> int:
                return int(function(*[args[a] if d is None else args[a].shape[d] for a, d in where]))

        object.__setattr__(self, "_fast", fast)

    def __call__(self, args: Sequence[Any]) -> int:
        """The size in a call with these arguments."""
        return self._fast if isinstance(self._fast, int) else self._fast(args)


@dataclass(frozen=True)
class ArenaInput:
    """One extra graph input: the valid prefix of one tensor of one arena.

    Attributes:
        placeholder: its name in the graph; extra inputs stand last, in the order of the records.
        token, token_index: name and position of the input that carries the arena's token.
        index: which of the arena's tensors.
        sizes: sizes without the sequence dimension, batch first.
        end: positions held after the call.
        seq_dim, dtype, device: see :class:`latentscan.ir.arena.Layout`.
        example: a fake tensor of the input's shape and strides, for compiling the graph.
        bytes_per_token: bytes of one position of one batch row, None if that depends on a symbol.
    """

    placeholder: str
    token: str
    token_index: int
    index: int
    sizes: tuple[Size, ...]
    end: Size
    seq_dim: int
    dtype: torch.dtype
    device: torch.device
    example: torch.Tensor
    bytes_per_token: int | None


class ArenaBinder:
    """A compiled callable together with the arenas that its extra inputs come from.

    Args:
        function: takes the graph's inputs, then one tensor for each record.
        records: from :func:`lower_cache_appends`.

    Calling it with the inputs that the graph had before lowering makes room in each arena and runs ``function``.

    Raises:
        CacheError: a token's arena is gone, holds something else, or is full.
    """

    def __init__(self, function: Callable[..., Any], records: Sequence[ArenaInput]) -> None:
        self.function, self.records = function, tuple(records)
        groups: dict[int, list[ArenaInput]] = {}
        for record in self.records:
            groups.setdefault(record.token_index, []).append(record)
        self._groups = [(token, sorted(group, key=lambda r: r.index)) for token, group in groups.items()]
        self._place = {record.placeholder: i for i, record in enumerate(self.records)}

    def bind(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """The extra inputs for a call with ``args``, in the order of the records."""
        extra: list[Any] = [None] * len(self.records)
        for token_index, group in self._groups:
            token = args[token_index]
            arena = arena_of(token)
            end = max(record.end(args) for record in group)
            layouts = [Layout(tuple(s(args) for s in r.sizes), r.seq_dim, r.dtype, r.device) for r in group]
            arena.ensure(layouts, token_length(token), end)
            for record in group:
                extra[self._place[record.placeholder]] = arena.prefix(record.index, end)
        return extra

    def __call__(self, *args: Any) -> Any:
        return self.function(*args, *self.bind(args))


def lower_cache_appends(gm: fx.GraphModule) -> list[ArenaInput]:
    """Lower every ``cache_append`` of a Dynamo graph, in place.

    Args:
        gm: a torch-level graph whose nodes carry fake values in ``meta["example_value"]``.

    Returns:
        A record for each extra placeholder, in order; ``[r.example for r in records]`` are their example inputs.

    Raises:
        CacheError: an append is in a subgraph, needs a gradient through cached positions, or its arena or sizes cannot
            be known at the call. The graph is then unchanged.
    """
    appends = [n for n in gm.graph.nodes if is_append(n)]
    for name, child in gm.named_modules():
        if child is not gm and isinstance(child, fx.GraphModule) and any(map(is_append, child.graph.nodes)):
            raise CacheError(
                "a cache is filled inside a subgraph",
                where=name,
                remedy="call the model without gradient checkpointing when it has a cache",
            )
    if not appends:
        return []
    plan = _Plan(gm, appends)  # may refuse
    return plan.apply()


def is_append(node: fx.Node) -> bool:
    """Whether a node appends to a cache (Dynamo records the op without its overload)."""
    return node.op == "call_function" and node.target in (CACHE_APPEND.op, CACHE_APPEND.op.overloadpacket)


@dataclass
class _Append:
    """One append node, read and checked."""

    node: fx.Node
    root: fx.Node  # the token's placeholder
    tensors: list[fx.Node]
    seq_dims: list[int]
    past: sympy.Expr
    end: sympy.Expr


class _Plan:
    """Everything that lowering needs to know, collected before the graph is touched."""

    def __init__(self, gm: fx.GraphModule, appends: list[fx.Node]) -> None:
        self.gm = gm
        self.placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.sources = _symbol_sources(self.placeholders)
        self.appends: list[_Append] = []
        for node in appends:
            self.appends.append(self._read(node))
        # Of every arena: one layout, and one end that covers all appends.
        self.groups: dict[fx.Node, list[_Append]] = {}
        for append in self.appends:
            self.groups.setdefault(append.root, []).append(append)
        self.records: list[ArenaInput] = []
        for root, group in self.groups.items():
            self._records_of(root, group)

    def _read(self, node: fx.Node) -> _Append:
        args: tuple[Any, ...] = node.args
        root, tensors, seq_dims = args
        while root.op != "placeholder":
            source = root.args[0] if root.target is operator.getitem else None
            if not isinstance(source, fx.Node) or not is_append(source) or root.args[1] != 1:
                raise CacheError(f"the token is computed by {root.name}, it is no input", where=node.name)
            root = source.args[0]
        user: Any
        for user in node.users:
            if user.target is not operator.getitem or user.args[1] not in (0, 1):
                raise CacheError(f"{user.name} uses the result of {node.name} in an unknown way", where=node.name)
            if user.args[1] == 0 and any(u.target is not operator.getitem for u in user.users):
                raise CacheError(f"the list of full tensors {user.name} is used as a whole", where=node.name)
        dims = [sequence_dim(_value(t).dim(), d) for t, d in zip(tensors, seq_dims, strict=True)]
        past = expression(_value(args[0]).shape[0]) - 1
        if past != 0 and any(_value(t).requires_grad for t in tensors):
            raise CacheError(
                "gradients do not flow through cached positions",
                where=node.name,
                remedy="call the model under torch.no_grad(), or without a cache",
            )
        end = sympy.expand(past + expression(_value(tensors[0]).shape[dims[0]]))
        return _Append(node, root, list(tensors), dims, past, end)

    def _records_of(self, root: fx.Node, group: list[_Append]) -> None:
        first, last = group[0], group[-1]
        for append in group[1:]:
            same_form = append.seq_dims == first.seq_dims and all(
                _same_form(_value(a), _value(b), d)
                for a, b, d in zip(append.tensors, first.tensors, first.seq_dims, strict=True)
            )
            # A chain (each append starts where the one before ended) or the same append again.
            grows = append.past in [a.end for a in group] or append.past == first.past and append.end == first.end
            if not same_form or not grows:
                raise CacheError(
                    f"{append.node.name} and {first.node.name} write different things to one cache layer",
                    where=append.node.name,
                    remedy="give each its own cache layer",
                )
        for i, (tensor, seq_dim) in enumerate(zip(first.tensors, first.seq_dims, strict=True)):
            value = _value(tensor)
            sizes = [s for d, s in enumerate(value.shape) if d != seq_dim]
            known = all(is_static(s) for s in sizes[1:])
            elements = int(torch.Size(map(int, sizes[1:])).numel()) if known else None
            self.records.append(
                ArenaInput(
                    placeholder=f"arena_{root.name}_{i}",
                    token=root.name,
                    token_index=self.placeholders.index(root),
                    index=i,
                    sizes=tuple(self._size(expression(s), tensor) for s in sizes),
                    end=self._size(last.end, tensor),
                    seq_dim=seq_dim,
                    dtype=value.dtype,
                    device=value.device,
                    example=_example(value, seq_dim, _length_like(value, last, seq_dim)),
                    bytes_per_token=elements * value.element_size() if elements is not None else None,
                )
            )

    def _size(self, expr: sympy.Expr, node: fx.Node) -> Size:
        unknown = [s for s in expr.free_symbols if s not in self.sources]
        if unknown:
            raise CacheError(
                f"size {expr} of {node.name} depends on {unknown}, which no input has",
                where=node.name,
                remedy="append tensors whose sizes follow from the inputs' sizes",
            )
        return Size(expr, self.sources)

    def apply(self) -> list[ArenaInput]:
        graph = self.gm.graph
        inputs: dict[tuple[fx.Node, int], fx.Node] = {}
        last = self.placeholders[-1]
        root_of = {n.name: n for n in self.placeholders}
        for record in self.records:
            with graph.inserting_after(last):
                last = graph.placeholder(record.placeholder)
            last.meta[VALUE] = record.example
            last._dynamo_source = None  # type: ignore[attr-defined]  # AOTAutograd asks every placeholder
            inputs[root_of[record.token], record.index] = last
        ends = {root: group[-1].end for root, group in self.groups.items()}
        for append in self.appends:
            self._rewrite(append, [inputs[append.root, i] for i in range(len(append.tensors))], ends[append.root])
        graph.lint()
        self.gm.recompile()
        return self.records

    def _rewrite(self, append: _Append, arenas: list[fx.Node], arena_end: sympy.Expr) -> None:
        graph, node = self.gm.graph, append.node
        token: Any = node.args[0]
        empty = append.past == 0
        fulls = []
        with graph.inserting_before(node):
            past = 0 if empty else self._emit(operator.sub, self._dim(token, 0), 1)
            count = self._dim(append.tensors[0], append.seq_dims[0])
            end = count if empty else self._emit(operator.add, past, count)
            for x, seq_dim, arena in zip(append.tensors, append.seq_dims, arenas, strict=True):
                written = self._emit("detach", x) if _value(x).requires_grad else x
                graph.call_function(ARENA_WRITE.op, (arena, past, written), {"seq_dim": seq_dim})
                if empty:
                    fulls.append(x)
                elif append.end == arena_end:
                    fulls.append(arena)
                else:
                    fulls.append(self._emit("narrow", arena, seq_dim, 0, end))
            head = self._emit("narrow", token, 0, 0, 1)
            new_token = self._emit("expand", head, self._emit(operator.add, end, 1))
        user: Any
        for user in list(node.users):
            if user.args[1] == 1:
                user.replace_all_uses_with(new_token)
            else:
                for item in list(user.users):
                    full = fulls[item.args[1]]
                    item.replace_all_uses_with(full)
                    graph.erase_node(item)
                    _views_to_reshapes(full)
            graph.erase_node(user)
        graph.erase_node(node)

    def _dim(self, node: fx.Node, dim: int) -> Any:
        size = _value(node).shape[dim]
        return int(expression(size)) if is_static(size) else self._emit(torch.ops.aten.sym_size.int, node, dim)

    def _emit(self, target: Any, *args: Any) -> Any:
        """A new node with its fake value; numbers are folded."""
        if not any(isinstance(a, fx.Node) for a in args):
            return target(*args)
        graph = self.gm.graph
        node = graph.call_method(target, args) if isinstance(target, str) else graph.call_function(target, args)
        values = [_value(a) if isinstance(a, fx.Node) else a for a in args]
        mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)
        if target is torch.ops.aten.sym_size.int:
            node.meta[VALUE] = values[0].shape[values[1]]
        elif isinstance(target, str):
            with mode:  # type: ignore[union-attr]
                node.meta[VALUE] = getattr(values[0], target)(*values[1:])
        else:
            node.meta[VALUE] = target(*values)
        return node


def _value(node: fx.Node) -> Any:
    value = node.meta.get(VALUE)
    if value is None:
        raise CacheError(
            f"node {node.name} has no fake value", where=node.name, remedy="propagate fake values before lowering"
        )
    return value


def _symbol_sources(placeholders: list[fx.Node]) -> dict[sympy.Symbol, tuple[int, int | None]]:
    """Where each symbol of the trace can be read at a call: an integer argument, or a tensor argument's size."""
    sources: dict[sympy.Symbol, tuple[int, int | None]] = {}
    for i, node in enumerate(placeholders):
        value = node.meta.get(VALUE)
        if isinstance(value, torch.SymInt) and isinstance(expression(value), sympy.Symbol):
            sources.setdefault(expression(value), (i, None))
        elif isinstance(value, torch.Tensor):
            for d, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and isinstance(expression(size), sympy.Symbol):
                    sources.setdefault(expression(size), (i, d))
    return sources


def _same_form(a: torch.Tensor, b: torch.Tensor, seq_dim: int) -> bool:
    sizes = all(same(x, y) for d, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if d != seq_dim)
    return sizes and a.dtype == b.dtype and a.device == b.device


def _length_like(value: torch.Tensor, append: _Append, seq_dim: int) -> Any:
    """``append.end`` as a SymInt of the trace, made by adding sizes that exist."""
    return _value(append.node.args[0]).shape[0] - 1 + _value(append.tensors[0]).shape[append.seq_dims[0]]  # type: ignore[arg-type]


def _example(value: torch.Tensor, seq_dim: int, length: Any) -> torch.Tensor:
    """A fake prefix of an arena: sequence outermost in memory, in its logical place in the shape."""
    sizes = [s for d, s in enumerate(value.shape) if d != seq_dim]
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty((length, *sizes), dtype=value.dtype, device=value.device).movedim(0, seq_dim)


def _views_to_reshapes(node: fx.Node) -> None:
    """``view`` on a full tensor assumed the strides of a fresh concatenation; ``reshape`` is the same without that."""
    for user in list(node.users):
        name = user.target if user.op == "call_method" else getattr(user.target, "__name__", "")
        if name not in _VIEWS and user.target is not operator.getitem:
            continue
        if user.op == "call_method" and name == "view" and not any(isinstance(a, torch.dtype) for a in user.args):
            user.target = "reshape"
        if user.args and user.args[0] is node:
            _views_to_reshapes(user)
