"""latentscan heal: a directory in, a better one out; a killed run goes on; bad input is one line and status 2."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from latentscan.ir.errors import CheckpointError
from latentscan.runtime.checkpoint import load, read_description
from latentscan.runtime.heal import Healer, Settings
from latentscan.tools import heal as tool
from latentscan.tools.cli import BAD_INPUT, OK, main
from latentscan.tools.heal import NUMBERS, PLOT, TENSORS, heal
from latentscan.tools.loss_plot import draw, running_mean, ticks

pytestmark = pytest.mark.filterwarnings("ignore:.*is for latentscan.load only.*:UserWarning")
ENTRY = "import sys; from latentscan.tools.cli import main; sys.exit(main())"
WORDS = ["--steps", "6", "--seq", "16", "--batch", "2", "--every", "2"]
SETTINGS = Settings(steps=6, seq=16, batch=2)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a text and a converted model."""
    folder = tmp_path_factory.mktemp("heal")
    (folder / "text.txt").write_text("".join(f"{i} and {i * i % 97} make {i * 7 % 31}; " for i in range(80)))
    source = "tiny:llama{num_hidden_layers=1}"
    pipeline = "mha-to-mla{rank=8,rope_dim=8},latent-cache,mla-absorb"
    arguments = ["convert", source, folder / "small", "-p", pipeline, "--calibration", folder / "text.txt"]
    assert main([str(a) for a in arguments]) == OK
    assert read_description(folder / "small")["source"] == source
    return folder


@pytest.fixture(scope="module")
def whole(place) -> dict[str, Any]:
    """What an unbroken run says; its directory is ``place / whole``."""
    return heal(place / "small", place / "text.txt", SETTINGS, out=place / "whole", every=2)


def numbers(folder: Path) -> dict[str, Any]:
    return json.loads((folder / NUMBERS).read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load(folder).named_parameters())


def test_the_result_is_a_converted_model_with_its_curve(place, whole):
    out = place / "whole"
    assert whole["steps"] == whole["step"] == 6 and whole["resumed_at"] == 0
    assert [row["loss"] for row in numbers(out)["losses"]][::5] == whole["loss"]
    assert set(whole["nll"]) == {"original", "before", "after"}
    assert not (out / TENSORS).exists()  # a finished run needs no optimiser
    before, after = weights(place / "small"), weights(out)
    moved = {n for n in before if not torch.equal(before[n], after[n])}
    assert moved and all(".self_attn." in n for n in moved)
    assert read_description(out)["source"] == read_description(place / "small")["source"]
    again = heal(place / "small", place / "text.txt", SETTINGS, out=out, every=2)
    assert again == whole | {"resumed_at": 6}  # nothing is left to do


def test_a_run_that_stops_goes_on_as_if_it_had_not(place, whole, tmp_path):
    seen: list[int] = []

    def stop(told: dict[str, Any]) -> None:
        seen.append(told["step"])
        if told["step"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        heal(place / "small", place / "text.txt", SETTINGS, out=tmp_path / "m", every=2, progress=stop)
    assert numbers(tmp_path / "m")["step"] == 4 and (tmp_path / "m" / TENSORS).is_file()
    load(tmp_path / "m")  # half-healed, and whole
    told = heal(
        place / "small", place / "text.txt", SETTINGS, out=tmp_path / "m", every=2,
        progress=lambda t: seen.append(t["step"]),
    )  # fmt: skip
    assert seen == [1, 2, 3, 4, 5, 5, 6]
    assert told["resumed_at"] == 4 and numbers(tmp_path / "m") == numbers(place / "whole")
    a, b = weights(tmp_path / "m"), weights(place / "whole")
    assert all(torch.equal(a[n], b[n]) for n in b)
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == sorted(p.name for p in (place / "whole").iterdir())


@pytest.mark.slow
def test_sabotage_a_run_that_starts_its_optimiser_anew_is_found(place, whole, tmp_path, monkeypatch):
    def stop(told: dict[str, Any]) -> None:
        if told["step"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        heal(place / "small", place / "text.txt", SETTINGS, out=tmp_path / "m", every=2, progress=stop)
    resume = Healer.resume

    def forgets(self: Healer, tensors: dict[str, torch.Tensor], told: dict[str, Any]) -> None:
        resume(self, tensors, told)
        self.optimiser.state.clear()

    monkeypatch.setattr(Healer, "resume", forgets)
    told = heal(place / "small", place / "text.txt", SETTINGS, out=tmp_path / "m", every=2)
    assert told["loss"] != whole["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["first checkpoint half written", "second checkpoint half written", "between"])
def test_a_killed_command_goes_on_with_the_same_losses(place, whole, tmp_path, moment):
    """The real command, SIGKILLed; what is there then is a whole checkpoint or nothing."""
    out = tmp_path / "here" / "m"
    out.parent.mkdir()
    arguments = ["heal", str(place / "small"), "--data", str(place / "text.txt"), "--out", str(out), *WORDS]
    child = subprocess.Popen([sys.executable, "-c", ENTRY, *arguments], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240

    def reached() -> bool:
        beside = [p for p in out.parent.iterdir() if p.name.startswith(".m.latentscan-aside")]
        if moment == "first checkpoint half written":
            return bool(beside) and any(beside[0].iterdir())
        if not out.exists():
            return False
        return moment == "between" or (bool(beside) and any(beside[0].iterdir()))

    while child.poll() is None and time.monotonic() < deadline:
        try:
            if reached():
                os.kill(child.pid, signal.SIGKILL)
                break
        except FileNotFoundError:
            continue
    assert child.wait() == -signal.SIGKILL
    if out.exists():
        load(out)
        assert numbers(out)["step"] in (2, 4, 6)
        assert numbers(out)["losses"] == numbers(place / "whole")["losses"][: numbers(out)["step"]]
    subprocess.run([sys.executable, "-c", ENTRY, *arguments], check=True, capture_output=True)
    assert numbers(out) == numbers(place / "whole")
    assert sorted(p.name for p in out.parent.iterdir()) == ["m"]  # what the killed one left beside is gone


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no directory": ({"dir": "nowhere"}, "there is no such directory"),
    "not converted": ({"dir": "empty"}, "no wrapped model was saved here"),
    "no text": ({"data": "nowhere.txt"}, "cannot be read"),
    "empty text": ({"data": "empty.txt"}, "the text is empty"),
    "short text": ({"data": "short.txt"}, "too few for two rows of 16"),
    "in place": ({"out": "small"}, "which a half-finished run would replace"),
    "foreign out": ({"out": "foreign"}, "holds a model that latentscan did not save"),
    "another conversion": ({"out": "other"}, "holds a converted model that no healing wrote"),
    "another run": ({"out": "whole", "more": ["--lr", "0.5"]}, "holds another run: its lr is 0.0001, not 0.5"),
    "another text": ({"out": "whole", "data": "other.txt"}, "holds another run: its text differs"),
    "another original": ({"teacher": "tiny:llama"}, "its layers is 2, the converted model's 1"),
    "no original": ({"teacher": "/nowhere/at/all"}, "there is no such directory"),
    "no steps": ({"more": ["--steps", "0"]}, "steps=0 is below 1"),
    "no checkpoints": ({"more": ["--every", "0"]}, "every=0 is below 1"),
    "nothing to train": ({"more": ["--lora-rank", "999"]}, "no matrix is larger than lora_rank=999"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_status_2(place, whole, tmp_path, capsys, case):
    words, reason = BAD[case]
    here = tmp_path / "here"
    shutil.copytree(place, here)
    shutil.copytree(here / "small", here / "other")
    (here / "empty").mkdir()
    (here / "foreign").mkdir()
    (here / "foreign" / "config.json").write_text("{}")
    for name, text in {"empty.txt": " \n", "short.txt": "too short", "other.txt": "another text " * 40}.items():
        (here / name).write_text(text)
    before = sorted(str(p) for p in here.rglob("*"))
    arguments = ["heal", here / words.get("dir", "small"), "--data", here / words.get("data", "text.txt")]
    arguments += ["--out", here / words.get("out", "new"), *WORDS, *words.get("more", [])]
    arguments += ["--teacher", words["teacher"]] if "teacher" in words else []
    capsys.readouterr()
    status = main([str(a) for a in arguments])
    told = capsys.readouterr()
    assert status == BAD_INPUT and not told.out
    assert reason in told.err and told.err.count("\n") == 1 and told.err.startswith("latentscan: ")
    assert sorted(str(p) for p in here.rglob("*")) == before


def test_a_damaged_checkpoint_is_told(place, whole, tmp_path):
    for name, change in (
        (NUMBERS, lambda p: p.write_text("{")), (NUMBERS, lambda p: p.write_text("{}")),
        (TENSORS, lambda p: p.write_bytes(b"x")), (TENSORS, lambda p: p.unlink(missing_ok=True)),
    ):  # fmt: skip
        out = tmp_path / "m"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(place / "whole", out)
        told = numbers(out)
        told["step"] = 4  # as if it were not finished
        (out / NUMBERS).write_text(json.dumps(told))
        change(out / name)
        with pytest.raises(CheckpointError, match=rf"{name}: cannot be read.*Remove the directory") as caught:
            heal(place / "small", place / "text.txt", SETTINGS, out=out)
        assert "\n" not in str(caught.value)


def test_a_model_that_does_not_say_its_origin_needs_a_teacher(place, tmp_path):
    shutil.copytree(place / "small", tmp_path / "m")
    path = tmp_path / "m" / "latentscan.json"
    told = json.loads(path.read_text())
    del told["source"]
    path.write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=r"does not say what it was converted from.*--teacher"):
        heal(tmp_path / "m", place / "text.txt", SETTINGS, out=tmp_path / "new")


def test_json_and_nothing_else(place, whole, capsys):
    capsys.readouterr()
    arguments = ["heal", place / "small", "--data", place / "text.txt", "--out", place / "whole", *WORDS, "--json"]
    assert main([str(a) for a in arguments]) == OK
    told = capsys.readouterr()
    assert json.loads(told.out) == json.loads(json.dumps(whole | {"resumed_at": 6}))
    assert main([str(a) for a in arguments[:-1]]) == OK
    text = capsys.readouterr().out
    assert "6 steps" in text and "NLL of the held-out rows: original" in text


# -- the curve --------------------------------------------------------------------------------------------------------


def test_ticks_are_round_and_cover():
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    for low, high in ((0.0, 3.7), (0.31, 0.32), (-5.0, 900.0), (0.0, 1e-9)):
        found = ticks(low, high)
        assert found[0] <= low and found[-1] >= high - 1e-12 and 2 <= len(found) <= 9
    assert running_mean([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])


def test_the_curve_falls_where_the_loss_falls(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name, values in (("down", [1 - i / 100 for i in range(100)]), ("up", [i / 100 for i in range(100)])):
        draw(values, [v / 2 for v in values], tmp_path / f"{name}.png")
        with image.open(tmp_path / f"{name}.png") as shown:
            assert shown.format == "PNG" and shown.size == (960, 540)
            pixels = shown.convert("RGB").load()

            def height(x: int, pixels=pixels) -> float:
                ys = [y for y in range(55, 480) if pixels[x, y] == (20, 90, 170)]
                return sum(ys) / len(ys)

            assert (height(300) < height(800)) == (name == "down")  # y grows downwards
    draw([0.5], [0.4], tmp_path / "one.png")


@pytest.mark.slow
def test_without_pillow_the_run_is_the_same_and_says_so(place, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool, "can_draw", lambda: False)
    arguments = ["heal", place / "small", "--data", place / "text.txt", "--out", tmp_path / "m", *WORDS]
    assert main([str(a) for a in arguments]) == OK
    assert "loss plot: none (install Pillow" in capsys.readouterr().out
    assert not (tmp_path / "m" / PLOT).exists()
    assert numbers(tmp_path / "m") == numbers(place / "whole")
