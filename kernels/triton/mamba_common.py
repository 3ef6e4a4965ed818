"""What the Mamba kernels beside the chunk scan share: scalar functions inside kernels, argument checks outside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ACTIVATIONS = ("none", "silu")


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in five instructions: powers of two and a reciprocal root need no scaling, as exp and division
    do. Relative error 2^-20; exactly zero where exp(-x) overflows."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def softplus(x):
    """log(1 + exp(x)) of fp32, linear above 20, with all its digits where exp(x) is small."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def silu_gradient(x):
    """Derivative of x·sigmoid(x)."""
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the device of its first tensor current: Triton launches on the current one."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        first = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        if first is None or not first.is_cuda or first.device.index == torch.cuda.current_device():
            return function(*args, **kwargs)
        with torch.cuda.device(first.device):
            return function(*args, **kwargs)

    return run


def check_activation(activation: str) -> None:
    """Raises ValueError: an unknown activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")


def check_tensors(*tensors: Tensor | None) -> None:
    """Raise ValueError for a dtype that these kernels do not compute (fp64), or tensors of several devices."""
    given = [t for t in tensors if t is not None]
    devices = {t.device for t in given}
    if len(devices) > 1:
        raise ValueError(f"tensors are on {len(devices)} devices: {', '.join(sorted(map(str, devices)))}")
    if any(t.dtype == torch.float64 for t in given):
        raise ValueError("fp64 is computed by kernels.reference only")


def check_shape(name: str, tensor: Tensor | None, expected: Sequence[int]) -> None:
    """Raise ValueError where a tensor's shape is not the expected one."""
    if tensor is not None and tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected)}")


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def absent(like: Tensor) -> Tensor:
    """The empty tensor that a backward function returns for an input that was not given."""
    return like.new_empty(0)
