"""``latentscan dump`` and ``latentscan diff``: every pass of a pipeline written to a folder, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from latentscan.ir.errors import CheckpointError, PipelineError
from latentscan.ir.frontends import register_all
from latentscan.passes.base import Context
from latentscan.passes.pipeline import nearest, parse
from latentscan.runtime.dumping import MARKER, check_folder, rank_and_ranks, rank_name
from latentscan.runtime.models import check_model
from latentscan.runtime.options import Options
from latentscan.runtime.wrap import make_plan


def dump(
    model: torch.nn.Module, pipeline: str, out: str, *, check: Any = True, calibration: Any = None
) -> dict[str, Any]:
    """Plan a pipeline on a model and write what every pass does to a folder; the model stays as it is.

    Args:
        out: the folder; it must not exist, or be an earlier dump, which is replaced.
        check: compare the numbers after every pass: a bool or tolerances as in ``wrap``.
        calibration: as in ``wrap``, for passes that need statistics.

    Returns:
        what this rank's ``latentscan-dump.json`` holds: pipeline, rank and a list of passes.

    Raises:
        CheckpointError: the folder is not ours. Every error of :func:`latentscan.wrap`; with a NumericsError the folder
        is still written, up to the pass that failed.
    """
    options = Options.of({"pipeline": pipeline, "dump": str(out), "check": check, "calibration": calibration})
    passes = parse(options.pipeline)
    check_folder(out)
    check_model(model)
    register_all()
    statistics = None
    if any(getattr(p, "wants_statistics", False) for p in passes):
        from latentscan.runtime.calibration import statistics_for

        statistics = statistics_for(model, passes, options.calibration)
    make_plan(model, options, Context(statistics=statistics, own_parameters=True))
    rank, ranks = rank_and_ranks()
    return read_index(Path(out) / rank_name(rank) if ranks > 1 else Path(out))


def diff(directory: str, pass_name: str | None = None) -> str:
    """What a pass changed, or all of them one after the other, as the dump says.

    Args:
        directory: a dump; of several ranks the first is shown, or name the folder of one (``DIR/rank-1``).
        pass_name: the pass's name, with or without options, or its folder (``02-mla-absorb``).

    Raises:
        CheckpointError: no dump of ours, or an incomplete one. PipelineError: no such pass in it.
    """
    folder = find(directory)
    passes = read_index(folder)["passes"]
    chosen = [e for e in passes if pass_name is None or pass_name in (e["pass"], e["folder"], e["pass"].split("{")[0])]
    if not chosen:
        names = [e["pass"].split("{")[0] for e in passes]
        raise PipelineError(
            f"the dump has no pass {pass_name!r}" if pass_name else "the dump holds no pass: its pipeline is empty",
            where=str(directory),
            remedy=f"its passes are {', '.join(names)}{nearest(pass_name, names)}" if pass_name and names else "",
        )
    parts = []
    for entry in chosen:
        text = _read(folder / entry["folder"] / "diff.txt")
        parts.append(text if pass_name else f"### {entry['pass']}: {entry['sites']} sites\n{text}")
    return "\n".join(parts)


def find(directory: str) -> Path:
    """The folder that holds the passes: of several ranks the first one that is there."""
    folder = Path(directory)
    ranks = sorted(folder.glob("rank-*"), key=lambda path: (len(path.name), path.name))
    return next((path for path in ranks if (path / MARKER).is_file()), folder)


def read_index(folder: Path) -> dict[str, Any]:
    """What the folder's marker file says.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    if not (folder / MARKER).is_file():
        raise CheckpointError(
            "is no dump of latentscan's" if folder.exists() else "does not exist",
            where=str(folder),
            remedy="make one with `latentscan dump MODEL --pipeline P --out DIR`",
        )
    try:
        index = json.loads(_read(folder / MARKER))
        if not isinstance(index["passes"], list):
            raise TypeError("passes is no list")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"cannot be read: {type(error).__name__}: {error}", where=str(folder / MARKER), remedy="dump again"
        ) from error
    return index


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(path), remedy="dump again") from error
