"""The Ascend kernels on an NPU. Never run yet: no NPU was there. Skipped with what is missing."""

from __future__ import annotations

import pytest
import torch

from latentscan.lowering.npu import missing
from latentscan.tools.ascend_check.numerics import Case, cases

LACKS = missing()
pytestmark = [pytest.mark.device, pytest.mark.skipif(bool(LACKS), reason=f"no Ascend NPU: {'; '.join(LACKS)}")]


def on_the_npu(case: Case) -> dict[str, float]:
    """The errors of a case whose tensors are on the NPU; the oracle's stay on the CPU."""

    def ours(*arguments, **options):
        moved = [a.to("npu") if isinstance(a, torch.Tensor) else a for a in arguments]
        out = case.ours(*moved, **options)
        return out.cpu() if isinstance(out, torch.Tensor) else tuple(t.cpu() for t in out)

    return Case(case.name, ours, case.oracle, case.arguments, case.options, case.tolerance, case.most).errors()


@pytest.mark.parametrize("case", [] if LACKS else cases(), ids=lambda case: case.name)
def test_a_kernel_equals_fp64_on_the_npu(case: Case):
    errors = on_the_npu(case)
    assert max(errors.values()) <= case.tolerance, errors


def test_a_wrapped_model_runs_on_the_npu():
    import latentscan
    from latentscan.runtime.tiny import build

    model = build("mamba2").half().to("npu")
    ids = torch.ones(2, 70, dtype=torch.long, device="npu")
    with torch.no_grad():
        before = model(ids).logits
        latentscan.wrap(model, "", target="ascend")
        after = model(ids).logits
    assert torch.allclose(before, after, atol=2e-2)
