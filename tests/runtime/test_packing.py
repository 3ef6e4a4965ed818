"""A row of several sequences gives what each gives alone: no state, no attention crosses a border."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch

from latentscan.ir.errors import RefusedError
from latentscan.runtime import packing
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import SSD_FAMILIES, build
from latentscan.tests.runtime.helpers import distance, pair, tokens, worst_gradient

LENGTHS = (9, 1, 17, 3)
PARTS = [tokens(1, n, seed=n)[0] for n in LENGTHS]


def collated(**options: Any) -> dict[str, Any]:
    """What Hugging Face's collator makes of the sequences."""
    from transformers import DataCollatorWithFlattening

    return dict(DataCollatorWithFlattening(**options)([{"input_ids": p.tolist()} for p in PARTS], return_tensors="pt"))


EVERYTHING = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
ALL_FAMILIES = [f if f == "bamba" else pytest.param(f, marks=pytest.mark.slow) for f in SSD_FAMILIES]


def separate(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([model(input_ids=p[None], use_cache=False).logits for p in PARTS], 1)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_collators_row_equals_separate_runs(family):
    model, eager = pair(family, "")
    batch = collated(**EVERYTHING)
    got = model(**batch)
    with torch.no_grad():
        want = separate(eager)
        leaking = eager(input_ids=batch["input_ids"], use_cache=False).logits
    assert distance(got.logits, want) < 1e-5
    assert distance(leaking, want) > 1e-3, "this check would not see a leak"
    got.loss.backward()
    # The same loss of the sequences one by one: every token but a sequence's first is predicted.
    losses, counted = [], 0
    for part in PARTS:
        if len(part) > 1:
            losses.append(eager(input_ids=part[None], labels=part[None], use_cache=False).loss * (len(part) - 1))
            counted += len(part) - 1
    (torch.stack(losses).sum() / counted).backward()
    assert distance(got.loss, torch.stack(losses).sum() / counted) < 1e-5
    assert worst_gradient(model, eager) < 5e-4


@pytest.mark.parametrize("family", ["mamba2", pytest.param("bamba", marks=pytest.mark.slow)])
def test_any_way_of_telling_the_borders_will_do(family):
    model, eager = pair(family, "")
    batch = collated(**EVERYTHING)
    ids = batch["input_ids"]
    ways = [
        {"seq_idx": batch["seq_idx"]},
        {"position_ids": batch["position_ids"]},
        {k: batch[k] for k in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")},
        {"cu_seqlens": batch["cu_seq_lens_q"]},
        {"seq_idx": batch["seq_idx"], "attention_mask": torch.ones_like(ids)},
    ]
    with torch.no_grad():
        want = separate(eager)
        for way in ways:
            assert distance(model(input_ids=ids, **way).logits, want) < 1e-5, list(way)


def test_attention_alone_is_told_too():
    model, eager = pair("llama", "")
    batch = collated(return_flash_attn_kwargs=True, return_position_ids=False)
    batch.pop("labels")
    with torch.no_grad():
        assert distance(model(**batch).logits, separate(eager)) < 1e-5


@pytest.mark.slow
def test_several_rows_of_several_sequences():
    model, eager = pair("mamba2", "")
    ids = tokens(2, 14)
    borders = ([0, 5, 14], [0, 11, 14])
    seq_idx = torch.stack(
        [torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(pairwise(e))]) for e in borders]
    )
    with torch.no_grad():
        got = model(input_ids=ids, seq_idx=seq_idx.int()).logits
        for row, ends in enumerate(borders):
            for a, b in pairwise(ends):
                assert distance(got[row : row + 1, a:b], eager(ids[row : row + 1, a:b], use_cache=False).logits) < 1e-5


@pytest.mark.slow
def test_lengths_change_without_another_trace():
    model, _ = pair("mamba2", "")
    with torch.no_grad():
        for total in (20, 31, 12):
            ids = tokens(1, total)
            model(input_ids=ids, seq_idx=(torch.arange(total) // 7)[None].int())
    assert len(model._latentscan_session.graphs) == 1


@pytest.mark.slow
def test_gradient_checkpointing_keeps_the_borders():
    model = build("mamba2").train()
    eager = copy.deepcopy(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    wrap(model, "")
    batch = collated(**EVERYTHING)
    got = model(**batch)
    with torch.no_grad():
        assert distance(got.logits, separate(eager)) < 1e-5
    got.loss.backward()
    plain = wrap(eager, "")
    plain(**batch).loss.backward()
    assert worst_gradient(model, plain) < 1e-4


@pytest.mark.parametrize("family", ["mamba", pytest.param("jamba", marks=pytest.mark.slow)])
def test_a_model_whose_scan_cannot_be_told_is_refused(family):
    model, eager = pair(family, "")
    batch = collated(**EVERYTHING)
    with pytest.raises(RefusedError, match="cannot be told where they start") as caught:
        model(**batch)
    assert "mixer" in str(caught.value) or "mamba" in str(caught.value)
    with pytest.raises(RefusedError, match="position_ids that start again"):
        model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    ids = tokens(2, 8)
    with torch.no_grad():  # positions that follow on pack nothing
        positions = torch.arange(8)[None]
        got = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        assert distance(got, eager(input_ids=ids, use_cache=False).logits) < 1e-5


def test_contradictions_are_refused():
    model, _ = pair("mamba2", "")
    ids, seq_idx = tokens(1, 8), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]], dtype=torch.int32)
    mask = torch.ones(1, 8, dtype=torch.long)
    mask[0, 0] = 0
    for more, message in (
        ({"seq_idx": seq_idx, "use_cache": True}, "and a cache"),
        ({"seq_idx": seq_idx, "attention_mask": mask}, "hides tokens"),
        ({"seq_idx": seq_idx[:, :5]}, r"seq_idx has shape \[1, 5\]"),
        ({"seq_idx": seq_idx, "position_ids": torch.arange(7)[None]}, "position_ids has shape"),
    ):
        with pytest.raises(RefusedError, match=message):
            model(input_ids=ids, **more)
    with pytest.raises(RefusedError, match="for 2 rows"):
        model(input_ids=tokens(2, 8), cu_seq_lens_q=torch.tensor([0, 8]))


def test_borders_are_what_anybody_tells():
    segments = packing._segments(
        {"seq_idx": torch.tensor([[4, 4, 4, 7, 7, 7]]), "cu_seqlens": torch.tensor([0, 1, 6])},
        torch.tensor([[0, 1, 2, 3, 4, 0]]), 1, 6, torch.device("cpu"), "",
    )  # fmt: skip
    assert segments.tolist() == [[0, 1, 1, 2, 2, 3]]
    assert packing._restarting(segments).tolist() == [[0, 0, 1, 0, 1, 0]]
