"""A training state on disk is complete or refused, and what is read is what was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from latentscan.ir.errors import CheckpointError
from latentscan.ir.weights import Part
from latentscan.runtime import training_state
from latentscan.runtime.training_state import MARKER, load_training, piece_of, save_training
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import tokens


class Small(torch.nn.Module):
    """Two weights, one of them tied, and a buffer."""

    def __init__(self, width: int = 3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = torch.nn.Embedding(5, width)
        self.head = torch.nn.Linear(width, 5, bias=True)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.rand(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids)).square().mean() * self.scale.sum()


def step(model: Any, optimizer: Any, **given: Any) -> float:
    optimizer.zero_grad()
    loss = model(**given)
    loss = getattr(loss, "loss", loss)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


IDS = torch.tensor([[0, 1, 2], [2, 3, 4]])


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.5, 0.9)),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
    ],
)
def test_losses_after_resuming_are_those_of_an_unbroken_run(make, tmp_path):
    model = Small()
    optimizer = make(model.parameters())
    step(model, optimizer, ids=IDS)
    save_training(tmp_path / "state", model, optimizer, extra={"step": 1, "name": "x"})
    wanted = [step(model, optimizer, ids=IDS) for _ in range(3)]
    again = Small(seed=1)
    other = make(again.parameters())
    other.param_groups[0]["lr"] = 7.0
    assert load_training(tmp_path / "state", again, other) == {"step": 1, "name": "x"}
    assert other.param_groups[0]["lr"] == 0.1
    assert [step(again, other, ids=IDS) for _ in range(3)] == wanted
    assert again.head.weight is again.table.weight
    alone = Small(seed=2)
    load_training(tmp_path / "state", alone)
    assert not torch.equal(alone.scale, Small(seed=2).scale)


@pytest.mark.slow
def test_a_wrapped_models_new_weights_are_saved_under_their_names(tmp_path):
    ids = tokens(2, 9)
    given = {"input_ids": ids, "labels": ids, "use_cache": False}
    model = wrap(build("deepseek_v3").train(), "mla-mm-split")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, **given)
    save_training(tmp_path / "state", model, optimizer)
    wanted = step(model, optimizer, **given)
    again = wrap(build("deepseek_v3").train(), "mla-mm-split")
    other = torch.optim.AdamW(again.parameters(), lr=1.0)
    load_training(tmp_path / "state", again, other)
    assert step(again, other, **given) == wanted
    with pytest.raises(CheckpointError, match="same passes"):
        load_training(tmp_path / "state", build("deepseek_v3"))


@pytest.fixture
def saved(tmp_path) -> Path:
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, ids=IDS)
    save_training(tmp_path / "state", model, optimizer)
    return tmp_path / "state"


def damage(folder: Path, how: str) -> None:
    (data,) = folder.glob("*.distcp")
    told = json.loads((folder / MARKER).read_text())
    if how == "no marker":
        (folder / MARKER).unlink()
    elif how == "half a marker":
        (folder / MARKER).write_text((folder / MARKER).read_text()[:40])
    elif how == "half a file":
        data.write_bytes(data.read_bytes()[:100])
    elif how == "no file":
        data.unlink()
    elif how == "newer":
        (folder / MARKER).write_text(json.dumps(told | {"format": 99}))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("no marker", "not written to the end"),
        ("half a marker", "cannot be read"),
        ("half a file", "has 100 bytes instead of"),
        ("no file", "is missing"),
        ("newer", "has format 99"),
    ],
)
def test_what_is_not_complete_is_refused_before_anything_is_read(saved, how, text):
    damage(saved, how)
    model = Small(seed=1)
    with pytest.raises(CheckpointError, match=text):
        load_training(saved, model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), Small(seed=1).parameters(), strict=True))


def test_another_model_or_optimiser_is_refused(saved):
    with pytest.raises(CheckpointError, match=r"table.weight has shape \[5, 3\], the model's has \[5, 4\]"):
        load_training(saved, Small(width=4))
    model = Small()
    two = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    with pytest.raises(CheckpointError, match="optimiser of 1 groups, this one has 2"):
        load_training(saved, model, two)
    with pytest.raises(CheckpointError, match="no weight of the model"):
        load_training(saved, model, torch.optim.AdamW(Small().parameters()))
    model.more = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="lacks 2 weights, more"):
        load_training(saved, model)
    with pytest.raises(CheckpointError, match="there is no such directory"):
        load_training(saved / "nothing", Small())


def test_a_save_that_fails_leaves_the_earlier_one(saved, monkeypatch):
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    kept = training_state._write

    def failing(path: str, state: Any) -> None:
        kept(path, state)
        raise OSError("no space left")

    monkeypatch.setattr(training_state, "_write", failing)
    with pytest.raises(CheckpointError, match="cannot save: no space left"):
        save_training(saved, Small(seed=3))
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before
    assert [p.name for p in saved.parent.iterdir()] == ["state"]
    with pytest.raises(CheckpointError, match="extra cannot be written as JSON"):
        save_training(saved, Small(), extra={"x": object()})


def test_a_directory_of_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds something else"):
        save_training(tmp_path, Small())
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_state_that_is_not_of_the_weights_form_is_refused(tmp_path):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(CheckpointError, match="row_var of weight is neither a number nor of the weight's form"):
        save_training(tmp_path / "state", model, optimizer)
    assert not list(tmp_path.iterdir())


def test_boxes_cover_a_whole_once_whoever_holds_what():
    """Ranks that hold indices apart, uneven, and twice."""
    whole = torch.arange(7 * 3.0).reshape(7, 3)
    held = ((0, 1, 4), (1, 2, 4, 5), (3, 6))
    for dim, tensor in ((0, whole), (1, whole.T.contiguous())):
        count, rebuilt = torch.zeros_like(tensor), torch.zeros_like(tensor)
        for rank in range(3):
            part = Part(dim, held, rank, tuple(tensor.shape))
            piece = piece_of(tensor.index_select(dim, torch.tensor(held[rank])), part)
            assert piece is not None
            for offsets, view in piece.boxes(mine=True):
                at = tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))
                rebuilt[at] = view
                count[at] += 1
            mine = sum(view.numel() for _, view in piece.boxes(mine=False))
            assert mine == 3 * len(held[rank])
        assert torch.equal(rebuilt, tensor)
        assert bool((count == 1).all())
