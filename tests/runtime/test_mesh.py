"""What ranks tell each other beside the graphs' own collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._dispatch.python import enable_python_dispatcher

from latentscan.ir.mesh import Axis
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
