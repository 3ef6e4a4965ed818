"""The exact half of mha-to-mla, planned: which latent loses nothing, and how many elements a token it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from latentscan.ir.graph import Graph
from latentscan.ir.layout import LayoutError, linear_of
from latentscan.ir.mla import Operand, computed_weight, latent_source, operand, same_latent
from latentscan.ir.tokenwise import NotTokenwise, again_on_read
from latentscan.passes.base import Context, Refusal, Site
from latentscan.passes.mha_to_mla import Found, _already_latent, find

NAME = "mha-to-mla"
_LARGE = 1024  # rows; beyond, a Cholesky factorisation answers what singular values would
ON_READ_RULES = ("keys-are-latent", "input-made-again-on-read")


@dataclass(frozen=True)
class Sides:
    """K and V of an attention, seen through everything that may run again when the cache is read.

    Attributes:
        key, value: the operands as they are cached.
        raw: the key before its rotation, where the whole key is one rotation; else the key.
        again: nodes that would run again on read; positions: whether a table of positions is among what they read.
        x: the input that keys and values are both made from, or None (``why`` then says what stands in the way).
    """

    key: Operand
    value: Operand
    raw: Operand
    again: tuple[fx.Node, ...]
    positions: bool
    x: fx.Node | None
    why: str


def sides_of(graph: Graph, found: Found) -> Sides:
    """Follow keys and values. Raises LayoutError."""
    key, value = operand(graph, found.key), operand(graph, found.value)
    raw = operand(graph, found.key_rope.args[0]) if found.key_rope is not None else key  # type: ignore[arg-type]
    if value.linear is None or value.other:
        return Sides(key, value, raw, (), False, None, "the values are no linear map of one input")
    if key.linear is not None and not key.other:
        same = same_latent(key.linear, value.linear)
        return Sides(
            key, value, raw, (), False, value.linear.x if same else None, "" if same else "K and V have two inputs"
        )
    try:
        again, linears, positions = again_on_read(graph, found.key, (0, 2))
    except NotTokenwise as error:
        return Sides(key, value, raw, (), False, None, str(error))
    maps = [linear_of(graph, n) for n in linears]
    if not maps or not all(m is not None and same_latent(m, value.linear) for m in maps):
        return Sides(key, value, raw, (), False, None, "K and V have two inputs")
    return Sides(key, value, raw, tuple(again), bool(positions), value.linear.x, "")


def plan_exact(
    graph: Graph, node: fx.Node, module: str, context: Context, full_rope: str, max_condition: float
) -> Site | Refusal:
    """The exact form with the fewest elements a token, or the canonical one with the reason why nothing is saved.

    Args:
        full_rope: what may become of keys that are rotated (or normed) as a whole: "auto", "keys", "input" or "none".
        max_condition: largest condition number of W_K at which V may be computed from K.
    """
    found = find(graph, node)
    latent = _already_latent(graph, found, module)
    if latent is not None:
        return latent
    sides = sides_of(graph, found)
    key, value = sides.key, sides.value
    kv_heads, key_width = (int(s) for s in key.features.source.shape)
    value_width = int(value.features.source.shape[1])
    both = kv_heads * (key_width + value_width)
    facts: dict[str, Any] = {"kv_heads": kv_heads, "before": both}
    planned = context.facts.get((NAME, module), {}).get("rule")
    linear = _linear_form(graph, found, sides, context, facts, module, planned)
    on_read = _on_read_form(graph, found, sides, context, facts, module, planned, full_rope, max_condition)
    forms: list[Site] = [f for f in (linear, on_read) if isinstance(f, Site)]
    if forms:  # of two alike the first, which computes less on read
        best = min(forms, key=lambda f: f.facts["d_c"] + f.facts["d_r"])
        return Site(module, best.rule, node.name, best.facts, best.note)
    facts |= {"rule": "key-value-is-latent", "d_c": both, "d_r": 0, "fused": False}
    note = f"canonical form: the latent is [K | V] itself ({both}), which is exact and saves nothing: {on_read}"
    return Site(module, "key-value-is-latent", node.name, facts, f"{note}; give rank and rope_dim to cache less")


def _linear_form(
    graph: Graph, found: Found, sides: Sides, context: Context, facts: dict[str, Any], module: str, planned: str | None
) -> Site | None:
    """What is linear in the input as the input or a basis of it; the rotated part of the keys, or all, as it is."""
    key, value = sides.key, sides.value
    if value.linear is None or value.other or planned in ("key-value-is-latent", *ON_READ_RULES):
        return None
    if key.linear is not None and not same_latent(key.linear, value.linear):
        return None
    inner = int(graph.shape(value.linear.x)[-1])
    rotated, both = facts["kv_heads"] * len(key.other), facts["before"]
    features = both - rotated
    beside, what = "", "W_V has" if key.linear is None else "W_K and W_V together have"
    if rotated:
        beside = f", {rotated} {'' if key.linear is None else 'rotated '}key features beside it"
    rank = min(inner, features)
    if planned == "basis-is-latent":
        rank = int(context.facts[NAME, module]["d_c"])
    elif planned is None and context.own_parameters and not context.meta:
        rank = min(rank, _rank(graph, [value] if key.linear is None else [key, value]) or rank)
    if planned == "basis-is-latent" or (planned is None and rank < min(inner, features)):
        latent_source(graph, value.linear.x)
        facts = {**facts, "rule": "basis-is-latent", "d_c": rank, "d_r": rotated, "fused": False}
        note = (
            f"{both} -> {rank + rotated} elements per token: {what} rank {rank} of {min(inner, features)}, so a basis "
            f"of what they read is the latent{beside}"
        )
        return Site("", "basis-is-latent", "", facts, note)
    if inner + rotated >= both:
        return None
    rule = "input-is-latent" if not key.other else "values-from-input" if key.linear is None else "partial-rotary"
    fused = not key.other and is_fused(graph, found, key, value)
    if fused:
        latent_source(graph, value.linear.x)  # it will be projected again
    facts = {**facts, "rule": rule, "d_c": inner, "d_r": rotated, "fused": fused}
    note = f"{both} -> {inner + rotated} elements per token: the layer's input ({inner}) is the latent{beside}"
    return Site("", rule, "", facts, note)


def _on_read_form(
    graph: Graph, found: Found, sides: Sides, context: Context, facts: dict[str, Any], module: str,
    planned: str | None, full_rope: str, max_condition: float,
) -> Site | str:  # fmt: skip
    """Keys that are rotated or normed as a whole: cached before that, and made on every read; or why not."""
    both = facts["before"]
    if sides.x is None:
        return sides.why
    if sides.key.linear is not None and sides.again:
        return f"{both} is less than the layer's input and the rotated key features"
    if not sides.again:
        inner = int(graph.shape(sides.x)[-1])
        return f"the layer's input has {inner} elements, the two together are made from no fewer"
    inner = int(graph.shape(sides.x)[-1])
    what = "keys are rotated as a whole" if sides.positions else "keys are normed as a whole"
    if 2 * inner > both:
        return f"{what}, and the layer's input ({inner}) is more than half of K and V ({both})"
    extra = 1 if sides.positions else 0
    if planned is not None and planned not in ON_READ_RULES:
        return "as planned"
    if planned is None and full_rope == "none":
        return (
            f"{what}; full_rope=auto would cache {inner + extra} elements in place of {both}, exactly, and pay for it "
            f"with up to {inner * both} multiply-adds at every step for every cached token"
        )
    counted = f"{both} -> {inner + extra} elements per token"
    beside = " and the position id, an int32," if extra else ""
    value_features = sides.value.rows.numel()
    square, why = _keys_form(graph, found, sides, context, module, planned, full_rope, max_condition)
    if square:
        facts = {**facts, "rule": "keys-are-latent", "d_c": inner, "d_r": extra, "fused": False}
        note = (
            f"{counted}: K before its rotation ({inner}){beside} are cached; K is rotated and V = K W_K^-1 W_V "
            f"computed when they are read, at every step for all cached tokens, {inner * value_features} multiply-adds "
            f"each ({why})"
        )
        return Site("", "keys-are-latent", "", facts, note)
    if full_rope == "keys":
        return why
    fused = is_fused(graph, found, sides.raw, sides.value)
    if fused:
        latent_source(graph, sides.x)
    facts = {**facts, "rule": "input-made-again-on-read", "d_c": inner, "d_r": extra, "fused": fused}
    made = "rotated" if extra else "normed"
    note = (
        f"{counted}: the layer's input ({inner}){beside} are cached; K is projected and {made}, V projected, when they "
        f"are read, at every step for all cached tokens, {inner * both} multiply-adds each; not from K alone: {why}"
    )
    return Site("", "input-made-again-on-read", "", facts, note)


def _keys_form(
    graph: Graph, found: Found, sides: Sides, context: Context, module: str, planned: str | None, full_rope: str,
    max_condition: float,
) -> tuple[bool, str]:  # fmt: skip
    """Whether V may be computed from K, and why (not)."""
    raw, value = sides.raw, sides.value
    if full_rope == "input":
        return False, "option full_rope=input"
    if planned is not None:
        return planned == "keys-are-latent", "as planned"
    if found.key_rope is None or raw.linear is None or raw.other:
        return False, "K is no linear map of the input before its rotation"
    inner, rows = int(graph.shape(raw.linear.x)[-1]), raw.rows.numel()
    if rows != inner or raw.rows.unique().numel() != rows:
        return False, f"W_K is {rows} x {inner}, not square"
    if not context.own_parameters:
        return False, "it needs a new Parameter, and an optimiser may hold the old ones"
    if context.meta:
        return False, f"decided with the weights: cond(W_K) at most {max_condition:g}"
    weights = _real(graph, raw), _real(graph, value)
    if any(w is None for w in weights):
        return False, "W_K or W_V is no plain parameter"
    weight: torch.Tensor = weights[0]  # type: ignore[assignment]
    if torch.finfo(weight.dtype).eps > 1e-6:
        dtype = str(weight.dtype).removeprefix("torch.")
        return False, f"the inverse of W_K needs float32 or float64, the weights are {dtype}"
    matrix = weight.double()
    if rows > _LARGE:  # its singular values would take minutes a layer
        holds = _least_is_above(matrix, 1 / max_condition)
        return holds, f"cond(W_K) is {'not above' if holds else 'above'} {max_condition:g}, which is allowed at most"
    values = torch.linalg.svdvals(matrix)
    condition = float(values[0] / values[-1]) if values[-1] > 0 else float("inf")
    return condition <= max_condition, f"cond(W_K) = {condition:.3g}, at most {max_condition:g} is allowed"


def _real(graph: Graph, part: Operand) -> torch.Tensor | None:
    """The operand's weight rows [heads * width, D] if they hold numbers here."""
    if part.linear is None or computed_weight(graph, part.features) is not None:
        return None
    weight = graph.weight(part.linear.weight)
    if weight is None:
        return None
    value = weight.value
    fake = hasattr(value, "fake_mode") or hasattr(value, "full_tensor") or value.device.type == "meta"
    if fake or not value.is_floating_point():
        return None
    matrix = value.detach()
    return (matrix.t() if part.linear.transposed else matrix)[part.rows.flatten().to(value.device)]


def _rank(graph: Graph, of: Sequence[Operand]) -> int | None:
    """Numerical rank of the operands' weights, one above the other; None if the weights are not here.

    Singular values above 4 eps of the largest count: a product of two factors in floating point has rounding noise of
    about eps times its norm, which this leaves out. eps is never larger than float32's, so that weights of 16 bits
    lose nothing that their own dtype can tell.
    """
    parts = [_real(graph, p) for p in of]
    if any(p is None for p in parts):
        return None
    eps = min(torch.finfo(parts[0].dtype).eps, torch.finfo(torch.float32).eps)  # type: ignore[union-attr]
    matrix = torch.cat([p.double() for p in parts])  # type: ignore[union-attr]
    if not bool(torch.isfinite(matrix).all()):
        return None
    if matrix.shape[0] < matrix.shape[1]:
        matrix = matrix.t()
    if min(matrix.shape) > _LARGE and _least_is_above(matrix, 1e-5):
        return int(min(matrix.shape))
    values = torch.linalg.svdvals(matrix)
    return max(1, int((values > 4 * eps * values[0]).sum()))


def _least_is_above(matrix: torch.Tensor, share: float) -> bool:
    """Whether the least singular value of a tall fp64 matrix is above ``share`` of the largest; False if in doubt.

    G - (share s)^2 I with G = M^T M has a Cholesky factor if and only if that holds, s being the largest singular
    value: from power iteration, which may fall short, so 5 % more is asked for. A tenth of the time of an SVD.
    """
    gram = matrix.t() @ matrix
    x = torch.linspace(1, 2, len(gram), dtype=gram.dtype, device=gram.device)
    for _ in range(50):
        x = gram @ (x / x.norm())
    gram.diagonal().sub_((1.05 * share) ** 2 * x.norm())
    return int(torch.linalg.cholesky_ex(gram).info) == 0


def is_fused(graph: Graph, found: Found, key: Operand, value: Operand) -> bool:
    """Whether the query comes out of the same matmul as keys or values, with views in between only."""
    if key.linear is None or value.linear is None or key.other or value.other:
        return False
    try:
        query = operand(graph, before_rope(found.query, found.query_rope))
    except LayoutError:
        return False
    if query.linear is None or query.other:
        return False
    return query.linear.node in (key.linear.node, value.linear.node)


def before_rope(node: fx.Node, rope: fx.Node | None) -> fx.Node:
    return node if rope is None else rope.args[0]  # type: ignore[return-value]
