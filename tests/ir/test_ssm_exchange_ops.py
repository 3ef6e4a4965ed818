"""The ops and the exchange of context parallelism's states: shards put together give the scan of the whole sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from latentscan.ir.ops import ssm, ssm_exchange, state_exchange
from latentscan.kernels.reference.ssm import chunk_scan_recurrence
from latentscan.kernels.reference.ssm_exchange import chunk_state, output_state

torch.set_num_threads(1)
B, L, H, P, G, N = 2, 7, 4, 3, 2, 5
SCAN = {"dt_softplus": True, "dt_min": 0.0, "dt_max": float("inf")}
SHAPES = {
    "chunk_state": ((B, L, H, P), (B, L, H), (H,), (B, L, G, N), (H,)),
    "output_state": ((B, L, H, P), (B, L, G, N), (B, L, H), (H,), (H,)),
}


def inputs(name: str) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in SHAPES[name]]
    tensors[-2] = -tensors[-2].abs() if name == "output_state" else tensors[-2]
    packed = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 3, 3, 3, 3]], dtype=torch.int32)
    return [*tensors, packed]


@pytest.mark.parametrize("name", SHAPES)
def test_opcheck(name):
    for args in (inputs(name), inputs(name)[:4]):
        result = torch.library.opcheck(getattr(ssm_exchange, name).op, tuple(args), SCAN)
        assert set(result.values()) == {"SUCCESS"}


def test_output_state_is_the_gradient_of_the_entering_state():
    dy, C, dt, A, bias, packed = inputs("output_state")
    x, Bs = torch.randn(B, L, H, P, dtype=torch.float64), torch.randn(B, L, G, N, dtype=torch.float64)
    for seq_idx in (packed, None):
        h = torch.zeros(B, H, P, N, dtype=torch.float64, requires_grad=True)
        y, _ = chunk_scan_recurrence(x, dt, A, Bs, C, None, None, bias, h, seq_idx, **SCAN)
        (want,) = torch.autograd.grad(y, h, dy)
        assert (output_state(dy, C, dt, A, bias, seq_idx, **SCAN) - want).abs().max() < 1e-13


class Shards:
    """R ranks in one process, without torch.distributed: what each would have received is put together by hand."""

    def __init__(self, data, *, packed: bool | None = None) -> None:
        draw = data.draw
        self.shards, self.batch, self.groups = draw(st.integers(1, 5)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
        self.lengths = [draw(st.integers(1, 6)) for _ in range(self.shards)]
        heads = self.groups * draw(st.integers(1, 2))
        width, states = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        total = sum(self.lengths)
        g = torch.Generator().manual_seed(draw(st.integers(0, 99)))

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.x, self.dt = random(self.batch, total, heads, width), random(self.batch, total, heads)
        self.A, self.bias, self.D = -random(heads).exp(), random(heads), random(heads)
        self.B, self.C = (random(self.batch, total, self.groups, states) for _ in range(2))
        self.init = random(self.batch, heads, width, states)
        packed = draw(st.booleans()) if packed is None else packed
        borders = torch.rand(self.batch, total, generator=g) < 0.3
        self.seq_idx = borders.long().cumsum(1) if packed else None
        self.dy, self.dfinal = random(*self.x.shape), random(*self.init.shape)

    def leaves(self) -> list[torch.Tensor]:
        return [self.x, self.dt, self.A, self.B, self.C, self.D, self.bias, self.init]

    def whole(self, final: bool) -> list[torch.Tensor]:
        """y, final state, gradients, from the definition."""
        given = [t.clone().requires_grad_() for t in self.leaves()]
        x, dt, A, Bs, C, D, bias, init = given
        y, state = chunk_scan_recurrence(x, dt, A, Bs, C, D, None, bias, init, self.seq_idx, **SCAN)
        loss = (y * self.dy).sum() + ((state * self.dfinal).sum() if final else 0)
        return [y, state, *torch.autograd.grad(loss, given)]

    def parts(self) -> list[slice]:
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        return [slice(e - n, e) for e, n in zip(ends, self.lengths, strict=True)]


def on_a_rank(s: Shards, rank: int, algorithm: str, final: bool, group: str = "g") -> list[torch.Tensor]:
    """The graph's calls on one rank: its y, the state of the whole sequence, its gradients."""
    size, part = s.shards, s.parts()[rank]
    torch.set_num_threads(1)
    given = [t[:, part].clone() if t.dim() > 1 and t is not s.init else t.clone() for t in s.leaves()]
    given = [t.requires_grad_() for t in given]
    x, dt, A, Bs, C, D, bias, init = given
    idx = None if s.seq_idx is None else s.seq_idx[:, part]
    ids = None
    if s.seq_idx is not None:
        ids = torch.stack([torch.stack([s.seq_idx[:, p.start], s.seq_idx[:, p.stop - 1]], 1) for p in s.parts()])
    where = (algorithm, "cp", size, rank, group)
    detached = [t.detach() for t in given]
    state, decay = chunk_state(*[detached[i] for i in (0, 1, 2, 3, 6)], idx, **SCAN)
    own = state_exchange.pack_state(state, decay, ids, rank)
    started = state_exchange.state_start(own, *where)
    tokens = state_exchange.scan_enter(x, dt, A, Bs, C, D, bias, idx, *where, chunk_size=4, final=final, **SCAN)
    messages = state_exchange.state_wait(started, own, *where)
    entering = state_exchange.entering_state(messages, init, ids, x.shape[3], algorithm, rank)
    y, _ = ssm.chunk_scan.op(*detached[:6], None, detached[6], entering, idx, None, chunk_size=4, **SCAN)
    whole, total = state_exchange.whole_state(messages, own, init, x.shape[3], *where) if final else (None, None)
    decays = state_exchange.decays_of(messages, own, total, algorithm)
    y, end = state_exchange.scan_leave(
        y, whole, tokens, C, dt, A, bias, idx, decays, entering, init, ids, *where, **SCAN
    )
    loss = (y * s.dy[:, part]).sum()
    if final:  # each rank uses the state of the whole sequence, with a weight of its own
        loss = loss + (end * s.dfinal).sum() * (rank + 1) / sum(range(1, size + 1))
    return [y.detach(), end.detach(), *torch.autograd.grad(loss, given)]


def joined(s: Shards, found: list[list[torch.Tensor]], final: bool) -> list[torch.Tensor]:
    """What all ranks found as one: y, final state and gradients of the whole."""
    y = torch.cat([f[0] for f in found], 1)
    final_state = found[-1][1]
    assert not final or all(torch.allclose(f[1], final_state, rtol=1e-12, atol=1e-12) for f in found)
    grads = []
    for i, leaf in enumerate(s.leaves()):
        parts = [f[2 + i] for f in found]
        grads.append(torch.cat(parts, 1) if leaf.dim() > 1 and leaf is not s.init else sum(parts))
    return [y, final_state, *grads]


def simulated(s: Shards, algorithm: str, final: bool, monkeypatch) -> list[torch.Tensor]:
    """The graph's calls on every rank in lock-step: threads of which each collective waits for the others' parts."""
    import threading

    size, barrier, board = s.shards, threading.Barrier(s.shards), {}
    local = threading.local()

    def meet(value: torch.Tensor) -> list[torch.Tensor]:
        board[local.rank] = value.detach().clone()
        barrier.wait(timeout=60)
        every = [board[r] for r in range(size)]
        barrier.wait(timeout=60)
        return every

    class Ops:
        wait_tensor = staticmethod(lambda x: x)
        all_gather_into_tensor = staticmethod(lambda x, n, g: torch.cat(meet(x)))
        all_reduce = staticmethod(lambda x, op, g: sum(meet(x)))
        reduce_scatter_tensor = staticmethod(lambda x, op, n, g: sum(meet(x)).chunk(n)[local.rank])

    monkeypatch.setattr(state_exchange, "_OPS", Ops)
    monkeypatch.setattr(
        state_exchange, "ring", lambda x, step, n, rank, g: meet(x)[(rank - step) % n].reshape(-1).clone()
    )
    results: dict[int, list[torch.Tensor]] = {}

    failures: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            local.rank = rank
            results[rank] = on_a_rank(s, rank, algorithm, final)
        except BaseException as error:  # noqa: BLE001  shown by the test
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=guarded, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    if failures:
        raise failures[0]
    found = [results[r] for r in range(size)]
    return joined(s, found, final)


NAMES = ("y", "final", "x", "dt", "A", "B", "C", "D", "dt_bias", "init")


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_shards_with_exchanged_states_give_the_scan_of_the_whole_and_its_gradients(data):
    """Both algorithms, any number of ranks, packing, initial state, and a final state that every rank uses (MATH 6)."""
    s, final = Shards(data), data.draw(st.booleans())
    algorithm = data.draw(st.sampled_from(state_exchange.ALGORITHMS)) if s.shards > 1 else "all-gather"
    with pytest.MonkeyPatch.context() as patch:
        got = simulated(s, algorithm, final, patch)
    for name, mine, want in zip(NAMES, got, s.whole(final), strict=True):
        if name != "final" or final:
            # fp64 sums over at most 30 tokens
            assert (mine - want).abs().max() <= 1e-11 * (1 + want.abs().max()), (name, algorithm, s.shards)


@pytest.mark.parametrize("algorithm", state_exchange.ALGORITHMS)
def test_a_final_state_whose_gradient_stays_on_its_own_rank_is_seen(algorithm, monkeypatch):
    """Leaving the gradient of the whole sequence's state to the last rank is the known mistake: it must show."""

    class Fixed:
        def __init__(self) -> None:
            self.values = iter([4, 2, 1, 3, 3, 3, 3, 1, 2, 3, 7])

        def draw(self, strategy):
            return next(self.values)

    s = Shards(Fixed(), packed=False)
    right = simulated(s, algorithm, True, monkeypatch)
    want = s.whole(True)
    assert max(float((a - b).abs().max()) for a, b in zip(right, want, strict=True)) < 1e-11

    kept = state_exchange._Leave.backward
    dropping = staticmethod(
        lambda ctx, dy, dfinal: kept(ctx, dy, dfinal * (ctx.where["rank"] == ctx.where["size"] - 1))
    )
    monkeypatch.setattr(state_exchange._Leave, "backward", dropping)
    wrong = simulated(s, algorithm, True, monkeypatch)
    assert max(float((a - b).abs().max()) for a, b in zip(wrong, want, strict=True)) > 1e-2


def test_the_algorithm_with_fewer_states_is_chosen():
    chosen = {size: state_exchange.cheaper(size) for size in (2, 3, 4, 5, 8, 64)}
    assert chosen == {2: "all-gather", 3: "all-gather", 4: "log-scan", 5: "log-scan", 8: "log-scan", 64: "log-scan"}
    assert [state_exchange.steps_of(n) for n in (2, 3, 4, 5, 8, 9, 64)] == [1, 2, 2, 3, 3, 4, 6]
