"""What the low-rank methods of mha-to-mla cost, on SmolLM2-135M-Instruct: ``python -m latentscan.tools.low_rank``.

Every method x cut x allocation, converted on several calibration subsets and never trained. Calibration rows are drawn
from the even topics of Python's own documentation, the held-out rows lie evenly over the odd ones, as in the demo.
The new weights are those of the pass; the loss is measured with a plain eager attention that reads them (a test holds
it to the wrapped model's), because tracing the model anew for every cell would take most of the time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from latentscan.passes.base import Context, Site
from latentscan.passes.mha_to_mla import MhaToMla
from latentscan.passes.mha_to_mla_low_rank import recipe_of
from latentscan.passes.mha_to_mla_rotary import Place, place_of
from latentscan.passes.pipeline import parse
from latentscan.runtime.calibration import Calibration, Moments, statistics_for

# d_c / d_r per method and cut of the 384 elements per token and layer: of those tried, each method's best.
SIZES = {
    ("transmla", 192): (128, 64), ("transmla", 96): (64, 32),
    ("pca", 192): (96, 96), ("pca", 96): (48, 48),
    ("two-sided", 192): (144, 48), ("two-sided", 96): (68, 28),
}  # fmt: skip
METHODS, CUTS, ALLOCATIONS = ("transmla", "pca", "two-sided"), (192, 96), ("uniform", "energy")


def pipeline(method: str, cut: int, allocation: str) -> str:
    rank, rope_dim = SIZES[method, cut]
    end = "" if allocation == "uniform" else f",allocation={allocation}"
    return f"mha-to-mla{{rank={rank},rope_dim={rope_dim},method={method}{end}}}"


def converted(model: Any, text: str, statistics: dict[str, Moments], graph: Any) -> dict[str, Any]:
    """Attention module path -> its new weights, with the site's facts; as the pass makes them."""
    (current,) = parse(text)
    assert isinstance(current, MhaToMla)
    context = Context(statistics=statistics, own_parameters=True)
    made = {}
    for site in current.plan(graph, context):
        assert isinstance(site, Site), site
        place = place_of(graph, graph.node(site.anchor), site.module, context)
        assert isinstance(place, Place)
        recipe = recipe_of(current, graph, site, place, context)
        with torch.no_grad():
            values = recipe.function(*(model.get_parameter(path) for path in recipe.sources))
        names = (t.rsplit("latentscan_", 1)[1] for t in recipe.targets)
        made[site.module] = {"facts": site.facts, "place": place, **dict(zip(names, values, strict=True))}
    return made


class Eager:
    """A Llama attention's forward on the new weights, without a cache."""

    def __init__(self, attention: Any, new: dict[str, Any]) -> None:
        self.attention, self.new, self.place = attention, new, new["place"]

    def __call__(self, hidden_states: torch.Tensor, **rest: Any) -> tuple[torch.Tensor, None]:
        new, x = self.new, hidden_states
        batch, length, _ = x.shape
        heads, kv_heads, width, _ = self.place.sizes
        pairs = [int(p) for p in str(new["facts"]["pairs"]).split("|")]
        angles = torch.arange(length)[:, None] * self.place.frequencies[pairs]
        cos, sin = angles.cos().to(x) * self.place.turn, angles.sin().to(x) * self.place.turn

        def part(y: torch.Tensor, n: int) -> torch.Tensor:
            return y.view(batch, length, n, -1).transpose(1, 2)

        def linear(y: torch.Tensor, name: str) -> torch.Tensor:
            return F.linear(y, new[f"{name}_weight"], new.get(f"{name}_bias"))

        def turn(y: torch.Tensor) -> torch.Tensor:
            first, second = y.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        latent = linear(x, "kv_down")
        k_plain, v = part(linear(latent, "k_up"), kv_heads), part(linear(latent, "v_up"), kv_heads)
        if "method" in new["facts"]:
            q, k_rope = part(linear(x, "q"), heads), part(linear(x, "k_rope"), 1).expand(-1, kv_heads, -1, -1)
            n = k_plain.shape[-1]
            q_plain, q_rope = q[..., :n], q[..., n:]
        else:
            q, k_rope = part(self.attention.q_proj(x), heads), part(linear(x, "k_rope"), kv_heads)
            rotated = pairs + [p + width // 2 for p in pairs]
            plain = [i for i in range(width) if i not in set(rotated)]
            q_plain, q_rope = q[..., plain], q[..., rotated]
        q, k = torch.cat([q_plain, turn(q_rope)], -1), torch.cat([k_plain, turn(k_rope)], -1)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.attention.scaling)
        return self.attention.o_proj(out.transpose(1, 2).flatten(2)), None


@contextmanager
def replaced(model: Any, made: dict[str, Any]) -> Iterator[None]:
    """The model computes with the new weights inside the block."""
    modules = {path: model.get_submodule(path) for path in made}
    try:
        for path, module in modules.items():
            module.forward = Eager(module, made[path])
        yield
    finally:
        for module in modules.values():
            module.__dict__.pop("forward", None)


def nll(model: Any, rows: torch.Tensor, batch: int = 4) -> float:
    """Mean negative log likelihood per token, nats."""
    total = 0.0
    with torch.no_grad():
        for part in rows.split(batch):
            logits = model(input_ids=part, use_cache=False).logits[:, :-1]
            total += float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return total / (rows.numel() - len(rows))


def measure(
    seeds: Sequence[int], rows: int, held_out_rows: int, cells: Sequence[tuple[str, int, str]], say: Any
) -> dict[str, Any]:
    """Calibrate once a seed, convert and measure every cell."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from latentscan.runtime.wrap import planning_graph
    from latentscan.tools import demo

    demo.quiet()
    folder, file = demo.smollm2_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    calibration, text = demo.texts()
    ids = torch.tensor(tokenizer(calibration)["input_ids"])
    seen = ids[: len(ids) // demo.LENGTH * demo.LENGTH].reshape(-1, demo.LENGTH)
    other = torch.tensor(tokenizer(text)["input_ids"])
    other = other[: len(other) // demo.LENGTH * demo.LENGTH].reshape(-1, demo.LENGTH)
    held_out = other[torch.linspace(0, len(other) - 1, held_out_rows).long()]
    graph = planning_graph(model)
    result: dict[str, Any] = {"baseline": nll(model, held_out), "rows": rows, "held_out": held_out_rows, "cells": {}}
    say(f"not compressed: {result['baseline']:.4f}")
    for seed in seeds:
        began = time.perf_counter()
        first = parse(pipeline(*cells[0]))
        statistics = statistics_for(model, first, Calibration(seen, rows=rows, seed=seed))
        say(f"seed {seed}: {rows} of {len(seen)} rows in {time.perf_counter() - began:.0f} s")
        for cell in cells:
            words = pipeline(*cell)
            made = converted(model, words, statistics, graph)
            assert sum(m["facts"]["d_c"] + m["facts"]["d_r"] for m in made.values()) == cell[1] * len(made)
            with replaced(model, made):
                value = nll(model, held_out)
            result["cells"].setdefault(words, []).append(value)
            say(f"seed {seed}: {words}: {value:.4f}")
    return result


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = ["| pipeline | NLL (mean) | above the original | spread (max - min) | seeds |", "|---|---|---|---|---|"]
    for words, values in result["cells"].items():
        mean = math.fsum(values) / len(values)
        above, spread = mean - result["baseline"], max(values) - min(values)
        lines.append(f"| `{words}` | {mean:.3f} | {above:.3f} | {spread:.3f} | {len(values)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m latentscan.tools.low_rank", description=__doc__)
    parser.add_argument("--seeds", default="0,1,2", help="calibration subsets, numbers with commas between")
    parser.add_argument("--rows", type=int, default=16, help="calibration rows of 256 tokens")
    parser.add_argument("--held-out", type=int, default=8, help="held-out rows of 256 tokens")
    for name, all_of in (("methods", METHODS), ("cuts", CUTS), ("allocations", ALLOCATIONS)):
        parser.add_argument(f"--{name}", default=",".join(map(str, all_of)), help="a selection of these")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the table")
    given = parser.parse_args(arguments)
    cells = [
        (method, int(cut), allocation)
        for cut in given.cuts.split(",")
        for method in given.methods.split(",")
        for allocation in given.allocations.split(",")
    ]
    unknown = [c for c in cells if c[:2] not in SIZES or c[2] not in ALLOCATIONS]
    if unknown:
        parser.error(f"there is no cell {unknown[0]}")
    seeds = [int(s) for s in given.seeds.split(",")]
    result = measure(seeds, given.rows, given.held_out, cells, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(result, sort_keys=True) if given.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
