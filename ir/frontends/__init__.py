"""Which library functions become which canonical op."""

from __future__ import annotations

import importlib
from typing import Any

_FRONTENDS = ("huggingface", "huggingface_ssm")


def register_all() -> bool:
    """Register the functions of every library and model file that is imported by now. Idempotent.

    Called before each capture, and by the plain backend after each trace. Functions are tried out on small inputs, so
    this runs as if nothing were going on: no autocast, no fake or other tensor mode, on the CPU.

    Returns:
        whether there was something new, which a trace that is already made has not been told of.
    """
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    from latentscan.ir.frontends import base

    modules: list[Any] = [importlib.import_module(f"latentscan.ir.frontends.{name}") for name in _FRONTENDS]

    def known() -> tuple[int, ...]:
        return len(base._SUBSTITUTED), *(len(m._SCANNED) for m in modules)

    before = known()
    quiet = torch.no_grad(), torch.autocast("cpu", enabled=False), _disable_current_modes(), torch.device("cpu")
    with quiet[0], quiet[1], quiet[2], quiet[3]:
        for module in modules:
            module.register()
    return known() != before
