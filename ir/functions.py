"""Autograd functions of a model that work on each element alone, such as an activation with a backward of its own.

Dynamo leaves ``torch.autograd.Function.apply`` as a call of two subgraphs, of which nobody knows what they do. Where
both compute each element from the same elements of their inputs, the call becomes one of :class:`ElementwiseFunction`,
which passes treat as they treat any other function of single elements.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from latentscan.ir.axes import POINTWISE, draws, name_of
from latentscan.ir.graph import Graph
from latentscan.ir.sizes import same

APPLY = getattr(torch.ops.higher_order, "autograd_function_apply", None)


class ElementwiseFunction:
    """An autograd function by its two graphs: called with tensors of one shape (and sizes), it gives one of that shape.

    Attributes:
        reads: places of the inputs that it keeps for its backward pass. makes: how many tensors it keeps beside these.
    """

    def __init__(
        self, forward: fx.GraphModule, backward: fx.GraphModule, reads: tuple[int, ...], makes: int, **more: Any
    ):
        self.forward, self.backward, self.reads, self.makes, self.more = forward, backward, reads, makes, more
        self.__name__ = self.__qualname__ = "elementwise_function"

    def __call__(self, *args: Any) -> torch.Tensor:
        result = APPLY(self.forward, self.backward, *args, **self.more)  # type: ignore[misc]
        return result[0] if isinstance(result, (tuple, list)) else result


def name_elementwise_functions(graph: Graph) -> None:
    """Calls of autograd functions that work on each element alone become calls of an :class:`ElementwiseFunction`."""
    if APPLY is None:
        return
    changed = False
    for call in graph.calls(APPLY):
        made = _elementwise(graph, call)
        for user in list(call.users):
            if user.target is operator.getitem and not user.users:  # a checkpoint handed it out, and nobody reads it
                graph.graph.erase_node(user)
        leaves = [u for u in call.users if u.target is operator.getitem]
        if made is None or len(leaves) != len(call.users) or any(u.args[1] != 0 for u in leaves):
            continue
        old = leaves[0] if leaves else call
        with graph.before(call, "normalize"):
            new = graph.call_like(old, made, *call.args[2:])
        for leaf in leaves:
            leaf.replace_all_uses_with(new)
            graph.graph.erase_node(leaf)
        if call.users:
            call.replace_all_uses_with(new)
        bodies = call.args[:2]
        graph.graph.erase_node(call)
        for body in bodies:
            if isinstance(body, fx.Node) and not body.users:
                graph.graph.erase_node(body)
        changed = True
    if changed:
        graph.module.delete_all_unused_submodules()


def _elementwise(graph: Graph, call: fx.Node) -> ElementwiseFunction | None:
    """What a call of an autograd function is, if it works on each element alone; else None."""
    bodies = [_body(graph, n) for n in call.args[:2]]
    given = call.args[2:]
    values = [graph.value(a) for a in given]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    result = graph.value(call)
    result = result[0] if isinstance(result, (tuple, list)) and result else result
    if any(b is None for b in bodies) or not tensors or not isinstance(result, torch.Tensor):
        return None
    if not all(_same_shape(t, result) for t in tensors) or call.kwargs.get("dirty_idx"):
        return None
    forward, backward = bodies
    places = [n for n in forward.graph.nodes if n.op == "placeholder"]  # type: ignore[union-attr]
    entries = [n for n in backward.graph.nodes if n.op == "placeholder"]  # type: ignore[union-attr]
    output = next(n for n in forward.graph.nodes if n.op == "output").args[0]  # type: ignore[union-attr]
    if len(places) != len(given) or not isinstance(output, (tuple, list)) or len(output) != 2:
        return None
    results, saved = (list(x) if isinstance(x, (tuple, list)) else [x] for x in output)
    numbers = {p for p, v in zip(places, values, strict=True) if not isinstance(v, torch.Tensor)}
    if len(entries) != len(results) + len(saved):
        return None
    kept = {
        e for e, s in zip(entries[len(results) :], saved, strict=True) if s in numbers or not isinstance(s, fx.Node)
    }
    if not _of_elements(forward, numbers) or not _of_elements(backward, kept):
        return None
    reads = tuple(i for i, p in enumerate(places) if p in saved and p not in numbers)
    makes = len({s for s in saved if isinstance(s, fx.Node) and s.op != "placeholder"})
    return ElementwiseFunction(forward, backward, reads, makes, **call.kwargs)  # type: ignore[arg-type]


def _body(graph: Graph, node: Any) -> fx.GraphModule | None:
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value: Any = graph.module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value if isinstance(value, fx.GraphModule) else None


def _same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dim() == b.dim() and all(same(x, y) for x, y in zip(a.shape, b.shape, strict=True))


def _of_elements(body: fx.GraphModule | None, numbers: set[fx.Node]) -> bool:
    """Whether a body computes with elements alone: ``numbers`` (sizes) it may carry, but not calculate with."""
    assert body is not None
    for node in body.graph.nodes:
        if node.op in ("placeholder", "output") or node.target is torch._C._set_grad_enabled:
            continue
        plain = node.op == "call_function" or (node.op == "call_method" and not str(node.target).endswith("_"))
        if not plain or name_of(node) not in POINTWISE or draws(node) or node.kwargs.get("out") is not None:
            return False
        if numbers.intersection(node.all_input_nodes):
            return False
    return True
