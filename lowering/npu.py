"""What an Ascend NPU needs of this machine, and what of it is missing. torch_npu is imported here and nowhere else.

torch_npu without CANN raises while it is imported (ImportError or RuntimeError, by version), and with torch's backend
autoload it does so inside ``import torch``; so it is imported only when an NPU is asked for, and its error is told.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch

from latentscan.ir.errors import PipelineError

REMEDY = (
    "run on a machine with an NPU, CANN, torch_npu and triton-ascend; here, `latentscan emit MODEL --target ascend "
    "--out DIR` writes the kernels and `make check-ascend` checks them; target=auto runs the model as it is"
)


def missing() -> list[str]:
    """What target=ascend lacks on this machine, in words; empty if it can run. Never raises."""
    found = []
    module, problem = _torch_npu()
    if problem:
        found.append(problem)
    else:
        try:
            there = bool(getattr(torch, "npu", module).is_available())
        except (AttributeError, ImportError, OSError, RuntimeError) as error:
            found.append(f"torch_npu cannot look for an NPU ({_line(error)})")
        else:
            if not there:
                found.append("torch_npu finds no NPU")
    if not _installed("triton.backends.ascend"):
        found.append("the vendor's Triton (triton-ascend) is not installed")
    if not os.environ.get("ASCEND_HOME_PATH"):
        found.append("CANN's environment is not set (ASCEND_HOME_PATH)")
    return found


def require(device: Any = None) -> None:
    """Raise unless the target can run, and on that device type (None: not known yet).

    Raises:
        PipelineError: one message with everything that is missing.
    """
    if lacks := missing():
        raise PipelineError(f"target=ascend cannot run here: {'; '.join(lacks)}", remedy=REMEDY)
    if device not in (None, "npu"):
        raise PipelineError(
            f"target=ascend needs an NPU, and the model is on {device}", remedy="use target=auto or move the model"
        )


def vendor() -> Any:
    """torch_npu's module, or None."""
    return _torch_npu()[0]


def _torch_npu() -> tuple[Any, str]:
    """(the module or None, what is wrong with it)."""
    if not _installed("torch_npu"):
        return None, "torch_npu is not installed"
    try:
        return importlib.import_module("torch_npu"), ""
    except (ImportError, RuntimeError, OSError) as error:
        return None, f"torch_npu is installed and cannot be imported ({_line(error)})"


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, RuntimeError, OSError, ValueError):
        return name == "torch_npu"  # there is one, and importing it says what is wrong


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
