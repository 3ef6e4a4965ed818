"""The rule of mla-absorb agrees with a count of multiplications for every query length and cache length (MATH 3)."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import pytest
import sympy

from latentscan.ir.graph import Graph
from latentscan.ir.sizes import expression
from latentscan.passes.base import Choice, Context, Site
from latentscan.passes.mla_absorb import MlaAbsorb
from latentscan.passes.pipeline import parse, run
from latentscan.runtime.executable import _condition
from latentscan.runtime.phases import traced_phases
from latentscan.tests.models import build

DEEPSEEK_V3 = {"heads": 128, "kv_heads": 128, "d_c": 512, "d_n": 128, "d_r": 64, "d_v": 128}
# A converted SmolLM2: 9 query heads over 3 KV heads of 64, 32 of them rotated.
CONVERTED = {"heads": 9, "kv_heads": 3, "d_c": 128, "d_n": 32, "d_r": 32, "d_v": 64}
CANONICAL = {"heads": 9, "kv_heads": 3, "d_c": 384, "d_n": 64, "d_r": 0, "d_v": 64}
SHAPES = [DEEPSEEK_V3, CONVERTED, CANONICAL]
NAMES = ["deepseek-v3", "converted-9-3", "canonical-9-3"]

QUERIES = [1, 2, 3, 4, 5, 8, 16, 31, 42, 64, 100, 128, 150, 169, 170, 171, 172, 200, 512, 1000]
KEYS = [1, 2, 3, 5, 8, 16, 32, 64, 100, 128, 171, 256, 400, 512, 1000, 2048, 4096, 32768, 10**6]
GRID = [(s, t) for s in QUERIES for t in KEYS if t >= s]


def multiplications(
    s: int, t: int, *, heads: int, kv_heads: int, d_c: int, d_n: int, d_r: int, d_v: int
) -> tuple[int, int]:
    """What both forms multiply for s causal queries over t keys, counted one by one: (expanded, absorbed)."""
    pairs = sum(t - s + query + 1 for query in range(s))  # query number q sees the keys up to its own
    expanded = absorbed = 0
    expanded += t * kv_heads * d_c * (d_n + d_v)  # W_UK and W_UV on every cached token
    for _ in range(heads):
        expanded += pairs * (d_n + d_r)  # scores
        expanded += pairs * d_v  # mix
        absorbed += s * d_n * d_c  # W_UK on the query
        absorbed += pairs * (d_c + d_r)
        absorbed += pairs * d_c
        absorbed += s * d_c * d_v  # W_UV on the output
    return expanded, absorbed


@lru_cache
def decode_graph() -> Graph:
    """A graph that continues a cache: query length and cached length are symbols of their own."""
    return traced_phases(build("deepseek_v3"), batch=2, seq=16)[0].graph


@lru_cache
def rule(name: str) -> tuple[Choice, sympy.Symbol, sympy.Expr, Site]:
    graph = decode_graph()
    (site, *_) = [f for f in MlaAbsorb().plan(graph, Context()) if isinstance(f, Site)]
    site = dataclasses.replace(site, facts={**site.facts, **SHAPES[NAMES.index(name)]})
    choice = MlaAbsorb().choice(graph, [site])
    assert choice is not None
    return choice, expression(site.facts["s"]), expression(site.facts["t"]), site


def absorbs(name: str, s: int, t: int) -> bool:
    """What the rule says, with the graph's own symbols: new tokens s, cached before them t - s."""
    choice, queries, keys, _ = rule(name)
    (past,) = keys.free_symbols - queries.free_symbols
    offset = keys.subs({queries: 0, past: 0})
    return bool(choice.condition.subs({queries: s, past: t - s - offset}))


@pytest.mark.parametrize("name", NAMES)
def test_the_rule_agrees_with_a_count_for_all_lengths(name):
    """vLLM#14253: prefill and decode split wrongly. One rule covers decode, chunked prefill and prefill."""
    wrong = []
    for s, t in GRID:
        expanded, absorbed = multiplications(s, t, **SHAPES[NAMES.index(name)])
        if absorbs(name, s, t) != (absorbed < expanded):
            wrong.append((s, t, expanded, absorbed))
    assert not wrong


@pytest.mark.parametrize("name", NAMES)
def test_the_grid_tries_both_answers(name):
    assert {absorbs(name, s, t) for s, t in GRID} == {True, False}


def test_the_limit_of_deepseek_v3_is_171_queries():
    assert [absorbs("deepseek-v3", s, 10**9) for s in (1, 169, 170, 171, 172, 1000)] == [True] * 3 + [False] * 3
    assert [absorbs("deepseek-v3", s, s) for s in (2, 100, 170, 171, 4096)] == [False] * 5, "without a prefix: never"


def test_leaving_out_the_number_of_kv_heads_would_choose_wrongly():
    """The sabotage: the rule for n_kv = n_h on a converted GQA model disagrees with the count."""
    shape = {**CONVERTED, "kv_heads": CONVERTED["heads"]}
    wrong = 0
    for s, t in GRID:
        expanded, absorbed = multiplications(s, t, **CONVERTED)
        naive_expanded, naive_absorbed = multiplications(s, t, **shape)
        wrong += (naive_absorbed < naive_expanded) != (absorbed < expanded)
    assert wrong > 10


@pytest.mark.parametrize("layers", [1, 3])
def test_layers_vote_together(layers):
    """One decision a graph: the sum over its layers."""
    choice, queries, keys, site = rule("deepseek-v3")
    many = MlaAbsorb().choice(decode_graph(), [site] * layers)
    assert many is not None
    (past,) = keys.free_symbols - queries.free_symbols
    for s, t in ((1, 100), (170, 10**6), (171, 10**6), (64, 64)):
        at = {queries: s, past: t - s}
        assert bool(many.condition.subs(at)) == bool(choice.condition.subs(at))
    assert ("summed over" in many.rule) == (layers > 1)


def test_the_compiled_call_decides_by_the_same_rule():
    """The condition as the executable evaluates it, on the graph's own inputs."""
    graph = decode_graph().copy()
    inputs = list(graph.inputs)
    program = run(graph.copy(), parse("mla-absorb"), Context())
    assert program.choice is not None
    decide = _condition(program, inputs)
    site = next(f for f in MlaAbsorb().plan(graph, Context()) if isinstance(f, Site))
    queries, keys = expression(site.facts["s"]), expression(site.facts["t"])
    (past,) = keys.free_symbols - queries.free_symbols
    tiny = {k: site.facts[k] for k in ("heads", "kv_heads", "d_c", "d_n", "d_r", "d_v")}
    for s, t in [(1, 9), (1, 1), (4, 5), (6, 6), (30, 200)]:
        arguments: list[Any] = [None] * len(inputs)
        for symbol, name in program.symbols.items():
            arguments[inputs.index(name)] = {queries: s, past: t - s - int(keys.subs({queries: 0, past: 0}))}.get(
                symbol, 2
            )
        expanded, absorbed = multiplications(s, t, **tiny)
        assert decide(arguments) == (absorbed < expanded)


def test_options_decide_before_the_rule():
    graph = decode_graph()
    sites = [f for f in MlaAbsorb().plan(graph, Context()) if isinstance(f, Site)]
    assert MlaAbsorb(when="always").choice(graph, sites) is None
    never = MlaAbsorb(when="never").choice(graph, sites)
    assert never is not None
    assert never.condition == sympy.false
