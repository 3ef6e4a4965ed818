"""One of two stages of a model under torch.distributed.pipelining, compared with the whole model.

Arguments: rank, world size, rendezvous file, result file, and a JSON list of cases: {family, pipeline, schedule}.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining

import latentscan
from latentscan.tests.distributed.launch import serve
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import distance, in_original_names, tokens

torch.set_num_threads(1)
ROWS, LENGTH, PIECES = 4, 9, 2


def stage_of(model: Any, first: bool) -> Any:
    """Half of a model's layers as a model of the library: what it has none of is the identity."""
    model = copy.deepcopy(model)
    layers, half = model.model.layers, len(model.model.layers) // 2
    model.model.layers = layers[:half] if first else layers[half:]
    if first:
        model.model.norm = model.lm_head = nn.Identity()
    for index, layer in enumerate(model.model.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    model.config = model.model.config = copy.deepcopy(model.config)
    model.config.num_hidden_layers = len(model.model.layers)
    return model


class Tensors(nn.Module):
    """A stage as pipelining calls it: a tensor in, a tensor out."""

    def __init__(self, model: nn.Module, first: bool) -> None:
        super().__init__()
        self.model, self.given = model, "input_ids" if first else "inputs_embeds"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(**{self.given: x}, use_cache=False).logits


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def run(case: dict[str, Any], rank: int) -> dict[str, Any]:
    whole, first = build(case["family"]).train(), rank == 0
    part = latentscan.wrap(stage_of(whole, first), case["pipeline"])
    ids = tokens(ROWS, LENGTH)
    labels = ids.roll(-1, 1)
    sizes = {"rows": ROWS // PIECES, "hidden": whole.config.hidden_size, "words": whole.config.vocab_size}
    between = torch.empty(sizes["rows"], LENGTH, sizes["hidden"], requires_grad=True)
    logits = torch.empty(sizes["rows"], LENGTH, sizes["words"], requires_grad=True)
    given = (ids[: sizes["rows"]], between) if first else (between, logits)
    stage = pipelining.PipelineStage(
        Tensors(part, first), rank, 2, torch.device("cpu"), input_args=(given[0],), output_args=(given[1],)
    )
    schedule = getattr(pipelining, case["schedule"])(stage, PIECES, loss_fn=loss_of)
    losses: list[torch.Tensor] = []
    schedule.step(ids) if first else schedule.step(target=labels, losses=losses)
    loss = loss_of(whole(ids, use_cache=False).logits, labels)
    loss.backward()
    half = len(whole.model.layers) // 2
    wanted = {n: p.grad for n, p in whole.named_parameters()}
    worst = 0.0
    for name, gradient in in_original_names(part, {n: p.grad for n, p in part.named_parameters()}).items():
        if gradient is not None:
            there = name if first else re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) + half}", name)
            worst = max(worst, distance(gradient, wanted[there]))
    return {
        "gradients": worst,
        "loss": 0.0 if first else abs(float(sum(map(float, losses)) / PIECES - loss.detach())),
    }


if __name__ == "__main__":
    serve(lambda case, rank, world: run(case, rank))
