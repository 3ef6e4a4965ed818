"""The table family x pass: what each pass says of a tiny model of each family. ``python -m latentscan.tests.families``
prints it; ``docs/families.md`` holds it and ``tests/passes/test_families.py`` keeps it true."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from latentscan.passes.base import Context, Refusal
from latentscan.passes.pipeline import parse, run
from latentscan.runtime.tiny import build
from latentscan.runtime.wrap import planning_graph

FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neox", "gptj", "phi", "stablelm",
    "phi3", "opt", "bloom", "mpt", "falcon", "olmo2", "smollm3", "cohere2", "gpt_oss", "deepseek_v2", "deepseek_v3",
    "minicpm3", "mamba2", "bamba", "falcon_h1", "nemotron_h", "zamba2", "granitemoehybrid",
)  # fmt: skip

# Kin of what the fast suite has already: their tests are slow ones.
KIN = ("phi", "stablelm", "mpt", "falcon", "olmo2", "cohere2", "gpt_oss", "bloom")

LOW_RANK = "mha-to-mla{rank=16,rope_dim=8}"
PIPELINES = (
    "mha-to-mla",
    LOW_RANK,
    "mla-mm-split",
    "latent-cache",
    "mla-absorb",
    "mha-to-mla,latent-cache",
    "mha-to-mla,latent-cache,mla-absorb",
    f"{LOW_RANK},latent-cache,mla-absorb",
    "mla-fa-without-pad",
    "mla-absorb{when=always},sparse-attention",
    "mla-swap-core-attn-out",
    "mla-zero-memory",
)

PAGE = Path(__file__).parent.parent / "docs" / "families.md"

HEAD = """# What each pass says of each family

Tiny random models (`latentscan plan tiny:FAMILY --pipeline P`), the graph that fills an empty cache. A cell is what the
*last* pass of the pipeline says: the rules by which it applied (number of sites), or `refused` with the rules by which
it refused (number of places); `nothing` where the family has no place of that kind. Rules are explained by
`latentscan explain PASS`, and `latentscan plan MODEL --pipeline P --explain` gives reason, values and remedy of each.
Written by `python -m latentscan.tests.families`; a test keeps it true.
"""


def row(family: str) -> list[str]:
    """The cells of one family."""
    graph = planning_graph(build(family))
    cells = []
    for pipeline in PIPELINES:
        passes = parse(pipeline)
        program = run(graph.copy(), passes, Context(own_parameters=True, meta=True), strict=False)
        record = program.records[len(passes) - 1] if len(program.records) == len(passes) else program.records[-1]
        cells.append(_cell(record.sites, record.refusals))
    return cells


def _cell(sites: list, refusals: list[Refusal]) -> str:
    parts = [f"{rule} ({n})" for rule, n in sorted(Counter(s.rule for s in sites).items())]
    refused = [f"{rule} ({n})" for rule, n in sorted(Counter(r.rule for r in refusals).items())]
    if refused:
        parts.append("refused: " + ", ".join(refused))
    return "; ".join(parts) or "nothing"


def table(rows: dict[str, list[str]]) -> str:
    """The page."""
    lines = [HEAD, "| family | " + " | ".join(f"`{p}`" for p in PIPELINES) + " |", "|---" * (len(PIPELINES) + 1) + "|"]
    lines += [f"| {family} | " + " | ".join(cells) + " |" for family, cells in rows.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(table({family: row(family) for family in FAMILIES}), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
