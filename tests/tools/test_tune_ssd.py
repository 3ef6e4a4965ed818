"""A user's table of tiles: written whole, read where it is given, and nowhere else."""

from __future__ import annotations

import json

import pytest
import torch

from latentscan.ir.errors import KernelError
from latentscan.kernels.triton.chunk_configs import Backward, Forward, Hopper, HopperBackward
from latentscan.kernels.triton.chunk_tuning import Row, Table, candidates, parse_table, read_table
from latentscan.tools import bench_ssd, tune_ssd
from latentscan.tools.cli import BAD_INPUT, main


def row(way="forward", config=None, tokens=1024, ms=1.0, shape=(4, 64, 1, 16)):
    return Row(way, "cpu", "bfloat16", shape, tokens, config or Forward(segments=3), ms)


def tensors(L=1024, b=1):
    x = torch.zeros(b, L, 4, 64, dtype=torch.bfloat16)
    return x, torch.zeros(b, L, 1, 16, dtype=torch.bfloat16)


def test_a_table_is_read_as_it_was_written(tmp_path):
    rows = (
        row(),
        row("backward", HopperBackward(segments=2)),
        row(config=Hopper(pieces=7), tokens=9),
        row("backward", Backward(heads=2), 3),
    )
    path = tmp_path / "tiles.json"
    tune_ssd.write(path, Table(rows).text())
    assert read_table(path) == Table(rows)
    assert [p.name for p in tmp_path.iterdir()] == ["tiles.json"]


def test_the_nearest_length_of_the_same_class_is_taken():
    table = Table((row(tokens=1024), row(tokens=8192, config=Forward(segments=9)), row("backward", Backward(heads=2))))
    assert table.forward(*tensors(1100)).segments == 3
    assert table.forward(*tensors(2048, b=3)).segments == 9
    assert table.backward(*tensors()).heads == 2
    assert table.forward(*tensors(10)) is None, "too far from every length"
    x, B = tensors()
    assert table.forward(x.float(), B) is None
    assert table.forward(x[:, :, :2], B) is None


def test_new_rows_replace_those_of_their_class_and_length():
    table = Table((row(), row(tokens=5))).with_rows([row(ms=0.5, config=Forward(segments=8))])
    assert len(table.rows) == 2
    assert table.forward(*tensors()).segments == 8


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", '{"schema": 2, "rows": []}', '{"schema": 1}', '{"schema": 1, "rows": [{"config": {"kind": "Big"}}]}',
        json.dumps({"schema": 1, "rows": [{"way": "forward", "config": {"kind": "Backward"}}]}),
        json.dumps({"schema": 1, "rows": [{"way": "forward", "config": {"kind": "Forward", "tile": 1}}]}),
    ],
)  # fmt: skip
def test_what_is_no_table_is_bad_input_with_its_name(tmp_path, capsys, text):
    path = tmp_path / "tiles.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"tiles\.json"):
        read_table(path)
    assert main(["bench", "ssd", "--table", str(path)]) == BAD_INPUT
    assert "tiles.json" in capsys.readouterr().err.replace("\n", "")


def test_a_table_is_either_made_or_given(tmp_path, capsys):
    there = str(tmp_path / "a.json")
    assert main(["bench", "ssd", "--tune", there, "--table", there]) == BAD_INPUT
    assert main(["bench", "ssd", "--table", there]) == BAD_INPUT
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("base", [Forward(), Hopper(), Backward(), HopperBackward()], ids=lambda c: type(c).__name__)
def test_the_shipped_choice_is_tried_first_and_none_twice(base):
    tried = list(candidates(base, 40, 132))
    assert tried[0] == base
    assert len(set(tried)) == len(tried) >= 4


def test_the_fastest_that_runs_is_written_and_the_rest_of_the_table_stays(tmp_path):
    path = tmp_path / "tiles.json"
    tune_ssd.write(path, Table((row(tokens=5, shape=(1, 2, 3, 4)),)).text())
    ins = bench_ssd.inputs(1, 256, 4, 64, 1, 16, device="cpu")
    calls = []

    def time(run):
        calls.append(run)
        if len(calls) == 2:
            raise RuntimeError("out of shared memory")
        return {3: 0.25}.get(len(calls), 1.0)

    said = []
    told = tune_ssd.tune(path, ins, time, said.append)
    assert [(t["way"], t["shipped_ms"], len(t["failed"])) for t in told] == [("forward", 1.0, 1), ("backward", 1.0, 0)]
    ((tile, why),) = told[0]["failed"]
    assert tile.startswith("Forward(") and why == "RuntimeError: out of shared memory"
    assert any(tile in line and why in line for line in said)
    assert told[0]["ms"] == 0.25
    table = read_table(path)
    assert len(table.rows) == 3 and table.rows[0].shape == (1, 2, 3, 4)
    assert repr(table.forward(ins["x"], ins["B"])) == told[0]["config"]
    with pytest.raises(RuntimeError):  # the shipped choice itself does not run: no table
        tune_ssd.tune(path, ins, lambda run: (_ for _ in ()).throw(RuntimeError("no")), lambda text: None)
    assert read_table(path) == table


def test_a_backward_is_timed_after_the_forward_that_was_chosen(tmp_path, monkeypatch):
    """With the states that this forward kept, and told its tiles."""
    from latentscan.kernels.triton import chunk_scan as ours

    kept, seen = object(), []

    def forward(*_, keep_starts=False, **options):
        return (None, None, kept) if keep_starts else (None, None)

    def backward(*_, **options):
        seen.append(options)

    monkeypatch.setattr(ours, "choose_forward", lambda *_: Hopper(pieces=11))
    monkeypatch.setattr(ours, "choose_backward", lambda *_: HopperBackward(pieces=11))
    monkeypatch.setattr(ours, "chunk_scan", forward)
    monkeypatch.setattr(ours, "chunk_scan_backward", backward)
    ins = bench_ssd.inputs(1, 256, 4, 64, 1, 16, device="cpu")
    tune_ssd.tune(tmp_path / "tiles.json", ins, lambda run: (run(), 1.0)[1], lambda text: None)
    assert len(seen) >= 4 and all(options["starts"] is kept for options in seen)
    assert parse_table(seen[0]["tiles"]).forward(ins["x"], ins["B"]) == Hopper(pieces=11)


def test_a_fault_that_is_not_about_what_fits_is_no_tile_that_failed(tmp_path):
    ins = bench_ssd.inputs(1, 256, 4, 64, 1, 16, device="cpu")
    calls = []

    def time(run):
        calls.append(run)
        if len(calls) == 2:
            raise TypeError("a fault of ours")
        return 1.0

    with pytest.raises(TypeError, match="of ours"):
        tune_ssd.tune(tmp_path / "tiles.json", ins, time, lambda text: None)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_leaves_nothing(tmp_path):
    with pytest.raises(KernelError, match="cannot be written"):
        tune_ssd.write(tmp_path / "none" / "tiles.json", "x")
    assert not list(tmp_path.iterdir())
