"""``latentscan bench ssd``: what can be known of it without a GPU."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from latentscan.ir.errors import KernelError
from latentscan.tools import bench_ssd
from latentscan.tools.cli import BAD_INPUT, main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [(), ("--json",), ("--seq", "64")])
def test_without_a_gpu_it_ends_with_status_2_and_one_line(capsys, arguments):
    assert main(["bench", "ssd", *arguments]) == BAD_INPUT
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.strip().count("\n") == 0 and "no CUDA device" in out.err


@pytest.mark.parametrize("arguments", [("ssm",), ("ssd", "--shape", "80,64"), ("ssd", "--shape", "80,64,3,128")])
def test_a_wrong_name_or_shape_is_bad_input_that_is_named(capsys, arguments):
    assert main(["bench", *arguments]) == BAD_INPUT
    assert arguments[-1].split(",")[0] in capsys.readouterr().err


def test_shapes_are_named_or_four_numbers():
    assert bench_ssd.parse_shape("mamba2-2.7b") == (80, 64, 1, 128)
    assert bench_ssd.parse_shape("4,16,2,24") == (4, 16, 2, 24)
    for wrong in ("4,16,2,257", "0,1,1,1", "a,b,c,d"):
        with pytest.raises(KernelError):
            bench_ssd.parse_shape(wrong)


def test_the_byte_floor_is_the_measured_anchor():
    ins = bench_ssd.inputs(1, 8, 80, 64, 1, 128, device="cpu")
    moved, flops = bench_ssd.floors(ins, backward=False)
    # x, y: 2 H P; B, C: 2 G N; dt: H; two bytes each.
    assert moved == 8 * 2 * (2 * 80 * 64 + 2 * 128 + 80)
    assert flops == 2 * 8 * (64 * (80 * 64 + 128) + 2 * 80 * 64 * 128)
    more = bench_ssd.floors(ins, backward=True)
    assert more[0] > 2 * moved and more[1] > 3 * flops


def test_the_table_shows_every_row_and_a_peer_that_failed():
    row = {"what": "latentscan", "pass": "forward", "ms": 0.4, "eager_ms": 0.5, "peak_mib": 363.0}
    floors = {"byte_floor_ms": 0.16, "flop_floor_ms": 0.2, "of_bandwidth": 0.4, "of_flops": 0.5}
    data = {
        "schema": 1, "device": "a GPU", "torch": "2", "shape": "s", "heads": 1, "head_dim": 2, "groups": 3,
        "d_state": 4, "batch": 1, "seq": 5, "bandwidth_tb_s": 4.2, "bf16_tflop_s": 600.0, "error": {"y": 0.002},
        "rows": [{**row, **floors}, {**row, "what": "peer"}, {"what": "other", "pass": "both", "failed": "Oops: no"}],
    }  # fmt: skip
    json.dumps(data)
    out = io.StringIO()
    bench_ssd.show(data, Console(file=out, width=160))
    text = out.getvalue()
    assert "0.400" in text and "40%" in text and "peer" in text and "Oops: no" in text and "2.0e-03" in text
