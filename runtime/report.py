"""``model.report``: what was matched, refused and made, and what is held."""

from __future__ import annotations

import dataclasses
from typing import Any

from latentscan.ir.weights import bytes_of
from latentscan.runtime.own import get
from latentscan.runtime.session import Session


class Report:
    """What a wrapped model's passes did. ``print(model.report)`` or ``model.report.to_json()``."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def passes(self) -> list[dict[str, Any]]:
        """One row for each pass: sites, refusals, node delta, seconds, worst error."""
        return [
            {
                "pass": r.text,
                "tier": r.tier,
                "sites": len(r.sites),
                "refusals": len(r.refusals),
                "nodes": r.nodes_after - r.nodes_before,
                "seconds": round(r.seconds, 3),
                "error": r.error,
                "tolerance": r.tolerance,
                "rule": r.choice.rule if r.choice else "",
            }
            for r in self._session.plan.records
        ]

    @property
    def refusals(self) -> list[dict[str, str]]:
        return [
            {"pass": r.name, "module": f.module, "rule": f.rule, "reason": f.reason, "remedy": f.remedy}
            for r in self._session.plan.records
            for f in r.refusals
        ]

    @property
    def sites(self) -> list[dict[str, str]]:
        return [
            {"pass": r.name, "module": s.module, "rule": s.rule, "note": s.note}
            for r in self._session.plan.records
            for s in r.sites
        ]

    @property
    def new_weight_bytes(self) -> int:
        """Bytes of the Parameters that the passes made."""
        model = self._session.model
        return sum(bytes_of(get(model, t)) for r in self._session.plan.recipes for t in r.targets)

    @property
    def released_weight_bytes(self) -> int:
        """Bytes that the released Parameters took."""
        model = self._session.model
        return sum(bytes_of(get(model, path)) for path in self._session.plan.released)

    @property
    def graphs(self) -> list[dict[str, Any]]:
        """One row for each graph traced so far."""
        return [
            {
                "training": g.training,
                "cached": g.cached,
                "forms": len(g.operations),
                "operations": g.operations,
                "collectives": g.collectives,
                "scheduled": [dataclasses.asdict(s) for s in g.scheduled],
            }
            for g in self._session.graphs
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "pipeline": self._session.plan.pipeline,
            "passes": self.passes,
            "sites": self.sites,
            "refusals": self.refusals,
            "new_weight_bytes": self.new_weight_bytes,
            "released_weight_bytes": self.released_weight_bytes,
            "graphs": self.graphs,
        }

    def __str__(self) -> str:
        from rich.console import Console

        from latentscan.runtime.tables import pass_table

        console = Console(width=110, emoji=False, record=True, file=None, force_terminal=False)
        with console.capture() as captured:
            console.print(pass_table(self.passes))
            for refusal in self.refusals[:20]:
                console.print("refused {pass} at {module}: {rule}: {reason}. Remedy: {remedy}".format(**refusal))
        return captured.get()
