"""mla-mm-split moves rows and nothing else: equal in fp64, the very weights back, and what it leaves alone."""

from __future__ import annotations

import copy
from operator import getitem
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from latentscan.ir.graph import Graph
from latentscan.ir.normalize import ATTENTION
from latentscan.ir.ops.rope import ROPE
from latentscan.ir.verify import verify, verify_all
from latentscan.passes.base import Context, Refusal, Site
from latentscan.passes.mla_mm_split import MlaMmSplit, split_functions
from latentscan.passes.pipeline import parse, run
from latentscan.runtime.wrap import planning_graph, wrap
from latentscan.tests.ir.building import Building, close, made_weights, random
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import ragged, worst_gradient

H, DN, DR, DV, C, Q = 3, 4, 2, 5, 6, 8
B, S = 2, 7


def up(make: Building, x: fx.Node, name: str, parts: list[int], form: str, bias: bool) -> list[fx.Node]:
    """Parts [B, H, S, width] of a projection of x, per head; ``form``: how it is written."""
    width, n = sum(parts), int(make.graph.shape(x)[-1])
    w = random(H * width, n, seed=len(name))
    b = make.weight(f"{name}.bias", random(H * width, seed=9)) if bias else None
    size = [make.method("size", x, 0), make.method("size", x, 1)]
    if form == "transposed":
        b = b if b is not None else make.weight(f"{name}.bias", torch.zeros(H * width, dtype=torch.float64))
        node = make.weight(f"{name}.weight", w.t().contiguous())
        y = make.call(torch.addmm, b, make.method("view", x, -1, n), node)
    else:
        y = make.call(F.linear, x, make.weight(f"{name}.weight", w), b)
    y = make.method("transpose", make.method("view", y, *size, H, width), 1, 2)
    if form == "chunk":
        assert len(set(parts)) == 1
        split = make.method("chunk", y, len(parts), dim=-1)
    else:
        split = make.call(torch.split, y, parts, dim=-1)
    return [make.call(getitem, split, i) for i in range(len(parts))]


def mla(form: str = "linear", bias: bool = False) -> tuple[Building, Graph, dict[str, torch.Tensor]]:
    make = Building()
    c_q, c, rope = make.input("c_q", "b", "s", Q), make.input("c", "b", "s", C), make.input("rope", "b", 1, "s", DR)
    cos, sin = make.input("cos", "b", "s", DR), make.input("sin", "b", "s", DR)
    q_nope, q_rope = up(make, c_q, "q_b_proj", [DN, DR], form, bias)
    k_nope, v = up(make, c, "kv_b_proj", [DN, DV], form, bias)
    q_rope = make.call(ROPE.op, q_rope, cos, sin, layout="half")
    k_rope = make.method("expand", make.call(ROPE.op, rope, cos, sin, layout="half"), -1, H, -1, -1)
    q, k = make.call(torch.cat, [q_nope, q_rope], -1), make.call(torch.cat, [k_nope, k_rope], -1)
    graph = make.output(make.call(ATTENTION, q, k, v, kind="causal", scale=0.4))
    inputs = {"c_q": (B, S, Q), "c": (B, S, C), "rope": (B, 1, S, DR), "cos": (B, S, DR), "sin": (B, S, DR)}
    return make, graph, {n: random(*shape, seed=i) for i, (n, shape) in enumerate(inputs.items())}


def plan(graph: Graph) -> list[Site | Refusal]:
    return MlaMmSplit().plan(graph, Context())


def split(graph: Graph) -> Graph:
    after = graph.copy()
    for site in plan(graph):
        assert isinstance(site, Site), site
        MlaMmSplit().apply(after, site, Context())
    after.clean()
    verify(after, before=graph, name="mla-mm-split")
    verify_all(after)
    return after


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["linear", "transposed"])
def test_one_matmul_per_consumer_gives_the_same_numbers(form, bias):
    make, graph, inputs = mla(form, bias)
    after = split(graph)
    weights = [n.args[1].name for n in after.calls(F.linear)]
    assert len(weights) == 4
    assert not after.calls(torch.split, torch.addmm)
    (want,), (got,) = make.run(graph, **inputs), make.run(after, **inputs)
    assert close(got, want) < 1e-14
    shapes = sorted(tuple(made_weights(after, make.values)[n].shape) for n in weights)
    assert shapes == sorted([(H * DN, Q), (H * DR, Q), (H * DN, C), (H * DV, C)])
    assert all(made_weights(after, make.values)[n].is_contiguous() for n in weights)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["linear", "transposed"])
def test_the_inverse_gives_back_the_very_weights(form, bias):
    make, graph, _ = mla(form, bias)
    after = split(graph)
    for recipe in {id(a.recipe): a.recipe for a in after.added}.values():
        sources = [make.values[after.weight_at(p).placeholder] for p in recipe.sources]
        made = recipe.function(*sources)
        back = recipe.inverse(*made)
        assert sum(t.numel() for t in made) == sum(t.numel() for t in sources)
        for a, b in zip(back, sources, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
        assert (len(sources) == 2) == (bias or form == "transposed")


def test_the_comparison_notices_rows_in_another_order():
    """Sabotage: whole blocks instead of rows per head, the mistake that chunking before de-interleaving makes."""
    make, graph, inputs = mla()
    after = split(graph)
    names = [a.placeholder for a in after.added]
    made = made_weights(after, make.values)
    blocks = make.values["q_b_proj_weight"].split([H * DN, H * DR])
    wrong = {names[0]: blocks[0], names[1]: blocks[1]}
    assert {n: v.shape for n, v in wrong.items()} == {n: made[n].shape for n in wrong}
    values = [wrong.get(n.name, made.get(n.name, inputs.get(n.name))) for n in after.nodes if n.op == "placeholder"]
    (got,) = after.module.forward(*values)
    assert close(got, make.run(graph, **inputs)[0]) > 0.1


@given(st.data())
def test_any_partition_of_rows_is_undone_bitwise(data):
    n, inner = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 4))
    order = data.draw(st.permutations(range(n)))
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1), min_size=1, max_size=3)))
    rows = [torch.tensor(order[a:b]) for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
    transposed, biased = data.draw(st.booleans()), data.draw(st.booleans())
    w, bias = random(n, inner), random(n, seed=1)
    given_tensors = [w.t().contiguous() if transposed else w] + ([bias] if biased else [])
    function, inverse = split_functions(rows, transposed, len(given_tensors))
    parts = function(*given_tensors)
    for part, r in zip(parts[: len(rows)], rows, strict=True):
        assert torch.equal(part, w[r])
    if biased:
        for part, r in zip(parts[len(rows) :], rows, strict=True):
            assert torch.equal(part, bias[r])
    assert all(torch.equal(a, b) for a, b in zip(inverse(*parts), given_tensors, strict=True))


def test_splitting_is_differentiable():
    rows = [torch.tensor([0, 2]), torch.tensor([3, 1])]
    function, _ = split_functions(rows, False, 1)
    w = random(4, 2).requires_grad_()
    a, b = function(w)
    (a.sum() + 2 * b.sum()).backward()
    assert torch.equal(w.grad, torch.tensor([[1.0], [2], [1], [2]], dtype=torch.float64).expand(4, 2))


# -- what is left alone -----------------------------------------------------------------------------------------


def _other(make: Building, how: str) -> fx.Node:
    x = make.input("x", "b", "s", C)
    size = [make.method("size", x, 0), make.method("size", x, 1)]
    w: Any = make.weight("w", random(H * (DN + DN), C))
    if how == "a computed weight":
        w = make.input("packed", H * 2 * DN, C)
    y = make.call(F.linear, x, w)
    if how == "whole blocks":  # Phi-3: [all of one | all of the other]
        halves = make.call(torch.chunk, y, 2, -1)
        parts = [make.method("unflatten", make.call(getitem, halves, i), -1, (H, DN)) for i in (0, 1)]
        a, b = (make.method("transpose", p, 1, 2) for p in parts)
        return make.call(torch.cat, [a, b], -1)
    heads = make.method("transpose", make.method("view", y, *size, H, 2 * DN), 1, 2)
    if how == "one consumer":
        return heads
    if how == "sliced":
        a = make.call(getitem, heads, (Ellipsis, slice(0, DN)))
        return make.call(torch.cat, [a, make.call(getitem, heads, (Ellipsis, slice(DN, None)))], -1)
    if how == "gathered":  # the query of a model that mha-to-mla converted: features without and with rotation
        first, second = [1, 3, 5, 0], [7, 2, 4, 6]
        return make.call(torch.cat, [make.call(getitem, heads, (Ellipsis, i)) for i in (first, second)], -1)
    parts = make.call(torch.split, heads, [DN, DN], -1)
    if how == "half of it is read":
        return make.call(getitem, parts, 1)
    if how == "read whole as well":
        return make.call(torch.cat, [make.call(getitem, parts, 0), make.method("sin", heads)], -1)
    if how == "a norm in between":
        return make.method("sin", make.call(getitem, parts, 0))
    return make.call(torch.cat, [make.call(getitem, parts, 1), make.call(getitem, parts, 0)], -1)


@pytest.mark.parametrize(
    ("how", "rule", "reason"),
    [
        ("one consumer", "not-split", "its whole result is read by"),
        ("whole blocks", "not-split", "not [B, heads, S, width]"),
        ("half of it is read", "not-split", "only one part"),
        ("read whole as well", "not-split", "whole result is read by sin"),
        ("a computed weight", "no-plain-weight", "packed is not a parameter"),
        ("a norm in between", "no-up-projection", "no linear map feeds"),
    ],
)
def test_other_projections_are_left_alone_by_name(how, rule, reason):
    make = Building()
    k = _other(make, how)
    width = int(make.graph.shape(k)[-1])
    q, v = make.input("q", "b", H, "s", width), make.input("v", "b", H, "s", DV)
    make.output(make.call(ATTENTION, q, k, v, kind="causal", scale=1.0))
    (found,) = plan(make.graph)
    assert isinstance(found, Refusal), found
    assert found.rule == rule
    assert reason in found.reason
    assert found.remedy


@pytest.mark.parametrize("how", ["swapped", "sliced", "gathered"])
def test_parts_in_another_order_are_split_all_the_same(how):
    make = Building()
    k = _other(make, how)
    q, v = make.input("q", "b", H, "s", 2 * DN), make.input("v", "b", H, "s", DV)
    graph = make.output(make.call(ATTENTION, q, k, v, kind="causal", scale=1.0))
    inputs = {"x": random(B, S, C), "q": random(B, H, S, 2 * DN, seed=1), "v": random(B, H, S, DV, seed=2)}
    assert close(make.run(split(graph), **inputs), make.run(graph, **inputs)) < 1e-14


# -- the layouts of the library's models ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "pipeline", "parts"),
    [
        ("deepseek_v3", {"q_lora_rank": None}, "", {"q_proj": [64, 32], "kv_b_proj": [64, 64]}),
        ("llama", {}, "mha-to-mla{method=pca,rank=16,rope_dim=8}", {"q_proj": [48, 16]}),
        pytest.param(
            "deepseek_v3",
            {"attention_bias": True, "rope_interleave": False},
            "",
            {"q_b_proj": [64, 32], "kv_b_proj": [64, 64]},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "deepseek_v2",
            {"q_lora_rank": None},
            "",
            {"q_proj": [64, 32], "kv_b_proj": [64, 64]},
            marks=pytest.mark.slow,
        ),
        pytest.param("deepseek_v2", {}, "", {"q_b_proj": [64, 32], "kv_b_proj": [64, 64]}, marks=pytest.mark.slow),
        pytest.param(
            "minicpm3", {"q_lora_rank": None}, "", {"q_proj": [64, 32], "kv_b_proj": [64, 64]}, marks=pytest.mark.slow
        ),
        pytest.param("minicpm3", {}, "", {"q_b_proj": [64, 32], "kv_b_proj": [64, 64]}, marks=pytest.mark.slow),
    ],
)
def test_every_layout_of_the_library_is_split_per_head(family, changes, pipeline, parts):
    """Case Megatron-Bridge#5261: without q_lora_rank the query's one projection is split, by head as well."""
    changes = {"num_hidden_layers": 1, **changes}
    if "deepseek" in family:
        changes["first_k_dense_replace"] = 1
    graph = planning_graph(build(family, **changes))
    passes = parse(",".join(p for p in (pipeline, "mla-mm-split") if p))
    record = run(graph, passes, Context(own_parameters=True, meta=True), strict=False).records[-1]
    found = {s.module.rsplit(".", 1)[-1]: s.note.split(" into ")[1] for s in record.sites}
    assert found == {name: " + ".join(map(str, sizes)) for name, sizes in parts.items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2", "minicpm3"])
def test_a_query_without_a_latent_trains_as_eager(family):
    dense = {"first_k_dense_replace": 1} if "deepseek" in family else {}
    eager = build(family, num_hidden_layers=1, q_lora_rank=None, **dense).train()
    model = wrap(copy.deepcopy(eager), "mla-mm-split")
    for m in (model, eager):
        m(**ragged(2, 9), use_cache=False).loss.backward()
    assert worst_gradient(model, eager) < 5e-6
