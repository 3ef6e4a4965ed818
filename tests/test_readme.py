"""The README's snippets run as they stand."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def installed() -> bool:
    names = {e.name for e in importlib.metadata.entry_points(group="torch_dynamo_backends")}
    return "latentscan" in names


def test_there_are_three_doors() -> None:
    assert len(blocks("python")) == 2 and len(blocks("sh")) == 1


def test_nothing_was_left_to_fill_in() -> None:
    assert not re.findall(r"@[A-Z_]+@", README)


@pytest.mark.parametrize("number", [0, 1])
def test_a_python_snippet_runs(number: int) -> None:
    code = blocks("python")[number]
    if "backend=" in code and not installed():
        pytest.skip("the package is not installed, so its entry point is unknown")
    exec(compile(code, f"README snippet {number}", "exec"), {"__name__": "readme"})


PRELUDE = """
import torch, torch.distributed, latentscan
from latentscan.runtime.tiny import build
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
model, ids = build("mamba2", num_hidden_layers=1).train(), torch.randint(3, 90, (2, 16))
torch.distributed.broadcast(ids, 0)
batches = [{"input_ids": ids, "labels": ids}] * 2
"""


@pytest.mark.slow
def test_the_snippet_for_several_processes_runs(tmp_path: Path) -> None:
    (snippet,) = blocks("py")
    script = tmp_path / "train.py"
    script.write_text(PRELUDE + snippet + "\nassert torch.isfinite(loss)\ntorch.distributed.destroy_process_group()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_commands_run(tmp_path: Path) -> None:
    for line in blocks("sh")[0].strip().splitlines():
        words = shlex.split(line)
        assert words[0] == "latentscan"
        done = subprocess.run(
            [sys.executable, "-I", "-c", "import sys; sys.path[:0] = eval(sys.argv.pop(1)); "
             "from latentscan.tools.cli import main; main()", repr(sys.path), *words[1:]],
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
