"""The training script in ``examples/``, under torchrun: it learns, and goes on after being killed as if it had not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from latentscan.runtime.training_state import MARKER
from latentscan.tests.models import build

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_parallel.py"
STEPS = 6


def start(model: str, out: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    return subprocess.Popen(
        [*command, model, "--out", str(out), "--steps", str(STEPS), "--save-every", "2", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> None:
    try:
        text = process.communicate(timeout=300)[0]
    finally:
        stop(process)
    assert process.returncode == 0, text[-3000:]


def stop(process: subprocess.Popen[str]) -> None:
    """Kill torchrun and its ranks, which are a session of their own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def losses(out: Path) -> dict[int, float]:
    """The last loss that was written of every step."""
    lines = (out / "losses.jsonl").read_text().splitlines()
    return {told["step"]: told["loss"] for told in map(json.loads, lines)}


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path):
    model = tmp_path / "model"
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 72}
    build("llama", **heads).save_pretrained(model)  # type: ignore[operator]
    finish(start(str(model), tmp_path / "unbroken", "--data", str(SCRIPT), "--mesh", "tp=2"))
    wanted = losses(tmp_path / "unbroken")
    assert sorted(wanted) == list(range(STEPS))
    assert wanted[STEPS - 1] < wanted[0] - 0.1  # it learns

    out = tmp_path / "killed"
    killed = start(str(model), out, "--data", str(SCRIPT), "--mesh", "tp=2")
    try:
        deadline = time.monotonic() + 240
        while not (out / "losses.jsonl").is_file() or max(losses(out), default=0) < 2:
            assert killed.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        stop(killed)
    assert max(losses(out)) < STEPS - 1
    saved = json.loads((out / "state" / MARKER).read_text())["extra"]["step"]
    assert 2 <= saved < STEPS
    shutil.copytree(out, tmp_path / "moved")
    finish(start(str(model), out, "--data", str(SCRIPT), "--mesh", "tp=2"))
    assert losses(out) == wanted  # bit for bit
    assert (out / "model" / "model.safetensors").is_file()

    words = ("--mesh", "dp=2", "--pipeline", "", "--data-parallel", "fsdp")
    finish(start(str(model), tmp_path / "moved", "--data", str(SCRIPT), *words))
    moved = losses(tmp_path / "moved")
    assert max(abs(moved[step] - wanted[step]) for step in wanted) < 2e-2  # bfloat16 rounds other sums
