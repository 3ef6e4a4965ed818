"""Autograd functions that work on each element alone are seen through; others stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from latentscan.ir import normalize as normalizing
from latentscan.ir.capture import capture
from latentscan.ir.functions import APPLY, ElementwiseFunction
from latentscan.ir.kept import storage_of, training
from latentscan.ir.layout import linear_of
from latentscan.ir.verify import verify_all
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build

torch.set_num_threads(1)


class Cube(torch.autograd.Function):
    """x^3 with a gradient that is wrong on purpose (7 x^2), so that nobody can have derived it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 7 * x * x * gradient


class Gate(torch.autograd.Function):
    """Two inputs of one shape, and a value of its own that it keeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(y)
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, gate = ctx.saved_tensors
        return gradient * gate, gradient * x * gate * (1 - gate)


class Centred(torch.autograd.Function):
    """Its forward mixes elements."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.0


class MixedBackward(torch.autograd.Function):
    """Only its backward mixes elements."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient - gradient.mean(-1, keepdim=True)


class OfLength(torch.autograd.Function):
    """It calculates with the number of tokens, which is another one on a rank that has a part of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: int) -> torch.Tensor:
        ctx.tokens = tokens
        return x / tokens

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient / ctx.tokens, None


class Scaled(torch.autograd.Function):
    """A factor for each feature is broadcast."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, factor = ctx.saved_tensors
        return gradient * factor, (gradient * x).sum((0, 1))


class Inside(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.up, self.factor, self.function = nn.Linear(4, 6), nn.Parameter(torch.ones(6)), function
        self.given = {"Gate": "twice", "OfLength": "length", "Scaled": "factor"}.get(function.__name__, "alone")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        if self.given == "twice":
            return Gate.apply(y, 2 * y)
        if self.given == "length":
            return OfLength.apply(y, x.shape[1])
        if self.given == "factor":
            return Scaled.apply(y, self.factor)
        return self.function.apply(y)


def traced(function: Any) -> Any:
    torch.manual_seed(0)
    model = Inside(function).train()
    return model, capture(model, inputs={"x": torch.randn(2, 3, 4)}, training=True)


@pytest.mark.parametrize(("function", "makes"), [(Cube, 0), (Gate, 1)], ids=["cube", "gate"])
def test_a_function_of_single_elements_is_one_call_that_keeps_what_it_saves(function, makes):
    model, graph = traced(function)
    verify_all(graph)
    (call,) = [n for n in graph.nodes if isinstance(n.target, ElementwiseFunction)]
    assert not graph.calls(APPLY)
    assert [linear_of(graph, call.args[i]) is not None for i in call.target.reads] == [True]
    assert call.target.makes == makes
    kept = training(graph)
    assert storage_of(call.args[call.target.reads[0]]) in kept and storage_of(call) not in kept
    assert sum(isinstance(key, tuple) and key[0] is call for key in kept) == makes
    x = torch.randn(5, 7, 4)
    found = []
    for run in (model, torch.compile(model, backend=with_our_graph, fullgraph=True, dynamic=True)):
        model.zero_grad()
        (run(x) ** 2).sum().backward()
        found.append(model.up.weight.grad.clone())
    assert torch.equal(*found)


def with_our_graph(module: Any, examples: Any) -> Any:
    """A backend that runs the normalised graph as it stands."""
    from latentscan.ir.capture import from_dynamo

    graph = from_dynamo(module, examples, training=True)
    assert any(isinstance(n.target, ElementwiseFunction) for n in graph.nodes)
    return graph.module.forward


@pytest.mark.parametrize("function", [Centred, MixedBackward, OfLength, Scaled], ids=lambda f: f.__name__)
def test_a_function_that_mixes_broadcasts_or_counts_stays_what_it_is(function):
    _, graph = traced(function)
    assert len(graph.calls(APPLY)) == 1
    assert not any(isinstance(n.target, ElementwiseFunction) for n in graph.nodes)


def test_the_gradient_is_the_functions_own():
    """Of bloom's GELU, whose formula a derivative of its forward need not be; with gradient checkpointing, too."""
    one, other = (build("bloom").train() for _ in range(2))
    wrap(other, "lower{target=reference}")
    ids = torch.randint(3, 128, (2, 7), generator=torch.Generator().manual_seed(1))
    for model in (one, other):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    mine, theirs = ({n: p.grad for n, p in m.named_parameters()} for m in (other, one))
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-6)


def test_recomputed_regions_keep_their_number():
    model = build("bloom").train()
    model.gradient_checkpointing_enable()
    graph = capture(model, inputs={"input_ids": torch.ones(2, 6, dtype=torch.long), "use_cache": False}, training=True)
    calls = [n for n in graph.nodes if isinstance(n.target, ElementwiseFunction)]
    assert [n.meta[normalizing.REGION] for n in calls] == [1, 2]
