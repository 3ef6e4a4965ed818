"""Swapped storages leave the device after the forward and are back, bit by bit, when the backward asks for them."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from latentscan.ir.capture import capture
from latentscan.ir.errors import RefusedError
from latentscan.ir.ops.swap import SWAP_OUT
from latentscan.lowering import swap
from latentscan.lowering.swap import Saved, Swapping, lower_swaps
from latentscan.passes.base import Context, Refusal
from latentscan.passes.mla_swap_core_attn_out import MlaSwapCoreAttnOut
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build
from latentscan.tests.passes.switches import rewritten
from latentscan.tests.runtime.helpers import ragged, tokens, worst_gradient


def layers(x: torch.Tensor, weights: list[torch.Tensor], dead: list[StorageWeakRef], *, stays: bool = False) -> Any:
    """exp, then a product, for each weight; what exp gives is kept by both and swapped."""
    for i, w in enumerate(weights):
        y = torch.exp(0.1 * x)
        dead.append(StorageWeakRef(y.untyped_storage()))
        y = swap.swap_out(y, stays and i + 1 == len(weights))
        x = y.transpose(0, 1).transpose(0, 1) @ w
        del y
    return x.sum()


def given() -> tuple[torch.Tensor, list[torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(4, 4, generator=g, dtype=torch.float64).requires_grad_() for _ in range(4))
    return x, weights


def gradients(run: Any) -> list[torch.Tensor]:
    x, weights = given()
    run(x, weights, []).backward()
    return [t.grad for t in (x, *weights)]


@pytest.mark.parametrize("stays", [False, True])
def test_gradients_are_bitwise_those_of_the_plain_call(stays):
    got = gradients(Swapping(lambda *args: layers(*args, stays=stays)))
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(layers), strict=True))


def test_device_memory_is_free_after_the_forward_except_what_stays():
    x, weights = given()
    dead: list[StorageWeakRef] = []
    loss = Swapping(lambda *args: layers(*args, stays=True))(x, weights, dead)
    gc.collect()
    assert [d.expired() for d in dead] == [True, True, False]
    loss.backward()
    plain: list[StorageWeakRef] = []
    kept = layers(x, weights, plain)  # without the hooks nothing is swapped
    assert [d.expired() for d in plain] == [False] * 3
    del kept


def test_the_way_back_starts_one_layer_ahead(monkeypatch):
    """Before layer n's backward asks for its value, the backward of layer n + 1 has started the copy."""
    log: list[str] = []
    copies: list[swap.HostCopy] = []
    fetch, prefetch, start = swap.HostCopy.fetch, swap.HostCopy.prefetch, swap.HostCopy.__init__

    def need(self: Any) -> torch.Tensor:
        log.append(f"need {copies.index(self)}")
        return fetch(self)

    def made(self: Any, *given: Any) -> None:
        copies.append(self)
        start(self, *given)

    monkeypatch.setattr(swap.HostCopy, "__init__", made)

    def ahead(self: Any) -> None:
        if self._again is None:
            log.append(f"start {copies.index(self)}")
        prefetch(self)

    monkeypatch.setattr(swap.HostCopy, "prefetch", ahead)
    monkeypatch.setattr(swap.HostCopy, "fetch", need)
    x, weights = given()
    Swapping(lambda *args: layers(*args, stays=True))(x, weights, []).backward()
    needs = [log.index(f"need {i}") for i in (0, 1)]
    starts = [log.index(f"start {i}") for i in (0, 1)]
    assert len(copies) == 2
    assert starts[1] < needs[1]
    assert starts[1] < starts[0] < needs[0]


def test_the_callers_own_hooks_see_what_is_not_swapped():
    seen: list[torch.Size] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen.append(t.shape)
        return t * 1

    x, weights = given()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = Swapping(layers)(x, weights, [])
    assert len(seen) == 3  # the weights; nothing of exp
    loss.backward()
    assert torch.equal(x.grad, gradients(layers)[0])


def test_a_failed_call_leaves_no_hooks_behind():
    def fail(*_: Any) -> None:
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        Swapping(fail)()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert swap._CURRENT.get() is None


def test_views_of_any_form_come_back(monkeypatch):
    storage = torch.arange(24, dtype=torch.float32)
    view = storage.view(4, 6)[1:, ::2].t()
    saved = Saved(view)
    saved.move(swap.HostCopy(view.untyped_storage(), view.device))
    assert torch.equal(saved.get(), view)
    assert saved.get().stride() == view.stride()


def test_the_op_is_sound():
    for stays in (False, True):
        torch.library.opcheck(SWAP_OUT.op, (torch.randn(2, 3, dtype=torch.float64, requires_grad=True), stays))


# -- in a model ----------------------------------------------------------------------------------------------------


def test_without_gradients_the_marks_go():
    model = build("deepseek_v3", first_k_dense_replace=2)
    for training, left in ((False, 0), (True, 4)):
        graph, _ = rewritten(capture(model.train(training), training=training), "mla-swap-core-attn-out")
        assert len(graph.calls(SWAP_OUT.op)) == 4  # two layers; the attention's output and the projection's input
        assert lower_swaps(graph, inductor=False) == left
        assert len(graph.calls(swap.swap_out)) == left
        assert not graph.calls(SWAP_OUT.op)
        graph.graph.lint()


def test_inductor_is_refused_in_training_with_the_remedy():
    model = build("deepseek_v3", first_k_dense_replace=2).train()
    graph, _ = rewritten(capture(model, training=True), "mla-swap-core-attn-out")
    with pytest.raises(RefusedError, match="inductor=False"):
        lower_swaps(graph, inductor=True)


def test_the_last_layers_output_stays_unless_asked():
    graph = capture(build("deepseek_v3", first_k_dense_replace=2).train(), training=True)
    assert [s.rule for s in MlaSwapCoreAttnOut().plan(graph, Context())] == ["swapped", "stays"]
    assert [s.rule for s in MlaSwapCoreAttnOut(keep_last=False).plan(graph, Context())] == ["swapped"] * 2
    (only,) = MlaSwapCoreAttnOut().plan(capture(build("llama", num_hidden_layers=1)), Context())
    assert isinstance(only, Refusal)
    assert (only.rule, only.remedy) == ("one-layer", "give keep_last=false")


@pytest.mark.slow
def test_frozen_layers_and_several_steps_train_as_eager():
    eager = build("deepseek_v3").train()
    model = wrap(copy.deepcopy(eager), "mla-swap-core-attn-out{keep_last=false},mla-zero-memory")
    for m in (model, eager):
        for name, p in m.named_parameters():
            p.requires_grad_("layers.1" in name)
        for seed in (0, 1):
            m(**ragged(2, 11 + seed), use_cache=False).loss.backward()
        m(tokens(2, 9, seed=3), labels=tokens(2, 9, seed=3), use_cache=False).loss.backward()
    assert worst_gradient(model, eager) < 5e-6
