"""A rank that fails in the middle of a step: the others end with an error that says where, and do not hang."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SECONDS = 15.0
ANSWER = 5.0  # how long a rank waits for the others to say where they are


def failed(folder: Path, world: int, pipeline: str, what: str) -> list[dict[str, Any]]:
    """What each rank but the last ended with."""
    result = folder / "result.json"
    command = [sys.executable, "-m", "latentscan.tests.distributed.failing_worker"]
    workers = [
        subprocess.Popen(
            [*command, str(r), str(world), str(folder / "rendezvous"), str(result), pipeline, str(SECONDS), what],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        for r in range(world)
    ]
    try:
        output = [w.communicate(timeout=600)[0] for w in workers]
    finally:
        for w in workers:
            w.kill()
    files = [Path(f"{result}.{r}") for r in range(world - 1)]
    assert all(f.exists() for f in files), "\n".join(o[-3000:] for o in output)
    return [json.loads(f.read_text(encoding="utf-8")) for f in files]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "pipeline", "what", "reason"),
    [
        (2, "tensor-parallel", "kill", "another rank ended"),
        (3, "tensor-parallel,overlap-collectives", "kill", "another rank ended|did not come in time"),
        (2, "tensor-parallel,overlap-collectives", "late", "the others did not come in time"),
        (3, "tensor-parallel", "late", "the others did not come in time"),
    ],
)
def test_the_others_end_in_time_and_say_where_they_waited(world, pipeline, what, reason, tmp_path):
    for rank, found in enumerate(failed(tmp_path, world, pipeline, what)):
        assert found["error"] == "MeshError", found
        assert found["seconds"] < SECONDS + ANSWER + 10
        text = found["text"]
        assert re.search(reason, text), text
        assert f"rank {rank} waited at all_reduce for lm_head, collective " in text  # the backward's first sum
        assert f"rank {world - 1} gave no sign" in text
        for other in {0, 1} - {rank, world - 1} if what == "late" else ():
            assert f"rank {other} waits at all_reduce for lm_head, collective " in text
