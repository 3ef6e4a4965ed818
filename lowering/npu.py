"""What an Ascend NPU needs of this machine, and what of it is missing. torch_npu is imported here and nowhere else.

torch_npu without CANN raises while it is imported (ImportError or RuntimeError, by version), and with torch's backend
autoload it does so inside ``import torch``; so it is imported only when an NPU is asked for, and its error is told.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from typing import Any

import torch

from latentscan.ir.errors import PipelineError

REMEDY = (
    "run on a machine with an NPU, CANN, torch_npu and triton-ascend; here, `latentscan emit MODEL --target ascend "
    "--out DIR` writes the kernels and `make check-ascend` checks them; target=auto runs the model as it is"
)


# What an NPU calls itself -> whose tiles its kernels take. The 910B and the 910_93 have the same cores.
_NAMES = {r"Ascend910B\d?": "910B3", r"Ascend910_93": "910B3", r"Ascend950": "950", r"Ascend910_95": "950"}


def missing() -> list[str]:
    """What target=ascend lacks on this machine, in words; empty if it can run. Never raises."""
    found = []
    module, problem = _torch_npu()
    if problem:
        found.append(problem)
    else:
        try:
            there = bool(getattr(torch, "npu", module).is_available())
        except Exception as error:  # noqa: BLE001  (a broken installation may raise anything)
            found.append(f"torch_npu cannot look for an NPU ({line(error)})")
        else:
            if not there:
                found.append("torch_npu finds no NPU")
            else:
                try:
                    chip()
                except PipelineError as error:
                    found.append(error.what)
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


def chip(index: int | None = None) -> str:
    """Whose tiles the kernels take on an NPU (None: the current one): a name of ``tiles.CHIPS``.

    Raises:
        PipelineError: the NPU does not say what it is, or there are no tiles for it.
    """
    module, problem = _torch_npu()
    try:
        name = str(getattr(torch, "npu", module).get_device_name(*(() if index is None else (index,))))
    except Exception as error:
        raise PipelineError(f"the NPU cannot be asked what it is ({problem or line(error)})", remedy=REMEDY) from error
    for pattern, tiles in _NAMES.items():
        if re.match(pattern, name):
            return tiles
    raise PipelineError(f"there are no tiles for the NPU {name}", remedy="use target=reference there")


def vendor() -> Any:
    """torch_npu's module, or None."""
    return _torch_npu()[0]


def _torch_npu() -> tuple[Any, str]:
    """(the module or None, what is wrong with it)."""
    if "torch_npu" in sys.modules and sys.modules["torch_npu"] is None:  # the command set a broken one aside
        return None, "torch_npu is installed and cannot be imported"
    if not _installed("torch_npu"):
        return None, "torch_npu is not installed"
    try:
        return importlib.import_module("torch_npu"), ""
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return None, f"torch_npu is installed and cannot be imported ({line(error)})"


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:  # noqa: BLE001
        return name == "torch_npu"  # there is one, and importing it says what is wrong


def line(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
