"""Mamba-1 and Mamba-2 models of transformers trace as one graph of canonical ops, and only for latentscan."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import types

import pytest
import torch

from latentscan.ir.frontends import base, huggingface_ssm
from latentscan.kernels.reference import selective, ssm, ssm_norm
from latentscan.tests.models import MAMBA1_FAMILIES, SSD_FAMILIES, build

torch.set_num_threads(1)
ALL = (*SSD_FAMILIES, *MAMBA1_FAMILIES)
LATENTSCAN = "latentscan."
STATE_SPACE = {"causal_conv1d", "conv_update", "chunk_scan", "state_update", "gated_rms_norm", "selective_scan"}


class Capture:
    """A backend that keeps the graphs and runs them as they are; ours if marked."""

    def __init__(self, *, marked: bool = True):
        self.graphs: list[torch.fx.GraphModule] = []
        self._latentscan_backend = marked

    def __call__(self, graph, example_inputs):
        self.graphs.append(graph)
        return graph.forward

    def targets(self, index: int = 0) -> list[str]:
        return [str(n.target) for n in self.graphs[index].graph.nodes if n.op.startswith("call")]

    def ops(self, index: int = 0) -> dict[str, int]:
        """State-space ops; a test that ran before may have registered the attention frontend too."""
        names = [t.split(".")[1] for t in self.targets(index) if t.startswith(LATENTSCAN)]
        names = [n for n in names if n in STATE_SPACE]
        return {name: names.count(name) for name in names}


@contextlib.contextmanager
def compiled(model, backend):
    """``model.forward`` compiled for all lengths, as ``wrap`` does it."""
    with torch._dynamo.config.patch(specialize_float=True):
        yield torch.compile(model.forward, backend=backend, fullgraph=True, dynamic=True)


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(length))


def model_of(family: str, **overrides):
    model = build(family, **overrides)
    huggingface_ssm.register()
    return model


def mixers(model) -> int:
    return sum(hasattr(m, "A_log") for m in model.modules())


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    """fp32 sums in another order: compared to the largest value."""
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("family", ALL)
def test_one_graph_of_canonical_ops_for_all_lengths(family):
    model, backend = model_of(family), Capture()
    with torch.no_grad(), compiled(model, backend) as forward:
        for length in (21, 40):
            ids = tokens(length)
            assert_close(forward(input_ids=ids, use_cache=False).logits, model(input_ids=ids, use_cache=False).logits)
    assert len(backend.graphs) == 1
    layers = mixers(model)
    expected = {"causal_conv1d": layers}
    if family in MAMBA1_FAMILIES:
        expected["selective_scan"] = layers
    else:
        expected["chunk_scan"] = layers
        if family != "falcon_h1":  # its default gates without a norm
            expected["gated_rms_norm"] = layers
    assert backend.ops() == expected
    left = " ".join(t for t in backend.targets() if not t.startswith(LATENTSCAN))
    assert "softplus" not in left
    assert "conv1d" not in left


@pytest.mark.parametrize("family", ALL)
def test_training_gradients_equal_eager(family):
    model, backend = model_of(family).train(), Capture()
    reference, ids = copy.deepcopy(model), tokens(21)
    reference(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    with compiled(model, backend) as forward:
        forward(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert len(backend.graphs) == 1
    expected = dict(reference.named_parameters())
    scale = max(p.grad.abs().max() for p in expected.values() if p.grad is not None)
    for name, parameter in model.named_parameters():
        other = expected[name].grad
        assert (parameter.grad is None) == (other is None), name
        if other is not None:
            bound = 1e-4 * other.abs().max() + 1e-6 * scale
            assert (parameter.grad - other).abs().max() <= bound, name


@pytest.mark.parametrize("family", ALL)
def test_greedy_generation_equals_eager(family):
    model, backend = model_of(family), Capture()
    ids = tokens(19)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, **options)
    with compiled(model, backend) as forward:
        model.forward = forward
        actual = model.generate(ids, **options)
    assert actual.tolist() == expected.tolist()
    decode = backend.ops(len(backend.graphs) - 1)
    assert decode["conv_update"] == decode["state_update"] == mixers(model)
    assert "chunk_scan" not in decode
    assert "selective_scan" not in decode
    assert len(backend.graphs) <= 3


def nodes(graph) -> list[tuple[str, str]]:
    return [(n.op, str(n.target)) for n in graph.graph.nodes]


@pytest.mark.parametrize("family", ["mamba2", "mamba"])
def test_other_backends_see_the_library_as_it_is(family):
    model = model_of(family, num_hidden_layers=1)
    ours, other = Capture(), Capture(marked=False)
    ids = tokens(5)
    for backend in (ours, other, ours):
        with torch.no_grad(), compiled(model, backend) as forward:
            forward(input_ids=ids, use_cache=False)
    assert ours.ops()
    assert not other.ops()
    # The same graph as a process without latentscan's substitutions gets.
    with unregistered(model), torch.no_grad(), compiled(model, plain := Capture(marked=False)) as forward:
        torch._dynamo.reset()
        forward(input_ids=ids, use_cache=False)
    assert nodes(other.graphs[0]) == nodes(plain.graphs[0])


@contextlib.contextmanager
def unregistered(model):
    """The model's file with fresh copies of its functions, which nothing was substituted for, and its own norms."""
    module = sys.modules[type(model).__module__]
    saved = dict(vars(module))
    norms = {}
    for name, value in saved.items():
        if isinstance(value, types.FunctionType) and id(value) in base._SUBSTITUTED:
            setattr(module, name, base.copy_of(value))
        elif name.endswith("RMSNormGated"):
            norms[value] = value.forward
            value.forward = value.forward._latentscan_original
    yield
    vars(module).update(saved)
    for norm, forward in norms.items():
        norm.forward = forward


# --- beyond the plain forward ----------------------------------------------------------------------------------------


def test_left_padding_generates_the_same_tokens():
    model, ids = model_of("bamba"), tokens(12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, attention_mask=mask, **options)
    with compiled(model, Capture()) as forward:
        model.forward = forward
        actual = model.generate(ids, attention_mask=mask, **options)
    assert actual.tolist() == expected.tolist()


def cache_of(output):
    return next(getattr(output, n) for n in ("cache", "cache_params", "past_key_values") if getattr(output, n, None))


def cache_argument(model):
    names = inspect.signature(model.forward).parameters
    return next(n for n in ("cache", "cache_params", "past_key_values") if n in names)


@pytest.mark.parametrize("family", ["mamba2", "falcon_h1"])
def test_a_prompt_in_pieces_equals_the_whole_prompt(family):
    model, ids = model_of(family, num_hidden_layers=1), tokens(30)
    name = cache_argument(model)
    with torch.no_grad(), compiled(model, Capture()) as forward:
        whole = model(input_ids=ids, use_cache=True).logits
        first = forward(input_ids=ids[:, :13], use_cache=True)
        second = forward(input_ids=ids[:, 13:29], use_cache=True, **{name: cache_of(first)})
        last = forward(input_ids=ids[:, 29:], use_cache=True, **{name: cache_of(second)})
    assert_close(torch.cat([first.logits, second.logits, last.logits], 1), whole)


@pytest.mark.parametrize("packing", ["seq_idx", "cu_seqlens"])
@pytest.mark.parametrize("family", ["mamba2", "bamba"])
def test_packed_sequences_equal_separate_runs_without_mamba_ssm(family, packing):
    # The language model class of mamba2 does not hand packing on to its mixers; the attention of bamba needs its own.
    model = model_of("mamba2").backbone if family == "mamba2" else model_of("bamba", attn_layer_indices=[])
    parts = [tokens(n, 1) for n in (9, 1, 14)]
    if packing == "seq_idx":
        kwargs = {"seq_idx": torch.cat([torch.full_like(p, i) for i, p in enumerate(parts)], 1).int()}
    else:
        kwargs = {"cu_seqlens": torch.tensor([0, 9, 10, 24], dtype=torch.int32)}
    with torch.no_grad(), compiled(model, Capture()) as forward:
        packed = forward(input_ids=torch.cat(parts, 1), use_cache=False, **kwargs)[0]
        separate = torch.cat([model(input_ids=p, use_cache=False)[0] for p in parts], 1)
    assert_close(packed, separate)


def test_packed_sequences_are_refused_where_the_scan_is_not_told():
    module = modeling("jamba")
    x, seq_idx = torch.randn(1, 6, 10), torch.zeros(1, 10, dtype=torch.int32)

    def run():
        return module.causal_conv1d_fn(x, torch.randn(6, 4), activation="silu", seq_idx=seq_idx)

    with pytest.raises(Exception, match="packed sequences"):
        torch.compile(run, backend=Capture(), fullgraph=True)()


@pytest.mark.parametrize("family", ["mamba2", "falcon_mamba"])
def test_gradient_checkpointing_gives_the_same_gradients(family):
    model, ids = model_of(family).train(), tokens(11)
    reference = copy.deepcopy(model)
    reference(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with compiled(model, Capture()) as forward:
        forward(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for (name, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= 1e-4 * b.grad.abs().max() + 1e-7, name


@pytest.mark.parametrize("family", ["mamba2", "mamba"])
def test_survives_aot_autograd_with_a_cache_and_in_training(family):
    from torch._dynamo.backends.debugging import aot_eager

    model, ids = model_of(family, num_hidden_layers=1), tokens(11)

    def backend(graph, example_inputs):
        return aot_eager(graph, example_inputs)

    setattr(backend, base.MARK, True)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, **options)
    reference = copy.deepcopy(model).train()
    reference(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    with compiled(model, backend) as forward:
        model.train()
        forward(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        for (name, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            assert (a.grad - b.grad).abs().max() <= 1e-4 * b.grad.abs().max() + 1e-7, name
        model.eval().forward = forward
        assert model.generate(ids, **options).tolist() == expected.tolist()


def test_bf16_under_autocast_stays_close_to_fp32():
    model, ids = model_of("mamba2").train(), tokens(21)
    with torch.no_grad():
        exact = model(input_ids=ids, use_cache=False).logits
    with torch.autocast("cpu", torch.bfloat16), compiled(model, Capture()) as forward:
        out = forward(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    assert_close(out.logits.float(), exact, 0.05)
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())


# --- what the substitutions rest on ----------------------------------------------------------------------------------


def modeling(family: str) -> types.ModuleType:
    return sys.modules[type(model_of(family)).__module__]


def double(values):
    return [v.double() if isinstance(v, torch.Tensor) else v for v in values]


@pytest.mark.parametrize("family", SSD_FAMILIES)
def test_the_librarys_scan_is_the_fp64_recurrence(family):
    function = modeling(family).mamba2_chunk_scan.__wrapped__
    for args, options in huggingface_ssm._chunk_scan_examples():
        x, dt, A, B, C, _ = double(args)
        D, bias, init = (options.get(n) for n in ("D", "dt_bias", "initial_states"))
        low, high = options.get("dt_limit", (0.0, float("inf")))
        exact = ssm.chunk_scan_recurrence(
            x, dt, A, B, C, D, None, bias, init, dt_softplus=True, dt_min=low, dt_max=high
        )
        for got, want in zip(function(*args, **options), exact, strict=True):
            assert_close(got.double(), want, 1e-5)


@pytest.mark.parametrize("family", MAMBA1_FAMILIES)
def test_the_librarys_selective_scan_is_the_fp64_recurrence(family):
    function = modeling(family).mamba_selective_scan.__wrapped__
    for args, options in huggingface_ssm._selective_scan_examples():
        D, z, bias = double(options[n] for n in ("D", "z", "delta_bias"))
        exact = selective.selective_scan_recurrence(*double(args), D, z, bias, delta_softplus=True)
        for got, want in zip(function(*args, **options), exact, strict=True):
            assert_close(got.double(), want, 1e-5)


@pytest.mark.parametrize("family", SSD_FAMILIES)
def test_the_librarys_gated_norm_is_ours_in_fp64(family):
    model = model_of(family)
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNormGated")]
    assert bool(norms) == (family != "falcon_h1")
    for norm in norms:
        x, gate = torch.randn(2, 2, 5, norm.weight.numel()).unbind()
        with torch.no_grad():
            norm.weight.uniform_(0.5, 1.5)
        options = huggingface_ssm._norm_options(norm, norm.weight.numel())
        exact = ssm_norm.gated_rms_norm(x.double(), gate.double(), norm.weight.double(), **options)
        assert_close(norm(x, gate).double(), exact, 1e-5)


def test_falcon_h1_with_its_norm():
    model, backend = model_of("falcon_h1", mamba_rms_norm=True), Capture()
    with torch.no_grad(), compiled(model, backend) as forward:
        assert_close(forward(input_ids=tokens(21), use_cache=False).logits, model(input_ids=tokens(21)).logits)
    assert backend.ops()["gated_rms_norm"] == mixers(model)


def fake_file(**contents) -> types.ModuleType:
    module = types.ModuleType(f"transformers.models.fake.modeling_fake_{'_'.join(contents)}_{id(contents)}")
    vars(module).update(contents)
    return module


def test_an_acausal_scan_is_replaced_by_the_definition_and_not_silently():
    right = modeling("mamba2").mamba2_chunk_scan.__wrapped__

    def mamba2_chunk_scan(hidden_states, *args, **kwargs):
        y, final_state = right(hidden_states, *args, **kwargs)
        return y + 0.01 * hidden_states.mean(1, keepdim=True), final_state

    with pytest.warns(
        UserWarning, match=r"mamba2_chunk_scan differs from its definition by .* computes the definition"
    ):
        huggingface_ssm.register_model_file(fake_file(mamba2_chunk_scan=mamba2_chunk_scan))
    assert id(mamba2_chunk_scan) in base._SUBSTITUTED


def test_a_function_that_only_looks_alike_is_left_alone():
    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
        return hidden_states

    def mamba_selective_scan(something_else):
        return something_else

    contents = {"causal_conv1d_fn": causal_conv1d_fn, "mamba_selective_scan": mamba_selective_scan}
    with pytest.warns(UserWarning, match="traced as it is") as caught:
        huggingface_ssm.register_model_file(fake_file(**contents))
    assert len(caught) == 2
    assert not {id(causal_conv1d_fn), id(mamba_selective_scan)} & set(base._SUBSTITUTED)


def test_a_norm_that_only_looks_alike_is_left_alone():
    class OtherRMSNormGated(torch.nn.Module):
        def __init__(self, hidden_size, eps=1e-6):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(hidden_size))
            self.variance_epsilon = eps

        def forward(self, hidden_states, gate=None):  # the gate comes after the norm, and nothing says so
            unit = hidden_states * torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * unit * (1 if gate is None else torch.nn.functional.silu(gate))

    module = fake_file(OtherRMSNormGated=OtherRMSNormGated)
    OtherRMSNormGated.__module__ = module.__name__
    before = OtherRMSNormGated.forward
    huggingface_ssm.register_model_file(module)
    assert OtherRMSNormGated.forward is before


def test_registering_changes_no_random_state_and_is_idempotent():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch.device("meta"):
        huggingface_ssm._VERIFIED.clear()
        huggingface_ssm._SCANNED.clear()
        huggingface_ssm.register(import_all=True)
    assert torch.equal(torch.get_rng_state(), state)
    count = len(base._SUBSTITUTED)
    huggingface_ssm.register()
    assert len(base._SUBSTITUTED) == count


def test_a_function_hidden_in_a_module_by_the_kernels_package_is_found():
    def function(x):
        return x

    class Func(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    assert huggingface_ssm._plain_function(Func()) is function
    assert huggingface_ssm._plain_function(torch.nn.Identity()) is None
    assert huggingface_ssm._plain_function(3) is None
