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
