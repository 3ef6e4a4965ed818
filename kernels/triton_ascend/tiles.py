"""Which tiles the kernels use on which chip: from what a tile needs of each memory, by arithmetic.

The coefficients are bytes an element of a tile while the most tiles are alive; where the vendor's compiler says what
an oversized kernel needs, they are its figures. ``python -m latentscan.tools.ascend_check`` has that compiler confirm
every choice that is made here.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True)
class Chip:
    """Bytes of each memory of one core: unified buffer (of a vector core), L1, and the cube's L0A, L0B and L0C."""

    name: str
    ub: int
    l1: int
    l0a: int
    l0b: int
    l0c: int


CHIPS = {
    "910B3": Chip("910B3", ub=192 * KIB, l1=512 * KIB, l0a=64 * KIB, l0b=64 * KIB, l0c=128 * KIB),
    "950": Chip("950", ub=248 * KIB, l1=512 * KIB, l0a=64 * KIB, l0b=64 * KIB, l0c=256 * KIB),
}

DEFAULT_CHIP = "910B3"  # where there is no NPU to ask

HEAD_DIMS = (32, 64, 128)  # tiles of head_dim; a smaller one is padded
D_STATES = (32, 64, 128, 256)  # tiles of d_state
CHUNKS = (256, 128, 64, 32)  # tried from the longest


@dataclass(frozen=True)
class Footprint:
    """Bytes of each memory that a kernel needs."""

    ub: int = 0
    l1: int = 0
    l0c: int = 0

    def excess(self, chip: Chip) -> str | None:
        """Which memory overflows, with the values; None if all fits."""
        for name in ("ub", "l1", "l0c"):
            need, there = getattr(self, name), getattr(chip, name)
            if need > there:
                return f"{name} needs {need // KIB} KiB, {chip.name} has {there // KIB}"
        return None


@dataclass(frozen=True)
class ChunkTiles:
    """Tiles of the chunk scan. chunk: tokens; head_dim, d_state: of a state; heads: of cumsum; pass_block: elements."""

    chunk: int
    head_dim: int = 64
    d_state: int = 128
    heads: int = 16
    pass_block: int = 4096

    def forward(self) -> dict[str, Footprint]:
        """What each kernel of the forward needs."""
        Q, P, N = self.chunk, self.head_dim, self.d_state
        vectors = 16 * Q
        return {
            # dt, the step, its softplus' terms and the sum: 8 fp32 tiles, doubled
            "cumsum": Footprint(ub=2 * 8 * 4 * Q * self.heads),
            "state": Footprint(ub=6 * Q * P + vectors, l1=4 * (Q * P + Q * N), l0c=4 * P * N),
            "pass": Footprint(ub=2 * 12 * self.pass_block),
            # 3 fp32 tiles of scores, which both vector cores of a cube share; x, z and the output
            "scan": Footprint(
                ub=max(12 * Q * Q // 2, 13 * Q * P) + vectors, l1=2 * (3 * Q * N + Q * Q + Q * P + P * N),
                l0c=4 * Q * max(Q, P),
            ),
        }  # fmt: skip

    def backward(self) -> dict[str, Footprint]:
        """What each kernel that the backward adds needs."""
        Q, P, N = self.chunk, self.head_dim, self.d_state
        vectors = 16 * Q
        return {
            "kept": Footprint(ub=2 * 12 * self.pass_block),
            # 8 tiles of pairs of tokens and 3.5 of token and channel are alive
            "token": Footprint(
                ub=32 * Q * Q + 14 * Q * P + vectors, l1=2 * (4 * Q * N + Q * Q + 3 * Q * P + 2 * P * N),
                l0c=4 * Q * max(Q, P),
            ),
            "pair": Footprint(ub=16 * Q * Q + vectors, l1=4 * 2 * Q * P, l0c=4 * Q * Q),
            "group": Footprint(
                ub=max(2 * Q * Q + 4 * Q * N, 6 * Q * P) + vectors, l1=4 * (Q * Q + Q * N + Q * P + P * N),
                l0c=4 * Q * N,
            ),
            "step": Footprint(ub=2 * 8 * 4 * Q * self.heads),
        }  # fmt: skip

    def excess(self, chip: Chip, *, backward: bool) -> str | None:
        """The first kernel that does not fit a chip, with the values."""
        needs = {**self.forward(), **(self.backward() if backward else {})}
        for name, need in needs.items():
            if reason := need.excess(chip):
                return f"{name}: {reason}"
        return None


def power(n: int) -> int:
    """The power of two, at least 16, that a tile of n has."""
    return max(16, 1 << (n - 1).bit_length())


def fitting(n: int, choices: tuple[int, ...]) -> int | None:
    """The smallest tile that holds n."""
    return next((choice for choice in choices if choice >= n), None)


def _choose(chip: Chip, P: int, N: int, backward: bool) -> ChunkTiles | None:
    for chunk in CHUNKS:
        # A longer chunk has fewer heads at once in the kernels that take one step after the other.
        tiles = ChunkTiles(chunk, P, N, heads=min(16, 2048 // chunk))
        if tiles.excess(chip, backward=backward) is None:
            return tiles
    return None


def _table(chip: Chip, backward: bool) -> dict[tuple[int, int], ChunkTiles]:
    made = {(P, N): _choose(chip, P, N, backward) for P in HEAD_DIMS for N in D_STATES}
    return {shape: tiles for shape, tiles in made.items() if tiles is not None}


# chip -> (tile of head_dim, tile of d_state) -> tiles: everything that is shipped, and that the check confirms
FORWARD = {name: _table(chip, False) for name, chip in CHIPS.items()}
BACKWARD = {name: _table(chip, True) for name, chip in CHIPS.items()}


def _look_up(table: dict[str, dict[tuple[int, int], ChunkTiles]], P: int, N: int, chip: str) -> ChunkTiles | None:
    shape = fitting(P, HEAD_DIMS), fitting(N, D_STATES)
    return table[chip].get(shape) if None not in shape else None  # type: ignore[arg-type]


def chunk_tiles(P: int, N: int, chip: str) -> ChunkTiles | None:
    """The forward's tiles for head_dim P and d_state N; None if none fits."""
    return _look_up(FORWARD, P, N, chip)


def backward_tiles(P: int, N: int, chip: str) -> ChunkTiles | None:
    """The backward's tiles; they have to serve the forward's kernels too, which make the states again."""
    return _look_up(BACKWARD, P, N, chip)


# --- the rest of a mixer ---------------------------------------------------------------------------------------------

CONV_TOKENS, CONV_CHANNELS = 32, 128  # fp32 tiles: input, past, product, sum, doubled: 128 KiB
NORM_BLOCK = 2048
UPDATE_CHANNELS = (64, 32, 16)


def update_tile(P: int, N: int, chip: str) -> int | None:
    """Channels of a state that one program of the decode step holds: state, its change and product, doubled."""
    wanted = power(P)
    return next((n for n in UPDATE_CHANNELS if n <= wanted and 24 * n * power(N) <= CHIPS[chip].ub), None)


# --- latent decode ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeTiles:
    """heads and keys of one step of the latent decode kernel, for a latent and a rotary part."""

    heads: int
    keys: int
    latent: int
    rope: int

    def footprint(self) -> Footprint:
        """What the kernel needs."""
        h, t, c, r = self.heads, self.keys, self.latent, self.rope
        # The keys come by way of the unified buffer, since they are masked: two buffers of them, sums and scores.
        return Footprint(
            ub=4 * t * (c + r) + 12 * h * c + 24 * h * t,
            l1=2 * (2 * t * (c + r) + h * (c + r) + h * t),
            l0c=4 * h * max(c, t),
        )


LATENTS = (64, 128, 256, 512)
ROPES = (16, 32, 64, 128)
DECODE = {
    name: {
        (c, r): next(
            (
                tiles
                for heads, keys in ((32, 128), (32, 64), (16, 128), (16, 64), (16, 32))
                if (tiles := DecodeTiles(heads, keys, c, r)).footprint().excess(chip) is None
            ),
            None,
        )
        for c in LATENTS
        for r in ROPES
    }
    for name, chip in CHIPS.items()
}


def decode_tiles(C: int, R: int, chip: str) -> DecodeTiles | None:
    """Tiles for a latent of C and R rotary features; None if none fits."""
    shape = fitting(C, LATENTS), fitting(R, ROPES)
    return DECODE[chip].get(shape) if None not in shape else None  # type: ignore[arg-type]
