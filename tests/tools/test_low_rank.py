"""The table of low-rank methods: its eager attention computes what the wrapped model does, and it reads its words."""

from __future__ import annotations

import copy

import pytest
import torch

from latentscan.passes.mha_to_mla import MhaToMla
from latentscan.passes.pipeline import parse
from latentscan.runtime.calibration import statistics_for
from latentscan.runtime.wrap import planning_graph, wrap
from latentscan.tests.ir.building import close
from latentscan.tests.models import build
from latentscan.tools import low_rank

TEXT = torch.randint(3, 128, (4, 32), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "words",
    [
        "rank=20,rope_dim=10",
        "rank=20,rope_dim=8,method=pca",
        "rank=20,rope_dim=8,method=transmla",
        "rank=20,rope_dim=6,method=transmla-unfolded",
    ],
)
def test_the_eager_attention_computes_what_the_wrapped_model_does(words):
    model = build("llama").eval()
    pipeline = f"mha-to-mla{{{words}}}"
    statistics = statistics_for(model, parse(pipeline), TEXT)
    made = low_rank.converted(model, pipeline, statistics, planning_graph(model))
    with torch.no_grad():
        plain = model(TEXT[:2], use_cache=False).logits
        with low_rank.replaced(model, made):
            got, loss = model(TEXT[:2], use_cache=False).logits, low_rank.nll(model, TEXT, 3)
        assert torch.equal(model(TEXT[:2], use_cache=False).logits, plain)
        want = wrap(copy.deepcopy(model), pipeline, calibration=TEXT)(TEXT[:2], use_cache=False).logits
    assert close(got, want) < 1e-5
    assert close(got, plain) > 1e-3
    assert loss > 0


def test_cells_keep_their_cut_and_their_method():
    every = low_rank.cells(low_rank.METHODS, low_rank.CUTS, low_rank.ALLOCATIONS, choose=False)
    assert len(every) == 4 * 2 * 2
    for cell in every + low_rank.cells(low_rank.METHODS, low_rank.CUTS, (), choose=True):
        (found,) = parse(cell.words)
        assert isinstance(found, MhaToMla)
        assert (found.method, found.allocation, found.rank) == (cell.method, cell.allocation, cell.cut - cell.rope_dim)
        assert cell.rope_dim in low_rank.CANDIDATES[cell.method, cell.cut]


def test_sizes_are_chosen_on_other_rows_than_the_table_is_measured_on():
    rows = torch.arange(200)[:, None]
    chosen, measured = (set(low_rank.held_out(rows, 12, choose).flatten().tolist()) for choose in (True, False))
    assert (len(chosen), len(measured), chosen & measured) == (8, 12, set())


def test_what_is_measured_is_found_again_and_nothing_else_is(tmp_path):
    """A line a measurement; a run that was killed within a line goes on after it."""
    path, cell = tmp_path / "some" / "cells.jsonl", {"method": "pca", "cut": 96}
    results = low_rank.Results(path)
    results.add(3.25, 12.34, cell=cell, seed=0, rows=16)
    results.add(3.5, 1.0, cell=cell, seed=1, rows=16)
    again = low_rank.Results(path)
    assert again.find(cell=cell, seed=1, rows=16) == 3.5
    assert again.find(cell=cell, seed=2, rows=16) is None and again.find(cell=cell, seed=1, rows=8) is None
    with path.open("a") as file:
        file.write('{"cell": {"meth')
    broken = low_rank.Results(path)
    assert broken.find(cell=cell, seed=0, rows=16) == 3.25
    broken.add(4.0, 1.0, cell=cell, seed=2, rows=16)
    assert low_rank.Results(path).find(cell=cell, seed=2, rows=16) == 4.0


def test_the_table_gives_mean_and_spread():
    cells = [low_rank.Cell("pca", 96, "uniform", 48), low_rank.Cell("two-sided", 192, "energy", 48)]
    result = {"baseline": 2.0, "cells": {cells[0]: [3.0, 3.5, 4.0], cells[1]: [2.5]}}
    lines = low_rank.table(result).splitlines()
    assert lines[2:] == [
        "| 75% | `pca` | uniform | 48/48 | 3.500 | +1.500 | 1.000 | 3 |",
        "| 50% | `two-sided` | energy | 144/48 | 2.500 | +0.500 | 0.000 | 1 |",
    ]


@pytest.mark.parametrize("words", [["--methods", "some"], ["--cuts", "192,100"], ["--allocations", "even"]])
def test_a_cell_that_is_not_there_is_bad_input(words, capsys):
    with pytest.raises(SystemExit) as ended:
        low_rank.main(words)
    assert ended.value.code == 2
    assert f"there is no {words[1].split(',')[-1]!r} among {words[0][2:]}" in capsys.readouterr().err
