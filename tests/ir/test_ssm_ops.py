"""The state-space ops: registered soundly, differentiable, symbolic, costed, and clear when misused."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from latentscan.ir.errors import KernelError
from latentscan.ir.ops import base, ssm
from latentscan.kernels.reference import ssm as ssm_ref

torch.set_num_threads(1)

B, L, H, P, G, N, D, W = 2, 7, 4, 3, 2, 5, 6, 4
SCAN = {"dt_softplus": True, "dt_min": 0.0, "dt_max": float("inf")}
SHAPES = {
    "chunk_scan": ((B, L, H, P), (B, L, H), (H,), (B, L, G, N), (B, L, G, N), (H,), (B, L, H, P), (H,), (B, H, P, N)),
    "state_update": ((B, H, P, N), (B, H, P), (B, H), (H,), (B, G, N), (B, G, N), (H, P), (B, H, P), (H,)),
    "selective_scan": ((B, D, L), (B, D, L), (D, N), (B, N, L), (B, N, L), (D,), (B, D, L), (D,), (B, D, N)),
    "causal_conv1d": ((B, L, D), (D, W), (D,), (B, D, W - 1)),
    "conv_update": ((B, D), (B, D, W), (D, W), (D,)),
    "gated_rms_norm": ((B, L, D), (B, L, D), (D,)),
}
REQUIRED = {"chunk_scan": 5, "state_update": 6, "selective_scan": 5, "causal_conv1d": 2, "conv_update": 3}
OPTIONS = {
    "chunk_scan": {"chunk_size": 4, **SCAN},
    "state_update": SCAN,
    "selective_scan": {"delta_softplus": True},
    "causal_conv1d": {"activation": "silu"},
    "conv_update": {"activation": "silu"},
    "gated_rms_norm": {"eps": 1e-5, "group_size": 3, "norm_before_gate": False},
}
NAMES = tuple(SHAPES)


def inputs(name: str, dtype: torch.dtype = torch.float64, *, grad: bool = False) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in SHAPES[name]]
    names = [a.name for a in getattr(ssm, name).op._schema.arguments]
    if "A" in names:
        tensors[names.index("A")] = -tensors[names.index("A")].abs()
    return [t.requires_grad_(grad) for t in tensors]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("optional", [True, False], ids=["all-inputs", "required-only"])
def test_opcheck(name, optional):
    info = getattr(ssm, name)
    args = inputs(name, grad=True)
    if not optional:
        args = args[: REQUIRED[name]] if name in REQUIRED else [args[0], None, args[2]]
    result = torch.library.opcheck(info.op, tuple(args), OPTIONS[name])
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_of_the_backward_op(name):
    info, backward = getattr(ssm, name), getattr(ssm, f"{name}_backward")
    args = inputs(name)
    out = info.op(*args, **OPTIONS[name])
    grads = [torch.randn_like(t) for t in (out if isinstance(out, tuple) else (out,))]
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    result = torch.library.opcheck(backward.op, (*grads, *args), OPTIONS[name], test_utils=utils)
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_against_finite_differences(name):
    info = getattr(ssm, name)
    # Scaled so that the time steps are far from softplus's threshold and the states stay of order one.
    args = [t.mul_(0.5).requires_grad_() for t in inputs(name)]
    assert torch.autograd.gradcheck(lambda *a: info.op(*a, **OPTIONS[name]), args, fast_mode=True)


def test_chunk_scan_gradients_equal_autograd_through_the_recurrence():
    args = inputs("chunk_scan", grad=True)
    packed = (torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 1]], dtype=torch.int32), None)
    ours = ssm.chunk_scan.op(*args, *packed, **OPTIONS["chunk_scan"])
    oracle = ssm_ref.chunk_scan_recurrence(*args, *packed, **SCAN)
    grads = [torch.randn_like(t) for t in oracle]
    torch.testing.assert_close(ours, oracle)
    torch.testing.assert_close(torch.autograd.grad(ours, args, grads), torch.autograd.grad(oracle, args, grads))


@pytest.mark.parametrize("name", NAMES)
def test_one_output_alone_can_be_differentiated(name):
    info = getattr(ssm, name)
    args = inputs(name, grad=True)
    out = info.op(*args, **OPTIONS[name])
    for t in out if isinstance(out, tuple) else (out,):
        grads = torch.autograd.grad(t.sum(), args, retain_graph=True, allow_unused=True)
        assert any(g is not None and g.abs().sum() > 0 for g in grads)


@pytest.mark.parametrize("name", NAMES)
def test_compiles_once_for_all_lengths(name):
    info, traced = getattr(ssm, name), []

    def backend(graph, example):
        traced.append(graph)
        return graph.forward

    torch._dynamo.reset()
    run = torch.compile(lambda *a: info.op(*a, **OPTIONS[name]), backend=backend, fullgraph=True, dynamic=True)
    for length in (7, 13):
        args = [torch.rand([length if s == L and t.dim() > 1 else s for s in t.shape]) - 1.0 for t in inputs(name)]
        torch.testing.assert_close(run(*args), info.op(*args, **OPTIONS[name]))
    assert len(traced) == 1


@pytest.mark.parametrize("name", NAMES)
def test_training_through_aot_autograd_equals_eager(name):
    from functorch.compile import aot_function, nop

    info = getattr(ssm, name)
    args = inputs(name, torch.float32, grad=True)

    def loss(*a):
        out = info.op(*a, **OPTIONS[name])
        return sum(t.square().sum() for t in (out if isinstance(out, tuple) else (out,)))

    expected = torch.autograd.grad(loss(*args), args)
    torch.testing.assert_close(torch.autograd.grad(aot_function(loss, nop)(*args), args), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_states_and_fp32_mathematics(name, dtype):
    info = getattr(ssm, name)
    args = inputs(name, dtype)
    out = info.op(*args, **OPTIONS[name])
    exact = info.op(*(t.double() for t in args), **OPTIONS[name])
    tolerance = 3 * torch.finfo(dtype).eps
    for a, e in zip(
        out if isinstance(out, tuple) else (out,), exact if isinstance(exact, tuple) else (exact,), strict=True
    ):
        assert (a.double() - e).abs().max() <= tolerance * (1 + e.abs().max())
    if name in ("chunk_scan", "selective_scan"):
        assert out[1].dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_autocast_keeps_dtypes_and_precision(name):
    info = getattr(ssm, name)
    args = inputs(name, torch.float32, grad=True)
    plain = info.op(*args, **OPTIONS[name])
    with torch.autocast("cpu", torch.bfloat16):
        cast = info.op(*args, **OPTIONS[name])
        grads = torch.autograd.grad(cast[0].sum(), args, allow_unused=True)
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)
    expected = torch.autograd.grad(plain[0].sum(), args, allow_unused=True)
    torch.testing.assert_close(grads, expected, rtol=0, atol=0)


def symbolic(shapes, dtype=torch.float32):
    """Fake tensors in which every distinct size above 2 is a symbol."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return mode, [mode.from_tensor(torch.empty(s, dtype=dtype), static_shapes=False) for s in shapes]


@pytest.mark.parametrize("name", NAMES)
def test_cost_and_fake_outputs_are_symbolic(name):
    info, backward = getattr(ssm, name), getattr(ssm, f"{name}_backward")
    mode, args = symbolic(SHAPES[name])
    with mode:
        out = info.op(*args, **OPTIONS[name])
        cost = info.cost(*args, **OPTIONS[name])
        grads = out if isinstance(out, tuple) else (out,)
        total = cost + backward.cost(*grads, *args, **OPTIONS[name])
    assert cost.flops.free_symbols
    assert total.written.free_symbols
    assert not mode.shape_env.guards
    assert base.REGISTRY[info.op] is info
    assert info.differentiable
    assert info.autocast == "keep"


def test_chunk_scan_cost_in_numbers():
    args = [torch.empty(s, device="meta") for s in SHAPES["chunk_scan"][:5]]
    cost = ssm.chunk_scan.cost(*args, chunk_size=4, **SCAN)
    assert cost.flops == 2 * B * L * (4 * (H * P + G * N) + 2 * H * P * N)
    assert cost.read == 4 * (B * L * (H * P + H + 2 * G * N) + H)
    assert cost.written == 4 * (B * L * H * P + B * H * P * N)
    assert isinstance(cost.flops, sympy.Integer)


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_and_output_names_its_axes(name):
    for info in (getattr(ssm, name), getattr(ssm, f"{name}_backward")):
        schema = info.op._schema
        tensors = {a.name for a in schema.arguments if not a.kwarg_only}
        outs = {"out"} if len(schema.returns) == 1 else {f"out{i}" for i in range(len(schema.returns))}
        assert set(info.axes) == tensors | outs


def test_errors_say_which_sizes_differ():
    x, dt, A, Bs, Cs, *_ = inputs("chunk_scan", torch.float32)
    mode = FakeTensorMode()
    with mode:
        fake = [torch.empty(t.shape) for t in (x, dt, A, Bs, Cs)]
        with pytest.raises(KernelError, match=r"chunk_scan: heads is 4 in x and 3 in dt"):
            ssm.chunk_scan.op(fake[0], fake[1][..., :3], *fake[2:], chunk_size=4, **SCAN)
        with pytest.raises(KernelError, match=r"B has shape \(2, 7, 5\), expected \[batch, seq, groups, d_state\]"):
            ssm.chunk_scan.op(*fake[:3], fake[3][:, :, 0], fake[4], chunk_size=4, **SCAN)
        with pytest.raises(KernelError, match="sequence is empty"):
            ssm.chunk_scan.op(*(t[:, :0] if t.dim() > 1 else t for t in fake), chunk_size=4, **SCAN)
    with pytest.raises(KernelError, match="chunk_scan: chunk_size 0 must be at least 1"):
        ssm.chunk_scan.op(x, dt, A, Bs, Cs, chunk_size=0, **SCAN)
