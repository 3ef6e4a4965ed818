"""mla-absorb: attention over the latent itself, with the up-projections moved to the query and the output."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from latentscan.ir.graph import Graph, module_path
from latentscan.ir.layout import LayoutError, as_slice, check_rows, rows_of
from latentscan.ir.mla import (
    Operand,
    argument,
    attention_like,
    columns_node,
    computed_weight,
    dropout_of,
    given_cache,
    latent_node,
    latent_source,
    only_columns,
    operand,
    same_latent,
)
from latentscan.ir.normalize import ATTENTION, LATENT_ATTENTION
from latentscan.ir.sizes import expression
from latentscan.passes.base import Choice, Context, Pass, Refusal, Site, Tier, foreign_cache


@dataclass(frozen=True)
class MlaAbsorb(Pass):
    """Move W_UK into the query and W_UV into the output, so that attention runs on the latent (MATH 1 and 3).

    score_h = (W_UK,h^T q_h) . c + qr_h . kr and out_h = W_UV,h sum_j p_j c_j: a re-association of the same products.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    when: str = field(default="flops", metadata={"choices": ("flops", "always", "never")})

    name: ClassVar[str] = "mla-absorb"
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    after: ClassVar[tuple[str, ...]] = ("mha-to-mla", "mla-mm-split", "latent-cache")
    summary: ClassVar[str] = "attention over the latent: W_UK goes into the query, W_UV into the output, where it pays"
    math: ClassVar[str] = (
        "absorb iff n_h P (2 d_c - d_n - d_v) < (n_kv t_e - n_h s) d_c (d_n + d_v), with P = s t - s (s - 1) / 2 for "
        "causal attention of s queries over t keys and t_e tokens expanded in this call. Key features that are rotated "
        "stay outside the latent. A key bias shifts all scores of a query alike and is dropped unless there are sinks "
        "or a softcap; a value bias is added after attention unless there are sinks. Two forms are compiled lazily and "
        "the rule chooses at every call."
    )

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        return [self._plan_one(graph, node) for node in attention_like(graph)]

    def _plan_one(self, graph: Graph, node: fx.Node) -> Site | Refusal:
        module = module_path(node)
        if dropout_of(node) > 0:
            return Refusal(
                module,
                "attention-dropout",
                f"it drops weights with p = {dropout_of(node)} in training; attention over the latent has no dropout",
                "set the attention dropout to 0 in the configuration to train in this form; evaluation takes it anyway",
            )
        if node.target != ATTENTION:
            return Refusal(module, "plain-attention", "this attention has no canonical form", "report the model")
        try:
            key, value = operand(graph, node.args[1]), operand(graph, node.args[2])  # type: ignore[arg-type]
        except LayoutError as error:
            cache = given_cache(graph, node.args[1])  # type: ignore[arg-type]
            if cache is not None:
                return foreign_cache(module, cache.name)
            return Refusal(module, "layout-unknown", str(error), "report the model: its key or value layout is new")
        refusal = _refuse(graph, node, module, key, value)
        if refusal is not None:
            return refusal
        heads, queries = graph.shape(node)[1], graph.shape(node)[2]
        kv_heads, keys = graph.shape(node.args[1])[1:3]  # type: ignore[arg-type]
        facts = {
            "heads": int(heads),
            "kv_heads": int(kv_heads),
            "d_c": int(graph.shape(value.linear.x)[-1]),  # type: ignore[union-attr]
            "d_n": len(key.columns),
            "d_r": len(key.other),
            "d_v": len(value.columns),
        }
        note = "latent {d_c}, key {d_n} + {d_r} rotated, value {d_v}, {heads} heads".format(**facts)
        return Site(module, "linear-in-latent", node.name, facts | {"s": queries, "t": keys}, note)

    def choice(self, graph: Graph, sites: list[Site]) -> Choice | None:
        if self.when == "always":
            return None
        if self.when == "never":
            return Choice(sympy.false, "option when=never", "absorb", "expand")
        saved = sympy.Integer(0)
        for site in sites:
            f = site.facts
            s, t = expression(f["s"]), expression(f["t"])
            pairs = s * t
            if argument(graph.node(site.anchor), "kind") == "causal":
                pairs -= s * (s - 1) / 2
            both = f["d_n"] + f["d_v"]
            absorbed = f["heads"] * pairs * (2 * f["d_c"] - both)
            expanded = (f["kv_heads"] * t - f["heads"] * s) * f["d_c"] * both
            saved += expanded - absorbed
        f = sites[0].facts
        rule = (
            f"absorb iff {f['heads']} P (2*{f['d_c']} - {f['d_n']} - {f['d_v']}) < "
            f"({f['kv_heads']} t - {f['heads']} s) {f['d_c']} ({f['d_n']} + {f['d_v']})"
            + ("" if len(sites) == 1 else f", summed over {len(sites)} layers")
        )
        return Choice(sympy.expand(saved) > 0, rule, "absorb", "expand")

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        node = graph.node(site.anchor)
        key, value = operand(graph, node.args[1]), operand(graph, node.args[2])  # type: ignore[arg-type]
        assert key.linear is not None and value.linear is not None  # plan refused everything else
        heads, kv_heads = site.facts["heads"], site.facts["kv_heads"]
        with graph.before(node, self.name):
            latent = latent_node(graph, value.linear.x)
            w_uk = rows_of(graph, key.linear.weight, key.rows, transposed=key.linear.transposed)
            w_uv = rows_of(graph, value.linear.weight, value.rows, transposed=value.linear.transposed)
            query: fx.Node = node.args[0]  # type: ignore[assignment]
            q_nope = _columns(graph, query, key.columns)
            q_rope = _columns(graph, query, key.other) if key.other else None
            k_rope = columns_node(graph, key, key.other) if key.other else None
            q_latent = _per_head(graph, q_nope, w_uk, "nc", heads, kv_heads)
            structure = [argument(node, n) for n in ("mask", "padding", "sinks", "cu_seqlens")]
            options = {n: argument(node, n) for n in ("kind", "window", "scale", "softcap")}
            mixed = graph.call(LATENT_ATTENTION, q_latent, q_rope, latent, k_rope, *structure, **options)
            out = _per_head(graph, mixed, w_uv, "cn", heads, kv_heads)
            if value.linear.bias is not None:
                bias = rows_of(graph, value.linear.bias, value.rows, transposed=False)
                bias = graph.method("unsqueeze", bias, 1)  # [kv_heads, 1, d_v]
                if kv_heads != heads:
                    bias = graph.method("repeat_interleave", bias, heads // kv_heads, 0)
                out = graph.call(operator.add, out, bias)
        graph.replace(node, out)
        graph.graph.erase_node(node)


def _refuse(graph: Graph, node: fx.Node, module: str, key: Operand, value: Operand) -> Refusal | None:
    """Why an attention's up-projections cannot be absorbed, or None."""

    def kind(of: Operand, columns: list[int]) -> str:
        sources = {of.features.sources[int(i)] for i in of.features.source[:, columns].unique()}
        return ", ".join(sorted(_describe(s) for s in sources))

    for of in (key, value):
        computed = computed_weight(graph, of.features)
        if computed is not None:
            return Refusal(
                module,
                "no-plain-weight",
                f"the weight of {computed.name} is computed at every call (quantised?), not a parameter of the model",
                "dequantise the model first: absorbing quantised weights would cost accuracy",
            )
    if key.linear is None:
        where = kind(key, key.other)
        cached = "cache_append" in where
        return Refusal(
            module,
            "key-cached-expanded" if cached else "key-not-linear",
            f"all {len(key.other)} key features per head come from {where}, not from a linear map of a latent",
            "put latent-cache before mla-absorb"
            if cached
            else "convert with mha-to-mla{rank=...,rope_dim=...} first: keys rotated or normed as a whole stay out",
        )
    if value.linear is None or value.other:
        where = kind(value, value.other)
        cached = "cache_append" in where
        return Refusal(
            module,
            "value-cached-expanded" if cached else "value-not-linear",
            f"{len(value.other)} value features per head come from {where}, not from a linear map of a latent",
            "put latent-cache before mla-absorb" if cached else "convert with mha-to-mla first",
        )
    if not same_latent(key.linear, value.linear):
        return Refusal(
            module,
            "two-latents",
            f"keys are linear in {key.linear.x.name}, values in {value.linear.x.name}",
            "convert with mha-to-mla first: it joins them in one latent",
        )
    sinks, softcap = argument(node, "sinks"), argument(node, "softcap")
    if key.linear.bias is not None and (sinks is not None or softcap is not None):
        what = "sinks" if sinks is not None else f"softcap {softcap}"
        return Refusal(
            module,
            "key-bias",
            f"{key.linear.bias.name} cannot be dropped from the scores with {what}",
            "leave mla-absorb out: mha-to-mla,latent-cache alone caches the latent and keeps the bias",
        )
    if value.linear.bias is not None and sinks is not None:
        return Refusal(
            module,
            "value-bias",
            "with sinks the probabilities do not sum to 1, so the value bias cannot be added after attention",
            "leave mla-absorb out: mha-to-mla,latent-cache alone caches the latent and keeps the bias",
        )
    try:
        _check_reachable(graph, key, value)
    except LayoutError as error:
        return Refusal(module, "rows-irregular", str(error), "put mla-mm-split before mla-absorb")
    return None


def _check_reachable(graph: Graph, key: Operand, value: Operand) -> None:
    """Raise LayoutError unless the weights' rows, the latent and the rotated key can be reached by views."""
    for part in (key, value):
        assert part.linear is not None
        check_rows(int(graph.shape(part.linear.weight)[1 if part.linear.transposed else 0]), part.rows)
        latent_source(graph, part.linear.x)
    if key.other:
        only_columns(key, key.other)


def _describe(node: fx.Node) -> str:
    target: Any = node.target
    if node.op == "call_function" and target is operator.getitem:
        return _describe(node.args[0])  # type: ignore[arg-type]
    return str(getattr(target, "_opname", None) or getattr(target, "__name__", None) or target)


def _columns(graph: Graph, query: fx.Node, columns: list[int]) -> fx.Node:
    """``query[..., columns]``; a part of a concatenation is taken as it is."""
    width = int(graph.shape(query)[-1])
    if columns == list(range(width)):
        return query
    if query.target is torch.cat and query.kwargs.get("dim", query.args[1] if len(query.args) > 1 else 0) in (-1, 3):
        start = 0
        for part in query.args[0]:  # type: ignore[union-attr]
            size = int(graph.shape(part)[-1])  # type: ignore[arg-type]
            if columns == list(range(start, start + size)):
                return part  # type: ignore[return-value]
            start += size
    piece = as_slice(columns)
    index: Any = piece if piece is not None else columns
    return graph.call(operator.getitem, query, (Ellipsis, index))


def _per_head(graph: Graph, x: fx.Node, weight: fx.Node, order: str, heads: int, kv_heads: int) -> fx.Node:
    """x [B, heads, S, i] times weight [kv_heads, n, c], over n ("nc") or over c ("cn") -> [B, heads, S, o]."""
    inner, outer = order[0], order[1]
    if heads == kv_heads:
        return graph.call(torch.einsum, f"bhs{inner},hnc->bhs{outer}", x, weight)
    x = graph.method("unflatten", x, 1, (kv_heads, heads // kv_heads))
    out = graph.call(torch.einsum, f"bhgs{inner},hnc->bhgs{outer}", x, weight)
    return graph.method("flatten", out, 1, 2)
