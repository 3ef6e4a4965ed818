"""The numbers are compared after every pass, and a pass that moves them is caught by name and module."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

from latentscan.ir.errors import NumericsError, PipelineError, RefusedError
from latentscan.ir.graph import Graph, module_path
from latentscan.ir.weights import Recipe
from latentscan.passes import pipeline
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier
from latentscan.passes.pipeline import parse, run
from latentscan.runtime.door import session_of
from latentscan.runtime.inspection import check_gradients, inspection
from latentscan.runtime.numerics import Probe, Sample, compare, default_tolerance, longest_reduction
from latentscan.runtime.options import Options
from latentscan.runtime.wrap import planning_graph, wrap
from latentscan.tests.models import build

MODULE = "model.layers.1.self_attn.q_b_proj"  # where the sabotage passes strike


def linears(graph: Graph, path: str = MODULE) -> list[Site | Refusal]:
    return [
        Site(path, "sabotage", n.name) for n in graph.calls(F.linear, torch._C._nn.linear) if module_path(n) == path
    ]


@dataclass(frozen=True)
class Scale(Pass):
    """Multiply a projection by ``factor``; by ``way`` in the graph, in a new weight, or in one head of a new weight."""

    factor: float = 1.0
    way: str = "graph"

    name: ClassVar[str] = "scale"
    tier: ClassVar[Tier] = Tier.REASSOCIATING

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        return linears(graph)

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        node = graph.node(site.anchor)
        if self.way == "graph":
            with graph.before(node, self.name):
                made = graph.call(torch.mul, graph.call_like(node, F.linear, *node.args), self.factor)
        else:
            rows = slice(None) if self.way == "weight" else slice(0, 24)

            def corrupt(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
                factors = torch.ones_like(weight)
                factors[rows] = self.factor
                return (weight * factors,)

            path = graph.weight(node.args[1]).path
            recipe = Recipe((path,), (path + "_scaled",), self.name, site.module, corrupt)
            (weight,) = graph.add_weights(recipe, [graph.value(node.args[1])])
            with graph.before(node, self.name):
                made = graph.call(F.linear, node.args[0], weight, None)
        graph.replace(node, made)
        graph.graph.erase_node(node)


@dataclass(frozen=True)
class ScaleExact(Scale):
    """The same, promising bitwise equality."""

    name: ClassVar[str] = "scale-exact"
    tier: ClassVar[Tier] = Tier.EXACT


@dataclass(frozen=True)
class ScaleFreely(Scale):
    """The same, promising nothing."""

    name: ClassVar[str] = "scale-freely"
    tier: ClassVar[Tier] = Tier.APPROXIMATE


@dataclass(frozen=True)
class StopGradient(Pass):
    """Leaves every value as it is, and no gradient."""

    name: ClassVar[str] = "stop-gradient"
    tier: ClassVar[Tier] = Tier.EXACT

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        return linears(graph)

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        node = graph.node(site.anchor)
        with graph.before(node, self.name):
            made = graph.method("detach", graph.call_like(node, F.linear, *node.args))
        graph.replace(node, made)
        graph.graph.erase_node(node)


OURS = {kind.name: kind for kind in (Scale, ScaleExact, ScaleFreely, StopGradient)}


@pytest.fixture(autouse=True)
def sabotage_passes(monkeypatch):
    """Pipelines may name the passes above."""
    known = pipeline.pass_class
    monkeypatch.setattr(pipeline, "pass_class", lambda name: OURS.get(name) or known(name))


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build("deepseek_v3")


@pytest.fixture(scope="module")
def traced(model) -> Graph:
    """The planning graph of ``model``; take copies."""
    return planning_graph(model)


def inspect(
    model: torch.nn.Module, text: str, check: Any = True, *, graph: Graph | None = None, **options
) -> list[Any]:
    """The records of a pipeline run on a model under inspection."""
    graph = planning_graph(model) if graph is None else graph.copy()
    with inspection(model, graph, Options.of({"pipeline": text, "check": check, **options})) as hooks:
        program = run(graph, parse(text), Context(own_parameters=True), hooks=hooks)
        return program.forced(True).records


# -- what passes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["deepseek_v2", "minicpm3", "gpt_neox", "opt", "nemotron_h"])
def test_rounding_of_the_real_passes_stays_within_an_eighth_of_the_tolerance(family):
    model = build(family, **({"num_key_value_heads": 4} if family == "nemotron_h" else {}))
    text = {"deepseek_v2": "mla-mm-split,mla-absorb", "minicpm3": "mla-mm-split,mla-absorb"}
    records = inspect(model, text.get(family, "latent-cache,mla-absorb"))
    for record in records:
        assert record.error is not None
        assert record.tolerance is not None
        assert record.error <= record.tolerance / 8
    assert records[-1].error > 0, "absorption rounds differently: the check compared something"


def test_absorption_that_does_not_pay_for_the_prefill_is_checked_all_the_same(model, traced):
    graph = traced.copy()
    nodes = len(graph.nodes)
    with inspection(model, graph, Options.of({"pipeline": "mla-absorb", "check": True})) as hooks:
        program = run(graph, parse("mla-absorb"), Context(), hooks=hooks)
    record: Any = program.records[0]
    assert not record.choice.condition
    assert record.nodes_after != record.nodes_before
    assert 0 < record.error <= record.tolerance
    assert len(program.graph.nodes) == nodes, "the prefill graph itself stays expanded"


def test_a_form_that_an_option_forbids_is_not_tried(model, traced):
    (record,) = inspect(model, "mla-absorb{when=never}", graph=traced)
    assert (record.nodes_after, record.error) == (record.nodes_before, 0.0)


def test_both_forms_of_a_choice_by_shape_are_checked():
    model = build("gpt2")  # MHA over the layer input: the rule depends on the length
    records = inspect(model, "latent-cache,mla-absorb")
    assert records[-1].error <= records[-1].tolerance


def test_half_precision_is_compared_with_its_own_rounding():
    records = inspect(build("minicpm3").bfloat16(), "mla-mm-split,mla-absorb")
    assert 1e-4 < records[-1].error <= records[-1].tolerance < 0.2


def test_experts_picked_by_a_tie_within_rounding_do_not_count():
    model = build("deepseek_v3", num_hidden_layers=4).bfloat16()
    graph = planning_graph(model)
    probe = Probe(model, graph)
    reference = probe.forward(graph)
    absorbed = parse("mla-absorb{when=always}")
    after = run(graph.copy(), absorbed, Context()).graph
    picks = [n for n, (_, value) in probe.forward(after).picks.items() if not _equal(value, reference.picks[n][1])]
    if picks:  # without taking over the picks another expert's weights would be compared
        assert compare(reference, probe.forward(after), 0.2).failed
    assert not compare(reference, probe.forward(after, reference), 0.2).failed


def _equal(a, b) -> bool:
    return torch.equal(a[1], b[1]) if isinstance(a, tuple) else torch.equal(a, b)


# -- what is caught ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["graph", "weight", "head"])
@pytest.mark.parametrize("factor", [1.01, -1.0, float("nan")])
def test_a_corrupted_projection_is_caught_by_pass_and_module(model, traced, way, factor):
    graph = traced.copy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scale = Scale(factor, way)
    options = Options.of({"pipeline": scale.text(), "check": True})
    with pytest.raises(NumericsError) as caught:
        with inspection(model, graph, options) as hooks:
            run(graph, [scale], Context(), hooks=hooks)
    assert caught.value.where.startswith("scale at model.layers.1.self_attn")
    assert "reassociating" in caught.value.what
    assert caught.value.remedy
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_tolerance_lies_between_measured_rounding_and_a_measured_sabotage(model, traced):
    """One per cent on one head of one projection of one layer is far above it, rounding far below."""
    (rounding,) = inspect(model, "mla-absorb", graph=traced)
    (sabotage,) = inspect(model, Scale(1.01, "head").text(), check={"scale": 1.0}, graph=traced)
    assert 8 * rounding.error < rounding.tolerance < sabotage.error / 100


@pytest.mark.parametrize("kind", [ScaleExact, Scale])
def test_one_bit_matters_to_an_exact_pass_only(model, traced, kind):
    text = kind(1.0 + 2**-23).text()
    if kind is Scale:
        (record,) = inspect(model, text, graph=traced)
        assert 0 < record.error <= record.tolerance
        return
    with pytest.raises(NumericsError, match="exact pass may move it by 0") as caught:
        inspect(model, text, graph=traced)
    assert caught.value.where.startswith("scale-exact at model.layers.1.self_attn")


def test_an_exact_pass_that_is_exact_has_error_zero(model, traced):
    (record,) = inspect(model, ScaleExact(1.0).text(), graph=traced)
    assert (record.error, record.tolerance) == (0.0, 0.0)


def test_an_approximate_pass_is_measured_and_not_stopped(model, traced):
    (record,) = inspect(model, ScaleFreely(1.5).text(), graph=traced)
    assert record.tolerance is None
    assert record.error > 1e-4
    with pytest.raises(NumericsError, match="scale-freely"):
        inspect(model, ScaleFreely(1.5).text(), check={"scale-freely": 1e-6}, graph=traced)


def test_a_default_tolerance_holds_for_every_pass_that_promises_something(model, traced):
    with pytest.raises(NumericsError, match="mla-absorb"):
        inspect(model, "mla-mm-split,mla-absorb", check={"default": 1e-9}, graph=traced)
    records = inspect(model, "mla-mm-split,mla-absorb", check={"default": 1e-9, "mla-absorb": 1e-3}, graph=traced)
    assert [r.tolerance for r in records] == [1e-9, 1e-3]


# -- gradients --------------------------------------------------------------------------------------------------------


def test_gradients_of_all_parameters_are_compared(model):
    records: list[Any] = check_gradients(
        model, parse("mla-mm-split,mla-absorb{when=always}"), Context(own_parameters=True), {}
    )
    assert all(r.error is not None and r.error <= r.tolerance / 4 for r in records)
    assert records[-1].error > 0


def test_a_pass_that_stops_a_gradient_is_caught_when_training_and_only_then(model, traced):
    graph = traced.copy()
    passes = [StopGradient()]
    with inspection(model, graph, Options.of({"pipeline": "stop-gradient", "check": True})) as hooks:
        run(graph, passes, Context(), hooks=hooks)
    assert hooks.after is not None
    for check, training in ((True, True), ({"gradients": True}, False)):
        graph = traced.copy()
        model.train(training)
        try:
            with pytest.raises(NumericsError, match="the gradient of") as caught:
                with inspection(model, graph, Options.of({"pipeline": "stop-gradient", "check": check})) as hooks:
                    run(graph, passes, Context(), hooks=hooks)
            assert model.training is training
        finally:
            model.eval()
        assert caught.value.where.startswith("stop-gradient at model.layers.1.self_attn.q_b_proj")
    assert all(p.grad is None for p in model.parameters())


def test_a_model_in_training_can_be_told_not_to_compare_gradients(model, traced):
    model.train()
    try:
        (record,) = inspect(model, "stop-gradient", check={"gradients": False}, graph=traced)
    finally:
        model.eval()
    assert record.error == 0.0


# -- through wrap -----------------------------------------------------------------------------------------------------


def test_wrap_leaves_the_model_as_it_was_when_the_check_fails(tmp_path):
    model = build("deepseek_v3")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(NumericsError, match="scale at"):
        wrap(model, "mla-mm-split," + Scale(1.1).text(), check=True, dump=str(tmp_path / "dump"))
    assert session_of(model) is None
    assert "forward" not in model.__dict__
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    index = json.loads((tmp_path / "dump" / "latentscan-dump.json").read_text())
    assert [e["pass"] for e in index["passes"]] == ["mla-mm-split", "scale{factor=1.1}"]
    assert index["stopped"].startswith("scale at model.layers.1.self_attn")
    numbers = json.loads((tmp_path / "dump" / "02-scale" / "numerics.json").read_text())
    assert numbers["values"]["failed"]
    assert numbers["values"]["first"]["module"].startswith("model.layers.1.self_attn")


def test_wrap_reports_errors_and_tolerances():
    model = wrap(build("deepseek_v3"), "mla-mm-split,mla-absorb", check=True)
    rows = model.report.passes
    assert [row["error"] is not None and row["error"] <= row["tolerance"] for row in rows] == [True, True]
    assert rows[1]["nodes"] < 0


# -- bad requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ({"mla-absorp": 1e-3}, "did you mean mla-absorb"),
        ({"default": -1.0}, "tolerance of default is -1.0"),
        ({"default": True}, "tolerance of default is True"),
        ({"default": float("nan")}, "tolerance of default is nan"),
    ],
)
def test_a_wrong_check_is_refused(model, traced, check, message):
    with pytest.raises(PipelineError, match=message):
        inspect(model, "mla-absorb", check=check, graph=traced)


def test_a_model_without_numbers_cannot_be_checked(model):
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        empty = AutoModelForCausalLM.from_config(model.config).eval()
    with pytest.raises(NumericsError, match="meta device"):
        inspect(empty, "mla-absorb")


def test_a_pass_without_sites_raises_its_refusals_under_inspection_too():
    with pytest.raises(RefusedError, match="already-least"):
        inspect(build("llama"), "latent-cache")


# -- the parts --------------------------------------------------------------------------------------------------------


def test_samples_see_form_infinities_and_nans():
    x = torch.tensor([1.0, -2.0, float("inf"), float("-inf")])
    assert Sample.of(x).difference(Sample.of(x)) == 0.0
    assert Sample.of(x).difference(Sample.of(-x)) == float("inf")
    assert Sample.of(x).difference(Sample.of(x.double())) == float("inf")
    assert Sample.of(x).difference(Sample.of(torch.tensor([1.0, float("nan"), float("inf"), float("-inf")]))) == float(
        "inf"
    )
    assert Sample.of(x).difference(Sample.of(torch.tensor([1.5, -2.0, float("inf"), float("-inf")]))) == 0.25
    assert Sample.of(torch.zeros(3)).difference(Sample.of(torch.full((3,), 1e-30))) == float("inf")


def test_a_large_value_is_sampled_at_the_same_places():
    x = torch.randn(300, 300)
    sample = Sample.of(x)
    assert sample.elements.numel() == 4096
    assert torch.equal(sample.elements, Sample.of(x).elements)
    x[:, 7] += 1.0  # one column of 300
    assert sample.difference(Sample.of(x)) > 0.1


def test_the_tolerance_grows_with_reduction_sites_and_dtype(model, traced):
    graph = traced.copy()
    sizes = Probe(model, graph).sizes
    assert longest_reduction(graph, sizes) == 96
    one, four = (float(default_tolerance(graph, Tier.REASSOCIATING, n, sizes) or 0) for n in (1, 4))
    assert four == pytest.approx(2 * one)
    assert default_tolerance(graph, Tier.EXACT, 4, sizes) == 0.0
    assert default_tolerance(graph, Tier.APPROXIMATE, 4, sizes) is None
    half = build("deepseek_v3").bfloat16()
    assert float(default_tolerance(planning_graph(half), Tier.REASSOCIATING, 1, sizes) or 0) > 1000 * one


def test_two_runs_of_one_graph_agree_bitwise_and_hold_no_cache(model, traced):
    graph = traced.copy()
    probe = Probe(model, graph)
    first = probe.forward(graph)
    assert compare(first, probe.forward(graph), 0.0).error == 0.0
    assert {tuple(o.shape) for o in first.outputs.values()} == {(2, 13, 128)}
