"""Which kernels the targets choose for the chunk scan, and that the chosen op is the canonical one to the compiler."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import latentscan
from latentscan.ir.capture import capture
from latentscan.ir.errors import KernelError, PipelineError
from latentscan.kernels.triton import chunk_configs, chunk_scan
from latentscan.kernels.triton.chunk_configs import Backward, Forward, Hopper
from latentscan.kernels.triton.chunk_tuning import Row, Table
from latentscan.lowering import reference, select, triton, triton_mamba
from latentscan.lowering.select import lower, resolve_target
from latentscan.runtime.options import Options


class Scan(nn.Module):
    """A chunk scan that a graph can be captured of."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.A = nn.Parameter(-torch.ones(4, dtype=dtype))

    def forward(self, x, dt, B, C):
        y, state = torch.ops.latentscan.chunk_scan(
            x, dt, self.A, B, C, chunk_size=16, dt_softplus=True, dt_min=0.0, dt_max=1.0
        )
        return y, state


def inputs(dtype=torch.float32, P=16, N=16, **kwargs):
    def empty(*shape):
        return torch.randn(*shape, **kwargs).to(dtype)

    return {"x": empty(2, 9, 4, P), "dt": empty(2, 9, 4), "B": empty(2, 9, 2, N), "C": empty(2, 9, 2, N)}


def targets_of(graph):
    return [str(n.target) for n in graph.nodes if "chunk_scan" in str(n.target)]


@pytest.mark.parametrize(("device", "target"), [("cuda", "triton"), ("cpu", "reference"), (None, "reference")])
def test_auto_takes_triton_on_cuda_and_the_reference_elsewhere(device, target):
    assert resolve_target("auto", device) == target


def test_a_target_that_cannot_run_is_refused_with_the_remedy(monkeypatch):
    with pytest.raises(PipelineError, match=r"on cpu.*target=auto"):
        resolve_target("triton", "cpu")
    assert resolve_target("triton") == "triton"
    monkeypatch.setattr(select, "TRITON", False)
    assert resolve_target("auto", "cuda") == "reference"
    with pytest.raises(PipelineError, match="not installed"):
        resolve_target("triton", "cuda")


def test_lowering_to_triton_replaces_the_scan_and_to_the_reference_leaves_it():
    graph = capture(Scan(), inputs=inputs())
    assert lower(graph.copy(), "reference") == {}
    lowered = graph.copy()
    assert lower(lowered, "triton") == {"chunk_scan": 1}
    lowered.graph.lint()
    assert targets_of(lowered) == ["latentscan_triton.chunk_scan.default"]
    assert targets_of(graph) == ["latentscan.chunk_scan.default"]


@pytest.mark.parametrize("change", [{"dtype": torch.float64}, {"N": 300}], ids=str)
def test_what_the_kernels_cannot_take_keeps_the_reference(change):
    graph = capture(Scan(change.get("dtype", torch.float32)), inputs=inputs(**change))
    assert lower(graph, "triton") == {}
    assert targets_of(graph) == ["latentscan.chunk_scan.default"]


def test_the_kernel_op_has_the_shapes_dtypes_and_backward_of_the_canonical_one():
    with FakeTensorMode():
        ins = inputs(torch.bfloat16)
        args = (ins["x"], ins["dt"], torch.empty(4), ins["B"], ins["C"])
        kwargs = {"chunk_size": 16, "dt_softplus": True, "dt_min": 0.0, "dt_max": 1.0}
        for name, more in (("chunk_scan", ()), ("chunk_scan_backward", (ins["x"], None))):
            want = getattr(torch.ops.latentscan, name)(*more, *args, **kwargs)
            got = getattr(torch.ops.latentscan_triton, name)(*more, *args, **kwargs)
            if name == "chunk_scan":
                *got, starts = got
                assert starts.shape == (0, 2, 64, 16)  # no kernel on this device keeps any
            assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in want]
        leaves = [t.requires_grad_() for t in args]
        y, state, _ = triton.CHUNK_SCAN(*leaves, **kwargs)
        grads = torch.autograd.grad(y.sum() + state.sum(), leaves)
        assert [g.shape for g in grads] == [t.shape for t in leaves]


def test_cpu_tensors_are_refused_with_the_remedy():
    ins = inputs()
    with pytest.raises(KernelError, match=r"on the CPU.*target=reference"):
        triton.CHUNK_SCAN(
            ins["x"], ins["dt"], -torch.ones(4), ins["B"], ins["C"], chunk_size=4, dt_softplus=True, dt_min=0.0,
            dt_max=1.0,
        )  # fmt: skip


def test_the_public_function_runs_the_reference_on_the_cpu():
    ins = inputs()
    args = (ins["x"], ins["dt"], -torch.ones(4), ins["B"], ins["C"])
    y, state = latentscan.chunk_scan(*args, dt_softplus=True, return_final_state=True)
    want = torch.ops.latentscan.chunk_scan(*args, chunk_size=64, dt_softplus=True, dt_min=0.0, dt_max=float("inf"))
    torch.testing.assert_close((y, state), tuple(want))
    assert latentscan.chunk_scan(*args, dt_softplus=True).shape == y.shape


def test_the_target_serves_every_op_that_has_a_kernel():
    """Every op of the namespace ``latentscan_triton`` that is no backward and no in-place form is in the table."""
    names = {
        n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if "latentscan_triton::" in n
    }
    ours = {n for n in names if not n.endswith(("_backward", "_"))} - {"output_state"}  # of a backward: scan_leave's
    assert {"causal_conv1d", "gated_rms_norm", "mamba_mixer", "selective_scan", "state_update", "conv_update"} < ours
    assert ours <= set(triton.KERNELS)
    assert set(reference.KERNELS) <= set(triton.KERNELS)


def test_a_mixer_of_tensors_on_a_gpu_is_given_its_kernels(monkeypatch):
    """As on CUDA: the device that the rules see is the only thing that is not there."""
    monkeypatch.setattr(triton_mamba, "unserved", lambda *args, **kwargs: None)
    from latentscan.runtime.wrap import planning_graph
    from latentscan.tests.models import build

    done = lower(planning_graph(build("mamba2"), cached=False), "triton")
    assert {"causal_conv1d", "chunk_scan", "gated_rms_norm"} <= set(done)


def tiles(*shapes):
    rows = [
        Row(way, "cpu", "float32", shape, tokens, config, 1.0)
        for shape in shapes
        for tokens in (18, 1000)
        for way, config in (("forward", Forward(segments=tokens)), ("backward", Backward(heads=2)))
    ]
    return Table(tuple(rows))


def test_a_table_of_tiles_reaches_the_kernels_of_its_shapes_and_no_other():
    graph = capture(Scan(), inputs=inputs())
    for table, expected in ((tiles((4, 16, 2, 16), (9, 9, 9, 9)), tiles((4, 16, 2, 16))), (tiles((9, 9, 9, 9)), None)):
        lowered = graph.copy()
        lower(lowered, "triton", table)
        (scan,) = (n for n in lowered.nodes if "chunk_scan" in str(n.target))
        assert scan.kwargs.get("tiles") == (expected.text() if expected else None)
    lowered = graph.copy()
    assert lower(lowered, "reference", tiles((4, 16, 2, 16))) == {}


def test_forward_and_backward_of_a_lowered_scan_take_their_rows(monkeypatch):
    """The ops are CUDA's: their kernels' functions are called as the ops call them."""
    text = tiles((4, 16, 2, 16)).text()
    seen = []
    with FakeTensorMode():
        ins = inputs()
        args = [t.requires_grad_() for t in (ins["x"], ins["dt"], torch.empty(4), ins["B"], ins["C"])]
        options = {"chunk_size": 16, "dt_softplus": True, "dt_min": 0.0, "dt_max": 1.0}

        def run(*given, results):
            seen.append(given[-1])
            return (None,) * results

        monkeypatch.setattr(chunk_scan.plain_forward, "forward", functools.partial(run, results=2))
        monkeypatch.setattr(chunk_scan.plain_backward, "backward", functools.partial(run, results=9))
        chunk_scan.chunk_scan(*args, **options, tiles=text)
        chunk_scan.chunk_scan_backward(ins["x"], None, *args, **options, tiles=text)
        assert seen == [Forward(segments=18), Backward(heads=2)]
        chunk_scan.chunk_scan(*args, **options)
        assert seen[2] != Forward(segments=18)
        y, _, _ = triton.CHUNK_SCAN(*args, **options, tiles=text)
        assert y.grad_fn.options["tiles"] == text
        torch.autograd.grad(y.sum(), args)
    hopper = Row("forward", "cpu", "float32", (4, 16, 2, 16), 18, Hopper(), 1.0)
    assert chunk_scan._told(Table((hopper,)).text(), *(ins[n] for n in ("x", "B", "C")), None, None) is None


def test_the_mixer_hands_its_tiles_to_the_scan(monkeypatch):
    from latentscan.kernels.triton import mamba_mixer

    text = tiles((4, 16, 2, 16)).text()
    seen = []
    monkeypatch.setattr(chunk_scan, "chunk_scan", lambda *a, **o: seen.append(o))
    monkeypatch.setattr(chunk_scan, "chunk_scan_backward", lambda *a, **o: seen.append(o))
    ins = inputs()
    args = (ins["x"], ins["dt"], torch.empty(4), ins["B"], ins["C"])
    for keep in (False, True):
        parts = mamba_mixer.parts(text, keep)
        parts.scan(*args)
        parts.scan_backward(ins["x"], None, *args, starts="kept" if keep else None)
    assert seen == [
        {"tiles": text, "keep_starts": False}, {"tiles": text, "starts": None},
        {"tiles": text, "keep_starts": True}, {"tiles": text, "starts": "kept"},
    ]  # fmt: skip
    for name in ("mamba_mixer", "mamba_mixer_backward"):
        assert "str tiles" in str(getattr(torch.ops.latentscan_triton, name).default._schema)


def test_a_model_is_given_the_file(tmp_path, monkeypatch):
    path = tmp_path / "tiles.json"
    path.write_text("{}")
    with pytest.raises(PipelineError, match=r"tiles\.json"):
        Options.of({"tiles": path})
    with pytest.raises(PipelineError, match="not a file's name"):
        Options.of({"tiles": 3})
    with pytest.raises(PipelineError, match=r"none\.json"):
        Options.of({"tiles": tmp_path / "none.json"})
    from latentscan.runtime import executable
    from latentscan.tests.models import build

    table = tiles((4, 16, 2, 16))
    path.write_text(table.text())
    given = []
    monkeypatch.setattr(executable, "lower", lambda graph, target, tiles: given.append(tiles))
    model = latentscan.wrap(build("mamba2"), tiles=path)
    model(input_ids=torch.zeros(1, 8, dtype=torch.long))
    assert given == [table]


def on_hopper(monkeypatch):
    monkeypatch.setattr(chunk_configs.Device, "of", staticmethod(lambda device: chunk_configs.H200))
    monkeypatch.setattr(chunk_configs, "gluon_works", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_what_the_forward_keeps_has_room_for_every_piece_or_for_none(monkeypatch):
    at = torch.device("cuda"), torch.bfloat16
    assert chunk_configs.starts_shape(*at, 32768, 64, 128) == (0, 2, 64, 128)
    on_hopper(monkeypatch)
    assert chunk_configs.starts_shape(*at, 32768, 64, 128) == (132, 2, 64, 128)
    assert chunk_configs.starts_shape(*at, 8192, 128, 64) == (132, 2, 64, 64)
    assert chunk_configs.starts_shape(*at, 8191, 128, 64) == (2, 2, 64, 64)
    for other in ((torch.float32, 32768, 64, 128), (torch.bfloat16, 32768, 80, 128), (torch.bfloat16, 32768, 64, 48)):
        assert chunk_configs.starts_shape(at[0], *other)[0] == 0


@pytest.mark.parametrize("tokens", [200, 9000])
def test_what_is_kept_costs_a_graph_of_any_length_no_guard(monkeypatch, tokens):
    on_hopper(monkeypatch)
    known = chunk_configs.starts_shape
    monkeypatch.setattr(triton, "starts_shape", lambda device, *sizes: known(torch.device("cuda"), *sizes))

    def train(x, dt, A, B, C):
        leaves = [t.detach().requires_grad_() for t in (x, dt, A, B, C)]
        y, _, kept = triton.CHUNK_SCAN(*leaves, chunk_size=16, dt_softplus=True, dt_min=0.0, dt_max=1.0)
        return kept, torch.autograd.grad(y.sum(), leaves)

    def fake(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    args = fake(1, tokens, 4, 64), fake(1, tokens, 4), fake(4), fake(1, tokens, 2, 128), fake(1, tokens, 2, 128)
    traced = make_fx(train, tracing_mode="symbolic")(*args)
    kept = next(n for n in traced.graph.nodes if n.op == "output").args[0][0].meta["val"]
    assert kept.shape[0].node.hint == (132 if tokens == 9000 else 2)
    assert traced.shape_env.guards, "other guards are there, so that this test would see one"
    assert not [str(g.expr) for g in traced.shape_env.guards if "8192" in str(g.expr)]
