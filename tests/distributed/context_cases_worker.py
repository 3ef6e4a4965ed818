"""One rank of many small context-parallel calls, each compared with one process. Started as ``python -m`` by
:mod:`launch`.

Arguments: rank, world size, rendezvous file, result file, and a JSON list of cases. A case is a dict:

    family, set         the tiny model and what is changed of it
    pipeline, mesh      ``mamba-context-parallel,ulysses`` and ``cp=<world>`` if left out
    rows, length        of the batch (2 x 24), or a length for each step
    mask                "left", "right" or "ones": rows of different lengths, padded at that end
    starts              places where a packed sequence starts, in every row; or a list for each row
    untrained           [from, to): tokens whose labels are all -100
    pad                 split_batch(pad=True)
    double, recompute, autocast, inductor   as they say
    steps               optimiser steps (2)
    do                  what to do after (see ``more``)
    states              instead of all this [algorithm, packed]: the ops around one scan, with initial and final states

Told for each: ``loss`` and ``gradient``, the largest relative differences; or ``error`` and ``text``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from latentscan.ir.errors import LatentscanError
from latentscan.runtime.batch import IGNORED, split_batch
from latentscan.runtime.wrap import wrap
from latentscan.tests.distributed.context_parallel_worker import apart, whole
from latentscan.tests.distributed.launch import serve
from latentscan.tests.models import build

BOTH = "mamba-context-parallel,ulysses"


def batches(case: dict[str, Any], vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """The whole batch of every step."""
    rows, lengths = case.get("rows", 2), case.get("length", 24)
    g = torch.Generator().manual_seed(case.get("seed", 5))
    found = []
    for step in range(case.get("steps", 2)):
        length = lengths[step] if isinstance(lengths, list) else lengths
        ids = torch.randint(3, vocabulary, (rows, length), generator=g)
        labels = ids.masked_fill(torch.rand(rows, length, generator=g) < 0.2, IGNORED)
        batch = {"input_ids": ids, "labels": labels}
        if "mask" in case:
            mask = torch.ones_like(ids)
            for row in range(rows):
                short = (3 + 5 * row) % length if case["mask"] != "ones" else 0
                mask[row, : short if case["mask"] == "left" else 0] = 0
                mask[row, length - short if case["mask"] == "right" else length :] = 0
            batch["attention_mask"] = mask
            labels.masked_fill_(mask == 0, IGNORED)
        if "starts" in case:
            starts = torch.zeros(rows, length, dtype=torch.bool)
            for row in range(rows):
                here = case["starts"]
                starts[row, here[row] if here and isinstance(here[0], list) else here] = True
            starts[:, 0] = False
            batch["seq_idx"] = starts.cumsum(1, dtype=torch.int32)
        if "untrained" in case:
            labels[:, slice(*case["untrained"])] = IGNORED
        found.append(batch)
    return found


def differences(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The largest relative difference; a gradient near zero counts against 1e-6 of the largest at least."""
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    floor = max(1e-6 * max(float(g.norm()) for g in want.values()), 1e-30)
    errors = [float((got[n] - g).norm()) / max(float(g.norm()), floor) for n, g in want.items()]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def gradients(model: torch.nn.Module, one: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All gradients of a wrapped model by the names of the one process'."""
    known = {id(p): n for n, p in one.named_parameters()}  # weights that layers share have several names
    names = {n: known[id(p)] for n, p in one.named_parameters(remove_duplicate=False)}
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {names.get(n, n): g for n, g in whole(model, grads).items()}


def states(algorithm: str, packed: bool, rank: int, world: int) -> dict[str, Any]:
    """A scan over shards of different lengths, fp64: its y, the whole sequence's state, which every rank uses with a
    weight of its own, and all gradients against the definition."""
    from latentscan.tests.ir.test_ssm_exchange_ops import Shards, joined, on_a_rank

    class Fixed:
        values = iter([world, 2, 2, *(3 + r for r in range(world)), 2, 3, 4, 7])

        def draw(self, strategy: Any) -> int:
            return next(self.values)

    s = Shards(Fixed(), packed=packed)
    every: list[Any] = [None] * world
    dist.all_gather_object(every, on_a_rank(s, rank, algorithm, True, dist.group.WORLD.group_name))  # type: ignore
    pairs = zip(joined(s, every, True), s.whole(True), strict=True)
    return {"states": max(float(((a - b).abs().max() / (1 + b.abs().max())).detach()) for a, b in pairs)}


def run(case: dict[str, Any], world: int) -> dict[str, Any]:
    if "states" in case:
        return states(*case["states"], dist.get_rank(), world)
    one = build(case["family"], **case.get("set", {})).train()
    one = one.double() if case.get("double") else one
    if case.get("recompute"):
        one.gradient_checkpointing_enable()  # type: ignore[operator]
    many, mesh = copy.deepcopy(one), case.get("mesh", f"cp={world}")
    wrap(many, case.get("pipeline", BOTH), mesh=mesh, **case.get("options", {}))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, many)]
    told: dict[str, Any] = {"loss": 0.0, "gradient": 0.0, "finite": True}
    for batch in batches(case, one.config.vocab_size):
        losses = []
        for model, optimizer in zip((one, many), optimizers, strict=True):
            optimizer.zero_grad()
            given = split_batch(batch, mesh, pad=case.get("pad", False)) if model is many else batch
            call: Callable[..., Any] = apart(one) if model is one and "starts" in case else model
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.get("autocast", False)):
                losses.append(call(**given, use_cache=False).loss)
            losses[-1].backward()
        want, got = (float(x.detach()) for x in losses)
        told["loss"] = max(told["loss"], abs(got - want) / max(abs(want), 1e-30))
        told["finite"] &= math.isfinite(got) and math.isfinite(want)
        wanted = {n: p.grad for n, p in one.named_parameters() if p.grad is not None}
        got_grads = gradients(many, one)
        if "gradients=partial" in case.get("pipeline", ""):  # what a sharded optimiser's reduce-scatter does
            for gradient in got_grads.values():
                dist.all_reduce(gradient)
        told["gradient"] = max(told["gradient"], differences(got_grads, wanted))
        for optimizer in optimizers:
            optimizer.step()
        for what in case.get("do", ()):
            told.update(more(what, one, many, batch, mesh))
    return told


def more(what: str, one: Any, many: Any, batch: dict[str, Any], mesh: str) -> dict[str, Any]:
    """Other calls of both models."""
    if what == "longer-mask":
        given = split_batch(batch, mesh)
        ones = given["attention_mask"].new_ones
        given["attention_mask"] = torch.cat([ones(given["input_ids"].shape[0], 5), given["attention_mask"]], 1)
        try:
            many(**given, use_cache=False)
        except LatentscanError as error:
            return {"longer": type(error).__name__, "longer_text": str(error)}
        return {"longer": "taken"}
    if what == "eval":
        one.eval(), many.eval()
        with torch.no_grad():
            want = one(**batch, use_cache=False)
            got = many(**split_batch(batch, mesh), use_cache=False)
        one.train(), many.train()
        rank, size = dist.get_rank(), dist.get_world_size()
        part = want.logits.chunk(size, 1)[rank]
        return {
            "eval_loss": abs(float(got.loss - want.loss)) / float(want.loss),
            "eval_logits": float((got.logits - part).abs().max() / part.abs().max()),
        }
    if what == "generate":
        many.eval()
        given = {"input_ids": batch["input_ids"][:, :8]}
        try:
            many.generate(**given, max_new_tokens=4, do_sample=False)
        except LatentscanError as error:
            return {"generate": type(error).__name__, "generate_text": str(error)}
        finally:
            many.train()
        return {"generate": "made"}
    if what == "two-models":  # another one, with another pipeline, called between two calls of the first
        other = build("llama").eval()
        split = wrap(copy.deepcopy(other), "ulysses", mesh=mesh)
        first = many(**split_batch(batch, mesh), use_cache=False).loss.detach()
        given = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
        with torch.no_grad():
            got = split(**split_batch(given, mesh), use_cache=False).loss
            want = other(**given).loss
        again = many(**split_batch(batch, mesh), use_cache=False).loss.detach()
        return {"other": abs(float(got - want)) / float(want), "again": float((first - again).abs())}
    raise ValueError(what)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(lambda case, rank, world: run(case, world), Exception)  # a rank that ended would leave the others waiting
