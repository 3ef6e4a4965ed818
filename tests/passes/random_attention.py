"""Random attention layers: drawn, built as graphs call by call, rewritten, and compared with their definition in fp64.

``check(spec)`` is the harness: a layer is rewritten as a prompt with a cache and as a training step. Every pass must
say something of it, and what comes out (prompt, chunk, single steps, gradients of every weight) must be what the
definition gives, which is written below without any op of ours.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import add, getitem, mul
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, fx

from latentscan.ir.arena import Arena, make_token
from latentscan.ir.eager_attention import canonical_eager
from latentscan.ir.graph import Graph
from latentscan.ir.normalize import ATTENTION
from latentscan.ir.ops.cache import CACHE_APPEND
from latentscan.ir.ops.rope import ROPE
from latentscan.passes.base import Context
from latentscan.passes.pipeline import Program, facts_of, parse, run
from latentscan.tests.ir.building import Building, close

ROWS, CHUNKS = 2, (4, 2, 1)
TOTAL = sum(CHUNKS)
EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Spec:
    """One attention layer and the pipeline for it.

    Attributes:
        layout: how projections are stored: "separate", "stacked" [q; k; v], "conv1d" (stacked, transposed, biased) or
            "grouped" ([queries, key, value] per KV head).
        bias: which of "qkv" have one (all or none in fused layouts).
        rotary: rotated features of a head (even; 0: none); ``rope``: the op's layout.
        norm: RMS norm on queries and keys: "", "head" (per head) or "whole" (over all heads).
        kv_rank: rank of [W_K; W_V], 0: full. condition: of W_K where it is square, 0: as drawn.
        written_out: the attention is matmul, softmax, matmul, as a model writes it, instead of the op.
    """

    hidden: int
    groups: int
    kv_heads: int
    width: int
    value_width: int
    layout: str = "separate"
    bias: str = ""
    rotary: int = 0
    rope: str = "half"
    norm: str = ""
    kv_rank: int = 0
    condition: float = 0.0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    written_out: bool = False
    pipeline: str = "mha-to-mla{full_rope=auto},latent-cache"
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.groups * self.kv_heads

    @property
    def scale(self) -> float:
        return 0.7 * self.width**-0.5


PIPELINES = (
    "mha-to-mla,latent-cache", "mha-to-mla,latent-cache", "mha-to-mla", "latent-cache",
    "mha-to-mla,mla-mm-split,latent-cache",
)  # fmt: skip
OPTIONS = ("{full_rope=input}", "{full_rope=keys,max_condition=1000}", "")


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """A layer of any family, or of none: MHA, GQA and MQA with every layout, bias, norm, rotation and structure."""
    groups, kv_heads = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (4, 1), (3, 2)]))
    width = draw(st.sampled_from([2, 4, 6]))
    value_width = draw(st.sampled_from([width, width, 3]))
    square = draw(st.booleans())
    hidden = kv_heads * width if square and kv_heads * width > 1 else draw(st.integers(3, 20))
    layout = draw(st.sampled_from(["separate", "separate", "stacked", "conv1d", "grouped"]))
    bias = (
        "".join(p for p in "qkv" if draw(st.booleans())) if layout == "separate" else draw(st.sampled_from(["", "qkv"]))
    )
    rotary = draw(st.sampled_from([0, 0, width, width, 2]))
    norm, kv_rank = draw(st.sampled_from(["", "", "", "head", "whole"])), draw(st.sampled_from([0, 0, 0, 1, 2, 5]))
    # Left to chance, keys that have an inverse and partial rotation that saves something are rare.
    kind = draw(st.sampled_from(["any", "any", "keys", "partial"]))
    if kind != "any":
        groups, kv_heads, width, norm, kv_rank = 1, max(kv_heads, 2), max(width, 4), "", 0
        value_width, hidden, rotary = width, kv_heads * width, width if kind == "keys" else 2
    passes = draw(st.sampled_from(PIPELINES))
    option = draw(st.sampled_from([*["{full_rope=auto}"] * 3, *OPTIONS]))
    pipeline = passes.replace("mha-to-mla", "mha-to-mla" + option)
    pipeline += draw(st.sampled_from(["", ",mla-absorb{when=always}"]))
    window, softcap = draw(st.sampled_from([None, None, 1, 3])), draw(st.sampled_from([None, None, 2.0]))
    sinks, alibi = draw(st.sampled_from([False, False, True])), draw(st.sampled_from([False, False, True]))
    return Spec(
        hidden,
        groups,
        kv_heads,
        width,
        value_width,
        layout,
        "qkv" if layout == "conv1d" else bias,
        rotary,
        draw(st.sampled_from(["half", "interleaved", "interleaved-to-half"])),
        norm=norm,
        kv_rank=kv_rank,
        condition=draw(st.sampled_from([5.0, 50.0] if kind == "keys" else [0.0, 5.0, 50.0])),
        window=window,
        softcap=softcap,
        sinks=sinks,
        alibi=alibi,
        written_out=draw(st.booleans()) and not sinks and groups == 1,
        pipeline=pipeline,
        seed=draw(st.integers(0, 1 << 20)),
    )


# -- weights -----------------------------------------------------------------------------------------------------------


def weights_of(spec: Spec) -> dict[str, Tensor]:
    """Parts by name: wq [n_h d, D], wk, wv, their biases bq, bk, bv, norms gq, gk, sinks, alibi slopes, frequencies."""
    g = torch.Generator().manual_seed(spec.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    d, n = (
        spec.hidden,
        {"q": spec.heads * spec.width, "k": spec.kv_heads * spec.width, "v": spec.kv_heads * spec.value_width},
    )
    made = {f"w{p}": draw(rows, d) / math.sqrt(d) for p, rows in n.items()}
    if spec.condition and n["k"] == d:
        u, _, v = torch.linalg.svd(made["wk"])
        made["wk"] = u @ torch.diag(torch.logspace(0, -math.log10(spec.condition), d, dtype=torch.float64)) @ v
    if spec.kv_rank:
        both = draw(n["k"] + n["v"], spec.kv_rank) @ draw(spec.kv_rank, d) / math.sqrt(d * spec.kv_rank)
        made["wk"], made["wv"] = both[: n["k"]], both[n["k"] :]
    made |= {f"b{p}": draw(n[p]) for p in spec.bias}
    if spec.norm:
        made |= {f"g{p}": 1 + 0.3 * draw(spec.width if spec.norm == "head" else n[p]) for p in "qk"}
    made |= {"sinks": draw(spec.heads)} if spec.sinks else {}
    made |= {"slopes": 0.3 * draw(spec.heads).abs()} if spec.alibi else {}
    made |= {"inv_freq": draw(spec.rotary // 2).abs() + 0.1} if spec.rotary else {}
    return made


def _order(spec: Spec) -> Tensor | None:
    """Rows of [q; k; v] in the order in which a fused weight has them; None if there is no fused weight."""
    if spec.layout == "separate":
        return None
    sizes = [spec.groups * spec.width, spec.width, spec.value_width]
    rows = torch.arange(spec.kv_heads * sum(sizes)).split([spec.kv_heads * s for s in sizes])
    if spec.layout != "grouped":
        return torch.cat(rows)
    return torch.cat([r.view(spec.kv_heads, -1) for r in rows], 1).flatten()


# -- the definition ----------------------------------------------------------------------------------------------------


def definition(spec: Spec, w: dict[str, Tensor], x: Tensor, positions: Tensor, padding: Tensor) -> Tensor:
    """softmax(mask(softcap(scale q k) - slopes distance)) v, term by term; x [B, T, D] -> [B, H, T, d_v]."""
    length = x.shape[1]

    def project(p: str, heads: int, width: int) -> Tensor:
        y = torch.einsum("btd,nd->btn", x, w[f"w{p}"])
        y = y + w[f"b{p}"] if f"b{p}" in w else y
        if spec.norm == "whole" and p in "qk":
            y = w[f"g{p}"] * y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-6)
        y = y.view(ROWS, length, heads, width).transpose(1, 2)
        if spec.norm == "head" and p in "qk":
            y = w[f"g{p}"] * y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-6)
        return _turned(spec, w, y, positions) if spec.rotary and p in "qk" else y

    q = project("q", spec.heads, spec.width)
    k = project("k", spec.kv_heads, spec.width).repeat_interleave(spec.groups, 1)
    v = project("v", spec.kv_heads, spec.value_width).repeat_interleave(spec.groups, 1)
    scores = spec.scale * torch.einsum("bhid,bhjd->bhij", q, k)
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    if spec.alibi:
        scores = scores + w["slopes"][:, None, None] * j
    seen = (j <= i) & (padding[:, None, None, :] != 0)
    if spec.window is not None:
        seen = seen & (i - j < spec.window)
    weights = torch.where(seen, scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    if spec.sinks:
        total = total + w["sinks"].exp()[:, None, None]
    return torch.einsum("bhij,bhjd->bhid", weights / torch.where(total > 0, total, 1.0), v)  # padding sees nothing


def _turned(spec: Spec, w: dict[str, Tensor], y: Tensor, positions: Tensor) -> Tensor:
    """Pairs of features turned by position times frequency: complex numbers."""
    r, half = spec.rotary, spec.rotary // 2
    turn = torch.polar(torch.ones((), dtype=torch.float64), positions[:, None, :, None].double() * w["inv_freq"])
    first, second = (y[..., :half], y[..., half:r]) if spec.rope == "half" else (y[..., 0:r:2], y[..., 1:r:2])
    z = torch.complex(first, second) * turn
    if spec.rope == "interleaved":
        out = torch.stack((z.real, z.imag), -1).flatten(-2)
    else:
        out = torch.cat((z.real, z.imag), -1)
    return torch.cat((out, y[..., r:]), -1)


# -- the graph ---------------------------------------------------------------------------------------------------------


class Layer:
    """The layer as a graph; ``cached``: it continues a cache."""

    def __init__(self, spec: Spec, weights: dict[str, Tensor], *, cached: bool) -> None:
        self.spec, self.make = spec, Building()
        make = self.make
        self.graph = make.graph
        keys = "p+s" if cached else "s"
        token = make.token() if cached else None
        x = make.input("x", "b", "s", spec.hidden)
        positions = make.input("positions", "b", "s", dtype=torch.int64)
        padding = make.input("padding", "b", keys, dtype=torch.bool)
        # What only a mask of the model's own says: ALiBi, and the causal triangle of an attention that is written out.
        self.dense = spec.alibi or spec.written_out
        mask = None
        if self.dense:
            rows, heads = "b" if spec.written_out else 1, spec.heads if spec.alibi else 1
            mask = make.input("mask", rows, heads, "s", keys)
        self.paths = self._weights(weights)
        q, k, v = self._project(x)
        if spec.norm == "head":
            q, k = self._norm(q, "gq"), self._norm(k, "gk")
        if spec.rotary:
            column = make.method("double", make.call(getitem, positions, (Ellipsis, None)))
            turned = make.call(mul, column, self.nodes["inv_freq"])
            turned = make.call(torch.cat, (turned, turned), dim=-1)
            tables = make.method("cos", turned), make.method("sin", turned)
            q, k = self._rotate(q, *tables), self._rotate(k, *tables)
        new = []
        if token is not None:
            both = make.call(CACHE_APPEND.op, token, [k, v], [2, 2])
            full = make.call(getitem, both, 0)
            k, v = (make.call(getitem, full, i) for i in (0, 1))
            new = [make.call(getitem, both, 1)]
        if spec.written_out:
            out = self._written_out(q, k, v, mask)
        else:
            structure = (mask, padding, self.nodes.get("sinks"))
            options = {"window": spec.window, "scale": spec.scale, "softcap": spec.softcap}
            out = make.call(ATTENTION, q, k, v, *structure, kind="causal", **options)
        make.output(out, *new)
        if spec.written_out:
            canonical_eager(self.graph)
            self.graph.clean()

    def _weights(self, weights: dict[str, Tensor]) -> list[str]:
        order = _order(self.spec)
        stored = {n: t for n, t in weights.items() if order is None or n[0] not in "wb"}
        if order is not None:
            fused = torch.cat([weights[f"w{p}"] for p in "qkv"])[order]
            stored["wqkv"] = fused.t() if self.spec.layout == "conv1d" else fused
            if self.spec.bias:
                stored["bqkv"] = torch.cat([weights[f"b{p}"] for p in "qkv"])[order]
        values = {n: t.clone().contiguous() for n, t in stored.items()}
        self.nodes = {n: self.make.weight(f"attn.{n}", t) for n, t in values.items()}
        return list(values)

    def _project(self, x: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        spec, make, nodes = self.spec, self.make, self.nodes
        sizes = {
            "q": (spec.heads, spec.width),
            "k": (spec.kv_heads, spec.width),
            "v": (spec.kv_heads, spec.value_width),
        }
        shape = [make.method("size", x, 0), make.method("size", x, 1)]
        if spec.layout == "separate":
            flat = {p: make.call(F.linear, x, nodes[f"w{p}"], nodes.get(f"b{p}")) for p in "qkv"}
        elif spec.layout == "grouped":
            y = make.call(F.linear, x, nodes["wqkv"], nodes.get("bqkv"))
            parts = [spec.groups * spec.width, spec.width, spec.value_width]
            y = make.method("view", y, *shape, spec.kv_heads, sum(parts))
            split = make.method("split", y, parts, -1)
            flat = {p: make.method("flatten", make.call(getitem, split, i), 2) for i, p in enumerate("qkv")}
        else:
            if spec.layout == "conv1d":
                y = make.call(torch.addmm, nodes["bqkv"], make.method("view", x, -1, spec.hidden), nodes["wqkv"])
                y = make.method("view", y, *shape, sum(h * n for h, n in sizes.values()))
            else:
                y = make.call(F.linear, x, nodes["wqkv"], nodes.get("bqkv"))
            split = make.method("split", y, [h * n for h, n in sizes.values()], -1)
            flat = {p: make.call(getitem, split, i) for i, p in enumerate("qkv")}
        if spec.norm == "whole":
            flat |= {p: self._norm(flat[p], f"g{p}") for p in "qk"}
        made = [make.method("transpose", make.method("view", flat[p], *shape, *sizes[p]), 1, 2) for p in "qkv"]
        return made[0], made[1], made[2]

    def _norm(self, y: fx.Node, gamma: str) -> fx.Node:
        make = self.make
        square = make.call(torch.mean, make.method("pow", y, 2), -1, keepdim=True)
        inverse = make.call(torch.rsqrt, make.call(add, square, 1e-6))
        return make.call(mul, self.nodes[gamma], make.call(mul, y, inverse))

    def _rotate(self, y: fx.Node, cos: fx.Node, sin: fx.Node) -> fx.Node:
        make, r = self.make, self.spec.rotary
        if r == self.spec.width:
            return make.call(ROPE.op, y, cos, sin, layout=self.spec.rope)
        first, rest = (make.call(getitem, y, (Ellipsis, s)) for s in (slice(0, r), slice(r, None)))
        return make.call(torch.cat, [make.call(ROPE.op, first, cos, sin, layout=self.spec.rope), rest], dim=-1)

    def _written_out(self, q: fx.Node, k: fx.Node, v: fx.Node, mask: Any) -> fx.Node:
        make, cap = self.make, self.spec.softcap
        scores = make.call(mul, make.call(torch.matmul, q, make.method("transpose", k, 2, 3)), self.spec.scale)
        if cap:
            scores = make.call(mul, make.call(torch.tanh, make.call(torch.div, scores, cap)), cap)
        scores = make.call(add, scores, mask)
        weights = make.call(F.dropout, make.call(F.softmax, scores, dim=-1), 0.0, False)
        return make.call(torch.matmul, weights, v)

    def mask(self, weights: dict[str, Tensor], padding: Tensor, past: int, new: int) -> Tensor:
        """The dense mask [B or 1, H or 1, S, T] of one call."""
        i, j = torch.arange(past, past + new)[:, None], torch.arange(past + new)[None, :]
        made = torch.zeros(1, 1, new, past + new, dtype=torch.float64)
        if self.spec.alibi:
            made = weights["slopes"][:, None, None] * j.double()[None] + made
        if self.spec.written_out:
            seen = (j <= i) & padding[:, None, None, : past + new]
            seen = seen & (i - j < self.spec.window) if self.spec.window is not None else seen
            made = made.masked_fill(~seen, -1e30)
        return made


# -- the harness -------------------------------------------------------------------------------------------------------

Sabotage = Callable[[Graph], None]


def tolerance(spec: Spec, program: Program) -> float:
    """fp64 rounding over the longest sums, through a norm and a softmax; times cond(W_K) where V comes from K."""
    sites = [s for r in program.records for s in r.sites if s.rule == "keys-are-latent"]
    condition = max([1.0, *(_condition(s.note) for s in sites)])
    return 400 * math.sqrt(max(spec.hidden, spec.heads * spec.width)) * EPS * condition


def _condition(note: str) -> float:
    return float(note.split("cond(W_K) = ")[1].split(",")[0])


def check(spec: Spec, sabotage: Sabotage | None = None) -> Program:
    """AssertionError unless the rewritten layer is the layer; what the passes said otherwise."""
    weights = weights_of(spec)
    g = torch.Generator().manual_seed(spec.seed + 1)
    x = torch.randn(ROWS, TOTAL, spec.hidden, generator=g, dtype=torch.float64)
    positions = torch.arange(TOTAL)[None] + torch.randint(0, 9, (ROWS, 1), generator=g)
    padding = torch.ones(ROWS, TOTAL, dtype=torch.bool)
    padding[0, : int(torch.randint(0, 3, (), generator=g))] = False  # on the left: a row's first queries see nothing
    want = definition(spec, weights, x, positions, padding)
    layer = Layer(spec, weights, cached=True)
    passes = parse(spec.pipeline)
    program = run(layer.graph.copy(), passes, Context(own_parameters=True), strict=False).forced(True)
    for record in program.records:
        assert record.sites or record.refusals, f"{record.name} says nothing of {spec}"
        assert all(r.rule and r.reason and r.remedy for r in record.refusals)
    graph = program.graph
    assert graph is not None
    if sabotage is not None:
        sabotage(graph)
    bound = tolerance(spec, program)
    _check_cached(spec, layer, program, weights, (x, positions, padding), want, bound)
    _check_training(spec, program, weights, (x, positions, padding), bound, sabotage)
    return program


def _check_cached(
    spec: Spec, layer: Layer, program: Program, weights: Any, inputs: Any, want: Tensor, bound: float
) -> None:
    """Prompt, chunk and steps, and the bytes that are held."""
    x, positions, padding = inputs
    arena = Arena()
    token, past = make_token(arena, 0), 0
    for new in CHUNKS:
        end = past + new
        given = {"x": x[:, past:end].contiguous(), "positions": positions[:, past:end]}
        given |= {"padding": padding[:, :end], "token": token}
        if layer.dense:
            given["mask"] = layer.mask(weights, padding, past, new)
        with torch.no_grad():
            out, token = layer.make.run(program.graph, **given)
        real = padding[:, past:end, None].expand(-1, -1, spec.value_width)[:, None].expand(-1, spec.heads, -1, -1)
        error = close(out[real], want[:, :, past:end][real])
        assert error < bound, f"{new} tokens after {past}: {error:.1e} > {bound:.1e}: {spec}"
        past = end
    assert arena.bytes_held() == ROWS * TOTAL * _bytes_expected(spec, program), spec


def _bytes_expected(spec: Spec, program: Program) -> int:
    """Bytes a token by the facts of the passes: eight a number, four a position id."""
    sites = {r.name: s for r in program.records for s in r.sites}
    if "latent-cache" not in sites:
        return 8 * spec.kv_heads * (spec.width + spec.value_width)
    made = sites.get("mha-to-mla")
    elements = sites["latent-cache"].facts["after"]
    if made is None:
        return 8 * elements
    assert elements == made.facts["d_c"] + made.facts["d_r"], f"{made.note}; {sites['latent-cache'].note}: {spec}"
    on_read = made.rule in ("keys-are-latent", "input-made-again-on-read")
    return 8 * elements - (4 if on_read and made.facts["d_r"] else 0)


def _check_training(
    spec: Spec, planned: Program, weights: dict[str, Tensor], inputs: Any, bound: float, sabotage: Sabotage | None
) -> None:
    """One training step with the decision of the cached graph: output and the gradient of every weight."""
    x, positions, padding = inputs
    layer = Layer(spec, weights, cached=False)
    context = Context(facts=facts_of(planned.records), own_parameters=True)
    program = run(layer.graph.copy(), parse(spec.pipeline), context, strict=False).forced(False)
    graph = program.graph
    assert graph is not None
    if sabotage is not None:
        sabotage(graph)
    real = padding[:, None, :, None].expand(ROWS, spec.heads, TOTAL, spec.value_width)
    seed = torch.randn(real.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)[real]
    leaves = {n: t.clone().requires_grad_() for n, t in weights.items()}
    (definition(spec, leaves, x, positions, padding)[real] * seed).sum().backward()
    expected = _stored(spec, {n: t.grad if t.grad is not None else torch.zeros_like(t) for n, t in leaves.items()})

    make = layer.make
    old = {holder: value.clone().requires_grad_() for holder, value in make.values.items()}
    by_path = {w.path: holder for holder, w in make.graph.weights.items()}
    new: dict[str, Tensor] = {}
    for added in graph.added:
        with torch.no_grad():
            held = old | new
            sources = [held[graph.weight_at(p).placeholder] for p in added.recipe.sources]
            made = added.recipe.function(*sources)[added.index]
        new[added.placeholder] = made.clone().requires_grad_()
    given = {"x": x, "positions": positions, "padding": padding}
    if layer.dense:
        given["mask"] = layer.mask(weights, padding, 0, TOTAL)
    values = [
        new[n.name] if n.name in new else old[n.name] if n.name in old else given[n.name]
        for n in graph.nodes
        if n.op == "placeholder"
    ]
    graph.module.recompile()
    (out,) = graph.module.forward(*values)
    want = definition(spec, weights, x, positions, padding)
    assert close(out[real], want[real]) < bound, f"training: {close(out[real], want[real]):.1e}: {spec}"
    (out[real] * seed).sum().backward()
    got = {n: old[by_path[f"attn.{n}"]].grad for n in layer.paths}
    _check_gradients(spec, graph, got, new, expected, weights, bound)


def _stored(spec: Spec, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parts as they are stored: fused, in order, transposed."""
    order = _order(spec)
    if order is None:
        return values
    found = {n: t for n, t in values.items() if n[0] not in "wb"}
    fused = torch.cat([values[f"w{p}"] for p in "qkv"])[order]
    found["wqkv"] = fused.t() if spec.layout == "conv1d" else fused
    if spec.bias:
        found["bqkv"] = torch.cat([values[f"b{p}"] for p in "qkv"])[order]
    return found


def _check_gradients(
    spec: Spec, graph: Graph, got: dict[str, Tensor | None], new: dict[str, Tensor], expected: dict[str, Tensor],
    weights: dict[str, Tensor], bound: float,
) -> None:  # fmt: skip
    """Gradients of old weights that are still read, and of the new ones by the chain rule.

    A new weight t that the old ones w are made of, w = f(t), has dL/dt = (df/dt)^T dL/dw: the recipe's inverse f is
    differentiated at t. Recipes without an inverse are followed the other way: dL/dw = (dt/dw)^T dL/dt.
    """
    scale = max(float(t.abs().max()) for t in expected.values())
    limit = 50 * bound * max(scale, 1e-3)
    for name, grad in got.items():
        if name in ("slopes", "inv_freq"):
            continue  # masks and tables are made outside
        owners = [a for a in graph.added if f"attn.{name}" in a.recipe.sources]
        if not owners:
            have = torch.zeros_like(expected[name]) if grad is None else grad
            assert float((have - expected[name]).abs().max()) < limit, f"gradient of {name}: {spec}"
    for recipe in {id(a.recipe): a.recipe for a in graph.added}.values():
        targets = [next(a.placeholder for a in graph.added if a.path == t) for t in recipe.targets]
        if recipe.inverse is None or any(s.rsplit(".", 1)[1] not in expected for s in recipe.sources):
            continue
        at = [new[t].detach().clone().requires_grad_() for t in targets]
        back = recipe.inverse(*at)
        dl_dw = [expected[s.rsplit(".", 1)[1]] for s in recipe.sources]
        want = torch.autograd.grad(back, at, dl_dw, allow_unused=True)
        for target, w in zip(targets, want, strict=True):
            have = new[target].grad
            have = torch.zeros_like(new[target]) if have is None else have
            w = torch.zeros_like(have) if w is None else w
            error = float((have - w).abs().max())
            assert error < limit * max(1.0, float(w.abs().max()) / scale), f"gradient of {target}: {error:.1e}: {spec}"


def replaced(spec: Spec, **fields: Any) -> Spec:
    return dataclasses.replace(spec, **fields)
