"""Sparse latent attention against its definition, written out query by query in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latentscan.ir.ops.sparse import SPARSE_LATENT_ATTENTION
from latentscan.kernels.reference.sparse import sparse_latent_attention, sparse_latent_attention_backward

SCALE = 0.37


def definition(q_latent, q_rope, latent, k_rope, indices, allowed, scale):
    """For each row, head and query: the softmax over its chosen and allowed keys alone, one key at a time."""
    out = torch.zeros_like(q_latent)
    batch, heads, queries, _ = q_latent.shape
    for b in range(batch):
        for s in range(queries):
            keys = [int(j) for n, j in enumerate(indices[b, s]) if allowed is None or allowed[b, s, n]]
            for h in range(heads if keys else 0):
                scores = []
                for j in keys:
                    score = q_latent[b, h, s] @ latent[b, j]
                    if q_rope is not None:
                        score = score + q_rope[b, h, s] @ k_rope[b, 0, j]
                    scores.append(scale * score)
                weights = torch.stack(scores).exp()
                weights = weights / weights.sum()
                out[b, h, s] = sum(w * latent[b, j] for w, j in zip(weights, keys, strict=True))
    return out


def inputs(batch=2, heads=3, queries=4, keys=7, chosen=3, width=5, rope=2, *, seed=0, hidden=0.3):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()

    q, c = normal(batch, heads, queries, width), normal(batch, keys, width)
    qr, kr = (normal(batch, heads, queries, rope), normal(batch, 1, keys, rope)) if rope else (None, None)
    order = torch.rand(batch, queries, keys, generator=g).argsort(-1)
    allowed = torch.rand(batch, queries, chosen, generator=g) > hidden
    allowed[0, 0] = False  # a query that sees nothing
    return q, qr, c, kr, order[..., :chosen], allowed


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(0, 3),
    st.integers(0, 99),
)  # fmt: skip
def test_it_is_the_definition(batch, heads, queries, keys, width, rope, seed):
    chosen = 1 + seed % keys
    given_ = inputs(batch, heads, queries, keys, chosen, width, rope, seed=seed)
    # A sum of at most 6 terms of order 1 in fp64.
    assert torch.allclose(
        sparse_latent_attention(*given_, scale=SCALE), definition(*given_, SCALE), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("rope", [0, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_the_backward_is_the_gradient(rope, masked):
    *tensors, indices, allowed = inputs(rope=rope)
    allowed = allowed if masked else None
    grad = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    floats = [t for t in tensors if t is not None]
    want = torch.autograd.grad(definition(*tensors, indices, allowed, SCALE), floats, grad)
    got = sparse_latent_attention_backward(grad, *tensors, indices, allowed, scale=SCALE)
    for g, w in zip([g for g, t in zip(got, tensors, strict=True) if t is not None], want, strict=True):
        assert torch.allclose(g, w, rtol=1e-11, atol=1e-12)


def test_the_comparison_notices_a_hidden_key_that_is_read():
    """Sabotage: the structure of the mask is lost."""
    *given_, allowed = inputs()
    got = sparse_latent_attention(*given_, None, scale=SCALE)
    assert not torch.allclose(got, definition(*given_, allowed, SCALE), rtol=1e-3, atol=1e-3)


def test_sixteen_bits_accumulate_in_thirty_two():
    *tensors, indices, allowed = inputs(keys=64, chosen=48, width=16)
    short = [t.detach().bfloat16() for t in tensors]
    got = sparse_latent_attention(*short, indices, allowed, scale=SCALE)
    want = definition(*(t.double() for t in short), indices, allowed, SCALE)
    assert got.dtype == torch.bfloat16
    # One rounding of the result: 2^-9 of its size, whatever the number of terms.
    assert torch.allclose(got.double(), want, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("rope", [0, 2])
def test_the_op_is_sound(rope):
    given_ = inputs(rope=rope)
    torch.library.opcheck(SPARSE_LATENT_ATTENTION.op, given_, {"scale": SCALE})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda a: (a[0], None, *a[2:]), "one of q_rope and k_rope"),
        (lambda a: (*a[:3], a[3].expand(-1, 3, -1, -1), *a[4:]), "k_rope is"),
        (lambda a: (*a[:4], a[4].double(), a[5]), "indices are"),
        (lambda a: (a[0][..., :2], *a[1:]), "widths differ"),
        (lambda a: (a[0][0], *a[1:]), "dimensions"),
    ],
)
def test_what_it_cannot_mean_is_an_error(change, what):
    from latentscan.ir.errors import KernelError

    with pytest.raises(KernelError, match=what):
        SPARSE_LATENT_ATTENTION.op(*change(inputs()), scale=SCALE)


def test_cost_counts_the_chosen_pairs():
    cost = SPARSE_LATENT_ATTENTION.cost(*inputs(), scale=SCALE)
    assert cost.flops == 2 * 2 * 3 * 4 * 3 * (2 * 5 + 2)
