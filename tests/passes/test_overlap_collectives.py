"""overlap-collectives says which graphs it schedules and which it leaves, and why."""

from __future__ import annotations

import pytest

from latentscan.ir.capture import capture
from latentscan.ir.errors import PipelineError
from latentscan.ir.mesh import parse_mesh
from latentscan.passes.base import Context, Refusal, Site
from latentscan.passes.pipeline import parse, run
from latentscan.runtime.wrap import planning_graph
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import tokens


def ended(graph, pipeline: str, mesh: str | None = "tp=2"):
    context = Context(own_parameters=True, meta=True, mesh=mesh and parse_mesh(mesh))
    return run(graph, parse(pipeline), context, strict=False)


def test_a_training_graph_is_scheduled_and_a_graph_that_fills_a_cache_is_not():
    model = build("llama")
    graph = capture(model.train(), inputs={"input_ids": tokens(2, 6), "use_cache": False}, training=True)
    made = ended(graph.copy(), "tensor-parallel,overlap-collectives{growth=0.25}")
    (site,) = made.records[-1].sites
    assert isinstance(site, Site)
    assert site.note == "6 collectives forward, 5 backward"
    assert made.graph.overlap == 0.25
    assert made.graph.copy().overlap == 0.25
    for text, mesh, rule in (
        ("overlap-collectives", "tp=2", "no-collectives"),
        ("overlap-collectives", None, "one-rank"),
        ("tensor-parallel,mla-swap-core-attn-out,overlap-collectives", "tp=2", "swaps"),
    ):
        made = ended(graph.copy(), text, mesh)
        (refusal,) = made.records[-1].refusals
        assert isinstance(refusal, Refusal)
        assert refusal.rule == rule
        assert made.graph.overlap is None
    made = ended(planning_graph(model), "tensor-parallel,overlap-collectives")
    (refusal,) = made.records[-1].refusals
    assert (refusal.rule, refusal.reason) == (
        "writes-cache", "the graph writes to a cache in place, which its 6 collectives may not pass"
    )  # fmt: skip


def test_a_growth_that_makes_no_sense_is_an_error():
    with pytest.raises(PipelineError, match="option growth=-1 is not between 0 and 10"):
        parse("overlap-collectives{growth=-1}")
    with pytest.raises(PipelineError, match="tensor-parallel must come before overlap-collectives"):
        parse("overlap-collectives,tensor-parallel")
