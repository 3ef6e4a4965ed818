"""Public bug reports about latent attention (CASES 15 to 22), one test a report."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from latentscan.ir.errors import RefusedError
from latentscan.ir.graph import Graph
from latentscan.ir.mla import attentions
from latentscan.ir.ops.rope import ROPE
from latentscan.passes.base import Context, Refusal, Site
from latentscan.passes.mha_to_mla import find
from latentscan.passes.pipeline import parse, run
from latentscan.runtime.cache import GraphCache, cache_argument
from latentscan.runtime.door import session_of
from latentscan.runtime.wrap import planning_graph, wrap
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import distance, pair, tokens

TEXT = tokens(4, 64, seed=1)


def continued(model: Any, ids: torch.Tensor, past: int, cache: Any = None) -> tuple[torch.Tensor, Any]:
    """Logits of ``ids[:, past:]`` after a call with the ones before, and the cache."""
    name = cache_argument(model)
    cache = GraphCache.for_model(model) if cache is None else cache
    with torch.no_grad():
        model(ids[:, :past], use_cache=True, **{name: cache})
        return model(ids[:, past:], use_cache=True, **{name: cache}).logits, cache


# -- 15 ----------------------------------------------------------------------------------------------------------------

# Numbers per token and layer, by hand. gpt2: hidden 64 instead of K and V of 4 heads of 16. gpt_neox: hidden 64 and 4
# heads of 16 x 1/4 rotated features. deepseek_v3: latent 16 and rotated 8; expanded, 4 heads of 16 + 8 and 16.
# llama in low rank: rank 16 and rope_dim 8 instead of K and V of 2 KV heads of 16.
HELD = {
    "gpt2": ("latent-cache,mla-absorb", 64, 2 * 4 * 16),
    "gpt_neox": ("latent-cache,mla-absorb", 64 + 4 * 4, 2 * 4 * 16),
    "deepseek_v3": ("mla-absorb", 16 + 8, 4 * (16 + 8 + 16)),
    "llama": ("mha-to-mla{rank=16,rope_dim=8},latent-cache,mla-absorb", 16 + 8, 2 * 2 * 16),
}


@pytest.mark.parametrize("family", HELD)
def test_the_compressed_cache_is_as_big_as_before(family):
    """Case 15 (MHA2MLA#25, MiniCPM#274, DeepSeek-R1#238): the bytes of the tensors that are really held."""
    pipeline, least, expanded = HELD[family]
    rows, positions, layers = 3, 12, 2 if family == "gpt2" else 1
    model = build(family, num_hidden_layers=layers)
    wrap(model, pipeline, calibration=TEXT if "rank" in pipeline else None)
    _, cache = continued(model, tokens(rows, positions), 9)
    held = [sum(t.numel() * t.element_size() for t in layer.tensors()) for layer in cache.layers]
    assert held == [rows * positions * least * 4] * layers  # four bytes a number
    assert cache.bytes_held() == sum(held)
    assert cache.bytes_per_token() == layers * least * 4
    # The storage grows by doubling from 64 positions: no second copy hides there.
    assert cache.bytes_allocated() == layers * rows * 64 * least * 4
    assert least < expanded
    assert not [t for layer in cache.layers for t in layer.tensors() if t[0, 0].numel() == expanded]


# -- 16 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_qk_norm_is_lost(family):
    """Case 16 (MHA2MLA#8): exact with norms of any weight; in low rank refused, for a norm is not linear."""
    model = build(family, num_hidden_layers=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                p.copy_(torch.randn(p.shape, generator=generator))
    low_rank = parse("mha-to-mla{rank=16,rope_dim=8}")
    with pytest.raises(RefusedError, match=r"qk-norm at .*self_attn.*a norm on queries or keys is not linear"):
        run(planning_graph(model), low_rank, Context(own_parameters=True, meta=True))
    ids, eager = tokens(2, 12), copy.deepcopy(model)
    wrap(model, "mha-to-mla,latent-cache")
    with torch.no_grad():
        want = eager(ids).logits[:, 7:]
        assert distance(continued(model, ids, 7)[0], want) < 2e-6
        for layer in eager.model.layers:  # and it is not that they do nothing
            layer.self_attn.k_norm.weight.fill_(0.0 if family == "qwen3" else -1.0)
        assert distance(eager(ids).logits[:, 7:], want) > 1e-3


def test_the_bias_of_qkv_is_lost():
    """Case 16 (MHA2MLA#4, MHA2MLA#24): Qwen2's biases, grouped heads; at full rank without rotation nothing is lost."""
    model = build("qwen2", num_hidden_layers=1).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.copy_(torch.randn(p.shape, generator=generator))
        for name, b in model.named_buffers():
            if name.endswith("inv_freq"):
                b.zero_()
    eager, ids = copy.deepcopy(model), tokens(2, 12)
    wrap(model, "mha-to-mla{rank=56,rope_dim=8}", calibration=TEXT)
    with torch.no_grad():
        want = eager(ids).logits
        assert distance(model(ids).logits, want) < 1e-12
        for name in ("q_proj", "v_proj"):
            biased = copy.deepcopy(eager)
            getattr(biased.model.layers[0].self_attn, name).bias.zero_()
            assert distance(biased(ids).logits, want) > 1e-3


def test_weights_that_grow_are_not_reported():
    """Case 16 (TransMLA#8): factors of a large rank are bigger than what they replace; the report has both."""
    model = build("llama", num_hidden_layers=1)
    before = sum(p.numel() for p in model.parameters())
    wrap(model, "mha-to-mla{rank=56,rope_dim=8,method=pca}", calibration=TEXT)
    # Down 56 x 64, up 2 x (16 - 4) and 2 x 16 rows of 56, rotated keys 8 x 64; instead of 32 x 64 twice.
    new, old = 56 * 64 + (24 + 32) * 56 + 8 * 64, 2 * 32 * 64
    assert (model.report.new_weight_bytes, model.report.released_weight_bytes) == (4 * new, 4 * old)
    assert new > old
    assert sum(p.numel() for p in model.parameters()) == before + new - old
    assert model.report.to_json()["new_weight_bytes"] == 4 * new


# -- 17, 18 ------------------------------------------------------------------------------------------------------------


def ropes(graph: Graph) -> int:
    return len(graph.calls(ROPE.op))


def test_without_a_query_rank_q_is_misread():
    """Case 17 (Megatron-Bridge#5261): q_lora_rank=None: one query projection, no norm, the same split per head."""
    model, eager = pair("deepseek_v3", "mla-mm-split,mla-absorb{when=always}", q_lora_rank=None, num_hidden_layers=1)
    modules = {n for n, _ in eager.named_modules()}
    assert not any("q_a" in n for n in modules)
    assert {n for n, _ in model.named_modules()} == modules, "no norm grew"
    split = {n: tuple(p.shape) for n, p in model.named_parameters() if "q_proj" in n}
    path = "model.layers.0.self_attn.q_proj.weight_part"
    assert split == {f"{path}0": (4 * 16, 64), f"{path}1": (4 * 8, 64)}
    ids = tokens()
    assert distance(model(ids).logits, eager(ids).logits) < 2e-6
    with torch.no_grad():  # the sabotage: rows in whole blocks, as a view without heads reads them
        q = eager.model.layers[0].self_attn.q_proj.weight
        part = model.model.layers[0].self_attn.q_proj.weight_part0
        part.copy_(q[: part.shape[0]])
        assert distance(model(ids).logits, eager(ids).logits) > 1e-3


@pytest.mark.parametrize(
    ("family", "pipeline"),
    [
        ("gpt_neox", "mha-to-mla,mla-mm-split,latent-cache,mla-absorb{when=always}"),
        pytest.param("deepseek_v3", "mla-mm-split,mla-absorb{when=always}", marks=pytest.mark.slow),
    ],
)
def test_partial_rotary_is_applied_twice(family, pipeline):
    """Case 17 (Megatron-Bridge#4271): one rotation of queries and one of keys in every layer, before and after."""
    model, eager = pair(family, pipeline, num_hidden_layers=1)
    assert ropes(planning_graph(eager)) == 2
    ids = tokens(2, 12)
    with torch.no_grad():
        assert distance(continued(model, ids, 7)[0], eager(ids).logits[:, 7:]) < 2e-6
    operations = [o for g in session_of(model).graphs for o in g.operations]
    assert [o["rope"] for o in operations] == [2, 2]  # what is cached is rotated already


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "llama"])
def test_rope_is_not_recognised_behind_a_norm(family):
    """Case 18 (tt-mlir#9125): queries and keys are rotations whatever stands before them."""
    graph = planning_graph(build(family, num_hidden_layers=1))
    found = [find(graph, node) for node in attentions(graph)]
    assert len(found) == 1
    for one in found:
        assert one.query_rope is one.query
        assert one.key_rope is one.key
        stack, seen = [one.key_rope.args[0]], set()
        while stack:
            node = stack.pop()
            if node not in seen and "self_attn" in str(node.meta.get("nn_module_stack")):
                seen.add(node)
                stack.extend(node.all_input_nodes)
        normed = any("rsqrt" in n.name for n in seen)
        assert normed == (family != "llama")
    assert ropes(graph) == 2
    assert not graph.calls("neg", torch.neg), "no rotation is left in pieces"


# -- 20, 21 ------------------------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """A quantised projection: bytes and a scale for each row; ``name`` is what the bytes are called."""

    def __init__(self, linear: nn.Linear, name: str) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        packed = (linear.weight.detach() / scale).round().to(torch.int8)
        self.name = name
        if name == "weight":
            self.weight = nn.Parameter(packed, requires_grad=False)
        else:
            self.register_buffer(name, packed)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, getattr(self, self.name).to(x.dtype) * self.scale)


def quantised(family: str, *projections: str, name: str = "packed") -> Any:
    model = build(family, num_hidden_layers=1)
    for layer in model.model.layers:
        for p in projections:
            setattr(layer.self_attn, p, Packed(getattr(layer.self_attn, p), name))
    return model


@pytest.mark.parametrize("name", ["packed", "weight"])
@pytest.mark.parametrize(
    ("family", "projection", "pipeline"),
    [
        ("deepseek_v3", "kv_b_proj", "mla-absorb"),
        ("deepseek_v3", "kv_b_proj", "mla-mm-split"),
        ("llama", "k_proj", "mha-to-mla{rank=16,rope_dim=8}"),
        ("llama", "q_proj", "mha-to-mla{rank=16,rope_dim=8}"),
    ],
)
def test_an_up_projection_without_a_plain_weight_dies_in_the_middle(family, projection, pipeline, name):
    """Case 20 (llm-compressor#1185): no ``.weight``, or one of bytes: refused, with the reason and a remedy."""
    graph = planning_graph(quantised(family, projection, name=name))
    (one,) = parse(pipeline)
    found = one.plan(graph, Context(own_parameters=True, meta=True))
    if pipeline == "mla-mm-split":  # the query's projection is plain; the quantised one is no linear map that it knows
        assert {f.module.rpartition(".")[2] for f in found if isinstance(f, Site)} == {"q_b_proj"}
        return
    assert [f.rule for f in found] == ["no-plain-weight"]
    for refusal in found:
        assert isinstance(refusal, Refusal)
        assert "computed at every call (quantised?)" in refusal.reason
        assert "dequantise" in refusal.remedy
    with pytest.raises(RefusedError, match="no-plain-weight"):
        run(graph, (one,), Context(own_parameters=True, meta=True))


@pytest.mark.parametrize("pipeline", ["mla-absorb", "mla-mm-split,mla-absorb"])
def test_quantised_weights_are_absorbed_or_quantised_again(pipeline):
    """Case 21 (mlx-lm#1037): no pass makes a weight from quantised ones, and the bytes stay what they are."""
    model = quantised("deepseek_v3", "q_b_proj", "kv_b_proj")
    state = {n: v.clone() for n, v in model.state_dict().items()}
    with pytest.raises(RefusedError) as caught:
        wrap(model, pipeline)
    assert caught.value.remedy
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[n], v) and after[n].dtype == v.dtype for n, v in state.items())


def test_a_quantised_weight_beside_a_plain_one_is_taken_along():
    """Case 21: the query's plain projection is split, and what is split has nothing of the quantised one."""
    model = wrap(quantised("deepseek_v3", "kv_b_proj"), "mla-mm-split")
    recipes = session_of(model).plan.recipes
    assert [r.sources for r in recipes] == [("model.layers.0.self_attn.q_b_proj.weight",)]
    assert model.model.layers[0].self_attn.kv_b_proj.packed.dtype == torch.int8
    with torch.no_grad():
        eager = quantised("deepseek_v3", "kv_b_proj")
        assert distance(model(tokens()).logits, eager(tokens()).logits) < 2e-6


# -- 22 ----------------------------------------------------------------------------------------------------------------


def test_chunked_prefill_takes_the_wrong_form():
    """Case 22 (vLLM#14253): a chunk absorbs after a long prefix and expands after a short one; counted as it runs.

    By hand for 4 heads of d_n = d_v = 16 and d_c = 32: absorbing saves 32 P < (t - s) 32 (32), P = s t - s (s - 1) / 2
    per head. 8 after 1: P = 44 against 32 x 1; 8 after 20: P = 196 against 32 x 20.
    """
    model, eager = pair("deepseek_v3", "mla-absorb", kv_lora_rank=32, num_hidden_layers=1)
    taken: list[bool] = []
    expected = [(2, 8), (20, 8), (20, 1), (3, 20)]
    for past, new in expected:
        ids = tokens(2, past + new)
        name, cache = cache_argument(model), GraphCache.for_model(model)
        with torch.no_grad():
            model(ids[:, :past], use_cache=True, **{name: cache})
            watched = _watch(model, taken)
            before = len(taken)
            got = model(ids[:, past:], use_cache=True, **{name: cache}).logits
            if not watched or len(taken) == before:  # its graph was made by this very call: ask again
                cache.crop(-new)
                _watch(model, taken)
                got = model(ids[:, past:], use_cache=True, **{name: cache}).logits
            assert distance(got, eager(ids).logits[:, past:]) < 2e-6
    by_hand = []
    for past, new in expected:
        t, pairs = past + new, new * (past + new) - new * (new - 1) // 2
        by_hand.append(4 * pairs * (2 * 32 - 32) < (4 * t - 4 * new) * 32 * 32)
    assert by_hand == [True, True, True, False]
    assert taken == by_hand


def _noted(decide: Any, taken: list[bool], args: Any) -> bool:
    taken.append(decide(args))
    return taken[-1]


def _watch(model: Any, taken: list[bool]) -> bool:
    """Note every decision of the graphs that continue a cache."""
    graphs = [g.executable for g in session_of(model).graphs if g.cached and g.executable._program.choice is not None]
    for executable in graphs:
        if not hasattr(executable, "_watched"):
            decide = executable._decide
            executable._watched = True
            executable._decide = functools.partial(_noted, decide, taken)
    return bool(graphs)
