"""Each rank reads its own part of a model's files, and holds nothing else meanwhile; training goes on as ever."""

from __future__ import annotations

from typing import Any

import pytest

from latentscan.tests.distributed.launch import launch
from latentscan.tests.distributed.test_tensor_parallel import LLAMA, check
from latentscan.tests.runtime.helpers import NO_DROPOUT

SPLIT = "mla-mm-split,mla-absorb,tensor-parallel"


def check_reading(ranks: list[dict[str, Any]], above: int = 0) -> None:
    """Args: above: bytes of sources that a rewrite needs whole, which are read by every rank."""
    for found in ranks:
        mine, whole = found["bytes"]
        assert mine < whole
        assert found["bytes_read"] <= mine + found["stored_buffers"] + above
        # What is held in the end, and while it is filled one source and what is copied from the file at a time.
        assert found["peak"] <= mine + 2 * found["largest"] + above
        assert found["peak"] > mine / 2  # that it counts at all


def test_ranks_read_their_parts_of_sharded_files(tmp_path):
    folder = str(tmp_path / "model")
    (ranks,) = launch(2, [{**LLAMA, "weights": folder}], tmp_path)
    check(ranks)
    check_reading(ranks)
    replicated = 5 * 72 * 4  # the norms
    assert sum(f["bytes_read"] for f in ranks) == ranks[0]["bytes"][1] + replicated


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "families",
    [("qwen2", "gpt_neox", "deepseek_v3", "gpt2"), ("mamba2", "bamba", "granitemoehybrid")],
    ids=["attention", "mamba"],
)
def test_families_are_read_in_parts(world, families, tmp_path):
    cases = [
        {"family": f, "overrides": NO_DROPOUT.get(f, {}), "weights": str(tmp_path / f), "do": ["generate"]}
        for f in families
    ]
    for ranks in launch(world, cases, tmp_path, timeout=1800):
        check(ranks)
        check_reading(ranks)


@pytest.mark.slow
def test_reading_whole_weights_is_noticed(tmp_path):
    (ranks,) = launch(2, [{**LLAMA, "weights": str(tmp_path / "model"), "whole": True}], tmp_path)
    check(ranks)  # right all the same
    for found in ranks:
        assert found["bytes_read"] > 1.5 * found["bytes"][0]
        with pytest.raises(AssertionError):
            check_reading([found])


@pytest.mark.slow
def test_rewritten_weights_are_made_and_split_one_after_the_other(tmp_path):
    """The up-projections are read whole, for they are split by heads after another pass made two of each."""
    case = {"family": "deepseek_v3", "pipeline": SPLIT, "weights": str(tmp_path / "model"), "do": ["generate"]}
    (ranks,) = launch(2, [case], tmp_path)
    check(ranks)
    check_reading(ranks, above=2 * 4 * (16 * 4 * 32 + 32 * 4 * 24))
