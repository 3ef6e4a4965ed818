"""Layout tracing against a direct numpy index computation, and views of weights against index_select."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from latentscan.ir.layout import (
    Features,
    LayoutError,
    as_slice,
    check_rows,
    is_layout,
    linear_of,
    rows_of,
    strip_layout,
    trace,
)
from latentscan.tests.ir.building import Building, random

B, S = 3, 4  # of the numpy side; the graph's are symbols


def factors(n: int) -> list[tuple[int, int]]:
    return [(a, n // a) for a in range(1, n + 1) if n % a == 0]


@dataclass
class Both:
    """One value twice: as a node, and as an array of labels (source, batch, token, feature).

    Attributes:
        dims: "b", "s", or the size of each dimension.
    """

    node: fx.Node
    labels: np.ndarray
    dims: list[Any]


class Chain:
    """Layout steps, on a graph and in numpy at once. Each picks its own details from ``data``."""

    def __init__(self, data: st.DataObject) -> None:
        self.data, self.make = data, Building()
        self.sizes: dict[str, fx.Node] = {}
        self.sources: list[tuple[fx.Node, int]] = []

    def pick(self, options: Any) -> Any:
        return self.data.draw(st.sampled_from(list(options)))

    def source(self, name: str, form: str, features: int) -> Both:
        """``form``: "bsf", "tf" (tokens flattened), "1sf" (one row for the whole batch), "bhsd" (apart already)."""
        token = np.indices((B, S, features))
        labels = np.stack([np.full((B, S, features), len(self.sources)), *token], -1)
        number = len(self.sources)
        if form == "tf":
            with_symbols = self.make.input(name, "b", "s", features)  # the sizes have to come from somewhere
            node = self.make.method("view", with_symbols, -1, features)
            node = self.make.method("mul", node, 2)  # no layout: the source
            labels, dims = labels.reshape(B * S, features, 4), ["bs", features]
            self.seen(with_symbols)
        elif form == "1sf":
            node, dims = self.make.input(name, 1, "s", features), [1, "s", features]
            labels = labels[:1]
        elif form == "bhsd":
            heads, width = self.pick(factors(features))
            node = self.make.input(name, "b", heads, "s", width)
            labels = labels.reshape(B, S, heads, width, 4).transpose(0, 2, 1, 3, 4)
            dims = ["b", heads, "s", width]
        else:
            node, dims = self.make.input(name, "b", "s", features), ["b", "s", features]
        self.sources.append((node, features))
        assert labels[..., 0].max() == number
        return Both(node, labels, dims)

    def seen(self, node: fx.Node) -> None:
        self.sizes = {"b": self.make.method("size", node, 0), "s": self.make.method("size", node, 1)}

    def size(self, dim: Any) -> Any:
        return self.sizes.get(dim, dim)

    def reshape(self, x: Both, dims: list[Any]) -> Both:
        number = {"b": B, "s": S, "bs": B * S}
        labels = x.labels.reshape([number.get(d, d) for d in dims] + [4])
        shape = [-1 if d == "bs" else self.size(d) for d in dims]
        name = self.pick(["view", "reshape"])
        node = self.make.method("contiguous", x.node) if name == "view" else x.node
        return Both(self.make.method(name, node, *shape), labels, dims)

    def features(self, x: Both) -> list[int]:
        return [i for i, d in enumerate(x.dims) if isinstance(d, int)]

    # -- steps, all of which leave tokens alone ----------------------------------------------------------------------

    def split_dim(self, x: Both) -> Both:
        dim = self.pick(self.features(x))
        a, b = self.pick(factors(x.dims[dim]))
        dims = [*x.dims[:dim], a, b, *x.dims[dim + 1 :]]
        if self.data.draw(st.booleans()):
            return self.reshape(x, dims)
        labels = x.labels.reshape(*x.labels.shape[:dim], a, b, *x.labels.shape[dim + 1 :])
        return Both(self.make.method("unflatten", x.node, dim, (a, -1)), labels, dims)

    def merge_dims(self, x: Both) -> Both:
        pairs = [i for i in self.features(x)[:-1] if isinstance(x.dims[i + 1], int)]
        if not pairs:
            return x
        i = self.pick(pairs)
        dims = [*x.dims[:i], x.dims[i] * x.dims[i + 1], *x.dims[i + 2 :]]
        labels = x.labels.reshape(*x.labels.shape[:i], dims[i], *x.labels.shape[i + 2 :])
        return Both(self.make.call(torch.flatten, x.node, i, i + 1), labels, dims)

    def exchange(self, x: Both) -> Both:
        i, j = self.pick(range(len(x.dims))), self.pick(range(len(x.dims)))
        order = list(range(len(x.dims)))
        order[i], order[j] = order[j], order[i]
        labels, dims = x.labels.transpose(*order, -1 % x.labels.ndim), [x.dims[o] for o in order]
        if self.data.draw(st.booleans()):
            return Both(self.make.method("permute", x.node, *order), labels, dims)
        return Both(self.make.call(torch.transpose, x.node, i - len(order), j), labels, dims)

    def part(self, x: Both) -> Both:
        dim = self.pick(self.features(x))
        n = x.dims[dim]
        start = self.data.draw(st.integers(0, n - 1))
        stop = self.data.draw(st.integers(start + 1, n))
        labels = np.take(x.labels, range(start, stop), dim)
        dims = [*x.dims[:dim], stop - start, *x.dims[dim + 1 :]]
        way = self.pick(["index", "split", "narrow", "ellipsis"])
        if way == "narrow":
            return Both(self.make.call(torch.narrow, x.node, dim, start, stop - start), labels, dims)
        if way == "split":
            pieces = [p for p in (start, stop - start, n - stop) if p]
            split = self.make.method("split", x.node, pieces, dim=dim - len(x.dims))
            return Both(self.make.call(operator.getitem, split, int(start > 0)), labels, dims)
        index: Any = (*[slice(None)] * dim, slice(start, stop))
        if way == "ellipsis" and dim == len(x.dims) - 1:
            index = (Ellipsis, slice(start, stop))
        return Both(self.make.call(operator.getitem, x.node, index), labels, dims)

    def chunk(self, x: Both) -> Both:
        dim = self.pick(self.features(x))
        pieces, size = self.pick(factors(x.dims[dim]))
        index = self.pick(range(pieces))
        labels = np.take(x.labels, range(index * size, (index + 1) * size), dim)
        chunks = self.make.call(torch.chunk, x.node, pieces, dim)
        dims = [*x.dims[:dim], size, *x.dims[dim + 1 :]]
        return Both(self.make.call(operator.getitem, chunks, index), labels, dims)

    def choose(self, x: Both) -> Both:
        dims = self.features(x)
        if len(dims) < 2:
            return x
        dim = self.pick(dims)
        index = self.pick(range(x.dims[dim]))
        labels = np.take(x.labels, index, dim)
        return Both(self.make.method("select", x.node, dim, index), labels, x.dims[:dim] + x.dims[dim + 1 :])

    def repeat(self, x: Both) -> Both:
        """A dimension of heads that share their features: None and expand, as ``repeat_kv`` does."""
        dim, times = self.pick(range(len(x.dims) + 1)), self.pick([1, 2, 3])
        labels = np.repeat(np.expand_dims(x.labels, dim), times, dim)
        node = self.make.call(operator.getitem, x.node, (*[slice(None)] * dim, None))
        dims = [*x.dims[:dim], times, *x.dims[dim:]]
        return Both(
            self.make.method("expand", node, *[times if i == dim else -1 for i in range(len(dims))]), labels, dims
        )

    def interleave(self, x: Both) -> Both:
        dim, times = self.pick(self.features(x)), self.pick([1, 2])
        dims = [*x.dims[:dim], x.dims[dim] * times, *x.dims[dim + 1 :]]
        node = self.make.method("repeat_interleave", x.node, times, dim)
        return Both(node, np.repeat(x.labels, times, dim), dims)

    def join(self, x: Both) -> Both:
        """Halves exchanged, as in a rotation, but without one; sometimes with a part missing or twice."""
        dim = self.pick(self.features(x))
        n = x.dims[dim]
        at = self.data.draw(st.integers(0, n))
        bounds = [(at, n), (0, at), *self.pick([[], [(0, n)]])]
        bounds = [b for b in bounds if b[0] < b[1]]
        parts = [self.make.call(torch.narrow, x.node, dim, a, b - a) for a, b in bounds]
        labels = np.concatenate([np.take(x.labels, range(a, b), dim) for a, b in bounds], dim)
        dims = [*x.dims[:dim], labels.shape[dim], *x.dims[dim + 1 :]]
        return Both(self.make.call(torch.cat, parts, dim=dim - len(dims)), labels, dims)

    def as_heads(self, x: Both, order: list[int]) -> Both:
        """[b, s, heads, width] in the given order of dimensions."""
        tokens = [x.dims.index("b"), x.dims.index("s")]
        front = [*tokens, *self.features(x)]
        x = Both(
            self.make.method("permute", x.node, *front),
            x.labels.transpose(*front, -1 % x.labels.ndim),
            [x.dims[i] for i in front],
        )
        count = int(np.prod(x.dims[2:], dtype=int))
        heads, width = self.pick(factors(count))
        x = self.reshape(x, ["b", "s", heads, width])
        return Both(
            self.make.method("permute", x.node, *order),
            x.labels.transpose(*order, -1 % x.labels.ndim),
            [x.dims[o] for o in order],
        )


STEPS = ["split_dim", "merge_dims", "exchange", "part", "chunk", "choose", "repeat", "interleave", "join"]


def check(chain: Chain, x: Both, order: list[int], found: Features) -> None:
    """Every feature of every token, as numpy says and as the trace says."""
    labels = x.labels.transpose(*[order.index(i) for i in range(4)], 4)  # [b, s, heads, width]
    got = [found.sources[int(i)] for i in found.source.flatten()]
    source, feature = labels[0, 0, ..., 0].flatten(), labels[0, 0, ..., 3].flatten()
    assert got == [chain.sources[i][0] for i in source]
    assert found.feature.flatten().tolist() == feature.tolist()
    assert found.source.shape == labels.shape[2:4]
    assert (labels[..., 3] == labels[:1, :1, ..., 3]).all()
    assert (labels[..., 2] == np.arange(S)[None, :, None, None]).all()
    for node, width in zip(found.sources, found.widths, strict=True):
        assert (node, width) in chain.sources
    assert [found.sources[i] for i in found.used()] == [n for i, (n, _) in enumerate(chain.sources) if i in set(source)]


@given(st.data())
def test_any_chain_of_views_splits_and_joins_is_followed(data):
    chain = Chain(data)
    form = data.draw(st.sampled_from(["bsf", "tf", "bhsd"]))
    x = chain.source("x", form, data.draw(st.sampled_from([12, 24, 30])))
    if form == "tf":
        x = chain.reshape(x, ["b", "s", x.dims[1]])
    elif form == "bsf":
        chain.seen(x.node)
    else:
        chain.sizes = {"b": chain.make.method("size", x.node, 0), "s": chain.make.method("size", x.node, 2)}
    for step in data.draw(st.lists(st.sampled_from(STEPS), max_size=6)):
        x = getattr(chain, step)(x)
    order = data.draw(st.permutations(range(4)))
    x = chain.as_heads(x, order)
    at = [order.index(i) for i in range(4)]
    found = trace(chain.make.graph, x.node, batch_dim=at[0], seq_dim=at[1], feature_dims=(at[2], at[3]))
    check(chain, x, order, found)


LAYOUTS = ["per-head", "stacked", "stacked-then-heads", "groups"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transposed", [False, True])
@settings(max_examples=8)
@given(heads=st.sampled_from([1, 2, 3, 4]), group=st.sampled_from([1, 2]), width=st.sampled_from([1, 4, 6]))
def test_the_fused_layouts_of_the_field(layout, transposed, heads, group, width):
    """q, k and v of one matmul: interleaved per head (NeoX), stacked (GPT-2, Phi-3), in groups of KV heads (Falcon)."""
    make = Building()
    kv = heads
    q_heads = heads * group if layout != "per-head" else heads
    rows = (q_heads + 2 * kv) * width
    if transposed:
        x = make.input("x", "b", "s", 5)
        w, bias = make.weight("c_attn.weight", random(5, rows)), make.weight("c_attn.bias", random(rows))
        flat = make.method("view", x, -1, 5)
        flat = make.call(torch.addmm, bias, flat, w)
        y = make.method("view", flat, make.method("size", x, 0), make.method("size", x, 1), rows)
        source = flat
    else:
        x, w = make.input("x", "b", "s", 5), make.weight("qkv.weight", random(rows, 5))
        source = y = make.call(F.linear, x, w)
    size = [make.method("size", x, 0), make.method("size", x, 1)]
    grid = np.arange(rows)
    if layout == "per-head":
        view = make.method("view", y, *size, heads, 3 * width)
        parts = make.method("chunk", make.method("transpose", view, 1, 2), 3, -1)
        got = [make.call(operator.getitem, parts, i) for i in range(3)]
        want = list(grid.reshape(heads, 3, width).transpose(1, 0, 2))
    elif layout == "groups":
        view = make.method("view", y, *size, kv, group + 2, width)
        pieces = [slice(0, group), slice(group, group + 1), slice(group + 1, group + 2)]
        got = []
        for piece in pieces:
            part = make.call(operator.getitem, view, (slice(None), slice(None), slice(None), piece))
            got.append(make.method("transpose", make.method("flatten", part, 2, 3), 1, 2))
        blocks = grid.reshape(kv, group + 2, width)
        want = [blocks[:, p].reshape(-1, width) for p in pieces]
    else:
        sizes = [q_heads * width, kv * width, kv * width]
        if layout == "stacked":
            split = make.call(torch.split, y, sizes, dim=2)
            parts = [make.call(operator.getitem, split, i) for i in range(3)]
        else:
            ends = np.cumsum([0, *sizes])
            parts = [make.call(operator.getitem, y, (Ellipsis, slice(int(a), int(b)))) for a, b in pairwise(ends)]
        got = [make.method("transpose", make.method("unflatten", p, -1, (-1, width)), 1, 2) for p in parts]
        want = [g.reshape(-1, width) for g in np.split(grid, np.cumsum(sizes)[:-1])]
    for node, rows_wanted in zip(got, want, strict=True):
        found = trace(make.graph, node, batch_dim=0, seq_dim=2, feature_dims=(1, 3))
        assert found.sources == (source,)
        assert found.widths == (rows,)
        assert found.feature.tolist() == rows_wanted.tolist()
        assert found.columns(0) == list(range(width))
    linear = linear_of(make.graph, source)
    assert linear is not None
    assert (linear.transposed, linear.bias is not None) == (transposed, transposed)
    assert strip_layout(linear.x) is x


def test_heads_from_different_sources_and_columns():
    """Two heads of one source and a rotated part shared by all heads: MLA's key."""
    make = Building()
    nope, rope = make.input("nope", "b", "s", 6), make.input("rope", "b", 1, "s", 2)
    heads = make.method("transpose", make.method("unflatten", nope, -1, (2, 3)), 1, 2)
    shared = make.method("expand", rope, -1, 2, -1, -1)
    key = make.call(torch.cat, [heads, shared], -1)
    found = trace(make.graph, key, batch_dim=0, seq_dim=2, feature_dims=(1, 3))
    by_node = {found.sources[i]: found.columns(i) for i in found.used()}
    assert by_node == {nope: [0, 1, 2], rope: [3, 4]}
    assert found.feature.tolist() == [[0, 1, 2, 0, 1], [3, 4, 5, 0, 1]]
    one = make.call(operator.getitem, shared, (slice(None), slice(0, 1)))
    one = make.method("repeat_interleave", one, 2, -1)  # 1 head of 4 features
    other = make.method("unsqueeze", make.call(operator.getitem, nope, (Ellipsis, slice(0, 4))), 1)
    mixed = make.call(torch.cat, [one, other], 1)
    found = trace(make.graph, mixed, batch_dim=0, seq_dim=2, feature_dims=(1, 3))
    with pytest.raises(LayoutError, match="different sources"):
        found.columns(0)


def test_one_row_for_the_whole_batch_is_followed():
    make = Building()
    like, x = make.input("like", "b", "s", 1), make.input("x", 1, "s", 6)
    y = make.method("expand", x, make.method("size", like, 0), -1, -1)
    y = make.method("transpose", make.method("unflatten", y, -1, (2, 3)), 1, 2)
    found = trace(make.graph, y, batch_dim=0, seq_dim=2, feature_dims=(1, 3))
    assert found.feature.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found.widths == (6,)


def _mixed(make: Building, x: fx.Node, how: str) -> fx.Node:
    b, s = make.method("size", x, 0), make.method("size", x, 1)
    full = slice(None)
    if how == "features as tokens":
        return make.method("reshape", make.method("transpose", x, 1, 2), b, s, 12)
    if how == "batch as tokens":
        return make.method("transpose", make.method("reshape", x, s, b, 12), 0, 1)
    if how == "batch as tokens, flat":
        flat = make.method("mul", make.method("view", x, -1, 12), 2)
        return make.method("transpose", make.method("reshape", flat, s, b, 12), 0, 1)
    if how == "the first token for all":
        return make.method("expand", make.call(operator.getitem, x, (full, slice(0, 1))), -1, s, -1)
    if how == "the first row for all":
        return make.method("expand", make.call(operator.getitem, x, slice(0, 1)), b, -1, -1)
    if how == "every second token":
        return make.call(operator.getitem, x, (full, slice(None, None, 2)))
    if how == "shifted":
        return make.call(operator.getitem, x, (full, slice(1, None)))
    if how == "shortened":
        return make.call(operator.getitem, x, (full, slice(None, -1)))
    if how == "the last token":
        return make.call(operator.getitem, x, (full, slice(-1, None)))
    if how == "joined in time":
        return make.call(torch.cat, [x, x], 1)
    if how == "a feature of the last token":
        last = make.call(operator.getitem, x, (full, slice(-1, None), slice(0, 1)))
        rest = make.call(operator.getitem, x, (full, full, slice(1, None)))
        return make.call(torch.cat, [make.method("expand", last, -1, s, -1), rest], -1)
    assert how == "a shifted feature"
    other = make.call(
        torch.cat,
        [
            make.call(operator.getitem, x, (full, slice(-1, None))),
            make.call(operator.getitem, x, (full, slice(None, -1))),
        ],
        1,
    )
    return make.call(
        torch.cat,
        [
            make.call(operator.getitem, x, (Ellipsis, slice(0, 6))),
            make.call(operator.getitem, other, (Ellipsis, slice(6, 12))),
        ],
        -1,
    )


MIXED = [
    "features as tokens", "batch as tokens", "batch as tokens, flat", "the first token for all",
    "the first row for all", "every second token", "shifted", "shortened", "the last token", "joined in time",
    "a feature of the last token", "a shifted feature",
]  # fmt: skip


@pytest.mark.parametrize("how", MIXED)
def test_tokens_that_mix_are_an_error(how):
    make = Building()
    y = _mixed(make, make.input("x", "b", "s", 12), how)
    y = make.method("transpose", make.method("unflatten", y, -1, (3, 4)), 1, 2)
    with pytest.raises(LayoutError):
        trace(make.graph, y, batch_dim=0, seq_dim=2, feature_dims=(1, 3))


def test_a_value_too_large_to_follow_says_what_to_do():
    make = Building()
    x = make.input("x", 4096, 4096, 64)
    with pytest.raises(LayoutError, match="too large to follow; trace with dynamic shapes"):
        trace(make.graph, make.method("unflatten", x, -1, (8, 8)), batch_dim=0, seq_dim=1, feature_dims=(2, 3))


def test_what_is_layout():
    make = Building()
    x = make.input("x", "b", "s", 6)
    layout = [
        make.method("view", x, -1, 6),
        make.call(operator.getitem, x, (Ellipsis, slice(0, 2))),
        make.method("to", x, torch.float64),
        make.call(operator.getitem, make.call(torch.chunk, x, 2, -1), 0),
        make.method("contiguous", x),
        make.method("type_as", x, x),
    ]
    index = make.method("argsort", x)
    other = [
        x, make.method("mul", x, 2), make.method("float", x), make.method("half", x), index,
        make.call(operator.getitem, x, (Ellipsis, make.call(operator.getitem, index, (0, 0)))),
    ]  # fmt: skip
    assert [is_layout(n) for n in layout] == [True] * len(layout)
    assert [is_layout(n) for n in other] == [False] * len(other)


# -- rows of weights ---------------------------------------------------------------------------------------------------


@st.composite
def regular_rows(draw: st.DrawFn) -> tuple[int, torch.Tensor]:
    """(rows of the weight, [heads, width] row numbers) as projections have them: a block, or a part of every stride."""
    heads, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    stride = width + draw(st.integers(0, 4)) if heads > 1 else width
    inside = draw(st.integers(0, stride - width))
    blocks_before, blocks_after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    offset = draw(st.integers(0, 7)) if stride == width else blocks_before * stride
    start = offset + inside
    total = offset + heads * stride + blocks_after * stride
    return total, start + stride * torch.arange(heads)[:, None] + torch.arange(width)


@given(regular_rows(), st.booleans())
def test_views_of_rows_equal_index_select(given_rows, transposed):
    total, rows = given_rows
    make = Building()
    value = random(total, 3)
    w = make.weight("w", value.t().contiguous() if transposed else value)
    bias = make.weight("bias", value[:, 0].contiguous())
    x = make.input("x", "b", 3)
    out = rows_of(make.graph, w, rows, transposed=transposed), rows_of(make.graph, bias, rows, transposed=False)
    make.output(*out, x)
    assert not [n for n in make.graph.nodes if n.target in (torch.index_select, "index_select")]
    got, got_bias, _ = make.run(x=random(2, 3))
    assert torch.equal(got, value.index_select(0, rows.flatten()).view(*rows.shape, 3))
    assert torch.equal(got_bias, value[:, 0][rows])
    assert got.untyped_storage().data_ptr() == make.values["w"].untyped_storage().data_ptr()


@given(st.data())
def test_rows_that_no_view_reaches_are_refused_and_all_others_are_right(data):
    """Any rows at all: either a view that equals index_select, or LayoutError; never other rows."""
    total = data.draw(st.integers(1, 12))
    heads, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    regular = data.draw(st.booleans())
    if regular:
        a, step, inner = (
            data.draw(st.integers(0, total)),
            data.draw(st.integers(-2, 6)),
            data.draw(st.sampled_from([1, 1, 2, -1])),
        )
        rows = a + step * torch.arange(heads)[:, None] + inner * torch.arange(width)
        rows = rows.clamp(0, total - 1)
    else:
        rows = torch.tensor(
            data.draw(st.lists(st.integers(0, total - 1), min_size=heads * width, max_size=heads * width))
        )
        rows = rows.view(heads, width)
    make = Building()
    value = random(total, 2)
    w = make.weight("w", value)
    try:
        check_rows(total, rows)
    except LayoutError:
        with pytest.raises(LayoutError):
            rows_of(make.graph, w, rows, transposed=False)
        return
    make.output(rows_of(make.graph, w, rows, transposed=False))
    assert torch.equal(make.run()[0], value[rows])


def test_heads_across_the_stride_are_refused():
    """Rows 3..5 and 8..10 of a weight that is cut every 5 rows: no view of whole strides holds them."""
    rows = torch.tensor([[3, 4, 5], [8, 9, 10]])
    with pytest.raises(LayoutError, match="cross the stride"):
        check_rows(20, rows)
    with pytest.raises(LayoutError, match="not consecutive"):
        check_rows(20, torch.tensor([[0, 2], [4, 6]]))
    with pytest.raises(LayoutError, match="regular distances"):
        check_rows(20, torch.tensor([[0, 1], [4, 5], [9, 10]]))
    assert check_rows(20, rows - 3) == (0, 5)


@given(st.lists(st.integers(0, 9), max_size=6))
def test_a_slice_is_the_list(indices):
    piece = as_slice(indices)
    ascending = bool(indices) and indices == list(range(indices[0], indices[0] + len(indices)))
    assert (piece is not None) == ascending
    if piece is not None:
        assert list(range(20))[piece] == indices
