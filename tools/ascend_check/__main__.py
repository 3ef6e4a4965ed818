"""``python -m latentscan.tools.ascend_check``: everything of the Ascend target that can be checked without an NPU.

Exit status 0: passed. 1: a check failed. 3: it could not be run here; the message says why.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from latentscan.tools.ascend_check.environment import UnavailableError, default_folder, ensure
from latentscan.tools.ascend_check.execute import on_the_cpu
from latentscan.tools.ascend_check.lint import lint_folder
from latentscan.tools.ascend_check.numerics import Case, cases
from latentscan.tools.ascend_check.shipped import Shipped, controls, shipped
from latentscan.tools.ascend_check.table import check_marks, markdown
from latentscan.tools.ascend_check.toolchain import CheckError, Toolchain, Verdict

NOT_RUN = 3
SAID = "No NPU binary is produced and nothing runs on an NPU."


def check(tools: Toolchain, chips: list[str], jobs: int, match: str, progress: Progress) -> dict[str, Any]:
    """Run every check and return its findings, as they are written with --json."""
    started = time.monotonic()
    found: dict[str, Any] = {"lint": [str(f) for f in lint_folder()], "controls": [], "kernels": [], "numerics": []}
    wanted = [(chip, entry) for chip in chips for entry in shipped(chip) if match in entry.call.kernel.name]
    to_run = [case for case in cases() if match in case.name] if "910B3" in chips else []
    to_control = controls() if "910B3" in chips and not match else []
    bar = progress.add_task("checks", total=len(wanted) + len(to_run) + len(to_control))
    with ThreadPoolExecutor(jobs) as pool:
        once = {(chip, entry.call): entry for chip, entry in wanted}  # tiles share compilations
        pending = {key: pool.submit(_verdict, tools, key[0], entry) for key, entry in once.items()}
        for control in to_control:
            verdict = _verdict(tools, "910B3", Shipped(control.call, control.name))
            right = verdict.ok if not control.reason else any(control.reason in e for e in verdict.errors)
            found["controls"].append(
                {"name": control.name, "must": control.reason or "pass", "right": right, "errors": list(verdict.errors)}
            )
            progress.advance(bar)
        for case in to_run:
            found["numerics"].append(_run(tools, case))
            progress.advance(bar)
        for chip, entry in wanted:
            verdict = pending[chip, entry.call].result()
            found["kernels"].append(
                {"kernel": entry.call.kernel.name, "tile": entry.tile, "chip": chip,
                 "ok": verdict.ok, "buffers": verdict.buffers, "errors": list(verdict.errors)}
            )  # fmt: skip
            progress.advance(bar)
    passed = [c["right"] for c in found["controls"]] + [e["ok"] for e in found["kernels"] + found["numerics"]]
    found["ok"] = not found["lint"] and all(passed)
    found["compiled"], found["seconds"] = tools.compiled, round(time.monotonic() - started, 1)
    return found


def _verdict(tools: Toolchain, chip: str, entry: Shipped) -> Verdict:
    try:
        return tools.verdict(tools.ir(entry.call, chip), chip)
    except CheckError as error:
        return Verdict(False, errors=(str(error),))


def _run(tools: Toolchain, case: Case) -> dict[str, Any]:
    try:
        with on_the_cpu(tools):
            errors = case.errors()
    except CheckError as error:
        return {"name": case.name, "ok": False, "error": str(error), "errors": {}, "tolerance": case.tolerance}
    worst = max(errors.values())
    ok = worst <= case.tolerance
    return {
        "name": case.name,
        "ok": ok,
        "error": "" if ok else "beyond the tolerance",
        "errors": errors,
        "tolerance": case.tolerance,
    }


def summary(found: dict[str, Any]) -> list[str]:
    """The findings in a few lines, failures in full."""
    lines = [f"lint: {line}" for line in found["lint"]]
    for control in found["controls"]:
        if not control["right"]:
            lines.append(f"control {control['name']}: must be {control['must']}, is {control['errors'] or 'passed'}")
    for kernel in found["kernels"]:
        if not kernel["ok"]:
            lines.append(f"{kernel['kernel']} {kernel['tile']} for {kernel['chip']}: {'; '.join(kernel['errors'])}")
    for case in found["numerics"]:
        if not case["ok"]:
            lines.append(f"{case['name']}: {case['error']}; errors {case['errors']}, tolerance {case['tolerance']:.1e}")
    worst = max((max(c["errors"].values(), default=0.0) for c in found["numerics"]), default=0.0)
    counts = [
        f"{sum(k['ok'] for k in found['kernels'])} of {len(found['kernels'])} compilations pass",
        f"{sum(c['right'] for c in found['controls'])} of {len(found['controls'])} controls are right",
        f"{sum(c['ok'] for c in found['numerics'])} of {len(found['numerics'])} runs agree with fp64 "
        f"({worst:.1e} at most)",
        f"lint {'is silent' if not found['lint'] else 'fails'}",
    ]
    return [*lines, f"ascend check: {'; '.join(counts)}; {found['compiled']} compiled, {found['seconds']} s. {SAID}"]


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m latentscan.tools.ascend_check", description=__doc__)
    parser.add_argument("--env", type=Path, default=default_folder(), help="where the checking environment is kept")
    parser.add_argument("--chip", choices=("910B3", "950", "all"), default="all")
    parser.add_argument("--match", default="", help="only kernels and runs whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    parser.add_argument("--json", type=Path, help="write all findings to this file")
    parser.add_argument("--table", type=Path, help="write the table of docs/ascend.md between its marks in this file")
    parser.add_argument("--pip-arg", action="append", default=[], help="an argument for pip; may be repeated")
    options = parser.parse_args(arguments)
    chips = ["910B3", "950"] if options.chip == "all" else [options.chip]
    console = Console(stderr=True, emoji=False)
    if options.match and not any(
        [case for case in cases() if options.match in case.name]
        + [entry for chip in chips for entry in shipped(chip) if options.match in entry.call.kernel.name]
    ):
        parser.error(f"--match {options.match}: no kernel and no run has it in its name")
    if options.table and (options.match or options.chip != "all"):
        parser.error("--table is written from a whole check: leave out --match and --chip")
    if options.json and not os.access(options.json.absolute().parent, os.W_OK):
        parser.error(f"--json {options.json}: its folder is not there or cannot be written")
    if options.table:
        try:
            check_marks(options.table.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            parser.error(f"--table {options.table}: {error}")
    try:
        environment = ensure(options.env, options.pip_arg, console.print)
    except UnavailableError as error:
        print(f"ascend check: NOT RUN: {error}. The lint alone: {len(lint_folder())} findings.")
        return NOT_RUN
    tools = Toolchain(environment)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            found = check(tools, chips, max(1, options.jobs), options.match, progress)
    finally:
        tools.close()
    if options.json:
        _write(options.json, json.dumps(found, indent=1) + "\n")
    if options.table:
        _write(options.table, markdown(options.table.read_text(encoding="utf-8"), found))
    print("\n".join(summary(found)))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
