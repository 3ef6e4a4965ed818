"""One rank's graphs on one machine: what they send is what the passes say, and what is hidden follows the schedule."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from latentscan.ir.cost import cost_by_kind
from latentscan.ir.errors import MeshError, PipelineError
from latentscan.ir.mesh import parse_mesh
from latentscan.ir.order import collectives
from latentscan.passes.base import Context
from latentscan.passes.pipeline import parse, run
from latentscan.runtime.phases import traced_phases, values_of
from latentscan.tests.models import build
from latentscan.tools import rank_graphs
from latentscan.tools.plan_mesh import mesh_plan, rate
from latentscan.tools.rank_graphs import alone_in, everywhere, graphs_of, operations, sent, timed

SP = "tensor-parallel,sequence-parallel"
MESH = parse_mesh("tp=2")


@pytest.fixture(scope="module")
def traced():
    return traced_phases(build("llama").to("meta"), batch=2, seq=64, train=True)[0]


def test_what_a_rank_sends_is_what_the_passes_say(traced):
    (phase,) = traced.phases
    program = run(traced.graph.copy(), parse(SP), Context(own_parameters=True, meta=True, mesh=MESH), strict=False)
    values = values_of(program.graph, phase)
    said = {
        name: sum(int(c.sent(2).subs(values)) for c in collectives(program.graph) if c.phase == name)
        for name in ("forward", "backward")
    }
    flops = sum(k.flops.at(values) for k in cost_by_kind(program.graph).values())
    with alone_in(MESH) as here:
        made = graphs_of(traced.graph, parse(SP), here, phase)
        assert {name: sum(s.bytes for s in sent(g, name, here)) for name, g, _ in made}["forward"] == said["forward"]
        backward = sent(made[1][1], "backward", here)
    # The planned backward has no labels, so that it begins with the logits' gradient: it gathers nothing for them.
    assert sum(s.bytes for s in backward) <= said["backward"]
    assert sum(map(operations, made[0][1].nodes)) == flops
    assert not dist.is_initialized()


def test_less_is_waited_for_once_it_is_scheduled(traced):
    (phase,) = traced.phases
    waits = []
    with alone_in(MESH) as here:
        for text in (SP, f"{SP},overlap-collectives{{growth=1}}"):
            name, graph, _ = graphs_of(traced.graph, parse(text), here, phase)[1]
            found = timed(graph, here, bandwidth=1e9, flops=1e9)
            assert name == "backward"
            waits.append(found)
    plain, scheduled = waits
    assert plain.exposed == pytest.approx(plain.sending)  # each is waited for at once
    assert scheduled.sending == pytest.approx(plain.sending)
    assert scheduled.exposed < 0.9 * plain.exposed


def test_ranks_that_differ_are_found(traced, monkeypatch):
    told = everywhere(traced.graph, parse(f"{SP},overlap-collectives"), parse_mesh("tp=2,dp=2"), traced.phases[0])
    assert len(told["ranks"]) == 4
    assert told["forward"]["bytes_sent"][0] == told["forward"]["bytes_sent"][1] > 0
    whole = rank_graphs.sent
    calls = iter(range(99))

    def one_less(graph, phase, mesh):
        found = whole(graph, phase, mesh)
        return found[1:] if next(calls) == 2 else found

    monkeypatch.setattr(rank_graphs, "sent", one_less)
    with pytest.raises(MeshError, match=r"would wait for each other for ever|without a partner"):
        everywhere(traced.graph, parse(SP), MESH, traced.phases[0])


def test_rates_are_numbers_with_a_unit():
    assert (rate("450G", "bandwidth"), rate("4e14", "flops"), rate(None, "flops")) == (450e9, 4e14, None)
    for text in ("fast", "-1G", "0", "infT", ""):
        with pytest.raises(PipelineError, match="is no number above 0"):
            rate(text, "bandwidth")


def test_a_plan_counts_gradients_and_moments_as_the_ranks_hold_them(traced):
    """What is split is held once over all ranks; AdamW keeps two moments of everything that trains."""
    model, graph = build("llama").to("meta"), traced.graph
    told = mesh_plan(model, parse(SP), MESH, [(traced, graph)], bandwidth=1e9, flops=1e9)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    rows = told["ranks"]
    assert sum(r["gradient_bytes"] - r["split_bytes"] for r in rows) == 2 * (
        whole - sum(r["split_bytes"] for r in rows)
    )
    assert all(r["optimizer_bytes"] == 2 * r["gradient_bytes"] for r in rows)
    estimate = told["estimate"]["phases"]["train"]
    assert estimate["exposed_s"] == pytest.approx(estimate["sending_s"])
    assert estimate["hidden"] == pytest.approx(0.0, abs=1e-6)
