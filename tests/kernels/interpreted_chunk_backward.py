"""What surrounds the walks of the backward in Gluon, under Triton's interpreter; ``python -m ...`` prints JSON.

The walks themselves do not run there. They are stood in for by what their docstrings say, in fp64, so that segments,
pieces, kept states, flows across chunks and the sums are held against the definition; tests/device checks the walks.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are declared

import torch
from torch import Tensor

from latentscan.kernels.reference import ssm
from latentscan.kernels.triton import chunk_scan_backward_gluon as ours
from latentscan.kernels.triton import chunk_scan_backward_walks as walks
from latentscan.kernels.triton.chunk_common import Steps, launch, sequence_starts
from latentscan.kernels.triton.chunk_configs import HopperBackward
from latentscan.kernels.triton.chunk_tuning import warm_up
from latentscan.tests.kernels.chunk_scan_checks import NAMES, Case, draw, error

Q, P = 64, 64
FLOW = 1.0  # 0: a walk that loses what flows across chunks
CASES: dict[str, tuple[Case, HopperBackward]] = {
    "segments, ragged": (
        Case((1, 777, 2, 64, 1, 64), torch.float32, absent=("z",)), HopperBackward(pieces=5, segments=3, every=2),
    ),
    "slabs in dx": (
        Case((1, 1100, 4, 64, 2, 64), torch.float32, absent=("z",)), HopperBackward(workspace=1 << 18, every=2),
    ),
    "packed, parts": (
        Case((1, 500, 3, 64, 1, 64), torch.float32, absent=("z", "D"), packed=(0, 70, 400)),
        HopperBackward(pieces=3, segments=2, state_parts=2),
    ),
    "one segment": (
        Case((1, 777, 3, 64, 1, 64), torch.float32, absent=("z",)), HopperBackward(pieces=5),
    ),
    "rows, heads of 128": (
        Case((2, 256, 2, 128, 2, 64), torch.float32, absent=("z", "init_state")), HopperBackward(pieces=7, segments=1),
    ),
}  # fmt: skip


def plain(t: Any) -> Tensor:
    return t.base if isinstance(t, SimpleNamespace) else t


def begin_of(f: int, pieces: int, T: int) -> int:
    return (f * (T // 2) // pieces) * 2


class Walk:
    """What a launch of a walk sees: every unit's chunks with their tokens, in fp64."""

    def __init__(self, x: Any, dy: Any, B: Any, C: Any, vec: Any, sizes: tuple[int, ...]) -> None:
        (self.L, self.NC, self.G, self.UG, self.share, self.H, self.T, self.K, self.SC, self.first) = sizes[:10]
        self.x, self.dy, self.B, self.C = (plain(t) for t in (x, dy, B, C))
        self.vec = plain(vec)
        self.batch = self.x.shape[0]

    def chunk(self, t: Tensor, b: int, head: int, c: int) -> Tensor:
        row = t[b, c * Q : (c + 1) * Q, head].double()
        return torch.cat([row, row.new_zeros(Q - len(row), row.shape[1])])

    def decay(self, b: int, h: int, c: int) -> tuple[Tensor, Tensor]:
        split = self.H // self.vec.shape[1]
        cum, step = self.vec[b, h // split, c].double()
        return cum, step

    def added(self, b: int, h: int, c: int, reverse: bool) -> tuple[Tensor, float]:
        cum, step = self.decay(b, h, c)
        g = h // self.share
        if reverse:
            found = (self.chunk(self.dy, b, h, c) * torch.exp2(cum)[:, None]).T @ self.chunk(self.C, b, g, c)
        else:
            weight = torch.exp2(cum[-1] - cum) * step
            found = (self.chunk(self.x, b, h, c) * weight[:, None]).T @ self.chunk(self.B, b, g, c)
        return found, float(torch.exp2(cum[-1]))

    def unit(self, u: int) -> tuple[int, int, list[int]]:
        bg = u // self.UG
        h0 = bg % self.G * self.share + u % self.UG * 2
        return bg // self.G, bg % self.G, [h for h in (h0, h0 + 1) if h < (bg % self.G + 1) * self.share]


def ends(v: Any, M: Any, vec: Tensor, added: Tensor, decays: Tensor, *sizes: int, J: int, REV: bool, **_: Any) -> None:
    w = Walk(v, v, M, M, vec, sizes)
    for pid in range(w.K):
        f0, f1 = begin_of(pid, w.K, w.T), begin_of(pid + 1, w.K, w.T)
        u = (f1 - 1) // w.SC
        start, stop = max(f0 - u * w.SC, 0), f1 - u * w.SC
        if stop == w.SC:
            continue
        pairs = (stop - start) // 2
        for j in range(J):
            own = range(start + pairs * j // J * 2, start + pairs * (j + 1) // J * 2)
            b, _, heads = w.unit(u)
            for i, h in enumerate(heads):
                state, total = 0.0, 1.0
                for c in own:
                    more, decay = w.added(b, h, w.first + (w.SC - 1 - c if REV else c), REV)
                    state, total = state * decay + more, total * decay
                if len(own):
                    added[pid * J + j, i] = state
                    decays[pid * J + j, i] = max(float(torch.tensor(total).log2()), -1e4)


def pieces_of(w: Walk, starts: Tensor, begin: Tensor) -> Any:
    """(u, b, g, w, head, chunk of the walk, state or None) along every piece; a state where a piece or unit begins."""
    for pid in range(w.K):
        for f in range(f0 := begin_of(pid, w.K, w.T), begin_of(pid + 1, w.K, w.T)):
            u, c = f // w.SC, f % w.SC
            b, g, heads = w.unit(u)
            for i, h in enumerate(heads):
                state = begin[b, h] if c == 0 else starts[pid, i] if f == f0 else None
                yield u, b, g, h, c, None if state is None else state.double()


def walk(kernel: Any, *args: Any, **meta: Any) -> None:
    reverse = kernel is walks.pulls_kernel
    x, dy, B, C, slab = (plain(t) for t in args[:5])
    if reverse:
        kept, dx, vec, scores, starts, begin, final, D, pulled, known = (plain(t) for t in args[5:15])
        sizes, total = args[15:], slab
        scores = scores.view(x.shape[0], B.shape[2], -1, Q, Q)
    else:
        total, kept, vec, starts, begin, final, seen = (plain(t) for t in args[5:12])
        sizes = args[12:]
    w = Walk(x, dy, B, C, vec, sizes)
    R, split = meta["R"], meta["SPLIT"]
    if not (reverse and meta["ADD"]):
        slab.zero_()
    S: dict[int, Tensor] = {}
    causal = torch.ones(Q, Q).tril().bool()
    for u, b, g, h, c, state in pieces_of(w, starts, begin):
        if state is not None:
            S[h + b * w.H] = state
        state = S[h + b * w.H]
        chunk = w.first + (w.SC - 1 - c if reverse else c)
        at = chunk - w.first
        cum, step = w.decay(b, h, chunk)
        xt, dt = w.chunk(w.x, b, h, chunk), w.chunk(w.dy, b, h, chunk)
        Bt, Ct = w.chunk(w.B, b, g, chunk), w.chunk(w.C, b, g, chunk)
        e = torch.where(causal, torch.exp2((cum[:, None] - cum[None, :]).clamp(max=0)), 0.0)  # [reader, source]
        if not meta["ADD"]:
            rows = slab[u % w.UG * w.batch + b, at * Q : (at + 1) * Q, g]
        elif reverse or at % 2 == 0:
            rows = total[b, chunk * Q : (chunk + 1) * Q, g]
        else:
            rows = slab[u % w.UG * w.batch + b, at // 2 * Q : (at // 2 + 1) * Q, g]
        if reverse:
            out = torch.exp2(cum[-1] - cum)
            rows += ((xt * (out * step)[:, None]) @ state).to(rows.dtype)
            du = (Bt @ state.T) * out[:, None]
            made = (e.T * scores[b, g, chunk].double()) @ dt * step[:, None] + du * step[:, None]
            if meta["HAS_D"]:
                made = made + dt * D[h // split].double()
            tokens = slice(chunk * Q, min((chunk + 1) * Q, w.L))
            dx[b, tokens, h] = made[: max(0, tokens.stop - tokens.start)].to(dx.dtype)
            pulled[b, h, at * Q : (at + 1) * Q] = (du * xt).sum(1).float()
        else:
            if chunk % R == 0:
                kept[chunk // R * w.batch + b, h * P : (h + 1) * P, 0] = state
            into = torch.exp2(cum)
            rows += ((dt * into[:, None]) @ state).to(rows.dtype)
            seen[b, h, chunk * Q : (chunk + 1) * Q] = (((Ct @ state.T) * dt).sum(1) * into).float()
        more, decay = w.added(b, h, chunk, reverse)
        S[h + b * w.H] = state * decay + more
        if reverse and chunk % R == 0:
            h0 = kept[chunk // R * w.batch + b, h * P : (h + 1) * P, 0].double()
            known[b, h, chunk // R] = (h0 * S[h + b * w.H]).sum(1).float() * FLOW
        if c == w.SC - 1:
            final[b, h] = S[h + b * w.H].float()


def pairs(x: Any, dy: Any, vec: Any, scores: Tensor, flow: Tensor, *args: Any, SPLIT: int, **_: Any) -> None:
    joined, products, weights, L, H, G, NC, share, _, batch = args
    x, dy, vec = plain(x), plain(dy), plain(vec)
    weights.zero_()
    w = Walk(x, dy, x, x, vec, (L, NC, G, 0, share, H, 0, 0, NC, 0))
    causal = torch.ones(Q, Q).tril().bool()
    for b in range(batch):
        for h in range(H):
            for c in range(NC):
                cum, step = w.decay(b, h, c)
                e = torch.where(causal, torch.exp2((cum[:, None] - cum[None, :]).clamp(max=0)), 0.0)
                inner = (w.chunk(dy, b, h, c) @ w.chunk(x, b, h, c).T) * e  # [reader, source]
                both = inner * scores[b, h // share, c].double()
                across = both.tril(-1)
                at = slice(c * Q, (c + 1) * Q)
                flow[b, h, at] = ((across * step).sum(1) - across.sum(0) * step).float()
                joined[b, h, at] = both.sum(0).float()
                products[b, h, at] = inner.diagonal().float()
                weights[h % 2, b, h // share, c] += (inner * step).T.float()


ENDS: list[bool] = []  # launches of ends: whether of the walk back
FOUND: dict[str, Tensor] = {}  # the states before the pieces of the last walk forward


def stand_in(kernel: Any, grid: int, *args: Any, **meta: Any) -> None:
    if kernel is walks.ends_kernel:
        ENDS.append(meta["REV"])
        ends(*args, **meta)
    elif kernel is ours.pairs_kernel:
        pairs(*args, **meta)
    elif kernel in (walks.reads_kernel, walks.pulls_kernel):
        if kernel is walks.reads_kernel:
            FOUND["starts"] = args[8].clone()
        walk(kernel, *args, **meta)
    else:
        launch(kernel, grid, *args, **meta)


def errors(case: Case, k: HopperBackward, kept: Tensor | None = None) -> dict[str, float]:
    ins, more = draw(case, "cpu")
    x, dt, A, B, C, D, z, bias, init = ins
    g = torch.Generator().manual_seed(1)
    y0, state0 = ssm.chunk_scan(*[None if t is None else t.double() for t in ins], **more)
    dy, dstate = torch.randn(y0.shape, generator=g), torch.randn(state0.shape, generator=g)
    exact = ssm.chunk_scan_backward(
        dy.double(), dstate.double(), *[None if t is None else t.double() for t in ins], **more
    )
    starts = sequence_starts(more.get("seq_idx"), more.get("cu_seqlens"), *x.shape[:2])  # type: ignore[union-attr]
    steps = Steps(dt, A, bias, starts, True, 0.0, float("inf"))  # type: ignore[arg-type]
    found = ours.backward(dy, dstate, x, steps, B, C, D, z, init, k, kept)  # type: ignore[arg-type]
    return {
        n: error(a, b)
        for n, a, b in zip(NAMES, found, exact, strict=True)
        if a is not None and b.numel()
    }  # fmt: skip


def many_elements() -> float:
    """The first block of a segment of 2^31 elements."""
    one, out = torch.ones(1024), torch.zeros(1024)
    sizes = (1 << 21, 1 << 21, 1, 0, 1 << 21, 1024, 0)  # L, rows, batch, first, tokens, GN, PARTS
    ours.slabs_kernel[(1,)](one, one, out, *sizes, BLOCK=1024, Q=Q, ODD=True)
    return float(out.sum())


def main() -> None:
    ours.launch = stand_in  # type: ignore[assignment]
    ours.descriptor = lambda t, *_: SimpleNamespace(base=t)  # type: ignore[assignment,return-value]
    ours.TensorDescriptor = lambda t, *_: SimpleNamespace(base=t)  # type: ignore[assignment,misc]
    told = {}
    for name, (case, k) in CASES.items():
        told[name] = errors(case, k)
        told[f"{name}, in a fixed order"] = errors(case, replace(k, atomic=False))
    case, k = CASES["one segment"]
    told["one segment"] = errors(case, k)
    kept = torch.cat([FOUND["starts"], torch.full_like(FOUND["starts"], float("nan"))])  # with room for more pieces
    ENDS.clear()
    told["what was kept"] = errors(case, k, kept)
    told["ends without what was kept"] = {"forward": ENDS.count(False), "back": ENDS.count(True)}
    told["sabotage: what was kept is of others"] = errors(case, k, kept * 1.01)
    told["more elements than 32 bits count"] = {"written": many_elements()}
    ours.noise = lambda dtype: 2.0**-18  # as in bfloat16
    told["shipped"] = errors(*CASES["packed, parts"])
    sizes: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "lengths": (20, 1), "batch": 2}
    told["warm_up"] = {"calls": warm_up(2, 16, 1, 16, **sizes, z=True, initial=True, packed=True, backward=True)}
    global FLOW
    FLOW = 0.0
    told["sabotage: nothing flows across chunks"] = errors(*CASES["segments, ragged"])
    FLOW = 1.0
    counts = ours.counts_kernel
    ours.launch = lambda kernel, *a, **m: None if kernel is counts else stand_in(kernel, *a, **m)  # type: ignore[assignment]
    torch.empty = lambda *a, _empty=torch.empty, **m: _empty(*a, **m).zero_()  # type: ignore[assignment]
    told["sabotage: the flow is not counted on"] = errors(*CASES["segments, ragged"])
    print(json.dumps(told))


if __name__ == "__main__":
    main()
