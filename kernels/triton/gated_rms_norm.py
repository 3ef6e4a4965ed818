"""Gated RMS norm of a Mamba mixer as Triton kernels, forward and backward.

Shapes and meaning are those of :mod:`latentscan.kernels.reference.ssm_norm`; math in fp32. x and z may be slices of a
wider row. The backward recomputes the statistic from x (and z), and its sums over rows are made in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentscan.kernels.triton.mamba_common import (
    absent,
    cdiv,
    check_shape,
    check_tensors,
    on_device,
    power_of_two,
    sigmoid,
)

MAX_GROUP = 16384
WIDE = 4096  # channels of a block above which a processor has one or two
SMALLEST = 163 << 10  # bytes of shared memory a block: sm_80's, of the devices that are compiled for without one
_PROGRAMS = 512  # of the backward, each with its own sum for the weight


def block_sizes(
    group_size: int, *, backward: bool, row: int = 6, weight: int = 2, room: int = SMALLEST
) -> dict[str, int]:  # fmt: skip
    """Rows and channels of a block, and its warps, for a group of channels; how the backward brings rows.

    Measured on an H200: wide groups want more work a thread, for there are few blocks a processor. The backward wants
    the next two blocks under way; where these have no room, a row is read again from the cache (AGAIN) instead of
    waiting in registers for its sums, if it is wide.

    Args:
        row: bytes a channel of what the backward reads of a row. weight: of the weight. room: bytes of shared memory.
    """
    channels = power_of_two(group_size)
    rows = max(1, (1024 if backward else 2048) // channels)
    elements = rows * channels
    ahead = backward and 2 * elements * row + 2 * channels * weight + 256 <= room
    much = (ahead and channels >= WIDE) if backward else channels > WIDE
    found = {"BR": rows, "BD": channels, "num_warps": min(32, max(2, elements // (32 * (32 if much else 16))))}
    return {**found, "STAGES": 3 if ahead else 1, "AGAIN": not ahead and channels > WIDE} if backward else found


def room_of(device: torch.device) -> int:
    """Bytes of shared memory that a block may take there."""
    if device.type != "cuda":
        return SMALLEST
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 << 10))


@triton.jit
def _forward_kernel(
    x_ptr, z_ptr, w_ptr, y_ptr, rows, groups, group_size, sxr, sxd, szr, szd, eps,
    HAS_Z: tl.constexpr, NORM_FIRST: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    g = pid % groups
    r = ((pid // groups).to(tl.int64) * BR + tl.arange(0, BR))[:, None]
    j = tl.arange(0, BD)[None, :]
    c = g * group_size + j
    ok = (r < rows) & (j < group_size)
    c64 = c.to(tl.int64)
    value = tl.load(x_ptr + r * sxr + c64 * sxd, mask=ok, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + c, mask=j < group_size, other=0.0).to(tl.float32)
    gate = tl.zeros([BR, BD], tl.float32)
    if HAS_Z:
        z = tl.load(z_ptr + r * szr + c64 * szd, mask=ok, other=0.0).to(tl.float32)
        gate = z * sigmoid(z)
        if not NORM_FIRST:
            value = value * gate
    inverse = tl.rsqrt(tl.sum(value * value, 1) / group_size + eps)[:, None]
    out = value * inverse * w
    if HAS_Z:
        if NORM_FIRST:
            out = out * gate
    tl.store(y_ptr + r * (groups * group_size) + c64, out.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, z_ptr, w_ptr, dx_ptr, dz_ptr, part_ptr, rows, groups, group_size, programs,
    syr, syd, sxr, sxd, szr, szd, sor, sod, eps,
    HAS_Z: tl.constexpr, NORM_FIRST: tl.constexpr, AGAIN: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Every ``programs``-th block of rows of one group; part [programs, channels] takes the sums for the weight."""
    pid = tl.program_id(0)
    g = pid % groups
    k = pid // groups
    j = tl.arange(0, BD)[None, :]
    c = g * group_size + j
    c64 = c.to(tl.int64)
    width = groups * group_size
    total = tl.zeros([BR, BD], tl.float32)
    for block in tl.range(k, tl.cdiv(rows, BR), programs, num_stages=STAGES):
        r = (tl.cast(block, tl.int64) * BR + tl.arange(0, BR))[:, None]
        ok = (r < rows) & (j < group_size)
        x = tl.load(x_ptr + r * sxr + c64 * sxd, mask=ok, other=0.0, eviction_policy="evict_last").to(tl.float32)
        dout = tl.load(dy_ptr + r * syr + c64 * syd, mask=ok, other=0.0, eviction_policy="evict_last").to(tl.float32)
        w = tl.load(w_ptr + c, mask=j < group_size, other=0.0).to(tl.float32)  # again each time: registers are scarce
        z = x
        gate = x
        value = x
        through = dout * w
        if HAS_Z:
            z = tl.load(z_ptr + r * szr + c64 * szd, mask=ok, other=0.0, eviction_policy="evict_last").to(tl.float32)
            gate = sigmoid(z)
            if NORM_FIRST:
                through = through * (z * gate)
            else:
                value = x * (z * gate)
        inverse = tl.rsqrt(tl.sum(value * value, 1) / group_size + eps)[:, None]
        shared = tl.sum(through * value, 1)[:, None] * inverse / group_size
        if AGAIN:  # a wide row does not wait in registers for its sums, it is read again from the cache
            x = tl.load(x_ptr + r * sxr + c64 * sxd, mask=ok, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dout = tl.load(dy_ptr + r * syr + c64 * syd, mask=ok, other=0.0, eviction_policy="evict_first").to(
                tl.float32
            )
            w = tl.load(w_ptr + c, mask=j < group_size, other=0.0, eviction_policy="evict_last").to(tl.float32)
            value = x
            through = dout * w
            if HAS_Z:
                z = tl.load(
                    z_ptr + r * szr + c64 * szd, mask=ok, other=0.0, eviction_policy="evict_first"
                ).to(tl.float32)  # fmt: skip
                gate = sigmoid(z)
                if NORM_FIRST:
                    through = through * (z * gate)
                else:
                    value = x * (z * gate)
        unit = value * inverse
        dvalue = (through - unit * shared) * inverse
        slope = gate * (1.0 + z * (1.0 - gate))  # of silu
        if HAS_Z:
            if NORM_FIRST:
                dz = dout * unit * w * slope
                total += dout * (z * gate) * unit
            else:
                dz = dvalue * x * slope
                dvalue = dvalue * (z * gate)
                total += dout * unit
            tl.store(dz_ptr + r * sor + c64 * sod, dz.to(dz_ptr.dtype.element_ty), mask=ok)
        else:
            total += dout * unit
        tl.store(dx_ptr + r * width + c64, dvalue.to(dx_ptr.dtype.element_ty), mask=ok)
    sums = tl.sum(total, 0)
    only = tl.arange(0, BD)
    part = part_ptr + tl.cast(k, tl.int64) * width + g * group_size + only
    tl.store(part, sums, mask=only < group_size)


def _rows(t: Tensor) -> Tensor:
    """[..., D] as [rows, D], a view wherever one exists."""
    return t.reshape(-1, t.shape[-1])


def _check(x: Tensor, z: Tensor | None, weight: Tensor, group_size: int) -> int:
    """Number of groups. Raises ValueError: shapes, dtypes or sizes that do not fit."""
    check_tensors(x, z, weight)
    channels = x.shape[-1]
    if group_size < 1 or channels % group_size:
        raise ValueError(f"group_size {group_size} does not divide {channels} channels")
    if group_size > MAX_GROUP:
        raise ValueError(f"group_size {group_size} is above {MAX_GROUP}, which one block of these kernels holds")
    check_shape("z", z, x.shape)
    check_shape("weight", weight, (channels,))
    return channels // group_size


@on_device
def gated_rms_norm(
    x: Tensor, z: Tensor | None, weight: Tensor, *, eps: float, group_size: int, norm_before_gate: bool
) -> Tensor:
    """``weight · rms(x) · silu(z)`` with ``norm_before_gate``, else ``weight · rms(x · silu(z))``; one launch.

    Args:
        x: [..., D]. z: as x, or None for no gate. weight: [D]. eps: added to the mean square.
        group_size: channels that share one mean square; divides D, at most 16384.

    Returns:
        [..., D], contiguous, in x's dtype.

    Raises:
        ValueError: shapes, dtypes or sizes that do not fit.
    """
    groups = _check(x, z, weight, group_size)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    xs = _rows(x)
    zs = xs if z is None else _rows(z)
    rows = xs.shape[0]
    size = block_sizes(group_size, backward=False)
    if rows:
        _forward_kernel[(cdiv(rows, size["BR"]) * groups,)](
            xs, zs, weight.contiguous(), y, rows, groups, group_size, *xs.stride(), *zs.stride(), eps,
            HAS_Z=z is not None, NORM_FIRST=norm_before_gate, **size,
        )  # fmt: skip
    return y


@on_device
def gated_rms_norm_backward(
    dy: Tensor | None, x: Tensor, z: Tensor | None, weight: Tensor,
    *, eps: float, group_size: int, norm_before_gate: bool, out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients (dx, dz, dweight) of :func:`gated_rms_norm`; dz is empty without a gate.

    One launch, and a sum over [at most 512, D]. ``out``: where to write dz, [..., D] as a view that flattens to rows; a
    new contiguous tensor if None.
    """
    groups = _check(x, z, weight, group_size)
    check_shape("dy", dy, x.shape)
    if dy is None:
        dz = absent(x) if z is None else torch.zeros_like(z) if out is None else out.zero_()
        return torch.zeros_like(x), dz, torch.zeros_like(weight)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check_shape("out", out, x.shape)
    dz = absent(x) if z is None else torch.empty(z.shape, dtype=z.dtype, device=x.device) if out is None else out
    dzs = xs = _rows(x)
    if z is not None:
        dzs = dz.view(-1, dz.shape[-1])  # no copy: it is written
    xs, dys = _rows(x), _rows(dy)
    zs = xs if z is None else _rows(z)
    rows = xs.shape[0]
    row = x.element_size() + dy.element_size() + (0 if z is None else z.element_size())
    size = block_sizes(group_size, backward=True, row=row, weight=weight.element_size(), room=room_of(x.device))
    programs = max(1, min(_PROGRAMS // 2 if size["BD"] > WIDE else _PROGRAMS, cdiv(rows, size["BR"])))
    part = torch.empty((programs, x.shape[-1]), dtype=torch.float32, device=x.device)
    _backward_kernel[(programs * groups,)](
        dys, xs, zs, weight.contiguous(), dx, dzs, part, rows, groups, group_size, programs,
        *dys.stride(), *xs.stride(), *zs.stride(), *dzs.stride(), eps,
        HAS_Z=z is not None, NORM_FIRST=norm_before_gate, **size,
    )  # fmt: skip
    return dx, dz, part.sum(0).to(weight.dtype)
