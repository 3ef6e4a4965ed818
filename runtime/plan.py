"""One decision per model: what was planned, and which weights it made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from latentscan.ir.weights import Recipe
from latentscan.passes.pipeline import PassRecord


@dataclass(frozen=True)
class ModelPlan:
    """The frozen decision that every graph of a wrapped model applies.

    Attributes:
        pipeline: canonical text.
        facts: (pass name, module path) -> facts.
        recipes: new weights, in the order in which they are made.
        released: paths of the old weights that no graph reads any more.
        required: (pass name, module path) that must be rewritten because old weights are gone.
        records: what the passes said when the plan was made.
    """

    pipeline: str
    facts: dict[tuple[str, str], dict[str, Any]]
    recipes: tuple[Recipe, ...] = ()
    released: tuple[str, ...] = ()
    required: frozenset[tuple[str, str]] = frozenset()
    records: tuple[PassRecord, ...] = field(default=(), repr=False)

    def to_json(self) -> dict[str, Any]:
        """A stable, plain form for ``latentscan.json``."""
        return {
            "pipeline": self.pipeline,
            "sites": [
                {"pass": name, "module": module, "facts": facts} for (name, module), facts in sorted(self.facts.items())
            ],
            "weights": [{"sources": list(r.sources), "targets": list(r.targets)} for r in self.recipes],
            "released": list(self.released),
        }
