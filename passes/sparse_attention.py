"""sparse-attention: latent attention over the keys that an indexer chose, gathered instead of masked."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from latentscan.ir.graph import Graph, module_path
from latentscan.ir.mla import argument, attention_like
from latentscan.ir.normalize import LATENT_ATTENTION
from latentscan.ir.ops.sparse import SPARSE_LATENT_ATTENTION
from latentscan.ir.sizes import expression
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier

_NOT = {operator.invert, torch.logical_not, torch.bitwise_not, "logical_not", "bitwise_not", "__invert__"}
_AND = {operator.and_, torch.logical_and, torch.bitwise_and, "logical_and", "bitwise_and", "__and__"}


@dataclass(frozen=True)
class Selection:
    """A mask that leaves each query its top-k keys.

    Attributes:
        indices: [B, S, K] positions. base: the mask that holds besides, [B, 1, S, T].
    """

    indices: fx.Node
    base: fx.Node


@dataclass(frozen=True)
class SparseAttention(Pass):
    """Absorbed attention whose mask comes from an indexer's top-k reads the chosen rows alone (MATH 4).

    Source: DeepSeek-V3.2-Exp, "DeepSeek Sparse Attention".
    """

    name: ClassVar[str] = "sparse-attention"
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    after: ClassVar[tuple[str, ...]] = (
        "mha-to-mla",
        "mla-fa-without-pad",
        "mla-mm-split",
        "latent-cache",
        "mla-absorb",
    )
    before: ClassVar[tuple[str, ...]] = ("mla-swap-core-attn-out", "mla-zero-memory")
    summary: ClassVar[str] = "latent attention over the rows that an indexer's top-k chose, gathered instead of masked"
    math: ClassVar[str] = (
        "The model masks all keys but the indexer's top k and attends densely. Attention over the k gathered latents "
        "is the same sum without its zeros: 2 s k (2 d_c + d_r) multiply-adds a head instead of 2 s t (2 d_c + d_r). "
        "Needs the absorbed form (mla-absorb{when=always}), in which all heads share the rows. The top-k itself and "
        "the indexer stay as the model has them; gradients reach the latent and the queries, as in the model. The "
        "indexer is not trained: the library computes it without gradients, and its loss (the KL divergence of its "
        "softmax from the attention summed over heads) is not served. Train it in the model's own code, with this pass "
        "left out."
    )

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        found: list[Site | Refusal] = []
        absorbed = set(graph.calls(LATENT_ATTENTION))
        every = absorbed | set(attention_like(graph))
        for node in (n for n in graph.nodes if n in every):
            module = module_path(node)
            mask = argument(node, "mask") if node.target != torch._C._nn.scaled_dot_product_attention else None
            selection = selection_of(graph, mask)
            if selection is None:
                found.append(
                    Refusal(
                        module,
                        "no-indexer",
                        "the attention's mask does not come from a top-k over index scores",
                        "use a model with an indexer (DeepSeek-V3.2); its weights cannot be made from nothing",
                    )
                )
            elif node not in absorbed:
                found.append(
                    Refusal(
                        module,
                        "not-absorbed",
                        "keys and values are expanded per head, so that every head would gather rows of its own",
                        "put mla-absorb{when=always} before sparse-attention",
                    )
                )
            elif (reason := _unfit(graph, node)) is not None:
                found.append(Refusal(module, "structure", reason, "report the model: such a mask is new"))
            else:
                chosen = graph.shape(selection.indices)[2]
                keys = graph.shape(node.args[2])[1]  # type: ignore[arg-type]
                note = f"{expression(chosen)} of {expression(keys)} keys per query are gathered"
                if graph.training:
                    note += "; the indexer is not trained: it has no gradient in the model, and no loss of its own here"
                found.append(Site(module, "top-k-gathered", node.name, {"k": chosen, "t": keys}, note))
        return found

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        node = graph.node(site.anchor)
        selection = selection_of(graph, argument(node, "mask"))
        assert selection is not None
        with graph.before(node, self.name):
            base = graph.call(operator.getitem, selection.base, (slice(None), 0))
            shape = graph.shape(selection.indices)
            if not _like(graph.shape(base)[:2], shape[:2]):
                base = graph.method("expand", base, *(graph.method("size", selection.indices, d) for d in (0, 1)), -1)
            allowed = graph.method("gather", base, -1, selection.indices)
            new = graph.call(
                SPARSE_LATENT_ATTENTION.op, *node.args[:4], selection.indices, allowed, scale=argument(node, "scale")
            )
        graph.replace(node, new)
        graph.graph.erase_node(node)


def _like(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return [expression(x) for x in a] == [expression(x) for x in b]


def _unfit(graph: Graph, node: fx.Node) -> str | None:
    """Why an absorbed attention cannot be made sparse, or None."""
    for name in ("padding", "sinks", "cu_seqlens", "window", "softcap"):
        if argument(node, name) is not None:
            return f"it has {name} besides its mask"
    if argument(node, "kind") != "full":
        return f"its kind is {argument(node, 'kind')!r} besides its mask"
    rope = node.args[3]
    if isinstance(rope, fx.Node) and graph.shape(rope)[1] != 1:
        return f"its rotary key has {graph.shape(rope)[1]} heads"
    return None


def selection_of(graph: Graph, mask: Any) -> Selection | None:
    """The top-k that a mask ``base & ~(ones with zeros scattered to the top-k)`` comes from, or None."""
    if not isinstance(mask, fx.Node) or mask.target not in _AND:
        return None
    for one, other in (mask.args[:2], mask.args[1::-1]):
        indices = _chosen(graph, one)
        if indices is not None and isinstance(other, fx.Node) and graph.value(other).dtype == torch.bool:
            return Selection(indices, other) if len(graph.shape(other)) == 4 and graph.shape(other)[1] == 1 else None
    return None


def _chosen(graph: Graph, node: Any) -> fx.Node | None:
    """The indices [B, S, K] of ``~unsqueeze(scatter(ones, -1, indices, False), 1)``, if they come from a top-k."""
    if not isinstance(node, fx.Node) or node.target not in _NOT:
        return None
    node = node.args[0]
    if node.target not in ("unsqueeze", torch.unsqueeze) or node.args[1:] != (1,):
        return None
    node = node.args[0]
    if node.target not in ("scatter", torch.scatter) or len(node.args) != 4 or node.args[3] is not False:
        return None
    ones, dim, indices, _ = node.args
    if ones.target not in ("new_ones", torch.ones) or dim not in (-1, 2) or len(graph.shape(indices)) != 3:
        return None
    return indices if _from_top_k(indices) else None


def _from_top_k(node: Any) -> bool:
    """Whether indices are a top-k's, so that those of one query are distinct."""
    while isinstance(node, fx.Node) and node.op == "call_method" and node.target in ("to", "long", "int", "contiguous"):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not operator.getitem or node.args[1] != 1:
        return False
    source: Any = node.args[0]
    return source.target in ("topk", torch.topk) and source.kwargs.get("dim", -1) in (-1, 2)
