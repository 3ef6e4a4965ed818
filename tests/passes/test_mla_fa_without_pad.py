"""mla-fa-without-pad removes zeros that change nothing, keeps the scale, and says where there are none."""

from __future__ import annotations

import copy
from operator import getitem
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from latentscan.ir.capture import capture
from latentscan.ir.cost import cost_by_kind, evaluate
from latentscan.ir.errors import RefusedError
from latentscan.ir.graph import Graph
from latentscan.ir.normalize import ATTENTION
from latentscan.ir.verify import verify
from latentscan.passes.base import Context, Refusal, Site
from latentscan.passes.mla_fa_without_pad import MlaFaWithoutPad
from latentscan.runtime.wrap import wrap
from latentscan.tests.ir.building import Building, close, random
from latentscan.tests.models import build
from latentscan.tests.passes.switches import padded_attention, rewritten, sizes_of
from latentscan.tests.runtime.helpers import distance, ragged, tokens, worst_gradient

B, H, S, DQK, DV = 2, 3, 7, 6, 4


def padded(
    qk: int, v: int, *, trim: Any = None, target: Any = ATTENTION, late: bool = False, **change: Any
) -> Building:
    """Attention whose q and k are padded to ``qk`` and v to ``v``; ``late``: padded as [B, S, H, D]."""
    make = Building()
    operands = []
    for name, width, full in (("q", DQK, qk), ("k", DQK, change.get("k", qk)), ("v", DV, v)):
        x = make.input(name, "b", H, "s", width)
        words = {"value": change["value"]} if "value" in change else {}
        if late:
            x = make.method("transpose", x, 1, 2)
        if full > width and change.get("cat"):
            size = [make.method("size", x, i) for i in range(3)]
            x = make.call(torch.cat, [x, make.method("new_zeros", x, [*size, full - width])], -1)
        elif full > width:
            x = make.call(F.pad, x, [0, full - width], "constant", *words.values())
        operands.append(make.method("transpose", x, 1, 2) if late else x)
    options = {"kind": "causal", "scale": 0.31} if target == ATTENTION else {"is_causal": True}
    out = make.method("transpose", make.call(target, *operands, **options), 1, 2)
    out = make.method("contiguous", out)
    if trim is None or trim:
        out = make.call(getitem, out, (Ellipsis, slice(None, trim or DV)))
    make.output(out)
    return make


def plan(graph: Graph) -> Site | Refusal:
    (found,) = MlaFaWithoutPad().plan(graph, Context())
    return found


def without(make: Building) -> Graph:
    after = make.graph.copy()
    site = plan(make.graph)
    assert isinstance(site, Site), site
    MlaFaWithoutPad().apply(after, site, Context())
    after.clean()
    verify(after, before=make.graph, name="mla-fa-without-pad")
    return after


def given_inputs() -> dict[str, torch.Tensor]:
    return {n: random(B, H, S, w, seed=i) for i, (n, w) in enumerate((("q", DQK), ("k", DQK), ("v", DV)))}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("cat", [False, True])
@pytest.mark.parametrize(("qk", "v"), [(DQK, DQK), (8, 8), (8, DV), (8, 5)])
def test_the_numbers_stay_and_the_zeros_go(qk, v, cat, late):
    make = padded(qk, v, cat=cat, late=late)
    after = without(make)
    assert not after.calls(F.pad, torch._C._nn.pad, torch.cat)
    (node,) = after.calls(ATTENTION)
    assert [after.shape(x)[-1] for x in node.args[:3]] == [DQK, DQK, DV]
    assert node.kwargs["scale"] == 0.31  # not 6 ** -0.5, nor 8 ** -0.5
    assert close(make.run(after, **given_inputs())[0], make.run(make.graph, **given_inputs())[0]) < 1e-14


def test_the_comparison_notices_a_scale_that_follows_the_width():
    """Sabotage."""
    make = padded(8, 8)
    after = without(make)
    (node,) = after.calls(ATTENTION)
    node.kwargs = {**node.kwargs, "scale": DQK**-0.5}
    assert close(make.run(after, **given_inputs())[0], make.run(make.graph, **given_inputs())[0]) > 1e-3


def test_the_librarys_own_default_scale_is_that_of_the_padded_width():
    make = padded(8, 8, target=F.scaled_dot_product_attention)
    after = without(make)
    (node,) = after.calls(F.scaled_dot_product_attention)
    assert node.kwargs["scale"] == 8**-0.5
    assert close(make.run(after, **given_inputs())[0], make.run(make.graph, **given_inputs())[0]) < 1e-14


def test_a_narrower_trim_stays():
    make = padded(DQK, DQK, trim=2)
    after = without(make)
    assert close(make.run(after, **given_inputs())[0], make.run(make.graph, **given_inputs())[0]) < 1e-14


@pytest.mark.parametrize(
    ("make", "rule", "reason"),
    [
        (lambda: padded(DQK, DV), "nothing-padded", "of widths [6, 6, 4]"),
        (lambda: padded(DQK, DQK, trim=False), "not-trimmed", "with its padded columns"),
        (lambda: padded(DQK, DQK, trim=5), "not-trimmed", "5 of them, 4 are real"),
        (lambda: padded(8, 8, value=1.0), "padding-not-zero", "pads with 1.0"),
    ],
)
def test_other_attentions_are_left_alone_by_name(make, rule, reason):
    found = plan(make().graph)
    assert isinstance(found, Refusal)
    assert found.rule == rule
    assert reason in found.reason
    assert found.remedy


def test_query_and_key_must_be_padded_alike():
    make = Building()
    q = make.call(F.pad, make.input("q", "b", H, "s", DQK), [0, 2])
    k, v = make.input("k", "b", H, "s", 8), make.input("v", "b", H, "s", DV)
    make.output(make.call(ATTENTION, q, k, v, kind="causal", scale=1.0))
    found = plan(make.graph)
    assert isinstance(found, Refusal)
    assert found.rule == "one-side-padded"


def test_a_family_whose_attention_is_not_padded_is_refused():
    with pytest.raises(RefusedError, match=r"nothing-padded at model\.layers\.0\.self_attn and 1 more"):
        wrap(build("deepseek_v3"), "mla-fa-without-pad")


# -- the library's flash-attention path --------------------------------------------------------------------------


@pytest.fixture
def flash(monkeypatch):
    """The library's own flash-attention wrapper on a CPU: SDPA in place of the kernel that it calls."""
    from transformers.integrations import flash_attention, sdpa_attention
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def kernel(q: Any, k: Any, v: Any, mask: Any, *, softmax_scale: Any = None, dropout: float = 0.0, **_: Any) -> Any:
        assert q.shape[-1] == v.shape[-1]  # what the kernel wants, and why the wrapper pads
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return sdpa_attention.sdpa_attention_forward(_Module, q, k, v, mask, dropout=dropout, scaling=softmax_scale)[0]

    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, **words: Any) -> Any:
        return flash_attention.flash_attention_forward(module, q, k, v, mask, **words)

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", kernel)
    monkeypatch.setattr(flash_attention, "get_target_dtype", lambda query, module: None)
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    yield
    ALL_ATTENTION_FUNCTIONS["sdpa"] = before


class _Module:
    num_key_value_groups, is_causal, training = 1, True, False


def test_the_librarys_flash_wrapper_loses_its_padding(flash):
    model = build("deepseek_v3", first_k_dense_replace=2)
    graph = capture(model)
    if not graph.calls(F.pad, torch._C._nn.pad):
        pytest.skip("this transformers pads elsewhere")
    after, (record,) = rewritten(graph, "mla-fa-without-pad")
    assert [s.facts["v_before"] for s in record.sites] == [24, 24]
    assert not after.calls(F.pad, torch._C._nn.pad)
    wrapped = wrap(copy.deepcopy(model), "mla-fa-without-pad,mla-mm-split")
    got, want = (m(tokens(2, 9), use_cache=False).logits for m in (wrapped, model))
    assert distance(got, want) < 2e-6


@pytest.mark.slow
def test_attention_padded_to_a_multiple_costs_less_without_and_trains_alike():
    eager = build("deepseek_v3", first_k_dense_replace=2).train()
    inputs = ragged(2, 13) | {"use_cache": False}
    with padded_attention(32):
        graph = capture(eager, inputs=inputs, training=True)
        model = wrap(copy.deepcopy(eager), "mla-fa-without-pad")
        model(**inputs).loss.backward()
    eager(**inputs).loss.backward()
    assert worst_gradient(model, eager) < 2e-6
    after, (record,) = rewritten(graph, "mla-fa-without-pad")
    sizes = sizes_of(graph, 2, 13)
    before, now = (evaluate(cost_by_kind(g)["attention"].flops.expression, sizes) for g in (graph, after))
    assert before / now == pytest.approx((32 + 32) / (24 + 16))  # 1.6, as for 256 and 192/128
    assert "1.60x less" in record.sites[0].note
