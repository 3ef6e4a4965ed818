"""Mixtures of experts over real processes: whole experts or inner features of all, loss and every gradient as one
process gives them, saved in the library's layout and read in parts."""

from __future__ import annotations

from typing import Any

import pytest

from latentscan.tests.distributed.launch import launch
from latentscan.tests.distributed.test_from_disk import check_reading
from latentscan.tests.distributed.test_tensor_parallel import TOLERANCE, check

SEQUENCE = "tensor-parallel,sequence-parallel"
WHOLE = "tensor-parallel{experts=whole}"
FEATURES = "tensor-parallel{experts=features}"
GROUPED: dict[str, Any] = {"experts": "grouped_mm"}  # products of sorted pairs; by number where it is left out
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0}


def test_whole_experts_on_two_ranks_equal_one_process(tmp_path):
    """Products of sorted pairs, of which each rank computes its own, for tokens that are shared out between regions."""
    case = {"family": "deepseek_v3", "overrides": ONE_LAYER, **GROUPED, "pipeline": SEQUENCE}
    (ranks,) = launch(2, [case], tmp_path)
    check(ranks)
    assert "model.layers.0.mlp.experts" in ranks[0]["sites"]
    layer = 4 * 3 * 32 * 64  # four experts
    assert ranks[0]["held"][0] < ranks[0]["held"][1] - layer // 2


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_whole_experts_equal_one_process(world, tmp_path):
    """With a shared expert, in a hybrid, and with biases and interleaved gates."""
    cases: list[dict[str, Any]] = []
    for family in ("deepseek_v3", "granitemoehybrid", "gpt_oss"):
        for how in ({}, GROUPED):
            cases += [{"family": family, **how, "steps": 2, "do": ["generate"]}]
            cases += [{"family": family, **how, "steps": 2, "pipeline": SEQUENCE}]
    for ranks in launch(world, cases, tmp_path, timeout=1800):
        check(ranks, steps=2)


@pytest.mark.slow
def test_ranks_that_do_not_divide_the_experts(tmp_path):
    """4 experts over 3 ranks: inner features of all, or 2, 1 and 1 of them."""
    cases = [
        {"family": family, **how, "pipeline": text, "do": ["generate"]}
        for family, how, text in (
            ("deepseek_v3", GROUPED, SEQUENCE), ("gpt_oss", GROUPED, "tensor-parallel"),
            ("gpt_oss", {}, "tensor-parallel"), ("deepseek_v3", {}, WHOLE), ("granitemoehybrid", GROUPED, WHOLE),
        )
    ]  # fmt: skip
    for ranks in launch(3, cases, tmp_path, timeout=1800):
        check(ranks)


@pytest.mark.slow
def test_features_can_be_asked_for(tmp_path):
    cases = [{"family": "deepseek_v3", **how, "pipeline": FEATURES} for how in ({}, GROUPED)]
    for ranks in launch(2, cases, tmp_path, timeout=1800):
        check(ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "text"), [(2, "tensor-parallel"), (3, WHOLE), (2, FEATURES)])
def test_experts_are_read_in_parts_and_saved_whole(world, text, tmp_path):
    """A checkpoint has every expert's matrices on their own: only the rank's are read."""
    cases = [
        {
            "family": family, "pipeline": text, "weights": str(tmp_path / family),
            "do": ["generate", f"save:{tmp_path}/saved-{family}", "load", "unwrap"],
        }
        for family in ("deepseek_v3", "granitemoehybrid")
    ]  # fmt: skip
    for ranks in launch(world, cases, tmp_path, timeout=1800):
        check(ranks)
        check_reading(ranks)
        for found in ranks:
            assert found["saved"] < 1e-5
            assert found["names"] == []
            assert found["loaded"] == 0
            assert found["odd"] == []
            assert found["unwrapped"] < 1e-5


@pytest.mark.slow
def test_every_collective_of_a_mixture_is_needed(tmp_path):
    """Sabotage: with any one gone, gradients are wrong by far more than the tolerance."""
    case: dict[str, Any] = {"family": "deepseek_v3", "overrides": ONE_LAYER, **GROUPED}
    ((first, *_),) = launch(2, [case], tmp_path)
    assert first["droppable"] >= 8
    (tmp_path / "again").mkdir()
    cases = [{**case, "drop": number} for number in range(first["droppable"])]
    for number, ranks in enumerate(launch(2, cases, tmp_path / "again", timeout=1800)):
        wrong = max(max(found["gradients"]) for found in ranks)
        assert wrong > 10 * TOLERANCE, (number, wrong)
