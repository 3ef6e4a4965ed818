"""The checking tool: what it says where it cannot run, how it reads the compiler, and (slow) that it catches faults."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from latentscan.ir.capture import capture
from latentscan.kernels.reference import attention, ssm, ssm_conv, ssm_norm
from latentscan.kernels.triton_ascend import latent_decode, mixer, tiles
from latentscan.kernels.triton_ascend import launch as launching
from latentscan.kernels.triton_ascend.launch import Kernel
from latentscan.lowering import ascend as _ascend  # noqa: F401  (registers the ops)
from latentscan.lowering.select import lower
from latentscan.runtime.tiny import build
from latentscan.tools.ascend_check import __main__ as command
from latentscan.tools.ascend_check import environment, shipped, table, toolchain
from latentscan.tools.ascend_check.environment import UnavailableError, default_folder, ensure
from latentscan.tools.ascend_check.execute import on_the_cpu, recorded
from latentscan.tools.ascend_check.host_ir import for_the_host
from latentscan.tools.ascend_check.numerics import FORWARD_TOLERANCE, Case, relative, scan_case
from latentscan.tools.ascend_check.toolchain import Call, CheckError, Toolchain

ROOT = Path(__file__).parents[2]
SCAN = Kernel("chunk_scan_kernels", "pass_kernel")


def test_a_machine_that_cannot_have_the_packages_is_told_so_and_counts_as_not_run(tmp_path, monkeypatch, capsys):
    def refuse(command: list[str], **_: Any) -> Any:
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: No matching distribution for triton-ascend\n")

    monkeypatch.setattr(environment.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(environment.subprocess, "run", refuse)
    assert command.main(["--env", str(tmp_path / "env")]) == command.NOT_RUN == 3
    told = capsys.readouterr().out
    assert "NOT RUN" in told and "No matching distribution for triton-ascend" in told
    assert not (tmp_path / "env" / "installed").exists()


def test_a_file_without_a_place_for_the_table_is_told_before_anything_is_run(tmp_path, capsys):
    (tmp_path / "notes.md").write_text("nothing")
    with pytest.raises(SystemExit) as end:
        command.main(["--env", str(tmp_path / "env"), "--table", str(tmp_path / "notes.md")])
    assert end.value.code == 2 and "no <!-- made by" in capsys.readouterr().err
    assert not (tmp_path / "env").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--match", "scann"], "no kernel and no run has it in its name"),
        (["--table", "{ours}", "--match", "join"], "leave out --match and --chip"),
        (["--table", "{ours}", "--chip", "950"], "leave out --match and --chip"),
        (["--json", "{nowhere}"], "its folder is not there"),
        (["--chip", "310"], "invalid choice"),
    ],
)
def test_a_check_of_nothing_or_to_nowhere_is_refused_before_it_begins(arguments, told, tmp_path, capsys):
    places = {"ours": ROOT / "docs" / "ascend.md", "nowhere": tmp_path / "none" / "f.json"}
    with pytest.raises(SystemExit) as end:
        command.main(["--env", str(tmp_path / "env"), *(a.format(**places) for a in arguments)])
    assert end.value.code == 2 and told in capsys.readouterr().err
    assert not (tmp_path / "env").exists()


def test_a_place_where_no_environment_can_be_made_is_not_run(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert command.main(["--env", str(tmp_path / "file")]) == command.NOT_RUN
    assert "its environment cannot be made in" in capsys.readouterr().out


def test_an_environment_that_lost_its_packages_is_made_again(tmp_path, monkeypatch):
    """Else every kernel would be told to fail."""
    made: list[Path] = []

    def create(folder: Path, **_: Any) -> None:
        made.append(folder)
        for path in ("triton/backends/ascend/x", "ascendnpuir/bin/bishengir-compile", "ascendnpuir/bin/bishengir-opt"):
            file = folder / "lib" / "python3.11" / "site-packages" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("")
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / "python").write_text("")

    monkeypatch.setattr(environment.venv, "create", create)
    monkeypatch.setattr(environment.subprocess, "run", lambda c, **_: subprocess.CompletedProcess(c, 0, "", ""))
    for _ in range(2):
        assert ensure(tmp_path).whole
    assert len(made) == 1
    (tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "ascendnpuir" / "bin" / "bishengir-opt").unlink()
    assert ensure(tmp_path).whole and len(made) == 2


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "riscv64")])
def test_a_machine_of_another_kind_is_not_run(system, machine, tmp_path, monkeypatch):
    monkeypatch.setattr(environment.platform, "system", lambda: system)
    monkeypatch.setattr(environment.platform, "machine", lambda: machine)
    with pytest.raises(UnavailableError, match="not here"):
        ensure(tmp_path)


def test_make_and_ci_run_the_check():
    assert "latentscan.tools.ascend_check" in (ROOT / "Makefile").read_text()
    assert "make check-ascend" in (ROOT / ".ci" / "run").read_text()


def test_only_the_missing_generator_is_forgiven():
    missing = '[ERROR] Cannot find hivmc under $PATH \nloc("k.mlir":2:1): error: External hivmc run fails, returning\n'
    assert toolchain._errors(missing + "[ERROR] Failed to run BiShengIR pipeline\n") == []
    overflow = 'loc("k.mlir":4:3): error: cc overflow, requires 2097152 bits while 1048576 bits available!\n'
    assert toolchain._errors(missing + overflow) == ["cc overflow, requires 2097152 bits while 1048576 bits available!"]


def test_the_vendors_ir_is_made_runnable():
    text = """module {
  func.func private @triton_cumsum_0(tensor<4x8xf32>, i32, i1) -> tensor<4x8xf32>
  func.func @k(%arg0: memref<?xi8>) attributes {mix_mode = "aiv", parallel_mode = "simd"} {
    annotation.mark %0
    %1 = call @triton_cumsum_0(%0, %c1_i32, %false) : (tensor<4x8xf32>, i32, i1) -> tensor<4x8xf32>
    scf.if %2 {
    } {hivm.unlikely_condition}
  }
}"""
    host = for_the_host(text)
    assert "attributes {llvm.emit_c_interface} {" in host and "annotation" not in host and "hivm" not in host
    assert "%before = arith.subi %i1, %c1" in host and "arith.constant 8 : index" in host


def test_arguments_that_the_target_does_not_take_are_refused():
    good = {"states": torch.zeros(1), "cum": torch.zeros(1), "start": torch.zeros(1), "entering": torch.zeros(1).half()}
    good |= {"end": torch.zeros(1), "first": 0, "NC": 1, "H": 1, "PN": 16, "Q": 16, "BLOCK": 16, "REVERSE": False}
    assert dict(Call.of(SCAN, good).signature)["entering"] == "*fp16"
    assert dict(Call.of(SCAN, {**good, "NC": 1 << 31}).signature)["NC"] == "i64"
    for name, value, told in (("start", None, "start is None"), ("cum", torch.zeros(1).double(), "torch.float64")):
        with pytest.raises(CheckError, match=told):
            Call.of(SCAN, {**good, name: value})
    with pytest.raises(CheckError, match="num_warps"):
        Call.of(SCAN, {**good, "num_warps": 4})


def test_every_kernel_is_among_what_is_shipped():
    import ast

    folder = ROOT / "kernels" / "triton_ascend"
    there = {
        node.name
        for path in folder.glob("*_kernels.py")
        if path.name != "control_kernels.py"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    for chip in ("910B3", "950"):
        assert {entry.call.kernel.name for entry in shipped.shipped(chip)} == there
    reasons = [control.reason for control in shipped.controls()]
    assert [bool(reason) for reason in reasons] == [True, False, True, False]


@pytest.mark.parametrize("chip", tiles.CHIPS)
def test_every_tile_that_a_size_leads_to_is_among_what_is_shipped(chip: str, monkeypatch):
    """All sizes are tried; the list is held by the constants that are tiles, kernel by kernel."""
    names = {
        "update_kernel": ("BP", "BN"),
        "conv_kernel": ("BD", "W"),
        "norm_kernel": ("BLOCK",),
        "join_kernel": ("BC",),
    }
    names |= {"pass_kernel": ("BLOCK",), "kept_kernel": ("BLOCK",), "split_kernel": ("BH", "BT", "BC", "BR")}

    def compiled() -> dict[str, set[tuple[int, ...]]]:
        there: dict[str, set[tuple[int, ...]]] = {kernel: set() for kernel in names}
        for entry in shipped.shipped(chip):
            if entry.call.kernel.name in names:
                constants = dict(entry.call.constants)
                there[entry.call.kernel.name].add(tuple(constants[n] for n in names[entry.call.kernel.name]))
        return there

    sizes = [n for i in range(13) for n in {1 << i, (1 << i) + 1}]
    blocks: set[tuple[int, ...]] = {
        (min(tiles.power(P * N), 4096),) for P in range(1, 129) for N in (1, 2, 3, 16, 100, 256)
    }
    wanted: dict[str, set[tuple[int, ...]]] = {
        "update_kernel": {
            (tile, tiles.power(N)) for P in sizes for N in sizes if (tile := tiles.update_tile(P, N, chip)) is not None
        },
        "conv_kernel": {(min(tiles.CONV_CHANNELS, tiles.power(D)), W) for D in sizes for W in (2, 3, 4)},
        "norm_kernel": {(min(tiles.NORM_BLOCK, tiles.power(size)),) for size in sizes},
        "join_kernel": {(tiles.power(C),) for C in range(1, 513)},
        "pass_kernel": blocks, "kept_kernel": blocks,
        "split_kernel": {
            (t.heads, t.keys, t.latent, t.rope)
            for C in range(1, 513, 3) for R in range(1, 129, 3) if (t := tiles.decode_tiles(C, R, chip)) is not None
        },
    }  # fmt: skip
    found = compiled()
    for kernel, choices in wanted.items():
        assert choices <= found[kernel], (kernel, choices - found[kernel])
    monkeypatch.setattr(shipped, "UPDATE_STATES", ((64, 128),))  # sabotage
    assert not wanted["update_kernel"] <= compiled()["update_kernel"]


def test_the_document_holds_the_table_of_every_shipped_tile():
    text = (ROOT / "docs" / "ascend.md").read_text()
    assert "No NPU binary was produced, and nothing of this has run on an NPU" in text
    for chip in ("910B3", "950"):
        for entry in shipped.shipped(chip):
            rows = [line for line in text.splitlines() if line.startswith(f"| {entry.call.kernel.name} |")]
            cells = [row.strip("| ").split(" | ") for row in rows]
            told = [cell[2 if chip == "910B3" else 3] for cell in cells if entry.tile in cell[1].split("; ")]
            assert len(told) == 1 and told[0].startswith("passes"), (chip, entry.call.kernel.name, entry.tile)
    with pytest.raises(ValueError, match="no <!-- made by"):
        table.markdown("nothing", {})


# --- with the vendor's packages --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tools():
    for folder in (ROOT / ".venv-ascend", default_folder()):
        if (folder / "installed").exists():
            made = Toolchain(ensure(folder))
            yield made
            made.close()
            return
    pytest.skip("the checking environment is not there: run make check-ascend first")


@pytest.mark.slow
def test_the_controls_have_the_verdicts_that_are_known(tools):
    for control in shipped.controls():
        verdict = tools.verdict(tools.ir(control.call, "910B3"), "910B3")
        assert verdict.ok == (not control.reason)
        assert not control.reason or any(control.reason in error for error in verdict.errors)


@pytest.mark.slow
def test_a_wrong_argument_moves_the_result_far_beyond_the_tolerance(tools, monkeypatch):
    """Sabotage: dt is taken 5 % longer by the kernels alone; then a program is left out."""
    case = scan_case("sabotage", 1, 70, 2, 1, 32, 32, init=True, softplus=True)
    with on_the_cpu(tools), monkeypatch.context() as patch:
        assert max(case.errors().values()) <= FORWARD_TOLERANCE
        run = launching.runner

        def longer(kernel: Kernel, programs: int, arguments: dict[str, Any]) -> None:
            if kernel.name == "cumsum_kernel":
                arguments = {**arguments, "dt": arguments["dt"] + 0.1}
            run(kernel, programs, arguments)

        def fewer(kernel: Kernel, programs: int, arguments: dict[str, Any]) -> None:
            run(kernel, programs - (kernel.name == "pass_kernel"), arguments)

        for sabotage in (longer, fewer):
            patch.setattr(launching, "runner", sabotage)
            assert max(case.errors().values()) > 5 * FORWARD_TOLERANCE
    assert launching.runner is None


@pytest.mark.slow
def test_a_write_outside_of_a_tensor_is_caught(tools, monkeypatch):
    case = scan_case("canary", 1, 40, 2, 1, 32, 32)
    with on_the_cpu(tools), monkeypatch.context() as patch:
        run = launching.runner

        def beyond(kernel: Kernel, programs: int, arguments: dict[str, Any]) -> None:
            run(kernel, programs + (kernel.name == "state_kernel"), arguments)

        patch.setattr(launching, "runner", beyond)
        with pytest.raises(CheckError, match="state_kernel: writes outside of a tensor"):
            case.errors()
    assert launching.runner is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "bamba", "nemotron_h"])
def test_a_lowered_model_on_the_vendors_ir_equals_the_model(tools, family: str):
    """The whole way: capture, lowering, launches; logits in fp16 are as near to fp64 as the library's own in fp16."""
    torch.manual_seed(0)
    model = build(family).eval()
    ids = torch.randint(0, 64, (2, 37))
    with torch.no_grad():
        truth = model.double()(ids, use_cache=False).logits
    model = model.half()
    with torch.no_grad():
        library = model(ids, use_cache=False).logits
    graph = capture(model, inputs={"input_ids": ids, "use_cache": False})
    done = lower(graph, "ascend")
    assert done["chunk_scan"] >= 1 and done["causal_conv1d"] >= 1
    graph.clean()
    with torch.no_grad(), on_the_cpu(tools) as launched:
        values = [graph_input(graph, name, ids) for name in graph.inputs]
        out = graph.module(*values)
    logits = next(t for t in out if isinstance(t, torch.Tensor) and t.shape == truth.shape)
    assert {call.kernel.name for call, _ in launched} >= {"scan_kernel", "conv_kernel"}
    assert relative(logits, truth) <= 3 * relative(library, truth)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("family", ["mamba2", "bamba", "nemotron_h", "deepseek_v3"])
def test_every_launch_of_a_lowered_model_passes_the_compiler(tools, family: str, dtype: torch.dtype):
    """The types and options that models have, and not those that the list of what is shipped thinks of."""
    model = build(family).eval().to(dtype)
    ids = torch.randint(0, 64, (2, 37))
    graph = capture(model, inputs={"input_ids": ids, "use_cache": False})
    done = lower(graph, "ascend")
    graph.clean()
    values = [graph_input(graph, name, ids) for name in graph.inputs]
    with torch.no_grad(), recorded() as launched:
        graph.module(*values)
    assert bool(launched) == ("chunk_scan" in done)
    for call in {call for call, _ in launched}:
        for chip in tiles.CHIPS:
            verdict = tools.verdict(tools.ir(call, chip), chip)
            assert verdict.ok, (call, chip, verdict.errors)


@pytest.mark.slow
def test_gradients_of_the_ops_come_from_the_kernels(tools):
    """Through autograd: the scan's from our backward, those of convolution and norm from the reference."""
    case = scan_case("autograd", 2, 70, 4, 2, 32, 32, D="head", z=True, bias=True, init=True, softplus=True)
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "init_state")
    options = case.options

    def gradients(op: Any, exact: bool) -> list[torch.Tensor]:
        leaves = [(t.double() if exact else t.clone()).requires_grad_() for t in case.arguments[: len(names)]]
        y, state = op(*leaves, **options)
        g = torch.Generator().manual_seed(0)
        dy = torch.randn(y.shape, generator=g).half().to(y.dtype)
        dstate = torch.randn(state.shape, generator=g).to(state.dtype)
        return list(torch.autograd.grad((y, state), leaves, (dy, dstate)))

    with on_the_cpu(tools) as launched:
        ours = gradients(torch.ops.latentscan_ascend.chunk_scan, exact=False)
    assert "token_kernel" in {call.kernel.name for call, _ in launched}
    for name, a, b in zip(names, ours, gradients(torch.ops.latentscan.chunk_scan, exact=True), strict=True):
        assert relative(a, b) <= 8 * 2.0**-11, name
    x = torch.randn(2, 9, 64).half().requires_grad_()
    weight = torch.randn(64, 4).half().requires_grad_()
    with on_the_cpu(tools):
        y, _ = torch.ops.latentscan_ascend.causal_conv1d(x, weight, activation="silu")
        found = torch.autograd.grad(y.float().sum(), (x, weight))
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    y, _ = torch.ops.latentscan.causal_conv1d(*exact, activation="silu")
    for a, b in zip(found, torch.autograd.grad(y.sum(), exact), strict=True):
        assert relative(a, b) <= 8 * 2.0**-11


def graph_input(graph: Any, name: str, ids: torch.Tensor) -> Any:
    """The value of one of a graph's inputs: a weight, a size, or the tokens."""
    if (weight := graph.weights.get(name)) is not None:
        return weight.value
    fake = graph.value(graph.node(name))
    return int(fake.node.hint) if isinstance(fake, torch.SymInt) else ids


@pytest.mark.slow
def test_json_and_status_of_a_short_run(tools, tmp_path, capsys):
    where = ["--env", str(tools.environment.folder), "--chip", "910B3", "--match", "join"]
    assert command.main([*where, "--json", str(tmp_path / "f.json")]) == 0
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["ok"] and {k["kernel"] for k in found["kernels"]} == {"join_kernel"}
    assert "nothing runs on an NPU" in capsys.readouterr().out


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 3), st.integers(3, 160), st.sampled_from(["", "seq_idx"]), st.booleans())
def test_any_length_and_packing_equals_fp64(tools, batch: int, length: int, packed: str, backward: bool):
    options: dict[str, Any] = {"init": True, "z": True, "D": "head", "softplus": True, "packed": packed}
    case = scan_case("any", batch, length, 4, 2, 32, 32, backward=backward, **options)
    with on_the_cpu(tools):
        assert max(case.errors().values()) <= case.tolerance


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["conv", "norm", "update", "decode"]), st.integers(0, 10_000))
def test_any_call_of_the_other_kernels_equals_fp64(tools, what: str, seed: int):
    """Batches, lengths, packing, views, what is optional, sizes that are no tile, and rows without a visible key."""
    pick, g = random.Random(seed), torch.Generator().manual_seed(seed)

    def draw(*shape: int, view: bool = False, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        whole = torch.randn(*shape[:-1], shape[-1] * (1 + view), generator=g).to(dtype)
        return whole[..., : shape[-1]]

    def maybe(*shape: int) -> torch.Tensor | None:
        return draw(*shape) if pick.random() < 0.5 else None

    b, view = pick.randint(1, 3), pick.random() < 0.4
    if what == "conv":
        L, D, W = pick.choice([1, 2, 3, 5, 31, 33, 70]), pick.choice([1, 16, 24, 130]), pick.choice([2, 3, 4])
        seq_idx = (torch.rand(b, L, generator=g) < 0.3).int().cumsum(1).int() if pick.random() < 0.5 else None
        given_ = (draw(b, L, D, view=view), draw(D, W), maybe(D), maybe(b, D, W - 1), seq_idx)
        options: dict[str, Any] = {"activation": pick.choice(["none", "silu"])}
        case = Case(what, mixer.causal_conv1d, ssm_conv.causal_conv1d, given_, options)
    elif what == "norm":
        G, S = pick.choice([1, 2, 3]), pick.choice([1, 16, 40, 2049])
        options = {"eps": 1e-5, "group_size": S, "norm_before_gate": pick.random() < 0.5}
        given_ = (draw(b, 5, G * S, view=view), maybe(b, 5, G * S), draw(G * S))
        case = Case(what, mixer.gated_rms_norm, ssm_norm.gated_rms_norm, given_, options)
    elif what == "update":
        H, P, N, G = pick.choice([(4, 1, 16, 1), (4, 48, 96, 2), (6, 64, 128, 3), (2, 100, 20, 1)])
        A = -draw(*pick.choice([(H,), (H, N)]), dtype=torch.float32).abs()
        options = {"dt_softplus": True, "dt_min": pick.choice([0.0, 0.1]), "dt_max": pick.choice([float("inf"), 0.7])}
        given_ = (
            draw(b, H, P, N, dtype=pick.choice([torch.float32, torch.float16])), draw(b, H, P), draw(b, H), A,
            draw(b, G, N), draw(b, G, N), pick.choice([None, draw(H), draw(H, P)]), maybe(b, H, P), maybe(H),
        )  # fmt: skip
        case = Case(what, mixer.state_update, ssm.state_update, given_, options)
    else:
        H, C, R, T = (
            pick.choice([1, 5, 33]),
            pick.choice([20, 64]),
            pick.choice([8, 16]),
            pick.choice([1, 31, 129, 300]),
        )
        padding = (torch.rand(b, T, generator=g) < 0.7).int() if pick.random() < 0.6 else None
        if padding is not None and b > 1:
            padding[0] = 0
        given_ = (draw(b, H, 1, C), draw(b, H, 1, R), draw(b, T, C, view=view), draw(b, 1, T, R), padding)

        def oracle(q: Any, r: Any, latent: Any, k: Any, pad: Any, scale: float) -> torch.Tensor:
            return attention.latent_attention(q, r, latent, k, padding=pad, kind="causal", scale=scale)

        case = Case(what, latent_decode.latent_decode, oracle, given_, {"scale": 0.1})
    with on_the_cpu(tools):
        assert max(case.errors().values()) <= case.tolerance
