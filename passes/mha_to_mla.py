"""mha-to-mla: multi-head attention as latent attention, exactly where the algebra allows, else in low rank."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.errors import PipelineError
from latentscan.ir.graph import Graph, module_path
from latentscan.ir.layout import LayoutError, Linear, linear_of
from latentscan.ir.mla import (
    Operand,
    attentions,
    latent_node,
    latent_source,
    operand,
    same_latent,
)
from latentscan.ir.ops.rope import ROPE as ROPE_INFO
from latentscan.ir.weights import Recipe
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier

ROPE = ROPE_INFO.op
LOW_RANK = ("two-sided", "pca", "transmla")  # the best measured one first: it is what auto takes


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

    name: ClassVar[str] = "mha-to-mla"
    summary: ClassVar[str] = "MHA/GQA to latent K and V: exact where the algebra allows, else low rank with calibration"
    before: ClassVar[tuple[str, ...]] = ("mla-mm-split", "latent-cache", "mla-absorb")
    math: ClassVar[str] = (
        "Exact: without rotation on K the layer's input is the latent, d_c = min(D, 2 n_kv d_h); with partial rotary "
        "it is the input and the rotated features; with full rotary [K | V] itself is the latent, d_c = 2 n_kv d_h, "
        "which saves nothing. Low rank (rank = d_c and rope_dim = d_r, elements per token and layer), by method: "
        "two-sided (auto): per frequency a unitary mix of KV heads, which commutes with the rotation; the components "
        "whose rotation counts most for the queries, 1 - |E exp(-i theta d)|^2 over the distances attended to, keep it "
        "in one key for all heads; the rest keeps its mean rotation and shares a latent with V by one joint SVD, K's "
        "error weighted by the queries, V's by W_O, tokens by the attention they receive. transmla: RoRoPE with "
        "frequency folding, balanced joint PCA. pca: whole rotary pairs of all heads by energy times the mean of "
        "1 - cos(theta d), balanced joint PCA of [K_nope / alpha | V]. allocation=energy spreads the same total rank "
        "over layers by what is lost. Approximate: needs calibration, and the error is reported."
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
        for option in ("rank", "rope_dim"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise PipelineError(f"pass {self.name}: {option}={value} is below 1", remedy=f"give {option} >= 1")

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        if self.wants_statistics:
            from latentscan.passes.mha_to_mla_low_rank import plan_low_rank

            return plan_low_rank(self, graph, context)
        found: list[Site | Refusal] = []
        for node in attentions(graph):
            module = module_path(node)
            try:
                found.append(self._plan_exact(graph, node, module))
            except LayoutError as error:
                found.append(Refusal(module, "layout-unknown", str(error), "report the model: its layout is new"))
        return found

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        node = graph.node(site.anchor)
        if site.rule == "low-rank":
            from latentscan.passes.mha_to_mla_low_rank import apply_low_rank

            apply_low_rank(self, graph, site, context)
        elif site.rule == "key-value-is-latent":
            _join(graph, find(graph, node), self.name)
        elif site.facts.get("fused"):
            _unfuse(graph, find(graph, node), self.name)

    # -- exact ------------------------------------------------------------------------------------------------------

    def _plan_exact(self, graph: Graph, node: fx.Node, module: str) -> Site | Refusal:
        found = find(graph, node)
        latent = _already_latent(graph, found, module)
        if latent is not None:
            return latent
        key, value = operand(graph, found.key), operand(graph, found.value)
        kv_heads, key_width = (int(s) for s in key.features.source.shape)
        value_width = int(value.features.source.shape[1])
        both = kv_heads * (key_width + value_width)
        facts: dict[str, Any] = {"kv_heads": kv_heads, "before": both}
        if key.linear is not None and value.linear is not None and same_latent(key.linear, value.linear):
            inner = int(graph.shape(key.linear.x)[-1])
            rotated = kv_heads * len(key.other)
            if inner + rotated < both and not value.other:
                rule = "partial-rotary" if key.other else "input-is-latent"
                fused = not key.other and _is_fused(graph, found, key, value)
                if fused:
                    latent_source(graph, key.linear.x)  # it will be projected again
                facts |= {"d_c": inner, "d_r": rotated, "fused": fused}
                note = f"the layer's input ({inner}) is the latent" + (
                    f", {rotated} rotated key features beside it" if rotated else ""
                )
                return Site(module, rule, node.name, facts, f"{both} -> {inner + rotated} elements per token: {note}")
        facts |= {"d_c": both, "d_r": 0, "fused": False}
        return Site(
            module,
            "key-value-is-latent",
            node.name,
            facts,
            f"canonical form: the latent is [K | V] itself ({both}), which is exact and saves nothing; "
            "give rank and rope_dim to cache less",
        )


# -- finding --------------------------------------------------------------------------------------------------------


def stored(graph: Graph, node: fx.Node) -> tuple[fx.Node, int] | None:
    """(append, index) if an operand is read from a cache of ours."""
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
        ends.append(_added(graph, operand_node) if at is None else at[0].args[1][at[1]])  # type: ignore[index, arg-type]
    query: Any = node.args[0]
    ropes = [n if n.target is ROPE else None for n in (query, ends[0])]  # type: ignore[union-attr]
    return Found(node, query, ends[0], ends[1], *ropes)  # type: ignore[arg-type]


def _added(graph: Graph, node: fx.Node) -> fx.Node:
    """What a library's cache that is still empty (a training step makes one) is joined with; else the node itself."""
    if node.target not in (torch.cat, torch.concat):
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


def _is_fused(graph: Graph, found: Found, key: Operand, value: Operand) -> bool:
    """Whether the query comes out of the same matmul as keys or values."""
    try:
        query = operand(graph, found.query)
    except LayoutError:
        return False
    return query.linear is not None and query.linear.node in (key.linear.node, value.linear.node)  # type: ignore[union-attr]


# -- rewriting --------------------------------------------------------------------------------------------------------


def _heads(graph: Graph, x: fx.Node, heads: int, width: int) -> fx.Node:
    """[B, S, heads * width] -> [B, heads, S, width]."""
    return graph.method("transpose", graph.method("unflatten", x, -1, (heads, width)), 1, 2)


def _replace_stored(graph: Graph, found: Found, key: fx.Node, value: fx.Node) -> None:
    """Let our cache, or whoever reads them (the attention, a library's cache), take the new key and value."""
    for position, (old, new) in enumerate(((found.key, key), (found.value, value))):
        at = stored(graph, found.node.args[1 + position])  # type: ignore[arg-type]
        if at is None:
            graph.replace(old, new)
        else:
            append, index = at
            tensors = list(append.args[1])  # type: ignore[arg-type]
            tensors[index] = new
            append.args = (append.args[0], tensors, *append.args[2:])


def _join(graph: Graph, found: Found, name: str) -> None:
    """Keys and values become views of one latent [B, S, n_kv (d_k + d_v)]; only where they are cached."""
    if stored(graph, found.node.args[1]) is None:  # type: ignore[arg-type]
        return
    append = stored(graph, found.node.args[1])[0]  # type: ignore[arg-type, index]
    with graph.before(append, name):
        flat = [graph.method("flatten", graph.method("transpose", x, 1, 2), 2) for x in (found.key, found.value)]
        latent = graph.call(torch.cat, flat, dim=-1)
        made, start = [], 0
        for x in (found.key, found.value):
            heads, width = int(graph.shape(x)[1]), int(graph.shape(x)[3])
            part = graph.call(operator.getitem, latent, (Ellipsis, slice(start, start + heads * width)))
            made.append(_heads(graph, part, heads, width))
            start += heads * width
    _replace_stored(graph, found, made[0], made[1])


def _unfuse(graph: Graph, found: Found, name: str) -> None:
    """Take keys and values out of a fused qkv matmul, so that only they are expanded from the latent."""
    parts = {"q": operand(graph, found.query), "k": operand(graph, found.key), "v": operand(graph, found.value)}
    key = parts["k"]
    if key.other:
        return  # partial rotary: the rotated features come from the same rows; mla-mm-split's business
    linear = key.linear
    assert linear is not None
    sources = [linear.weight] + ([linear.bias] if linear.bias is not None else [])
    weights = [graph.weight(s) for s in sources]
    rows = [p.rows.flatten() for p in parts.values()]
    from latentscan.passes.mla_mm_split import split_functions

    function, inverse = split_functions(rows, linear.transposed, len(sources))
    module = module_path(found.node)
    kinds = ("weight", "bias")[: len(sources)]
    targets = tuple(f"{module}.latentscan_{p}_{kind}" for kind in kinds for p in parts)
    recipe = Recipe(tuple(w.path for w in weights), targets, name, module, function, inverse)  # type: ignore[union-attr]
    inner = graph.shape(linear.weight)[0 if linear.transposed else 1]
    values = [
        graph.value(s).new_empty((r.numel(), inner) if i == 0 else (r.numel(),))
        for i, s in enumerate(sources)
        for r in rows
    ]
    nodes = graph.add_weights(recipe, values)
    made = []
    with graph.before(found.key, name):
        x = latent_node(graph, linear.x)
        for index, part in enumerate(parts.values()):
            bias = nodes[3 + index] if linear.bias is not None else None
            made.append(_heads(graph, graph.call(F.linear, x, nodes[index], bias), *(int(s) for s in part.rows.shape)))
    found.node.replace_input_with(found.query, made[0])
    _replace_stored(graph, found, made[1], made[2])
