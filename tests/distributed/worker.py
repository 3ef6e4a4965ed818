"""One rank of a tensor-parallel comparison with one process. Started as ``python -m`` by :mod:`launch`.

Arguments: rank, world size, rendezvous file, result file, and a JSON list of cases. A case is a dict:

    family, overrides   of the tiny model
    pipeline            what it is wrapped with; tensor-parallel alone if left out
    mesh                ``tp=<world>`` if left out
    experts             how the library multiplies with experts' weights, in both; by number if left out
    base                what the one process is wrapped with, the first passes of pipeline; calibrated alike
    recompute           gradient checkpointing in both
    steps               optimiser steps (default 1)
    padding             False: no batch has any
    against             another pipeline on the same mesh, whose weights after the steps must be the same bits
    drop                leave out the collective of this number in the training graph (sabotage)
    whole               sabotage: parts of weights are cut from whole ones
    weights             a folder: the first rank saves the model there, and every rank wraps it from the meta device
    do                  more to do afterwards: "generate", "embeds", "save:<folder>", "convert:<folder>", "unwrap",
                        "load", "nll", "mismatch"
    rank_overrides      {rank: overrides of that rank alone} for ranks that do not agree
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from typing import Any

import torch
import torch.distributed as dist

from latentscan.ir.ops import collectives
from latentscan.runtime import session as session_module
from latentscan.runtime.checkpoint import load
from latentscan.runtime.door import session_of
from latentscan.runtime.source import resolve
from latentscan.runtime.stored import Stored
from latentscan.runtime.wrap import unwrap, wrap
from latentscan.tests.distributed.launch import serve
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import distance, ragged, tokens

torch.set_num_threads(1)


def perturbed(model: torch.nn.Module) -> torch.nn.Module:
    """Biases, norms and other vectors are not what they are initialised to: a lost or doubled one shows."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def smollm2(*, tokenizer: bool = False) -> Any:
    """SmolLM2-135M-Instruct's real weights in fp32, or its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from latentscan.tools import demo

    demo.quiet()
    folder, file = demo.smollm2_folder()
    if tokenizer:
        return AutoTokenizer.from_pretrained(folder, gguf_file=file)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)


def without(graph: Any, number: int) -> None:
    """Sabotage: the collective of that number is gone, on every rank."""
    found = [n for n in graph.nodes if n.target in collectives.COLLECTIVES]
    node = found[number]
    replacement = {
        collectives.split_gated_norm: local_norm,
        collectives.embed_rows: local_embedding,
        collectives.gather_last: local_logits,
    }.get(node.target)
    if replacement is not None:
        node.target = replacement
        return
    node.replace_all_uses_with(node.args[0])
    graph.graph.erase_node(node)


def local_embedding(ids: Any, weight: Any, start: int, stop: int, *_: Any) -> torch.Tensor:
    here = (ids >= start) & (ids < stop)
    return torch.nn.functional.embedding(torch.where(here, ids - start, 0), weight) * here.unsqueeze(-1)


def local_logits(x: torch.Tensor, sizes: list[int], rank: int, *_: Any) -> torch.Tensor:
    return torch.cat([x if r == rank else x.new_zeros(*x.shape[:-1], n) for r, n in enumerate(sizes)], -1)


def local_norm(*args: Any) -> torch.Tensor:
    return collectives.split_gated_norm(*args[:-1], "")


def gathered(model: torch.nn.Module, values: dict[str, Any]) -> dict[str, Any]:
    """Values by the names of the wrapped model, whole and by their original names. Communicates."""
    values = dict(values)
    for recipe in reversed(session_of(model).plan.recipes):  # type: ignore[union-attr]
        if recipe.inverse is not None and all(values.get(t) is not None for t in recipe.targets):
            made = recipe.inverse(*[values.pop(t) for t in recipe.targets])
            values.update(zip(recipe.sources, made, strict=True))
    return values


def worst(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest distance of a gradient from the wanted one; gradients near zero count against all others' size."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    floor = 1e-3 * max(float(g.abs().max()) for g in wanted.values() if g is not None)
    errors = []
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None, name
            continue
        errors.append(float((found[name] - gradient).abs().max() / gradient.abs().max().clamp(min=floor)))
    return max(errors)


def run(case: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    overrides = {**case.get("overrides", {}), **case.get("rank_overrides", {}).get(str(rank), {})}
    dtype = overrides.pop("dtype", "float32")
    one = smollm2() if case["family"] == "smollm2" else perturbed(build(case["family"], **overrides))
    one = one.to(getattr(torch, dtype))
    if "experts" in case:
        one.set_experts_implementation(case["experts"])  # type: ignore[operator]
    case["start"] = copy.deepcopy(one) if "against" in case else None
    one.train(case.get("train", True))
    if case.get("recompute"):
        one.gradient_checkpointing_enable()  # type: ignore[operator]
    held = sum(p.numel() for p in one.parameters())
    pipeline, mesh = case.get("pipeline", "tensor-parallel"), case.get("mesh", f"tp={world}")
    read: dict[str, Any] = {}
    if "base" in case:
        given = {"calibration": tokens(4, 32, 5)} if "rank=" in case["base"] else {}
        model = wrap(copy.deepcopy(one), pipeline, mesh=mesh, **given)
        one = wrap(one, case["base"], **given)
    elif "weights" in case:
        kept_part = Stored.part
        Stored.part = cut_after_reading if case.get("whole") else kept_part  # type: ignore[method-assign]
        try:
            model = from_disk(one, case["weights"], rank, pipeline, mesh, read)
        finally:
            Stored.part = kept_part  # type: ignore[method-assign]
    else:
        model = wrap(copy.deepcopy(one), pipeline, mesh=mesh)
    kept = session_module.Executable
    droppable = []

    class Dropping(kept):  # type: ignore[valid-type, misc]
        """Counts the collectives of each graph, and leaves one out."""

        def __init__(self, program: Any, *args: Any, **more: Any) -> None:
            graph = program.forced(False).graph
            droppable.append(sum(n.target in collectives.COLLECTIVES for n in graph.nodes))
            if "drop" in case:
                without(graph, case["drop"])
            super().__init__(program, *args, **more)

    session_module.Executable = Dropping  # type: ignore[misc]
    try:
        result = compare(case, model, one)
    finally:
        session_module.Executable = kept  # type: ignore[misc]
    if "against" in case:
        result |= same_bits(case, model, one)
    result |= read
    result["droppable"] = droppable[0] if droppable else 0
    result["held"] = sum(p.numel() for p in model.parameters()), held
    for what in case.get("do", ()):
        more(what, model, one, result, rank)
    return result


def from_disk(one: Any, folder: str, rank: int, pipeline: str, mesh: str, found: dict[str, Any]) -> torch.nn.Module:
    """The model wrapped from its files alone; what was read, and the most bytes of tensors alive meanwhile."""
    if rank == 0:
        one.save_pretrained(folder, max_shard_size="100KB")
    dist.barrier()
    empty = resolve(folder).on_meta().train(one.training)
    before, peak, kept = set(storages()), [0], Stored._copy

    def copied(self: Any, *args: Any) -> None:
        kept(self, *args)
        peak[0] = max(peak[0], sum(n for key, n in storages().items() if key not in before))
        found["bytes_read"] = self.bytes_read

    Stored._copy = copied  # type: ignore[method-assign]
    try:
        model = wrap(empty, pipeline, mesh=mesh, weights=folder)
    finally:
        Stored._copy = kept  # type: ignore[method-assign]
    found["peak"] = peak[0]
    found["bytes"] = sum(p.nbytes for p in model.parameters()), sum(p.nbytes for p in one.parameters())
    found["stored_buffers"] = sum(b.nbytes for n, b in one.named_buffers() if n in one.state_dict())
    found["largest"] = max(p.nbytes for p in one.parameters())
    return model


def cut_after_reading(self: Any, name: str, part: Any, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    whole = self.read(name, like, device)
    return whole if part.dim is None else whole.index_select(part.dim, torch.tensor(part.own))


def storages() -> dict[int, int]:
    """Address and bytes of what all tensors of the process are kept in."""
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    found = [t.untyped_storage() for t in tensors if t.device.type == "cpu"]
    return {s.data_ptr(): s.nbytes() for s in found}


def compare(case: dict[str, Any], model: torch.nn.Module, one: torch.nn.Module) -> dict[str, Any]:
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, one)]
    losses, gradients = [], []
    for step in range(case.get("steps", 1)):
        ids = tokens(3, 9, step)
        padded = step % 2 == 0 and case.get("padding", True)
        batch = ragged(2, 13 + step) if padded else {"input_ids": ids, "labels": ids}
        found = [m(**batch, use_cache=False).loss for m in (model, one)]
        for loss, optimizer in zip(found, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        losses.append(abs(float(found[0].detach() - found[1].detach())))
        mine = gathered(model, {n: p.grad for n, p in model.named_parameters()})
        theirs = {n: p.grad for n, p in one.named_parameters()}
        gradients.append(worst(mine, theirs if session_of(one) is None else gathered(one, theirs)))
        for optimizer in optimizers:
            optimizer.step()
    if not losses:
        return {}
    graph = session_of(model).graphs[0]  # type: ignore[union-attr]
    own = list(model.parameters())
    states = [t for p in own for t in optimizers[0].state[p].values() if isinstance(t, torch.Tensor)]
    return {
        "elements": [sum(t.numel() for t in ts) for ts in (own, [p.grad for p in own if p.grad is not None], states)],
        "losses": losses,
        "gradients": gradients,
        "sites": [s.module for r in graph.records for s in r.sites],
        "collectives": graph.collectives,
    }


def same_bits(case: dict[str, Any], model: torch.nn.Module, one: torch.nn.Module) -> dict[str, Any]:
    """Whether a model wrapped in another way came to the same weights in the same steps; and what was scheduled."""
    mesh = session_of(model).mesh  # type: ignore[union-attr]
    other = wrap(copy.deepcopy(case["start"]), case["against"], mesh=mesh.text())  # type: ignore[union-attr]
    compare(case, other, copy.deepcopy(case["start"]))
    mine, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    scheduled = session_of(model).graphs[0].scheduled  # type: ignore[union-attr]
    return {
        "bits": all(torch.equal(p, theirs[n]) for n, p in mine.items()) and mine.keys() == theirs.keys(),
        "scheduled": [dataclasses.asdict(s) for s in scheduled],
    }


def more(what: str, model: torch.nn.Module, one: torch.nn.Module, result: dict[str, Any], rank: int) -> None:
    model.eval(), one.eval()
    batch = ragged(2, 11)
    given = {k: batch[k] for k in ("input_ids", "attention_mask")}
    if what == "generate":
        with torch.no_grad():
            result["logits"] = distance(model(**given).logits, one(**given).logits)
            made = [m.generate(**given, max_new_tokens=6, do_sample=False) for m in (model, one)]  # type: ignore
        result["generate"] = bool(torch.equal(*made))
    elif what == "embeds":
        values = torch.randn(2, 9, one.config.hidden_size, generator=torch.Generator().manual_seed(3))
        found = [m(inputs_embeds=values, use_cache=False).logits for m in (model, one)]
        result["embeds"] = distance(*found)
    elif what == "nll":
        from latentscan.tools import demo

        text = demo.rows(smollm2(tokenizer=True), demo.texts()[1], 2)
        result["nll"] = demo.nll(model, text), demo.nll(one, text)
    elif what == "mismatch":
        length = 11 + rank  # every rank has another one
        model(tokens(2, length), use_cache=False)
    elif what.startswith("convert:"):
        model.save_pretrained(what[8:])  # type: ignore[operator]
        with torch.no_grad():
            result["converted"] = distance(load(what[8:])(**given).logits, one(**given).logits)
            parts = load(what[8:], mesh=f"tp={dist.get_world_size()}")
            result["loaded_in_parts"] = distance(parts(**given).logits, one(**given).logits)
        mine, theirs = dict(parts.named_parameters()), dict(model.named_parameters())
        result["same_parts"] = mine.keys() == theirs.keys() and all(torch.equal(mine[n], p) for n, p in theirs.items())
    elif what.startswith("save:"):
        model.save_pretrained(what[5:])  # type: ignore[operator]
        plain = type(one).from_pretrained(what[5:])  # type: ignore[attr-defined]
        mine, theirs = plain.state_dict(), one.state_dict()
        result["saved"] = max(distance(mine[n].float(), theirs[n].float()) for n in theirs)
        result["names"] = sorted(mine.keys() ^ theirs.keys())
    elif what == "load":
        state = {n: v * 1.1 for n, v in one.state_dict().items()}
        found = model.load_state_dict(state)
        mine = gathered(model, dict(model.named_parameters()))
        result["loaded"] = max(float((mine[n] - state[n]).abs().max()) for n, _ in one.named_parameters())
        result["odd"] = [*found.missing_keys, *found.unexpected_keys]
        one.load_state_dict(state)
    elif what == "unwrap":
        unwrap(model)
        mine = dict(model.named_parameters())
        assert mine.keys() == dict(one.named_parameters()).keys()
        result["unwrapped"] = max(distance(mine[name], p) for name, p in one.named_parameters())


if __name__ == "__main__":
    serve(run)
