"""sequence-parallel takes the whole stream between split regions, on every rank alike. Numbers: tests/distributed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from latentscan.ir.capture import capture
from latentscan.ir.errors import PipelineError
from latentscan.ir.graph import Graph
from latentscan.ir.mesh import parse_mesh
from latentscan.ir.ops import sequence
from latentscan.ir.order import check_order, collectives
from latentscan.passes.base import Context
from latentscan.passes.pipeline import Program, parse, run
from latentscan.passes.sequence_parallel import stream
from latentscan.runtime.phases import traced_phases
from latentscan.tests.models import build

BOTH = "tensor-parallel,sequence-parallel"


def on_rank(graph: Graph, size: int, rank: int) -> Program:
    return run(graph.copy(), parse(BOTH), Context(mesh=parse_mesh(f"tp={size}").at(tp=rank), own_parameters=True))


def test_regions_gather_what_comes_in_and_scatter_what_goes_out():
    graph = capture(build("llama"), training=True)
    found = [on_rank(graph, 3, rank).graph for rank in range(3)]
    names = Counter(n.target.__name__ for n in found[0].nodes if n.target in sequence.SEQUENCE)  # type: ignore[union-attr]
    # the first region reads the embedding, which every rank has; the head reads a slice of the last norm
    assert names == {"scatter_tokens": 4, "gather_tokens": 3, "shard_tokens": 1, "unshard_tokens": 1}
    orders = {r: [c.key() for c in collectives(g)] for r, g in enumerate(found)}  # type: ignore[arg-type]
    check_order(orders, "tp")
    kinds = Counter((k[0], k[1]) for k in orders[0])
    assert kinds["reduce_scatter", "forward"] == 4
    assert kinds["reduce_scatter", "backward"] == 3


def test_norms_run_on_the_rank_s_tokens_and_their_weights_are_summed():
    graph = on_rank(capture(build("llama", num_hidden_layers=1), training=True), 2, 0).graph
    assert graph is not None
    whole = graph.shape(next(n for n in graph.nodes if n.op == "placeholder" and "input_ids" in n.name))[1]
    norm = next(n for n in graph.calls("pow") if "post_attention" in str(n.meta.get("nn_module_stack")))
    assert str(graph.shape(norm)[1]) == str((whole + 1) // 2)
    weights = [n for n in graph.nodes if n.op == "placeholder" and "post_attention_layernorm" in n.name]
    assert [u.target.__name__ for w in weights for u in w.users] == ["copy_to"]  # type: ignore[union-attr]


class Adapted(torch.nn.Module):
    """A projection with a narrow one beside it, which tensor-parallel leaves whole."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.reduce = torch.nn.Linear(inner.in_features, 4, bias=False)
        self.expand = torch.nn.Linear(4, inner.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.expand(self.reduce(x))


def test_a_value_that_is_split_and_whole_is_made_whole_before_its_first_reader():
    model = build("llama", num_hidden_layers=1)
    layer = model.model.layers[0].self_attn
    layer.q_proj = Adapted(layer.q_proj)
    graph = on_rank(capture(model, training=True), 2, 0).graph
    assert graph is not None
    at = {n: i for i, n in enumerate(graph.nodes)}
    made = graph.calls(sequence.unshard_tokens)
    assert made and all(at[m] < at[u] for m in made for u in m.users)


def test_a_step_of_one_token_is_left_as_it_is():
    (_, decode) = traced_phases(build("mamba2"), batch=2, seq=8)
    records = on_rank(decode.graph, 2, 0).records
    assert [r.rule for r in records[1].refusals] == ["one-token"]


@pytest.mark.parametrize(
    ("seq", "size", "left"), [(2, 2, True), (3, 2, False), (4, 4, True), (3, 4, True), (5, 4, False)]
)
def test_no_more_than_a_token_for_each_rank_is_left_as_it_is(seq, size, left):
    """A dimension of one token is traced as fixed, which the rest of the pipeline forbids."""
    model = build("llama", num_hidden_layers=1, num_key_value_heads=4)
    graph = capture(
        model, inputs={"input_ids": torch.ones(2, seq, dtype=torch.long), "use_cache": False}, training=True
    )
    for rank in range(size):
        assert [r.rule for r in on_rank(graph, size, rank).records[1].refusals] == ["one-token"] * left


def test_it_needs_regions():
    with pytest.raises(PipelineError, match="needs tensor-parallel"):
        parse("sequence-parallel")
    found = stream(capture(build("llama", num_hidden_layers=1), training=True))
    assert found.rule == "no-regions"  # type: ignore[union-attr]


@pytest.mark.parametrize(("length", "size"), [(7, 2), (6, 3), (1, 4), (5, 4)])
def test_lengths_that_the_ranks_do_not_divide_are_filled_up_with_zeros(length, size):
    x = torch.randn(length, 2, 3)
    parts = [sequence._own(x, size, rank) for rank in range(size)]
    assert len({p.shape for p in parts}) == 1
    joined = torch.cat(parts)
    assert torch.equal(joined[:length], x)
    assert not joined[length:].any()
