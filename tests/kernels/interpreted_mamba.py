"""The Mamba Triton kernels against the fp64 references, under Triton's interpreter.

Not collected by itself: the interpreter is chosen when triton is first imported, so `test_triton_mamba.py` runs this
file with pytest in processes of their own, where TRITON_INTERPRET is set.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from latentscan.kernels.reference import selective, ssm, ssm_conv, ssm_norm
from latentscan.kernels.triton import causal_conv1d as conv
from latentscan.kernels.triton import gated_rms_norm as norm
from latentscan.kernels.triton import selective_scan as scan
from latentscan.kernels.triton import selective_scan_backward as scan_backward
from latentscan.kernels.triton import state_update as update

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_triton_mamba.py"

# Relative to the largest value: rounding of the stored dtype, and fp32 sums of some hundred terms of both signs.
# (The interpreter cuts bf16 off instead of rounding it.)
ROUNDING = {torch.float32: 2**-23, torch.float16: 2**-11, torch.bfloat16: 2**-7}
SUMS = 64 * 2**-23


@pytest.fixture(autouse=True, scope="module")
def short_blocks() -> Iterator[None]:
    """Short runs: the interpreter takes a millisecond for what a GPU does at once."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FORWARD", "FORWARD_MORE"):
            patch.setattr(conv, name, {"BL": 16, "NB": 2, "BD": 16, "num_warps": 1})
        patch.setattr(conv, "BACKWARD", {"S": 4, "T": 8, "BD": 16, "num_warps": 1})
        patch.setattr(scan_backward, "CHUNK", 16)
        yield


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + sum(shape) + len(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def exact(values: Any) -> list[Any]:
    return [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values]


def assert_near(got: Any, want: Any) -> None:
    """Outputs near the fp64 ones, of the same shape, all finite; empty ones are empty in both."""
    got, want = ((v,) if isinstance(v, Tensor) else v for v in (got, want))
    assert len(got) == len(want)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape, index
        if b.numel():
            bound = (ROUNDING[a.dtype] + SUMS) * b.abs().max().clamp(min=1e-3)
            error = (a.double() - b).abs().max()
            assert error <= bound, (index, float(error), float(bound))


def strided(x: Tensor, left: int, right: int) -> Tensor:
    """The same values as a slice of a wider row, the rest NaN."""
    wide = torch.full((*x.shape[:-1], left + x.shape[-1] + right), float("nan"), dtype=x.dtype)
    wide[..., left : left + x.shape[-1]] = x
    return wide[..., left : left + x.shape[-1]]


# --- convolution -----------------------------------------------------------------------------------------------------


def conv_inputs(
    batch: int, length: int, channels: int, width: int, *, bias: bool = True, init: bool = True, packed: bool = False,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    seq_idx = None
    if packed:
        seq_idx = (torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < 0.3).int().cumsum(1)
    return (
        strided(random(batch, length, channels, seed=seed, dtype=dtype), 3, 2),
        random(channels, width, seed=seed + 1, dtype=dtype),
        random(channels, seed=seed + 2, dtype=dtype) if bias else None,
        random(batch, channels, width - 1, seed=seed + 3, dtype=dtype) if init else None,
        seq_idx,
    )


def check_conv(inputs: tuple[Any, ...], activation: str, *, dy: bool = True, dfinal: bool = True) -> None:
    x, weight, *_ = inputs
    want = ssm_conv.causal_conv1d(*exact(inputs), activation=activation)
    assert_near(conv.causal_conv1d(*inputs, activation=activation), want)
    grads = (
        random(*x.shape, seed=7, dtype=x.dtype) if dy else None,
        random(x.shape[0], x.shape[2], weight.shape[1] - 1, seed=8, dtype=x.dtype) if dfinal else None,
    )
    want = ssm_conv.causal_conv1d_backward(*exact(grads), *exact(inputs), activation=activation)
    assert_near(conv.causal_conv1d_backward(*grads, *inputs, activation=activation), want)


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 37])
def test_conv_widths_and_lengths(width, length):
    check_conv(conv_inputs(2, length, 5, width), "silu")
    check_conv(conv_inputs(2, length, 5, width, packed=True), "silu")
    check_conv(conv_inputs(1, length, 5, width, bias=False, init=False), "none")


@pytest.mark.slow
def test_conv_several_blocks_of_tokens_and_channels(monkeypatch):
    for name in ("FORWARD", "FORWARD_MORE"):
        monkeypatch.setattr(conv, name, {"BL": 4, "NB": 2, "BD": 4, "num_warps": 1})
    monkeypatch.setattr(conv, "BACKWARD", {"S": 2, "T": 4, "BD": 4, "num_warps": 1})
    for packed in (False, True):
        check_conv(conv_inputs(2, 29, 10, 4, packed=packed), "silu")
    check_conv(conv_inputs(2, 29, 10, 3, init=False), "silu", dfinal=False)
    check_conv(conv_inputs(2, 8, 10, 4, packed=True), "none", dy=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_conv_in_16_bits(dtype):
    check_conv(conv_inputs(2, 20, 9, 4, dtype=dtype, packed=True), "silu")


@pytest.mark.slow
def test_conv_of_channels_first_memory():
    x, *rest = conv_inputs(2, 20, 9, 4)
    check_conv((x.transpose(1, 2).contiguous().transpose(1, 2), *rest), "silu")


@pytest.mark.slow
@settings(max_examples=12)
@given(st.data())
def test_conv_of_any_shape(data):
    sizes = [data.draw(st.integers(1, n)) for n in (3, 45, 9)]
    flags = {name: data.draw(st.booleans()) for name in ("bias", "init", "packed")}
    check_conv(conv_inputs(*sizes, data.draw(st.integers(2, 4)), **flags), data.draw(st.sampled_from(["none", "silu"])))


def test_conv_of_one_row_of_sequences_is_that_of_each_alone():
    x, weight, bias, _, _ = conv_inputs(1, 17, 6, 4)
    ends = [0, 1, 3, 10, 17]
    seq_idx = torch.tensor([[k for k in range(4) for _ in range(ends[k], ends[k + 1])]])
    packed, _ = conv.causal_conv1d(x, weight, bias, None, seq_idx, activation="silu")
    alone = [conv.causal_conv1d(x[:, a:b], weight, bias, activation="silu")[0] for a, b in pairwise(ends)]
    assert torch.equal(packed, torch.cat(alone, 1))
    leaky, _ = conv.causal_conv1d(x, weight, bias, activation="silu")  # what the check would see without boundaries
    assert not torch.equal(leaky, packed)


def test_gradients_are_written_where_they_belong():
    x, weight, bias, _, _ = conv_inputs(2, 20, 5, 4)
    dy, wide = random(2, 20, 5, seed=7), torch.full((2, 20, 12), float("nan"))
    want = conv.causal_conv1d_backward(dy, None, x, weight, bias, activation="silu")
    got = conv.causal_conv1d_backward(dy, None, x, weight, bias, activation="silu", out=wide[..., 5:10])
    assert all(map(torch.equal, got, want))
    options = {"eps": 0.1, "group_size": 5, "norm_before_gate": False}
    want = norm.gated_rms_norm_backward(dy, x, x.flip(1), weight[:, 0], **options)
    got = norm.gated_rms_norm_backward(dy, x, x.flip(1), weight[:, 0], **options, out=wide[..., :5])
    assert all(map(torch.equal, got, want))
    assert torch.equal(wide[..., :5], want[1])
    assert wide[..., 10:].isnan().all()


def test_conv_gradient_of_a_wrong_filter_is_seen():
    inputs = conv_inputs(2, 20, 5, 4)
    wrong = (inputs[0], inputs[1].flip(1), *inputs[2:])
    dy = random(2, 20, 5, seed=7)
    got = conv.causal_conv1d_backward(dy, None, *wrong, activation="silu")
    want = ssm_conv.causal_conv1d_backward(dy.double(), None, *exact(inputs), activation="silu")
    with pytest.raises(AssertionError):
        assert_near(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("more", [0, 1, 3])
def test_conv_update(width, more):
    x, weight, bias = random(3, 10), random(10, width), random(10, seed=1)
    state = strided(random(3, 10, width - 1 + more), 1, 1)
    for activation, b in (("silu", bias), ("none", None)):
        want = ssm_conv.conv_update(x.double(), state.double(), *exact((weight, b)), activation=activation)
        assert_near(conv.conv_update(x, state, weight, b, activation=activation), want)
        own = state.clone()
        y, new = conv.conv_update(x, own, weight, b, activation=activation, inplace=True)
        assert new is own
        assert_near((y, own), want)


def test_conv_update_of_some_rows_of_a_pool():
    x, weight, pool, rows = random(3, 10), random(10, 4), random(5, 10, 4), torch.tensor([4, -1, 1])
    before = pool.clone()
    y, _ = conv.conv_update(x, pool, weight, activation="silu", inplace=True, state_indices=rows)
    live = torch.tensor([0, 2])
    want = ssm_conv.conv_update(x[live].double(), before[rows[live]].double(), weight.double(), activation="silu")
    assert_near((y[live], pool[rows[live]]), want)
    assert torch.equal(pool[[0, 2, 3]], before[[0, 2, 3]])
    assert not y[1].any()
    with pytest.raises(ValueError, match="inplace"):
        conv.conv_update(x, pool, weight, state_indices=rows)


def test_conv_refuses_what_it_does_not_compute():
    x, weight, _, init, _ = conv_inputs(2, 5, 6, 4)
    for call, message in (
        (lambda: conv.causal_conv1d(x, random(6, 5)), "width 5"),
        (lambda: conv.causal_conv1d(x, weight, activation="gelu"), "gelu"),
        (lambda: conv.causal_conv1d(x.double(), weight), "fp64"),
        (lambda: conv.causal_conv1d(x, weight, None, init[..., 1:]), "holds 2 values"),
        (lambda: conv.causal_conv1d(x, weight, None, None, torch.zeros(2, 4)), "seq_idx"),
        (lambda: conv.conv_update(x[:, 0], init[..., 1:], weight), "holds 2 values"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_conv_narrow_and_wide_packed_and_not():
    check_conv(conv_inputs(2, 19, 5, 2), "silu")
    check_conv(conv_inputs(2, 19, 5, 4, packed=True), "silu")
    check_conv(conv_inputs(1, 1, 5, 3, bias=False, init=False), "none")


# --- norm ------------------------------------------------------------------------------------------------------------


def check_norm(shape: tuple[int, ...], group: int, first: bool, gated: bool, dtype: torch.dtype, seed: int = 0) -> None:
    x = strided(random(*shape, seed=seed, dtype=dtype), 1, 2)
    z = strided(random(*shape, seed=seed + 1, dtype=dtype), 4, 0) if gated else None
    weight, dy = random(shape[-1], seed=seed + 2), random(*shape, seed=seed + 3, dtype=dtype)
    options = {"eps": 0.1, "group_size": group, "norm_before_gate": first}
    assert_near(
        norm.gated_rms_norm(x, z, weight, **options), ssm_norm.gated_rms_norm(*exact((x, z, weight)), **options)
    )
    want = ssm_norm.gated_rms_norm_backward(*exact((dy, x, z, weight)), **options)
    assert_near(norm.gated_rms_norm_backward(dy, x, z, weight, **options), want)


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("channels", "group"), [(24, 24), (24, 8), (21, 7), (40, 1)])
def test_norm_orders_and_groups(first, gated, channels, group):
    check_norm((2, 5, channels), group, first, gated, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norm_in_16_bits(dtype):
    check_norm((2, 7, 24), 12, False, True, dtype)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 20), st.booleans(), st.booleans())
def test_norm_of_any_shape(rows, groups, group, first, gated):
    check_norm((2, rows, groups * group), group, first, gated, torch.float32)


def test_norm_both_orders():
    check_norm((2, 5, 24), 8, False, True, torch.float32)
    check_norm((2, 5, 21), 7, True, True, torch.float16)


def test_norm_with_more_rows_than_programs(monkeypatch):
    monkeypatch.setattr(norm, "_PROGRAMS", 3)
    more = {"STAGES": 1, "AGAIN": False}
    sizes = {"BR": 2, "BD": 16, "num_warps": 1}
    monkeypatch.setattr(norm, "block_sizes", lambda *_, backward, **__: {**sizes, **more} if backward else sizes)
    check_norm((3, 7, 32), 16, False, True, torch.float32)


@pytest.mark.parametrize("room", [0, 1 << 17])
def test_norm_of_a_wide_row_that_is_read_again_or_ahead(monkeypatch, room):
    monkeypatch.setattr(norm, "WIDE", 8)
    monkeypatch.setattr(norm, "room_of", lambda device: room)
    sizes = norm.block_sizes(24, backward=True, row=12, weight=4, room=room)
    assert (sizes["AGAIN"], sizes["STAGES"]) == ((True, 1) if room == 0 else (False, 3))
    for first in (False, True):
        check_norm((2, 5, 48), 24, first, True, torch.float32)


def test_norm_without_a_gradient_and_bad_groups():
    x, w = random(2, 3, 8), random(8)
    options = {"eps": 0.1, "group_size": 8, "norm_before_gate": False}
    assert not any(g.any() for g in norm.gated_rms_norm_backward(None, x, x, w, **options))
    with pytest.raises(ValueError, match="does not divide"):
        norm.gated_rms_norm(x, None, w, **{**options, "group_size": 3})


def test_norm_of_the_wrong_order_is_seen():
    x, z, w = random(2, 3, 8), random(2, 3, 8, seed=1), random(8)
    got = norm.gated_rms_norm(x, z, w, eps=0.1, group_size=8, norm_before_gate=True)
    with pytest.raises(AssertionError):
        assert_near(got, ssm_norm.gated_rms_norm(*exact((x, z, w)), eps=0.1, group_size=8, norm_before_gate=False))


# --- decode step -----------------------------------------------------------------------------------------------------


def update_inputs(
    batch: int, heads: int, dim: int, groups: int, states: int, *, a_states: bool = False, D: str = "head",
    z: bool = True, bias: bool = True, dtype: torch.dtype = torch.float32,
) -> tuple[Any, ...]:  # fmt: skip
    skips = {"head": random(heads, seed=1), "channel": random(heads, dim, seed=1), "none": None}
    return (
        random(batch, heads, dim, states),
        strided(random(batch, heads * dim, dtype=dtype), 3, 1).unflatten(1, (heads, dim)),
        random(batch, heads, dtype=dtype),
        -random(*((heads, states) if a_states else (heads,))).abs(),
        strided(random(batch, groups * states, dtype=dtype), 1, 0).unflatten(1, (groups, states)),
        random(batch, groups, states, seed=2, dtype=dtype),
        skips[D],
        random(batch, heads, dim, seed=3, dtype=dtype) if z else None,
        random(heads, seed=4) if bias else None,
    )


@pytest.mark.slow
@pytest.mark.parametrize("D", ["head", "channel", "none"])
@pytest.mark.parametrize(("z", "bias"), [(True, True), (False, False)])
@pytest.mark.parametrize("shape", [(2, 4, 6, 2, 5), (3, 6, 1, 2, 7), (2, 5, 1, 1, 16), (1, 3, 70, 1, 40)])
def test_state_update(shape, D, z, bias):
    for a_states in (False, True):
        inputs = update_inputs(*shape, a_states=a_states, D=D, z=z, bias=bias)
        for options in (
            {"dt_softplus": True},
            {"dt_softplus": False, "dt_min": 0.1, "dt_max": 0.5},
        ):
            assert_near(update.state_update(*inputs, **options), ssm.state_update(*exact(inputs), **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_state_update_in_16_bits_and_in_place(dtype):
    state, *rest = update_inputs(2, 4, 6, 2, 5, dtype=dtype)
    want = ssm.state_update(*exact((state, *rest)), dt_softplus=True)
    y, new = update.state_update(state, *rest, dt_softplus=True, inplace=True)
    assert new is state
    assert_near((y, state), want)


@pytest.mark.parametrize("shape", [(4, 4, 6, 2, 5), (4, 6, 1, 2, 7)])
def test_state_update_of_some_rows_of_a_pool(shape):
    _, *rest = update_inputs(*shape)
    pool, rows = random(7, *shape[1:3], shape[4]), torch.tensor([6, -1, 0, 2], dtype=torch.int32)
    before, live = pool.clone(), torch.tensor([0, 2, 3])
    y, _ = update.state_update(pool, *rest, dt_softplus=True, inplace=True, state_indices=rows)
    alone = [t[live] if i not in (2, 5, 7) and t is not None else t for i, t in enumerate(rest)]
    want = ssm.state_update(before[rows[live].long()].double(), *exact(alone), dt_softplus=True)
    assert_near((y[live], pool[rows[live].long()]), want)
    assert torch.equal(pool[[1, 3, 4, 5]], before[[1, 3, 4, 5]])
    assert not y[1].any()
    with pytest.raises(ValueError, match="inplace"):
        update.state_update(pool, *rest, state_indices=rows)


def test_state_update_forgets_nothing_silently():
    """Large steps: exp underflows to an exact zero, nothing overflows (vLLM PR 37501)."""
    state, x, dt, A, *rest = update_inputs(2, 4, 6, 2, 5)
    inputs = (state, x, dt * 1e4, A * 1e4, *rest)
    assert_near(update.state_update(*inputs, dt_softplus=True), ssm.state_update(*exact(inputs), dt_softplus=True))


def test_state_update_of_both_kinds_of_heads():
    for shape, D in (((2, 4, 6, 2, 5), "channel"), ((3, 6, 1, 2, 7), "head")):
        inputs = update_inputs(*shape, D=D)
        assert_near(update.state_update(*inputs, dt_softplus=True), ssm.state_update(*exact(inputs), dt_softplus=True))


# --- selective scan --------------------------------------------------------------------------------------------------


def scan_inputs(
    batch: int, channels: int, length: int, states: int, groups: int | None = None, *, D: bool = True, z: bool = True,
    bias: bool = True, init: bool = True, dtype: torch.dtype = torch.float32, last: bool = True,
) -> tuple[Any, ...]:  # fmt: skip
    """``last``: channels last in memory, as a model has them."""

    def place(t: Tensor) -> Tensor:
        return strided(t.transpose(-1, -2), 2, 1).transpose(-1, -2) if last else t

    mixed = (batch, states, length) if groups is None else (batch, groups, states, length)
    return (
        place(random(batch, channels, length, dtype=dtype)),
        place(random(batch, channels, length, seed=1, dtype=dtype)),
        -random(channels, states).abs() * 2,
        place(random(*mixed, seed=2, dtype=dtype)),
        place(random(*mixed, seed=3, dtype=dtype)),
        random(channels, seed=4) if D else None,
        place(random(batch, channels, length, seed=5, dtype=dtype)) if z else None,
        random(channels, seed=6) if bias else None,
        random(batch, channels, states, seed=7) if init else None,
    )


def check_scan(inputs: tuple[Any, ...], *, softplus: bool = True, dy: bool = True, dfinal: bool = True) -> None:
    u, A = inputs[0], inputs[2]
    want = selective.selective_scan(*exact(inputs), delta_softplus=softplus)
    assert_near(scan.selective_scan(*inputs, delta_softplus=softplus), want)
    grads = (
        random(*u.shape, seed=8, dtype=u.dtype) if dy else None,
        random(u.shape[0], *A.shape, seed=9) if dfinal else None,
    )
    want = selective.selective_scan_backward(*exact(grads), *exact(inputs), delta_softplus=softplus)
    assert_near(scan_backward.selective_scan_backward(*grads, *inputs, delta_softplus=softplus), want)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 37])
def test_scan_lengths(length):
    check_scan(scan_inputs(2, 6, length, 5))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_scan_groups_and_blocks_of_channels(groups):
    check_scan(scan_inputs(2, 74, 5, 3, groups))


@pytest.mark.slow
@pytest.mark.parametrize("given_names", [(), ("D",), ("z",), ("bias",), ("init",)])
def test_scan_without_optional_inputs(given_names):
    flags = {name: name in given_names for name in ("D", "z", "bias", "init")}
    check_scan(scan_inputs(2, 6, 9, 4, **flags), dfinal="init" in given_names)


@pytest.mark.slow
def test_scan_several_chunks_and_programs(monkeypatch):
    monkeypatch.setattr(scan_backward, "CHUNK", 4)
    monkeypatch.setattr(scan_backward, "_SCRATCH", 4 * 4 * 4 * 32 * 3)
    monkeypatch.setattr(scan.Sizes, "chunk", lambda *_: 8)
    check_scan(scan_inputs(2, 6, 29, 4))
    check_scan(scan_inputs(2, 6, 29, 4, init=False, last=False), dfinal=False)
    check_scan(scan_inputs(2, 6, 29, 4, z=False), dy=False)


@pytest.mark.slow
def test_scan_chunks_change_nothing_but_rounding(monkeypatch):
    inputs = scan_inputs(2, 6, 40, 4)
    results = []
    for chunk in (8, 16, 64):
        monkeypatch.setattr(scan.Sizes, "chunk", lambda *_, chunk=chunk: chunk)
        results.append(scan.selective_scan(*inputs, delta_softplus=True))
    for other in results[1:]:
        assert_near(other, [t.double() for t in results[0]])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scan_in_16_bits(dtype):
    check_scan(scan_inputs(2, 6, 11, 4, dtype=dtype))


def test_scan_of_a_ragged_length():
    check_scan(scan_inputs(2, 6, 19, 5))
    check_scan(scan_inputs(1, 6, 1, 4, 2, D=False, z=False, bias=False, init=False), dfinal=False)


def test_scan_without_softplus():
    u, delta, *rest = scan_inputs(2, 6, 11, 4, bias=False)
    check_scan((u, delta.abs(), *rest), softplus=False)


@pytest.mark.slow
@settings(max_examples=5)
@given(st.integers(1, 2), st.integers(1, 9), st.integers(1, 20), st.integers(1, 6), st.booleans())
def test_scan_of_any_shape(batch, channels, length, states, flag):
    check_scan(scan_inputs(batch, channels, length, states, D=flag, z=not flag, init=flag))


def test_scan_over_extreme_steps_is_finite():
    u, delta, A, *rest = scan_inputs(2, 6, 11, 4)
    check_scan((u, delta * 50, A * 100, *rest))


def test_scan_gradient_of_a_lost_gate_is_seen():
    inputs = scan_inputs(2, 6, 11, 4)
    dy = random(2, 6, 11, seed=8)
    lost = (*inputs[:6], torch.zeros_like(inputs[6]), *inputs[7:])
    got = scan_backward.selective_scan_backward(dy, None, *lost, delta_softplus=True)
    want = selective.selective_scan_backward(dy.double(), None, *exact(inputs), delta_softplus=True)
    with pytest.raises(AssertionError):
        assert_near(got, want)


# --- all of them -----------------------------------------------------------------------------------------------------


def test_offsets_beyond_32_bits(monkeypatch):
    """A view whose strides pass 2^31 elements (m#1015): addresses are computed, nothing is read."""
    batch, channels, length = 2, 3, 3
    row, token = 3 << 30, 5 << 28
    span = row + (length - 1) * token + channels
    storage = torch.empty(span, dtype=torch.float16, device="meta").untyped_storage()
    assert storage.nbytes() > 2**32
    seen: list[int] = []

    from triton.runtime import interpreter

    original = interpreter.interpreter_builder.create_masked_load

    def load(ptrs: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        offsets = ptrs.data.astype("int64")[mask.data.astype(bool)]
        seen.extend(int(o) for o in offsets.ravel())
        nothing = copy.copy(mask)
        nothing.data = mask.data & False  # there is no memory
        return original(ptrs, nothing, *args, **kwargs)

    x = torch.empty(1, dtype=torch.float16).as_strided((1, 1, 1), (row, token, 1))
    base = x.data_ptr()
    monkeypatch.setattr(interpreter.interpreter_builder, "create_masked_load", load)
    w = torch.ones(channels, 2, dtype=torch.float16)
    y = torch.empty(batch, length, channels, dtype=torch.float16)
    final = torch.empty(batch, channels, 1, dtype=torch.float16)
    conv._forward_kernel[(batch,)](
        x, w, w, w, w, y, final, length, channels, row, token, 1, 2, 1, 0, 0, 0, 0, 0,
        W=2, ACTIVE=False, HAS_BIAS=False, HAS_INIT=False, HAS_SEQ=False, BL=4, NB=1, BD=4, num_warps=1,
    )  # fmt: skip
    wanted = {base + 2 * (b * row + t * token + d) for b in range(2) for t in range(3) for d in range(3)}
    assert wanted <= set(seen)
    assert max(wanted) - base > 2**32
