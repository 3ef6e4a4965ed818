"""The exact half of mha-to-mla: which latent loses nothing, how many elements a token it takes, and the rewrite."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.graph import Graph, module_path
from latentscan.ir.layout import LayoutError, Linear, linear_of
from latentscan.ir.mla import Operand, columns_node, computed_weight, latent_node, latent_source, operand, same_latent
from latentscan.ir.tokenwise import ON_READ, NotTokenwise, again_on_read
from latentscan.ir.weights import Recipe
from latentscan.passes.base import Context, Refusal, Site
from latentscan.passes.mha_to_mla import Found, _already_latent, _heads, _replace_stored, find, stored

NAME = "mha-to-mla"
_ON_READ = ("keys-are-latent", "input-made-again-on-read")


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
    if value.linear is None or value.other or planned in ("key-value-is-latent", *_ON_READ):
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
    fused = not key.other and _is_fused(graph, found, key, value)
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
    if full_rope == "none" or (planned is not None and planned not in _ON_READ):
        return "option full_rope=none"
    if 2 * inner > both:
        what = "keys are rotated as a whole" if sides.positions else "keys are normed as a whole"
        return f"{what}, and the layer's input ({inner}) is more than half of K and V ({both})"
    extra = 1 if sides.positions else 0
    counted = f"{both} -> {inner + extra} elements per token"
    beside = " and the position id, an int32," if extra else ""
    square, why = _keys_form(graph, found, sides, context, module, planned, full_rope, max_condition)
    if square:
        facts = {**facts, "rule": "keys-are-latent", "d_c": inner, "d_r": extra, "fused": False}
        note = (
            f"{counted}: K before its rotation ({inner}){beside} are cached; K is rotated and V = K W_K^-1 W_V "
            f"computed when they are read, at every step for all cached tokens ({why})"
        )
        return Site("", "keys-are-latent", "", facts, note)
    if full_rope == "keys":
        return why
    fused = _is_fused(graph, found, sides.raw, sides.value)
    if fused:
        latent_source(graph, sides.x)
    facts = {**facts, "rule": "input-made-again-on-read", "d_c": inner, "d_r": extra, "fused": fused}
    made = "rotated" if extra else "normed"
    note = (
        f"{counted}: the layer's input ({inner}){beside} are cached; K is projected and {made}, V projected, when they "
        f"are read, at every step for all cached tokens; not from K alone: {why}"
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
        return False, f"the inverse of W_K needs float32, the weights are {str(weight.dtype).removeprefix('torch.')}"
    values = torch.linalg.svdvals(weight.double())
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
    if min(matrix.shape) > 1024:  # the Gram matrix tells full rank far sooner; its square root of eps is 1e-8
        gram = torch.linalg.eigvalsh(matrix.t() @ matrix)
        if gram[0] > 1e-10 * gram[-1]:
            return int(min(matrix.shape))
    values = torch.linalg.svdvals(matrix)
    return max(1, int((values > 4 * eps * values[0]).sum()))


def _is_fused(graph: Graph, found: Found, key: Operand, value: Operand) -> bool:
    """Whether the query comes out of the same matmul as keys or values, with views in between only."""
    if key.linear is None or value.linear is None or key.other or value.other:
        return False
    try:
        query = operand(graph, _before_rope(found.query, found.query_rope))
    except LayoutError:
        return False
    if query.linear is None or query.other:
        return False
    return query.linear.node in (key.linear.node, value.linear.node)


def _before_rope(node: fx.Node, rope: fx.Node | None) -> fx.Node:
    return node if rope is None else rope.args[0]  # type: ignore[return-value]


# -- rewriting --------------------------------------------------------------------------------------------------------


def apply_exact(graph: Graph, site: Site) -> None:
    """Rewrite one site of :func:`plan_exact`."""
    found = find(graph, graph.node(site.anchor))
    if site.rule == "key-value-is-latent":
        _join(graph, found)
        return
    if site.rule in _ON_READ:
        for node in sides_of(graph, found).again:
            node.meta[ON_READ] = True
    if site.rule == "basis-is-latent":
        _use_basis(graph, found, int(site.facts["d_c"]))
    elif site.rule == "keys-are-latent":
        _values_from_keys(graph, found)
    elif site.facts.get("fused"):
        _unfuse(graph, found)


class Old:
    """The weights that some operands are rows of, as the sources of one recipe."""

    def __init__(self, graph: Graph, parts: dict[str, Operand]) -> None:
        self.graph, self.parts = graph, parts
        self.paths: list[str] = []
        self.sizes: list[int] = []  # rows of each source
        self.transposed: list[bool] = []
        self.where: dict[str, tuple[int, int | None]] = {}
        for name, part in parts.items():
            assert part.linear is not None
            self.where[name] = (
                self._add(part.linear, part.linear.weight),
                None if part.linear.bias is None else self._add(part.linear, part.linear.bias),
            )  # type: ignore[assignment]

    def _add(self, linear: Linear, node: fx.Node) -> int:
        weight = self.graph.weight(node)
        assert weight is not None  # checked when planning
        if weight.path not in self.paths:
            is_weight = node is linear.weight
            self.paths.append(weight.path)
            self.transposed.append(is_weight and linear.transposed)
            self.sizes.append(int(self.graph.shape(node)[1 if self.transposed[-1] else 0]))
        return self.paths.index(weight.path)

    def biased(self, name: str) -> bool:
        return self.where[name][1] is not None

    def read(self, given: Sequence[torch.Tensor], name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(weight rows [n, D], bias rows [n]) of a part, from the sources' values."""
        at, bias_at = self.where[name]
        rows = self.parts[name].rows.flatten().to(given[at].device)
        weight = given[at].t() if self.transposed[at] else given[at]
        return weight.index_select(0, rows), None if bias_at is None else given[bias_at].index_select(0, rows)

    def writer(self) -> Callable[[dict[str, tuple[Any, Any]]], tuple[torch.Tensor, ...]] | None:
        """The sources from the parts' rows, or None unless the parts hold every row of every source exactly once."""
        rows: list[list[tuple[str, int, torch.Tensor]]] = [[] for _ in self.paths]
        for name, (at, bias_at) in self.where.items():
            flat = self.parts[name].rows.flatten()
            rows[at].append((name, 0, flat))
            if bias_at is not None:
                rows[bias_at].append((name, 1, flat))
        back = []
        for size, members in zip(self.sizes, rows, strict=True):
            every = torch.cat([r for _, _, r in members])
            if every.numel() != size or every.unique().numel() != size:
                return None
            back.append(torch.argsort(every))

        def write(values: dict[str, tuple[Any, Any]]) -> tuple[torch.Tensor, ...]:
            made = []
            for members, order, transposed in zip(rows, back, self.transposed, strict=True):
                joined = torch.cat([values[name][kind] for name, kind, _ in members])
                joined = joined.index_select(0, order.to(joined.device))
                made.append(joined.t().contiguous() if transposed else joined)
            return tuple(made)

        return write


def _targets(graph: Graph, old: Old, module: str, names: Sequence[str], shapes: dict[str, tuple[int, ...]], recipe: Any,
             inverse: Any) -> dict[str, fx.Node]:  # fmt: skip
    """Placeholders of new weights by name; ``recipe``: sources -> {name: value}, ``inverse``: the way back or None."""
    like = next(graph.value(p.linear.weight) for p in old.parts.values() if p.linear is not None)

    def function(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = recipe(given)
        return tuple(made[n].to(given[0].dtype) for n in names)

    def back(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.to(given[0].dtype) for t in inverse(dict(zip(names, given, strict=True))))

    whole = Recipe(
        tuple(old.paths), tuple(f"{module}.latentscan_{n}" for n in names), NAME, module, function,
        None if inverse is None else back,
    )  # fmt: skip
    nodes = graph.add_weights(whole, [like.new_empty(shapes[n]) for n in names])
    return dict(zip(names, nodes, strict=True))


def _parts(graph: Graph, found: Found, key: Operand, value: Operand) -> dict[str, Operand]:
    """K and V, and the query where it shares their matmul."""
    parts = {"k": key, "v": value}
    if _is_fused(graph, found, key, value):
        parts["q"] = operand(graph, _before_rope(found.query, found.query_rope))
    return parts


def _new_query(graph: Graph, found: Found, query: fx.Node) -> None:
    user = found.node if found.query_rope is None else found.query_rope
    user.replace_input_with(_before_rope(found.query, found.query_rope), query)


def _first(graph: Graph, found: Found, query: bool) -> fx.Node:
    """The first node that will read something new: the key (or its rotation), with ``query`` the query's too."""
    users = [found.key if found.key_rope is None else found.key_rope]
    if query and found.query_rope is not None:
        users.append(found.query_rope)
    return next(n for n in graph.graph.nodes if n in users)


def _split_heads(graph: Graph, flat: fx.Node, part: Operand) -> fx.Node:
    return _heads(graph, flat, *(int(s) for s in part.rows.shape))


def _use_basis(graph: Graph, found: Found, rank: int) -> None:
    """[W_K; W_V] (or W_V alone) = up down, ``down`` [rank, D] of orthonormal rows; biases stay on the up side."""
    key, value = operand(graph, found.key), operand(graph, found.value)
    assert value.linear is not None
    parts = {"v": value} if key.linear is None else _parts(graph, found, key, value)
    factored = [p for p in "kv" if p in parts]
    old, module = Old(graph, parts), module_path(found.node)
    inner = int(graph.shape(value.linear.x)[-1])
    n = {p: o.rows.numel() for p, o in parts.items()}
    shapes: dict[str, tuple[int, ...]] = {"kv_down_weight": (rank, inner)}
    shapes |= {f"{p}_up_weight": (n[p], rank) for p in factored}
    shapes |= {f"{p}_up_bias": (n[p],) for p in factored if old.biased(p)}
    if "q" in parts:
        shapes["q_weight"] = (n["q"], inner)
        shapes |= {"q_bias": (n["q"],)} if old.biased("q") else {}

    def recipe(given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        read = {p: old.read(given, p) for p in parts}
        left, values, right = torch.linalg.svd(torch.cat([read[p][0] for p in factored]).double(), full_matrices=False)
        ups = (left[:, :rank] * values[:rank]).split([n[p] for p in factored])
        made: dict[str, Any] = {"kv_down_weight": right[:rank]}
        for part, up in zip(factored, ups, strict=True):
            made |= {f"{part}_up_weight": up, f"{part}_up_bias": read[part][1]}
        return made | ({"q_weight": read["q"][0], "q_bias": read["q"][1]} if "q" in parts else {})

    writer = old.writer()

    def inverse(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        assert writer is not None
        down = given["kv_down_weight"].double()
        rows = {p: (given[f"{p}_up_weight"].double() @ down, given.get(f"{p}_up_bias")) for p in factored}
        if "q" in parts:
            rows["q"] = given["q_weight"].double(), given.get("q_bias")
        return writer(rows)

    new = _targets(graph, old, module, tuple(shapes), shapes, recipe, inverse if writer is not None else None)
    made: dict[str, fx.Node] = {}
    with graph.before(_first(graph, found, "q" in parts), NAME):
        x = latent_node(graph, value.linear.x)
        latent = graph.call(F.linear, x, new["kv_down_weight"])
        for part in factored:
            flat = graph.call(F.linear, latent, new[f"{part}_up_weight"], new.get(f"{part}_up_bias"))
            made[part] = _split_heads(graph, flat, parts[part])
        if key.linear is not None and key.other:
            made["k"] = _with_columns(graph, key, made["k"])
        if "q" in parts:
            made["q"] = _split_heads(graph, graph.call(F.linear, x, new["q_weight"], new.get("q_bias")), parts["q"])
    if "q" in parts:
        _new_query(graph, found, made["q"])
    _replace_stored(graph, found, made.get("k", found.key), made["v"])


def _with_columns(graph: Graph, key: Operand, plain: fx.Node) -> fx.Node:
    """The key with its unrotated columns taken from ``plain``; the others stay what they are."""
    rotated = columns_node(graph, key, key.other)
    order = torch.argsort(torch.tensor(key.columns + key.other)).tolist()
    joined = graph.call(torch.cat, [plain, rotated], dim=-1)
    width = len(order)
    if order == list(range(width)):
        return joined
    start = len(key.columns)
    if order == [*range(start, width), *range(start)]:  # the rotated ones come first, in order
        return graph.call(torch.cat, [rotated, plain], dim=-1)
    raise LayoutError("rotated and other key features alternate")


def _values_from_keys(graph: Graph, found: Found) -> None:
    """V = K M^T + (b_v - M b_k) with M = W_V W_K^-1 [n_kv d_v, n_kv d_h]; solved in fp64."""
    assert found.key_rope is not None
    before = found.key_rope.args[0]
    key, value = operand(graph, before), operand(graph, found.value)  # type: ignore[arg-type]
    assert key.linear is not None and value.linear is not None
    parts = _parts(graph, found, key, value)
    old, module = Old(graph, parts), module_path(found.node)
    inner = int(graph.shape(key.linear.x)[-1])
    n = {p: o.rows.numel() for p, o in parts.items()}
    shifted = old.biased("k") or old.biased("v")
    shapes: dict[str, tuple[int, ...]] = {"k_weight": (n["k"], inner), "v_of_k_weight": (n["v"], n["k"])}
    shapes |= {"k_bias": (n["k"],)} if old.biased("k") else {}
    shapes |= {"v_of_k_bias": (n["v"],)} if shifted else {}
    if "q" in parts:
        shapes["q_weight"] = (n["q"], inner)
        shapes |= {"q_bias": (n["q"],)} if old.biased("q") else {}

    def recipe(given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        read = {p: old.read(given, p) for p in parts}
        (k, k_bias), (v, v_bias) = read["k"], read["v"]
        matrix = torch.linalg.solve(k.double().t(), v.double().t()).t()
        made: dict[str, Any] = {"k_weight": k, "k_bias": k_bias, "v_of_k_weight": matrix}
        if shifted:
            bias = matrix.new_zeros(n["v"]) if v_bias is None else v_bias.double()
            made["v_of_k_bias"] = bias if k_bias is None else bias - matrix @ k_bias.double()
        return made | ({"q_weight": read["q"][0], "q_bias": read["q"][1]} if "q" in parts else {})

    writer = old.writer() if old.biased("v") or not shifted else None

    def inverse(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        assert writer is not None
        k, k_bias, matrix = given["k_weight"].double(), given.get("k_bias"), given["v_of_k_weight"].double()
        v_bias = given.get("v_of_k_bias")
        if v_bias is not None and k_bias is not None:
            v_bias = v_bias.double() + matrix @ k_bias.double()
        rows: dict[str, tuple[Any, Any]] = {"k": (k, k_bias), "v": (matrix @ k, v_bias)}
        if "q" in parts:
            rows["q"] = given["q_weight"].double(), given.get("q_bias")
        return writer(rows)

    new = _targets(graph, old, module, tuple(shapes), shapes, recipe, inverse if writer is not None else None)
    with graph.before(_first(graph, found, "q" in parts), NAME):
        x = latent_node(graph, key.linear.x)
        flat = graph.call(F.linear, x, new["k_weight"], new.get("k_bias"))
        v = _split_heads(graph, graph.call(F.linear, flat, new["v_of_k_weight"], new.get("v_of_k_bias")), value)
        k = _split_heads(graph, flat, key)
        if "q" in parts:
            q = _split_heads(graph, graph.call(F.linear, x, new["q_weight"], new.get("q_bias")), parts["q"])
    found.key_rope.replace_input_with(before, k)  # type: ignore[arg-type]
    if "q" in parts:
        _new_query(graph, found, q)
    _replace_stored(graph, found, found.key, v)


def _unfuse(graph: Graph, found: Found) -> None:
    """Take keys and values out of a fused qkv matmul, so that only they are made again from the latent."""
    raw = operand(graph, _before_rope(found.key, found.key_rope))
    parts = _parts(graph, found, raw, operand(graph, found.value))
    assert raw.linear is not None and "q" in parts
    old, module = Old(graph, parts), module_path(found.node)
    inner = int(graph.shape(raw.linear.x)[-1])
    order = [p for p in "qkv" if p in parts]
    shapes: dict[str, tuple[int, ...]] = {f"{p}_weight": (parts[p].rows.numel(), inner) for p in order}
    shapes |= {f"{p}_bias": (parts[p].rows.numel(),) for p in order if old.biased(p)}

    def recipe(given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        read = {p: old.read(given, p) for p in order}
        made: dict[str, Any] = {f"{p}_weight": w for p, (w, _) in read.items()}
        return made | {f"{p}_bias": b for p, (_, b) in read.items()}

    writer = old.writer()

    def inverse(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        assert writer is not None
        return writer({p: (given[f"{p}_weight"], given.get(f"{p}_bias")) for p in order})

    new = _targets(graph, old, module, tuple(shapes), shapes, recipe, inverse if writer is not None else None)
    with graph.before(_first(graph, found, True), NAME):
        x = latent_node(graph, raw.linear.x)
        made = {
            p: _split_heads(graph, graph.call(F.linear, x, new[f"{p}_weight"], new.get(f"{p}_bias")), parts[p])
            for p in order
        }
    _new_query(graph, found, made["q"])
    if found.key_rope is not None:
        found.key_rope.replace_input_with(found.key_rope.args[0], made["k"])  # type: ignore[arg-type]
        _replace_stored(graph, found, found.key, made["v"])
    else:
        _replace_stored(graph, found, made["k"], made["v"])


def _join(graph: Graph, found: Found) -> None:
    """Keys and values become views of one latent [B, S, n_kv (d_k + d_v)]; only where they are cached."""
    at = stored(graph, found.node.args[1])  # type: ignore[arg-type]
    if at is None:
        return
    with graph.before(at[0], NAME):
        flat = [graph.method("flatten", graph.method("transpose", x, 1, 2), 2) for x in (found.key, found.value)]
        latent = graph.call(torch.cat, flat, dim=-1)
        made, start = [], 0
        for x in (found.key, found.value):
            heads, width = int(graph.shape(x)[1]), int(graph.shape(x)[3])
            part = graph.call(operator.getitem, latent, (Ellipsis, slice(start, start + heads * width)))
            made.append(_heads(graph, part, heads, width))
            start += heads * width
    _replace_stored(graph, found, made[0], made[1])
