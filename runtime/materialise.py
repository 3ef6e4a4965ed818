"""A model on the meta device gets its weights from a directory, rewritten on the way; a rank reads its part only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from latentscan.ir.errors import CheckpointError
from latentscan.ir.weights import Recipe
from latentscan.runtime.own import bury, get, place, release, tombstone, trained
from latentscan.runtime.plan import ModelPlan
from latentscan.runtime.stored import Stored


def is_empty(model: torch.nn.Module) -> bool:
    """Whether any of a model's weights are on the meta device."""
    return any(p.is_meta for p in model.parameters())


def materialise(
    model: torch.nn.Module,
    plan: ModelPlan,
    stored: Stored,
    device: torch.device,
    new: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Fill a model on the meta device: new weights by the plan's recipes, the others as they are stored. All or none.

    A rank's part of a weight is read as that part. Sources that a recipe changes otherwise are held while their own
    new weights are made, and no longer.

    Args:
        new: new weights of the plan that are stored as they are, and are not made again: by name, on the meta device.

    Raises:
        CheckpointError: weights are missing or of another shape, or a buffer that is not stored is not known to the
        library.
    """
    modules = list(model.modules())
    before = [(m, dict(m._parameters), dict(m._buffers), set(m._non_persistent_buffers_set)) for m in modules]
    try:
        _Filling(model, plan, stored, device, new or {}).run()
    except BaseException:
        for module, parameters, buffers, names in before:
            module._parameters.clear(), module._parameters.update(parameters)
            module._buffers.clear(), module._buffers.update(buffers)
            module._non_persistent_buffers_set = names
        raise


class _Filling:
    def __init__(
        self, model: Any, plan: ModelPlan, stored: Stored, device: torch.device, new: Mapping[str, torch.Tensor]
    ) -> None:
        self.model, self.plan, self.stored, self.device, self.new = model, plan, stored, device, new
        self.kept = [r for r in plan.recipes if all(t in new for t in r.targets)]
        recipes = [r for r in plan.recipes if r not in self.kept]
        self.makers = {target: recipe for recipe in recipes for target in recipe.targets}
        self.readers: dict[str, int] = {}  # how many recipes are still to read a weight that one of them made
        for recipe in plan.recipes:
            for source in recipe.sources:
                self.readers[source] = self.readers.get(source, 0) + 1
        self.names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)
        self.made: set[str] = set()

    def run(self) -> None:
        whole = dict(self.model.named_parameters())
        self.check(whole)
        for path, like in self.new.items():
            module, name = place(self.model, path)
            if path in self.plan.released:
                bury(self.model, path, tombstone(like.shape, like.dtype, self.device))
            else:
                value = torch.nn.Parameter(self.stored.read(path, like, self.device), like.is_floating_point())
                module.register_parameter(name, value)
        for recipe in self.plan.recipes:
            if recipe not in self.kept:
                self.make(recipe, whole)
        old = [s for s in self.plan.released if s in {n for names in self.names.values() for n in names}]
        release(self.model, old, self.device)
        for name, parameter in list(self.model.named_parameters()):
            if parameter.is_meta:
                value = self.stored.read(self.stored_name(name, parameter), parameter, self.device)
                self.put(name, value, parameter)
        fill_buffers(self.model, self.stored, self.device)

    def stored_name(self, name: str, parameter: torch.Tensor) -> str:
        return next((n for n in self.names.get(id(parameter), [name]) if n in self.stored), name)

    def check(self, whole: dict[str, torch.nn.Parameter]) -> None:
        gone = {s for r in self.kept for s in r.sources} & set(self.plan.released)
        missing = [n for n, p in whole.items() if n not in gone and self.stored_name(n, p) not in self.stored]
        persistent = {n for n in self.model.state_dict() if n not in whole}
        aliases = {n for names in self.names.values() for n in names}
        missing += sorted(n for n in persistent - aliases if n not in self.stored)
        if missing:
            raise CheckpointError(
                f"lacks {len(missing)} weights of the model, {missing[0]} first", where=str(self.stored.folder),
                remedy="build the model from this directory's config.json",
            )  # fmt: skip

    def make(self, recipe: Recipe, whole: dict[str, torch.nn.Parameter]) -> None:
        """Make a recipe's weights, first those that it is made from."""
        if recipe.targets[0] in self.made:
            return
        for source in recipe.sources:
            if source in self.makers:
                self.make(self.makers[source], whole)
        like = [self.source(s, whole) for s in recipe.sources]
        if recipe.parts and not any(s in self.makers for s in recipe.sources):
            values: Sequence[torch.Tensor] = [
                self.stored.part(self.stored_name(s, p), part, p, self.device)
                for s, p, part in zip(recipe.sources, like, recipe.parts, strict=False)
            ]
        else:
            given = [
                p if s in self.makers else self.stored.read(self.stored_name(s, p), p, self.device)
                for s, p in zip(recipe.sources, like, strict=True)
            ]
            values = recipe.make(*given)
        trains = [
            p.requires_grad or (s in self.new and p.is_floating_point())
            for s, p in zip(recipe.sources, like, strict=True)
        ]
        for path, value, flag in zip(recipe.targets, values, trained(recipe, trains), strict=True):
            module, name = place(self.model, path)
            own = value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
            module.register_parameter(name, torch.nn.Parameter(own.detach(), requires_grad=flag))
            self.made.add(path)
        for source in recipe.sources:
            self.readers[source] -= 1
            if source in self.makers and source in self.plan.released and not self.readers[source]:
                release(self.model, [source])

    def source(self, path: str, whole: dict[str, torch.nn.Parameter]) -> torch.Tensor:
        if path in self.new:
            return self.new[path]
        return get(self.model, path) if path in self.makers or path not in whole else whole[path]

    def put(self, name: str, value: torch.Tensor, old: torch.nn.Parameter) -> None:
        """A weight that stays what it is, under all of its names."""
        new = torch.nn.Parameter(value, requires_grad=old.requires_grad)
        for path in self.names.get(id(old), [name]):
            module, last = place(self.model, path)
            module._parameters[last] = new


def fill_buffers(model: Any, stored: Stored, device: torch.device) -> None:
    """Buffers of a model whose parameters are in place: stored ones are read, others computed by the library.

    Raises:
        CheckpointError: the library does not compute one.
    """
    marked = "_is_hf_initialized"
    computed: list[tuple[torch.nn.Module, str, str]] = []
    for prefix, module in model.named_modules():
        if getattr(module, "rope_type", None) == "longrope" and getattr(
            module.__dict__.get("long_inv_freq"), "is_meta", False
        ):
            del module.long_inv_freq  # planning made it; the first call makes it again
        for name, buffer in list(module._buffers.items()):
            path = f"{prefix}.{name}" if prefix else name
            if buffer is None or not buffer.is_meta:
                continue
            if name not in module._non_persistent_buffers_set:
                module._buffers[name] = stored.read(path, buffer, device)
            else:
                nan = buffer.is_floating_point()
                module._buffers[name] = torch.full_like(buffer, float("nan") if nan else 0, device=device)
                computed.append((module, name, path))
    again = {id(m) for m, _, _ in computed}
    for module in model.modules():
        setattr(module, marked, id(module) not in again)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not any(b is tensor for m, n, _ in computed for b in (m._buffers[n],)):
                setattr(tensor, marked, True)
    if not computed:
        return
    model.initialize_weights()
    for module, name, path in computed:
        value = module._buffers[name]
        if value is not None and value.is_floating_point() and bool(value.isnan().any()):
            raise CheckpointError(
                f"the buffer {path} is neither stored nor computed by the library", where=str(stored.folder),
                remedy="load the whole model with from_pretrained, and wrap it without weights=",
            )  # fmt: skip


__all__ = ["is_empty", "materialise"]
