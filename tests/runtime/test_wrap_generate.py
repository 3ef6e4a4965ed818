"""``generate`` on wrapped models: the library's tokens, two graphs whatever the length, one form a step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import sympy
import torch

from latentscan.ir.errors import CacheError, RefusedError
from latentscan.runtime.cache import ARGUMENT_NAMES, GraphCache, cache_argument
from latentscan.runtime.door import session_of
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import distance, pair, tokens

# One family of each kind: latent attention, learned positions, rotary GQA, sliding windows, a hybrid.
MODELS = {
    "deepseek_v3": "mla-mm-split,mla-absorb",
    "gpt2": "latent-cache,mla-absorb",
    "gemma3": "",
    "bamba": "",
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beam": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "left-padding": {"do_sample": False, "padding": 4},
    "static": {"do_sample": False, "cache_implementation": "static"},
    "without-cache": {"do_sample": False, "use_cache": False},
    "chunked-prefill": {"do_sample": False, "prefill_chunk_size": 4},
}
# Each way on one family, each family in one way; the rest of the table is slow.
FAST = {("deepseek_v3", "greedy"), ("gpt2", "beam"), ("gemma3", "left-padding"), ("bamba", "static")}
FAST |= {("gpt2", "without-cache")}


def generate(model: Any, ids: torch.Tensor, *, padding: int = 0, **words: Any) -> torch.Tensor:
    model.generation_config.eos_token_id = None
    if padding:
        ids, mask = ids.clone(), torch.ones_like(ids)
        ids[0, :padding], mask[0, :padding] = 0, 0
        words["attention_mask"] = mask
    torch.manual_seed(7)
    return model.generate(ids, max_new_tokens=12, **words)


@pytest.mark.parametrize(
    ("family", "way"),
    [pytest.param(f, w, marks=() if (f, w) in FAST else pytest.mark.slow) for f in MODELS for w in WAYS],
)
def test_tokens_equal_eager_and_no_step_recompiles(family, way):
    model, eager = pair(family, MODELS[family])
    words = WAYS[way]
    theirs = {k: v for k, v in words.items() if k != "cache_implementation"}
    for batch, length in ((2, 9), (3, 14)):
        ids = tokens(batch, length)
        assert torch.equal(generate(model, ids, **words), generate(eager, ids, **theirs))
    kinds = {"without-cache": 1, "chunked-prefill": 4}.get(way, 2)
    assert len(session_of(model).graphs) == kinds  # prefill and decode; chunks add the later and the last, odd one


def test_a_divergence_would_be_seen():
    """Sabotage: another seed, or one weight scaled, gives other tokens."""
    model, eager = pair("deepseek_v3", "mla-mm-split,mla-absorb")
    ids = tokens(2, 9)
    with torch.no_grad():
        model.model.layers[1].self_attn.kv_b_proj.weight_part1.mul_(-1)
    assert not torch.equal(generate(model, ids, do_sample=False), generate(eager, ids, do_sample=False))


@pytest.mark.parametrize("kind", ["offloaded", "quantized"])
def test_a_cache_implementation_that_is_not_served_refuses(kind):
    model, _ = pair("llama", "")
    with pytest.raises(CacheError, match=kind):
        generate(model, tokens(), do_sample=False, cache_implementation=kind)


def test_a_static_cache_is_allocated_once():
    model, _ = pair("llama", "")
    out = generate(model, tokens(2, 9), do_sample=False, cache_implementation="static", return_dict_in_generate=True)
    cache = out[cache_argument(model) if cache_argument(model) in out else "past_key_values"]
    assert isinstance(cache, GraphCache)
    assert {a.capacity for a in cache.arenas} == {a.max_length for a in cache.arenas}
    assert cache.get_seq_length() == 9 + 12 - 1


def test_both_forms_of_a_graph_are_taken_by_the_call_s_lengths():
    """d_c = 32: eight tokens after one cached expand, after twenty they absorb; one graph, equal logits."""
    model, eager = pair("deepseek_v3", "mla-absorb", kv_lora_rank=32)
    name = cache_argument(model)
    forms = []
    with torch.no_grad():
        for past in (1, 20):
            ids = tokens(2, past + 8)
            cache = GraphCache.for_model(model)
            model(ids[:, :past], use_cache=True, **{name: cache})
            got = model(ids[:, past:], use_cache=True, **{name: cache}).logits
            assert distance(got, eager(ids).logits[:, past:]) < 2e-6
            chunks = [g for g in session_of(model).graphs if g.cached][1:]
            forms.append((len(session_of(model).graphs), [g.executable.forms for g in chunks]))
    # A prompt of one token is a graph of its own; the chunk's graph is made once and gets its second form.
    assert forms[0][1][0] == 1
    assert max(forms[1][1]) == 2


def test_prefill_expands_and_a_long_prefix_absorbs():
    model, _ = pair("deepseek_v3", "mla-absorb", kv_lora_rank=32)
    generate(model, tokens(2, 20), do_sample=False)
    prefill, decode = session_of(model).graphs
    assert prefill.records[-1].choice.condition == sympy.false  # as many queries as keys: known without their number
    assert list(decode.executable._forms) == [True]
    assert decode.records[-1].choice.condition.free_symbols


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_cache_is_continued_and_cropped_across_calls(family):
    model, eager = pair(family, MODELS[family])
    name = cache_argument(model)
    ids, other = tokens(2, 16), tokens(2, 6, seed=5)
    cache = GraphCache.for_model(model)
    with torch.no_grad():
        model(ids[:, :10], use_cache=True, **{name: cache})
        kept = copy.deepcopy(cache)
        whole = model(ids[:, 10:], use_cache=True, **{name: cache}).logits
        assert distance(whole, eager(ids).logits[:, 10:]) < 2e-6
        cache.crop(-6)
        assert cache.get_seq_length() == 10
        again = model(other, use_cache=True, **{name: cache}).logits
        want = eager(torch.cat([ids[:, :10], other], 1)).logits[:, 10:]
        assert distance(again, want) < 2e-6
        assert distance(again, eager(ids).logits[:, 10:]) > 1e-2  # sabotage: the old continuation is not it
        branch = model(ids[:, 10:], use_cache=True, **{name: kept}).logits  # a copy made before is independent
        assert distance(branch, whole) < 2e-6


def test_the_cache_of_generate_is_continued_by_generate():
    model, eager = pair("deepseek_v3", "mla-mm-split,mla-absorb")
    first = generate(model, tokens(2, 9), do_sample=False, return_dict_in_generate=True)
    cache = first[cache_argument(model) if cache_argument(model) in first else "past_key_values"]
    longer = torch.cat([first.sequences, tokens(2, 3, seed=3)], 1)
    again = generate(model, longer, do_sample=False, **{cache_argument(model): cache})
    assert torch.equal(again, generate(eager, longer, do_sample=False))


def test_prompt_lookup_decoding_crops_the_cache():
    model, eager = pair("llama", "")
    ids = tokens(1, 4).repeat(1, 4)
    words = {"do_sample": False, "prompt_lookup_num_tokens": 3}
    assert torch.equal(generate(model, ids, **words), generate(eager, ids, **words))


def test_a_call_without_a_cache_in_evaluation_returns_one():
    model, _ = pair("llama", "")
    name = cache_argument(model)
    with torch.no_grad():
        out = model(tokens(2, 9))
        assert isinstance(out[name], GraphCache)
        assert out[name].get_seq_length() == 9
        assert out.logits.shape == (2, 9, 128)
        assert model(tokens(2, 9), use_cache=False).get(name) is None


def test_two_models_do_not_share_caches():
    model, _ = pair("llama", "")
    other, _ = pair("deepseek_v3", "mla-absorb")
    name = cache_argument(model)
    cache = GraphCache.for_model(model)
    with torch.no_grad():
        model(tokens(2, 9), use_cache=True, **{name: cache})
        with pytest.raises(CacheError, match="holds"):
            other(tokens(2, 1), use_cache=True, **{name: cache})


def test_an_empty_prompt_is_refused():
    model = wrap(build("llama").eval(), "")
    for call in (model, model.generate):
        with pytest.raises(RefusedError, match=r"the prompt is empty: input_ids has shape \[1, 0\]"):
            call(torch.zeros(1, 0, dtype=torch.long))


def test_a_model_that_only_the_chain_of_calls_holds_stays():
    assert wrap(build("llama").eval(), "").generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2).shape == (1, 5)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("kind", ["ours", "dynamic", "static"])
def test_a_cache_given_under_either_name_is_used(name, kind):
    from transformers import DynamicCache, StaticCache

    if name not in ARGUMENT_NAMES or (name == "cache" and cache_argument(build("llama")) != "cache"):
        pytest.skip("this version of transformers does not know the name")
    model, reference = pair("llama", "")
    model.eval(), reference.eval()
    ids = tokens(3, 9)
    cache = {
        "ours": lambda: GraphCache.for_model(model),
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=32),
    }[kind]()
    with torch.no_grad():
        whole = reference(ids, use_cache=False).logits
        first = model(ids[:, :5], **{name: cache}).logits
        assert int(cache.get_seq_length()) == 5
        rest = model(ids[:, 5:], **{name: cache}).logits
    assert distance(torch.cat([first, rest], 1), whole) < 1e-5


def test_a_padding_mask_of_another_length_does_as_the_library_does():
    model, reference = pair("llama", "")
    model.eval(), reference.eval()
    ids = tokens(3, 9)
    for length in (9, 14, 6):
        mask = torch.ones(3, length, dtype=torch.long)
        mask[1, :3] = 0
        with torch.no_grad():
            got, want = (m(ids, attention_mask=mask, use_cache=True).logits for m in (model, reference))
        seen = mask[:, :9] != 0
        assert distance(got[:, : seen.shape[1]][seen], want[:, : seen.shape[1]][seen]) < 1e-5
    cache, theirs = GraphCache.for_model(model), None
    with torch.no_grad():
        model(ids[:, :8], **{cache_argument(model): cache})
        theirs = reference(ids[:, :8], use_cache=True)
        held = theirs.get(cache_argument(reference))
        short = torch.ones(3, 1, dtype=torch.long)  # must not be broadcast over nine keys
        got = model(ids[:, 8:], attention_mask=short, **{cache_argument(model): cache}).logits
        want = reference(ids[:, 8:], attention_mask=short, **{cache_argument(model): held}).logits
    assert distance(got, want) < 1e-5


def test_a_library_cache_under_a_latent_pipeline_is_refused_with_the_reason():
    from transformers import DynamicCache

    model = wrap(build("gpt2").eval(), "latent-cache,mla-absorb")
    with torch.no_grad(), pytest.raises(CacheError, match="DynamicCache keeps keys and values"):
        model(tokens(2, 5), past_key_values=DynamicCache(config=model.config))
