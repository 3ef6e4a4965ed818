"""The Mamba Triton kernels: under the interpreter, and compiled for GPUs that are not here; each in its own process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "kernels-mamba.md"


def run(*command: str, interpret: bool, tmp_path: Path) -> str:
    """Standard output of a Python command; TRITON_INTERPRET counts when triton is first imported, so not in here."""
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def interpreted(path: Path, marks: str, tmp_path: Path) -> int:
    """Run a file of tests under the interpreter; how many passed."""
    arguments = ("-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-m", marks, str(path))
    told = run("-m", "pytest", *arguments, interpret=True, tmp_path=tmp_path)
    found = re.search(r"(\d+) passed", told)
    assert found is not None, told
    return int(found[1])


def test_kernels_equal_the_fp64_references(tmp_path):
    assert interpreted(HERE / "interpreted_mamba.py", "not slow", tmp_path) >= 20


@pytest.mark.slow
def test_kernels_equal_the_fp64_references_on_more_shapes(tmp_path):
    assert interpreted(HERE / "interpreted_mamba.py", "slow", tmp_path) >= 60


@pytest.mark.slow
def test_models_run_on_the_kernels(tmp_path):
    assert interpreted(HERE.parent / "lowering" / "interpreted_triton_mamba.py", "slow or not slow", tmp_path) >= 9


def test_every_shipped_choice_compiles_and_the_table_of_registers_is_current(tmp_path):
    import triton

    told = json.loads(run("-m", "latentscan.tests.kernels.mamba_aot", interpret=False, tmp_path=tmp_path))
    rows = told["rows"]
    assert {row["sm"] for row in rows} == {80, 90}
    assert {row["kernel"] for row in rows} >= {"forward", "backward", "update", "local", "pass", "output", "walk"}
    room = {80: 163 << 10, 90: 227 << 10}  # bytes of shared memory that a block may have
    assert all(row["registers"] <= 255 and row["shared"] <= room[row["sm"]] for row in rows)
    spilling = {(row["call"], row["sm"]): row["local"] for row in rows if row["local"] > 16}  # a scalar or two may
    assert not spilling
    # Registers belong to a version of Triton and its ptxas: the table is of one version.
    written = DOCUMENT.read_text()
    if f"Triton {triton.__version__}," in written:
        assert told["table"] in written, "renew it: python -m latentscan.tests.kernels.mamba_aot --write"


@pytest.mark.slow
def test_sizes_of_one_compile(tmp_path):
    """Triton makes constants of sizes and strides of one, which then are no tensors inside a kernel."""
    told = run("-m", "latentscan.tests.kernels.mamba_aot", "--smallest", interpret=False, tmp_path=tmp_path)
    assert int(told) >= 60
