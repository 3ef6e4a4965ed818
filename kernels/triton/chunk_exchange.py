"""What context parallelism sends of a chunk scan, in portable Triton: the state pass of the scan's forward alone.

Same signatures as :mod:`latentscan.kernels.reference.ssm_exchange`. The gradient of the entering state is the same sum
as the final state, of other weights: those of a token are what is left of an entering state there.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from latentscan.kernels.reference.ssm_common import check_limits, heads_of
from latentscan.kernels.triton.chunk_common import Sizes, Steps, launch, pad, precision, prepare, rows_of, wide
from latentscan.kernels.triton.chunk_common import sequence_starts as starts_of
from latentscan.kernels.triton.chunk_configs import Device, Forward, forward_config, refusal
from latentscan.kernels.triton.chunk_scan import _on as on_device
from latentscan.kernels.triton.chunk_scan_forward import carry_kernel, states_kernel


def _prepared(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None, seq_idx: Tensor | None, softplus: bool,
    minimum: float, maximum: float,
) -> tuple[Tensor, Tensor, Sizes, Tensor, Forward]:  # fmt: skip
    check_limits(minimum, maximum)
    heads_of(B.shape[2], x.shape[2])
    if reason := refusal(x, B):
        raise ValueError(reason)
    x, B = rows_of(x), rows_of(B)
    bias = None if dt_bias is None else dt_bias.contiguous()
    starts = starts_of(seq_idx, None, *x.shape[:2])
    chunks = triton.cdiv(x.shape[1], 64)
    k = forward_config(
        pad(x.shape[3]), pad(B.shape[3]), x.dtype, x.shape[0] * x.shape[2], chunks, Device.of(x.device)
    )  # fmt: skip
    s = Sizes.of(x, B, k.chunk)
    return x, B, s, prepare(Steps(dt, A.contiguous(), bias, starts, softplus, minimum, maximum), s), k


def _summed(x: Tensor, B: Tensor, vec: Tensor, s: Sizes, k: Forward) -> Tensor:
    """fp32 [b, H, P, N]: the state after all chunks, from zero."""
    chunks = triton.cdiv(s.NC, min(k.segments, s.NC))
    S = triton.cdiv(s.NC, chunks)
    if S * chunks > s.NC:  # the kernel reads whole segments
        vec = torch.cat([vec, vec.new_zeros(s.b, s.H, S * chunks - s.NC, 2, s.Q)], 2)
    states = torch.zeros(s.b, S + 1, s.H, s.P, s.N, device=x.device, dtype=torch.float32)
    decays = torch.empty(s.b, S + 1, s.H, device=x.device, dtype=torch.float32)
    BP, BN = min(pad(s.P), k.state_p), min(pad(s.N), k.state_n)
    launch(
        states_kernel, s.b * S * s.H * triton.cdiv(s.P, BP) * triton.cdiv(s.N, BN),
        x, B, vec, states, decays, s.L, s.H, s.G, S * chunks, s.P, s.N, S + 1, chunks, *x.stride()[:3],
        *B.stride()[:3], Q=s.Q, BP=BP, BN=BN, EVEN_P=s.P % BP == 0, EVEN_N=s.N % BN == 0, PREC=precision(x.dtype),
        WIDE=wide(s.Q, x, B), STAGES=k.state_stages, num_warps=k.state_warps,
    )  # fmt: skip
    block = min(1024, triton.next_power_of_2(s.P * s.N))
    launch(
        carry_kernel, s.b * s.H * triton.cdiv(s.P * s.N, block), states, decays, s.H, S + 1, s.P * s.N, BLOCK=block
    )  # fmt: skip
    return states[:, S].contiguous()


def chunk_state(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor | None = None, seq_idx: Tensor | None = None,
    *, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The state from zero [b, H, P, N] and the decay [b, H] over all tokens, fp32."""
    with on_device(x):
        x, B, s, vec, k = _prepared(x, dt, A, B, dt_bias, seq_idx, dt_softplus, dt_min, dt_max)
        decay = vec[:, :, :, 0, -1].sum(2).exp2()
        return _summed(x, B, vec, s, k), decay


def output_state(
    dy: Tensor, C: Tensor, dt: Tensor, A: Tensor, dt_bias: Tensor | None = None, seq_idx: Tensor | None = None,
    *, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
) -> Tensor:  # fmt: skip
    """The gradient of the entering state through the outputs, fp32 [b, H, P, N]."""
    with on_device(dy):
        dy, C, s, vec, k = _prepared(dy, dt, A, C, dt_bias, seq_idx, dt_softplus, dt_min, dt_max)
        inside = vec[:, :, :, 0]
        ends = inside[..., -1]
        left = (inside + (ends.cumsum(2) - ends)[..., None]).exp2()
        left = left * (torch.arange(s.NC * s.Q, device=dy.device) < s.L).view(s.NC, s.Q)
        return _summed(dy, C, torch.stack([torch.zeros_like(left), left], 3), s, k)
