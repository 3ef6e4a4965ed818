"""The ways in which a wrapped model may be called: outputs, masks, the library's caches; many models, many graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from latentscan.ir.capture import capture
from latentscan.ir.errors import CacheError, CaptureError
from latentscan.ir.frontends.huggingface import _sdpa_function
from latentscan.ir.mla import attentions
from latentscan.passes.base import Context
from latentscan.passes.pipeline import parse, run
from latentscan.runtime import session
from latentscan.runtime.cache import GraphCache, cache_argument
from latentscan.runtime.door import session_of
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import distance, pair, tokens, worst_gradient

SPLIT = "mla-mm-split,mla-absorb"


def mask_4d() -> torch.Tensor:
    mask = torch.ones(13, 13, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    mask[:, :, 5:, :3] = False
    return mask


CALLS: dict[str, dict[str, Any]] = {
    "tuple": {"return_dict": False},
    "dense-mask": {"attention_mask": mask_4d()},
    "packed-positions": {"position_ids": torch.cat([torch.arange(6), torch.arange(7)])[None].repeat(2, 1)},
    "last-logits": {"logits_to_keep": 1},
    "attentions": {"output_attentions": True},
}


@pytest.mark.parametrize("way", [pytest.param(w, marks=pytest.mark.slow if w == "tuple" else ()) for w in CALLS])
def test_calls_equal_eager(way):
    model, eager = pair("deepseek_v3", SPLIT)
    got, want = (m(tokens(), use_cache=False, **CALLS[way]) for m in (model, eager))
    assert type(got) is type(want)
    assert distance(got[0], want[0]) < 2e-6
    assert got[0].shape == want[0].shape
    if way in ("dense-mask", "packed-positions"):  # sabotage: the argument matters
        assert distance(got[0], eager(tokens(), use_cache=False)[0]) > 1e-2


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_hidden_states_come_out_at_the_first_call(family):
    """The library installs its hooks then, under a lock that Dynamo cannot trace."""
    model, eager = pair(family, "")
    got, want = (m(tokens(), output_hidden_states=True, use_cache=False).hidden_states for m in (model, eager))
    assert len(got) == len(want) == 3
    assert max(distance(a, b) for a, b in zip(got, want, strict=True)) < 2e-6


def test_generate_returns_scores_and_hidden_states():
    model, eager = pair("llama", "")
    words = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": -1, "return_dict_in_generate": True}
    words |= {"output_scores": True, "output_hidden_states": True, "num_beams": 3, "num_return_sequences": 2}
    got, want = (m.generate(tokens(2, 9), **words) for m in (model, eager))
    assert torch.equal(got.sequences, want.sequences)
    assert max(distance(a, b) for a, b in zip(got.scores, want.scores, strict=True)) < 2e-6
    assert distance(got.hidden_states[0][2], want.hidden_states[0][2]) < 2e-6


@pytest.mark.parametrize("length", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_one_row_generates_as_eager(length):
    model, eager = pair("deepseek_v3", SPLIT)
    words = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1}
    ids = tokens(1, length)
    assert torch.equal(model.generate(ids, **words), eager.generate(ids, **words))
    assert len(session_of(model).graphs) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({}, "ValueError: You must specify exactly one of input_ids or inputs_embeds"),
        ({"input_ids": tokens(2, 5)[0]}, "rope: x, cos and sin have 3, 3 and 3 dimensions"),
        ({"input_ids": tokens(2, 5).float()}, "Expected tensor for argument #1 'indices'"),
    ],
)
def test_a_wrong_call_is_told_as_the_model_tells_it(words, told):
    model = wrap(build("llama", num_hidden_layers=1))
    with pytest.raises(CaptureError) as caught:
        model(**words)
    text = str(caught.value)
    assert told in text
    assert not any(prose in text for prose in ("Hint", "torch.compile", "\n", "Explanation"))


# -- caches that the user gives -------------------------------------------------------------------------------------


def cache_of(kind: str, model: Any) -> Any:
    if kind == "graph":
        return GraphCache.for_model(model)
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=30)


FAST = {("llama", "static"), ("gemma3", "dynamic"), ("deepseek_v3", "static")}
OTHERS = ("gemma2", "bamba", "zamba2", "qwen3_next")
TABLE = [(f, k) for f in ("llama", "gemma3", "deepseek_v3", *OTHERS) for k in ("graph", "dynamic", "static")]


@pytest.mark.parametrize(
    ("family", "kind"), [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in TABLE]
)
def test_every_cache_of_the_library_works_as_in_eager(family, kind):
    """Prefill beyond a window, single steps, a chunk; a cache of fixed size holds more keys than there are tokens."""
    model, eager = pair(family, SPLIT if family == "deepseek_v3" else "")
    name, ids = cache_argument(model), tokens(2, 19)
    mine, theirs = cache_of(kind, model), cache_of("dynamic" if kind == "graph" else kind, eager)
    with torch.no_grad():
        for part in (slice(0, 12), slice(12, 13), slice(13, 14), slice(14, 18), slice(18, 19)):
            got = model(ids[:, part], use_cache=True, **{name: mine}).logits
            assert distance(got, eager(ids[:, part], use_cache=True, **{name: theirs}).logits) < 2e-6
    assert mine.get_seq_length() == 19


def test_a_triangle_at_the_wrong_corner_would_be_seen(monkeypatch):
    """Sabotage: the canonical op's triangle ends at the last key, which a fresh cache of fixed size has not filled."""
    monkeypatch.setattr("latentscan.ir.frontends.huggingface.statically_known_true", lambda known: True)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 30, 8)
    monkeypatch.setattr("latentscan.ir.frontends.huggingface.traced_by_latentscan", lambda: True)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2)
    assert distance(_sdpa_function(lambda *a, **b: None)(torch.nn.Module(), q, k, k, None)[0], want) > 1e-2


@pytest.mark.parametrize("pipeline", ["", "latent-cache"])
def test_a_cache_made_with_gradients_on_is_continued(pipeline):
    """Nobody gave that cache: it is one that the next call takes, and gradients of the first call are whole."""
    model, eager = pair("gpt2", pipeline, num_hidden_layers=1)
    outs = [m(tokens(2, 9)) for m in (model, eager)]
    for out in outs:
        out.logits.square().mean().backward()
    assert worst_gradient(model, eager) < 1e-5
    with torch.no_grad():
        got, want = (
            m(tokens(2, 1), past_key_values=out.past_key_values).logits
            for m, out in zip((model, eager), outs, strict=True)
        )
    assert distance(got, want) < 2e-6
    again = model(tokens(2, 9)).past_key_values
    if pipeline:  # a gradient would have to go through what is stored
        with pytest.raises(CacheError, match=r"gradients do not flow.*no_grad"):
            model(tokens(2, 1), past_key_values=again)
    else:
        model(tokens(2, 1), past_key_values=again).logits.sum().backward()


# -- many models, many graphs ---------------------------------------------------------------------------------------


def test_models_wrapped_in_one_process_share_neither_graphs_nor_limits(monkeypatch):
    """CASES 25 and 29: the same class with other sizes and pipelines, called in turn, within a limit of two graphs."""
    monkeypatch.setattr(session, "RECOMPILE_LIMIT", 2)
    settings = [(16, ""), (16, "mla-absorb"), (24, "mla-mm-split"), (16, SPLIT)]
    pairs = [pair("deepseek_v3", pipeline, kv_lora_rank=rank, num_hidden_layers=1) for rank, pipeline in settings]
    for length in (13, 17):
        for model, eager in pairs:
            assert distance(model(tokens(2, length)).logits, eager(tokens(2, length)).logits) < 2e-6
            with torch.no_grad():
                assert distance(model(tokens(2, length)).logits, eager(tokens(2, length)).logits) < 2e-6
    assert [len(session_of(model).graphs) for model, _ in pairs] == [2] * 4


def test_more_graphs_than_the_limit_raise_instead_of_running_on_released_weights(monkeypatch):
    monkeypatch.setattr(session, "RECOMPILE_LIMIT", 1)
    model, _ = pair("deepseek_v3", SPLIT)
    model(tokens())
    with torch.no_grad(), pytest.raises(CaptureError, match="one graph") as caught:
        model(tokens())
    assert "unwrap" in caught.value.remedy
    assert not bool(model(tokens()).logits.isnan().any())  # the first graph still serves


@pytest.mark.slow
def test_a_reset_of_dynamo_costs_graphs_and_nothing_else():
    model, eager = pair("deepseek_v3", SPLIT)
    before = model(tokens()).logits
    torch._dynamo.reset()
    assert torch.equal(model(tokens()).logits, before)
    assert distance(before, eager(tokens()).logits) < 2e-6


def test_a_wrapped_model_inside_a_compiled_function():
    """The user's own torch.compile around a wrapped model: it may break there, and gives the same numbers."""
    model, eager = pair("llama", "")

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).logits.logsumexp(-1).mean() * 2

    got = torch.compile(loss, backend="eager")(tokens())
    assert distance(got, 2 * eager(tokens(), use_cache=False).logits.logsumexp(-1).mean()) < 1e-6


def test_wrapping_says_what_it_did():
    model = wrap(build("deepseek_v3"), SPLIT)
    assert [row["pass"] for row in model.report.passes] == ["mla-mm-split", "mla-absorb"]
    assert [row["sites"] for row in model.report.passes] == [4, 2]
    assert model.report.new_weight_bytes == model.report.released_weight_bytes > 0
    assert model.report.graphs == []
    model(tokens())
    assert len(model.report.graphs) == 1
    assert "mla-absorb" in str(model.report)


# -- attention weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "pipeline"),
    [
        ("gpt2", ""),  # takes the argument out before it comes to its layers
        ("opt", "mha-to-mla,latent-cache,mla-absorb"),
        ("llama", "mha-to-mla,latent-cache"),
        pytest.param("gpt_neox", "mha-to-mla,latent-cache,mla-absorb", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", SPLIT, marks=pytest.mark.slow),
    ],
)
def test_eager_attention_gives_its_weights_when_asked_and_only_then(family, pipeline):
    model, eager = pair(family, pipeline, attn_implementation="eager", num_hidden_layers=1)
    words: dict[str, Any] = {"output_attentions": True, "use_cache": True}
    with torch.no_grad():
        got, want = (m(tokens(2, 9), **words) for m in (model, eager))
        steps = [
            m(tokens(2, 1), **words, past_key_values=out.past_key_values) for m, out in ((model, got), (eager, want))
        ]
        plain = model(tokens(2, 9))
    for mine, theirs in ((got, want), steps):
        assert len(mine.attentions) == len(theirs.attentions) == 1
        assert distance(mine.attentions[0], theirs.attentions[0]) < 2e-6
        assert distance(mine.logits, theirs.logits) < 2e-6
    assert plain.attentions is None


def test_attentions_that_the_configuration_wants_come_out():
    model, eager = pair("llama", "mha-to-mla", attn_implementation="eager", num_hidden_layers=1, output_attentions=True)
    got, want = (m(tokens(2, 9), use_cache=False).attentions for m in (model, eager))
    assert len(got) == len(want) == 1
    assert distance(got[0], want[0]) < 2e-6


@pytest.mark.parametrize("wanted", [True, False])
def test_attention_weights_and_attention_are_made_of_the_same_query_and_key(wanted):
    """The low-rank form leaves rotated features out of both; weights of one form times keys of the other mean nothing.
    And where nobody reads the weights, the graph does not hold them."""
    model = build("llama", attn_implementation="eager", num_hidden_layers=1)
    inputs = {"input_ids": tokens(2, 9), "use_cache": False, "output_attentions": wanted}
    graph = capture(model, inputs=inputs)
    run(graph, parse("mha-to-mla{rank=24,rope_dim=16}"), Context(own_parameters=True, meta=True))
    (attention,) = attentions(graph)
    weights = [n for n in graph.calls(torch.matmul) if attention.args[0] in n.args]
    assert len(weights) == len(graph.calls(torch.nn.functional.softmax)) == wanted
    assert all(attention.args[1] in above(n) for n in weights)


def above(node: Any) -> set[Any]:
    found, stack = set(), [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                stack.append(source)
    return found
