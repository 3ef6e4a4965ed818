"""Dump folders: what every pass saw, changed and said, for people (index.md, diff.txt) and for programs (JSON).

A folder is written aside and put in its place when it is complete, and it carries a marker file that names the files
of the dump: the next dump replaces these, and other files in the folder stay. A folder without the marker was not made
here and is never written into or deleted.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from latentscan.ir.errors import CheckpointError
from latentscan.ir.graph import VALUE, Graph
from latentscan.ir.printer import Printer
from latentscan.ir.sizes import number
from latentscan.ir.weights import bytes_of
from latentscan.passes.pipeline import PassRecord
from latentscan.runtime.atomic import check_writable, files_in, replaced_directory
from latentscan.runtime.numerics import Comparison, is_append

MARKER = "latentscan-dump.json"  # its presence says that latentscan made the folder; it holds what index.md shows
FORMAT = 1


@dataclass(frozen=True)
class Size:
    """What a graph holds.

    Attributes:
        weights: bytes of the weights that it reads.
        cache: bytes that it appends to caches for one token of one batch row.
        calls: how many calls it makes.
    """

    weights: int
    cache: int
    calls: int

    @classmethod
    def of(cls, graph: Graph) -> Size:
        read = {w.path: w.value for w in graph.weights.values() if graph.node(w.placeholder).users}
        cache = sum(_bytes_per_token(n) for n in graph.graph.nodes if is_append(n))
        calls = sum(n.op.startswith("call") for n in graph.graph.nodes)
        return cls(sum(map(bytes_of, read.values())), cache, calls)


def _bytes_per_token(node: fx.Node) -> int:
    total = 0
    for tensor, dim in zip(node.args[1], node.args[2], strict=True):  # type: ignore[arg-type]
        value = tensor.meta[VALUE]  # type: ignore[union-attr]
        token = {0, dim % value.dim()}  # type: ignore[operator]
        count = 1
        for position, size in enumerate(value.shape):
            count *= 1 if position in token else number(size)
        total += count * value.element_size()
    return total


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder as a path, if it does not exist or is a dump of ours, and can be written.

    Raises:
        CheckpointError: it exists and latentscan did not make it, it has no parent folder, or cannot be written.
    """
    path = Path(folder).expanduser().absolute()
    check_writable(path)
    if path.exists() or path.is_symlink():
        if path.is_symlink() or not path.is_dir() or not (path / MARKER).is_file():
            raise CheckpointError(
                "exists and is no dump of latentscan's, so it is left alone",
                where=str(folder),
                remedy="name a folder that does not exist yet, or remove this one yourself",
            )
    elif not path.parent.is_dir():
        raise CheckpointError("its parent folder does not exist", where=str(folder), remedy=f"make {path.parent} first")
    return path


class Dump:
    """One run's dump, being written.

    Args:
        folder: where it will be. Of several ranks each writes ``rank-N`` in it.
        pipeline: the pipeline's text.

    Raises:
        CheckpointError: the folder exists and is not ours.
    """

    def __init__(self, folder: str | os.PathLike[str], pipeline: str) -> None:
        self.rank, self.ranks = rank_and_ranks()
        path = check_folder(folder)
        if self.ranks > 1:
            _make_parent(path, self.ranks)
            path = check_folder(path / rank_name(self.rank))
        self.path, self.pipeline = path, pipeline
        self.passes: list[dict[str, Any]] = []
        self.stopped = ""
        self._printer = Printer()
        earlier = written_files(path)
        self._place = replaced_directory(path, lambda name: name not in earlier)
        self._aside = self._place.__enter__()

    def add(
        self,
        index: int,
        before: Graph,
        after: Graph,
        record: PassRecord,
        found: Comparison | None,
        *,
        gradients: bool = False,
    ) -> None:
        """Write what one pass did.

        Args:
            before, after: the graph before and after it; where the pass is left out for these shapes, its other form.
            found: how far the numbers moved, if they were compared.
            gradients: they are gradients of a graph of their own: only the numbers are written, to the pass's folder.
        """
        if gradients:
            entry = next((e for e in self.passes if e["pass"] == record.text), None)
            if entry is not None and found is not None:
                entry["gradients"] = numbers_of(found)
                self._json(entry["folder"], "numerics.json", _numerics(entry))
            return
        name = f"{index + 1:02d}-{record.name}"
        taken = [e["folder"] for e in self.passes]
        if record.choice is not None and name in taken and record.nodes_after == record.nodes_before:
            return  # the form that leaves everything as it was
        while name in taken:  # the same pass after another choice of an earlier one
            name += "-again"
        (self._aside / name).mkdir()
        sizes = Size.of(before), Size.of(after)
        entry = {
            "pass": record.text,
            "tier": record.tier,
            "folder": name,
            "sites": len(record.sites),
            "refusals": len(record.refusals),
            "calls": [s.calls for s in sizes],
            "weight_bytes": [s.weights for s in sizes],
            "cache_bytes_per_token": [s.cache for s in sizes],
            "seconds": round(record.seconds, 3),
            "rule": record.choice.rule if record.choice else "",
            "form": _form(record),
            "error": _plain(record.error),
            "tolerance": record.tolerance,
            "values": None if found is None else numbers_of(found),
        }
        self.passes.append(entry)
        self._text(name, "before.txt", self._printer.text(before))
        self._text(name, "after.txt", self._printer.text(after))
        self._text(name, "diff.txt", self._printer.diff(before, after) or "nothing changed\n")
        self._json(name, "sites.json", sites_of(record))
        self._json(name, "numerics.json", _numerics(entry))

    def index(self) -> dict[str, Any]:
        """What the marker file holds, and ``index.md`` shows."""
        return {
            "format": FORMAT,
            "pipeline": self.pipeline,
            "rank": self.rank,
            "ranks": self.ranks,
            "stopped": self.stopped,
            "passes": [{k: v for k, v in e.items() if k not in ("values", "gradients")} for e in self.passes],
        }

    def close(self, stopped: str = "") -> None:
        """Finish the folder and put it in its place; what latentscan dumped there before is replaced.

        Args:
            stopped: the error that ended the run. If it came before the first pass, there is nothing to see: what was
                there before stays.
        """
        self.stopped = stopped
        try:
            if stopped and not self.passes:
                raise _Nothing
            self._text("", "index.md", _index_page(self.index()))
            self._json("", MARKER, self.index() | {"files": sorted([*files_in(self._aside), MARKER])})
            check_folder(self.path)  # somebody may have made it meanwhile
        except BaseException as error:
            self._place.__exit__(type(error), error, error.__traceback__)
            if not isinstance(error, _Nothing):
                raise
        else:
            self._place.__exit__(None, None, None)

    def _text(self, folder: str, name: str, text: str) -> None:
        (self._aside / folder / name).write_text(text, encoding="utf-8")

    def _json(self, folder: str, name: str, value: Any) -> None:
        self._text(folder, name, json.dumps(value, indent=1, default=str) + "\n")


class _Nothing(Exception):  # noqa: N818  control flow, not an error
    """There is nothing to put in place."""


def written_files(folder: Path) -> frozenset[str]:
    """The files of a dump, by their path in its folder; of several ranks', those of each."""
    found: set[str] = set()
    for marker in (folder / MARKER, *folder.glob(f"{rank_name('*')}/{MARKER}")):
        inside = marker.parent.relative_to(folder)
        found.add((inside / MARKER).as_posix())
        try:
            told = json.loads(marker.read_text(encoding="utf-8"))
            names = told.get("files") or [*_FILES, *(f"{e['folder']}/{n}" for e in told["passes"] for n in _FILES)]
            found.update((inside / str(name)).as_posix() for name in names)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # none that can be read: all of it stays, and what is dumped again wins
    return frozenset(found)


# What a dump holds that does not say so: one of an earlier version.
_FILES = ("index.md", "before.txt", "after.txt", "diff.txt", "sites.json", "numerics.json")


def rank_and_ranks() -> tuple[int, int]:
    """This process's rank and how many there are: (0, 1) unless torch.distributed is initialised."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def rank_name(rank: int | str) -> str:
    """The folder of one rank within a dump."""
    return f"rank-{rank}"


def _make_parent(path: Path, ranks: int) -> None:
    """Make the folder that holds the ranks' dumps: with its marker from the first moment, whoever comes first."""
    if path.exists():
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}.ranks")
    aside.mkdir()
    (aside / MARKER).write_text(json.dumps({"format": FORMAT, "ranks": ranks}) + "\n", encoding="utf-8")
    try:
        aside.rename(path)
    except OSError:  # another rank was faster
        shutil.rmtree(aside, ignore_errors=True)
        check_folder(path)


def _form(record: PassRecord) -> str:
    """Which form of a pass with a choice the folder shows."""
    if record.choice is None:
        return ""
    return record.choice.no if record.nodes_after == record.nodes_before else record.choice.yes


def numbers_of(found: Comparison) -> dict[str, Any]:
    """A comparison for JSON; modules in the order of execution."""
    return {
        "error": _plain(found.error),
        "output_error": _plain(found.output_error),
        "tolerance": found.tolerance,
        "failed": found.failed,
        "first": {"module": found.module, "value": found.node},
        "modules": {path: _plain(error) for path, error in found.modules.items()},
    }


def _numerics(entry: dict[str, Any]) -> dict[str, Any]:
    if entry["values"] is None:
        return {"checked": False}
    return {"checked": True, "values": entry["values"], "gradients": entry.get("gradients")}


def sites_of(record: PassRecord) -> dict[str, Any]:
    """Sites, refusals and the rule that chose, for JSON."""
    choice, rule = record.choice, None
    if choice is not None:
        rule = {"rule": choice.rule, "condition": str(choice.condition), "yes": choice.yes, "no": choice.no}
    return {
        "pass": record.text,
        "sites": [
            {"module": s.module, "rule": s.rule, "note": s.note, "facts": {k: _plain(v) for k, v in s.facts.items()}}
            for s in record.sites
        ],
        "refusals": [
            {"module": r.module, "rule": r.rule, "reason": r.reason, "remedy": r.remedy} for r in record.refusals
        ],
        "choice": rule,
    }


def _plain(value: Any) -> Any:
    """A value as JSON knows it; infinity and NaN become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def _index_page(index: dict[str, Any]) -> str:
    columns = [
        "sites",
        "refusals",
        "calls",
        "weight bytes",
        "cache bytes per token",
        "seconds",
        "worst error",
        "tolerance",
    ]
    of_rank = f", rank {index['rank']} of {index['ranks']}" if index["ranks"] > 1 else ""
    lines = [
        "# What the passes did",
        "",
        f"Pipeline: `{index['pipeline'] or '(empty)'}`{of_rank}",
        "",
        f"| pass | {' | '.join(columns)} |",
        f"|---|{'---:|' * len(columns)}",
    ]
    for e in index["passes"]:
        cells = [
            f"[{e['pass']}]({e['folder']}/diff.txt)" + (f" ({e['form']})" if e["form"] else ""),
            str(e["sites"]),
            str(e["refusals"]),
            _change(e["calls"]),
            _change(e["weight_bytes"]),
            _change(e["cache_bytes_per_token"]),
            f"{e['seconds']:.2f}",
            "not checked" if e["error"] is None else f"{float(e['error']):.1e}",
            "" if e["tolerance"] is None else f"{e['tolerance']:.1e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if index["stopped"]:
        lines += ["", f"**Stopped**: {index['stopped']}"]
    rules = [f"- {e['pass']}: {e['rule']}" for e in index["passes"] if e["rule"]]
    if rules:
        lines += ["", "Rules that choose a form at every call:", "", *rules]
    lines += [
        "",
        "Each pass has a folder: `before.txt`, `after.txt` (the graph as text, equal layers shown once), `diff.txt`",
        "(what changed, module by module), `sites.json` (where it applied, where it refused and why), `numerics.json`",
        "(how far the numbers moved, module by module).",
    ]
    return "\n".join(lines) + "\n"


def _change(pair: list[int]) -> str:
    before, after = pair
    return f"{before:,}" if before == after else f"{before:,} → {after:,}"
