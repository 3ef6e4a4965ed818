"""``sparse_latent_attention``: absorbed attention over the keys that an indexer chose, with an explicit backward op.

    q_latent [B,H,S,C], q_rope [B,H,S,R], latent [B,T,C], k_rope [B,1,T,R], indices [B,S,K], allowed [B,S,K]
    -> [B,H,S,C]

Semantics: :mod:`latentscan.kernels.reference.sparse`. Autocast casts queries, latents and rotary keys.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from latentscan.ir.errors import KernelError
from latentscan.ir.ops.base import Cost, define
from latentscan.ir.sizes import expression
from latentscan.kernels.reference import sparse as ref

_ARGUMENTS = "Tensor q_latent, Tensor? q_rope, Tensor latent, Tensor? k_rope, Tensor indices, Tensor? allowed=None"


def _check(q_latent: Tensor, q_rope: Tensor | None, latent: Tensor, k_rope: Tensor | None, indices: Tensor) -> None:
    """Raise KernelError for arguments that the op cannot mean; sizes that are unknown while tracing pass."""
    where = "sparse_latent_attention"
    if q_latent.dim() != 4 or latent.dim() != 3 or indices.dim() != 3:
        dims = q_latent.dim(), latent.dim(), indices.dim()
        raise KernelError(f"q_latent, latent, indices have {dims} dimensions", where=where, remedy="use 4, 3 and 3")
    if (q_rope is None) != (k_rope is None):
        raise KernelError("one of q_rope and k_rope is missing", where=where, remedy="give both or neither")
    if k_rope is not None and (k_rope.dim() != 4 or statically_known_true(k_rope.shape[1] != 1)):
        raise KernelError(f"k_rope is {tuple(k_rope.shape)}", where=where, remedy="use one rotary key for all heads")
    if indices.is_floating_point() or indices.dtype == torch.bool:
        raise KernelError(f"indices are {indices.dtype}", where=where, remedy="use int32 or int64 positions")
    if statically_known_true(q_latent.shape[3] != latent.shape[2]):
        raise KernelError(f"widths differ: {tuple(q_latent.shape)}, {tuple(latent.shape)}", where=where)


def _forward(q_latent, q_rope, latent, k_rope, indices, allowed=None, *, scale):
    _check(q_latent, q_rope, latent, k_rope, indices)
    return ref.sparse_latent_attention(q_latent, q_rope, latent, k_rope, indices, allowed, scale=scale)


def _fake(q_latent, q_rope, latent, k_rope, indices, allowed=None, *, scale):
    _check(q_latent, q_rope, latent, k_rope, indices)
    return q_latent.new_empty(q_latent.shape)


def _backward_fake(grad, q_latent, q_rope, latent, k_rope, indices, allowed=None, *, scale):
    acc = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    none = q_latent.new_empty(0, dtype=acc)
    given = [none if x is None else x.new_empty(x.shape) for x in (q_rope, k_rope)]
    return q_latent.new_empty(q_latent.shape), given[0], latent.new_empty(latent.shape), given[1]


def _bytes(*tensors: Tensor | None) -> sympy.Expr:
    sizes = [sympy.Mul(*(expression(n) for n in x.shape)) * x.element_size() for x in tensors if x is not None]
    return sympy.Add(*sizes)


def _pairs(q_latent: Tensor, indices: Tensor) -> sympy.Expr:
    batch, heads, queries, _ = (expression(n) for n in q_latent.shape)
    return batch * heads * queries * expression(indices.shape[2])


def _rows(q_rope: Tensor | None, latent: Tensor, indices: Tensor) -> sympy.Expr:
    width = expression(latent.shape[2]) + (0 if q_rope is None else expression(q_rope.shape[3]))
    return sympy.Mul(*(expression(n) for n in indices.shape)) * width * latent.element_size()


def _cost(q_latent, q_rope, latent, k_rope, indices, allowed=None, *, scale) -> Cost:
    width = 2 * expression(latent.shape[2]) + (0 if q_rope is None else expression(q_rope.shape[3]))
    read = _bytes(q_latent, q_rope, indices, allowed) + _rows(q_rope, latent, indices)
    return Cost(2 * _pairs(q_latent, indices) * width, read, _bytes(q_latent))


def _backward_cost(grad, q_latent, q_rope, latent, k_rope, indices, allowed=None, *, scale) -> Cost:
    width = 5 * expression(latent.shape[2]) + (0 if q_rope is None else 3 * expression(q_rope.shape[3]))
    read = _bytes(grad, q_latent, q_rope, indices, allowed) + _rows(q_rope, latent, indices)
    return Cost(2 * _pairs(q_latent, indices) * width, read, _bytes(q_latent, q_rope, latent, k_rope))


_AXES = {
    "q_latent": ("batch", "heads", "seq", "latent"),
    "q_rope": ("batch", "heads", "seq", "rope_dim"),
    "latent": ("batch", "keys", "latent"),
    "k_rope": ("batch", "one", "keys", "rope_dim"),
    "indices": ("batch", "seq", "chosen"),
    "allowed": ("batch", "seq", "chosen"),
}

SPARSE_LATENT_ATTENTION_BACKWARD = define(
    f"sparse_latent_attention_backward(Tensor grad, {_ARGUMENTS}, *, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=ref.sparse_latent_attention_backward,
    fake=_backward_fake,
    cost=_backward_cost,
    axes={
        "grad": _AXES["q_latent"],
        **_AXES,
        "out0": _AXES["q_latent"],
        "out1": _AXES["q_rope"],
        "out2": _AXES["latent"],
        "out3": _AXES["k_rope"],
    },
    autocast="cast",
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = dict(keyword_only_inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: a recomputed region unpacks each tensor a single time
    dq, dqr, dc, dkr = SPARSE_LATENT_ATTENTION_BACKWARD.op(grad, *saved, **ctx.options)
    if saved[1] is None:
        dqr = dkr = None
    return dq, dqr, dc, dkr, None, None


SPARSE_LATENT_ATTENTION = define(
    f"sparse_latent_attention({_ARGUMENTS}, *, float scale) -> Tensor",
    reference=_forward,
    fake=_fake,
    cost=_cost,
    axes={**_AXES, "out": _AXES["q_latent"]},
    autocast="cast",
    backward=_backward,
    setup_context=_setup_context,
)
