"""Context parallelism with real processes (gloo): losses and every gradient equal to one process, and sabotages."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

HYBRID = "pipeline=mamba-context-parallel,ulysses"
# fp32 sums over at most 24 tokens, 3 SGD steps and 2 layers: rounding is 1e-6 to 1e-5; every sabotage is over 1e-2.
TOLERANCE = 5e-5


def ranks(tmp_path, size: int, family: str, *words: str) -> list[dict]:
    """What each rank found; all output in the error if one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = tmp_path / "out.json"
    base = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    command = [sys.executable, "-m", "latentscan.tests.distributed.context_parallel_worker", family, str(out), *words]
    logs = [(tmp_path / f"log{r}").open("w+") for r in range(size)]
    running = [
        subprocess.Popen(command, env=base | {"RANK": str(r)}, stdout=log, stderr=subprocess.STDOUT)
        for r, log in enumerate(logs)
    ]
    try:
        codes = [p.wait(timeout=300) for p in running]
    finally:
        for p in running:
            p.kill()
    if any(codes):
        text = []
        for log in logs:
            log.seek(0)
            text.append(log.read()[-1500:])
        pytest.fail("\n".join(text))
    return json.loads(out.read_text())


def check(found: list[dict]) -> None:
    assert all(f["names"] for f in found)
    assert max(f["loss"] for f in found) < TOLERANCE
    assert max(f["gradient"] for f in found) < TOLERANCE, found[0]["where"]


@pytest.mark.parametrize("words", [(), ("packed",)])
def test_two_ranks_train_mamba2_as_one_process_does(tmp_path, words):
    check(ranks(tmp_path, 2, "mamba2", *words))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "family", "words"),
    [
        (3, "mamba2", ()),
        (4, "mamba2", ()),
        (3, "mamba2", ("packed",)),
        (2, "bamba", (HYBRID, "packed")),
        (4, "mamba2", ("mesh=cp=2,tp=2", "pipeline=tensor-parallel,mamba-context-parallel")),
        (2, "bamba", (HYBRID,)),
        (2, "nemotron_h", (HYBRID,)),
        (2, "falcon_h1", (HYBRID,)),
        (2, "zamba2", (HYBRID,)),
        (2, "llama", ("pipeline=ulysses",)),
        (4, "llama", ("pipeline=ulysses",)),  # KV heads go to two ranks each
    ],
)
def test_more_ranks_and_families(tmp_path, size, family, words):
    check(ranks(tmp_path, size, family, *words))


@pytest.mark.slow
@pytest.mark.parametrize("dropped", ["copy_to", "sum_partial", "tail", "state"])
def test_a_dropped_collective_is_seen(tmp_path, dropped):
    found = ranks(tmp_path, 2, "mamba2", f"drop={dropped}")
    assert max(max(f["loss"], f["gradient"]) for f in found) > 1e-2
