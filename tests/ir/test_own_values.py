"""What our autograd functions give is never a view of what they made: before torch 2.13, AOTAutograd silently loses the
gradient of such a view (at a batch of one a ``contiguous()`` copies nothing, and there it is)."""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd

import latentscan.ir.ops.ssm
import latentscan.ir.ops.ssm_exchange  # noqa: F401  (both register)
from latentscan.ir.errors import RefusedError
from latentscan.ir.ops import collectives, exchange, sequence, state_exchange

H, P, N = 2, 4, 3
WEIGHT = torch.linspace(-1, 1, 4 * (H * P + 2 * N + H), dtype=torch.float64).sin().view(4, -1)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    if dist.is_initialized():
        pytest.skip("a group is there already")
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "s"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def scan(x, group):
    """The exchange around a scan, with what it reads made from ``x`` [b, L, D]."""
    rows = x.shape[0]
    wide, B_, C, dt = (x @ WEIGHT).split([H * P, N, N, H], -1)
    wide, B_, C, dt = wide.unflatten(-1, (H, P)), B_.unsqueeze(2), C.unsqueeze(2), dt.sigmoid()
    A, bias = -torch.ones(H, dtype=x.dtype), None
    where = ("all-gather", "cp", 1, 0, group)
    limits = {"dt_softplus": False, "dt_min": 0.0, "dt_max": float("inf")}
    tokens = state_exchange.scan_enter(wide, dt, A, B_, C, None, bias, None, *where, chunk_size=4, **limits)
    entering = torch.zeros(rows, H, P, N, dtype=x.dtype)
    parts = [t.detach() for t in (wide, dt, A, B_, C)]
    y, _ = torch.ops.latentscan.chunk_scan.default(
        *parts, None, None, bias, entering, None, None, chunk_size=4, **limits
    )
    decays = torch.ones(1, rows, H, dtype=x.dtype)
    return state_exchange.scan_leave(
        y, None, tokens, C, dt, A, bias, None, decays, entering, None, None, *where, **limits
    )[0]  # fmt: skip


CASES = {
    "copy_to": lambda x, g: collectives.copy_to(x, "a", g),
    "reduce_from": lambda x, g: collectives.reduce_from(x, "a", g),
    "gather_last": lambda x, g: collectives.gather_last(x, [x.shape[-1]], 0, "a", g),
    "share_rows": lambda x, g: collectives.share_rows(
        x, 1, x.shape[1], list(range(x.shape[1])), list(range(x.shape[1])), "a", g
    ),
    "split_gated_norm": lambda x, g: collectives.split_gated_norm(
        x, x.cos(), x.new_ones(x.shape[-1]), 0.1, 2, [0, 0, 1, 1], 2, False, "a", g
    ),
    "gather_tokens": lambda x, g: sequence.gather_tokens(x, 1, x.shape[1], 1, "a", g),
    "scatter_tokens": lambda x, g: sequence.scatter_tokens(x, 1, 1, "a", g),
    "unshard_tokens": lambda x, g: sequence.unshard_tokens(x, 1, x.shape[1], 1, 0, "a", g),
    "shard_tokens": lambda x, g: sequence.shard_tokens(x, 1, 1, 0, "a", g),
    "sum_partial": lambda x, g: exchange.sum_partial(x, "a", g),
    "to_heads": lambda x, g: exchange.to_heads(x[:, None], "a", 1, g),
    "to_tokens": lambda x, g: exchange.to_tokens(x[:, None], "a", 1, g),
    "gather_shared": lambda x, g: exchange.gather_shared(x, 1, "a", 1, g),
    "tail": lambda x, g: exchange.tail_wait(exchange.tail_start(x[:, -1:], "a", 1, 1, g), x, 1, None, "a", 1, 1, g),
    "fork_tail": lambda x, g: torch.cat([t @ WEIGHT for t in exchange.fork_tail(x, 1, "a")], 1),
    "scan_enter, scan_leave": scan,
}


def compiled(call):
    return torch.compile(call, backend=aot_autograd(fw_compiler=lambda m, _: m), fullgraph=True, dynamic=True)


@pytest.mark.parametrize("shape", [(1, 6, 4), (1, 1, 4), (3, 5, 4)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients_reach_what_is_before_it(name, shape, group):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g, dtype=torch.float64)

    def call(x):
        return CASES[name](x * 2, group)[:, :].sin().sum()

    found = []
    for run in (call, compiled(call)):
        torch._dynamo.reset()
        given = x.clone().requires_grad_()
        run(given).backward()
        found.append(given.grad)
    assert found[0].norm() > 1e-3
    torch.testing.assert_close(found[1], found[0])


def test_saved_tensors_are_read_once():
    """Under gradient checkpointing the second ``ctx.saved_tensors`` of a backward raises."""
    import latentscan

    root, found = Path(latentscan.__path__[0]), 0
    for folder in ("ir", "lowering", "kernels", "passes", "runtime"):
        for file in sorted((root / folder).rglob("*.py")):
            for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(function, ast.FunctionDef):
                    reads = [
                        n for n in ast.walk(function) if isinstance(n, ast.Attribute) and n.attr == "saved_tensors"
                    ]
                    inner = [f for f in ast.walk(function) if isinstance(f, ast.FunctionDef) and f is not function]
                    assert len(reads) <= max(1, len(inner)), f"{file.name}: {function.name}"
                    found += len(reads)
    assert found > 8


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_gradients_are_refused(name, group):
    """Torch's gradient of an all-reduce is one more: second-order gradients were too large by the number of ranks."""
    x = torch.randn((2, 6, 4), dtype=torch.float64, requires_grad=True)
    made = CASES[name](x * 2, group).sin().sum()
    with pytest.raises(RefusedError, match="create_graph=True"):
        torch.autograd.grad(made, x, create_graph=True)


@pytest.mark.parametrize("before", [False, True], ids=["gate-first", "norm-first"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_norm_over_ranks_keeps_its_inputs_alone_and_has_their_gradients(before, gated, group):
    """Groups of six channels, of which a rank may have any part: three groups of 4, 6 and 2 local channels."""
    g = torch.Generator().manual_seed(0)
    x, z = (torch.randn(2, 3, 12, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(12, generator=g, dtype=torch.float64, requires_grad=True)
    groups, size, eps = [0] * 4 + [1] * 6 + [2] * 2, 6, 0.1

    def norm(x, z, weight):
        gate = z if gated else None
        return collectives.split_gated_norm(x, gate, weight, eps, size, groups, 3, before, "a", group)

    def plain(x, z, weight):
        gate = torch.nn.functional.silu(z) if gated else torch.ones_like(z)
        value = x if before else x * gate
        found, at = [], 0
        for n in (4, 6, 2):
            part = value[..., at : at + n]
            found.append(part * torch.rsqrt(part.square().sum(-1, keepdim=True) / size + eps) * weight[at : at + n])
            at += n
        return torch.cat(found, -1) * (gate if before else 1)

    saved: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        got = norm(x, z, weight)
    want = plain(x, z, weight)
    torch.testing.assert_close(got, want)
    assert sum(t.numel() for t in saved) == (2 if gated else 1) * x.numel() + weight.numel() + 2 * 3 * 3
    dout = torch.randn(want.shape, generator=g, dtype=torch.float64)
    leaves = (x, z, weight) if gated else (x, weight)
    torch.testing.assert_close(torch.autograd.grad(got, leaves, dout), torch.autograd.grad(want, leaves, dout))
