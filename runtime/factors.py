"""How an optimiser's fp32 variables become a parameter: as its master copy, or as low-rank factors beside it (LoRA).

The model reads plain Parameters in its own dtype: nothing is traced anew, and what is saved is merged already. The
price of factors is a gradient of the whole matrix; the chain rule takes it on to the factors here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Master:
    """A parameter that trains itself, through an fp32 copy if it is of another dtype."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self._own = parameter.dtype == torch.float32
        self.variables: dict[str, Tensor] = {"": parameter if self._own else parameter.detach().float().clone()}
        self.constants: dict[str, Tensor] = {}

    def take_gradient(self) -> None:
        """Move the parameter's gradient to the variables."""
        if not self._own:
            grad, self.parameter.grad = self.parameter.grad, None
            self.variables[""].grad = None if grad is None else grad.float()

    def write(self) -> None:
        """Write the variables' value into the parameter."""
        if not self._own:
            with torch.no_grad():
                self.parameter.copy_(self.variables[""])


class LowRankUpdate:
    """LoRA (arXiv 2106.09685): W = W0 + B A with A [r, in] and B [out, r], B = 0 at first; W0 [out, in] is frozen.

    A is drawn with variance 1 / in; there is no further scaling: the learning rate does that.
    """

    def __init__(self, parameter: nn.Parameter, rank: int) -> None:
        rows, columns = parameter.shape
        self.parameter = parameter
        device = parameter.device
        a = torch.randn(rank, columns).to(device) / math.sqrt(columns)
        self.variables: dict[str, Tensor] = {"lora_a": a, "lora_b": torch.zeros(rows, rank, device=device)}
        self.constants: dict[str, Tensor] = {"base": parameter.detach().clone()}

    def take_gradient(self) -> None:
        """dW -> dA = B^T dW, dB = dW A^T."""
        grad, self.parameter.grad = self.parameter.grad, None
        if grad is None:
            return
        a, b = self.variables["lora_a"], self.variables["lora_b"]
        a.grad, b.grad = b.T @ grad.float(), grad.float() @ a.T

    def write(self) -> None:
        with torch.no_grad():
            self.parameter.copy_(self.constants["base"].float() + self.variables["lora_b"] @ self.variables["lora_a"])
