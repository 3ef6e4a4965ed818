"""``latentscan passes`` and ``latentscan explain``: what passes say of themselves."""

from __future__ import annotations

import inspect
from typing import Any

from latentscan.passes.base import Pass
from latentscan.passes.pipeline import REGISTRY, pass_class

SCHEMA = 1


def tier_text(kind: type[Pass]) -> str:
    """The tier of a pass with its default options, and whether options change it."""
    tier = kind().tier.value
    return f"{tier} (by option)" if isinstance(inspect.getattr_static(kind, "tier"), property) else tier


def pass_rows() -> list[dict[str, Any]]:
    """Every pass: name, tier, summary, in the order of the registry."""
    found = [pass_class(name) for name in REGISTRY]
    return [{"name": kind.name, "tier": tier_text(kind), "summary": kind.summary} for kind in found]


def explanation(name: str) -> dict[str, Any]:
    """All that a pass says of itself. Raises PipelineError for an unknown name."""
    kind = pass_class(name)
    return {
        "schema": SCHEMA,
        "name": kind.name,
        "tier": tier_text(kind),
        "summary": kind.summary,
        "description": inspect.cleandoc(kind.__doc__ or ""),
        "math": kind.math,
        "options": [
            {
                "name": option,
                "type": str(spec.type),
                "default": spec.default,
                "choices": list(spec.metadata.get("choices", ())),
            }
            for option, spec in kind.options().items()
        ],
        "after": list(kind.after),
        "before": list(kind.before),
        "needs": list(kind.needs),
        "may_find_nothing": kind.may_be_empty,
        "graphs": "graphs that fill a cache" if kind.phases == "cached" else "every graph",
    }
