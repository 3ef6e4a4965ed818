"""Canonical ops as functions, with the kernel of the tensors' device where there is one."""

from __future__ import annotations

import math

from torch import Tensor

from latentscan.ir.ops import functional as _reference
from latentscan.kernels.triton.chunk_configs import refusal
from latentscan.lowering.select import TRITON
from latentscan.lowering.triton import CHUNK_SCAN


def chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, init_state: Tensor | None = None, chunk_size: int | None = None,
    seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """As :func:`latentscan.ir.ops.functional.chunk_scan`; on CUDA by fused kernels for bf16, fp16 and fp32 with
    head_dim and d_state up to 256, elsewhere by the reference. Differentiable and traceable.

    Raises:
        KernelError: shapes or options that do not fit, with the values.
    """
    if x.is_cuda and TRITON and refusal(x, B) is None:
        y, state, _ = CHUNK_SCAN(
            x, dt, A, B, C, D, z, dt_bias, init_state, seq_idx, cu_seqlens,
            chunk_size=64 if chunk_size is None else chunk_size, dt_softplus=dt_softplus,
            dt_min=float(dt_limit[0]), dt_max=float(dt_limit[1]),
        )  # fmt: skip
        return (y, state) if return_final_state else y
    return _reference.chunk_scan(
        x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, init_state=init_state, chunk_size=chunk_size, seq_idx=seq_idx,
        cu_seqlens=cu_seqlens, dt_softplus=dt_softplus, dt_limit=dt_limit, return_final_state=return_final_state,
    )  # fmt: skip
