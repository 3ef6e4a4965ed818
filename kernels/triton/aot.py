"""Compiling every launch of a function without a device: registers, spills and shared memory of each kernel.

``compile_launches`` runs the function on meta tensors with launches recorded instead of started, so that what is
compiled is what the function launches, specialised as Triton would at the call.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from latentscan.kernels.triton import chunk_common

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel. ``spill``: bytes of stack a thread; ``shared``: bytes a program."""

    kernel: str
    warps: int
    registers: int
    spill: int
    shared: int


def compile_launches(run: Callable[[], Any], capability: int = 90) -> list[Compiled]:
    """Compile what ``run`` launches for compute capability ``capability`` (80, 90); each distinct kernel once.

    Args:
        run: calls kernels on tensors of the meta device.

    Raises:
        Exception: whatever the compiler says of a kernel that does not compile.
    """
    found: dict[Any, Compiled] = {}

    def record(kernel: Any, grid: int, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        options = {k: v for k, v in meta.items() if k in OPTIONS}
        source, key = _source(kernel, args, {k: v for k, v in meta.items() if k not in OPTIONS}, capability)
        key = (kernel.__name__, key, tuple(sorted(options.items())))
        if key not in found:
            found[key] = _compile(kernel.__name__, source, options, capability)

    before, chunk_common.recorder = chunk_common.recorder, record
    try:
        run()
    finally:
        chunk_common.recorder = before
    return list(found.values())


def _source(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], capability: int) -> tuple[Any, Any]:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    signature: dict[str, str] = {}
    values: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(kernel.arg_names):
        if i < len(args):
            kind, specialised = native_specialize_impl(CUDABackend, args[i], False, True, True)
            signature[name] = kind
            if kind == "constexpr":
                values[(i,)] = args[i]
            elif specialised is not None and "D" in str(specialised):
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            values[(i,)] = constants[name]
    make: Any = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        make = GluonASTSource
    source = make(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    return source, (tuple(signature.items()), str(sorted(values.items(), key=str)), str(attributes))


def _compile(name: str, source: Any, options: dict[str, Any], capability: int) -> Compiled:
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        text = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    registers = re.search(r"REG:(\d+)", text)
    stack = re.search(r"STACK:(\d+)", text)
    metadata = compiled.metadata
    return Compiled(
        name, metadata.num_warps, int(registers[1]) if registers else -1, int(stack[1]) if stack else -1,
        metadata.shared,
    )  # fmt: skip
