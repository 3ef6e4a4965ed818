"""A user's table of tiles on its way to the kernels: read from a file, and put into a graph as the kernels' argument.

The table is what ``latentscan bench ssd --tune`` writes. Each kernel is given the rows of its own shape, as text, and
takes of these the nearest length when it runs, so that a graph of any length has them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import fx

from latentscan.ir.errors import PipelineError
from latentscan.ir.graph import Graph
from latentscan.kernels.triton.chunk_tuning import Table, read_table


def tiles_at(path: Any) -> Table:
    """The table in the file at ``path``.

    Raises:
        PipelineError: it is no table, or cannot be read.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise PipelineError(f"tiles={path!r} is not a file's name", remedy="give what bench ssd --tune wrote")
    try:
        return read_table(path)
    except (ValueError, OSError) as error:
        raise PipelineError(f"tiles: {error}", remedy="give a file that bench ssd --tune wrote") from error


def give_tiles(graph: Graph, node: fx.Node, table: Table) -> None:
    """The rows of a kernel's shape as its argument, if it takes them and there are any."""
    if not any(a.name == "tiles" for a in node.target._schema.arguments):
        return
    if "heads" in node.kwargs:
        shape = tuple(node.kwargs[name] for name in ("heads", "head_dim", "groups", "d_state"))
    else:
        at = [a.name for a in node.target._schema.arguments]
        x, B = (graph.value(node.args[at.index(name)]) for name in ("x", "B"))  # type: ignore[arg-type]
        shape = (*x.shape[2:], *B.shape[2:])
    rows = table.only(*shape)  # type: ignore[arg-type]
    if rows.rows:
        node.kwargs = {**node.kwargs, "tiles": rows.text()}


def with_tiles(schema: str) -> str:
    """An op's schema with the argument more."""
    head, results = schema.split(") -> ")
    return f'{head}{"" if "*, " in head else ", *"}, str tiles="") -> {results}'


def with_starts(schema: str, *, backward: bool = False) -> str:
    """A scan's schema with what its forward keeps for the backward: a result more, or a last positional argument."""
    head, results = schema.split(") -> ")
    if backward:
        return f"{head.replace(', *, ', ', Tensor? starts=None, *, ', 1)}) -> {results}"
    return f"{head}) -> {results.removesuffix(')')}, Tensor starts)"


def starts_apart(canonical: Any, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments of a kernel as those of the canonical op, and what was kept, if it is among them."""
    count = sum(not a.kwarg_only for a in canonical._schema.arguments)
    return args[:count], dict(zip(("starts",), args[count:], strict=False))


def without_tiles(canonical: Callable[..., Any]) -> Callable[..., Any]:
    """The canonical op for arguments of a kernel that takes tiles, and what was kept."""

    def called(*args: Any, tiles: str = "", starts: Any = None, **kwargs: Any) -> Any:
        return canonical(*starts_apart(canonical, args)[0], **kwargs)

    return called
