"""mla-swap-core-attn-out: training holds the attention's output in host memory until the layer's backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from latentscan.ir.block import every_attention, tail_of
from latentscan.ir.graph import REGION, Graph, module_path
from latentscan.ir.kept import moved
from latentscan.ir.layout import is_layout, linear_of
from latentscan.ir.ops.swap import SWAP_OUT
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier


@dataclass(frozen=True)
class MlaSwapCoreAttnOut(Pass):
    """Swap the attention's output to the host after the forward, and back before its layer's backward (MATH 4).

    Options: ``keep_last`` leaves the last layer's output on the device, for its backward comes first.
    """

    keep_last: bool = True

    name: ClassVar[str] = "mla-swap-core-attn-out"
    tier: ClassVar[Tier] = Tier.EXACT
    after: ClassVar[tuple[str, ...]] = (
        "mha-to-mla", "mla-fa-without-pad", "mla-mm-split", "latent-cache", "mla-absorb", "sparse-attention",
    )  # fmt: skip
    before: ClassVar[tuple[str, ...]] = ("mla-zero-memory",)
    summary: ClassVar[str] = "training holds the attention's output on the host, and fetches it before its backward"
    math: ClassVar[str] = (
        "Frees s b n_h d_v elements a layer, less the last layer's: what the attention itself and the output "
        "projection saved of the attention's output is copied to pinned host memory on a stream of its own and freed "
        "on the device once its readers are done. The backward of a layer starts the copy back for the layer before "
        "it. The numbers are the same ones. Needs inductor=False in training: a graph that Inductor compiles takes "
        "everything back at once. A layer that gradient checkpointing recomputes keeps nothing to swap and is "
        "refused."
    )

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        found: list[Site | Refusal] = []
        attentions = every_attention(graph)
        for attention in attentions:
            module = module_path(attention)
            tail = tail_of(graph, attention)
            if not tail:
                found.append(
                    Refusal(
                        module,
                        "no-output-projection",
                        f"{attention.name} does not reach a linear map through views alone",
                        "nothing to do: its output is not what the next product saves",
                    )
                )
                continue
            if graph.training and REGION in attention.meta:
                found.append(
                    Refusal(
                        module,
                        "already-recomputed",
                        "gradient checkpointing computes the whole layer again, so that no output is kept",
                        "leave one of the two out",
                    )
                )
                continue
            heads, width = graph.shape(attention)[1], graph.shape(tail[-1].args[0])[-1]  # type: ignore[arg-type]
            stays = self.keep_last and attention is attentions[-1]
            facts: dict[str, Any] = {"heads": int(heads), "width": int(width), "stays": stays}
            if graph.training:
                facts["freed"] = 0 if stays else moved(graph, *marks(graph, attention))
            if stays and len(attentions) == 1:
                found.append(
                    Refusal(module, "one-layer", "the only layer's backward comes first", "give keep_last=false")
                )
                continue
            note = "the last layer: its backward comes first" if stays else f"{width} elements per token to the host"
            found.append(Site(module, "stays" if stays else "swapped", attention.name, facts, note))
        return found

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        for node in marks(graph, graph.node(site.anchor)):
            readers = list(node.users)
            with graph.after(node, self.name):
                swapped = graph.call(SWAP_OUT.op, node, *([True] if site.facts["stays"] else []))
            for reader in readers:
                reader.replace_input_with(node, swapped)


def marks(graph: Graph, attention: fx.Node) -> list[fx.Node]:
    """What the output projection saves, and the attention's own output if only views lie between: often one storage.

    (Absorbed attention gives latents, which W_UV makes values of: those are the attention's output then.)
    """
    *between, last = tail_of(graph, attention)
    linear = linear_of(graph, last)
    assert linear is not None
    return [attention, linear.x] if between and all(is_layout(n) for n in between) else [linear.x]
