"""What is around a command and fails it: disks that are full, devices that are not there, directories in the way."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from latentscan.ir.errors import CheckpointError, PipelineError
from latentscan.runtime import calibration as calibrating
from latentscan.runtime.atomic import file_errors, replaced_directory
from latentscan.runtime.calibration import Calibration, token_batches
from latentscan.runtime.checkpoint import load
from latentscan.tests.models import build
from latentscan.tools.cli import BAD_INPUT, OK, main

pytestmark = pytest.mark.filterwarnings("ignore:.*is for latentscan.load only.*:UserWarning")
ENTRY = "import sys; from latentscan.tools.cli import main; sys.exit(main())"
LLAMA, LOW = "tiny:llama{num_hidden_layers=1}", "mha-to-mla{rank=8,rope_dim=8},latent-cache"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A text and a converted model."""
    folder = tmp_path_factory.mktemp("surroundings")
    (folder / "text.txt").write_text("".join(map(chr, range(32, 127))) * 20)
    words = ["convert", LLAMA, folder / "half", "-p", LOW, "--calibration", folder / "text.txt"]
    assert main([str(w) for w in words]) == OK
    return folder


def refused(capsys, *words: object) -> str:
    """The one line of a command that ends with status 2."""
    capsys.readouterr()
    status = main([str(w) for w in words])
    told = capsys.readouterr()
    assert status == BAD_INPUT, told.err
    assert told.err.startswith("latentscan: ") and told.err.count("\n") == 1
    return told.err


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verb", ["convert", *(pytest.param(v, marks=pytest.mark.slow) for v in ("convert with a state", "export", "heal"))]
)
def test_a_file_that_cannot_grow_is_one_line_and_nothing_is_written(place, tmp_path, verb):
    """The real command under a limit of file sizes, which fails safetensors within a file like a full disk."""
    shutil.copytree(place, tmp_path / "here")
    here, before = tmp_path / "here", contents(place)
    words = {
        "convert": ["convert", LLAMA, here / "new", "-p", "mha-to-mla"],
        "convert with a state": ["convert", LLAMA, here / "new", "-p", LOW, "--calibration", here / "text.txt"],
        "export": ["export", here / "half", here / "new"],
        "heal": ["heal", here / "half", "--data", here / "text.txt", "--out", here / "new", "--steps", 1, "--seq", 16],
    }[verb]
    most = 50_000 if verb != "convert with a state" else 20_000
    done = subprocess.run(
        [sys.executable, "-B", "-c", ENTRY, *map(str, words)], capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if not line.startswith("step ")]
    assert done.returncode == BAD_INPUT, done.stderr
    assert len(lines) == 1 and "cannot be written: " in lines[0] and "ree some space" in lines[0].lower()
    assert contents(here) == before and not (here / "new").exists()


def test_errors_of_files_are_told_from_others(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(CheckpointError, match=r"cannot be written: .*No such file"), file_errors(tmp_path, "give up"):
        save_file({"a": torch.ones(2)}, str(tmp_path / "no" / "where" / "file"))
    with pytest.raises(CheckpointError, match=r"cannot be written: \[Errno 28\] full\. Give up"):
        with file_errors(tmp_path, "give up"):
            raise OSError(28, "full")
    with pytest.raises(ZeroDivisionError), file_errors(tmp_path, "give up"):
        _ = 1 / 0


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_files_have_the_mode_that_new_files_have(tmp_path, umask):
    earlier = os.umask(umask)
    try:
        target = tmp_path / "new"
        target.mkdir()
        (target / "mine").touch()
        (target / "mine").chmod(0o640)
        with replaced_directory(target, lambda _: True) as aside:
            (aside / "inner").mkdir()
            for name in ("a", "inner/b"):
                (aside / name).touch(mode=0o600)
        build("llama", num_hidden_layers=1).save_pretrained(tmp_path / "plain")
    finally:
        os.umask(earlier)
    found = {p.relative_to(target).as_posix(): p.stat().st_mode & 0o777 for p in target.rglob("*") if p.is_file()}
    assert found == {"a": 0o666 & ~umask, "inner/b": 0o666 & ~umask, "mine": 0o640}  # the user's own stays


def test_a_converted_model_can_be_read_by_others(place):
    probe = place / "probe"
    probe.touch()
    modes = {p.name: p.stat().st_mode for p in (place / "half").iterdir()}
    assert "model.safetensors" in modes and set(modes.values()) == {probe.stat().st_mode}
    probe.unlink()


# -- directories in the way -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("out", "how"), [("half", "is"), ("half/inner", "lies in"), (".", "holds"), ("link", "is")])
def test_an_export_does_not_replace_what_it_reads(place, tmp_path, capsys, out, how):
    here = tmp_path / "here"
    shutil.copytree(place, here)
    (here / "link").symlink_to("half")
    if out == ".":  # made by latentscan too, else it is refused for that
        shutil.copy(here / "half" / "latentscan.json", here)
    before = contents(here)
    assert f"{how} the directory that is read" in refused(capsys, "export", here / "half", here / out)
    assert contents(here) == before
    load(here / "half")


def test_a_conversion_does_not_replace_what_it_reads(tmp_path, capsys):
    source = tmp_path / "model"
    build("llama", num_hidden_layers=1).save_pretrained(source)
    before = contents(tmp_path)
    words = ("-p", "mha-to-mla,latent-cache")
    assert "would be overwritten" in refused(capsys, "convert", source, source, *words)
    assert "lies in the directory that is read" in refused(capsys, "convert", source, source / "inner", *words)
    assert contents(tmp_path) == before


# -- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["foo", "cuda:99", "meta", ""])
def test_healing_on_a_device_that_is_not_there(place, capsys, device):
    before = contents(place)
    words = ("heal", place / "half", "--data", place / "text.txt", "--out", place / "new", "--seq", 16)
    told = refused(capsys, *words, "--device", device)
    assert f"device={device!r} cannot be used here" in told and "--device cpu" in told
    assert contents(place) == before


# -- calibration data -------------------------------------------------------------------------------------------------


TENSORS = {
    "bool": (torch.ones(2, 8, dtype=torch.bool), r"a torch.bool tensor of shape \[2, 8\]"),
    "complex": (torch.ones(2, 8, dtype=torch.complex64), "a torch.complex64 tensor"),
    "float": (torch.ones(2, 8), "a torch.float32 tensor"),
    "one number": (torch.tensor(7), r"a torch.int64 tensor of shape \[\]"),
    "three dimensions": (torch.ones(2, 3, 4, dtype=torch.long), r"shape \[2, 3, 4\]"),
    "empty": (torch.ones(0, 4, dtype=torch.long), r"shape \[0, 4\] holds no tokens"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_are_no_token_ids(kind):
    data, why = TENSORS[kind]
    with pytest.raises(PipelineError, match=why) as told:
        token_batches(build("llama", num_hidden_layers=1), Calibration(data))
    assert "integer token ids of shape [N, L]" in str(told.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_token_ids_of_any_integer_type_and_one_row_alone(dtype):
    model, row = build("llama", num_hidden_layers=1), torch.arange(3, 15).to(dtype)
    for data in (row, row[None], row.reshape(3, 4)):
        assert torch.equal(torch.cat(token_batches(model, Calibration(data))).flatten(), row)


def test_a_tokenizer_that_makes_no_tokens(tmp_path, capsys, monkeypatch):
    source, text = tmp_path / "model", tmp_path / "text.txt"
    build("llama", num_hidden_layers=1).save_pretrained(source)
    text.write_text("some words")
    monkeypatch.setattr(calibrating, "_tokenizer", lambda model: lambda text: {"input_ids": []})
    before = contents(tmp_path)
    told = refused(capsys, "convert", source, tmp_path / "new", "-p", LOW, "--calibration", text)
    assert "the tokenizer makes no tokens of the calibration text (10 characters)" in told
    assert contents(tmp_path) == before
