"""A rank's rows of a batch along dp: averages over the ranks are averages over the trained tokens."""

from __future__ import annotations

import pytest
import torch

from latentscan.ir.errors import MeshError
from latentscan.ir.mesh import parse_mesh
from latentscan.runtime.batch import IGNORED, split_batch
from latentscan.tests.models import build


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    """Rows of which very different numbers of tokens are trained; one row of another length would be padded so."""
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 100, (6, 12), generator=g)
    labels = ids.clone()
    for row in range(6):
        labels[row, : 2 * row] = IGNORED
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def test_the_mean_of_the_ranks_losses_and_gradients_is_that_of_the_whole_batch(batch):
    model = build("llama", num_hidden_layers=1).double()
    whole = model(**batch).loss
    (wanted,) = torch.autograd.grad(whole, [model.lm_head.weight])
    parts = [split_batch(batch, parse_mesh("dp=3,tp=2").at(dp=r)) for r in range(3)]
    assert torch.equal(torch.cat([p["input_ids"] for p in parts]), batch["input_ids"])
    losses = [model(**p).loss for p in parts]
    torch.testing.assert_close(sum(losses) / 3, whole)
    found = [torch.autograd.grad(loss, [model.lm_head.weight])[0] for loss in losses]
    torch.testing.assert_close(sum(found) / 3, wanted)
    naive = [model(**{k: v for k, v in p.items() if k != "num_items_in_batch"}).loss for p in parts]  # sabotage
    assert abs(float((sum(naive) / 3 - whole).detach())) > 1e-3


def test_rows_and_tokens_are_cut_together(batch):
    mesh = parse_mesh("dp=2,cp=3")
    parts = [[split_batch(batch, mesh.at(dp=r, cp=c)) for c in range(3)] for r in range(2)]
    ids = torch.cat([torch.cat([p["input_ids"] for p in row], 1) for row in parts])
    assert torch.equal(ids, batch["input_ids"])
    trained = sum(int((p["shift_labels"] != IGNORED).sum()) for row in parts for p in row)
    assert {float(p["num_items_in_batch"]) for row in parts for p in row} == {trained / 2}
    assert trained == int((batch["labels"][:, 1:] != IGNORED).sum())


def test_what_has_no_rows_of_its_own_is_passed_on(batch):
    mesh = parse_mesh("dp=2")
    places = torch.arange(12)[None]
    part = split_batch({**batch, "position_ids": places, "scale": 2.0}, mesh.at(dp=1))
    assert part["scale"] == 2.0
    assert torch.equal(part["position_ids"], places)
    assert "num_items_in_batch" not in split_batch({"input_ids": batch["input_ids"]}, mesh)


def test_rows_that_cannot_be_shared_evenly_say_what_to_do(batch):
    with pytest.raises(MeshError, match=r"6 rows cannot be shared evenly by 4 ranks.*[Gg]ive 8 rows"):
        split_batch(batch, parse_mesh("dp=4"))
