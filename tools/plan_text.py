"""A plan for people: tables of the dict that :func:`latentscan.tools.plan.plan` returns."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text


def bytes_text(count: int) -> str:
    """Bytes in binary units: ``1.50 GiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def flops_text(count: int) -> str:
    """Operations in decimal units: ``1.50 TFLOP``."""
    size = float(count)
    for unit in ("", "K", "M", "G", "T", "P"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}FLOP"
        size /= 1000
    return f"{size:.3g} EFLOP"


def weights_text(weights: dict[str, int], by_pass: dict[str, tuple[int, int]]) -> str:
    """One line: bytes of all weights before and after, and the passes that make more than they replace.

    Args:
        by_pass: (made, released) by pass.
    """
    growth = weights["after"] - weights["before"]
    change = f"{growth / weights['before']:+.1%}" if growth and weights["before"] else "no change"
    text = f"weights: {bytes_text(weights['before'])} -> {bytes_text(weights['after'])} ({change})"
    more = [
        f"{name} makes {bytes_text(made)} in place of {bytes_text(released)}"
        for name, (made, released) in by_pass.items()
        if made > released
    ]
    return f"weights grow: {text.removeprefix('weights: ')}: " + ", ".join(more) if more and growth > 0 else text


def show(data: dict[str, Any], console: Console, *, explain: bool = False) -> None:
    """Print a plan."""
    model = data["model"]
    what = "one training step of" if data["train"] else "a prompt of"
    console.print(
        f"[bold]{escape(model['name'])}[/bold]: {model['class']}, {model['layers']} layers, "
        f"{model['parameters']:,} parameters, {model['dtype']}; "
        f"{what} {data['batch']} x {data['seq']} tokens",
        highlight=False,
    )
    for note in model["notes"]:
        console.print(f"note: {note}", markup=False)
    if data["passes"]:
        console.print(_passes(data))
    for row in data["passes"]:
        if row["rule"]:
            forms = ", ".join(f"{phase}: {form}" for phase, form in row["forms"].items())
            console.print(Text.assemble((row["name"], "bold"), f": {row['rule']}\n  -> {forms}"))
    _sites(data, console, explain)
    console.print(_costs(data))
    if "mesh" in data:
        for table in _mesh(data["mesh"]):
            console.print(table)
    for phase in data["phases"].values():
        if phase.get("exchange"):
            console.print(_exchange(phase["exchange"], phase["tokens_a_rank"]))
            filled = phase["tokens_a_rank"] * phase["exchange"]["ranks"]
            if filled != phase["tokens"]:
                console.print(f"{phase['tokens']} tokens are filled up to {filled}: split_batch(..., pad=True)")
    if explain:
        for name, phase in data["phases"].items():
            console.print(_kinds(name, phase))
    if data["weights"]["after"] > data["weights"]["before"]:
        rows = {r["name"]: (r["new_weight_bytes"], r["released_weight_bytes"]) for r in data["passes"]}
        console.print(weights_text(data["weights"], rows), style="yellow", highlight=False)
    for error in data["errors"]:
        console.print(
            f"{error['pass']}: {error['message']}. {error['remedy']}", style="red", markup=False, highlight=False
        )


def _passes(data: dict[str, Any]) -> Table:
    table = Table(title="passes")
    table.add_column("pass", overflow="fold")
    table.add_column("tier")
    for name in ("sites", "refusals", "nodes", "new weights", "released"):
        table.add_column(name, justify="right")
    for row in data["passes"]:
        new, old = (bytes_text(row[k]) if row[k] else "-" for k in ("new_weight_bytes", "released_weight_bytes"))
        table.add_row(
            escape(row["pass"]), row["tier"], str(row["sites"]), str(row["refusals"]), f"{row['nodes']:+d}", new, old
        )
    return table


def _sites(data: dict[str, Any], console: Console, explain: bool) -> None:
    for title, key, columns in (
        ("sites", "sites", ("pass", "module", "rule", "note")),
        ("refusals", "refusals", ("pass", "module", "rule", "reason", "remedy")),
    ):
        rows = data.get(f"all_{key}") if explain else data[key]
        if not rows:
            continue
        table = Table(title=title)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(escape(str(row[c])) for c in columns))
        console.print(table)


def _costs(data: dict[str, Any]) -> Group:
    table = Table(title="cost")
    table.add_column("")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right")

    def row(name: str, before: int, after: int, text: Any) -> None:
        change = "-" if before == after else (f"{(after - before) / before:+.1%}" if before else "new")
        table.add_row(name, text(before), text(after), change)

    row("weights", data["weights"]["before"], data["weights"]["after"], bytes_text)
    cache = data["cache"]
    if not data["train"]:
        per = cache["bytes_per_token"]
        row("KV cache a token", per["before"], per["after"], bytes_text)
        if cache["state_bytes_per_row"]:
            row("recurrent state a row", cache["state_bytes_per_row"], cache["state_bytes_per_row"], bytes_text)
        at = cache["bytes_at_seq"]
        row(f"cache at {data['batch']} x {data['seq']}", at["before"], at["after"], bytes_text)
    for name, phase in data["phases"].items():
        before, after = phase["before"], phase["after"]
        step = f"{name}, {phase['tokens']} tokens" + (f" after {phase['past']}" if phase["past"] else "")
        row(f"{step}: operations", before["flops"], after["flops"], flops_text)
        kind = "kept for backward" if name == "train" else "at once, at most"
        row(f"{step}: activations {kind}", before["activation_bytes"], after["activation_bytes"], bytes_text)
    note = Text(
        "Operations: products, convolutions, scans, attention. Activations: as the graph stands, before any fusion.",
        style="dim",
    )
    return Group(table, note)


def _mesh(mesh: dict[str, Any]) -> list[Table]:
    ranks = Table(title=f"mesh {mesh['mesh']}: weights of each rank")
    for name in ("tp rank", "bytes", "split", "whole", "gradients", "AdamW"):
        ranks.add_column(name, justify="right")
    columns = ("bytes", "split_bytes", "whole_bytes", "gradient_bytes", "optimizer_bytes")
    for row in mesh["ranks"]:
        ranks.add_row(str(row["rank"]), *(bytes_text(row[k]) for k in columns))
    sends = Table(title="collectives of one call")
    for name in ("phase", "pass", "collective", "for", "axis"):
        sends.add_column(name)
    for name in ("count", "sent by a rank"):
        sends.add_column(name, justify="right")
    for row in mesh["collectives"]:
        words = (row["phase"], row["pass"], row["collective"], row["caller"], row["axis"])
        sends.add_row(*words, str(row["count"]), bytes_text(row["bytes_sent"]))
    return [ranks, sends, *_estimate(mesh)]


def _estimate(mesh: dict[str, Any]) -> list[Table]:
    told = mesh.get("estimate")
    if told is None:
        return []
    rates = f"{told['bandwidth'] / 1e9:g} GB/s, {told['flops'] / 1e12:g} TFLOP/s"
    table = Table(title=f"what the first rank waits for, estimated at {rates}")
    table.add_column("phase")
    for name in ("computes", "sends", "waits", "hidden", "of its time"):
        table.add_column(name, justify="right")
    for name, row in told["phases"].items():
        times = (f"{row[k] * 1e3:.3f} ms" for k in ("compute_s", "sending_s", "exposed_s"))
        table.add_row(name, *times, f"{row['hidden']:.1%}", f"{row['exposed_share']:.1%}")
    return [table]


def _exchange(data: dict[str, Any], tokens: int) -> Group:
    table = Table(title=f"states of a sequence over {data['ranks']} ranks, {tokens} tokens a rank: bytes sent, one way")
    for column in ("layers", data["algorithm"], "the other", "tails", "all-to-all on heads", "fewer from tokens on"):
        table.add_column(column, justify="right")
    for row in data["rows"]:
        keys = ("state_bytes", "other_algorithm_bytes", "tail_bytes", "heads_bytes")
        table.add_row(str(row["layers"]), *(bytes_text(row[k]) for k in keys), f"{row['break_even_length']:,}")
    lines = [f"{name}: {text}" for name, text in data["formulas"].items()]
    rate = data["bytes_per_recomputed_tflop"]
    lines.append(
        f"all layers, both ways: {bytes_text(data['bytes'])}; recomputing takes {flops_text(data['forward_flops'])}: "
        f"at 400 TFLOP/s the exchange is the faster from {rate * 400 / 1e9:.3g} GB/s on"
    )
    return Group(table, Text("\n".join(lines), style="dim"))


def _kinds(name: str, phase: dict[str, Any]) -> Table:
    table = Table(title=f"{name} by kind of node")
    table.add_column("kind")
    for column in ("nodes", "operations before", "nodes after", "operations after", "bytes read after"):
        table.add_column(column, justify="right")
    before, after = phase["before"]["kinds"], phase["after"]["kinds"]
    empty = {"nodes": 0, "flops": 0, "read": 0}
    for kind in dict.fromkeys([*before, *after]):
        a, b = before.get(kind, empty), after.get(kind, empty)
        table.add_row(
            kind,
            str(a["nodes"]),
            flops_text(a["flops"]),
            str(b["nodes"]),
            flops_text(b["flops"]),
            bytes_text(b["read"]),
        )
    return table
