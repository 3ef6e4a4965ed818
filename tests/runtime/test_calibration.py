"""Calibration: streamed moments are those of the whole, a killed run goes on where it was, bad data are errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from latentscan.ir.errors import CheckpointError, PipelineError
from latentscan.passes.pipeline import parse
from latentscan.runtime import calibration as module
from latentscan.runtime.calibration import Calibration, Moments, statistics_for, token_batches
from latentscan.tests.ir.building import close, random
from latentscan.tests.models import build

ATTN = "model.layers.0.self_attn"
TOKENS = torch.randint(3, 128, (6, 40), generator=torch.Generator().manual_seed(5))
PASSES = parse("mha-to-mla{rank=16,rope_dim=8}")


class StoppedError(Exception):
    pass


def tiny(family: str = "llama", **words):
    return build(family, num_hidden_layers=1, **words).double().eval()


def tensors(moments: Moments) -> list[torch.Tensor]:
    return [getattr(moments, name) for name in module._TENSORS]


# -- moments ----------------------------------------------------------------------------------------------------------


def test_streamed_moments_are_those_of_the_whole():
    x, w = random(6, 10, 5), random(6, 10, seed=1).abs()
    mass = random(6, 3, 10, seed=2).abs()
    made = Moments.empty(5)
    for row in range(0, 6, 2):
        part = slice(row, row + 2)
        made.add(x[part].float().double(), w[part], mass[part].sum(0))
    x = x.float().double()
    flat, weights = x.reshape(-1, 5), w.reshape(-1, 1)
    want = [
        flat.T @ flat / 60, flat.mean(0),
        (flat * weights).T @ flat / weights.sum(), (flat * weights).sum(0) / weights.sum(), mass.sum(0),
    ]  # fmt: skip
    assert all(close(a, b) < 1e-13 for a, b in zip(tensors(made), want, strict=True))
    assert (made.tokens, made.length) == (60, 10)
    # Sabotage: a row that is left out is seen.
    assert close(tensors(made)[0], flat[10:].T @ flat[10:] / 50) > 1e-3


def test_rows_of_several_lengths_count_by_their_tokens():
    x = random(1, 9, 4)
    made = Moments.empty(4)
    made.add(x[:, :6], torch.ones(1, 6), torch.ones(2, 6))
    made.add(x[:, 6:], torch.ones(1, 3), torch.ones(2, 3))
    assert close(made.covariance, x[0].T @ x[0] / 9) < 1e-14
    assert made.distances.tolist() == [[2.0] * 3 + [1.0] * 3] * 2
    assert made.length == 6


def test_memory_does_not_grow_with_the_number_of_tokens():
    few = statistics_for(tiny(), PASSES, TOKENS[:1])[ATTN]
    many = statistics_for(tiny(), PASSES, TOKENS)[ATTN]
    assert many.tokens == 6 * few.tokens
    assert [t.shape for t in tensors(many)] == [t.shape for t in tensors(few)]
    assert {t.dtype for t in tensors(many)} == {torch.float64}


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.slow), "phi3", "gemma2"])
def test_attention_is_the_model_s_own(family):
    """Weights and distances against the probabilities that the library's eager attention gives.

    Separate and fused projections, biases, a softcap and a window shorter than the rows.
    """
    words = {"sliding_window": 7} if family == "gemma2" else {}
    model = build(family, num_hidden_layers=1, attn_implementation="eager", **words).double().eval()
    found = statistics_for(build(family, num_hidden_layers=1, **words).double().eval(), PASSES, TOKENS)[ATTN]
    if family == "gemma2":
        assert model.config.layer_types[0] == "sliding_attention"
    captured = []
    handle = model.model.layers[0].self_attn.register_forward_hook(lambda m, a, out: captured.append(out[1]))
    inputs = []
    projection = getattr(model.model.layers[0].self_attn, "qkv_proj" if family == "phi3" else "k_proj")
    projection.register_forward_pre_hook(lambda m, a: inputs.append(a[0]))
    with torch.no_grad():
        model(TOKENS, use_cache=False)
    handle.remove()
    p, x = captured[0].double(), inputs[0]  # [B, heads, L, L]
    received = p.mean(1).sum(1)
    distance = torch.stack([p.diagonal(-d, 2, 3).sum((0, 2)) for d in range(p.shape[-1])], 1)
    assert close(found.distances, distance) < 1e-5  # probabilities are in fp32
    want = torch.einsum("bl,bld,ble->de", received, x, x) / received.sum()
    assert close(found.attended, want) < 1e-5
    assert close(found.attended, found.covariance) > 1e-3  # attention does count


# -- rows -------------------------------------------------------------------------------------------------------------


def test_rows_are_drawn_by_the_seed():
    model = tiny()

    def rows(**words):
        return torch.cat(token_batches(model, Calibration(TOKENS, **words)))

    assert torch.equal(rows(), TOKENS)
    assert torch.equal(rows(rows=2), TOKENS[:2])
    assert torch.equal(rows(rows=3, seed=1), rows(rows=3, seed=1))
    assert not torch.equal(rows(rows=3, seed=1), rows(rows=3, seed=2))
    assert sorted(rows(seed=4).flatten().tolist()) == sorted(TOKENS.flatten().tolist())
    with pytest.raises(PipelineError, match="has 6 rows, 7 are asked for"):
        rows(rows=7)
    for words in ({"rows": 0}, {"length": 0}, {"batch": -1}):
        with pytest.raises(PipelineError, match="is below 1"):
            Calibration(TOKENS, **words)


def test_batches_do_not_matter():
    one, other = (statistics_for(tiny(), PASSES, Calibration(TOKENS, batch=b))[ATTN] for b in (1, 4))
    assert all(close(a, b) < 1e-12 for a, b in zip(tensors(one), tensors(other), strict=True))


def test_options_beyond_a_limit_are_told_before_anything_is_computed(monkeypatch):
    def begin(*_):
        raise StoppedError

    monkeypatch.setattr(module, "progress", begin)
    for options, text in (
        ("rank=999,rope_dim=8", "rank=999 is larger than 56"),
        ("rank=8,rope_dim=7", "rope_dim=7 does not fit"),
        ("rank=8,rope_dim=12,method=transmla", "Give 16 or 8 or 4 or 2"),
    ):
        with pytest.raises(PipelineError) as caught:
            statistics_for(tiny(), parse(f"mha-to-mla{{{options}}}"), TOKENS)
        assert text in str(caught.value)
    with pytest.raises(StoppedError):  # where the batches would begin
        statistics_for(tiny(), PASSES, TOKENS)


# -- resuming ---------------------------------------------------------------------------------------------------------


def stopped_after(count: int, model, calibration: Calibration) -> None:
    """Run a calibration that dies in the forward pass after ``count`` batches."""
    seen = 0

    def count_and_stop(*_):
        nonlocal seen
        seen += 1
        if seen > count:
            raise StoppedError

    handle = model.model.embed_tokens.register_forward_pre_hook(count_and_stop)
    try:
        with pytest.raises(StoppedError):
            statistics_for(model, PASSES, calibration)
    finally:
        handle.remove()


def batches_run(model, calibration: Calibration, passes=PASSES) -> tuple[int, dict[str, Moments]]:
    seen = []
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda *_: seen.append(1))
    try:
        found = statistics_for(model, passes, calibration)
    finally:
        handle.remove()
    return len(seen), found


def test_an_interrupted_calibration_goes_on_where_it_was(tmp_path):
    model, state = tiny(), tmp_path / "state"
    calibration = Calibration(TOKENS, state=state, every=0, batch=1)
    traced, _ = batches_run(model, Calibration(TOKENS, batch=1))
    stopped_after(traced - 6 + 3, model, calibration)
    run, found = batches_run(model, calibration)
    assert run == traced - 3
    whole = statistics_for(model, PASSES, TOKENS)
    assert all(close(a, b) < 1e-13 for a, b in zip(tensors(found[ATTN]), tensors(whole[ATTN]), strict=True))
    assert (found[ATTN].tokens, found[ATTN].length) == (whole[ATTN].tokens, whole[ATTN].length)
    again, same = batches_run(model, calibration)  # all is done: nothing is run
    assert again == traced - 6
    assert all(torch.equal(a, b) for a, b in zip(tensors(found[ATTN]), tensors(same[ATTN]), strict=True))
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("change", ["weights", "tokens", "batch"])
def test_a_state_of_something_else_is_not_taken(tmp_path, change):
    state = tmp_path / "state"
    statistics_for(tiny(), PASSES, Calibration(TOKENS, state=state))
    model, tokens, batch = tiny(), TOKENS.clone(), 4
    if change == "weights":
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight[0, 0] += 1e-3
    elif change == "tokens":
        tokens[3, 3] = 4 if tokens[3, 3] != 4 else 5
    else:
        batch = 3
    fresh = statistics_for(model, PASSES, Calibration(tokens, batch=batch))
    found = statistics_for(model, PASSES, Calibration(tokens, state=state, batch=batch))
    assert all(torch.equal(a, b) for a, b in zip(tensors(found[ATTN]), tensors(fresh[ATTN]), strict=True))


def test_a_file_that_is_no_state_is_an_error_and_stays(tmp_path):
    broken, other = tmp_path / "broken", tmp_path / "other"
    broken.write_bytes(b"nothing")
    save_file({"a": torch.zeros(1)}, str(other))
    for path, text in ((broken, "cannot be read"), (other, "no calibration state")):
        before = path.read_bytes()
        with pytest.raises(CheckpointError, match=text):
            statistics_for(tiny(), PASSES, Calibration(TOKENS, state=path))
        assert path.read_bytes() == before
    with pytest.raises(CheckpointError, match="cannot be written"):
        statistics_for(tiny(), PASSES, Calibration(TOKENS, state=broken / "below"))


_KILLED = """
import sys, torch
from latentscan.runtime import calibration
from latentscan.tools import convert
from pathlib import Path
plain = calibration._write
def write(path, mark, done, moments):
    plain(path, mark, done, moments)
    print(done, flush=True)
    if sys.argv[4] == "kill" and done == 2:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
calibration._write = write
made = calibration.Calibration
convert.Calibration = lambda data, state: made(data, state=state, every=0, batch=1)
convert.convert(sys.argv[1], Path(sys.argv[2]), "mha-to-mla{rank=24,rope_dim=8}", calibration=Path(sys.argv[3]))
"""


@pytest.mark.slow
def test_convert_killed_while_it_calibrates_goes_on(tmp_path):
    """SIGKILL after the second of four batches: the next run begins with the third, and leaves nothing behind."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 50, encoding="utf-8")
    runs = []
    for last in ("kill", "go on"):
        words = [sys.executable, "-c", _KILLED, "tiny:llama", str(out), str(text), last]
        runs.append(subprocess.run(words, capture_output=True, text=True, env=os.environ, check=False))
    assert runs[0].returncode == -signal.SIGKILL
    assert runs[0].stdout.split() == ["1", "2"]
    assert runs[1].returncode == 0, runs[1].stderr
    assert runs[1].stdout.split() == ["3", "4"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "text.txt"]
