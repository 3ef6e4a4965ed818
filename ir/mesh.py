"""The mesh that parallel passes split a model over: named axes, their sizes, and where this rank is.

A description only: process groups are made by the runtime (``latentscan.runtime.mesh``) and enter by name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from latentscan.ir.errors import MeshError

AXES = ("dp", "tp", "cp")


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh.

    Attributes:
        name: "dp", "tp" or "cp".
        size: ranks along it.
        rank: this rank's place on it.
        group: name of the process group along it; empty on a planned mesh, where nothing is sent.
    """

    name: str
    size: int
    rank: int = 0
    group: str = ""


@dataclass(frozen=True)
class Mesh:
    """Axes in the order in which ranks are counted, the last one fastest."""

    axes: tuple[Axis, ...] = ()

    def axis(self, name: str) -> Axis:
        """An axis by name; one of size 1 if the mesh does not have it."""
        return next((a for a in self.axes if a.name == name), Axis(name, 1))

    @property
    def size(self) -> int:
        """All ranks of the mesh."""
        return math.prod(a.size for a in self.axes)

    def text(self) -> str:
        """The mesh as it is written: ``tp=2,cp=2``."""
        return ",".join(f"{a.name}={a.size}" for a in self.axes)

    def at(self, **ranks: int) -> Mesh:
        """The same mesh as another rank sees it, with nothing to send over."""
        for name, rank in ranks.items():
            if not 0 <= rank < self.axis(name).size:
                raise MeshError(f"there is no rank {rank} on {name}, which has {self.axis(name).size}")
        return Mesh(tuple(replace(a, rank=ranks.get(a.name, a.rank), group="") for a in self.axes))

    def everywhere(self) -> Iterator[Mesh]:
        """The mesh as each of its ranks sees it, in order."""
        for place in itertools.product(*(range(a.size) for a in self.axes)):
            yield self.at(**dict(zip((a.name for a in self.axes), place, strict=True)))


def parse_mesh(text: str) -> Mesh:
    """A mesh from text such as ``tp=2,cp=2``, seen from its first rank.

    Raises:
        MeshError: unknown or repeated axes, or sizes that are no positive numbers.
    """
    axes: list[Axis] = []
    for part in text.split(","):
        name, equals, number = (p.strip() for p in part.partition("="))
        if not equals or name not in AXES:
            raise MeshError(
                f"mesh {text!r}: cannot read {part.strip()!r}", remedy="write axis=size of dp, tp, cp: tp=2,cp=2"
            )
        if name in (a.name for a in axes):
            raise MeshError(f"mesh {text!r}: axis {name} is given twice", remedy="give it once")
        if not number.isdecimal() or int(number) < 1:
            raise MeshError(
                f"mesh {text!r}: the size of {name} is {number!r}", remedy="give a number of ranks, 1 or more"
            )
        axes.append(Axis(name, int(number)))
    return Mesh(tuple(axes))


def shares(count: int, size: int, multiple: int = 1) -> list[int]:
    """How many of ``count`` things each of ``size`` ranks gets, in whole multiples; the first ranks get one more.

    Raises:
        MeshError: ``count`` is no multiple of ``multiple``.
    """
    if count % multiple:
        raise MeshError(f"{count} is no multiple of {multiple}")
    blocks = count // multiple
    return [(blocks // size + (rank < blocks % size)) * multiple for rank in range(size)]
