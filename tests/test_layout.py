"""The repository keeps the rules of tests/layout.py, its wheel holds every file, and importing latentscan is cheap."""

from __future__ import annotations

import ast
import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from latentscan.tests import layout

in_a_checkout = pytest.mark.skipif(
    not (layout.ROOT / "setup.cfg").exists(), reason="needs the repository: these tests run from an installed package"
)


@in_a_checkout
def test_the_house_is_in_order():
    assert not (found := layout.check_tree()), "\n" + "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("path", "line", "complaint"),
    [
        ("kernels/triton/ssd.py", "import latentscan.ir.graph", "kernels may import only latentscan.kernels"),
        ("kernels/reference/scan.py", "from latentscan.kernels.triton import ssd", "only latentscan.kernels.reference"),
        ("ir/graph.py", "from latentscan.kernels.triton import ssd", "imports latentscan.kernels.triton.ssd"),
        ("ir/graph.py", "from latentscan import kernels", "imports latentscan.kernels;"),
        ("ir/ops/rope.py", "from latentscan.passes.base import Pass", "ir may import only"),
        ("ir/ops/rope.py", "import latentscan", "through the root package"),
        ("passes/absorb.py", "from latentscan.lowering import select", "passes may import only"),
        ("passes/absorb.py", "def f():\n    from latentscan.runtime import wrap", "imports latentscan.runtime.wrap"),
        ("passes/absorb.py", "from latentscan.kernels.reference import scan", "imports latentscan.kernels.reference"),
        ("lowering/select.py", "from latentscan.passes.pipeline import run", "latentscan.passes.base"),
        ("lowering/select.py", "from latentscan.passes import base_of_everything", "latentscan.passes.base"),
        ("runtime/wrap.py", "from latentscan.tools import cli", "imports latentscan.tools.cli"),
        ("tools/cli.py", "from latentscan.tests import layout", "imports latentscan.tests.layout"),
        ("__init__.py", "from latentscan.tests import layout", "the root may import only"),
        ("ir/graph.py", "from .ops import base", "absolute"),
        ("tests/test_x.py", "from . import layout", "absolute"),
        ("tests/test_x.py", "import kernels", "top-level package: write latentscan.kernels"),
        ("lowering/select.py", "from kernels.reference import scan", "top-level package"),
        ("ir/graph.py", "import importlib\nimportlib.import_module('latentscan.runtime.wrap')", "latentscan.runtime"),
        ("ir/capture.py", "import transformers", "imports transformers when it is itself imported"),
        ("passes/absorb.py", "from transformers.cache_utils import Cache", "inside the function"),
        ("runtime/wrap.py", "try:\n    import transformers\nexcept ImportError:\n    pass", "inside the function"),
        ("lowering/triton.py", "import triton.language as tl", "imports triton"),
        ("kernels/reference/scan.py", "class A:\n    import torch_npu", "imports torch_npu"),
        ("ir/graph.py", "x = 1\n" * 601, "601 lines"),
    ],
)
def test_a_broken_rule_is_found(path: str, line: str, complaint: str):
    found = layout.check_source(line, path)
    assert len(found) == 1
    assert complaint in str(found[0])


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("kernels/triton/ssd.py", "import triton\nfrom latentscan.kernels.reference import scan"),
        ("ir/ops/scan.py", "from latentscan.kernels.reference import scan\nfrom latentscan.ir.ops.base import define"),
        ("ir/ops/scan.py", "from latentscan.kernels import reference"),
        ("ir/frontends/huggingface.py", "def f():\n    import transformers"),
        ("ir/capture.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers"),
        ("lowering/fuse.py", "from latentscan.passes.base import Pass\nfrom latentscan.passes import base"),
        ("runtime/cache.py", "from transformers import Cache\nfrom latentscan import __version__"),
        ("tools/demo.py", "import latentscan\nfrom latentscan import wrap\nfrom latentscan.lowering import select"),
        ("tests/test_x.py", "import transformers\nfrom latentscan.tests import layout\nimport latentscan"),
        ("passes/irregular.py", "import irresistible, kernelspec"),
        ("ir/graph.py", "x = 1\n" * 600),
    ],
)
def test_what_is_allowed_is_not_complained_about(path: str, line: str):
    assert layout.check_source(line, path) == []


@pytest.fixture
def small_house(tmp_path: Path) -> Path:
    """A repository in order, with two packages."""
    (tmp_path / "ir").mkdir()
    for place in ("__init__.py", "ir/__init__.py", "ir/graph.py"):
        (tmp_path / place).touch()
    (tmp_path / "setup.cfg").write_text("[options]\npackages =\n    latentscan\n    latentscan.ir\nzip_safe = false\n")
    assert layout.check_tree(tmp_path) == []
    return tmp_path


def test_a_new_subpackage_must_be_listed_and_make_packages_lists_it(small_house: Path):
    (small_house / "ir" / "ops").mkdir()
    (small_house / "ir" / "ops" / "__init__.py").touch()
    assert [str(v) for v in layout.check_tree(small_house)] == [
        "setup.cfg:1: does not list latentscan.ir.ops: run `make packages`"
    ]
    layout.write_packages(small_house)
    assert layout.check_tree(small_house) == []
    assert (small_house / "setup.cfg").read_text().endswith("    latentscan.ir.ops\nzip_safe = false\n")


def test_a_removed_subpackage_must_be_unlisted(small_house: Path):
    shutil.rmtree(small_house / "ir")
    assert [v.message for v in layout.check_tree(small_house)] == [
        "lists latentscan.ir, which is no package: run `make packages`"
    ]


def test_a_folder_of_python_files_without_init_is_found_and_make_packages_makes_it_one(small_house: Path):
    (small_house / "ir" / "ops" / "deep").mkdir(parents=True)
    (small_house / "ir" / "ops" / "deep" / "rope.py").touch()
    assert [v.path for v in layout.check_tree(small_house)] == ["ir/ops", "ir/ops/deep"]
    layout.write_packages(small_house)
    assert layout.check_tree(small_house) == []
    assert layout.listed_packages(small_house)[-2:] == ["latentscan.ir.ops", "latentscan.ir.ops.deep"]


def test_a_room_that_the_design_does_not_have_is_found(small_house: Path):
    (small_house / "utils").mkdir()
    (small_house / "utils" / "__init__.py").touch()
    assert [v.path for v in layout.check_tree(small_house)] == ["utils"]


def test_a_broken_rule_deep_in_the_tree_is_found(small_house: Path):
    (small_house / "ir" / "graph.py").write_text("import latentscan.runtime\n")
    assert [(v.path, v.line) for v in layout.check_tree(small_house)] == [("ir/graph.py", 1)]


def imported_by(statement: str, *, path: Path | None = None) -> set[str]:
    """The top-level modules in sys.modules after ``statement`` in a fresh interpreter that sees ``path`` first."""
    script = f"import sys; sys.path[:0] = {[str(path)] if path else []!r}; {statement}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in run.stdout.split()}


def test_importing_latentscan_imports_neither_torch_nor_transformers():
    modules = imported_by("import latentscan")
    assert "latentscan" in modules
    assert not modules & {"torch", "transformers", "triton", "numpy", "rich", "typer"}
    assert "torch" in imported_by("import latentscan, torch")  # the check can fail


def defined_in(source: str) -> set[str]:
    """The names that the top level of a module defines or imports."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@in_a_checkout
@pytest.mark.parametrize("group", ["console_scripts", "torch_dynamo_backends"])
def test_an_entry_point_names_something_that_is_defined(group: str):
    config = configparser.ConfigParser()
    config.read(layout.ROOT / "setup.cfg", encoding="utf-8")
    module, _, name = config["options.entry_points"][group].partition(" = ")[2].partition(":")
    file = layout.ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
    assert file.exists(), f"no {file.relative_to(layout.ROOT)}"
    assert name in defined_in(file.read_text(encoding="utf-8"))
    assert "no_such_name" not in defined_in(file.read_text(encoding="utf-8"))


@in_a_checkout
def test_the_wheel_holds_every_file_of_the_package_and_imports_without_torch(tmp_path: Path):
    copy, site = tmp_path / "copy", tmp_path / "site"
    copy.mkdir()
    junk = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "*~")
    for room in layout.ROOMS:
        shutil.copytree(layout.ROOT / room, copy / room, ignore=junk)
    for file in layout.ROOT.glob("[!.]*.*"):
        if file.is_file():
            shutil.copy(file, copy)
    build = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", build, str(tmp_path)]
    subprocess.run(command, cwd=copy, capture_output=True, text=True, check=True)
    (wheel,) = tmp_path.glob("latentscan-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)

    expected = {file.relative_to(layout.ROOT) for file in layout.ROOT.glob("*.py")} | {Path("py.typed")}
    for room in layout.ROOMS:
        expected |= {file.relative_to(copy) for file in (copy / room).rglob("*") if file.is_file()}
    held = {file.relative_to(site / "latentscan") for file in (site / "latentscan").rglob("*") if file.is_file()}
    assert held == expected

    modules = imported_by(f"import latentscan; assert latentscan.__file__.startswith({str(site)!r})", path=site)
    assert "torch" not in modules
