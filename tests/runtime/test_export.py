"""Export as DeepSeek-V3: plain transformers and latentscan.load compute what the converted model does, or a refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from latentscan.ir.errors import CheckpointError, RefusedError
from latentscan.ir.mla import attentions
from latentscan.kernels.reference.rope import rope
from latentscan.runtime import export as module
from latentscan.runtime.checkpoint import load
from latentscan.runtime.door import session_of
from latentscan.runtime.export import attention_state, export, neutral_norm, pair_slots, rope_parameters
from latentscan.runtime.export_parts import Parts, parts_of
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build
from latentscan.tools.cli import BAD_INPUT, OK, main

CALIBRATION = torch.randint(3, 128, (8, 64), generator=torch.Generator().manual_seed(1))
IDS = torch.randint(3, 128, (2, 21), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, :4] = 0
LOW_RANK = "mha-to-mla{method=pca,rank=24,rope_dim=8},latent-cache,mla-absorb"
TWO_SIDED = "mha-to-mla{rank=12,rope_dim=8},latent-cache,mla-absorb"
PLAIN = """
import json, sys, torch
from transformers import AutoModelForCausalLM
assert not any(n.split(".")[0] == "latentscan" for n in sys.modules)
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
given = torch.load(sys.argv[2])
with torch.no_grad():
    out = model(**given, use_cache=True)
cache = getattr(out, "cache", None) or out.past_key_values
words = dict(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
layer = cache.layers[0]
held = (layer.keys.numel() + layer.values.numel()) // given["input_ids"].numel()
torch.save([out.logits, model.generate(**given, **words), held, layer.keys.shape[1]], sys.argv[3])
assert not any(n.split(".")[0] == "latentscan" for n in sys.modules)
"""


def sharp(family: str = "llama", **words: Any) -> Any:
    """A model whose outputs depend on its attention, and whose norms have weights."""
    model = build(family, **words)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "self_attn" in name:
                p.mul_(8)
            if "norm" in name:
                p.copy_(1 + 0.3 * torch.randn(p.shape, generator=generator))
    return model


def converted(pipeline: str = LOW_RANK, family: str = "llama", **words: Any) -> Any:
    return wrap(sharp(family, **words), pipeline, calibration=CALIBRATION if "rank=" in pipeline else None)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=MASK, use_cache=False).logits[MASK.bool()]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


# kind -> (pipeline, overrides, cached elements: of the converted and the exported model).
# n_kv rotated heads lie side by side in one; layers that rotate other pairs make it wider; the constant is one more.
FIT = {
    "MQA, exact": ("mha-to-mla,latent-cache", {"num_key_value_heads": 1}, (32, 33)),
    "MQA, low rank": (LOW_RANK.replace("24", "12"), {"num_key_value_heads": 1, "num_hidden_layers": 1}, (20, 21)),
    "GQA, low rank, tied": (LOW_RANK, {"num_hidden_layers": 1, "tie_word_embeddings": True}, (32, 33)),
    "MQA, two-sided": (TWO_SIDED, {"num_key_value_heads": 1, "num_hidden_layers": 1}, (20, 21)),
    "GQA, two-sided": (TWO_SIDED, {"num_hidden_layers": 1}, (20, 21)),
    "MHA, low rank": (LOW_RANK, {"num_key_value_heads": 4, "num_hidden_layers": 1}, (32, 33)),
    "GQA, exact": ("mha-to-mla", {"num_hidden_layers": 1}, (64, 65)),
}


@pytest.mark.parametrize("kind", [k if k == "GQA, two-sided" else pytest.param(k, marks=pytest.mark.slow) for k in FIT])
def test_plain_transformers_and_latentscan_read_the_export(kind, tmp_path):
    pipeline, words, elements = FIT[kind]
    model = converted(pipeline, **words)
    made = export(model)
    assert made.elements == elements and made.error <= made.tolerance
    wrap(made.model, made.pipeline)
    made.model.save_pretrained(tmp_path / "m")
    want = logits(model)
    words = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    tokens = model.generate(input_ids=IDS, attention_mask=MASK, **words)
    again = load(tmp_path / "m")
    assert distance(logits(again), want) <= made.tolerance
    assert torch.equal(again.generate(input_ids=IDS, attention_mask=MASK, **words), tokens)
    torch.save({"input_ids": IDS, "attention_mask": MASK}, tmp_path / "given")
    arguments = [str(tmp_path / name) for name in ("m", "given", "told")]
    subprocess.run([sys.executable, "-I", "-c", PLAIN, *arguments], check=True)
    theirs, generated, held, heads = torch.load(tmp_path / "told")
    assert distance(theirs[MASK.bool()], want) <= made.tolerance
    assert torch.equal(generated, tokens)
    if heads == 1:  # the library itself caches the latent (older ones expand it first)
        assert held == elements[1]
    assert json.loads((tmp_path / "m" / "latentscan.json").read_text())["reads_as_plain_model"] is True


def test_layers_that_rotate_other_pairs_share_one_table():
    """Two layers, each with pairs of its own: what a layer does not rotate by a slot is zero there."""
    model = converted()
    facts = session_of(model).plan.facts
    pairs = [facts["mha-to-mla", f"model.layers.{i}.self_attn"]["pairs"] for i in range(2)]
    made = export(model)
    union = len({p for text in pairs for p in text.split("|")})
    assert made.elements == (32, 24 + 1 + 2 * 2 * union)
    assert distance(logits(made.model), logits(model)) <= made.tolerance


def test_bf16_models_stay_bf16_and_as_close_as_bf16_is():
    model = sharp(num_hidden_layers=1).to(torch.bfloat16)
    wrap(model, LOW_RANK, calibration=CALIBRATION)
    made = export(model)
    assert {p.dtype for p in made.model.parameters()} == {torch.bfloat16}
    assert 1e-4 < made.error <= made.tolerance < 0.5


# -- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "gpt2": ("mha-to-mla,latent-cache", {}, "gpt2.*has no rms_norm_eps"),
    "opt": ("mha-to-mla,latent-cache", {}, "opt.*has no rms_norm_eps"),
    "gpt_neox": ("mha-to-mla", {}, "gpt_neox.*has no rms_norm_eps"),
    "qwen3": ("mha-to-mla", {}, "not linear in the layer's input .a norm"),
    "gemma2": ("mha-to-mla", {}, "softcap|has no hidden_act"),
    "phi3": ("mha-to-mla", {}, "counterpart|place in DeepSeek|layout"),
    "qwen2": (LOW_RANK, {}, "is a bias of queries, and DeepSeek-V3's have none"),
    "mistral": ("mha-to-mla", {"sliding_window": 8}, "window"),
}


@pytest.mark.parametrize(
    "family", [f if f in ("gpt2", "qwen2") else pytest.param(f, marks=pytest.mark.slow) for f in REFUSED]
)
def test_what_does_not_fit_is_refused_with_the_reason_and_a_remedy(family):
    pipeline, words, reason = REFUSED[family]
    model = sharp(family, **words)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("proj.bias"):
                p.fill_(0.1)
    wrap(model, pipeline, calibration=CALIBRATION if "rank=" in pipeline else None)
    with pytest.raises(RefusedError, match=reason) as caught:
        export(model)
    assert caught.value.remedy and "\n" not in str(caught.value)
    if "rank=" in pipeline:
        assert "rank" not in caught.value.remedy and "latentscan.load" in caught.value.remedy  # it has one


@pytest.mark.parametrize(("pipeline", "advised"), [("mha-to-mla", True), (LOW_RANK, False)])
def test_a_rank_is_advised_to_a_model_without_one_only(pipeline, advised, monkeypatch):
    """Whatever the reason is, one that another conversion might remove."""

    def refuse(*_: Any) -> None:
        raise RefusedError("a reason", where="a module", remedy=module.INDIRECT)

    made = converted(pipeline, num_hidden_layers=1)
    monkeypatch.setattr(module, "parts_of", refuse)
    with pytest.raises(RefusedError, match="a module: a reason") as caught:
        export(made)
    assert ("give mha-to-mla a rank" in caught.value.remedy) == advised
    assert "latentscan.load" in caught.value.remedy


def test_rotations_that_change_with_length_are_refused():
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64} | factors
    model = wrap(sharp(num_hidden_layers=1, rope_parameters=rope), "mha-to-mla")
    with pytest.raises(RefusedError, match=r"rope_type 'longrope'.*one fixed table"):
        export(model)
    with pytest.raises(RefusedError, match="not converted"):
        export(sharp(num_hidden_layers=1))


@pytest.fixture(scope="module")
def model() -> Any:
    return converted(num_hidden_layers=1)


def _ordinary_norm(down: Any, gain: Any, width: int, dtype: Any) -> tuple[float, float, float]:
    return 1.0, 1.0, 1.0


def _other_angles(slots: Any, longest: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0}


def _a_thousandth_off(*given: Any) -> tuple[float, float, float]:
    constant, weight, undo = neutral_norm(*given)
    return constant, weight, undo * 1.001


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("neutral_norm", _ordinary_norm),
        ("rope_parameters", _other_angles),
        ("neutral_norm", _a_thousandth_off),
    ],
    ids=["norm", "angles", "a thousandth"],
)
def test_sabotage_the_comparison_of_logits_finds_a_wrong_export(model, monkeypatch, name, wrong):
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(RefusedError, match="as DeepSeek-V3 its logits would differ"):
        export(model)


# -- the algebra ------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 9), st.integers(0, 5), st.integers(2, 40), st.floats(-8, 8), st.integers(0, 1000))
def test_the_norm_is_neutral_to_rounding(d_c, extra, hidden, magnitude, seed):
    """fp32, with the library's formula, against the latent itself in fp64."""
    g = torch.Generator().manual_seed(seed)
    down = torch.randn(d_c, hidden, generator=g, dtype=torch.float64) * 2.0**magnitude
    gain = torch.randn(hidden, generator=g)
    x = torch.randn(50, hidden, generator=g, dtype=torch.float64)
    x_hat = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    latent = (x_hat * gain) @ down.T
    width = d_c + extra + 1
    constant, weight, undo = neutral_norm(down, gain, width, torch.float32)
    full = torch.zeros(50, width)
    full[:, :d_c], full[:, -1] = latent.float(), constant
    normed = weight * (full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + 1e-6))
    error = (normed[:, :d_c].double() * undo - latent).abs() / latent.abs().clamp_min(1e-300)
    assert float(error.max()) < 8 * 2.0**-24  # a handful of roundings, relative, for every element
    full[:, -1] = constant / 1000  # sabotage: a constant that is too small
    wrong = weight * (full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + 1e-6)) * 1000**-1
    assert float(((wrong[:, :d_c].double() * undo - latent) / latent).abs().max()) > 8 * 2.0**-24


def test_a_dtype_that_cannot_hold_the_constant_is_refused():
    down = torch.full((4, 8), 3000.0, dtype=torch.float64)
    with pytest.raises(RefusedError, match=r"is beyond torch\.float16"):
        neutral_norm(down, torch.ones(8), 5, torch.float16)
    neutral_norm(down, torch.ones(8), 5, torch.bfloat16)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.integers(1, 5), st.integers(1, 6), st.integers(0, 99)
)
def test_scores_and_values_are_those_of_the_parts_in_fp64(groups, per_group, d_n, d_v, d_c, seed):
    """Random parts of two layers with different pairs, through the exported weights and the definition."""
    g = torch.Generator().manual_seed(seed)
    heads, hidden = groups * per_group, 7
    table = torch.tensor([1.0, 0.5, 0.11, 0.013])

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64)

    def part(pairs: list[int]) -> Parts:
        count = len(pairs) * groups
        query_rope = rand(heads, groups, len(pairs), 2, hidden)
        own = torch.arange(heads)[:, None] // per_group == torch.arange(groups)
        query_rope = query_rope * own[:, :, None, None, None]
        return Parts(
            "m", 0.3, rand(heads, d_n, hidden), rand(heads, d_n, d_c), rand(heads, d_v, d_c), rand(d_c, hidden),
            query_rope.flatten(1, 2), rand(count, 2, hidden), rand(heads, d_n), rand(heads, d_v), rand(count, 2),
            torch.arange(groups).repeat_interleave(len(pairs)), table[pairs].repeat(groups),
        )  # fmt: skip

    parts = [part([0, 2]), part([1, 2, 3])]
    slots = pair_slots(parts)
    assert len(slots) == 4 * groups

    class config:
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim, kv_lora_rank = d_n + 1, 2 * len(slots), d_v, d_c + 2

    x = rand(6, hidden)
    angles = torch.arange(6, dtype=torch.float64)[:, None] * torch.tensor([f for f, _ in slots], dtype=torch.float64)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[None] for f in (torch.cos, torch.sin))
    for one in parts:
        made = attention_state(one, slots, config, torch.ones(hidden), torch.float64)
        q = (x @ made["q_proj.weight"].T).unflatten(-1, (heads, -1)).transpose(0, 1)
        a = x @ made["kv_a_proj_with_mqa.weight"].T + made["kv_a_proj_with_mqa.bias"]
        latent, key = a[:, : d_c + 2], a[:, d_c + 2 :]
        latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt() * made["kv_a_layernorm.weight"]
        kv = (latent @ made["kv_b_proj.weight"].T).unflatten(-1, (heads, -1)).transpose(0, 1)
        k_n, v = kv.split([d_n + 1, d_v], -1)
        turned_q = rope(q[None, ..., d_n + 1 :], cos, sin, layout="half")[0]
        turned_k = rope(key[None, None], cos, sin, layout="half")[0]
        got = (q[..., : d_n + 1] @ k_n.mT + turned_q @ turned_k.mT) * (d_n + 1 + 2 * len(slots)) ** -0.5
        c = x @ one.down.T
        plain = torch.einsum("hnc,tc->htn", one.key_up, c) + one.key_bias[:, None]
        want = torch.einsum("hnd,sd,htn->hst", one.query, x, plain)
        for index in range(len(one.frequencies)):
            turn = torch.arange(6, dtype=torch.float64) * one.frequencies[index].double()
            qp = torch.einsum("hmd,sd->hsm", one.query_rope[:, index], x)
            kp = torch.einsum("md,td->tm", one.key_rope[index], x) + one.key_rope_bias[index]
            zq, zk = torch.complex(*qp.unbind(-1)), torch.complex(*kp.unbind(-1))
            z = (zq * torch.polar(torch.ones(6).double(), turn))[:, :, None]
            want = want + (z * (zk * torch.polar(torch.ones(6).double(), turn)).conj()).real
        torch.testing.assert_close(got, want * one.scale, rtol=1e-9, atol=1e-9)
        values = torch.einsum("hvc,tc->htv", one.value_up, c) + one.value_bias[:, None]
        torch.testing.assert_close(v, values, rtol=1e-9, atol=1e-9)


DEFAULT = (1.0 / 500.0 ** (torch.arange(0, 6, 2, dtype=torch.float) / 6)).tolist()


@pytest.mark.parametrize("table", [DEFAULT, [1.0], [1.0, 0.1, 0.09], [0.7, 0.2, 0.2, 0.05], [0.3]])
def test_any_table_of_angles_is_in_the_configuration(table):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    words = rope_parameters([(f, 0) for f in table], 64)
    assert (words["rope_type"] == "default") == (table in (DEFAULT, [1.0]))
    config = DeepseekV3Config(qk_rope_head_dim=2 * len(table), rope_parameters=words, max_position_embeddings=64)
    rotary = DeepseekV3RotaryEmbedding(config)
    for length in (5, 100):  # also beyond what the configuration calls the original length
        cos, _ = rotary(torch.zeros(1), torch.arange(length)[None])
        angles = torch.arange(length)[:, None].double() * torch.tensor(table, dtype=torch.float64)
        assert float((cos[0, :, : len(table)].double() - angles.cos()).abs().max()) < length * 2.0**-22
    assert rotary.attention_scaling == 1.0


def test_rotated_heads_are_read_from_the_graph_and_not_from_the_passs_name(model):
    graph = module._converted_graph(model)
    (node,) = attentions(graph)
    part = parts_of(model, graph, node)
    assert part.key_rope.shape[0] == 4 and part.group.tolist() == [0, 0, 1, 1]  # 2 KV heads with 2 pairs each
    zero = part.query_rope.reshape(4, 2, 2, 2, -1).abs().sum((2, 3, 4)) == 0
    assert zero.tolist() == [[False, True], [False, True], [True, False], [True, False]]
    assert part.down.shape == (24, 64) and part.scale == pytest.approx(16**-0.5)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_exports_what_it_converts_and_what_it_converted(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(map(chr, range(32, 127))) * 40)  # bytes are tokens: more kinds than the rank
    words = ["tiny:llama{num_hidden_layers=1}", "-p", LOW_RANK, "--calibration", str(text)]
    assert main(["convert", *words, str(tmp_path / "a"), "--export", "deepseek-v3", "--json"]) == OK
    told = json.loads(capsys.readouterr().out)
    assert told["elements"] == [32, 33] and told["error"] <= told["tolerance"] and told["reads_as_plain_model"]
    assert told["weight_bytes"][1] > told["weight_bytes"][0]
    original = told["weights"]["before"]
    assert main(["convert", *words, str(tmp_path / "a"), "--export", "deepseek-v3"]) == OK
    out = capsys.readouterr().out
    assert "the original has " in out and f"(the original: {original:,})" in out
    assert main(["convert", *words, str(tmp_path / "b")]) == OK
    assert main(["export", str(tmp_path / "b"), str(tmp_path / "c")]) == OK
    out = capsys.readouterr().out
    assert "for plain transformers too: 32 -> 33 cached elements per token and layer" in out
    assert out.index("export to") < out.index("for plain transformers too")  # told before anything is written
    a, c = (load(tmp_path / n) for n in "ac")
    assert all(torch.equal(p, c.get_parameter(n)) for n, p in a.named_parameters())
    assert type(a).__name__ == "DeepseekV3ForCausalLM"


def test_the_command_refuses_in_one_line_and_writes_nothing(tmp_path, capsys):
    for arguments, words in (
        (["convert", "tiny:gpt2{n_layer=1}", "-p", "mha-to-mla,latent-cache", "--export", "deepseek-v3"], "gpt2"),
        (["convert", "tiny:llama", "-p", "mha-to-mla", "--export", "deepsek"], "The forms are deepseek-v3"),
        (["export", str(tmp_path / "nowhere")], "there is no such directory"),
    ):
        place = [str(tmp_path / "new")]
        assert main([*arguments[:2], *place, *arguments[2:]]) == BAD_INPUT
        told = capsys.readouterr()
        assert words in told.err and told.err.count("\n") == 1 and not told.out
        assert list(Path(tmp_path).iterdir()) == []
    with pytest.raises(CheckpointError):
        load(tmp_path / "new")
