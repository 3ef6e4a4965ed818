"""Attention that is written out becomes the canonical op with the same numbers, or stays as it is."""

from __future__ import annotations

from operator import add, matmul, mul
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from latentscan.ir.eager_attention import ATTENTION, canonical_eager, canonical_linear
from latentscan.tests.ir.building import Building, close, random


def inputs(make: Building) -> tuple[Any, Any, Any, Any]:
    """q, k, v [B, 3, S or T, 4] and a mask [B, 1, S, T]."""
    q = make.input("q", "b", 3, "s", 4)
    k, v = (make.input(n, "b", 3, "t", 4) for n in "kv")
    return q, k, v, make.input("mask", "b", 1, "s", "t")


VALUES = {
    "q": random(2, 3, 5, 4), "k": random(2, 3, 7, 4, seed=1), "v": random(2, 3, 7, 4, seed=2),
    "mask": random(2, 1, 5, 7, seed=3),
}  # fmt: skip


def scores(make: Building, q: Any, k: Any, scale: float = 0.5) -> Any:
    return make.call(mul, make.call(matmul, q, make.method("transpose", k, -1, -2)), scale)


def weighted(make: Building, x: Any, v: Any, p: float = 0.0, training: bool = False) -> Any:
    return make.call(matmul, make.call(F.dropout, make.call(F.softmax, x, dim=-1), p, training), v)


def plain(make: Building) -> Any:
    q, k, v, mask = inputs(make)
    return weighted(make, make.call(add, scores(make, q, k), mask), v)


def capped(make: Building) -> Any:
    q, k, v, mask = inputs(make)
    x = make.call(mul, make.call(torch.tanh, make.call(torch.div, scores(make, q, k), 2.0)), 2.0)
    return weighted(make, make.call(add, x, mask), v)


def filled(make: Building) -> Any:
    """MPT: a bias first, then a fill where a mask says so."""
    q, k, v, mask = inputs(make)
    x = make.call(add, scores(make, q, k), mask)
    far = make.call(torch.gt, mask, 0.5)
    return weighted(make, make.method("masked_fill", x, far, -1e30), v)


def flat(make: Building) -> Any:
    """BLOOM: rows and heads in one dimension, a bias inside the product, a mask after."""
    q, k, v, mask = inputs(make)
    rows = make.method("size", q, 0)
    both = make.call(mul, rows, 3)
    q3, k3, v3 = (make.method("reshape", x, both, -1, 4) for x in (q, k, v))
    bias = make.method("reshape", make.method("expand", mask, -1, 3, -1, -1), both, make.method("size", q, 2), -1)
    x = make.call(
        torch.baddbmm, bias, batch1=q3, batch2=make.method("transpose", k3, -1, -2), beta=1.0, alpha=0.5
    )  # fmt: skip
    x = make.method("view", x, rows, 3, make.method("size", q, 2), -1)
    x = make.call(F.softmax, make.call(add, x, mask), dim=-1)
    x = make.method("view", make.call(F.dropout, x, 0.1, False), both, make.method("size", q, 2), -1)
    return make.method("view", make.call(torch.bmm, x, v3), rows, 3, make.method("size", q, 2), 4)


@pytest.mark.parametrize("written", [plain, capped, filled, flat])
def test_it_becomes_the_op_with_the_same_numbers(written):
    make = Building()
    make.output(written(make))
    before = make.graph.copy()
    canonical_eager(make.graph)
    make.graph.clean()
    assert len(make.graph.calls(ATTENTION)) == 1
    assert not make.graph.calls(F.softmax, torch.bmm, torch.baddbmm, F.dropout)
    (got,), (want,) = make.run(**VALUES), make.run(before, **VALUES)
    assert close(got, want) < 1e-14
    node = make.graph.calls(ATTENTION)[0]  # sabotage: the comparison sees another scale and another cap
    for option, value in (("scale", 0.51), ("softcap", 1.5)):
        kept = node.kwargs
        node.kwargs = {**kept, option: value}
        assert close(make.run(**VALUES)[0], want) > 1e-4
        node.kwargs = kept


def drops(make: Building) -> Any:
    q, k, v, mask = inputs(make)
    return weighted(make, make.call(add, scores(make, q, k), mask), v, 0.1, True)


def by_tensor(make: Building) -> Any:
    q, k, v, mask = inputs(make)
    return weighted(make, make.call(mul, scores(make, q, k), mask), v)


def capped_after_mask(make: Building) -> Any:
    q, k, v, mask = inputs(make)
    x = make.call(torch.tanh, make.call(add, scores(make, q, k), mask))
    return weighted(make, make.call(mul, x, 2.0), v)


def over_queries(make: Building) -> Any:
    q, k, v, mask = inputs(make)
    x = make.call(F.softmax, make.call(add, scores(make, q, k), mask), dim=2)
    return make.call(matmul, x, v)


@pytest.mark.parametrize("written", [drops, by_tensor, capped_after_mask, over_queries])
def test_what_the_op_cannot_say_stays(written):
    make = Building()
    make.output(written(make))
    text = str(make.graph.graph)
    canonical_eager(make.graph)
    make.graph.clean()
    assert str(make.graph.graph) == text


def test_probabilities_that_are_returned_stay():
    make = Building()
    q, k, v, mask = inputs(make)
    p = make.call(F.softmax, make.call(add, scores(make, q, k), mask), dim=-1)
    make.output(make.call(matmul, p, v), p)
    canonical_eager(make.graph)
    assert not make.graph.calls(ATTENTION)


@pytest.mark.parametrize("how", ["T", "t", "transpose"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_with_a_transposed_weight_is_a_linear_map(how, bias):
    make = Building()
    x, w, b = make.input("x", "b", "s", 4), make.weight("w", random(6, 4)), make.weight("b", random(6))
    turned = make.call(getattr, w, "T") if how == "T" else make.method(how, w, *((0, 1) if how == "transpose" else ()))
    y = make.call(matmul, x, turned)
    make.output(make.call(add, y, b) if bias else y)
    before = make.graph.copy()
    canonical_linear(make.graph)
    make.graph.clean()
    (node,) = make.graph.calls(F.linear)
    assert node.args == (x, w, b if bias else None)
    assert not make.graph.calls(matmul, add)
    value = {"x": random(2, 3, 4)}
    assert close(make.run(**value), make.run(before, **value)) < 1e-15
