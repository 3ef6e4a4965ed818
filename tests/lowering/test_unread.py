"""Compiled graphs send no gradients of zero to weights that only unread outputs read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import aot_function, nop
from torch import fx, nn

from latentscan.lowering.unread import read_by, without_unread
from latentscan.runtime import executable
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build

torch.set_num_threads(1)


class Outputs(fx.GraphModule):
    """x, and the weights of three maps -> two results that share the first map, and a number."""

    def __init__(self, *, in_place: bool = False, alike: bool = False) -> None:
        graph = fx.Graph()
        x, a, b, c = (graph.placeholder(n) for n in "xabc")
        h = graph.call_function(torch.matmul, (x, a))
        if in_place:
            h = graph.call_function(torch.clone, (h,))
            graph.call_method("zero_", (graph.call_function(torch.narrow, (h, 1, 0, 1)),))
        first = graph.call_function(torch.tanh, (graph.call_function(torch.matmul, (h, b)),))
        second = graph.call_function(torch.matmul, (first if alike else h, c if not alike else b))
        graph.output((first, second, 3))
        super().__init__(nn.Module(), graph)


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 3, generator=generator, requires_grad=True) for _ in "abc"]


def gradients(run: Any, read: tuple[int, ...]) -> list[torch.Tensor | None]:
    x, given = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), weights()
    found = run(x, *given)
    sum((found[i] ** 2).sum() for i in read).backward()
    return [w.grad for w in given]


@pytest.mark.parametrize("read", [(0,), (1,), (0, 1)], ids=str)
def test_gradients_are_those_of_eager(read):
    module = Outputs()
    compiled = aot_function(module.forward, fw_compiler=nop)
    wanted = gradients(module.forward, read)
    found = gradients(without_unread(compiled, module.graph), read)
    assert [g is None for g in found] == [g is None for g in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine is None or torch.equal(mine, theirs)  # type: ignore[arg-type]
    plain = gradients(aot_function(module.forward, fw_compiler=nop), read)  # sabotage: without it they are zeros
    assert sum(g is not None and not g.any() for g in plain) == sum(g is None for g in wanted) == 2 - len(read)


def test_outputs_know_what_they_are_computed_from():
    assert read_by(Outputs().graph) == [frozenset({0, 1, 2}), frozenset({0, 1, 3}), frozenset()]


@pytest.mark.parametrize("words", [{"in_place": True}, {"alike": True}], ids=str)
def test_nothing_is_watched_where_nothing_can_differ_or_memory_is_written(words):
    run = print
    assert (without_unread(run, Outputs(**words).graph) is run) == (words == {"in_place": True})


def test_nothing_is_left_out_where_an_output_is_a_view_made_afterwards():
    module = Outputs()

    def viewed(*args: torch.Tensor) -> list[Any]:
        first, second, number = compiled(*args)
        return [first.t(), second, number]

    compiled = aot_function(module.forward, fw_compiler=nop)
    found = gradients(without_unread(viewed, module.graph), (0,))
    assert found[2] is not None and not found[2].any()


def test_calls_without_gradients_and_twice_through_one_graph():
    module = Outputs()
    given = weights()
    with torch.no_grad():
        assert without_unread(module.forward, module.graph)(torch.ones(2, 3), *given)[0].grad_fn is None
    run = without_unread(aot_function(module.forward, fw_compiler=nop), module.graph)
    once, again = run(torch.ones(2, 3), *given), run(-torch.ones(2, 3), *given)
    (once[0].sum() + again[1].sum()).backward()
    assert all(w.grad is not None and w.grad.any() for w in given)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """The first of two ranks, of which the other is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("inductor", [False, True])
def test_layers_behind_what_is_read_get_no_gradient_under_scheduled_collectives(two_ranks, monkeypatch, inductor):
    """The loss is of the hidden states of a layer."""
    found = []
    for mended in (True, False):
        if not mended:  # sabotage
            monkeypatch.setattr(executable, "without_unread", lambda run, graph: run)
        model = wrap(
            copy.deepcopy(build("llama")).train(), "tensor-parallel,overlap-collectives", mesh="tp=2", inductor=inductor
        )
        out = model(torch.randint(3, 90, (2, 9)), use_cache=False, output_hidden_states=True)
        out.hidden_states[1].sum().backward()
        found.append({n for n, p in model.named_parameters() if p.grad is None})
    assert found[1] == set()
    unread = ("model.layers.1.", "model.norm", "lm_head")
    assert found[0] == {n for n, _ in model.named_parameters() if n.startswith(unread)}
