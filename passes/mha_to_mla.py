"""mha-to-mla: multi-head attention as latent attention, exactly where the algebra allows, else in low rank."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from latentscan.ir.errors import PipelineError
from latentscan.ir.graph import Graph, module_path
from latentscan.ir.layout import LayoutError, Linear, linear_of
from latentscan.ir.mla import (
    attention_like,
    given_cache,
    operand,
    same_latent,
    ungrouped,
)
from latentscan.ir.ops.rope import ROPE as ROPE_INFO
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier, foreign_cache

ROPE = ROPE_INFO.op
LOW_RANK = ("two-sided", "pca", "transmla", "transmla-unfolded")  # the best measured one first: it is what auto takes


@dataclass(frozen=True)
class Found:
    """One attention, seen before its cache.

    Attributes:
        node: the attention. query, key, value: its operands before any ``cache_append``.
        key_rope: the rope call that makes the whole key, or None. query_rope: likewise.
    """

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    query_rope: fx.Node | None
    key_rope: fx.Node | None


@dataclass(frozen=True)
class MhaToMla(Pass):
    """MHA, GQA or MQA to latent attention (MATH 1 and 2)."""

    rank: int | None = None
    rope_dim: int | None = None
    method: str = field(default="auto", metadata={"choices": ("auto", "exact", *LOW_RANK)})
    allocation: str = field(default="uniform", metadata={"choices": ("uniform", "energy")})
    balance: bool = True
    full_rope: str = field(default="none", metadata={"choices": ("none", "auto", "keys", "input")})
    max_condition: float = 100.0

    name: ClassVar[str] = "mha-to-mla"
    summary: ClassVar[str] = "MHA/GQA to latent K and V: exact where the algebra allows, else low rank with calibration"
    before: ClassVar[tuple[str, ...]] = ("mla-mm-split", "latent-cache", "mla-absorb")
    math: ClassVar[str] = (
        "Exact: without rotation on K the layer's input is the latent, d_c = min(D, 2 n_kv d_h), or a basis of what "
        "W_K and W_V read where their rank is smaller (singular values above 4 eps); with partial rotary it is that "
        "and the rotated features, D + n_kv d_rot. With full rotary, where that halves the cache (MHA), only if "
        "full_rope asks for it, because the expansion then runs for all cached tokens at every step, D^2 to 2 D^2 "
        "multiply-adds each: full_rope=keys, K before its rotation, V = K W_K^-1 W_V, if cond(W_K) <= max_condition "
        "and the weights are float32 or float64; input, the layer's input; auto, the first of these that holds. "
        "Position ids are cached beside, K is rotated on read. Everywhere else (full-rotary GQA) there is no exact "
        "saving: [K | V] itself is the latent, d_c = 2 n_kv d_h, which saves nothing. Biases, norms, sinks, softcaps "
        "and windows stay what they are. "
        "Low rank (rank = d_c and rope_dim = d_r, elements per token and layer), by method: "
        "two-sided (auto): per frequency a unitary mix of KV heads, which commutes with the rotation; the components "
        "whose rotation counts most for the queries, 1 - |E exp(-i theta d)|^2 over the distances attended to, keep it "
        "in one key for all heads; the rest keeps its mean rotation and shares a latent with V by one joint SVD, K's "
        "error weighted by the queries, V's by W_O, tokens by the attention they receive. transmla: RoRoPE with "
        "frequency folding, balanced joint PCA; transmla-unfolded: the loudest frequencies instead of folded ones. "
        "pca: whole rotary pairs of all heads by energy times the mean of 1 - cos(theta d), balanced joint PCA of "
        "[K_nope / alpha | V]. allocation=energy spreads the same total rank over layers by what is lost. Approximate: "
        "needs calibration, and the error is reported."
    )

    @property
    def tier(self) -> Tier:  # type: ignore[override]
        return Tier.APPROXIMATE if self.wants_statistics else Tier.REASSOCIATING

    @property
    def wants_statistics(self) -> bool:
        """Whether the low-rank form is asked for."""
        return self.method in LOW_RANK or (self.method == "auto" and self.rank is not None)

    @property
    def low_rank_method(self) -> str:
        return LOW_RANK[0] if self.method == "auto" else self.method

    def check_options(self) -> None:
        if self.method == "exact" and (self.rank is not None or self.rope_dim is not None):
            raise PipelineError(
                f"pass {self.name}: method=exact takes no rank or rope_dim",
                remedy=f"leave them out, or use method={LOW_RANK[0]}",
            )
        if self.wants_statistics and self.rank is None:
            raise PipelineError(
                f"pass {self.name}: method={self.method} needs rank", remedy="give rank=..., the latent's width d_c"
            )
        if self.allocation != "uniform" and not self.wants_statistics:
            raise PipelineError(f"pass {self.name}: allocation without rank", remedy="give rank=... as well")
        if self.rank is None and self.rope_dim is not None:
            raise PipelineError(f"pass {self.name}: rope_dim without rank", remedy="give rank=... as well")
        if not self.balance and self.method != "pca":
            raise PipelineError(
                f"pass {self.name}: balance=false without method=pca, the one that it belongs to",
                remedy="give method=pca as well",
            )
        if self.wants_statistics and (self.full_rope != "none" or self.max_condition != 100.0):
            raise PipelineError(
                f"pass {self.name}: full_rope and max_condition are of the exact form", remedy="leave rank out"
            )
        if not self.max_condition >= 1:
            raise PipelineError(
                f"pass {self.name}: max_condition={self.max_condition:g} is below 1, the least there is",
                remedy="give max_condition >= 1, or full_rope=input",
            )
        for option in ("rank", "rope_dim"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise PipelineError(f"pass {self.name}: {option}={value} is below 1", remedy=f"give {option} >= 1")

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        if self.wants_statistics:
            from latentscan.passes.mha_to_mla_low_rank import plan_low_rank

            return plan_low_rank(self, graph, context)
        from latentscan.passes.mha_to_mla_exact import plan_exact

        found: list[Site | Refusal] = []
        for node in attention_like(graph):
            module = module_path(node)
            try:
                found.append(plan_exact(graph, node, module, context, self.full_rope, self.max_condition))
            except LayoutError as error:
                cache = given_cache(graph, node.args[1])  # type: ignore[arg-type]
                if cache is not None:
                    found.append(foreign_cache(module, cache.name))
                    continue
                found.append(Refusal(module, "layout-unknown", str(error), "report the model: its layout is new"))
        return found

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        if site.rule == "low-rank":
            from latentscan.passes.mha_to_mla_low_rank import apply_low_rank

            apply_low_rank(self, graph, site, context)
        else:
            from latentscan.passes.mha_to_mla_exact_apply import apply_exact

            apply_exact(graph, site)


# -- finding --------------------------------------------------------------------------------------------------------


def stored(graph: Graph, node: fx.Node) -> tuple[fx.Node, int] | None:
    """(append, index) if an operand is read from a cache of ours."""
    node = ungrouped(graph, node)
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        full = node.args[0]
        if full.target is operator.getitem and getattr(full.args[0].target, "_opname", "") == "cache_append":  # type: ignore
            return full.args[0], int(node.args[1])  # type: ignore[return-value, arg-type]
    return None


def find(graph: Graph, node: fx.Node) -> Found:
    """An attention's operands before its cache."""
    ends = []
    for operand_node in node.args[1:3]:
        at = stored(graph, operand_node)  # type: ignore[arg-type]
        ends.append(_added(graph, ungrouped(graph, operand_node)) if at is None else at[0].args[1][at[1]])  # type: ignore[index, arg-type]
    query: Any = node.args[0]
    ropes = [n if n.target is ROPE else None for n in (query, ends[0])]  # type: ignore[union-attr]
    return Found(node, query, ends[0], ends[1], *ropes)  # type: ignore[arg-type]


def _added(graph: Graph, node: fx.Node) -> fx.Node:
    """What a library's cache that is still empty (a training step makes one) is joined with; else the node itself."""
    if node.target not in (torch.cat, torch.concat, torch.concatenate):
        return node
    full = [p for p in node.args[0] if not any(isinstance(n, int) and n == 0 for n in graph.shape(p))]  # type: ignore
    return full[0] if len(full) == 1 else node  # type: ignore[return-value]


def _already_latent(graph: Graph, found: Found, module: str) -> Refusal | None:
    """Refuse where keys and values are made from one value that the query is not made from: it is latent attention."""
    key, value = operand(graph, found.key), operand(graph, found.value)
    if key.linear is None or value.linear is None or not same_latent(key.linear, value.linear):
        return None
    if _reads_same_input(graph, found, key.linear):
        return None
    return Refusal(
        module,
        "already-latent",
        f"K and V are made from a latent of {int(graph.shape(key.linear.x)[-1])} features already",
        "leave mha-to-mla out; latent-cache and mla-absorb apply as they are",
    )


def _reads_same_input(graph: Graph, found: Found, key: Linear) -> bool:
    """Whether the query is made from the same value as the key: then that is the layer's input, else a latent."""
    stack, seen = [found.query], set()
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        linear = linear_of(graph, current)
        if linear is not None:
            return same_latent(linear, key)
        stack.extend(n for n in current.all_input_nodes if n.op != "placeholder")
    return False


# -- rewriting --------------------------------------------------------------------------------------------------------


def _heads(graph: Graph, x: fx.Node, heads: int, width: int) -> fx.Node:
    """[B, S, heads * width] -> [B, heads, S, width]."""
    return graph.method("transpose", graph.method("unflatten", x, -1, (heads, width)), 1, 2)


def _replace_stored(graph: Graph, found: Found, key: fx.Node, value: fx.Node) -> None:
    """Let our cache, or whoever reads them (the attention, a library's cache), take the new key and value."""
    for position, (old, new) in enumerate(((found.key, key), (found.value, value))):
        at = stored(graph, found.node.args[1 + position])  # type: ignore[arg-type]
        if old is new:
            continue
        if at is None:
            graph.replace(old, new)
        else:
            append, index = at
            tensors = list(append.args[1])  # type: ignore[arg-type]
            tensors[index] = new
            append.args = (append.args[0], tensors, *append.args[2:])
