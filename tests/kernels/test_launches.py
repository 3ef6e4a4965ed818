"""Every keyword of a launch is an argument of its kernel. The interpreter takes any; a GPU refuses."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import latentscan

FOLDER = Path(latentscan.__file__).parent / "kernels" / "triton"
OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg"}


def kernels() -> dict[str, set[str]]:
    """Kernel -> its arguments. Kernels of one name in several files share them here."""
    found: dict[str, set[str]] = {}
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                found.setdefault(node.name, set()).update(a.arg for a in (*node.args.args, *node.args.kwonlyargs))
    return found


def launches(text: str) -> list[tuple[str, set[str]]]:
    """(kernel, keywords) of each ``kernel[grid](...)`` in a source text."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Subscript):
            continue
        if isinstance(node.func.value, ast.Name):
            found.append((node.func.value.id, {k.arg for k in node.keywords if k.arg is not None}))
    return found


def test_launches_give_kernels_what_they_take():
    known = kernels()
    seen = [
        (path.name, kernel, words)
        for path in sorted(FOLDER.glob("*.py"))
        for kernel, words in launches(path.read_text(encoding="utf-8"))
        if kernel in known
    ]
    assert seen
    for file, kernel, words in seen:
        assert not words - known[kernel] - OPTIONS, (file, kernel)


@pytest.mark.parametrize("line", ["_forward_kernel[(1,)](x, AGAIN=True)"])
def test_a_keyword_too_many_is_seen(line):
    ((kernel, words),) = launches(line)
    assert words - kernels()[kernel] - OPTIONS
