"""Weights of a graph: which placeholder is which parameter of the model, and recipes for new ones.

A recipe says how new weights come from old ones. What becomes of it is the runtime's business: it can be computed
before every call with gradients, folded once while nothing changes, or turned into new Parameters of the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from latentscan.ir.errors import RefusedError


class Weight:
    """One parameter or buffer that the traced model reads.

    Attributes:
        path: its name in ``model.named_parameters()`` or ``named_buffers()``.
        placeholder: the name of its placeholder node.
    """

    def __init__(self, path: str, placeholder: str, value: torch.Tensor, fake: torch.Tensor | None = None) -> None:
        """
        Args:
            value: the model's own tensor (never a copy). It is held weakly if there is a fake one to fall back on:
                Dynamo keeps graphs for as long as it likes, and they must not keep a model or its old weights alive.
            fake: the placeholder's fake value.
        """
        self.path, self.placeholder = path, placeholder
        self._real = None if fake is None else weakref.ref(value)
        self._fake = value if fake is None else fake

    def __repr__(self) -> str:
        return f"Weight({self.path!r}, {self.placeholder!r}, {list(self.value.shape)} {self.value.dtype})"

    @property
    def value(self) -> torch.Tensor:
        """The model's own tensor; a fake one of its form once that is gone, or for a weight that is not made yet."""
        real = None if self._real is None else self._real()
        return self._fake if real is None else real


@dataclass(frozen=True)
class Part:
    """Which part of a source each rank of an axis holds, so that it can be read, stored and found again as such.

    Attributes:
        dim: the dimension along which the source is split; None: the first rank holds all of it, the others nothing.
        held: for each rank the indices along ``dim``, ascending. Ranks may hold the same ones.
        rank: this rank.
        shape: of the whole source.
    """

    dim: int | None
    held: tuple[tuple[int, ...], ...]
    rank: int
    shape: tuple[int, ...]

    @property
    def own(self) -> tuple[int, ...] | None:
        """This rank's indices along ``dim``; None where that is the whole source."""
        return None if self.dim is None else self.held[self.rank]


@dataclass(frozen=True)
class Recipe:
    """How a group of new weights is made from existing ones.

    Attributes:
        sources: paths of the existing weights, in the order in which ``function`` takes them.
        targets: paths of the new weights (module path + name), in the order in which ``function`` returns them.
        maker: name of the pass. module: path of the site that it was made for.
        function: ``function(*sources) -> tuple of tensors``; differentiable torch code.
        inverse: ``inverse(*targets) -> tuple of tensors`` in the order of ``sources``, or None if the old weights
            cannot be rebuilt.
        keep: for the plan's text form: facts such as the rank.
        group: not empty if the targets are this rank's part of the sources: ``inverse`` then communicates, and every
            rank of that process group must call it.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    maker: str
    module: str
    function: Callable[..., tuple[torch.Tensor, ...]]
    inverse: Callable[..., tuple[torch.Tensor, ...]] | None = None
    keep: dict[str, Any] = field(default_factory=dict)
    group: str = ""
    parts: tuple[Part, ...] = ()

    def make(self, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The new weights, to be kept: without gradients, and none but finite ones.

        Raises:
            RefusedError: one of them is not finite.
        """
        with torch.no_grad():
            values = self.function(*sources)
        for path, value in zip(self.targets, values, strict=True):
            if _is_finite(value):
                continue
            old = next((p for p, s in zip(self.sources, sources, strict=True) if not _is_finite(s)), None)
            cause = f", and so is {old}, which it is made from" if old else ", though all that it is made from are"
            raise RefusedError(
                f"{self.maker} makes {path} of shape {list(value.shape)} not finite in {value.dtype}{cause}",
                where=self.module,
                remedy="repair the model's weights" if old else "give a wider dtype, or other calibration data",
            )
        return values


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are. True where they are not known, or cannot be infinite."""
    if tensor.is_meta or not tensor.numel() or not tensor.is_floating_point() or tensor.element_size() < 2:
        return True
    return bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())  # a NaN is either; nothing of its size


@dataclass
class Added:
    """A new weight of a graph: the placeholder that was appended for it and where its value comes from."""

    path: str
    placeholder: str
    recipe: Recipe
    index: int  # position among the recipe's targets


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements (not of its storage)."""
    return tensor.numel() * tensor.element_size()
