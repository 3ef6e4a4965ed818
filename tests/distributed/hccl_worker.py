"""The worker of the distributed tests on a backend that is called hccl, and a mesh for the device type npu.

Its transport is gloo, so that it runs anywhere and the numbers count. Run by test_hccl.py: a backend and a device type
are registered once per process, and Dynamo traces nothing after a device type without a C++ part was.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist

from latentscan.runtime import mesh as meshes
from latentscan.tests.distributed import worker
from latentscan.tests.distributed.launch import serve


def _create(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _mesh_of_npus() -> None:
    """What wrap does first with a model whose parameters are on an NPU."""
    device = types.ModuleType("npu")
    for name, value in {"device_count": 8, "is_available": True, "is_initialized": True, "current_device": 0}.items():
        setattr(device, name, lambda *_, value=value: value)
    device.set_device = lambda index: None  # type: ignore[attr-defined]
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", device)
    parameter = types.SimpleNamespace(device=types.SimpleNamespace(type="npu"))
    model: Any = types.SimpleNamespace(parameters=lambda: iter([parameter]))
    mesh = meshes.bind_mesh(f"tp={dist.get_world_size()}", model)
    assert mesh is not None
    (axis,) = mesh.axes
    assert (axis.name, axis.size, axis.rank) == ("tp", dist.get_world_size(), dist.get_rank())
    assert dist.get_backend(meshes.group_of(axis)) == "hccl"
    assert meshes.gather_facts(axis, dist.get_rank()) == list(range(axis.size))


def main() -> None:
    dist.Backend.register_backend("hccl", _create, devices=["cpu"])
    begin = dist.init_process_group

    def init(backend: str, **options: Any) -> None:
        begin("hccl", **options)
        assert dist.get_backend() == "hccl"

    def last() -> None:
        _mesh_of_npus()
        dist.all_reduce(torch.zeros(1))  # the library's barrier asks the device for its C++ part

    dist.init_process_group, dist.barrier = init, last
    serve(worker.run)


if __name__ == "__main__":
    main()
