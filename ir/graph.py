"""The Graph: an FX graph of torch calls and canonical ops, with its weights, symbols and provenance."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from latentscan.ir.errors import CaptureError
from latentscan.ir.sizes import expression, is_static
from latentscan.ir.weights import Added, Recipe, Weight

VALUE = "example_value"  # Dynamo's key for a node's fake value
PRODUCED_BY = "latentscan_pass"  # node.meta: name of the pass that made the node
LOCAL = "latentscan_local"  # node.meta: mesh axis of which the value is one rank's part
REGION = "latentscan_recompute"  # node.meta: id of the gradient-checkpointing region that the node belongs to

_IMPURE_FUNCTIONS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift,
    torch._assert, torch._assert_async,
}  # fmt: skip
_PURE_FUNCTIONS = {operator.and_, operator.or_, operator.not_, operator.is_}  # their names only look like writes
_RANDOM = {"dropout", "rand", "randn", "rand_like", "randn_like", "bernoulli", "multinomial", "randint", "normal"}


def normal_path(source: str) -> str:
    """Dynamo's name of a module or weight as a plain dotted path.

    ``L['self']._modules['model']._parameters['weight']`` and ``L['self'].model.weight`` both give ``model.weight``.
    """
    text = re.sub(r"""\._(?:modules|parameters|buffers)\[['"]([^'"]+)['"]\]""", r".\1", source)
    text = re.sub(r"""^[LG]\[['"][^'"]+['"]\](?:\[\d+\])*(?:\.__self__|\.forward|\._orig_mod)*""", "", text)
    return re.sub(r"""\[['"]?([^'"\]]+)['"]?\]""", r".\1", text).lstrip(".")


class Graph:
    """A traced model, open for passes.

    Attributes:
        module: the ``fx.GraphModule`` that passes rewrite.
        inputs: names of the placeholders that the traced callable was called with, in order.
        weights: placeholder name -> :class:`Weight`.
        added: new weights, in the order of their placeholders, which come after ``inputs``.
        training: whether the graph was traced with gradients enabled.
        events: provenance: one line for each thing that a pass did, in order.
        overlap: collectives are to be scheduled beside other work; by how much memory may grow. None: as they stand.
    """

    def __init__(self, module: fx.GraphModule, weights: dict[str, Weight], *, training: bool) -> None:
        self.module = module
        self.weights = weights
        self.training = training
        self.inputs = [n.name for n in module.graph.nodes if n.op == "placeholder"]
        self.added: list[Added] = []
        self.events: list[str] = []
        self.overlap: float | None = None
        self._by_path = {w.path: w for w in weights.values()}
        self._names: dict[str, fx.Node] = {}  # an index for `node`; made again when it does not fit
        self._like: fx.Node | None = None
        self._pass = ""

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.module.graph.nodes)

    def calls(self, *targets: Any) -> list[fx.Node]:
        """Nodes that call one of the given functions, ops, or methods (by name)."""
        wanted = set(targets)
        return [n for n in self.graph.nodes if n.op in ("call_function", "call_method") and n.target in wanted]

    def node(self, name: str) -> fx.Node:
        """The node of that name. Raises CaptureError if there is none."""
        found = self._names.get(name)
        if found is None or found.name != name or found.graph is not self.graph or found._erased:
            self._names = {n.name: n for n in self.graph.nodes}
            found = self._names.get(name)
        if found is None:
            raise CaptureError(f"no node is named {name!r}")
        return found

    def weight(self, node: Any) -> Weight | None:
        """The weight that a placeholder stands for, or None."""
        return self.weights.get(node.name) if isinstance(node, fx.Node) else None

    def weight_at(self, path: str) -> Weight | None:
        return self._by_path.get(path)

    def rename_weight(self, path: str, to: str) -> None:
        """Call a weight by another of its names, unless it is not read here or that name is taken."""
        if path in self._by_path and to not in self._by_path:
            weight = self._by_path[to] = self._by_path.pop(path)
            weight.path = to

    def value(self, node: Any) -> Any:
        """The fake value of a node (or the argument itself if it is no node)."""
        return node.meta.get(VALUE) if isinstance(node, fx.Node) else node

    def shape(self, node: fx.Node) -> tuple[Any, ...]:
        """Sizes; a symbolic one that tracing has fixed (a feature dimension of embedded inputs, say) as a number."""
        return tuple(int(expression(s)) if is_static(s) else s for s in self.value(node).shape)

    @property
    def fake_mode(self) -> Any:
        for n in self.graph.nodes:
            value = n.meta.get(VALUE)
            if isinstance(value, torch.Tensor) and hasattr(value, "fake_mode"):
                return value.fake_mode
        raise CaptureError("the graph holds no fake tensor")

    def largest(self, size: fx.Node) -> int | None:
        """The largest value that a symbolic size can have by the guards of the trace; None if it has no bound."""
        env, value = self.fake_mode.shape_env, self.value(size)
        if env is None or not isinstance(value, torch.SymInt):
            return None
        bound = env.bound_sympy(expression(value)).upper
        return int(bound) if bound.is_Integer and bound < 1 << 31 else None

    def specialized(self) -> set[sympy.Symbol]:
        """Symbols that something has fixed or tied to others after tracing; no guard of Dynamo's knows of it."""
        env = self.fake_mode.shape_env
        return set() if env is None else set(env.replacements)

    def symbols(self) -> dict[sympy.Symbol, str]:
        """Free shape symbols -> the SymInt placeholder that carries them at run time."""
        found: dict[sympy.Symbol, str] = {}
        for n in self.graph.nodes:
            if n.op == "placeholder":
                value = n.meta.get(VALUE)
                if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
                    found[value.node.expr] = n.name
        return found

    # -- writing ------------------------------------------------------------------------------------------------

    @contextmanager
    def before(self, anchor: fx.Node, pass_name: str) -> Iterator[None]:
        """New nodes go before ``anchor`` and inherit its module, stack trace and recompute region."""
        saved = self._like, self._pass
        self._like, self._pass = anchor, pass_name
        try:
            with self.graph.inserting_before(anchor):
                yield
        finally:
            self._like, self._pass = saved

    @contextmanager
    def after(self, anchor: fx.Node, pass_name: str) -> Iterator[None]:
        """New nodes go after ``anchor`` in the order in which they are made."""
        following = anchor.next
        while following.op == "placeholder":
            following = following.next
        saved = self._like, self._pass
        self._like, self._pass = anchor, pass_name
        try:
            with self.graph.inserting_before(following):
                yield
        finally:
            self._like, self._pass = saved

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a function call; its fake value is computed now, so a wrong shape fails here."""
        return self._made(self.graph.call_function(function, args, kwargs))

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self._made(self.graph.call_method(name, args, kwargs))

    def call_like(self, old: fx.Node, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call that gives what ``old`` gives; it is not evaluated, so it cannot add a guard."""
        return self._made(self.graph.call_function(function, args, kwargs), self.value(old))

    def _made(self, node: fx.Node, value: Any = None) -> fx.Node:
        node.meta[VALUE] = self.evaluate(node) if value is None else value
        if self._like is not None:
            for key in ("nn_module_stack", "stack_trace", REGION):
                if key in self._like.meta:
                    node.meta[key] = self._like.meta[key]
        node.meta[PRODUCED_BY] = self._pass
        return node

    def evaluate(self, node: fx.Node) -> Any:
        """The fake value that a call node has, given its arguments' fake values."""

        def get(value: fx.Node) -> Any:
            return value.meta[VALUE]

        args = fx.map_arg(node.args, get)
        kwargs = fx.map_arg(node.kwargs, get)
        mode = self.fake_mode
        allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True  # on meta, x[[2, 0]] makes a plain index
        try:
            # Without the Python dispatcher torch 2.11 decomposes linear in C++, which symbolic sizes cannot pass.
            with mode, enable_python_dispatcher(), torch.no_grad():
                if node.op == "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                return node.target(*args, **kwargs)  # type: ignore[operator]
        finally:
            mode.allow_non_fake_inputs = allowed

    def add_weights(self, recipe: Recipe, values: Sequence[torch.Tensor]) -> list[fx.Node]:
        """Append one placeholder for each target of ``recipe``.

        Args:
            values: tensors that have the targets' shapes, dtypes and devices (fake ones will do).
        """
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        last = placeholders[-1]
        made = []
        for index, (path, value) in enumerate(zip(recipe.targets, values, strict=True)):
            existing = next((a for a in self.added if a.path == path), None)
            if existing is not None:
                made.append(self.node(existing.placeholder))
                continue
            with self.graph.inserting_after(last):
                node = self.graph.placeholder("latentscan_" + re.sub(r"\W", "_", path))
            last = node
            with self.fake_mode:
                fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            node.meta[VALUE] = fake
            self.added.append(Added(path, node.name, recipe, index))
            self.weights[node.name] = self._by_path[path] = Weight(path, node.name, fake)
            made.append(node)
        return made

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let every user of ``old`` use ``new``."""
        old.replace_all_uses_with(new)

    def clean(self) -> int:
        """Erase dead nodes, keeping whatever writes memory, draws random numbers or appends to a cache."""
        erased = 0
        for node in reversed(self.nodes):
            if node.users or node.op in ("placeholder", "output") or is_impure(node):
                continue
            self.graph.erase_node(node)
            erased += 1
        self.module.recompile()
        return erased

    def copy(self) -> Graph:
        """An independent copy of the graph; weights and fake values are shared."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        output = graph.graph_copy(self.graph, mapping)
        graph.output(output)
        old_output = next(n for n in self.graph.nodes if n.op == "output")
        new_output = next(n for n in graph.nodes if n.op == "output")
        new_output.meta = dict(old_output.meta)
        renamed = False
        for old, new in mapping.items():
            new.meta = dict(old.meta)
            if hasattr(old, "_dynamo_source"):
                new._dynamo_source = old._dynamo_source
            renamed |= old.name != new.name
            new.name = old.name
        module = fx.GraphModule(self.module, graph)
        other = Graph.__new__(Graph)
        other.__dict__.update(self.__dict__)
        other.module, other._names = module, {}
        other.inputs, other.added, other.events = list(self.inputs), list(self.added), list(self.events)
        other.weights, other._by_path = dict(self.weights), dict(self._by_path)
        return other

    def restore(self, saved: Graph) -> None:
        """Become ``saved`` again (a copy made before a pass)."""
        self.__dict__.update(saved.copy().__dict__)


def module_path(node: fx.Node) -> str:
    """Path of the innermost module that a node was traced in, or the empty string."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    return normal_path(list(stack.values())[-1][0])


def module_class(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    kind = list(stack.values())[-1][1]
    return kind if isinstance(kind, str) else kind.__name__


def is_impure(node: fx.Node) -> bool:
    """Whether a node must stay although nobody reads its value."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op == "call_module":
        return True
    if node.op != "call_function":
        return False
    if node.target in _PURE_FUNCTIONS:
        return False
    if node.target in _IMPURE_FUNCTIONS or getattr(node.target, "__name__", "") in _RANDOM:
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable or node.target._opname.startswith("cache_append")
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return True
    return getattr(node.target, "__name__", "x_").endswith("_")


def written_by(node: fx.Node) -> Any:
    """The value that a node writes in place; None if it writes none (it draws random numbers, say)."""
    if not is_impure(node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    name = getattr(node.target, "__name__", "")
    inplace = node.kwargs.get("inplace", len(node.args) > 3 and node.args[3])  # of a dropout
    return None if name in _RANDOM and not inplace else node.args[0]
