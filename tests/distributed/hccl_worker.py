"""The worker of the distributed tests on a backend that is called hccl and serves the device type npu.

Its transport is gloo, so that it runs anywhere and the numbers count. Run by test_hccl.py: a backend is registered once
per process.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist

from latentscan.runtime import mesh as meshes
from latentscan.tests.distributed import worker


def _create(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def main() -> None:
    device = types.ModuleType("npu")
    for name, value in {
        "device_count": 8,
        "is_available": True,
        "is_initialized": True,
        "current_device": 0,
        "_is_in_bad_fork": False,
        "manual_seed_all": None,
    }.items():
        setattr(device, name, lambda *_, value=value: value)
    device.set_device = lambda index: None  # type: ignore[attr-defined]
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", device)
    dist.Backend.register_backend("hccl", _create, devices=["cpu", "npu"])
    begin, bind = dist.init_process_group, meshes.bind_mesh

    def init(backend: str, **options: Any) -> None:
        begin("hccl", **options)
        assert dist.get_backend() == "hccl"
        # A mesh of a model whose parameters are on an NPU.
        parameter = types.SimpleNamespace(device=types.SimpleNamespace(type="npu"))
        model: Any = types.SimpleNamespace(parameters=lambda: iter([parameter]))
        (axis,) = (a for a in _bound(bind(f"tp={dist.get_world_size()}", model)).axes)
        assert (axis.name, axis.size, axis.rank) == ("tp", dist.get_world_size(), dist.get_rank())
        assert dist.get_backend(meshes.group_of(axis)) == "hccl"

    dist.init_process_group = init
    dist.barrier = lambda: dist.all_reduce(torch.zeros(1))  # the library's asks the device for its C++ hooks
    worker.main()


def _bound(mesh: Any) -> Any:
    assert mesh is not None
    return mesh


if __name__ == "__main__":
    main()
