"""Experts whole on a rank where the ranks divide them, else by inner features; what is sent; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from latentscan.ir.capture import capture
from latentscan.ir.errors import PipelineError, RefusedError
from latentscan.ir.graph import Graph
from latentscan.ir.mesh import parse_mesh
from latentscan.ir.ops.collectives import copy_to, reduce_from
from latentscan.ir.order import check_order, collectives
from latentscan.passes.base import Context, Site
from latentscan.passes.experts import mixture_at
from latentscan.passes.pipeline import Program, parse, run
from latentscan.runtime.tiny import build

EXPERTS = "model.layers.0.mlp.experts"


def traced(family: str, how: str, **overrides: Any) -> Graph:
    model = build(family, num_hidden_layers=1, **overrides)
    model.set_experts_implementation(how)  # type: ignore[operator]
    return capture(model, training=True)


@pytest.fixture(scope="module")
def deepseek() -> dict[str, Graph]:
    return {how: traced("deepseek_v3", how, first_k_dense_replace=0) for how in ("batched_mm", "grouped_mm")}


def on_rank(graph: Graph, text: str, rank: int = 0, pipeline: str = "tensor-parallel") -> Program:
    return run(graph.copy(), parse(pipeline), Context(mesh=parse_mesh(text).at(tp=rank), own_parameters=True))


def shapes(program: Program) -> dict[str, tuple[int, ...]]:
    graph = program.graph
    assert graph is not None
    return {a.path.removesuffix("_tp"): tuple(graph.weights[a.placeholder].value.shape) for a in graph.added}


def site_of(program: Program) -> Site:
    return next(s for s in program.records[0].sites if s.module == EXPERTS)


@pytest.mark.parametrize("how", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize(
    ("options", "mesh", "rule", "up", "down"),
    [
        ("", "tp=2", "whole-experts", (2, 64, 64), (2, 64, 32)),
        ("", "tp=4", "whole-experts", (1, 64, 64), (1, 64, 32)),
        ("", "tp=3", "experts", (4, 22, 64), (4, 64, 11)),  # 4 experts: their 32 inner features are 11, 11 and 10
        ("{experts=features}", "tp=2", "experts", (4, 32, 64), (4, 64, 16)),
        ("{experts=whole}", "tp=3", "whole-experts", (2, 64, 64), (2, 64, 32)),
    ],
)
def test_ranks_hold_whole_experts_or_features_of_all(deepseek, how, options, mesh, rule, up, down):
    program = on_rank(deepseek[how], mesh, pipeline="tensor-parallel" + options)
    found = shapes(program)
    assert site_of(program).rule == rule
    assert found[f"{EXPERTS}.gate_up_proj"] == up
    assert found[f"{EXPERTS}.down_proj"] == down
    if options != "{experts=whole}" and mesh == "tp=3":
        assert "3 ranks do not divide 4 experts" in site_of(program).note
    if options == "{experts=features}":
        assert "as the option says" in site_of(program).note


@pytest.mark.parametrize("how", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("options", ["", "{experts=features}"])
def test_what_is_summed_is_tokens_not_pairs_of_token_and_expert(deepseek, how, options):
    """Router weights in, tokens in, tokens out: one collective each, and the shared expert reads the same copy."""
    graph = on_rank(deepseek[how], "tp=2", pipeline=f"tensor-parallel{options}").graph
    assert graph is not None
    tokens = [3, 3, 2]  # dimensions: hidden states of the mixture and of its shared expert; weights of the experts
    mixture = [n for n in graph.nodes if n.target is copy_to and "mlp" in str(n.meta.get("nn_module_stack"))]
    assert sorted((len(graph.shape(n)) for n in mixture), reverse=True) == tokens[1:]
    sums = [n for n in graph.nodes if n.target is reduce_from and "mlp" in str(n.meta.get("nn_module_stack"))]
    assert [len(graph.shape(n)) for n in sums] == tokens[:2]
    (copy,) = [n for n in mixture if len(graph.shape(n)) == 3]
    assert len(copy.users) == 3  # the experts, and two projections of the shared one


@pytest.mark.parametrize("how", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_issues_the_same_collectives(deepseek, how, size):
    pipeline = "tensor-parallel,sequence-parallel"
    found = [collectives(on_rank(deepseek[how], f"tp={size}", r, pipeline).graph) for r in range(size)]  # type: ignore
    check_order({r: [c.key() for c in one] for r, one in enumerate(found)}, "tp")
    assert any(c.name == "reduce_scatter" and "mlp" in c.module for c in found[0])


def test_biases_of_experts_go_with_them():
    graph = traced("gpt_oss", "grouped_mm")
    found = [shapes(on_rank(graph, "tp=2", rank)) for rank in range(2)]
    for one in found:
        assert one[f"{EXPERTS}.gate_up_proj_bias"] == (2, 192)
        assert one[f"{EXPERTS}.down_proj_bias"] == (2, 64)


def test_interleaved_gates_are_split_with_their_values():
    """gpt_oss takes every second feature: 3 ranks do not divide its 4 experts, so each has pairs of 96 features."""
    found = shapes(on_rank(traced("gpt_oss", "batched_mm"), "tp=3"))
    assert found[f"{EXPERTS}.gate_up_proj"] == (4, 64, 64)
    assert found[f"{EXPERTS}.gate_up_proj_bias"] == (4, 64)


def test_more_ranks_than_experts_are_refused_by_name(deepseek):
    graph = deepseek["batched_mm"]
    program = on_rank(graph, "tp=4", pipeline="tensor-parallel{experts=whole}")
    assert site_of(program).rule == "whole-experts"
    (refusal,) = [
        r
        for r in on_rank(traced("gpt_oss", "batched_mm", num_local_experts=2, num_experts_per_tok=1), "tp=4",
                         pipeline="tensor-parallel{experts=whole}").records[0].refusals
        if r.module == EXPERTS
    ]  # fmt: skip
    assert refusal.rule == "too-few-experts"
    assert "4 ranks share 2 experts" in refusal.reason
    assert "experts=features" in refusal.remedy


def test_an_unknown_way_is_an_error():
    with pytest.raises(PipelineError, match="not one of auto, whole, features"):
        parse("tensor-parallel{experts=half}")


def product(graph: Graph) -> fx.Node:
    return next(n for n in graph.nodes if getattr(n.target, "__name__", "") == "bmm")


def test_pairs_that_are_read_elsewhere_or_mixed_are_not_kept_whole(deepseek):
    """Sabotaged graphs: a softmax over pairs, and a weight that something else reads."""
    mixed = deepseek["batched_mm"].copy()
    weighted = next(n for n in mixed.nodes if n.name.startswith("silu") and n.args[0].name.startswith("gate"))
    with mixed.before(next(iter(weighted.users)), "test"):
        wrong = mixed.call(torch.softmax, weighted, 0)
    next(iter(u for u in weighted.users if u is not wrong)).replace_input_with(weighted, wrong)
    refusals = on_rank(mixed, "tp=2", pipeline="tensor-parallel{experts=whole}").records[0].refusals
    assert any("not known to keep pairs" in r.reason for r in refusals if r.module == EXPERTS)
    read = deepseek["batched_mm"].copy()
    weight = mixture_at(read, product(read)).weights[0]
    with read.before(product(read), "test"):
        extra = read.method("sum", weight)
    out = next(n for n in read.nodes if n.op == "output")
    out.args = ((*out.args[0], extra),)  # type: ignore[misc]
    refusals = on_rank(read, "tp=2", pipeline="tensor-parallel{experts=whole}").records[0].refusals
    assert any("is also read by" in r.reason for r in refusals if r.module == EXPERTS)


def test_a_later_graph_may_not_split_experts_another_way(deepseek):
    """Facts of one graph hold for all graphs of a model."""
    from latentscan.ir.errors import VerifyError
    from latentscan.passes.pipeline import facts_of

    first = on_rank(deepseek["batched_mm"], "tp=2")
    context = Context(mesh=parse_mesh("tp=2"), own_parameters=True, facts=facts_of(first.records))
    with pytest.raises((VerifyError, RefusedError), match="planned with units = 4, but this graph gives 32"):
        run(deepseek["batched_mm"].copy(), parse("tensor-parallel{experts=features}"), context)
