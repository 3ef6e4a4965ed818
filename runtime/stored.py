"""Weights in a Hugging Face directory, read slice by slice: nothing but what is asked for is read."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from latentscan.ir.errors import CheckpointError
from latentscan.ir.weights import Part
from latentscan.runtime.source import one_line

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_AT_ONCE = 1 << 26  # bytes that a copy into place holds twice


@dataclass(frozen=True)
class Leaf:
    """One tensor of a file."""

    file: Path
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Joined:
    """Tensors one after the other along ``dim``; ``stacked``: along a new one, each being one index of it."""

    pieces: tuple[Leaf | Joined, ...]
    dim: int
    stacked: bool

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.pieces[0].shape
        if self.stacked:
            return (*first[: self.dim], len(self.pieces), *first[self.dim :])
        total = sum(p.shape[self.dim] for p in self.pieces)
        return (*first[: self.dim], total, *first[self.dim + 1 :])


def runs(indices: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ascending indices as (first, behind the last, place of the first among the indices)."""
    found: list[tuple[int, int, int]] = []
    for at, index in enumerate(indices):
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1, found[-1][2])
        else:
            found.append((index, index + 1, at))
    return found


class Stored:
    """The weights of a directory by a model's names.

    Args:
        folder: holds ``model.safetensors``, or several files and their index.
        model: whose names are wanted, on any device. Where the library stores a weight in several tensors (experts) or
            under another name, its own table says so.
        more: names of stored weights that are no names of the model's yet.

    Attributes:
        bytes_read: what was read of the files so far, headers left out.

    Raises:
        CheckpointError: a file is missing or damaged, or lacks weights of the model.
    """

    def __init__(self, folder: Any, model: torch.nn.Module, more: Iterable[str] = ()) -> None:
        self.folder, self.bytes_read = Path(folder), 0
        self._open: dict[Path, Any] = {}
        leaves = {name: leaf for path in self._files() for name, leaf in self._leaves(path).items()}
        self._weights = _by_model_names(leaves, model, more, self.folder)

    def _files(self) -> list[Path]:
        if not self.folder.is_dir():
            raise CheckpointError("there is no such directory", where=str(self.folder), remedy="give the model's own")
        index = self.folder / INDEX
        if not index.is_file():
            return [self.folder / SINGLE]
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return [self.folder / name for name in sorted(names)]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"cannot be read: {one_line(error)}", where=str(index), remedy="copy the directory again"
            ) from None

    def _leaves(self, path: Path) -> dict[str, Leaf]:
        from safetensors import safe_open

        if not path.is_file():
            raise CheckpointError("is missing", where=str(path), remedy="give a directory of safetensors files")
        try:
            file = self._open[path] = safe_open(str(path), framework="pt").__enter__()
            return {n: Leaf(path, n, tuple(file.get_slice(n).get_shape())) for n in file.keys()}  # noqa: SIM118
        except Exception as error:  # noqa: BLE001  safetensors' own error types
            raise CheckpointError(
                f"is damaged: {one_line(error)}", where=str(path), remedy="copy the directory again"
            ) from None

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights[name].shape

    def read(
        self, name: str, like: torch.Tensor, device: torch.device, dim: int | None = None, own: Sequence[int] = ()
    ) -> torch.Tensor:
        """A weight, or the indices ``own`` of it along ``dim``, in the dtype of ``like``.

        Args:
            like: has the shape of the whole weight.

        Raises:
            CheckpointError: the stored weight has another shape.
        """
        weight = self._weights[name]
        if weight.shape != tuple(like.shape):
            raise CheckpointError(
                f"{name} has shape {list(weight.shape)}, the model's has {list(like.shape)}", where=str(self.folder),
                remedy="build the model from this directory's config.json",
            )  # fmt: skip
        shape = tuple(len(own) if d == dim else s for d, s in enumerate(weight.shape))
        made = torch.empty(shape, dtype=like.dtype, device=device)
        self._fill(weight, made, dim, range(made.shape[dim]) if dim is None and made.dim() == 0 else own)
        return made

    def _fill(self, weight: Leaf | Joined, out: torch.Tensor, dim: int | None, own: Sequence[int]) -> None:
        if isinstance(weight, Leaf):
            if dim is None:
                self._copy(weight, out, None, 0, 0)
            for first, behind, at in runs(own) if dim is not None else ():
                self._copy(weight, out.narrow(dim, at, behind - first), dim, first, behind)  # type: ignore[arg-type]
            return
        along = weight.dim
        if weight.stacked:
            chosen = own if dim == along else range(len(weight.pieces))
            inner = None if dim is None or dim == along else dim - (dim > along)
            for at, index in enumerate(chosen):
                self._fill(weight.pieces[index], out.select(along, at), inner, () if inner is None else own)
            return
        start = place = 0
        for piece in weight.pieces:
            size = piece.shape[along]
            mine = [i - start for i in own if start <= i < start + size] if dim == along else own
            count = len(mine) if dim == along else size
            if count:
                self._fill(piece, out.narrow(along, place, count), dim, mine)
            start, place = start + size, place + count

    def _copy(self, leaf: Leaf, out: torch.Tensor, dim: int | None, first: int, behind: int) -> None:
        """Indices ``first`` to ``behind`` along ``dim`` into place, a bounded number of bytes at a time."""
        stored = self._open[leaf.file].get_slice(leaf.name)
        if not leaf.shape:
            value = self._open[leaf.file].get_tensor(leaf.name)
            self.bytes_read += value.numel() * value.element_size()
            out.copy_(value)
            return
        rows = (first, behind) if dim == 0 else (0, leaf.shape[0])
        width = math.prod((behind - first) if d == dim else s for d, s in enumerate(leaf.shape) if d)
        step = max(1, _AT_ONCE // max(1, 4 * width))
        for row in range(*rows, step):
            place: list[slice] = [slice(row, min(row + step, rows[1]))]
            if dim:
                place += [slice(None)] * (dim - 1) + [slice(first, behind)]
            value = stored[tuple(place)]
            self.bytes_read += value.numel() * value.element_size()
            out.narrow(0, row - rows[0], value.shape[0]).copy_(value)

    def part(self, name: str, part: Part, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """What this rank holds of a weight."""
        return self.read(name, like, device, part.dim, part.own or ())

    def close(self) -> None:
        self._open.clear()


# -- names ------------------------------------------------------------------------------------------------------------


def _by_model_names(leaves: dict[str, Leaf], model: Any, more: Iterable[str], folder: Path) -> dict[str, Leaf | Joined]:
    """What is stored, by the model's names."""
    wanted = {**dict.fromkeys(more, True), **model.state_dict(keep_vars=True)}
    found: dict[str, Leaf | Joined] = {name: leaf for name, leaf in leaves.items() if name in wanted}
    rest = [name for name in leaves if name not in wanted]
    if not rest:
        return found
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key
    except ImportError as error:
        raise CheckpointError(
            f"{rest[0]} is no name of the model's, and this transformers has no table of stored names: {error}",
            where=str(folder), remedy="install the transformers that wrote the directory",
        ) from None  # fmt: skip
    table = get_model_conversion_mapping(model)
    converters = [t for t in table if isinstance(t, WeightConverter)]
    renamings = [t for t in table if not isinstance(t, WeightConverter)]
    by_pattern = {pattern: t for t in converters for pattern in t.source_patterns}
    groups: dict[str, dict[str, list[Leaf]]] = defaultdict(lambda: defaultdict(list))
    used: dict[str, Any] = {}
    for name in sorted(rest, key=_natural):
        new, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if new not in wanted or new in found:
            continue
        if pattern is None:
            groups[new][""].append(leaves[name])
        else:
            groups[new][pattern].append(leaves[name])
            used[new] = by_pattern[pattern]
    left = [n for n in rest if n not in {leaf.name for p in groups.values() for made in p.values() for leaf in made}]
    known = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    left = [n for n in left if not any(p.search(n) for p in known)]
    if left:
        warnings.warn(
            f"{folder} holds {len(left)} weights that the model has not, {min(left)} first; they are left out",
            stacklevel=4,
        )
    for name, patterns in groups.items():
        found[name] = _joined(name, patterns, used[name], folder) if name in used else patterns[""][0]
    return found


def _natural(name: str) -> list[Any]:
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", name)]


def _joined(name: str, patterns: dict[str, list[Leaf]], converter: Any, folder: Path) -> Leaf | Joined:
    """A weight that the library's converter makes of several stored ones: lists stacked, then one behind the other."""
    pieces: list[list[Leaf | Joined]] = [list(patterns[p]) for p in converter.source_patterns if p in patterns]
    for step in converter.operations:
        kind = type(step).__name__
        if kind == "MergeModulelist":
            pieces = [[Joined(tuple(p), step.dim, True)] for p in pieces]
        elif kind == "Concatenate":
            pieces = [[Joined(tuple(x for p in pieces for x in p), step.dim, False)]]
        else:
            raise CheckpointError(
                f"{name} is stored in a form that is read whole only ({kind})", where=str(folder),
                remedy="load the whole model with from_pretrained, and wrap it without weights=",
            )  # fmt: skip
    ((made,),) = pieces
    return made


__all__ = ["Stored", "runs"]
