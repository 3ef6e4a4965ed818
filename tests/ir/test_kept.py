"""What autograd keeps, by formula, against what its saved-tensor hooks are given."""

from __future__ import annotations

from collections.abc import Callable
from operator import add, mul, truediv
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.cost import evaluate
from latentscan.ir.kept import host_keys, kept, total, training
from latentscan.ir.normalize import ATTENTION, LATENT_ATTENTION
from latentscan.ir.ops.rope import ROPE
from latentscan.ir.ops.swap import SWAP_OUT
from latentscan.lowering.select import lower
from latentscan.tests.ir.building import Building

B, S, D, H, DK, DV = 2, 5, 8, 2, 6, 4
SIZES = {"b": B, "s": S}


def hidden(make: Building, name: str = "x") -> fx.Node:
    """A value that some call made, so that it counts: [B, S, D]."""
    return make.method("neg", make.input(name, "b", "s", D))


def heads(make: Building, name: str, width: int) -> fx.Node:
    return make.method("neg", make.input(name, "b", H, "s", width))


def attended(make: Building, **changes: int) -> fx.Node:
    q, k = heads(make, "q", DK), heads(make, "k", DK)
    return make.call(ATTENTION, q, k, heads(make, "v", changes.get("v", DV)), kind="causal", scale=0.4)


def grouped(make: Building) -> fx.Node:
    q = heads(make, "q", DK)
    k, v = (make.method("neg", make.input(n, "b", 1, "s", DK)) for n in "kv")
    return make.call(ATTENTION, q, k, v, kind="causal", scale=0.4)


def latent(make: Building) -> fx.Node:
    c, kr = make.method("neg", make.input("c", "b", "s", D)), make.method("neg", make.input("kr", "b", 1, "s", DV))
    return make.call(LATENT_ATTENTION, heads(make, "q", D), heads(make, "qr", DV), c, kr, kind="causal", scale=0.4)


def rotated(make: Building) -> fx.Node:
    cos, sin = (make.method("neg", make.input(n, "b", "s", DK)) for n in ("cos", "sin"))
    return make.call(ROPE.op, heads(make, "q", DK), cos, sin, layout="half")


def tabled(make: Building) -> fx.Node:
    """A product with a table, which takes no gradient: the other factor is not kept."""
    x = hidden(make)
    table = make.method("cos", make.call(torch.arange, D, dtype=torch.float64))
    return make.call(mul, x, make.method("exp", table))


def turned(make: Building) -> fx.Node:
    """Rotated as complex numbers: the angles are kept alone, and what is turned is a view."""
    pairs = make.method("unflatten", hidden(make), -1, (D // 2, 2))
    angles = make.call(torch.polar, *(make.call(torch.ones, D // 2, dtype=torch.float64) for _ in range(2)))
    return make.call(torch.view_as_real, make.call(mul, make.call(torch.view_as_complex, pairs), angles))


def normed(make: Building) -> fx.Node:
    weights = [make.weight(n, torch.randn(D, dtype=torch.float64)) for n in ("w", "b")]
    return make.call(F.layer_norm, hidden(make), (D,), *weights, 1e-5)


def dropping(make: Building, p: float) -> fx.Node:
    q, k, v = (heads(make, n, DK) for n in "qkv")
    return make.call(F.scaled_dot_product_attention, q, k, v, dropout_p=p, is_causal=True)


def capped(make: Building, kind: str) -> fx.Node:
    q, k, v = (heads(make, n, DK) for n in "qkv")
    return make.call(ATTENTION, q, k, v, kind=kind, scale=0.4, softcap=5.0)


def masked(make: Building, heads_of_mask: int) -> fx.Node:
    q, k, v = (heads(make, n, DK) for n in "qkv")
    mask = make.method("detach", make.method("neg", make.input("mask", "b", heads_of_mask, "s", "s")))
    return make.call(ATTENTION, q, k, v, mask, kind="causal", scale=0.4)


CALLS: dict[str, Callable[[Building], fx.Node]] = {
    "linear": lambda m: m.call(F.linear, hidden(m), m.weight("w", torch.randn(3, D, dtype=torch.float64))),
    "product": lambda m: m.call(mul, hidden(m), hidden(m, "y")),
    "product with a number": lambda m: m.call(mul, hidden(m), 2.0),
    "product with a table": tabled,
    "complex rotation": turned,
    "layer norm": normed,
    "quotient": lambda m: m.call(truediv, hidden(m), 3.0),
    "sum": lambda m: m.call(add, hidden(m), hidden(m, "y")),
    "square": lambda m: m.method("pow", hidden(m), 2),
    "mean": lambda m: m.method("mean", hidden(m), -1, keepdim=True),
    "rsqrt": lambda m: m.call(torch.rsqrt, m.method("square", hidden(m))),
    "silu": lambda m: m.call(F.silu, hidden(m)),
    "sigmoid": lambda m: m.call(torch.sigmoid, hidden(m)),
    "softmax": lambda m: m.call(F.softmax, hidden(m), -1),
    "dropout": lambda m: m.call(F.dropout, hidden(m), 0.5, True),
    "dropout of nothing": lambda m: m.call(F.dropout, hidden(m), 0.0, True),
    "dropout in evaluation": lambda m: m.call(F.dropout, hidden(m), 0.5, False),
    "layer norm without weights": lambda m: m.call(F.layer_norm, hidden(m), (D,)),
    "masked fill": lambda m: m.method("masked_fill", hidden(m), m.method("gt", hidden(m, "y"), 0), 0.0),
    "stack": lambda m: m.call(torch.stack, [hidden(m), hidden(m, "y")], -1),
    "cat": lambda m: m.call(torch.cat, [hidden(m), hidden(m, "y")], -1),
    "pad": lambda m: m.call(F.pad, hidden(m), [0, 2]),
    "rope": rotated,
    "attention": attended,
    "attention of one head dim": lambda m: attended(m, v=DK),
    "attention of grouped heads": grouped,
    "attention that drops": lambda m: dropping(m, 0.5),
    "attention with a softcap": lambda m: capped(m, "full"),
    "causal attention with a softcap": lambda m: capped(m, "causal"),
    "attention under a mask": lambda m: masked(m, 1),
    "attention under a mask for each head": lambda m: masked(m, H),
    "latent attention": latent,
}


def measured(make: Building) -> int:
    """Bytes of all storages that the graph's calls save; inputs take gradients and are not counted."""
    graph = make.graph.copy()
    lower(graph, "reference")
    arguments: list[Any] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            shape = [SIZES.get(str(n), n) if not isinstance(n, int) else n for n in _shape(make, node)]
            arguments.append(torch.randn(shape, dtype=torch.float64).requires_grad_())
    given = {t.untyped_storage()._cdata for t in arguments}
    saved: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage()._cdata not in given:
            saved[t.untyped_storage()._cdata] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        graph.module.forward(*arguments)
    return sum(t.untyped_storage().nbytes() for t in saved.values())


def _shape(make: Building, node: fx.Node) -> list[Any]:
    names = {make.symbols[n].node.expr: n for n in SIZES}
    return [n if isinstance(n, int) else names[n.node.expr] for n in make.graph.shape(make.graph.node(node.name))]


def values(make: Building) -> dict[Any, int]:
    return {make.symbols[n].node.expr: size for n, size in SIZES.items()}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_keeps_what_its_derivative_needs(name):
    make = Building()
    out = CALLS[name](make)
    graph = make.output(out)
    says = evaluate(total(kept(graph, [n for n in graph.nodes if n.op.startswith("call")])), values(make))
    assert says == measured(make), name


def test_views_share_their_storage_and_a_swap_takes_it_away():
    make = Building()
    x = hidden(make)
    y = make.method("transpose", make.method("square", x), 1, 2)
    away = make.call(SWAP_OUT.op, y)
    graph = make.output(make.call(mul, make.method("transpose", away, 1, 2), make.call(torch.sigmoid, x)))
    before = total(kept(graph, graph.nodes))
    after = total(training(graph))
    size = B * S * D * 8
    assert evaluate(before, values(make)) == 3 * size  # x, its square, the sigmoid
    assert evaluate(after, values(make)) == 2 * size
    assert len(host_keys(graph)) >= 2
