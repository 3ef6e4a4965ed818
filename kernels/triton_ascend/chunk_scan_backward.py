"""The Mamba-2 chunk scan on an Ascend NPU, backward; the states before the chunks are made again from the inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from latentscan.kernels.reference.ssm_common import absent
from latentscan.kernels.triton_ascend.chunk_scan import (
    Problem,
    chunk_states,
    decays,
    group_strides,
    outputs,
    pass_states,
    problem,
    rows,
    strides,
)
from latentscan.kernels.triton_ascend.launch import Kernel, launch
from latentscan.kernels.triton_ascend.tiles import DEFAULT_CHIP, ChunkTiles, backward_tiles, power

GATE = Kernel("chunk_scan_backward_kernels", "gate_kernel")
KEPT = Kernel("chunk_scan_backward_kernels", "kept_kernel")
TOKEN = Kernel("chunk_scan_backward_kernels", "token_kernel")
PAIR = Kernel("chunk_scan_backward_kernels", "pair_kernel")
GROUP = Kernel("chunk_scan_backward_kernels", "group_kernel")
STEP = Kernel("chunk_scan_backward_kernels", "step_kernel")

GATE_BLOCK = 2048


def _gate(p: Problem, dy: Tensor, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient before the gate, dz), both as x."""
    dy, z = dy.contiguous(), z.contiguous()
    dout, dz = torch.empty_like(y), torch.empty_like(z)
    launch(GATE, -(-y.numel() // GATE_BLOCK), dy=dy, z=z, y=y, dout=dout, dz=dz, n=y.numel(), BLOCK=GATE_BLOCK)
    return dout, dz


def _groups(
    p: Problem, x: Tensor, B: Tensor, states: Tensor, cum: Tensor, step: Tensor, pairs: Tensor, of_c: bool
) -> Tensor:
    """dC (of_c) or dB, [b, L, G, N] in x's dtype."""
    out = p.empty(p.b, p.L, p.G, p.N, dtype=p.x.dtype)
    launch(
        GROUP, p.b * p.NC * p.G, x=x, B=B, states=states, cum=cum, step=step, pairs=pairs, dB=out, L=p.L, NC=p.NC,
        **strides("x", x), **group_strides("b", B), **p.sizes, OF_C=of_c,
    )  # fmt: skip
    return out


def chunk_scan_backward(
    dy: Tensor | None, dfinal_state: Tensor | None,
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    init_state: Tensor | None = None, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None,
    *, chunk_size: int, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
    chip: str = DEFAULT_CHIP, tiles: ChunkTiles | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of :func:`latentscan.kernels.triton_ascend.chunk_scan.chunk_scan`.

    Returns:
        (dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinit_state), each in the shape and dtype of its input; an empty
        tensor where the input was None.

    Raises:
        ValueError: as the forward.
    """
    tiles = tiles or backward_tiles(x.shape[3], B.shape[3], chip)
    p = problem(
        x, dt, A, B, C, D, z, dt_bias, seq_idx, cu_seqlens, chunk_size, dt_softplus, dt_min, dt_max, chip, tiles
    )
    cum, step = decays(p)
    entering, _ = pass_states(p, chunk_states(p, p.x, p.B, cum, step), cum, init_state)
    dout = torch.zeros_like(p.x, memory_format=torch.contiguous_format) if dy is None else rows(dy.to(p.x.dtype), p.Q)
    dz = absent(x)
    if p.z is not None:
        dout, dz = _gate(p, dout, p.z, outputs(p, cum, step, entering, D=p.D, z=None))
    adjoint, dinit = pass_states(
        p, chunk_states(p, dout, p.C, cum, step, reverse=True), cum, dfinal_state, reverse=True
    )
    kept, PN = p.empty(p.b, p.H, p.NC), p.P * p.N
    launch(
        KEPT, p.units, entering=entering, adjoint=adjoint, kept=kept, NC=p.NC, H=p.H, PN=PN,
        BLOCK=min(p.tiles.pass_block, power(PN)),
    )  # fmt: skip
    dx = p.empty(p.b, p.L, p.H, p.P, dtype=p.x.dtype)
    dcum, dstep = torch.empty_like(cum), torch.empty_like(cum)
    dD = p.empty(p.b, p.NC, p.H, p.P) if p.D is not None else cum
    launch(
        TOKEN, p.units, x=p.x, B=p.B, C=p.C, dout=dout, D=p.A if p.D is None else p.D, cum=cum, step=step,
        entering=entering, adjoint=adjoint, kept=kept, dx=dx, dcum=dcum, dstep=dstep, dD=dD, L=p.L, NC=p.NC,
        **strides("x", p.x), **group_strides("b", p.B), **group_strides("c", p.C), **strides("d", dout), **p.sizes,
        HAS_D=p.D is not None, D_CHANNELS=p.D is not None and p.D.dim() == 2,
    )  # fmt: skip
    pairs = p.empty(p.b, p.NC, p.G, p.Q, p.Q)
    launch(
        PAIR, p.b * p.NC * p.G, x=p.x, dout=dout, cum=cum, step=step, pairs=pairs, L=p.L, NC=p.NC,
        **strides("x", p.x), **strides("d", dout), H=p.H, G=p.G, P=p.P, Q=p.Q, BP=p.tiles.head_dim,
    )  # fmt: skip
    dB = _groups(p, p.x, p.C, adjoint, cum, step, pairs, False)
    dC = _groups(p, dout, p.B, entering, cum, step, pairs, True)
    ddt, dA, dbias = p.empty(p.b, p.L, p.H), p.empty(p.b, p.NC, p.H), p.empty(p.b, p.NC, p.H)
    launch(
        STEP, p.b * p.NC * -(-p.H // p.tiles.heads), dt=p.dt, A=p.A, bias=p.A if p.dt_bias is None else p.dt_bias,
        starts=p.A if p.starts is None else p.starts, dcum=dcum, dstep=dstep, ddt=ddt, dA=dA, dbias=dbias, L=p.L,
        NC=p.NC, s_b=p.dt.stride(0), s_l=p.dt.stride(1), dt_min=float(p.dt_min), dt_max=float(p.dt_max), H=p.H, Q=p.Q,
        BH=p.tiles.heads, SOFTPLUS=p.softplus, HAS_BIAS=p.dt_bias is not None, PACKED=p.starts is not None,
    )  # fmt: skip
    none = absent(x)
    return (
        dx, ddt.to(dt.dtype), dA.sum((0, 1)).to(A.dtype), dB.to(B.dtype), dC.to(C.dtype),
        none if D is None else (dD.sum((0, 1)) if D.dim() == 2 else dD.sum((0, 1, 3))).to(D.dtype),
        dz, none if dt_bias is None else dbias.sum((0, 1)).to(dt_bias.dtype),
        none if init_state is None else dinit.to(init_state.dtype),
    )  # fmt: skip
