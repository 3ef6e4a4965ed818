"""Tile sizes of the chunk scan, chosen by shape class: one static table, nothing is tuned at a user's call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

GLUON_VERSIONS = ("3.6", "3.7")
LARGEST = 256  # of head_dim and of d_state
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refusal(x: Tensor, B: Tensor) -> str | None:
    """Why the kernels cannot take such tensors (or fake ones); None if they can."""
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}; the kernels take bfloat16, float16 and float32"
    if x.shape[-1] > LARGEST or B.shape[-1] > LARGEST:
        return f"head_dim {x.shape[-1]} and d_state {B.shape[-1]} must be at most {LARGEST}"
    return None


@dataclass(frozen=True)
class Forward:
    """Choices of the portable forward. ``chunk`` tokens; a segment is a run of chunks that one program walks."""

    chunk: int = 64
    segments: int = 8
    state_p: int = 64
    state_n: int = 128
    state_warps: int = 4
    state_stages: int = 3
    out_p: int = 64
    out_warps: int = 4
    out_stages: int = 2


@dataclass(frozen=True)
class Hopper:
    """Choices of the forward in Gluon.

    Attributes:
        pieces: programs of the output pass; one a processor, so that all are at work at once.
        state_parts: programs of the state pass that share a piece.
    """

    pieces: int = 132
    out_stages: int = 3
    gated_stages: int = 2
    out_registers: int = 232
    state_parts: int = 1
    state_stages: int = 3
    state_registers: int = 216


@dataclass(frozen=True)
class Backward:
    """Choices of the portable backward. ``workspace`` bounds the bytes of states that are alive at once."""

    chunk: int = 64
    block_p: int = 64
    heads: int = 5
    warps: int = 4
    stages: int = 2
    group_p: int = 64
    group_n: int = 128
    group_heads: int = 40
    group_warps: int = 4
    group_stages: int = 3
    walk_p: int = 64
    walk_n: int = 128
    walk_warps: int = 4
    walk_stages: int = 3
    workspace: int = 116 << 20
    state_p: int = 64
    state_n: int = 128
    state_warps: int = 4
    state_stages: int = 3


@dataclass(frozen=True)
class HopperBackward:
    """Choices of the backward in Gluon.

    Attributes:
        pieces: programs of a walk; one a processor.
        segments: runs of the sequence that are worked on one after the other; 0: as few as ``workspace``, and what is
            free where dx comes later, allow.
        workspace: bytes for a segment of the walk back; 0: 9/32 of x's, or all that is wanted, if that is little; a
            sixteenth of x's for the last segment where ``atomic``, as nothing else needs it then.
        every: chunks between two states that are kept to tell what flows across chunks; a power of two, at least 2.
        state_parts: programs that share a piece in the pass that finds the states before the pieces.
        together: heads whose pairs of tokens one program sums, at most.
        atomic: dB and half of dC are summed over pairs of heads by adding to memory, in no fixed order: two runs may
            differ in the last bits of dB and dC. Where torch.use_deterministic_algorithms is on they never are.
    """

    pieces: int = 132
    segments: int = 0
    workspace: int = 0
    every: int = 8
    together: int = 80
    pair_stages: int = 4
    pair_registers: int = 240
    stages: int = 2
    registers: int = 240
    state_parts: int = 1
    state_stages: int = 3
    state_registers: int = 216
    atomic: bool = True

    def __post_init__(self) -> None:
        if self.every < 2 or self.every & (self.every - 1):
            raise ValueError(f"every={self.every} is no power of two of at least 2")
        if self.pieces < 1 or self.segments < 0 or not isinstance(self.atomic, bool):
            raise ValueError(f"pieces={self.pieces}, segments={self.segments} or atomic={self.atomic!r} cannot be")


@dataclass(frozen=True)
class Device:
    """What the choice depends on: compute capability, processors, bytes of second-level cache."""

    capability: tuple[int, int]
    processors: int
    cache: int

    @staticmethod
    def of(device: torch.device) -> Device:
        if device.type != "cuda":
            return H200  # the interpreter and the ahead-of-time compiler
        p = torch.cuda.get_device_properties(device)
        return Device((p.major, p.minor), p.multi_processor_count, p.L2_cache_size)


def gluon_works() -> bool:
    """Gluon is experimental: only versions of Triton that our kernels were compiled with count."""
    import triton

    return triton.__version__.rpartition(".")[0] in GLUON_VERSIONS


def starts_shape(device: torch.device, dtype: torch.dtype, tokens: Any, P: int, N: int) -> tuple[Any, ...]:
    """[rows, 2, 64, N] of the states before its pieces that the forward keeps for the backward, in fp32.

    No rows where no kernel has such pieces. Below 8 192 tokens (of all rows) there are two, which nobody reads: so
    symbolic tokens need no guard, neither against no element nor between short and long.
    """
    fits = dtype in (torch.bfloat16, torch.float16) and P % 64 == 0 and N in (64, 128)
    if not (fits and device.type == "cuda" and torch.cuda.is_available()):
        return 0, 2, 64, N
    on = Device.of(device)
    if on.capability != (9, 0) or not gluon_works():
        return 0, 2, 64, N
    long = torch.sym_min(1, tokens // 8192)
    return torch.sym_max(2, on.processors * long), 2, 64, N


H200 = Device((9, 0), 132, 50 << 20)
A100 = Device((8, 0), 108, 40 << 20)


def forward_config(P: int, N: int, dtype: torch.dtype, heads: int, chunks_of_64: int, device: Device) -> Forward:
    """For heads = batch x H programs side by side. ``P`` and ``N`` are padded to powers of two."""
    wide = N * dtype.itemsize > 256  # more than 128 halves: smaller tiles
    k = Forward(chunk=64, out_p=min(P, 64), state_p=min(P, 64), state_n=min(N, 128))
    if dtype.itemsize > 2:
        k = replace(k, out_p=min(P, 32), out_stages=1, state_n=min(N, 64), state_stages=2)
    if wide:
        k = replace(k, chunk=32 if N * dtype.itemsize > 512 else 64, out_p=min(P, 32), state_n=64, out_stages=1)
        k = replace(k, state_stages=2)
    if device.capability < (9, 0):
        k = replace(k, out_stages=min(k.out_stages, 2), state_stages=2)
    programs = heads * max(1, P // k.out_p)
    segments = max(1, round(10 * device.processors / programs))
    chunks = chunks_of_64 * 64 // k.chunk
    return replace(k, segments=min(segments, max(1, chunks // 4)))


def hopper_config(units: int, shared_bytes: int, device: Device) -> Hopper:
    """For ``units`` pairs of heads that read ``shared_bytes`` of B, C and scores.

    As many pieces as processors keep them all at work. Where what the units share does not stay in the cache, whole
    numbers of pieces a unit keep them at the same place of the sequence, so that it is read once.
    """
    pieces = device.processors
    aligned = pieces // units * units
    if shared_bytes > device.cache // 2 and aligned >= 0.75 * pieces:
        pieces = aligned
    # Pieces that end a unit need no state. More programs than processors only cost: each fills its pipeline first.
    working = pieces - units if pieces > units else pieces
    parts = min(4, max(1, device.processors // working))
    # Measured: 2 % faster where pieces are short of processors, and not known to be elsewhere.
    return Hopper(pieces=pieces, state_parts=parts, out_registers=240 if parts > 1 else Hopper.out_registers)


def backward_config(P: int, N: int, dtype: torch.dtype, group_heads: int, device: Device) -> Backward:
    """``group_heads``: heads that share a group of B and C."""
    width = N * dtype.itemsize
    k = Backward(block_p=min(P, 64), walk_p=min(P, 64), walk_n=min(N, 128), group_p=min(P, 64), group_n=min(N, 128))
    k = replace(k, state_p=min(P, 64), state_n=min(N, 128))
    if P > 64 or dtype.itemsize > 2:
        k = replace(k, stages=1)
    if dtype.itemsize > 2:
        k = replace(k, block_p=min(P, 32), group_n=min(N, 64), group_stages=2, walk_n=min(N, 64), walk_stages=2)
        k = replace(k, state_n=min(N, 64), state_stages=2)
    if width > 256:
        k = replace(k, chunk=32, block_p=min(P, 32), state_n=min(N, 64), state_stages=2, group_stages=2, stages=1)
    if width > 512:
        k = replace(k, chunk=16, block_p=min(P, 32))
    if device.capability < (9, 0):
        # Products take their operands from registers there: less of everything at once, or ptxas gives up.
        k = replace(k, block_p=min(k.block_p, 32), warps=8, stages=1, walk_stages=2, state_stages=2)
        if dtype.itemsize > 2:
            k = replace(k, chunk=min(k.chunk, 32), walk_p=min(P, 32), walk_n=min(N, 32), state_n=min(N, 32))
            k = replace(k, group_p=min(P, 32), group_n=min(N, 32))
    runs, parts = -(-group_heads // k.heads), -(-group_heads // k.group_heads)
    return replace(k, heads=-(-group_heads // runs), group_heads=-(-group_heads // parts))
