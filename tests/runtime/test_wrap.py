"""A wrapped model computes what the unwrapped one does: forward, gradients, and few graphs."""

from __future__ import annotations

import pytest
import torch

from latentscan.ir.errors import RefusedError
from latentscan.runtime.door import session_of
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import CASES, distance, pair, ragged, worst_gradient


@pytest.mark.parametrize(
    ("family", "pipeline"),
    [pytest.param(*case, marks=pytest.mark.slow if case[0] == "deepseek_v2" else ()) for case in CASES],
)
def test_forward_and_every_gradient_equal_eager_at_two_shapes(family, pipeline):
    model, eager = pair(family, pipeline)
    for batch, length in ((2, 13), (3, 17)):
        call = ragged(batch, length)
        model.zero_grad()
        eager.zero_grad()
        got, want = model(**call), eager(**call)
        real = call["attention_mask"].bool()
        assert distance(got.logits[real], want.logits[real]) < 2e-6
        assert distance(got.loss, want.loss) < 1e-6
        got.loss.backward()
        want.loss.backward()
        assert worst_gradient(model, eager) < 5e-6
    assert len(session_of(model).graphs) == 1


def test_the_comparison_notices_a_swapped_weight():
    """Sabotage: two parts of a split projection exchanged must be seen in the logits and in the gradients."""
    model, eager = pair("deepseek_v3", "mla-mm-split")
    part = model.model.layers[0].self_attn.kv_b_proj.weight_part0
    with torch.no_grad():
        part.copy_(part.flip(0))
    call = ragged(2, 13)
    got, want = model(**call), eager(**call)
    assert distance(got.logits, want.logits) > 1e-3
    got.loss.backward()
    want.loss.backward()
    assert worst_gradient(model, eager) > 1e-3


@pytest.mark.parametrize(
    ("family", "pipeline", "rule"),
    [
        ("llama", "mla-mm-split", "not-split"),
        ("llama", "mla-absorb", "key-cached-expanded"),
        ("gpt2", "mla-absorb", "key-cached-expanded"),
        ("deepseek_v3", "latent-cache,mla-absorb", "already-least"),
        ("mamba2", "mla-absorb", "nothing to match"),
    ],
)
def test_a_pass_without_a_site_refuses_and_changes_nothing(family, pipeline, rule):
    model = build(family)
    names = {k: id(v) for k, v in model.__dict__.items()}
    parameters = {n: id(p) for n, p in model.named_parameters()}
    with pytest.raises(RefusedError, match=rule) as caught:
        wrap(model, pipeline)
    assert caught.value.remedy
    assert {k: id(v) for k, v in model.__dict__.items()} == names
    assert {n: id(p) for n, p in model.named_parameters()} == parameters
    assert not model._state_dict_hooks
    assert not model._load_state_dict_pre_hooks
