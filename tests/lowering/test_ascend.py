"""Target ascend: what is missing is told at once, launches keep the device's limit, the vendor's ops are used."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
import types

import pytest
import torch

from latentscan.ir.errors import KernelError, PipelineError
from latentscan.kernels.reference import attention as ref
from latentscan.kernels.triton_ascend.launch import Kernel, launch
from latentscan.kernels.triton_ascend.tiles import BACKWARD, CHIPS, DECODE, FORWARD, ChunkTiles, chunk_tiles
from latentscan.lowering import ascend, ascend_vendor, npu
from latentscan.lowering.select import resolve_target
from latentscan.runtime.tiny import build
from latentscan.tools.ascend_check.execute import recorded
from latentscan.tools.ascend_check.numerics import relative, scan_case

OPTIONS = {"chunk_size": 64, "dt_softplus": False, "dt_min": 0.0, "dt_max": 1.0}


def fake_torch_npu(monkeypatch, **content) -> types.ModuleType:
    module = types.ModuleType("torch_npu")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    for name, value in content.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return module


def test_importing_latentscan_and_lowering_never_imports_torch_npu(tmp_path):
    (tmp_path / "torch_npu.py").write_text("raise SystemExit('torch_npu was imported')")
    lines = "import sys; sys.path.insert(0, sys.argv[1])\nimport latentscan\nimport latentscan.tools.cli\n"
    lines += "import latentscan.lowering.ascend, latentscan.lowering.select as s\nlatentscan.wrap\n"
    lines += "assert s.resolve_target('auto', 'cpu') == 'reference' and 'torch_npu' not in sys.modules\n"
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", lines, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_machine_without_any_of_it_is_told_everything_in_one_message(monkeypatch):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setattr(npu, "_installed", lambda name: False)
    with pytest.raises(PipelineError) as found:
        resolve_target("ascend")
    for part in ("torch_npu is not installed", "triton-ascend", "ASCEND_HOME_PATH", "latentscan emit"):
        assert part in str(found.value)


def test_wrap_refuses_the_target_before_it_touches_the_model():
    import latentscan

    model = build("llama")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(PipelineError, match="target=ascend cannot run here"):
        latentscan.wrap(model, "", target="ascend")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not hasattr(model, "report")


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libhccl.so: cannot open"), RuntimeError("CANN\nis missing"), OSError("so"),
        AttributeError("no _C"), KeyError("ASCEND_OPP_PATH"), AssertionError("version"), SyntaxError("bad"),
        SystemExit("no CANN"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_a_broken_torch_npu_is_reported_and_not_raised(monkeypatch, error: BaseException):
    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return importlib.machinery.ModuleSpec(name, Finder) if name == "torch_npu" else None

        @staticmethod
        def create_module(spec):
            return None

        @staticmethod
        def exec_module(module):
            raise error

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    (told,) = [text for text in npu.missing() if "torch_npu" in text]
    assert told.startswith(f"torch_npu is installed and cannot be imported ({type(error).__name__}: ")
    assert "\n" not in told
    assert npu.vendor() is None
    assert resolve_target("auto", "npu") == "reference"


def test_a_complete_machine_is_served_and_only_on_its_npu(monkeypatch):
    fake_torch_npu(monkeypatch, is_available=lambda: True, get_device_name=lambda *_: "Ascend910B2")
    monkeypatch.setenv("ASCEND_HOME_PATH", "/somewhere")
    monkeypatch.setattr(npu, "_installed", lambda name: True)
    assert npu.missing() == []
    assert resolve_target("ascend", "npu") == resolve_target("auto", "npu") == resolve_target("ascend") == "ascend"
    with pytest.raises(PipelineError, match="the model is on cpu"):
        resolve_target("ascend", "cpu")
    fake_torch_npu(monkeypatch, is_available=lambda: False)
    assert npu.missing() == ["torch_npu finds no NPU"]


@pytest.mark.parametrize("error", [AssertionError("odd"), AttributeError("npu"), ValueError("driver")])
def test_a_torch_npu_that_cannot_look_for_an_npu_is_reported(monkeypatch, error: Exception):
    def is_available():
        raise error

    fake_torch_npu(monkeypatch, is_available=is_available, __version__=None)
    assert npu.missing()[0] == f"torch_npu cannot look for an NPU ({type(error).__name__}: {error})"
    fake_torch_npu(monkeypatch)  # nothing is in it
    assert npu.missing()[0].startswith("torch_npu cannot look for an NPU (AttributeError")


@pytest.mark.parametrize(
    ("name", "tiles"),
    [
        ("Ascend910B1", "910B3"), ("Ascend910B3", "910B3"), ("Ascend910B4-1", "910B3"), ("Ascend910_9382", "910B3"),
        ("Ascend950PR_9579", "950"), ("Ascend910_9589", "950"),
    ],
)  # fmt: skip
def test_the_npu_says_which_tiles_its_kernels_take(monkeypatch, name: str, tiles: str):
    asked = []

    def get_device_name(*index):
        asked.append(index)
        return name

    fake_torch_npu(monkeypatch, is_available=lambda: True, get_device_name=get_device_name)
    assert npu.chip() == npu.chip(3) == tiles and tiles in CHIPS
    assert asked == [(), (3,)]


@pytest.mark.parametrize("name", ["Ascend310P3", "Ascend910", "Ascend910A", "Ascend1000", "", None])
def test_an_npu_without_tiles_is_refused_by_its_name(monkeypatch, name):
    fake_torch_npu(monkeypatch, is_available=lambda: True, get_device_name=lambda *_: name)
    monkeypatch.setenv("ASCEND_HOME_PATH", "/somewhere")
    monkeypatch.setattr(npu, "_installed", lambda name: True)
    assert npu.missing() == [f"there are no tiles for the NPU {name}"]
    with pytest.raises(PipelineError, match="there are no tiles for the NPU"):
        resolve_target("ascend", "npu")
    assert resolve_target("auto", "npu") == "reference"


def test_ops_take_the_tiles_of_the_npu_that_their_tensors_are_on(monkeypatch):
    """The device type npu does not exist here: a name of it is put in place of what a tensor says it is on."""
    made: list[tuple[str, str]] = []
    for op in ("chunk_scan", "chunk_scan_backward", "state_update"):
        module = importlib.import_module(f"latentscan.kernels.triton_ascend.{ascend.KERNEL_MODULES[op]}")
        monkeypatch.setattr(module, op, lambda *_, chip, op=op, **__: made.append((op, chip)))

    def refusal(*tensors_and_chip) -> str:
        made.append(("latent", tensors_and_chip[4]))
        return "none fits"

    monkeypatch.setattr(ascend_vendor.latent_decode, "refusal", refusal)
    monkeypatch.setattr(npu, "chip", lambda index=None: {0: "910B3", 1: "950"}[index])
    monkeypatch.setattr(ascend, "_device", lambda args: types.SimpleNamespace(type="npu", index=1))
    assert ascend.placed("chunk_scan", (torch.zeros(1),)) == {"chip": "950"}
    assert ascend.placed("gated_rms_norm", (torch.zeros(1),)) == {}
    for op in ("chunk_scan", "chunk_scan_backward", "state_update"):
        ascend._kernel(op)(torch.zeros(1), **ascend.placed(op, (torch.zeros(1),)))
    assert made == [("chunk_scan", "950"), ("chunk_scan_backward", "950"), ("state_update", "950")]
    q, r = torch.zeros(1, 2, 1, 64).half(), torch.zeros(1, 2, 1, 16).half()
    ascend_vendor.latent_attention(
        q, r, torch.zeros(1, 3, 64).half(), torch.zeros(1, 1, 3, 16).half(), kind="full", scale=1.0, chip="950"
    )
    assert made[-1] == ("latent", "950")


def test_an_op_on_the_cpu_says_that_it_is_not_for_it():
    x, dt = torch.zeros(1, 4, 2, 32).half(), torch.zeros(1, 4, 2)
    B = torch.zeros(1, 4, 1, 32).half()
    with pytest.raises(KernelError, match="the tensors are on cpu"):
        torch.ops.latentscan_ascend.chunk_scan(x, dt, torch.zeros(2), B, B, **OPTIONS)


def test_the_ops_of_the_target_have_fakes_and_take_what_the_kernels_take():
    with torch.device("meta"):
        x, B = torch.empty(1, 70, 4, 64).half(), torch.empty(1, 70, 2, 128).half()
        dt, A = torch.empty(1, 70, 4), torch.empty(4)
    with recorded() as launched:
        y, state = torch.ops.latentscan_ascend.chunk_scan(x, dt, A, B, B, **OPTIONS)
    assert (y.shape, state.shape) == (x.shape, (1, 4, 64, 128))
    assert launched == [] or [c.kernel.name for c, _ in launched][-1] == "scan_kernel"
    assert ascend.unserved("chunk_scan", x, dt, A, B, B, chunk_size=64) is None
    assert "torch.float32" in str(ascend.unserved("chunk_scan", x.float(), dt, A, B.float(), B.float()))
    assert "head_dim 256" in str(ascend.unserved("chunk_scan", torch.empty(1, 70, 4, 256).half(), dt, A, B, B))
    assert "filter width 7" in str(ascend.unserved("causal_conv1d", x, torch.empty(8, 7)))


def test_a_launch_of_nothing_starts_nothing():
    with recorded() as launched:
        launch(Kernel("chunk_scan_kernels", "scan_kernel"), 0)
    assert launched == []


@pytest.mark.parametrize("chip", CHIPS)
def test_shipped_tiles_are_the_longest_that_fit_and_the_known_controls_do_not(chip: str):
    for table, backward in ((FORWARD[chip], False), (BACKWARD[chip], True)):
        assert len(table) == 12
        for (P, N), tiles in table.items():
            assert tiles.excess(CHIPS[chip], backward=backward) is None
            longer = ChunkTiles(2 * tiles.chunk, P, N, heads=min(16, 2048 // (2 * tiles.chunk)))
            assert longer.excess(CHIPS[chip], backward=backward) is not None
    assert chunk_tiles(64, 128, "910B3").chunk == 128
    assert "scan: " in str(ChunkTiles(256, 64, 128, heads=8).excess(CHIPS["910B3"], backward=False))
    assert all(tiles is not None for tiles in DECODE[chip].values())
    assert chunk_tiles(200, 128, chip) is None


def attended(q, k, v, heads, layout, scale, sparse_mode=0, atten_mask=None):
    """npu_fusion_attention by the definition; ``atten_mask`` hides, and mode 3 is causal from the last key."""
    assert (layout, heads) == ("BNSD", q.shape[1])
    assert sparse_mode in (0, 3)
    if sparse_mode == 3:
        assert atten_mask.shape == (2048, 2048) and bool(atten_mask[0, 1]) and not bool(atten_mask[1, 0])
    kind = "causal" if sparse_mode == 3 else "full"
    return (ref.attention(q, k, v, kind=kind, scale=scale),)


def test_the_vendors_attention_is_given_what_the_definition_says(monkeypatch):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, s, 16, generator=g).half() for h, s in ((4, 3), (2, 9), (2, 9)))
    want = ref.attention(q, k, v, kind="causal", scale=0.3)
    calls: list[str] = []

    def fused(*args, **kwargs):
        calls.append("attention")
        return attended(*args, **kwargs)

    fake_torch_npu(monkeypatch, npu_fusion_attention=fused)
    options = {"kind": "causal", "scale": 0.3}
    assert torch.allclose(ascend_vendor.attention(q, k, v, **options), want, atol=2e-3)
    assert torch.allclose(ascend_vendor.attention(q[:, :, -1:], k, v, **options), want[:, :, -1:], atol=2e-3)
    assert calls == ["attention"] * 2
    capped = ascend_vendor.attention(q, k, v, softcap=2.0, **options)  # not served by it
    assert torch.allclose(capped, ref.attention(q, k, v, softcap=2.0, **options), atol=2e-3)
    assert calls == ["attention"] * 2


def test_the_vendors_latent_decode_is_given_what_the_definition_says(monkeypatch):
    g = torch.Generator().manual_seed(0)
    q, r = torch.randn(2, 4, 1, 512, generator=g).half(), torch.randn(2, 4, 1, 64, generator=g).half()
    latent, k = torch.randn(2, 9, 512, generator=g).half(), torch.randn(2, 1, 9, 64, generator=g).half()
    calls: list[str] = []

    def fused(query, key, value, *, query_rope, key_rope, num_heads, num_key_value_heads, input_layout, scale):
        calls.append("latent")
        assert (num_heads, num_key_value_heads, input_layout) == (4, 1, "BNSD")
        whole = ref.attention(
            torch.cat([query, query_rope], -1), torch.cat([key, key_rope], -1), value, kind="full", scale=scale
        )
        return whole, None

    fake_torch_npu(monkeypatch, npu_fused_infer_attention_score=fused)
    want = ref.latent_attention(q, r, latent, k, kind="causal", scale=0.04)
    assert torch.allclose(ascend_vendor.latent_attention(q, r, latent, k, kind="causal", scale=0.04), want, atol=4e-3)
    assert calls == ["latent"]


def test_an_error_of_the_numerics_is_not_hidden():
    assert relative(torch.tensor([float("nan")]), torch.ones(1).double()) == float("inf")
    assert relative(torch.ones(2), torch.ones(1).double()) == float("inf")
    case = scan_case("sabotage", 1, 40, 2, 1, 32, 32, init=True)
    assert case.oracle is not case.ours
