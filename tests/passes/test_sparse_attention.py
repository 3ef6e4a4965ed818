"""sparse-attention gathers what DeepSeek-V3.2's indexer chose: the library's numbers and gradients, fewer products."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from latentscan.ir.capture import capture
from latentscan.ir.cost import cost_by_kind, evaluate
from latentscan.ir.errors import RefusedError
from latentscan.ir.graph import Graph
from latentscan.passes.base import Context, Refusal, Site
from latentscan.passes.sparse_attention import SparseAttention
from latentscan.runtime.door import session_of
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import FAMILIES, build
from latentscan.tests.passes.switches import rewritten, sizes_of
from latentscan.tests.runtime.helpers import distance, ragged, tokens, worst_gradient

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "DeepseekV32Config"):
    pytest.skip("this transformers has no DeepSeek-V3.2", allow_module_level=True)

PIPELINE = "mla-absorb{when=always},sparse-attention"


def model(**overrides: Any) -> Any:
    return build("deepseek_v32", **{"first_k_dense_replace": 2, **overrides})


def graph_of(training: bool = False) -> Graph:
    return capture(model().train(training), training=training)


def test_training_gives_the_gradients_of_the_masked_model():
    eager = model().train()
    sparse = wrap(copy.deepcopy(eager), f"mla-mm-split,{PIPELINE},mla-swap-core-attn-out,mla-zero-memory")
    inputs = ragged(2, 17) | {"use_cache": False}
    for m in (sparse, eager):
        m(**inputs).loss.backward()
    assert worst_gradient(sparse, eager) < 5e-6
    (traced,) = session_of(sparse).graphs
    assert traced.operations[0]["sparse_latent_attention"] == 2
    assert [len(r.sites) for r in traced.records] == [4, 2, 2, 2, 2]


@pytest.mark.slow
def test_generation_gives_the_tokens_of_the_masked_model():
    eager = model()
    sparse = wrap(copy.deepcopy(eager), PIPELINE)
    inputs = ragged(2, 9)
    del inputs["labels"]
    words = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1}
    assert torch.equal(sparse.generate(**inputs, **words), eager.generate(**inputs, **words))
    assert all(g.cached and g.operations[0]["sparse_latent_attention"] == 2 for g in session_of(sparse).graphs)


def test_the_comparison_notices_a_query_that_reads_other_keys(monkeypatch):
    """Sabotage: every query reads its neighbour's rows."""
    from latentscan.kernels.reference import sparse as ref

    chosen = ref.chosen
    monkeypatch.setattr(ref, "chosen", lambda rows, indices: chosen(rows, indices.roll(1, 1)))
    eager = model()
    got = wrap(copy.deepcopy(eager), PIPELINE)(tokens(2, 17), use_cache=False).logits
    assert distance(got, eager(tokens(2, 17), use_cache=False).logits) > 1e-3


def test_products_fall_from_all_keys_to_the_chosen_ones():
    graph = graph_of()
    sizes = sizes_of(graph, 2, 100)
    dense, _ = rewritten(graph, "mla-absorb{when=always}")
    sparse, records = rewritten(graph, PIPELINE)
    before = evaluate(cost_by_kind(dense)["latent_attention"].flops.expression, sizes)
    after = evaluate(cost_by_kind(sparse)["sparse_latent_attention"].flops.expression, sizes)
    assert (before, after) == tuple(2 * 2 * 2 * 4 * 100 * k * (2 * 16 + 8) for k in (100, 5))
    assert "5" in records[-1].sites[0].note
    assert not [n for n in sparse.nodes if n.target == "scatter"]  # the dense mask is gone


def test_a_model_without_an_indexer_is_refused_by_name():
    refusals = SparseAttention().plan(capture(build("deepseek_v3")), Context())
    assert [r.rule for r in refusals if isinstance(r, Refusal)] == ["no-indexer"] * 2
    with pytest.raises(RefusedError, match="top-k over index scores"):
        wrap(build("deepseek_v3"), PIPELINE)


def test_expanded_attention_is_refused_with_the_remedy():
    (first, _) = SparseAttention().plan(graph_of(), Context())
    assert isinstance(first, Refusal)
    assert first.rule == "not-absorbed"
    assert "mla-absorb{when=always}" in first.remedy


def test_indices_that_are_no_top_k_are_left_alone():
    """Duplicates would be counted twice; only a top-k promises that there are none."""
    graph, _ = rewritten(graph_of(), "mla-absorb{when=always}")
    assert all(isinstance(f, Site) for f in SparseAttention().plan(graph, Context()))
    for node in graph.calls("topk"):
        node.target = "sort"
    assert {f.rule for f in SparseAttention().plan(graph, Context())} == {"no-indexer"}


def test_the_tiny_model_is_a_family():
    assert FAMILIES["deepseek_v32"][1]["index_topk"] == 5
