"""Every family, wrapped with every exact pass that applies to it: forward, all gradients and generate as in eager."""

from __future__ import annotations

import math

import pytest
import torch

import latentscan
from latentscan.runtime.tiny import build
from latentscan.tests.families import FAMILIES, KIN, PIPELINES
from latentscan.tests.passes.test_families import committed

# What `docs/families.md` says applies, in pipeline order, without the approximate form.
EXACT = {
    "llama": "mha-to-mla,latent-cache",
    "qwen2": "mha-to-mla,latent-cache",
    "qwen3": "mha-to-mla,latent-cache",
    "mistral": "mha-to-mla,latent-cache",
    "gemma2": "mha-to-mla,latent-cache",
    "gemma3": "mha-to-mla,latent-cache",
    "gpt2": "mha-to-mla,latent-cache,mla-absorb",
    "gpt_neox": "mha-to-mla,mla-mm-split,latent-cache,mla-absorb",
    "gptj": "mha-to-mla,latent-cache,mla-absorb",
    "phi": "mha-to-mla,mla-mm-split,latent-cache,mla-absorb",
    "stablelm": "mha-to-mla,mla-mm-split,latent-cache,mla-absorb",
    "phi3": "mha-to-mla,latent-cache",
    "opt": "mha-to-mla,latent-cache,mla-absorb",
    "bloom": "mha-to-mla,latent-cache,mla-absorb",
    "mpt": "mha-to-mla,latent-cache,mla-absorb",
    "falcon": "mha-to-mla,latent-cache",
    "olmo2": "mha-to-mla,latent-cache",
    "smollm3": "mha-to-mla,latent-cache,mla-absorb",
    "cohere2": "mha-to-mla,latent-cache,mla-absorb",
    "gpt_oss": "mha-to-mla,latent-cache",
    "deepseek_v2": "mla-mm-split,mla-absorb",
    "deepseek_v3": "mla-mm-split,mla-absorb",
    "minicpm3": "mla-mm-split,mla-absorb",
    "mamba2": "",
    "bamba": "mha-to-mla,mla-mm-split,latent-cache",
    "falcon_h1": "mha-to-mla,latent-cache",
    "nemotron_h": "mha-to-mla,latent-cache",
    "zamba2": "mha-to-mla,latent-cache",
    "granitemoehybrid": "mha-to-mla,latent-cache",
}
NO_DROPOUT = {
    "gptj": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "bloom": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "opt": {"dropout": 0.0, "attention_dropout": 0.0},
}


def tolerance(width: int) -> float:
    """fp32 rounding over sums of ``width`` terms, ten layers' worth of them, relative to the largest value."""
    return 10 * math.sqrt(width) * torch.finfo(torch.float32).eps


def ids(rows: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(seed))


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-12))


def test_every_family_has_every_pass_that_applies() -> None:
    """The pipelines above are those that the committed table says apply."""
    assert set(EXACT) == set(FAMILIES)
    for family, cells in committed().items():
        says = dict(zip(PIPELINES, cells, strict=True))
        applies = [name for name in ("mha-to-mla", "mla-mm-split") if _applied(says[name])]
        cached = says["mha-to-mla,latent-cache"] if "mha-to-mla" in applies else says["latent-cache"]
        absorbed = says["mha-to-mla,latent-cache,mla-absorb"] if _applied(cached) else says["mla-absorb"]
        applies += [name for name, cell in (("latent-cache", cached), ("mla-absorb", absorbed)) if _applied(cell)]
        assert EXACT[family] == ",".join(applies), family


def _applied(cell: str) -> bool:
    return cell != "nothing" and not cell.startswith("refused")


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow if f in KIN else ()) for f in FAMILIES])
def test_forward_gradients_and_generate_equal_eager(family: str) -> None:
    overrides = NO_DROPOUT.get(family, {})
    eager, wrapped = build(family, **overrides), build(family, **overrides)
    latentscan.wrap(wrapped, EXACT[family])
    names = {id(p): n for n, p in wrapped.named_parameters()}
    for seed, (rows, length) in enumerate([(2, 13), (3, 21)]):
        batch = ids(rows, length, seed)
        mask = torch.ones_like(batch)
        mask[1, : length // 3] = 0
        outs = []
        for model in (eager, wrapped):
            model.train()
            model.zero_grad()
            logits = model(input_ids=batch, attention_mask=mask, use_cache=False).logits[mask != 0]
            weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
            (logits * weight).mean().backward()
            outs.append(logits.detach())
        assert relative(outs[1], outs[0]) < tolerance(64)
        want = {n: p.grad for n, p in eager.named_parameters()}
        got = {names[id(p)]: p.grad for p in wrapped.parameters()}
        for recipe in wrapped.__dict__["_latentscan_session"].plan.recipes:
            assert recipe.inverse is not None  # rows moved about, so gradients move back the same way
            if any(s in want for s in recipe.sources):
                grads = recipe.inverse(*[got.pop(t) for t in recipe.targets])
                got.update(zip(recipe.sources, grads, strict=True))
        assert set(got) == set(want)
        for name, grad in want.items():
            if grad is None:
                assert got[name] is None or not got[name].any(), name
                continue
            assert relative(got[name], grad) < 4 * tolerance(64), name
    eager.eval(), wrapped.eval()
    prompt = ids(2, 9, 7)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 12, "do_sample": False}
    expected, actual = eager.generate(prompt, **options), wrapped.generate(prompt, **options)
    assert torch.equal(actual, expected)
    beams = {**options, "num_beams": 3, "max_new_tokens": 8}
    assert torch.equal(wrapped.generate(prompt, **beams), eager.generate(prompt, **beams))


def test_a_wrong_weight_is_seen() -> None:
    """The parity test's tolerance sits far below what one wrong row does."""
    eager, wrapped = build("deepseek_v3"), build("deepseek_v3")
    latentscan.wrap(wrapped, EXACT["deepseek_v3"])
    with torch.no_grad():
        part = next(p for n, p in wrapped.named_parameters() if n.endswith("weight_part0"))
        part[0] += 0.05
        batch = ids(2, 13, 0)
        error = relative(
            wrapped(input_ids=batch, use_cache=False).logits, eager(input_ids=batch, use_cache=False).logits
        )
    assert error > 10 * tolerance(64)
