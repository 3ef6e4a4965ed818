"""Rotated components over heads, mean rotation and the two-sided joint SVD: each is the best there is, by counting."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from latentscan.kernels.reference.rope import rope
from latentscan.passes.lowrank import (
    METHODS,
    Heads,
    Inputs,
    Method,
    choose_pairs,
    components,
    decouple,
    energies_of,
    joined,
    mean_rotation,
    objective,
    plain_pairs,
    solve,
    spread_ranks,
)
from latentscan.tests.ir.building import close, random

D, WIDTH, VALUE, GROUPS, HEADS = 12, 8, 6, 2, 4
FREQUENCIES = 100.0 ** -(torch.arange(WIDTH // 2, dtype=torch.float64) / 4)
TWO_SIDED, BASELINE = METHODS["two-sided"], METHODS["transmla"]


def tables(length: int, frequencies: torch.Tensor = FREQUENCIES) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies.repeat(2)
    return angles.cos()[None], angles.sin()[None]


def heads(seed: int = 0, groups: int = GROUPS, **words) -> Heads:
    made = {
        "query": random(HEADS, WIDTH, D + 1, seed=seed),
        "key": random(groups, WIDTH, D + 1, seed=seed + 1),
        "value": random(groups, VALUE, D + 1, seed=seed + 2),
        "frequencies": FREQUENCIES,
        "scale": WIDTH**-0.5,
    }
    o = random(HEADS, 10, VALUE, seed=seed + 3)
    return Heads(**({"output": o.mT @ o} | made | words))


def inputs(seed: int = 9, distances: torch.Tensor | None = None) -> Inputs:
    """Uneven, correlated inputs that are not centred; those that are attended to are others."""
    found = []
    for s in (seed, seed + 1):
        x = random(400, D, seed=s) @ torch.diag(torch.logspace(0, -1, D, dtype=torch.float64)) + random(D, seed=s + 2)
        found.append(joined(x.T @ x / len(x), x.mean(0)))
    return Inputs(*found, distances)


def scores(query: torch.Tensor, key: torch.Tensor, x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotated scores [heads, L, L] of query [h, 2 n, D + 1] and key [g, 2 n, D + 1] on x [L, D + 1]."""
    cos, sin = tables(len(x), frequencies)
    q, k = (rope(torch.einsum("ld,hnd->hln", x, w)[None], cos, sin, layout="half")[0] for w in (query, key))
    return q @ k.repeat_interleave(len(query) // len(key), 0).mT


def whole_scores(of: Heads, problem, pairs: list[int], x: torch.Tensor) -> torch.Tensor:
    """Scores by the shared rotated key and the exact rest."""
    n = problem.query.shape[1] - problem.rope.shape[0]
    turned = scores(problem.query[:, n:], problem.rope[None], x, FREQUENCIES[pairs])
    left = torch.einsum("ld,hnd->hln", x, problem.query[:, :n])
    k = torch.einsum("ld,hnd->hln", x[:, :-1], problem.key)
    return turned + left @ k.repeat_interleave(HEADS // len(of.key), 0).mT


# -- mixing heads commutes with rotation ------------------------------------------------------------------------------


@pytest.mark.parametrize("unitary", [False, True])
def test_mixing_heads_per_frequency_commutes_with_rotation(unitary):
    """RoRoPE: with all components rotated the scores are what they were, in fp64. Sabotage: a mix across halves."""
    of, x = heads(), torch.cat([random(11, D), torch.ones(11, 1, dtype=torch.float64)], 1)
    method = dataclasses.replace(TWO_SIDED, unitary=unitary, centred=False)
    pairs = sorted([0, 1, 2, 3] * GROUPS)
    problem = decouple(of, inputs(), method, pairs)
    assert problem.query.shape == (HEADS, WIDTH + 2 * len(pairs), D + 1)
    assert float(problem.key.abs().max()) < 1e-13  # nothing is left for the latent
    query = problem.query[:, WIDTH:]
    want = scores(of.query, of.key, x, FREQUENCIES)
    got = scores(query, problem.rope[None], x, FREQUENCIES[pairs])
    assert close(got, want) < 1e-13  # sums of 8 products of order 1 in fp64
    wrong = problem.rope[torch.randperm(2 * len(pairs), generator=torch.Generator().manual_seed(1))]
    assert close(scores(query, wrong[None], x, FREQUENCIES[pairs]), want) > 1e-2


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([1, 2, 4]), st.integers(1, 4))
def test_components_are_orthonormal_as_the_queries_see_them(seed, groups, fold_at):
    """make and give undo each other: all components of a frequency give the keys back."""
    of = heads(seed, groups)
    fold = {1: 1, 2: 2, 3: 1, 4: 4}[fold_at]
    method = TWO_SIDED if fold == 1 else BASELINE
    found = components(of, inputs(), method, fold)
    both = torch.einsum("fcgm,fchn->fgmhn", found.give, found.make).flatten(3).flatten(1, 2)
    assert close(both, torch.eye(groups * fold, dtype=both.dtype).expand_as(both)) < 1e-12
    assert bool((found.energies.diff(dim=1) <= 1e-12 * found.energies.max()).all())


def test_a_unitary_mix_keeps_more_than_an_orthogonal_one():
    """Head 1's key is head 0's turned by 90 degrees: one complex component holds both, one real component cannot."""
    of = heads()
    first = of.key[:1]
    turned = torch.cat([-first[:, WIDTH // 2 :], first[:, : WIDTH // 2]], 1)
    of = dataclasses.replace(of, key=torch.cat([first, turned]))
    for unitary, share in ((True, 0.0), (False, 0.1)):
        found = components(of, inputs(), dataclasses.replace(TWO_SIDED, unitary=unitary))
        left = found.energies[:, 1] / found.energies.sum(1)
        assert bool((left < 1e-12).all() if unitary else (left > share).all())


def test_no_component_loses_less_by_chance():
    """The principal component is the best single one: brute force over random unit vectors."""
    of, data = heads(), inputs()
    found = components(of, data, Method(unitary=True))
    key = torch.complex(*of.key.chunk(2, 1))
    c = data.plain.clone()
    c[:D, :D] += 0.01 * data.plain.diagonal()[:D].mean() * torch.eye(D, dtype=c.dtype)
    generator = torch.Generator().manual_seed(0)
    for f in range(WIDTH // 2):
        gram = key[:, f] @ c.to(key.dtype) @ key[:, f].mH
        for _ in range(200):
            u = torch.randn(GROUPS, dtype=torch.complex128, generator=generator)
            u = u / u.norm()
            assert float((u.conj() @ gram @ u).real) <= float(found.energies[f, 0]) * (1 + 1e-12)


# -- mean rotation ----------------------------------------------------------------------------------------------------


def test_the_mean_rotation_is_the_best_constant():
    """Among constants in place of exp(-i theta d), by least squares over distances; the rest is 1 - |mean|^2."""
    distances = random(HEADS, 30).abs()
    found = mean_rotation(heads(), distances)
    d = torch.arange(30, dtype=torch.float64)
    weights = distances / distances.sum(1, keepdim=True)
    for f, theta in enumerate(FREQUENCIES):
        turning = torch.exp(-1j * theta * d)
        lost = ((turning - found[:, f, None]).abs().square() * weights).sum(1)
        assert close(lost, 1 - found[:, f].abs().square()) < 1e-12
        for step in (0.01, -0.01, 0.01j):
            assert bool((((turning - found[:, f, None] - step).abs().square() * weights).sum(1) > lost).all())
    even = mean_rotation(heads(frequencies=None), distances)
    assert close(even.real, torch.ones(HEADS, WIDTH // 2, dtype=torch.float64)) == 0


def test_without_rotation_and_at_one_distance_nothing_is_lost():
    """If every query looks back by 3 tokens, the mean rotation is the rotation; scores at that distance are exact."""
    distances = torch.zeros(HEADS, 8, dtype=torch.float64)
    distances[:, 3] = 1
    of, data = heads(), inputs(distances=distances)
    method = dataclasses.replace(TWO_SIDED, centred=False)
    pairs = [0, 0, 3]
    key_without_bias = torch.cat([of.key[..., :-1], torch.zeros_like(of.key[..., -1:])], -1)
    of = dataclasses.replace(of, key=key_without_bias)
    x = torch.cat([random(9, D), torch.ones(9, 1, dtype=torch.float64)], 1)
    want = scores(of.query, of.key, x, FREQUENCIES).diagonal(-3, 1, 2)
    got = whole_scores(of, decouple(of, data, method, pairs), pairs, x)
    assert close(got.diagonal(-3, 1, 2), want) < 1e-13
    assert close(got.diagonal(-1, 1, 2), scores(of.query, of.key, x, FREQUENCIES).diagonal(-1, 1, 2)) > 1e-3


# -- choosing ---------------------------------------------------------------------------------------------------------


def test_components_go_to_where_rotation_counts():
    """By brute force over all ways to keep 3 of the 8: what is lost is the sum of what is not kept."""
    of, data = heads(), inputs(distances=random(HEADS, 40).abs())
    pairs = choose_pairs(of, data, TWO_SIDED, 3)
    energies = components(of, data, TWO_SIDED).energies
    best = float(energies.flatten().sort(descending=True).values[:3].sum())
    kept = sum(float(energies[p, : pairs.count(p)].sum()) for p in set(pairs))
    assert kept == pytest.approx(best)
    assert pairs == sorted(pairs)
    assert plain_pairs([0, 0, 1, 3], GROUPS, 4) == [0, 1, 2, 3]
    assert plain_pairs([1, 3], 1, 4) == [0, 2]


def test_a_pair_that_no_query_reads_keeps_no_rotation():
    of = heads()
    query = of.query.clone()
    query[:, [0, WIDTH // 2]] = 0
    assert 0 not in choose_pairs(dataclasses.replace(of, query=query), inputs(), TWO_SIDED, 6)
    loud = of.key.clone()
    loud[:, [0, WIDTH // 2]] *= 100
    assert choose_pairs(dataclasses.replace(of, query=query, key=loud), inputs(), BASELINE, 2)[0] == 0


def test_the_baseline_keeps_a_component_of_every_group_of_frequencies():
    of, data = heads(), inputs()
    assert choose_pairs(of, data, BASELINE, 4) == [0, 1, 2, 3]
    two = choose_pairs(of, data, BASELINE, 2)
    assert [p // 2 for p in two] == [0, 1]
    problem = decouple(of, data, BASELINE, two)
    assert problem.rope.shape == (4, D + 1)
    assert problem.key.shape == (GROUPS, WIDTH, D)


def test_without_folding_the_loudest_frequencies_keep_a_rotation_of_their_own():
    """By the energy of their principal components; the others stay whole in what the latent has to give."""
    of, data, method = heads(), inputs(), METHODS["transmla-unfolded"]
    loud = of.key.clone()
    loud[:, [1, 5]] *= 10  # pair 1 of 4
    of = dataclasses.replace(of, key=loud)
    assert choose_pairs(of, data, method, 1) == [1]
    pairs = choose_pairs(of, data, method, 3)
    energies = components(of, data, method).energies[:, 0]
    assert pairs == sorted(energies.topk(3).indices.tolist()) and 1 in pairs
    problem = decouple(of, data, method, pairs)
    (silent,) = set(range(4)) - set(pairs)
    assert problem.rope.shape == (6, D + 1)
    assert torch.equal(problem.key[:, [silent, silent + 4]], of.key[:, [silent, silent + 4], :-1])
    assert choose_pairs(of, data, method, 4) == choose_pairs(of, data, BASELINE, 4)  # nothing to fold: the same


# -- the joint SVD ----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 11), st.sampled_from(["two-sided", "transmla"]))
def test_the_latent_minimises_the_stated_objective(seed, rank, name):
    """Against the lower bound by Eckart and Young, and against random latents with their best up-projections."""
    of, data = heads(seed), inputs(seed + 50, random(HEADS, 20, seed=seed).abs())
    pairs = [0, 1, 1, 2] if name == "two-sided" else [0, 1, 2, 3]
    problem = decouple(of, data, METHODS[name], pairs)
    made = solve(problem, rank, of.value[..., -1])
    reached = objective(problem, made.up_key, made.up_value, made.down)
    energies = energies_of(problem)
    scale = float(energies.sum())
    assert reached == pytest.approx(float(energies[rank:].sum()), abs=1e-9 * scale)
    assert made.residual == pytest.approx(reached / scale, abs=1e-9)
    for step in range(5):
        down = made.down + 0.05 * random(*made.down.shape, seed=step) * made.down.abs().mean()
        inverse = torch.linalg.pinv(down @ problem.covariance @ down.T)
        ups = (m @ problem.covariance @ down.T @ inverse for m in (problem.key, problem.value))
        assert objective(problem, *ups, down) >= reached - 1e-9 * scale
        # And up-projections that are not the regression lose, whatever the weights.
        assert objective(problem, made.up_key + 0.1, made.up_value, made.down) > reached - 1e-9 * scale


def test_the_objective_is_the_mean_square_of_what_the_output_moves():
    """On samples: E (scale q.e)^2 E|W_O (v - E v)|^2 for keys plus E|W_O f|^2 for values, summed over heads."""
    n = 3000
    x = random(n, D, seed=4) + 0.5
    one = torch.cat([x, torch.ones(n, 1, dtype=torch.float64)], 1)
    joint = joined(x.T @ x / n, x.mean(0))
    o = random(HEADS, 10, VALUE, seed=3)
    of = heads(output=o.mT @ o)
    problem = decouple(of, Inputs(joint, joint), TWO_SIDED, [0, 1, 2])
    made = solve(problem, 3, of.value[..., -1])
    width = problem.key.shape[1]
    q = torch.einsum("nd,hkd->hnk", one, problem.query[:, :width])
    # The damping is part of the covariance: take it out of the comparison by comparing with the same covariance.
    centred = x - x.mean(0)
    e = torch.einsum("nd,gkd->gnk", centred, problem.key - made.up_key @ made.down)
    f = torch.einsum("nd,gkd->gnk", centred, problem.value - made.up_value @ made.down)
    v = torch.einsum("nd,gkd->gnk", centred, problem.value)
    total = 0.0
    for h in range(HEADS):
        g = h // (HEADS // GROUPS)
        moment = q[h].T @ q[h] / n
        spread = float((v[g] @ o[h].T).square().sum(1).mean())
        total += of.scale**2 * spread * float(((e[g] @ moment) * e[g]).sum(1).mean())
        total += float((f[g] @ o[h].T).square().sum(1).mean())
    assert objective(problem, made.up_key, made.up_value, made.down) == pytest.approx(total, rel=0.05)


def test_constants_stay_outside_the_latent():
    """What is left of values has mean zero: the bias carries the mean, biases of the old projection too."""
    of, data = heads(), inputs()
    problem = decouple(of, data, TWO_SIDED, [0, 1])
    made = solve(problem, 2, of.value[..., -1])
    mean = data.attended[-1, :-1]
    want = of.value[..., :-1] @ mean + of.value[..., -1]
    assert close(made.up_value @ (made.down @ mean) + made.value_bias, want) < 1e-12
    plain = solve(decouple(of, data, dataclasses.replace(TWO_SIDED, centred=False), [0, 1]), 2, of.value[..., -1])
    assert close(plain.value_bias, of.value[..., -1]) < 1e-15


def test_latent_features_have_unit_variance():
    problem = decouple(heads(), inputs(), TWO_SIDED, [0, 1])
    made = solve(problem, 5, torch.zeros(GROUPS, VALUE))
    assert close(made.down @ problem.covariance @ made.down.T, torch.eye(5, dtype=torch.float64)) < 1e-9


def test_silent_queries_or_keys_are_no_division_by_zero():
    of = heads()
    for field in ("query", "key", "value"):
        silent = dataclasses.replace(of, **{field: torch.zeros_like(getattr(of, field))})
        for name, method in METHODS.items():
            pairs = choose_pairs(silent, inputs(), method, 4)
            made = solve(decouple(silent, inputs(), method, pairs), 6, silent.value[..., -1])
            for tensor in (made.down, made.up_key, made.up_value, made.value_bias, made.rope, made.query):
                assert torch.isfinite(tensor).all(), (field, name)


# -- ranks ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(4, 24), min_size=1, max_size=6), st.integers(1, 12), st.sampled_from([1, 2, 4]), st.data())
def test_the_budget_is_kept_exactly(sizes, rank, step, data):
    rank = min(rank, min(sizes))
    energies = [random(n, seed=data.draw(st.integers(0, 99))).abs().sort(descending=True).values for n in sizes]
    ranks = spread_ranks(energies, rank, sizes, step)
    assert sum(ranks) == rank * len(sizes)
    assert all(1 <= r <= n for r, n in zip(ranks, sizes, strict=True))


def test_ranks_go_to_where_they_save_most():
    flat, steep = torch.ones(16), torch.cat([torch.full((4,), 10.0), torch.zeros(12)])
    assert spread_ranks([flat, steep], 8, [16, 16]) == [12, 4]
    energies = [random(10, seed=s).abs().sort(descending=True).values for s in range(3)]
    ranks = spread_ranks(energies, 4, [10] * 3)
    lost = sum(float(e[r:].sum()) for e, r in zip(energies, ranks, strict=True))
    for a in range(1, 11):
        for b in range(1, 11):
            if 1 <= 12 - a - b <= 10:
                other = sum(float(e[r:].sum()) for e, r in zip(energies, (a, b, 12 - a - b), strict=True))
                assert lost <= other + 1e-12
    assert math.isclose(sum(ranks), 12)
