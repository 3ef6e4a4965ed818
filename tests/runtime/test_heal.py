"""Healing: gradients reach what was converted, the loss falls, and a resumed run takes the very same steps."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from latentscan.ir.errors import PipelineError, RefusedError
from latentscan.runtime import heal
from latentscan.runtime.door import session_of
from latentscan.runtime.factors import LowRankUpdate, Master
from latentscan.runtime.heal import Healer, Rows, Settings, relative_distance, trainable
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build

LOW_RANK = "mha-to-mla{method=pca,rank=8,rope_dim=8},latent-cache,mla-absorb"
CALIBRATION = torch.randint(3, 128, (8, 64), generator=torch.Generator().manual_seed(1))
TEXT = [(7 * i * i + 3 * i) % 97 + 3 for i in range(900)]
SETTINGS = Settings(steps=6, batch=2, seq=16, lr=1e-3, hidden=1.0)


def teacher(**words: Any) -> Any:
    """Attention that matters: with the weights of ``build`` alone, outputs hardly depend on it."""
    model = build("llama", num_hidden_layers=1, **words)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "self_attn" in name:
                p.mul_(12)
    return model


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """The original, which has dropout, and its converted form; do not train these but copies."""
    original = teacher(attention_dropout=0.2)
    return original, wrap(copy.deepcopy(original), LOW_RANK, calibration=CALIBRATION)


def healer(pair: tuple[Any, Any], settings: Settings = SETTINGS, dtype: torch.dtype = torch.float32) -> Healer:
    original, converted = (copy.deepcopy(m).to(dtype) for m in pair)
    return Healer(converted, original, Rows.of(TEXT, settings, 128, "text"), settings)


def losses(one: Healer) -> list[float]:
    return [told["loss"] for told in one.run()]


# -- what is trained --------------------------------------------------------------------------------------------------


def test_the_converted_attentions_train_and_everything_gets_a_gradient(pair):
    original, converted = (copy.deepcopy(m) for m in pair)
    found = trainable(converted, "attention")
    made = {t for r in session_of(converted).plan.recipes for t in r.targets}
    assert made <= set(found)
    assert set(found) - made == {f"model.layers.0.self_attn.{n}_proj.weight" for n in "qo"}
    assert {n for n, p in converted.named_parameters() if p.requires_grad} == set(found)
    one = Healer(converted, original, Rows.of(TEXT, SETTINGS, 128, "text"), SETTINGS)
    divergence, hidden = one.loss(one.rows.batch(0, SETTINGS))
    (divergence + hidden).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in found.values())
    assert session_of(converted).graphs[-1].operations[0].get("latent_attention", 0) == 0  # expanded in training
    assert set(trainable(converted, "all")) == {n for n, _ in converted.named_parameters()}


def test_frozen_parameters_stay_and_trained_ones_move(pair):
    one = healer(pair)
    before = {n: p.detach().clone() for n, p in one.student.named_parameters()}
    one.step()
    moved = {n for n, p in one.student.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(one.updates)
    assert all(torch.equal(p, pair[0].get_parameter(n)) for n, p in one.teacher.named_parameters())


def test_exact_conversions_and_strangers_are_refused(pair):
    exact = wrap(build("llama", num_hidden_layers=1), "mha-to-mla,latent-cache")
    with pytest.raises(RefusedError, match="is exact: nothing was lost"):
        trainable(exact, "attention")
    with pytest.raises(RefusedError, match="is not converted"):
        trainable(build("llama", num_hidden_layers=1), "attention")
    rows = Rows.of(TEXT, SETTINGS, 128, "text")
    for words, reason in (({"num_hidden_layers": 2}, "layers is 2"), ({"vocab_size": 64}, "vocabulary is 64")):
        with pytest.raises(RefusedError, match=reason):
            Healer(pair[1], build("llama", **{"num_hidden_layers": 1} | words), rows, SETTINGS)


def test_wrong_settings_and_texts_are_told():
    for words, reason in (
        ({"steps": 0}, "steps=0 is below 1"), ({"lr": float("nan")}, "no learning rate"), ({"seq": 1}, "seq=1"),
        ({"train": "mlp"}, "not one of attention, all"), ({"hidden": -1.0}, "no weight"), ({"lora_rank": -1}, "lora"),
    ):  # fmt: skip
        with pytest.raises(PipelineError, match=reason):
            Settings(**words)
    with pytest.raises(PipelineError, match="too few for two rows of 16"):
        Rows.of(TEXT[:31], SETTINGS, 128, "text")
    with pytest.raises(PipelineError, match="the vocabulary has 50"):
        Rows.of(TEXT, SETTINGS, 50, "text")


# -- data and loss ----------------------------------------------------------------------------------------------------


def test_every_row_is_seen_once_a_pass_and_held_out_rows_never():
    settings = Settings(batch=3, seq=16)
    rows = Rows.of(TEXT, settings, 128, "text")
    count = len(rows.train)
    assert len(rows.held_out) == 2 and count + 2 == len(TEXT) // 16
    seen = torch.cat([rows.batch(step, settings) for step in range(2 * count)])[: 6 * count // 3 * 3]
    passes = seen.reshape(-1, count, 16)
    for one in passes:
        assert sorted(map(tuple, one.tolist())) == sorted(map(tuple, rows.train.tolist()))
    assert not torch.equal(passes[0], passes[1])  # in another order
    assert not torch.equal(rows.batch(0, settings), rows.batch(0, Settings(batch=3, seq=16, seed=1)))


def test_the_loss_is_the_definition_in_fp64(pair):
    one = healer(pair)
    one.student.eval()
    ids = one.rows.batch(0, SETTINGS)
    with torch.no_grad():
        divergence, hidden = one.loss(ids)
        mine, theirs = (
            m(input_ids=ids, output_hidden_states=True, use_cache=False) for m in (one.student, one.teacher)
        )
    p, q = (o.logits.double().softmax(-1) for o in (theirs, mine))
    want = (p * (p / q).log()).sum(-1).mean()
    assert float(divergence) == pytest.approx(float(want), rel=1e-4)
    a, b = mine.hidden_states[-1].double(), theirs.hidden_states[-1].double()
    assert float(hidden) == pytest.approx(float(((a - b).norm(dim=-1) / b.norm(dim=-1)).square().mean()), rel=1e-4)
    assert float(divergence) > 1e-4 and float(hidden) > 1e-4  # there is something to heal
    assert float(relative_distance(b, b)) == 0
    with torch.no_grad():
        one.student = one.teacher  # the original has nothing to learn from itself
        assert [float(x) for x in one.loss(ids)] == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.parametrize(("words", "left"), [({}, 0.5), ({"lora_rank": 4}, 0.8)], ids=["full", "lora"])
def test_the_gap_closes(pair, words, left):
    one = healer(pair, Settings(steps=40, batch=4, seq=16, lr=1e-2, hidden=1.0, **words))
    found = losses(one)
    assert sum(found[-5:]) < left * sum(found[:5])


def test_sabotage_without_optimiser_steps_it_does_not(pair, monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    found = losses(healer(pair, Settings(steps=10, batch=4, seq=16, lr=1e-2, hidden=1.0)))
    assert sum(found[-5:]) > 0.8 * sum(found[:5])


def test_a_loss_that_is_not_finite_stops_the_run(pair):
    one = healer(pair)
    with torch.no_grad():
        next(iter(one.updates.values())).parameter.fill_(float("nan"))
    with pytest.raises(RefusedError, match=r"loss of step 1 is nan.*smaller --lr"):
        one.step()


# -- resuming ---------------------------------------------------------------------------------------------------------

RUNS = {
    "full": (SETTINGS, torch.float32),
    "lora": (Settings(steps=6, batch=2, seq=16, lr=1e-3, lora_rank=3), torch.float32),
    "bf16": (Settings(steps=6, batch=2, seq=16, lr=1e-3), torch.bfloat16),
}


@pytest.mark.parametrize("run", [pytest.param(r, marks=() if r == "full" else pytest.mark.slow) for r in RUNS])
def test_a_resumed_run_takes_the_very_same_steps(pair, run, tmp_path):
    settings, dtype = RUNS[run]
    whole = healer(pair, settings, dtype)
    want = losses(whole)
    first = healer(pair, settings, dtype)
    got = [first.step()["loss"] for _ in range(3)]
    save_file(first.tensors(), tmp_path / "state")
    numbers = first.numbers()
    torch.rand(7)  # somebody else draws meanwhile
    second = healer(pair, settings, dtype)
    second.resume(load_file(tmp_path / "state"), numbers)
    assert torch.equal(torch.get_rng_state(), load_file(tmp_path / "state")["rng.cpu"])
    got += losses(second)
    assert got == want
    assert [told["loss"] for told in second.losses] == want
    ends = (dict(m.student.named_parameters()) for m in (whole, second))
    assert all(torch.equal(a, b) for a, b in zip(*(d.values() for d in ends), strict=True))


@pytest.mark.parametrize(
    "lost", ["exp_avg_sq.", *(pytest.param(x, marks=pytest.mark.slow) for x in ("value.", "step"))]
)
def test_sabotage_a_run_that_forgets_something_differs(pair, lost):
    whole = healer(pair)
    want = losses(whole)
    first = healer(pair)
    for _ in range(3):
        first.step()
    tensors, numbers = first.tensors(), first.numbers()
    second = healer(pair)
    if lost == "step":
        numbers["step"] = 2
    for name in tensors:
        if lost != "step" and name.startswith(lost):
            fresh = second.variables()[name.removeprefix("value.")] if lost == "value." else torch.zeros(())
            tensors[name] = fresh.detach().expand_as(tensors[name]).clone()
    second.resume(tensors, numbers)
    assert losses(second)[-1] != want[-1]


@pytest.mark.slow
def test_held_out_rows_do_not_change_what_comes_next(pair):
    one, other = healer(pair), healer(pair)
    got = [one.step()["loss"]]
    one.nll(one.student), one.nll(one.teacher)
    got.append(one.step()["loss"])
    assert got == [other.step()["loss"] for _ in range(2)]


# -- factors ----------------------------------------------------------------------------------------------------------


def test_factors_get_the_gradient_that_autograd_gives():
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(5, n, generator=generator) for n in (7, 4))
    parameter = torch.nn.Parameter(torch.randn(4, 7, generator=generator))
    update = LowRankUpdate(parameter, 2)
    update.variables["lora_b"].normal_(generator=generator)
    update.write()
    a, b = (update.variables[n].double().requires_grad_() for n in ("lora_a", "lora_b"))
    want = (x.double() @ (update.constants["base"].double() + b @ a).T - target.double()).square().sum()
    want.backward()
    (x @ parameter.T - target).square().sum().backward()
    update.take_gradient()
    for name, exact in (("lora_a", a), ("lora_b", b)):
        torch.testing.assert_close(update.variables[name].grad.double(), exact.grad, rtol=1e-5, atol=1e-4)
    assert parameter.grad is None
    update.variables["lora_b"].zero_()
    update.write()
    assert torch.equal(parameter, update.constants["base"])  # no factors: the frozen matrix, bitwise


def test_what_lora_trains_is_of_low_rank_and_merged(pair):
    one = healer(pair, Settings(steps=2, batch=2, seq=16, lr=1e-2, lora_rank=3))
    losses(one)
    start = dict(pair[1].named_parameters())
    for name, parameter in one.student.named_parameters():
        rank = (
            int(torch.linalg.matrix_rank((parameter - start[name]).double(), rtol=1e-4)) if parameter.dim() > 1 else 0
        )
        assert rank == (3 if name in one.updates else 0), name
    assert sum(v.numel() for v in one.variables().values()) < sum(u.parameter.numel() for u in one.updates.values())


def test_a_bf16_parameter_moves_by_less_than_its_rounding():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    update = Master(parameter)
    for _ in range(8):
        with torch.no_grad():
            update.variables[""] += 2.0**-10  # an eighth of a step of bf16 at 1
        update.write()
    assert torch.equal(parameter, torch.full((3,), 1 + 2.0**-7, dtype=torch.bfloat16))


def test_the_rate_rises_and_falls():
    settings = Settings(steps=100, lr=2.0)
    rates = [settings.rate(step) for step in range(100)]
    assert rates[0] == 0.2 and max(rates) == 2.0 == rates[9] == rates[10]
    assert all(a > b for a, b in itertools.pairwise(rates[10:])) and rates[-1] < 0.01
    assert heal.Settings(steps=1).rate(0) == heal.Settings().lr
