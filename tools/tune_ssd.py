"""``latentscan bench ssd --tune``: try tiles near the shipped ones on this machine and write the best to a table."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from latentscan.ir.errors import KernelError
from latentscan.kernels.triton.chunk_configs import HopperBackward
from latentscan.kernels.triton.chunk_tuning import Row, Table, candidates, device_name, read_table


def tune(
    path: Path, ins: dict[str, Any], time: Callable[[Callable[[], Any]], float], step: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Time the candidates of forward and backward and put the fastest into the table at ``path``.

    Args:
        ins: inputs by name, as of ``bench ssd``.
        time: milliseconds of a call.

    Returns:
        of each way: its name, the shipped choice's ms, the best one's ms and itself; how many were tried; those that
        failed, as pairs of themselves and why.

    Raises:
        KernelError: the file is there and is no table, or cannot be written. Exception: of the shipped choice, or one
        that is not about what fits a device.
    """
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    # A pass of the compiler that fails is a RuntimeError; an AcceleratorError leaves no device to go on with.
    unfit = (CompilationError, OutOfResources, PTXASError, RuntimeError)
    broken = getattr(torch, "AcceleratorError", ())
    from latentscan.kernels.triton import chunk_scan as ours
    from latentscan.kernels.triton.chunk_configs import Device

    table = table_at(path) if path.exists() else Table()
    x, B, C, D = (ins[n] for n in ("x", "B", "C", "D"))
    b, L, H, P = x.shape
    processors = Device.of(x.device).processors
    units = b * B.shape[2] * -(-H // B.shape[2] * max(1, P // 64) // 2)
    options: dict[str, Any] = {"chunk_size": 64, "dt_softplus": True}
    dy = torch.randn_like(x)
    told: list[dict[str, Any]] = []
    rows: list[Row] = []
    for way, base in (
        ("forward", ours.choose_forward(x, B, C, D, None)),
        ("backward", ours.choose_backward(x, B, C, D, None, dy)),
    ):
        found: list[tuple[float, Any]] = []
        failed: list[tuple[str, str]] = []
        text, kept = Table(tuple(rows)).text(), None
        if isinstance(base, HopperBackward):  # as after the forward that was chosen
            kept = ours.chunk_scan(**ins, **options, tiles=text, keep_starts=True)[2]
        for config in candidates(base, units, processors):
            step(f"{way} {len(found) + len(failed) + 1}")

            def run(way: str = way, config: Any = config, text: str = text, kept: Any = kept) -> Any:
                if way == "forward":
                    return ours.chunk_scan(**ins, **options, config=config)
                return ours.chunk_scan_backward(dy, None, **ins, **options, config=config, tiles=text, starts=kept)

            try:
                found.append((time(run), config))
            except unfit as error:
                if config == base or isinstance(error, broken):
                    raise
                why = " ".join(str(error).split())[:200]
                failed.append((repr(config), f"{type(error).__name__}: {why}"))
                step(f"{way}: {config} does not run here: {failed[-1][1]}")
        ms, best = min(found, key=lambda f: f[0])
        dtype = str(x.dtype).removeprefix("torch.")
        rows.append(Row(way, device_name(x.device), dtype, (H, P, *B.shape[2:]), b * L, best, ms))
        told.append(
            {
                "way": way,
                "shipped_ms": found[0][0],
                "ms": ms,
                "config": repr(best),
                "tried": len(found),
                "failed": failed,
            }
        )
    write(path, table.with_rows(rows).text())
    return told


def table_at(path: Path) -> Table:
    """The table in a file; what is wrong with it as a KernelError."""
    try:
        return read_table(path)
    except (ValueError, OSError) as error:
        remedy = "give a file that --tune made, or another name"
        raise KernelError(str(error), where="bench ssd", remedy=remedy) from error


def write(path: Path, text: str) -> None:
    """The whole file or nothing of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise KernelError(
            f"{path} cannot be written: {error}", where="bench ssd", remedy="give another name"
        ) from error
