"""Starts the worker on several gloo processes of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def launch(
    world: int, cases: list[dict[str, Any]], folder: Path, *, timeout: float = 900, worker: str = "worker"
) -> list[list[dict[str, Any]]]:
    """Run cases (see :mod:`worker`) one after the other on ``world`` processes.

    Returns:
        for each case what each rank found.
    """
    result = folder / "result.json"
    command = [sys.executable, "-m", f"latentscan.tests.distributed.{worker}"]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder / "rendezvous"), str(result), json.dumps(cases)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        for rank in range(world)
    ]
    try:
        output = [w.communicate(timeout=timeout)[0] for w in workers]
    finally:
        for w in workers:
            w.kill()
    assert [w.returncode for w in workers] == [0] * world, "\n".join(o[-3000:] for o in output)
    every = [json.loads(Path(f"{result}.{rank}").read_text(encoding="utf-8")) for rank in range(world)]
    return [list(ranks) for ranks in zip(*every, strict=True)]
