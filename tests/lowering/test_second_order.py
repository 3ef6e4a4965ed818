"""Gradients of gradients: right where plain torch computes a backward, refused where a kernel does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import latentscan
from latentscan.ir.errors import RefusedError
from latentscan.lowering import ascend, triton, triton_mamba

NAMESPACES = {m.NAMESPACE for m in (ascend, triton, triton_mamba)}
BACKWARDS = sorted(
    name
    for name in torch._C._dispatch_get_all_op_names()
    if name.partition("::")[0] in NAMESPACES and name.endswith("_backward")
)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def scan(x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    A = -torch.ones(x.shape[2], dtype=x.dtype)
    return latentscan.chunk_scan(x, dt, A, B, C, dt_softplus=True, chunk_size=2)  # type: ignore[return-value]


CALLS: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "attention": (latentscan.attention, [(2, 2, 3, 2), (2, 1, 3, 2), (2, 1, 3, 2)]),
    "latent_attention": (
        lambda q, r, c, k: latentscan.latent_attention(q, r, c, k, scale=0.5),
        [(2, 2, 3, 2), (2, 2, 3, 2), (2, 3, 2), (2, 1, 3, 2)],
    ),
    "chunk_scan": (scan, [(2, 3, 2, 2), (2, 3, 2), (2, 3, 1, 2), (2, 3, 1, 2)]),
    "causal_conv1d": (latentscan.causal_conv1d, [(2, 4, 3), (3, 2)]),
    "gated_rms_norm": (lambda x, w, z: latentscan.gated_rms_norm(x, w, z=z), [(2, 3, 4), (4,), (2, 3, 4)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_gradients_are_those_of_differences_and_nothing_is_warned_of(name):
    function, shapes = CALLS[name]
    assert torch.autograd.gradgradcheck(function, [randn(*shape, seed=i) for i, shape in enumerate(shapes)])


def test_every_kernels_backward_refuses_them():
    assert len(BACKWARDS) >= 6
    missing = [n for n in BACKWARDS if not torch._C._dispatch_has_kernel_for_dispatch_key(n, "Autograd")]
    assert missing == []


@pytest.mark.parametrize("namespace", ["latentscan_ascend", "latentscan_triton"])
def test_through_a_kernel_they_are_refused_and_first_gradients_are_not(namespace):
    name = {"latentscan_ascend": "chunk_scan", "latentscan_triton": "causal_conv1d"}[namespace]
    op = getattr(getattr(torch.ops, namespace), name).default
    with FakeTensorMode():
        tensors = [torch.randn(*shape, requires_grad=True) for shape in CALLS[name][1]]
        x = tensors[0]
        if name == "chunk_scan":
            out, _ = op(
                x,
                tensors[1],
                -torch.ones(x.shape[2]),
                *tensors[2:],
                chunk_size=2,
                dt_softplus=True,
                dt_min=0.0,
                dt_max=9.0,
            )
        else:
            out, _ = op(*tensors, activation="silu")
        (plain,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        assert plain.shape == x.shape
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(RefusedError, match="create_graph=True"):
            first.square().sum().backward()
