"""Public faults of convolutions, decode steps and packed sequences (CASES 5, 7, 8, 9, 11, 14), against fp64."""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

import pytest
import torch

from latentscan.ir.errors import RefusedError
from latentscan.ir.ops.functional import causal_conv1d, state_update
from latentscan.kernels.reference import ssm
from latentscan.tests.runtime.helpers import distance, pair, tokens


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def by_hand(x: torch.Tensor, weight: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """The convolution of each sequence of one row by its definition, token by token."""
    width = weight.shape[1]
    y = torch.zeros_like(x)
    for start, end in pairwise(bounds):
        for t in range(start, end):
            for lag in range(min(width, t - start + 1)):
                y[:, t] += weight[:, width - 1 - lag] * x[:, t - lag]
    return y


@pytest.mark.parametrize("width", [2, 3, 4])
def test_case_7_strides_that_are_no_multiples_of_8_and_packed_sequences(width):
    wide = random(1, 13, 23)
    x, weight = wide[..., 5:12], random(7, width)  # 7 channels of rows of 23
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3]])
    torch.testing.assert_close(causal_conv1d(x, weight, seq_idx=seq_idx), by_hand(x, weight, [0, 2, 6, 7, 13]))
    torch.testing.assert_close(causal_conv1d(x, weight), by_hand(x, weight, [0, 13]))


def test_case_8_a_missing_seq_idx_leaks_and_a_given_one_does_not():
    model, eager = pair("mamba2", "")
    ids = tokens(1, 15)
    positions = torch.cat([torch.arange(6), torch.arange(9)])[None]
    with torch.no_grad():
        apart = torch.cat([eager(ids[:, :6], use_cache=False).logits, eager(ids[:, 6:], use_cache=False).logits], 1)
        leaking = model(input_ids=ids, use_cache=False).logits
        told = model(input_ids=ids, position_ids=positions).logits  # all that a default collator says
    assert distance(told, apart) < 1e-5
    assert distance(leaking, apart) > 1e-3


def test_case_8_where_nothing_can_be_told_it_is_refused():
    model, _ = pair("mamba", "")
    with pytest.raises(RefusedError, match="would leak"):
        model(input_ids=tokens(1, 8), seq_idx=torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]]))


@pytest.mark.parametrize("D", [None, (3,), (3, 4)], ids=["no D", "D per head", "D per channel"])
@pytest.mark.parametrize("bias", [False, True])
def test_case_9_the_single_step_is_the_scan_of_one_token(D, bias):
    x, dt, A = random(2, 3, 4), random(2, 3), -random(3).abs()
    B, C, state = random(2, 1, 5), random(2, 1, 5, seed=1), random(2, 3, 4, 5)
    D, dt_bias = None if D is None else random(*D), random(3, seed=2) if bias else None
    y, new = state_update(state, x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=True)
    row = [t[:, None] for t in (x, dt, B, C)]
    want, final = ssm.chunk_scan_recurrence(
        row[0], row[1], A, row[2], row[3], D, None, dt_bias, state, dt_softplus=True, dt_min=0.0, dt_max=float("inf")
    )
    torch.testing.assert_close(y, want[:, 0])
    torch.testing.assert_close(new, final)


@pytest.mark.parametrize("length", [1, 2])
def test_case_11_a_shard_shorter_than_the_filter_has_the_whole_gradient(length):
    """A row cut in shards that hand their last inputs on: gradients of the first shard pass through its final state."""
    x, weight = random(2, 5, 3), random(3, 4)
    grad = random(2, 5, 3, seed=3)
    whole = x.clone().requires_grad_()
    causal_conv1d(whole, weight).backward(grad)
    cut = x.clone().requires_grad_()
    state, parts = None, []
    for start in range(0, 5, length):
        y, state = causal_conv1d(cut[:, start : start + length], weight, init_state=state, return_final_state=True)
        parts.append(y)
    torch.cat(parts, 1).backward(grad)
    torch.testing.assert_close(cut.grad, whole.grad)


def test_case_14_nothing_is_tuned_at_the_first_call():
    pytest.importorskip("triton")
    from triton.runtime.autotuner import Autotuner

    for name in ("causal_conv1d", "gated_rms_norm", "state_update", "selective_scan", "selective_scan_backward"):
        module: Any = importlib.import_module(f"latentscan.kernels.triton.{name}")
        assert not [v for v in vars(module).values() if isinstance(v, Autotuner)], name
