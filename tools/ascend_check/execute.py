"""Runs launches on the CPU: the vendor's IR of each kernel, as a library of this machine, program after program.

Tensors are handed over as copies between canaries, so that a write outside of a tensor is found. What a program
reads without having written it is NaN.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from latentscan.kernels.triton_ascend import launch as launching
from latentscan.kernels.triton_ascend.launch import MOST_PROGRAMS, Kernel
from latentscan.tools.ascend_check.toolchain import Call, CheckError, Toolchain

GUARD = 4096  # bytes before and after each tensor
CANARY = 0x7E


class _View(ctypes.Structure):
    """A memref of rank 1."""

    _fields_ = [
        ("allocated", ctypes.c_void_p), ("aligned", ctypes.c_void_p), ("offset", ctypes.c_int64),
        ("size", ctypes.c_int64), ("stride", ctypes.c_int64),
    ]  # fmt: skip


@contextlib.contextmanager
def on_the_cpu(toolchain: Toolchain, chip: str = "910B3") -> Iterator[list[tuple[Call, int]]]:
    """Within it, launches of kernels/triton_ascend run on the CPU. Yields the list of (call, programs) launched."""
    launched: list[tuple[Call, int]] = []

    def run(kernel: Kernel, programs: int, arguments: dict[str, Any]) -> None:
        call = Call.of(kernel, arguments)
        launched.append((call, programs))
        run_programs(toolchain.library(toolchain.ir(call, chip)), call, programs, arguments)

    before, launching.runner = launching.runner, run
    try:
        yield launched
    finally:
        launching.runner = before


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Call, int]]]:
    """Within it, launches do nothing but are listed (on tensors of any device, meta too)."""
    launched: list[tuple[Call, int]] = []
    before = launching.runner
    launching.runner = lambda kernel, programs, arguments: launched.append((Call.of(kernel, arguments), programs))
    try:
        yield launched
    finally:
        launching.runner = before


def run_programs(library: Path, call: Call, programs: int, arguments: dict[str, Any]) -> None:
    """Run a kernel's programs one after the other.

    Raises:
        CheckError: more programs than the device starts, or a write outside of a tensor.
    """
    if programs > MOST_PROGRAMS:
        raise CheckError(f"{call.kernel.name}: {programs} programs, the device starts {MOST_PROGRAMS}")
    loaded = ctypes.CDLL(str(library))
    function = getattr(loaded, f"_mlir_ciface_{call.kernel.name}")
    guarded: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # storage -> (its bytes, the copy)
    scratch = torch.zeros(1 << 16, dtype=torch.int8)
    views, given = [], []

    def view(pointer: int, size: int) -> Any:
        views.append(_View(pointer, pointer, 0, size, 1))
        return ctypes.byref(views[-1])

    given += [view(scratch.data_ptr(), scratch.numel()), view(scratch.data_ptr(), scratch.numel())]
    for name, kind in call.signature:
        value = arguments[name]
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in guarded:
                bytes_ = torch.tensor([], dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
                copy = torch.full((bytes_.numel() + 2 * GUARD,), CANARY, dtype=torch.uint8)
                copy[GUARD : GUARD + bytes_.numel()] = bytes_
                guarded[storage.data_ptr()] = bytes_, copy
            start = guarded[storage.data_ptr()][1].data_ptr() + GUARD + value.storage_offset() * value.element_size()
            given.append(view(start, storage.nbytes() // value.element_size() - value.storage_offset()))
        elif kind == "fp32":
            given.append(ctypes.c_float(value))
        else:
            given.append((ctypes.c_int32 if kind == "i32" else ctypes.c_int64)(value))
    tail = [ctypes.c_int32(n) for n in (programs, 1, 1)]
    zero = ctypes.c_int32(0)
    for program in range(programs):
        loaded.latentscan_next_program()
        function(*given, *tail, ctypes.c_int32(program), zero, zero)
    for bytes_, copy in guarded.values():
        edge = torch.cat([copy[:GUARD], copy[GUARD + bytes_.numel() :]])
        if not bool((edge == CANARY).all()):
            raise CheckError(f"{call.kernel.name}: writes outside of a tensor of {bytes_.numel()} bytes")
        bytes_.copy_(copy[GUARD : GUARD + bytes_.numel()])
