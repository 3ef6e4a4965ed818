"""Models whose mixers are lowered to the Triton kernels, under Triton's interpreter; run by `test_triton_mamba.py`."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from latentscan.ir.errors import KernelError
from latentscan.ir.ops import functional
from latentscan.kernels.triton import causal_conv1d as conv
from latentscan.lowering import select, triton_mamba
from latentscan.runtime.door import session_of
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import distance, pair, tokens, worst_gradient

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_triton_mamba.py"

LOWERED: list[str] = []


@pytest.fixture(autouse=True)
def target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference target with the Mamba kernels of ours added."""
    LOWERED.clear()
    original = select.lower

    def lower(graph: Any, name: str, tiles: Any = None) -> dict[str, int]:
        rules = dict(triton_mamba.KERNELS)
        with pytest.MonkeyPatch.context() as patch:
            from latentscan.lowering import reference

            patch.setattr(reference, "KERNELS", {**reference.KERNELS, **rules})
            done = original(graph, name, tiles)
        LOWERED.extend(str(n.target) for n in graph.nodes if str(n.target).startswith("latentscan_triton"))
        return done

    monkeypatch.setattr("latentscan.runtime.executable.lower", lower)
    monkeypatch.setattr(conv, "BACKWARD", {"S": 4, "T": 8, "BD": 64, "num_warps": 1})


def names() -> set[str]:
    return {name.split(".")[1] for name in LOWERED}


@pytest.mark.parametrize("family", ["mamba2", "mamba"])
def test_training_equals_eager(family):
    model, eager = pair(family, "")
    call = {"input_ids": tokens(2, 11), "labels": tokens(2, 11)}
    got, want = model(**call), eager(**call)
    assert distance(got.logits, want.logits) < 1e-5
    got.loss.backward()
    want.loss.backward()
    assert worst_gradient(model, eager) < 2e-4
    scan = {"gated_rms_norm"} if family == "mamba2" else {"selective_scan"}
    assert names() == {"causal_conv1d"} | scan


@pytest.mark.parametrize("family", ["mamba2", "falcon_h1"])
def test_a_fused_mixer_trains_as_eager(family):
    model, eager = pair(family, "fuse-mamba", num_hidden_layers=1)
    call = {"input_ids": tokens(2, 11), "labels": tokens(2, 11)}
    got, want = model(**call), eager(**call)
    assert distance(got.logits, want.logits) < 1e-5
    got.loss.backward()
    want.loss.backward()
    assert worst_gradient(model, eager) < 2e-4
    assert names() == {"mamba_mixer"}


@pytest.mark.parametrize("family", ["mamba2", "mamba"])
def test_generate_equals_eager_and_writes_states_in_place(family):
    model, eager = pair(family, "")
    model.eval()
    eager.eval()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    want = eager.generate(tokens(2, 7), **options)
    assert model.generate(tokens(2, 7), **options).tolist() == want.tolist()
    assert {"conv_update_", "state_update_"} <= names()
    assert not {"conv_update", "state_update"} & names()
    assert session_of(model) is not None


def test_inductor_takes_the_ops_and_the_written_states():
    model, eager = build("mamba2", num_hidden_layers=1), build("mamba2", num_hidden_layers=1)
    wrap(model, "fuse-mamba", inductor=True)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    want = eager.generate(tokens(2, 7), **options)
    assert model.generate(tokens(2, 7), **options).tolist() == want.tolist()
    assert {"mamba_mixer", "conv_update_", "state_update_"} <= names()


def test_a_state_that_is_read_before_it_is_copied_is_not_written_in_place():
    from torch import fx

    graph = fx.Graph()
    state = graph.placeholder("state")
    step = graph.call_function(torch.ops.latentscan.state_update.default, (state,))
    import operator

    graph.call_function(operator.getitem, (step, 0))
    new = graph.call_function(operator.getitem, (step, 1))
    later = graph.call_function(torch.add, (state, 1))
    copy = graph.call_method("copy_", (state, new))
    assert triton_mamba._written_state(step, 0) is None
    later.replace_input_with(state, copy)
    graph.erase_node(later)
    assert triton_mamba._written_state(step, 0) is not None
    graph.call_function(torch.add, (new, 1))  # the new state is wanted elsewhere, too
    assert triton_mamba._written_state(step, 0) is None


def test_ops_are_sound():
    x, w, bias = torch.randn(2, 5, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True), torch.randn(6)
    ops = torch.ops.latentscan_triton
    torch.library.opcheck(ops.causal_conv1d.default, (x, w, bias, None, None), {"activation": "silu"})
    u = torch.randn(2, 3, 5, requires_grad=True)
    bc = torch.randn(2, 4, 5)
    args = (u, torch.randn(2, 3, 5), -torch.rand(3, 4), bc, bc, None, torch.randn(2, 3, 5), None, None)
    torch.library.opcheck(ops.selective_scan.default, args, {"delta_softplus": True})
    norm = {"eps": 1e-5, "group_size": 3, "norm_before_gate": False}
    torch.library.opcheck(ops.gated_rms_norm.default, (x, None, torch.randn(6)), norm)
    step = (
        torch.randn(2, 3, 2, 4),
        torch.randn(2, 3, 2),
        torch.randn(2, 3),
        -torch.rand(3),
        bc[..., :1].mT,
        bc[..., :1].mT,
    )
    limits = {"dt_softplus": True, "dt_min": 0.0, "dt_max": float("inf")}
    torch.library.opcheck(ops.state_update_.default, step, limits)


def test_what_has_no_kernel_says_why():
    x, w = torch.randn(2, 5, 6), torch.randn(6, 5)
    assert "filter width 5" in str(triton_mamba.unserved("causal_conv1d", x, w, activation="silu"))
    assert "float64" in str(triton_mamba.unserved("causal_conv1d", x.double(), w.double()))
    assert "group_size" in str(triton_mamba.unserved("gated_rms_norm", x, None, w, group_size=1 << 20))
    assert triton_mamba.unserved("causal_conv1d", x, w[:, :4]) is None
    with pytest.raises(KernelError, match="width 5"):
        torch.ops.latentscan_triton.causal_conv1d(x, w, activation="none")
    y = functional.causal_conv1d(x, w)  # the reference takes any width
    assert y.shape == x.shape


def test_two_kernels_for_one_op_are_an_error():
    table: dict[str, Any] = {}
    triton_mamba.register(table)
    assert set(table) == set(triton_mamba.KERNELS)
    with pytest.raises(KernelError, match="already"):
        triton_mamba.register(table)
