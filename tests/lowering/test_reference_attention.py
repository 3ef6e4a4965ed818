"""Attention on the reference target against loops from the definition and the ops; traced, compiled, autocast."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch.fx.experimental.proxy_tensor import make_fx

from latentscan.ir.errors import KernelError
from latentscan.ir.ops import attention as ops
from latentscan.kernels.reference import attention as ref
from latentscan.lowering.reference_attention import attention_sdpa, latent_attention_torch
from latentscan.tests.kernels.attention_oracle import Case, cases, gradients, loop_attention, loop_latent_attention


def flags(case: Case) -> list[dict[str, bool]]:
    """Every setting of the two booleans that is true of the case."""
    q, k = case.tensors[0], case.tensors[2]
    q_len, kv_len = q.shape[2], k.shape[-2]
    square, single = [{}], [{}]
    if q_len == kv_len:
        square.append({"square": True})
    if q_len == 1:
        single.append({"single": True})
    return [{**a, **b} for a in square for b in single]


def check(case: Case, *, latent: bool) -> None:
    loop, function = (loop_latent_attention, latent_attention_torch) if latent else (loop_attention, attention_sdpa)
    leaves, arguments = case.leaves()
    expected = loop(*arguments, **case.options)
    wanted = gradients(expected, leaves)
    for setting in flags(case):
        out = function(*arguments, **case.options, **setting)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        for got, want in zip(gradients(out, leaves), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@settings(max_examples=150)
@given(cases(latent=False))
def test_attention_sdpa_equals_loops(case):
    check(case, latent=False)


@settings(max_examples=150)
@given(cases(latent=True))
def test_latent_attention_torch_equals_loops(case):
    check(case, latent=True)


def randn(*shape, dtype=torch.float32, grad=True):
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=g).to(dtype).requires_grad_(grad)


def qkv(s, t, *, b=2, h=4, groups=2, dk=16, dv=16, **kwargs):
    return randn(b, h, s, dk, **kwargs), randn(b, groups, t, dk, **kwargs), randn(b, groups, t, dv, **kwargs)


def latents(s, t, *, b=2, h=4, groups=1, c=16, r=4, **kwargs):
    return (
        randn(b, h, s, c, **kwargs),
        randn(b, h, s, r, **kwargs),
        randn(b, t, c, **kwargs),
        randn(b, groups, t, r, **kwargs),
    )


def test_top_left_alignment_is_noticed(monkeypatch):
    """Sabotage: the checks above must fail when the mask is aligned top-left."""
    case = Case(tuple(x.double() for x in qkv(3, 5, grad=False)), (None,) * 4, {"kind": "causal", "scale": 0.5})
    latent = Case(tuple(x.double() for x in latents(3, 5, grad=False)), (None,) * 4, case.options)
    check(case, latent=False)
    check(latent, latent=True)
    monkeypatch.setattr(ref, "alignment", lambda q_len, kv_len: 0)
    with pytest.raises(AssertionError, match="not close"):
        check(case, latent=False)
    with pytest.raises(AssertionError, match="not close"):
        check(latent, latent=True)


STRUCTURES = {
    "square": ({"square": True}, 40, 40, {}),
    "chunk": ({}, 16, 40, {}),
    "single": ({"single": True}, 1, 40, {}),
    "window": ({"square": True}, 40, 40, {"window": 7}),
    "sinks": ({"square": True}, 40, 40, {"sinks": randn(4, grad=False)}),
    "softcap": ({}, 16, 40, {"softcap": 3.0}),
    "padding": ({}, 40, 40, {"padding": (torch.arange(40) >= 9).expand(2, 40)}),
    "bias": ({}, 40, 40, {"mask": randn(1, 4, 40, 40, grad=False)}),
    "single head bias": ({"single": True}, 1, 40, {"mask": randn(1, 4, 1, 40, grad=False)}),
    "packed": ({"square": True}, 40, 40, {"cu_seqlens": torch.tensor([0, 11, 12, 40], dtype=torch.int32)}),
}


def doubled(options):
    """The options with floating tensors in fp64."""
    return {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dv", [16, 8, 24])
@pytest.mark.parametrize("name", STRUCTURES)
def test_precision(name, dv, dtype):
    """Against fp64: 16-bit probabilities may be rounded by SDPA, so a few roundings of the dtype; T = 40 fp32 sums."""
    setting, s, t, structure = STRUCTURES[name]
    q, k, v = qkv(s, t, dv=dv, dtype=dtype, grad=False, b=1 if name == "packed" else 2)
    options = {"kind": "causal", "scale": 0.25, **structure}
    got = attention_sdpa(q, k, v, **options, **setting)
    assert got.dtype == dtype
    want = ref.attention(q.double(), k.double(), v.double(), **doubled(options))
    eps = torch.finfo(dtype).eps
    tolerance = 4 * eps if dtype == torch.bfloat16 else 4 * 40**0.5 * eps
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2])
def test_latent_precision(groups, dtype):
    inputs = latents(9, 40, groups=groups, dtype=dtype, grad=False)
    got = latent_attention_torch(*inputs, kind="causal", scale=0.2)
    want = ref.latent_attention(*(x.double() for x in inputs), kind="causal", scale=0.2)
    eps32 = torch.finfo(torch.float32).eps
    assert got.dtype == dtype
    # inside fp32 throughout: sums over T = 40 and C + R = 20, then one rounding
    half = 0.5 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(got.double(), want, rtol=half + 4 * 40**0.5 * eps32, atol=4 * 40**0.5 * eps32)


def count(graph: torch.fx.GraphModule, name: str) -> int:
    return sum(name in str(n.target) for n in graph.graph.nodes)


def test_sdpa_takes_the_fast_path_where_it_means_the_same():
    """is_causal without a mask for a square, no mask at all for a single query, and K and V never repeated."""

    def trace(s, t, **options):
        return make_fx(lambda q, k, v: attention_sdpa(q, k, v, kind="causal", scale=0.25, **options))(
            *qkv(s, t, grad=False)
        )

    for graph in (trace(40, 40, square=True), trace(1, 40, single=True)):
        assert count(graph, "flash_attention") == 1
        assert count(graph, "arange") == count(graph, "expand") == count(graph, "repeat") == 0
    assert count(trace(16, 40), "flash_attention") == 1
    assert count(trace(16, 40), "arange") == 2


def test_latent_is_never_repeated_per_head():
    shapes = []
    graph = make_fx(lambda *x: latent_attention_torch(*x, kind="causal", scale=0.25))(*latents(3, 40, grad=False))
    for node in graph.graph.nodes:
        value = node.meta.get("val", node.meta.get("tensor_meta"))
        if value is not None and hasattr(value, "shape"):
            shapes.append(tuple(value.shape))
    assert shapes
    latent = 2 * 40 * 16
    assert all(s[-1] != 16 or torch.Size(s).numel() <= latent for s in shapes)  # [.., T, C] only once per batch item


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("latent", [False, True])
def test_symbolic_lengths_compile_once(backend, latent):
    function, make = (latent_attention_torch, latents) if latent else (attention_sdpa, qkv)
    op = ops.LATENT_ATTENTION.op if latent else ops.ATTENTION.op

    def step(padding, *inputs):
        return function(*inputs, padding=padding, kind="causal", scale=0.25, window=30)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for n, (s, t) in enumerate(((11, 23), (9, 40), (14, 14))):
        inputs, padding = make(s, t), (torch.arange(t) >= 3).expand(2, t).clone()
        torch._dynamo.mark_dynamic(padding, 1)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, x.dim() - 2)
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            out = compiled(padding, *inputs)
        want = op(*inputs, padding=padding, kind="causal", scale=0.25, window=30)
        torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
        for a, b in zip(gradients(out, list(inputs)), gradients(want, list(inputs)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_autocast_equals_the_ops():
    bias, sinks = randn(1, 4, 40, 40, grad=False) + 1000, randn(4, grad=False)
    for structure in ({"mask": bias}, {"mask": bias, "sinks": sinks}, {"sinks": sinks, "softcap": 2.0}):
        options = {"kind": "causal", "scale": 0.25, **structure}
        with torch.autocast("cpu", torch.bfloat16):
            got, want = attention_sdpa(*qkv(40, 40), **options), ops.ATTENTION.op(*qkv(40, 40), **options)
            latent = latent_attention_torch(*latents(40, 40), **options)
            latent_want = ops.LATENT_ATTENTION.op(*latents(40, 40), **options)
        assert got.dtype == want.dtype == latent.dtype == torch.bfloat16
        torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)
        torch.testing.assert_close(latent, latent_want, rtol=2**-7, atol=1e-3)


def test_wrong_flags_are_errors_where_sizes_are_known():
    with pytest.raises(KernelError, match="square=True with 3 queries, 5 keys"):
        attention_sdpa(*qkv(3, 5), kind="causal", scale=1.0, square=True)
    with pytest.raises(KernelError, match="single=True with 3 queries"):
        latent_attention_torch(*latents(3, 5), kind="causal", scale=1.0, single=True)


@pytest.mark.device("cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dv", [16, 8])
@pytest.mark.parametrize("name", [*STRUCTURES, "nothing", "nothing with bias"])
def test_cuda(name, dv, dtype, monkeypatch):
    """The same on a GPU, with gradients; "nothing" hides all keys from some queries: their rows are zero, not NaN."""
    nothing = {"padding": (torch.arange(40) >= 9).expand(2, 40), "window": 4}
    bias = {"mask": randn(1, 4, 40, 40, grad=False).masked_fill(torch.rand(1, 1, 40, 1) < 0.3, -torch.inf).to(dtype)}
    more = {"nothing": ({}, 40, 40, nothing), "nothing with bias": ({}, 40, 40, {**nothing, **bias})}
    setting, s, t, structure = {**STRUCTURES, **more}[name]
    structure = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in structure.items()}
    inputs = [x.cuda().detach().requires_grad_() for x in qkv(s, t, dv=dv, dtype=dtype, b=1 if name == "packed" else 2)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    got = attention_sdpa(*inputs, kind="causal", scale=0.25, **structure, **setting)
    want = ops.ATTENTION.op(*exact, kind="causal", scale=0.25, **doubled(structure))
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(0)).cuda()
    pairs = [(got, want)]
    pairs += zip(
        torch.autograd.grad((got * weights).sum(), inputs),
        torch.autograd.grad((want * weights).sum(), exact),
        strict=True,
    )
    eps = torch.finfo(dtype).eps
    for a, b in pairs:  # the gradients sum 40 rows of size about 1
        torch.testing.assert_close(a.double(), b, rtol=8 * eps, atol=4 * 40**0.5 * eps * (1 + b.abs().max().item()))
    if name in more:
        assert (got[:, :, :9] == 0).all()
