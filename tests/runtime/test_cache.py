"""GraphCache under generate(): the tokens of eager Hugging Face, two graphs, and all that generate asks of a cache."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import pytest
import torch
from torch import fx
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from latentscan.ir.errors import CacheError
from latentscan.ir.ops.cache import ARENA_WRITE
from latentscan.lowering.cache import ArenaBinder, lower_cache_appends
from latentscan.runtime.cache import (
    CHUNKED_PREFILL,
    GraphCache,
    GraphLayer,
    HybridLayer,
    LinearLayer,
    cache_argument,
    check_implementation,
    distinct_sizes,
)

BASE = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1}
ATTENTION = BASE | {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
SSD = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", ATTENTION),
    "gemma3": ("gemma3_text", ATTENTION | {"head_dim": 16, "sliding_window": 8}),
    "deepseek_v3": (
        "deepseek_v3",
        ATTENTION
        | {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
        | {"qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 4}
        | {"num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "mamba": ("mamba", BASE | {"state_size": 8, "time_step_rank": 4, "num_hidden_layers": 1}),
    "mamba2": (
        "mamba2",
        BASE
        | {"num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 2, "state_size": 16, "chunk_size": 16}
        | {"num_hidden_layers": 1},
    ),
    "bamba": ("bamba", ATTENTION | SSD | {"attn_layer_indices": [1], "mamba_expand": 2}),
    "falcon_h1": ("falcon_h1", ATTENTION | SSD | {"mamba_d_ssm": 128, "num_hidden_layers": 1}),
}


def build(family: str) -> Any:
    kind, words = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **words)).float().eval()
    model.generation_config.eos_token_id = None
    if family == "deepseek_v3":
        model.set_experts_implementation("batched_mm")
    return model


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def off_by_one(gm: fx.GraphModule) -> None:
    """Sabotage: decode writes one position too early."""
    for node in gm.graph.nodes:
        if node.target is ARENA_WRITE.op and isinstance(node.args[1], fx.Node):
            with gm.graph.inserting_before(node):
                early = gm.graph.call_function(operator.sub, (node.args[1], 1))
            node.args = (node.args[0], early, *node.args[2:])
    gm.recompile()


class Compiled:
    """A model whose forward is compiled; ``graphs`` are what Dynamo made, after lowering."""

    def __init__(self, family: str, sabotage=None) -> None:
        self.model, self.eager = build(family), build(family)
        self.graphs: list[fx.GraphModule] = []

        def backend(gm, example_inputs):
            gm = copied(gm)
            records = lower_cache_appends(gm)
            if sabotage:
                sabotage(gm)
            self.graphs.append(gm)
            return ArenaBinder(gm.forward, records)

        forward = type(self.model).forward.__get__(self.model)
        self.model.forward = torch.compile(forward, backend=backend, fullgraph=True, dynamic=True)
        self.name = cache_argument(self.model)

    def cache(self, **words) -> GraphCache:
        return GraphCache.for_model(self.model, **words)

    def generate(self, ids, cache=None, seed=0, **words) -> torch.Tensor:
        torch.manual_seed(seed)
        with distinct_sizes():
            return self.model.generate(ids, **{self.name: self.cache() if cache is None else cache}, **words)

    def expect(self, ids, cache=None, seed=0, **words) -> torch.Tensor:
        """What eager Hugging Face says."""
        torch.manual_seed(seed)
        return self.eager.generate(ids, **({self.name: cache} if cache is not None else {}), **words)

    @torch.no_grad()
    def logits(self, ids, cache, eager=False, **words) -> torch.Tensor:
        with distinct_sizes():
            model = self.eager if eager else self.model
            return model(input_ids=ids, **{self.name: cache}, use_cache=True, **words).logits


def prompt(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


GREEDY = {"do_sample": False, "max_new_tokens": 8}


def families(*quick: str, slow: tuple[str, ...] = ()):
    """One run a family; the slow ones are state-space models, whose traces are long."""
    return pytest.mark.parametrize("family", [*quick, *(pytest.param(f, marks=pytest.mark.slow) for f in slow)])


# -- tokens --------------------------------------------------------------------------------------------------------


@families("llama", "gemma3", "deepseek_v3", "mamba2", "bamba", slow=("mamba", "falcon_h1"))
def test_greedy_tokens_with_two_graphs(family):
    m, ids = Compiled(family), prompt(2, 11)
    assert torch.equal(m.generate(ids, **GREEDY), m.expect(ids, **GREEDY))
    assert len(m.graphs) == 2


def test_no_recompile_per_step_or_prompt_length():
    m = Compiled("llama")
    words = GREEDY | {"max_new_tokens": 40}
    for length, graphs in ((7, 2), (2, 2), (1, 3)):  # a prompt of one token is a prefill of its own
        ids = prompt(2, length)
        assert torch.equal(m.generate(ids, **words), m.expect(ids, **words)), length
        assert len(m.graphs) == graphs, length


def test_generate_with_chunked_prefill():
    m = Compiled("llama")
    for length in (30, 45, 61):
        ids = prompt(2, length)
        assert torch.equal(m.generate(ids, prefill_chunk_size=8, **GREEDY), m.expect(ids, **GREEDY)), length
    # First chunk, chunk, step; transformers 5.17 passes slices of the mask, whose strides tell the last chunk apart.
    assert len(m.graphs) <= 4


@pytest.mark.parametrize("length", [1, 2, 7])
def test_two_graphs_for_any_first_prompt(length):
    m, ids = Compiled("llama"), prompt(2, length)
    assert torch.equal(m.generate(ids, **GREEDY), m.expect(ids, **GREEDY))
    assert len(m.graphs) == 2


@families("llama", slow=("falcon_h1",))
def test_sampling_and_beams(family):
    m, ids = Compiled(family), prompt(2, 7)
    sample = {"do_sample": True, "max_new_tokens": 8}
    assert torch.equal(m.generate(ids, seed=3, **sample), m.expect(ids, seed=3, **sample))
    beams = GREEDY | {"num_beams": 3}
    assert torch.equal(m.generate(ids, **beams), m.expect(ids, **beams))


@families("llama", "gemma3", slow=("bamba",))
def test_left_padding(family):
    m, ids = Compiled(family), prompt(3, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[2, :9] = 0
    words = GREEDY | {"attention_mask": mask}
    assert torch.equal(m.generate(ids * mask, **words), m.expect(ids * mask, **words))


def test_assisted_decoding_rolls_back():
    m, ids = Compiled("llama"), prompt(1, 9).repeat(1, 2)
    words = GREEDY | {"max_new_tokens": 12}
    assert torch.equal(m.generate(ids, prompt_lookup_num_tokens=3, **words), m.expect(ids, **words))


def test_a_second_turn_reuses_the_cache():
    m, ids, more = Compiled("llama"), prompt(2, 9), prompt(2, 5, seed=2)
    ours, theirs = m.cache(), DynamicCache(config=m.eager.config)
    first = m.generate(ids, ours, **GREEDY)
    assert torch.equal(first, m.expect(ids, theirs, **GREEDY))
    turn = torch.cat([first, more], 1)
    assert torch.equal(m.generate(turn, ours, **GREEDY), m.expect(turn, theirs, **GREEDY))
    assert ours.get_seq_length() == theirs.get_seq_length()


def test_two_caches_with_one_model():
    m = Compiled("llama")
    caches, prompts = [m.cache(), m.cache()], [prompt(2, 6), prompt(2, 9, seed=2)]
    for c, ids in zip(caches, prompts, strict=True):
        m.logits(ids, c)
    for step in range(4):
        for i, c in enumerate(caches):
            token = prompt(2, 1, seed=10 * i + step)
            got = m.logits(token, c)
            prompts[i] = torch.cat([prompts[i], token], 1)
            want = m.logits(prompts[i], DynamicCache(config=m.eager.config), eager=True)[:, -1:]
            torch.testing.assert_close(got, want)
    assert len(m.graphs) == 2


def test_a_write_one_position_off_changes_the_tokens():
    """Sabotage: the comparisons above depend on where decode writes."""
    ids = prompt(2, 11)
    m = Compiled("llama", off_by_one)
    assert not torch.equal(m.generate(ids, **GREEDY), m.expect(ids, **GREEDY))


# -- several tokens with a filled cache ------------------------------------------------------------------------------


@families("llama", "mamba2", slow=("gemma3", "deepseek_v3", "falcon_h1"))
def test_chunked_prefill(family):
    m, ids = Compiled(family), prompt(2, 29)
    cache = m.cache()
    parts = [m.logits(ids[:, a:b], cache) for a, b in ((0, 10), (10, 27), (27, 28), (28, 29))]
    want = m.logits(ids, DynamicCache(config=m.eager.config), eager=True)
    torch.testing.assert_close(torch.cat(parts, 1), want, atol=2e-5, rtol=1e-4)
    assert len(m.graphs) == 3


@pytest.mark.parametrize("compiled", [True, False])
def test_mamba1_refuses_chunked_prefill(compiled):
    m, ids = Compiled("mamba"), prompt(2, 12)
    cache = m.cache()
    m.logits(ids[:, :8], cache, eager=not compiled)
    with pytest.raises(CacheError, match=r"cache layer 0: several tokens at once.*one call"):
        m.logits(ids[:, 8:], cache, eager=not compiled)
    m.logits(ids[:, 8:9], cache, eager=not compiled)


def test_the_refusal_is_still_needed():
    """transformers continues Mamba-1 from a zero state; when that is mended, CHUNKED_PREFILL can name it."""
    model, ids = build("mamba"), prompt(2, 12)
    assert "mamba" not in CHUNKED_PREFILL
    cache, name = DynamicCache(config=model.config), cache_argument(model)
    with torch.no_grad():
        model(input_ids=ids[:, :8], **{name: cache}, use_cache=True)
        chunk = model(input_ids=ids[:, 8:], **{name: cache}, use_cache=True).logits
        whole = model(input_ids=ids, use_cache=False).logits[:, 8:]
    assert (chunk - whole).abs().max() > 1e-4 * whole.abs().max()


# -- the methods -----------------------------------------------------------------------------------------------------


def test_crop_and_continue():
    m, ids, other = Compiled("llama"), prompt(2, 12), prompt(2, 4, seed=2)
    cache = m.cache()
    m.logits(ids, cache)
    cache.crop(-5)
    assert cache.get_seq_length() == 7
    got = m.logits(other, cache)
    want = m.logits(torch.cat([ids[:, :7], other], 1), DynamicCache(config=m.eager.config), eager=True)[:, 7:]
    torch.testing.assert_close(got, want)
    cache.crop(0)
    assert cache.get_seq_length() == 11


def test_a_sliding_layer_can_be_cropped_past_its_window():
    m, ids = Compiled("gemma3"), prompt(2, 30)
    cache = m.cache()
    m.logits(ids, cache)
    cache.crop(-15)
    want = m.logits(ids[:, :18], DynamicCache(config=m.eager.config), eager=True)[:, 15:]
    torch.testing.assert_close(m.logits(ids[:, 15:18], cache), want, atol=2e-5, rtol=1e-4)
    assert cache.get_mask_sizes(1, 0) == (19, 0)


@families("mamba2", slow=("falcon_h1",))
def test_a_recurrent_state_refuses_crop_and_nothing_changes(family):
    m = Compiled(family)
    cache = m.cache()
    m.logits(prompt(2, 12), cache)
    held = cache.bytes_held()
    with pytest.raises(CacheError, match="cannot be rolled back"):
        cache.crop(-2)
    assert cache.bytes_held() == held
    cache.crop(0)


@families("llama", "falcon_h1", slow=("bamba",))
def test_batch_rows_move_as_in_eager(family):
    m, ids = Compiled(family), prompt(3, 9)
    ours, theirs = m.cache(), DynamicCache(config=m.eager.config)
    m.logits(ids, ours)
    rows = torch.tensor([2, 0, 0])
    ours.reorder_cache(rows)
    ours.batch_repeat_interleave(2)
    ours.batch_select_indices(torch.tensor([0, 1, 5, 2]))
    order = rows.repeat_interleave(2)[[0, 1, 5, 2]]
    m.logits(ids[order], theirs, eager=True)
    position = {"position_ids": torch.full((4, 1), 9)} if family == "bamba" else {}
    token = prompt(4, 1, seed=5)
    got, want = m.logits(token, ours, **position), m.logits(token, theirs, eager=True, **position)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    assert ours.batch_size == 4


@families("llama", slow=("falcon_h1",))
def test_reset_serves_another_batch_without_a_new_graph(family):
    m, cache = Compiled(family), None
    for batch in (2, 3):
        cache = cache or m.cache()
        cache.reset()
        assert not cache.is_initialized
        ids = prompt(batch, 9)
        assert torch.equal(m.generate(ids, cache, **GREEDY), m.expect(ids, **GREEDY))
        assert cache.is_initialized
    assert len(m.graphs) == 2


@pytest.mark.parametrize(
    ("family", "duplicate"),
    [("llama", copy.deepcopy), ("llama", lambda c: pickle.loads(pickle.dumps(c))), ("falcon_h1", copy.deepcopy)],
)
def test_a_copy_is_independent(family, duplicate):
    m, ids = Compiled(family), prompt(2, 9)
    cache = m.cache()
    m.logits(ids, cache)
    other = duplicate(cache)
    a, b = prompt(2, 1, seed=2), prompt(2, 1, seed=3)
    m.logits(a, cache)
    got = m.logits(b, other)
    want = m.logits(torch.cat([ids, b], 1), DynamicCache(config=m.eager.config), eager=True)[:, -1:]
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    assert not {x.id for x in cache.arenas} & {x.id for x in other.arenas}


def test_bytes_are_those_held():
    m = Compiled("deepseek_v3")
    cache = m.cache()
    assert (cache.bytes_held(), cache.bytes_per_token()) == (0, 0)
    m.logits(prompt(2, 9), cache)
    assert cache.bytes_per_token() == 2 * (16 + 8) * 4  # layers x (latent + rope) x fp32: what transformers caches
    assert cache.bytes_held() == 2 * 9 * cache.bytes_per_token()
    assert cache.bytes_held() <= cache.bytes_allocated() == 2 * 64 * cache.bytes_per_token()
    assert cache.bytes_held() == sum(t.numel() * t.element_size() for layer in cache.layers for t in layer.tensors())


def test_limits():
    m = Compiled("llama")
    cache = m.cache(max_len=12, max_batch=2)
    assert cache.get_max_length() == 12
    assert m.cache().get_max_length() == -1
    m.logits(prompt(2, 12), cache)
    assert cache.bytes_allocated() == cache.bytes_held()
    with pytest.raises(CacheError, match=r"cache layer 0: 13 positions do not fit"):
        m.logits(prompt(2, 1), cache)
    cache.reset()
    with pytest.raises(CacheError, match=r"3 batch rows do not fit"):
        m.logits(prompt(3, 4), cache)


def test_it_works_eagerly_too():
    m, ids = Compiled("llama"), prompt(2, 7)
    assert torch.equal(m.expect(ids, m.cache(), **GREEDY), m.expect(ids, **GREEDY))
    with pytest.raises(CacheError, match="no_grad"):
        m.eager(input_ids=ids, **{m.name: m.cache()})


# -- construction ----------------------------------------------------------------------------------------------------


def test_layers_mirror_dynamic_cache():
    kinds = {f: [type(x) for x in GraphCache.for_model(build(f)).layers] for f in FAMILIES}
    assert kinds["llama"] == kinds["gemma3"] == kinds["deepseek_v3"] == [GraphLayer] * 2
    assert kinds["mamba"] == kinds["mamba2"] == [LinearLayer]
    assert kinds["bamba"] == [LinearLayer, GraphLayer]
    assert kinds["falcon_h1"] == [HybridLayer]
    assert GraphCache.for_model(build("mamba2")).is_compileable is False
    assert GraphCache.for_model(build("llama").config).is_linear == [False, False]
    assert GraphCache.for_model(build("bamba")).is_linear == [True, False]
    assert GraphCache.for_model(build("falcon_h1")).is_linear == [False]


@pytest.mark.parametrize("kind", ["static", "offloaded_static", "quantized", "offloaded", "nonsense"])
def test_other_implementations_are_refused(kind):
    with pytest.raises(CacheError, match="is not served") as caught:
        GraphCache.for_model(build("llama"), implementation=kind)
    assert caught.value.remedy
    check_implementation("dynamic")


def test_an_unknown_layer_kind_is_refused(monkeypatch):
    from transformers import cache_utils

    class Strange(cache_utils.DynamicLayer):
        pass

    monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", Strange)
    with pytest.raises(CacheError, match="llama needs a Strange"):
        GraphCache.for_model(build("llama"))


def test_offloading_is_refused():
    with pytest.raises(CacheError, match="offloaded"):
        GraphCache.for_model(build("llama")).offload(0)
