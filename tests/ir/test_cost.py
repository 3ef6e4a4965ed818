"""Costs against what torch counts, caches against what they hold, activations by hand."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from latentscan.ir.capture import capture
from latentscan.ir.cost import (
    Total,
    cache_bytes_per_token,
    cost_by_kind,
    einsum_flops,
    evaluate,
    peak_bytes,
)
from latentscan.ir.graph import Graph
from latentscan.ir.kept import training_bytes
from latentscan.runtime.cache import GraphCache, cache_argument
from latentscan.runtime.phases import Phase, traced_phases, values_of
from latentscan.runtime.wrap import planning_graph
from latentscan.tests.models import build


class Products(nn.Module):
    """Every product that is counted, once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(6, 10), nn.Conv1d(10, 4, 3, groups=2)
        self.weight = nn.Parameter(torch.ones(10, 7))
        self.bias = nn.Parameter(torch.ones(7))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self.linear(input)  # [b, s, 10]
        flat = torch.addmm(self.bias, x.reshape(-1, 10), self.weight)  # [b s, 7]
        scores = x @ x.transpose(1, 2)  # [b, s, s]
        again = torch.bmm(scores, x)  # [b, s, 10]
        other = torch.einsum("bsd,btd->bst", again, x)
        return self.conv(x.transpose(1, 2)).sum() + flat.sum() + other.sum()


def flops(graph: Graph, values: dict, *, only: set[str] | None = None) -> int:
    return sum(k.flops.at(values) for name, k in cost_by_kind(graph).items() if only is None or name in only)


def counted(function) -> dict[str, int]:
    """What torch counts, by op."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        function()
    return {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}


def sizes(graph: Graph, batch: int, length: int) -> dict:
    return values_of(graph, Phase("prefill", batch, length, 0))


def input_sizes(graph: Graph, *given: int) -> dict:
    """The symbols of the first dimensions of a graph's only input."""
    (node,) = [
        n
        for n in graph.nodes
        if n.op == "placeholder" and isinstance(graph.value(n), torch.Tensor) and graph.weight(n) is None
    ]
    return {s.node.expr: n for s, n in zip(graph.shape(node), given, strict=False) if isinstance(s, torch.SymInt)}


def test_products_cost_what_torch_counts():
    model, x = Products(), torch.ones(3, 5, 6)
    graph = capture(model, inputs={"input": x})
    values = input_sizes(graph, 3, 5)
    assert len(values) == 2
    kinds = cost_by_kind(graph)
    assert {n: k.nodes for n, k in kinds.items()} == {
        "linear": 1, "addmm": 1, "matmul": 1, "bmm": 1, "einsum": 1, "conv": 1
    }  # fmt: skip
    assert flops(graph, values) == sum(counted(lambda: model(x)).values())


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3", "mamba2"])
def test_a_model_costs_what_torch_counts(family):
    model = build(family)
    graph = capture(model)
    ids = torch.randint(3, 100, (3, 11))
    theirs = counted(lambda: model(input_ids=ids, use_cache=False))
    products = {k: v for k, v in theirs.items() if k.split(".")[-1] in ("mm", "addmm", "bmm")}
    ours = flops(graph, sizes(graph, 3, 11), only={"linear", "addmm", "matmul", "bmm", "einsum"})
    if family == "mamba2":  # eagerly the scan itself is products too, which we count under chunk_scan
        assert ours == products["aten.mm"]
        return
    attention = 0
    if family == "deepseek_v3":  # unequal head dims: torch's attention is products too, over all pairs
        attention = 2 * 2 * 3 * 4 * 11 * 11 * (24 + 16)
    assert ours == sum(products.values()) - attention


def test_einsum_counts_two_operands_at_a_time():
    def tensor(*shape):
        return torch.empty(*shape, device="meta")

    assert einsum_flops("ij,jk->ik", tensor(2, 3), tensor(3, 5)) == 2 * 2 * 3 * 5
    assert einsum_flops("i,j->ij", tensor(4), tensor(6)) == 24  # nothing is summed: one product each
    assert einsum_flops("...d,hd->...h", tensor(2, 3, 5), tensor(7, 5)) == 2 * 2 * 3 * 5 * 7
    assert einsum_flops("ij,jk,kl->il", tensor(2, 3), tensor(3, 5), tensor(5, 7)) == 2 * (2 * 3 * 5 + 2 * 5 * 7)
    assert einsum_flops("ij,jk", tensor(2, 3), tensor(3, 5)) == 60


def test_a_total_counts_equal_terms_and_evaluates_each_once():
    s = sympy.Symbol("s", integer=True, positive=True)
    total = Total()
    for _ in range(30):
        total.add(3 * s**2)
    total.add(s)
    assert total.expression == 90 * s**2 + s
    assert total.at({s: 7}) == 90 * 49 + 7
    with pytest.raises(KeyError, match="s"):
        evaluate(s, {})


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "bamba"])
def test_the_cache_holds_what_the_graph_says(family):
    model = build(family)
    cache = GraphCache.for_model(model)
    with torch.no_grad():
        model(input_ids=torch.randint(3, 100, (2, 9)), use_cache=True, **{cache_argument(model): cache})
    said = cache_bytes_per_token(planning_graph(model))
    assert said == cache.bytes_per_token() > 0
    states = cache.bytes_held() - sum(a.bytes_held() for a in cache.arenas)
    assert traced_phases(model, batch=1, seq=8)[0].state_bytes * 2 == states


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3", "gpt_neox"])
def test_one_graph_stands_for_prefill_and_decode(family):
    """Its costs at both sizes are those of graphs traced for these calls alone."""
    model = build(family)
    (traced,) = traced_phases(model, batch=3, seq=21)
    prefill, decode = traced.phases
    alone = planning_graph(model)
    assert flops(traced.graph, values_of(traced.graph, prefill)) == flops(alone, sizes(alone, 3, 21)) > 0
    assert cache_bytes_per_token(traced.graph) == cache_bytes_per_token(alone)
    cache = GraphCache.for_model(model)
    with torch.no_grad():
        model(input_ids=torch.ones(3, 21, dtype=torch.long), use_cache=True, **{cache_argument(model): cache})
    step = capture(
        model,
        inputs={
            "input_ids": torch.ones(3, 1, dtype=torch.long), "use_cache": True, cache_argument(model): cache
        },
    )  # fmt: skip
    assert flops(traced.graph, values_of(traced.graph, decode)) == flops(step, values_of(step, decode)) > 0


def test_costs_fix_no_size():
    (traced,) = traced_phases(build("llama"), batch=2, seq=16)
    before = traced.graph.specialized()
    cost_by_kind(traced.graph, backward=True)
    assert traced.graph.specialized() == before


def test_gradients_cost_twice_their_product_and_a_recomputed_layer_once_more():
    def training(checkpointing: bool) -> Graph:
        model = build("llama").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        return capture(model, training=True)

    plain, again = training(False), training(True)
    at = sizes(plain, 2, 8)
    kinds = cost_by_kind(plain, backward=True)
    assert kinds["linear backward"].flops.at(at) == 2 * kinds["linear"].flops.at(at)
    more = cost_by_kind(again, backward=True)["linear"].flops.at(sizes(again, 2, 8))
    head = 2 * 2 * 8 * 64 * 128  # the logits are outside of the layers
    assert more == 2 * kinds["linear"].flops.at(at) - head
    assert training_bytes(again, sizes(again, 2, 8)) < training_bytes(plain, at) / 3


def test_activations_by_hand():
    class Chain(nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            a = input.exp()  # 1
            view = a.view(-1, 2).t()  # shares a
            b = a.sin()  # 2
            c = b.cos()  # 3: a and b are still wanted
            return view.sum() + (a + b + c).sum()

    graph = capture(Chain(), inputs={"input": torch.ones(4, 6)})
    values = input_sizes(graph, 40, 60)
    whole = 40 * 60 * 4
    assert training_bytes(graph, values) == 2 * whole  # a: of exp and sin; b: of cos
    # a, b, c and a + b are alive together, with the first sum
    assert 4 * whole <= peak_bytes(graph, values) <= 4 * whole + 8
