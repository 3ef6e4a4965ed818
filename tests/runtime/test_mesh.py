"""What ranks tell each other beside the graphs' own collectives."""

from __future__ import annotations

import copy

import pytest
import sympy
import torch
import torch.distributed as dist
from torch._dispatch.python import enable_python_dispatcher

from latentscan.ir.capture import capture
from latentscan.ir.errors import MeshError
from latentscan.ir.mesh import Axis, parse_mesh
from latentscan.ir.order import Collective
from latentscan.ir.weights import Part, Recipe
from latentscan.runtime import mesh, own, session

PYTHON = torch._C.DispatchKey.PythonDispatcher


def test_ranks_are_compared_without_pythons_dispatcher(monkeypatch):
    """Under it an operator starts with the interpreter's lock held, and gloo's thread may wait for that lock while it
    holds the one that starting takes: seen as a hang of a backward graph's compilation (two stacks of one process)."""
    seen = []

    def gather(found, facts, group=None):
        seen.append(torch._C._dispatch_tls_is_dispatch_key_included(PYTHON))
        found[:] = [facts] * len(found)

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(mesh, "group_of", lambda axis: None)
    with enable_python_dispatcher():
        assert torch._C._dispatch_tls_is_dispatch_key_included(PYTHON)
        assert mesh.gather_facts(Axis("tp", 2, 0, ""), "here") == ["here", "here"]
        assert torch._C._dispatch_tls_is_dispatch_key_included(PYTHON)
    assert seen == [False]


@pytest.mark.parametrize("same", [True, False])
def test_models_of_which_other_weights_train_are_not_alike(monkeypatch, same):
    """A bias that trains alone is added elsewhere: ranks that see it otherwise would give wrong numbers."""
    one = torch.nn.Linear(3, 2)
    other = copy.deepcopy(one)
    other.weight.requires_grad_(same)
    said = []

    def gather(axis, facts):
        said.append(facts)
        return said[-2:] if len(said) > 1 else [facts, facts]

    monkeypatch.setattr(mesh, "gather_facts", gather)
    mesh.check_alike(parse_mesh("tp=2"), one, "tensor-parallel")
    if same:
        mesh.check_alike(parse_mesh("tp=2"), other, "tensor-parallel")
    else:
        with pytest.raises(MeshError, match="rank 1 of tp has trained weights"):
            mesh.check_alike(parse_mesh("tp=2"), other, "tensor-parallel")


def test_tokens_and_masks_are_compared_by_their_values_and_large_values_are_not():
    ids = torch.tensor([[1, 2, 3]])
    assert mesh._values(ids) == mesh._values(ids.clone()) != mesh._values(ids + 1)
    assert mesh._values(ids.bool()) != mesh._values(ids == 1)
    assert mesh._values(ids.t()) == mesh._values(ids.t().contiguous())
    assert mesh._values(ids.float()) == ""
    assert mesh._values(ids[:, :0]).startswith(" holding ")


class Dropping(torch.nn.Module):
    """A dropout that is a module, one that is a call, and one that always drops."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.module = torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)
        self.called, self.always = Calls(None), Calls(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.always(self.called(self.module(self.inner(x))))


class Calls(torch.nn.Module):
    def __init__(self, training: bool | None) -> None:
        super().__init__()
        self.forced = training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5, self.training if self.forced is None else self.forced)


def drawing_graph(model: torch.nn.Module) -> session.TracedGraph:
    """What a session notes of a graph of the model in its present mode."""
    graph = capture(model, inputs={"x": torch.ones(2, 3)}, training=True)
    return session.TracedGraph(
        True, False, [], draws=session.drawing_modules(graph, model), drawing=torch.device("cpu")
    )


def test_random_numbers_count_where_a_module_that_draws_them_is_in_training():
    model = Dropping().train()
    model.always.forced = None
    graph = drawing_graph(model)
    assert graph.draws == {"module": False, "called": False, "always": False}
    found = []
    for still in ((), ("module",), ("module", "called"), ("module", "called", "always")):
        for name in still:
            model.get_submodule(name).eval()
        found.append(graph.may_draw(model))
    assert found == [True, True, True, False]
    assert model.training
    model.module.train()
    assert graph.may_draw(model)
    model.module.p = 0.0
    assert not graph.may_draw(model)
    del model.called  # of what is gone nothing is known
    assert graph.may_draw(model)


def test_random_numbers_that_are_drawn_in_evaluation_always_count():
    model = Dropping().eval()
    graph = drawing_graph(model)
    assert graph.draws == {"always": True}
    assert graph.may_draw(model) and graph.may_draw(model.train())


@pytest.mark.parametrize("axis", ["tp", "cp"])
@pytest.mark.parametrize("frozen", [(), ("0.weight",), ("0.weight", "1.bias"), ("2.bias",)], ids=str)
def test_a_weight_that_one_rank_froze_after_wrap_is_named_on_every_rank(monkeypatch, axis, frozen):
    """The last bias is the first rank's alone, so what it does is that rank's matter."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    other = copy.deepcopy(model)
    for name in frozen:
        other.get_parameter(name).requires_grad_(False)
    parts = (Part(0, ((0,), (1,)), 0, (2, 2)), Part(None, ((0,), (1,)), 0, (2,)))
    alone = Recipe(("w", "b"), ("2.weight", "2.bias"), "", "", lambda *given: given, parts=parts)
    mine, theirs = (own.trained_weights(m, [alone]) for m in (model, other))
    said: list[torch.Tensor] = []

    def reduce(both, *_, **__):  # the other rank's numbers were said before
        said.append(both.clone())
        both.copy_(torch.stack(said).amax(0))

    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(mesh, "group_of", lambda _: None)
    flags = ["".join("01"[t] for _, t in trains) for trains in (mine, theirs)]
    monkeypatch.setattr(mesh, "gather_facts", lambda _, facts: [facts | {"trained weights": f} for f in flags])
    where = parse_mesh(f"{axis}=2")
    mesh.check_call(where, (), {}, True, trains=theirs)
    if frozen in ((), ("2.bias",)):
        mesh.check_call(where, (), {}, True, trains=mine)
        return
    more = {1: "", 2: " and 1 more"}[len(frozen)]
    with pytest.raises(MeshError, match=f"on rank 1 of {axis} than on rank 0: 0.weight{more}. Freeze"):
        mesh.check_call(where, (), {}, True, trains=mine)
    monkeypatch.setattr(mesh, "gather_facts", lambda _, facts: [(["same"], f) for f in flags])
    issued = [Collective("all_reduce", "forward", axis, sympy.Integer(1), torch.float32, "", "", "")]
    with pytest.raises(MeshError, match="other weights train"):  # also where a graph is compiled
        mesh.agree_on_order(where, issued, mine)
