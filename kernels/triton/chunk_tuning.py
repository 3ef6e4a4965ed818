"""A user's own table of tiles for the chunk scan: made by ``latentscan bench ssd --tune``, read where it is given.

Nothing here is looked up by itself: a table is a value that its user passes on, as ``config=table.forward(x, B)`` to a
kernel or as ``tiles=`` to a model.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from latentscan.kernels.triton.chunk_configs import Backward, Forward, Hopper, HopperBackward

SCHEMA = 1
KINDS: dict[str, Any] = {k.__name__: k for k in (Forward, Hopper, Backward, HopperBackward)}
Config = Forward | Hopper | Backward | HopperBackward


@dataclass(frozen=True)
class Row:
    """One choice: ``way`` forward or backward, ``shape`` H, P, G, N, tokens of all rows, milliseconds when chosen."""

    way: str
    device: str
    dtype: str
    shape: tuple[int, int, int, int]
    tokens: int
    config: Config
    ms: float


@dataclass(frozen=True)
class Table:
    """Choices by device, dtype and shape; of several lengths the nearest, if it is within a factor of four."""

    rows: tuple[Row, ...] = ()

    def forward(self, x: Tensor, B: Tensor) -> Any:
        """The forward's choice for inputs like these, or None: the shipped one."""
        return self._find("forward", x, B)

    def backward(self, x: Tensor, B: Tensor) -> Any:
        """The backward's choice, or None."""
        return self._find("backward", x, B)

    def _find(self, way: str, x: Tensor, B: Tensor) -> Config | None:
        b, L, H, P = x.shape
        key = way, device_name(x.device), str(x.dtype).removeprefix("torch."), (H, P, *B.shape[2:])
        fitting = [r for r in self.rows if (r.way, r.device, r.dtype, r.shape) == key]
        if not fitting:
            return None
        best = min(fitting, key=lambda r: (abs(math.log2(r.tokens / (b * L))), r.tokens))
        return best.config if abs(math.log2(best.tokens / (b * L))) <= 2 else None

    def only(self, heads: int, head_dim: int, groups: int, d_state: int) -> Table:
        """The rows of that shape."""
        return Table(tuple(r for r in self.rows if r.shape == (heads, head_dim, groups, d_state)))

    def with_rows(self, rows: Iterable[Row]) -> Table:
        """These rows in place of those for the same class and length."""
        new = {(r.way, r.device, r.dtype, r.shape, r.tokens): r for r in (*self.rows, *rows)}
        return Table(tuple(new.values()))

    def text(self) -> str:
        """As JSON, a row a line."""
        rows = [
            json.dumps({**vars(r), "config": {"kind": type(r.config).__name__, **asdict(r.config)}}) for r in self.rows
        ]
        return f'{{"schema": {SCHEMA}, "rows": [\n' + ",\n".join(rows) + "\n]}\n"


def read_table(path: str | os.PathLike[str]) -> Table:
    """The table in a file.

    Raises:
        ValueError: it is no such table, or one of another version, with what is wrong. OSError: it cannot be read.
    """
    try:
        return parse_table(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


@functools.lru_cache(maxsize=256)
def parse_table(text: str) -> Table:
    """The table in a text.

    Raises:
        ValueError: it is no such table, or one of another version, with what is wrong.
    """
    try:
        told = json.loads(text)
        if told["schema"] != SCHEMA:
            raise ValueError(f"it is of version {told['schema']}, not {SCHEMA}")
        rows = []
        for row in told["rows"]:
            kind = KINDS[row["config"].pop("kind")]
            config = kind(**row["config"])
            if row["way"] not in ("forward", "backward") or isinstance(config, (Forward, Hopper)) != (
                row["way"] == "forward"
            ):
                raise ValueError(f"a {type(config).__name__} is no choice of the {row['way']}")
            rows.append(Row(**{**row, "config": config, "shape": tuple(row["shape"])}))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"no table of tiles: {type(error).__name__}: {error}") from error
    return Table(tuple(rows))


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def candidates(base: Config, units: int, processors: int) -> Iterator[Config]:
    """Choices near the shipped one, which comes first; ``units``: pairs of heads, times rows."""
    tried = {base}
    yield base
    near: list[Any] = []
    if isinstance(base, Hopper):
        counts = {base.pieces, processors, max(1, processors // units) * units}
        near = [replace(base, pieces=n, state_parts=j) for n in sorted(counts) for j in (1, 2, 4)]
        near += [replace(base, out_registers=240)]
    elif isinstance(base, HopperBackward):
        counts = {processors, max(1, processors // units) * units} - {base.pieces}
        near = [replace(base, segments=n) for n in (1, 2, 4)] + [replace(base, pieces=n) for n in sorted(counts)]
        near += [replace(base, state_parts=j) for j in (2, 4)]
    elif isinstance(base, Forward):
        near = [replace(base, segments=max(1, round(base.segments * f))) for f in (0.5, 2, 4)]
        near += [replace(base, out_stages=n) for n in (1, 2, 3)] + [replace(base, out_warps=8)]
    else:
        near = [replace(base, workspace=base.workspace * f) for f in (2, 4)]
        near += [replace(base, heads=max(1, base.heads // 2)), replace(base, stages=1), replace(base, warps=8)]
    for config in near:
        if config not in tried:
            tried.add(config)
            yield config


def warm_up(
    heads: int, head_dim: int, groups: int, d_state: int, *, dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda", lengths: Iterable[int] = (2048,), batch: int = 1, z: bool = False,
    initial: bool = False, packed: bool = False, backward: bool = False, table: Table | None = None,
) -> int:  # fmt: skip
    """Compile what calls with such sizes will launch, so that no user's request waits for it.

    Args:
        lengths: one of each kind that will come; kernels differ by whether sizes are multiples of 16 or 1, and by the
            choice of tiles, not by each length.
        table: tiles that calls will be given.

    Returns:
        how many calls were made.
    """
    from latentscan.kernels.triton import chunk_scan as ours

    calls = 0
    for L in lengths:
        x = torch.zeros(batch, L, heads, head_dim, device=device, dtype=dtype)
        B = torch.zeros(batch, L, groups, d_state, device=device, dtype=dtype)
        per_head = torch.zeros(heads, device=device)
        state = torch.zeros(batch, heads, head_dim, d_state, device=device) if initial else None
        seq = torch.zeros(batch, L, dtype=torch.int32, device=device) if packed else None
        ins = (x, x[..., 0], per_head - 1, B, B, per_head, x if z else None, per_head, state, seq, None)
        options: dict[str, Any] = {"chunk_size": 64, "dt_softplus": True}
        ours.chunk_scan(*ins, **options, config=None if table is None else table.forward(x, B))
        calls += 1
        if backward:
            chosen = None if table is None else table.backward(x, B)
            ours.chunk_scan_backward(x, None, *ins, **options, config=chosen)
            calls += 1
    return calls
