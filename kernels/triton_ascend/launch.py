"""Starting the kernels of this folder, which are named and imported only when they run.

The vendor's Triton and the NPU's torch are needed on the NPU alone; who checks the kernels without one sets ``runner``.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

MOST_PROGRAMS = 65535  # of one launch, over all axes

# Called for every launch (of at most MOST_PROGRAMS programs) in place of the device.
runner: Callable[[Kernel, int, dict[str, Any]], None] | None = None


@dataclass(frozen=True)
class Kernel:
    """A kernel by name: ``name`` in ``module`` (of this folder)."""

    module: str
    name: str

    @property
    def path(self) -> Path:
        return Path(__file__).parent / f"{self.module}.py"

    @property
    def parameters(self) -> dict[str, bool]:
        """Parameter -> whether it is a compile-time constant, in order; read from the source."""
        return _parameters(self.path, self.name)

    def load(self) -> Any:
        """The compiled function; imports Triton."""
        return getattr(importlib.import_module(f"latentscan.kernels.triton_ascend.{self.module}"), self.name)


@cache
def _parameters(path: Path, name: str) -> dict[str, bool]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            return {
                a.arg: "constexpr" in (ast.unparse(a.annotation) if a.annotation is not None else "") for a in arguments
            }
    raise LookupError(f"{path.name} has no kernel {name}")


def launch(kernel: Kernel, units: int, /, **arguments: Any) -> None:
    """Serve ``units`` units of work, a program each, in as many launches as the device's limit asks for.

    The kernel's parameter ``first`` is the number of a launch's first unit.
    """
    for first in range(0, units, MOST_PROGRAMS):
        programs = min(MOST_PROGRAMS, units - first)
        if runner is not None:
            runner(kernel, programs, {**arguments, "first": first})
        else:
            kernel.load()[(programs,)](**arguments, first=first)
