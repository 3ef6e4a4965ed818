"""No assumption of NCCL: a backend called hccl, for the device type npu, serves meshes and their collectives."""

from __future__ import annotations

import re
from pathlib import Path

from latentscan.tests.distributed.launch import launch
from latentscan.tests.distributed.test_tensor_parallel import LLAMA, check

ROOT = Path(__file__).parents[2]


def test_a_mesh_on_another_backend_and_device_type_gives_the_same_numbers(tmp_path):
    (whole,) = launch(2, [{**LLAMA, "steps": 1}], tmp_path, worker="hccl_worker")
    check(whole)


def test_no_source_names_nccl():
    for room in ("ir", "passes", "lowering", "runtime", "kernels"):
        for path in (ROOT / room).rglob("*.py"):
            assert not re.search("nccl", path.read_text(encoding="utf-8"), re.IGNORECASE), path
