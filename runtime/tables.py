"""Tables for people."""

from __future__ import annotations

from typing import Any


def pass_table(rows: list[dict[str, Any]], title: str | None = None) -> Any:
    """A rich table of pass rows (see ``Report.passes``)."""
    from rich.table import Table

    table = Table(title=title)
    table.add_column("pass")
    table.add_column("tier")
    for name in ("sites", "refusals", "nodes", "seconds", "worst error"):
        table.add_column(name, justify="right")
    for row in rows:
        error = "not checked" if row["error"] is None else f"{row['error']:.1e}"
        table.add_row(
            row["pass"], row["tier"], str(row["sites"]), str(row["refusals"]), f"{row['nodes']:+d}",
            f"{row['seconds']:.2f}", error,
        )  # fmt: skip
    return table
