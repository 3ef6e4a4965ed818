"""The committed table family x pass is what the passes say; every refusal tells rule, reason, values and remedy."""

from __future__ import annotations

import re

import pytest

from latentscan.ir.errors import PipelineError
from latentscan.passes.base import Context, Refusal
from latentscan.passes.pipeline import parse
from latentscan.runtime.tiny import build
from latentscan.runtime.wrap import planning_graph
from latentscan.tests.families import FAMILIES, KIN, PAGE, PIPELINES, row


def committed() -> dict[str, list[str]]:
    rows = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| family"):
            family, *cells = [c.strip() for c in line.strip("|").split("|")]
            rows[family] = cells
    return rows


def test_the_table_names_every_family_and_pipeline() -> None:
    assert list(committed()) == list(FAMILIES)
    assert all(len(cells) == len(PIPELINES) for cells in committed().values())


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow if f in KIN else ()) for f in FAMILIES])
def test_the_table_is_true(family: str) -> None:
    assert row(family) == committed()[family]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "deepseek_v3"])
def test_a_refusal_tells_rule_reason_values_and_remedy(family: str) -> None:
    graph = planning_graph(build(family))
    seen = 0
    for name in ("mha-to-mla{rank=16,rope_dim=8}", "mla-mm-split", "latent-cache", "mla-absorb"):
        (one,) = parse(name)
        try:
            found = one.plan(graph, Context(own_parameters=True, meta=True))
        except PipelineError:
            continue
        for refusal in found:
            if isinstance(refusal, Refusal):
                seen += 1
                assert re.fullmatch(r"[a-z0-9-]+", refusal.rule)
                assert refusal.module and refusal.remedy and len(refusal.reason) > 20
    assert seen
