"""``GraphCache``: a Hugging Face cache that passes can see through.

An attention layer's ``update`` emits ``cache_append(token, [k, v])``. The token is a tensor whose length says how much
is cached, so Dynamo sees a cache that grows; what is really stored lives in an :class:`~latentscan.ir.arena.Arena` and
is whatever the final graph appends. Linear-attention layers (Mamba and its relatives) keep Hugging Face's own
fixed-size states.

Sliding-window layers store all positions: the window is in the mask, which ``get_mask_sizes`` describes at full length.
That costs memory against Hugging Face's own sliding layer and needs no rotation of the stored positions.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.exc import ShortenTraceback
from transformers import cache_utils as hf
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from latentscan.ir.arena import Arena, make_token
from latentscan.ir.errors import CacheError

# Layers that cache nothing; absent in older versions.
_DUMMY: Any = getattr(hf, "DummyLayer", None)
_INDEXED: Any = getattr(hf, "DynamicIndexedLayer", None)
_HYBRID = (hf.LinearAttentionAndFullAttentionLayer, hf.LinearAttentionAndSlidingWindowAttentionLayer)

ARGUMENT_NAMES = ("cache", "past_key_values", "cache_params")

# Families whose mixer continues from a filled cache over several tokens at once. The Mamba-1 families of transformers
# 5.17 to 5.24 start such a chunk from a zero state and give wrong logits without a word.
CHUNKED_PREFILL = frozenset(
    {"mamba2", "bamba", "zamba2", "nemotron_h", "falcon_h1", "granitemoehybrid", "qwen3_next", "olmo_hybrid", "lfm2"}
)

# crop(n > 0) used to name the length to keep; transformers 5.18 allows only the number of tokens to remove.
_CROP_TO_LENGTH = hasattr(Cache, "get_max_cache_shape")


class _TracedCacheError(ShortenTraceback, CacheError):
    """A CacheError raised while Dynamo traces: as a ShortenTraceback it reaches the user as it is."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        ShortenTraceback.__init__(self, what, first_useful_frame=None)
        CacheError.__init__(self, what, where=where, remedy=remedy)


@torch._dynamo.assume_constant_result
def _refuse_trace(what: str, where: str, remedy: str) -> None:
    """Raise while Dynamo traces. (A ``raise`` in traced code becomes an "observed exception" without its message.)"""
    raise _TracedCacheError(what, where=where, remedy=remedy)


def _refuse(what: str, where: str, remedy: str) -> None:
    if torch.compiler.is_compiling():
        _refuse_trace(what, where, remedy)
    raise CacheError(what, where=where, remedy=remedy)


class _AppendMixin:
    """The attention part of a layer: an arena, and the token that stands for it in graphs."""

    arena: Arena
    token: torch.Tensor
    is_sliding = False
    is_compileable = False  # "compileable" is Hugging Face's word for static shapes
    is_croppable = True
    supports_early_init = False
    max_length: int | None = None

    def _init_append(self, arena: Arena) -> None:
        self.arena = arena
        self.token = make_token(arena, 0)
        self.max_length = arena.max_length
        self.keys: Any = None  # these two are never filled; see `tensors`
        self.values: Any = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        """Append ``[batch, heads, new, dim]`` (or without heads) tensors; returns all cached, new ones included."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and key_states.requires_grad:
            raise CacheError(
                "gradients do not flow through a GraphCache outside a compiled graph",
                where=self.arena.where,
                remedy="call the model under torch.no_grad(), or without a cache",
            )
        dims = [key_states.dim() - 2, value_states.dim() - 2]
        (keys, values), self.token = torch.ops.latentscan.cache_append(self.token, [key_states, value_states], dims)
        return keys, values

    def get_seq_length(self) -> int:
        return self.token.shape[0] - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(length, offset)`` of the keys that the next ``query_length`` tokens see: everything, from the start."""
        return self.token.shape[0] - 1 + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self.max_length is None else self.max_length

    def get_max_cache_shape(self) -> int:
        return self.get_max_length()

    def tensors(self) -> list[torch.Tensor]:
        """What is cached: views of the storage."""
        return self.arena.tensors()

    def _forget(self, length: int) -> None:
        self.arena.crop(length)
        self.token = make_token(self.arena, length)

    def _check_crop(self, tokens_to_remove: int) -> int:
        """How many tokens a valid ``crop`` removes."""
        held = int(self.get_seq_length())
        if tokens_to_remove > 0:
            if not _CROP_TO_LENGTH:
                raise CacheError(
                    f"crop({tokens_to_remove}) would add tokens",
                    where=self.arena.where,
                    remedy=f"crop(-n) removes n tokens; {held} are cached",
                )
            return max(held - tokens_to_remove, 0)
        return min(-tokens_to_remove, held)

    def _state(self) -> dict[str, Any]:
        state = {k: v for k, v in self.__dict__.items() if k != "token"}
        return state | {"_length": int(self.get_seq_length())}

    def __setstate__(self, state: dict[str, Any]) -> None:  # a copy has an arena, so a token, of its own
        state = dict(state)
        length = state.pop("_length")
        self.__dict__.update(state)
        self.token = make_token(self.arena, length)


class GraphLayer(_AppendMixin, CacheLayerMixin):  # type: ignore[misc]
    """An attention layer's cache."""

    def __init__(self, arena: Arena | None = None) -> None:
        self._init_append(arena or Arena())

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.token.shape[0] > 1

    def __getstate__(self) -> dict[str, Any]:
        return self._state()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the arena takes its form from what is appended."""

    def crop(self, tokens_to_remove: int) -> None:
        self._forget(int(self.get_seq_length()) - self._check_crop(tokens_to_remove))

    def reset(self) -> None:
        self.arena.reset()
        self.token = make_token(self.arena, 0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.arena.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.arena.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.arena.batch_select(indices)

    def offload(self) -> None:
        raise CacheError("a GraphCache cannot be offloaded", where=self.arena.where, remedy=_NO_OFFLOAD)

    prefetch = offload


class IndexedLayer(GraphLayer):
    """The cache of an attention layer with an indexer (DeepSeek-V3.2), whose keys [batch, new, dim] it holds too."""

    def __init__(self, arena: Arena, indexer: Arena) -> None:
        super().__init__(arena)
        self.indexer = GraphLayer(indexer)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append the indexer's keys; returns all of them, new ones included."""
        (keys,), token = torch.ops.latentscan.cache_append(self.indexer.token, [indexer_key_states], [1])
        self.indexer.token = token
        return keys

    def crop(self, tokens_to_remove: int) -> None:
        kept = int(self.indexer.get_seq_length()) - self._check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        self.indexer._forget(max(kept, 0))

    def reset(self) -> None:
        super().reset()
        self.indexer.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.indexer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.indexer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self.indexer.batch_select_indices(indices)


_NO_OFFLOAD = "use Hugging Face's offloaded cache on the unwrapped model"


class _LinearMixin:
    """The fixed-size part of a layer: what Hugging Face's linear-attention layer lacks or does silently wrong."""

    chunks = True  # whether several tokens may continue from a filled cache
    where = ""
    number_of_states: int
    conv_states: dict[int, Any]
    recurrent_states: dict[int, Any]
    is_conv_states_initialized: dict[int, bool]
    is_recurrent_states_initialized: dict[int, bool]
    has_previous_state: dict[int, bool]
    record_past: bool

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """As Hugging Face's; refuses a chunk of several tokens where the model would forget its state."""
        if not self.chunks and self.has_previous_state[state_idx] and conv_states.shape[-1] > 1:
            _refuse(
                "several tokens at once cannot continue from a filled cache: this model family starts them from a "
                "zero state",
                self.where,
                "prefill the whole prompt in one call (no prefill_chunk_size), then decode token by token",
            )
        return super().update_conv_state(conv_states, state_idx, **kwargs)  # type: ignore[misc]

    def _states(self) -> Iterator[tuple[dict[int, Any], int]]:
        for states, ready in (
            (self.conv_states, self.is_conv_states_initialized),
            (self.recurrent_states, self.is_recurrent_states_initialized),
        ):
            yield from ((states, i) for i, there in ready.items() if there)

    def _select_rows(self, choose: Any) -> None:
        for states, i in self._states():
            states[i] = choose(states[i])

    def _reset_linear(self) -> None:
        """Back to the state before the first call, whatever the next batch's size; ``record_past`` stays."""
        record_past = self.record_past
        hf.LinearAttentionCacheLayerMixin.__init__(self, number_of_states=self.number_of_states)  # type: ignore[arg-type]
        self.record_past = record_past

    def _check_linear_crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and any(self.is_recurrent_states_initialized.values()):
            raise CacheError(
                f"crop({tokens_to_remove}): a recurrent state cannot be rolled back",
                where=self.where,
                remedy="reset() and prefill again, or copy.deepcopy the cache before the tokens that may be dropped",
            )
        if tokens_to_remove and not self.record_past and any(self.is_conv_states_initialized.values()):
            raise CacheError(
                f"crop({tokens_to_remove}): earlier convolution inputs were not kept",
                where=self.where,
                remedy="call activate_past_recording() on the cache first",
            )

    def _crop_linear(self, tokens_to_remove: int) -> None:
        if self.record_past and any(self.is_conv_states_initialized.values()):
            hf.LinearAttentionCacheLayerMixin.crop(self, tokens_to_remove)  # type: ignore[arg-type]

    def bytes_held(self) -> int:
        return sum(states[i].numel() * states[i].element_size() for states, i in self._states())


class LinearLayer(_LinearMixin, LinearAttentionLayer):  # type: ignore[misc]
    """A linear-attention layer's states."""

    def __init__(self, number_of_states: int = 1, *, chunks: bool = True, where: str = "") -> None:
        super().__init__(number_of_states=number_of_states)
        self.chunks, self.where = chunks, where

    def reset(self) -> None:
        self._reset_linear()

    def crop(self, tokens_to_remove: int) -> None:
        self._check_linear_crop(tokens_to_remove)
        self._crop_linear(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select_rows(lambda s: s.index_select(0, beam_idx.to(s.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select_rows(lambda s: s.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select_rows(lambda s: s[indices.to(s.device)])


class HybridLayer(_AppendMixin, _LinearMixin, hf.LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A layer with both attention and linear attention."""

    def __init__(
        self, number_of_states: int = 1, *, arena: Arena | None = None, chunks: bool = True, where: str = ""
    ) -> None:
        hf.LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states=number_of_states)
        self._init_append(arena or Arena(where=where))
        self.is_initialized = True
        self.chunks, self.where = chunks, where

    def __getstate__(self) -> dict[str, Any]:
        return self._state()

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return LinearAttentionLayer.is_croppable.fget(self)  # type: ignore[attr-defined]

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if not args:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        self._reset_linear()
        self.arena.reset()
        self.token = make_token(self.arena, 0)

    def crop(self, tokens_to_remove: int) -> None:
        self._check_linear_crop(tokens_to_remove)
        removed = self._check_crop(tokens_to_remove)
        self._crop_linear(-removed)
        self._forget(int(self.get_seq_length()) - removed)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        LinearLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        self.arena.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        LinearLayer.batch_repeat_interleave(self, repeats)  # type: ignore[arg-type]
        self.arena.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        LinearLayer.batch_select_indices(self, indices)  # type: ignore[arg-type]
        self.arena.batch_select(indices)


class GraphCache(Cache):
    """A Hugging Face cache for models that latentscan compiles. Make one with :meth:`for_model`.

    ``copy.deepcopy`` and pickling make independent caches. Errors are :class:`~latentscan.ir.errors.CacheError`.
    """

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers=layers)

    @classmethod
    def for_model(
        cls,
        model_or_config: Any,
        *,
        max_batch: int | None = None,
        max_len: int | None = None,
        implementation: str | None = None,
    ) -> GraphCache:
        """An empty cache with a layer for each of the model's.

        Args:
            model_or_config: a Hugging Face model or its config.
            max_batch: most batch rows (beams count). None: any.
            max_len: most positions, allocated once at the first write. None: grow by doubling.
            implementation: what ``generation_config.cache_implementation`` asks for.

        Raises:
            CacheError: another implementation than "dynamic", or a layer kind that is not served.
        """
        check_implementation(implementation)
        config = getattr(model_or_config, "config", model_or_config).get_text_config(decoder=True)
        family = config.model_type
        layers: list[Any] = []
        theirs: list[Any] = hf.DynamicCache(config=config).layers
        for i, layer in enumerate(theirs):
            where, kind = f"cache layer {i}", type(layer)
            arena = Arena(max_length=max_len, max_batch=max_batch, where=where)
            chunks = family in CHUNKED_PREFILL
            if kind in (hf.DynamicLayer, hf.DynamicSlidingWindowLayer):
                layers.append(GraphLayer(arena))
            elif kind is LinearAttentionLayer:
                layers.append(LinearLayer(layer.number_of_states, chunks=chunks, where=where))
            elif kind in _HYBRID:
                layers.append(HybridLayer(layer.number_of_states, arena=arena, chunks=chunks, where=where))
            elif kind is _INDEXED:
                indexer = Arena(max_length=max_len, max_batch=max_batch, where=f"{where}, indexer")
                layers.append(IndexedLayer(arena, indexer))
            elif kind is _DUMMY:
                layers.append(layer)
            else:
                raise CacheError(
                    f"{family} needs a {kind.__name__}, which GraphCache does not serve",
                    where=where,
                    remedy="use Hugging Face's DynamicCache; passes that change what is cached then refuse",
                )
        if not layers:  # a config that says nothing of its layers
            for i in range(config.num_hidden_layers):
                layers.append(GraphLayer(Arena(max_length=max_len, max_batch=max_batch, where=f"cache layer {i}")))
        return cls(layers)

    # -- what Hugging Face asks ---------------------------------------------------------------------------------

    @property
    def is_compileable(self) -> bool:
        """Always False, or ``generate`` would wrap the compiled model in a compilation of its own."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether something is cached."""
        return any(
            (isinstance(x, _AppendMixin) and x.token.shape[0] > 1)
            or (isinstance(x, _LinearMixin) and any(x.is_conv_states_initialized.values()))
            for x in self.layers
        )

    @property
    def batch_size(self) -> int:
        """Batch rows held, -1 before the first call."""
        for layer in self.layers:
            if isinstance(layer, _AppendMixin) and layer.arena.batch is not None:
                return layer.arena.batch
            if isinstance(layer, _LinearMixin):
                for states, i in layer._states():
                    return states[i].shape[0]
        return -1

    max_batch_size = batch_size

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Most positions, -1 if there is no limit."""
        limits = [x.get_max_length() for x in self.layers if isinstance(x, _AppendMixin)]
        if layer_idx is not None:
            return self.layers[layer_idx].get_max_length()
        return max(limits, default=-1)

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """The older name of :meth:`get_max_length`."""
        return self.get_max_length(layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens (transformers before 5.18 also takes the length to keep).

        Raises:
            CacheError: a layer's state cannot be rolled back; nothing is changed then.
        """
        for layer in self.layers:
            if isinstance(layer, _LinearMixin):
                layer._check_linear_crop(tokens_to_remove)
            if isinstance(layer, _AppendMixin):
                layer._check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def offload(self, *args: Any, **kwargs: Any) -> None:
        raise CacheError("a GraphCache cannot be offloaded", remedy=_NO_OFFLOAD)

    prefetch = offload

    # -- what we measure ----------------------------------------------------------------------------------------

    @property
    def arenas(self) -> list[Arena]:
        """The arenas of the attention layers, in layer order; an indexer's follows its layer's."""
        found = []
        for layer in self.layers:
            found += [layer.arena] if isinstance(layer, _AppendMixin) else []
            found += [layer.indexer.arena] if isinstance(layer, IndexedLayer) else []
        return found

    def bytes_held(self) -> int:
        """Bytes of what is cached: the valid positions of attention layers and the states of linear ones."""
        states = sum(x.bytes_held() for x in self.layers if isinstance(x, _LinearMixin))
        return states + sum(a.bytes_held() for a in self.arenas)

    def bytes_allocated(self) -> int:
        """Bytes of the storage, used or not."""
        states = sum(x.bytes_held() for x in self.layers if isinstance(x, _LinearMixin))
        return states + sum(a.bytes_allocated() for a in self.arenas)

    def bytes_per_token(self) -> int:
        """Bytes that one more token of one batch row takes in all layers; 0 before the first call."""
        return sum(a.bytes_per_position() // (a.batch or 1) for a in self.arenas)


def check_implementation(implementation: str | None) -> None:
    """Refuse a ``cache_implementation`` that GraphCache is not.

    Raises:
        CacheError: for static, quantized, offloaded and unknown ones.
    """
    if implementation in (None, "dynamic", "hybrid"):  # transformers itself reads "hybrid" as unset
        return
    remedies = {
        "static": "leave it unset and give GraphCache.for_model(model, max_len=...) to allocate once",
        "quantized": "leave it unset; the latent-cache pass makes the cache smaller",
        "offloaded": _NO_OFFLOAD,
    }
    kind = next((k for k in ("offloaded", "quantized", "static") if k in implementation), None)
    remedy = remedies[kind] if kind else "leave it unset"
    raise CacheError(f"cache_implementation={implementation!r} is not served", remedy=remedy)


def cache_argument(model: Any) -> str:
    """The name under which ``model.forward`` (and ``generate``) takes its cache.

    ``cache`` since transformers 5.24; before, ``past_key_values`` or, for Mamba models, ``cache_params``.
    """
    names = inspect.signature(type(model).forward).parameters
    for name in ARGUMENT_NAMES:
        if name in names:
            return name
    raise CacheError(f"{type(model).__name__}.forward takes no cache", remedy=f"expected one of {ARGUMENT_NAMES}")


@contextlib.contextmanager
def distinct_sizes() -> Iterator[None]:
    """While tracing: sizes that happen to be equal in the first call stay different symbols.

    Without this, two cached positions and a batch of two become one symbol, and the next step compiles again.
    """
    from torch.fx.experimental import _config

    with _config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield
