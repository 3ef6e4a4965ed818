"""Public bug reports about passes and compilers (CASES 24 and 26 to 30), one test a report."""

from __future__ import annotations

import gc
import json
import re
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from latentscan.ir.errors import PipelineError, RefusedError
from latentscan.ir.mesh import parse_mesh
from latentscan.ir.normalize import LATENT_ATTENTION
from latentscan.passes.base import Context
from latentscan.passes.pipeline import REGISTRY, parse, run
from latentscan.runtime.door import session_of
from latentscan.runtime.phases import traced_phases
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import tokens
from latentscan.tools.dump import dump

TP = "tensor-parallel"

# -- 24 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REGISTRY)
def test_a_pass_drops_to_no_matches_and_nobody_notices(name):
    """Case 24 (pytorch#190886, vllm-ascend#5253): nothing to match is an error of that pass."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(input_ids))

    from latentscan.ir.capture import capture

    class Bare(nn.Module):  # not even a vocabulary, which tensor-parallel would split
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.scale * input_ids

    graph = capture(
        Bare() if name in (TP, "sequence-parallel") else Plain(),
        inputs={"input_ids": torch.ones(2, 3, dtype=torch.long)},
    )
    passes = parse(f"{TP},{name}" if name == "sequence-parallel" else name)
    context = Context(mesh=parse_mesh("tp=2,cp=2"))
    found_by = passes[0].name
    with pytest.raises(RefusedError, match=f"{found_by}: the pass (found no(thing to match| cache)|refused)") as caught:
        run(graph, passes, context)
    assert caught.value.remedy
    # One graph of several, as torch.compile hands them over, may be of a phase without a cache.
    if passes[0].phases == "cached":
        assert not run(graph, passes, context, one_phase=True).records[0].sites


@pytest.mark.parametrize(("family", "words"), [("mamba2", {}), ("llama", {"num_hidden_layers": 0})])
def test_a_model_without_keys_and_values_is_no_place_for_a_pass_on_caches(family, words):
    """Case 24: the planning graph fills no cache at all, so that no later graph will."""
    model = build(family, **words)
    with pytest.raises(RefusedError, match="latent-cache: the pass found no cache"):
        wrap(model, "latent-cache")
    assert "forward" not in model.__dict__


def test_a_model_of_which_every_place_is_refused_is_wrapped_in_silence():
    """Case 24: llama's keys are no maps of a latent; wrap says so, for all its layers at once, and leaves it alone."""
    model = build("llama")
    forward = model.forward
    with pytest.raises(
        RefusedError, match=r"mla-absorb: .*key-cached-expanded at model\.layers\.0\.self_attn and 1 more"
    ):
        wrap(model, "mla-absorb")
    assert session_of(model) is None
    assert model.forward == forward


# -- 26 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipeline", "words", "message"),
    [
        ("mla-absorb{wen=always}", {}, "has no option 'wen'.*did you mean when"),
        ("latent-cache{rank=16}", {}, "latent-cache has no option 'rank'"),
        ("mla-absorb{when=always,when=never}", {}, "given twice"),
        ("mha-to-mla{rope_dim=8}", {}, "rope_dim without rank"),
        ("mha-to-mla{method=exact,rank=16}", {}, "takes no rank"),
        ("mla-absorb", {"target": "tpu"}, "tpu"),
        ("mla-absorb", {"mesh": "tp=2"}, "mesh 'tp=2' is given, but no pass of the pipeline uses it"),
        ("mla-absorb", {"inductor": "yes"}, "inductor='yes'"),
        ("mla-absorb", {"check": {"mla-absrob": 1.0}}, "check names 'mla-absrob'.*did you mean mla-absorb"),
        ("mla-absorb", {"check": 3}, "check=3"),
        ("mha-to-mla{rank=16}", {}, "needs calibration"),
    ],
)
def test_options_are_silently_ignored(pipeline, words, message):
    """Case 26 (torchtitan#3223): a word that would change nothing is an error with the right one beside it."""
    model = build("deepseek_v3", num_hidden_layers=1)
    with pytest.raises(PipelineError) as caught:
        wrap(model, pipeline, **words)
    assert re.search(message, str(caught.value), re.DOTALL)
    assert caught.value.remedy
    assert session_of(model) is None


def test_an_option_that_is_taken_changes_what_is_done():
    """Case 26: always, never and the rule give three different programs where a cache is continued."""
    graph = traced_phases(build("deepseek_v3", num_hidden_layers=1), batch=2, seq=8)[0].graph
    found = {}
    for when in ("always", "never", "flops"):
        program = run(graph.copy(), parse(f"mla-absorb{{when={when}}}"), Context())
        latent = [len(program.forced(a).graph.calls(LATENT_ATTENTION)) for a in (True, False)]
        found[when] = program.choice is not None, latent
    assert found == {"always": (False, [1, 1]), "never": (False, [0, 0]), "flops": (True, [1, 0])}


# -- 27 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "pipeline", "released"),
    [
        pytest.param("deepseek_v3", "mla-mm-split,mla-absorb", ("q_b_proj", "kv_b_proj"), marks=pytest.mark.slow),
        ("llama", "mha-to-mla{method=pca,rank=16,rope_dim=8}", ("k_proj", "v_proj")),
    ],
)
def test_fused_weights_keep_the_old_ones_alive(family, pipeline, released):
    """Case 27 (TensorRT-LLM#4674): after wrapping, running and a backward the old tensors are gone."""
    model = build(family, num_hidden_layers=1)
    old = {n: weakref.ref(p) for n, p in model.named_parameters() if n.split(".")[-2] in released}
    storages = {n: weakref.ref(r().untyped_storage()) for n, r in old.items()}
    kept = {n: p.numel() for n, p in model.named_parameters() if n not in old}
    gone = sum(r().numel() for r in old.values())
    assert len(old) == 2
    assert None not in [r() for r in storages.values()]
    wrap(model, pipeline, calibration=tokens(4, 64) if "rank" in pipeline else None)
    with torch.no_grad():
        model(tokens())
    model(tokens()).logits.sum().backward()
    gc.collect()
    assert [n for n, r in old.items() if r() is not None] == []
    assert [n for n, r in storages.items() if r() is not None] == []
    new = {n: p.numel() for n, p in model.named_parameters() if n not in kept}
    assert model.report.new_weight_bytes == 4 * sum(new.values())
    assert model.report.released_weight_bytes == 4 * gone
    assert {n: p.numel() for n, p in model.named_parameters() if n in kept} == kept
    for n in old:  # what stands in their place takes the bytes of one number
        module, name = model.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]
        assert getattr(module, name).untyped_storage().nbytes() == 4


# -- 28 ----------------------------------------------------------------------------------------------------------------


def shared_state() -> dict[str, Any]:
    """What all models of a process share, and what others hang their hooks on."""
    import torch._dynamo
    import torch._inductor.config as inductor
    from torch.nn.modules import module
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.gpt2 import modeling_gpt2
    from transformers.models.llama import modeling_llama

    found: dict[str, Any] = {
        f"global {n}": dict(v) for n, v in vars(module).items() if n.startswith("_global_") and "hooks" in n
    }
    found |= {
        f"inductor {n}": getattr(inductor, n)
        for n in dir(inductor)
        if n.endswith(("custom_pre_pass", "custom_post_pass"))
    }
    found |= {f"dynamo {n}": v for n, v in torch._dynamo.config.get_config_copy().items()}
    found |= {f"attention {n}": f for n, f in dict(ALL_ATTENTION_FUNCTIONS).items()}
    for file in (masking_utils, modeling_llama, modeling_gpt2):
        found |= {f"{file.__name__}.{n}": v for n, v in vars(file).items() if callable(v)}
    found["sdpa"] = torch.nn.functional.scaled_dot_product_attention
    found["excepthook"], found["grad mode"] = sys.excepthook, torch.is_grad_enabled()
    return found


def test_the_hooks_of_others_are_overwritten():
    """Case 28 (pytorch#178048): what all models share is the same after wrapping and running."""
    calls: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: calls.append(type(m).__name__))
    try:
        wrap(build("llama", num_hidden_layers=1), "")  # registers what there is to register
        model, other = build("llama", num_hidden_layers=1), build("llama", num_hidden_layers=1)
        before = shared_state()
        methods = {n: getattr(type(model), n) for n in ("forward", "generate", "save_pretrained", "state_dict")}
        wrap(model, "mha-to-mla,latent-cache")
        after = shared_state()
        assert {n for n in before if before[n] is not after.get(n) and before[n] != after.get(n)} == set()
        assert before.keys() == after.keys()
        assert all(getattr(type(model), n) is f for n, f in methods.items())
        assert not {"forward", "report", "_prepare_cache_for_generation"} & other.__dict__.keys()
        calls.clear()
        with torch.no_grad():
            want = other(tokens()).logits
        assert calls.count("LlamaAttention") == 1, "the other's hook runs where the other runs"
    finally:
        handle.remove()
    with torch.no_grad():
        assert torch.allclose(model(tokens()).logits, want, atol=1e-5)
    ours = {n: v for n, v in before.items() if str(getattr(v, "__module__", "")).startswith("latentscan")}
    assert not ours, "functions of the library are still the library's, also after the first model"
    assert {n for n, v in shared_state().items() if v is not before[n] and v != before[n]} <= {
        "global _global_forward_hooks",
        "global _global_forward_hooks_always_called",
    }


# -- 29 ----------------------------------------------------------------------------------------------------------------


def test_every_length_or_every_object_compiles_again():
    """Case 29 (pytorch#174704, transformers#36725): two graphs a model for any length, batch and number of calls."""
    from torch._dynamo.utils import counters

    models = [wrap(build("llama", num_hidden_layers=1), "mha-to-mla,latent-cache") for _ in range(2)]
    words = {"do_sample": False, "max_new_tokens": 3}

    def compiled() -> int:
        return counters["stats"]["unique_graphs"]

    start = compiled()
    for model in models:
        model.generation_config.eos_token_id = None
        model.generate(tokens(2, 5), **words)
    first = compiled() - start
    assert first == 2 * 2
    for length, batch in ((9, 2), (17, 3), (30, 2)):
        for model in models:  # in turns: neither throws the other's graphs out
            model.generate(tokens(batch, length), **words)
            model.generate(tokens(batch, length), **words)
    assert compiled() - start == first
    assert [len(session_of(m).graphs) for m in models] == [2, 2]


# -- 30 ----------------------------------------------------------------------------------------------------------------


def test_dumps_that_nobody_can_read(tmp_path):
    """Case 30 (vLLM#41296): an index that links what is there, equal layers once, and JSON for programs."""
    sizes = {}
    for layers in (3, 6):
        folder = tmp_path / str(layers)
        returned = dump(build("llama", num_hidden_layers=layers), "mha-to-mla,latent-cache", str(folder), check=False)
        sizes[layers] = {p.name: len(p.read_text().splitlines()) for p in folder.glob("0*/*.txt")}
        page = (folder / "index.md").read_text()
        links = re.findall(r"\]\(([^)]+)\)", page)
        assert len(links) == 2
        assert all((folder / link).is_file() for link in links)
        for name in ("mha-to-mla", "latent-cache"):
            assert f"[{name}](" in page
        files = sorted(folder.rglob("*.json"))
        assert len(files) == 5
        parsed = {
            f.name if f.parent == folder else f"{f.parent.name}/{f.name}": json.loads(f.read_text()) for f in files
        }
        sites = next(v for n, v in parsed.items() if n.endswith("latent-cache/sites.json"))
        assert [s["module"] for s in sites["sites"]] == [f"model.layers.{i}.self_attn" for i in range(layers)]
        assert [p["pass"] for p in returned["passes"]] == ["mha-to-mla", "latent-cache"]
        assert len(str(sites["sites"][0]["note"])) > 10
    assert sizes[3] == sizes[6], "twice the layers, not one line more"
    text = next((tmp_path / "6").glob("02-*/after.txt")).read_text()
    modules = [line for line in text.splitlines() if line.startswith("model.layers")]
    assert 0 < len(modules) < 6, "layers that are alike are said once"
