"""New Parameters on the user's model, old ones released, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from latentscan.ir.errors import RefusedError
from latentscan.ir.weights import Recipe, bytes_of

RELEASED = "_latentscan_released"  # on a module: names of its buffers that stand for released Parameters
TIES = "_latentscan_ties"  # on the model: path of a released Parameter -> its other names
FROZEN = "_latentscan_frozen"  # on the model: paths of released Parameters that did not train
DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"


def place(model: torch.nn.Module, path: str) -> tuple[torch.nn.Module, str]:
    """The module that holds a weight, and the weight's name in it."""
    module, _, name = path.rpartition(".")
    return model.get_submodule(module), name


def get(model: torch.nn.Module, path: str) -> torch.Tensor:
    """A weight by its path.

    Raises:
        RefusedError: it is not there: its module was exchanged after wrapping.
    """
    try:
        module, name = place(model, path)
        return getattr(module, name)
    except AttributeError:
        raise _moved(model, path) from None


def check_places(model: torch.nn.Module, recipes: Sequence[Recipe], released: Sequence[str]) -> None:
    """Raise RefusedError unless new weights and what stands for released ones are where they were put."""
    for recipe in recipes:
        for path in recipe.targets:
            get(model, path)
    for path in released:
        get(model, path)
        module, name = place(model, path)
        if name not in module.__dict__.get(RELEASED, ()):
            raise _moved(model, path)


def _moved(model: torch.nn.Module, path: str) -> RefusedError:
    """The error for a weight whose module is another one now."""
    there, module = path.rpartition(".")[0], None
    while module is None:
        try:
            module = model.get_submodule(there)
        except AttributeError:
            there = there.rpartition(".")[0]
    return RefusedError(
        f"{path} is not the weight that wrap put there: the module was exchanged after wrap "
        f"(a {type(module).__name__} is there now)",
        where=there or type(model).__name__,
        remedy="put the module back that was there; to change it (an adapter, say), unwrap, change it and wrap again",
    )


def trained(recipe: Recipe, flags: Sequence[bool]) -> list[bool]:
    """Which targets train, given which sources do: a part does if what it is a part of does, else all or none.

    Raises:
        RefusedError: the bias of a sum over the ranks trains and its weight does not. The first rank alone holds the
        bias, so the others' backward passes might start later, without the collectives that it waits for.
    """
    if not recipe.parts:
        return [any(flags)] * len(recipe.targets)
    alone = len(recipe.parts) < len(recipe.sources) or recipe.parts[-1].dim is None
    if alone and flags[-1] and not flags[0]:
        raise trains_alone(recipe.sources[-1])
    return list(flags[: len(recipe.targets)])


def trains_alone(bias: str) -> RefusedError:
    return RefusedError(
        f"{bias}, which the first rank alone holds, trains and its weight does not",
        where=bias.rpartition(".")[0],
        remedy="freeze the weight before wrap, which then gives every rank the bias; or train both or neither of them",
    )


def alone_in_training(model: torch.nn.Module, recipes: Sequence[Recipe]) -> str:
    """The first bias on this rank that a later freeze has left to train without its weight (see :func:`trained`)."""
    for recipe in recipes:
        if len(recipe.parts) == 2 and recipe.parts[1].dim is None:
            weight, bias = (get(model, path) for path in recipe.targets)
            if bias.requires_grad and not weight.requires_grad:
                return recipe.sources[1]
    return ""


def trained_weights(model: torch.nn.Module, recipes: Sequence[Recipe]) -> list[tuple[str, bool]]:
    """Names of weights and whether they train, without those that one rank alone holds: on all ranks the same."""
    alone = {t for r in recipes for t, part in zip(r.targets, r.parts, strict=False) if part.dim is None}
    return [(name, p.requires_grad) for name, p in model.named_parameters() if name not in alone]


def make_parameters(model: torch.nn.Module, recipes: Sequence[Recipe]) -> None:
    """Compute every recipe and register its targets: Parameters, or of buffers alone buffers, unsaved. All or none."""
    made: list[tuple[torch.nn.Module, str]] = []
    try:
        for recipe in recipes:
            sources = [get(model, path) for path in recipe.sources]
            values = recipe.make(*sources)
            flags = trained(recipe, [s.requires_grad for s in sources])
            for path, value, trains in zip(recipe.targets, values, flags, strict=True):
                module, name = place(model, path)
                if any(isinstance(s, torch.nn.Parameter) for s in sources):
                    module.register_parameter(name, torch.nn.Parameter(value.detach().clone(), requires_grad=trains))
                else:
                    module.register_buffer(name, value.detach().clone(), persistent=False)
                made.append((module, name))
    except BaseException:
        for module, name in made:
            delattr(module, name)
        raise


def tombstone(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of NaN that takes the bytes of one number."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(tuple(shape))


def release(model: torch.nn.Module, paths: Sequence[str], device: torch.device | None = None) -> int:
    """Delete Parameters, wherever they are registered; NaN buffers that are not saved take their names. All or none.

    Args:
        device: of the NaN buffers; the Parameters' own if None.

    Returns:
        the bytes freed.
    """
    old = {id(p): p for p in (get(model, path) for path in paths)}
    frozen = {path for path in paths if not get(model, path).requires_grad}
    if frozen:
        setattr(model, FROZEN, getattr(model, FROZEN, frozenset()) | frozen)
    dead = {key: tombstone(p.shape, p.dtype, device or p.device) for key, p in old.items()}
    names: dict[int, list[str]] = {}
    for prefix, module in list(model.named_modules()):
        for name, parameter in list(module._parameters.items()):
            if id(parameter) in dead:
                del module._parameters[name]
                path = f"{prefix}.{name}" if prefix else name
                names.setdefault(id(parameter), []).append(path)
                bury(model, path, dead[id(parameter)])
    ties = {mine: [n for n in every if n != mine] for every in names.values() for mine in every if len(every) > 1}
    if ties:
        setattr(model, TIES, {**getattr(model, TIES, {}), **ties})
    return sum(bytes_of(p) for p in old.values())


def bury(model: torch.nn.Module, path: str, nan: torch.Tensor) -> None:
    """Register a :func:`tombstone` under the name of a Parameter that is gone."""
    module, name = place(model, path)
    module.register_buffer(name, nan, persistent=False)
    module.__dict__.setdefault(RELEASED, set()).add(name)
    # DistributedDataParallel broadcasts buffers into place, which a tombstone does not allow.
    setattr(model, DDP_IGNORES, [*getattr(model, DDP_IGNORES, ()), path])


def shrink_tombstones(model: torch.nn.Module) -> None:
    """``.to()`` writes a released weight's placeholder out in full; make it one number again."""
    for module in model.modules():
        for name in module.__dict__.get(RELEASED, ()):
            value = module._buffers[name]
            if value is not None and value.dim() and any(value.stride()):
                module._buffers[name] = tombstone(value.shape, value.dtype, value.device)


def refuse_tied(model: torch.nn.Module, recipes: Sequence[Recipe], released: Sequence[str]) -> None:
    """Raise RefusedError if a weight that goes and could be rebuilt has several names: a state dict needs them all.

    A part of a tied weight stays tied: all readers read the one part.
    """
    gone = {s for r in recipes if r.inverse is not None and not r.group for s in r.sources if s in released}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for path in sorted(gone):
        tied = names[id(get(model, path))]
        if len(tied) > 1:
            raise RefusedError(
                f"{' and '.join(tied)} are one weight, and the new ones would have no such tie",
                where=path,
                remedy="untie it first: give each module a clone of its own",
            )


def restore(model: torch.nn.Module, recipes: Sequence[Recipe], released: Sequence[str]) -> None:
    """Rebuild released weights from the new ones and remove these. All or none.

    Raises:
        RefusedError: a recipe has no inverse, or a module was exchanged.
    """
    check_places(model, recipes, released)
    for recipe in recipes:
        if recipe.inverse is None and any(s in released for s in recipe.sources):
            raise RefusedError(
                f"{', '.join(recipe.sources)} cannot be rebuilt: the conversion has no inverse",
                where="unwrap",
                remedy="load the original checkpoint again",
            )
    rebuilt: dict[str, torch.nn.Parameter] = {}
    for recipe in reversed(recipes):
        if not any(s in released for s in recipe.sources):
            continue
        targets = [rebuilt[t] if t in rebuilt else get(model, t) for t in recipe.targets]
        with torch.no_grad():
            values = recipe.inverse(*targets)  # type: ignore[misc]
        flags = [t.requires_grad for t in targets]  # type: ignore[union-attr]
        if not recipe.parts:
            flags = [any(flags)]
        flags += [path not in getattr(model, FROZEN, ()) and any(flags) for path in recipe.sources[len(flags) :]]
        for path, value, trains in zip(recipe.sources, values, flags, strict=True):
            rebuilt[path] = torch.nn.Parameter(value.detach().clone(), requires_grad=trains)
    ties = getattr(model, TIES, {})
    rebuilt.update({other: p for path, p in list(rebuilt.items()) for other in ties.get(path, ())})
    for path, parameter in rebuilt.items():
        module, name = place(model, path)
        module._buffers.pop(name, None)
        module._non_persistent_buffers_set.discard(name)
        module._parameters[name] = parameter
        module.__dict__[RELEASED].remove(name)
        if not module.__dict__[RELEASED]:
            del module.__dict__[RELEASED]
    for recipe in recipes:
        for path in recipe.targets:
            module, name = place(model, path)
            if hasattr(module, name):
                delattr(module, name)
    model.__dict__.pop(TIES, None)
    model.__dict__.pop(FROZEN, None)
    ignored = [path for path in getattr(model, DDP_IGNORES, ()) if path not in released and path not in ties]
    if ignored:
        setattr(model, DDP_IGNORES, ignored)
    elif DDP_IGNORES in model.__dict__:
        delattr(model, DDP_IGNORES)


class StateDictMap:
    """Original names in a wrapped model's state dict, wherever the recipes have inverses.

    A rank's part of a weight keeps its new name: a state dict that communicates hangs when one rank alone asks for it.
    ``save_pretrained`` gathers.
    """

    shards = False  # whether parts of weights are mapped too

    def __init__(self, recipes: Sequence[Recipe], released: Sequence[str]) -> None:
        gone = set(released)
        wanted = [r for r in recipes if r.inverse is not None and (self.shards or not r.group)]
        self.recipes = tuple(r for r in wanted if all(s in gone for s in r.sources))

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDictMap:
        return self  # it never changes, and names no model

    def __reduce__(self):  # the first thing of a wrapped model that pickle comes to
        raise RefusedError(
            "a wrapped model cannot be pickled", remedy="save it with save_pretrained and read it with latentscan.load"
        )


class SaveHook(StateDictMap):
    """state_dict post-hook.

    Sharded tensors (``fully_shard``) keep the new names: the old ones would need every rank's rows, and a state dict
    that communicates hangs when one rank alone asks for it. They load back by these names.
    """

    def __call__(self, module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for recipe in reversed(self.recipes):
            names = [prefix + t for t in recipe.targets]
            if not all(n in state for n in names) or any(hasattr(state[n], "full_tensor") for n in names):
                continue
            with torch.no_grad():
                values = recipe.inverse(*[state[n] for n in names])  # type: ignore[misc]
            for name in names:
                del state[name]
            state.update(zip((prefix + s for s in recipe.sources), values, strict=True))


class LoadHook(StateDictMap):
    """load_state_dict pre-hook: originals become the new weights; new names are taken as they are."""

    shards = True

    def __call__(self, module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for recipe in self.recipes:
            names = [prefix + s for s in recipe.sources]
            if not all(n in state for n in names):
                continue
            with torch.no_grad():
                values = recipe.function(*[state[n] for n in names])
            for name in names:
                del state[name]
            for path in recipe.sources:
                for other in getattr(module, TIES, {}).get(path, ()):
                    state.pop(prefix + other, None)
            state.update(zip((prefix + t for t in recipe.targets), values, strict=True))
