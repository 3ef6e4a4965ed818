"""Training on meshes with real processes: data, tensor and context parallelism together, checkpoints, clipping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from latentscan.tests.distributed.launch import launch
from latentscan.tests.distributed.test_tensor_parallel import LLAMA, TOLERANCE

TP: dict[str, Any] = {"pipeline": "tensor-parallel", "clip": 0.1}


def train(world: int, cases: list[dict[str, Any]], folder: Path) -> list[list[dict[str, Any]]]:
    return launch(world, cases, folder, worker="training_worker", timeout=900)


def check(ranks: list[dict[str, Any]], steps: int = 2) -> None:
    """Losses near 5 and norms in fp32: some roundings of sums of 1e5 terms. AdamW's eps of 1e-4 keeps weights near."""
    for found in ranks:
        assert "error" not in found, found
        assert len(found["losses"]) == steps
        assert max(found["losses"]) < 1e-5
        assert max(found["gradients"]) < TOLERANCE
        assert max(found["norms"]) < 1e-5
        assert found["weights"] < 1e-5
        assert found.get("exported", 0.0) < 1e-5


def check_memory(ranks: list[dict[str, Any]], tp: int, dp: int = 1) -> None:
    """What is split is held once over the ranks of tp, whatever it is for; dp: ranks that cut it again."""
    whole = ranks[0]["bytes_of_one"][1]
    total = ranks[0]["split"][0]
    for found in ranks:
        mine = found["split"][1] + whole - total  # this rank's parts, and what all ranks of tp hold
        for what, times in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
            assert found["bytes"][what] == pytest.approx(times * mine / dp, rel=0.02 if dp > 1 else 1e-9)
    assert sum(f["split"][1] for f in ranks[:tp]) == total


def test_data_parallel_means_are_over_tokens_not_over_ranks(tmp_path):
    case = {"family": "llama", "mesh": "dp=2", "clip": 0.1, "stop": 2}
    whole, apart = train(2, [{**case, "parallel": "fsdp3"}, case], tmp_path)
    check(whole)
    check_memory(whole, tp=1, dp=2)
    assert min(max(found["gradients"]) for found in apart) > 100 * TOLERANCE  # sabotage: nothing averages


@pytest.mark.slow
def test_what_is_split_is_held_once_in_weights_gradients_and_optimiser(tmp_path):
    ranks = train(2, [{"family": f, "mesh": "tp=2", "stop": 1, **TP} for f in ("llama", "qwen2", "mamba2")], tmp_path)
    for found in ranks:
        check(found, steps=1)
        check_memory(found, tp=2)
        total = found[0]["bytes_of_one"][1]
        assert found[0]["split"][0] > 0.98 * total  # nearly everything is


@pytest.mark.slow
def test_data_and_tensor_parallelism_in_one_mesh(tmp_path):
    both = {"mesh": "dp=2,tp=2", "stop": 2, **TP}
    cases: list[dict[str, Any]] = [
        {**LLAMA, **both, "parallel": "ddp", "export": str(tmp_path / "llama")},
        {"family": "qwen2", **both, "parallel": "zero1"},
        {"family": "mamba2", **both, "parallel": "fsdp2", "export": str(tmp_path / "mamba2")},
        {"family": "deepseek_v3", **both, "parallel": "fsdp3"},
        {"family": "llama", **both, "parallel": "fsdp3", "pipeline": "tensor-parallel,sequence-parallel"},
    ]
    found = train(4, cases, tmp_path)
    for ranks in found:
        check(ranks)
    for ranks, (weights, state) in zip(found, ((1, 1), (1, 2), (2, 2), (2, 2), (2, 2)), strict=True):
        mine = ranks[0]["bytes"]
        assert mine["optimizer"] == pytest.approx(2 * mine["parameters"] * weights / state, rel=0.1)


@pytest.mark.slow
def test_data_and_context_parallelism_in_one_mesh(tmp_path):
    case = {"family": "mamba2", "mesh": "dp=2,cp=2", "pipeline": "mamba-context-parallel", "stop": 2, "clip": 0.1}
    for ranks in train(4, [{**case, "parallel": "ddp"}, {**case, "parallel": "fsdp3"}], tmp_path):
        check(ranks)


@pytest.mark.slow
def test_clipping_counts_what_several_ranks_hold_once(tmp_path):
    """9 query and 3 KV heads over 4 ranks: KV heads are held twice, norms four times."""
    (ranks,) = train(4, [{**LLAMA, "mesh": "tp=4", "stop": 2, **TP}], tmp_path)
    check(ranks)
    assert all(found["naive"] > 1e-2 for found in ranks)  # each rank's own norm is another


@pytest.mark.slow
def test_training_goes_on_on_another_mesh(tmp_path):
    """tp=2, then 4, 3 and one process: losses and gradients stay those of one unbroken run.

    gpt_neox has row biases, mamba2 components of one weight that are split apart, deepseek_v3 rewritten weights.
    """
    families: list[dict[str, Any]] = [
        LLAMA, {"family": "gpt_neox"}, {"family": "mamba2"},
        {"family": "deepseek_v3", "pipeline": "mla-mm-split,tensor-parallel"},
    ]  # fmt: skip
    meshes = [(2, "tp=2"), (4, "dp=2,tp=2"), (3, "tp=3"), (1, "tp=1")]
    for at, (world, mesh) in enumerate(meshes):
        cases = []
        for family in families:
            case = {**TP, **family, "mesh": mesh, "start": at, "stop": at + 1}
            case["save"] = f"{tmp_path}/{at}-{family['family']}"
            if at:
                case["load"] = f"{tmp_path}/{at - 1}-{family['family']}"
            if world == 1:
                case |= {"pipeline": case["pipeline"].replace("tensor-parallel", "").rstrip(","), "mesh": "dp=1"}
            if "dp=2" in mesh:
                case["parallel"] = "fsdp3" if family["family"] == "mamba2" else "zero1"
            cases.append(case)
        for ranks in train(world, cases, tmp_path / f"run{at}"):
            check(ranks, steps=1)
            assert all(found["extra"] == ({"step": at} if at else None) for found in ranks)
