"""Compiles the AscendC kernels with g++ against the host header and runs plans of launches: host semantics, no NPU."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from latentscan.kernels.ascendc.emit import Plan, Shape, sources

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")
CANARY = 0x7E


class HostError(Exception):
    """What the host header found, or the compiler said."""


def build(shape: Shape, folder: Path, change: dict[str, tuple[str, str]] | None = None, *flags: str) -> Path:
    """The shared library of a shape; ``change``: file -> (text, what replaces it), for sabotage.

    Raises:
        HostError: g++ refuses the sources.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in sources(shape).items():
        if change and name in change:
            old, new = change[name]
            assert text.count(old) == 1, (name, old, text.count(old))
            text = text.replace(old, new)
        (folder / name).write_text(text)
    library = folder / "kernels.so"
    command = ["g++", *FLAGS, *flags, f"-I{folder}", f"-I{HERE}", str(HERE / "driver.cpp"), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostError(done.stderr)
    return library


def run(library: Path, plan: Plan, inputs: dict[str, Tensor], blocks: int = 3) -> dict[str, Tensor]:
    """The outputs of a plan. Other buffers are NaN before they are written, and lie between canaries.

    Raises:
        HostError: overrun, misalignment, a race, ... with the kernel's name.
    """
    loaded = ctypes.CDLL(str(library))
    made: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for name, (shape, dtype) in plan.buffers.items():
        kind = getattr(torch, dtype)
        count = torch.Size(shape).numel()
        whole[name] = torch.full((count * kind.itemsize + 1024,), CANARY, dtype=torch.uint8)
        made[name] = whole[name][512:-512].view(kind).view(shape)
        if name in inputs:
            assert tuple(inputs[name].shape) == shape, (name, inputs[name].shape, shape)
            made[name].copy_(inputs[name])
        else:
            made[name].fill_(float("nan"))
    tiling = ctypes.create_string_buffer(plan.tiling_bytes())
    for launch in plan.launches:
        addresses: list[Any] = [made[name].data_ptr() for name in launch.buffers] + [ctypes.addressof(tiling)]
        function = getattr(loaded, f"run_{launch.kernel}")
        function.restype = ctypes.c_char_p
        wrong = function(ctypes.c_int64(min(blocks, launch.units)), (ctypes.c_void_p * len(addresses))(*addresses))
        if wrong is not None:
            raise HostError(f"{launch.kernel}: {wrong.decode()}")
    for name, tensor in whole.items():
        if not bool((torch.cat([tensor[:512], tensor[-512:]]) == CANARY).all()):
            raise HostError(f"a write outside of {name}")
    return {name: made[name] for name in plan.outputs}
