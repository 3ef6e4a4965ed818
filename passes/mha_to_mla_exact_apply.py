"""The exact half of mha-to-mla, applied: new weights from old ones by recipes, and what is cached instead."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.graph import Graph, module_path
from latentscan.ir.layout import LayoutError, Linear
from latentscan.ir.mla import Operand, columns_node, latent_node, operand
from latentscan.ir.tokenwise import ON_READ
from latentscan.ir.weights import Recipe
from latentscan.passes.base import Site
from latentscan.passes.mha_to_mla import Found, _heads, _replace_stored, find, stored
from latentscan.passes.mha_to_mla_exact import NAME, ON_READ_RULES, before_rope, is_fused, sides_of


def apply_exact(graph: Graph, site: Site) -> None:
    """Rewrite one site of :func:`plan_exact`."""
    found = find(graph, graph.node(site.anchor))
    if site.rule == "key-value-is-latent":
        _join(graph, found)
        return
    if site.rule in ON_READ_RULES:
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
    if is_fused(graph, found, key, value):
        parts["q"] = operand(graph, before_rope(found.query, found.query_rope))
    return parts


def _new_query(graph: Graph, found: Found, query: fx.Node) -> None:
    user = found.node if found.query_rope is None else found.query_rope
    user.replace_input_with(before_rope(found.query, found.query_rope), query)


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
    raw = operand(graph, before_rope(found.key, found.key_rope))
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
