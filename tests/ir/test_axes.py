"""Units are followed through layouts, broadcasting and products, in both directions."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

from latentscan.ir.axes import (
    AxisError,
    Placement,
    Units,
    results,
    through_layout,
    through_matmul,
    through_pointwise,
    through_reduction,
)
from latentscan.ir.layout import SmallNumbers
from latentscan.ir.region import COLUMN, ROW, grow
from latentscan.tests.ir.building import Building


def labels(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def test_a_fused_projection_knows_the_units_of_all_its_parts():
    """[q | k | v] rows: each part is split by KV group, in an order that no even split of the rows gives."""
    b = Building()
    x = b.input("x", "b", "s", 24)
    parts = b.method("split", x, [16, 4, 4], -1)
    q, k, v = (b.call(operator.getitem, parts, i) for i in range(3))
    heads = b.method("unflatten", q, -1, (8, 2))
    graph = b.output(heads, k, v)
    units, small = Units(2), SmallNumbers()
    known = {heads: Placement(2, torch.arange(8) // 4), k: Placement(2, labels(0, 0, 1, 1))}
    known |= through_layout(graph, heads, known, units, small)
    assert known[q].dim == 2
    assert known[q].labels.tolist() == [0] * 8 + [1] * 8
    found = through_layout(graph, parts, known, units, small)[x]
    assert found.labels.tolist() == [0] * 8 + [1] * 8 + [0, 0, 1, 1] + [-1] * 4
    known[v] = known[k]
    whole = through_layout(graph, parts, known, units, small)[x]
    assert whole.complete
    assert units.owned(whole.labels, 2, 1) == [*range(8, 16), 18, 19, 22, 23]


def test_what_every_unit_reads_is_not_split():
    """One rotary key that is expanded to all heads belongs to none of them."""
    b = Building()
    x = b.input("x", "b", 1, "s", 4)
    y = b.method("expand", x, -1, 6, -1, -1)
    graph = b.output(y)
    known = {y: Placement(1, torch.arange(6))}
    assert x not in through_layout(graph, y, known, Units(6), SmallNumbers())


def test_a_key_head_belongs_to_the_query_heads_that_read_it():
    b = Building()
    x = b.input("x", "b", 3, "s", 4)
    y = b.call(torch.repeat_interleave, x, 3, dim=1)
    graph = b.output(y)
    units = Units(9)
    known = through_layout(graph, y, {y: Placement(1, torch.arange(9))}, units, SmallNumbers())
    assert [units.members(int(i)) for i in known[x].labels] == [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}]
    # 9 query heads over 4 ranks: 3, 2, 2, 2; the middle key head is held twice, the last one twice
    assert units.held(known[x].labels, 4) == [[0], [1], [1, 2], [2]]


def test_features_that_are_mixed_with_units_are_told():
    b = Building()
    x = b.input("x", "b", "s", 4, 6)
    y = b.method("flatten", b.method("transpose", x, 2, 3), 2, 3)
    z = b.method("unflatten", y, 2, (4, 6))
    graph = b.output(z)
    known = {z: Placement(2, torch.arange(4))}
    with pytest.raises(AxisError, match="lie along no dimensions"):
        through_layout(graph, y, through_layout(graph, z, known, Units(4), SmallNumbers()), Units(4), SmallNumbers())


def test_broadcast_inputs_are_left_alone():
    b = Building()
    x, gain, table = b.input("x", "b", 4, "s", 8), b.input("gain", 4, 1, 1), b.input("table", "b", 1, "s", 8)
    y = b.call(torch.mul, x, gain)
    z = b.call(torch.mul, y, table)
    graph = b.output(z)
    known = {y: Placement(1, torch.arange(4))}
    assert {n.name: p.dim for n, p in through_pointwise(graph, y, known).items()} == {"mul": 1, "x": 1, "gain": 0}
    assert table not in through_pointwise(graph, z, known)


def test_a_reduction_across_units_is_told():
    b = Building()
    x = b.input("x", "b", "s", 8)
    y = b.method("mean", x, -1, keepdim=True)
    graph = b.output(y)
    with pytest.raises(AxisError, match="works across the units"):
        through_reduction(graph, y, {x: Placement(2, torch.arange(8))})


def test_products_pass_units_of_batch_and_rows():
    b = Building()
    x, w = b.input("x", "b", 4, "s", 8), b.input("w", 4, 8, 5)
    y = b.call(torch.matmul, x, w)
    graph = b.output(y)
    found = through_matmul(graph, y, {y: Placement(1, torch.arange(4))})
    assert {n.name: p.dim for n, p in found.items()} == {"matmul": 1, "x": 1, "w": 0}
    with pytest.raises(AxisError, match="sums over the units"):
        through_matmul(graph, y, {x: Placement(3, torch.arange(8))})


def test_a_region_lies_between_columns_and_rows():
    b = Building()
    x = b.input("x", "b", "s", 6)
    shapes = {"gate": (10, 6), "up": (10, 6), "down": (6, 10)}
    weights = [b.weight(f"{name}.weight", torch.randn(*shape)) for name, shape in shapes.items()]
    gate, up = b.call(F.linear, x, weights[0]), b.call(F.linear, x, weights[1])
    inner = b.call(torch.mul, b.call(F.silu, gate), up)
    down = b.call(F.linear, inner, weights[2])
    graph = b.output(b.call(torch.add, down, x))
    region = grow(graph, Units(10), {inner: Placement(2, torch.arange(10))})
    assert region.ops(COLUMN) == [gate, up]
    assert region.ops(ROW) == [down]
    assert x not in region.placed
    assert region.entries(gate) == [x]


def test_a_value_that_the_model_returns_is_not_split():
    b = Building()
    x, w, v = b.input("x", "b", "s", 6), b.weight("w", torch.randn(10, 6)), b.weight("v", torch.randn(6, 10))
    inner = b.call(F.linear, x, w)
    graph = b.output(b.call(F.linear, inner, v), inner)
    with pytest.raises(AxisError, match="the model returns linear"):
        grow(graph, Units(10), {inner: Placement(2, torch.arange(10))})
    assert [place for place, _ in results(inner)] == [()]
