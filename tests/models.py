"""Tiny random models for the tests: those of ``tiny:FAMILY``."""

from __future__ import annotations

from latentscan.runtime.tiny import FAMILIES, MAMBA1_FAMILIES, SSD_FAMILIES, build

__all__ = ["FAMILIES", "MAMBA1_FAMILIES", "SSD_FAMILIES", "build"]
