"""Starts a worker on several gloo processes of this machine, and is what such a worker runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from latentscan.ir.errors import LatentscanError


def launch(
    world: int, cases: list[dict[str, Any]], folder: Path, *, timeout: float = 900, worker: str = "worker"
) -> list[list[dict[str, Any]]]:
    """Run cases (see :mod:`worker`) one after the other on ``world`` processes.

    Returns:
        for each case what each rank found.
    """
    folder.mkdir(exist_ok=True)
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


def serve(run: Callable[[dict[str, Any], int, int], Any], expected: type[Exception] = LatentscanError) -> None:
    """A worker's main: every case of the command line through ``run(case, rank, world)``; what it gives, or the error
    that was expected, goes to the rank's file."""
    import torch
    import torch.distributed as dist

    rank, world, rendezvous, result, cases = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    results = []
    for case in json.loads(cases):
        try:
            results.append(run(case, rank, world))
        except expected as error:
            results.append({"error": type(error).__name__, "text": str(error)})
        torch._dynamo.reset()
    with open(f"{result}.{rank}", "w", encoding="utf-8") as file:
        json.dump(results, file)
    dist.barrier()
    dist.destroy_process_group()
