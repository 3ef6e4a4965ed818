"""Where mha-to-mla's low-rank form fits: rotated keys that are linear in the layer's input, and their old weights."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.graph import Graph, module_path
from latentscan.ir.layout import LayoutError, Linear, linear_of
from latentscan.ir.mla import Operand, argument, attentions, computed_weight, latent_source, operand, same_latent
from latentscan.ir.ops.rope import ROPE as ROPE_INFO
from latentscan.passes import lowrank
from latentscan.passes.base import Context, Refusal
from latentscan.passes.mha_to_mla import Found, _already_latent, find

ROPE = ROPE_INFO.op


@dataclass(frozen=True)
class Place:
    """One attention that can take the low-rank form.

    Attributes:
        query, key, value: before rotation, as linear maps.
        output: the output projection, where it reads nothing but the heads in order, else None.
        frequencies: radians per token of each pair, None if unknown. turn: factor of the cosine and sine tables.
    """

    module: str
    found: Found
    query: Operand
    key: Operand
    value: Operand
    output: Linear | None
    frequencies: torch.Tensor | None
    turn: float

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """heads, kv_heads, d, d_v."""
        (kv_heads, width), heads = self.key.rows.shape, self.query.rows.shape[0]
        return int(heads), int(kv_heads), int(width), int(self.value.rows.shape[1])


def place_of(graph: Graph, node: fx.Node, module: str, context: Context) -> Place | Refusal:
    """What the low-rank form needs to know of an attention, or why it does not apply. Raises LayoutError."""
    found = find(graph, node)
    parts = _already_latent(graph, found, module) or _rotary_parts(graph, found, module)
    if isinstance(parts, Refusal):
        return parts
    query, key, value = parts
    if not context.own_parameters:
        return Refusal(
            module, "new-parameters",
            "the low-rank form needs new Parameters, and an optimiser may hold the old ones",
            "use latentscan.wrap(model, ...) before the optimiser is built",
        )  # fmt: skip
    for part in (query, key):
        latent_source(graph, part.linear.x)  # type: ignore[union-attr]
    frequencies, turn = frequencies_of(graph, found)
    return Place(module, found, query, key, value, output_of(graph, node), frequencies, turn)


def frequencies_of(graph: Graph, found: Found) -> tuple[torch.Tensor | None, float]:
    """Radians per token of each rotary pair, from the buffer that the cosine table is made of (None if unknown), and
    the constant factor that the table has."""
    rope = found.key_rope
    assert rope is not None
    pairs = int(graph.shape(rope.args[1])[-1]) // 2  # type: ignore[arg-type]
    stack: list[tuple[Any, float]] = [(rope.args[1], 1.0)]
    seen = set()
    while stack:
        current, factor = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        weight = graph.weight(current)
        if weight is not None and weight.path.endswith("inv_freq") and weight.value.numel() == pairs:
            return weight.value.detach().reshape(pairs).double(), factor
        if current.target in (torch.cos, "cos"):
            scale = factor  # inside the cosine a factor is a change of frequency
            stack.extend((n, scale) for n in current.all_input_nodes)
            continue
        if current.target in (operator.mul, torch.mul, "mul") and _outside_cosine(current):
            numbers = [float(a) for a in current.args if isinstance(a, (int, float))]
            factor *= numbers[0] if numbers else 1.0
        stack.extend((n, factor) for n in current.all_input_nodes)
    return None, 1.0


def _outside_cosine(node: fx.Node) -> bool:
    """Whether a cosine lies above a value: then its factors scale the table."""
    stack, seen = list(node.all_input_nodes), set()
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.target in (torch.cos, "cos"):
            return True
        stack.extend(current.all_input_nodes)
    return False


def output_of(graph: Graph, attention: fx.Node) -> Linear | None:
    """The linear map that reads an attention's heads in their order and nothing else, or None."""
    node, turned = attention, False
    while len(node.users) == 1:
        user = next(iter(node.users))
        linear = linear_of(graph, user)
        if linear is not None:
            plain = graph.weight(linear.weight) is not None
            return linear if turned and linear.x is node and plain else None
        if user.op != "call_method":
            return None
        if user.target == "transpose" and set(user.args[1:]) in ({1, 2}, {-3, -2}) and not turned:
            turned = True
        elif user.target not in ("contiguous", "reshape", "view", "flatten"):
            return None
        node = user
    return None


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
            why = (
                ": a norm on queries or keys is not linear (it divides each head by a number of its own for every "
                "token, which would be cached beside the latent, and which absorption cannot take into the query)"
                if normed
                else ""
            )
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


def _is_normed(node: fx.Node, depth: int = 6) -> bool:
    """Whether an RMS or layer norm stands just above a value."""
    name = str(getattr(node.target, "__name__", node.target))
    if "rsqrt" in name or "norm" in name:
        return True
    if depth == 0 or node.op == "placeholder" or node.target in (F.linear, torch._C._nn.linear, torch.addmm):
        return False
    return any(_is_normed(n, depth - 1) for n in node.all_input_nodes)


# -- old weights ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sources:
    """The old weights that new ones are made from: their paths, and how to read them.

    Attributes:
        paths: of the weights. at: part -> (index of its weight, of its bias or None, whether it is stored [in, out]).
        rows: part -> [heads, n] rows of that weight.
    """

    paths: list[str] = field(default_factory=list)
    at: dict[str, tuple[int, int | None, bool]] = field(default_factory=dict)
    rows: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, place: Place, *, query: bool, output: bool) -> Sources:
        made = cls()
        parts = {"k": place.key, "v": place.value} | ({"q": place.query} if query else {})
        for part, of in parts.items():
            made._add(graph, part, of.linear)
            made.rows[part] = of.rows
        if output and place.output is not None:
            made._add(graph, "o", place.output, bias=False)
        return made

    def _add(self, graph: Graph, part: str, linear: Linear | None, bias: bool = True) -> None:
        assert linear is not None
        index: list[int | None] = []
        for node in (linear.weight, linear.bias if bias else None):
            weight = graph.weight(node) if node is not None else None
            if weight is None:
                index.append(None)
                continue
            if weight.path not in self.paths:
                self.paths.append(weight.path)
            index.append(self.paths.index(weight.path))
        self.at[part] = (index[0], index[1], linear.transposed)  # type: ignore[assignment]

    def biased(self, part: str) -> bool:
        return self.at[part][1] is not None

    def matrix(self, given: Sequence[torch.Tensor], part: str) -> torch.Tensor:
        """[heads, n, D] of a projection; [D, heads d_v] of the output."""
        index, _, transposed = self.at[part]
        w = given[index].t() if transposed else given[index]
        return w if part == "o" else w[self.rows[part].to(w.device)]

    def bias(self, given: Sequence[torch.Tensor], part: str) -> torch.Tensor:
        """[heads, n]."""
        index = self.at[part][1]
        assert index is not None
        return given[index][self.rows[part].to(given[index].device)]

    def values(self, graph: Graph) -> list[torch.Tensor]:
        """The weights as they are now."""
        found = (graph.weight_at(path) for path in self.paths)
        return [w.value.detach() for w in found if w is not None]


def heads_of(place: Place, sources: Sources, given: Sequence[torch.Tensor]) -> lowrank.Heads:
    """The weights of an attention in the algebra's form, in fp64."""

    def joined(part: str) -> torch.Tensor:
        w = sources.matrix(given, part).double()
        b = sources.bias(given, part).double() if sources.biased(part) else w.new_zeros(w.shape[:-1])
        return torch.cat([w, b[..., None]], -1)

    output = None
    if "o" in sources.at:
        o = sources.matrix(given, "o").double().unflatten(1, (place.sizes[0], -1)).transpose(0, 1)  # [heads, D, d_v]
        output = o.mT @ o
    scale = float(argument(place.found.node, "scale"))  # type: ignore[arg-type]
    return lowrank.Heads(joined("q"), joined("k"), joined("v"), output, place.frequencies, scale, place.turn)


def inputs_of(moments: Any, device: torch.device) -> lowrank.Inputs:
    plain = lowrank.joined(moments.covariance, moments.mean).to(device)
    if moments.attended is None:
        return lowrank.Inputs(plain, plain)
    attended = lowrank.joined(moments.attended, moments.attended_mean).to(device)
    return lowrank.Inputs(plain, attended, moments.distances.to(device))


# -- calibration ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """Where an attention's statistics are taken.

    Attributes:
        module: whose input is measured: the key projection.
        weigh: x [B, L, D] -> attention that each token receives [B, L], and attention mass by distance [heads, L];
            None where the attention cannot be computed from x alone.
        mark: text that changes when the weights do.
    """

    module: str
    weigh: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None
    mark: str


def calibration_points(graph: Graph) -> dict[str, Point]:
    """Attention module -> the point whose input is to be measured."""
    points = {}
    for node in attentions(graph):
        found = find(graph, node)
        if found.key_rope is None:
            continue
        try:
            key = operand(graph, found.key_rope.args[0])  # type: ignore[arg-type]
            module = module_path(node)
            place = place_of(graph, node, module, Context(own_parameters=True))
        except LayoutError:
            continue
        if key.linear is not None:
            weigh, mark = None, ""
            if isinstance(place, Place):
                weigh, mark = _weigher(graph, place)
            points[module] = Point(module_path(key.linear.node), weigh, mark)
    return points


def _weigher(graph: Graph, place: Place) -> tuple[Any, str]:
    sources = Sources.of(graph, place, query=True, output=False)
    given = sources.values(graph)
    mark = "" if any(w.is_meta for w in given) else "|".join(f"{float(w.double().sum()):.17g}" for w in given)
    node, query, key = place.found.node, place.query.linear, place.key.linear
    window, kind = argument(node, "window"), argument(node, "kind")
    assert query is not None and key is not None
    if place.frequencies is None or not same_latent(query, key) or not isinstance(window, (int, type(None))):
        return None, mark
    if kind != "causal":
        return None, mark
    softcap, scale = argument(node, "softcap"), float(argument(node, "scale"))  # type: ignore[arg-type]
    frequencies, turn = place.frequencies, place.turn

    def project(x: torch.Tensor, part: str) -> torch.Tensor:
        y = torch.einsum("ld,hnd->hln", x, sources.matrix(given, part))
        y = y + sources.bias(given, part)[:, None] if sources.biased(part) else y
        angles = torch.arange(x.shape[0], dtype=torch.float64, device=x.device)[:, None] * frequencies.to(x.device)
        cos, sin = (angles.cos() * turn).to(x.dtype), (angles.sin() * turn).to(x.dtype)
        first, second = y.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def weigh(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = x.shape[1]
        at = torch.arange(length, device=x.device)
        distance = at[:, None] - at
        seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        received, mass = [], torch.zeros(place.sizes[0], length, dtype=torch.float64, device=x.device)
        for row in x:  # one at a time: [heads, L, L] is the largest thing here
            q, k = project(row, "q"), project(row, "k")
            scores = q @ k.repeat_interleave(q.shape[0] // k.shape[0], 0).mT * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            p = scores.float().masked_fill(~seen, float("-inf")).softmax(-1).double()
            received.append(p.sum((0, 1)) / q.shape[0])
            mass.index_add_(1, distance[seen], p[:, seen])
        return torch.stack(received), mass

    return weigh, mark
