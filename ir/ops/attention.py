"""The ops ``attention``, ``latent_attention`` (the absorbed form) and ``causal_mask``, with explicit backward ops.

Shapes and semantics are those of :mod:`latentscan.kernels.reference.attention`. In short:

    attention         q [B,H,S,Dk], k [B,Hkv,T,Dk], v [B,Hkv,T,Dv] -> [B,H,S,Dv]
    latent_attention  q_latent [B,H,S,C], q_rope [B,H,S,R], latent [B,T,C], k_rope [B,G,T,R], G = 1 or Hkv -> [B,H,S,C]
    causal_mask       -> [B,1,S,T], bool or additive

Autocast casts queries, keys, values and latents; the additive mask and the sinks keep their dtype, because they enter
fp32 scores (a position bias or -1e9 does not survive 16 bits).

Rows of left padding see nothing and give zeros, where Hugging Face's eager attention averages all values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import wraps
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from latentscan.ir.errors import KernelError
from latentscan.ir.ops import base
from latentscan.ir.ops.base import Cost, OpInfo, define
from latentscan.kernels.reference import attention as ref

_OPTIONS = "str kind, SymInt? window=None, float scale, float? softcap=None"
_STRUCTURE = "Tensor? mask=None, Tensor? padding=None, Tensor? sinks=None, Tensor? cu_seqlens=None"
_QKV = "Tensor q, Tensor k, Tensor v"
_LATENT = "Tensor q_latent, Tensor? q_rope, Tensor latent, Tensor? k_rope"


# --- argument checks -------------------------------------------------------------------------------------------------


def _fail(op: str, what: str, remedy: str = "") -> None:
    raise KernelError(what, where=op, remedy=remedy)


def _differ(a: Any, b: Any) -> bool:
    """Whether two sizes are known to differ; adds no guard when they are symbolic."""
    return statically_known_true(a != b)


def _check_structure(
    op: str,
    batch: Any,
    heads: Any,
    q_len: Any,
    kv_len: Any,
    mask: Tensor | None,
    padding: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
    kind: str,
    window: Any,
    scale: float,
    softcap: float | None,
) -> None:
    """Raise KernelError for arguments that the op cannot mean; sizes that are unknown while tracing pass."""
    if kind not in ("causal", "full"):
        _fail(op, f"kind is {kind!r}", "use 'causal' or 'full'")
    if statically_known_true(kv_len == 0):
        _fail(op, "there are no keys (T = 0)", "append the current token to the cache before attending")
    if window is not None and statically_known_true(window <= 0):
        _fail(op, f"window is {window}", "use a positive number of tokens, or None")
    if softcap is not None and not softcap > 0:
        _fail(op, f"softcap is {softcap}", "use a positive number, or None")
    if mask is not None:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            _fail(op, f"mask has dtype {mask.dtype}", "use bool (True = attend) or a floating additive mask")
        if mask.dim() > 4:
            _fail(op, f"mask has {mask.dim()} dimensions", "it must broadcast to [B,H,S,T]")
        for have, want in zip(reversed(mask.shape), (kv_len, q_len, heads, batch), strict=False):
            if _differ(have, want) and _differ(have, 1):
                shape = tuple(mask.shape)
                _fail(op, f"mask of shape {shape} does not broadcast to {(batch, heads, q_len, kv_len)} [B,H,S,T]")
    if padding is not None:
        if padding.is_floating_point() or padding.dim() != 2:
            _fail(op, f"padding is {padding.dtype}, {padding.dim()}-D", "use bool or int [B,T], nonzero = a real token")
        if _differ(padding.shape[0], batch) or _differ(padding.shape[1], kv_len):
            _fail(op, f"padding has shape {tuple(padding.shape)}, batch and keys are {(batch, kv_len)}")
    if sinks is not None and (sinks.dim() != 1 or _differ(sinks.shape[0], heads)):
        _fail(op, f"sinks has shape {tuple(sinks.shape)}", f"it needs one logit for each of the {heads} heads")
    if cu_seqlens is not None:
        if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
            _fail(op, f"cu_seqlens is {cu_seqlens.dtype} of {cu_seqlens.dim()} dimensions", "use int32 or int64 [N+1]")
        if _differ(batch, 1) or _differ(q_len, kv_len):
            what = f"cu_seqlens with batch {batch}, {q_len} queries and {kv_len} keys"
            _fail(op, what, "pack sequences into batch 1, S = T")


def _check_attention(op: str, q: Tensor, k: Tensor, v: Tensor, *structure: Any) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        _fail(op, f"q, k, v have {q.dim()}, {k.dim()}, {v.dim()} dimensions", "use [B,H,S,D] each")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        _fail(op, f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}", "use one floating dtype")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if _differ(q.shape[0], k.shape[0]) or _differ(k.shape[0], v.shape[0]):
        _fail(op, f"batch sizes differ: {shapes}")
    if _differ(k.shape[1], v.shape[1]) or _differ(k.shape[2], v.shape[2]):
        _fail(op, f"k and v differ in heads or length: {shapes}")
    if _differ(q.shape[3], k.shape[3]):
        _fail(op, f"q and k differ in head dim: {shapes}")
    if _differ(q.shape[1] % k.shape[1], 0):
        _fail(op, f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key heads: {shapes}")
    _check_structure(op, q.shape[0], q.shape[1], q.shape[2], k.shape[2], *structure)


def _check_latent(
    op: str, q_latent: Tensor, q_rope: Tensor | None, latent: Tensor, k_rope: Tensor | None, *structure: Any
) -> None:
    if (q_rope is None) != (k_rope is None):
        _fail(op, f"q_rope is {'absent' if q_rope is None else 'given'}, k_rope is not alike", "give both or neither")
    if q_latent.dim() != 4 or latent.dim() != 3:
        _fail(op, f"q_latent is {q_latent.dim()}-D, latent {latent.dim()}-D", "use [B,H,S,C] and [B,T,C]")
    tensors = [x for x in (q_latent, q_rope, latent, k_rope) if x is not None]
    if any(x.dtype != q_latent.dtype for x in tensors) or not q_latent.is_floating_point():
        _fail(op, f"the inputs are {[str(x.dtype) for x in tensors]}", "use one floating dtype")
    shapes = f"shapes {[tuple(x.shape) for x in tensors]}"
    if any(_differ(x.shape[0], q_latent.shape[0]) for x in tensors) or _differ(q_latent.shape[3], latent.shape[2]):
        _fail(op, f"q_latent and latent do not fit: {shapes}")
    if q_rope is not None and k_rope is not None:
        if q_rope.dim() != 4 or k_rope.dim() != 4:
            _fail(op, f"q_rope or k_rope is not four-dimensional: {shapes}", "use [B,H,S,R] and [B,G,T,R]")
        if any(_differ(a, b) for a, b in zip(q_rope.shape[:3], q_latent.shape[:3], strict=True)):
            _fail(op, f"q_rope does not fit q_latent: {shapes}")
        if _differ(k_rope.shape[2], latent.shape[1]) or _differ(k_rope.shape[3], q_rope.shape[3]):
            _fail(op, f"k_rope does not fit latent or q_rope: {shapes}")
        if _differ(q_latent.shape[1] % k_rope.shape[1], 0):
            _fail(op, f"{q_latent.shape[1]} heads are no multiple of the rotary key's {k_rope.shape[1]}: {shapes}")
    _check_structure(op, q_latent.shape[0], q_latent.shape[1], q_latent.shape[2], latent.shape[1], *structure)


def _checked(check: Callable[..., None], function: Callable[..., Any], *, skip: int = 0) -> Callable[..., Any]:
    """``function`` with its arguments checked first, except ``skip`` leading ones (the incoming gradient)."""

    @wraps(function)
    def run(*args: Any, kind: str, window: Any = None, scale: float, softcap: float | None = None, **rest: Any) -> Any:
        own = args[skip:] + (None,) * (_ARITY[check] - (len(args) - skip))
        check(function.__name__.strip("_").removesuffix("_fake"), *own, kind, window, scale, softcap)
        return function(*args, kind=kind, window=window, scale=scale, softcap=softcap, **rest)

    return run


def _outside_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with autocast off: it would cast the fp32 scores of the reference's matmuls."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        device = args[0].device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return run


_ARITY: dict[Any, int] = {_check_attention: 7, _check_latent: 8}


# --- cost ------------------------------------------------------------------------------------------------------------


def _expr(value: Any) -> sympy.Expr:
    """A size as a sympy expression: symbolic sizes keep their symbols."""
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(int(value))


def _bytes(*tensors: Tensor | None) -> sympy.Expr:
    total = sympy.Integer(0)
    for x in tensors:
        if x is not None:
            total += sympy.Mul(*(_expr(n) for n in x.shape)) * x.element_size()
    return total


def score_pairs(q_len: Any, kv_len: Any, kind: str, window: Any = None) -> sympy.Expr:
    """P, the number of (query, key) pairs that ``kind`` and ``window`` leave, per batch element and head.

    ``s t``, or causally ``s t - s (s - 1) / 2``, for ``s <= t``; padding, dense masks and packing are not subtracted.
    Sizes are ints, SymInts or sympy expressions.
    """
    s, t = (x if isinstance(x, sympy.Expr) else _expr(x) for x in (q_len, kv_len))
    if window is None:
        return s * t - s * (s - 1) / 2 if kind == "causal" else s * t
    w = window if isinstance(window, sympy.Expr) else _expr(window)
    # The first `short` queries still see every key that the kind leaves them; the window cuts the others.
    short = sympy.Min(s, sympy.Max(0, w - 1 - (t - s)))
    if kind == "causal":
        return short * (t - s) + short * (short + 1) / 2 + (s - short) * w
    cut = s - short
    return s * t - (cut * (t - s - w + 1) + cut * (s - 1 + short) / 2)


def _attention_cost(q: Tensor, k: Tensor, v: Tensor, *structure: Any, kind: str, window: Any = None, **_: Any) -> Cost:
    pairs = score_pairs(q.shape[2], k.shape[2], kind, window)
    batch, heads, length, dk, dv = map(_expr, (*q.shape, v.shape[3]))
    return Cost(
        2 * batch * heads * pairs * (dk + dv),
        _bytes(q, k, v, *structure),
        batch * heads * length * dv * q.element_size(),
    )


def _attention_backward_cost(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *structure: Any, kind: str, window: Any = None, **_: Any
) -> Cost:
    pairs = score_pairs(q.shape[2], k.shape[2], kind, window)
    batch, heads, _, dk, dv = map(_expr, (*q.shape, v.shape[3]))
    # scores and dq, dk; dp and dv
    return Cost(2 * batch * heads * pairs * (3 * dk + 2 * dv), _bytes(grad, q, k, v, *structure), _bytes(q, k, v))


def _latent_cost(
    q_latent: Tensor,
    q_rope: Tensor | None,
    latent: Tensor,
    k_rope: Tensor | None,
    *structure: Any,
    kind: str,
    window: Any = None,
    **_: Any,
) -> Cost:
    pairs = score_pairs(q_latent.shape[2], latent.shape[1], kind, window)
    batch, heads, _, width = map(_expr, q_latent.shape)
    rotary = sympy.Integer(0) if q_rope is None else _expr(q_rope.shape[3])
    return Cost(
        2 * batch * heads * pairs * (2 * width + rotary),
        _bytes(q_latent, q_rope, latent, k_rope, *structure),
        _bytes(q_latent),
    )


def _latent_backward_cost(
    grad: Tensor,
    q_latent: Tensor,
    q_rope: Tensor | None,
    latent: Tensor,
    k_rope: Tensor | None,
    *structure: Any,
    kind: str,
    window: Any = None,
    **_: Any,
) -> Cost:
    pairs = score_pairs(q_latent.shape[2], latent.shape[1], kind, window)
    batch, heads, _, width = map(_expr, q_latent.shape)
    rotary = sympy.Integer(0) if q_rope is None else _expr(q_rope.shape[3])
    inputs = (q_latent, q_rope, latent, k_rope)
    flops = 2 * batch * heads * pairs * (5 * width + 3 * rotary)
    return Cost(flops, _bytes(grad, *inputs, *structure), _bytes(*inputs))


def _causal_mask_cost(like, padding, batch, q_len, kv_len, window, *, additive: bool) -> Cost:
    size = like.element_size() if additive else 1
    return Cost(sympy.Integer(0), _bytes(padding), _expr(batch) * _expr(q_len) * _expr(kv_len) * size)


# --- fakes -----------------------------------------------------------------------------------------------------------


def _attention_fake(q, k, v, mask=None, padding=None, sinks=None, cu_seqlens=None, **_):
    return q.new_empty((q.shape[0], q.shape[1], q.shape[2], v.shape[3]))


def _fresh(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _side_gradients(q: Tensor, mask: Tensor | None, sinks: Tensor | None, mask_grad: bool) -> tuple[Tensor, Tensor]:
    acc = ref.accumulation_dtype(q.dtype)
    dmask = _fresh(mask) if mask_grad and mask is not None else q.new_empty(0, dtype=acc)
    return dmask, q.new_empty(0, dtype=acc) if sinks is None else _fresh(sinks)


def _attention_backward_fake(
    grad, q, k, v, mask=None, padding=None, sinks=None, cu_seqlens=None, *, mask_grad=False, **_
):
    return (_fresh(q), _fresh(k), _fresh(v), *_side_gradients(q, mask, sinks, mask_grad))


def _latent_attention_fake(q_latent, q_rope, latent, k_rope, mask=None, padding=None, sinks=None, cu_seqlens=None, **_):
    return _fresh(q_latent)


def _latent_attention_backward_fake(
    grad,
    q_latent,
    q_rope,
    latent,
    k_rope,
    mask=None,
    padding=None,
    sinks=None,
    cu_seqlens=None,
    *,
    mask_grad=False,
    **_,
):
    side = _side_gradients(q_latent, mask, sinks, mask_grad)
    empty = q_latent.new_empty(0, dtype=ref.accumulation_dtype(q_latent.dtype))
    dq_rope = empty if q_rope is None else _fresh(q_rope)
    dk_rope = empty.new_empty(0) if k_rope is None else _fresh(k_rope)
    return (_fresh(q_latent), dq_rope, _fresh(latent), dk_rope, *side)


def _causal_mask_fake(like, padding, batch, q_len, kv_len, window, *, additive):
    return like.new_empty((batch, 1, q_len, kv_len), dtype=like.dtype if additive else torch.bool)


# --- gradients -------------------------------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = dict(keyword_only_inputs)


def _wants_mask(ctx: Any, mask: Tensor | None, position: int) -> bool:
    return mask is not None and mask.is_floating_point() and ctx.needs_input_grad[position]


def _attention_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    inputs = ctx.saved_tensors
    mask, sinks = inputs[3], inputs[5]
    mask_grad = _wants_mask(ctx, mask, 3)
    dq, dk, dv, dmask, dsinks = torch.ops.latentscan.attention_backward(
        grad, *inputs, **ctx.options, mask_grad=mask_grad
    )
    return dq, dk, dv, dmask if mask_grad else None, None, None if sinks is None else dsinks, None


def _latent_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    inputs = ctx.saved_tensors
    q_rope, mask, sinks = inputs[1], inputs[4], inputs[6]
    mask_grad = _wants_mask(ctx, mask, 4)
    dq, dqr, dc, dkr, dmask, dsinks = torch.ops.latentscan.latent_attention_backward(
        grad, *inputs, **ctx.options, mask_grad=mask_grad
    )
    if q_rope is None:
        dqr = dkr = None
    return dq, dqr, dc, dkr, dmask if mask_grad else None, None, None if sinks is None else dsinks, None


# --- autocast --------------------------------------------------------------------------------------------------------


def _cast_leading(info: OpInfo, count: int) -> OpInfo:
    """Register autocast for ``info``'s first ``count`` arguments only (base's rule casts the mask and sinks too)."""

    def make(device: str, key: str) -> Callable[..., Any]:
        exclude = torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[key])

        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype = torch.get_autocast_dtype(device)

            def cast(value: Any) -> Any:
                if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
                    return value.to(dtype)
                return value

            with torch._C._ExcludeDispatchKeyGuard(exclude):
                return info.op(*map(cast, args[:count]), *args[count:], **kwargs)

        return kernel

    base._LIBRARY.impl(info.name, make("cpu", "AutocastCPU"), "AutocastCPU")
    base._LIBRARY.impl(info.name, make("cuda", "AutocastCUDA"), "AutocastCUDA")
    info = dataclasses.replace(info, autocast="cast")
    base.REGISTRY[info.op] = info
    return info


# --- declarations ----------------------------------------------------------------------------------------------------

_STRUCTURE_AXES = {
    "mask": ("batch", "heads", "seq", "keys"),
    "padding": ("batch", "keys"),
    "sinks": ("heads",),
    "cu_seqlens": ("sequences",),
}
_ATTENTION_AXES = {
    "q": ("batch", "heads", "seq", "head_dim"),
    "k": ("batch", "kv_heads", "keys", "head_dim"),
    "v": ("batch", "kv_heads", "keys", "value_dim"),
    **_STRUCTURE_AXES,
}
_LATENT_AXES = {
    "q_latent": ("batch", "heads", "seq", "latent"),
    "q_rope": ("batch", "heads", "seq", "rope_dim"),
    "latent": ("batch", "keys", "latent"),
    "k_rope": ("batch", "kv_heads", "keys", "rope_dim"),
    **_STRUCTURE_AXES,
}

ATTENTION_BACKWARD = define(
    f"attention_backward(Tensor grad, {_QKV}, {_STRUCTURE}, *, {_OPTIONS}, bool mask_grad=False)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_checked(_check_attention, _outside_autocast(ref.attention_backward), skip=1),
    fake=_checked(_check_attention, _attention_backward_fake, skip=1),
    cost=_attention_backward_cost,
    axes={
        "grad": ("batch", "heads", "seq", "value_dim"),
        **_ATTENTION_AXES,
        "out0": _ATTENTION_AXES["q"],
        "out1": _ATTENTION_AXES["k"],
        "out2": _ATTENTION_AXES["v"],
        "out3": _ATTENTION_AXES["mask"],
        "out4": _ATTENTION_AXES["sinks"],
    },
)

ATTENTION = _cast_leading(
    define(
        f"attention({_QKV}, {_STRUCTURE}, *, {_OPTIONS}) -> Tensor",
        reference=_checked(_check_attention, _outside_autocast(ref.attention)),
        fake=_checked(_check_attention, _attention_fake),
        cost=_attention_cost,
        axes={**_ATTENTION_AXES, "out": ("batch", "heads", "seq", "value_dim")},
        backward=_attention_grad,
        setup_context=_setup_context,
    ),
    3,
)

LATENT_ATTENTION_BACKWARD = define(
    f"latent_attention_backward(Tensor grad, {_LATENT}, {_STRUCTURE}, *, {_OPTIONS}, bool mask_grad=False)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_checked(_check_latent, _outside_autocast(ref.latent_attention_backward), skip=1),
    fake=_checked(_check_latent, _latent_attention_backward_fake, skip=1),
    cost=_latent_backward_cost,
    axes={
        "grad": _LATENT_AXES["q_latent"],
        **_LATENT_AXES,
        "out0": _LATENT_AXES["q_latent"],
        "out1": _LATENT_AXES["q_rope"],
        "out2": _LATENT_AXES["latent"],
        "out3": _LATENT_AXES["k_rope"],
        "out4": _LATENT_AXES["mask"],
        "out5": _LATENT_AXES["sinks"],
    },
)

LATENT_ATTENTION = _cast_leading(
    define(
        f"latent_attention({_LATENT}, {_STRUCTURE}, *, {_OPTIONS}) -> Tensor",
        reference=_checked(_check_latent, _outside_autocast(ref.latent_attention)),
        fake=_checked(_check_latent, _latent_attention_fake),
        cost=_latent_cost,
        axes={**_LATENT_AXES, "out": _LATENT_AXES["q_latent"]},
        backward=_latent_grad,
        setup_context=_setup_context,
    ),
    4,
)

CAUSAL_MASK = define(
    "causal_mask(Tensor like, Tensor? padding, SymInt batch, SymInt q_len, SymInt kv_len, SymInt? window, *,"
    " bool additive) -> Tensor",
    reference=ref.causal_mask,
    fake=_causal_mask_fake,
    cost=_causal_mask_cost,
    axes={"padding": ("batch", "keys"), "out": ("batch", "one", "seq", "keys")},
    constant=True,  # `like` tells dtype and device alone
)
