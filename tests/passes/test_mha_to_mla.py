"""mha-to-mla: exact forms are exact, the low-rank form is exact at full rank, limits name themselves, graphs agree."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

from latentscan.ir.errors import PipelineError, RefusedError, VerifyError
from latentscan.ir.graph import Graph
from latentscan.ir.normalize import ATTENTION
from latentscan.passes.base import Context, Refusal, Site, Tier
from latentscan.passes.mha_to_mla import MhaToMla
from latentscan.passes.pipeline import Program, facts_of, parse, run
from latentscan.runtime.calibration import statistics_for
from latentscan.runtime.numerics import Comparison, Probe, compare
from latentscan.runtime.phases import traced_phases
from latentscan.runtime.wrap import planning_graph, wrap
from latentscan.tests.ir.building import Building, close, random
from latentscan.tests.models import build

TEXT = torch.randint(3, 128, (4, 64), generator=torch.Generator().manual_seed(1))
ATTN = "model.layers.0.self_attn"
EXACTLY = 1e-13  # fp64: sums of 64 products, relative to the largest value


@functools.cache
def model(family: str, *, still: bool = False) -> Any:
    """A model of one layer in fp64 with random biases; ``still``: no pair rotates (all frequencies are 0)."""
    made = build(family, num_hidden_layers=1).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if name.endswith("bias"):
                p.copy_(torch.randn(p.shape, generator=generator))
        if still:
            for name, b in made.named_buffers():
                if name.endswith("inv_freq"):
                    b.zero_()
    return made


@functools.cache
def planned(family: str, **words: Any) -> Graph:
    return planning_graph(model(family, **words))


def converted(family: str, pipeline: str, *, text: torch.Tensor = TEXT, **words: Any) -> Program:
    passes = parse(pipeline)
    wants = any(getattr(p, "wants_statistics", False) for p in passes)
    statistics = statistics_for(model(family, **words), passes, text) if wants else None
    context = Context(statistics=statistics, own_parameters=True)
    return run(planned(family, **words).copy(), passes, context).forced(True)


def distance(family: str, program: Program, **words: Any) -> Comparison:
    probe = Probe(model(family, **words), planned(family, **words))
    before = probe.forward(planned(family, **words))
    return compare(before, probe.forward(program.graph, before), None)


def weights(family: str, program: Program, **words: Any) -> dict[str, torch.Tensor]:
    """The new weights by their names after ``latentscan_``."""
    made = Probe(model(family, **words), planned(family, **words))._made(program.graph, {})
    return {path.rsplit("latentscan_", 1)[1]: value for path, value in made.items()}


# -- exact forms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "rule", "facts"),
    [
        ("gpt2", "input-is-latent", {"before": 128, "d_c": 64, "d_r": 0, "fused": True}),
        ("opt", "input-is-latent", {"before": 128, "d_c": 64, "d_r": 0, "fused": False}),
        ("gpt_neox", "partial-rotary", {"before": 128, "d_c": 64, "d_r": 16, "fused": False}),
        ("llama", "key-value-is-latent", {"before": 64, "d_c": 64, "d_r": 0, "fused": False}),
        ("qwen3", "key-value-is-latent", {"before": 64, "d_c": 64, "d_r": 0, "fused": False}),
    ],
)
def test_the_exact_forms_are_exact(family, rule, facts):
    program = converted(family, "mha-to-mla,latent-cache")
    (site,) = program.records[0].sites
    assert site.rule == rule
    assert {k: site.facts[k] for k in facts} == facts
    assert program.records[0].tier == Tier.REASSOCIATING.value
    assert distance(family, program).output_error < 1e-6  # the library's norms and logits are in fp32
    modules = distance(family, program).modules
    outs = {m: e for m, e in modules.items() if m.endswith(("o_proj", "out_proj", "c_proj", "attention.dense"))}
    assert outs
    assert max(outs.values()) < (EXACTLY if family != "opt" else 1e-12)


def test_the_canonical_form_says_that_it_saves_nothing():
    (site,) = converted("llama", "mha-to-mla").records[0].sites
    assert "saves nothing" in site.note
    assert "rank and rope_dim" in site.note


# -- low rank, exact where nothing is cut ----------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "rope_dim"), [("llama", 8), ("llama", 28), ("qwen2", 8), ("phi3", 8)])
def test_full_rank_without_rotation_is_exact(family, rope_dim):
    """Separate projections, projections with biases, and one fused projection; whichever pairs keep their rotation."""
    program = converted(family, f"mha-to-mla{{rank={64 - rope_dim},rope_dim={rope_dim},method=pca}}", still=True)
    (site,) = program.records[0].sites
    assert site.rule == "low-rank"
    assert (site.facts["d_c"], site.facts["d_r"]) == (64 - rope_dim, rope_dim)
    found = distance(family, program, still=True)
    assert found.modules[f"{ATTN}.o_proj"] < EXACTLY
    assert program.records[0].tier == Tier.APPROXIMATE.value
    names = set(weights(family, program, still=True))
    assert ("k_up_bias" in names) == (family == "qwen2")
    assert ("q_weight" in names) == (family == "phi3")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_full_rank_with_rotation_and_a_smaller_rank_are_not(family):
    """The sabotage: the comparison sees a rotation that is left out, and a rank that is one too small."""
    turned = converted(family, "mha-to-mla{rank=56,rope_dim=8}")
    assert distance(family, turned).modules[f"{ATTN}.o_proj"] > 1e-4
    smaller = converted(family, "mha-to-mla{rank=55,rope_dim=8}", still=True)
    assert distance(family, smaller, still=True).modules[f"{ATTN}.o_proj"] > 1e-6


def test_more_rank_loses_less():
    by_rank = [
        distance("llama", converted("llama", f"mha-to-mla{{rank={r},rope_dim=8}}", still=True), still=True)
        for r in (8, 40)
    ]
    errors = [c.modules[f"{ATTN}.o_proj"] for c in by_rank]
    assert errors[0] > errors[1] > 1e-6


def test_biases_that_are_forgotten_would_be_seen():
    """Sabotage of the bias test: without the biases qwen2 is another model."""
    program = converted("qwen2", "mha-to-mla{rank=56,rope_dim=8}", still=True)
    for node in program.graph.nodes:
        if node.target is torch._C._nn.linear and len(node.args) == 3 and node.args[2] is not None:
            if "latentscan" in node.args[2].name:
                node.args = node.args[:2]
    program.graph.module.recompile()
    assert distance("qwen2", program, still=True).modules[f"{ATTN}.o_proj"] > 1e-2


def test_the_new_weights_are_pieces_and_factors_of_the_old():
    program = converted("qwen2", "mha-to-mla{rank=56,rope_dim=8,method=pca}", still=True)
    made = weights("qwen2", program, still=True)
    attention = model("qwen2", still=True).model.layers[0].self_attn
    pairs = [int(p) for p in program.records[0].sites[0].facts["pairs"].split("|")]
    rotated = pairs + [p + 8 for p in pairs]
    plain = [i for i in range(16) if i not in rotated]
    key, bias = attention.k_proj.weight.unflatten(0, (2, 16)), attention.k_proj.bias.unflatten(0, (2, 16))
    assert torch.equal(made["k_rope_weight"], key[:, rotated].flatten(0, 1))
    assert torch.equal(made["k_rope_bias"], bias[:, rotated].flatten())
    assert torch.equal(made["k_up_bias"], bias[:, plain].flatten())
    assert torch.equal(made["v_up_bias"], attention.v_proj.bias)
    assert close(made["k_up_weight"] @ made["kv_down_weight"], key[:, plain].flatten(0, 1)) < 1e-12
    assert close(made["v_up_weight"] @ made["kv_down_weight"], attention.v_proj.weight) < 1e-12
    assert made["kv_down_weight"].shape == (56, 64)


def test_weights_keep_their_dtype():
    tiny = build("llama", num_hidden_layers=1).to(torch.bfloat16)
    passes = parse("mha-to-mla{rank=16,rope_dim=8}")
    graph = planning_graph(tiny)
    statistics = statistics_for(tiny, passes, TEXT)
    after = run(graph.copy(), passes, Context(statistics=statistics, own_parameters=True)).graph
    made = Probe(tiny, graph)._made(after, {})
    assert {v.dtype for v in made.values()} == {torch.bfloat16}
    assert statistics[ATTN].covariance.dtype == torch.float64


@pytest.mark.parametrize(("frequencies", "pairs"), [("fast first", "0|1|2"), ("fast last", "5|6|7")])
def test_the_pairs_that_rotate_fast_keep_their_rotation(frequencies, pairs):
    """Read from the model's own table: pairs of equal energy are told apart by their frequency."""
    tiny = build("llama", num_hidden_layers=1)
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):  # every feature of every head has the same energy
            w = getattr(tiny.model.layers[0].self_attn, name).weight
            w.copy_(w[:1].expand_as(w))
        if frequencies == "fast last":
            for name, b in tiny.named_buffers():
                if name.endswith("inv_freq"):
                    b.copy_(b.flip(0))
    # Within 64 tokens the three fastest of 8 go round at least once, the fourth by a third.
    passes = parse("mha-to-mla{rank=16,rope_dim=12,method=pca}")
    context = Context(statistics=statistics_for(tiny, passes, TEXT), own_parameters=True)
    (site,) = passes[0].plan(planning_graph(tiny), context)
    assert isinstance(site, Site)
    assert site.facts["pairs"] == pairs


# -- one rotated key for all heads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", "rank=54,rope_dim=10"), ("qwen2", "rank=54,rope_dim=10"),
        pytest.param("llama", "rank=34,rope_dim=30", marks=pytest.mark.slow),
        ("phi3", "rank=54,rope_dim=10"), ("llama", "rank=48,rope_dim=16,method=transmla"),
        pytest.param("qwen2", "rank=48,rope_dim=16,method=transmla", marks=pytest.mark.slow),
        ("gemma2", "rank=54,rope_dim=10"),
    ],
)  # fmt: skip
def test_a_shared_rotated_key_of_full_rank_without_rotation_is_exact(family, options):
    """Every component that is kept, whatever the method weighs by: the scores and values are what they were.

    qwen2 has biases on queries, keys and values, phi3 one fused projection, gemma2 a softcap (nothing is centred).
    """
    program = converted(family, f"mha-to-mla{{{options}}}", still=True)
    (site,) = program.records[0].sites
    assert distance(family, program, still=True).modules[f"{ATTN}.o_proj"] < EXACTLY
    names = set(weights(family, program, still=True))
    assert "k_up_bias" not in names  # it shifts all scores of a query alike
    assert {"q_weight", "k_rope_weight"} <= names
    assert ("q_bias" in names) == ("k_rope_bias" in names) == (family == "qwen2")
    centred = site.facts["method"] == "two-sided" and family != "gemma2"
    assert ("v_up_bias" in names) == (centred or family == "qwen2")
    # Sabotage: one feature less is seen.
    rank, rest = options.removeprefix("rank=").split(",", 1)
    less = converted(family, f"mha-to-mla{{rank={int(rank) - 4},{rest}}}", still=True)
    assert distance(family, less, still=True).modules[f"{ATTN}.o_proj"] > 1e-9


def test_components_that_keep_their_rotation_are_exact_where_only_they_carry_it():
    """All but one component of the slowest pair rotate: with a table that leaves that pair still, nothing is lost."""
    tiny = build("llama", num_hidden_layers=1).double()
    for name, b in tiny.named_buffers():
        if name.endswith("inv_freq"):
            b[-1] = 0
    passes = parse("mha-to-mla{rank=36,rope_dim=28}")
    context = Context(statistics=statistics_for(tiny, passes, TEXT), own_parameters=True)
    graph = planning_graph(tiny)
    program = run(graph.copy(), passes, context)
    (site,) = program.records[0].sites
    assert site.facts["pairs"] == "0|0|1|1|2|2|3|3|4|4|5|5|6|6"
    probe = Probe(tiny, graph)
    before = probe.forward(graph)
    error = compare(before, probe.forward(program.graph, before), None).modules[f"{ATTN}.o_proj"]
    assert error < 1e-6  # the library makes its cosine table in fp32


@pytest.mark.parametrize("method", ["two-sided", "pca", "transmla"])
def test_one_key_head_for_all_is_served(method):
    """MQA: what rotates is whole, and exact; the rest shares the latent with the values."""
    tiny = build("llama", num_hidden_layers=1, num_key_value_heads=1).double()
    for name, b in tiny.named_buffers():
        if name.endswith("inv_freq"):
            b[4:] = 0  # the slow half of the pairs stands still
    passes = parse(f"mha-to-mla{{rank=24,rope_dim=8,method={method}}}")
    context = Context(statistics=statistics_for(tiny, passes, TEXT), own_parameters=True)
    graph = planning_graph(tiny)
    program = run(graph.copy(), passes, context)
    probe = Probe(tiny, graph)
    before = probe.forward(graph)
    error = compare(before, probe.forward(program.graph, before), None).modules[f"{ATTN}.o_proj"]
    assert (error < 1e-6) == (method != "transmla")  # which folds two frequencies into one instead of choosing
    if method == "two-sided":
        assert program.records[0].sites[0].facts["pairs"] == "0|1|2|3"


@pytest.mark.parametrize("method", ["two-sided", "pca"])
def test_the_factor_of_the_tables_goes_to_what_no_longer_rotates(method):
    """YaRN multiplies cosine and sine by a constant, and so the scores of all pairs, rotated or not, by its square."""
    words = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
    tiny = build("llama", num_hidden_layers=1, rope_parameters=words).double()
    assert tiny.model.rotary_emb.attention_scaling > 1.1
    for name, b in tiny.named_buffers():
        if name.endswith("inv_freq"):
            b.zero_()
    passes = parse(f"mha-to-mla{{rank=56,rope_dim=8,method={method}}}")
    context = Context(statistics=statistics_for(tiny, passes, TEXT), own_parameters=True)
    graph = planning_graph(tiny)
    probe = Probe(tiny, graph)
    before = probe.forward(graph)
    after = probe.forward(run(graph.copy(), passes, context).graph, before)
    assert compare(before, after, None).modules[f"{ATTN}.o_proj"] < 1e-6  # the tables are in fp32


def test_equal_heads_need_one_component_a_pair():
    """Keys of all heads alike: the components go to the fastest pairs, one each, instead of one for every head."""
    tiny = build("llama", num_hidden_layers=1)
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            w = getattr(tiny.model.layers[0].self_attn, name).weight
            w.copy_(w[:1].expand_as(w))
    passes = parse("mha-to-mla{rank=16,rope_dim=8}")
    context = Context(statistics=statistics_for(tiny, passes, TEXT), own_parameters=True)
    (site,) = passes[0].plan(planning_graph(tiny), context)
    assert len(set(site.facts["pairs"].split("|"))) == 4


@pytest.mark.parametrize("method", ["two-sided", "pca", "transmla"])
def test_ranks_by_energy_keep_the_budget(method):
    tiny = build("llama", num_hidden_layers=3)
    with torch.no_grad():  # the last layer's values have two directions only
        w = tiny.model.layers[2].self_attn.v_proj.weight
        w.copy_(w[:, :2] @ torch.randn(2, w.shape[1], generator=torch.Generator().manual_seed(0)))
        tiny.model.layers[2].self_attn.k_proj.weight.mul_(1e-3)
    passes = parse(f"mha-to-mla{{rank=16,rope_dim=8,method={method},allocation=energy}}")
    statistics = statistics_for(tiny, passes, TEXT)
    context = Context(statistics=statistics, own_parameters=True)
    graph = planning_graph(tiny)
    program = run(graph.copy(), passes, context)
    ranks = [s.facts["d_c"] for s in program.records[0].sites]
    assert sum(ranks) == 3 * 16
    assert len(set(ranks)) > 1
    for site in program.records[0].sites:
        assert f"latent {site.facts['d_c']}" in site.note
        added = [a for a in program.graph.added if a.path == f"{site.module}.latentscan_kv_down_weight"]
        assert program.graph.weights[added[0].placeholder].value.shape[0] == site.facts["d_c"]
    facts = facts_of(program.records)
    again = run(graph.copy(), passes, Context(facts=facts, own_parameters=True, meta=True))
    assert facts_of(again.records) == facts


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what", "remedy"),
    [
        ("rank=57,rope_dim=8", "rank=57 is larger than 56, all that K and V hold beside rope_dim=8", "rank <= 56"),
        ("rank=1000,rope_dim=28", "rank=1000 is larger than 36", "rank <= 36"),
        ("rank=16,rope_dim=6", "rope_dim=6 does not fit 2 KV heads of 16 features", "a multiple of 4 below 32"),
        ("rank=16,rope_dim=32", "rope_dim=32 does not fit 2 KV heads of 16", "a multiple of 4 below 32"),
        ("rank=16,rope_dim=64", "rope_dim=64 does not fit 2 KV heads of 16", "a multiple of 4 below 32"),
    ],
)
def test_a_size_beyond_a_limit_names_the_limit(options, what, remedy):
    with pytest.raises(PipelineError) as caught:
        converted("llama", f"mha-to-mla{{{options},method=pca}}")
    assert what in caught.value.what
    assert remedy in caught.value.remedy
    assert caught.value.where == f"mha-to-mla at {ATTN}"


@pytest.mark.parametrize(
    ("options", "what", "remedy"),
    [
        ("rank=55,rope_dim=10", "rank=55 is larger than 54", "rank <= 54"),
        ("rank=16,rope_dim=7", "rope_dim=7 does not fit 2 KV heads of 16", "an even number below 32"),
        ("rank=16,rope_dim=32", "rope_dim=32 does not fit 2 KV heads of 16", "an even number below 32"),
        ("rank=16,rope_dim=12,method=transmla", "rope_dim=12 does not fit 2 KV heads", "give 16 or 8 or 4 or 2"),
        ("rank=16,rope_dim=24,method=transmla", "rope_dim=24 does not fit 2 KV heads", "give 16 or 8 or 4 or 2"),
        ("rank=16,rope_dim=18,method=transmla-unfolded", "rope_dim=18 does not fit 2 KV heads", "even number up to 16"),
    ],
)
def test_one_rotated_key_for_all_heads_has_its_own_limits(options, what, remedy):
    with pytest.raises(PipelineError) as caught:
        converted("llama", f"mha-to-mla{{{options}}}")
    assert what in caught.value.what
    assert remedy in caught.value.remedy


def test_the_limits_themselves_are_served():
    for options in ("rank=36,rope_dim=28,method=pca", "rank=1,rope_dim=4,method=pca"):
        assert len(converted("llama", f"mha-to-mla{{{options}}}").records[0].sites) == 1


def test_rope_dim_left_out_is_an_eighth_of_the_key():
    (site,) = converted("llama", "mha-to-mla{rank=16,method=pca}").records[0].sites
    assert site.facts["d_r"] == 2 * 4


@pytest.mark.parametrize(
    "options",
    [
        "rank=0", "rank=16,rope_dim=-4", "rope_dim=8", "method=pca", "method=two-sided", "method=transmla",
        "method=exact,rank=8", "balance=false", "rank=8,balance=false", "allocation=energy", "rank=8,allocation=some",
    ],
)  # fmt: skip
def test_options_that_mean_nothing_are_errors(options):
    with pytest.raises(PipelineError) as caught:
        parse(f"mha-to-mla{{{options}}}")
    assert caught.value.remedy


def test_calibration_that_is_missing_is_asked_for():
    with pytest.raises(PipelineError, match=r"needs calibration.*Give calibration="):
        run(planned("llama").copy(), parse("mha-to-mla{rank=16,rope_dim=8}"), Context(own_parameters=True))


def test_an_optimiser_s_parameters_are_not_replaced():
    with pytest.raises(RefusedError, match=r"new-parameters.*wrap"):
        run(planned("llama").copy(), parse("mha-to-mla{rank=16,rope_dim=8}"), Context(meta=True))


# -- refusals of the low-rank form -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "rule", "reason"),
    [
        ("qwen3", "qk-norm", "a norm on queries or keys is not linear"),
        ("gemma3", "qk-norm", "a norm on queries or keys is not linear"),
        ("gpt2", "key-not-rotated", "the whole key is not one rotation"),
        ("gpt_neox", "key-not-rotated", "the whole key is not one rotation"),
        ("deepseek_v3", "already-latent", "a latent of 16 features already"),
    ],
)
def test_what_low_rank_cannot_serve_is_refused_by_name(family, rule, reason):
    passes = parse("mha-to-mla{rank=16,rope_dim=8}")
    (found,) = passes[0].plan(planned(family), Context(own_parameters=True, meta=True))
    assert isinstance(found, Refusal)
    assert (found.module.rpartition(".")[2] in ("self_attn", "attn", "attention"), found.rule) == (True, rule)
    assert reason in found.reason
    assert "exact" in found.remedy or "leave" in found.remedy


def test_a_key_bias_under_a_softcap_stays_where_it_is():
    """What is dropped from scores must be the same for all keys; under a softcap nothing is."""
    make = Building()
    x, cos, sin = make.input("x", "b", "s", 12), make.input("cos", "b", "s", 4), make.input("sin", "b", "s", 4)
    size = [make.method("size", x, 0), make.method("size", x, 1)]

    def heads(name: str) -> Any:
        w, b = make.weight(f"{name}.weight", random(12, 12)), make.weight(f"{name}.bias", random(12))
        y = make.call(torch.nn.functional.linear, x, w, b)
        return make.method("transpose", make.method("view", y, *size, 3, 4), 1, 2)

    q, k = (make.call(torch.ops.latentscan.rope.default, heads(n), cos, sin, layout="half") for n in ("q", "k"))
    make.output(make.call(ATTENTION, q, k, heads("v"), kind="causal", scale=0.5, softcap=3.0))
    (found,) = MhaToMla(rank=8, rope_dim=6).plan(make.graph, Context(own_parameters=True, meta=True))
    assert isinstance(found, Refusal)
    assert found.rule == "key-bias"


# -- one decision for all graphs ---------------------------------------------------------------------------------------


def test_all_graphs_of_a_model_come_to_the_same_facts():
    """Prefill with an empty cache, a filled cache, and training: pairs, ranks and sizes as first decided."""
    tiny = model("llama")
    passes = parse("mha-to-mla{rank=16,rope_dim=8,method=pca}")
    first = converted("llama", "mha-to-mla{rank=16,rope_dim=8,method=pca}")
    facts = facts_of(first.records)
    assert list(facts) == [("mha-to-mla", ATTN)]
    later = Context(facts=facts, own_parameters=True, required=frozenset(facts))  # no statistics any more
    graphs = [traced_phases(tiny, batch=2, seq=8)[0].graph, traced_phases(tiny, batch=2, seq=8, train=True)[0].graph]
    for graph in graphs:
        program = run(graph, passes, later)
        assert facts_of(program.records) == facts
        assert {a.path for a in program.graph.added} == {a.path for a in first.graph.added}
    # Pairs are taken from the plan even where other statistics would choose others.
    forced = {k: {**v, "pairs": "3|7"} for k, v in facts.items()}
    again = run(planned("llama").copy(), passes, Context(facts=forced, own_parameters=True))
    assert {s.facts["pairs"] for s in again.records[0].sites} == {"3|7"}


@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", "pca"), ("llama", "two-sided"), pytest.param("phi3", "two-sided", marks=pytest.mark.slow)],
)
def test_a_training_step_is_converted_though_the_library_makes_a_cache(family, method):
    """A step with gradients joins keys and values with an empty cache of the library's: that is served too.

    Keys of another width do not fit that cache, which nothing continues from: there it holds NaN, not the old keys.
    """
    eager = build(family, num_hidden_layers=1)
    for name, b in eager.named_buffers():
        if name.endswith("inv_freq"):
            b.zero_()
    ours = wrap(copy.deepcopy(eager), f"mha-to-mla{{rank=56,rope_dim=8,method={method}}}", calibration=TEXT)
    ids, found = TEXT[:, :9], []
    for one in (eager, ours):
        out = one(ids, labels=ids)
        out.loss.backward()
        layer = one.model.layers[0]
        keys = [t for kept in out.past_key_values.layers for t in (kept.keys, kept.values)]
        found.append([out.logits, layer.input_layernorm.weight.grad, one.lm_head.weight.grad, keys[1]])
        whole = one is eager or method == "pca"
        assert all(bool(torch.isfinite(t).all()) for t in (keys if whole else keys[1:]))
        assert whole or bool(keys[0].isnan().all())
    assert close(found[1], found[0]) < 1e-5
    assert all(p.grad is not None for n, p in ours.named_parameters() if "latentscan" in n)


def test_a_graph_that_would_decide_otherwise_raises():
    first = converted("llama", "mha-to-mla{rank=16,rope_dim=8}")
    later = Context(facts=facts_of(first.records), own_parameters=True)
    with pytest.raises(VerifyError, match="planned with d_c = 16, but this graph gives 12"):
        run(planned("llama").copy(), parse("mha-to-mla{rank=12,rope_dim=8}"), later)
