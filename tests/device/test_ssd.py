"""The chunk scan's numbers on a GPU; times and tables are made by ``python -m latentscan.tests.device.ssd_device``."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from latentscan.kernels.triton.chunk_configs import Hopper
from latentscan.tests.device.ssd_device import NUMERICS
from latentscan.tests.kernels.chunk_scan_checks import errors

# bf16: the bar for gradients, a few roundings of 2^-9 a product. fp16: 2^-11. fp32: the bar, with packed sums.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 4 * 2**-11, torch.float32: 1e-4}


@pytest.mark.device("cuda")
@pytest.mark.parametrize("name", NUMERICS)
def test_outputs_and_gradients_are_those_of_the_definition_and_of_every_run(name):
    case = NUMERICS[name]
    if isinstance(case.forward, Hopper) and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Gluon kernels are for Hopper")
    found = errors(case, "cuda", repeat=True, condition=True)
    # dA and ddt_bias sum over all tokens and may nearly cancel: then the inputs' last bits move them more than the bar.
    loose = {k.removeprefix("floor "): found.pop(k) for k in list(found) if k.startswith("floor d")}
    floor, changed = found.pop("floor"), found.pop("changed")
    assert changed == 0
    if case.dtype != torch.float32:
        assert found["y"] <= 2 * floor
    wrong = {k: e for k, e in found.items() if not e <= max(TOLERANCE[case.dtype], 8 * loose.get(k, 0.0))}
    assert not wrong
