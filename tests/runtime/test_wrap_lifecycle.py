"""A wrapped model stays the user's model: copies, dtypes, state dicts, modes, unwrap; old weights are really gone."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from latentscan.ir.errors import LatentscanError, PipelineError, RefusedError, VerifyError
from latentscan.runtime.door import session_of
from latentscan.runtime.own import get
from latentscan.runtime.wrap import refresh, unwrap, wrap
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import distance, pair, tokens

SPLIT = "mla-mm-split,mla-absorb"


def same_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


# -- copies, devices, dtypes ----------------------------------------------------------------------------------------


def test_a_deep_copy_is_a_wrapped_model_of_its_own():
    model, eager = pair("deepseek_v3", SPLIT)
    ids = tokens()
    before = model(ids).logits
    other = copy.deepcopy(model)
    assert session_of(other) is not session_of(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    assert torch.equal(model(ids).logits, before)
    eager.load_state_dict(other.state_dict())
    assert distance(other(ids).logits, eager(ids).logits) < 2e-6
    assert len(session_of(other).graphs) == len(session_of(model).graphs) == 1
    assert other.report.graphs is not model.report.graphs
    with pytest.raises(RefusedError, match="together with its model"):
        copy.deepcopy(session_of(model))
    with pytest.raises(RefusedError, match="save_pretrained"):
        pickle.dumps(session_of(model))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.bfloat16, 0.02),
        pytest.param(torch.float16, 0.004, marks=pytest.mark.slow),
        pytest.param(torch.float64, 1e-6, marks=pytest.mark.slow),
    ],
)
def test_a_wrapped_model_changes_its_dtype(dtype, tolerance):
    model, eager = pair("deepseek_v3", SPLIT)
    model(tokens())  # compiled once in fp32, then again
    model.half() if dtype == torch.float16 else model.to(dtype)
    eager.to(dtype)
    got, want = model(tokens()).logits, eager(tokens()).logits
    assert got.dtype == want.dtype
    assert distance(got, want) < tolerance
    assert all(p.dtype == dtype for p in model.parameters())
    for path in session_of(model).plan.released:  # .to() wrote them out in full: they are one number again
        assert not any(get(model, path).stride())
        assert get(model, path).dtype == dtype


def test_train_and_eval_switch_without_new_graphs():
    model, eager = pair("deepseek_v3", SPLIT)
    for _ in range(2):
        for training in (True, False):
            model.train(training)
            eager.train(training)
            assert distance(model(tokens()).logits, eager(tokens()).logits) < 2e-6
            with torch.no_grad():
                assert distance(model(tokens()).logits, eager(tokens()).logits) < 2e-6
    kinds = [(g.training, g.cached) for g in session_of(model).graphs]
    assert len(kinds) == 4  # two modes, with and without gradients, each once


@pytest.mark.slow
def test_inference_mode_equals_no_grad():
    model, eager = pair("deepseek_v3", SPLIT)
    with torch.inference_mode():
        got = model(tokens()).logits
    assert distance(got, eager(tokens()).logits) < 2e-6
    ids = tokens()
    assert distance(model(ids, labels=ids).loss, eager(ids, labels=ids).loss) < 1e-6  # training afterwards works


# -- state dicts ----------------------------------------------------------------------------------------------------


def test_state_dicts_keep_the_original_names_and_values():
    model, eager = pair("deepseek_v3", SPLIT)
    assert same_state(model.state_dict(), eager.state_dict())
    assert list(model.state_dict()) != []
    doubled = {k: 2 * v for k, v in eager.state_dict().items()}
    result = model.load_state_dict(doubled)
    assert not result.missing_keys
    assert not result.unexpected_keys
    eager.load_state_dict(doubled)
    assert same_state(model.state_dict(), eager.state_dict())
    assert distance(model(tokens()).logits, eager(tokens()).logits) < 2e-6
    # Sabotage: a state dict that lacks one matrix is noticed.
    del doubled["model.layers.0.self_attn.q_b_proj.weight"]
    with pytest.raises(RuntimeError, match="q_b_proj"):
        model.load_state_dict(doubled)


def test_loading_a_state_dict_leaves_the_dict_alone():
    model, eager = pair("deepseek_v3", SPLIT)
    given = dict(eager.state_dict())
    names = list(given)
    model.load_state_dict(given)
    assert list(given) == names


def test_a_module_that_holds_the_wrapped_model_saves_and_loads_it():
    model, eager = pair("deepseek_v3", SPLIT)
    outer = nn.ModuleDict({"policy": model})
    state = outer.state_dict()
    assert state.keys() == {f"policy.{k}" for k in eager.state_dict()}
    outer.load_state_dict({k: 2 * v for k, v in state.items()})
    assert torch.equal(model.lm_head.weight, 2 * eager.lm_head.weight)
    parts = model.model.layers[0].self_attn.q_b_proj
    want = 2 * eager.model.layers[0].self_attn.q_b_proj.weight.norm()
    assert torch.allclose(torch.cat([parts.weight_part0, parts.weight_part1]).norm(), want)


# -- unwrap ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "pipeline"),
    [("deepseek_v3", SPLIT), pytest.param("gpt2", "latent-cache,mla-absorb", marks=pytest.mark.slow)],
)
def test_unwrap_gives_back_the_very_model(family, pipeline):
    model, eager = pair(family, pipeline)
    model.generate(tokens(), max_new_tokens=3, do_sample=False)
    assert unwrap(model) is model
    assert same_state(model.state_dict(), eager.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in eager.named_parameters()]
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in eager.named_buffers()]
    assert model.__dict__.keys() == eager.__dict__.keys()
    assert not model._state_dict_hooks
    assert not model._load_state_dict_pre_hooks
    assert torch.equal(model(tokens()).logits, eager(tokens()).logits)
    wrap(model, pipeline)  # and again
    assert distance(model(tokens()).logits, eager(tokens()).logits) < 2e-6


def test_unwrap_gives_the_present_weights():
    model, eager = pair("deepseek_v3", SPLIT)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
        for p in eager.parameters():
            p.mul_(2)
    assert same_state(unwrap(model).state_dict(), eager.state_dict())


def test_wrapping_twice_and_unwrapping_an_unwrapped_model_refuse():
    model = build("llama")
    with pytest.raises(RefusedError, match="not wrapped"):
        unwrap(model)
    with pytest.raises(RefusedError, match="not wrapped"):
        refresh(model)
    wrap(model)
    with pytest.raises(RefusedError, match="wrapped already"):
        wrap(model)


# -- released weights -----------------------------------------------------------------------------------------------


def test_released_weights_are_freed_and_an_eager_run_shows_nan():
    model = build("deepseek_v3")
    old = {n: weakref.ref(p) for n, p in model.named_parameters()}
    total = sum(p.numel() for p in model.parameters())
    wrap(model, SPLIT)
    released = session_of(model).plan.released
    assert len(released) == 4
    with torch.no_grad():
        model(tokens())
    model(tokens())
    gc.collect()
    assert [n for n in released if old[n]() is not None] == []
    assert all(r() is not None for n, r in old.items() if n not in released)
    assert sum(p.numel() for p in model.parameters()) == total
    held = sum(b.untyped_storage().nbytes() for n, b in model.named_buffers() if n in released)
    assert held == 4 * len(released)  # one fp32 number each
    assert bool(type(model).forward(model, tokens()).logits.isnan().all())
    assert not bool(model(tokens()).logits.isnan().any())


def test_a_wrapped_model_can_be_freed():
    """Dynamo keeps what it compiled where the garbage collector does not look: nothing there may hold the model."""
    model = wrap(build("deepseek_v3"), SPLIT)
    model(tokens())
    with torch.no_grad():
        model.generate(tokens(), max_new_tokens=3)
    there = weakref.ref(model), weakref.ref(session_of(model)), weakref.ref(model.lm_head.weight)
    del model
    gc.collect()
    assert [r() for r in there] == [None, None, None]


def test_tied_weights_stay_tied():
    model, eager = pair("llama", "", tie_word_embeddings=True)
    ids = tokens()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model(ids, labels=ids).loss.backward()
    eager(ids, labels=ids).loss.backward()
    assert distance(model.lm_head.weight.grad, eager.lm_head.weight.grad) < 1e-6
    other = copy.deepcopy(model)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert other.lm_head.weight is not model.lm_head.weight


def test_new_parameters_train_only_if_the_old_ones_did():
    model = build("deepseek_v3")
    frozen = model.model.layers[0].self_attn.kv_b_proj
    frozen.weight.requires_grad_(False)
    wrap(model, SPLIT)
    assert not frozen.weight_part0.requires_grad
    assert model.model.layers[1].self_attn.kv_b_proj.weight_part0.requires_grad
    unwrap(model)
    assert not frozen.weight.requires_grad


# -- what is refused ------------------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """A quantised projection as bitsandbytes makes it: bytes and scales, no ``weight`` Parameter."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("packed", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.packed.to(x.dtype) * self.scale)


def quantised() -> Any:
    model = build("deepseek_v3")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = PackedLinear(layer.self_attn.kv_b_proj)
    return model


@pytest.mark.parametrize("pipeline", ["mla-absorb", "mla-mm-split"])
def test_a_quantised_projection_is_refused_with_the_reason(pipeline):
    model = quantised()
    if pipeline == "mla-absorb":
        with pytest.raises(RefusedError, match="no-plain-weight") as caught:
            wrap(model, pipeline)
        assert "dequantise" in caught.value.remedy
        return
    wrap(model, pipeline)  # the query's projection is plain and is split; the quantised one is left alone
    sites = {s["module"] for s in model.report.sites}
    assert sites == {f"model.layers.{i}.self_attn.q_b_proj" for i in range(2)}
    assert distance(model(tokens()).logits, quantised()(tokens()).logits) < 2e-6


def test_a_quantised_model_is_compiled_as_it_is():
    model, eager = wrap(quantised()), quantised()
    assert distance(model(tokens()).logits, eager(tokens()).logits) < 2e-6


class Adapter(nn.Module):
    """What adapter libraries put over a projection."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x)


@pytest.mark.parametrize(
    ("family", "pipeline", "owner", "name"),
    [
        ("deepseek_v3", SPLIT, "model.layers.0.self_attn", "kv_b_proj"),  # holds old and new weights
        ("gpt2", "mha-to-mla", "transformer.h.0.attn", "c_attn"),  # holds the released weight only
    ],
)
def test_a_module_exchanged_after_wrap_is_named_and_nothing_is_lost(family, pipeline, owner, name):
    model, eager = pair(family, pipeline, num_hidden_layers=1)
    model(tokens())
    there = model.get_submodule(owner)
    base = getattr(there, name)
    setattr(there, name, Adapter(base))
    refresh(model)
    for use in (lambda: model(tokens()), lambda: unwrap(model)):
        with pytest.raises(RefusedError, match=rf"{name}.*a Adapter is there now.*[Pp]ut the module back"):
            use()
    setattr(there, name, base)
    assert distance(model(tokens()).logits, eager(tokens()).logits) < 2e-6
    unwrap(model)
    assert same_state(model.state_dict(), eager.state_dict())


@pytest.mark.parametrize("pipeline", ["", "mla-mm-split"])
def test_a_wrapped_model_is_not_pickled_and_says_what_to_do(pipeline, tmp_path):
    model, _ = pair("deepseek_v3", pipeline, num_hidden_layers=1)
    for write in (pickle.dumps, lambda m: torch.save(m, tmp_path / "m.pt")):
        with pytest.raises(RefusedError, match=r"cannot be pickled.*save_pretrained"):
            write(model)


def test_models_that_are_not_served_are_named():
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

    from latentscan.tests.models import FAMILIES

    kind, words = FAMILIES["llama"]
    headless = AutoModel.from_config(AutoConfig.for_model(kind, **words))
    t5 = AutoModelForSeq2SeqLM.from_config(
        AutoConfig.for_model("t5", vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    adapted = build("llama")
    adapted.peft_config = {}
    hooked = build("deepseek_v3")
    hooked.forward = hooked.forward  # as accelerate's hooks do
    for model, reason in [
        (headless, "head"),
        (t5, "encoder-decoder"),
        (adapted, "adapters"),
        (hooked, "forward"),
        (nn.Linear(2, 2), "torch.compile"),
        (torch.compile(build("llama", num_hidden_layers=1)), "compiled already"),
        ("a path", "not a model"),
    ]:
        with pytest.raises(RefusedError, match=reason) as caught:
            wrap(model, SPLIT)
        assert caught.value.remedy
    assert hooked.model.layers[0].self_attn.q_b_proj.weight.requires_grad  # still there


@pytest.mark.parametrize("fails", ["install", "release"])
def test_a_wrap_that_fails_late_leaves_the_model_as_it_was(fails, monkeypatch):
    model, eager = build("deepseek_v3"), build("deepseek_v3")

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"latentscan.runtime.wrap.{fails}", fail)
    with pytest.raises(KeyboardInterrupt):
        wrap(model, SPLIT)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in eager.named_parameters()]
    assert same_state(model.state_dict(), eager.state_dict())
    assert model.__dict__.keys() == eager.__dict__.keys()
    assert not model._state_dict_hooks


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"pipeline": "mla-absorbe"}, "did you mean mla-absorb"),
        ({"pipeline": "mla-absorb{when=maybe}"}, "flops, always, never"),
        ({"pipeline": "mla-absorb,mla-mm-split"}, "mla-mm-split must come before mla-absorb"),
        ({"pipeline": 3}, "not text"),
        ({"target": "tpu"}, "tpu"),
        ({"inductor": "maybe"}, "auto, on, off"),
        ({"mesh": "tp=2"}, "mesh"),
        ({"check": "yes"}, "neither a bool nor a dict"),
    ],
)
def test_wrong_words_are_errors_that_say_what_is_right(words, reason):
    model = build("llama")
    with pytest.raises(PipelineError, match=reason):
        wrap(model, **words)
    assert session_of(model) is None


def test_a_call_that_breaks_the_graph_raises_instead_of_running_on_released_weights():
    model, _ = pair("deepseek_v3", SPLIT)
    model.model.layers[0].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    with pytest.raises(LatentscanError, match="one graph"):
        model(tokens())


# -- tied projections -----------------------------------------------------------------------------------------------


def test_a_projection_that_two_layers_share_is_refused():
    model = build("deepseek_v3")
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_b_proj.weight = first.q_b_proj.weight
    with pytest.raises(RefusedError, match=r"layers\.0.*layers\.1.*one weight") as caught:
        wrap(model, SPLIT)
    assert "untie" in caught.value.remedy
    assert session_of(model) is None
    second.q_b_proj.weight = nn.Parameter(first.q_b_proj.weight.detach().clone())
    assert distance(wrap(model, SPLIT)(tokens()).logits, model(tokens()).logits) == 0


@pytest.mark.slow
def test_a_weight_is_released_under_all_its_names():
    """zamba2's attention blocks share their weights: low rank replaces them in each block."""
    model = build("zamba2")
    blocks = [m for n, m in model.named_modules() if n.endswith("shared_transformer.self_attn")]
    assert blocks[0].k_proj.weight is blocks[1].k_proj.weight
    old = weakref.ref(blocks[0].k_proj.weight)
    wrap(model, "mha-to-mla{rank=32,rope_dim=16},latent-cache", calibration=tokens(4, 20))
    gc.collect()
    assert old() is None
    assert not any("k_proj" in n or "v_proj" in n for n, _ in model.named_parameters())
    assert not any("k_proj" in n or "v_proj" in n for n in model.state_dict())
    model.double()
    assert not bool(model(tokens()).logits.isnan().any())
    for block in blocks:
        assert bool(block.k_proj.weight.isnan().all())
        assert not any(block.k_proj.weight.stride())


def test_no_option_is_ignored():
    from latentscan.runtime.backend import latentscan as backend

    with pytest.raises(PipelineError, match="no pass of the pipeline uses it"):
        wrap(build("llama"), "", calibration=["text"])
    for name, value in (("check", True), ("dump", "somewhere"), ("calibration", ["text"])):
        with pytest.raises(PipelineError, match=f"option {name} is not served"):
            backend(None, [], options={name: value})


def test_a_graph_that_reads_a_weight_that_is_gone_is_an_error():
    """Sabotage: a later graph that no pass rewrites would compute with the NaN of released weights."""
    model = build("deepseek_v3").eval()
    wrap(model, "mla-mm-split")
    session = session_of(model)
    assert session is not None and session.plan.released
    session.passes = []
    with pytest.raises(VerifyError, match="which other graphs of this model were rewritten to do without"):
        model(torch.ones(2, 5, dtype=torch.long))
