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
