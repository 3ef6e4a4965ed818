"""State-space and hybrid families wrapped: forward and gradients as eager, shared blocks included."""

from __future__ import annotations

import pytest

from latentscan.runtime.door import session_of
from latentscan.tests.runtime.helpers import distance, pair, tokens, worst_gradient

FAST = ("mamba", "mamba2", "bamba", "zamba2")
SLOW = ("falcon_h1", "nemotron_h", "granitemoehybrid", "jamba", "falcon_mamba")


@pytest.mark.parametrize("family", [*FAST, *(pytest.param(f, marks=pytest.mark.slow) for f in SLOW)])
def test_state_space_families_equal_eager(family):
    model, eager = pair(family, "")
    for batch, length in ((2, 21), (3, 37)):
        call = {"input_ids": tokens(batch, length), "labels": tokens(batch, length)}
        model.zero_grad()
        eager.zero_grad()
        got, want = model(**call), eager(**call)
        assert distance(got.logits, want.logits) < 5e-6
        got.loss.backward()
        want.loss.backward()
        assert worst_gradient(model, eager) < 2e-4  # tiny gradients of dt_bias and A_log, summed in another order
    assert len(session_of(model).graphs) == 1


def test_a_shared_block_is_counted_once_and_trained_through_all_its_uses():
    model, eager = pair("zamba2", "")
    shared = [n for n, p in eager.named_parameters(remove_duplicate=False) if p is eager.get_parameter(n)]
    twice = len(shared) - len(list(eager.parameters()))
    assert twice > 0, "zamba2 no longer shares a block: this test needs another family"
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in eager.named_parameters()]
    assert [n for n, _ in model.named_parameters(remove_duplicate=False)] == shared
    ids = tokens(2, 21)
    model(ids, labels=ids).loss.backward()
    eager(ids, labels=ids).loss.backward()
    assert worst_gradient(model, eager) < 2e-4
