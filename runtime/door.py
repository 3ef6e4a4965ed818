"""How a wrapped model is called: ``forward``, ``generate``'s cache, state dict hooks and ``save_pretrained``."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from latentscan.ir.errors import CacheError, RefusedError
from latentscan.ir.frontends.huggingface import install_recording_hooks
from latentscan.runtime.cache import ARGUMENT_NAMES, GraphCache, cache_argument
from latentscan.runtime.own import LoadHook, SaveHook
from latentscan.runtime.packing import packed_call
from latentscan.runtime.session import Session

SESSION = "_latentscan_session"
_OVERRIDES = ("forward", "_prepare_cache_for_generation", "save_pretrained", "report")


def session_of(model: torch.nn.Module) -> Session | None:
    return model.__dict__.get(SESSION)


class _Method:
    """A replaced method of one model; a deep copy of the model gets its own."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.model = session.model  # a cycle on purpose: wrap(model).generate(...) in one expression keeps the model


class Forward(_Method):
    """``model.forward``: compiled; in evaluation a missing cache is a GraphCache.

    With gradients, which do not flow through a GraphCache, it is one only if a pass has changed what is stored: a later
    call could not go on from the library's own cache.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.__signature__ = inspect.signature(type(session.model).forward.__get__(session.model))

    @torch.compiler.disable  # inside somebody else's compiled function this is a call like any other
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.session.model
        ids = args[0] if args else kwargs.get("input_ids")
        if isinstance(ids, torch.Tensor) and ids.numel() == 0:
            raise RefusedError(
                f"the prompt is empty: input_ids has shape {list(ids.shape)}",
                where=type(model).__name__,
                remedy="give at least one token, such as the beginning-of-sequence token",
            )
        install_recording_hooks(model, kwargs)
        given = self._given(args, kwargs)
        packed = None
        if given is not None:
            has_cache = any(given.get(name) is not None for name in ARGUMENT_NAMES)
            packed = packed_call(model, given, set(self.__signature__.parameters), has_cache)
        if packed is not None:
            assert given is not None
            given = {name: value for name, value in (given | packed.changed).items() if value is not None}
            return self.session.call_packed(packed.segments, **given)
        self._check_or_give_cache(model, args, kwargs)
        return self.session.call(*args, **kwargs)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The call's arguments by name; None if the model's forward does not take them so."""
        try:
            bound = self.__signature__.bind_partial(*args, **kwargs).arguments
        except TypeError:
            return None
        rest = [p.name for p in self.__signature__.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
        return {k: v for k, v in bound.items() if k not in rest} | {
            k: v for n in rest for k, v in bound.get(n, {}).items()
        }

    def _check_or_give_cache(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            name = cache_argument(model)
            given = self.__signature__.bind_partial(*args, **kwargs).arguments
        except (CacheError, TypeError):
            return
        given = {**given, **given.get("kwargs", {})}
        # The library takes a cache under its old names too.
        theirs = next((given[n] for n in ARGUMENT_NAMES if given.get(n) is not None), None)
        changed = any(p == "latent-cache" for p, _ in self.session.plan.facts)
        if theirs is not None:
            if not isinstance(theirs, GraphCache) and changed:
                raise CacheError(
                    f"a {type(theirs).__name__} keeps keys and values, but this pipeline stores what they are made of",
                    where=type(model).__name__,
                    remedy="give latentscan.GraphCache.for_model(model), or no cache",
                )
            return
        uses = given.get("use_cache")
        if uses is None:
            uses = getattr(model.config, "use_cache", False)
        if uses and not model.training and (changed or not torch.is_grad_enabled()):
            kwargs[name] = GraphCache.for_model(model)


class PrepareCache(_Method):
    """What ``generate`` calls to make its cache: a GraphCache, unless the user gives one or wants none."""

    def __call__(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        model = self.session.model
        name = cache_argument(model)
        none_given = all(model_kwargs.get(n) is None for n in ARGUMENT_NAMES)
        if none_given and generation_config.use_cache is not False:
            implementation = generation_config.cache_implementation
            length = None
            if implementation == "static":
                names = list(inspect.signature(type(model)._prepare_cache_for_generation).parameters)[3:]
                given = dict(zip(names, args, strict=False)) | kwargs
                length = max(given.get("max_cache_length") or 0, generation_config.max_cache_len or 0) or None
                implementation = None
                if length is None:
                    raise CacheError("a static cache needs a length", remedy="give max_new_tokens or max_cache_len")
                length += 1
            model_kwargs[name] = GraphCache.for_model(model, max_len=length, implementation=implementation)
            return None
        return type(model)._prepare_cache_for_generation(model, generation_config, model_kwargs, *args, **kwargs)


class SavePretrained(_Method):
    """``save_pretrained``: as before, and ``latentscan.json`` beside it."""

    def __call__(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        from latentscan.runtime.checkpoint import save

        return save(self.session, directory, *args, **kwargs)


def check_free(model: torch.nn.Module) -> None:
    """Raise RefusedError if something else has replaced a method that wrapping replaces."""
    taken = [name for name in _OVERRIDES if name in model.__dict__]
    if taken:
        raise RefusedError(
            f"the model's {', '.join(taken)} was replaced by something else",
            where=type(model).__name__,
            remedy="remove that hook first (for accelerate: remove_hook_from_module)",
        )


def install(model: torch.nn.Module, session: Session) -> None:
    """Make ``model`` the wrapped model of ``session``."""
    from latentscan.runtime.report import Report

    model.__dict__[SESSION] = session
    model.__dict__["forward"] = Forward(session)
    model.__dict__["report"] = Report(session)
    if hasattr(model, "_prepare_cache_for_generation"):
        model.__dict__["_prepare_cache_for_generation"] = PrepareCache(session)
    if hasattr(model, "save_pretrained"):
        model.__dict__["save_pretrained"] = SavePretrained(session)
    save = SaveHook(session.plan.recipes, session.plan.released)
    load = LoadHook(session.plan.recipes, session.plan.released)
    if load.recipes:
        handles = model.register_state_dict_post_hook(save), model.register_load_state_dict_pre_hook(load)
        model.__dict__["_latentscan_hooks"] = [h.id for h in handles]


def remove(model: torch.nn.Module) -> None:
    """Undo :func:`install`."""
    for name in (*_OVERRIDES, SESSION):
        model.__dict__.pop(name, None)
    for hook_id in model.__dict__.pop("_latentscan_hooks", []):
        model._state_dict_hooks.pop(hook_id, None)
        model._load_state_dict_pre_hooks.pop(hook_id, None)
