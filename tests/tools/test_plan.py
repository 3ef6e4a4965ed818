"""plan says what wrap does, counts what it costs, and takes work in proportion to the layers."""

from __future__ import annotations

import cProfile
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from latentscan.ir.errors import PipelineError
from latentscan.ir.graph import Graph
from latentscan.ir.kept import training_bytes
from latentscan.passes.base import Context, Site
from latentscan.passes.latent_cache import LatentCache
from latentscan.passes.pipeline import parse, run
from latentscan.runtime.cache import GraphCache, cache_argument
from latentscan.runtime.door import session_of
from latentscan.runtime.phases import traced_phases, values_of
from latentscan.runtime.source import resolve
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import FAMILIES, build
from latentscan.tests.passes.switches import kept_bytes
from latentscan.tools import plan as planning
from latentscan.tools.plan import SCHEMA, plan
from latentscan.tools.plan_text import weights_text

DEEPSEEK = Path(__file__).parents[1] / "data" / "deepseek_v3" / "config.json"
LOW_RANK = "mha-to-mla{rank=24,rope_dim=8},latent-cache,mla-absorb"


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters and buffers, released ones being what they are: one number."""
    tensors = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())
    }
    return sum(tensors.values())


@pytest.mark.parametrize(
    ("family", "pipeline"),
    [
        ("deepseek_v3", "mla-mm-split,mla-absorb"),
        ("llama", LOW_RANK),
        ("gpt2", "mha-to-mla,latent-cache"),
        ("bamba", ""),
    ],
)
def test_it_says_what_wrap_does(family, pipeline):
    told = plan(resolve(f"tiny:{family}"), pipeline, batch=2, seq=9, explain=True)
    model = build(family)
    before = held_bytes(model)
    assert told["weights"]["before"] == before
    wrap(model, pipeline, calibration=torch.randint(3, 128, (8, 64)) if "rank=" in pipeline else None)
    report = model.report
    assert [{k: r[k] for k in ("pass", "module", "rule")} for r in told["all_sites"]] == [
        {k: r[k] for k in ("pass", "module", "rule")} for r in report.sites
    ]
    assert [(r["pass"], r["module"], r["rule"]) for r in told["all_refusals"]] == [
        (r["pass"], r["module"], r["rule"]) for r in report.refusals
    ]
    released = session_of(model).plan.released
    assert abs(told["weights"]["after"] - (held_bytes(model) - 4 * len(released))) == 0
    cache = GraphCache.for_model(model)
    with torch.no_grad():
        model(input_ids=torch.randint(3, 128, (2, 9)), use_cache=True, **{cache_argument(model): cache})
    assert told["cache"]["bytes_per_token"]["after"] == cache.bytes_per_token()
    assert told["cache"]["bytes_at_seq"]["after"] == cache.bytes_held()
    assert told["errors"] == []


FAST = ("falcon", "deepseek_v32")


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in FAST else pytest.mark.slow) for f in FAMILIES])
def test_every_family_is_planned_on_the_meta_device(family):
    """Falcon indexes by lists, DeepSeek-V3.2's indexer has a cache of its own, which is as long as its layer's."""
    told = plan(resolve(f"tiny:{family}"), "", batch=2, seq=9)
    if "decode" in told["phases"]:
        model = build(family)
        cache = GraphCache.for_model(model)
        with torch.no_grad():
            model(input_ids=torch.randint(3, 128, (2, 9)), use_cache=True, **{cache_argument(model): cache})
        assert told["cache"]["bytes_per_token"]["before"] == cache.bytes_per_token()
    trained = plan(resolve(f"tiny:{family}"), "", batch=2, seq=9, train=True)
    assert trained["phases"]["train"]["before"]["flops"] > 2 * told["phases"]["prefill"]["before"]["flops"]


def test_the_rule_takes_its_form_at_each_size():
    text, pipeline = "tiny:deepseek_v3", "mla-mm-split,mla-absorb"
    told = plan(resolve(text), pipeline, seq=4096)
    (row,) = [r for r in told["passes"] if r["name"] == "mla-absorb"]
    assert row["forms"] == {"prefill": "expand", "decode": "absorb"}
    assert "absorb iff 4 P (2*16 - 16 - 16) < (4 t - 4 s) 16 (16 + 16)" in row["rule"]
    prefill, decode = (told["phases"][p] for p in ("prefill", "decode"))
    assert decode["after"]["flops"] < decode["before"]["flops"] / 10
    assert prefill["after"]["flops"] == prefill["before"]["flops"]
    assert "latent_attention" in decode["after"]["kinds"] and "latent_attention" not in prefill["after"]["kinds"]
    never = plan(resolve(text), "mla-mm-split,mla-absorb{when=never}", seq=4096)
    assert never["phases"]["decode"]["forms"] == {"mla-absorb": "expand"}
    assert never["phases"]["decode"]["after"]["flops"] == decode["before"]["flops"]


def test_growing_weights_are_told():
    """A rank close to full makes the factors bigger than what they replace."""
    told = plan(resolve("tiny:llama"), "mha-to-mla{method=pca,rank=48,rope_dim=8},latent-cache")
    assert told["weights"]["after"] > told["weights"]["before"]
    made, released = told["weights"]["made"], told["weights"]["released"]
    assert told["weights"]["after"] - told["weights"]["before"] == made - released > 0
    assert [r["new_weight_bytes"] for r in told["passes"]] == [made, 0]
    assert [r["released_weight_bytes"] for r in told["passes"]] == [released, 0]
    # A layer: down 48 x 64, up 2 x (12 + 16) rows of 48, 8 rotated rows of 64, for K and V of 32 x 64 each.
    assert (made, released) == (2 * 4 * (48 * 64 + 56 * 48 + 8 * 64), 2 * 4 * 2 * 32 * 64)
    rows = {r["name"]: (r["new_weight_bytes"], r["released_weight_bytes"]) for r in told["passes"]}
    text = weights_text(told["weights"], rows)
    assert text.startswith("weights grow: ") and "mha-to-mla makes 49.00 KiB in place of 32.00 KiB" in text
    assert "latent-cache" not in text


def test_weights_that_are_only_moved_about_do_not_grow():
    """Every new weight has an old one that goes: two passes, each with its own."""
    told = plan(resolve("tiny:gpt_neox"), "mha-to-mla,mla-mm-split,latent-cache")
    assert told["weights"]["made"] == told["weights"]["released"] > 0
    split = next(r for r in told["passes"] if r["name"] == "mla-mm-split")
    assert split["new_weight_bytes"] == split["released_weight_bytes"] == told["weights"]["made"]
    rows = {r["name"]: (r["new_weight_bytes"], r["released_weight_bytes"]) for r in told["passes"]}
    assert weights_text(told["weights"], rows).endswith("(no change)")


def test_a_pass_that_finds_nothing_is_an_error_with_its_reason():
    told = plan(resolve("tiny:llama"), "latent-cache")
    (error,) = told["errors"]
    assert error["pass"] == "latent-cache"
    assert "64 elements per token" in error["message"] and "mha-to-mla" in error["remedy"]
    (refusal,) = told["refusals"]
    assert (refusal["module"], refusal["count"]) == ("model.layers.0..1.self_attn", 2)


def test_a_pass_on_caches_never_finds_nothing_in_silence():
    """Without a cache in any phase it is an error; in a training step, where wrap lets it rest, a note."""
    (error,) = plan(resolve("tiny:mamba2{num_hidden_layers=1}"), "latent-cache", seq=32)["errors"]
    assert (error["pass"], "found no cache" in error["message"]) == ("latent-cache", True)
    words = {"seq": 32, "train": True}
    told = plan(resolve("tiny:gpt2{num_hidden_layers=1}"), "mha-to-mla,latent-cache,mla-absorb", **words)
    assert [n.split()[0] for n in told["model"]["notes"]] == ["latent-cache", "mla-absorb"]
    assert "p = 0.1" in told["model"]["notes"][1]
    assert not told["errors"]


def test_training_counts_gradients_and_what_they_keep():
    told = plan(resolve("tiny:llama"), "", batch=2, seq=16, train=True)
    (phase,) = told["phases"].values()
    kinds = phase["before"]["kinds"]
    assert kinds["linear backward"]["flops"] == 2 * kinds["linear"]["flops"]
    once, twice = (
        phase["before"],
        plan(resolve("tiny:llama"), "", batch=4, seq=16, train=True)["phases"]["train"]["before"],
    )
    for figure in ("flops", "activation_bytes"):  # rotary tables do not grow with the batch
        assert 0 <= 2 * once[figure] - twice[figure] < once[figure] / 50


def test_planned_activation_bytes_are_those_that_autograd_keeps():
    """MHA, which the CPU's attention keeps as a GPU's does, but that bringing heads last copies its output."""
    pipeline, model = "mla-zero-memory", "tiny:llama{num_key_value_heads=4}"
    (phase,) = plan(resolve(model), pipeline, batch=2, seq=24, train=True)["phases"].values()
    ids = torch.randint(3, 100, (2, 24), generator=torch.Generator().manual_seed(0))
    held = {}
    for words in ("", pipeline):
        wrapped = wrap(resolve(model).load().train(), words)
        held[words] = kept_bytes(wrapped, "logits", input_ids=ids, use_cache=False) - ids.numel() * 8
    assert held[pipeline] < 0.8 * held[""]
    copies = 2 * ids.numel() * 64 * 4  # layers x tokens x hidden size
    assert phase["before"]["activation_bytes"] == held[""] - copies
    assert phase["after"]["activation_bytes"] == held[pipeline]  # nothing inside is kept, the copy neither


# Dropout, norms of the library, products with tables and activations written out; all but some numbers of ids.
KEPT = ("gpt2", "tiny:gpt2{attn_pdrop=0.0}", "llama", "opt", "gptj", "gpt_neox", "phi3", "falcon", "mamba2", "zamba2")


@pytest.mark.parametrize(
    "text", [pytest.param(t, marks=() if t in ("gpt2", "gptj") else pytest.mark.slow) for t in KEPT]
)
def test_what_a_training_step_on_a_cpu_keeps_is_counted(text):
    """To 0.2 %; a plan is of the meta device, which stands for a GPU: its dropout keeps a byte an element, and no
    attention copies."""
    source = resolve(text if ":" in text else f"tiny:{text}")
    model, batch, length = source.load().train(), 2, 24
    (traced,) = traced_phases(model, batch=batch, seq=length, train=True)
    counted = training_bytes(traced.graph, values_of(traced.graph, traced.phases[0]))
    ids = torch.randint(3, 100, (batch, length), generator=torch.Generator().manual_seed(0))
    held = kept_bytes(wrap(model, ""), "logits", input_ids=ids, use_cache=False) - ids.numel() * 8
    assert abs(counted / held - 1) < 0.002
    on_gpu = plan(source, "", batch=batch, seq=length, train=True)["phases"]["train"]["before"]["activation_bytes"]
    assert 0.8 * held < on_gpu <= counted


def test_the_plan_is_plain_data_and_the_same_every_time():
    first, second = (plan(resolve("tiny:deepseek_v3"), "mla-mm-split,mla-absorb", seq=64) for _ in range(2))
    assert json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    assert first["schema"] == SCHEMA


def calls(work: Callable[[], object]) -> int:
    """Function calls that ``work`` makes: a count of work that does not depend on the machine."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return sum(entry.callcount for entry in profile.getstats())


def layers(count: int) -> torch.nn.Module:
    return resolve(f"tiny:llama{{num_hidden_layers={count}}}").on_meta()


PIPELINE = "mha-to-mla{rank=24,rope_dim=8},latent-cache,mla-absorb"


def work_by_layers(counts: tuple[int, ...]) -> dict[int, tuple[int, int, int]]:
    """Layers -> nodes, calls while tracing, calls in the passes."""
    done = {}
    for count in (2, *counts):  # the first time also fills what is cached once a process
        model, found = layers(count), []
        tracing = calls(lambda m=model, f=found: f.extend(traced_phases(m, batch=1, seq=64)))
        graph = found[0].graph
        nodes = len(graph.nodes)
        context = Context(own_parameters=True, meta=True)
        done[count] = nodes, tracing, calls(lambda g=graph, c=context: run(g, parse(PIPELINE), c).forced(True))
    done = {count: done[count] for count in counts}
    print("\nlayers  nodes  calls while tracing  calls in passes")
    for count, row in done.items():
        print(f"{count:6} {row[0]:6} {row[1]:20,} {row[2]:16,}")
    return done


def growth(done: dict[int, tuple[int, int, int]], what: int) -> float:
    """How much more a layer takes between the last two sizes than between the first two: 1 if linear."""
    (a, b, c), rows = done, done.values()
    x, y, z = (row[what] for row in rows)
    return ((z - y) / (c - b)) / ((y - x) / (b - a))


@pytest.mark.parametrize("counts", [(1, 2, 4), pytest.param((2, 8, 30), marks=pytest.mark.slow)], ids=str)
def test_work_is_proportional_to_layers(counts):
    done = work_by_layers(counts)
    assert growth(done, 0) == 1
    assert growth(done, 1) < 1.1
    assert growth(done, 2) < 1.1


@pytest.mark.slow
def test_sabotage_a_copy_for_every_site_is_found(monkeypatch):
    theirs = LatentCache.apply

    def copying(self: LatentCache, graph: Graph, site: Site, context: Context) -> None:
        graph.copy()
        theirs(self, graph, site, context)

    monkeypatch.setattr(LatentCache, "apply", copying)
    assert growth(work_by_layers((2, 8, 30)), 2) > 1.1


@pytest.mark.slow
def test_deepseek_v3_plans_within_a_minute_and_4_gib():
    """671B on two cores, in a process of its own so that its memory is its own."""
    script = (
        "import resource, sys, time; from latentscan.tools.cli import main; began = time.perf_counter();"
        f"status = main(['plan', {str(DEEPSEEK)!r}, '--pipeline', 'mla-mm-split,mla-absorb', '--json']);"
        "print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr);"
        "sys.exit(status)"
    )
    began = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = time.perf_counter() - began
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == 0, done.stderr
    print(f"\n671B: {wall:.1f} s, {busy:.1f} s of processor, {int(done.stderr.split()[-1]) / 2**20:.2f} GiB")
    assert busy < 60  # the wall time of an idle machine
    assert int(done.stderr.split()[-1]) < 4 * 2**20  # KiB
    told = json.loads(done.stdout)
    assert told["model"]["parameters"] == 671_026_404_352
    assert {r["name"]: (r["sites"], r["refusals"]) for r in told["passes"]} == {
        "mla-mm-split": (122, 0), "mla-absorb": (61, 0)
    }  # fmt: skip
    assert told["cache"]["bytes_per_token"] == {"before": 61 * 576 * 2, "after": 61 * 576 * 2}
    assert told["weights"]["before"] == told["weights"]["after"]
    forms = {name: phase["forms"]["mla-absorb"] for name, phase in told["phases"].items()}
    assert forms == {"prefill": "expand", "decode": "absorb"}
    # 37 billion active parameters, and attention over all pairs with 192 + 128 features a head
    prefill = 2 * 32768 * 37.5e9 + 2 * 61 * 128 * 32768 * 32769 / 2 * 320
    assert abs(told["phases"]["prefill"]["after"]["flops"] / prefill - 1) < 0.05
    # one token: the latent is read instead of expanded, 512 + 64 and 512 features a head
    decode = 2 * 37.5e9 + 2 * 61 * 128 * 32769 * 1088
    assert abs(told["phases"]["decode"]["after"]["flops"] / decode - 1) < 0.05


def test_lengths_that_the_ranks_of_cp_do_not_divide_are_filled_up_and_short_shards_are_bad_input():
    told = plan(resolve("tiny:mamba2"), "mamba-context-parallel", seq=13, train=True, mesh="cp=4")
    assert told["phases"]["train"]["tokens_a_rank"] == 4
    even = plan(resolve("tiny:mamba2"), "mamba-context-parallel", seq=16, train=True, mesh="cp=4")
    assert told["phases"]["train"]["after"]["flops"] == even["phases"]["train"]["after"]["flops"]
    with pytest.raises(PipelineError, match=r"8 tokens over 4 ranks are 2 a rank, and each needs 3 .* 12 tokens"):
        plan(resolve("tiny:mamba2"), "mamba-context-parallel", seq=8, train=True, mesh="cp=4")


@pytest.mark.parametrize(
    ("pipeline", "mesh", "noted"), [("", "tp=2", 1), ("", "dp=2", 0), ("tensor-parallel", "tp=2", 0)]
)
def test_a_mesh_that_no_pass_uses_is_noted(pipeline, mesh, noted):
    notes = plan(resolve("tiny:llama"), pipeline, seq=16, train=True, mesh=mesh)["model"]["notes"]
    assert sum(f"no pass uses the mesh {mesh}" in n for n in notes) == noted


def test_under_a_cp_mesh_a_ranks_tokens_and_what_it_sends_are_counted():
    """Two ranks of 256 tokens: half the operations and nearly half of what is kept; a state is 4 x 8 x 257 bytes."""
    data = plan(resolve("tiny:mamba2"), "mamba-context-parallel", seq=512, train=True, mesh="cp=2")
    phase = data["phases"]["train"]
    assert phase["tokens_a_rank"] == 256
    assert phase["after"]["flops"] == pytest.approx(phase["before"]["flops"] / 2, rel=0.03)
    assert phase["after"]["activation_bytes"] == pytest.approx(phase["before"]["activation_bytes"] / 2, rel=0.06)
    (row,) = phase["exchange"]["rows"]
    assert row["state_bytes"] == 4 * 8 * 257
    assert row["tail_bytes"] == 4 * 3 * 192
    assert row["heads_bytes"] == 4 * 512 * (3 * 128 + 2 * 2 * 16 + 8) // 4
    assert phase["exchange"]["bytes"] == 2 * 2 * (4 * 8 * 257 + 4 * 3 * 192)  # two layers, both ways
    sent = {(c["pass"], c["caller"]): c["bytes_sent"] for c in data["mesh"]["collectives"]}
    assert sent["forward", "state_start"] == 2 * row["state_bytes"]
    assert sent["forward", "tail_start"] == 2 * row["tail_bytes"]


def test_a_training_step_that_cannot_be_split_as_wrap_decides_is_told(monkeypatch):
    """Dropout inside a region: evaluation, on which wrap decides, has none."""
    text = "tiny:gpt2{attn_pdrop=%s,n_layer=1}"
    words: dict[str, Any] = {"seq": 16, "train": True, "mesh": "tp=2"}
    assert plan(resolve(text % 0.0), "tensor-parallel", **words)["errors"] == []
    (error,) = plan(resolve(text % 0.1), "tensor-parallel", **words)["errors"]
    assert error["pass"] == "tensor-parallel" and error["remedy"].startswith("set this dropout to 0")
    assert error["message"].startswith("the first step would raise: transformer.h.0.attn: ")
    assert plan(resolve(text % 0.1), "tensor-parallel", seq=16, mesh="tp=2")["errors"] == []
    monkeypatch.setattr(planning, "_decided", lambda *_: None)  # sabotage
    assert plan(resolve(text % 0.1), "tensor-parallel", **words)["errors"] == []


def test_a_training_step_is_split_where_wrap_splits():
    """Bloom's activation is an autograd function in training only."""
    text, modules = "tiny:bloom{n_layer=1}", []
    for train in (False, True):
        told = plan(resolve(text), "tensor-parallel", seq=16, train=train, mesh="tp=2", explain=True)
        modules.append([(s["module"], s["rule"]) for s in told["all_sites"]])
        assert told["errors"] == []
    assert modules[0] == modules[1] and ("transformer.h.0.mlp", "features") in modules[0]


def test_a_state_whose_channels_are_a_symbol_is_no_traceback():
    """Mamba-1's second graph, which decodes with a state that the first one made."""
    told = plan(resolve("tiny:mamba{num_hidden_layers=1}"), "tensor-parallel", seq=16, mesh="tp=2", explain=True)
    assert set(told["phases"]) == {"prefill", "decode"}
    assert any("backbone.layers.0.mixer" in r["module"] for r in (*told["all_sites"], *told["all_refusals"]))
