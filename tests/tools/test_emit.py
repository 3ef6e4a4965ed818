"""``latentscan emit``: the folder is whole, tells what is served and what not, and is never written over another's."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import torch

from latentscan.ir.errors import CheckpointError
from latentscan.kernels.ascendc.emit import SOURCES
from latentscan.runtime.source import resolve
from latentscan.tools import emit as emitting
from latentscan.tools.cli import main
from latentscan.tools.emit import MARKER, emit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("emit") / "out"
    emit(resolve("tiny:mamba2"), out, seq=1000)
    return out


def test_the_folder_holds_kernels_tilings_graphs_and_a_build_script(folder):
    index = json.loads((folder / MARKER).read_text())
    assert "No NPU binary was produced" in index["note"] and index["note"] in (folder / "README.md").read_text()
    scans = [s for s in index["sites"] if s["op"] == "chunk_scan"]
    assert scans and all(s["forward"]["chunk"] == 128 and s["launches_of_scan"] == 1 for s in scans)
    for name in index["ascendc"]:
        made = {path.name for path in (folder / "ascendc" / name).iterdir()}
        assert made >= {*SOURCES, "shape.h", "CMakeLists.txt", "chunk_scan.json", "chunk_scan.tiling"}
        plan = json.loads((folder / "ascendc" / name / "chunk_scan.json").read_text())
        assert plan["tiling"]["tokens"] == 1000
        assert (folder / "ascendc" / name / "chunk_scan.tiling").stat().st_size == 8 * len(plan["tiling"])
    assert {"chunk_scan.py", "chunk_scan_kernels.py", "tiles.py"} <= {p.name for p in (folder / "triton").iterdir()}
    assert not (folder / "triton" / "control_kernels.py").exists()
    lowered = (folder / "graph" / "prefill-lowered.txt").read_text()
    assert "latentscan_ascend" in lowered and "latentscan_ascend" not in (folder / "graph" / "prefill.txt").read_text()
    assert {p.name for p in folder.iterdir()} == {
        "README.md", MARKER, "ascendc", "build.sh", "graph", "tilings.json", "triton",
    }  # fmt: skip


def test_the_build_script_says_that_cann_is_missing(folder):
    done = subprocess.run(
        [folder / "build.sh"], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "CANN is not found" in done.stderr) == (2, True)


def test_a_folder_of_somebody_else_is_left_alone_and_an_own_one_is_replaced(tmp_path, folder):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="was not made by emit"):
        emit(resolve("tiny:mamba2"), tmp_path / "notes")
    assert (tmp_path / "notes" / "mine.txt").read_text() == "mine"
    (folder / "stale.txt").write_text("")
    emit(resolve("tiny:mamba2"), folder, seq=1000)
    assert not (folder / "stale.txt").exists() and (folder / MARKER).exists()


def test_nothing_is_left_of_an_emission_that_fails(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(emitting, "_readme", fail)
    with pytest.raises(CheckpointError, match="disk full"):
        emit(resolve("tiny:mamba2"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--target", "tpu"], "nothing is emitted for target 'tpu'"),
        (["--chip", "310"], "there is no chip '310'. Use one of 910B3, 950"),
        (["--dtype", "float64"], "dtype 'float64'"),
        (["-p", "mha-to-mlb"], "mha-to-mlb"),
    ],
)
def test_bad_input_is_one_message_and_status_2(arguments, told, tmp_path, capsys):
    assert main(["emit", "tiny:mamba2", "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "bfloat16"}, "the AscendC templates take float16, the model is bfloat16"),
        ({"chip": "950"}, "the AscendC templates are written for the 910B, not for 950"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_the_ascendc_templates_do_not_compute_is_not_emitted_and_told(options, why, tmp_path):
    index = emit(resolve("tiny:mamba2"), tmp_path / "out", seq=1000, **options)
    scans = [s for s in index["sites"] if s["kernel"] in ("chunk_scan", "state_update")]
    assert scans and {s["ascendc"] for s in scans} == {f"not emitted: {why}"}
    assert index["ascendc"] == {} and not (tmp_path / "out" / "ascendc").exists()
    assert why in (tmp_path / "out" / "README.md").read_text()
    assert {s["op"] for s in index["sites"]} >= {"chunk_scan", "state_update"}


def test_rates_per_state_are_no_matter_of_the_templates():
    site = {"kernel": "state_update", "rates": "per state", "sizes": {"H": 2, "P": 16, "G": 1, "N": 16}, "options": {}}
    assert emitting._shapes([site], "910B3", torch.float16) == {} and "differs by state" in site["ascendc"]
    assert emitting._shapes([{**site, "rates": "per head"}], "910B3", torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bamba", "deepseek_v3", "nemotron_h", "llama"])
def test_other_families_are_emitted_with_every_site_told(family, tmp_path):
    index = emit(resolve(f"tiny:{family}"), tmp_path / "out", dtype="bfloat16")
    assert index["sites"] and all(site["kernel"] for site in index["sites"])
    assert index["dtype"] == "bfloat16"
