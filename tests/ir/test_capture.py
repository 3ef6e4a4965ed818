"""Every family becomes one graph of canonical ops, for all batches and lengths, and no other trace is touched."""

from __future__ import annotations

import contextlib
import gc
import sys
import types
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from latentscan.ir import capture as capturing
from latentscan.ir.capture import capture, forget_compiled, source_name, trace_settings, with_own_code
from latentscan.ir.errors import CaptureError
from latentscan.ir.frontends import base, register_all
from latentscan.ir.graph import REGION, Graph, module_path
from latentscan.ir.verify import verify_all
from latentscan.tests.models import FAMILIES, NEW, build
from latentscan.tests.runtime.helpers import NO_DROPOUT, distance, tokens

torch.set_num_threads(1)

SCAN1, SCAN2 = ("causal_conv1d", "selective_scan"), ("causal_conv1d", "chunk_scan", "gated_rms_norm")
# Family -> how often each canonical op is in its graph. DeepSeek-V2 rotates complex numbers, OPT and GPT-2 nothing;
# GPT-J, Cohere and gpt-oss rotate in functions of their own. BLOOM and MPT write attention out, with a dense mask.
OPS: dict[str, dict[str, int]] = {
    **{f: {"attention": 2, "rope": 4} for f in ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3")},
    **{f: {"attention": 2, "rope": 4} for f in ("gpt_neox", "deepseek_v3", "minicpm3")},
    **{f: {"attention": 2, "rope": 4} for f in ("phi", "stablelm", "falcon", "olmo2")},
    **{f: {"attention": 2} for f in ("gpt2", "opt", "deepseek_v2", "gptj", "cohere2", "gpt_oss")},
    **{f: {"attention": 2, "causal_mask": 1} for f in ("bloom", "mpt")},
    "smollm3": {"attention": 2, "rope": 2},
    "deepseek_v32": {"causal_mask": 1, "rope": 8, "attention": 2},  # the indexer rotates, too, and needs the mask
    "kimi_linear": {"attention": 1, "causal_conv1d": 1},
    "olmo_hybrid": {"attention": 1, "rope": 2, "causal_conv1d": 1},
    "qwen3_next": {"attention": 1, "rope": 2, "causal_conv1d": 3},
    "mamba": dict.fromkeys(SCAN1, 2),
    "falcon_mamba": dict.fromkeys(SCAN1, 2),
    "jamba": dict.fromkeys(SCAN1, 1) | {"attention": 1},
    "mamba2": dict.fromkeys(SCAN2, 2),
    "bamba": dict.fromkeys(SCAN2, 1) | {"attention": 1, "rope": 2},
    "falcon_h1": {"causal_conv1d": 2, "chunk_scan": 2, "attention": 2, "rope": 4},
    "granitemoehybrid": dict.fromkeys(SCAN2, 1) | {"attention": 1},
    "nemotron_h": dict.fromkeys(SCAN2, 2) | {"attention": 1},
    "zamba2": dict.fromkeys(SCAN2, 4) | {"attention": 2, "rope": 4},
}
FAST = ("llama", "gemma2", "gpt2", "deepseek_v2", "deepseek_v3", "mamba", "bamba", "zamba2")


def each(families: Any = OPS) -> list[Any]:
    return [pytest.param(f, marks=() if f in FAST else pytest.mark.slow) for f in families if f in FAMILIES]


def ops(graph: Graph) -> dict[str, int]:
    names = [n.target._opname for n in graph.nodes if getattr(n.target, "namespace", "") == "latentscan"]
    return dict(Counter(names))


def run(graph: Graph, model: nn.Module, **inputs: torch.Tensor) -> Any:
    """Execute a captured graph on the model's weights: other placeholders by the name of the input that they are."""
    values: dict[str, Any] = {}
    arguments = []
    for name in graph.inputs:
        node = graph.node(name)
        weight = graph.weight(node)
        given = inputs.get(source_name(node)[:-2].rpartition("'")[2])  # L['name'] or L['kwargs']['name']
        if weight is not None:
            arguments.append(weight.value)
        elif given is not None:
            arguments.append(given)
            fake = graph.value(node)
            for real, size in zip(given.shape, fake.shape, strict=True):
                values[str(size)] = real
        else:
            arguments.append(None)
    for i, name in enumerate(graph.inputs):
        if arguments[i] is None:
            default = 0 if "logits_to_keep" in name else None  # an argument that some versions trace as a variable
            arguments[i] = values.get(str(graph.value(graph.node(name))), default)
    return graph.module(*arguments)


def test_the_table_names_every_family():
    assert OPS.keys() - NEW == FAMILIES.keys() - NEW


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", each())
def test_one_graph_of_canonical_ops_for_every_shape(family, training):
    model = build(family, **NO_DROPOUT.get(family, {}))
    model.train(training)
    graph = capture(model, training=training)
    assert graph.training == training
    assert ops(graph) == OPS[family]
    assert not any("scaled_dot_product" in str(n.target) for n in graph.nodes)
    assert not graph.specialized()
    (ids,) = [n for n in graph.nodes if source_name(n).endswith("['input_ids']")]
    batch, length = graph.shape(ids)
    assert isinstance(batch, torch.SymInt)
    assert isinstance(length, torch.SymInt)
    assert batch.node.expr != length.node.expr
    verify_all(graph)
    for shape in ((2, 21), (3, 37)):
        ids = tokens(*shape)
        with torch.no_grad():
            got = [x for x in run(graph, model, input_ids=ids) if isinstance(x, torch.Tensor) and x.dim() == 3]
            want = model(ids, use_cache=False).logits
        assert min(distance(g, want) for g in got if g.shape == want.shape) < 5e-6


def test_weights_carry_the_models_own_names_and_tensors():
    for family in ("llama", "zamba2"):
        model = build(family, tie_word_embeddings=True) if family == "llama" else build(family)
        graph = capture(model)
        named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        assert graph.weights
        for weight in graph.weights.values():
            assert named[weight.path] is weight.value
        read = {id(w.value) for w in graph.weights.values()}
        assert {id(p) for p in model.parameters()} <= read
        modules = dict(model.named_modules(remove_duplicate=False))
        assert all(module_path(n) in modules for n in graph.nodes if n.op == "call_function" and module_path(n))


def test_what_is_captured_keeps_no_weight_alive():
    model = build("deepseek_v3")
    graph = capture(model)
    there = weakref.ref(model), weakref.ref(model.lm_head.weight)
    shape = model.lm_head.weight.shape
    del model
    gc.collect()
    assert [r() for r in there] == [None, None]
    weight = graph.weight_at("lm_head.weight")
    assert weight is not None
    assert weight.value.shape == shape  # the form is still known


# -- gradient checkpointing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", each(["llama", "deepseek_v3", "gpt2", "zamba2", "mamba2", "bamba", "qwen3_next"]))
def test_recomputed_layers_are_inlined_and_marked(family):
    plain = ops(capture(build(family).train(), training=True))
    model = build(family).train()
    model.gradient_checkpointing_enable()
    graph = capture(model, training=True)
    assert ops(graph) == plain
    assert not any("checkpoint" in str(n.target) for n in graph.nodes)
    regions = {n.meta[REGION] for n in graph.nodes if REGION in n.meta}
    layers = model.config.num_hidden_layers if family != "zamba2" else 4
    assert regions == set(range(1, layers + 1))
    assert all(REGION in n.meta for n in graph.calls(torch.ops.latentscan.attention.default))
    verify_all(graph)


# -- plain torch ----------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Attention as people write it; heads are split off here, so that their number is known."""

    def __init__(self, heads: tuple[int, int] = (4, 4), **words: Any) -> None:
        super().__init__()
        self.heads, self.words, self.project = heads, words, nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, past: torch.Tensor | None = None) -> torch.Tensor:
        seen = x if past is None else past
        q, k = (self.project(t).unflatten(-1, (-1, 8)).transpose(1, 2) for t in (x, seen))
        k = k[:, : self.heads[1]]
        return F.scaled_dot_product_attention(q[:, : self.heads[0]], k, k, **self.words)


@pytest.mark.parametrize(
    ("words", "keys", "expected"),
    [
        ({"is_causal": True}, None, "causal"),
        ({}, None, "full"),
        ({}, 9, "full"),
        ({"scale": 0.5}, 9, "full"),
        ({"enable_gqa": True, "heads": (4, 2)}, 9, "full"),
        # The library aligns its triangle at the top left, ours is at the bottom right: left as it is.
        ({"is_causal": True}, 9, None),
        ({"dropout_p": 0.5}, 9, None),
    ],
)
def test_plain_attention_is_canonical_exactly_where_it_means_the_same(words, keys, expected):
    g = torch.Generator().manual_seed(0)
    inputs = {"x": torch.randn(2, 5, 32, generator=g)}
    if keys is not None:
        inputs["past"] = torch.randn(2, keys, 32, generator=g)
    model = Plain(**words)
    graph = capture(model, inputs=inputs)
    found = [n for n in graph.nodes if getattr(n.target, "_opname", "") == "attention"]
    assert [n.kwargs["kind"] for n in found] == ([expected] if expected else [])
    if "dropout_p" not in words:
        assert distance(run(graph, model, **inputs)[0], model(**inputs)) < 1e-6


class Given(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, k)


def test_attention_with_an_unknown_number_of_heads_is_left_alone():
    inputs = {"q": torch.randn(2, 4, 5, 8), "k": torch.randn(2, 4, 9, 8)}
    graph = capture(Given(), inputs=inputs)
    assert not ops(graph)
    assert distance(run(graph, Given(), **inputs)[0], Given()(**inputs)) < 1e-6


# -- errors and settings --------------------------------------------------------------------------------------------


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1


def test_a_break_in_the_graph_is_an_error_that_says_so():
    with pytest.raises(CaptureError, match="one graph") as caught:
        capture(Breaks(), inputs={"x": torch.ones(2, 3)})
    assert caught.value.where == "Breaks"
    assert caught.value.remedy


def test_warnings_of_the_library_do_not_break_the_graph():
    import logging

    logger = logging.getLogger("somebody")

    class Warns(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logger.warning("x has %s dimensions", x.dim())
            return x + 1

    assert capture(Warns(), inputs={"x": torch.ones(2, 3)}).nodes


class Picks(nn.Module):
    """Indices that are written as lists, as Falcon's fused projection has them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.linear(x)
        return heads[..., [-2]] + heads[..., [0, 2]].sum(-1, keepdim=True)


def test_indices_written_as_lists_are_traced_on_the_meta_device(monkeypatch):
    """There torch makes a plain meta tensor of such a list, which a fake mode takes for a leak."""
    from torch._subclasses.fake_tensor import fake_tensor_tls as state

    given = {"x": torch.ones(2, 3, 4, device="meta")}
    graph = capture(Picks().to("meta"), inputs=given)
    verify_all(graph)
    output = next(n for n in graph.nodes if n.op == "output")
    assert [tuple(graph.shape(n)[2:]) for n in output.all_input_nodes] == [(1,)]
    with capturing._plain_indices(Picks()):  # where something real could leak the check stays
        assert state.allow_non_fake_inputs_override is None
    with pytest.raises(ZeroDivisionError), capturing._plain_indices(Picks().to("meta")):
        1 / (state.allow_non_fake_inputs_override is not True)
    assert state.allow_non_fake_inputs_override is None
    monkeypatch.setattr(capturing, "_plain_indices", lambda model: contextlib.nullcontext())
    with pytest.raises(CaptureError, match="convert all Tensors to FakeTensors"):  # sabotage
        capture(Picks().to("meta"), inputs=given)


def test_settings_hold_for_our_traces_only():
    config = torch._dynamo.config
    names = ("specialize_float", "optimize_ddp", "ignore_logging_functions")
    before = {n: getattr(config, n) for n in names}
    with trace_settings(recompile_limit=3):
        assert config.specialize_float
        assert not config.optimize_ddp
        assert config.recompile_limit == 3
    assert {n: getattr(config, n) for n in names} == before
    capture(build("llama"))
    assert {n: getattr(config, n) for n in names} == before


def test_captures_do_not_count_against_a_recompile_limit():
    """CASES 29: Hugging Face decorates all forwards with one function, where Dynamo would count all models."""
    model = build("llama", num_hidden_layers=1)
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        for _ in range(4):
            capture(model)
        ids = tokens()
        ours = torch.compile(model.forward, backend="eager", fullgraph=True)
        assert distance(ours(ids, use_cache=False).logits, model(ids, use_cache=False).logits) < 1e-6


def test_a_function_with_its_own_code_is_the_same_function():
    def outer(scale: float):
        def inner(x: torch.Tensor, *, plus: float = 1.0) -> torch.Tensor:
            return scale * x + plus

        return inner

    function = outer(3.0)
    function.mark = "kept"  # type: ignore[attr-defined]
    copy = with_own_code(function)
    assert copy is not function
    assert copy.__code__ is not function.__code__
    assert copy(torch.ones(1)) == function(torch.ones(1)) == 4
    assert copy(torch.ones(1), plus=2.0) == 5
    assert copy.mark == "kept"  # type: ignore[attr-defined]
    assert copy.__closure__ is function.__closure__ or copy.__closure__ == function.__closure__
    method = types.MethodType(lambda self, x: self + x, 2)
    assert with_own_code(method)(3) == 5
    assert with_own_code(len) is len
    forget_compiled(len)
    graphs = []

    def record(module: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    compiled = torch.compile(copy, backend=record)
    for _ in range(2):
        compiled(torch.ones(3))
    assert len(graphs) == 1
    forget_compiled(copy)
    compiled(torch.ones(3))
    assert len(graphs) == 2


def test_registering_twice_finds_nothing_new_and_eager_functions_stay():
    """CASES 28: nothing of the library is replaced; substitutions live in Dynamo's traces of ours."""
    from transformers import masking_utils
    from transformers.integrations import sdpa_attention

    build("llama")
    functions = {
        name: getattr(module, name)
        for module, name in (
            (masking_utils, "create_causal_mask"),
            (masking_utils, "create_sliding_window_causal_mask"),
            (sdpa_attention, "sdpa_attention_forward"),
            (sys.modules["transformers.models.llama.modeling_llama"], "apply_rotary_pos_emb"),
        )
    }
    register_all()
    assert not register_all()
    for name, function in functions.items():
        assert function.__module__.startswith("transformers."), name
        assert function.__name__ == name
    assert not base.traced_by_latentscan()  # outside any trace


def test_functions_are_tried_out_undisturbed(monkeypatch):
    """Registering under autocast, fake tensors or another default device must not make a function unknown for good."""
    from torch._subclasses import FakeTensorMode

    from latentscan.ir.frontends import huggingface

    build("llama")
    name = "transformers.models.llama.modeling_llama"
    found: list[Any] = []
    layout = huggingface.rotary_layout

    def recorded(function: Any) -> Any:
        found.append(layout(function))
        return found[-1]

    monkeypatch.setattr(huggingface, "rotary_layout", recorded)
    for context in (FakeTensorMode(), torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16)):
        huggingface._SCANNED.discard(name)
        with context:
            register_all()
    assert found == ["half"] * 3


# -- parts without gradients ----------------------------------------------------------------------------------------


class WithoutGrad(torch.nn.Module):
    """The first factor is computed under no_grad, its inputs are parameters; so is an unused part."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            a, b = self.frozen(x).chunk(2, -1)
        return torch.cat([a, 2 * b], -1) * self.trained(x)


def test_what_is_computed_without_gradients_takes_none():
    from latentscan.runtime.backend import latentscan

    torch.manual_seed(0)
    model, x = WithoutGrad(), torch.randn(2, 4)
    graph = capture(model, inputs={"x": x}, training=True)
    assert len(graph.calls("detach")) == 2
    assert not graph.calls(torch._C._set_grad_enabled)
    want = torch.autograd.grad(model(x).sum(), list(model.trained.parameters()))
    torch.compile(model, backend=latentscan)(x).sum().backward()
    assert all(p.grad is None for p in model.frozen.parameters())
    for p, g in zip(model.trained.parameters(), want, strict=True):
        assert torch.allclose(p.grad, g)


def test_the_comparison_notices_a_lost_no_grad(monkeypatch):
    """Sabotage: without the step, gradients reach what was computed under no_grad."""
    from latentscan.ir import normalize
    from latentscan.runtime.backend import latentscan

    monkeypatch.setattr(normalize, "detach_without_grad", lambda graph: None)
    model = WithoutGrad()
    torch.compile(model, backend=latentscan)(torch.randn(2, 4)).sum().backward()
    assert model.frozen.weight.grad is not None
