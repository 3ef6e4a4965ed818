"""What surrounds the Gluon backward's walks, against fp64: the walks are stood in for under Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

import torch

from latentscan.kernels.triton import chunk_configs, chunk_scan
from latentscan.kernels.triton.chunk_configs import Backward, Forward, Hopper, HopperBackward
from latentscan.kernels.triton.chunk_scan_backward_gluon import segment_chunks, segments_back


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    module = "latentscan.tests.kernels.interpreted_chunk_backward"
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_everything_but_the_walks_is_exact(found):
    for name, errors in found.items():
        if not {"x", "A"} - set(errors) and name != "shipped" and "sabotage" not in name:
            # fp32 sums of up to 777 tokens; ddt_bias is the sum of what cancels.
            assert {k: e for k, e in errors.items() if not e < (1e-4 if k == "dt_bias" else 1e-5)} == {}, name


def test_what_is_taken_for_rounding_costs_less_than_the_bar(found):
    assert all(e < 1e-2 for e in found["shipped"].values())
    assert found["shipped"]["A"] > 1e-4, "nothing was taken away: this test no longer sees it"


def test_states_that_the_forward_kept_are_not_found_again(found):
    assert found["ends without what was kept"] == {"forward": 0, "back": 1}
    assert found["sabotage: what was kept is of others"]["C"] > 1e-4


def test_a_segment_of_more_elements_than_32_bits_count_is_written(found):
    assert found["more elements than 32 bits count"] == {"written": 1024}


@pytest.mark.parametrize("wrong", [{"every": 1}, {"every": 6}, {"every": 0}, {"pieces": 0}, {"atomic": "no"}])
def test_a_choice_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HopperBackward(**wrong)


def hopper(monkeypatch):
    monkeypatch.setattr(chunk_configs.Device, "of", staticmethod(lambda device: chunk_configs.H200))
    monkeypatch.setattr(chunk_scan, "gluon_works", lambda: True)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 0)


def test_the_form_does_not_depend_on_how_tensors_lie(monkeypatch):
    """A saved tensor may come back as another layout (off the device and back): the backward takes the same form."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    hopper(monkeypatch)
    with FakeTensorMode():

        def empty(b, length, heads, width, row=0, rows=0):
            row = row or heads * width
            strides = (rows or length) * row, row, width, 1
            return torch.empty_strided((b, length, heads, width), strides, dtype=torch.bfloat16, device="cuda")

        B = empty(2, 8192, 1, 128)
        odd = empty(2, 8192, 80, 64, row=80 * 64 + 4)  # rows of no multiple of 16 bytes
        for x in (empty(2, 8192, 80, 64, rows=9000), odd, empty(2, 8192, 80, 64)):
            laid, *_ = chunk_scan._laid_out(x, B, B, None, None)
            assert type(chunk_scan.choose_forward(laid, B, B, None, None)) is Hopper
            assert type(chunk_scan.choose_backward(laid, B, B, None, None, laid)) is HopperBackward
        assert type(chunk_scan.choose_forward(odd, B, B, None, None)) is Forward
        wide = empty(2, 8200, 80, 64)  # rows that copies cannot see as one: no copy helps
        assert chunk_scan._laid_out(wide, B, B, None, None)[0] is wide
        few = empty(1, 32768, 40, 64), empty(1, 32768, 10, 128)
        assert not chunk_scan.choose_backward(few[0], few[1], few[1], None, None, few[0]).atomic


@pytest.fixture
def told(monkeypatch):
    """A call of the backward in Gluon -> (the choice, the states) that it is told."""
    from latentscan.kernels.triton import chunk_scan_backward_gluon as gluon

    seen: list[Any] = []

    def backward(*args):
        seen.append(args[9:11])
        return (None,) * 9

    monkeypatch.setattr(gluon, "refusal", lambda *_: None)
    monkeypatch.setattr(gluon, "backward", backward)
    x, B, A = torch.randn(1, 64, 2, 64), torch.randn(1, 64, 1, 64), -torch.ones(2)

    def call(config, starts=None):
        chunk_scan.chunk_scan_backward(x, None, x, x[..., 0], A, B, B, chunk_size=64, config=config, starts=starts)
        return seen.pop()

    return call


def test_a_fixed_order_is_taken_where_it_is_asked_for(told):
    def run(**more):
        return told(HopperBackward(**more))[0].atomic

    assert run() and not run(atomic=False)
    torch.use_deterministic_algorithms(True)
    try:
        assert not run()
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_was_kept_is_used_for_the_forwards_own_pieces_only(monkeypatch, told):
    kept = torch.randn(7, 2, 64, 64)
    for forward, used in ((Hopper(pieces=7), True), (Hopper(pieces=8), False), (Forward(), False)):
        monkeypatch.setattr(chunk_scan, "choose_forward", lambda *_, chosen=forward: chosen)
        assert (told(HopperBackward(pieces=7), kept)[1] is kept) == used
    x, B, A = torch.randn(1, 64, 2, 64), torch.randn(1, 64, 1, 64), -torch.ones(2)
    with pytest.raises(ValueError, match="keep_starts"):
        chunk_scan.chunk_scan(x, x[..., 0], A, B, B, chunk_size=64, config=Forward(), keep_starts=True)


def test_a_warm_up_calls_forward_and_backward_of_every_length(found):
    assert found["warm_up"] == {"calls": 4}


@pytest.mark.parametrize("fault", ["nothing flows across chunks", "the flow is not counted on"])
def test_a_flow_that_is_left_out_is_seen(found, fault):
    errors = found[f"sabotage: {fault}"]
    assert errors["A"] > 1e-2
    assert errors["dt"] > 1e-3


@pytest.mark.parametrize("chunks", [2, 6, 12, 512, 2048])
@pytest.mark.parametrize("segments", [0, 1, 3])
def test_segments_are_whole_windows_and_fit(chunks, segments):
    every, room = HopperBackward().every, 76
    got = segment_chunks(chunks, room, segments, every)
    assert got % every == 0
    count = -(-chunks // got)
    if segments:
        assert count <= segments
    else:
        assert got <= room + every
        assert got >= chunks or got * 2 + every > room


@given(
    chunks=st.integers(1, 3000).map(lambda n: 2 * n), most=st.integers(0, 300), every=st.sampled_from([2, 4, 8, 16]),
    kept=st.none() | st.sampled_from([0.5, 0.25, 0.125]), slab=st.just(0.0) | st.floats(0.4, 2.0),
)  # fmt: skip
def test_a_segment_back_never_writes_where_states_are_kept(chunks, most, every, kept, slab):
    spans = segments_back(chunks, most, kept, slab, every)
    assert [a for a, _ in spans] == [a + n for a, n in spans[1:]] + [0]
    assert spans[0][0] + spans[0][1] == chunks
    for first, here in spans:
        assert here > 0 and first % every == 0
        windows = -(-(first + here) // every)
        if kept is not None:
            # States up to the segment's end lie before it, or it is the first, whose states are moved away.
            assert first == 0 or windows * every * kept <= first
        else:
            assert here <= max(most, every) + every


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "dtype", "kind"),
    [
        (1, 2048, 80, torch.bfloat16, HopperBackward),
        (1, 1024, 80, torch.bfloat16, Backward),  # too few chunks for all processors
        (40, 256, 16, torch.bfloat16, HopperBackward),
        (1, 32768, 80, torch.bfloat16, HopperBackward),
        (40, 200, 16, torch.bfloat16, Backward),  # rows that copies cannot see as one
        (1, 32768, 80, torch.float32, Backward),
    ],
)
def test_gluon_is_chosen_where_it_fits_and_there_is_work_for_it(monkeypatch, batch, tokens, heads, dtype, kind):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(chunk_configs.Device, "of", staticmethod(lambda device: chunk_configs.H200))
    monkeypatch.setattr(chunk_scan, "gluon_works", lambda: True)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 0)
    with FakeTensorMode():
        x = torch.empty(batch, tokens, heads, 64, dtype=dtype, device="cuda")
        B = torch.empty(batch, tokens, 1, 128, dtype=dtype, device="cuda")
        chosen = chunk_scan.choose_backward(x, B, B, None, None, x)
        assert type(chosen) is kind
        if isinstance(chosen, HopperBackward):
            assert chosen.every == (8 if tokens >= 8192 else 4)
        monkeypatch.setattr(chunk_configs.Device, "of", staticmethod(lambda device: chunk_configs.A100))
        assert type(chunk_scan.choose_backward(x, B, B, None, None, x)) is Backward
