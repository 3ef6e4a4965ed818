"""Hugging Face transformers: masks, attention functions and rotary embeddings become canonical ops while tracing.

Functions that exist once per model file (rotary embeddings, eager attention) are recognised by what they compute:
each candidate is run on small random inputs and accepted only if it equals our reference. A function that equals
none is left alone; Dynamo then traces it as it is.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from latentscan.ir.frontends.base import substitute, traced_by_latentscan
from latentscan.ir.frontends.packing import CURRENT, jumping_positions
from latentscan.ir.ops import attention as _attention  # noqa: F401  (registers the ops)
from latentscan.ir.ops import mask as _mask  # noqa: F401
from latentscan.ir.ops import rope as _rope  # noqa: F401
from latentscan.kernels.reference.rope import rope as reference_rope

RECORDED = ("output_hidden_states", "output_attentions", "output_router_logits")
_SCANNED: set[str] = set()
_COLLECTOR: Any = None  # the library's record of what its hooks collect in this call
ROPE_LAYOUTS: tuple[Any, ...] = ("half", "interleaved-to-half", "interleaved")


def register() -> None:
    """Substitute what all models share, and the functions of every model file that is imported by now. Idempotent."""
    if "transformers" not in sys.modules:
        return
    from transformers import masking_utils
    from transformers.integrations import sdpa_attention
    from transformers.utils import output_capturing

    global _COLLECTOR
    _COLLECTOR = getattr(output_capturing, "_active_collector", None)
    substitute(masking_utils.create_causal_mask, lambda original: _mask_function(original, sliding=False))
    substitute(masking_utils.create_sliding_window_causal_mask, lambda original: _mask_function(original, sliding=True))
    substitute(sdpa_attention.sdpa_attention_forward, _sdpa_function)
    for name in [n for n in sys.modules if n.startswith("transformers.models.") and ".modeling_" in n]:
        register_model_file(sys.modules[name])


def register_model_file(module: types.ModuleType) -> None:
    """Substitute the rotary and eager attention functions of one ``modeling_*`` file, where they are verified."""
    if module.__name__ in _SCANNED:
        return
    _SCANNED.add(module.__name__)
    for name, function in list(vars(module).items()):
        if not isinstance(function, types.FunctionType):
            continue
        if name.startswith("apply_rotary"):
            layout = rotary_layout(function)
            if layout is not None:
                substitute(function, functools.partial(_rotary_function, layout=layout))
        elif name == "eager_attention_forward" and eager_is_plain(function):
            substitute(function, _eager_function)
        elif name == "eager_attention_forward" and eager_is_plain(function, sinks=True):
            substitute(function, functools.partial(_eager_function, sinks=True))


# -- masks ------------------------------------------------------------------------------------------------------


def _first_attention_layer(cache: Any, sliding: bool) -> int:
    """Index of the first layer of ``cache`` that holds keys and values of the wanted kind, else of any kind, else 0."""
    index, any_kind = 0, -1
    for layer in cache.layers:
        is_linear = not hasattr(layer, "get_mask_sizes")
        is_sliding = bool(getattr(layer, "is_sliding", False))
        if not is_linear and is_sliding == sliding:
            return index
        if not is_linear and any_kind < 0:
            any_kind = index
        index += 1
    return max(any_kind, 0)


def _grows_at_the_end(cache: Any, layer_index: int) -> bool:
    """Whether the layer's keys are all positions so far, so that the last query sees the last key."""
    if layer_index >= len(cache.layers):
        return not getattr(cache, "is_compileable", False)
    layer = cache.layers[layer_index]
    return not getattr(layer, "is_compileable", False) and not getattr(layer, "is_sliding", False)


def _mask_function(original: Callable[..., Any], *, sliding: bool) -> Callable[..., Any]:
    def create_mask(
        config: Any,
        inputs_embeds: Any = None,
        attention_mask: Any = None,
        cache: Any = None,
        position_ids: Any = None,
        or_mask_function: Any = None,
        and_mask_function: Any = None,
        block_sequence_ids: Any = None,
        layer_idx: Any = None,
        past_key_values: Any = None,
        **rest: Any,
    ) -> Any:
        if past_key_values is not None:
            cache = past_key_values
        ours = (
            traced_by_latentscan()
            and or_mask_function is None
            and and_mask_function is None
            and block_sequence_ids is None
            and getattr(config, "is_causal", True)
            and config._attn_implementation in ("sdpa", "eager")
            and (attention_mask is None or (isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2))
            and (not sliding or getattr(config, "sliding_window", None) is not None)
        )
        if ours and cache is not None:
            if layer_idx is None:
                layer_idx = _first_attention_layer(cache, sliding)
            ours = _grows_at_the_end(cache, layer_idx)
        if not ours:
            # The names that both versions of the library know; the cache's name differs, so it goes by position.
            if or_mask_function is not None or and_mask_function is not None:
                rest["or_mask_function"] = or_mask_function
                rest["and_mask_function"] = and_mask_function
            if block_sequence_ids is not None:
                rest["block_sequence_ids"] = block_sequence_ids
            return original(config, inputs_embeds, attention_mask, cache, position_ids, **rest)
        queries = inputs_embeds.shape[1]
        if cache is not None:
            keys = cache.get_mask_sizes(queries, layer_idx)[0]
        elif attention_mask is not None:
            keys = attention_mask.shape[-1]
        else:
            keys = queries
        padding = None
        if attention_mask is not None:
            padding = attention_mask.to(device=inputs_embeds.device, dtype=torch.bool)
            padding = torch.ops.latentscan.fit_padding.default(padding, keys)
        mask = torch.ops.latentscan.causal_mask.default(
            inputs_embeds,
            padding,
            inputs_embeds.shape[0],
            queries,
            keys,
            config.sliding_window if sliding else None,
            additive=config._attn_implementation == "eager",
        )
        if CURRENT.segments is not None:
            mask = torch.ops.latentscan.packing_mask.default(mask, jumping_positions(CURRENT.segments))
        elif cache is None and attention_mask is None and position_ids is not None:
            # Several sequences in one row are told by positions that jump; see packing_mask.
            mask = torch.ops.latentscan.packing_mask.default(mask, position_ids)
        return mask

    return create_mask


# -- attention --------------------------------------------------------------------------------------------------


def _sdpa_function(original: Callable[..., Any]) -> Callable[..., Any]:
    drops_softcap = ignores_softcap(original)

    def sdpa_attention(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: Any = None,
        is_causal: Any = None,
        position_bias: Any = None,
        **kwargs: Any,
    ) -> Any:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        ours = (
            traced_by_latentscan()
            and dropout == 0.0
            and position_bias is None
            and (drops_softcap or kwargs.get("softcap") is None)
            and kwargs.get("s_aux") is None
        )
        # Without a mask the library is causal from the top left: with a cache of fixed size there are more keys than
        # queries, and most of them are not filled yet. Ours is causal at the bottom right.
        if ours and attention_mask is None and causal and query.shape[2] > 1:
            ours = statically_known_true(query.shape[2] == key.shape[2])
        if not ours:
            if position_bias is not None:
                kwargs["position_bias"] = position_bias
            return original(
                module,
                query,
                key,
                value,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                is_causal=is_causal,
                **kwargs,
            )
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        kind = "causal" if attention_mask is None and causal and query.shape[2] > 1 else "full"
        out = torch.ops.latentscan.attention.default(query, key, value, attention_mask, kind=kind, scale=scale)
        return out.transpose(1, 2).contiguous(), None

    return sdpa_attention


def ignores_softcap(function: Callable[..., Any]) -> bool:
    """Whether the library's SDPA function drops a softcap in silence (5.17 does; 5.24 raises). We then drop it too:
    the numbers that a user has are the ones to keep."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 8, generator=g) * 4 for _ in range(3))
    module = types.SimpleNamespace(num_key_value_groups=1, training=False, head_dim=8, is_causal=True)
    try:
        capped, plain = (function(module, q, k, v, None, scaling=1.0, **extra)[0] for extra in ({"softcap": 1.0}, {}))
    except Exception:  # noqa: BLE001  it refuses a softcap
        return False
    return torch.equal(capped, plain)


def _eager_function(original: Callable[..., Any], sinks: bool = False) -> Callable[..., Any]:
    def eager_attention(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: Any = None,
        softcap: Any = None,
        **kwargs: Any,
    ) -> Any:
        ours = traced_by_latentscan() and dropout == 0.0
        wanted = not ours or attentions_are_wanted(module, kwargs.get("output_attentions"))
        weights = None
        if softcap is not None:
            kwargs["softcap"] = softcap
        if wanted:
            out, weights = original(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        if ours:  # the library's own output, made on the way to its weights, is then read by nobody and goes
            scale = scaling if scaling is not None else query.shape[-1] ** -0.5
            structure = (None, module.sinks) if sinks else ()  # no padding beside the mask
            out = torch.ops.latentscan.attention.default(
                query, key, value, attention_mask, *structure, kind="full", scale=scale, softcap=softcap
            )
            out = out.transpose(1, 2).contiguous()
        return out, weights

    return eager_attention


def install_recording_hooks(model: torch.nn.Module, words: dict[str, Any]) -> None:
    """Install the hooks by which the library collects hidden states and attentions, if a call with the keyword
    arguments ``words`` wants any: it would do so in that call, under a lock that cannot be traced."""
    config = getattr(model, "config", None)
    if "transformers" not in sys.modules or not any(words.get(n, getattr(config, n, False)) for n in RECORDED):
        return
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    for module in model.modules():
        if module is not model and isinstance(module, PreTrainedModel):
            maybe_install_capturing_hooks(module)


def attentions_are_wanted(module: Any, argument: Any) -> bool:
    """Whether the caller takes the attention's weights: as an argument, by the configuration, or by a recording hook.

    Some models (GPT-2, OPT) take the argument out before it comes to their layers; the library's hooks then know.
    Readable while Dynamo traces.
    """
    if argument or getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    if not getattr(_COLLECTOR, "compiling", False):
        return False
    recorded = _COLLECTOR.global_var
    return recorded is not None and ("attentions" in recorded or "cross_attentions" in recorded)


def eager_is_plain(function: Callable[..., Any], *, sinks: bool = False) -> bool:
    """Whether an ``eager_attention_forward`` is softmax(scale q k + mask) v with optional softcap, and no more.

    ``sinks``: with one more logit a head, ``module.sinks``, that takes part in the softmax and has no value.
    """
    from latentscan.kernels.reference.attention import attention as reference

    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 5, 8, generator=g, dtype=torch.float64) for h in (4, 2, 2))
    bias = torch.zeros(2, 1, 5, 5, dtype=torch.float64).masked_fill(torch.ones(5, 5).triu(1).bool(), -1e30)
    module = types.SimpleNamespace(num_key_value_groups=2, training=False, head_dim=8, is_causal=True)
    extra_logits = torch.randn(4, generator=g, dtype=torch.float64) if sinks else None
    if sinks:
        module.sinks = extra_logits
    if "repeat_kv" not in getattr(function, "__code__", types.SimpleNamespace(co_names=())).co_names:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    takes_softcap = "softcap" in inspect.signature(function).parameters
    try:
        for softcap in (None, 5.0) if takes_softcap else (None,):
            extra = {"softcap": softcap} if takes_softcap else {}
            got = function(module, q, k, v, bias, scaling=0.3, dropout=0.0, **extra)[0]
            want = reference(q, k, v, bias, None, extra_logits, kind="full", scale=0.3, softcap=softcap).transpose(1, 2)
            # The library computes the softmax in fp32 whatever the inputs are.
            if got.shape != want.shape or not torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5):
                return False
    except Exception:  # noqa: BLE001  an unknown signature or attribute: not a function that we know
        return False
    return True


# -- rotary embeddings --------------------------------------------------------------------------------------------


def rotary_layout(function: Callable[..., Any]) -> str | None:
    """Which layout of the canonical ``rope`` a ``(q, k, cos, sin, ...)`` function computes, or None if none."""
    names = list(inspect.signature(function).parameters)
    if names[:4] != ["q", "k", "cos", "sin"] or "unsqueeze_dim" not in names:
        return None
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, h, 5, 8, generator=g, dtype=torch.float64) for h in (4, 2))
    angle = torch.randn(2, 5, 4, generator=g, dtype=torch.float64)
    angle = torch.cat([angle, angle], -1)
    cos, sin = angle.cos(), angle.sin()
    # Half of the features rotated: the function must pass the others through, or it does not know partial rotary.
    half_cos = torch.cat([cos[..., :2]] * 2, -1)
    half_sin = torch.cat([sin[..., :2]] * 2, -1)
    try:
        got = function(q, k, cos, sin, unsqueeze_dim=1)
        moved = function(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    except Exception:  # noqa: BLE001  not a function of this kind
        return None
    for layout in ROPE_LAYOUTS:
        want = [reference_rope(x, cos, sin, layout=layout) for x in (q, k)]
        if not all(torch.allclose(a, b) for a, b in zip(got, want, strict=True)):
            continue
        if not all(torch.allclose(a.transpose(1, 2), b) for a, b in zip(moved, want, strict=True)):
            return None
        try:
            partial = function(q, k, half_cos, half_sin, unsqueeze_dim=1)
        except Exception:  # noqa: BLE001  full rotary only; the replacement then never sees a partial one
            return layout
        want = [reference_rope(x, half_cos, half_sin, layout=layout) for x in (q, k)]
        agree = all(a.shape == b.shape and torch.allclose(a, b) for a, b in zip(partial, want, strict=True))
        return layout if agree else None
    return None


def _rotary_function(original: Callable[..., Any], layout: str) -> Callable[..., Any]:
    def rotate(x: Any, cos: Any, sin: Any, unsqueeze_dim: int) -> Any:
        width = cos.shape[-1]
        rope = torch.ops.latentscan.rope.default
        if width == x.shape[-1]:
            return rope(x, cos, sin, layout=layout, unsqueeze_dim=unsqueeze_dim)
        rotated = rope(x[..., :width], cos, sin, layout=layout, unsqueeze_dim=unsqueeze_dim)
        return torch.cat([rotated, x[..., width:]], dim=-1)

    def apply_rotary(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        unsqueeze_dim = kwargs.get("unsqueeze_dim", 1)
        if len(args) == 1 and isinstance(args[0], int):
            unsqueeze_dim = args[0]
        plain = len(args) == 0 or (len(args) == 1 and isinstance(args[0], int))
        if not (traced_by_latentscan() and plain):
            return original(q, k, cos, sin, *args, **kwargs)
        return rotate(q, cos, sin, unsqueeze_dim), rotate(k, cos, sin, unsqueeze_dim)

    return apply_rotary
