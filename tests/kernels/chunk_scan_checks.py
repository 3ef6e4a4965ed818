"""Inputs and fp64 comparison of the chunk scan's kernels, for the interpreter here and for tests/device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from latentscan.kernels.reference import ssm
from latentscan.kernels.triton import chunk_scan as ours
from latentscan.kernels.triton.chunk_configs import Backward, Forward, Hopper

NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "init_state")


@dataclass(frozen=True)
class Case:
    """One comparison. ``shape`` b, L, H, P, G, N; a config of None is the shipped choice.

    Attributes:
        absent: names of inputs that are None. channels: D per channel. extreme: A and dt over their whole range.
        packed: None, "seq_idx" or a tuple that is cu_seqlens. strided: x, z, B, C, dt are views of one line.
        options: more of the op's options.
    """

    shape: tuple[int, int, int, int, int, int]
    dtype: torch.dtype
    forward: Forward | Hopper | None = None
    backward: Backward | None = None
    absent: tuple[str, ...] = ()
    packed: str | tuple[int, ...] | None = None
    channels: bool = False
    strided: bool = False
    extreme: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0


def draw(case: Case, device: str) -> tuple[list[Tensor | None], dict[str, Any]]:
    """The inputs in the op's order and its other arguments, as a Mamba-2 layer sees them."""
    b, L, H, P, G, N = case.shape
    g = torch.Generator(device=device).manual_seed(case.seed)

    def randn(*s: int) -> Tensor:
        return torch.randn(*s, generator=g, device=device)

    if case.strided:
        widths = [H * P, H * P, G * N, G * N, H, 7 - (H + 7) % 8]
        z, x, B, C, dt, _ = randn(b, L, sum(widths)).to(case.dtype).split(widths, -1)
        z, x, B, C = z.unflatten(-1, (H, P)), x.unflatten(-1, (H, P)), B.unflatten(-1, (G, N)), C.unflatten(-1, (G, N))
    else:
        x, z, dt = (randn(*s).to(case.dtype) for s in ((b, L, H, P), (b, L, H, P), (b, L, H)))
        B, C = (randn(b, L, G, N).to(case.dtype) for _ in range(2))
    A, bias = -torch.exp(torch.rand(H, generator=g, device=device) * 2.7), randn(H) - 3
    if case.extreme:
        A, bias = -torch.exp(randn(H) * 8), randn(H) * 8
    D = randn(H, P) if case.channels else randn(H)
    values = dict(zip(NAMES, (x, dt, A, B, C, D, z, bias, randn(b, H, P, N)), strict=True))
    more: dict[str, Any] = {"chunk_size": 64, "dt_softplus": True, **dict(case.options)}
    if case.packed == "seq_idx":
        more["seq_idx"] = (torch.rand(b, L, generator=g, device=device) < 0.05).cumsum(1).int()
    elif case.packed is not None:
        more["cu_seqlens"] = torch.tensor(case.packed, device=device)
    return [None if n in case.absent else t for n, t in values.items()], more


def error(a: Tensor, b: Tensor) -> float:
    """Relative RMSE; absolute where nothing is expected. nan and inf stay visible."""
    return ((a.double() - b).norm() / (b.norm() if b.norm() > 0 else 1.0)).item()


class Poisoned:
    """New memory is full of NaN, so that what a kernel forgets to write is seen."""

    def __enter__(self) -> None:
        self.empty, self.empty_like = torch.empty, torch.empty_like

        def poison(t: Tensor) -> Tensor:
            return t.fill_(float("nan")) if t.is_floating_point() else t

        torch.empty = lambda *a, **k: poison(self.empty(*a, **k))  # type: ignore[assignment]
        torch.empty_like = lambda *a, **k: poison(self.empty_like(*a, **k))  # type: ignore[assignment]

    def __exit__(self, *_: Any) -> None:
        torch.empty, torch.empty_like = self.empty, self.empty_like  # type: ignore[assignment]


def errors(case: Case, device: str, *, repeat: bool = False, condition: bool = False) -> dict[str, float]:
    """Errors by name (y, state, dx, ddt, ...); ``floor`` is what rounding the exact y costs.

    Args:
        repeat: and whether a second backward gives other bits (``changed``) where a fixed order is asked for, whose
            errors then count as well.
        condition: and how far each exact gradient moves when x, B, C and dy move by half a unit in the last place
            (``floor dA``, ...): much for sums that nearly cancel, such as dA of a single head.
    """
    ins, more = draw(case, device)
    exact = [None if t is None else t.double() for t in ins]
    y0, state0 = ssm.chunk_scan(*exact, **more)
    g = torch.Generator(device=device).manual_seed(case.seed + 1)
    dy = torch.randn(y0.shape, generator=g, device=device).to(case.dtype)
    dstate = torch.randn(state0.shape, generator=g, device=device)
    grads0 = ssm.chunk_scan_backward(dy.double(), dstate.double(), *exact, **more)
    floors: dict[str, float] = {}
    if condition:
        half = torch.finfo(case.dtype).eps / 2
        moved = [
            t
            if n not in ("x", "B", "C") or t is None
            else t * (1 + half * torch.randn(t.shape, generator=g, device=device))
            for n, t in zip(NAMES, exact, strict=True)
        ]
        other = dy.double() * (1 + half * torch.randn(dy.shape, generator=g, device=device))
        grads1 = ssm.chunk_scan_backward(other, dstate.double(), *moved, **more)
        floors = {f"floor d{n}": error(a, b) for n, a, b in zip(NAMES, grads1, grads0, strict=True) if b.numel()}
    keep = {"keep_starts": True} if case.forward is None else {"config": case.forward}
    with Poisoned():
        y, state, *kept = ours.chunk_scan(*ins, **more, **keep)
        back: dict[str, Any] = {**more, "config": case.backward, "starts": kept[0] if kept else None}
        grads = ours.chunk_scan_backward(dy, dstate, *ins, **back)
        if repeat:
            torch.use_deterministic_algorithms(True)
            try:
                once, again = (ours.chunk_scan_backward(dy, dstate, *ins, **back) for _ in range(2))
            finally:
                torch.use_deterministic_algorithms(False)
    found = {**floors, "floor": error(y0.to(case.dtype), y0), "y": error(y, y0), "state": error(state, state0)}
    for name, ours_, exact_, like in zip(NAMES, grads, grads0, ins, strict=True):
        assert ours_.shape == exact_.shape, name
        if like is not None:
            assert ours_.dtype == like.dtype, name
            found[f"d{name}"] = error(ours_, exact_)
    assert y.dtype == case.dtype and state.dtype == torch.float32
    if repeat:
        found["changed"] = float(sum(not torch.equal(a, b) for a, b in zip(once, again, strict=True)))
        for name, ours_, exact_, like in zip(NAMES, once, grads0, ins, strict=True):
            if like is not None:
                found[f"d{name}"] = max(found[f"d{name}"], error(ours_, exact_))
    return found
