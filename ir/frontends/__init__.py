"""Which library functions become which canonical op."""

from __future__ import annotations


def register_all() -> None:
    """Register every frontend whose library is imported by now. Idempotent; called before each capture."""
    import importlib

    for name in ("huggingface", "huggingface_ssm"):
        importlib.import_module(f"latentscan.ir.frontends.{name}").register()
