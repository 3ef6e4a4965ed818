"""Where the values of a graph's new weights come from at each call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from latentscan.ir.graph import Graph
from latentscan.ir.weights import Added, Recipe
from latentscan.runtime.own import get


def version_key(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Changes whenever a tensor is replaced, moved or written in place (but not by writes through ``.data``)."""

    def version(t: torch.Tensor) -> int:
        try:
            return t._version
        except RuntimeError:  # inference tensors do not count
            return -1

    return tuple((id(t), t.data_ptr(), version(t), t.dtype, str(t.device)) for t in tensors)


@dataclass(frozen=True)
class Folded:
    """What a recipe gave for the present sources."""

    key: tuple[Any, ...]
    values: tuple[torch.Tensor, ...]
    sources: tuple[weakref.ref[torch.Tensor], ...]  # while they live, an id means the same tensor


_LIVE: weakref.WeakSet[RecipeWeights] = weakref.WeakSet()


class RecipeWeights:
    """New weights computed from the model's own: with gradients at every call, else once until a source changes.

    Used where latentscan does not own the model's parameters (the plain backend). Sources are held weakly; what was
    folded goes with them.
    """

    def __init__(self) -> None:
        self._folded: dict[tuple[str, ...], Folded] = {}
        self._served: list[weakref.ref[torch.Tensor]] = []
        _LIVE.add(self)

    def serve(self, graph: Graph) -> None:
        """Remember, weakly, whose weights the graph reads, so that ``refresh`` can tell its model from others."""
        self._served = [weakref.ref(w.value) for w in graph.weights.values()]

    def serves(self, of: Container[int]) -> bool:
        """Whether a graph reads any of the tensors with the given ids."""
        return any(t is not None and id(t) in of for t in (r() for r in self._served))

    def values(self, recipe: Recipe, sources: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if torch.is_grad_enabled() and any(s.requires_grad for s in sources):
            return recipe.function(*sources)
        key = version_key(sources)
        kept = self._folded.get(recipe.targets)
        if kept is None or kept.key != key or any(r() is None for r in kept.sources):
            with torch.no_grad():
                made = tuple(t.contiguous() for t in recipe.function(*sources))
            kept = Folded(key, made, tuple(weakref.ref(s, self._forgetter(recipe.targets)) for s in sources))
            self._folded[recipe.targets] = kept
        return kept.values

    def _forgetter(self, targets: tuple[str, ...]) -> Callable[[Any], None]:
        mine = weakref.ref(self)

        def forget(source: Any) -> None:
            weights = mine()
            kept = None if weights is None else weights._folded.get(targets)
            if kept is not None and any(r is source for r in kept.sources):
                del weights._folded[targets]  # type: ignore[union-attr]

        return forget

    def refresh(self, of: Container[int] | None = None) -> None:
        """Forget what was folded: everything, or what comes from tensors with the given ids."""
        for targets, kept in list(self._folded.items()):
            if of is None or any(id(r()) in of for r in kept.sources):
                del self._folded[targets]

    def bind(self, graph: Graph) -> Callable[[Sequence[Any]], list[torch.Tensor]]:
        """A function from the graph's inputs to the values of its added weights."""
        groups = recipes_of(graph.added)
        at = {name: i for i, name in enumerate(graph.inputs)}
        given = {w.path: at[w.placeholder] for w in graph.weights.values() if w.placeholder in at}

        def values(args: Sequence[Any]) -> list[torch.Tensor]:
            made: dict[str, torch.Tensor] = {}
            for recipe, _ in groups:  # a recipe may read what an earlier one made
                sources = [made[p] if p in made else args[given[p]] for p in recipe.sources]
                made.update(zip(recipe.targets, self.values(recipe, sources), strict=True))
            return [made[a.path] for a in graph.added]

        return values


def refresh_folded(model: torch.nn.Module) -> bool:
    """Forget what plain-backend graphs folded from the model's weights; whether any graph reads this model."""
    of = {id(t) for t in (*model.parameters(), *model.buffers())}
    served = False
    for weights in list(_LIVE):
        weights.refresh(of)
        served = served or weights.serves(of)
    return served


class OwnedWeights:
    """New weights that are Parameters of the wrapped model; the model is held weakly."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)

    def serve(self, graph: Graph) -> None:
        """The model is known."""

    def refresh(self) -> None:
        """Nothing is folded here."""

    def bind(self, graph: Graph) -> Callable[[Sequence[Any]], list[torch.Tensor]]:
        paths = [a.path for a in graph.added]

        def values(args: Sequence[Any]) -> list[torch.Tensor]:
            model = self._model()
            assert model is not None  # it is being called
            return [get(model, path) for path in paths]

        return values


def recipes_of(added: Sequence[Added]) -> list[tuple[Recipe, list[Added]]]:
    """Added weights grouped by recipe, in order."""
    groups: list[tuple[Recipe, list[Added]]] = []
    for item in added:
        for recipe, members in groups:
            if recipe.targets == item.recipe.targets:
                members.append(item)
                break
        else:
            groups.append((item.recipe, [item]))
    return groups
