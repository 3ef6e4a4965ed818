"""What the runtime tests share: token batches, the equality they ask for, gradients under the original names."""

from __future__ import annotations

import copy
from typing import Any

import torch

from latentscan.runtime.door import session_of
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build

torch.set_num_threads(1)

# A family and the pipelines that apply to it; "" is the canonical form alone.
PIPELINES: dict[str, tuple[str, ...]] = {
    "deepseek_v3": ("", "mla-absorb", "mla-mm-split,mla-absorb"),
    "deepseek_v2": ("", "mla-mm-split,mla-absorb"),
    "minicpm3": ("mla-absorb", "mla-mm-split,mla-absorb"),
    "gpt2": ("", "latent-cache,mla-absorb"),
    "opt": ("", "latent-cache,mla-absorb"),
    "gpt_neox": ("latent-cache,mla-absorb",),
    "llama": ("",),
}
CASES = [(family, pipeline) for family, pipelines in PIPELINES.items() for pipeline in pipelines]
NO_DROPOUT = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "opt": {"dropout": 0.0}}


def tokens(batch: int = 2, length: int = 13, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


def ragged(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Ids, a mask with padding on the left of every other row, and labels that leave the padding out.

    And the first token after it: what predicts it is padding, whose row eager attention gives other numbers.
    """
    ids, mask = tokens(batch, length), torch.ones(batch, length, dtype=torch.long)
    mask[::2, : length // 3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[::2, length // 3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """max|difference| / max|expected|: how logits and gradients are compared here."""
    return float((actual - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1e-9))


def pair(family: str, pipeline: str, **overrides: Any) -> tuple[Any, Any]:
    """A wrapped model, and the same model as the library runs it."""
    model = build(family, **{**NO_DROPOUT.get(family, {}), **overrides})
    return wrap(copy.deepcopy(model), pipeline), model


def original_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients of a wrapped model under the names that the model had before."""
    found = {name: p.grad for name, p in model.named_parameters()}
    return in_original_names(model, found)


def in_original_names(model: Any, values: dict[str, Any]) -> dict[str, Any]:
    session = session_of(model)
    for recipe in reversed(session.plan.recipes if session else ()):
        if all(values.get(t) is not None for t in recipe.targets):
            assert recipe.inverse is not None
            values.update(zip(recipe.sources, recipe.inverse(*[values.pop(t) for t in recipe.targets]), strict=True))
    return values


def worst_gradient(model: Any, reference: Any) -> float:
    """The largest distance of any parameter's gradient; every parameter must have one on both sides or on neither."""
    mine, theirs = original_gradients(model), {name: p.grad for name, p in reference.named_parameters()}
    assert mine.keys() == theirs.keys()
    assert {n for n, g in mine.items() if g is None} == {n for n, g in theirs.items() if g is None}
    return max(distance(mine[n], g) for n, g in theirs.items() if g is not None)
