"""Weights are read from files slice by slice, under the model's names, and a model on meta is filled from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from latentscan.ir.errors import CheckpointError, PipelineError, RefusedError
from latentscan.runtime.source import resolve
from latentscan.runtime.stored import Stored, runs
from latentscan.runtime.wrap import unwrap, wrap
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import tokens

CPU = torch.device("cpu")


def saved(family: str, folder: Path, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A tiny model, saved, and an empty one of the same form."""
    model = build(family)
    model.save_pretrained(folder, **options)  # type: ignore[operator]
    return model, resolve(str(folder)).on_meta()


def test_runs_of_indices():
    assert runs([0, 1, 2, 5, 7, 8]) == [(0, 3, 0), (5, 6, 3), (7, 9, 4)]
    assert runs([]) == []


# Experts are stored one by one in deepseek_v3 and joined in the model; gpt2's head is tied and not stored.
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "mamba2", "gpt2", "granitemoehybrid"])
@pytest.mark.parametrize("size", ["100KB", "1GB"])
def test_any_part_of_a_weight_is_what_the_model_holds(family, size, tmp_path):
    model, empty = saved(family, tmp_path, max_shard_size=size)
    stored = Stored(tmp_path, empty)
    for name, weight in model.named_parameters():
        stored.bytes_read = 0
        assert torch.equal(stored.read(name, weight, CPU), weight)
        assert stored.bytes_read == weight.nbytes
        for dim in range(weight.dim()):
            own = [i for i in range(weight.shape[dim]) if i % 3 != 1]
            stored.bytes_read = 0
            part = stored.read(name, weight, CPU, dim, own)
            assert torch.equal(part, weight.index_select(dim, torch.tensor(own)))
            assert stored.bytes_read == part.nbytes  # and no more


@pytest.mark.parametrize(
    ("family", "pipeline"),
    [
        ("gpt_neox", "latent-cache"),
        pytest.param("deepseek_v3", "mla-mm-split,mla-absorb", marks=pytest.mark.slow),
        pytest.param("gemma3", "", marks=pytest.mark.slow),
        pytest.param("mamba2", "", marks=pytest.mark.slow),
    ],
)
def test_a_model_on_meta_is_wrapped_from_its_directory(family, pipeline, tmp_path):
    model, empty = saved(family, tmp_path)
    ids = tokens(2, 9)
    wrap(model, pipeline), wrap(empty, pipeline, weights=tmp_path)
    with torch.no_grad():
        assert torch.equal(empty(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    mine, theirs = dict(empty.named_buffers()), dict(model.named_buffers())
    assert mine.keys() == theirs.keys()
    assert all(b.device == theirs[n].device and b.dtype == theirs[n].dtype for n, b in mine.items())
    unwrap(empty), unwrap(model)
    assert all(torch.equal(p, q) for p, q in zip(empty.parameters(), model.parameters(), strict=True))


def test_weights_keep_the_models_dtype_ties_and_need_of_gradients(tmp_path):
    _, empty = saved("gpt2", tmp_path)
    empty = empty.to(torch.bfloat16)
    empty.transformer.wpe.weight.requires_grad_(False)
    wrap(empty, "", weights=tmp_path)
    assert empty.lm_head.weight is empty.transformer.wte.weight
    assert {p.dtype for p in empty.parameters()} == {torch.bfloat16}
    assert [n for n, p in empty.named_parameters() if not p.requires_grad] == ["transformer.wpe.weight"]


def test_what_does_not_fit_is_refused_and_the_model_stays_empty(tmp_path):
    _, empty = saved("llama", tmp_path)
    with pytest.raises(RefusedError, match="weights=DIRECTORY"):
        wrap(empty, "")
    with pytest.raises(PipelineError, match="has its weights"):
        wrap(build("llama"), "", weights=tmp_path)
    with pytest.raises(PipelineError, match="calibrated on the whole model"):
        wrap(empty, "mha-to-mla{rank=16,rope_dim=8}", weights=tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        wrap(empty, "", weights=tmp_path / "nothing")
    other = resolve("tiny:llama{intermediate_size=64}").on_meta()
    with pytest.raises(CheckpointError, match=r"has shape \[96, 64\], the model's has \[64, 64\]"):
        wrap(other, "", weights=tmp_path)
    deeper = resolve("tiny:llama{num_hidden_layers=3}").on_meta()
    with pytest.raises(CheckpointError, match="lacks 9 weights of the model"):
        wrap(deeper, "", weights=tmp_path)
    for model in (empty, other, deeper):
        assert all(p.is_meta for p in model.parameters())
        assert "forward" not in model.__dict__
    wrap(empty, "", weights=tmp_path)


def test_weights_that_the_model_has_not_are_told(tmp_path):
    _, empty = saved("llama", tmp_path)
    fewer = resolve("tiny:llama{num_hidden_layers=1}").on_meta()
    with pytest.warns(UserWarning, match=r"holds 9 weights that the model has not, model.layers.1"):
        Stored(tmp_path, fewer)
    empty.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(RefusedError, match="quantised"):
        wrap(empty, "", weights=tmp_path)


def test_a_damaged_or_missing_file_is_named(tmp_path):
    _, empty = saved("llama", tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first = tmp_path / sorted(set(index["weight_map"].values()))[0]
    whole = first.read_bytes()
    first.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=f"{first.name}: is damaged"):
        Stored(tmp_path, empty)
    first.unlink()
    with pytest.raises(CheckpointError, match=f"{first.name}: is missing"):
        Stored(tmp_path, empty)
