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


def directions(moment: torch.Tensor, centre: torch.Tensor | None = None) -> int:
    """How many directions inputs span (around ``centre`` [D]): eigenvalues of E[x x^T] above 1e-10 of the largest.

    Inputs that repeat leave eigenvalues of eps^2, 1e-14 where they were computed in fp32, and fp64 sums D eps, 1e-12.
    The largest is that before centring, which leaves nothing but rounding where all inputs are alike.
    """
    c = moment.double()
    largest = torch.linalg.eigvalsh(c)[-1]
    if centre is not None:
        c = c - torch.outer(centre.double(), centre.double())
    return int((torch.linalg.eigvalsh(c) > 1e-10 * largest).sum()) if float(largest) > 0 else 0


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


def joint_energies(key: torch.Tensor, value: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """Energies of the principal components of :func:`balanced_joint_pca`, largest first, [n_k + n_v]."""
    k, v, c = key.double(), value.double(), damped(covariance)
    norms = [output_energy(w.detach(), c).clamp_min(0).sqrt().mean() for w in (k, v)]
    alpha = float(norms[0] / norms[1]) if k.shape[0] and min(norms) > 0 else 1.0
    joint = torch.cat([k / alpha, v])
    return torch.linalg.eigvalsh(joint @ c @ joint.T).flip(0).clamp_min(0)


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


# -- decoupled rotation and two-sided weighting -----------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """What a way of choosing the shared rotated key and the latent takes into account; all off is the plain baseline.

    Attributes:
        unitary: heads are mixed by a unitary matrix per frequency instead of an orthogonal one.
        by_loss: rotated components go, over all frequencies and heads, to where most would be lost without rotation,
            as the queries see it; else every frequency keeps the principal component of its keys (RoRoPE).
        folding: where there are fewer components than frequencies, neighbouring frequencies share one; else (without
            ``by_loss``) those frequencies keep theirs where it is loudest, and the others do not rotate.
        mean_rotation: components that lose their rotation keep its mean over the distances that are attended to.
        two_sided: keys' errors are weighted by the queries, values' by the output projection; else balanced by alpha.
        centred: constants of keys and values stay outside the latent (keys' shift all scores alike).
        attended: tokens count by the attention that they receive.
    """

    unitary: bool = False
    by_loss: bool = False
    folding: bool = False
    mean_rotation: bool = False
    two_sided: bool = False
    centred: bool = False
    attended: bool = False


METHODS = {
    "transmla": Method(folding=True),
    "transmla-unfolded": Method(),
    "two-sided": Method(unitary=True, by_loss=True, mean_rotation=True, two_sided=True, centred=True, attended=True),
}


@dataclass(frozen=True)
class Heads:
    """One attention before its rotation, as linear maps of [x, 1]; pair j of a head is features j and j + d / 2.

    Attributes:
        query: [heads, d, D + 1], the bias in the last column. key: [kv_heads, d, D + 1].
        value: [kv_heads, d_v, D + 1].
        output: [heads, d_v, d_v], W_O,h^T W_O,h of the output projection's columns; None: the identity.
        frequencies: [d / 2] radians per token; None if unknown.
        scale: of the scores. turn: factor of the cosine and sine tables.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor | None
    frequencies: torch.Tensor | None
    scale: float
    turn: float = 1.0


@dataclass(frozen=True)
class Inputs:
    """What is known of a layer's inputs, in fp64.

    Attributes:
        plain: [D + 1, D + 1] E[[x, 1] [x, 1]^T] over tokens.
        attended: the same, tokens weighted by the attention that they receive.
        distances: [heads, N] attention mass by distance between query and key; None: all distances alike.
    """

    plain: torch.Tensor
    attended: torch.Tensor
    distances: torch.Tensor | None = None


@dataclass(frozen=True)
class Latent:
    """score = q_plain . (up_key z) + q_rope . rotated(rope [x, 1]),  v = up_value z + bias,  z = down x.

    Attributes:
        down: [rank, D], so scaled that z has unit variance.
        up_key: [kv_heads, d_n, rank]. up_value: [kv_heads, d_v, rank]. value_bias: [kv_heads, d_v].
        rope: [2 n, D + 1] the shared rotated key, in half-split order. query: [heads, d_n + 2 n, D + 1].
        residual: share of the weighted energy that is lost, in [0, 1].
    """

    down: torch.Tensor
    up_key: torch.Tensor
    up_value: torch.Tensor
    value_bias: torch.Tensor
    rope: torch.Tensor
    query: torch.Tensor
    residual: float


def joined(covariance: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """E[[x, 1] [x, 1]^T], [D + 1, D + 1] in fp64, from E[x x^T] and E[x]."""
    c, m = covariance.double(), mean.double()
    return torch.cat([torch.cat([c, m[:, None]], 1), torch.cat([m, m.new_ones(1)])[None]])


def mean_rotation(heads: Heads, distances: torch.Tensor | None, horizon: int = 256) -> torch.Tensor:
    """E[exp(-i theta d)] of each pair over the distances that a head attends to: [heads, d / 2], complex.

    A score is Re(conj(q) exp(-i theta d) k) for the complex numbers q, k of a pair. Of all constants, the mean comes
    closest to the rotation in the mean square, and 1 - |mean|^2 is what is lost.
    """
    pairs = heads.query.shape[1] // 2
    if heads.frequencies is None:
        return heads.query.new_ones(heads.query.shape[0], pairs, dtype=torch.complex128)
    if distances is None:
        distances = heads.query.new_ones(heads.query.shape[0], max(horizon, 2))
    weights = distances.double() / distances.double().sum(-1, keepdim=True).clamp_min(1e-300)
    d = torch.arange(weights.shape[1], dtype=torch.float64, device=weights.device)
    angles = d[:, None] * heads.frequencies.to(d)
    return torch.complex(weights @ angles.cos(), -(weights @ angles.sin()))


def _complex(rows: torch.Tensor) -> torch.Tensor:
    """[..., d, D] features in half-split order as complex numbers [..., d / 2, D]."""
    return torch.complex(*rows.double().chunk(2, -2))


def _real(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows.real, rows.imag], -2)


def _energies(rows: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """E|y|^2 of complex outputs y = rows [x, 1]: the shape of rows without its last dimension."""
    return ((rows @ covariance.to(rows.dtype)) * rows.conj()).sum(-1).real.clamp_min(0)


@dataclass(frozen=True)
class Components:
    """Principal components of the heads' keys, one set a group of frequencies.

    Attributes:
        members: [groups, m] pairs that share a rotation (m = 1 without folding).
        energies: [groups, c], largest first, c = m kv_heads: what is lost if the component does not rotate.
        make: [groups, c, kv_heads, m] r = sum make k. give: [groups, c, kv_heads, m] k ~ sum_c give r.
    """

    members: torch.Tensor
    energies: torch.Tensor
    make: torch.Tensor
    give: torch.Tensor


def components(heads: Heads, inputs: Inputs, method: Method, fold: int = 1) -> Components:
    """Components of the keys over heads, per frequency. Complex (or real) combinations commute with rotation (MATH 1).

    Args:
        fold: how many neighbouring frequencies share a component.
    """
    key, query = _complex(heads.key), _complex(heads.query)  # [g, f, D + 1], [h, f, D + 1]
    g, f, _ = key.shape
    c = _damp(inputs.attended if method.attended else inputs.plain)
    if method.by_loss:
        lost = 1.0
        if heads.frequencies is not None:
            lost = 1 - mean_rotation(heads, inputs.distances if method.attended else None).abs().square()
        loss = (_energies(query, inputs.plain) * lost).unflatten(0, (g, -1)).sum(1).clamp_min(0).sqrt()  # [g, f]
        largest = loss.amax(0, keepdim=True)
        weight = torch.where(largest > 0, (loss / largest).clamp_min(1e-3), 1.0)
        size = largest.square().squeeze(0)  # [f]
    else:
        weight, size = key.real.new_ones(g, f), key.real.new_ones(f)
    members = torch.arange(f, device=key.device).reshape(-1, fold)
    y = (key * weight[..., None])[:, members].permute(1, 0, 2, 3).flatten(1, 2)  # [groups, g m, D + 1]
    gram = y @ c.to(y.dtype) @ y.mH
    energies, vectors = torch.linalg.eigh(gram if method.unitary else gram.real)
    vectors = vectors.to(y.dtype).flip(-1).mT.unflatten(-1, (g, fold))  # [groups, c, g, m]
    w = weight[:, members].permute(1, 0, 2)[:, None]
    energies = energies.flip(-1).clamp_min(0) * size[members[:, :1]]
    return Components(members, energies, vectors.conj() * w, vectors / w)


def _damp(joint: torch.Tensor, damping: float = 0.01) -> torch.Tensor:
    """:func:`damped`, the constant left as it is."""
    c = joint.double().clone()
    d = c.shape[0] - 1
    c[:d, :d] += damping * c.diagonal()[:d].mean() * torch.eye(d, dtype=c.dtype, device=c.device)
    return c


def choose_pairs(heads: Heads, inputs: Inputs, method: Method, count: int) -> list[int]:
    """For each of ``count`` rotated components, the pair whose frequency turns it, ascending.

    A pair comes as often as it keeps components. With folding it is the loudest of those that share one.

    Args:
        count: with ``folding`` a divisor of d / 2, without at most d / 2; with ``by_loss`` at most kv_heads d / 2.
    """
    pairs = heads.key.shape[1] // 2
    if method.by_loss:
        found = components(heads, inputs, method)
        best = found.energies.flatten().sort(descending=True, stable=True).indices[:count]
        return sorted(int(i) // found.energies.shape[1] for i in best)
    if not method.folding:
        return sorted(int(i) for i in components(heads, inputs, method).energies[:, 0].topk(count).indices)
    energy = _energies(_complex(heads.key), inputs.plain).sum(0).reshape(count, pairs // count)
    return [int(i) + n * (pairs // count) for n, i in enumerate(energy.argmax(1))]


def plain_pairs(pairs: list[int], kv_heads: int, total: int) -> list[int]:
    """The pairs that have a part without rotation.

    With one KV head those that rotate have none. With several it depends on the data whether something is left: all
    pairs have one, so that sizes follow from the options alone.
    """
    return [p for p in range(total) if p not in pairs] if kv_heads == 1 else list(range(total))


@dataclass(frozen=True)
class Problem:
    """The low-rank problem that is left when the rotated components are chosen.

    Attributes:
        query: [heads, d_n + 2 n, D + 1]. rope: [2 n, D + 1].
        key: [kv_heads, d_n, D] what the latent has to give. value: [kv_heads, d_v, D].
        key_weight: [kv_heads, d_n, d_n]. value_weight: [kv_heads, d_v, d_v]: see :func:`objective`.
        covariance: [D, D] of the inputs, damped, centred where the method says so.
        mean: [D] of the inputs where they are centred, else zeros.
    """

    query: torch.Tensor
    rope: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_weight: torch.Tensor
    value_weight: torch.Tensor
    covariance: torch.Tensor
    mean: torch.Tensor


def decouple(heads: Heads, inputs: Inputs, method: Method, pairs: list[int]) -> Problem:
    """Take the rotated components of ``pairs`` out of the keys, and say how errors in the rest count.

    An error e of a key changes a score by scale q . e, and that the output, at a probability p, by
    p W_O,h (v - o): so A = scale^2 sum_h E|W_O,h (v - E v)|^2 E[q q^T] over the heads of a group, in the units of the
    values' B = sum_h W_O,h^T W_O,h. No balance is needed between the two.
    """
    key, query = _complex(heads.key), _complex(heads.query)
    g, f, _ = key.shape
    group = query.shape[0] // g
    fold = f // len(pairs) if method.folding else 1
    found = components(heads, inputs, method, fold)
    rest, rope, rotated = key.clone(), [], []
    for j, p in enumerate(pairs):
        at, order = p // fold, pairs[:j].count(p)
        members = found.members[at]
        made = torch.einsum("gm,gmx->x", found.make[at, order], key[:, members])
        give = found.give[at, order]  # [g, m]
        rest[:, members] -= give[..., None] * made
        rope.append(made)
        rotated.append(torch.einsum("hm,hmx->hx", give.conj().repeat_interleave(group, 0), query[:, members]))
    left = plain_pairs(pairs, g, f) if method.by_loss else list(range(f))
    mean = torch.full_like(query[..., :1].real, heads.turn**2)
    if method.mean_rotation:
        turning = mean_rotation(heads, inputs.distances if method.attended else None)
        mean = (heads.turn**2 * turning.conj())[..., None]
    q_plain, k_plain = _real((query * mean)[:, left]), _real(rest[:, left])
    joint = (inputs.attended if method.attended else inputs.plain).double()
    covariance, centre = joint[:-1, :-1], torch.zeros_like(joint[-1, :-1])
    if method.centred:
        centre = joint[-1, :-1]
        covariance = covariance - torch.outer(centre, centre)
    covariance = damped(covariance)
    k, v = k_plain[..., :-1], heads.value.double()[..., :-1]
    weights = (_two_sided if method.two_sided else _balanced)(heads, q_plain, k, v, inputs.plain, covariance)
    new_query = torch.cat([q_plain, _real(torch.stack(rotated, 1))], 1)
    return Problem(new_query, _real(torch.stack(rope)), k, v, *weights, covariance, centre)


def _two_sided(
    heads: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plain: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[0] // k.shape[0]
    output = heads.output
    if output is None:
        output = torch.eye(v.shape[1], dtype=v.dtype, device=v.device).expand(q.shape[0], -1, -1)
    output = output.double()
    spread = (output * (v @ c @ v.mT).repeat_interleave(group, 0)).sum((1, 2)).clamp_min(0)  # E|W_O (v - E v)|^2
    a = heads.scale**2 * spread[:, None, None] * (q @ plain.double() @ q.mT)
    return a.unflatten(0, (-1, group)).sum(1), output.unflatten(0, (-1, group)).sum(1)


def _balanced(
    heads: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plain: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    norms = [output_energy(w.detach().flatten(0, 1), c).clamp_min(0).sqrt().mean() for w in (k, v)]
    alpha = float(norms[0] / norms[1]) if k.numel() and min(norms) > 0 else 1.0
    one = [torch.eye(w.shape[1], dtype=w.dtype, device=w.device).expand(w.shape[0], -1, -1) for w in (k, v)]
    return one[0] / alpha**2, one[1]


def objective(problem: Problem, up_key: torch.Tensor, up_value: torch.Tensor, down: torch.Tensor) -> float:
    """sum_g tr(A_g E_g C E_g^T) + tr(B_g F_g C F_g^T), with E and F the errors of keys and values."""
    errors = (problem.key - up_key @ down, problem.value - up_value @ down)
    weights = (problem.key_weight, problem.value_weight)
    return sum(float((w * (e @ problem.covariance @ e.mT)).sum()) for w, e in zip(weights, errors, strict=True))


def _root(weight: torch.Tensor) -> torch.Tensor:
    """Symmetric square roots of [n, m, m]."""
    values, vectors = torch.linalg.eigh(weight)
    return (vectors * values.clamp_min(0).sqrt()[:, None]) @ vectors.mT


def _spectrum(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Energies [n] and vectors [n, n], largest first, of the weighted outputs, and these as rows [n, D]."""
    rows = [
        (_root(w) @ m).flatten(0, 1)
        for w, m in ((problem.key_weight, problem.key), (problem.value_weight, problem.value))
    ]
    joint = torch.cat(rows)
    energies, vectors = torch.linalg.eigh(joint @ problem.covariance @ joint.T)
    return energies.flip(0).clamp_min(0), vectors.flip(1), joint


def energies_of(problem: Problem) -> torch.Tensor:
    """What every further latent feature saves of :func:`objective`, largest first."""
    return _spectrum(problem)[0]


def solve(problem: Problem, rank: int, value_bias: torch.Tensor) -> Latent:
    """The latent of ``rank`` features that minimises :func:`objective`: one joint SVD (Eckart and Young).

    With whatever weights, the best up-projections for a latent are the regressions on it, so that no weight is undone
    by a division.

    Args:
        rank: at most min(D, kv_heads (d_n + d_v)).
        value_bias: [kv_heads, d_v] the values' own bias.
    """
    energies, vectors, joint = _spectrum(problem)
    kept = energies[:rank].clamp_min(energies[0] * 1e-24 + 1e-300)
    down = (vectors[:, :rank].T @ joint) / kept.sqrt()[:, None]
    c = problem.covariance
    inverse = torch.linalg.pinv(down @ c @ down.T, rtol=1e-14, hermitian=True)
    up_key, up_value = (m @ c @ down.T @ inverse for m in (problem.key, problem.value))
    bias = value_bias.double() + (problem.value - up_value @ down) @ problem.mean
    energies = energies.detach()
    total = energies.sum()
    lost = float(energies[rank:].sum() / total) if total > 0 else 0.0
    return Latent(down, up_key, up_value, bias, problem.rope, problem.query, lost)


def spread_ranks(energies: list[torch.Tensor], rank: int, most: list[int], step: int = 1) -> list[int]:
    """Ranks of layers with the mean ``rank`` that together lose least: steps go to whoever saves most by one.

    Args:
        energies: of every layer, what each further latent feature saves, largest first, in units that may be added.
        most: the largest rank of each layer. step: ranks are multiples of it, but for what is left at the end.

    Returns:
        ranks whose sum is len(energies) * rank exactly, each at least 1 (a quarter of ``rank`` where that is more).
    """
    least = [min(max(1, rank // 4 // step * step), m) for m in most]
    ranks, left = list(least), rank * len(energies) - sum(least)
    sums = [torch.cat([e.new_zeros(1), e.double().cumsum(0)]) for e in energies]
    while left > 0:
        gains = []
        for total, at, top in zip(sums, ranks, most, strict=True):
            size = min(step, top - at, left)
            end = min(at + size, total.numel() - 1)
            gains.append(float(total[end] - total[min(at, end)]) / size if size > 0 else -1.0)
        best = max(range(len(gains)), key=gains.__getitem__)
        taken = min(step, most[best] - ranks[best], left)
        ranks[best] += taken
        left -= taken
    return ranks
