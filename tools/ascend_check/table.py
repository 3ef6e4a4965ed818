"""The table of docs/ascend.md, made from the findings of the check."""

from __future__ import annotations

from typing import Any

BEGIN, END = "<!-- made by `make check-ascend ARGS=--table=docs/ascend.md` -->", "<!-- end of what is made -->"


def markdown(text: str, found: dict[str, Any]) -> str:
    """``text`` with what lies between the marks made anew.

    Raises:
        ValueError: the marks are not there.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"no {BEGIN} and {END}")
    head, rest = text.split(BEGIN, 1)
    return f"{head}{BEGIN}\n\n{_kernels(found)}\n\n{_runs(found)}\n\n{_controls(found)}\n\n{END}{rest.split(END, 1)[1]}"


def _kernels(found: dict[str, Any]) -> str:
    chips = list(dict.fromkeys(k["chip"] for k in found["kernels"]))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for k in found["kernels"]:
        tile = k["tile"] if k["tile"] != "fixed" else k["constants"]
        cell = rows.setdefault((k["kernel"], tile), {})
        verdict = ("passes" if k["buffers"] == "double" else "passes, single buffers") if k["ok"] else k["errors"][0]
        if cell.get(k["chip"], verdict) != verdict:  # two variants of one tile: the worse one is told
            verdict = max(cell[k["chip"]], verdict, key=len)
        cell[k["chip"]] = verdict
    lines = [f"| kernel | tile | {' | '.join(chips)} |", f"|---|---|{'---|' * len(chips)}"]
    for (kernel, tile), cell in rows.items():
        lines.append(f"| {kernel} | {tile} | {' | '.join(cell.get(chip, 'not shipped') for chip in chips)} |")
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
