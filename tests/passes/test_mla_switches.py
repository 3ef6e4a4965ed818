"""All switches together on DeepSeek-V3: the same numbers and gradients as eager, and as many bytes as predicted."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch

from latentscan.ir.capture import capture
from latentscan.runtime.cache import GraphCache, cache_argument
from latentscan.runtime.door import session_of
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build
from latentscan.tests.passes.switches import freed, kept_bytes, padded_attention, predicted, rewritten
from latentscan.tests.runtime.helpers import distance, ragged, tokens, worst_gradient

SWITCHES = {
    "no-pad": "mla-fa-without-pad",
    "split": "mla-mm-split",
    "absorb": "mla-absorb{when=always}",
    "swap": "mla-swap-core-attn-out",
    "zero": "mla-zero-memory",
}
EVERY = [tuple(n for n, on in zip(SWITCHES, bits, strict=True) if on) for bits in itertools.product((0, 1), repeat=5)]
FAST = {("no-pad", "split", "swap", "zero")}
BATCH, LENGTH = 2, 23


def eager_model(names: tuple[str, ...]) -> Any:
    """With a layer of experts; the many slow combinations do without, for they are the same to all of them."""
    return build("deepseek_v3") if names in FAST else build("deepseek_v3", first_k_dense_replace=2)


def combinations() -> list[Any]:
    return [
        pytest.param(names, id="+".join(names) or "none", marks=() if names in FAST else pytest.mark.slow)
        for names in EVERY
    ]


def text(names: tuple[str, ...]) -> str:
    return ",".join(SWITCHES[n] for n in names)


def padding(names: tuple[str, ...]) -> Any:
    """With no-pad the model's attention is padded to start with."""
    return padded_attention(32) if "no-pad" in names else contextlib.nullcontext()


def applied(model: Any, names: tuple[str, ...]) -> None:
    """Every switch found its two layers in the newest graph."""
    records = {r.name: len(r.sites) for r in session_of(model).graphs[-1].records}
    assert all(records[SWITCHES[n].split("{")[0]] >= 2 for n in names), records


@pytest.mark.parametrize("names", combinations())
def test_training_gives_the_gradients_of_eager_and_keeps_what_is_predicted(names):
    eager = eager_model(names).train()
    plain = copy.deepcopy(eager)
    inputs = ragged(BATCH, LENGTH) | {"use_cache": False}
    eager(**inputs).loss.backward()
    with padding(names):
        base = wrap(copy.deepcopy(plain))
        before = kept_bytes(base, **inputs)
        model = wrap(copy.deepcopy(plain), text(names))
        after = kept_bytes(model, **inputs)
        graph = capture(plain, inputs=inputs, training=True)
    applied(model, names)
    assert worst_gradient(model, eager) < 5e-6
    changed, records = rewritten(graph, text(names))
    blocks = freed(graph, rewritten(graph, "mla-zero-memory")[1], BATCH, LENGTH)
    # All that training keeps: within 5 % of what the attention blocks keep without the switches.
    was, now = predicted(graph, BATCH, LENGTH), predicted(changed, BATCH, LENGTH)
    assert before - after == pytest.approx(was - now, abs=0.05 * blocks)
    # What the switches for memory say that they free, they free.
    memory = tuple(n for n in names if n in ("swap", "zero"))
    if memory:
        with padding(names):
            rest = wrap(copy.deepcopy(plain), text(tuple(n for n in names if n not in memory)))
            without = kept_bytes(rest, **inputs)
        assert without - after == pytest.approx(freed(graph, records, BATCH, LENGTH), rel=0.05)
        assert without > after


@pytest.mark.parametrize("names", combinations())
def test_evaluation_equals_eager_with_every_kind_of_cache(names):
    from transformers import StaticCache

    eager = eager_model(names)
    with padding(names):
        model = wrap(copy.deepcopy(eager), text(names))
        ids, rows = tokens(2, 9), ragged(2, 9)
        del rows["labels"]
        key = cache_argument(model)
        with torch.no_grad():
            assert distance(model(**rows, use_cache=False).logits, eager(**rows, use_cache=False).logits) < 5e-6
            applied(model, names)
            for make in (GraphCache.for_model, lambda m: StaticCache(config=m.config, max_cache_len=16)):
                caches = [make(model), StaticCache(config=eager.config, max_cache_len=16)]
                for part in (ids[:, :6], ids[:, 6:8], ids[:, 8:]):  # prefill, several tokens, one token
                    got, want = (
                        m(part, use_cache=True, **{key: c}) for m, c in zip((model, eager), caches, strict=True)
                    )
                    assert distance(got.logits, want.logits) < 5e-6
        words = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": -1}
        assert torch.equal(model.generate(**rows, **words), eager.generate(**rows, **words))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.slow) for k in ("graph", "dynamic", "static")],
)
def test_training_with_a_cache_gives_the_gradients_of_eager(kind):
    from transformers import DynamicCache, StaticCache

    eager = build("deepseek_v3").train()
    model = wrap(copy.deepcopy(eager), text(("split", "absorb", "swap", "zero")))
    make = {
        "graph": GraphCache.for_model,
        "dynamic": lambda m: DynamicCache(config=m.config),
        "static": lambda m: StaticCache(config=m.config, max_cache_len=32),
    }
    inputs, key = ragged(BATCH, LENGTH), cache_argument(model)
    for m, how in ((model, kind), (eager, "static" if kind == "static" else "dynamic")):
        m(**inputs, use_cache=True, **{key: make[how](m)}).loss.backward()
    assert worst_gradient(model, eager) < 5e-6
    rules = {r.rule for record in session_of(model).graphs[-1].records for r in record.refusals}
    refused = {"graph": "cache-in-block", "static": "input-is-written"}.get(kind)
    assert (refused in rules) == (refused is not None), rules  # recomputed, or refused by name


def test_the_prediction_notices_a_block_that_is_kept_after_all(monkeypatch):
    """Sabotage: regions that are marked and not outlined."""
    from latentscan.runtime import executable

    monkeypatch.setattr(executable, "outline_checkpoints", lambda graph, higher_order: 0)
    with pytest.raises(AssertionError):
        test_training_gives_the_gradients_of_eager_and_keeps_what_is_predicted(("zero",))


@pytest.mark.slow
def test_the_comparison_notices_a_swapped_value_that_comes_back_changed(monkeypatch):
    """Sabotage: bytes that are lost on the way."""
    from latentscan.lowering import swap

    fetch = swap.HostCopy.fetch
    monkeypatch.setattr(swap.HostCopy, "fetch", lambda self: torch.zeros_like(fetch(self)))
    with pytest.raises(AssertionError):
        test_training_gives_the_gradients_of_eager_and_keeps_what_is_predicted(("swap",))
