"""The AscendC kernels of one shape: sources made from the templates of this folder, the plan of launches, build files.

The sources are compiled by CANN on an NPU machine. Here they are compiled by g++ against the host header of our tests,
which runs their arithmetic and holds their use of buffers ("host semantics"); nothing of CANN is part of this.
"""

from __future__ import annotations

import math
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCES = ("common.h", "chunk_scan.cpp", "state_update.cpp")
UB_BYTES = 192 * 1024
CHUNKS = (128, 64, 32, 16)
GONE = -111.0


@dataclass(frozen=True)
class Shape:
    """What the sources are made for. H heads, P head_dim, G groups, N d_state; Q tokens a chunk."""

    H: int
    P: int
    G: int
    N: int
    Q: int
    has_d: bool = True
    has_z: bool = True
    softplus: bool = True
    dt_min: float = 0.0
    dt_max: float = math.inf

    @staticmethod
    def choose(H: int, P: int, G: int, N: int, **options: Any) -> Shape:
        """With the longest chunk that fits.

        Raises:
            ValueError: no chunk fits, or the sizes are not whole fractals.
        """
        for Q in CHUNKS:
            shape = Shape(H, P, G, N, Q, **options)
            if shape.refusal() is None:
                return shape
        raise ValueError(shape.refusal())

    def refusal(self) -> str | None:
        """Why the templates do not take the shape (their static_asserts say the same), or None."""
        H, P, G, N, Q = self.H, self.P, self.G, self.N, self.Q
        if P % 16 or N % 16 or Q % 16:
            return f"head_dim {P}, d_state {N} and chunk {Q} have to be multiples of 16"
        if H % G:
            return f"{H} heads cannot share {G} groups evenly"
        if H * P > 65535 or G * N > 65535:
            return f"rows of {max(H * P, G * N)} elements are longer than a copy to fractals can step over"
        for name, bytes_ in self.unified_buffer().items():
            if bytes_ > UB_BYTES:
                return f"{name} needs {bytes_} bytes of unified buffer, there are {UB_BYTES}"
        for m, n, k in ((Q, Q, N), (Q, P, Q), (P, N, Q), (Q, P, N)):
            if 4 * max(m * k, k * n) > 64 * 1024 or 4 * m * n > 128 * 1024:
                return f"the product {m} x {n} x {k} overflows L0"
        return None

    @property
    def S(self) -> int:
        """Channels of a state that one unit of the decode step takes."""
        parts = (n for n in range(1, self.P + 1) if self.P % n == 0 and self.P // n % 16 == 0)
        return next((self.P // n for n in parts if 16 * self.P // n * self.N <= UB_BYTES * 3 // 4), 16)

    def unified_buffer(self) -> dict[str, int]:
        """Bytes that each vector kernel takes; the host header accounts for the same."""
        P, N, Q, S = self.P, self.N, self.Q, self.S
        return {
            "decay": 4 * (2 * Q + 2 * Q + 4 * Q + Q + 3 * Q + 64 + 16 * Q),
            "weights": 2 * (Q * Q * 4 + Q * P * 2 + 2 * Q * 4 + Q * Q * 2 + Q * P * 2) + 8 * Q * Q + 4 * Q * P + 8 * Q,
            "output": 2 * (8 * Q * P + 4 * Q) + 6 * Q * P + 8 * Q * P + 4 * (P + Q),
            "state_update": 16 * S * N + 2 * (2 * S + 2 * N) * 2 + 4 * S + 16 * (S + N) + 32 * S + 96,
        }  # fmt: skip

    def header(self) -> str:
        """shape.h."""
        largest = 3.0e38
        lines = [f"constexpr uint32_t {name} = {getattr(self, name)};" for name in ("H", "P", "G", "N", "Q", "S")]
        lines += [
            f"constexpr bool {name.upper()} = {str(getattr(self, name)).lower()};"
            for name in ("has_d", "has_z", "softplus")
        ]
        lines += [
            f"constexpr float {name} = {value!r}f;"
            for name, value in (("DT_MIN", float(self.dt_min)), ("DT_MAX", min(self.dt_max, largest)), ("GONE", GONE))
        ]
        body = "\n".join(lines)
        return (
            "// Made for one shape; see kernels/ascendc/emit.py.\n#ifndef LATENTSCAN_ASCENDC_SHAPE_H\n"
            f"#define LATENTSCAN_ASCENDC_SHAPE_H\n\n#include <cstdint>\n\nnamespace latentscan {{\n\n{body}\n\n"
            "}  // namespace latentscan\n\n#endif\n"
        )


@dataclass(frozen=True)
class Launch:
    """A kernel, the buffers that it is given in order (the tiling comes after them), and its units of work."""

    kernel: str
    core: str
    buffers: tuple[str, ...]
    units: int


@dataclass(frozen=True)
class Plan:
    """Buffers by name (shape, dtype) and launches in order; inputs are the caller's, outputs its results."""

    buffers: dict[str, tuple[tuple[int, ...], str]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    launches: tuple[Launch, ...]
    tiling: dict[str, int]

    def tiling_bytes(self) -> bytes:
        """The kernels' last argument."""
        return struct.pack(f"<{len(self.tiling)}q", *self.tiling.values())

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def chunk_scan_plan(s: Shape, batch: int, tokens: int) -> Plan:
    """The forward of the chunk scan. dt, x, z, B, C and starts are padded with zeros to whole chunks; y is not."""
    b, H, P, G, N, Q = batch, s.H, s.P, s.G, s.N, s.Q
    chunks = -(-tokens // Q)
    padded, units = chunks * Q, b * chunks * H
    f, h = "float32", "float16"
    buffers: dict[str, tuple[tuple[int, ...], str]] = {
        "dt": ((b, H, padded), f), "A": ((H,), f), "bias": ((H,), f), "starts": ((b, padded), f),
        "x": ((b, padded, H, P), h), "B": ((b, padded, G, N), h), "C": ((b, padded, G, N), h),
        "z": ((b, padded, H, P), h), "D": ((H, P), f), "start": ((b, H, P, N), f),
        "cum": ((b, H, chunks, Q), f), "step": ((b, H, chunks, Q), f), "scores": ((b, chunks, G, Q, Q), f),
        "weights": ((units, Q, Q), h), "scaled": ((units, Q, P), h), "inner": ((units, Q, P), f),
        "states": ((units, P, N), f), "entering": ((units, P, N), h), "outer": ((units, Q, P), f),
        "y": ((b, tokens, H, P), h), "last": ((b, H, P, N), f),
    }  # fmt: skip
    blocks = -(-P * N // 2048)
    launches = (
        Launch("latentscan_decay", "vector", ("dt", "A", "bias", "starts", "cum", "step"), units),
        Launch("latentscan_scores", "cube", ("C", "B", "scores"), b * chunks * G),
        Launch("latentscan_weights", "vector", ("scores", "x", "cum", "step", "weights", "scaled"), units),
        Launch("latentscan_inner", "cube", ("weights", "x", "inner"), units),
        Launch("latentscan_states", "cube", ("scaled", "B", "states"), units),
        Launch("latentscan_carry", "vector", ("states", "cum", "start", "entering", "last"), b * H * blocks),
        Launch("latentscan_entering", "cube", ("C", "entering", "outer"), units),
        Launch("latentscan_output", "vector", ("inner", "outer", "x", "z", "D", "cum", "y"), units),
    )
    tiling = {
        "batch": b, "tokens": tokens, "chunks": chunks, "x_batch": padded * H * P, "x_token": H * P,
        "bc_batch": padded * G * N, "bc_token": G * N, "z_batch": padded * H * P, "z_token": H * P,
    }  # fmt: skip
    inputs = ("dt", "A", "bias", "starts", "x", "B", "C", "z", "D", "start")
    return Plan(buffers, inputs, ("y", "last"), launches, tiling)


def state_update_plan(s: Shape, batch: int) -> Plan:
    """One decode step."""
    b, H, P, G, N = batch, s.H, s.P, s.G, s.N
    f, h = "float32", "float16"
    buffers: dict[str, tuple[tuple[int, ...], str]] = {
        "state": ((b, H, P, N), f), "x": ((b, H, P), h), "dt": ((b, H), f), "A": ((H,), f), "B": ((b, G, N), h),
        "C": ((b, G, N), h), "D": ((H, P), f), "z": ((b, H, P), h), "bias": ((H,), f), "new_state": ((b, H, P, N), f),
        "y": ((b, H, P), h),
    }  # fmt: skip
    tiling = dict.fromkeys(("tokens", "chunks", "x_batch", "x_token", "bc_batch", "bc_token", "z_batch", "z_token"), 1)
    names = tuple(buffers)
    launch = Launch("latentscan_state_update", "vector", names, b * H * (P // s.S))
    return Plan(buffers, names[:-2], names[-2:], (launch,), {"batch": b, **tiling})


def sources(shape: Shape) -> dict[str, str]:
    """File name -> text: the kernels of a shape, and what builds them on a machine with CANN.

    Raises:
        ValueError: the templates do not take the shape.
    """
    if reason := shape.refusal():
        raise ValueError(reason)
    files = {name: (HERE / name).read_text(encoding="utf-8") for name in SOURCES}
    return {**files, "shape.h": shape.header(), "CMakeLists.txt": CMAKE}


CMAKE = """# Builds the kernels into a library with CANN's AscendC tools. Never run where it was made, without CANN.
cmake_minimum_required(VERSION 3.16)
project(latentscan_ascendc)
set(SOC_VERSION "Ascend910B3" CACHE STRING "the NPU")
set(RUN_MODE "npu" CACHE STRING "as CANN's kernel CMake names it")
set(ASCEND_CANN_PACKAGE_PATH "$ENV{ASCEND_HOME_PATH}" CACHE PATH "CANN")
if(NOT EXISTS "${ASCEND_CANN_PACKAGE_PATH}")
  message(FATAL_ERROR "CANN is not found: source its set_env.sh, or set ASCEND_HOME_PATH")
endif()
foreach(place "compiler/tikcpp" "tools/tikcpp")
  if(EXISTS "${ASCEND_CANN_PACKAGE_PATH}/${place}/ascendc_kernel_cmake/ascendc.cmake")
    include("${ASCEND_CANN_PACKAGE_PATH}/${place}/ascendc_kernel_cmake/ascendc.cmake")
    break()
  endif()
endforeach()
if(NOT COMMAND ascendc_library)
  message(FATAL_ERROR "this CANN has no ascendc_kernel_cmake")
endif()
ascendc_library(latentscan_kernels SHARED chunk_scan.cpp state_update.cpp)
ascendc_include_directories(latentscan_kernels PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
"""
