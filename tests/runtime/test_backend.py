"""``torch.compile(model, backend="latentscan")``: options, training, no stale weights, late imports, other backends."""

from __future__ import annotations

import copy
import gc
import importlib.metadata
import subprocess
import sys
import traceback
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from latentscan.ir.capture import from_dynamo
from latentscan.ir.errors import LatentscanError, PipelineError, RefusedError
from latentscan.runtime import backend as door
from latentscan.runtime.backend import latentscan
from latentscan.runtime.binding import RecipeWeights
from latentscan.runtime.cache import GraphCache, cache_argument
from latentscan.runtime.wrap import refresh
from latentscan.tests.models import FAMILIES, MAMBA1_FAMILIES, build
from latentscan.tests.runtime.helpers import distance, tokens, worst_gradient

SPLIT = "mla-mm-split,mla-absorb"


@pytest.fixture
def graphs(monkeypatch) -> list[Any]:
    """The graphs that the backend was given."""
    seen: list[Any] = []
    original = door._compile

    def recorded(module, example_inputs, options):
        seen.append(from_dynamo(module, example_inputs))
        return original(module, example_inputs, options)

    monkeypatch.setattr(door, "_compile", recorded)
    return seen


def compiled(model: nn.Module, pipeline: str = "", **words: Any) -> Any:
    return torch.compile(model, backend=latentscan, options={"pipeline": pipeline}, **words)


# -- pieces and caches ----------------------------------------------------------------------------------------------


def test_labels_break_the_graph_and_the_loss_is_left_as_it_is(graphs):
    """The library logs on the way to its loss, where Dynamo cuts the graph: a piece without weights is no model."""
    model = build("gpt2", num_hidden_layers=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    eager, ids = copy.deepcopy(model), tokens(2, 9)
    with pytest.warns(UserWarning, match="Dynamo broke the graph.*latentscan.wrap"):
        loss = compiled(model, "mla-absorb")(input_ids=ids, labels=ids, use_cache=False).loss
    want = eager(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward(), want.backward()
    assert distance(loss, want) < 2e-6 and worst_gradient(model, eager) < 1e-5
    assert [bool(g.weights) for g in graphs] == [True, False]
    torch._dynamo.reset()
    with pytest.raises(RefusedError, match="mla-mm-split"):  # a piece with weights in which a pass finds nothing
        compiled(build("mamba2", num_hidden_layers=1), "mla-mm-split")(input_ids=ids)


@pytest.mark.parametrize(("family", "pipeline"), [("gpt2", "mla-absorb"), ("llama", "mha-to-mla")])
def test_a_step_on_the_library_s_cache_is_refused_by_its_name(family, pipeline):
    model = build(family, num_hidden_layers=1)
    with torch.no_grad():
        cache = model(tokens(2, 5), use_cache=True).past_key_values
        with pytest.raises(RefusedError, match=r"foreign-cache at .*a cache of the library's own.*latentscan\.wrap"):
            compiled(model, pipeline)(tokens(2, 1), past_key_values=cache, use_cache=True)


# -- the name and the options ---------------------------------------------------------------------------------------


def test_the_entry_point_names_the_backend():
    found = [e for e in importlib.metadata.entry_points(group="torch_dynamo_backends") if e.name == "latentscan"]
    if not found:
        pytest.skip("latentscan is not installed here: no entry point")
    assert found[0].load() is latentscan
    model = build("llama")
    ours = torch.compile(model, backend="latentscan", options={"pipeline": ""})
    with torch.no_grad():
        assert distance(ours(tokens()).logits, model(tokens()).logits) < 1e-6


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pipelne": ""}, "did you mean pipeline"),
        ({"pipeline": "mla-absorbe"}, "did you mean mla-absorb"),
        ({"pipeline": "mla-absorb{when=maybe}"}, "flops, always, never"),
        ({"pipeline": "mla-absorb,mla-mm-split"}, "mla-mm-split must come before"),
        ({"target": "tpu"}, "tpu"),
        ({"inductor": 3}, "auto, on, off"),
        ({"check": "yes"}, "neither a bool nor a dict"),
        ({"mesh": "tp=2"}, "mesh"),
    ],
)
def test_wrong_options_are_our_own_errors(options, reason):
    model = nn.Linear(4, 4)
    with pytest.raises(PipelineError, match=reason) as caught:
        torch.compile(model, backend=latentscan, options=options)(torch.ones(2, 4))
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("family", "pipeline", "reason"),
    [
        ("llama", "mha-to-mla{rank=16,rope_dim=8}", r"latentscan\.wrap"),
        ("gpt2", "latent-cache", r"latentscan\.wrap"),
        ("llama", "mla-mm-split", "not-split"),
    ],
)
def test_what_this_door_cannot_do_is_refused_with_the_remedy(family, pipeline, reason):
    model = build(family)
    with torch.no_grad(), pytest.raises(RefusedError, match=reason):
        compiled(model, pipeline)(tokens())


def test_a_graph_cache_makes_latent_cache_work_at_this_door():
    model = build("gpt2")
    ours, name = compiled(model, "latent-cache", dynamic=True), cache_argument(model)
    ids, cache = tokens(2, 12), GraphCache.for_model(model)
    with torch.no_grad():
        ours(ids[:, :8], use_cache=True, **{name: cache})
        got = ours(ids[:, 8:], use_cache=True, **{name: cache}).logits
        assert distance(got, model(ids).logits[:, 8:]) < 2e-6
    # 64 for the normalised input instead of 64 + 64 for keys and values, in two layers, fp32.
    assert cache.bytes_per_token() == 2 * 64 * 4


# -- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "pipeline"), [("llama", ""), ("deepseek_v3", SPLIT)])
def test_twenty_steps_of_adamw_lose_as_eager_does(family, pipeline, graphs):
    model = build(family).train()
    eager = copy.deepcopy(model)
    ours = compiled(model, pipeline)
    mine = torch.optim.AdamW(model.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(eager.parameters(), lr=1e-3)
    losses = []
    for step in range(20):
        ids = tokens(2, 13 + step % 3, seed=step % 4)
        mine.zero_grad()
        theirs.zero_grad()
        got, want = (m(input_ids=ids, labels=ids, use_cache=False).loss for m in (ours, eager))
        assert abs(float(got.detach() - want.detach())) < 1e-4
        got.backward()
        want.backward()
        mine.step()
        theirs.step()
        losses.append(float(got.detach()))
    assert min(losses[-4:]) < losses[0] - 0.05  # it learns
    assert 1 <= len(graphs) <= 2  # one for the first length, one for all others
    assert all(g.training for g in graphs)


def test_dropout_of_the_default_configuration_draws_as_eager_does(graphs):
    model = build("gpt2").train()
    eager = copy.deepcopy(model)
    ids = tokens()
    torch.manual_seed(3)
    got = compiled(model)(ids, labels=ids, use_cache=False).loss
    torch.manual_seed(3)
    want = eager(ids, labels=ids, use_cache=False).loss
    got.backward()
    want.backward()
    assert distance(got, want) < 1e-6
    assert worst_gradient(model, eager) < 5e-6
    torch.manual_seed(4)
    assert distance(eager(ids, labels=ids).loss, want) > 1e-5  # sabotage: another seed is another loss
    assert any("dropout" in str(n.target) for n in graphs[0].nodes)


# -- weights that change --------------------------------------------------------------------------------------------


def test_no_folded_weight_is_stale_after_a_step_or_a_load_and_data_writes_need_refresh():
    model = build("deepseek_v3")
    eager = copy.deepcopy(model)
    ours, ids = compiled(model, SPLIT), tokens()

    def apart() -> float:
        with torch.no_grad():
            return distance(ours(ids, use_cache=False).logits, eager(ids, use_cache=False).logits)

    def step(of: nn.Module, run: Any) -> None:
        optimizer = torch.optim.SGD(of.parameters(), lr=0.5)
        run(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert apart() < 2e-6
    for _ in range(2):
        step(model, ours)
        step(eager, eager)
        assert apart() < 2e-5
    state = {k: 1.1 * v for k, v in eager.state_dict().items()}
    model.load_state_dict(state)
    eager.load_state_dict(state)
    assert apart() < 2e-6
    for m in (model, eager):  # another object under the same name
        part = m.model.layers[0].self_attn.kv_b_proj
        part.weight = nn.Parameter(part.weight.detach().flip(0).contiguous())
    assert apart() < 2e-6
    for m in (model, eager):
        m.model.layers[0].self_attn.kv_b_proj.weight.data.mul_(2)
    assert apart() > 1e-2  # a write through .data cannot be noticed ...
    refresh(model)
    assert apart() < 2e-6  # ... so it has to be said


def test_weights_are_folded_once_while_nothing_changes():
    model, calls = build("deepseek_v3"), []
    weights = RecipeWeights()
    source = model.model.layers[0].self_attn.kv_b_proj.weight

    class Doubling:
        targets = ("x",)

        @staticmethod
        def function(w: torch.Tensor) -> tuple[torch.Tensor]:
            calls.append(1)
            return (2 * w,)

    with torch.no_grad():
        first = weights.values(Doubling, [source])[0]
        assert weights.values(Doubling, [source])[0] is first
        assert len(calls) == 1
        source.mul_(3)
        assert torch.equal(weights.values(Doubling, [source])[0], 2 * source)
    made = weights.values(Doubling, [source])[0]
    assert made.requires_grad
    assert len(calls) == 3
    del source, model, made
    gc.collect()
    assert not weights._folded  # what was folded goes with its source
    weights.values(Doubling, [torch.ones(2)])


def test_a_compiled_model_can_be_freed():
    model = build("deepseek_v3")
    ours = compiled(model, SPLIT)
    ids = tokens()
    ours(ids, labels=ids, use_cache=False).loss.backward()
    with torch.no_grad():
        ours(ids, use_cache=False)
    there = weakref.ref(model), weakref.ref(model.lm_head.weight)
    del model, ours
    gc.collect()
    assert [r() for r in there] == [None, None]


def test_refresh_says_when_there_is_nothing_to_refresh():
    model, other = build("llama"), build("llama")
    ours = compiled(model, "mha-to-mla{method=exact}")
    with torch.no_grad():
        ours(tokens(), use_cache=False)
    refresh(model)  # its graph folds nothing, but is there
    with pytest.raises(RefusedError, match="not wrapped"):
        refresh(other)  # another model's graphs are not its own


# -- what is captured -----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(32, 96), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("causal", [True, False])
def test_plain_torch_attention_is_the_canonical_op(causal, graphs):
    model = Attention(causal)
    ours = compiled(model, dynamic=True)
    for length in (7, 11):
        x = torch.randn(2, length, 32, generator=torch.Generator().manual_seed(0))
        assert distance(ours(x), model(x)) < 1e-6
    assert len(graphs) == 1
    (found,) = [n for n in graphs[0].nodes if getattr(n.target, "_opname", "") == "attention"]
    assert found.kwargs["kind"] == ("causal" if causal else "full")
    assert not any("scaled_dot" in str(n.target) for n in graphs[0].nodes)


def test_two_compiled_models_share_nothing():
    """CASES 25: the same classes, other sizes and another pipeline, called in turn."""
    small, large = build("deepseek_v3"), build("deepseek_v3", kv_lora_rank=24)
    ours = compiled(small, SPLIT, dynamic=True), compiled(large, "mla-absorb", dynamic=True)
    with torch.no_grad():
        for length in (13, 17):
            for run, model in zip(ours, (small, large), strict=True):
                got = run(tokens(2, length), use_cache=False).logits
                assert distance(got, model(tokens(2, length), use_cache=False).logits) < 2e-6


def test_an_error_is_its_own_message_and_no_advice_of_dynamo_s():
    model = build("llama", num_hidden_layers=1)
    for options in ({"pipeline": "mla-absorb"}, {"pipeline": "mla-absrb"}, {"pipline": ""}):
        with pytest.raises(LatentscanError) as caught:
            torch.compile(model, backend=latentscan, options=options)(tokens())
        text = "".join(traceback.format_exception_only(caught.value))
        assert text.count("\n") == 1 and "TORCHDYNAMO" not in text and "user code" not in text


def test_errors_pass_dynamo_as_they_are():
    error = door.through_dynamo(RefusedError("no", where="here", remedy="do it"))
    assert isinstance(error, RefusedError)
    assert isinstance(error, LatentscanError)
    assert str(error) == "here: no. Do it"
    assert error.remedy == "do it"


# -- other processes ------------------------------------------------------------------------------------------------


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


LATE = """
import torch
torch.set_num_threads(1)
import latentscan.runtime.backend as door
seen = []
original = door._compile
def recorded(module, inputs, options):
    seen.append([str(n.target) for n in module.graph.nodes])
    return original(module, inputs, options)
door._compile = recorded
from latentscan.tests.models import build
for family in ("qwen3", "mamba2"):
    model = build(family)
    ours = torch.compile(model, backend=door.latentscan, dynamic=True)
    ids = torch.arange(3, 29).view(2, 13)
    with torch.no_grad():
        got, want = ours(ids, use_cache=False).logits, model(ids, use_cache=False).logits
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    print(family, len(seen), sum("latentscan.rope" in t for t in seen[-1]), sum("chunk_scan" in t for t in seen[-1]))
"""


def test_models_imported_after_the_backend_are_captured():
    """Their functions are unknown to the first trace; the backend asks for another one."""
    assert python(LATE).split("\n")[:2] == ["qwen3 1 4 0", "mamba2 2 0 2"]


FOREIGN = """
import torch
torch.set_num_threads(1)
{first}
from latentscan.tests.models import build
{then}
def record(module, inputs):
    print(module.graph)
    return module.forward
for family in {families}:
    torch._dynamo.reset()  # all families are compiled through one decorator of the library: eight would be too many
    model = build(family)
    ids = torch.arange(3, 29).view(2, 13)
    with torch.no_grad():
        eager = model(ids, use_cache=False).logits
        ours = torch.compile(model, backend=record, fullgraph=True, dynamic=True)(ids, use_cache=False).logits
    assert (eager - ours).abs().max() <= 1e-5 * eager.abs().max()
    print(family, eager.double().sum().item().hex(), flush=True)
"""
REGISTERED = "from latentscan.ir.frontends import register_all; register_all()"
WRAPPED = """
from latentscan.runtime.wrap import wrap
for family in {families}:
    model = wrap(build(family))
    model(torch.arange(3, 29).view(2, 13))
"""


OTHERS = [f for f in FAMILIES if f not in MAMBA1_FAMILIES and f != "gemma2"]


@pytest.mark.parametrize(
    "families",
    # A few in each process: all in one took minutes, and the limit of python() is met by every family that is added.
    [["gemma2"], *(pytest.param(OTHERS[n : n + 5], marks=pytest.mark.slow) for n in range(0, len(OTHERS), 5))],
    ids=" ".join,
)
def test_another_backend_gets_the_graph_that_it_gets_without_us(families):
    """CASES 28: the same graphs and the same eager numbers, bit for bit, in a process that uses latentscan."""
    without = python(FOREIGN.format(first="", then="", families=families))
    assert without.count("graph():") == len(families)
    assert "latentscan" not in without.replace("latentscan/", "")
    with_us = FOREIGN.format(first=REGISTERED, then=WRAPPED.format(families=families) + REGISTERED, families=families)
    assert python(with_us) == without


@pytest.mark.slow
def test_inductor_in_the_same_process_is_as_without_us():
    model = build("llama")
    latent = compiled(model)(tokens(), use_cache=False).logits
    torch._dynamo.reset()
    with torch.no_grad():
        assert distance(torch.compile(model)(tokens(), use_cache=False).logits, latent) < 1e-5


def test_inductor_is_given_only_options_that_it_has():
    from torch._inductor import list_options

    from latentscan.lowering.inductor import inductor_options

    assert set(inductor_options()) <= set(list_options())
    assert "triton.mix_order_reduction" in inductor_options() or torch.__version__ < "2.10"
