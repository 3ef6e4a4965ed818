"""latent-cache stores the least: the cut against brute force, the replay against the graph before, and its ties."""

from __future__ import annotations

import itertools
from operator import getitem
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from latentscan.ir.arena import Arena, make_token
from latentscan.ir.graph import Graph
from latentscan.ir.normalize import ATTENTION
from latentscan.ir.ops.cache import CACHE_APPEND
from latentscan.ir.tokenwise import NotTokenwise, Place, input_places, width
from latentscan.ir.verify import verify, verify_all
from latentscan.passes.base import Context, Refusal, Site
from latentscan.passes.latent_cache import LatentCache, minimum_cut
from latentscan.tests.ir.building import Building, close, random

APPEND = CACHE_APPEND.op


def append(make: Building, token: fx.Node, tensors: list[fx.Node], dims: list[int]) -> list[fx.Node]:
    """What is cached of each tensor, and the new token."""
    both = make.call(APPEND, token, tensors, dims)
    full = make.call(getitem, both, 0)
    return [*(make.call(getitem, full, i) for i in range(len(tensors))), make.call(getitem, both, 1)]


def planned(graph: Graph) -> list[Site | Refusal]:
    return LatentCache().plan(graph, Context())


def rewritten(graph: Graph) -> Graph:
    """A copy after the pass, verified."""
    after = graph.copy()
    for site in planned(graph):
        assert isinstance(site, Site)
        LatentCache().apply(after, site, Context())
    after.clean()
    verify(after, before=graph, name="latent-cache")
    verify_all(after)
    return after


# -- the cut -----------------------------------------------------------------------------------------------------------


@st.composite
def networks(draw: st.DrawFn) -> tuple[Building, list[tuple[fx.Node, Place]]]:
    """A random network of linear maps, joins, slices and ends above two or three cached tensors."""
    make = Building()
    values = [make.input("x", "b", "s", draw(st.integers(1, 6)))]
    for _ in range(draw(st.integers(1, 7))):
        x = draw(st.sampled_from(values))
        n = int(make.graph.shape(x)[-1])
        kind = draw(st.sampled_from(["linear", "linear", "cat", "slice", "end", "heads"]))
        if kind == "linear":
            values.append(make.call(F.linear, x, make.weight(f"w{len(values)}", random(draw(st.integers(1, 5)), n))))
        elif kind == "cat":
            values.append(make.call(torch.cat, [x, draw(st.sampled_from(values))], -1))
        elif kind == "slice" and n > 1:
            values.append(make.call(getitem, x, (Ellipsis, slice(0, draw(st.integers(1, n - 1))))))
        elif kind == "end":
            values.append(make.method("sin", x))
        else:
            values.append(make.method("squeeze", make.method("unsqueeze", x, 1), 1))
    cached = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
    return make, [(c, (0, 1)) for c in cached]


def network_of(make: Building, tensors: list[tuple[fx.Node, Place]]) -> dict[fx.Node, tuple[Place, list[fx.Node]]]:
    """Node -> (its place, its token-wise inputs) above the tensors."""
    found: dict[fx.Node, tuple[Place, list[fx.Node]]] = {}
    stack = list(tensors)
    while stack:
        node, place = stack.pop()
        if node in found:
            continue
        try:
            inputs = input_places(make.graph, node, place)
        except NotTokenwise:
            inputs = {}
        found[node] = place, list(inputs)
        stack.extend(inputs.items())
    return found


def gives(network: dict[fx.Node, tuple[Place, list[fx.Node]]], stored: set[fx.Node], node: fx.Node) -> bool:
    """Whether ``node`` can be made from what is stored."""
    if node in stored:
        return True
    inputs = network[node][1]
    return bool(inputs) and all(gives(network, stored, i) for i in inputs)


@settings(max_examples=60)
@given(networks())
def test_the_cut_is_the_best_of_all_sets(given_network):
    """Every subset of the network is tried; among the narrowest the one with the fewest tensors wins."""
    make, tensors = given_network
    network = network_of(make, tensors)
    cost = {n: (width(make.graph, n, place), 1) for n, (place, _) in network.items()}
    best = None
    for count in range(1, len(network) + 1):
        for stored in itertools.combinations(network, count):
            if all(gives(network, set(stored), t) for t, _ in tensors):
                total = sum(cost[n][0] for n in stored), count
                best = total if best is None else min(best, total)
    cut = minimum_cut(make.graph, tensors)
    assert all(gives(network, {n for n, _ in cut}, t) for t, _ in tensors)
    assert (sum(cost[n][0] for n, _ in cut), len(cut)) == best
    order = [n for n in make.graph.nodes if n in dict(cut)]
    assert [n for n, _ in cut] == order, "in the graph's order, so that every graph of a model stores alike"


def test_values_that_cannot_be_cached_as_they_are_are_not_cut():
    """The narrowest value is flat (batch and sequence in one dimension), then one with the sequence first."""
    make = Building()
    x = make.input("x", "b", "s", 8)
    down, up = make.weight("down", random(3, 8)), make.weight("up", random(12, 3))
    flat = make.call(F.linear, make.method("view", x, -1, 8), down)
    first = make.call(F.linear, flat, up)
    y = make.method("view", first, make.method("size", x, 0), make.method("size", x, 1), 12)
    assert minimum_cut(make.graph, [(y, (0, 1))]) == [(x, (0, 1))]  # 8, although 3 is narrower
    turned = make.call(F.linear, make.method("transpose", x, 0, 1), down)
    z = make.method("transpose", make.call(F.linear, turned, up), 0, 1)
    assert minimum_cut(make.graph, [(z, (0, 1))]) == [(x, (0, 1))]


# -- the replay --------------------------------------------------------------------------------------------------------


def gpt2(make: Building, token: fx.Node, x: fx.Node) -> tuple[list[fx.Node], list[int], int]:
    """Fused, transposed and biased: K and V from the layer's input (7 < 2 x 2 x 3)."""
    w, bias = make.weight("c_attn.weight", random(7, 18)), make.weight("c_attn.bias", random(18))
    flat = make.call(torch.addmm, bias, make.method("view", x, -1, 7), w)
    y = make.method("view", flat, make.method("size", x, 0), make.method("size", x, 1), 18)
    split = make.method("split", y, 6, 2)
    k, v = (make.call(getitem, split, i) for i in (1, 2))
    return [make.method("transpose", make.method("view", p, *sizes(make, x), 2, 3), 1, 2) for p in (k, v)], [2, 2], 7


def sizes(make: Building, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    return make.method("size", x, 0), make.method("size", x, 1)


def mla(make: Building, token: fx.Node, x: fx.Node) -> tuple[list[fx.Node], list[int], int]:
    """A normed latent of 2 and one rotated key of 2 for all heads; [k_nope | v] of kv_b per head."""
    down, up = make.weight("kv_a", random(4, 7)), make.weight("kv_b", random(2 * (3 + 2), 2))
    both = make.method("split", make.call(F.linear, x, down), [2, 2], -1)
    latent = make.method("sin", make.call(getitem, both, 0))
    rope = make.method("cos", make.method("unsqueeze", make.call(getitem, both, 1), 1))
    heads = make.method("transpose", make.method("view", make.call(F.linear, latent, up), *sizes(make, x), 2, 5), 1, 2)
    parts = make.call(torch.split, heads, [3, 2], -1)
    nope, v = (make.call(getitem, parts, i) for i in (0, 1))
    k = make.call(torch.cat, [nope, make.method("expand", rope, -1, 2, -1, -1)], -1)
    return [k, v], [2, 2], 4


def partial(make: Building, token: fx.Node, x: fx.Node) -> tuple[list[fx.Node], list[int], int]:
    """NeoX: per head, the first 4 of 16 key features rotated, the rest and the values straight from the input (7)."""
    w, bias = make.weight("qkv", random(2 * 36, 7)), make.weight("qkv_bias", random(2 * 36))
    view = make.method("view", make.call(F.linear, x, w, bias), *sizes(make, x), 2, 36)
    parts = make.method("split", make.method("transpose", view, 1, 2), [4, 16, 16], -1)
    k, v = (make.call(getitem, parts, i) for i in (1, 2))
    rotated = make.method("sin", make.call(getitem, k, (Ellipsis, slice(0, 4))))
    k = make.call(torch.cat, [rotated, make.call(getitem, k, (Ellipsis, slice(4, None)))], -1)
    return [k, v], [2, 2], 7 + 2 * 4


def repeated(make: Building, token: fx.Node, x: fx.Node) -> tuple[list[fx.Node], list[int], int]:
    """K and V repeated for the query's heads before they are cached: the two KV heads are enough."""
    out = []
    for name in ("k", "v"):
        y = make.method("cos", make.call(F.linear, x, make.weight(name, random(4, 7))))  # an end, so x is no choice
        heads = make.method("transpose", make.method("view", y, *sizes(make, x), 2, 2), 1, 2)
        wide = make.method("expand", make.call(getitem, heads, (slice(None), slice(None), None)), -1, -1, 3, -1, -1)
        out.append(make.method("flatten", wide, 1, 2))
    return out, [2, 2], 8


KINDS = {"gpt2": gpt2, "mla": mla, "partial": partial, "repeated": repeated}


def cached_graph(kind: Any) -> tuple[Building, Graph, int]:
    make = Building()
    token, x = make.token(), make.input("x", "b", "s", 7)
    tensors, dims, least = kind(make, token, x)
    *full, new = append(make, token, tensors, dims)
    return make, make.output(*full, new), least


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_expanded_from_the_store_is_what_was_cached(kind):
    """A prompt of 5, a chunk of 3 and a step, in fp64: the same keys and values, from fewer numbers."""
    make, before, least = cached_graph(KINDS[kind])
    (site,) = planned(before)
    assert isinstance(site, Site)
    assert (site.module, site.rule, site.facts["after"]) == ("attn", "minimum-cut", least)
    after = rewritten(before)
    arenas = Arena(), Arena()
    tokens = [make_token(a, 0) for a in arenas]
    held = 0
    for seed, new in enumerate((5, 3, 1)):
        x = random(2, new, 7, seed=seed)
        results = []
        for i, graph in enumerate((before, after)):
            *full, tokens[i] = make.run(graph, x=x, token=tokens[i])
            results.append(full)
        held += new
        assert all(f.shape[2] == held for f in results[0])
        assert close(results[1], results[0]) < 1e-14
        assert tokens[1].shape[0] == held + 1
    assert arenas[0].bytes_held() == 2 * 9 * 8 * site.facts["before"]
    assert arenas[1].bytes_held() == 2 * 9 * 8 * least  # rows, positions, bytes of a double


def test_the_comparison_notices_a_wrong_replay():
    """Sabotage: one item of the split taken for another."""
    make, before, _ = cached_graph(gpt2)
    after = rewritten(before)
    arenas = Arena(), Arena()
    x = random(2, 5, 7)
    *want, _ = make.run(before, x=x, token=make_token(arenas[0], 0))
    for node in after.graph.nodes:  # the wrong half of the fused result
        if node.target is getitem and node.args[1] == 1 and "split" in node.args[0].name:
            node.args = (node.args[0], 0)
    *got, _ = make.run(after, x=x, token=make_token(arenas[1], 0))
    assert close(got, want) > 0.1


# -- ties and refusals -------------------------------------------------------------------------------------------------


def two(make: Building, x: fx.Node, widths: tuple[int, int]) -> list[fx.Node]:
    n = int(make.graph.shape(x)[-1])
    weights = [make.weight(f"w{i}", random(w, n)) for i, w in enumerate(widths)]
    return [make.call(F.linear, x, w) for w in weights]


@pytest.mark.parametrize(("features", "rule"), [(7, "minimum-cut"), (8, "already-least"), (9, "already-least")])
def test_a_tie_that_would_compute_again_is_refused(features, rule):
    """Two projections of 4: an input of 7 is less; one of 8 is no less, and needs both matmuls on all tokens."""
    make = Building()
    token, x = make.token(), make.input("x", "b", "s", features)
    make.output(*append(make, token, two(make, x, (4, 4)), [1, 1]))
    (found,) = planned(make.graph)
    assert found.rule == rule
    if isinstance(found, Refusal):
        assert "8 elements per token are cached" in found.reason
        assert "mha-to-mla" in found.remedy
    else:
        assert found.facts == {"before": 8, "after": 7}


def test_a_tie_of_views_is_one_tensor():
    """K and V are halves of one value: it is stored, once; nothing is computed again."""
    make = Building()
    token, x = make.token(), make.input("x", "b", "s", 8)
    y = make.method("sin", x)
    k, v = (make.call(getitem, make.call(torch.chunk, y, 2, -1), i) for i in (0, 1))
    make.output(*append(make, token, [k, v], [1, 1]))
    (site,) = planned(make.graph)
    assert isinstance(site, Site)
    assert site.facts == {"before": 8, "after": 8}
    after = rewritten(make.graph)
    (node,) = [n for n in after.nodes if n.target is APPEND]
    assert [n.name for n in node.args[1]] == [y.name]


def test_one_tensor_that_is_cached_twice_is_stored_once():
    make = Building()
    token, x = make.token(), make.input("x", "b", "s", 8)
    y = make.method("sin", x)
    make.output(*append(make, token, [y, y], [1, 1]))
    (site,) = planned(make.graph)
    assert isinstance(site, Site)
    assert site.facts == {"before": 16, "after": 8}


def test_values_that_are_no_tokenwise_maps_are_refused_with_their_sizes():
    make = Building()
    token, x = make.token(), make.input("x", "b", 2, "s", 3)
    k, v = make.method("sin", x), make.method("cumsum", x, 2)
    make.output(*append(make, token, [k, v], [2, 2]))
    (found,) = planned(make.graph)
    assert isinstance(found, Refusal)
    assert (found.module, found.rule) == ("attn", "already-least")
    assert found.reason.startswith("12 elements per token are cached (sin (6), cumsum (6))")


def test_keys_that_leave_the_graph_are_somebody_else_s_cache():
    make = Building()
    q, k, v = (make.input(n, "b", 2, "s", 3) for n in "qkv")
    attention = make.call(ATTENTION, q, k, v, kind="causal", scale=1.0)
    make.output(attention, k, v)
    (found,) = planned(make.graph)
    assert isinstance(found, Refusal)
    assert found.rule == "foreign-cache"
    assert "wrap" in found.remedy
    alone = Building()
    q, k, v = (alone.input(n, "b", 2, "s", 3) for n in "qkv")
    alone.output(alone.call(ATTENTION, q, k, v, kind="causal", scale=1.0))
    assert planned(alone.graph) == []


def test_planning_changes_nothing():
    make = Building()
    token, x = make.token(), make.input("x", "b", "s", 7)
    graph = make.output(*append(make, token, two(make, x, (4, 4)), [1, 1]))
    text = str(graph.graph)
    assert planned(graph) == planned(graph)
    assert str(graph.graph) == text
