"""Graphs made by hand, call by call, with named symbolic sizes; they run on plain tensors, in fp64 by default."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from latentscan.ir.graph import VALUE, Graph
from latentscan.ir.weights import Weight

SIZES = {"b": 101, "s": 103, "t": 107, "p": 109}  # hints; they are never allocated


class Building:
    """A Graph in the making: inputs and weights, calls, then ``output``.

    Sizes given as names are symbols; a name is the same symbol everywhere. Every node says that it was traced in the
    module ``attn``.
    """

    def __init__(self) -> None:
        environment = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=environment)
        names = list(SIZES)
        context: Any = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC] * len(names), constraint_sizes=[None] * len(names)
        )
        sizes = torch.empty(tuple(SIZES.values()), device="meta")
        fake = self.mode.from_tensor(sizes, symbolic_context=context, source=ConstantSource("sizes"))
        self.symbols = dict(zip(names, fake.shape, strict=True))
        self.graph = Graph(fx.GraphModule(torch.nn.Module(), fx.Graph()), {}, training=False)
        self.values: dict[str, torch.Tensor] = {}  # weights by placeholder name

    def input(self, name: str, *shape: int | str, dtype: torch.dtype = torch.float64) -> fx.Node:
        """A placeholder; sizes are numbers, or names such as "b" (or "p+s" for a sum)."""
        sizes = [sum(self.symbols[x] for x in d.split("+")) if isinstance(d, str) else d for d in shape]
        with self.mode:
            return self._placeholder(name, torch.empty(sizes, dtype=dtype))

    def token(self, past: str = "p") -> fx.Node:
        """What stands for a cache that holds ``past`` positions."""
        with self.mode:
            return self._placeholder("token", torch.empty_strided((self.symbols[past] + 1,), (0,), dtype=torch.int64))

    def weight(self, path: str, value: torch.Tensor) -> fx.Node:
        """A placeholder for a parameter with a value."""
        with self.mode:
            fake = torch.empty(value.shape, dtype=value.dtype)
        node = self._placeholder(path.replace(".", "_"), fake)
        weight = Weight(path, node.name, value, fake)
        self.graph.weights[node.name] = self.graph._by_path[path] = weight
        self.values[node.name] = value
        return node

    def _placeholder(self, name: str, fake: torch.Tensor) -> fx.Node:
        holders = [n for n in self.graph.nodes if n.op == "placeholder"]
        with contextlib.ExitStack() as stack:
            if holders:
                stack.enter_context(self.graph.graph.inserting_after(holders[-1]))
            node = self.graph.graph.placeholder(name)
        node.meta[VALUE] = fake
        self.graph.inputs.append(node.name)
        return node

    def call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._placed(self.graph.call(function, *args, **kwargs))

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self._placed(self.graph.method(name, *args, **kwargs))

    def _placed(self, node: fx.Node) -> fx.Node:
        node.meta["nn_module_stack"] = {"attn": ("L['self'].attn", torch.nn.Module)}
        return node

    def output(self, *nodes: Any) -> Graph:
        node = self.graph.graph.output(tuple(nodes))
        node.meta[VALUE] = tuple(fx.map_arg(nodes, lambda n: n.meta[VALUE]))
        self.graph.module.recompile()
        return self.graph

    def run(self, graph: Graph | None = None, **inputs: Any) -> Any:
        """The outputs of ``graph`` (by default of the graph as it is) on inputs by name; new weights from recipes."""
        graph = graph or self.graph
        graph.module.recompile()
        made = made_weights(graph, self.values)
        values = [made[n.name] if n.name in made else inputs[n.name] for n in graph.nodes if n.op == "placeholder"]
        return graph.module.forward(*values)


def made_weights(graph: Graph, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values by placeholder of a graph's weights, those that recipes make included."""
    found = dict(values)
    for added in graph.added:
        sources = [found[graph.weight_at(path).placeholder] for path in added.recipe.sources]
        found[added.placeholder] = added.recipe.function(*sources)[added.index]
    return found


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(actual: Any, expected: Any) -> float:
    """Largest difference relative to the largest value, over tensors or sequences of them."""
    if isinstance(actual, Sequence):
        assert len(actual) == len(expected)
        return max(close(a, e) for a, e in zip(actual, expected, strict=True))
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float((actual - expected).detach().abs().max() / expected.detach().abs().max())
