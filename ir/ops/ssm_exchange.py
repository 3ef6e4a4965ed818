"""The two ops that context parallelism cuts a chunk scan into, with explicit backward ops.

    chunk_state    x [b,L,H,P], dt [b,L,H], A [H], B [b,L,G,N] -> state fp32 [b,H,P,N], decay fp32 [b,H]
    state_output   C [b,L,G,N], dt [b,L,H], A [H], state [b,H,P,N] -> [b,L,H,P]

Semantics: :mod:`latentscan.kernels.reference.ssm_exchange`.
"""

from __future__ import annotations

import sympy

from latentscan.ir.ops.ssm import CHUNK_SCAN_AXES, LIMITS, define_with_backward, sizes, state_dtype
from latentscan.kernels.reference import ssm_exchange as ref

_STATE = CHUNK_SCAN_AXES["init_state"]

chunk_state, chunk_state_backward = define_with_backward(
    "chunk_state",
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor? dt_bias=None, Tensor? seq_idx=None",
    LIMITS,
    ("state", "decay"),
    axes=CHUNK_SCAN_AXES,
    out_axes=(_STATE, ("batch", "heads")),
    reference=ref.chunk_state,
    reference_backward=ref.chunk_state_backward,
    fake=lambda x, dt, A, B, *_, **__: (
        x.new_empty((x.shape[0], *x.shape[2:], B.shape[-1]), dtype=state_dtype(x)),
        x.new_empty((x.shape[0], x.shape[2]), dtype=state_dtype(x)),
    ),
    flops=lambda x, dt, A, B, *_, **__: 2 * sympy.Mul(*sizes(*x.shape, B.shape[-1])),
    flops_backward=lambda x, dt, A, B, *_, **__: 4 * sympy.Mul(*sizes(*x.shape, B.shape[-1])),
    constant=("seq_idx",),
)

state_output, state_output_backward = define_with_backward(
    "state_output",
    "Tensor C, Tensor dt, Tensor A, Tensor state, Tensor? dt_bias=None, Tensor? seq_idx=None",
    LIMITS,
    ("y",),
    axes={**CHUNK_SCAN_AXES, "state": _STATE},
    out_axes=(CHUNK_SCAN_AXES["x"],),
    reference=ref.state_output,
    reference_backward=ref.state_output_backward,
    fake=lambda C, dt, A, state, *_, **__: (C.new_empty((*dt.shape, state.shape[2])),),
    flops=lambda C, dt, A, state, *_, **__: 2 * sympy.Mul(*sizes(*dt.shape, *state.shape[2:])),
    flops_backward=lambda C, dt, A, state, *_, **__: 4 * sympy.Mul(*sizes(*dt.shape, *state.shape[2:])),
    constant=("seq_idx",),
)
