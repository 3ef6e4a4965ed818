"""Public bug reports of state-space scans (CASES 2 to 5, 8, 9, 13, 14), as small tests of the op and its kernels.

The kernels' numbers on the same faults are in tests/kernels/test_chunk_scan_triton.py (case 1 too: a view with 2^31
elements between tokens) and, on a GPU, tests/device.
"""

from __future__ import annotations

import importlib

import pytest
import torch

import latentscan
from latentscan.kernels.reference import ssm


def inputs(b=2, L=21, H=4, P=8, G=2, N=8, dtype=torch.float64, A=2.0):
    g = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    A = (-torch.rand(H, generator=g, dtype=torch.float64) * A).to(torch.promote_types(dtype, torch.float32))
    return [randn(b, L, H, P), randn(b, L, H), A, randn(b, L, G, N), randn(b, L, G, N)]


def gradients(args, **kwargs):
    leaves = [t.detach().clone().requires_grad_() for t in args]
    y, state = latentscan.chunk_scan(*leaves, return_final_state=True, dt_softplus=True, **kwargs)
    return y, state, torch.autograd.grad(y.float().square().sum() + state.square().sum(), leaves)


def test_case_2_heads_times_batch_beyond_65535_are_one_axis_of_the_grid():
    """fla#172: tests/kernels holds the grids; here, that no launch can have a second axis."""
    pytest.importorskip("triton")
    common = importlib.import_module("latentscan.kernels.triton.chunk_common")
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **meta: None

    common.launch(Kernel(), 70_000, num_warps=4)
    assert grids == [(70_000,)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_case_3_gradients_of_the_first_step_are_finite(dtype):
    """m#352, m#445."""
    y, state, grads = gradients(inputs(L=70, dtype=dtype))
    assert y.dtype == dtype and state.dtype == torch.float32
    assert all(g.isfinite().all() for g in grads)


def test_case_4_large_decay_gives_zero_and_not_inf():
    """m PR 746, vLLM PR 37501: each term of the sum of decays is clamped before it reaches an exponential."""
    y, state, grads = gradients(inputs(L=70, dtype=torch.float32, A=1e8))
    assert all(t.isfinite().all() for t in (y, state, *grads))


@pytest.mark.parametrize(("length", "chunk"), [(90, 40), (90, 50), (200, 256), (1, 64)])
def test_case_5_any_chunk_gives_the_same_numbers(length, chunk):
    """m#449."""
    args = inputs(L=length)
    want, _ = ssm.chunk_scan_recurrence(*args, dt_softplus=True)
    y = latentscan.chunk_scan(*args, chunk_size=chunk, dt_softplus=True)
    torch.testing.assert_close(y, want)


@pytest.mark.parametrize("packing", ["seq_idx", "cu_seqlens"])
def test_case_8_packed_sequences_do_not_leak_into_each_other(packing):
    """m#758, SkyRL PR 2056; without the packing the same check fails."""
    args = inputs(b=1, L=21)
    index = (torch.arange(21) >= 8).int()[None]
    given = {"seq_idx": index} if packing == "seq_idx" else {"cu_seqlens": torch.tensor([0, 8, 21])}
    y = latentscan.chunk_scan(*args, chunk_size=16, dt_softplus=True, **given)
    parts = [[t if t.dim() == 1 else t[:, run] for t in args] for run in (slice(0, 8), slice(8, 21))]
    want = torch.cat([latentscan.chunk_scan(*part, chunk_size=16, dt_softplus=True) for part in parts], 1)
    torch.testing.assert_close(y, want)
    leaking = latentscan.chunk_scan(*args, chunk_size=16, dt_softplus=True)
    assert not torch.allclose(leaking, want)


def test_case_9_steps_without_bias_and_outputs_without_skip():
    """vLLM PR 21532."""
    args = inputs()
    zero = torch.zeros(4, dtype=torch.float64)
    want = latentscan.chunk_scan(*args, D=zero, dt_bias=zero, dt_softplus=True)
    torch.testing.assert_close(latentscan.chunk_scan(*args, dt_softplus=True), want)


def test_case_13_compiled_with_changing_lengths_it_is_finite_and_compiled_twice_at_most():
    """pytorch#146129, m#740."""
    graphs = []

    def count(module, example):
        graphs.append(module)
        return module.forward

    scan = torch.compile(lambda *args: latentscan.chunk_scan(*args, dt_softplus=True), backend=count, fullgraph=True)
    for length in (21, 34, 55, 89):
        args = inputs(L=length, dtype=torch.float32)
        y = scan(*args)
        torch.testing.assert_close(y, latentscan.chunk_scan(*args, dt_softplus=True))
    assert len(graphs) == 2


def test_case_14_nothing_is_tuned_at_a_call():
    """vLLM PR 39822: kernels are plain functions of their arguments, tiles come from a table."""
    pytest.importorskip("triton")
    from triton.runtime import Autotuner

    found = 0
    for name in ("common", "scan_forward", "scan_backward"):
        module = importlib.import_module(f"latentscan.kernels.triton.chunk_{name}")
        kernels = [v for k, v in vars(module).items() if k.endswith("_kernel")]
        found += len(kernels)
        assert not any(isinstance(k, Autotuner) for k in kernels)
    assert found >= 10
