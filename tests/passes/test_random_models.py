"""No silent difference: random attention layers and random models of the library, through the passes, against their
definition (fp64) and eager (fp32). 440 layers and 500 whole models in the slow suite, a few in the fast one."""

from __future__ import annotations

import copy
import math
import operator
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from latentscan.ir.errors import RefusedError
from latentscan.ir.graph import Graph
from latentscan.ir.layout import linear_of
from latentscan.ir.normalize import ATTENTION, LATENT_ATTENTION
from latentscan.ir.ops.mask import token_positions
from latentscan.ir.ops.rope import ROPE
from latentscan.passes.pipeline import Program, parse
from latentscan.runtime.cache import GraphCache, cache_argument
from latentscan.runtime.calibration import statistics_for
from latentscan.runtime.wrap import planning_graph, wrap
from latentscan.tests.models import build
from latentscan.tests.passes.random_attention import Spec, check, replaced, specs
from latentscan.tests.runtime.helpers import NO_DROPOUT, distance, tokens
from latentscan.tools import low_rank

LAYERS, MODELS, PARTS = 440, 500, 10  # of the slow suite; a part of the models takes minutes
RULES = {
    "key-value-is-latent", "input-is-latent", "partial-rotary", "basis-is-latent", "keys-are-latent",
    "input-made-again-on-read", "values-from-input",
}  # fmt: skip

# One layer a rule, and the elements a token that it takes: heads 2 of 4 features unless said otherwise.
PLAIN = Spec(8, 1, 2, 4, 4)
CHOSEN = {
    "input-is-latent": (replaced(PLAIN, hidden=7, bias="qkv", softcap=2.0, sinks=True), 7),
    "partial-rotary": (replaced(PLAIN, layout="grouped", bias="qkv", rotary=2, window=3), 8 + 2 * 2),
    "basis-is-latent": (replaced(PLAIN, layout="conv1d", bias="qkv", kv_rank=3, softcap=2.0), 3),
    "keys-are-latent": (replaced(PLAIN, bias="qkv", rotary=4, condition=50.0, sinks=True), 8 + 1),
    "input-made-again-on-read": (replaced(PLAIN, layout="stacked", rotary=4, norm="head", window=3, sinks=True), 8 + 1),
    "values-from-input": (replaced(PLAIN, hidden=7, width=2, rotary=2, bias="qv", sinks=True), 7 + 4),
    "key-value-is-latent": (replaced(PLAIN, groups=2, hidden=16, bias="k", rotary=4, softcap=2.0), 16),
}


def rules(program: Program) -> list[str]:
    return [s.rule for r in program.records if r.name == "mha-to-mla" for s in r.sites]


# -- layers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", CHOSEN)
def test_each_rule_is_taken_where_it_should_be_and_changes_nothing(rule):
    spec, elements = CHOSEN[rule]
    program = check(spec)
    (site,) = program.records[0].sites
    assert (site.rule, site.facts["d_c"] + site.facts["d_r"]) == (rule, elements)
    assert str(elements) in site.note
    assert program.records[1].sites[0].facts["after"] == elements


@settings(max_examples=10)
@given(specs())
def test_a_random_layer_stays_what_it_is(spec):
    check(spec)


@pytest.mark.slow
def test_many_random_layers_stay_what_they_are():
    seen: Counter[str] = Counter()

    @settings(max_examples=LAYERS, derandomize=False, database=None, phases=[hypothesis.Phase.generate])
    @hypothesis.seed(1)
    @given(specs())
    def every(spec: Spec) -> None:
        seen.update(rules(check(spec)))

    every()
    assert set(seen) == RULES, seen
    assert min(seen.values()) >= 2, seen


# -- sabotage: what a wrong rewrite would have done, seen by the same harness ------------------------------------------


def attention_nodes(graph: Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target in (ATTENTION, LATENT_ATTENTION)]


def without_option(name: str) -> Any:
    def sabotage(graph: Graph) -> None:
        for node in attention_nodes(graph):
            assert node.kwargs[name] is not None
            node.kwargs = {**node.kwargs, name: None}

    return sabotage


def without_sinks(graph: Graph) -> None:
    for node in attention_nodes(graph):
        position = [a.name for a in node.target._schema.arguments].index("sinks")
        assert node.args[position] is not None
        node.update_arg(position, None)


def without_the_last_bias(graph: Graph) -> None:
    """Of keys or values: those come last."""
    biased = [n for n in graph.nodes if (m := linear_of(graph, n)) is not None and m.bias is not None]
    node = biased[-1]
    node.args, node.kwargs = node.args[:2], {}


def turned_the_other_way(graph: Graph) -> None:
    """Keys that are rotated on read turn backwards."""
    node = [n for n in graph.nodes if n.target is ROPE.op][-1]
    with graph.before(node, "sabotage"):
        node.update_arg(2, graph.method("neg", node.args[2]))


def without_a_norm(graph: Graph) -> None:
    products = [n for n in graph.nodes if n.target is operator.mul and graph.weight(n.args[0]) is not None]
    products[-1].replace_all_uses_with(products[-1].args[1])


def one_value_for_all(graph: Graph) -> None:
    """The up-projection of values reads the first rows of the latent's weight twice."""
    node = [n for n in graph.nodes if linear_of(graph, n) is not None][-1]
    with graph.before(node, "sabotage"):
        weight = graph.call(operator.getitem, node.args[1], slice(0, 1))
        node.update_arg(1, graph.method("expand", weight, graph.shape(node.args[1])[0], -1))


def without_positions(graph: Graph) -> None:
    """Every token is taken to stand at position 0 when it is read. (A training step caches none.)"""
    for node in graph.calls(token_positions.op):
        with graph.after(node, "sabotage"):
            zero = graph.call(torch.zeros_like, node)
        node.replace_all_uses_with(zero, delete_user_cb=lambda user, zero=zero: user is not zero)


def without_a_gradient(graph: Graph) -> None:
    """The right values, but nothing flows back through the last projection's input."""
    node = [n for n in graph.nodes if linear_of(graph, n) is not None][-1]
    with graph.before(node, "sabotage"):
        node.update_arg(1, graph.method("detach", node.args[1]))


SABOTAGES = {
    "softcap": ("basis-is-latent", without_option("softcap")),
    "window": ("partial-rotary", without_option("window")),
    "sinks": ("input-is-latent", without_sinks),
    "bias": ("input-is-latent", without_the_last_bias),
    "bias in V of K": ("keys-are-latent", without_the_last_bias),
    "bias beside a basis": ("basis-is-latent", without_the_last_bias),
    "rotation on read": ("keys-are-latent", turned_the_other_way),
    "rotation of the input on read": ("input-made-again-on-read", turned_the_other_way),
    "norm on read": ("input-made-again-on-read", without_a_norm),
    "positions": ("keys-are-latent", without_positions),
    "rows": ("basis-is-latent", one_value_for_all),
    "gradient": ("basis-is-latent", without_a_gradient),
}


@pytest.mark.parametrize("what", SABOTAGES)
def test_sabotage_is_seen(what):
    rule, sabotage = SABOTAGES[what]
    spec, _ = CHOSEN[rule]
    with pytest.raises(AssertionError, match=r"^gradient of" if what == "gradient" else r"tokens after"):
        check(spec, sabotage)


@pytest.mark.slow
def test_sabotage_of_random_layers_is_seen():
    """A softcap or the bias of the values that is dropped, whatever else the layer is.

    Not with a window of one key, whose weight is 1 whatever its score; a bias of keys alone would shift all scores.
    """

    @settings(max_examples=20, phases=[hypothesis.Phase.generate])
    @given(specs(), st.booleans())
    def every(spec: Spec, softcap: bool) -> None:
        pipeline = "mha-to-mla{full_rope=auto},latent-cache"
        spec = replaced(spec, window=None, pipeline=pipeline, layout="separate", written_out=False)
        spec = replaced(spec, softcap=1.0) if softcap else replaced(spec, bias="v")
        with pytest.raises(AssertionError):
            check(spec, without_option("softcap") if softcap else without_the_last_bias)

    every()


# -- models of the library ---------------------------------------------------------------------------------------------

FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gpt2", "gpt_neox", "opt", "gptj", "phi", "stablelm",
    "bloom", "falcon", "gpt_oss", "smollm3", "cohere2", "olmo2",
)  # fmt: skip
ONE_LAYER = {"gpt2": "n_layer", "gptj": "n_layer", "bloom": "n_layer"}
HAS_KV_HEADS = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "stablelm", "gpt_oss", "olmo2", "cohere2")
HAS_HEAD_DIM = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss", "cohere2")
HAS_BIAS = {
    "llama": "attention_bias", "qwen3": "attention_bias", "stablelm": "use_qkv_bias", "cohere2": "attention_bias"
}  # fmt: skip


LOW_RANK = ("llama", "qwen2", "mistral")  # families whose attention `tools.low_rank.Eager` writes down
WIDTHS = {"gpt2": "n_embd"} | dict.fromkeys(("qwen2", "phi3", "gpt_neox", "phi", "stablelm", "olmo2"), "hidden_size")


@dataclass(frozen=True)
class Drawn:
    """A random model: its family, its configuration, and what is done to it.

    Attributes:
        absorb: whether absorption is asked for. split: tokens of each call, the last two with a filled cache.
        low_rank: options of mha-to-mla's low-rank form, or "".
    """

    family: str
    given: dict[str, Any]
    seed: int
    absorb: bool
    split: tuple[int, ...]
    low_rank: str = ""


@st.composite
def configurations(draw: st.DrawFn, families: tuple[str, ...] = FAMILIES) -> Drawn:
    family = draw(st.sampled_from(families))
    given: dict[str, Any] = dict(NO_DROPOUT.get(family, {}))
    given[ONE_LAYER.get(family, "num_hidden_layers")] = draw(st.sampled_from([1, 1, 1, 2]))
    if family == "bloom":
        given |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    if family == "smollm3":
        given["no_rope_layers"] = [draw(st.integers(0, 1)) for _ in range(given["num_hidden_layers"])]
    if family == "cohere2":
        kinds = st.sampled_from(["sliding_attention", "full_attention"])
        given["layer_types"] = [draw(kinds) for _ in range(given["num_hidden_layers"])]
    if family in HAS_KV_HEADS:
        given["num_key_value_heads"] = draw(st.sampled_from([1, 2, 4, 4]))
    if family in HAS_HEAD_DIM:
        given["head_dim"] = draw(st.sampled_from([8, 16, 24]))
        given["hidden_size"] = draw(st.sampled_from([16, 32, 48, 64]))
    if family in WIDTHS:
        given[WIDTHS[family]] = draw(st.sampled_from([32, 64]))
    if family in HAS_BIAS:
        given[HAS_BIAS[family]] = draw(st.booleans())
    if family in ("gemma2", "gpt_oss", "mistral"):
        given["sliding_window"] = draw(st.sampled_from([3, 8]))
    if family == "gemma2":
        given |= {"attn_implementation": "eager", "attn_logit_softcapping": draw(st.sampled_from([None, 3.0]))}
    if family in ("gpt_neox", "phi", "stablelm"):
        given["partial_rotary_factor"] = draw(st.sampled_from([0.25, 0.5]))
    if family == "falcon":
        given |= {"alibi": draw(st.booleans()), "multi_query": draw(st.booleans()), "bias": draw(st.booleans())}
    words, absorb = "", draw(st.sampled_from([True, False, False]))
    if family in LOW_RANK and draw(st.booleans()):
        words, absorb = draw(low_ranks(family, given)), draw(st.booleans())
    split = draw(st.sampled_from([(11, 1), (7, 5), (5, 4, 3)]))
    return Drawn(family, given, draw(st.integers(0, 1000)), absorb, split, words)


@st.composite
def low_ranks(draw: st.DrawFn, family: str, given: dict[str, Any]) -> str:
    """Options of the low-rank form that the model can have."""
    given.pop("sliding_window", None)
    if family == "mistral":
        given["sliding_window"] = None
    heads, hidden = given["num_key_value_heads"], given.get("hidden_size", 64)
    width = given.get("head_dim", hidden // 4)
    method = draw(st.sampled_from(["two-sided", "two-sided", "pca", "transmla", "transmla-unfolded"]))
    key = heads * width
    sizes = {
        "two-sided": range(2, key, 2), "pca": range(2 * heads, key - 2 * heads + 1, 2 * heads),
        "transmla": [d for d in range(2, width + 1, 2) if width % d == 0 and d < key],
        "transmla-unfolded": [d for d in range(2, width + 1, 2) if d < key],
    }  # fmt: skip
    rope_dim = draw(st.sampled_from(list(sizes[method])))
    rank = draw(st.integers(1, min(hidden, 2 * key - rope_dim)))
    return f"{{rank={rank},rope_dim={rope_dim},method={method}}}"


def shaken(drawn: Drawn) -> Any:
    """The model, with biases, norms and sinks that are not what they start as (zeros, ones, nothing), and attentions
    that weigh as much as the rest: as they start they hardly move a logit."""
    eager, g = build(drawn.family, **drawn.given), torch.Generator().manual_seed(drawn.seed)
    with torch.no_grad():
        for name, p in eager.named_parameters():
            if p.dim() == 1:
                p.add_(0.3 * torch.randn(p.shape, generator=g))
            elif "attn" in name or "attention" in name:
                p.mul_(8)
    return eager


def check_model(drawn: Drawn) -> list[str]:
    """Raise AssertionError unless a wrapped model is the model, or in low rank its definition; its rules."""
    eager = shaken(drawn)
    model = copy.deepcopy(eager)
    exact = f"mha-to-mla{drawn.low_rank or '{full_rope=auto}'},latent-cache"
    text = tokens(4, 64, drawn.seed + 1) if drawn.low_rank else None  # spans any of these latents
    for pipeline in [f"{exact},mla-absorb{{when=always}}"] * drawn.absorb + [exact]:
        try:
            wrap(model, pipeline, calibration=text)
            break
        except RefusedError as refused:  # as a whole: the model is as it was
            told = refused.remedy
        assert told, pipeline
    else:
        return ["refused"]
    found = [s for s in model.report.sites if s["pass"] == "mha-to-mla"]
    of_keys = [s["note"] for s in found if s["rule"] == "keys-are-latent"]
    conditions = [float(note.split("cond(W_K) = ")[1].split(",")[0]) for note in of_keys]
    bound = 10 * math.sqrt(96) * torch.finfo(torch.float32).eps * max([1.0, *conditions])
    ids, mask = tokens(2, 12, drawn.seed), torch.ones(2, 12, dtype=torch.long)
    name, cache = cache_argument(model), GraphCache.for_model(model)
    if text is None:
        mask[1, : drawn.seed % 4] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    takes = "position_ids" in eager.forward.__code__.co_varnames
    with torch.no_grad():
        if text is not None:
            words = f"mha-to-mla{drawn.low_rank}"
            statistics = statistics_for(eager, parse(words), text)
            made = low_rank.converted(eager, words, statistics, planning_graph(eager))
            with low_rank.replaced(eager, made):
                want = eager(ids).logits
        else:
            want = eager(ids, attention_mask=mask, **({"position_ids": positions} if takes else {})).logits
        got, begin = [], 0
        for count in drawn.split:
            end = begin + count
            extra = {"position_ids": positions[:, begin:end]} if takes else {}
            extra |= {"attention_mask": mask[:, :end], "use_cache": True, name: cache}
            got.append(model(ids[:, begin:end], **extra).logits)
            begin = end
    real = mask.bool()
    assert distance(torch.cat(got, 1)[real], want[real]) < bound, drawn
    notes = [s["note"] for s in model.report.sites if s["pass"] == "latent-cache"]
    assert cache.bytes_per_token() == 4 * sum(int(note.split(" -> ")[1].split()[0]) for note in notes), (drawn, notes)
    return [s["rule"] for s in found]


@pytest.mark.parametrize("options", ["", "{rank=10,rope_dim=6}"])
def test_a_random_model_is_checked_against_its_definition(options, monkeypatch):
    """And the check finds an attention whose output is off by a hundredth."""
    given = {"num_hidden_layers": 1, "num_key_value_heads": 2, "hidden_size": 16, "head_dim": 8}
    drawn = Drawn("llama", given, 3, True, (7, 5), options)
    assert check_model(drawn) == ["low-rank" if options else "keys-are-latent"]

    def spoilt(model: Any, *words: Any, honest: Any = wrap, **named: Any) -> Any:
        honest(model, *words, **named)
        with torch.no_grad():
            model.model.layers[0].self_attn.o_proj.weight.mul_(1.01)
        return model

    monkeypatch.setattr(sys.modules[__name__], "wrap", spoilt)
    with pytest.raises(AssertionError):
        check_model(drawn)


def rules_of_models(seed: int, count: int, families: tuple[str, ...] = FAMILIES) -> Counter[str]:
    """Check random models; how many attentions each rule rewrote, and under "refused" how many models none did."""
    seen: Counter[str] = Counter()

    @settings(max_examples=count, derandomize=False, database=None, phases=[hypothesis.Phase.generate])
    @hypothesis.seed(seed)
    @given(configurations(families))
    def every(drawn: Drawn) -> None:
        torch._dynamo.reset()
        seen.update(check_model(drawn))

    every()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_random_models_stay_what_they_are(part):
    seen = rules_of_models(1 + part, MODELS // PARTS)
    assert set(seen) >= {"key-value-is-latent", "input-is-latent", "partial-rotary", "input-made-again-on-read"}, seen
    assert seen["refused"] < MODELS / PARTS / 10, seen


@pytest.mark.slow
def test_many_random_models_in_low_rank_are_its_definition():
    seen = rules_of_models(1, 40, LOW_RANK)  # among all families it is drawn once or twice in fifty
    assert seen["low-rank"] >= 10, seen


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
@pytest.mark.parametrize("rank", [56, 20])
def test_low_rank_is_the_model_at_full_rank_and_agrees_with_itself_below(family, rank):
    """At full rank, with nothing rotating, equal; below, prompt and steps agree, and the error is measured."""
    eager = build(family, num_hidden_layers=1)
    for name, b in eager.named_buffers():
        if name.endswith("inv_freq") and rank == 56:
            b.zero_()
    model = copy.deepcopy(eager)
    text = tokens(4, 64, seed=1)
    rest = ",latent-cache,mla-absorb" if rank < 56 else ""  # 56 and 8 are all that K and V hold
    wrap(model, f"mha-to-mla{{rank={rank},rope_dim=8,method=pca}}{rest}", calibration=text, check=True)
    ids = tokens(2, 12)
    name, cache = cache_argument(model), GraphCache.for_model(model)
    with torch.no_grad():
        whole = model(ids).logits
        model(ids[:, :7], use_cache=True, **{name: cache})
        rest = model(ids[:, 7:], use_cache=True, **{name: cache}).logits
        want = eager(ids).logits
    bound = 10 * math.sqrt(96) * torch.finfo(torch.float32).eps
    assert distance(rest, whole[:, 7:]) < bound
    assert (distance(whole, want) < bound) == (rank == 56)
    assert model.report.passes[0]["error"] is not None
