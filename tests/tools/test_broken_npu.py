"""The command beside a torch_npu that breaks at import: it tells so in a line and does what needs no NPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BROKEN = {
    "import": "raise ImportError('libhccl.so: cannot open shared object file')",
    "runtime": "raise RuntimeError('CANN is missing')",
    "attribute": "import torch\ntorch._C._npu_init",
    "exit": "raise SystemExit('source set_env.sh first')",
}


def command(folder: Path, source: str, *arguments: str, autoload: bool) -> subprocess.CompletedProcess[str]:
    """Run the command where a torch_npu of that source is installed, with (autoload) the entry point torch loads."""
    (folder / "torch_npu").mkdir(parents=True)
    (folder / "torch_npu" / "__init__.py").write_text(source)
    if autoload:
        about = folder / "torch_npu-2.13.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13\n")
        (about / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    path = ":".join([str(folder), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "-m", "latentscan", *arguments],
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["runtime", *(pytest.param(k, marks=pytest.mark.slow) for k in BROKEN if k != "runtime")]
)
def test_planning_and_emitting_go_on_without_it(kind, tmp_path):
    done = command(tmp_path, BROKEN[kind], "emit", "tiny:mamba2", "--out", "out", autoload=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (told,) = [line for line in done.stderr.splitlines() if "torch_npu" in line]
    assert (
        told.startswith("latentscan: torch_npu is installed and cannot be imported (")
        and "Traceback" not in done.stderr
    )
    assert (tmp_path / "out" / "latentscan-emit.json").is_file()


@pytest.mark.slow
def test_it_is_told_without_an_entry_point_too_where_transformers_would_import_it(tmp_path):
    done = command(tmp_path, BROKEN["import"], "plan", "tiny:llama", autoload=False)
    assert (done.returncode, done.stderr.count("libhccl.so")) == (0, 1), done.stderr[-2000:]


def test_help_imports_nothing_of_it(tmp_path):
    done = command(tmp_path, "import os\nos._exit(7)", "--help", autoload=True)
    assert (done.returncode, done.stderr) == (0, "")
