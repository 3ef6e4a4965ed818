"""tensor-parallel plans whole regions, on every rank alike, and refuses with reasons. Numbers: tests/distributed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from latentscan.ir.capture import capture
from latentscan.ir.errors import MeshError, PipelineError, VerifyError
from latentscan.ir.functions import ElementwiseFunction
from latentscan.ir.graph import Graph
from latentscan.ir.mesh import parse_mesh
from latentscan.ir.ops.collectives import reduce_from
from latentscan.ir.order import check_order, collectives, ranks_to_try
from latentscan.ir.verify import verify_all
from latentscan.passes import sharding
from latentscan.passes.base import Context
from latentscan.passes.pipeline import Program, facts_of, parse, run
from latentscan.runtime.cache import GraphCache, cache_argument
from latentscan.runtime.options import Options
from latentscan.runtime.own import alone_in_training, make_parameters, trains_alone
from latentscan.runtime.wrap import wrap
from latentscan.tests.ir.test_functions import Centred
from latentscan.tests.models import build

NINE = {
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 72, "intermediate_size": 97,
}  # fmt: skip


def traced(family: str, **overrides: Any) -> Graph:
    return capture(build(family, **overrides), training=True)


def on_rank(graph: Graph, text: str, rank: int, pipeline: str = "tensor-parallel") -> Program:
    return run(graph.copy(), parse(pipeline), Context(mesh=parse_mesh(text).at(tp=rank), own_parameters=True))


def shapes(program: Program) -> dict[str, tuple[int, ...]]:
    graph = program.graph
    assert graph is not None
    return {a.path.removesuffix("_tp"): tuple(graph.weights[a.placeholder].value.shape) for a in graph.added}


@pytest.fixture(scope="module")
def llama() -> Graph:
    return traced("llama", **NINE)


def test_whole_kv_groups_go_to_ranks_the_first_ones_getting_one_more(llama):
    layer = "model.layers.0"
    for rank, (groups, features) in enumerate(((2, 49), (1, 48))):
        found = shapes(on_rank(llama, "tp=2", rank))
        assert found[f"{layer}.self_attn.q_proj.weight"] == (groups * 3 * 8, 72)
        assert found[f"{layer}.self_attn.k_proj.weight"] == (groups * 8, 72)
        assert found[f"{layer}.self_attn.o_proj.weight"] == (72, groups * 3 * 8)
        assert found[f"{layer}.mlp.down_proj.weight"] == (72, features)


def test_with_more_ranks_than_kv_heads_every_rank_has_query_heads(llama):
    found = [shapes(on_rank(llama, "tp=4", rank)) for rank in range(4)]
    assert [f["model.layers.0.self_attn.q_proj.weight"][0] // 8 for f in found] == [3, 2, 2, 2]
    assert [f["model.layers.0.self_attn.k_proj.weight"][0] // 8 for f in found] == [1, 1, 2, 1]


def test_the_bias_of_a_row_belongs_to_the_first_rank():
    graph = traced("gpt_neox", num_hidden_layers=1)
    held = ["gpt_neox.layers.0.attention.dense.bias" in shapes(on_rank(graph, "tp=3", rank)) for rank in range(3)]
    assert held == [True, False, False]


def _recipes(model: Any, rank: int) -> list[Any]:
    graph = on_rank(capture(model, training=True), "tp=2", rank).graph
    assert graph is not None
    return [a.recipe for a in graph.added if a.index == 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_part_trains_if_what_it_is_a_part_of_does(rank):
    """A frozen weight whose bias trains stays frozen, and the other way round; unwrap gives the flags back."""
    model = build("qwen2", num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    attention.q_proj.weight.requires_grad_(False)
    attention.k_proj.bias.requires_grad_(False)
    make_parameters(model, _recipes(model, rank))
    found = {n.removesuffix("_tp"): p.requires_grad for n, p in attention.named_parameters() if n.endswith("_tp")}
    assert found == {
        "q_proj.weight": False, "q_proj.bias": True, "k_proj.weight": True, "k_proj.bias": False,
        "v_proj.weight": True, "v_proj.bias": True, "o_proj.weight": True,
    }  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_a_row_s_bias_that_trains_without_its_weight_is_on_every_rank(rank):
    """Added behind the sum. On the first rank alone it would start a backward pass that the others do not run."""
    model = build("gpt_neox", num_hidden_layers=1)
    layer = model.gpt_neox.layers[0]
    layer.attention.dense.weight.requires_grad_(False)
    program = on_rank(capture(model, training=True), "tp=2", rank)
    (attention,) = [s for s in program.records[0].sites if s.module == "gpt_neox.layers.0.attention"]
    assert attention.facts["row_biases"] == "whole"
    recipes = [a.recipe for a in program.graph.added if a.index == 0]
    assert "gpt_neox.layers.0.attention.dense.bias" not in {s for r in recipes for s in r.sources}
    bias = program.graph.node(program.graph.weight_at("gpt_neox.layers.0.attention.dense.bias").placeholder)
    (user,) = bias.users
    assert user.target is torch.add and user.args[0].target is reduce_from
    make_parameters(model, recipes)
    assert layer.attention.dense.bias.requires_grad and not layer.attention.dense.weight_tp.requires_grad
    assert hasattr(layer.mlp.dense_4h_to_h, "bias_tp") is (rank == 0)  # its weight trains


@pytest.mark.parametrize("rank", [0, 1])
def test_a_weight_that_is_frozen_after_wrap_does_not_leave_its_bias_alone(rank):
    model = build("gpt_neox", num_hidden_layers=1)
    dense = model.gpt_neox.layers[0].attention.dense
    recipes = _recipes(model, rank)
    make_parameters(model, recipes)
    assert alone_in_training(model, recipes) == ""
    dense.weight_tp.requires_grad_(False)
    path = "gpt_neox.layers.0.attention.dense.bias"
    assert alone_in_training(model, recipes) == (path if rank == 0 else "")  # the others cannot know
    assert "Freeze the weight before wrap" in str(trains_alone(path))


def test_a_call_with_embedded_inputs_splits_the_head_that_was_planned(llama):
    """Nothing is looked up there that tells the size of the vocabulary; read whole, the weight would be gone."""
    embedded = {"inputs_embeds": torch.zeros(2, 6, 72), "use_cache": False}
    graph = capture(build("llama", **NINE), inputs=embedded, training=True)
    facts = facts_of(on_rank(llama, "tp=2", 0).records)
    context = Context(mesh=parse_mesh("tp=2").at(tp=0), own_parameters=True, facts=facts)
    for given, split in ((context, True), (dataclasses.replace(context, facts={}), False)):
        records = run(graph.copy(), parse("tensor-parallel"), given).records
        assert ("lm_head" in [s.module for s in records[0].sites]) is split


def test_more_ranks_than_heads_are_one_clear_error(llama):
    with pytest.raises(MeshError, match="10 ranks share 9 heads, so that some would have none") as caught:
        on_rank(llama, "tp=10", 0)
    assert "tp=9 or less" in caught.value.remedy


def test_without_a_mesh_the_pass_says_what_it_needs(llama):
    with pytest.raises(MeshError, match="no mesh"):
        run(llama.copy(), parse("tensor-parallel"), Context())


def test_a_mesh_needs_running_ranks_and_a_pass_that_uses_it():
    with pytest.raises(MeshError, match="not initialised"):
        wrap(build("llama", num_hidden_layers=1), "tensor-parallel", mesh="tp=2")
    with pytest.raises(PipelineError, match="no pass of the pipeline uses it"):
        wrap(build("llama", num_hidden_layers=1), "", mesh="tp=2")
    with pytest.raises(PipelineError, match="check is not served with a mesh"):
        Options.of({"mesh": "tp=2", "check": True})


def test_dropout_inside_a_region_is_refused_by_name():
    model = build("gpt2", num_hidden_layers=1).train()
    records = on_rank(capture(model, training=True), "tp=2", 0).records
    (refusal,) = [r for r in records[0].refusals if r.module == "transformer.h.0.attn"]
    assert "draws random numbers" in refusal.reason


def test_a_weight_that_others_read_is_refused():
    """Zamba2 uses one transformer block at several places: all or nothing, and each place says why."""
    records = on_rank(traced("zamba2"), "tp=2", 0).records
    reasons = {r.module: r.reason for r in records[0].refusals}
    assert "is also read by" in reasons["model.layers.1.shared_transformer.self_attn"]


@pytest.mark.parametrize(("family", "size"), [("llama", 2), ("mamba2", 3), ("deepseek_v3", 4)])
def test_every_rank_issues_the_same_collectives(family, size):
    graph = traced(family, num_hidden_layers=2)
    orders = {r: [c.key() for c in collectives(on_rank(graph, f"tp={size}", r).graph)] for r in range(size)}  # type: ignore
    assert len(orders[0]) >= 6
    check_order(orders, "tp")
    for number in (0, 3):  # sabotage: one rank leaves one out, or two change places
        short, swapped = dict(orders), dict(orders)
        short[size - 1] = [k for i, k in enumerate(orders[0]) if i != number]
        swapped[1] = [*orders[0][:number], orders[0][number + 1], orders[0][number], *orders[0][number + 2 :]]
        with pytest.raises(MeshError, match=f"rank {size - 1} "):
            check_order(short, "tp")
        if swapped[1] != orders[0]:
            with pytest.raises(MeshError, match=f"collective {number} of rank 1"):
                check_order(swapped, "tp")


def test_64_ranks_agree_and_send_what_the_formulas_say():
    """70 KV groups of 3 heads over 64 ranks: two each for the first six, one for the others."""
    overrides = {
        "num_attention_heads": 210, "num_key_value_heads": 70, "head_dim": 2, "hidden_size": 210,
        "intermediate_size": 401, "vocab_size": 130, "num_hidden_layers": 1,
    }  # fmt: skip
    graph = traced("llama", **overrides)
    ranks = ranks_to_try(parse_mesh("tp=64"), "tp")
    assert {0, 1, 62, 63} <= set(ranks)
    programs = {r: on_rank(graph, "tp=64", r) for r in (0, 5, 6, 63)}
    found = {r: collectives(p.graph) for r, p in programs.items()}  # type: ignore[arg-type]
    check_order({r: [c.key() for c in f] for r, f in found.items()}, "tp")
    heads = [shapes(p)["model.layers.0.self_attn.q_proj.weight"][0] // 6 for p in programs.values()]
    assert heads == [2 * 1, 2 * 1, 1, 1]
    activation = [c for c in found[0] if c.caller in ("copy_to", "reduce_from")]
    assert len(activation) == 5  # two regions, and what enters the head
    symbols = activation[0].elements.free_symbols
    sizes = dict.fromkeys(symbols, 8)
    assert {int(c.sent(64).subs(sizes)) for c in activation} == {2 * 63 * 8 * 8 * 210 * 4 // 64}
    (logits,) = [c for c in found[0] if c.name == "all_gather"]
    assert int(logits.sent(64).subs(sizes)) == 63 * 8 * 8 * 3 * 4  # 130 rows: three at most, padded


def test_a_wrong_local_size_does_not_pass(llama, monkeypatch):
    """Sabotage: the rewriting forgets to change a size; executing the node on element numbers shows it."""
    graph = traced("mamba2", num_hidden_layers=1)
    monkeypatch.setattr(sharding.Split, "_local_shape", lambda *_: None)
    with pytest.raises(VerifyError, match="on a rank's part"):
        on_rank(graph, "tp=2", 1)


def test_a_refused_pass_leaves_the_graph_as_it_was(llama, monkeypatch):
    graph = llama.copy()
    before = [str(n.args) for n in graph.nodes]
    monkeypatch.setattr(sharding.Split, "reduce", lambda *_: torch.ones(1).item(5))
    with pytest.raises(VerifyError):
        run(graph, parse("tensor-parallel"), Context(mesh=parse_mesh("tp=2"), own_parameters=True))
    assert [str(n.args) for n in graph.nodes] == before


def test_embedded_inputs_of_a_latent_attention_split_its_heads_and_nothing_else():
    """Their features are traced as a symbol and fixed later: a size that is no int once made a second region of it."""
    embedded = {"inputs_embeds": torch.zeros(2, 6, 64), "use_cache": False}
    graph = capture(build("deepseek_v3", num_hidden_layers=1), inputs=embedded, training=True)
    node = next(n for n in graph.nodes if n.op == "placeholder" and "inputs_embeds" in n.name)
    assert graph.shape(node)[2] == 64 and isinstance(graph.shape(node)[2], int)
    sites = [(s.module, s.rule) for s in on_rank(graph, "tp=2", 0).records[0].sites]
    assert sites[0] == ("model.layers.0.self_attn", "heads")
    assert [m for m, _ in sites].count("model.layers.0.self_attn") == 1


@pytest.mark.parametrize("family", ["mpt", "bloom"])
def test_of_a_mask_for_each_head_a_rank_reads_its_heads(family):
    """Alibi is made of numbers alone, on every rank; 4 heads over 3 ranks."""
    graph = capture(build(family, num_hidden_layers=1))
    for rank, (first, stop) in enumerate(((0, 2), (2, 3), (3, 4))):
        program = on_rank(graph, "tp=3", rank)
        (attention,) = [n for n in program.graph.nodes if n.target is torch.ops.latentscan.attention.default]
        mask = attention.args[3]
        assert mask.args[1] == (slice(None), slice(first, stop))
        assert program.graph.shape(mask)[1] == program.graph.shape(attention)[1] == stop - first


def test_a_prompt_that_is_shorter_than_the_convolution_is_split():
    """Its conv state is padded; with sequence-parallel such a graph is left as it is, for so few tokens."""
    model = build("mamba2", num_hidden_layers=1).eval()
    given = {"input_ids": torch.ones(2, 3, dtype=torch.long), "use_cache": True}
    with torch.no_grad():
        graph = capture(model, inputs={**given, cache_argument(model): GraphCache.for_model(model)})
    assert any(n.target is torch._C._nn.pad for n in graph.nodes)
    records = on_rank(graph, "tp=2", 1, "tensor-parallel,sequence-parallel").records
    assert records[0].sites[0].module == "backbone.layers.0.mixer"
    assert [r.rule for r in records[1].refusals] == ["one-token"]
    assert "at most 3 tokens" in records[1].refusals[0].reason


def test_a_refused_dropout_says_what_to_set():
    model = build("gpt2", num_hidden_layers=1)
    facts = facts_of(on_rank(capture(model.eval()), "tp=2", 0).records)
    needed = frozenset({("tensor-parallel", "transformer.h.0.attn")})
    context = Context(mesh=parse_mesh("tp=2").at(tp=0), own_parameters=True, facts=facts, required=needed)
    with pytest.raises(VerifyError, match="draws random numbers") as caught:
        run(capture(model.train(), training=True), parse("tensor-parallel"), context)
    assert caught.value.remedy.startswith("set this dropout to 0")


class _CentredInTraining(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Centred.apply(x) if self.training else x


def test_a_refusal_of_a_part_of_what_was_planned_is_the_reason():
    """An activation that is an autograd function across features, in training only."""
    model = build("bloom", num_hidden_layers=1)
    model.transformer.h[0].mlp.gelu_impl = _CentredInTraining()
    facts = facts_of(on_rank(capture(model.eval()), "tp=2", 0).records)
    needed = frozenset({("tensor-parallel", "transformer.h.0.mlp")})
    context = Context(mesh=parse_mesh("tp=2").at(tp=0), own_parameters=True, facts=facts, required=needed)
    with pytest.raises(VerifyError, match=r"cannot be rewritten as planned: .*autograd_function_apply"):
        run(capture(model.train(), training=True), parse("tensor-parallel"), context)


def test_an_activation_with_a_backward_of_its_own_is_split_in_training_as_in_evaluation():
    """Bloom's GELU is an autograd function in training only."""
    model = build("bloom", num_hidden_layers=1)
    sites = []
    for training in (False, True):
        program = on_rank(capture(model.train(training), training=training), "tp=3", 2, "tensor-parallel")
        sites.append([(s.module, s.rule, s.facts) for s in program.records[0].sites])
        verify_all(program.graph)
    assert sites[0] == sites[1]
    (gelu,) = [n for n in program.graph.nodes if isinstance(n.target, ElementwiseFunction)]
    assert program.graph.shape(gelu)[2] == 4 * 64 // 3


class Twice(torch.nn.Module):
    """Two regions read one value; between them it may be written."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.write = write
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.GELU(), torch.nn.Linear(12, 8)) for _ in range(2)
        )
        self.table = torch.nn.Embedding(16, 8)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids) * 2
        first = self.layers[0](x)
        if self.write is not None:
            self.write(x)
        return first + self.layers[1](x)


def _one_place(x: torch.Tensor) -> None:
    x[:, 0] = 1.0


def _one_feature(x: torch.Tensor) -> None:
    x[..., 0].zero_()


@pytest.mark.parametrize("write", [None, _one_place, _one_feature])
def test_a_value_that_is_written_after_a_region_has_read_it_is_not_copied_once_for_all(write):
    graph = capture(Twice(write).train(), inputs={"input_ids": torch.ones(2, 6, dtype=torch.long)}, training=True)
    record = on_rank(graph, "tp=2", 0, "tensor-parallel").records[0]
    split = ["layers.0", "layers.1"] if write is None else ["layers.1"]
    assert [s.module for s in record.sites if s.rule == "features"] == split
    assert any("is written by" in r.reason for r in record.refusals) == (write is not None)
