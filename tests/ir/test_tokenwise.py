"""Token-wise nodes: where tokens lie in their inputs, against a look at every element; running them on more tokens."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import fx

from latentscan.ir.layout import linear_of
from latentscan.ir.tokenwise import NotTokenwise, Place, again_on_read, input_places, regroup, rerun, width
from latentscan.tests.ir.building import Building, close, random

# -- regroup -----------------------------------------------------------------------------------------------------------


def place_holds(before: tuple[int, ...], after: tuple[int, ...], place: Place, found: Place) -> bool:
    """Whether every element has the batch and sequence number at ``found`` in ``before`` that it has at ``place``.

    Where a place is one number, that dimension counts batch x sequence.
    """
    old = [c.flatten() for c in np.indices(before)]
    here = [c.flatten() for c in np.indices(after)]
    if place[0] != place[1]:
        batch, seq, length = here[place[0]], here[place[1]], after[place[1]]
        if found[0] != found[1]:
            return bool((old[found[0]] == batch).all() and (old[found[1]] == seq).all()) and (
                before[found[0]] == after[place[0]] and before[found[1]] == length
            )
        return bool((old[found[0]] == batch * length + seq).all()) and before[found[0]] == after[place[0]] * length
    flat = here[place[0]]
    if found[0] != found[1]:
        return bool((old[found[0]] * before[found[1]] + old[found[1]] == flat).all()) and (
            before[found[0]] * before[found[1]] == after[place[0]]
        )
    return bool((old[found[0]] == flat).all()) and before[found[0]] == after[place[0]]


def places(rank: int) -> list[Place]:
    return [(i, j) for i in range(rank) for j in range(rank)]


SIZE = st.sampled_from([1, 1, 2, 3, 5])


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of the same elements: both are merges, with ones put in anywhere, of one list of sizes."""
    fine = draw(st.lists(SIZE, min_size=1, max_size=5))

    def merged() -> tuple[int, ...]:
        cuts = draw(st.lists(st.booleans(), min_size=len(fine) - 1, max_size=len(fine) - 1))
        shape = [fine[0]]
        for cut, n in zip(cuts, fine[1:], strict=True):
            if cut:
                shape.append(n)
            else:
                shape[-1] *= n
        for at in draw(st.lists(st.integers(0, 5), max_size=2)):
            shape.insert(min(at, len(shape)), 1)
        return tuple(shape)

    return merged(), merged()


@settings(max_examples=300)
@given(reshapes())
@example(((1, 1, 1), (1, 1, 1)))
@example(((2, 3, 6), (2, 3, 2, 3)))
@example(((6, 4), (2, 3, 4)))
@example(((2, 3, 4), (6, 4)))
@example(((3, 4), (1, 3, 4)))
def test_the_place_found_is_right_and_found_wherever_there_is_one(shapes):
    """Also with batch or sequence 1 and features 1, where several places are right."""
    before, after = shapes
    for place in places(len(after)):
        if place[0] > place[1]:
            continue  # sequence first: below
        right = [p for p in places(len(before)) if place_holds(before, after, place, p)]
        try:
            found = regroup(before, after, place)
        except NotTokenwise:
            # Refused: flattened where it was apart, apart with something between, or one token, whose place is moot.
            steps = (1,) if place[0] != place[1] else (0, 1)
            missed = [p for p in right if p[1] - p[0] in steps]
            assert not missed or after[place[0]] * after[place[1]] == 1, (place, right)
            continue
        assert found in right, (place, right)


@settings(max_examples=200)
@given(reshapes())
def test_a_sequence_before_the_batch_is_never_put_elsewhere(shapes):
    before, after = shapes
    for place in places(len(after)):
        if place[0] > place[1]:
            try:
                found = regroup(before, after, place)
            except NotTokenwise:
                continue
            if found[0] != found[1]:
                assert place_holds(before, after, place, found)
            else:  # flattened with the sequence outside: only one of them may count
                assert 1 in (after[place[0]], after[place[1]]) and place_holds(before, after, place, found)


@pytest.mark.parametrize(
    ("before", "after", "place"),
    [
        ((2, 15), (2, 3, 5), (0, 1)),  # tokens and features apart only now
        ((6, 5), (2, 15), (0, 1)),
        ((2, 3, 10), (2, 6, 5), (0, 1)),  # a feature dimension swallowed by the sequence
        ((2, 3, 4, 5), (2, 12, 5), (0, 1)),
        ((6, 4), (4, 6), (0, 0)),
        ((2, 3, 4), (3, 2, 4), (0, 0)),
        ((2, 3, 4), (3, 8), (0, 1)),
        ((5,), (1, 1, 5), (0, 1)),
    ],
)
def test_wrong_merges_are_refused(before, after, place):
    with pytest.raises(NotTokenwise, match=r"a reshape from \["):
        regroup(before, after, place)


@pytest.mark.parametrize(
    ("before", "after", "place", "found"),
    [
        ((7, 11, 64), (7, 11, 4, 16), (0, 1), (0, 1)),
        ((7, 11, 4, 16), (7, 11, 64), (0, 1), (0, 1)),
        ((77, 64), (7, 11, 64), (0, 1), (0, 0)),
        ((7, 11, 64), (77, 64), (0, 0), (0, 1)),
        ((77, 64), (77, 4, 16), (0, 0), (0, 0)),
        ((7, 1, 11, 64), (7, 11, 64), (0, 1), (0, 2)),
        ((7, 11, 64), (7, 1, 11, 64), (0, 2), (0, 1)),
        ((1, 1, 64), (1, 1, 4, 16), (0, 1), (0, 1)),
        ((1, 64, 1), (1, 64, 1, 1), (0, 2), (0, 2)),
        ((7, 4, 1, 16), (7, 4, 16), (0, 1), (0, 1)),
        ((1, 11, 64), (11, 64), (0, 0), (0, 1)),
    ],
)
def test_the_usual_reshapes(before, after, place, found):
    assert regroup(before, after, place) == found


# -- nodes -------------------------------------------------------------------------------------------------------------


def nodes(make: Building) -> dict[str, tuple[fx.Node, Place, list[tuple[fx.Node, Place]] | None]]:
    """Name -> (node, place of batch and sequence, the inputs and places to be found; None: an end)."""
    x = make.input("x", "b", "s", 12)
    h = make.input("h", "b", 3, "s", 4)
    flat = make.input("flat", "t", 12)
    w, bias = make.weight("w", random(6, 12)), make.weight("bias", random(6))
    wt = make.weight("wt", random(12, 6))
    b, s = make.method("size", x, 0), make.method("size", x, 1)
    full = slice(None)
    split = make.method("split", x, [4, 8], -1)
    chunks = make.call(torch.chunk, h, 2, 3)
    seq_split = make.method("split", x, 1, 1)
    linear = make.call(F.linear, x, w, bias)
    addmm = make.call(torch.addmm, bias, flat, wt)
    first = make.method("transpose", x, 0, 1)
    apart, one_head = make.method("view", x, b, s, 3, 4), make.method("unsqueeze", x, 1)
    return {
        "linear": (linear, (0, 1), [(x, (0, 1))]),
        "linear along the sequence": (linear, (0, 2), None),
        "addmm": (addmm, (0, 0), [(flat, (0, 0))]),
        "addmm along its sum": (addmm, (0, 1), None),
        "view": (make.method("view", x, b, s, 3, 4), (0, 1), [(x, (0, 1))]),
        "reshape function": (make.call(torch.reshape, x, (-1, 12)), (0, 0), [(x, (0, 1))]),
        "flatten": (make.method("flatten", apart, 2), (0, 1), [(apart, (0, 1))]),
        "unflatten": (make.call(torch.unflatten, x, 2, (3, 4)), (0, 1), [(x, (0, 1))]),
        "squeeze": (make.method("squeeze", one_head, 1), (0, 1), [(one_head, (0, 2))]),
        "unsqueeze": (make.call(torch.unsqueeze, x, 1), (0, 2), [(x, (0, 1))]),
        "transpose": (make.method("transpose", h, 1, 2), (0, 1), [(h, (0, 2))]),
        "transpose, negative": (make.call(torch.transpose, h, -1, -2), (0, 3), [(h, (0, 2))]),
        "swapaxes": (make.method("swapaxes", h, 2, 3), (0, 3), [(h, (0, 2))]),
        "permute": (make.method("permute", h, 0, 2, 1, 3), (0, 1), [(h, (0, 2))]),
        "permute, tuple": (make.call(torch.permute, h, (2, 0, -1, 1)), (1, 0), [(h, (0, 2))]),
        "t": (make.method("t", flat), (1, 1), [(flat, (0, 0))]),
        "sequence first": (make.method("transpose", first, 0, 1), (0, 1), [(first, (1, 0))]),
        "contiguous": (make.method("contiguous", h), (0, 2), [(h, (0, 2))]),
        "clone": (make.call(torch.clone, h), (0, 2), [(h, (0, 2))]),
        "a cast that casts nothing": (make.method("to", x, torch.float64), (0, 1), [(x, (0, 1))]),
        "a cast": (make.method("float", x), (0, 1), None),
        "split": (split, (0, 1), [(x, (0, 1))]),
        "item of a split": (make.call(operator.getitem, split, 1), (0, 1), [(split, (0, 1))]),
        "chunk": (chunks, (0, 2), [(h, (0, 2))]),
        "chunk of heads": (make.method("chunk", h, 3, dim=1), (0, 2), [(h, (0, 2))]),
        "split of the sequence": (seq_split, (0, 1), None),
        "cat": (make.call(torch.cat, [x, linear], -1), (0, 1), [(x, (0, 1)), (linear, (0, 1))]),
        "cat of tokens": (make.call(torch.cat, [x, x], dim=1), (0, 1), None),
        "cat of rows": (make.call(torch.cat, [x, x]), (0, 1), None),
        "slice": (make.call(operator.getitem, x, (Ellipsis, slice(0, 4))), (0, 1), [(x, (0, 1))]),
        "slice, written out": (make.call(operator.getitem, h, (full, slice(0, 2))), (0, 2), [(h, (0, 2))]),
        "index with None": (make.call(operator.getitem, h, (full, full, None)), (0, 3), [(h, (0, 2))]),
        "a head": (make.call(operator.getitem, h, (full, 0)), (0, 1), [(h, (0, 2))]),
        "some tokens": (make.call(operator.getitem, x, (full, slice(-1, None))), (0, 1), None),
        "a row": (make.call(operator.getitem, x, slice(0, 1)), (0, 1), None),
        "the new dimension": (make.call(operator.getitem, x, (full, None)), (0, 1), None),
        "expand of heads": (make.method("expand", one_head, -1, 3, -1, -1), (0, 2), [(one_head, (0, 2))]),
        "expand of tokens": (make.method("expand", make.input("one", "b", 1, 12), -1, s, -1), (0, 1), None),
        "expand in front": (make.method("expand", make.input("row", "s", 12), b, -1, -1), (0, 1), None),
        "no layout": (make.method("mul", x, 2), (0, 1), None),
        "an input": (x, (0, 1), None),
    }  # fmt: skip


MAKE = Building()
NODES = nodes(MAKE)


@pytest.mark.parametrize("name", NODES)
def test_where_tokens_lie_in_the_inputs(name):
    """Every kind of node; ends raise instead."""
    node, place, want = NODES[name]
    if want is None:
        with pytest.raises(NotTokenwise):
            input_places(MAKE.graph, node, place)
    else:
        assert list(input_places(MAKE.graph, node, place).items()) == want


def test_elements_per_token():
    make = Building()
    x, h = make.input("x", "b", "s", 12), make.input("h", "b", 3, "s", 4)
    assert (width(make.graph, x, (0, 1)), width(make.graph, h, (0, 2))) == (12, 12)
    assert width(make.graph, make.method("view", x, -1, 12), (0, 0)) == 12
    assert width(make.graph, make.input("one", 1, 1, 7), (0, 1)) == 7


# -- again, on more tokens ----------------------------------------------------------------------------------------

AGAIN = [
    n for n, (node, _, want) in NODES.items() if want is not None and isinstance(MAKE.graph.value(node), torch.Tensor)
]
PAST, NEW, ROWS = 4, 3, 2
VALUES = {
    "x": random(ROWS, NEW, 12), "h": random(ROWS, 3, NEW, 4), "flat": random(ROWS * NEW, 12),
    "one": random(ROWS, 1, 12), "row": random(NEW, 12),
}  # fmt: skip


def values_of(make: Building, given: dict[str, torch.Tensor]) -> dict[fx.Node, Any]:
    """What every node is on plain values; what does not run on them is left out."""
    known: dict[fx.Node, Any] = {}
    for n in make.graph.nodes:
        if n.op == "placeholder":
            if n.name in make.values or n.name in given:
                known[n] = make.values.get(n.name, given.get(n.name))
        elif all(i in known for i in n.all_input_nodes):
            args, kwargs = fx.map_arg(n.args, known.__getitem__), fx.map_arg(n.kwargs, known.__getitem__)
            try:
                known[n] = (
                    getattr(args[0], n.target)(*args[1:], **kwargs)
                    if n.op == "call_method"
                    else n.target(*args, **kwargs)
                )
            except RuntimeError:
                continue
    return known


def tokens_of(value: torch.Tensor, place: Place) -> torch.Tensor:
    """[rows, tokens, ...] of a value."""
    if place[0] == place[1]:
        return value.movedim(place[0], 0).unflatten(0, (ROWS, -1))
    return value.movedim(place, (0, 1))


@pytest.fixture(scope="module")
def again() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Name -> (a node traced for NEW tokens, run again on PAST + NEW; the node itself), as [rows, tokens, ...]."""
    make = Building()
    cases = nodes(make)
    plain = values_of(make, VALUES)
    given, made_nodes = dict(VALUES), {}
    for name in AGAIN:
        node, place, _ = cases[name]
        longer: dict[fx.Node, fx.Node] = {}
        for source, at in input_places(make.graph, node, place).items():
            # The same tokens behind others: a placeholder of its own for each input.
            split = not isinstance(plain[source], torch.Tensor)
            whole = source.args[0] if split else source  # a split's items come from its longer input
            value = tokens_of(plain[whole], at)
            value = torch.cat([random(ROWS, PAST, *value.shape[2:], seed=5), value], 1)
            shape = list(make.graph.shape(whole))
            length = make.symbols["p"] + make.symbols["s"]
            shape[at[1]] = length if at[0] != at[1] else make.symbols["b"] * length
            value = value.flatten(0, 1).movedim(0, at[0]) if at[0] == at[1] else value.movedim((0, 1), at)
            last = [n for n in make.graph.nodes if n.op == "placeholder"][-1]
            with make.graph.graph.inserting_after(last), make.mode:
                new = make._placeholder(f"longer_{len(given)}", torch.empty(shape, dtype=torch.float64))
            given[new.name] = value
            longer[source] = make.method("split", new, [4, 8], -1) if split else new
        source, at = next(iter(input_places(make.graph, node, place).items()))
        first = longer[source] if isinstance(make.graph.value(longer[source]), torch.Tensor) else longer[source].args[0]
        sizes = tuple(make.method("size", first, d) for d in at)
        made_nodes[name] = rerun(make.graph, node, place, longer, sizes)
    known = values_of(make, given)
    return {
        n: (tokens_of(known[m], cases[n][1]), tokens_of(plain[cases[n][0]], cases[n][1])) for n, m in made_nodes.items()
    }


@pytest.mark.parametrize("name", AGAIN)
def test_a_node_run_again_on_all_tokens_ends_as_it_does_on_some(name, again):
    got, expected = again[name]
    assert got.shape[1] == PAST + NEW
    assert close(got[:, PAST:], expected) < 1e-14
    assert close(got[:, :NEW], expected) > 0.1


def test_a_symbolic_feature_dimension_cannot_be_run_again():
    make = Building()
    x = make.input("x", "b", "s", "t", 2)
    node = make.method("flatten", x, 2)
    view = make.method("view", node, make.method("size", x, 0), make.method("size", x, 1), make.method("size", x, 2), 2)
    place = input_places(make.graph, view, (0, 1))
    assert place == {node: (0, 1)}
    sizes = (make.method("size", node, 0), make.method("size", node, 1))
    with pytest.raises(NotTokenwise, match="symbolic feature dimension"):
        rerun(make.graph, view, (0, 1), {node: node}, sizes)


def test_a_linear_map_is_followed_where_the_layout_module_knows_it():
    make = Building()
    w = make.weight("w", random(4, 12))
    x = make.input("x", "b", "s", 12)
    computed = make.call(F.linear, x, make.method("mul", w, 2))
    assert linear_of(make.graph, computed) is None
    with pytest.raises(NotTokenwise, match="neither linear nor a view"):
        input_places(make.graph, computed, (0, 1))


# -- what may run again on read ----------------------------------------------------------------------------------------


def _normed_key(make: Building, *, over: int = -1, scale: Any = None) -> Any:
    """A key that is projected, normed in another dtype over a dimension, and multiplied by something."""
    x = make.input("x", "b", "s", 6)
    y = make.call(F.linear, x, make.weight("w", random(8, 6)))
    y = make.method(
        "transpose", make.method("view", y, make.method("size", x, 0), make.method("size", x, 1), 2, 4), 1, 2
    )
    wide = make.method("to", y, torch.float32)
    mean = make.call(torch.mean, make.call(operator.mul, wide, wide), over, True)
    out = make.method("type_as", make.call(operator.mul, wide, make.call(torch.rsqrt, mean)), y)
    return out if scale is None else make.call(operator.mul, out, scale(make, x))


def test_a_norm_with_casts_is_followed_to_its_linear_map():
    make = Building()
    key = _normed_key(make, scale=lambda make, x: make.weight("gamma", random(4)))
    again, linears, positions = again_on_read(make.graph, key, (0, 2))
    assert [linear_of(make.graph, n).weight.name for n in linears] == ["w"]
    assert not positions
    assert {getattr(n.target, "__name__", n.target) for n in again} == {"to", "mul", "mean", "rsqrt", "type_as"}
    with pytest.raises(NotTokenwise):  # only where somebody has marked it
        input_places(make.graph, key, (0, 2))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"over": 2}, "differs from call to call"),
        ({"over": 1}, "more than the features"),
        ({"scale": lambda make, x: make.method("amax", x)}, "differs from call to call"),
        ({"scale": lambda make, x: make.method("size", x, 1)}, "depends on the size"),
        ({"scale": lambda make, x: make.input("rows", "b", 1, 1, 1)}, "differs from call to call"),
    ],
)
def test_what_differs_from_call_to_call_does_not_run_again(options, why):
    make = Building()
    with pytest.raises(NotTokenwise, match=why):
        again_on_read(make.graph, _normed_key(make, **options), (0, 2))
