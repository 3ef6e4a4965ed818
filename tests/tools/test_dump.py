"""Dump folders: what they hold, that they are whole or absent, and that a folder of somebody else's is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from latentscan.ir.errors import CheckpointError, NumericsError, PipelineError, RefusedError
from latentscan.runtime import dumping
from latentscan.runtime.door import session_of
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build
from latentscan.tools.dump import diff, dump

PIPELINE = "mla-mm-split,mla-absorb"
FILES = {"before.txt", "after.txt", "diff.txt", "sites.json", "numerics.json"}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build("deepseek_v3")


@pytest.fixture(scope="module")
def dumped(model, tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("dumps") / "dump"
    return folder, dump(model, PIPELINE, str(folder))


def test_a_dump_has_an_index_and_a_folder_a_pass(dumped):
    folder, index = dumped
    assert {p.name for p in folder.iterdir()} == {"index.md", dumping.MARKER, "01-mla-mm-split", "02-mla-absorb"}
    for name in ("01-mla-mm-split", "02-mla-absorb"):
        assert {p.name for p in (folder / name).iterdir()} == FILES
    assert [e["pass"] for e in index["passes"]] == ["mla-mm-split", "mla-absorb"]
    page = (folder / "index.md").read_text()
    split, absorb = (line.split(" | ") for line in page.splitlines() if line.startswith("| ["))
    assert split[0] == "| [mla-mm-split](01-mla-mm-split/diff.txt)"
    assert split[1] == "4"  # q_b_proj and kv_b_proj of two layers
    assert absorb[0].endswith("(absorb)"), "the form that prefill leaves out is the one to look at"
    assert "→" in absorb[3]
    assert "absorb iff 4 P (2*16 - 16 - 16)" in page
    leftovers = [p.name for p in folder.parent.iterdir() if p.name != "dump"]
    assert not leftovers


def test_what_programs_read_is_json_with_the_facts(dumped):
    folder, index = dumped
    absorb = index["passes"][1]
    assert absorb["sites"] == 2
    assert absorb["cache_bytes_per_token"] == [2 * 4 * (16 + 8)] * 2
    assert absorb["calls"][1] < absorb["calls"][0]
    assert 0 < absorb["error"] <= absorb["tolerance"]
    sites = json.loads((folder / "02-mla-absorb" / "sites.json").read_text())
    assert [s["module"] for s in sites["sites"]] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert sites["sites"][0]["facts"]["d_c"] == 16
    assert sites["choice"]["yes"] == "absorb"
    numbers = json.loads((folder / "02-mla-absorb" / "numerics.json").read_text())
    assert numbers["checked"]
    assert next(iter(numbers["values"]["modules"])) == "model.embed_tokens"
    assert numbers["values"]["modules"]["model.embed_tokens"] == 0.0


def test_the_diff_of_a_pass_is_what_it_changed(dumped):
    folder, _ = dumped
    text = diff(str(folder), "mla-absorb")
    assert "latent_attention" in text
    assert "weight_part0" in text
    assert "=== model.norm" not in text
    assert text == diff(str(folder), "02-mla-absorb")
    assert diff(str(folder), None).count("### ") == 2


def test_a_pass_that_its_option_leaves_out_changes_nothing(model, tmp_path):
    folder = tmp_path / "dump"
    index = dump(model, "mla-absorb{when=never}", str(folder), check=False)
    assert json.loads((folder / "01-mla-absorb" / "numerics.json").read_text()) == {"checked": False}
    assert (folder / "01-mla-absorb" / "diff.txt").read_text() == "nothing changed\n"
    assert index["passes"][0]["form"] == "expand"


def test_the_model_stays_as_it_is(model, dumped):
    assert session_of(model) is None
    assert "weight_part0" not in " ".join(model.state_dict())
    model(torch.ones(1, 3, dtype=torch.long))


def test_gradients_are_dumped_too(model, tmp_path):
    dump(model, "mla-mm-split", str(tmp_path / "dump"), check={"gradients": True})
    numbers = json.loads((tmp_path / "dump" / "01-mla-mm-split" / "numerics.json").read_text())
    assert numbers["gradients"]["error"] <= numbers["gradients"]["tolerance"]
    assert any(path.endswith("q_b_proj") for path in numbers["gradients"]["modules"])


# -- folders ----------------------------------------------------------------------------------------------------------


def test_an_earlier_dump_is_replaced(model, tmp_path):
    folder = tmp_path / "dump"
    dump(model, PIPELINE, str(folder), check=False)
    dump(model, "mla-mm-split", str(folder), check=False)
    assert {p.name for p in folder.iterdir()} == {"index.md", dumping.MARKER, "01-mla-mm-split"}
    assert [p.name for p in tmp_path.iterdir()] == ["dump"]


def test_files_that_somebody_put_into_a_dump_stay(model, tmp_path):
    """Of the earlier dump's own files none does, even where the next one has no such pass, and of several ranks'."""
    folder = tmp_path / "dump"
    dump(model, PIPELINE, str(folder), check=False)
    mine = ["mine.txt", "notes/mine.txt", "02-mla-absorb/mine.txt", "index.md.old"]
    for name in mine:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    (folder / "empty").mkdir()
    (folder / "rank-0").mkdir()
    (folder / "rank-0" / "index.md").write_text("of a rank")
    (folder / "rank-0" / dumping.MARKER).write_text(json.dumps({"passes": [], "files": ["index.md"]}))
    dump(model, "mla-mm-split", str(folder), check=False)
    index = json.loads((folder / dumping.MARKER).read_text())
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert found == {*mine, *index["files"]}
    assert "01-mla-mm-split/diff.txt" in index["files"] and (folder / "empty").is_dir()
    assert all((folder / name).read_text() == name for name in mine)
    assert [p.name for p in tmp_path.iterdir()] == ["dump"]


@pytest.mark.parametrize("kind", ["full", "empty", "file", "link"])
@pytest.mark.parametrize("door", [dump, lambda model, pipeline, folder: wrap(model, pipeline, dump=folder)])
def test_a_folder_of_somebody_else_is_neither_written_nor_deleted(model, tmp_path, kind, door):
    folder = tmp_path / "mine"
    if kind == "file":
        folder.write_text("precious")
    elif kind == "link":
        (tmp_path / "target").mkdir()
        folder.symlink_to(tmp_path / "target")
    else:
        folder.mkdir()
        if kind == "full":
            (folder / "thesis.txt").write_text("precious")
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="left alone") as caught:
        door(model, PIPELINE, str(folder))
    assert "does not exist yet" in caught.value.remedy
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == before
    assert session_of(model) is None
    if kind == "full":
        assert (folder / "thesis.txt").read_text() == "precious"


def test_a_folder_that_appears_while_dumping_is_left_alone(model, tmp_path, monkeypatch):
    folder = tmp_path / "dump"
    add = dumping.Dump.add

    def meddle(self, *args, **kwargs):
        folder.mkdir(exist_ok=True)
        (folder / "thesis.txt").write_text("precious")
        return add(self, *args, **kwargs)

    monkeypatch.setattr(dumping.Dump, "add", meddle)
    with pytest.raises(CheckpointError, match="left alone"):
        dump(model, "mla-mm-split", str(folder), check=False)
    assert [p.name for p in tmp_path.rglob("*")] == ["dump", "thesis.txt"]


def test_a_folder_without_a_parent_is_refused(model, tmp_path):
    with pytest.raises(CheckpointError, match="parent folder does not exist"):
        dump(model, PIPELINE, str(tmp_path / "no" / "dump"))


def test_a_run_that_stops_early_keeps_the_earlier_dump(model, tmp_path):
    folder = tmp_path / "dump"
    dump(model, "mla-mm-split", str(folder), check=False)
    with pytest.raises(RefusedError):
        dump(model, "latent-cache", str(folder), check=False)
    assert "01-mla-mm-split" in {p.name for p in folder.iterdir()}
    with pytest.raises(RefusedError):
        dump(model, "mla-mm-split,latent-cache", str(folder), check=False)
    assert "**Stopped**: latent-cache" in (folder / "index.md").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["dump"]


def test_a_failed_check_is_dumped_up_to_the_pass_that_failed(model, tmp_path):
    folder = tmp_path / "dump"
    with pytest.raises(NumericsError, match="mla-absorb"):
        dump(model, PIPELINE, str(folder), check={"mla-absorb": 1e-12})
    numbers = json.loads((folder / "02-mla-absorb" / "numerics.json").read_text())
    assert numbers["values"]["failed"]
    assert numbers["values"]["first"]["module"].startswith("model.layers.0.self_attn")
    assert "mla-absorb at model.layers.0" in (folder / "index.md").read_text()


_RANK = """
import sys, torch
import torch.distributed as dist
rank, store, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
from latentscan.tests.models import build
from latentscan.tools.dump import dump
if rank == 0:
    import time; time.sleep(2)  # the ranks finish at different times
assert dump(build("deepseek_v3"), "mla-mm-split", folder, check=False)["rank"] == rank
dist.barrier()
dist.destroy_process_group()
"""


def test_every_rank_dumps_under_its_own_name(tmp_path):
    folder = tmp_path / "dump"
    commands = [[sys.executable, "-c", _RANK, str(rank), str(tmp_path / "store"), str(folder)] for rank in range(2)]
    ranks = [subprocess.Popen(c, cwd=tmp_path, env=os.environ, stderr=subprocess.PIPE, text=True) for c in commands]
    for process in ranks:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors[-2000:]
    assert {p.name for p in folder.iterdir()} == {dumping.MARKER, "rank-0", "rank-1"}
    for rank in range(2):
        index = json.loads((folder / f"rank-{rank}" / dumping.MARKER).read_text())
        assert (index["rank"], index["ranks"]) == (rank, 2)
    assert diff(str(folder), "mla-mm-split") == diff(str(folder / "rank-1"), "mla-mm-split")


# -- reading ----------------------------------------------------------------------------------------------------------


def test_reading_what_is_no_dump_is_an_error_with_a_remedy(dumped, tmp_path):
    folder, _ = dumped
    with pytest.raises(CheckpointError, match="does not exist"):
        diff(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="no dump of latentscan's"):
        diff(str(tmp_path))
    (tmp_path / dumping.MARKER).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        diff(str(tmp_path))
    with pytest.raises(PipelineError, match="did you mean mla-absorb"):
        diff(str(folder), "mla-absorp")
