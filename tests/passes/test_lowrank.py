"""The low-rank algebra: PCA is the SVD of W C^(1/2), the residual is the energy lost, pairs go by what they lose."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latentscan.passes.lowrank import balanced_joint_pca, damped, output_energy, rotary_pairs_by_energy
from latentscan.tests.ir.building import close, random

D, NK, NV = 10, 6, 8


def covariance(size: int = D, seed: int = 7) -> torch.Tensor:
    """E[x x^T] of uneven, correlated features."""
    root = random(size, size, seed=seed) * torch.logspace(0, -2, size, dtype=torch.float64)
    return root @ root.T


def square_root(c: torch.Tensor) -> torch.Tensor:
    energies, vectors = torch.linalg.eigh(c)
    return vectors * energies.clamp_min(0).sqrt() @ vectors.T


def lost(joint: torch.Tensor, approximation: torch.Tensor, c: torch.Tensor) -> float:
    """E|y - y'|^2 / E|y|^2."""
    return float(output_energy(joint - approximation, c).sum() / output_energy(joint, c).sum())


@pytest.mark.parametrize("rank", [1, 3, 7, D])
def test_pca_of_outputs_is_the_svd_of_w_times_the_root_of_c(rank):
    key, value, c = random(NK, D, seed=1) * 5, random(NV, D, seed=2), covariance()
    made = balanced_joint_pca(key, value, c, rank)
    c = damped(c)
    alpha = output_energy(key, c).sqrt().mean() / output_energy(value, c).sqrt().mean()
    joint = torch.cat([key / alpha, value])
    root = square_root(c)
    u, s, v = torch.linalg.svd(joint @ root, full_matrices=False)
    best = u[:, :rank] * s[:rank] @ v[:rank] @ torch.linalg.inv(root)
    up = torch.cat([made.up_key / alpha, made.up_value])
    assert close(up @ made.down, best) < 1e-9
    assert made.residual == pytest.approx(float((s[rank:] ** 2).sum() / (s**2).sum()), abs=1e-12)
    assert made.residual == pytest.approx(lost(joint, up @ made.down, c), abs=1e-12)
    assert (made.down.shape, made.up_key.shape, made.up_value.shape) == ((rank, D), (NK, rank), (NV, rank))
    assert close(up.T @ up, torch.eye(rank, dtype=torch.float64)) < 1e-12


def test_no_other_latent_of_that_width_loses_less():
    key, value, c = random(NK, D, seed=1), random(NV, D, seed=2), covariance()
    made = balanced_joint_pca(key, value, c, 4, balance=False)
    joint, c = torch.cat([key, value]), damped(c)
    for seed in range(20):
        down = made.down + 0.1 * random(4, D, seed=seed) * made.down.abs().mean()
        gram = down @ c @ down.T
        up = joint @ c @ down.T @ torch.linalg.inv(gram)  # the best there is for that latent
        assert lost(joint, up @ down, c) > made.residual
    # Leaving the data out: the SVD of the weights alone loses more on them.
    u, s, v = torch.linalg.svd(joint)
    assert lost(joint, u[:, :4] * s[:4] @ v[:4], c) > made.residual


def test_full_rank_loses_nothing():
    key, value = random(NK, D, seed=1), random(3, D, seed=2)
    made = balanced_joint_pca(key, value, covariance(), NK + 3)
    assert close([made.up_key @ made.down, made.up_value @ made.down], [key, value]) < 1e-12
    assert made.residual < 1e-12
    wide = balanced_joint_pca(random(2 * D, D), random(D, D, seed=3), covariance(), D)  # rank D of 3 D rows
    assert wide.residual < 1e-12
    assert close(wide.up_key @ wide.down, random(2 * D, D)) < 1e-12


@given(st.sampled_from([1e-3, 0.1, 30.0, 1e4]))
def test_balance_makes_the_scale_of_keys_irrelevant(scale):
    """alpha takes any common scale out of the keys: keys and values lose the same share as before."""
    key, value, c = random(NK, D, seed=1), random(NV, D, seed=2), covariance()
    losses = []
    for k in (key, key * scale):
        made = balanced_joint_pca(k, value, c, 4)
        losses.append((lost(k, made.up_key @ made.down, damped(c)), lost(value, made.up_value @ made.down, damped(c))))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_without_balance_large_keys_are_fitted_at_the_values_expense():
    key, value, c = random(NK, D, seed=1) * 30, random(NV, D, seed=2), covariance()
    with_balance, without = (balanced_joint_pca(key, value, c, 4, balance=b) for b in (True, False))
    c = damped(c)

    def losses(made):
        return lost(key, made.up_key @ made.down, c), lost(value, made.up_value @ made.down, c)

    assert losses(without)[1] > 2 * losses(with_balance)[1]
    assert losses(without)[0] < losses(with_balance)[0]


@pytest.mark.parametrize(("nk", "scale"), [(0, 1.0), (NK, 0.0)])
def test_no_keys_or_no_energy_in_them_is_no_division_by_zero(nk, scale):
    """rope_dim may leave no key feature for the latent; a pruned head's keys are zero."""
    key, value = random(nk, D) * scale, random(NV, D, seed=2)
    made = balanced_joint_pca(key, value, covariance(), NV)
    assert close(made.up_value @ made.down, value) < 1e-12
    assert torch.isfinite(made.up_key).all()
    silent = balanced_joint_pca(random(NK, D), value * 0, covariance(), NK)
    assert close(silent.up_key @ silent.down, random(NK, D)) < 1e-12
    assert balanced_joint_pca(key * 0, value * 0, covariance(), 3).residual == 0.0


def test_damping_is_one_per_cent_of_the_mean_diagonal():
    """Directions that the calibration text never showed still count a little."""
    c = torch.diag(torch.tensor([4.0, 2.0, 0.0]))
    assert close(damped(c), torch.diag(torch.tensor([4.02, 2.02, 0.02], dtype=torch.float64))) < 1e-12
    assert damped(c).dtype == torch.float64
    made = balanced_joint_pca(torch.eye(3)[:1] * 0, torch.eye(3), c, 3)
    assert close(made.up_value @ made.down, torch.eye(3, dtype=torch.float64)) < 1e-12


def test_energy_is_the_mean_square_of_the_outputs():
    x, w = random(500, D), random(NK, D, seed=1)
    assert close(output_energy(w, x.T @ x / 500), ((x @ w.T) ** 2).mean(0)) < 1e-12


# -- rotary pairs ------------------------------------------------------------------------------------------------------

FREQUENCIES = 10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)  # of a head of 8: 1, 0.1, 0.01, 0.001


def rows(energies: list[float], heads: int = 1) -> torch.Tensor:
    """[heads * 8, 8] rows whose pair j (features j and j + 4) has energy ``energies[j]`` under C = 1."""
    one = torch.diag(torch.tensor(energies * 2, dtype=torch.float64).div(2).sqrt())
    return one.repeat(heads, 1)


C8 = torch.eye(8, dtype=torch.float64)


def test_at_equal_energy_the_fast_pairs_keep_their_rotation():
    even = rows([1.0] * 4)
    for keep, pairs in ((1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 3])):
        assert rotary_pairs_by_energy(even, even, C8, 1, 1, keep, FREQUENCIES) == pairs
    # The order of frequencies is not taken for granted.
    assert rotary_pairs_by_energy(even, even, C8, 1, 1, 2, FREQUENCIES.flip(0)) == [2, 3]


def test_energy_counts_and_without_frequencies_it_alone():
    loud = rows([1.0, 1.0, 1.0, 9.0])
    assert rotary_pairs_by_energy(loud, loud, C8, 1, 1, 1) == [3]
    # Nine times the energy in q and k each, but within 256 tokens pair 3 turns by 0.256 radians.
    assert rotary_pairs_by_energy(loud, loud, C8, 1, 1, 1, FREQUENCIES) == [0]
    # Where texts are as long as its period it turns, and is kept.
    assert rotary_pairs_by_energy(loud, loud, C8, 1, 1, 1, FREQUENCIES, 20000) == [3]
    # Both must be there: a pair that the query does not look at loses nothing.
    assert rotary_pairs_by_energy(rows([1, 1, 0, 1]), rows([1, 1, 99, 2]), C8, 1, 1, 3) == [0, 1, 3]


def test_the_score_is_what_a_pair_loses_on_average():
    """|q||k|cos(phi + theta d) against |q||k|cos(phi): the mean square over phases and distances, by counting."""
    q, k = [1.0, 2.0, 4.0, 3.0], [2.0, 1.0, 5.0, 4.0]
    horizon = 40
    phases = torch.arange(0, 360, dtype=torch.float64) * math.pi / 180
    distances = torch.arange(1, horizon + 1, dtype=torch.float64)
    mean_square = []
    for j in range(4):
        change = torch.cos(phases[:, None] + FREQUENCIES[j] * distances) - torch.cos(phases)[:, None]
        mean_square.append(q[j] * k[j] * float((change**2).mean(0).mean()))
    # The rule orders by sqrt(q k) (1 - cos): the order by the counted loss is the same for these pairs.
    by_rule = [rotary_pairs_by_energy(rows(q), rows(k), C8, 1, 1, n, FREQUENCIES, horizon) for n in (1, 2, 3)]
    by_count = sorted(range(4), key=lambda j: -mean_square[j])
    assert by_rule == [sorted(by_count[:n]) for n in (1, 2, 3)]


def test_heads_of_a_group_count_with_their_own_key():
    """Heads 0, 1 share KV head 0; heads 2, 3 share KV head 1. Pair 2 is loud in query head 3 and in KV head 1 only."""
    quiet, loud = rows([1.0] * 4), rows([1.0, 1.0, 50.0, 1.0])
    silent = rows([1.0, 1.0, 0.0, 1.0])
    query = torch.cat([quiet, quiet, quiet, loud])
    matched = rotary_pairs_by_energy(query, torch.cat([silent, loud]), C8, 4, 2, 1)
    crossed = rotary_pairs_by_energy(query, torch.cat([quiet * 3, silent]), C8, 4, 2, 1)
    assert matched == [2]
    assert crossed != [2]


def test_correlated_inputs_count():
    """Energy is that of outputs on data, not of weights: a feature that the data never shows has none."""
    even = rows([1.0] * 4)
    c = C8.clone()
    c[0, 0] = c[4, 4] = 0  # pair 0 reads features 0 and 4
    assert rotary_pairs_by_energy(even, even, c, 1, 1, 1, FREQUENCIES) == [1]
