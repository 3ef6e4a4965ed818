"""Training a wrapped model: optimisers, gradient checkpointing, autocast, dropout, decoding in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from latentscan.ir.errors import VerifyError
from latentscan.lowering import checkpoint
from latentscan.runtime import executable
from latentscan.runtime.door import session_of
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import NO_DROPOUT, distance, original_gradients, pair, tokens, worst_gradient

SPLIT = "mla-mm-split,mla-absorb"


def train(model: Any, steps: int, **words: Any) -> list[float]:
    """Losses of AdamW steps on batches of changing length."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, **words)
    losses = []
    for step in range(steps):
        ids = tokens(2, 13 + step % 3, seed=step % 2)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("family", "pipeline"),
    [
        ("deepseek_v3", SPLIT),
        ("gpt2", "latent-cache,mla-absorb"),
        pytest.param("minicpm3", "mla-mm-split", marks=pytest.mark.slow),
        pytest.param("zamba2", "", marks=pytest.mark.slow),
        pytest.param("llama", "", marks=pytest.mark.slow),
    ],
)
def test_five_steps_of_adamw_equal_eager_training(family, pipeline):
    model, eager = pair(family, pipeline)
    got, want = train(model.train(), 5), train(eager.train(), 5)
    assert got == pytest.approx(want, abs=1e-5)
    assert want[4] < want[0]
    # The weights agree too, under their old names (AdamW is element by element, so a split changes nothing).
    for name, value in model.state_dict().items():
        assert distance(value, eager.state_dict()[name]) < 2e-3, name
    assert len(session_of(model).graphs) == 1


def test_the_comparison_of_losses_notices_an_untrained_weight():
    """Sabotage: new Parameters that the optimiser does not hold give other losses."""
    model, eager = pair("deepseek_v3", "mla-mm-split")
    for name, p in model.named_parameters():
        if "_part" in name:
            p.requires_grad_(False)
    assert train(model, 5) != pytest.approx(train(eager, 5), abs=1e-5)


def test_decoding_after_a_step_uses_the_new_weights():
    model, eager = pair("deepseek_v3", SPLIT)
    ids = tokens(2, 9)
    words = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1}
    before = model.generate(ids, **words)
    for _ in range(2):
        train(model.train(), 3)
        train(eager.train(), 3)
        model.eval()
        eager.eval()
        assert torch.equal(model.generate(ids, **words), eager.generate(ids, **words))
    assert not torch.equal(model.generate(ids, **words), before)
    assert len(session_of(model).graphs) == 3  # training, prefill, decode


# -- gradient checkpointing -----------------------------------------------------------------------------------------


def saved_bytes(model: Any, length: int = 40) -> int:
    """Bytes that autograd keeps for the backward pass of one step, each storage once and parameters left out."""
    mine = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in mine:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    ids = tokens(2, length)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return sum(t.untyped_storage().nbytes() for t in kept.values())


@pytest.mark.parametrize(
    ("family", "pipeline"),
    [
        ("zamba2", ""),  # regions within regions
        pytest.param("llama", "", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", SPLIT, marks=pytest.mark.slow),
        pytest.param("gpt2", "latent-cache,mla-absorb", marks=pytest.mark.slow),
        pytest.param("bamba", "", marks=pytest.mark.slow),
        pytest.param("mamba2", "", marks=pytest.mark.slow),
        pytest.param("gemma3", "", marks=pytest.mark.slow),
    ],
)
def test_gradient_checkpointing_recomputes_and_gives_the_same_gradients(family, pipeline):
    plain, eager = pair(family, pipeline)
    model = build(family, **NO_DROPOUT.get(family, {}))
    for m in (model, plain, eager):
        m.train()
    for m in (model, eager):
        m.gradient_checkpointing_enable()
    wrap(model, pipeline)
    least, most, theirs = saved_bytes(model), saved_bytes(plain), saved_bytes(eager)
    assert least < most / 3
    assert least < theirs * 1.1  # as little as the library's own checkpointing keeps
    assert worst_gradient(model, eager) < 1e-4
    assert worst_gradient(plain, eager) < 1e-4
    with torch.no_grad():
        model.eval()
        assert distance(model(tokens()).logits, plain.eval()(tokens()).logits) < 2e-6


def test_the_measure_of_kept_bytes_notices_lost_regions(monkeypatch):
    """Sabotage: without outlining, a checkpointed model keeps everything."""
    monkeypatch.setattr(executable, "outline_checkpoints", lambda graph, higher_order: 0)
    plain, _ = pair("llama", "")
    model = build("llama").train()
    model.gradient_checkpointing_enable()
    wrap(model)
    assert saved_bytes(model) > saved_bytes(plain.train()) * 0.9


def test_the_hook_of_the_librarys_checkpointing_is_never_traced(monkeypatch):
    """Dynamo refuses its requires_grad_() before torch 2.13. Planning puts it back, a call does not need it."""
    from latentscan.runtime import wrap as wrapping

    model = build("llama").train()
    model.gradient_checkpointing_enable()
    hooks, seen = model.get_input_embeddings()._forward_hooks, []
    capture = wrapping.capture

    def counting(*arguments, **options):
        seen.append(len(hooks))
        return capture(*arguments, **options)

    monkeypatch.setattr(wrapping, "capture", counting)
    assert len(hooks) == 1
    wrapping.planning_graph(model)
    assert seen == [0] and len(hooks) == 1
    wrap(model)
    model(tokens(), labels=tokens()).loss.backward()
    assert not hooks
    assert model.get_input_embeddings().weight.grad is not None


def test_regions_are_outlined_once_each(monkeypatch):
    counts = []
    original = checkpoint.outline_checkpoints

    def counted(graph, higher_order):
        counts.append(original(graph, higher_order=higher_order))
        return counts[-1]

    monkeypatch.setattr(executable, "outline_checkpoints", counted)
    model = build("llama").train()
    model.gradient_checkpointing_enable()
    wrap(model)
    saved_bytes(model)
    with torch.no_grad():
        model(tokens())  # nothing is recomputed where nothing is kept
    assert counts == [2, 0]


def test_dropout_is_drawn_again_alike_in_a_recomputed_region():
    model = build("gpt2").train()
    model.gradient_checkpointing_enable()
    eager = copy.deepcopy(model)
    wrap(model)
    ids = tokens()
    for m in (model, eager):
        torch.manual_seed(11)
        m(ids, labels=ids, use_cache=False).loss.backward()
    assert worst_gradient(model, eager) < 1e-5


# -- dropout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "pipeline", "words"),
    [
        ("gpt2", "", {}),
        ("deepseek_v3", "mla-mm-split", {"attention_dropout": 0.2}),
        pytest.param("opt", "", {"dropout": 0.1}, marks=pytest.mark.slow),
    ],
)
def test_dropout_draws_as_eager_does(family, pipeline, words):
    model = build(family, **words).train()
    eager = copy.deepcopy(model)
    wrap(model, pipeline)
    ids = tokens()
    for m in (model, eager):
        torch.manual_seed(11)
        m(ids, labels=ids, use_cache=False).loss.backward()
    assert worst_gradient(model, eager) < 1e-5
    torch.manual_seed(12)
    eager.zero_grad()
    eager(ids, labels=ids, use_cache=False).loss.backward()
    assert worst_gradient(model, eager) > 1e-3  # sabotage: another seed


EXACT = "mha-to-mla,latent-cache,mla-absorb"


def test_a_model_that_keeps_its_dropout_trains_and_generates_in_its_latent_form():
    """The latent's projections are its own Parameters, so every graph must use them; absorption says why it waits."""
    model = build("gpt2", num_hidden_layers=1)
    eager = copy.deepcopy(model)
    wrap(model, EXACT)
    ids = tokens(2, 9)
    for m in (model.train(), eager.train()):
        torch.manual_seed(11)
        m(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert worst_gradient(model, eager) < 1e-5
    conversion, _, absorption = session_of(model).graphs[-1].records
    assert len(conversion.sites) == 1
    assert [(r.rule, "p = 0.1" in r.reason) for r in absorption.refusals] == [("attention-dropout", True)]
    found = []
    for m in (model, eager):
        torch.manual_seed(12)
        found.append(m.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=-1))
    assert torch.equal(*found)


def test_grouped_heads_in_low_rank_train_with_dropout():
    """The library repeats each key for its group before it drops weights. p = 1e-9 takes that way and drops none."""
    model = build("llama", num_hidden_layers=1, attention_dropout=1e-9)
    wrap(model, "mha-to-mla{rank=24,rope_dim=16}", calibration=tokens(4, 32))
    ids = tokens(2, 9)
    want = model(ids, labels=ids, use_cache=False).loss
    got = model.train()(ids, labels=ids, use_cache=False).loss
    got.backward()
    assert abs(float(got - want)) < 1e-5
    assert [len(g.records[0].sites) for g in session_of(model).graphs] == [1, 1]
    assert all(p.grad is not None for n, p in model.named_parameters() if "latentscan" in n)


def test_dropout_that_is_written_out_is_refused_by_name():
    model = wrap(build("gpt2", num_hidden_layers=1, attn_implementation="eager"), EXACT).train()
    with pytest.raises(VerifyError, match=r"h\.0\.attn.*dropout of 0\.1.*Set the attention dropout to 0"):
        model(tokens(2, 9), use_cache=False)
    model.eval()(tokens(2, 9), use_cache=False)


# -- autocast -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "pipeline"),
    [("deepseek_v3", SPLIT), *(pytest.param(f, "", marks=pytest.mark.slow) for f in ("mamba2", "llama"))],
)
def test_autocast_is_as_close_as_eager_autocast(family, pipeline):
    model, eager = pair(family, pipeline)
    ids = tokens()
    exact = eager(ids, labels=ids)
    exact.loss.backward()
    reference = {n: p.grad.clone() for n, p in eager.named_parameters() if p.grad is not None}
    eager.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = model(ids, labels=ids), eager(ids, labels=ids)
    assert got.logits.dtype == want.logits.dtype
    error, theirs = distance(got.logits.float(), exact.logits), distance(want.logits.float(), exact.logits)
    assert 1e-4 < error < 2 * theirs + 1e-3  # rounded to bf16, and no worse than the library
    got.loss.backward()
    want.loss.backward()
    mine = original_gradients(model)
    ours = max(distance(mine[n], g) for n, g in reference.items())
    assert ours < 2 * max(distance(eager.get_parameter(n).grad, g) for n, g in reference.items()) + 1e-2
    assert {g.dtype for g in mine.values() if g is not None} == {torch.float32}
    # And without autocast again: another graph, exact as before.
    assert distance(model(ids).logits, exact.logits) < 2e-6


# -- parts ----------------------------------------------------------------------------------------------------------


def test_frozen_parameters_get_no_gradient_and_the_others_get_theirs():
    model, eager = pair("deepseek_v3", SPLIT)
    for m in (model, eager):
        for name, p in m.named_parameters():
            p.requires_grad_("self_attn" in name)
    ids = tokens()
    for m in (model, eager):
        m(ids, labels=ids, use_cache=False).loss.backward()
    assert worst_gradient(model, eager) < 5e-6


@pytest.mark.slow
def test_gradients_accumulate_over_batches_and_reach_input_embeddings():
    model, eager = pair("deepseek_v3", SPLIT)
    given: list[nn.Parameter] = []
    for m in (model, eager):
        table = m.get_input_embeddings().weight.detach()
        for seed in (0, 1):
            ids = tokens(2, 13, seed=seed)
            m(ids, labels=ids, use_cache=False).loss.backward()
        x = nn.Parameter(table[tokens()].clone())
        m(inputs_embeds=x, labels=tokens(), use_cache=False).loss.backward()
        given.append(x)
    assert worst_gradient(model, eager) < 5e-6
    assert distance(given[0].grad, given[1].grad) < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_inductor_compiles_the_rest_and_trains(recompute):
    """One small model; what is left after lowering goes to Inductor."""
    model = build("llama", num_hidden_layers=1).train()
    if recompute:
        model.gradient_checkpointing_enable()
    eager = copy.deepcopy(model)
    wrap(model, inductor=True)
    assert train(model, 3) == pytest.approx(train(eager, 3), abs=1e-4)
    with torch.no_grad():
        model.eval()
        words = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": -1}
        assert torch.equal(model.generate(tokens(2, 9), **words), eager.eval().generate(tokens(2, 9), **words))
