"""mla-zero-memory: training keeps an attention block's input and computes the block again for its gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import sympy
from torch import fx

from latentscan.ir.block import (
    Activations,
    Block,
    BlockError,
    block_between,
    check_repeatable,
    every_attention,
    leaving,
    sides_of,
)
from latentscan.ir.graph import REGION, Graph, module_path
from latentscan.ir.kept import host_keys, kept, kept_by, region_keeps, storage_of, training
from latentscan.ir.ops.swap import SWAP_OUT
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier


@dataclass(frozen=True)
class MlaZeroMemory(Pass):
    """Recompute the attention block in the backward pass; keep only its input and the random state (MATH 4).

    Options: ``until`` is the last thing that is computed again, the output projection ("output") or the attention
    ("attention": its result is kept as well).
    """

    until: str = field(default="output", metadata={"choices": ("output", "attention")})

    name: ClassVar[str] = "mla-zero-memory"
    tier: ClassVar[Tier] = Tier.EXACT
    after: ClassVar[tuple[str, ...]] = (
        "mha-to-mla", "mla-fa-without-pad", "mla-mm-split", "latent-cache", "mla-absorb", "sparse-attention",
        "mla-swap-core-attn-out",
    )  # fmt: skip
    summary: ClassVar[str] = "training keeps the attention block's input alone and recomputes the block in backward"
    math: ClassVar[str] = (
        "The block is everything between the one value from which query, key and value all descend and the "
        "attention's output projection, a fused input projection included, found from the graph. It becomes a "
        "checkpointed call: the same calls run twice on the same numbers, with the random state of the first time. "
        "Rotary tables, position ids, cu_seqlens and masks are inputs of that call. Costs one more forward of the "
        "block; frees every activation in it. With mla-swap-core-attn-out the block ends before the swap, and the "
        "attention's result goes to the host. Evaluation is untouched; a layer that gradient checkpointing recomputes "
        "as a whole is refused."
    )

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        activations = Activations(graph)
        found: list[Site | Refusal] = []
        held = set(training(graph)) if graph.training else set()
        for attention in every_attention(graph):
            module = module_path(attention)
            try:
                block = activations.block(attention)
                nodes = self._region(graph, block)
                _check(graph, block, nodes)
            except BlockError as error:
                found.append(Refusal(module, error.rule, str(error), error.remedy))
                continue
            facts: dict[str, Any] = {"input": (block.input.name,)}
            if graph.training:
                facts["freed"] = freed(graph, block, nodes, held)
            note = f"{len(nodes)} calls from {block.input.name} to {nodes[-1].name} are computed again in training"
            found.append(Site(module, "recompute-block", attention.name, facts, note))
        return found

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        if not graph.training:
            return
        block = block_between(graph, graph.node(site.facts["input"][0]), graph.node(site.anchor))
        number = 1 + max((n.meta[REGION] for n in graph.graph.nodes if REGION in n.meta), default=0)
        for node in self._region(graph, block):
            node.meta[REGION] = number

    def _region(self, graph: Graph, block: Block) -> tuple[fx.Node, ...]:
        """What is computed again: the block, and of its tail what comes before the swap or the option's end."""
        swap = next((i for i, n in enumerate(block.tail) if n.target is SWAP_OUT.op and n.args[1:] != (True,)), None)
        if swap is not None:
            return (*block.nodes, *block.tail[:swap])
        return (*block.nodes, *(block.tail[:-1] if self.until == "attention" else block.tail))


def _check(graph: Graph, block: Block, nodes: tuple[fx.Node, ...]) -> None:
    """Raise BlockError where a block cannot be recomputed, or already is."""
    others = [n for n in every_attention(graph) if n in set(block.nodes) and n is not block.attention]
    if others:
        raise BlockError(
            "several-attentions",
            f"the nearest common input, {block.input.name}, feeds {1 + len(others)} attentions",
            "nothing to do: keys or values come from another layer",
        )
    if not graph.training:
        return
    if any(REGION in n.meta for n in nodes):
        raise BlockError(
            "already-recomputed",
            "gradient checkpointing computes the whole layer again",
            "leave one of the two out: checkpointing keeps even less",
        )
    check_repeatable(graph, nodes)


def freed(graph: Graph, block: Block, nodes: tuple[fx.Node, ...], held: set[Any]) -> sympy.Expr:
    """Bytes that training no longer keeps: what the block's calls keep, less its inputs and what others keep anyway.

    Args:
        held: storages that are kept without this block. One that its recomputation alone needs (a mask, say) is kept
            from now on: it is subtracted, and added to ``held`` for the blocks that share it.
    """
    before = kept(graph, nodes)
    inputs = (block.input, *sides_of(nodes, block.input))
    still = {storage_of(n) for n in inputs} | host_keys(graph)
    inside = set(nodes)
    for node in leaving(nodes):
        for user in node.users:
            if user.op == "output":
                still.add(storage_of(node))
            elif user not in inside:
                still |= set(kept_by(graph, user))
    new = {k: size for k, size in region_keeps(graph, nodes).items() if k not in held}
    held |= set(new)
    return sympy.Add(*(size for storage, size in before.items() if storage not in still)) - sympy.Add(*new.values())
