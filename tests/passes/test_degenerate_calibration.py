"""Calibration data that say too little, and weights that come out infinite, are refused; the model stays as it was."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from latentscan import wrap
from latentscan.ir.errors import PipelineError, RefusedError
from latentscan.ir.weights import Recipe
from latentscan.passes import lowrank
from latentscan.runtime.own import make_parameters
from latentscan.tests.ir.building import random
from latentscan.tests.models import build
from latentscan.tools.cli import main

RANK = 24
FEW = {
    "one token": (torch.tensor([[7]]), f"are 1 tokens, too few for a latent of {RANK}"),
    "fewer tokens than features": (torch.arange(3, 26).reshape(1, 23), "are 23 tokens, too few"),
    "pads": (torch.zeros(2, 16, dtype=torch.long), "span 0 directions"),
    "one id": (torch.full((2, 32), 7), r"span [01] directions"),
    "two ids": (torch.tensor([[7, 9] * 16] * 2), r"span [12] directions"),
}


@pytest.mark.parametrize("method", ["two-sided,allocation=energy", "two-sided", "pca", "transmla", "transmla-unfolded"])
@pytest.mark.parametrize("kind", FEW)
def test_too_little_is_refused_before_anything_is_computed(kind, method, monkeypatch):
    tokens, why = FEW[kind]
    model = build("llama", num_hidden_layers=1).eval()
    before = {n: p.clone() for n, p in model.named_parameters()}
    for name in ("solve", "balanced_joint_pca", "choose_pairs", "rotary_pairs_by_energy"):
        monkeypatch.setattr(lowrank, name, None)
    with pytest.raises(PipelineError, match=why) as told:
        wrap(model, f"mha-to-mla{{rank={RANK},rope_dim=8,method={method}}}", calibration=tokens)
    assert "self_attn" in str(told.value) and "smaller rank" in str(told.value)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(torch.equal(after[n], before[n]) for n in before)


@pytest.mark.parametrize("method", ["two-sided", "pca", "transmla"])
@pytest.mark.parametrize("rows", [(4, 32), (1, 40)])
def test_little_that_suffices_converts(rows, method):
    tokens = torch.randint(3, 128, rows, generator=torch.Generator().manual_seed(3))
    model = build("llama").eval()
    wrap(model, f"mha-to-mla{{rank={RANK},rope_dim=8,method={method}}}", calibration=tokens)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(1, 24), st.integers(0, 99), st.sampled_from([torch.float32, torch.float64]))
def test_directions_are_those_of_the_data(count, width, seed, dtype):
    """[count, width] inputs, each seen 1 to 3 times and rounded: turned unit vectors, then their opposites."""
    units = torch.linalg.qr(random(width, width, seed=seed)).Q
    x = torch.cat([units, -units] * 15)[:count].to(dtype)
    seen = torch.cat([x, x[: count // 2], x[: count // 3]]).double()
    assert lowrank.directions(seen.T @ seen / len(seen)) == min(count, width)
    seen = seen + 3
    moment, mean = seen.T @ seen / len(seen), seen.mean(0)
    assert lowrank.directions(moment, mean) == min(count - 1, width)


def test_the_command_refuses_in_one_line_and_writes_nothing(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("a")
    arguments = ["convert", "tiny:llama", str(tmp_path / "out"), "-p", "mha-to-mla{rank=24,rope_dim=8}"]
    assert main([*arguments, "--calibration", str(text)]) == 2
    told = capsys.readouterr().err
    assert "are 1 tokens" in told and told.count("\n") == 1 and "Traceback" not in told
    assert sorted(p.name for p in tmp_path.iterdir()) == ["text.txt"]


# -- every pass's weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_refused_by_name(bad, dtype):
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, 4, dtype=dtype)

    def broken(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = w.clone()
        out[1, 2] = bad
        return w * 2, out

    def recipe(function):
        return Recipe(("inner.weight",), ("inner.good", "inner.bad"), "some-pass", "inner", function)

    model = Layer()
    with pytest.raises(RefusedError, match=r"inner: some-pass makes inner\.bad of shape \[4, 3\] not finite"):
        make_parameters(model, [recipe(broken)])
    assert sorted(dict(model.named_parameters())) == ["inner.bias", "inner.weight"]
    make_parameters(model, [recipe(lambda w: (w * 2, w))])  # a finite one passes
    with torch.no_grad():
        model.inner.weight[0, 0] = bad
    with pytest.raises(RefusedError, match=r"and so is inner\.weight, which it is made from"):
        recipe(lambda w: (w, w)).make(model.inner.weight)


def test_a_pass_that_makes_an_infinite_weight_leaves_the_model_as_it_was(monkeypatch):
    true = lowrank.solve

    def wrong(*given):
        made = true(*given)
        made.up_value[0, 0, 0] = float("inf")
        return made

    monkeypatch.setattr(lowrank, "solve", wrong)
    model = build("llama", num_hidden_layers=1).eval()
    names = [n for n, _ in model.named_parameters()]
    tokens = torch.randint(3, 128, (4, 32), generator=torch.Generator().manual_seed(3))
    with pytest.raises(RefusedError, match=r"self_attn: mha-to-mla makes .*v_up_weight .* not finite in torch.float32"):
        wrap(model, f"mha-to-mla{{rank={RANK},rope_dim=8}}", calibration=tokens)
    assert [n for n, _ in model.named_parameters()] == names
