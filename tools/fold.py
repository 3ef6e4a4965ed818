"""Folding repeated layers: what holds for layers 0 to 29 is said once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_SUFFIX = re.compile(r"_\d+\b")


@dataclass(frozen=True)
class Folded(Generic[T]):
    """Items that differ only in their layer.

    Attributes:
        module: their module paths as one text, such as ``model.layers.0..29.self_attn``.
        items: the items themselves, in order.
    """

    module: str
    items: tuple[T, ...]

    @property
    def first(self) -> T:
        return self.items[0]


def fold(items: Iterable[T], module: Callable[[T], str], *same: Callable[[T], str]) -> list[Folded[T]]:
    """Group items whose module paths differ only in the first number and whose texts ``same`` agree.

    Numbers at the end of node names (``k_17``) do not count as a difference.
    """
    groups: dict[tuple[str, ...], list[T]] = {}
    for item in items:
        pattern = _NUMBER.sub("*", module(item), count=1)
        groups.setdefault((pattern, *(_SUFFIX.sub("", s(item)) for s in same)), []).append(item)
    return [Folded(fold_paths([module(i) for i in members]), tuple(members)) for members in groups.values()]


def fold_paths(paths: list[str]) -> str:
    """Module paths that differ only in the first number, as one: ``model.layers.0..2,5.self_attn``."""
    found = [_NUMBER.search(p) for p in paths]
    numbers = sorted({int(m.group()) for m in found if m is not None})
    if not numbers or found[0] is None:
        return paths[0]
    return paths[0][: found[0].start()] + ranges(numbers) + paths[0][found[0].end() :]


def ranges(numbers: list[int]) -> str:
    """Ascending numbers as ranges: ``0..2,5``."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(f"{p[0]}..{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
