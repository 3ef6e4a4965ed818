"""Wrapped models under DDP and FSDP2: two gloo processes give what one process gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def two_processes(mode: str, folder: Path) -> dict[str, Any]:
    """Run the worker twice; what rank 0 saw."""
    result = folder / "result.json"
    command = [sys.executable, "-m", "latentscan.tests.runtime.distributed_worker", mode]
    workers = [
        subprocess.Popen(
            [*command, str(rank), "2", str(folder / "rendezvous"), str(result)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        for rank in range(2)
    ]
    try:
        output = [w.communicate(timeout=240)[0] for w in workers]
    finally:
        for w in workers:
            w.kill()
    assert [w.returncode for w in workers] == [0, 0], "\n".join(o[-3000:] for o in output)
    return json.loads(result.read_text(encoding="utf-8"))


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_training_equals_one_process(mode, tmp_path):
    found = two_processes(mode, tmp_path)
    assert max(found["losses"]) < 1e-5
    assert found["gradients"][0] < 5e-6
    assert max(found["gradients"]) < 1e-3  # AdamW lifts rounding of the smallest gradients
    assert found["weights"] < 1e-3
    assert found["eval"] < 1e-5
    assert found["same_names"]
    assert found["graphs"] == 2
    if mode == "ddp":
        assert found["names"] == []
    else:  # sharded: the split weights stay split, and load back
        assert len(found["names"]) == 8
        assert all("_part" in name for name in found["names"])
        assert found["loads"]


@pytest.mark.slow
def test_the_comparison_notices_gradients_that_were_not_reduced(tmp_path):
    """Sabotage: a step under no_sync keeps each rank's own gradients."""
    assert two_processes("ddp-unsynchronised", tmp_path)["gradients"][0] > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp-layers", "fsdp-only-layers"])
def test_layers_sharded_on_their_own_are_refused(mode, tmp_path):
    found = two_processes(mode, tmp_path)
    assert found["error"] == "RefusedError"
    assert "fully_shard(model) once" in found["text"]


def test_a_graph_that_ddp_cuts_in_pieces_is_refused(tmp_path):
    found = two_processes("plain-split", tmp_path)
    assert found["error"] == "RefusedError"
    assert "optimize_ddp" in found["text"]


@pytest.mark.slow
def test_the_plain_door_works_under_ddp_in_one_piece(tmp_path):
    assert two_processes("plain-whole", tmp_path)["gradients"] < 5e-6
