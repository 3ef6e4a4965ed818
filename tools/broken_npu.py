"""A torch_npu that is installed and cannot be imported must not keep the command from planning and emitting.

torch imports it as it is imported itself (its backends are loaded by entry point), and transformers imports it where it
finds it; either then fails. So the command tries it once, tells, and goes on as if it were not there.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable


def set_aside(tell: Callable[[str], None]) -> None:
    """Import torch_npu where it is installed; if that fails, tell why in a line and hide it from this process.

    Nothing is done where torch is there already: what it loads at import is then loaded.
    """
    if "torch" in sys.modules or "torch_npu" in sys.modules or importlib.util.find_spec("torch_npu") is None:
        return
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # imported here instead, where its error can be told
    importlib.import_module("torch")
    try:
        importlib.import_module("torch_npu")
    except (Exception, SystemExit) as error:  # noqa: BLE001  (a broken installation may raise anything)
        from latentscan.lowering.npu import line

        for name in [n for n in sys.modules if n.startswith("torch_npu.")]:
            del sys.modules[name]
        sys.modules["torch_npu"] = None  # type: ignore[assignment]
        tell(f"torch_npu is installed and cannot be imported ({line(error)}); going on without it")
