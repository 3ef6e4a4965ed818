"""overlap-collectives: transfers start early and are waited for late, in forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from latentscan.ir.errors import PipelineError
from latentscan.ir.graph import Graph
from latentscan.ir.ops.swap import SWAP_OUT
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier


@dataclass(frozen=True)
class OverlapCollectives(Pass):
    """Order each rank's work such that it computes while its collectives are under way (MATH 5 and 6).

    Options: ``growth`` is by how much the bytes alive at once may grow, as a part of what they were; with less to
    spare, work is taken from fewer collectives ahead, and at last the graph stays as it is.
    """

    growth: float = 0.1

    name: ClassVar[str] = "overlap-collectives"
    tier: ClassVar[Tier] = Tier.EXACT
    after: ClassVar[tuple[str, ...]] = (
        "mha-to-mla", "mla-fa-without-pad", "mla-mm-split", "latent-cache", "mla-absorb", "sparse-attention",
        "tensor-parallel", "sequence-parallel", "fuse-mamba", "mla-swap-core-attn-out", "mla-zero-memory",
        "mamba-context-parallel", "ulysses",
    )  # fmt: skip
    summary: ClassVar[str] = "collectives start early and are waited for late, in forward and backward"
    math: ClassVar[str] = (
        "List scheduling of the forward and the backward graph that AOTAutograd makes: what leads to the next start "
        "goes first, then other work (weight casts, gradients of weights) of the next two collectives' neighbourhood, "
        "and a wait when nothing else is left. The sum of an input's gradient runs beside the product for the weight's "
        "gradient. The order of the collectives, which all ranks share, of random numbers and of effects stays, and "
        "nothing passes a write in place; the same nodes compute the same values, so the numbers are the same ones. "
        "The report has for each collective the computing nodes between start and wait before and after, and the bytes "
        "alive at once. A graph that writes to a cache in place is left as it is."
    )

    def check_options(self) -> None:
        if not 0 <= self.growth <= 10:
            raise PipelineError(
                f"pass {self.name}: option growth={self.growth:g} is not between 0 and 10",
                remedy="give the part by which memory may grow, such as 0.1",
            )

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        from latentscan.ir.order import collectives

        mesh = context.mesh
        if mesh is None or mesh.size == 1:
            return [Refusal("", "one-rank", "the mesh has one rank", "give a mesh such as tp=2")]
        found = collectives(graph)
        if not found:
            reason = "no pass before it made this graph communicate"
            return [Refusal("", "no-collectives", reason, "put tensor-parallel or another parallel pass before it")]
        if any(getattr(n.target, "_opname", "") == "cache_append" for n in graph.nodes):
            reason = f"the graph writes to a cache in place, which its {len(found)} collectives may not pass"
            return [Refusal("", "writes-cache", reason, "nothing to do: graphs without a cache are scheduled")]
        if graph.training and graph.calls(SWAP_OUT.op):
            reason = "saved activations are swapped by hooks, and AOTAutograd takes them all back at once"
            return [Refusal("", "swaps", reason, "leave mla-swap-core-attn-out or this pass out")]
        forward = sum(c.phase == "forward" for c in found)
        note = f"{forward} collectives forward, {len(found) - forward} backward"
        anchor = next(n.name for n in graph.nodes if n.op == "output")
        return [Site("", "scheduled", anchor, {}, note)]

    def allows_nothing(self, refusals: Sequence[Refusal]) -> bool:
        """A graph that fills a cache, as the one that plans are made on does, has nothing to schedule."""
        return bool(refusals) and all(r.rule in ("writes-cache", "swaps") for r in refusals)

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        graph.overlap = self.growth
