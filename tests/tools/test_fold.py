"""Repeated layers are said once, and nothing that differs is merged."""

from __future__ import annotations

import pytest

from latentscan.tools.fold import fold, fold_paths, ranges


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([0, 1, 2], "0..2"), ([3], "3"), ([0, 1, 5, 7, 8], "0..1,5,7..8"), (list(range(30)), "0..29")],
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text


def test_paths_fold_their_first_number():
    paths = [f"model.layers.{i}.self_attn" for i in (2, 0, 1, 7)]
    assert fold_paths(paths) == "model.layers.0..2,7.self_attn"
    assert fold_paths(["model.layers.3.mlp.experts.1"]) == "model.layers.3.mlp.experts.1"
    assert fold_paths(["lm_head"]) == "lm_head"
    assert fold_paths([""]) == ""


def test_only_what_says_the_same_is_merged():
    items = [(f"h.{i}.attn", f"stores k_{i} (32)") for i in range(4)] + [
        ("h.4.attn", "stores k_4 (64)"),
        ("h.5.mlp", "stores k_5 (32)"),
    ]
    groups = fold(items, lambda i: i[0], lambda i: i[1])
    assert [(g.module, len(g.items), g.first[1]) for g in groups] == [
        ("h.0..3.attn", 4, "stores k_0 (32)"),
        ("h.4.attn", 1, "stores k_4 (64)"),
        ("h.5.mlp", 1, "stores k_5 (32)"),
    ]
    assert sum(len(g.items) for g in groups) == len(items)
