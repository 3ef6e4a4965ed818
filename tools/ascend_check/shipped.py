"""Every launch that the shipped tile choices lead to, nothing being run: what the vendor's compiler has to pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from latentscan.kernels.triton_ascend import latent_decode, mixer
from latentscan.kernels.triton_ascend.chunk_scan import chunk_scan
from latentscan.kernels.triton_ascend.chunk_scan_backward import chunk_scan_backward
from latentscan.kernels.triton_ascend.launch import Kernel
from latentscan.kernels.triton_ascend.mixer import WIDTHS
from latentscan.kernels.triton_ascend.tiles import BACKWARD, DECODE, FORWARD, ChunkTiles, decode_tiles
from latentscan.tools.ascend_check.execute import recorded
from latentscan.tools.ascend_check.toolchain import Call

HEADS, GROUPS, LENGTH = 8, 2, 600
# Sizes that reach every tile of the kernels whose tiles follow the sizes (a test holds that they do).
UPDATE_STATES = (*((P, N) for P in (16, 32, 64) for N in (16, 32, 64, 128, 256, 512)), (128, 128), (48, 96), (1, 16))
CONV_SHAPES = (*((D, W) for D in (16, 32, 64, 3328) for W in WIDTHS), (5376, 4), (96, 2))
NORM_SHAPES = ((5120, 5120), (4096, 512), (96, 96), *((4096, 1 << i) for i in range(4, 12) if i != 9))
SMALL_STATES = ((4, 4), (8, 4), (8, 8), (16, 8), (16, 16), (32, 16))  # whose pass takes a block of its own
SMALL_LATENTS = (16, 32)  # whose splits are joined by a block of its own


@dataclass(frozen=True)
class Shipped:
    """A compilation: the call, and the tile it comes from, in words."""

    call: Call
    tile: str


def _meta(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _scan(
    P: int, N: int, tiles: ChunkTiles, chip: str, backward: bool, dtype: torch.dtype, *, bare: bool = False,
    narrow: bool = False,
) -> list[Call]:  # fmt: skip
    """The launches of a scan with every optional input, or (bare) with none.

    narrow: dt, its bias and D have x's type, as in a model; else they are fp32.
    """
    x, B = _meta(2, LENGTH, HEADS, P, dtype=dtype), _meta(2, LENGTH, GROUPS, N, dtype=dtype)
    kind = dtype if narrow else torch.float32
    dt, A, bias = _meta(2, LENGTH, HEADS, dtype=kind), _meta(HEADS, dtype=torch.float32), _meta(HEADS, dtype=kind)
    state = _meta(2, HEADS, P, N, dtype=torch.float32)
    seq_idx = torch.zeros(2, LENGTH, dtype=torch.int32, device="meta")
    D = _meta(HEADS, dtype=dtype) if narrow else _meta(HEADS, P, dtype=torch.float32)
    options = {"chunk_size": 256, "dt_softplus": not bare, "chip": chip, "tiles": tiles}
    more = () if bare else (D, x, bias, state, seq_idx)
    with recorded() as launched:
        if backward:
            chunk_scan_backward(x, None if bare else state, x, dt, A, B, B, *more, **options)  # type: ignore[arg-type]
        else:
            chunk_scan(x, dt, A, B, B, *more, **options)  # type: ignore[arg-type]
    return [call for call, _ in launched]


def shipped(chip: str) -> list[Shipped]:
    """All of them for a chip, every tile with every kernel; every optional input is there, so nothing is left out."""
    found: dict[Shipped, None] = {}

    def add(calls: list[Call], tile: str) -> None:
        for call in calls:
            found[Shipped(call, tile or call.tile)] = None

    for backward, table in ((False, FORWARD), (True, BACKWARD)):
        for (P, N), tiles in table[chip].items():
            tile = f"P{P} N{N} chunk {tiles.chunk}"
            add(_scan(P, N, tiles, chip, backward, torch.float16), tile)
            if (P, N) == (64, 128):
                add(_scan(P, N, tiles, chip, backward, torch.bfloat16), f"{tile} bf16")
                add(_scan(P, N, tiles, chip, backward, torch.float16, bare=True), f"{tile} bare")
                add(_scan(P, N, tiles, chip, backward, torch.float16, narrow=True), f"{tile} narrow")
                add(_scan(P, N, tiles, chip, backward, torch.bfloat16, narrow=True), f"{tile} narrow bf16")
                add(_scan(P - 16, N - 32, tiles, chip, backward, torch.float16), f"{tile}, of P48 N96")
        for P, N in SMALL_STATES:
            calls = _scan(P, N, table[chip][32, 32], chip, backward, torch.float16)
            add([c for c in calls if c.kernel.name in ("pass_kernel", "kept_kernel")], f"of P{P} N{N}")
    for (C, R), decode in DECODE[chip].items():
        if decode is None:
            continue
        q, r = _meta(2, 40, 1, C), _meta(2, 40, 1, R)
        with recorded() as launched:
            padding = torch.ones(2, 900, dtype=torch.int32, device="meta")
            latent_decode.latent_decode(
                q, r, _meta(2, 900, C), _meta(2, 1, 900, R), padding, scale=1.0, chip=chip, tiles=decode
            )
        add([call for call, _ in launched], f"latent {C} rope {R} heads {decode.heads} keys {decode.keys}")
    for C in SMALL_LATENTS:
        small = decode_tiles(C, 16, chip)
        assert small is not None
        with recorded() as launched:
            latent_decode.latent_decode(
                _meta(2, 40, 1, C), _meta(2, 40, 1, 16), _meta(2, 900, C), _meta(2, 1, 900, 16), scale=1.0, chip=chip
            )
        add([call for call, _ in launched], f"latent {small.latent} rope 16, of {C}, bare")
    add(*_mixer(chip))
    return list(found)


def _mixer(chip: str) -> tuple[list[Call], str]:
    with recorded() as launched:
        for D, W in CONV_SHAPES:
            seq_idx = torch.zeros(2, 70, dtype=torch.int32, device="meta")
            weight, state = _meta(D, W), _meta(2, D, W - 1)
            mixer.causal_conv1d(_meta(2, 70, D), weight, _meta(D), state, seq_idx, activation="silu")
        mixer.causal_conv1d(_meta(2, 70, 3328), _meta(3328, 4))
        x = _meta(2, 3, 5120)
        mixer.gated_rms_norm(x, None, _meta(5120), eps=1e-5, group_size=5120, norm_before_gate=False)
        for dtype in (torch.bfloat16, torch.float32):
            x = _meta(2, 3, 5120, dtype=dtype)
            mixer.gated_rms_norm(x, x, _meta(5120, dtype=dtype), eps=1e-5, group_size=5120, norm_before_gate=False)
            weight = _meta(3328, 4, dtype=dtype)
            mixer.causal_conv1d(_meta(2, 70, 3328, dtype=dtype), weight, weight[:, 0], activation="silu")
        for D, size in NORM_SHAPES:
            for before in (False, True):
                x = _meta(2, 3, D)
                mixer.gated_rms_norm(x, x, _meta(D), eps=1e-5, group_size=size, norm_before_gate=before)
        for P, N in UPDATE_STATES:
            x, A = _meta(2, HEADS, P), _meta(HEADS, N, dtype=torch.float32)
            state, bias = _meta(2, HEADS, P, N, dtype=torch.float32), _meta(HEADS, dtype=torch.float32)
            B = _meta(2, GROUPS, N)
            if (P, N) == (64, 128):  # as in a model, and with nothing optional
                half = _meta(HEADS)
                mixer.state_update(
                    state, x, _meta(2, HEADS), A[:, 0], B, B, half, None, half, dt_softplus=True, chip=chip
                )
                mixer.state_update(state.half(), x, _meta(2, HEADS), A[:, 0], B, B, chip=chip)
            mixer.state_update(
                state, x, _meta(2, HEADS), A, B, B, _meta(HEADS, P), x, bias, dt_softplus=True, chip=chip
            )
    return [call for call, _ in launched], ""


@dataclass(frozen=True)
class Control:
    """A kernel whose verdict is known. ``reason``: what the compiler has to say; empty if it has to fit."""

    name: str
    call: Call
    reason: str


def controls() -> list[Control]:
    """Kernels for the 910B3 that must fail, and beside each one that must pass: the check of the check."""
    tiles = ChunkTiles(256, 64, 128)
    (long,) = [c for c in _scan(64, 128, tiles, "910B3", False, torch.float16) if c.kernel.name == "scan_kernel"]
    tiles = ChunkTiles(128, 64, 128)
    (short,) = [c for c in _scan(64, 128, tiles, "910B3", False, torch.float16) if c.kernel.name == "scan_kernel"]
    return [
        Control("scan with chunks of 256", long, "cc overflow, requires 2097152 bits while 1048576 bits"),
        Control("scan with chunks of 128", short, ""),
        Control("fused kernel, strided dt", _fused(True), "ub overflow"),
        Control("fused kernel, contiguous dt", _fused(False), ""),
    ]


def _fused(strided: bool) -> Call:
    half, single = _meta(1), _meta(1, dtype=torch.float32)
    return Call.of(
        Kernel("control_kernels", "fused_kernel"),
        {
            "x": half, "dt": single, "A": single, "B": half, "C": half, "start": single, "y": single, "state": single,
            "first": 0, "L": LENGTH, "H": HEADS, "NC": 10, "Q": 64, "P": 64, "N": 128, "STRIDED": strided,
        },
    )  # fmt: skip
