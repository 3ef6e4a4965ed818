"""One rank that uses a split model, and beside it one process' model, as scripts may. Started by :mod:`launch`.

Arguments: rank, world size, rendezvous file, result file, and a JSON list of cases. A case is a dict:

    models      [{family, overrides, experts}, ..], all wrapped in this process before any is called
    pipeline, inductor    of :func:`wrap`
    trained     the last parts of the names of what trains (``["bias"]``); all if left out
    late        what does not train is frozen after wrap only
    apart       from this step on the ranks draw other random numbers
    script      what is done with every model, one after the other, in turns:

        step B L, step B L B2 L2 ..     a step of SGD; with several batches their gradients are accumulated
        autocast B L                    a step under autocast to bfloat16
        embeds B L                      loss and gradient of embedded inputs, in training
        loss B L                        evaluation without gradients, then training again
        grad B L                        gradients in evaluation mode, no step
        generate B L                    six tokens, greedily, then training again
        sample B L                      six tokens drawn by each rank for itself
        recompute, keep                 gradient checkpointing on, off
        clip                            the next steps clip to a norm of 0.1
        still                           every module but the model itself to evaluation
        freeze                          rank 1 alone freezes the weights of the first norm

The result has for each model a list of [action, distance]: of losses, of every gradient, of logits, of tokens.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

from latentscan.ir.errors import LatentscanError
from latentscan.runtime.gradients import clip_grad_norm_
from latentscan.runtime.wrap import wrap
from latentscan.tests.distributed.launch import serve
from latentscan.tests.distributed.worker import gathered, perturbed, worst
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import distance, ragged, tokens

torch.set_num_threads(1)


def inputs(batch: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Ids and labels; for an even batch a mask with padding on the left, and no label that padding would predict."""
    ids = tokens(batch, length, seed)
    if batch % 2:
        return {"input_ids": ids, "labels": ids}
    mask = ragged(batch, length)["attention_mask"]
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask.roll(1, 1) * mask == 0, -100)}


def freeze(model: torch.nn.Module, trained: list[str]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.removesuffix("_tp").endswith(tuple(trained)))


class Pair:
    """A model split over the ranks, and the same in one process."""

    def __init__(self, given: dict[str, Any], case: dict[str, Any]) -> None:
        one = perturbed(build(given["family"], **given.get("overrides", {})))
        if "experts" in given:
            one.set_experts_implementation(given["experts"])  # type: ignore[operator]
        late = case.get("late", False)
        if "trained" in case and not late:
            freeze(one, case["trained"])
        self.model, self.one = copy.deepcopy(one).train(), one.train()
        self.norm: float | None = None
        self.apart_from = case.get("apart", 1 << 30)
        more = {"inductor": case["inductor"]} if "inductor" in case else {}
        wrap(self.model, case.get("pipeline", "tensor-parallel"), mesh=f"tp={dist.get_world_size()}", **more)
        if late:
            for m in self.both:
                freeze(m, case["trained"])
        self.optimizers = [
            torch.optim.SGD([p for p in m.parameters() if p.requires_grad] or [torch.zeros(1)], lr=0.05, momentum=0.9)
            for m in self.both
        ]

    @property
    def both(self) -> tuple[Any, Any]:
        return self.model, self.one

    def do(self, seed: int, what: str, *numbers: int) -> float:
        batch, length = (*numbers, 2, 9)[:2]
        given = inputs(batch, length, seed)
        del given["labels"]
        if what in ("step", "autocast"):
            pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
            return self.step(seed, pairs, what == "autocast")
        if what in ("recompute", "keep"):
            for m in self.both:
                m.gradient_checkpointing_enable() if what == "recompute" else m.gradient_checkpointing_disable()
        elif what == "clip":
            self.norm = 0.1
        elif what == "still":
            for module in (m for model in self.both for m in model.modules() if m is not model):
                module.eval()
        elif what == "freeze":
            names = [n for n, _ in self.model.named_parameters() if "norm" in n]
            if dist.get_rank() == 1:
                self.model.get_parameter(names[0]).requires_grad_(False)
        elif what == "embeds":
            return self.embeds(batch, length, seed)
        elif what == "grad":
            return self.in_eval(lambda m: self.backward(m, batch, length, seed), self.gradients)
        elif what == "loss":
            seen = given.get("attention_mask", torch.ones(batch, length, dtype=torch.long))[..., None]
            with torch.no_grad():
                return self.in_eval(lambda m: m(**given, use_cache=False).logits * seen)
        elif what == "generate":
            made = []
            self.in_eval(lambda m: made.append(m.generate(**given, max_new_tokens=6, do_sample=False)))
            return 0.0 if torch.equal(*made) else 1.0
        elif what == "sample":
            torch.manual_seed(dist.get_rank())
            self.model.eval().generate(**given, max_new_tokens=6, do_sample=True)
        else:
            raise ValueError(what)
        return 0.0

    def in_eval(self, call: Any, then: Any = None) -> float:
        found = [call(m.eval()) for m in self.both]
        error = distance(*found) if isinstance(found[0], torch.Tensor) else 0.0
        error = max(error, then() if then is not None else 0.0)
        for m in self.both:
            m.train(), m.zero_grad()
        return error

    def backward(self, model: Any, batch: int, length: int, seed: int) -> torch.Tensor:
        loss = model(**inputs(batch, length, seed), use_cache=False).loss
        loss.backward()
        return loss.detach()

    def gradients(self) -> float:
        mine = dict(self.model.named_parameters())
        assert all(p.grad is None for p in mine.values() if not p.requires_grad)
        whole = gathered(self.model, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in mine.items()})
        theirs = {n: p.grad for n, p in self.one.named_parameters() if p.grad is not None}
        return worst({n: whole[n] for n in theirs}, theirs)

    def step(self, seed: int, pairs: list[tuple[int, int]], autocast: bool) -> float:
        errors = []
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for number, (batch, length) in enumerate(pairs):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses = []
                for m in self.both:
                    other = dist.get_rank() if seed >= self.apart_from else 0
                    torch.manual_seed(100 * seed + number + other)  # ranks and one process draw the same numbers
                    losses.append(self.backward(m, batch, length, seed + number))
            errors.append(abs(float(losses[0] - losses[1])))
        errors.append(self.gradients())
        if self.norm is not None:
            norms = clip_grad_norm_(self.model, self.norm), torch.nn.utils.clip_grad_norm_(self.one.parameters(), 0.1)
            errors.append(abs(float(norms[0] / norms[1] - 1)))
        for optimizer in self.optimizers:
            optimizer.step()
        return max(errors)

    def embeds(self, batch: int, length: int, seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(batch, length, self.one.config.hidden_size, generator=generator)
        found = []
        for m in self.both:
            given = values.clone().requires_grad_()
            m(inputs_embeds=given, labels=tokens(batch, length, seed), use_cache=False).loss.backward()
            found.append(given.grad)
        error = max(distance(*found), self.gradients())  # type: ignore[arg-type]
        for m in self.both:
            m.zero_grad()
        return error

    def apart(self) -> float:
        """The largest distance of a weight from one process', all steps done."""
        mine = gathered(self.model, dict(self.model.named_parameters()))
        return max(distance(mine[n].detach(), p.detach()) for n, p in self.one.named_parameters() if p.requires_grad)


def run(case: dict[str, Any]) -> dict[str, Any]:
    pairs = [Pair(given, case) for given in case["models"]]
    found: list[list[Any]] = [[] for _ in pairs]
    for seed, (what, *numbers) in enumerate(case["script"]):
        for pair, told in zip(pairs, found, strict=True):
            action = " ".join(map(str, (what, *numbers)))
            try:
                told.append([action, pair.do(seed, what, *numbers)])
            except LatentscanError as error:
                return {"done": found, "at": action, "error": type(error).__name__, "text": str(error)}
    return {"done": found, "apart": [pair.apart() for pair in pairs]}


if __name__ == "__main__":
    serve(lambda case, rank, world: run(case))
