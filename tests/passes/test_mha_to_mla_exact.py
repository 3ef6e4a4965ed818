"""The exact forms on models of the library: fp32 against eager in fp64, the bytes that generate leaves in the cache,
saving and loading, and what is decided by numbers (rank, condition, dtype) or refused."""

from __future__ import annotations

import copy
import math
import operator
from typing import Any

import pytest
import torch

from latentscan.ir.errors import PipelineError
from latentscan.ir.normalize import ATTENTION
from latentscan.ir.ops.cache import CACHE_APPEND
from latentscan.ir.ops.rope import ROPE
from latentscan.passes.base import Context, Site
from latentscan.passes.mha_to_mla import MhaToMla
from latentscan.passes.pipeline import parse, run
from latentscan.runtime.cache import GraphCache, cache_argument
from latentscan.runtime.checkpoint import load
from latentscan.runtime.wrap import planning_graph, unwrap, wrap
from latentscan.tests.ir.building import Building, random
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import distance, tokens

MHA = {"num_key_value_heads": 4, "num_hidden_layers": 1}
AUTO = "mha-to-mla{full_rope=auto}"
EXACTLY = 1e-5  # the bar, fp32 against fp64; measured about 1e-6


def shaped(model: Any, *, condition: float = 0.0, rank: int = 0) -> Any:
    """Key projections of a condition number, or keys and values of a rank, and biases that do something."""
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.copy_(0.5 * torch.randn(p.shape, generator=g))
            elif condition and name.endswith("k_proj.weight"):
                u, _, v = torch.linalg.svd(torch.randn(p.shape, generator=g, dtype=torch.float64))
                p.copy_(0.3 * u @ torch.diag(torch.logspace(0, -math.log10(condition), len(u), dtype=u.dtype)) @ v)
            elif rank and name.endswith("c_attn.weight"):  # [in, q k v]
                low = torch.randn(64, rank, generator=g) @ torch.randn(rank, 128, generator=g)
                p[:, 64:] = low / 8 / math.sqrt(rank)
    return model


def _model(name: str) -> Any:
    if name == "gpt2":
        return build("gpt2", n_layer=2)
    if name == "gpt2 of rank 20":
        return shaped(build("gpt2", n_layer=1), rank=20)
    if name == "llama":
        return shaped(build("llama", **MHA), condition=50.0)
    if name == "qwen2":
        return shaped(build("qwen2", **MHA), condition=50.0)
    if name == "phi3":
        return build("phi3", **MHA)
    return build(name, **{"n_layer" if name in ("gptj", "bloom") else "num_hidden_layers": 1})


# Bytes a token and layer by MATH 1: the input (64), a basis of 20, the input and 4 heads of 8 rotated features, or K
# before its rotation (64) with the position id, an int32. Eager holds K and V: 128 numbers.
CASES = {
    "gpt2": ("input-is-latent", 64 * 4),
    "gpt2 of rank 20": ("basis-is-latent", 20 * 4),
    "bloom": ("input-is-latent", 64 * 4),
    "gptj": ("partial-rotary", (64 + 4 * 8) * 4),
    "llama": ("keys-are-latent", 64 * 4 + 4),
    "qwen2": ("keys-are-latent", 64 * 4 + 4),
    "phi3": ("input-made-again-on-read", 64 * 4 + 4),
}
SLOW = ("bloom", "qwen2", "phi3")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES])
def test_exact_forms_are_within_the_bar_and_hold_what_they_say(name):
    rule, held = CASES[name]
    eager = _model(name)
    option = "input" if name == "phi3" else "auto"  # phi3's is fused, and taken apart
    model = wrap(copy.deepcopy(eager), f"mha-to-mla{{full_rope={option}}},latent-cache")
    sites = [s for s in model.report.sites if s["pass"] == "mha-to-mla"]
    layers = 2 if name == "gpt2" else 1
    assert [s["rule"] for s in sites] == [rule] * layers
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    oracle = copy.deepcopy(eager).double()
    with torch.no_grad():
        want = oracle(ids, attention_mask=mask).logits[mask.bool()]
        got = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    assert distance(got.double(), want) < EXACTLY
    cache = GraphCache.for_model(model)
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    made = model.generate(ids, **{cache_argument(model): cache}, **options)
    assert torch.equal(made, eager.generate(ids, **options))
    assert cache.get_seq_length() == 12 + 8 - 1
    assert cache.bytes_held() == layers * 2 * 19 * held
    assert cache.bytes_held() == sum(t.numel() * t.element_size() for layer in cache.layers for t in layer.tensors())


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2 of rank 20", marks=pytest.mark.slow)])
def test_new_weights_go_to_disk_under_the_old_names_and_back(name, tmp_path):
    """The way back is exact but for rounding: V's weight is M W_K, K's and V's are up times down."""
    eager = _model(name)
    model = wrap(copy.deepcopy(eager), f"{AUTO},latent-cache", check={"default": 1e-4})
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    state = model.state_dict()
    assert set(state) == set(eager.state_dict())
    with torch.no_grad():
        want = eager(tokens()).logits
        assert distance(again(tokens()).logits, want) < EXACTLY
        assert [s["rule"] for s in again.report.sites] == [s["rule"] for s in model.report.sites]
        plain = unwrap(model)
        for key, value in eager.state_dict().items():
            assert distance(plain.state_dict()[key], value) < 1e-4, key
        assert distance(plain(tokens()).logits, want) < EXACTLY


# -- decided by numbers ------------------------------------------------------------------------------------------------


def planned(model: Any, pipeline: str = AUTO, *, own: bool = True) -> Site:
    (site,) = run(planning_graph(model), parse(pipeline), Context(own_parameters=own)).records[0].sites
    return site


def test_keys_alone_need_an_inverse_that_holds():
    """The bound of the condition number itself; below it the input is cached, which needs no inverse."""
    model = shaped(build("llama", **MHA), condition=50.0)
    assert planned(model).rule == "keys-are-latent"
    assert planned(model, "mha-to-mla{full_rope=auto,max_condition=51}").rule == "keys-are-latent"
    refused = planned(model, "mha-to-mla{full_rope=auto,max_condition=49}")
    assert refused.rule == "input-made-again-on-read"
    assert "cond(W_K) = 50, at most 49 is allowed" in refused.note and "128 -> 65 elements per token" in refused.note
    only = planned(model, "mha-to-mla{max_condition=49,full_rope=keys}")
    assert only.rule == "key-value-is-latent" and "saves nothing: cond(W_K) = 50" in only.note
    assert planned(model, "mha-to-mla{full_rope=input}").rule == "input-made-again-on-read"
    singular = shaped(build("llama", **MHA), condition=50.0)
    with torch.no_grad():
        singular.model.layers[0].self_attn.k_proj.weight[0] = 0
    assert planned(singular).rule == "input-made-again-on-read"
    assert "float32 or float64, the weights are bfloat16" in planned(copy.deepcopy(model).bfloat16()).note
    assert "an optimiser may hold" in planned(model, own=False).note


def test_what_costs_time_at_every_step_has_to_be_asked_for():
    """The default leaves full rotary MHA as it is, and says which option saves how much at which price."""
    model = shaped(build("llama", **MHA), condition=50.0)
    site = planned(model, "mha-to-mla")
    assert site.rule == "key-value-is-latent" and site.facts["d_c"] == 128
    assert "full_rope=auto would cache 65 elements in place of 128" in site.note
    assert f"up to {64 * 128} multiply-adds at every step for every cached token" in site.note
    assert planned(model, "mha-to-mla{full_rope=auto}").facts["d_c"] == 64


def test_where_keys_are_rotated_and_grouped_nothing_is_saved_and_the_remedy_is_named():
    for family in ("llama", "gpt_oss", "falcon"):
        site = planned(build(family, num_hidden_layers=1))
        assert site.rule == "key-value-is-latent"
        assert "saves nothing: keys are rotated as a whole, and the layer's input (64) is more than half" in site.note
        assert "give rank and rope_dim" in site.note


def test_rank_is_told_from_rounding_noise():
    """A product of two factors in fp32 has rank 20 and noise in its other singular values; a random matrix has not."""
    assert planned(_model("gpt2 of rank 20")).facts["d_c"] == 20
    noisy = _model("gpt2 of rank 20")
    with torch.no_grad():
        weight = noisy.transformer.h[0].attn.c_attn.weight
        weight.add_(1e-5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    assert planned(noisy).rule == "input-is-latent"


def test_large_matrices_are_judged_as_small_ones_are(monkeypatch):
    """Beyond a size the bounds are tested without singular values, to the same end."""
    models = [shaped(build("llama", **MHA), condition=c) for c in (50.0, 90.0, 111.0)] + [_model("gpt2 of rank 20")]
    small = [planned(m) for m in models]
    monkeypatch.setattr("latentscan.passes.mha_to_mla_exact._LARGE", 1)
    large = [planned(m) for m in models]
    assert [s.rule for s in small] == ["keys-are-latent"] * 2 + ["input-made-again-on-read", "basis-is-latent"]
    assert [(s.rule, s.facts) for s in small] == [(s.rule, s.facts) for s in large]
    assert "cond(W_K) is not above 100" in large[0].note and "cond(W_K) is above 100" in large[2].note


@pytest.mark.parametrize("options", ["max_condition=0.5", "full_rope=never", "rank=8,full_rope=keys"])
def test_options_that_mean_nothing_are_errors(options):
    with pytest.raises(PipelineError) as caught:
        parse(f"mha-to-mla{{{options}}}")
    assert caught.value.remedy


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("form", ["product", "matmul"])
def test_tables_that_change_from_call_to_call_are_not_made_again(moving, form):
    """Dynamic scaling: frequencies that depend on the longest position would turn old keys anew, unlike the model."""
    make = Building()
    token, x = make.token(), make.input("x", "b", "s", 8)
    positions = make.input("positions", "b", "s", dtype=torch.int64)
    column = make.method("double", make.call(operator.getitem, positions, (Ellipsis, None)))
    frequencies = make.weight("inv_freq", random(2))
    if moving:
        frequencies = make.call(operator.truediv, frequencies, make.method("amax", column))
    if form == "product":
        angles = make.call(operator.mul, column, frequencies)
    else:  # as transformers had it: [B, R/2, 1] @ [B, 1, S]
        column = make.method("double", make.call(operator.getitem, positions, (slice(None), None, slice(None))))
        row = make.call(operator.getitem, frequencies, (None, slice(None), None))
        wide = make.method("expand", row, make.method("size", x, 0), -1, 1)
        angles = make.method("transpose", make.call(operator.matmul, wide, column), 1, 2)
    angles = make.call(torch.cat, (angles, angles), dim=-1)
    tables = make.method("cos", angles), make.method("sin", angles)
    size = [make.method("size", x, 0), make.method("size", x, 1)]

    def heads(name: str) -> Any:
        y = make.call(torch.nn.functional.linear, x, make.weight(name, random(8, 8)))
        return make.method("transpose", make.method("view", y, *size, 2, 4), 1, 2)

    q, k = (make.call(ROPE.op, heads(n), *tables, layout="half") for n in ("q", "k"))
    both = make.call(CACHE_APPEND.op, token, [k, heads("v")], [2, 2])
    full = make.call(operator.getitem, both, 0)
    cached = [make.call(operator.getitem, full, i) for i in (0, 1)]
    make.output(make.call(ATTENTION, q, *cached, kind="causal", scale=0.5), make.call(operator.getitem, both, 1))
    (site,) = MhaToMla(full_rope="input").plan(make.graph, Context())
    assert isinstance(site, Site)
    assert site.rule == ("key-value-is-latent" if moving else "input-made-again-on-read")
    assert ("differs from call to call" in site.note) == moving
