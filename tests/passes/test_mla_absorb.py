"""mla-absorb re-associates and nothing else: fp64 equality with the attention it replaces, and what it must refuse."""

from __future__ import annotations

import re
from operator import getitem
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.graph import Graph
from latentscan.ir.normalize import ATTENTION, LATENT_ATTENTION
from latentscan.ir.verify import verify, verify_all
from latentscan.passes import mla_absorb
from latentscan.passes.base import Context, Refusal, Site
from latentscan.passes.mla_absorb import MlaAbsorb
from latentscan.tests.ir.building import Building, close, random

B, S, T = 2, 5, 9
DN, DR, DV, C = 6, 4, 3, 7  # key features that are linear in the latent, rotated ones, value features, latent


def projection(
    make: Building, x: fx.Node, name: str, heads: int, width: int, *, bias: bool, transposed: bool, seed: int
) -> fx.Node:
    """[B, heads, T, width] from x [B, T, C]."""
    n = int(make.graph.shape(x)[-1])
    w = random(heads * width, n, seed=seed)
    b = make.weight(f"{name}.bias", random(heads * width, seed=seed + 50)) if bias else None
    size = [make.method("size", x, 0), make.method("size", x, -2)]
    if transposed:
        node = make.weight(f"{name}.weight", w.t().contiguous())
        b = b if b is not None else make.weight(f"{name}.bias", torch.zeros(heads * width, dtype=torch.float64))
        flat = make.call(torch.addmm, b, make.method("reshape", x, -1, n), node)
        y = make.method("view", flat, *size, heads, width)
    else:
        y = make.call(F.linear, x, make.weight(f"{name}.weight", w), b)
        y = make.method("view", y, *size, heads, width)
    return make.method("transpose", y, 1, 2)


def attention(
    *,
    heads: int = 4,
    kv_heads: int = 4,
    rope: str = "shared",
    key_bias: bool = False,
    value_bias: bool = False,
    transposed: bool = False,
    fused: bool = False,
    rotated_first: bool = False,
    latent_dim: int = 3,
    structure: tuple[str, ...] = (),
    **options: Any,
) -> tuple[Building, Graph, dict[str, torch.Tensor]]:
    """An attention over keys and values that are made from a latent, and inputs for it.

    Args:
        rope: rotated key features "shared" by all heads, one set "per-head" (KV head), or "none".
        fused: [k_nope | v] of one projection, per head.
        latent_dim: the latent is [B, T, C], or [B, 1, T, C] with 4.
        structure: of "mask", "padding", "sinks".
        options: of the attention.
    """
    make = Building()
    width = DN + (DR if rope != "none" else 0)
    q = make.input("q", "b", heads, "s", width)
    latent = make.input("latent", "b", "t", C) if latent_dim == 3 else make.input("latent", "b", 1, "t", C)
    words = {"transposed": transposed}
    if fused:
        y = projection(make, latent, "kv_b", kv_heads, DN + DV, bias=value_bias or key_bias, seed=1, **words)
        parts = make.call(torch.split, y, [DN, DV], -1)
        nope, v = (make.call(getitem, parts, i) for i in (0, 1))
    else:
        nope = projection(make, latent, "k", kv_heads, DN, bias=key_bias, seed=1, **words)
        v = projection(make, latent, "v", kv_heads, DV, bias=value_bias, seed=2, **words)
    inputs = {"q": random(B, heads, S, width, seed=3), "latent": random(B, T, C, seed=4)}
    if latent_dim == 4:
        inputs["latent"] = inputs["latent"].unsqueeze(1)
    k = nope
    if rope != "none":
        groups = 1 if rope == "shared" else kv_heads
        rotated = part = make.input("k_rope", "b", groups, "t", DR)
        inputs["k_rope"] = random(B, groups, T, DR, seed=5)
        if groups != kv_heads:
            part = make.method("expand", rotated, -1, kv_heads, -1, -1)
        k = make.call(torch.cat, [part, nope] if rotated_first else [nope, part], -1)
    if kv_heads != heads and options.pop("repeat", False):  # as repeat_kv does
        k, v = (make.method("repeat_interleave", x, heads // kv_heads, 1) for x in (k, v))
    given: list[Any] = [None, None, None, None]
    if "mask" in structure:
        given[0] = make.input("mask", "b", 1, "s", "t")
        inputs["mask"] = torch.where(
            torch.rand(B, 1, S, T, generator=torch.Generator().manual_seed(6)) > 0.3, 0.5, -1e9
        )
        inputs["mask"] = inputs["mask"].double()
    if "padding" in structure:
        given[1] = make.input("padding", "b", "t", dtype=torch.bool)
        inputs["padding"] = torch.arange(T).expand(B, T) >= torch.tensor([[0], [3]])
    if "sinks" in structure:
        given[2] = make.weight("sinks", random(heads, seed=7))
    settings = {"kind": "causal", "scale": width**-0.5, **options}
    out = make.call(ATTENTION, q, k, v, *given, **settings)
    return make, make.output(out), inputs


def plan(graph: Graph) -> Site | Refusal:
    (found,) = MlaAbsorb(when="always").plan(graph, Context())
    return found


def absorbed(graph: Graph) -> Graph:
    site = plan(graph)
    assert isinstance(site, Site), site
    after = graph.copy()
    MlaAbsorb(when="always").apply(after, site, Context())
    after.clean()
    verify(after, before=graph, name="mla-absorb")
    verify_all(after)
    return after


CASES: dict[str, dict[str, Any]] = {
    "MHA, one rotated key": {},
    "no rotated key": {"rope": "none"},
    "a rotated key per head": {"rope": "per-head"},
    "rotated features first": {"rotated_first": True},
    "GQA": {"kv_heads": 2},
    "GQA, a rotated key per KV head": {"kv_heads": 2, "rope": "per-head"},
    "GQA without rotation": {"kv_heads": 2, "rope": "none"},
    "MQA": {"kv_heads": 1, "rope": "per-head"},
    "key bias": {"key_bias": True},
    "value bias": {"value_bias": True},
    "GQA, both biases": {"kv_heads": 2, "key_bias": True, "value_bias": True},
    "both biases, fused": {"fused": True, "key_bias": True, "value_bias": True},
    "fused [k | v] per head": {"fused": True},
    "GQA, fused": {"kv_heads": 2, "fused": True},
    "transposed weights": {"transposed": True},
    "transposed, fused, GQA": {"transposed": True, "fused": True, "kv_heads": 2, "value_bias": True},
    "a latent with a head axis": {"latent_dim": 4},
    "window": {"window": 3},
    "window, key bias, padding": {"window": 4, "key_bias": True, "structure": ("padding",)},
    "softcap": {"softcap": 2.0},
    "softcap, value bias": {"softcap": 2.0, "value_bias": True},
    "sinks": {"structure": ("sinks",)},
    "sinks and window, GQA": {"structure": ("sinks",), "window": 3, "kv_heads": 2},
    "padding, value bias": {"structure": ("padding",), "value_bias": True},
    "dense mask, key bias": {"structure": ("mask",), "kind": "full", "key_bias": True},
    "another scale": {"scale": 1.7},
    "full": {"kind": "full"},
}


@pytest.mark.parametrize("name", CASES)
def test_absorbed_attention_is_the_attention(name):
    make, graph, inputs = attention(**CASES[name])
    after = absorbed(graph)
    assert len(after.calls(LATENT_ATTENTION)) == 1
    assert not after.calls(ATTENTION)
    (want,), (got,) = make.run(graph, **inputs), make.run(after, **inputs)
    if "padding" in CASES[name].get("structure", ()) and CASES[name].get("value_bias"):
        # A query that sees nothing gives zeros; nothing reads it, and its bias is of no matter.
        sees = torch.arange(S)[None, :] + T - S >= torch.tensor([[0], [3]])
        want, got = want * sees[:, None, :, None], got * sees[:, None, :, None]
    assert close(got, want) < 1e-12


def test_keys_are_not_expanded_any_more():
    """Neither keys nor values of the latent's length are made, and the latent is read as it is."""
    make, graph, _ = attention(kv_heads=2)
    after = absorbed(graph)
    (node,) = after.calls(LATENT_ATTENTION)
    assert node.args[2].name == "latent"
    assert node.args[3].name == "k_rope"
    assert not after.calls(F.linear, torch.cat)
    assert "k_bias" not in {n.name for n in after.nodes}
    del make


def test_the_facts_are_the_sizes():
    site = plan(attention(heads=4, kv_heads=2)[1])
    assert isinstance(site, Site)
    assert {k: v for k, v in site.facts.items() if isinstance(v, int)} == {
        "heads": 4, "kv_heads": 2, "d_c": C, "d_n": DN, "d_r": DR, "d_v": DV,
    }  # fmt: skip
    assert (site.module, site.rule) == ("attn", "linear-in-latent")


# -- refusals ----------------------------------------------------------------------------------------------------------

NOT_EXACT: dict[str, tuple[dict[str, Any], str, str]] = {
    "key bias under sinks": ({"key_bias": True, "structure": ("sinks",)}, "key-bias", "k_bias .* with sinks"),
    "key bias under a softcap": ({"key_bias": True, "softcap": 2.0}, "key-bias", "k_bias .* with softcap 2.0"),
    "value bias under sinks": ({"value_bias": True, "structure": ("sinks",)}, "value-bias", "do not sum to 1"),
}


@pytest.mark.parametrize("name", NOT_EXACT)
def test_biases_that_cannot_leave_are_refused_and_would_be_wrong(name, monkeypatch):
    """The sabotage: without the refusal the result is off by far more than rounding."""
    words, rule, reason = NOT_EXACT[name]
    make, graph, inputs = attention(**words)
    found = plan(graph)
    assert isinstance(found, Refusal)
    assert found.rule == rule
    assert re.search(reason, found.reason)
    assert "mha-to-mla" in found.remedy
    monkeypatch.setattr(mla_absorb, "_refuse", lambda *_: None)
    (want,), (got,) = make.run(graph, **inputs), make.run(absorbed(graph), **inputs)
    assert close(got, want) > 1e-3


def _keys_and_values(make: Building, how: str) -> tuple[fx.Node, fx.Node]:
    latent, other = make.input("latent", "b", "t", C), make.input("other", "b", "t", C)
    k = projection(make, latent, "k", 4, DN, bias=False, transposed=False, seed=1)
    v = projection(make, latent, "v", 4, DV, bias=False, transposed=False, seed=2)
    if how == "two latents":
        v = projection(make, other, "v2", 4, DV, bias=False, transposed=False, seed=2)
    if how == "a normed key":
        k = make.method("sin", k)
    if how == "half a value":
        v = make.call(torch.cat, [v, make.input("more", "b", 4, "t", 2)], -1)
    if how == "a computed weight":
        w = make.method("to", make.weight("packed", torch.randint(-8, 8, (4 * DN, C), dtype=torch.int8)), torch.float64)
        y = make.method("unflatten", make.call(F.linear, latent, w), -1, (4, DN))
        k = make.method("transpose", y, 1, 2)
    if how == "features of two maps":
        k = make.call(torch.cat, [k, projection(make, other, "k2", 4, 2, bias=False, transposed=False, seed=3)], -1)
    if how == "heads inside features":
        y = make.call(F.linear, latent, make.weight("odd", random(4 * DN, C)))
        k = make.method("permute", make.method("unflatten", y, -1, (DN, 4)), 0, 3, 1, 2)
    if how == "a scattered rotated key":
        rope = make.input("rope", "b", 4, "t", DR)
        k = make.call(
            torch.cat,
            [make.call(getitem, rope, (Ellipsis, slice(0, 2))), k, make.call(getitem, rope, (Ellipsis, slice(2, 4)))],
            -1,
        )
        # nothing holds features 0, 1, 2, 3 of `rope` apart from `rope` itself: swap its halves, and nothing does
        k = make.call(
            torch.cat,
            [
                make.call(getitem, k, (Ellipsis, slice(DN + 2, None))),
                make.call(getitem, k, (Ellipsis, slice(0, DN + 2))),
            ],
            -1,
        )
    return k, v


@pytest.mark.parametrize(
    ("how", "rule", "reason"),
    [
        ("two latents", "two-latents", "keys are linear in latent, values in other"),
        ("a normed key", "key-not-linear", "all 6 key features per head come from sin"),
        ("half a value", "value-not-linear", "2 value features per head come from more"),
        ("a computed weight", "no-plain-weight", "computed at every call"),
        ("features of two maps", "layout-unknown", "two linear maps"),
        ("heads inside features", "rows-irregular", "not consecutive within a head"),
        ("a scattered rotated key", "rows-irregular", "no value holds just the 4 rotated key features"),
    ],
)
def test_what_is_no_latent_attention_is_refused_by_name(how, rule, reason):
    make = Building()
    k, v = _keys_and_values(make, how)
    q = make.input("q", "b", 4, "s", int(make.graph.shape(k)[-1]))
    make.output(make.call(ATTENTION, q, k, v, kind="causal", scale=1.0))
    found = plan(make.graph)
    assert isinstance(found, Refusal), found
    assert found.rule == rule
    assert reason in found.reason
    assert found.remedy


def test_a_static_graph_that_takes_the_first_token_for_all_is_refused():
    """The plain backend traces static sizes: the number of tokens then looks like any other number."""
    make = Building()
    latent = make.input("latent", 2, T, C)
    w = make.weight("k", random(4 * DN, C))
    y = make.call(F.linear, latent, w)
    first = make.method("expand", make.call(getitem, y, (slice(None), slice(0, 1))), -1, T, -1)
    k = make.method("transpose", make.method("unflatten", first, -1, (4, DN)), 1, 2)
    v = make.method("transpose", make.method("unflatten", y, -1, (4, DN)), 1, 2)
    make.output(make.call(ATTENTION, make.input("q", 2, 4, S, DN), k, v, kind="causal", scale=1.0))
    found = plan(make.graph)
    assert isinstance(found, Refusal), found
    assert (found.rule, "cannot be told from its tokens" in found.reason) == ("layout-unknown", True)
