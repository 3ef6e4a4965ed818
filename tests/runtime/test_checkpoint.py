"""Wrapped models on disk: the same model comes back, damage is told, and a kill leaves the old or the new directory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from latentscan.ir.errors import CheckpointError
from latentscan.ir.weights import Recipe
from latentscan.runtime import atomic, checkpoint
from latentscan.runtime.checkpoint import load, tensors_in, unsharded
from latentscan.runtime.door import session_of
from latentscan.runtime.own import get
from latentscan.runtime.plan import ModelPlan
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build

IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
CALIBRATION = torch.randint(3, 128, (8, 64), generator=torch.Generator().manual_seed(1))
LOW_RANK = "mha-to-mla{rank=24,rope_dim=8},latent-cache,mla-absorb"
SPLIT = "mla-mm-split,mla-absorb"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def wrapped(family: str = "deepseek_v3", pipeline: str = SPLIT, **overrides) -> torch.nn.Module:
    return wrap(build(family, **overrides), pipeline, calibration=CALIBRATION if "rank=" in pipeline else None)


# -- the same model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "pipeline", "overrides"),
    [
        ("deepseek_v3", SPLIT, {}),
        ("llama", LOW_RANK, {}),
        ("llama", LOW_RANK, {"tie_word_embeddings": True, "num_hidden_layers": 1}),
        ("qwen2", LOW_RANK, {"num_hidden_layers": 1}),  # biases
        ("gpt2", "mha-to-mla,latent-cache", {"n_layer": 1}),
        ("mamba2", "", {"num_hidden_layers": 1}),
        ("zamba2", LOW_RANK, {}),  # one block in several layers: released under every name
    ],
)
def test_what_was_saved_comes_back(tmp_path, family, pipeline, overrides):
    saved = wrapped(family, pipeline, **overrides)
    want = logits(saved)
    saved.save_pretrained(tmp_path / "m", max_shard_size="50KB")
    again = load(tmp_path / "m")
    assert type(again) is type(saved)
    assert torch.equal(logits(again), want)
    here, there = (dict(m.named_parameters()) for m in (saved, again))
    assert sorted(here) == sorted(there)
    assert all(torch.equal(here[n], there[n]) and there[n].requires_grad for n in here)
    apart = [len(dict(m.named_parameters(remove_duplicate=False))) for m in (saved, again)]
    assert apart[0] == apart[1]  # tied weights stay tied: as many names for as many tensors
    tied = [m.get_input_embeddings().weight is m.get_output_embeddings().weight for m in (saved, again)]
    assert tied[0] == tied[1] == saved.config.tie_word_embeddings
    assert session_of(again).plan.to_json() == session_of(saved).plan.to_json()
    for path in session_of(again).plan.released:  # dead weights are one NaN each
        assert get(again, path).isnan().all()
        assert get(again, path).untyped_storage().nbytes() == 4
    assert not [n for n, b in (*again.named_buffers(), *again.named_parameters()) if b.device.type == "meta"]


@pytest.mark.parametrize(("family", "pipeline"), [("deepseek_v3", SPLIT), ("llama", LOW_RANK)])
def test_the_type_is_kept(tmp_path, family, pipeline):
    model = build(family, dtype="bfloat16").to(torch.bfloat16)
    wrap(model, pipeline, calibration=CALIBRATION if "rank=" in pipeline else None)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert {n: p.dtype for n, p in again.named_parameters()} == {n: p.dtype for n, p in model.named_parameters()}
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_recipes_without_an_inverse_are_not_made_again(tmp_path, monkeypatch):
    saved = wrapped("llama", LOW_RANK)
    saved.save_pretrained(tmp_path)
    names = set(tensors_in(tmp_path))
    assert {t for r in session_of(saved).plan.recipes for t in r.targets} <= names
    assert not set(session_of(saved).plan.released) & names

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a recipe was computed")

    monkeypatch.setattr(checkpoint, "make_parameters", never)
    monkeypatch.setattr("latentscan.passes.lowrank.solve", never)
    again = load(tmp_path)
    assert torch.equal(logits(again), logits(saved))


def test_a_loaded_model_generates_and_saves_the_same_files(tmp_path):
    saved = wrapped(num_hidden_layers=1)
    saved.save_pretrained(tmp_path / "a")
    again = load(tmp_path / "a")
    want = saved.generate(IDS, max_new_tokens=4, do_sample=False)
    assert torch.equal(again.generate(IDS, max_new_tokens=4, do_sample=False), want)
    again.save_pretrained(tmp_path / "b")
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == files
    assert all((tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in files)


def test_plain_transformers_reads_what_has_inverses(tmp_path):
    model = build("deepseek_v3")
    want = logits(model)
    wrap(model, SPLIT).save_pretrained(tmp_path)
    plain, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    plain.set_experts_implementation("batched_mm")
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert torch.equal(logits(plain), want)
    assert json.loads((tmp_path / "latentscan.json").read_text())["reads_as_plain_model"] is True


def test_trained_weights_are_what_is_saved(tmp_path):
    model = wrapped("llama", LOW_RANK, num_hidden_layers=1).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    optimiser.step()
    model.eval().save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


# -- directories ------------------------------------------------------------------------------------------------------


def test_other_files_of_an_earlier_save_stay_and_old_shards_go(tmp_path):
    model = wrapped("llama", "mha-to-mla,latent-cache")
    target = tmp_path / "m"
    model.save_pretrained(target, max_shard_size="50KB")
    assert len(list(target.glob("model-*.safetensors"))) > 2
    (target / "optimizer.pt").write_bytes(b"state")
    (target / "runs").mkdir()
    with open(target / "runs" / "log", "w") as log:
        log.write("one ")
        log.flush()
        model.save_pretrained(target)
        log.write("two")
    assert (target / "runs" / "log").read_text() == "one two"
    assert (target / "optimizer.pt").read_bytes() == b"state"
    assert [p.name for p in target.glob("model*")] == ["model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    load(target)


def test_an_empty_or_unrelated_directory_takes_the_model(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    model = wrapped("llama", "mha-to-mla,latent-cache")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    load(tmp_path)


def test_a_model_of_somebody_else_is_not_overwritten(tmp_path):
    build("llama").save_pretrained(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    model = wrapped("llama", "mha-to-mla,latent-cache")
    with pytest.raises(CheckpointError, match="holds a model that latentscan did not save"):
        model.save_pretrained(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_failed_save_leaves_the_old_model(tmp_path, monkeypatch):
    model = wrapped("llama", "mha-to-mla,latent-cache")
    target = tmp_path / "m"
    model.save_pretrained(target)
    before = {p.name: p.read_bytes() for p in target.iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        model.save_pretrained(target)
    assert {p.name: p.read_bytes() for p in target.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_only_the_main_process_writes_and_nothing_is_pushed(tmp_path):
    model = wrapped("llama", "mha-to-mla,latent-cache")
    model.save_pretrained(tmp_path / "m", is_main_process=False)
    assert not (tmp_path / "m").exists()
    with pytest.raises(CheckpointError, match="push_to_hub is not served"):
        model.save_pretrained(tmp_path / "m", push_to_hub=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        model.save_pretrained(tmp_path / "file")


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "m"
    model = wrapped("llama", LOW_RANK)
    model.save_pretrained(folder, max_shard_size="50KB")
    return folder


def shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[0]


def edit(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "latentscan.json"
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))


def header(path: Path, text: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(text)) + text)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no marker": (lambda f: (f / "latentscan.json").unlink(), "no wrapped model was saved here"),
    "marker is no json": (lambda f: (f / "latentscan.json").write_text("{"), "cannot be read"),
    "marker is a list": (lambda f: (f / "latentscan.json").write_text("[]"), "cannot be read"),
    "newer": (lambda f: edit(f, lambda t: t.update(format=99)), "has format 99, this latentscan"),
    "no plan": (lambda f: edit(f, lambda t: t.pop("plan")), "is incomplete"),
    "no class": (lambda f: edit(f, lambda t: t.update({"class": "NobodyForCausalLM"})), "has no NobodyForCausalLM"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: is missing"),
    "config is no json": (lambda f: (f / "config.json").write_text("{"), "config.json: cannot be read"),
    "truncated": (lambda f: os.truncate(shard(f), shard(f).stat().st_size - 1), r"has \d+ bytes instead of \d+"),
    "too long": (lambda f: shard(f).write_bytes(shard(f).read_bytes() + b"x"), r"has \d+ bytes instead of \d+"),
    "empty": (lambda f: os.truncate(shard(f), 0), "is damaged"),
    "header cut": (lambda f: os.truncate(shard(f), 40), "is damaged"),
    "header of another kind": (lambda f: header(shard(f), b"[1, 2]"), "is damaged"),
    "shard missing": (lambda f: shard(f).unlink(), "is missing"),
    "index is no json": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "index.json: cannot be read"),
    "other rank": (
        lambda f: edit(f, lambda t: t["plan"].update(pipeline=t["plan"]["pipeline"].replace("24", "16"))),
        "the stored plan is not the one made now|planned with d_c",
    ),
    "other decision": (
        lambda f: edit(f, lambda t: t["plan"]["sites"][0]["facts"].update(heads=8, kv_heads=3)),
        "the stored plan|planned with",
    ),
    "a site less": (lambda f: edit(f, lambda t: t["plan"]["sites"].pop()), r"plan.sites has \d entries, now \d"),
    "unknown pass": (lambda f: edit(f, lambda t: t["plan"].update(pipeline="no-such-pass")), "there is no pass"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_clear_error(tmp_path, saved_model, damage):
    folder = tmp_path / "m"
    shutil.copytree(saved_model, folder)
    change, words = DAMAGE[damage]
    change(folder)
    with pytest.raises(Exception, match=words) as caught:
        load(folder)
    assert damage == "unknown pass" or isinstance(caught.value, CheckpointError)
    assert "\n" not in str(caught.value)


def test_a_missing_directory_is_one_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such directory"):
        load(tmp_path / "nowhere")


def test_missing_weights_are_named(tmp_path, saved_model):
    from safetensors.torch import load_file, save_file

    def without(part: str) -> Path:
        folder = tmp_path / part
        folder.mkdir()
        for name in ("config.json", "generation_config.json", "latentscan.json"):
            (folder / name).write_bytes((saved_model / name).read_bytes())
        state = {k: v for p in saved_model.glob("model-*") for k, v in load_file(p).items() if part not in k}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    with pytest.raises(CheckpointError, match=r"lacks the weight model.layers.0.self_attn.latentscan_k_up_weight"):
        load(without("k_up"))
    with pytest.raises(CheckpointError, match=r"lacks 2 weights, model.layers.0.mlp.up_proj.weight first"):
        load(without("mlp.up_proj"))


# -- kills ------------------------------------------------------------------------------------------------------------

# What Python tells its audit hooks of that changes a directory.
_EVENTS = ("os.rename", "os.mkdir", "os.link", "os.remove", "os.rmdir", "shutil.rmtree")


class Trap:
    """In a child process: SIGKILL at the n-th thing that is about to happen to a folder, or has just happened."""

    def __init__(self, folder: Path, at: int) -> None:
        self.folder, self.left = str(folder), at

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, args: tuple) -> None:
        writes = event == "open" and isinstance(args[1], str) and args[1][:1] in "wax"
        if (writes or event in _EVENTS) and self.folder in os.fspath(str(args[0])):
            self.step()

    def around(self, module: object, name: str) -> None:
        theirs = getattr(module, name)

        def trapped(*args: object, **kwargs: object) -> object:
            self.step()
            result = theirs(*args, **kwargs)
            self.step()
            return result

        setattr(module, name, trapped)

    def halfway(self, module: object, name: str) -> None:
        """Also when half of a weights file is on disk."""
        theirs = getattr(module, name)

        def trapped(tensors: dict, path: str, **kwargs: object) -> None:
            self.step()
            theirs(tensors, path, **kwargs)
            whole = Path(path).read_bytes()
            os.truncate(path, len(whole) // 2)
            self.step()
            Path(path).write_bytes(whole)

        setattr(module, name, trapped)


def run_killed(work: Callable[[], object], folder: Path, at: int) -> bool:
    """Run ``work`` in a child that is killed at its n-th step. False if it finished before."""
    child = os.fork()
    if child == 0:
        try:
            import transformers.modeling_utils

            trap = Trap(folder, at)
            trap.halfway(transformers.modeling_utils, "safe_save_file")
            trap.around(atomic, "exchange")
            sys.addaudithook(trap.audit)
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001  the child must not go on as a test process
            os._exit(3)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def content(folder: Path) -> dict[str, bytes] | None:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())} if folder.exists() else None


def states_after_kills(work: Callable[[], object], target: Path, prepare: Callable[[], object]) -> list[dict | None]:
    """What is at ``target`` after a kill at every step, the last being no kill at all."""
    states = []
    for at in range(1, 400):
        prepare()
        killed = run_killed(work, target.parent, at)
        states.append(content(target))
        if not killed:
            return states
    raise AssertionError("it never finished")


@pytest.mark.parametrize("existing", [False, True], ids=["new", "over an earlier save"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_leaves_the_old_directory_or_the_new_one(tmp_path, existing):
    target, earlier = tmp_path / "here" / "m", tmp_path / "earlier"
    model = wrapped("llama", "mha-to-mla,latent-cache", num_hidden_layers=1)
    if existing:
        other = wrapped("llama", "mha-to-mla,latent-cache")
        other.save_pretrained(earlier)
    old = content(earlier)

    def prepare() -> None:
        if target.exists():
            shutil.rmtree(target)
        if existing:
            shutil.copytree(earlier, target)

    states = states_after_kills(lambda: model.save_pretrained(target, max_shard_size="60KB"), target, prepare)
    new = states[-1]
    assert new is not None and new != old and len(new) > 5
    assert len(states) > 10
    assert all(state in (old, new) for state in states)
    assert states.count(old) > 5 and states.count(new) > 1
    model.save_pretrained(target, max_shard_size="60KB")
    assert [p.name for p in target.parent.iterdir()] == ["m"]  # what the killed ones left beside is gone
    assert content(target) == new
    load(target)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_sabotage_writing_in_place_is_found(tmp_path):
    target = tmp_path / "here" / "m"
    model = wrapped("llama", "mha-to-mla,latent-cache", num_hidden_layers=1)

    def prepare() -> None:
        shutil.rmtree(target.parent, ignore_errors=True)
        target.parent.mkdir()

    def in_place() -> None:
        type(model).save_pretrained(model, str(target), max_shard_size="60KB")

    states = states_after_kills(in_place, target, prepare)
    assert any(state not in (None, states[-1]) for state in states)


def test_without_an_exchange_two_renames_do(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "exchange", lambda a, b: False)
    for text in ("one", "two"):
        with atomic.replaced_directory(tmp_path / "m", lambda name: name == "kept") as aside:
            (aside / "file").write_text(text)
        (tmp_path / "m" / "kept").write_text("mine")
    assert (tmp_path / "m" / "file").read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_the_stored_plan_says_nothing_of_the_ranks():
    """Passes over a mesh are left out, and so is what only they released: whole graphs read it."""

    def nothing(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ()

    low_rank = Recipe(("k", "o"), ("k_new",), "mha-to-mla", "a", nothing)
    parts = Recipe(("o",), ("o_tp",), "tensor-parallel", "a", nothing, group="tp")
    facts: dict = {(name, "a"): {} for name in ("latent-cache", "tensor-parallel", "ulysses")}
    plan = ModelPlan("latent-cache,tensor-parallel,ulysses", facts, (low_rank, parts), ("k", "o"))
    whole = unsharded(plan)
    assert whole.pipeline == "latent-cache"
    assert list(whole.facts) == [("latent-cache", "a")]
    assert (whole.recipes, whole.released) == ((low_rank,), ("k",))
