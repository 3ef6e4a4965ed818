"""The chunk scan's kernels against the fp64 definition under Triton's interpreter, in one process of their own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from latentscan.kernels.triton import chunk_common
from latentscan.kernels.triton import chunk_scan as ours
from latentscan.kernels.triton.chunk_configs import (
    A100,
    H200,
    Backward,
    Forward,
    backward_config,
    forward_config,
    hopper_config,
)
from latentscan.kernels.triton.chunk_scan_backward import chunks_a_segment

FAST = (
    "shipped", "small tiles", "half precision", "one token", "odd sizes, D per channel", "nothing optional", "limits",
    "seq_idx", "cu_seqlens", "cu_seqlens without 0", "views of one line", "extreme A and dt",
    "three heads a group in runs of two",
)  # fmt: skip

# fp16: operands of every product are rounded to 2^-11; two roundings a product, and sums of signs by chance.
# fp32: what a packing costs, 160 a boundary in the running sum of a chunk, of which fp32 keeps 2^-24.
TOLERANCE = {"half": 4 * 2**-11, "single": 1e-4}


def run(which: str) -> dict[str, dict[str, float]]:
    command = [sys.executable, "-W", "ignore", "-m", "latentscan.tests.kernels.chunk_scan_interpreted", which]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, float]]:
    return run("fast")


def check(found: dict[str, float]) -> None:
    allowed = TOLERANCE["half" if found.pop("floor") > 1e-5 else "single"]
    assert found.pop("changed") == 0, "a second backward gave other bits"
    floors = {name: found.pop(f"floor {name}", 0.0) for name in list(found) if not name.startswith("floor")}
    wrong = {name: e for name, e in found.items() if not e <= max(allowed, 8 * floors[name])}
    assert not wrong, f"above {allowed}: {wrong}"


@pytest.mark.parametrize("case", FAST)
def test_outputs_and_all_gradients_are_those_of_the_definition(told, case):
    check(dict(told[case]))


def test_no_case_of_the_worker_is_left_unread(told):
    assert set(told) == {*FAST, "sabotage", "wide view", "pieces"}


def test_leaving_out_any_kernel_is_noticed(told):
    assert set(told["sabotage"]) == {
        "prep_kernel", "scores_kernel", "states_kernel", "carry_kernel", "output_kernel", "walk_kernel",
        "chunk_kernel", "groups_kernel", "sums_kernel", "steps_kernel",
    }  # fmt: skip
    unnoticed = {k: e for k, e in told["sabotage"].items() if not (math.isnan(e) or e > 0.01)}
    assert not unnoticed


def test_a_view_with_2_to_the_31_elements_between_tokens_reads_the_same(told):
    assert told["wide view"]["different"] == 0


def test_states_are_carried_over_pieces_however_they_cut_the_units(told):
    assert len(told["pieces"]) == 7
    assert all(e < 1e-5 for e in told["pieces"].values()), told["pieces"]


@pytest.mark.slow
def test_random_shapes_packings_and_tiles():
    told = run("slow")
    assert len(told) == 30
    for case in told.values():
        check(dict(case))


def meta(b=1, L=4096, H=80, P=64, G=1, N=128, dtype=torch.bfloat16) -> dict[str, Any]:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    f32 = torch.float32
    return {
        "x": empty(b, L, H, P), "dt": empty(b, L, H), "A": empty(H, dtype=f32), "B": empty(b, L, G, N),
        "C": empty(b, L, G, N), "D": empty(H, dtype=f32), "dt_bias": empty(H, dtype=f32),
    }  # fmt: skip


@pytest.fixture
def launches(monkeypatch):
    """(name, grid) of what is launched, on meta tensors."""
    found: list[tuple[str, int]] = []
    monkeypatch.setattr(chunk_common, "recorder", lambda kernel, grid, args, kw: found.append((kernel.__name__, grid)))
    return found


def test_more_than_65535_heads_times_batch_lie_along_one_axis(launches):
    ins = meta(b=2, L=33, H=70_000, P=16, N=16)
    y, state = ours.chunk_scan(**ins, chunk_size=64, config=Forward())
    grads = ours.chunk_scan_backward(y, state, **ins, chunk_size=64, config=Backward())
    assert [g.shape for g in grads[:5]] == [ins[n].shape for n in ("x", "dt", "A", "B", "C")]
    assert dict(launches)["output_kernel"] == 140_000
    assert all(isinstance(grid, int) and 0 < grid < 2**31 for _, grid in launches)


def test_the_states_alive_at_once_stay_in_the_workspace(launches, monkeypatch):
    held: list[int] = []
    make = torch.empty

    def empty(*args, **kwargs):
        t = make(*args, **kwargs)
        held.append(t.numel() * t.element_size())
        return t

    ins = meta(L=32_768)
    dy = torch.empty_like(ins["x"])
    monkeypatch.setattr(torch, "empty", empty)
    ours.chunk_scan_backward(dy, None, **ins, chunk_size=64)
    gradients = sum(ins[n].numel() * 2 for n in ("x", "dt", "B", "C"))
    # Two copies of the states of a segment, those before the segments, decays, and what is summed later.
    assert sum(held) - gradients < 170 << 20
    assert sum(held) < 500 << 20


def test_a_segment_is_as_long_as_the_workspace_allows():
    s = chunk_common.Sizes(1, 32_768, 80, 64, 1, 128, 64)
    states = 80 * 64 * 128
    chunks = chunks_a_segment(s, 2, 116 << 20)
    assert states * (4 * chunks + 4 * -(-s.NC // chunks)) <= 116 << 20
    assert chunks_a_segment(s, 2, 1 << 40) == s.NC
    assert 1 < chunks_a_segment(s, 2, 1) < 64  # nothing fits: what needs least
    assert chunks_a_segment(chunk_common.Sizes(2, 1, 4, 16, 1, 16, 64), 4, 1) == 1


@pytest.mark.parametrize("device", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_shipped_tiles_are_powers_of_two_that_products_can_take(device, dtype):
    for P in (16, 32, 64, 128, 256):
        for N in (16, 32, 64, 128, 256):
            f = forward_config(P, N, dtype, 80, 512, device)
            b = backward_config(P, N, dtype, 80, device)
            tiles = (
                f.chunk,
                f.out_p,
                f.state_p,
                f.state_n,
                b.chunk,
                b.block_p,
                b.group_p,
                b.group_n,
                b.walk_p,
                b.walk_n,
            )
            assert all(t >= 16 and t & (t - 1) == 0 for t in tiles), (P, N, f, b)


def test_pieces_keep_every_processor_at_work_or_the_shared_inputs_in_cache():
    assert hopper_config(40, 20 << 20, H200).pieces == 132
    assert hopper_config(40, 80 << 20, H200).pieces == 120  # three a unit
    assert hopper_config(100, 80 << 20, H200).pieces == 100
    assert hopper_config(300, 80 << 20, H200).pieces == 132
    for units in range(1, 300):
        for shared in (1 << 20, 80 << 20):
            k = hopper_config(units, shared, H200)
            assert 0 < k.pieces <= 132 and 1 <= k.state_parts <= 4
    assert hopper_config(40, 20 << 20, H200).state_parts == 1  # 2.7B at 32 768 tokens: sharing only costs
    assert hopper_config(64, 80 << 20, H200).state_parts == 2  # Nemotron-H


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"P": 257}, "head_dim 257"),
        ({"G": 3}, "80 heads cannot share 3 groups"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused_with_its_values(change, message):
    with pytest.raises(ValueError, match=message):
        ours.chunk_scan(**meta(**change), chunk_size=64)


def test_bad_options_are_refused_with_their_values():
    with pytest.raises(ValueError, match="chunk_size 0"):
        ours.chunk_scan(**meta(), chunk_size=0)
    with pytest.raises(ValueError, match="dt_min -1"):
        ours.chunk_scan(**meta(), chunk_size=1, dt_min=-1.0)
    with pytest.raises(ValueError, match="seq_idx has shape"):
        ours.chunk_scan(**meta(), chunk_size=1, seq_idx=torch.zeros(1, 7, dtype=torch.int32))
    with pytest.raises(ValueError, match="2 rows"):
        ours.chunk_scan(**meta(b=2), chunk_size=1, cu_seqlens=torch.tensor([0, 7]))


def test_gluon_is_for_versions_that_the_kernels_were_compiled_with(monkeypatch):
    import triton

    monkeypatch.setattr(triton, "__version__", "3.7.1")
    assert ours.gluon_works()
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    assert not ours.gluon_works()
