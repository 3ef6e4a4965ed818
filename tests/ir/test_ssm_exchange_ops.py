"""The ops of context parallelism: registered soundly, and shards put together give the scan of the whole sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from latentscan.ir.ops import ssm, ssm_exchange
from latentscan.kernels.reference.ssm import chunk_scan_recurrence
from latentscan.kernels.reference.ssm_exchange import chunk_state, state_output

torch.set_num_threads(1)
B, L, H, P, G, N = 2, 7, 4, 3, 2, 5
SCAN = {"dt_softplus": True, "dt_min": 0.0, "dt_max": float("inf")}
SHAPES = {
    "chunk_state": ((B, L, H, P), (B, L, H), (H,), (B, L, G, N), (H,)),
    "state_output": ((B, L, G, N), (B, L, H), (H,), (B, H, P, N), (H,)),
}


def inputs(name: str, *, grad: bool = False) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in SHAPES[name]]
    tensors[2] = -tensors[2].abs()
    packed = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 3, 3, 3, 3]], dtype=torch.int32)
    return [t.requires_grad_(grad) for t in tensors] + [packed]


@pytest.mark.parametrize("name", SHAPES)
def test_opcheck(name):
    for args in (inputs(name, grad=True), inputs(name, grad=True)[:4]):
        result = torch.library.opcheck(getattr(ssm_exchange, name).op, tuple(args), SCAN)
        assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_against_finite_differences(name):
    op = getattr(ssm_exchange, name).op
    *args, packed = [t.mul_(0.5) if t.is_floating_point() else t for t in inputs(name)]
    args = [t.requires_grad_() for t in args]
    for last in (packed, None):
        assert torch.autograd.gradcheck(lambda *a, last=last: op(*a, last, **SCAN), args, fast_mode=True)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_shards_give_the_scan_of_the_whole(data):
    """MATH 6 in one process: local scans from zero, states folded over the shards, their output added."""
    shards, batch = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    lengths = [data.draw(st.integers(1, 9)) for _ in range(shards)]
    groups = data.draw(st.sampled_from([1, 2]))
    heads, width, states = (
        groups * data.draw(st.integers(1, 2)),
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 4)),
    )
    packed, total = data.draw(st.booleans()), sum(lengths)
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    x, dt, bias, A = draw(batch, total, heads, width), draw(batch, total, heads), draw(heads), -draw(heads).exp()
    Bs, Cs, init = (
        draw(batch, total, groups, states),
        draw(batch, total, groups, states),
        draw(batch, heads, width, states),
    )
    seq_idx = (torch.rand(batch, total, generator=g) < 0.3).long().cumsum(1) if packed else None
    y, final = chunk_scan_recurrence(x, dt, A, Bs, Cs, None, None, bias, init, seq_idx, **SCAN)
    h, start, got = init, 0, []
    for length in lengths:
        part = slice(start, start + length)
        here = None if seq_idx is None else seq_idx[:, part]
        state, decay = chunk_state(x[:, part], dt[:, part], A, Bs[:, part], bias, here, **SCAN)
        if seq_idx is not None and start:
            h = h * (seq_idx[:, start] == seq_idx[:, start - 1])[:, None, None, None]
        own, _ = ssm.chunk_scan.op(
            x[:, part], dt[:, part], A, Bs[:, part], Cs[:, part], None, None, bias, None, here, chunk_size=4, **SCAN
        )
        got.append(own + state_output(Cs[:, part], dt[:, part], A, h, bias, here, **SCAN))
        h, start = decay[..., None, None] * h + state, start + length
    bound = 1e-12 * (1 + total)
    assert (torch.cat(got, 1) - y).abs().max() <= bound * (1 + y.abs().max())
    assert (h - final).abs().max() <= bound * (1 + final.abs().max())
