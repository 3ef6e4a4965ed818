"""The table of docs/ascend.md, made from the findings of the check."""

from __future__ import annotations

from typing import Any

BEGIN, END = "<!-- made by `make check-ascend ARGS=--table=docs/ascend.md` -->", "<!-- end of what is made -->"


def markdown(text: str, found: dict[str, Any]) -> str:
    """``text`` with what lies between the marks made anew.

    Raises:
        ValueError: the marks are not there.
    """
    check_marks(text)
    head, rest = text.split(BEGIN, 1)
    return f"{head}{BEGIN}\n\n{_kernels(found)}\n\n{_runs(found)}\n\n{_controls(found)}\n\n{END}{rest.split(END, 1)[1]}"


def check_marks(text: str) -> None:
    """Raise ValueError unless the marks are there."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"no {BEGIN} and {END}")


def _kernels(found: dict[str, Any]) -> str:
    """A row for the tiles of a kernel that have the same verdicts on every chip."""
    chips = list(dict.fromkeys(k["chip"] for k in found["kernels"]))
    verdicts: dict[str, dict[str, dict[str, str]]] = {}  # kernel -> tile -> chip
    for k in found["kernels"]:
        verdict = ("passes" if k["buffers"] == "double" else "passes, single buffers") if k["ok"] else k["errors"][0]
        cell = verdicts.setdefault(k["kernel"], {}).setdefault(k["tile"], {})
        # Variants of one tile (a state and its adjoint): the worse one is told.
        cell[k["chip"]] = max(cell.get(k["chip"], ""), verdict, key=len)
    lines = [f"| kernel | tiles | {' | '.join(chips)} |", f"|---|---|{'---|' * len(chips)}"]
    for kernel, tiles in verdicts.items():
        rows: dict[tuple[str, ...], list[str]] = {}
        for tile, cell in tiles.items():
            rows.setdefault(tuple(cell.get(chip, "not shipped") for chip in chips), []).append(tile)
        for told, names in rows.items():
            lines.append(f"| {kernel} | {'; '.join(names)} | {' | '.join(told)} |")
    return "\n".join(lines)


def _runs(found: dict[str, Any]) -> str:
    lines = ["| run on the CPU from the vendor's IR | largest error of an output | tolerance |", "|---|---|---|"]
    for case in found["numerics"]:
        worst = max(case["errors"].values(), default=float("nan"))
        lines.append(f"| {case['name']} | {worst:.1e} | {case['tolerance']:.1e} |")
    return "\n".join(lines)


def _controls(found: dict[str, Any]) -> str:
    lines = ["| control, 910B3 | the compiler has to say | said |", "|---|---|---|"]
    for control in found["controls"]:
        said = "; ".join(e.split(" (possible")[0] for e in control["errors"] if "overflow" in e) or "passes"
        lines.append(f"| {control['name']} | {control['must']} | {said} |")
    return "\n".join(lines)
