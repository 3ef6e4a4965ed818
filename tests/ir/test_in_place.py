"""Writes in place: what reads a node reads what it is at that point."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from latentscan.ir.capture import capture
from latentscan.ir.errors import RefusedError
from latentscan.ir.graph import is_impure
from latentscan.runtime.wrap import wrap

CLIP = 0.05


class Writing(nn.Module):
    """One linear map and a function that writes into what it gave."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x), x)


def clamped(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y.clamp_(-0.1, 0.1)
    return y.view(-1, 3) * 2


def chained(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    before = y * 3
    y += x
    y.mul_(2)
    return before + y.tanh_()


def read_through_a_view(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    view = y.view(-1, 3)
    y.clamp_(-0.1, 0.1)
    return view * 2


def into_the_input(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    z = x.view(-1)
    z.mul_(2)
    return y + x


@pytest.mark.parametrize(
    ("function", "left"), [(clamped, 0), (chained, 0), (read_through_a_view, 1), (into_the_input, 1)]
)
def test_writes_become_values_where_nothing_else_sees_them(function, left):
    torch.manual_seed(0)
    model, x = Writing(function).double(), torch.randn(4, 6, dtype=torch.float64)
    graph = capture(model, inputs={"x": x})
    assert sum(is_impure(n) for n in graph.nodes) == left
    weights = {w.placeholder: model.get_parameter(w.path) for w in graph.weights.values()}
    given = [weights.get(n.name) for n in graph.nodes if n.op == "placeholder"]
    tensors = [n for n in graph.nodes if n.op == "placeholder" and isinstance(graph.value(n), torch.Tensor)]
    inputs = {n: x.clone() for n in tensors if n.name not in weights}
    sizes = iter(x.shape)
    arguments = [
        w if w is not None else inputs[n] if n in inputs else next(sizes)
        for w, n in zip(given, [n for n in graph.nodes if n.op == "placeholder"], strict=True)
    ]
    (found,) = graph.module(*arguments)
    assert torch.equal(found, model(x.clone()))


def clipped() -> Any:
    """A model that clamps queries, keys and values in place, at a bound that most of them pass."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.OlmoConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, clip_qkv=CLIP, pad_token_id=0, eos_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    return transformers.OlmoForCausalLM(config).double()


def test_low_rank_sees_that_a_clamp_is_in_the_way():
    with pytest.raises(RefusedError, match="clamp"):
        wrap(clipped(), "mha-to-mla{rank=56,rope_dim=8}", calibration=torch.randint(3, 100, (8, 48)))


@pytest.mark.parametrize("pipeline", ["mla-zero-memory", "mha-to-mla,latent-cache"])
def test_gradients_through_a_clamp_are_right(pipeline):
    one = clipped().train()
    model, ids = wrap(copy.deepcopy(one), pipeline), torch.randint(3, 100, (2, 9))
    for m in (one, model):
        m(ids, labels=ids, use_cache=False).loss.backward()
    for name, wanted in one.named_parameters():
        found = dict(model.named_parameters()).get(name)
        if found is not None:
            assert torch.allclose(found.grad, wanted.grad, rtol=1e-9, atol=1e-12), name
