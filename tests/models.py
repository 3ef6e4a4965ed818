"""Tiny random models for the tests: those of ``tiny:FAMILY`` that the installed transformers knows."""

from __future__ import annotations

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from latentscan.runtime import tiny
from latentscan.runtime.tiny import MAMBA1_FAMILIES, SSD_FAMILIES, build

NEW = {"deepseek_v32"}  # absent in the oldest transformers that is supported
FAMILIES = {f: v for f, v in tiny.FAMILIES.items() if f not in NEW or v[0] in CONFIG_MAPPING_NAMES}

__all__ = ["FAMILIES", "MAMBA1_FAMILIES", "SSD_FAMILIES", "build"]
