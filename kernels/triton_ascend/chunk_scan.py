"""The Mamba-2 chunk scan on an Ascend NPU, forward; signatures of :mod:`latentscan.kernels.reference.ssm`.

Tensors are fp16 or bf16 with neighbouring elements in their last axis (others are copied); sums, states and decays
are fp32. The result does not depend on ``chunk_size``: the tiles are those of
:mod:`~latentscan.kernels.triton_ascend.tiles`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from latentscan.kernels.reference.ssm_common import check_limits, heads_of
from latentscan.kernels.triton_ascend.launch import Kernel, launch
from latentscan.kernels.triton_ascend.tiles import DEFAULT_CHIP, ChunkTiles, chunk_tiles, power

CUMSUM = Kernel("chunk_scan_kernels", "cumsum_kernel")
STATE = Kernel("chunk_scan_kernels", "state_kernel")
PASS = Kernel("chunk_scan_kernels", "pass_kernel")
SCAN = Kernel("chunk_scan_kernels", "scan_kernel")


@dataclass(frozen=True)
class Problem:
    """One call, checked: sizes, tiles and the inputs as the kernels take them."""

    b: int
    L: int
    H: int
    P: int
    G: int
    N: int
    tiles: ChunkTiles
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    starts: Tensor | None
    softplus: bool
    dt_min: float
    dt_max: float

    @property
    def Q(self) -> int:
        return self.tiles.chunk

    @property
    def NC(self) -> int:
        return -(-self.L // self.Q)

    @property
    def units(self) -> int:
        return self.b * self.NC * self.H

    @property
    def sizes(self) -> dict[str, Any]:
        """The constants of most kernels."""
        return {
            "H": self.H, "G": self.G, "P": self.P, "N": self.N, "Q": self.Q, "BP": self.tiles.head_dim,
            "BN": self.tiles.d_state,
        }  # fmt: skip

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x.device)


def strides(prefix: str, t: Tensor) -> dict[str, int]:
    """The strides of a [b, L, heads or groups, ...] as arguments."""
    return {f"{prefix}_sb": t.stride(0), f"{prefix}_sl": t.stride(1), f"{prefix}_sh": t.stride(2)}


def group_strides(prefix: str, t: Tensor) -> dict[str, int]:
    return {f"{prefix}_sb": t.stride(0), f"{prefix}_sl": t.stride(1), f"{prefix}_sg": t.stride(2)}


def rows(t: Tensor, Q: int) -> Tensor:
    """``t`` with neighbouring elements in its last axis, and a chunk of it within 2^31 elements."""
    return t if t.stride(-1) == 1 and Q * t.stride(1) < 1 << 31 else t.contiguous()


def refusal(x: Tensor, B: Tensor, chip: str = DEFAULT_CHIP) -> str | None:
    """Why the kernels do not take such tensors, or None."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"x is {x.dtype}; the Ascend kernels take float16 and bfloat16"
    if chunk_tiles(x.shape[3], B.shape[3], chip) is None:
        return f"head_dim {x.shape[3]} and d_state {B.shape[3]} fit no tile of {chip}"
    return None


def problem(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    seq_idx: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int, dt_softplus: bool, dt_min: float, dt_max: float,
    chip: str = DEFAULT_CHIP, tiles: ChunkTiles | None = None,
) -> Problem:  # fmt: skip
    """Check a call.

    Raises:
        ValueError: limits, chunk size, groups, packing, dtype or sizes do not fit, with the values.
    """
    check_limits(dt_min, dt_max)
    if chunk_size < 1:
        raise ValueError(f"chunk_size {chunk_size} must be at least 1")
    b, L, H, P = x.shape
    G, N = B.shape[2:]
    heads_of(G, H)
    if L == 0:
        raise ValueError("the sequence is empty")
    if reason := refusal(x, B, chip):
        raise ValueError(reason)
    tiles = tiles or chunk_tiles(P, N, chip)
    assert tiles is not None
    Q = tiles.chunk
    return Problem(
        b, L, H, P, G, N, tiles, rows(x, Q), rows(dt, Q), A.contiguous(), rows(B.to(x.dtype), Q),
        rows(C.to(x.dtype), Q), None if D is None else D.contiguous(), None if z is None else rows(z, Q),
        None if dt_bias is None else dt_bias.contiguous(), sequence_starts(seq_idx, cu_seqlens, b, L),
        dt_softplus, dt_min, min(dt_max, 3.0e38),
    )  # fmt: skip


def sequence_starts(seq_idx: Tensor | None, cu_seqlens: Tensor | None, b: int, L: int) -> Tensor | None:
    """fp32 [b, L]: 1 where a packed sequence starts (never token 0), or None. No value is read by the host."""
    given = seq_idx if seq_idx is not None else cu_seqlens
    if given is None:
        return None
    if seq_idx is not None and tuple(seq_idx.shape) != (b, L):
        raise ValueError(f"seq_idx has shape {tuple(seq_idx.shape)}, expected {(b, L)}")
    if cu_seqlens is not None and (b != 1 or cu_seqlens.dim() != 1):
        raise ValueError(
            f"cu_seqlens is one-dimensional and needs one packed row, got {tuple(cu_seqlens.shape)} and {b} rows"
        )
    starts = torch.zeros(b, L + 1, dtype=torch.float32, device=given.device)
    if seq_idx is not None:
        starts[:, 1:L] = (seq_idx[:, 1:] != seq_idx[:, :-1]).float()
    if cu_seqlens is not None:
        starts.index_fill_(1, cu_seqlens.to(torch.int64).clamp(0, L), 1.0)
        starts[:, 0] = 0
    return starts[:, :L].contiguous()


def decays(p: Problem) -> tuple[Tensor, Tensor]:
    """cum, step: fp32 [b, H, NC, Q]."""
    cum, step = p.empty(p.b, p.H, p.NC, p.Q), p.empty(p.b, p.H, p.NC, p.Q)
    heads = p.tiles.heads
    launch(
        CUMSUM, p.b * p.NC * -(-p.H // heads), dt=p.dt, A=p.A, bias=p.A if p.dt_bias is None else p.dt_bias,
        starts=p.A if p.starts is None else p.starts, cum=cum, step=step, L=p.L, NC=p.NC, s_b=p.dt.stride(0),
        s_l=p.dt.stride(1), dt_min=float(p.dt_min), dt_max=float(p.dt_max), H=p.H, Q=p.Q, BH=heads,
        SOFTPLUS=p.softplus, HAS_BIAS=p.dt_bias is not None, PACKED=p.starts is not None,
    )  # fmt: skip
    return cum, step


def chunk_states(p: Problem, x: Tensor, B: Tensor, cum: Tensor, step: Tensor, *, reverse: bool = False) -> Tensor:
    """fp32 [b, NC, H, P, N]: what each chunk adds to the state, or (reverse) to its adjoint."""
    states = p.empty(p.b, p.NC, p.H, p.P, p.N)
    launch(
        STATE, p.units, x=x, B=B, cum=cum, step=step, states=states, L=p.L, NC=p.NC, **strides("x", x),
        **group_strides("b", B), **p.sizes, REVERSE=reverse,
    )  # fmt: skip
    return states


def pass_states(
    p: Problem, states: Tensor, cum: Tensor, start: Tensor | None, *, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """(x's dtype [b, NC, H, P, N]: the state before, or the adjoint after, each chunk; fp32 [b, H, P, N]: the last)."""
    shape = (p.b, p.H, p.P, p.N)
    begin = torch.zeros(shape, device=p.x.device) if start is None else start.float().contiguous()
    entering, end = torch.empty_like(states, dtype=p.x.dtype), p.empty(*shape)
    PN = p.P * p.N
    block = min(p.tiles.pass_block, power(PN))
    launch(
        PASS, p.b * p.H * -(-PN // block), states=states, cum=cum, start=begin, entering=entering, end=end, NC=p.NC,
        H=p.H, PN=PN, Q=p.Q, BLOCK=block, REVERSE=reverse,
    )  # fmt: skip
    return entering, end


def outputs(p: Problem, cum: Tensor, step: Tensor, entering: Tensor, *, D: Tensor | None, z: Tensor | None) -> Tensor:
    """y [b, L, H, P] in x's dtype."""
    y = p.empty(p.b, p.L, p.H, p.P, dtype=p.x.dtype)
    zt = p.x if z is None else z
    launch(
        SCAN, p.units, x=p.x, B=p.B, C=p.C, z=zt, D=p.A if D is None else D, cum=cum, step=step, entering=entering, y=y,
        L=p.L, NC=p.NC, **strides("x", p.x), **group_strides("b", p.B), **group_strides("c", p.C), **strides("z", zt),
        **p.sizes, HAS_D=D is not None, D_CHANNELS=D is not None and D.dim() == 2, HAS_Z=z is not None,
    )  # fmt: skip
    return y


def chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    init_state: Tensor | None = None, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None,
    *, chunk_size: int, dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float = float("inf"),
    chip: str = DEFAULT_CHIP, tiles: ChunkTiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y like x and the fp32 final state [b, H, P, N]; see :func:`latentscan.kernels.reference.ssm.chunk_scan`.

    Args:
        chip, tiles: tile sizes; by default the shipped ones of the chip.

    Raises:
        ValueError: limits, chunk size, groups, packing, dtype or sizes do not fit, with the values.
    """
    p = problem(
        x, dt, A, B, C, D, z, dt_bias, seq_idx, cu_seqlens, chunk_size, dt_softplus, dt_min, dt_max, chip, tiles
    )
    cum, step = decays(p)
    entering, final = pass_states(p, chunk_states(p, p.x, p.B, cum, step), cum, init_state)
    return outputs(p, cum, step, entering, D=p.D, z=p.z), final
