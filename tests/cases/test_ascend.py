"""Public bug reports of Ascend kernels (CASES 39), as small tests of tiles and launches; no NPU is needed."""

from __future__ import annotations

import pytest
import torch

from latentscan.kernels.triton_ascend import launch as launching
from latentscan.kernels.triton_ascend.chunk_scan import chunk_scan
from latentscan.kernels.triton_ascend.launch import Kernel
from latentscan.kernels.triton_ascend.tiles import CHIPS, ChunkTiles, DecodeTiles
from latentscan.tools.ascend_check.shipped import controls


def test_tiles_that_overflow_the_unified_buffer_are_known_before_the_compiler():
    """sgl-project/sglang#25330. The compiler's own verdict on the same tiles: make check-ascend."""
    chip = CHIPS["910B3"]
    assert ChunkTiles(256, 64, 128, heads=8).excess(chip, backward=False) == "scan: ub needs 388 KiB, 910B3 has 192"
    assert "token: ub" in str(ChunkTiles(128, 64, 128, heads=8).excess(chip, backward=True))
    assert DecodeTiles(64, 128, 512, 64).footprint().excess(chip) == "ub needs 864 KiB, 910B3 has 192"
    assert {c.name for c in controls() if c.reason} == {"scan with chunks of 256", "fused kernel, strided dt"}


def test_a_million_tokens_are_started_within_the_limit_of_a_launch():
    """vllm-ascend PR 11656: more units than the device starts; every pointer is a tensor, also of what is not given."""
    with torch.device("meta"):
        x, B = torch.empty(1, 1 << 20, 80, 64).half(), torch.empty(1, 1 << 20, 1, 128).half()
        dt, A = torch.empty(1, 1 << 20, 80), torch.empty(80)
    seen: list[tuple[str, int, int]] = []

    def record(kernel: Kernel, programs: int, arguments: dict) -> None:
        assert all(value is not None for value in arguments.values())
        seen.append((kernel.name, arguments["first"], programs))

    before, launching.runner = launching.runner, record
    try:
        chunk_scan(x, dt, A, B, B, chunk_size=256)
    finally:
        launching.runner = before
    scans = [(first, programs) for name, first, programs in seen if name == "scan_kernel"]
    assert max(programs for _, _, programs in seen) <= launching.MOST_PROGRAMS == 65535
    assert sum(programs for _, programs in scans) == (1 << 20) // 128 * 80
    assert [first for first, _ in scans] == [65535 * i for i in range(len(scans))]
    assert len(scans) == 11


@pytest.mark.parametrize("stride", [1 << 25, 1 << 40])
def test_rows_that_32_bits_cannot_reach_are_copied(stride):
    """The offset of a token within its chunk is 32 bits wide, so a chunk that spans more elements is copied."""
    from latentscan.kernels.triton_ascend.chunk_scan import rows

    with torch.device("meta"):
        x = torch.empty(1).as_strided((1, 128, 2, 32), (0, stride, 32, 1))
    assert (rows(x, 128).stride(1) == 64) == (128 * stride >= 1 << 31)
    assert rows(x, 32).stride(1) == (64 if 32 * stride >= 1 << 31 else stride)


@pytest.mark.parametrize("stride", [1 << 24, 1 << 40])
def test_heads_and_keys_that_32_bits_cannot_reach_are_copied(stride):
    """One query token of a long prefill: its heads lie as far apart as the prefill is long."""
    from latentscan.kernels.triton_ascend.latent_decode import _near

    with torch.device("meta"):
        q = torch.empty(1).as_strided((1, 128, 64), (0, stride, 1))
    assert _near(q, 127).stride(1) == (stride if stride == 1 << 24 else 64)
    assert _near(q, 128).stride(1) == 64


def _million() -> list[tuple[str, int, dict]]:
    """Every launch of every function of the target at a million tokens, with nothing optional given."""
    from latentscan.kernels.triton_ascend import chunk_scan_backward, latent_decode, mixer

    L, seen = 1 << 20, []
    with torch.device("meta"):
        x, B = torch.empty(1, L, 80, 64).half(), torch.empty(1, L, 1, 128).half()
        dt, A, wide = torch.empty(1, L, 80), torch.empty(80), torch.empty(1, L, 5376).half()
        q, r = torch.empty(64, 128, 1, 512).half(), torch.empty(64, 128, 1, 64).half()
        latent, k = torch.empty(64, L, 512).half(), torch.empty(64, 1, L, 64).half()
        taps, weight, state = torch.empty(5376, 4).half(), torch.empty(5376).half(), torch.empty(9999, 80, 64, 128)
        step, one, group = torch.empty(9999, 80, 64).half(), torch.empty(9999, 80), torch.empty(9999, 1, 128).half()
    before = launching.runner
    launching.runner = lambda kernel, programs, arguments: seen.append((kernel.name, programs, arguments))
    try:
        chunk_scan_backward.chunk_scan_backward(x, None, x, dt, A, B, B, chunk_size=256)
        latent_decode.latent_decode(q, r, latent, k, scale=1.0)
        mixer.causal_conv1d(wide, taps)
        mixer.gated_rms_norm(wide, None, weight, eps=1e-5, group_size=5376, norm_before_gate=False)
        mixer.state_update(state, step, one, A, group, group)
    finally:
        launching.runner = before
    return seen


def test_every_kernel_keeps_the_limit_and_has_no_optional_pointer():
    seen = _million()
    assert max(programs for _, programs, _ in seen) == launching.MOST_PROGRAMS
    assert all(value is not None for _, _, arguments in seen for value in arguments.values())
    split = {name for name, _, arguments in seen if arguments["first"] > 0}
    assert split >= {"conv_kernel", "norm_kernel", "update_kernel", "token_kernel", "state_kernel", "kept_kernel"}
    assert {name for name, _, _ in seen} >= {
        "pair_kernel",
        "group_kernel",
        "step_kernel",
        "split_kernel",
        "join_kernel",
    }


def test_the_limit_is_of_the_launch(monkeypatch):
    """Sabotage: without the split the limit is broken."""
    monkeypatch.setattr(launching, "MOST_PROGRAMS", 1 << 40)
    assert max(programs for _, programs, _ in _million()) > 65535
