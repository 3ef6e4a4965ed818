"""What training scripts do with a split model, in one order and another: everything as one process gives it."""

from __future__ import annotations

from typing import Any

import pytest

from latentscan.tests.distributed.launch import launch
from latentscan.tests.distributed.test_tensor_parallel import LLAMA, TOLERANCE

PARALLEL = "tensor-parallel"
SEQUENCE = "tensor-parallel,sequence-parallel"
# Lengths that two ranks do not divide, at most one token for each rank before and after longer ones, one row and more.
SCRIPT: list[list[Any]] = [
    ["step", 2, 13], ["generate", 2, 7], ["loss", 3, 5], ["step", 3, 6, 1, 11], ["grad", 2, 8], ["recompute"],
    ["step", 2, 9], ["keep"], ["clip"], ["step", 1, 2], ["generate", 1, 1], ["step", 4, 3], ["embeds", 2, 7],
    ["generate", 1, 2], ["step", 2, 13], ["generate", 3, 9],
]  # fmt: skip
SHORT: list[list[Any]] = [["step", 2, 13], ["generate", 2, 7], ["step", 3, 9, 1, 4], ["loss", 2, 3]]


def go(world: int, cases: list[dict[str, Any]], folder: Any) -> list[list[dict[str, Any]]]:
    return launch(world, cases, folder, timeout=1800, worker="habits_worker")


def check(ranks: list[dict[str, Any]], bound: float = TOLERANCE) -> None:
    for found in ranks:
        assert "error" not in found, found
        for told in found["done"]:
            assert [action for action, error in told if not error < bound] == [], told
        assert max(found["apart"]) < bound


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [PARALLEL, SEQUENCE])
@pytest.mark.parametrize("family", ["llama", "mamba2", "deepseek_v3"])
def test_everything_a_script_does_between_two_steps(family, pipeline, tmp_path):
    """Generation, evaluation, accumulation, checkpointing, clipping, embedded inputs; no graph is used for a length
    that it is wrong for."""
    (ranks,) = go(2, [{"models": [{"family": family}], "pipeline": pipeline, "script": SCRIPT}], tmp_path)
    check(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
def test_uneven_heads_and_short_calls_on_more_ranks(world, tmp_path):
    cases = [
        {"models": [model], "pipeline": text, "script": [*SHORT, ["generate", 1, 3], ["step", 2, 2], ["step", 2, 13]]}
        for model in (LLAMA, {"family": "mamba2"})
        for text in (PARALLEL, SEQUENCE)
    ]
    for ranks in go(world, cases, tmp_path):
        check(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mamba2"])
@pytest.mark.parametrize("pipeline", [PARALLEL, f"{SEQUENCE},overlap-collectives"])
def test_inductor(family, pipeline, tmp_path):
    case = {"models": [{"family": family}], "pipeline": pipeline, "inductor": True}
    (ranks,) = go(
        2, [{**case, "script": [["step", 2, 13], ["step", 3, 9], ["generate", 2, 7], ["step", 2, 11]]}], tmp_path
    )
    check(ranks)


@pytest.mark.slow
def test_several_models_in_one_process(tmp_path):
    models = [{"family": "llama"}, {"family": "qwen2"}, {"family": "llama"}]
    (ranks,) = go(2, [{"models": models, "pipeline": SEQUENCE, "script": SHORT}], tmp_path)
    check(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "features", "auto"])
def test_experts_of_each_kind(how, tmp_path):
    cases = [
        {"models": [{"family": family, "experts": "grouped_mm"}], "pipeline": f"{PARALLEL}{{experts={how}}}"}
        for family in ("deepseek_v3", "granitemoehybrid", "gpt_oss")
    ]
    for ranks in go(2, [{**case, "script": SHORT} for case in cases], tmp_path):
        check(ranks)


@pytest.mark.slow
def test_autocast(tmp_path):
    """bfloat16 sums in another order: some roundings of 2^-8."""
    script = [["autocast", 2, 13], ["step", 2, 9], ["autocast", 3, 7]]
    for ranks in go(
        2, [{"models": [{"family": "llama"}], "pipeline": t, "script": script} for t in (PARALLEL, SEQUENCE)], tmp_path
    ):
        check(ranks, 0.1)


@pytest.mark.slow
def test_dropout_of_what_all_ranks_hold_is_that_of_one_process_or_an_error(tmp_path):
    """With other seeds each rank would drop other elements of the same values, and say nothing."""
    opt: dict[str, Any] = {"models": [{"family": "opt"}], "script": [*SHORT, ["recompute"], ["step", 2, 9]]}
    cases = [{**opt, "pipeline": SEQUENCE}, {**opt, "pipeline": PARALLEL, "apart": 0}, {**opt, "apart": 2}]
    same, apart, later = go(2, cases, tmp_path)
    check(same)
    for ranks, at in ((apart, "step 2 13"), (later, "step 3 9 1 4")):
        for found in ranks:
            assert (found["error"], found["at"]) == ("MeshError", at)
            assert "rank 1 of tp would draw other random numbers than rank 0" in found["text"]
            assert "torch.manual_seed" in found["text"]


@pytest.mark.slow
def test_ranks_may_draw_apart_where_nothing_is_dropped(tmp_path):
    """The model trains and every module with a dropout is in evaluation, after steps that dropped; in training again
    the same ranks are told."""
    script = [["step", 2, 13], ["still"], ["step", 2, 13], ["step", 2, 9], ["loss", 2, 5], ["step", 2, 13]]
    cases = [
        {"models": [{"family": "opt"}], "pipeline": PARALLEL, "apart": 2, "script": n} for n in (script[:4], script)
    ]
    still, again = go(2, cases, tmp_path)
    check(still)
    for found in again:
        assert (found["error"], found["at"]) == ("MeshError", "step 2 13")
        assert len(found["done"][0]) == 5 and "other random numbers" in found["text"]


@pytest.mark.slow
def test_a_rank_that_alone_freezes_weights_after_wrap_is_told(tmp_path):
    """Before the first step and after one; the others would wait for its backward pass until the time-out."""
    scripts = [["freeze"], ["step", 2, 13]], [["step", 2, 13], ["freeze"], ["step", 2, 13]]
    cases = [{"models": [{"family": "llama"}], "pipeline": SEQUENCE, "script": s} for s in scripts]
    for ranks in go(2, cases, tmp_path):
        for found in ranks:
            assert (found["error"], found["at"]) == ("MeshError", "step 2 13")
            assert "other weights train on rank 1 of tp than on rank 0: model.layers.0.input_layernorm" in found["text"]


@pytest.mark.slow
def test_biases_that_train_alone(tmp_path):
    """All of them, or those of sums over the ranks; frozen after wrap, every rank says so."""
    gpt2: dict[str, Any] = {"models": [{"family": "gpt2", "overrides": {"attn_pdrop": 0.0}}], "pipeline": PARALLEL}
    neox: dict[str, Any] = {"models": [{"family": "gpt_neox"}], "pipeline": f"{SEQUENCE},overlap-collectives"}
    rows = ["c_proj.bias", "dense.bias", "dense_4h_to_h.bias"]
    for case in (gpt2, neox):
        folder = tmp_path / case["models"][0]["family"]
        cases = [{**case, "trained": ["bias"], "script": SHORT}, {**case, "trained": rows, "script": SHORT}]
        for ranks in go(2, cases, folder):
            check(ranks)
    (late,) = go(2, [{**gpt2, "trained": ["bias"], "late": True, "script": SHORT}], tmp_path / "late")
    for found in late:
        assert found["error"] == "RefusedError"
        assert "freeze the weight before wrap" in found["text"].lower()


@pytest.mark.slow
def test_masks_for_each_head(tmp_path):
    (ranks,) = go(2, [{"models": [{"family": "mpt"}], "pipeline": SEQUENCE, "script": SHORT}], tmp_path)
    check(ranks)


@pytest.mark.slow
def test_scheduled_collectives_beside_other_attention_and_under_inductor(tmp_path):
    """gpt2's heads are a symbol there; of a graph from Inductor's cache one rank would not compare the order."""
    gpt2 = {"models": [{"family": "gpt2", "overrides": {"attn_pdrop": 0.0}}], "script": SHORT}
    neox = {"models": [{"family": "gpt_neox", "overrides": {"num_hidden_layers": 2}}], "trained": ["bias"]}
    cases = [
        {**gpt2, "pipeline": f"{PARALLEL},overlap-collectives"},
        {**neox, "pipeline": f"{SEQUENCE},overlap-collectives", "inductor": True, "script": [["step", 2, 13]]},
    ]
    for ranks in go(2, cases, tmp_path):
        check(ranks)


@pytest.mark.slow
def test_ranks_that_sample_other_tokens_are_told(tmp_path):
    case = {"models": [{"family": "llama"}], "pipeline": PARALLEL, "script": [["sample", 2, 7]]}
    (ranks,) = go(2, [case], tmp_path)
    assert [found["error"] for found in ranks] == ["MeshError"] * 2
    assert all("holding" in found["text"] for found in ranks)
