"""The rest of a Mamba mixer on an Ascend NPU: causal convolution, gated RMS norm, one decode step; forward only.

Signatures of :mod:`latentscan.kernels.reference`. Tensors are fp16, bf16 or fp32; sums are fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latentscan.kernels.reference.ssm_common import ACTIVATIONS, check_limits, heads_of, segment_numbers
from latentscan.kernels.triton_ascend.launch import Kernel, launch
from latentscan.kernels.triton_ascend.tiles import (
    CONV_CHANNELS,
    CONV_TOKENS,
    DEFAULT_CHIP,
    NORM_BLOCK,
    power,
    update_tile,
)

CONV = Kernel("mixer_kernels", "conv_kernel")
NORM = Kernel("mixer_kernels", "norm_kernel")
UPDATE = Kernel("mixer_kernels", "update_kernel")
WIDTHS = (2, 3, 4)


def _reach(seq_idx: Tensor, width: int) -> Tensor:
    """fp32 [b, L]: how many tokens before each one belong to its sequence, at most width - 1; the row's past counts."""
    number = segment_numbers(seq_idx, None, seq_idx.shape[0], seq_idx.shape[1], seq_idx.device)
    assert number is not None
    reach = torch.zeros(seq_idx.shape, device=seq_idx.device)
    for k in range(1, width):
        shifted = torch.nn.functional.pad(number, (k, 0))[:, : number.shape[1]]
        reach += (shifted == number).float()
    return reach


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, init_state: Tensor | None = None,
    seq_idx: Tensor | None = None, *, activation: str = "none",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y [b, L, D] and the last inputs [b, D, W - 1]; see :func:`latentscan.kernels.reference.ssm_conv.causal_conv1d`.

    Raises:
        ValueError: activation, filter width or state do not fit.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    b, L, D = x.shape
    W = weight.shape[1]
    if W not in WIDTHS:
        raise ValueError(f"filter width {W}; the Ascend kernel takes 2, 3 and 4")
    if init_state is not None and init_state.shape[-1] != W - 1:
        raise ValueError(f"init_state holds {init_state.shape[-1]} values per channel, the convolution needs {W - 1}")
    x = x if x.stride(-1) == 1 and CONV_TOKENS * x.stride(1) < 1 << 31 else x.contiguous()
    before = x.new_zeros(b, W - 1, D) if init_state is None else init_state.to(x.dtype).mT.contiguous()
    y = torch.empty(b, L, D, dtype=x.dtype, device=x.device)
    tokens, channels = CONV_TOKENS, min(CONV_CHANNELS, power(D))
    taps = weight.mT.contiguous()
    launch(
        CONV, b * -(-L // tokens) * -(-D // channels), x=x, before=before, weight=taps,
        bias=taps if bias is None else bias.contiguous(), reach=taps if seq_idx is None else _reach(seq_idx, W), y=y,
        L=L, x_sb=x.stride(0), x_sl=x.stride(1), D=D, W=W, BT=tokens, BD=channels, HAS_BIAS=bias is not None,
        PACKED=seq_idx is not None, SILU=activation == "silu",
    )  # fmt: skip
    tail = torch.cat([before, x[:, -(W - 1) :]], 1)[:, -(W - 1) :]
    if seq_idx is not None:
        number = segment_numbers(seq_idx, None, b, L, x.device)
        assert number is not None
        number = torch.nn.functional.pad(number, (W - 1, 0))[:, -(W - 1) :]
        tail = tail * (number == number[:, -1:])[..., None]
    return y, tail.mT.contiguous()


def gated_rms_norm(
    x: Tensor, z: Tensor | None, weight: Tensor, *, eps: float, group_size: int, norm_before_gate: bool
) -> Tensor:
    """As x; see :func:`latentscan.kernels.reference.ssm_norm.gated_rms_norm`.

    Raises:
        ValueError: group_size does not divide the channels.
    """
    D = x.shape[-1]
    if group_size < 1 or D % group_size:
        raise ValueError(f"group_size {group_size} does not divide {D} channels")
    flat = x.reshape(-1, D)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    gate = flat if z is None else z.reshape(-1, D)
    gate = gate if gate.stride(-1) == 1 else gate.contiguous()
    y = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    launch(
        NORM, flat.shape[0] * (D // group_size), x=flat, z=gate, weight=weight.contiguous(), y=y, x_sl=flat.stride(0),
        z_sl=gate.stride(0), eps=float(eps), D=D, SIZE=group_size, BLOCK=min(NORM_BLOCK, power(group_size)),
        HAS_Z=z is not None, BEFORE=norm_before_gate,
    )  # fmt: skip
    return y.reshape(x.shape)


def state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    *, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"), chip: str = DEFAULT_CHIP,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y as x, new state); see :func:`latentscan.kernels.reference.ssm.state_update`.

    Raises:
        ValueError: limits, groups or sizes do not fit.
    """
    check_limits(dt_min, dt_max)
    b, H, P, N = state.shape
    G = B.shape[1]
    heads_of(G, H)
    tile = update_tile(P, N, chip)
    if tile is None:
        raise ValueError(f"d_state {N} fits no tile of {chip}")
    new, y = (
        torch.empty_like(state, memory_format=torch.contiguous_format),
        torch.empty_like(x, memory_format=torch.contiguous_format),
    )
    none = A.contiguous()
    launch(
        UPDATE, b * H * -(-P // tile), state=state.contiguous(), x=x.contiguous(), dt=dt.contiguous(), A=none,
        B=B.contiguous(), C=C.contiguous(), D=none if D is None else D.contiguous(),
        z=none if z is None else z.contiguous(), bias=none if dt_bias is None else dt_bias.contiguous(), new=new, y=y,
        dt_min=float(dt_min), dt_max=min(float(dt_max), 3.0e38), H=H, G=G, P=P, N=N, BP=tile, BN=power(N),
        A_STATES=A.dim() == 2, HAS_D=D is not None, D_CHANNELS=D is not None and D.dim() == 2, HAS_Z=z is not None,
        HAS_BIAS=dt_bias is not None, SOFTPLUS=dt_softplus,
    )  # fmt: skip
    return y, new
