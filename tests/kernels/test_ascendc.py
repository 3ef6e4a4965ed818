"""The AscendC kernels by host semantics: warnings, arithmetic against fp64, and that misuse of buffers is caught."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from latentscan.kernels.ascendc.emit import SOURCES, Shape, chunk_scan_plan, sources, state_update_plan
from latentscan.kernels.reference import ssm
from latentscan.tests.kernels.ascendc_host.host import HERE, HostError, build, run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

# Three roundings to fp16 between the inputs and a result, see tools/ascend_check/numerics.py.
TOLERANCE = 4 * 2.0**-11
SMALL = Shape(4, 32, 2, 16, 16, dt_min=0.01)
# The part of the public interface that the kernels may use.
SUBSET = {
    "Add", "Adds", "Brcb", "CFG_ROW_MAJOR", "Cast", "DataCopy", "DataCopyExtParams", "DataCopyPad",
    "DataCopyPadExtParams", "Div", "Duplicate", "Exp", "Fixpipe", "FixpipeParamsV220", "GetBlockIdx",
    "GetBlockNum", "GlobalTensor", "HardEvent", "Ln", "LoadData", "LoadData2DParams", "LocalTensor", "Max",
    "Maxs", "Min", "Mins", "Mmad", "MmadParams", "Mul", "Muls", "Nd2NzParams", "PipeBarrier", "ReduceSum",
    "RoundMode", "SetFlag", "Sub", "TBuf", "TPipe", "TPosition", "TQue", "WaitFlag",
}  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return build(SMALL, tmp_path_factory.mktemp("ascendc"), None, "-O1")


def exact(value):
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def relative(ours: Tensor, truth: Tensor) -> float:
    assert torch.isfinite(ours).all()
    return float((ours.double() - truth).abs().max() / truth.abs().max())


def scan_inputs(
    s: Shape, b: int, L: int, seed: int, packed: bool = True
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inputs of the plan, and those of the oracle."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    x, z = draw(b, L, s.H, s.P).half(), draw(b, L, s.H, s.P).half()
    B, C = (draw(b, L, s.G, s.N) * s.N**-0.5).half(), (draw(b, L, s.G, s.N) * s.N**-0.5).half()
    dt, A, D, bias = draw(b, L, s.H) * 0.5, -draw(s.H).abs() * 2, draw(s.H, s.P), draw(s.H)
    init = draw(b, s.H, s.P, s.N)
    starts = torch.zeros(b, L)
    if packed and L > 3:
        starts[0, L // 3], starts[-1, L - 1] = 1, 1
    padding = chunk_scan_plan(s, b, L).buffers["x"][0][1] - L
    padded = {k: F.pad(v, (0, 0, 0, 0, 0, padding)) for k, v in {"x": x, "z": z, "B": B, "C": C}.items()}
    given_ = {"dt": F.pad(dt.mT, (0, padding)), "A": A, "bias": bias, "D": D, "start": init}
    truth = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": bias, "init_state": init}
    truth["seq_idx"] = starts.cumsum(1).int()
    if not s.has_d:
        truth.pop("D")
    if not s.has_z:
        truth.pop("z")
    return {**given_, **padded, "starts": F.pad(starts, (0, padding))}, truth


def many_sequences(given_: dict[str, Tensor], truth: dict[str, Tensor], L: int) -> None:
    """Half of the tokens a sequence each, then a long one with small steps, whose decays must not lose their bits."""
    starts = torch.zeros_like(truth["seq_idx"]).float()
    starts[:, 1 : L // 2 + 1] = 1
    for name in ("dt", "dt_bias", "bias"):
        for tensors in (given_, truth):
            if name in tensors:
                tensors[name] = torch.full_like(tensors[name], -2.5)
    truth["seq_idx"] = starts.cumsum(1).int()
    given_["starts"] = F.pad(starts, (0, given_["starts"].shape[1] - L))


def scan_errors(
    library: Path, s: Shape, b: int, L: int, seed: int = 0, change: Callable[..., None] | None = None
) -> tuple[float, float]:
    given_, truth = scan_inputs(s, b, L, seed)
    if change:
        change(given_, truth, L)
    out = run(library, chunk_scan_plan(s, b, L), given_)
    y, last = ssm.chunk_scan(
        **{k: exact(v) for k, v in truth.items()}, chunk_size=s.Q, dt_softplus=s.softplus, dt_min=s.dt_min,
        dt_max=s.dt_max,
    )  # fmt: skip
    return relative(out["y"], y), relative(out["last"], last)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 3), st.integers(1, 70), st.integers(0, 99))
def test_the_scan_equals_fp64(library, b: int, L: int, seed: int):
    assert max(scan_errors(library, SMALL, b, L, seed)) <= TOLERANCE


@pytest.mark.slow
def test_many_packed_sequences_leave_the_decays_their_bits(tmp_path):
    shape = Shape(2, 32, 1, 16, 64)
    library = build(shape, tmp_path, None, "-O1")
    assert max(scan_errors(library, shape, 2, 64, change=many_sequences)) <= TOLERANCE


def test_one_step_equals_fp64(library):
    s, b = SMALL, 3
    g = torch.Generator().manual_seed(1)
    sizes = {
        "state": (b, s.H, s.P, s.N), "x": (b, s.H, s.P), "dt": (b, s.H), "A": (s.H,), "B": (b, s.G, s.N),
        "C": (b, s.G, s.N), "D": (s.H, s.P), "z": (b, s.H, s.P), "bias": (s.H,),
    }  # fmt: skip
    plan = state_update_plan(s, b)
    made = {k: torch.randn(*v, generator=g).to(getattr(torch, plan.buffers[k][1])) for k, v in sizes.items()}
    made["A"] = -made["A"].abs()
    out = run(library, plan, made)
    truth = {("dt_bias" if k == "bias" else k): exact(v) for k, v in made.items()}
    y, new = ssm.state_update(**truth, dt_softplus=True, dt_min=s.dt_min)
    assert relative(out["y"], y) <= TOLERANCE
    assert relative(out["new_state"], new) <= 64 * 2.0**-23


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        Shape.choose(2, 64, 1, 128), Shape.choose(4, 64, 2, 64, has_d=False, softplus=False, dt_max=0.7),
        Shape.choose(2, 128, 1, 128, has_z=False), Shape(2, 48, 1, 80, 32),
    ],
    ids=lambda s: f"P{s.P}-N{s.N}-Q{s.Q}",
)  # fmt: skip
def test_more_shapes_equal_fp64_and_take_the_buffer_that_is_accounted(shape: Shape, tmp_path):
    import ctypes

    library = build(shape, tmp_path)
    loaded = ctypes.CDLL(str(library))
    given_, _ = scan_inputs(shape, 1, 5, 0)
    loaded.forget()
    run(library, chunk_scan_plan(shape, 1, 5), given_)
    counted = shape.unified_buffer()
    assert loaded.most_unified_buffer() == max(counted[k] for k in ("decay", "weights", "output"))
    assert max(scan_errors(library, shape, 2, 2 * shape.Q + 37)) <= TOLERANCE


SABOTAGES = {
    "overrun of a local tensor": (
        "AscendC::Exp(decay, decay, Q * Q);", "AscendC::Exp(decay, decay, Q * Q + 8);", "overrun",
    ),
    "misalignment": (
        "AscendC::Add(total, total, state, Q * P);", "AscendC::Add(total, total, state[1], Q * P - 8);", "alignment",
    ),
    "overrun of a global tensor": (
        "static_cast<uint32_t>(Least(Q, t.tokens - c * Q)), P,\n                H * P);",
        "Q, P,\n                H * P);", "overrun",
    ),
    "race": (
        "      VectorThenScalar();\n      for (uint32_t row = 0; row < Q; ++row) AscendC::Muls(wide",
        "      for (uint32_t row = 0; row < Q; ++row) AscendC::Muls(wide", "race",
    ),
    "overlap": (
        "AscendC::Add(b[by * LANES], a[by * LANES], a[0], (Q - by) * LANES);",
        "AscendC::Add(a[by * LANES], a[by * LANES], a[0], (Q - by) * LANES);", "overlap",
    ),
    "a load that is read before its queue passed it on": (
        "      score = score_in.DeQue<float>();\n", "", "race: a vector source of what the loads wrote",
    ),
    "a store that does not wait for what is stored": (
        "      made = weight_out.DeQue<half>();\n", "", "race: a store of what the vector pipe wrote",
    ),
    "a product of fractals that have not come": (
        "    right = b2.template DeQue<half>();\n", "", "race: Mmad of what the loads to L0 wrote",
    ),
    "Fixpipe before the product": (
        "    product = c1.template DeQue<float>();\n", "", "race: Fixpipe of what the cube wrote",
    ),
    "use after it was freed": (
        "      AscendC::Exp(decay, cum_t, Q);\n      cum_in.FreeTensor(cum_t);\n",
        "      cum_in.FreeTensor(cum_t);\n      AscendC::Exp(decay, cum_t, Q);\n",
        "a vector source of a freed buffer",
    ),
    "a load beside the queues": (
        "      AscendC::DataCopy(vector[Q], steps[at], Q);\n",
        "      AscendC::DataCopy(vector[Q], steps[at], Q);\n"
        "      AscendC::DataCopy(vectors.Get<float>()[0], cums[at], Q);\n", "in no queue",
    ),
    "a buffer that is not freed": ("      score_in.FreeTensor(score);\n", "", "queue"),
    "vector work on a cube core": (
        "KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);\n  latentscan::Carry",
        "KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);\n  latentscan::Carry", "wrong core",
    ),
    "a fractal that is not turned": ("load.ifTranspose = !TB;", "load.ifTranspose = TB;", ""),
}  # fmt: skip
FAST = ("overrun of a local tensor", "misalignment")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in SABOTAGES])
def test_an_injected_fault_is_caught(name: str, tmp_path):
    old, new, expected = SABOTAGES[name]
    library = build(SMALL, tmp_path, {"chunk_scan.cpp": (old, new)}, "-O0")
    if expected:
        with pytest.raises(HostError, match=expected):
            scan_errors(library, SMALL, 2, 3 * SMALL.Q + 5)
    else:
        assert max(scan_errors(library, SMALL, 2, 3 * SMALL.Q + 5)) > 10 * TOLERANCE


@pytest.mark.slow
def test_a_warning_or_too_large_a_tile_stops_the_build(tmp_path):
    with pytest.raises(HostError, match="unused variable"):
        build(SMALL, tmp_path / "warning", {"common.h": ("  Tiling tiling;\n", "  Tiling tiling;\n  int unused;\n")})
    large = Shape(2, 128, 1, 128, 128)
    assert "weights needs" in str(large.refusal())
    with pytest.raises(HostError, match="weights: the tiles overflow the unified buffer"):
        build(SMALL, tmp_path / "large", {"shape.h": ("uint32_t Q = 16", "uint32_t Q = 128")})


@pytest.mark.slow
def test_the_host_counts_the_unified_buffer_itself(tmp_path):
    library = build(SMALL, tmp_path, None, "-O0", "-DLATENTSCAN_UB_BYTES=4096")
    with pytest.raises(HostError, match="capacity: UB needs"):
        scan_errors(library, SMALL, 1, 20)


def test_the_kernels_know_nothing_of_the_host():
    """What the host header has beyond the public interface is no part of what a kernel may be written with."""
    for name in SOURCES:
        text = re.sub(r"//.*", "", (HERE.parents[2] / "kernels" / "ascendc" / name).read_text())
        assert not re.search(r"host::|\.data\b|\.memory\b|\.Aligned\(|\.Within\(|\.In\(", text), name


def test_the_kernels_use_the_declared_interface_alone():
    files = sources(SMALL)
    text = "\n".join(files[name] for name in SOURCES)
    used = set(re.findall(r"AscendC::(\w+)", text))
    assert used <= SUBSET, used - SUBSET
    assert {"Mmad", "LoadData", "Fixpipe", "Exp", "DataCopy"} <= used
    assert set(re.findall(r"#include [<\"]([\w.]+)", text)) <= {"kernel_operator.h", "shape.h", "common.h"}
    host = (HERE / "kernel_operator.h").read_text()
    missing = [name for name in used if not re.search(rf"\b{name}\b", host)]
    assert missing == []


def test_a_shape_that_does_not_fit_is_refused_with_its_values():
    with pytest.raises(ValueError, match="head_dim 40"):
        sources(Shape(2, 40, 1, 16, 16))
    with pytest.raises(ValueError, match="3 heads cannot share 2 groups"):
        sources(Shape(3, 32, 2, 16, 16))
    assert Shape.choose(80, 64, 1, 128).Q == 64
