"""sequence-parallel takes the whole stream between split regions, on every rank alike. Numbers: tests/distributed."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import pytest
import torch

from latentscan.ir.capture import capture
from latentscan.ir.errors import PipelineError
from latentscan.ir.graph import Graph, written_by
from latentscan.ir.mesh import parse_mesh
from latentscan.ir.ops import sequence
from latentscan.ir.order import check_order, collectives
from latentscan.passes import sequence_parallel
from latentscan.passes.base import Context, Refusal
from latentscan.passes.pipeline import Program, parse, run
from latentscan.passes.sequence_parallel import stream
from latentscan.runtime.phases import traced_phases
from latentscan.tests.models import build

BOTH = "tensor-parallel,sequence-parallel"


def on_rank(graph: Graph, size: int, rank: int, pipeline: str = BOTH) -> Program:
    return run(graph.copy(), parse(pipeline), Context(mesh=parse_mesh(f"tp={size}").at(tp=rank), own_parameters=True))


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


class Written(torch.nn.Module):
    """Between two regions some of a value is written in place."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.write, self.table = write, torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.GELU(), torch.nn.Linear(12, 8)) for _ in range(2)
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.table(input_ids)) + 1
        self.write(x)
        return self.layers[1](x * 2) + x


def _one_place(x: torch.Tensor) -> None:
    x[:, 0] = 1.0


def _one_feature(x: torch.Tensor) -> None:
    x[..., 0].zero_()


def _nothing(x: torch.Tensor) -> None:
    pass


@pytest.mark.parametrize("write", [_nothing, _one_place, _one_feature])
def test_a_value_that_is_written_in_place_stays_whole(write, monkeypatch):
    """Its own tokens would stay unwritten: what writes would get a copy of all tokens."""
    graph = capture(Written(write).train(), inputs={"input_ids": torch.ones(2, 6, dtype=torch.long)}, training=True)

    def lost() -> bool:
        made = on_rank(graph, 2, 0).graph
        writers = [w for w in map(written_by, made.nodes) if w is not None]
        while any(w.target is operator.getitem for w in writers):
            writers = [w.args[0] if w.target is operator.getitem else w for w in writers]
        return any(w.target is sequence.unshard_tokens and len(w.users) == 1 for w in writers)

    assert not lost()
    found = stream(on_rank(graph, 2, 0, "tensor-parallel").graph)  # type: ignore[arg-type]
    assert not isinstance(found, Refusal)
    assert ("x" in {n.name for n in found[0]}) == (write is _nothing)
    monkeypatch.setattr(sequence_parallel, "written_by", lambda node: None)  # sabotage
    assert lost() == (write is not _nothing)
