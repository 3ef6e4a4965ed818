"""The plain-torch state-space references against the token-by-token definition and autograd through it."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from latentscan.kernels.reference import selective, ssm, ssm_conv, ssm_norm

torch.set_num_threads(1)
SSD_NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "init_state")


def ssd_inputs(b=2, L=21, H=4, P=3, G=2, N=5, *, channels=False, absent=(), seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    values = {
        "x": randn(b, L, H, P),
        "dt": randn(b, L, H),
        "A": -torch.rand(H, generator=g, dtype=torch.float64).to(dtype) * 2,
        "B": randn(b, L, G, N),
        "C": randn(b, L, G, N),
        "D": randn(H, P) if channels else randn(H),
        "z": randn(b, L, H, P),
        "dt_bias": randn(H),
        "init_state": randn(b, H, P, N),
    }
    return [None if name in absent else values[name] for name in SSD_NAMES]


def oracle_gradients(function, inputs, grads, *rest, **kwargs):
    """Outputs of ``function`` and the gradients of its inputs, by autograd through the loop."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in inputs]
    outputs = function(*leaves, *rest, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    present = [t for t in leaves if t is not None]
    reached = [i for i, t in enumerate(outputs) if t.requires_grad]
    got = torch.autograd.grad(
        [outputs[i] for i in reached], present, [grads[i] for i in reached], allow_unused=True, materialize_grads=True
    )
    got = iter(got)
    return outputs, [None if t is None else next(got) for t in leaves]


def assert_all_close(actual, expected, names, **tolerance):
    for name, a, e in zip(names, actual, expected, strict=True):
        if e is None:
            assert a.numel() == 0, name
        else:
            torch.testing.assert_close(a, e, msg=lambda m, name=name: f"{name}: {m}", **tolerance)


def check_ssd(inputs, seq_idx=None, cu_seqlens=None, **kwargs):
    g = torch.Generator().manual_seed(1)
    x, init = inputs[0], inputs[-1]
    shape = (x.shape[0], x.shape[2], x.shape[3], inputs[3].shape[-1])
    grads = (torch.randn(x.shape, generator=g, dtype=x.dtype), torch.randn(shape, generator=g, dtype=x.dtype))
    expected, gradients = oracle_gradients(
        ssm.chunk_scan_recurrence, inputs, grads, seq_idx, cu_seqlens, **{**kwargs, "chunk_size": 0}
    )
    actual = ssm.chunk_scan(*inputs, seq_idx, cu_seqlens, **kwargs)
    assert_all_close(actual, expected, ("y", "final_state"), rtol=1e-9, atol=1e-9)
    actual = ssm.chunk_scan_backward(*grads, *inputs, seq_idx, cu_seqlens, **kwargs)
    assert_all_close(actual, gradients, SSD_NAMES, rtol=1e-8, atol=1e-8)
    assert init is None or actual[-1].shape == init.shape


@pytest.mark.parametrize(("length", "chunk"), [(1, 16), (1, 1), (21, 8), (16, 8), (21, 40), (50, 7), (5, 1)])
def test_chunked_ssd_equals_the_recurrence_for_any_length_and_chunk(length, chunk):
    check_ssd(ssd_inputs(L=length), chunk_size=chunk, dt_softplus=True)


@pytest.mark.parametrize(
    "absent", [(), ("D",), ("dt_bias",), ("z",), ("init_state",), ("D", "z", "dt_bias", "init_state")], ids=str
)
@pytest.mark.parametrize("channels", [False, True], ids=["D-per-head", "D-per-channel"])
def test_every_optional_input_may_be_absent(absent, channels):
    check_ssd(ssd_inputs(absent=absent, channels=channels), chunk_size=8, dt_softplus=True, dt_min=0.3, dt_max=1.5)


def test_without_softplus_negative_steps_count_as_zero():
    check_ssd(ssd_inputs(), chunk_size=8, dt_softplus=False)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_ssd_for_random_shapes_and_packings(data):
    draw = data.draw
    G, share = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    b, L = draw(st.integers(2, 3)), draw(st.integers(1, 40))
    sizes = {"P": draw(st.integers(1, 5)), "N": draw(st.integers(1, 5))}
    names = ("D", "z", "dt_bias", "init_state")
    absent = draw(st.sets(st.sampled_from(names)))
    seq_idx = None
    if draw(st.booleans()):
        starts = draw(st.lists(st.booleans(), min_size=b * L, max_size=b * L))
        seq_idx = torch.tensor(starts).reshape(b, L).cumsum(1).int()
    inputs = ssd_inputs(
        b, L, G * share, G=G, **sizes, channels=draw(st.booleans()), absent=absent, seed=draw(st.integers(0, 99))
    )
    check_ssd(inputs, seq_idx, chunk_size=draw(st.integers(1, 50)), dt_softplus=draw(st.booleans()))


def runs(lengths):
    edges = [0, *itertools.accumulate(lengths)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("packing", ["seq_idx", "seq_idx-reused", "cu_seqlens", "cu_seqlens-without-zero", "both"])
@pytest.mark.parametrize("lengths", [(9, 1, 11), (8, 8, 5), (1, 20)], ids=str)
def test_packed_sequences_equal_separate_runs(packing, lengths):
    batch = 1 if packing.startswith("cu") or packing == "both" else 2
    inputs = ssd_inputs(b=batch)
    numbers = [i % 2 if packing == "seq_idx-reused" else i for i in range(len(lengths))]
    seq_idx = torch.tensor([n for n, size in zip(numbers, lengths, strict=True) for _ in range(size)])
    seq_idx = seq_idx.expand(batch, -1).int() if not packing.startswith("cu") else None
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    cu = {"cu_seqlens": cu, "cu_seqlens-without-zero": cu[1:], "both": cu}.get(packing)
    kwargs = {"chunk_size": 8, "dt_softplus": True}
    y, final = ssm.chunk_scan(*inputs, seq_idx, cu, **kwargs)
    for i, run in enumerate(runs(lengths)):
        part = [
            t[:, run] if name in ("x", "dt", "B", "C", "z") else t for name, t in zip(SSD_NAMES, inputs, strict=True)
        ]
        part[-1] = inputs[-1] if i == 0 else None  # the initial state must not leak past the first boundary
        y_run, final_run = ssm.chunk_scan(*part, **kwargs)
        torch.testing.assert_close(y[:, run], y_run)
    torch.testing.assert_close(final, final_run)
    check_ssd(inputs, seq_idx, cu, **kwargs)


def test_large_decay_gives_no_inf_or_nan_in_fp32_or_bf16():
    for dtype in (torch.float32, torch.bfloat16):
        inputs = ssd_inputs(L=300, dtype=dtype)
        inputs[2] = inputs[2] * 1e4
        y, final = ssm.chunk_scan(*inputs, chunk_size=256, dt_softplus=True)
        assert y.dtype == dtype
        assert final.dtype == torch.float32
        grads = ssm.chunk_scan_backward(y, final, *inputs, chunk_size=256, dt_softplus=True)
        assert all(t.isfinite().all() for t in (y, final, *grads))
        assert [t.dtype for t in grads] == [t.dtype for t in inputs]


def test_the_memory_bound_does_not_change_the_result(monkeypatch):
    monkeypatch.setattr(ssm, "_BLOCK_ELEMENTS", 1)
    check_ssd(ssd_inputs(L=40), chunk_size=8, dt_softplus=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": 0}, "chunk_size 0"),
        ({"dt_min": -1.0}, "dt_min -1.0"),
        ({"dt_min": 2.0, "dt_max": 1.0}, "dt_max 1.0"),
    ],
)
def test_bad_options_are_refused_with_their_values(change, message):
    with pytest.raises(ValueError, match=message):
        ssm.chunk_scan(*ssd_inputs(), **{"chunk_size": 8, "dt_softplus": True, **change})


def test_bad_shapes_are_refused_with_their_values():
    with pytest.raises(ValueError, match="4 heads cannot share 3 groups"):
        ssm.chunk_scan(*ssd_inputs(G=3), chunk_size=8)
    with pytest.raises(ValueError, match="2 rows"):
        ssm.chunk_scan(*ssd_inputs(), None, torch.tensor([0, 21]), chunk_size=8)
    with pytest.raises(ValueError, match="seq_idx has shape"):
        ssm.chunk_scan(*ssd_inputs(), torch.zeros(2, 20, dtype=torch.int32), chunk_size=8)


@pytest.mark.parametrize("channels", [False, True], ids=["D-per-head", "D-per-channel"])
def test_decode_steps_continue_the_sequence(channels):
    x, dt, A, B, C, D, z, dt_bias, init = ssd_inputs(channels=channels)
    y, final = ssm.chunk_scan(x, dt, A, B, C, D, z, dt_bias, init, chunk_size=8, dt_softplus=True, dt_max=1.0)
    state = init
    for t in range(x.shape[1]):
        y_t, state = ssm.state_update(
            state, x[:, t], dt[:, t], A, B[:, t], C[:, t], D, z[:, t], dt_bias, dt_softplus=True, dt_max=1.0
        )
        torch.testing.assert_close(y_t, y[:, t])
    torch.testing.assert_close(state, final)


# The selective scan of Mamba-1.

SELECTIVE_NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "init_state")


def selective_inputs(b=2, L=21, D=6, N=3, groups=None, absent=(), seed=0):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    bc = (b, N, L) if groups is None else (b, groups, N, L)
    values = (randn(b, D, L), randn(b, D, L), -randn(D, N).abs(), randn(*bc), randn(*bc))
    values += (randn(D), randn(b, D, L), randn(D), randn(b, D, N))
    return [None if name in absent else t for name, t in zip(SELECTIVE_NAMES, values, strict=True)]


def check_selective(inputs, **kwargs):
    g = torch.Generator().manual_seed(1)
    u = inputs[0]
    grads = (
        torch.randn(u.shape, generator=g, dtype=u.dtype),
        torch.randn(u.shape[0], *inputs[2].shape, generator=g, dtype=u.dtype),
    )
    expected, gradients = oracle_gradients(selective.selective_scan_recurrence, inputs, grads, **kwargs)
    assert_all_close(selective.selective_scan(*inputs, **kwargs), expected, ("y", "final_state"))
    actual = selective.selective_scan_backward(*grads, *inputs, **kwargs)
    assert_all_close(actual, gradients, SELECTIVE_NAMES, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("absent", [(), ("D",), ("z",), ("delta_bias",), ("init_state",)], ids=str)
def test_selective_scan_equals_the_recurrence(softplus, absent):
    check_selective(selective_inputs(absent=absent), delta_softplus=softplus)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 80), st.integers(1, 4), st.integers(0, 99))
def test_selective_scan_for_random_shapes(groups, share, length, d_state, seed):
    inputs = selective_inputs(L=length, D=groups * share, N=d_state, groups=groups, seed=seed)
    check_selective(inputs, delta_softplus=True)


def test_ssd_with_one_channel_per_head_is_the_selective_scan():
    x, dt, A, B, C, D, z, dt_bias, init = ssd_inputs(P=1, G=1)
    y, final = ssm.chunk_scan(x, dt, A, B, C, D, z, dt_bias, init, chunk_size=8, dt_softplus=True)
    y1, final1 = selective.selective_scan(
        x[..., 0].mT, dt.mT, A[:, None].expand(-1, 5), B[:, :, 0].mT, C[:, :, 0].mT, D, z[..., 0].mT, dt_bias,
        init[:, :, 0], delta_softplus=True,
    )  # fmt: skip
    torch.testing.assert_close(y1.mT, y[..., 0])
    torch.testing.assert_close(final1, final[:, :, 0])


def test_decode_steps_of_mamba_1_are_state_updates_with_one_channel_per_head():
    u, delta, A, B, C, D, z, bias, init = selective_inputs()
    y, final = selective.selective_scan(u, delta, A, B, C, D, z, bias, init, delta_softplus=True)
    state = init[:, :, None]
    for t in range(u.shape[2]):
        y_t, state = ssm.state_update(
            state, u[..., t, None], delta[..., t], A, B[:, None, :, t], C[:, None, :, t], D, z[..., t, None], bias,
            dt_softplus=True,
        )  # fmt: skip
        torch.testing.assert_close(y_t[..., 0], y[..., t])
    torch.testing.assert_close(state[:, :, 0], final)


# Convolution.


def conv_oracle(x, weight, bias, init_state, seq_idx=None, activation="none"):
    """The definition, token by token and tap by tap."""
    b, L, D = x.shape
    W = weight.shape[1]
    before = x.new_zeros(b, D, W - 1) if init_state is None else init_state
    line = [*before.unbind(2), *x.unbind(1)]
    index = torch.zeros(b, L, dtype=torch.int64) if seq_idx is None else seq_idx
    index = [*[index[:, 0]] * (W - 1), *index.unbind(1)]

    def same(i, j):  # one sequence from position i to j
        return torch.stack([index[k] == index[j] for k in range(i, j + 1)]).all(0)[:, None]

    def at(i, j):
        return torch.where(same(i, j), line[i], 0.0)

    rows = []
    for t in range(W - 1, W - 1 + L):
        rows.append(sum(at(t - k, t) * weight[:, W - 1 - k] for k in range(W)) + (0 if bias is None else bias))
    y = torch.stack(rows, 1)
    last = L + W - 2
    final = torch.stack([at(i, last) for i in range(L, L + W - 1)], 2) if W > 1 else x.new_zeros(b, D, 0)
    return (F.silu(y) if activation == "silu" else y), final


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_convolution_and_its_gradients_for_random_shapes(data):
    draw = data.draw
    b, L, D, W = draw(st.integers(2, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x, weight, bias, init = (
        torch.randn(*s, generator=g, dtype=torch.float64) for s in ((b, L, D), (D, W), (D,), (b, D, W - 1))
    )
    inputs = [x, weight, bias if draw(st.booleans()) else None, init if draw(st.booleans()) else None]
    seq_idx = None
    if draw(st.booleans()):
        starts = draw(st.lists(st.booleans(), min_size=b * L, max_size=b * L))
        seq_idx = torch.tensor(starts).reshape(b, L).cumsum(1)
    activation = draw(st.sampled_from(["none", "silu"]))
    grads = (torch.randn_like(x), torch.randn_like(init))
    expected, gradients = oracle_gradients(conv_oracle, inputs, grads, seq_idx, activation=activation)
    assert_all_close(ssm_conv.causal_conv1d(*inputs, seq_idx, activation=activation), expected, ("y", "final_state"))
    actual = ssm_conv.causal_conv1d_backward(*grads, *inputs, seq_idx, activation=activation)
    assert_all_close(actual, gradients, ("x", "weight", "bias", "init_state"))


def test_convolution_equals_torch_and_reads_any_strides():
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((2, 13, 29), (13, 4), (13,)))
    y, _ = ssm_conv.causal_conv1d(x[..., 3:24].transpose(1, 2), weight, bias, activation="silu")
    expected = F.silu(F.conv1d(x[..., 3:24], weight[:, None], bias, padding=3, groups=13)[..., :21])
    torch.testing.assert_close(y, expected.transpose(1, 2))
    assert y.is_contiguous()


@pytest.mark.parametrize("kept", [3, 4, 6])
def test_conv_steps_continue_the_sequence(kept):
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((2, 9, 5), (5, 4), (5,)))
    y, _ = ssm_conv.causal_conv1d(x, weight, bias, activation="silu")
    state = x.new_zeros(2, 5, kept)
    for t in range(9):
        y_t, new = ssm_conv.conv_update(x[:, t], state, weight, bias, activation="silu")
        torch.testing.assert_close(y_t, y[:, t])
        assert new.shape == state.shape
        assert new.data_ptr() != state.data_ptr()
        state = new
    torch.testing.assert_close(state, x[:, 9 - kept :].transpose(1, 2))


def test_convolution_refuses_bad_states_and_activations():
    x, weight = torch.zeros(2, 5, 3), torch.zeros(3, 4)
    with pytest.raises(ValueError, match="init_state holds 4 values"):
        ssm_conv.causal_conv1d(x, weight, None, torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="conv_state holds 2 values"):
        ssm_conv.conv_update(x[:, 0], torch.zeros(2, 3, 2), weight)
    with pytest.raises(ValueError, match="'gelu' is not one of none, silu"):
        ssm_conv.causal_conv1d(x, weight, activation="gelu")


# Gated norm.


def norm_oracle(x, z, weight, *, eps, group_size, norm_before_gate):
    gate = 1.0 if z is None else z * torch.sigmoid(z)
    value = x if norm_before_gate else x * gate
    parts = [p * torch.rsqrt((p * p).mean(-1, keepdim=True) + eps) for p in value.split(group_size, -1)]
    out = torch.cat(parts, -1) * weight
    return out * gate if norm_before_gate else out


@pytest.mark.parametrize("gated", [False, True], ids=["no-gate", "gate"])
@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("group_size", [2, 6, 12])
@pytest.mark.parametrize("shape", [(2, 7, 12), (3, 12)], ids=str)
def test_gated_norm_and_its_gradients(gated, norm_before_gate, group_size, shape):
    g = torch.Generator().manual_seed(0)
    x, z, dy = (torch.randn(*shape, generator=g, dtype=torch.float64) for _ in range(3))
    inputs = [x, z if gated else None, torch.randn(12, generator=g, dtype=torch.float64)]
    options = {"eps": 1e-3, "group_size": group_size, "norm_before_gate": norm_before_gate}
    (expected,), gradients = oracle_gradients(norm_oracle, inputs, (dy,), **options)
    torch.testing.assert_close(ssm_norm.gated_rms_norm(*inputs, **options), expected)
    assert_all_close(ssm_norm.gated_rms_norm_backward(dy, *inputs, **options), gradients, ("x", "z", "weight"))


def test_gated_norm_refuses_groups_that_do_not_fit():
    with pytest.raises(ValueError, match="group_size 5 does not divide 12"):
        ssm_norm.gated_rms_norm(
            torch.zeros(2, 12), None, torch.ones(12), eps=1e-6, group_size=5, norm_before_gate=False
        )
