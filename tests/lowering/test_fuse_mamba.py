"""fuse-mamba: the same numbers from fewer kernels and bytes, and a reason where it leaves a mixer as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from latentscan.ir.capture import capture
from latentscan.ir.errors import KernelError, RefusedError
from latentscan.ir.ops import ssm as _ssm  # noqa: F401
from latentscan.ir.ops.ssm_mixer import mamba_mixer
from latentscan.kernels.reference import ssm, ssm_conv, ssm_norm
from latentscan.lowering.fuse_mamba import FuseMamba
from latentscan.lowering.states import share_final_states
from latentscan.passes.base import Context, Refusal
from latentscan.passes.pipeline import parse, run
from latentscan.runtime.backend import latentscan
from latentscan.runtime.door import session_of
from latentscan.runtime.phases import traced_phases
from latentscan.runtime.wrap import wrap
from latentscan.tests.lowering.counting import count
from latentscan.tests.models import MAMBA1_FAMILIES, SSD_FAMILIES, build
from latentscan.tests.runtime.helpers import distance, pair, ragged, tokens, worst_gradient

FAST = ("mamba2",)
FAMILIES = [f if f in FAST else pytest.param(f, marks=pytest.mark.slow) for f in (*SSD_FAMILIES, *MAMBA1_FAMILIES)]


def mixers(model: torch.nn.Module) -> int:
    return sum(hasattr(m, "A_log") for m in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_eager(family):
    model, eager = pair(family, "fuse-mamba")
    for batch, length in ((2, 21), (3, 37)):
        call = {"input_ids": tokens(batch, length), "labels": tokens(batch, length)}
        model.zero_grad()
        eager.zero_grad()
        got, want = model(**call), eager(**call)
        assert distance(got.logits, want.logits) < 5e-6
        got.loss.backward()
        want.loss.backward()
        assert worst_gradient(model, eager) < 3e-4
    (traced,) = session_of(model).graphs
    ops = traced.operations[0]
    (record,) = traced.records
    if family in SSD_FAMILIES:
        assert ops["mamba_mixer"] == mixers(model) == len(record.sites)
        assert not {"chunk_scan", "causal_conv1d", "gated_rms_norm"} & set(ops)
        gates = {site.facts["gate"] for site in record.sites}
        assert gates == {"plain" if family == "falcon_h1" else "norm"}
    else:
        assert {site.rule for site in record.sites} == {"delta-channels-last"}
        assert len(record.sites) == ops["selective_scan"] == mixers(model)


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow) for f in ("zamba2", "mamba")] + ["mamba2"])
def test_generate_equals_eager(family):
    model, eager = pair(family, "fuse-mamba")
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    want = eager.eval().generate(tokens(2, 9), **options)
    assert model.eval().generate(tokens(2, 9), **options).tolist() == want.tolist()
    refused = {r.rule for g in session_of(model).graphs for record in g.records for r in record.refusals}
    assert "single-step" in refused


@pytest.mark.slow
def test_packed_sequences_stay_apart_in_the_fused_mixer():
    model, eager = pair("mamba2", "fuse-mamba")
    ids, seq_idx = tokens(1, 20), torch.tensor([[0] * 7 + [1] + [2] * 12]).int()
    with torch.no_grad():
        got = model(input_ids=ids, seq_idx=seq_idx).logits
        parts = [eager(ids[:, a:b], use_cache=False).logits for a, b in ((0, 7), (7, 8), (8, 20))]
    assert distance(got, torch.cat(parts, 1)) < 1e-5
    assert session_of(model).graphs[-1].operations[0]["mamba_mixer"] == mixers(model)


@pytest.mark.parametrize("family", ["mamba2", pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_a_training_step_launches_moves_and_keeps_less(family):
    counted = {}
    for pipeline in ("", "fuse-mamba"):
        model, _ = pair(family, pipeline)
        call = {"input_ids": tokens(2, 64), "labels": tokens(2, 64)}
        model(**call)  # compiles
        counted[pipeline] = count(lambda model=model, call=call: model(**call).loss)
    before, after = counted[""], counted["fuse-mamba"]
    layers = 2
    # Per layer: scan and convolution and their gates were two launches or more, and as many backward.
    assert after.launches <= before.launches - 4 * layers
    assert after.moved < before.moved
    inner, wide = 128, 192  # of the tiny models; fp32
    assert before.kept - after.kept >= layers * 2 * 64 * wide * 4  # the convolution's output waits no more
    assert after.by_name["mamba_mixer"] == after.by_name["mamba_mixer_backward"] == layers
    assert inner < wide


@pytest.mark.slow
def test_gradient_checkpointing_and_autocast():
    plain, model = build("mamba2").train(), build("mamba2").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    call = {"input_ids": tokens(2, 21), "labels": tokens(2, 21)}
    wrap(model, "fuse-mamba")
    model(**call).loss.backward()
    plain(**call).loss.backward()
    assert worst_gradient(model, plain) < 3e-4
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**call)
    out.loss.backward()
    assert distance(out.logits.float(), plain(**call).logits) < 0.05
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.slow
def test_the_plain_door_takes_it():
    model = build("mamba2")
    compiled = torch.compile(model, backend=latentscan, options={"pipeline": "fuse-mamba"})
    ids = tokens(2, 21)
    with torch.no_grad():
        assert distance(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits) < 5e-6


def fused(graph: Any) -> Any:
    return run(graph, parse("fuse-mamba"), Context(), strict=False).records[0]


def graph_of(family: str, *, training: bool = True, **more: Any) -> Any:
    model = build(family)
    return capture(model.train(training), inputs={**ragged(2, 9), "use_cache": False, **more}, training=training)


def test_masked_padding_is_a_reason_to_leave_the_parts():
    record = fused(graph_of("mamba2"))
    assert not record.sites
    assert {r.rule for r in record.refusals} == {"no-convolution"}
    assert all("padding" in r.reason and r.remedy for r in record.refusals)
    assert {r.module for r in record.refusals} == {f"backbone.layers.{i}.mixer" for i in range(2)}


def test_a_model_without_mixers_is_an_error():
    with pytest.raises(RefusedError, match="found nothing to match"):
        pair("llama", "fuse-mamba")


def test_what_the_plan_says_changes_nothing():
    graph = capture(build("mamba2"))
    before = [(n.name, n.target, n.args) for n in graph.nodes]
    found = FuseMamba().plan(graph, Context())
    assert [f.rule for f in found] == ["mixer", "mixer"]
    assert [(n.name, n.target, n.args) for n in graph.nodes] == before


def _mixer_inputs(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[list[Any], dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    heads, dim, groups, states = 4, 3, 2, 2
    inner, wide = heads * dim, heads * dim + 2 * groups * states

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    inputs = [
        random(2, 7, inner + wide + heads), random(wide, 4), random(wide) if bias else None, -random(heads).abs(),
        random(heads) if bias else None, random(heads) if bias else None, random(inner), None,
    ]  # fmt: skip
    options = {
        "heads": heads, "head_dim": dim, "groups": groups, "d_state": states, "activation": "silu", "chunk_size": 4,
        "dt_softplus": True, "dt_min": 0.0, "dt_max": float("inf"), "eps": 0.1, "group_size": 6,
        "norm_before_gate": False,
    }  # fmt: skip
    return inputs, options


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("gated", ["norm", "plain"])
def test_the_op_is_its_parts_one_after_another(norm_first, gated):
    inputs, o = _mixer_inputs()
    o["norm_before_gate"] = norm_first
    if gated == "plain":
        inputs[6] = None
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 1]])
    for packed in (None, seq_idx):
        inputs[7] = packed
        projected, weight, bias, A, D, dt_bias, norm_weight, _ = inputs
        z, mixed, dt = projected.split([12, 20, 4], -1)
        mixed, _ = ssm_conv.causal_conv1d(mixed, weight, bias, None, packed, activation="silu")
        x, B, C = (
            mixed[..., :12].unflatten(-1, (4, 3)),
            *(mixed[..., i : i + 4].unflatten(-1, (2, 2)) for i in (12, 16)),
        )
        y, state = ssm.chunk_scan_recurrence(
            x, dt, A, B, C, D, None, dt_bias, None, packed, dt_softplus=True, dt_min=0.0, dt_max=float("inf")
        )
        want = y.flatten(2) * torch.nn.functional.silu(z)
        if norm_weight is not None:
            norm = {name: o[name] for name in ("eps", "group_size", "norm_before_gate")}
            want = ssm_norm.gated_rms_norm(y.flatten(2), z, norm_weight, **norm)
        out, final, _ = mamba_mixer.op(*inputs, **o)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(final, state)


@pytest.mark.parametrize("gated", [pytest.param("norm", marks=pytest.mark.slow), "plain"])
def test_the_op_is_sound(gated):
    inputs, options = _mixer_inputs()
    if gated == "plain":
        inputs[6] = None
    leaves = [None if t is None else t.requires_grad_() for t in inputs]
    torch.library.opcheck(mamba_mixer.op, tuple(leaves), options)

    def results(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(tensors)
        return mamba_mixer.op(*[None if t is None else next(given) for t in leaves], **options)[:2]

    assert torch.autograd.gradcheck(results, [t for t in leaves if t is not None])
    with pytest.raises(KernelError, match="expected 12"):
        mamba_mixer.op(inputs[0][..., 1:], *inputs[1:], **options)


def test_a_wrong_gate_is_seen_by_the_parity_check():
    model, eager = pair("mamba2", "fuse-mamba")
    with torch.no_grad():
        for module in eager.modules():
            if type(module).__name__ == "MambaRMSNormGated":
                module.variance_epsilon = 0.5  # what the fused op would do with another eps
        ids = tokens(2, 9)
        assert distance(model(ids, use_cache=False).logits, eager(ids, use_cache=False).logits) > 1e-3


# --- final states ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mamba2", pytest.param("mamba", marks=pytest.mark.slow)])
def test_final_states_are_shared_in_prefill_only(family):
    prefill, decode = (t.graph for t in traced_phases(build(family), batch=2, seq=9))
    copies = len(prefill.calls("copy_"))
    assert share_final_states(prefill) == 2
    assert len(prefill.calls("copy_")) == copies - 2
    prefill.graph.lint()
    assert share_final_states(decode) == 0
    assert share_final_states(capture(build(family).train(), training=True)) == 0


def test_a_final_state_with_another_reader_is_copied():
    prefill = traced_phases(build("mamba2", num_hidden_layers=1), batch=2, seq=9)[0].graph
    (copy,) = [n for n in prefill.calls("copy_") if n.args[1].name.startswith("final_state")]
    with prefill.before(copy, "test"):
        prefill.call(torch.neg, copy.args[1])
    assert share_final_states(prefill) == 0


def test_refusals_say_what_and_why():
    inputs = {"input_ids": tokens(2, 9), "use_cache": False}
    graph = capture(build("mamba2"), inputs=inputs)
    (scan, _) = graph.calls(torch.ops.latentscan.chunk_scan.default)
    with graph.before(scan, "test"):
        shifted = graph.call(torch.add, scan.args[1], 1)
    scan.update_arg(1, shifted)
    first, second = FuseMamba().plan(graph, Context())
    assert isinstance(first, Refusal)
    assert first.rule == "no-projection"
    assert second.rule == "mixer"
