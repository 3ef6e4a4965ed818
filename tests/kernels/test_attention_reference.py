"""The plain-torch attention and rope references against loops from the definition and Hugging Face's own rope."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as neox_rope
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rope
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rope

from latentscan.kernels.reference import attention as ref
from latentscan.kernels.reference.rope import rope, rope_backward
from latentscan.tests.kernels.attention_oracle import (
    Case,
    cases,
    gradients,
    loop_attention,
    loop_latent_attention,
    sees,
)

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def check(case: Case, *, latent: bool) -> None:
    """Forward, autograd through the reference and the explicit backward against the loops."""
    loop, function = (loop_latent_attention, ref.latent_attention) if latent else (loop_attention, ref.attention)
    backward = ref.latent_attention_backward if latent else ref.attention_backward
    leaves, arguments = case.leaves()
    expected = loop(*arguments, **case.options)
    out = function(*arguments, **case.options)
    assert not out.isnan().any()
    torch.testing.assert_close(out, expected, **EXACT)
    wanted = gradients(expected, leaves)
    for got, want in zip(gradients(out, leaves), wanted, strict=True):
        torch.testing.assert_close(got, want, **EXACT)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    with torch.no_grad():
        mask_grad = case.structure[0] is not None and case.structure[0].is_floating_point()
        explicit = backward(weights, *arguments, **case.options, mask_grad=mask_grad)
    for got, want in zip([x for x in explicit if x.numel()], wanted, strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@settings(max_examples=150)
@given(cases(latent=False))
def test_attention_equals_loops(case):
    check(case, latent=False)


@settings(max_examples=150)
@given(cases(latent=True))
def test_latent_attention_equals_loops(case):
    check(case, latent=True)


def test_top_left_alignment_is_noticed(monkeypatch):
    """Sabotage: the check above must fail when the causal mask is aligned top-left."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 4, generator=g, dtype=torch.float64) for n in (3, 5, 5))
    case = Case((q, k, v), (None,) * 4, {"kind": "causal", "scale": 0.5})
    check(case, latent=False)
    monkeypatch.setattr(ref, "alignment", lambda q_len, kv_len: 0)
    with pytest.raises(AssertionError, match="not close"):
        check(case, latent=False)


def test_absorption_identity():
    """K = [W_UK c | kr], V = W_UV c equals the absorbed query over the latent, then W_UV."""
    g = torch.Generator().manual_seed(1)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    b, h, s, t, c, n, r, dv = 2, 3, 4, 7, 6, 5, 2, 4
    q, qr, latent, kr, w_uk, w_uv = (
        randn(b, h, s, n),
        randn(b, h, s, r),
        randn(b, t, c),
        randn(b, 1, t, r),
        randn(h, n, c),
        randn(h, dv, c),
    )
    k = torch.cat((torch.einsum("btc,hnc->bhtn", latent, w_uk), kr.expand(b, h, t, r)), -1)
    v = torch.einsum("btc,hvc->bhtv", latent, w_uv)
    padding = torch.ones(b, t, dtype=torch.bool)
    padding[1, :4] = False  # the first query of item 1 sees nothing
    options = {"kind": "causal", "scale": 0.3, "softcap": 2.0}
    sinks = randn(h)
    expanded = ref.attention(torch.cat((q, qr), -1), k, v, None, padding, sinks, **options)
    absorbed = ref.latent_attention(
        torch.einsum("bhsn,hnc->bhsc", q, w_uk), qr, latent, kr, None, padding, sinks, **options
    )
    assert (expanded[1, :, 0] == 0).all()
    torch.testing.assert_close(torch.einsum("bhsc,hvc->bhsv", absorbed, w_uv), expanded, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_loses_only_the_rounding_of_the_result(dtype):
    """16-bit inputs: everything inside is fp32, so that the error is the last rounding plus fp32 sums over T keys."""
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, h, n, 32, generator=g).to(dtype) for h, n in ((4, 9), (2, 40), (2, 40)))
    out = ref.attention(q, k, v, kind="causal", scale=32**-0.5)
    assert out.dtype == dtype
    exact = ref.attention(q.double(), k.double(), v.double(), kind="causal", scale=32**-0.5)
    eps32, eps = torch.finfo(torch.float32).eps, torch.finfo(dtype).eps
    # scores of size |q||k|/sqrt(32) < 8 with error sqrt(32) eps32 each, then a convex sum of T values below 5
    bound = (8 * 32**0.5 + 40**0.5) * eps32 * 5 + (0.5 * eps * exact.abs() if dtype != torch.float32 else 0)
    assert ((out.double() - exact).abs() <= bound).all()


@given(st.data())
def test_causal_mask_equals_loops(data):
    batch, s, t = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    window = data.draw(st.sampled_from([None, 1, 2, 7]))
    padding = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=batch * t, max_size=batch * t)))
    padding = padding.reshape(batch, t) if data.draw(st.booleans()) else None
    like = torch.empty(1, dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    expected = torch.tensor(
        [
            [[[sees(i, j, s, t, "causal", window) and (padding is None or bool(padding[b, j])) for j in range(t)]
              for i in range(s)]]
            for b in range(batch)
        ]
    )  # fmt: skip
    got = ref.causal_mask(like, padding, batch, s, t, window, additive=False)
    assert got.dtype == torch.bool
    assert got.is_contiguous()
    assert torch.equal(got, expected)
    dense = ref.causal_mask(like, padding, batch, s, t, window, additive=True)
    assert dense.dtype == like.dtype
    assert torch.equal(dense, torch.where(expected, 0.0, torch.finfo(like.dtype).min).to(like.dtype))


def tables(batch, length, rotary, *, dtype=torch.float32, seed=0):
    """cos and sin [batch,length,rotary] as Hugging Face makes them: cat(freqs, freqs)."""
    angles = torch.randn(batch, length, rotary // 2, generator=torch.Generator().manual_seed(seed)) * 3
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("table_batch", [1, 2])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_rope_is_bitwise_hugging_faces(dtype, table_batch, unsqueeze_dim):
    q, k = (torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (1, 2))
    length = q.shape[3 - unsqueeze_dim]
    cos, sin = tables(table_batch, length, 16, dtype=dtype)
    for layout, library in (("half", llama_rope), ("interleaved-to-half", apply_rotary_pos_emb_interleave)):
        for got, want in zip((q, k), library(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim), strict=True):
            got = rope(got, cos, sin, layout=layout, unsqueeze_dim=unsqueeze_dim)
            assert torch.equal(got, want), layout
    cos, sin = tables(table_batch, length, 6, dtype=dtype)
    got = rope(q, cos, sin, layout="half", unsqueeze_dim=unsqueeze_dim)
    assert torch.equal(got, neox_rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)[0])
    # GPT-J: [B,S,H,D], tables of half the width, features in place
    x = q.transpose(1, 2) if unsqueeze_dim == 1 else q
    got = rope(x[..., :6], cos, sin, layout="interleaved", unsqueeze_dim=2)
    assert torch.equal(got, gptj_rope(x[..., :6], sin[..., :3], cos[..., :3]))


def test_rope_layouts_are_permutations_of_each_other():
    x = torch.randn(2, 3, 5, 10)
    cos, sin = tables(1, 5, 6)
    order = torch.tensor([0, 2, 4, 1, 3, 5, 6, 7, 8, 9])
    half = rope(x[..., order], cos, sin, layout="half")
    assert torch.equal(rope(x, cos, sin, layout="interleaved-to-half"), half)
    assert torch.equal(rope(x, cos, sin, layout="interleaved")[..., order], half)
    assert torch.equal(half[..., 6:], x[..., 6:])


def test_rope_promotes_and_keeps_the_dtype_of_x():
    x = torch.randn(1, 2, 5, 8).bfloat16()
    cos, sin = tables(1, 5, 8)
    out = rope(x, cos, sin, layout="half")
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, rope(x.float(), cos, sin, layout="half").bfloat16())


@pytest.mark.parametrize("layout", ["half", "interleaved", "interleaved-to-half"])
@pytest.mark.parametrize("rotary", [8, 4])
def test_rope_backward_is_the_transposed_map(layout, rotary):
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = tables(2, 5, rotary, dtype=torch.float64)
    if layout == "half":  # its halves may differ
        sin = sin + torch.linspace(0, 1, rotary, dtype=torch.float64)
    grad = torch.randn(x.shape, dtype=torch.float64)
    (expected,) = torch.autograd.grad(rope(x, cos, sin, layout=layout), x, grad)
    torch.testing.assert_close(rope_backward(grad, cos, sin, layout=layout), expected, **EXACT)
