"""What the low-rank methods of mha-to-mla cost, on SmolLM2-135M-Instruct: ``python -m latentscan.tools.low_rank``.

Every method x cut x allocation, converted on several calibration subsets and never trained. Calibration rows are drawn
from the even topics of Python's own documentation; held-out rows are of the odd ones: the first of them choose d_c and
d_r (``--choose``), others, evenly over the rest, give the table. Statistics are shared by the cells of a subset, and
every cell is written to ``--out`` when it is measured: the same command goes on where it was.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from latentscan.passes.base import Context, Site
from latentscan.passes.mha_to_mla import MhaToMla
from latentscan.passes.mha_to_mla_low_rank import recipe_of
from latentscan.passes.mha_to_mla_rotary import Place, place_of
from latentscan.passes.pipeline import parse
from latentscan.runtime.calibration import Calibration, Moments, statistics_for

# d_c / d_r per method and cut of the 384 elements per token and layer: of CANDIDATES, each method's best.
SIZES = {
    ("transmla", 192): (128, 64), ("transmla", 96): (64, 32),
    ("transmla-unfolded", 192): (136, 56), ("transmla-unfolded", 96): (48, 48),
    ("pca", 192): (120, 72), ("pca", 96): (48, 48),
    ("two-sided", 192): (144, 48), ("two-sided", 96): (64, 32),
}  # fmt: skip
CANDIDATES = {  # d_r
    ("transmla", 192): (64, 32, 16), ("transmla", 96): (64, 32, 16),
    ("transmla-unfolded", 192): (64, 56, 48, 40, 32), ("transmla-unfolded", 96): (64, 48, 32),
    ("pca", 192): (120, 108, 96, 72), ("pca", 96): (60, 48, 36),
    ("two-sided", 192): (56, 48, 40), ("two-sided", 96): (32, 28, 24),
}  # fmt: skip
METHODS, CUTS = ("transmla", "transmla-unfolded", "pca", "two-sided"), (192, 96)
ALLOCATIONS = ("uniform", "energy")
BEFORE = 384
CHOOSING = 8  # held-out rows that sizes are chosen on: the first of the text


@dataclass(frozen=True)
class Cell:
    """One conversion of the model."""

    method: str
    cut: int
    allocation: str
    rope_dim: int

    @property
    def words(self) -> str:
        end = "" if self.allocation == "uniform" else f",allocation={self.allocation}"
        return f"mha-to-mla{{rank={self.cut - self.rope_dim},rope_dim={self.rope_dim},method={self.method}{end}}}"


def cells(methods: Sequence[str], cuts: Sequence[int], allocations: Sequence[str], choose: bool) -> list[Cell]:
    """The cells of the table, or those that sizes are chosen from."""
    kinds = [(method, cut) for cut in cuts for method in methods]
    if choose:
        return [Cell(*kind, "uniform", d_r) for kind in kinds for d_r in CANDIDATES[kind]]
    return [Cell(*kind, allocation, SIZES[kind][1]) for kind in kinds for allocation in allocations]


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


class Results:
    """Measured losses in a file of JSON lines, one a measurement, written as soon as it is made.

    A line is of the same measurement as another if everything but its "nll" and "seconds" is the same.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text() if path.exists() else ""
        whole, torn = text[: text.rfind("\n") + 1], text[text.rfind("\n") + 1 :]
        if torn:  # a line that was being written when the run was killed
            path.write_text(whole)
        self.lines = [json.loads(line) for line in whole.splitlines()]

    def find(self, **what: Any) -> float | None:
        known = (x["nll"] for x in self.lines if {k: v for k, v in x.items() if k not in ("nll", "seconds")} == what)
        return next(known, None)

    def add(self, nll: float, seconds: float, **what: Any) -> None:
        self.lines.append({**what, "nll": nll, "seconds": round(seconds, 1)})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(self.lines[-1], sort_keys=True) + "\n")


def held_out(rows: torch.Tensor, count: int, choose: bool) -> torch.Tensor:
    """The rows that sizes are chosen on, or ``count`` others."""
    if choose:
        return rows[:CHOOSING]
    return rows[torch.linspace(CHOOSING, len(rows) - 1, count).long()]


def measure(
    seeds: Sequence[int],
    rows: int,
    count: int,
    wanted: Sequence[Cell],
    results: Results,
    say: Any,
    choose: bool = False,
) -> dict[str, Any]:
    """Calibrate once a seed, convert and measure every cell that ``results`` does not hold yet.

    Args:
        rows: calibration rows. count: held-out rows. say: told every result.

    Returns:
        "baseline": NLL of the model as it is. "cells": (cell, NLL of every seed).
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from latentscan.runtime.wrap import planning_graph
    from latentscan.tools import demo

    demo.quiet()
    folder, file = demo.smollm2_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    seen, other = (
        ids[: len(ids) // demo.LENGTH * demo.LENGTH].reshape(-1, demo.LENGTH)
        for ids in (torch.tensor(tokenizer(text)["input_ids"]) for text in demo.texts())
    )
    measured = held_out(other, count, choose)
    common = {"rows": rows, "held_out": len(measured), "choose": choose}

    def baseline() -> float:
        known = results.find(cell=None, **common)
        if known is None:
            began = time.perf_counter()
            known = nll(model, measured)
            results.add(known, time.perf_counter() - began, cell=None, **common)
        return known

    result: dict[str, Any] = {"baseline": baseline(), "cells": {cell: [] for cell in wanted}}
    say(f"{len(measured)} of {len(other)} held-out rows, not compressed: {result['baseline']:.4f}")
    graph, done = None, 0
    for seed in seeds:
        statistics = None
        for cell in wanted:
            done += 1
            what = {"cell": asdict(cell), "seed": seed, **common}
            value = results.find(**what)
            if value is None:
                began = time.perf_counter()
                if statistics is None:
                    statistics = statistics_for(model, parse(cell.words), Calibration(seen, rows=rows, seed=seed))
                    say(f"seed {seed}: {rows} of {len(seen)} rows in {time.perf_counter() - began:.0f} s")
                    began = time.perf_counter()
                graph = planning_graph(model) if graph is None else graph
                made = converted(model, cell.words, statistics, graph)
                assert sum(m["facts"]["d_c"] + m["facts"]["d_r"] for m in made.values()) == cell.cut * len(made)
                with replaced(model, made):
                    value = nll(model, measured)
                results.add(value, time.perf_counter() - began, **what)
            result["cells"][cell].append(value)
            say(f"{done} of {len(seeds) * len(wanted)}: seed {seed}: {cell.words}: {value:.4f}")
    return result


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| cut | method | allocation | d_c / d_r | NLL (mean) | above the original | spread (max - min) | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell, values in result["cells"].items():
        mean = math.fsum(values) / len(values)
        above, spread = mean - result["baseline"], max(values) - min(values)
        lines.append(
            f"| {1 - cell.cut / BEFORE:.0%} | `{cell.method}` | {cell.allocation} | {cell.cut - cell.rope_dim}/"
            f"{cell.rope_dim} | {mean:.3f} | +{above:.3f} | {spread:.3f} | {len(values)} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m latentscan.tools.low_rank", description=__doc__)
    parser.add_argument("--seeds", default="0,1,2", help="calibration subsets, numbers with commas between")
    parser.add_argument("--rows", type=int, default=16, help="calibration rows of 256 tokens")
    parser.add_argument("--held-out", type=int, default=12, help="held-out rows of 256 tokens")
    parser.add_argument("--choose", action="store_true", help="measure the sizes of CANDIDATES on rows of their own")
    parser.add_argument("--out", type=Path, default=Path("low-rank.jsonl"), help="what is measured, a line a cell")
    for name, all_of in (("methods", METHODS), ("cuts", CUTS), ("allocations", ALLOCATIONS)):
        parser.add_argument(f"--{name}", default=",".join(map(str, all_of)), help="a selection of these")
    given = parser.parse_args(arguments)
    for name, all_of in (("methods", METHODS), ("cuts", CUTS), ("allocations", ALLOCATIONS)):
        unknown = [w for w in getattr(given, name).split(",") if w not in map(str, all_of)]
        if unknown:
            parser.error(f"there is no {unknown[0]!r} among {name}: {', '.join(map(str, all_of))}")
    cuts = [int(c) for c in given.cuts.split(",")]
    wanted = cells(given.methods.split(","), cuts, given.allocations.split(","), given.choose)
    seeds = [int(s) for s in given.seeds.split(",")]
    say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    result = measure(seeds, given.rows, given.held_out, wanted, Results(given.out), say, given.choose)
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
