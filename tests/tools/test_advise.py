"""The advisor and the break-even formulas: numbers worked out by hand for one tiny model, and how it decides."""

from __future__ import annotations

import json

import pytest

from latentscan.ir.errors import PipelineError
from latentscan.runtime.source import resolve
from latentscan.tools import advise as advise_module
from latentscan.tools.advise import advise, chunk_length, memory_of
from latentscan.tools.break_even import Layer
from latentscan.tools.cli import main

P = 77_168  # parameters of tiny:mamba2
TINY = Layer(heads=8, head_dim=16, groups=2, d_state=16, conv=4, element=2)


@pytest.fixture(scope="module")
def steps():
    """The traced steps, once: the advice for other sizes is arithmetic on them."""
    made: dict[bool, object] = {}
    kept = advise_module.traced_step

    def once(model, *, recompute):
        if recompute not in made:
            made[recompute] = kept(model, recompute=recompute)
        return made[recompute]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advise_module, "traced_step", once)
        yield once


def given(gpus: int, memory: str = "1G", **words):
    return advise(resolve("tiny:mamba2"), gpus=gpus, memory=memory_of(memory), **{"seq": 512, **words})


def test_bytes_of_a_rank_are_those_of_the_formulas(steps):
    told = given(4, batch=2)  # two rows: no dp=4
    best = told["best"]
    assert (best["dp"], best["tp"], best["cp"]) == (2, 1, 2)
    assert best["weights"] == best["gradients"] == 2 * P
    assert best["master"] == 4 * P // 4
    assert best["optimizer"] == 8 * P // 4
    assert told["refused"]["dp=4,tp=1,cp=1"] == "2 rows over dp=4"
    # Kept a token and layer, in bf16: the norm's fp32 input, its square root's operand 2 x 64 fp32, in_proj's input 64,
    # its output 328, the convolution's 192, the scan's 128, the gated norm's 128: 4 x 128 + 2 (64 + 328 + 192 + 256).
    alone = told["one_gpu"]
    layer = 512 * (2 * (64 + 328 + 192 + 128 + 128))
    assert alone["activations"] > 2 * layer
    assert alone["enough"]
    # A rank has one row of half the tokens, less than half a row's bytes only by what does not grow with the tokens.
    assert best["activations"] == pytest.approx(alone["activations"] / 2, rel=0.02)


def test_less_memory_brings_recomputation_and_then_nothing(steps):
    roomy = given(2)
    assert not roomy["best"]["recompute"]
    between = (roomy["best"]["total"] + roomy["least"]["total"]) // 2
    assert roomy["least"]["recompute"]
    tight = given(2, str(between))
    assert tight["best"]["recompute"]
    assert tight["best"]["total"] <= between < roomy["best"]["total"]
    assert not tight["one_gpu"]["enough"]
    none = given(2, str(roomy["least"]["total"] - 1))
    assert none["best"] is None


def test_shards_and_heads_that_do_not_fit_are_named(steps):
    told = given(3, seq=512)
    assert told["refused"]["dp=1,tp=1,cp=3"] == "512 tokens over cp=3"
    assert told["refused"]["dp=1,tp=3,cp=1"] == "8 Mamba heads over tp=3"
    told = given(8, seq=16)
    assert told["refused"]["dp=1,tp=1,cp=8"] == "a shard of 2 tokens is shorter than 3"
    with pytest.raises(PipelineError, match=r"no way to share 1 rows of 512 tokens over 7 GPUs: dp=7.*--batch"):
        given(7, seq=512, batch=1)


def test_many_gpus_are_tried_by_their_divisors():
    found = advise_module._degrees(99_991 * 2)  # twice a prime
    assert sorted(found)[0] == (1, 1, 2 * 99_991)
    assert len(found) == 9 and all(dp * tp * cp == 2 * 99_991 for dp, tp, cp in found)


def test_volumes_by_hand():
    """H 8, P 16, N 16, G 2, d_conv 4, bf16: a state is 4 x 8 x 257 = 8224 bytes a row."""
    assert TINY.states(2, 1, "all-gather") == 8224
    assert TINY.states(8, 3, "all-gather") == 7 * 3 * 8224
    assert TINY.states(8, 3, "log-scan") == 3 * 3 * 8224
    assert TINY.tail(2) == 2 * 2 * 3 * (128 + 64)
    # x, z, y: 384; B and C for max(2, 2) groups: 64; dt: 8
    assert TINY.by_heads(2, 1, 512) == 2 * 512 * 456 // 4
    assert TINY.break_even(2, "all-gather") == -(-4 * 8224 // (2 * 456))
    length = TINY.break_even(4, "all-gather")
    assert TINY.by_heads(4, 1, length) >= TINY.states(4, 1, "all-gather") > TINY.by_heads(4, 1, length - 4)
    # MATH 6 for a 2.7B layer: all-gather sends fewer bytes from about R^2 N / 1.5 tokens on.
    big = Layer(80, 64, 1, 128, 4, 2)
    assert big.break_even(2, "all-gather") == pytest.approx(4 * 128 / 1.5, rel=0.06)


def test_a_chunk_is_longer_where_the_state_is_larger():
    found = [chunk_length(Layer(80, 64, 1, n, 4, 2)) for n in (16, 64, 256)]
    assert found == sorted(found)
    assert set(found) <= set(advise_module.CHUNKS)


@pytest.mark.parametrize("text", ["", "80X", "-1G", "zero", "nan", "inf", "1e999G"])
def test_memory_that_is_no_size_is_bad_input(text):
    with pytest.raises(PipelineError, match="is no size"):
        memory_of(text)
    assert memory_of("80G") == memory_of("80GiB") == 80 << 30


def test_the_verb_prints_the_formulas_and_one_json_object(steps, capsys):
    words = ["advise", "tiny:mamba2", "--gpus", "2", "--seq", "512", "--memory"]
    assert main([*words, "1G"]) == 0
    text = capsys.readouterr().out
    for word in ("one GPU is enough", "advice: dp=2", "8 P / (dp cp tp)", "chunk length", "tiny:mamba2: "):
        assert word in text
    assert main([*words, "1K", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["best"] is None
    assert main([*words, "much"]) == 2
