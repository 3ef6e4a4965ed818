"""Scheduling for overlap: starts early, waits late, and nothing that the ranks share or the numbers need changes."""

from __future__ import annotations

import weakref

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed._functional_collectives
from torch import fx

from latentscan.ir.errors import VerifyError
from latentscan.ir.ops.waiting import wait
from latentscan.lowering import schedule
from latentscan.lowering.overlap import boxed, guard_waits
from latentscan.lowering.schedule import check_order, distances, is_start, is_wait, list_schedule, overlap, peak_bytes

C10D = torch.ops._c10d_functional
ATEN = torch.ops.aten
SIZE = 4


class Drawn:
    """An ATen graph built by hand; every value is a fake [4, 4] fp32 of its own, 64 bytes."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def add(self, target: object, *args: object) -> fx.Node:
        name = target._schema.name.split("::")[1]  # type: ignore[attr-defined]
        return self._valued(self.graph.create_node("call_function", target, args, name=name))  # type: ignore[arg-type]

    def given(self, name: str) -> fx.Node:
        return self._valued(self.graph.placeholder(name))

    def _valued(self, node: fx.Node) -> fx.Node:
        node.meta["val"] = torch.empty(SIZE, SIZE)
        return node

    def reduced(self, x: fx.Node, place: str = "") -> fx.Node:
        """An all-reduce that is waited for at once."""
        return self.add(C10D.wait_tensor.default, self.add(C10D.all_reduce.default, x, "sum", f"0@{place}"))

    def done(self, *outputs: fx.Node) -> fx.Graph:
        self.graph.output(outputs)
        self.graph.lint()
        return self.graph


def backward(layers: int = 3) -> fx.Graph:
    """The shape of a tensor-parallel backward: the gradient of each weight needs nothing of the sum beside it."""
    d = Drawn()
    x, grad, weight = d.given("x"), d.given("grad"), d.given("weight")
    weights = []
    for layer in range(layers):
        into = d.add(ATEN.mm.default, grad, weight)
        weights.append(d.add(ATEN.mm.default, grad, x))
        grad = d.reduced(into, f"layers.{layer}")
    return d.done(grad, *weights)


def names(graph: fx.Graph) -> list[str]:
    return [n.name for n in graph.nodes]


def test_the_sum_of_an_inputs_gradient_runs_beside_the_product_for_the_weights():
    graph = backward()
    done = overlap(graph, "backward")
    assert [(m.name, m.module, m.before, m.after) for m in done.collectives] == [
        ("all_reduce", f"layers.{i}", 0, 1) for i in range(3)
    ]
    assert (done.phase, done.ahead, done.kept) == ("backward", 2, 0)
    order = names(graph)
    assert order.index("all_reduce") < order.index("mm_1") < order.index("wait_tensor")


def test_a_gather_starts_before_weights_are_cast_and_not_all_weights_are_cast_at_the_first():
    d = Drawn()
    x, layers = d.given("x"), 6
    for layer in range(layers):
        weight = d.given(f"w{layer}")
        cast = d.add(ATEN._to_copy.default, weight)
        x = d.reduced(x, str(layer))
        x = d.add(ATEN.mm.default, x, cast)
    graph = d.done(x)
    done = overlap(graph, "forward", growth=2.0)
    order = names(graph)
    assert order.index("all_reduce") < order.index("_to_copy") < order.index("wait_tensor")
    assert order.index("_to_copy_5") > order.index("wait_tensor_2")  # two collectives ahead, no more
    assert all(m.after >= 1 for m in done.collectives[:-2])
    assert done.peak_after <= 3 * done.peak_before


def test_memory_may_not_grow_beyond_what_was_said():
    """Weights ten times as large: with nothing to spare work is taken from one collective ahead, or none."""
    d = Drawn()
    x = d.given("x")
    for layer in range(4):
        cast = d.add(ATEN._to_copy.default, d.given(f"w{layer}"))
        cast.meta["val"] = torch.empty(40, 40)
        small = d.add(ATEN.sum.default, cast)
        x = d.add(ATEN.mm.default, d.reduced(x), small)
    graph = d.done(x)
    before = names(graph)
    tight = overlap(graph, "forward", growth=0.0)
    assert tight.peak_after <= tight.peak_before
    loose = overlap(graph, "forward", growth=9.0)
    assert loose.ahead == 2 > tight.ahead
    assert names(graph) != before
    assert loose.peak_after == peak_bytes(list(graph.nodes))


def test_random_numbers_keep_their_order_and_nothing_passes_a_write():
    d = Drawn()
    x, y = d.given("x"), d.given("y")
    first = d.add(ATEN.rand_like.default, y)
    summed = d.reduced(d.add(ATEN.mm.default, x, x))
    second = d.add(ATEN.rand_like.default, y)
    late = d.add(ATEN.mm.default, y, y)
    written = d.add(ATEN.copy_.default, y, d.add(ATEN.mm.default, summed, first))
    after = d.add(ATEN.mm.default, y, y)
    graph = d.done(second, late, written, after)
    done = overlap(graph, "forward", growth=9.0)
    order = names(graph)
    assert done.kept == 3
    assert order.index(first.name) < order.index(second.name)
    assert order.index(late.name) < order.index(written.name) < order.index(after.name)
    assert done.collectives[0].after > done.collectives[0].before


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=60)
def test_any_graph_keeps_its_dependencies_its_collectives_and_its_writes(data):
    d = Drawn()
    values = [d.given("a"), d.given("b")]
    for _ in range(data.draw(st.integers(1, 40))):
        kind = data.draw(st.sampled_from(["mm", "mm", "reduce", "start", "wait", "rand", "write"]))
        x, y = (values[data.draw(st.integers(0, len(values) - 1))] for _ in range(2))
        if kind == "reduce":
            values.append(d.reduced(x))
        elif kind == "start":
            values.append(d.add(C10D.all_reduce.default, x, "sum", "0"))
        elif kind == "wait" and is_start(x):
            values.append(d.add(C10D.wait_tensor.default, x))
        elif kind == "rand":
            values.append(d.add(ATEN.rand_like.default, x))
        elif kind == "write":
            values.append(d.add(ATEN.add_.Tensor, x, y))
        else:
            values.append(d.add(ATEN.mm.default, x, y))
    graph = d.done(*values[-3:])
    old = list(graph.nodes)
    new = list_schedule(old, data.draw(st.integers(1, 3)))
    check_order(old, new)
    before, after = distances(old), distances(new)
    assert list(filter(is_start, old)) == list(filter(is_start, new))
    assert before.keys() == after.keys()


def test_what_is_sent_lives_until_the_wait():
    """A GPU reads it until then. Seen on two H200: without this, memory that was taken again gave wrong gradients."""
    graph = backward()
    overlap(graph, "backward", growth=1.0)
    peak = peak_bytes(list(graph.nodes))
    assert guard_waits(graph) == 3
    module = fx.GraphModule({}, graph)
    lines = module.code.splitlines()
    for node in graph.nodes:
        if node.target is wait:
            start, sent = node.args[0], node.args[3]
            assert sent is start.args[0]
            dropped = next(
                i for i, line in enumerate(lines) if "; " in line and f" {sent.name} = " in line.split("; ", 1)[1]
            )
            assert f"{node.name} =" in lines[dropped]
    assert peak >= 64 * 5


# -- sabotage: the check catches an overlap pass that is wrong


def swapped(order: list[fx.Node], first: str, second: str) -> list[fx.Node]:
    at = {n.name: i for i, n in enumerate(order)}
    order[at[first]], order[at[second]] = order[at[second]], order[at[first]]
    return order


def test_a_receive_above_its_send_is_caught(monkeypatch):
    graph = backward()
    before = names(graph)
    monkeypatch.setattr(schedule, "list_schedule", lambda nodes, _: swapped(list(nodes), "all_reduce", "wait_tensor"))
    with pytest.raises(VerifyError, match="wait_tensor would run before all_reduce, which it reads"):
        overlap(graph, "backward")
    assert names(graph) == before  # nothing half done


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ("all_reduce", "all_reduce_1", "the order of collectives changed|would run before"),
        ("mm", "all_reduce", "all_reduce would run before mm"),
    ],
)
def test_another_order_of_collectives_is_caught(first, second, text):
    d = Drawn()
    x, y = d.given("x"), d.given("y")
    a = d.add(C10D.all_reduce.default, d.add(ATEN.mm.default, x, x), "sum", "0@one")
    b = d.add(C10D.all_reduce.default, y, "sum", "0@two")
    graph = d.done(d.add(C10D.wait_tensor.default, a), d.add(C10D.wait_tensor.default, b))
    old = list(graph.nodes)
    with pytest.raises(VerifyError, match=text):
        check_order(old, swapped(list(old), first, second))


def test_random_numbers_out_of_order_and_a_passed_write_are_caught():
    d = Drawn()
    y = d.given("y")
    first, second = d.add(ATEN.rand_like.default, y), d.add(ATEN.rand_like.default, y)
    read = d.add(ATEN.mm.default, y, y)
    written = d.add(ATEN.add_.Tensor, y, y)
    graph = d.done(first, second, read, written)
    old = list(graph.nodes)
    with pytest.raises(VerifyError, match="the order of random numbers and effects changed"):
        check_order(old, swapped(list(old), first.name, second.name))
    with pytest.raises(VerifyError, match="mm would pass add_, which writes in place"):
        check_order(old, swapped(list(old), read.name, written.name))
    assert not any(map(is_wait, old))


@pytest.mark.parametrize(("make", "freed"), [(boxed, True), (lambda made: lambda args: made.forward(*args), False)])
def test_what_a_boxed_graph_has_read_is_freed(make, freed):
    """The second one, as it was, holds all that the forward kept until the backward ends."""
    alive = []
    values = [torch.ones(3)]
    given = weakref.ref(values[0])
    graph = fx.Graph()
    first = graph.call_function(torch.neg, (graph.placeholder("kept"),))
    graph.call_function(lambda _: alive.append(given() is not None), (first,))
    graph.output((first,))
    make(fx.GraphModule(torch.nn.Module(), graph))(values)
    assert alive == [not freed]
