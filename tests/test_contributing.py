"""The examples of CONTRIBUTING.md run, and pass ruff like everything else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from latentscan.tests import layout

GUIDE = layout.ROOT / "CONTRIBUTING.md"

pytestmark = pytest.mark.skipif(not GUIDE.exists(), reason="needs the repository: runs from an installed package")

# Each example becomes the module that its first line names; then every test function among them is called. In a process
# of its own, because an op cannot be unregistered.
RUN = """
import sys, types
ran = 0
for path, source in EXAMPLES:
    module = types.ModuleType("latentscan." + path.removesuffix(".py").replace("/", "."))
    sys.modules[module.__name__] = module
    exec(compile(source, path, "exec"), module.__dict__)
    for name, function in list(vars(module).items()):
        if name.startswith("test_"):
            function()
            ran += 1
print("ran", ran)
"""


def examples() -> list[tuple[str, str]]:
    """(path, source) of each file that the guide shows."""
    return re.findall(r"```python\n# (\S+)\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def run(shown: list[tuple[str, str]]) -> subprocess.CompletedProcess[str]:
    script = RUN.replace("EXAMPLES", repr(shown))
    return subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True)


def test_the_examples_run():
    shown = examples()
    done = run(shown)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ran", str(sum(source.count("\ndef test_") for _, source in shown))]
    assert done.stdout.split() != ["ran", "0"]


def test_a_wrong_example_fails():
    wrong = [(path, source.replace("2 * grad", "3 * grad")) for path, source in examples()]
    assert wrong != examples()
    assert run(wrong).returncode != 0


def test_the_examples_keep_the_rules_of_the_house(tmp_path: Path):
    for path, source in examples():
        assert layout.check_source(source, path) == []
        (tmp_path / Path(path).name).write_text(source, encoding="utf-8")
    ruff = [sys.executable, "-m", "ruff", "check", "--config", str(layout.ROOT / "pyproject.toml"), str(tmp_path)]
    done = subprocess.run(ruff, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
