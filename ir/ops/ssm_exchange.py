"""What context parallelism sends of a chunk scan, as two ops without gradients of their own.

    chunk_state    x [b,L,H,P], dt [b,L,H], A [H], B [b,L,G,N] -> state fp32 [b,H,P,N], decay fp32 [b,H]
    output_state   dy [b,L,H,P], C [b,L,G,N], dt [b,L,H], A [H] -> fp32 [b,H,P,N]

Semantics: :mod:`latentscan.kernels.reference.ssm_exchange`. The gradients of what is sent are part of the scan's own
backward, see :mod:`latentscan.ir.ops.state_exchange`.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor

from latentscan.ir.ops.base import Cost, OpInfo, define
from latentscan.ir.ops.ssm import CHUNK_SCAN_AXES, LIMITS, _bytes, _check, _kernel, sizes, state_dtype
from latentscan.kernels.reference import ssm_exchange as ref

_STATE = CHUNK_SCAN_AXES["init_state"]
_AXES = {**CHUNK_SCAN_AXES, "dy": CHUNK_SCAN_AXES["x"]}


def _define(schema: str, names: tuple[str, ...], reference: Any, fake: Any, out_axes: dict[str, Any]) -> OpInfo:
    """An op whose first argument is [b, L, H, P] and that sums products with a [b, L, G, N] over the tokens."""
    name = schema.split("(")[0]

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = args + (None,) * (len(names) - len(args))
        _check(name, _AXES, names, given)
        return fake(*args)

    def cost(*args: Any, **kwargs: Any) -> Cost:
        made = checked(*args, **kwargs)
        wide = next(a for n, a in zip(names, args, strict=False) if n in "BC")
        flops = 2 * sympy.Mul(*sizes(*args[0].shape, wide.shape[3]))
        return Cost(flops, _bytes(*args), _bytes(*(made if isinstance(made, tuple) else (made,))))

    return define(
        schema, reference=_kernel(name, reference), fake=checked, cost=cost,
        axes={**{n: _AXES[n] for n in names}, **out_axes}, tags=(torch.Tag.pt2_compliant_tag,),
    )  # fmt: skip


def _state(x: Tensor, wide: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], *x.shape[2:], wide.shape[3]), dtype=state_dtype(x))


chunk_state = _define(
    f"chunk_state(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor? dt_bias=None, Tensor? seq_idx=None, *, {LIMITS})"
    " -> (Tensor state, Tensor decay)",
    ("x", "dt", "A", "B", "dt_bias", "seq_idx"),
    ref.chunk_state,
    lambda x, dt, A, B, *_: (_state(x, B), x.new_empty((x.shape[0], x.shape[2]), dtype=state_dtype(x))),
    {"out0": _STATE, "out1": ("batch", "heads")},
)

output_state = _define(
    f"output_state(Tensor dy, Tensor C, Tensor dt, Tensor A, Tensor? dt_bias=None, Tensor? seq_idx=None, *, {LIMITS})"
    " -> Tensor",
    ("dy", "C", "dt", "A", "dt_bias", "seq_idx"),
    ref.output_state,
    lambda dy, C, *_: _state(dy, C),
    {"out": _STATE},
)
