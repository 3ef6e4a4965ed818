"""latentscan: checked graph transformations for long-sequence models."""

from __future__ import annotations

__version__ = "0.1.0"
