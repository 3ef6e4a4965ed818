"""Named cases: our Ascend functions, run on the CPU from the vendor's IR, against fp64 by the definition.

An error is relative to the largest magnitude of the true result. A result is a sum of terms, each of which meets three
roundings to fp16 of at most 2^-11 (an input of a product, a state, the result); gradients meet twice as many. So the
tolerances are 4 and 8 times 2^-11; what is wrong moves a result by far more (see the tests' sabotage).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from latentscan.kernels.reference import attention, ssm, ssm_conv, ssm_norm
from latentscan.kernels.triton_ascend import latent_decode, launch, mixer
from latentscan.kernels.triton_ascend.chunk_scan import chunk_scan
from latentscan.kernels.triton_ascend.chunk_scan_backward import chunk_scan_backward

FORWARD_TOLERANCE = 4 * 2.0**-11
BACKWARD_TOLERANCE = 8 * 2.0**-11


@dataclass(frozen=True)
class Case:
    """A call and what it is compared with; ``most``: programs a launch may have, if fewer than the device allows."""

    name: str
    ours: Callable[..., Any]
    oracle: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = FORWARD_TOLERANCE
    most: int | None = None

    def errors(self) -> dict[str, float]:
        """Output (by place) -> relative error; runs the launches with whatever runner is set."""
        with _limited(self.most):
            ours = _tuple(self.ours(*self.arguments, **self.options))
        truth = _tuple(self.oracle(*map(_exact, self.arguments), **{k: _exact(v) for k, v in self.options.items()}))
        return {str(i): relative(a, b) for i, (a, b) in enumerate(zip(ours, truth, strict=True)) if b.numel()}


def relative(ours: Tensor, truth: Tensor) -> float:
    """The largest error, relative to the largest magnitude of the truth; infinite if a value is not finite."""
    if ours.shape != truth.shape or not bool(torch.isfinite(ours).all()):
        return float("inf")
    return float((ours.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-30))


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _exact(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@contextlib.contextmanager
def _limited(most: int | None) -> Iterator[None]:
    before, launch.MOST_PROGRAMS = launch.MOST_PROGRAMS, most or launch.MOST_PROGRAMS
    try:
        yield
    finally:
        launch.MOST_PROGRAMS = before


class _Draw:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).to(dtype)

    def half(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self(*shape, scale=scale, dtype=torch.float16)


def scan_case(
    name: str, b: int, L: int, H: int, G: int, P: int, N: int, *, D: str = "", z: bool = False, bias: bool = False,
    init: bool = False, packed: str = "", softplus: bool = False, limits: tuple[float, float] = (0.0, float("inf")),
    view: bool = False, backward: bool = False, most: int | None = None,
) -> Case:  # fmt: skip
    """A chunk scan.

    Args:
        D: "", "head" or "channel".
        packed: "", "seq_idx", "cu_seqlens", or "many": a hundred sequences of one token before a long one, with small
            steps, whose decays must not lose their bits.
        view: x is a slice.
    """
    draw = _Draw(len(name) + L)
    wide = draw.half(b, L, H, 2 * P)
    x = wide[..., :P] if view else wide[..., :P].contiguous()
    dt = draw(b, L, H, scale=0.5) if softplus else draw(b, L, H, scale=0.3).abs()
    B, C = (draw.half(b, L, G, N, scale=N**-0.5) for _ in range(2))
    seq_idx = cu_seqlens = None
    if packed == "seq_idx":
        seq_idx = torch.zeros(b, L, dtype=torch.int32)
        for row in range(b):
            seq_idx[row, L // 3 + row :] += 1
            seq_idx[row, L - 2 :] += 1
    elif packed == "many":
        seq_idx = torch.arange(L, dtype=torch.int32).clamp(max=100).expand(b, L).contiguous()
        dt = torch.full((b, L, H), 0.01)
    elif packed:
        cu_seqlens = torch.tensor([0, L // 4, L // 4 + 1, L], dtype=torch.int32)
    inputs = (
        x, dt, -draw(H).abs() * 2, B, C, {"": None, "head": draw(H), "channel": draw(H, P)}[D],
        draw.half(b, L, H, P) if z else None, draw(H) if bias else None, draw(b, H, P, N) if init else None, seq_idx,
        cu_seqlens,
    )  # fmt: skip
    options = {"chunk_size": 64, "dt_softplus": softplus, "dt_min": limits[0], "dt_max": limits[1]}
    if backward:
        grads = (draw.half(b, L, H, P), draw(b, H, P, N) if init else None)
        return Case(
            name, chunk_scan_backward, ssm.chunk_scan_backward, (*grads, *inputs), options, BACKWARD_TOLERANCE, most
        )
    return Case(name, chunk_scan, ssm.chunk_scan, inputs, options, FORWARD_TOLERANCE, most)


def _decode_case(name: str, b: int, H: int, T: int, C: int, R: int, padded: bool, most: int | None = None) -> Case:
    draw = _Draw(T)
    padding = None
    if padded:
        padding = torch.ones(b, T, dtype=torch.int32)
        padding[0, : T // 3] = 0
    tensors = (draw.half(b, H, 1, C), draw.half(b, H, 1, R), draw.half(b, T, C), draw.half(b, 1, T, R))

    def oracle(q: Tensor, r: Tensor, latent: Tensor, k: Tensor, pad: Tensor | None, scale: float) -> Tensor:
        return attention.latent_attention(q, r, latent, k, padding=pad, kind="causal", scale=scale)

    options = {"scale": (C + R) ** -0.5}
    return Case(name, latent_decode.latent_decode, oracle, (*tensors, padding), options, FORWARD_TOLERANCE, most)


def _mixer_cases() -> list[Case]:
    draw = _Draw(7)
    seq_idx = torch.zeros(2, 77, dtype=torch.int32)
    seq_idx[:, 30:] = 1
    seq_idx[1, 76:] = 2
    conv = (draw.half(2, 77, 200), draw(200, 4), draw(200), draw(2, 200, 3).half(), seq_idx)
    short = (draw.half(2, 2, 40), draw(40, 4), None, draw.half(2, 40, 3))
    norm = (draw.half(2, 5, 2560), draw.half(2, 5, 2560), draw(2560))
    b, H, P, N, G = 2, 4, 48, 96, 2
    step = (
        draw(b, H, P, N), draw.half(b, H, P), draw(b, H), -draw(H).abs(), draw.half(b, G, N), draw.half(b, G, N),
        draw(H, P), draw.half(b, H, P), draw(H),
    )  # fmt: skip
    model = (
        draw(b, H, P, N), draw.half(b, H, P), draw.half(b, H), -draw(H).abs(), draw.half(b, G, N), draw.half(b, G, N),
        draw.half(H), None, draw.half(H),
    )  # fmt: skip
    old = (
        draw(b, 24, 1, 16),
        draw.half(b, 24, 1),
        draw(b, 24),
        -draw(24, 16).abs(),
        draw.half(b, 1, 16),
        draw.half(b, 1, 16),
    )
    cases = [
        Case("conv, packed, state", mixer.causal_conv1d, ssm_conv.causal_conv1d, conv, {"activation": "silu"}),
        Case(
            "conv, shorter than its filter", mixer.causal_conv1d, ssm_conv.causal_conv1d, short, {"activation": "none"}
        ),
        Case("state update", mixer.state_update, ssm.state_update, step, {"dt_softplus": True, "dt_min": 0.01}),
        Case("state update, as in a model", mixer.state_update, ssm.state_update, model, {"dt_softplus": True}),
        Case("state update, Mamba-1", mixer.state_update, ssm.state_update, old, {"dt_softplus": True}, most=7),
    ]
    for before in (True, False):
        options = {"eps": 1e-5, "group_size": 1280, "norm_before_gate": before}
        name = f"gated norm, {'before' if before else 'after'} the gate"
        cases.append(Case(name, mixer.gated_rms_norm, ssm_norm.gated_rms_norm, norm, options))
    return cases


def cases() -> list[Case]:
    """Every case that the check runs."""
    everything = {"D": "channel", "z": True, "bias": True, "init": True, "packed": "seq_idx", "softplus": True}
    scans: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
        ("plain", (1, 128, 2, 1, 64, 128), {}),
        ("ragged", (2, 200, 4, 2, 64, 128), {"D": "head"}),
        ("one token", (2, 1, 2, 2, 32, 64), {"init": True, "z": True}),
        ("a chunk and one", (1, 129, 2, 1, 32, 32), {"init": True, "softplus": True}),
        ("all inputs", (2, 150, 4, 2, 32, 64), {**everything, "limits": (0.05, 1.5), "view": True}),
        ("padded tiles", (1, 70, 3, 1, 48, 96), {**everything, "packed": "cu_seqlens"}),
        ("many sequences", (2, 200, 4, 2, 32, 32), {"packed": "many", "init": True}),
        ("launches of 7", (1, 150, 4, 1, 32, 32), {"init": True, "most": 7}),
    ]
    made = [
        scan_case(f"scan {way}, {name}", *sizes, **options, backward=way == "backward")
        for way in ("forward", "backward")
        for name, sizes, options in scans
    ]
    made += [
        _decode_case("latent decode, 16 heads 512 + 64", 2, 16, 300, 512, 64, True),
        _decode_case("latent decode, 5 heads 96 + 24", 3, 5, 77, 96, 24, False),
        _decode_case("latent decode, one key", 1, 3, 1, 128, 32, False),
        _decode_case("latent decode, launches of 7", 2, 20, 500, 64, 16, True, most=7),
    ]
    return made + _mixer_cases()
