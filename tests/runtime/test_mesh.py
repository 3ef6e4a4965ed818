"""What ranks tell each other beside the graphs' own collectives."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch._dispatch.python import enable_python_dispatcher

from latentscan.ir.errors import MeshError
from latentscan.ir.mesh import Axis, parse_mesh
from latentscan.runtime import mesh

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
