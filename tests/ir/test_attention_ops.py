"""The ops attention, latent_attention, causal_mask, rope: registration, gradients, symbols, cost, autocast, errors."""

from __future__ import annotations

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from latentscan.ir.errors import KernelError
from latentscan.ir.ops import attention as ops
from latentscan.ir.ops import base
from latentscan.ir.ops import rope as rope_ops
from latentscan.tests.kernels.attention_oracle import cases, gradients, loop_attention, loop_latent_attention, sees

attention = torch.ops.latentscan.attention
latent_attention = torch.ops.latentscan.latent_attention
causal_mask = torch.ops.latentscan.causal_mask
rope = torch.ops.latentscan.rope


def randn(*shape, dtype=torch.float64, grad=True, seed=0):
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_(grad)


def qkv(b=2, h=4, groups=2, s=3, t=5, dk=4, dv=3, **kwargs):
    return randn(b, h, s, dk, **kwargs), randn(b, groups, t, dk, **kwargs), randn(b, groups, t, dv, **kwargs)


def latents(b=2, h=4, groups=2, s=3, t=5, c=4, r=2, **kwargs):
    return (
        randn(b, h, s, c, **kwargs),
        randn(b, h, s, r, **kwargs),
        randn(b, t, c, **kwargs),
        randn(b, groups, t, r, **kwargs),
    )


PADDING = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 0]])  # the first query of item 0 sees nothing
PACKED = torch.tensor([0, 2, 5], dtype=torch.int32)


# --- registration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck_attention(grad):
    sinks, mask = randn(4, grad=grad), randn(1, 4, 3, 5, grad=grad)
    options = {"kind": "causal", "window": 2, "scale": 0.3, "softcap": 2.0}
    torch.library.opcheck(attention.default, (*qkv(grad=grad), mask, PADDING, sinks), options)
    torch.library.opcheck(latent_attention.default, (*latents(grad=grad), mask, PADDING, sinks), options)


def test_opcheck_bare_and_packed():
    plain = {"kind": "full", "scale": 0.3}
    torch.library.opcheck(attention.default, qkv(dtype=torch.bfloat16), plain, test_utils=SHORT)
    torch.library.opcheck(latent_attention.default, (latents()[0], None, latents()[2], None), plain, test_utils=SHORT)
    packed = (*qkv(b=1, s=5), None, None, None, PACKED)
    torch.library.opcheck(attention.default, packed, {"kind": "causal", "scale": 0.3}, test_utils=SHORT)


SHORT = ("test_schema", "test_autograd_registration", "test_faketensor")


def test_opcheck_backward_and_mask():
    grad, tensors = randn(2, 4, 3, 3, grad=False), qkv(grad=False)
    mask, sinks = randn(4, 3, 5, grad=False), randn(4, grad=False)
    options = {"kind": "causal", "scale": 0.3}
    for mask_grad in (False, True):
        torch.library.opcheck(
            ops.ATTENTION_BACKWARD.op,
            (grad, *tensors, mask, PADDING, sinks),
            {**options, "mask_grad": mask_grad},
            test_utils=SHORT,
        )
    tensors, grad = latents(grad=False), randn(2, 4, 3, 4, grad=False)
    torch.library.opcheck(ops.LATENT_ATTENTION_BACKWARD.op, (grad, *tensors), options, test_utils=SHORT)
    bare = (grad, tensors[0], None, tensors[2], None)
    torch.library.opcheck(ops.LATENT_ATTENTION_BACKWARD.op, bare, options, test_utils=SHORT)
    for additive in (False, True):
        torch.library.opcheck(causal_mask.default, (grad, PADDING, 2, 3, 5, 2), {"additive": additive})
    assert not ops.CAUSAL_MASK.differentiable


class Asked(TorchDispatchMode):
    """What each ``attention_backward`` is asked for: ``mask_grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is ops.ATTENTION_BACKWARD.op:
            self.found.append(bool((kwargs or {}).get("mask_grad")))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_mask_that_is_made_has_no_gradient_and_none_is_computed(backend):
    """It is made with the hidden states' dtype; its gradient would be [B, 1, S, T] in each layer, for nobody."""

    def loss(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        mask = causal_mask(x, PADDING, 2, 5, 5, None, additive=True)
        mask = mask if bias is None else mask + bias
        return attention(x, x, x, mask, kind="full", scale=0.3).sum()

    run = loss if backend is None else torch.compile(loss, backend=backend, fullgraph=True)
    x = randn(2, 3, 5, 8)
    out = run(x)
    with Asked() as asked:
        out.backward()
    assert asked.found == [False]
    assert not causal_mask(x, PADDING, 2, 5, 5, None, additive=True).requires_grad
    bias = randn(5)  # sabotage: one that takes gradients
    out = run(x, bias)
    with Asked() as asked:
        out.backward()
    assert asked.found == [True]
    assert bias.grad is not None


@pytest.mark.parametrize("layout", ["half", "interleaved", "interleaved-to-half"])
def test_opcheck_rope(layout):
    x, cos, sin = randn(2, 3, 5, 8), randn(1, 5, 6, grad=False), randn(1, 5, 6, grad=False)
    torch.library.opcheck(rope.default, (x, cos, sin), {"layout": layout})
    torch.library.opcheck(rope_ops.ROPE_BACKWARD.op, (x, cos, sin), {"layout": layout}, test_utils=SHORT)
    function = lambda x: rope(x, cos, sin, layout=layout)  # noqa: E731
    torch.autograd.gradcheck(function, x)
    torch.autograd.gradgradcheck(function, x)
    by_seq = {"layout": layout, "unsqueeze_dim": 2}
    out = rope(x.transpose(1, 2), cos, sin, **by_seq)
    torch.testing.assert_close(out, function(x).transpose(1, 2), rtol=0, atol=0)
    assert out.is_contiguous()


# --- gradients -------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(cases(latent=False), cases(latent=True))
def test_gradients_equal_autograd_through_loops(case, latent_case):
    for op, loop, drawn in ((attention, loop_attention, case), (latent_attention, loop_latent_attention, latent_case)):
        leaves, arguments = drawn.leaves()
        expected = loop(*arguments, **drawn.options)
        out = op(*arguments, **drawn.options)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        for got, want in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_gradcheck():
    sinks, mask = randn(4), randn(1, 1, 3, 5)
    options = {"kind": "causal", "window": 3, "scale": 0.3, "softcap": 2.0}
    torch.autograd.gradcheck(lambda q, k, v, m, s: attention(q, k, v, m, PADDING, s, **options), (*qkv(), mask, sinks))
    torch.autograd.gradcheck(
        lambda a, b, c, d, m, s: latent_attention(a, b, c, d, m, PADDING, s, **options), (*latents(), mask, sinks)
    )


def test_a_query_that_sees_nothing_is_zero_also_in_the_gradient():
    q, k, v = qkv(dtype=torch.float32)
    nothing = torch.full((1, 1, 3, 5), torch.finfo(torch.float32).min)
    for structure in ((None, PADDING * 0), (nothing, None), (torch.zeros(3, 5, dtype=torch.bool), None)):
        out = attention(q, k, v, *structure, kind="full", scale=0.5)
        assert (out == 0).all()
        assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


# --- tracing ---------------------------------------------------------------------------------------------------------


def test_symbolic_lengths_stay_symbolic():
    """Traced at one size, forward and backward as ops; right at others, with different S and T."""
    padding = torch.ones(2, 7, dtype=torch.int64)

    def step(q, k, v, padding):
        out = attention(q, k, v, None, padding, kind="causal", window=4, scale=0.5)
        return torch.autograd.grad(out.sum(), (q, k, v))

    graph = make_fx(step, tracing_mode="symbolic")(*qkv(s=3, t=7), padding)
    names = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert "latentscan.attention.default" in names
    assert "latentscan.attention_backward.default" in names
    other = (*qkv(b=3, s=4, t=9), torch.ones(3, 9, dtype=torch.int64))
    for got, want in zip(graph(*other), step(*other), strict=True):
        assert torch.equal(got, want)


def test_compiled_once_for_all_lengths():
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, kind="causal", scale=0.5), backend="aot_eager", dynamic=True, fullgraph=True
    )
    with torch._dynamo.config.patch(error_on_recompile=True, specialize_float=True):
        for s, t in ((11, 13), (4, 9), (6, 6)):  # the first: no two sizes equal, which would be a guard
            inputs = qkv(s=s, t=t)
            assert torch.equal(compiled(*inputs), attention(*inputs, kind="causal", scale=0.5))


# --- autocast --------------------------------------------------------------------------------------------------------


def test_autocast_casts_the_operands_and_keeps_mask_and_sinks():
    q, k, v = qkv(dtype=torch.float32)
    sinks = randn(4, dtype=torch.float32)
    bias = (torch.arange(5.0) * 0.7 + 1000).expand(1, 1, 3, 5).masked_fill(torch.tensor([True] + [False] * 4), -1e9)
    low = [x.detach().bfloat16() for x in (q, k, v)]
    expected = attention(*low, bias, PADDING, sinks, kind="causal", scale=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, bias, PADDING, sinks, kind="causal", scale=0.5)
        gradient = torch.autograd.grad(out.float().sum(), (q, k, v, sinks))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    assert [g.dtype for g in gradient] == [torch.float32] * 4
    out = attention(*(x.double() for x in low), bias.double(), PADDING, sinks.double(), kind="causal", scale=0.5)
    # everything inside is fp32: only the result is rounded (the scores near 1000 have an fp32 error of 6e-5)
    torch.testing.assert_close(expected.double(), out, rtol=2**-8 + 2e-4, atol=1e-4)


def test_autocast_in_the_backward_and_for_fp64_and_rope():
    low = [x.detach().bfloat16().requires_grad_() for x in qkv()]
    plain = torch.autograd.grad(attention(*low, kind="causal", scale=0.5).sum(), low)
    q, latent = latents()[0], latents()[2]
    x, cos, sin = (randn(1, 2, 5, 6, dtype=torch.float32), *(randn(1, 5, 6, dtype=torch.float32, grad=False),) * 2)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(attention(*low, kind="causal", scale=0.5).sum(), low)
        assert latent_attention(q, None, latent, None, kind="full", scale=0.5).dtype == torch.float64
        half = latent_attention(q.float(), None, latent.float(), None, kind="full", scale=0.5)
        assert rope(x, cos, sin, layout="half").dtype == torch.float32
    assert half.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))
    assert base.REGISTRY[attention.default].autocast == "cast"
    assert base.REGISTRY[rope.default].autocast == "keep"


# --- cost and axes ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 7), st.integers(0, 6), st.sampled_from(["causal", "full"]), st.sampled_from([None, 1, 2, 5, 20]))
def test_score_pairs_counts_what_the_loops_count(s, extra, kind, window):
    t = s + extra
    counted = sum(sees(i, j, s, t, kind, window) for i in range(s) for j in range(t))
    assert ops.score_pairs(s, t, kind, window) == counted
    symbols = dict(zip(sympy.symbols("s t w", integer=True, positive=True), (s, t, window or 1), strict=True))
    formula = ops.score_pairs(*list(symbols)[:2], kind, None if window is None else list(symbols)[2])
    assert formula.subs(symbols) == counted


def test_cost_is_that_of_the_absorption_rule():
    """MATH 3: absorbed 2 n_h P (2 d_c + d_r), expanded 2 n_h P (d_qk + d_v), with P = s t - s (s - 1) / 2."""
    b, h, s, t = 2, 4, 3, 5
    pairs = s * t - s * (s - 1) // 2
    cost = ops.ATTENTION.cost(*qkv(), kind="causal", scale=1.0)
    assert cost.flops == 2 * b * h * pairs * (4 + 3)
    assert cost.read == 8 * b * (h * s * 4 + 2 * t * (4 + 3))
    assert cost.written == 8 * b * h * s * 3
    assert ops.LATENT_ATTENTION.cost(*latents(), kind="causal", scale=1.0).flops == 2 * b * h * pairs * (2 * 4 + 2)
    assert (
        ops.ATTENTION_BACKWARD.cost(randn(2, 4, 3, 3), *qkv(), kind="full", scale=1.0).flops == 2 * b * h * s * t * 18
    )
    mask = ops.CAUSAL_MASK.cost(qkv()[0], None, b, s, t, None, additive=True)
    assert (mask.flops, mask.written) == (0, 8 * b * s * t)


def test_cost_keeps_symbols():
    costs = []

    def step(q, k, v):
        costs.append(ops.ATTENTION.cost(q, k, v, kind="causal", scale=1.0))
        return q + 1

    make_fx(step, tracing_mode="symbolic")(*qkv(s=3, t=7))
    assert costs[0].flops.free_symbols


@pytest.mark.parametrize("info", [x for x in vars(ops).values() if isinstance(x, base.OpInfo)], ids=lambda x: x.name)
def test_axes_name_every_dimension(info):
    known = {a.name for a in info.op._schema.arguments} | {"out"} | {f"out{i}" for i in range(6)}
    assert set(info.axes) <= known
    assert base.REGISTRY[info.op] is info


# --- errors ----------------------------------------------------------------------------------------------------------


def test_errors_name_the_values():
    q, k, v = qkv(dtype=torch.float32, grad=False)
    ok = {"kind": "causal", "scale": 1.0}
    for arguments, options, words in (
        ((q, k, v), {"kind": "prefix", "scale": 1.0}, "'prefix'"),
        ((q[:, :3], k, v), ok, "3 query heads are no multiple of 2"),
        ((q, k[..., :2], v), ok, "head dim"),
        ((q, k.double(), v), ok, "float64"),
        ((q, k, v[:, :, :4]), ok, "length"),
        ((q, k, v), {**ok, "window": 0}, "window is 0"),
        ((q, k, v), {**ok, "softcap": 0.0}, "softcap"),
        ((q, k, v, torch.ones(3, 5, dtype=torch.int64)), ok, "int64"),
        ((q, k, v, torch.ones(3, 4, dtype=torch.bool)), ok, r"\(3, 4\)"),
        ((q, k, v, None, torch.ones(2, 4, dtype=torch.bool)), ok, r"\(2, 4\)"),
        ((q, k, v, None, torch.ones(2, 5)), ok, "padding is torch.float32"),
        ((q, k, v, None, None, torch.ones(3)), ok, "sinks"),
        ((q, k, v, None, None, None, PACKED), ok, "batch 2"),
        ((q, k[:, :, :0], v[:, :, :0]), ok, "no keys"),
    ):
        for run in (attention, lambda *a, **o: attention(*(x if x is None else x.to("meta") for x in a), **o)):
            with pytest.raises(KernelError, match=words):
                run(*arguments, **options)
    q, qr, latent, kr = latents(dtype=torch.float32, grad=False)
    for arguments, words in (
        ((q, qr, latent, None), "k_rope"),
        ((q, qr, latent[..., :2], kr), "do not fit"),
        ((q, qr, latent, kr[:, :, :3]), "k_rope does not fit"),
        ((q, qr[:, :3], latent, kr), "q_rope does not fit"),
        ((q, qr.double(), latent, kr), "float64"),
    ):
        with pytest.raises(KernelError, match=words):
            latent_attention(*arguments, **ok)
    cos = torch.ones(1, 3, 4)
    for arguments, options, words in (
        ((q, cos, cos), {"layout": "neox"}, "interleaved-to-half"),
        ((q, cos[:, :2], cos[:, :2]), {"layout": "half"}, "positions"),
        ((q, cos, cos), {"layout": "half", "unsqueeze_dim": 2}, "positions"),
        ((q, cos[..., :3], cos[..., :3]), {"layout": "half"}, "odd"),
        ((q[..., :2], cos, cos), {"layout": "half"}, "exceeds"),
    ):
        with pytest.raises(KernelError, match=words):
            rope(*arguments, **options)
