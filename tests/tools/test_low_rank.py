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
    "words", ["rank=20,rope_dim=10", "rank=20,rope_dim=8,method=pca", "rank=20,rope_dim=8,method=transmla"]
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


def test_cells_keep_their_cut():
    for (method, cut), (rank, rope_dim) in low_rank.SIZES.items():
        assert rank + rope_dim == cut, method
        for allocation in low_rank.ALLOCATIONS:
            (found,) = parse(low_rank.pipeline(method, cut, allocation))
            assert isinstance(found, MhaToMla)
            assert (found.method, found.allocation, found.rank) == (method, allocation, rank)


def test_the_table_gives_mean_and_spread():
    result = {"baseline": 2.0, "cells": {"a": [3.0, 3.5, 4.0], "b": [2.5]}}
    lines = low_rank.table(result).splitlines()
    assert lines[2:] == ["| `a` | 3.500 | 1.500 | 1.000 | 3 |", "| `b` | 2.500 | 0.500 | 0.000 | 1 |"]


def test_a_cell_that_is_not_there_is_bad_input(capsys):
    with pytest.raises(SystemExit) as ended:
        low_rank.main(["--methods", "some"])
    assert ended.value.code == 2
    assert "there is no cell ('some', 192, 'uniform')" in capsys.readouterr().err
