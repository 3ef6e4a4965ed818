"""The low-rank algebra of mha-to-mla, in fp64, on plain tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Factors:
    """[K_nope | V] ~ W_U (W_D x), with biases kept outside the latent.

    Attributes:
        down: [rank, D]. up_key: [n_k, rank]. up_value: [n_v, rank].
        residual: share of the (balanced) output energy that is lost, in [0, 1].
    """

    down: torch.Tensor
    up_key: torch.Tensor
    up_value: torch.Tensor
    residual: float


def damped(covariance: torch.Tensor, damping: float = 0.01) -> torch.Tensor:
    """A covariance [D, D] with ``damping`` times its mean diagonal added, in fp64."""
    c = covariance.double()
    return c + damping * c.diagonal().mean() * torch.eye(c.shape[0], dtype=c.dtype, device=c.device)


def output_energy(weight: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """E[y_i^2] of y = W x for each row of W [n, D], given E[x x^T] [D, D]."""
    return ((weight @ covariance) * weight).sum(-1)


def balanced_joint_pca(
    key: torch.Tensor, value: torch.Tensor, covariance: torch.Tensor, rank: int, *, balance: bool = True
) -> Factors:
    """PCA of the outputs [W_K x / alpha | W_V x] on calibration data (MATH 2; TransMLA, arXiv 2502.07864).

    PCA of y = W x is the eigendecomposition of W C W^T with C = E[x x^T]; alpha is the ratio of the mean column norms
    of K and V, so that neither is fitted at the other's expense.

    Args:
        key: [n_k, D] rows of the un-rotated key features. value: [n_v, D]. covariance: [D, D].
        rank: number of latent features, at most min(D, n_k + n_v).
    """
    k, v, c = key.double(), value.double(), damped(covariance)
    alpha = 1.0
    if balance and k.shape[0]:
        norms = [output_energy(w.detach(), c).clamp_min(0).sqrt().mean() for w in (k, v)]
        alpha = float(norms[0] / norms[1]) if norms[1] > 0 else 1.0
        alpha = alpha if alpha > 0 else 1.0
    joint = torch.cat([k / alpha, v])
    energies, vectors = torch.linalg.eigh(joint @ c @ joint.T)
    energies = energies.detach()
    basis = vectors[:, -rank:].flip(-1)  # [n_k + n_v, rank], largest first
    total = energies.clamp_min(0).sum()
    lost = energies[: energies.numel() - rank].clamp_min(0).sum()
    return Factors(
        basis.T @ joint, basis[: k.shape[0]] * alpha, basis[k.shape[0] :], float(lost / total) if total > 0 else 0.0
    )


def rotary_pairs_by_energy(
    query: torch.Tensor,
    key: torch.Tensor,
    covariance: torch.Tensor,
    heads: int,
    kv_heads: int,
    keep: int,
    frequencies: torch.Tensor | None = None,
    horizon: int = 256,
) -> list[int]:
    """Which rotary pairs lose most when they lose their rotation; the same pairs for all heads.

    A pair adds |q| |k| cos(phi + theta d) to a score at distance d. Without rotation it adds |q| |k| cos(phi): over
    phases the mean square of the difference is |q|^2 |k|^2 (1 - cos(theta d)). So a pair's score is its energy
    sqrt(E|q|^2 E|k|^2), summed over heads, times the mean of 1 - cos(theta d) over distances up to ``horizon``: slow
    pairs barely rotate within it and can do without.

    Args:
        query: [heads * d, D], key: [kv_heads * d, D], both in half-split order (pair j is features j and j + d/2).
        keep: number of pairs, at most d / 2.
        frequencies: [d / 2] radians per token, or None to go by energy alone.

    Returns:
        pair numbers in ascending order.
    """
    c = covariance.double()
    half = key.shape[0] // kv_heads // 2
    q = output_energy(query.double(), c).reshape(heads, 2, half).sum(1).clamp_min(0)
    k = output_energy(key.double(), c).reshape(kv_heads, 2, half).sum(1).clamp_min(0)
    score = (q * k.repeat_interleave(heads // kv_heads, 0)).sqrt().sum(0)
    if frequencies is not None:
        distances = torch.arange(1, max(horizon, 2), dtype=score.dtype, device=score.device)
        score = score * (1 - torch.cos(distances[:, None] * frequencies.to(score))).mean(0)
    return sorted(int(i) for i in score.topk(keep).indices)
