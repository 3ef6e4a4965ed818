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
from latentscan.ir.layout import LayoutError, Linear, as_slice, linear_of
from latentscan.ir.mla import (
    Operand,
    argument,
    attention_like,
    attentions,
    computed_weight,
    given_cache,
    latent_node,
    latent_source,
    operand,
    same_latent,
    ungrouped,
)
from latentscan.ir.ops.rope import ROPE as ROPE_INFO
from latentscan.ir.weights import Recipe
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier, foreign_cache
from latentscan.passes.lowrank import balanced_joint_pca, rotary_pairs_by_energy

ROPE = ROPE_INFO.op


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
    method: str = field(default="auto", metadata={"choices": ("auto", "exact", "pca")})
    balance: bool = True

    name: ClassVar[str] = "mha-to-mla"
    summary: ClassVar[str] = "MHA/GQA to latent K and V: exact where the algebra allows, else low rank with calibration"
    before: ClassVar[tuple[str, ...]] = ("mla-mm-split", "latent-cache", "mla-absorb")
    math: ClassVar[str] = (
        "Exact: without rotation on K the layer's input is the latent, d_c = min(D, 2 n_kv d_h); with partial rotary "
        "it is the input and the rotated features; with full rotary [K | V] itself is the latent, d_c = 2 n_kv d_h, "
        "which saves nothing. Low rank (rank = d_c and rope_dim = d_r, elements per token and layer): the rotary pairs "
        "that would lose most (energy times the mean of 1 - cos(theta d) over distances d) keep their rotation, the "
        "other key features lose it and share a latent with V: balanced joint PCA of [K_nope / alpha | V] on "
        "calibration outputs. Approximate: needs calibration, and the error is reported."
    )

    @property
    def tier(self) -> Tier:  # type: ignore[override]
        return Tier.APPROXIMATE if self.wants_statistics else Tier.REASSOCIATING

    @property
    def wants_statistics(self) -> bool:
        """Whether the low-rank form is asked for."""
        return self.method == "pca" or (self.method == "auto" and self.rank is not None)

    def check_options(self) -> None:
        if self.method == "exact" and (self.rank is not None or self.rope_dim is not None):
            raise PipelineError(
                f"pass {self.name}: method=exact takes no rank or rope_dim", remedy="leave them out, or use method=pca"
            )
        if self.wants_statistics and self.rank is None:
            raise PipelineError(
                f"pass {self.name}: method=pca needs rank", remedy="give rank=..., the latent's width d_c"
            )
        if self.rank is None and self.rope_dim is not None:
            raise PipelineError(f"pass {self.name}: rope_dim without rank", remedy="give rank=... as well")
        if not self.balance and not self.wants_statistics:
            raise PipelineError(f"pass {self.name}: balance without rank", remedy="give rank=... as well")
        for option in ("rank", "rope_dim"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise PipelineError(f"pass {self.name}: {option}={value} is below 1", remedy=f"give {option} >= 1")

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        found: list[Site | Refusal] = []
        for node in attention_like(graph):
            module = module_path(node)
            try:
                if self.wants_statistics:
                    found.append(self._plan_low_rank(graph, node, module, context))
                else:
                    found.append(self._plan_exact(graph, node, module))
            except LayoutError as error:
                cache = given_cache(graph, node.args[1])  # type: ignore[arg-type]
                if cache is not None:
                    found.append(foreign_cache(module, cache.name))
                    continue
                found.append(Refusal(module, "layout-unknown", str(error), "report the model: its layout is new"))
        return found

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        node = graph.node(site.anchor)
        if site.rule == "low-rank":
            self._apply_low_rank(graph, site, context)
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

    # -- low rank ---------------------------------------------------------------------------------------------------

    def _plan_low_rank(self, graph: Graph, node: fx.Node, module: str, context: Context) -> Site | Refusal:
        found = find(graph, node)
        latent = _already_latent(graph, found, module)
        parts = latent if latent is not None else _rotary_parts(graph, found, module)
        if isinstance(parts, Refusal):
            return parts
        query, key, value = parts
        if not context.own_parameters:
            return Refusal(
                module, "new-parameters",
                "the low-rank form needs new Parameters, and an optimiser may hold the old ones",
                "use latentscan.wrap(model, ...) before the optimiser is built",
            )  # fmt: skip
        latent_source(graph, key.linear.x)  # type: ignore[union-attr]
        kv_heads, width = (int(s) for s in key.rows.shape)
        value_width = int(value.rows.shape[1])
        inner = int(graph.shape(key.linear.x)[-1])  # type: ignore[union-attr]
        rope_dim = self.rope_dim if self.rope_dim is not None else kv_heads * max(2, width // 8 * 2)
        step = 2 * kv_heads
        if rope_dim % step or rope_dim >= kv_heads * width:
            raise PipelineError(
                f"rope_dim={rope_dim} does not fit {kv_heads} KV heads of {width} features",
                where=f"{self.name} at {module}",
                remedy=f"give a multiple of {step} below {kv_heads * width}",
            )
        rank = self.rank
        assert rank is not None  # check_options
        most = min(inner, kv_heads * (width + value_width) - rope_dim)
        if rank > most:
            raise PipelineError(
                f"rank={rank} is larger than {most}, all that K and V hold beside rope_dim={rope_dim}",
                where=f"{self.name} at {module}",
                remedy=f"give rank <= {most}",
            )
        planned = context.facts.get((self.name, module))
        keep = rope_dim // step
        if planned is not None:
            pairs = str(planned["pairs"])
        elif context.meta:
            pairs = "|".join(str(i) for i in range(keep))
        elif context.statistics is None or module not in context.statistics:
            raise PipelineError(
                "the low-rank form needs calibration", where=f"{self.name} at {module}",
                remedy="give calibration=<text file, list of strings or token tensor>",
            )  # fmt: skip
        else:
            weights = [_rows(_weight(graph, o.linear), o) for o in (query, key)]
            moments = context.statistics[module]
            chosen = rotary_pairs_by_energy(
                weights[0], weights[1], moments.covariance, query.rows.shape[0], kv_heads, keep,
                frequencies_of(graph, found), moments.length,
            )  # fmt: skip
            pairs = "|".join(map(str, chosen))
        before = kv_heads * (width + value_width)
        facts = {"kv_heads": kv_heads, "before": before, "d_c": rank, "d_r": rope_dim, "pairs": pairs}
        note = f"{before} -> {rank + rope_dim} elements per token: latent {rank}, rotated {rope_dim}"
        return Site(module, "low-rank", node.name, facts, note)

    def _apply_low_rank(self, graph: Graph, site: Site, context: Context) -> None:
        found = find(graph, graph.node(site.anchor))
        parts = _rotary_parts(graph, found, site.module)
        assert not isinstance(parts, Refusal)
        query, key, value = parts
        assert query.linear and key.linear and value.linear and found.key_rope and found.query_rope
        pairs = [int(i) for i in str(site.facts["pairs"]).split("|")]
        kv_heads, width = (int(s) for s in key.rows.shape)
        value_width, heads = int(value.rows.shape[1]), int(query.rows.shape[0])
        half = width // 2
        rotated = pairs + [p + half for p in pairs]
        plain = [i for i in range(width) if i not in set(rotated)]
        rank = int(site.facts["d_c"])
        recipe, has_query = self._recipe(graph, site, query, key, value, plain, rotated, context)
        like, inner = graph.value(key.linear.weight), int(graph.shape(key.linear.x)[-1])
        sizes = {
            "kv_down": (rank, inner),
            "k_up": (kv_heads * len(plain), rank),
            "v_up": (kv_heads * value_width, rank),
            "k_rope": (kv_heads * len(rotated), inner),
            "q": (heads * width, inner),
        }
        values = []
        for target in recipe.targets:
            part, kind = target.rsplit("latentscan_", 1)[1].rsplit("_", 1)
            values.append(like.new_empty(sizes[part] if kind == "weight" else sizes[part][:1]))
        new = dict(
            zip((t.rsplit("latentscan_", 1)[1] for t in recipe.targets), graph.add_weights(recipe, values), strict=True)
        )
        with graph.before(found.key, self.name):
            x = latent_node(graph, key.linear.x)
            latent = graph.call(F.linear, x, new["kv_down_weight"])
            k_plain = graph.call(F.linear, latent, new["k_up_weight"], new.get("k_up_bias"))
            v = _heads(
                graph, graph.call(F.linear, latent, new["v_up_weight"], new.get("v_up_bias")), kv_heads, value_width
            )
            k_rot = _heads(
                graph, graph.call(F.linear, x, new["k_rope_weight"], new.get("k_rope_bias")), kv_heads, len(rotated)
            )
            cos, sin = (graph.call(operator.getitem, t, (Ellipsis, _index(rotated))) for t in found.key_rope.args[1:3])
            options = dict(found.key_rope.kwargs)
            k_rot = graph.call(ROPE, k_rot, cos, sin, **options)
            k = graph.call(torch.cat, [_heads(graph, k_plain, kv_heads, len(plain)), k_rot], dim=-1)
        with graph.before(found.query if found.query is not found.key else found.node, self.name):
            before_rope: Any = found.query_rope.args[0]
            if has_query:
                before_rope = _heads(graph, graph.call(F.linear, x, new["q_weight"], new.get("q_bias")), heads, width)
            q_plain = graph.call(operator.getitem, before_rope, (Ellipsis, _index(plain)))
            q_rot = graph.call(operator.getitem, before_rope, (Ellipsis, _index(rotated)))
            q_cos, q_sin = (
                graph.call(operator.getitem, t, (Ellipsis, _index(rotated))) for t in found.query_rope.args[1:3]
            )
            q_rot = graph.call(ROPE, q_rot, q_cos, q_sin, **dict(found.query_rope.kwargs))
            q = graph.call(torch.cat, [q_plain, q_rot], dim=-1)
        graph.replace(found.query, q)  # for whoever multiplies it with the key: attention weights that come out, too
        _replace_stored(graph, found, k, v)

    def _recipe(
        self, graph: Graph, site: Site, query: Operand, key: Operand, value: Operand,
        plain: list[int], rotated: list[int], context: Context,
    ) -> tuple[Recipe, bool]:  # fmt: skip
        """New weights from the old projections; the query's too where it is fused with them."""
        assert query.linear and key.linear and value.linear
        maps: dict[str, Linear] = {"k": key.linear, "v": value.linear}
        has_query = query.linear.node in (key.linear.node, value.linear.node)
        rows = {"k": key.rows, "v": value.rows, "q": query.rows}
        sources: list[str] = []
        where: dict[str, tuple[int, int | None, bool]] = {}
        for part, linear in maps.items() if not has_query else {**maps, "q": query.linear}.items():
            index: list[int | None] = []
            for node in (linear.weight, linear.bias):
                weight = graph.weight(node)
                if weight is None:
                    index.append(None)
                    continue
                if weight.path not in sources:
                    sources.append(weight.path)
                index.append(sources.index(weight.path))
            where[part] = (index[0], index[1], linear.transposed)  # type: ignore[assignment]
        biased = {part: w[1] is not None for part, w in where.items()}
        names = ["kv_down_weight", "k_up_weight", "v_up_weight", "k_rope_weight"]
        names += ["k_up_bias", "k_rope_bias"] if biased["k"] else []
        names += ["v_up_bias"] if biased["v"] else []
        names += ["q_weight"] if has_query else []
        names += ["q_bias"] if has_query and biased["q"] else []
        statistics = context.statistics[site.module] if context.statistics else None
        rank, balance = int(site.facts["d_c"]), self.balance

        def function(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if statistics is None:
                raise PipelineError(
                    "the low-rank form needs calibration", where=site.module, remedy="give calibration="
                )

            def weight(part: str) -> torch.Tensor:
                w = given[where[part][0]]
                return (w.t() if where[part][2] else w)[rows[part].flatten().to(w.device)]

            k = weight("k").unflatten(0, tuple(key.rows.shape))
            factors = balanced_joint_pca(
                k[:, plain].flatten(0, 1), weight("v"), statistics.covariance.to(k.device), rank, balance=balance
            )
            made = {
                "kv_down_weight": factors.down,
                "k_up_weight": factors.up_key,
                "v_up_weight": factors.up_value,
                "k_rope_weight": k[:, rotated].flatten(0, 1),
            }
            if biased["k"]:
                bias = given[where["k"][1]][key.rows.to(k.device)]  # type: ignore[index]
                made |= {"k_up_bias": bias[:, plain].flatten(), "k_rope_bias": bias[:, rotated].flatten()}
            if biased["v"]:
                made["v_up_bias"] = given[where["v"][1]][value.rows.flatten().to(k.device)]  # type: ignore[index]
            if has_query:
                made["q_weight"] = weight("q")
                if biased["q"]:
                    made["q_bias"] = given[where["q"][1]][query.rows.flatten().to(k.device)]  # type: ignore[index]
            return tuple(made[n].to(k.dtype).contiguous() for n in names)

        targets = tuple(f"{site.module}.latentscan_{n}" for n in names)
        return Recipe(tuple(sources), targets, self.name, site.module, function, None, {"rank": rank}), has_query


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
    if node.target not in (torch.cat, torch.concat):
        return node
    full = [p for p in node.args[0] if not any(isinstance(n, int) and n == 0 for n in graph.shape(p))]  # type: ignore
    return full[0] if len(full) == 1 else node  # type: ignore[return-value]


def _rotary_parts(graph: Graph, found: Found, module: str) -> tuple[Operand, Operand, Operand] | Refusal:
    """Query and key before their rotation, and the value, as linear maps; or why not."""
    if found.key_rope is None or found.query_rope is None:
        what = getattr(found.key.target, "__name__", str(found.key.target))
        return Refusal(
            module, "key-not-rotated", f"the whole key is not one rotation: it comes from {what}",
            "use mha-to-mla without rank (exact) for keys that are not or only partly rotated",
        )  # fmt: skip
    layout, dim = found.key_rope.kwargs["layout"], found.key_rope.kwargs.get("unsqueeze_dim", 1)
    if layout != "half" or dim != 1 or dict(found.key_rope.kwargs) != dict(found.query_rope.kwargs):
        return Refusal(
            module, "rope-layout", f"rotation layout {layout!r}, unsqueeze_dim {dim}", "not served yet: use exact"
        )
    query, key, value = (
        operand(graph, n)
        for n in (found.query_rope.args[0], found.key_rope.args[0], found.value)  # type: ignore[arg-type]
    )
    for label, part in (("query", query), ("key", key), ("value", value)):
        computed = computed_weight(graph, part.features)
        if computed is not None:
            return Refusal(
                module,
                "no-plain-weight",
                f"the weight of the {label} ({computed.name}) is computed at every call (quantised?), not a parameter",
                "dequantise the model first",
            )
        if part.linear is None or part.other:
            names = {part.features.sources[i].name for i in part.features.used()}
            normed = any(_is_normed(part.features.sources[i]) for i in part.features.used())
            rule = "qk-norm" if normed and label != "value" else f"{label}-not-linear"
            why = ": a norm on queries or keys is not linear" if normed else ""
            return Refusal(
                module, rule,
                f"the {label} before rotation comes from {', '.join(sorted(names))}, not from a linear map{why}",
                "use the exact form: leave rank and rope_dim out",
            )  # fmt: skip
        if graph.weight(part.linear.weight) is None:
            return Refusal(module, "no-plain-weight", f"{label} has no plain weight", "dequantise the model first")
    if not same_latent(key.linear, value.linear):  # type: ignore[arg-type]
        return Refusal(
            module, "two-inputs", "keys and values are made from different inputs", "not served yet: use exact"
        )
    sinks, softcap = argument(found.node, "sinks"), argument(found.node, "softcap")
    if key.linear.bias is not None and (sinks is not None or softcap is not None):  # type: ignore[union-attr]
        return Refusal(module, "key-bias", "a key bias with sinks or softcap cannot leave the latent", "use exact")
    return query, key, value


def frequencies_of(graph: Graph, found: Found) -> torch.Tensor | None:
    """Radians per token of each rotary pair, from the buffer that the cosine table is made of; None if unknown."""
    rope = found.key_rope
    assert rope is not None
    pairs = int(graph.shape(rope.args[1])[-1]) // 2  # type: ignore[arg-type]
    stack, seen = [rope.args[1]], set()
    while stack:
        current: Any = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        weight = graph.weight(current)
        if weight is not None and weight.path.endswith("inv_freq") and weight.value.numel() == pairs:
            return weight.value.detach().reshape(pairs).double()
        stack.extend(current.all_input_nodes)
    return None


def calibration_points(graph: Graph) -> dict[str, str]:
    """Attention module -> the module whose input is to be measured (that of its key projection)."""
    points = {}
    for node in attentions(graph):
        found = find(graph, node)
        if found.key_rope is None:
            continue
        try:
            key = operand(graph, found.key_rope.args[0])  # type: ignore[arg-type]
        except LayoutError:
            continue
        if key.linear is not None:
            points[module_path(node)] = module_path(key.linear.node)
    return points


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


def _is_normed(node: fx.Node, depth: int = 6) -> bool:
    """Whether an RMS or layer norm stands just above a value."""
    name = str(getattr(node.target, "__name__", node.target))
    if "rsqrt" in name or "norm" in name:
        return True
    if depth == 0 or node.op == "placeholder" or node.target in (F.linear, torch._C._nn.linear, torch.addmm):
        return False
    return any(_is_normed(n, depth - 1) for n in node.all_input_nodes)


# -- rewriting --------------------------------------------------------------------------------------------------------


def _heads(graph: Graph, x: fx.Node, heads: int, width: int) -> fx.Node:
    """[B, S, heads * width] -> [B, heads, S, width]."""
    return graph.method("transpose", graph.method("unflatten", x, -1, (heads, width)), 1, 2)


def _index(features: list[int]) -> Any:
    piece = as_slice(features)
    return piece if piece is not None else features


def _rows(weight: torch.Tensor, part: Operand) -> torch.Tensor:
    """The operand's weight rows [heads * width, D], in its own order."""
    assert part.linear is not None
    matrix = weight.t() if part.linear.transposed else weight
    return matrix.detach()[part.rows.flatten().to(matrix.device)]


def _weight(graph: Graph, linear: Linear | None) -> torch.Tensor:
    weight = graph.weight(linear.weight) if linear is not None else None
    assert weight is not None  # checked when planning
    return weight.value


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
