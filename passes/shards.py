"""Recipes for the parts of weights that one rank holds, and the way back, which communicates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from latentscan.ir.mesh import Axis
from latentscan.ir.ops.collectives import first_holds, gather_shards
from latentscan.ir.weights import Part, Recipe, Weight

SUFFIX = "_tp"
OPTIONAL = "optional"  # in a recipe's keep
Held = Sequence[Sequence[int]]
Tensors = tuple[torch.Tensor, ...]


def pick(tensor: torch.Tensor, dim: int, indices: Sequence[int]) -> torch.Tensor:
    """The given indices along a dimension, in memory of their own."""
    return tensor.index_select(dim, torch.tensor(list(indices), dtype=torch.long, device=tensor.device))


def column_recipe(sources: Sequence[Weight], dim: int, held: Held, axis: Axis, maker: str, site: str) -> Recipe:
    """Rows of a weight (along ``dim``) and of its bias, which has one dimension."""
    dims = [dim, 0][: len(sources)]
    totals = [int(w.value.shape[d]) for w, d in zip(sources, dims, strict=True)]

    def function(*given: torch.Tensor) -> Tensors:
        return tuple(pick(t, d, held[axis.rank]) for t, d in zip(given, dims, strict=True))

    def inverse(*parts: torch.Tensor) -> Tensors:
        return tuple(gather_shards(t, d, held, n, axis.group) for t, d, n in zip(parts, dims, totals, strict=True))

    return _recipe(sources, dims, held, function, inverse, axis, maker, site)


def row_recipe(sources: Sequence[Weight], dim: int, held: Held, axis: Axis, maker: str, site: str) -> Recipe:
    """Input features of a weight (along ``dim``); the bias goes to the first rank as it is."""
    total = int(sources[0].value.shape[dim])
    shape = tuple(int(s) for s in sources[1].value.shape) if len(sources) > 1 else ()
    kept = len(sources) if axis.rank == 0 else 1

    def function(*given: torch.Tensor) -> Tensors:
        return (pick(given[0], dim, held[axis.rank]), *(b.clone() for b in given[1:kept]))

    def inverse(*parts: torch.Tensor) -> Tensors:
        weight = gather_shards(parts[0], dim, held, total, axis.group)
        if not shape:
            return (weight,)
        return weight, first_holds(parts[1] if len(parts) > 1 else None, weight, shape, axis.group)

    return _recipe(sources, [dim, None][:kept], held, function, inverse, axis, maker, site)


def weight_recipe(
    source: Weight, dim: int, held: Held, axis: Axis, maker: str, site: str, *, optional: bool = False
) -> Recipe:
    """Any other weight, split along one dimension.

    Args:
        optional: some graphs do not read it (the embedding, where a call gives embedded inputs).
    """
    total = int(source.value.shape[dim])

    def function(*given: torch.Tensor) -> Tensors:
        return (pick(given[0], dim, held[axis.rank]),)

    def inverse(*parts: torch.Tensor) -> Tensors:
        return (gather_shards(parts[0], dim, held, total, axis.group),)

    recipe = _recipe([source], [dim], held, function, inverse, axis, maker, site)
    return replace(recipe, keep={**recipe.keep, OPTIONAL: optional})


def _recipe(
    sources: Sequence[Weight],
    dims: Sequence[int | None],
    held: Held,
    function: Callable[..., Tensors],
    inverse: Callable[..., Tensors],
    axis: Axis,
    maker: str,
    site: str,
) -> Recipe:
    """A recipe for the first ``len(dims)`` of its sources, each with ``held[rank]`` along its dimension."""
    paths = tuple(w.path for w in sources)
    every = tuple(tuple(h) for h in held)
    parts = tuple(
        Part(dim, every, axis.rank, tuple(int(s) for s in w.value.shape)) for w, dim in zip(sources, dims, strict=False)
    )
    count = len(held[axis.rank])
    shapes = [tuple(count if d == p.dim else s for d, s in enumerate(p.shape)) for p in parts]
    targets = tuple(p + SUFFIX for p in paths[: len(dims)])
    return Recipe(paths, targets, maker, site, function, inverse, {"shapes": shapes}, axis.group or "-", parts)
