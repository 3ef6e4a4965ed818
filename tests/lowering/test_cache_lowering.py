"""cache_append becomes a write into an arena and a slice: same values, eager and under Inductor, whatever is stored."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed

from latentscan.ir.arena import Arena, Layout, arena_of, make_token, token_length
from latentscan.ir.errors import CacheError
from latentscan.ir.ops.cache import ARENA_WRITE, CACHE_APPEND
from latentscan.lowering.cache import ArenaBinder, is_append, lower_cache_appends


class Layer:
    """The attention part of a cache layer."""

    def __init__(self, arena: Arena | None = None) -> None:
        self.arena = arena or Arena()
        self.token = make_token(self.arena, 0)

    def update(self, *tensors: torch.Tensor, seq_dim: int = 2) -> list[torch.Tensor]:
        full, self.token = torch.ops.latentscan.cache_append(self.token, list(tensors), [seq_dim] * len(tensors))
        return full


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph: Dynamo reads the original's placeholders after the backend returns."""
    graph, seen = fx.Graph(), {}
    out = graph.graph_copy(gm.graph, seen)
    graph.output(out)
    for old, new in seen.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return fx.GraphModule(gm, graph)


class Backend:
    """Lowers the appends, then runs the graph as it is, through AOTAutograd, or compiled by Inductor."""

    def __init__(self, inner: str = "eager", before=None, after=None) -> None:
        self.inner, self.before, self.after = inner, before, after
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> ArenaBinder:
        gm = copied(gm)
        if self.before:
            self.before(gm)
        records = lower_cache_appends(gm)
        if self.after:
            self.after(gm)
        self.graphs.append(gm)
        inputs = [*example_inputs, *(r.example for r in records)]
        if self.inner == "inductor":
            from torch._inductor.compile_fx import compile_fx

            return ArenaBinder(compile_fx(gm, inputs), records)
        if self.inner == "aot":
            return ArenaBinder(aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward))(gm, inputs), records)
        return ArenaBinder(gm.forward, records)


def compiled(function, inner: str = "eager", **hooks):
    backend = Backend(inner, **hooks)
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=True), backend


@pytest.fixture(autouse=True)
def no_grad(request):
    with torch.set_grad_enabled("grad" in request.node.name):
        yield


X = torch.arange(2 * 3 * 200 * 4, dtype=torch.float32).reshape(2, 3, 200, 4).sin()
INNER = pytest.mark.parametrize("inner", ["eager", "inductor"])


# -- the op as it stands -------------------------------------------------------------------------------------------


def test_the_op_itself_is_correct_and_returns_copies():
    layer = Layer()
    first, _ = layer.update(X[:, :, :5], 2 * X[:, :, :5])
    k, v = layer.update(X[:, :, 5:6], 2 * X[:, :, 5:6])
    assert torch.equal(k, X[:, :, :6])
    assert torch.equal(v, 2 * X[:, :, :6])
    k.zero_()
    first.zero_()
    assert torch.equal(layer.arena.prefix(0), X[:, :, :6])
    assert token_length(layer.token) == 6
    assert layer.token.stride() == (0,)


@pytest.mark.parametrize(("past", "seq_dim"), [(0, 2), (3, 2), (3, 1)])
def test_opcheck_append(past, seq_dim):
    arena = Arena()
    x = X[:, :, :4].contiguous() if seq_dim == 2 else X[:, 0, :4].contiguous()
    arena.ensure([Layout.of(x, seq_dim)], 0, past)
    arena.prefix(0).zero_()
    torch.library.opcheck(CACHE_APPEND.op, (make_token(arena, past), [x], [seq_dim]))


def test_opcheck_write():
    torch.library.opcheck(ARENA_WRITE.op, (torch.zeros(2, 3, 9, 4), 5, X[:, :, :4].contiguous()), {"seq_dim": 2})


def test_unequal_lengths_are_refused():
    with pytest.raises(CacheError, match="different lengths"):
        Layer().update(X[:, :, :5], X[:, :, :4])


# -- lowered -------------------------------------------------------------------------------------------------------


@INNER
def test_steps_of_every_size_and_a_growing_arena(inner):
    layer = Layer()

    def f(layer, x):
        k, v = layer.update(x * 1, x * 2)
        return (k + v).sum(-1), k.sin()

    run, backend = compiled(f, inner)
    done = 0
    for step in (5, 1, 1, 3, 1, 60, 1, 1, 70, 1):  # crosses capacities 64 and 128
        total, sine = run(layer, X[:, :, done : done + step])
        done += step
        torch.testing.assert_close(total, 3 * X[:, :, :done].sum(-1), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(sine, X[:, :, :done].sin())
        assert (token_length(layer.token), layer.arena.length) == (done, done)
        assert layer.token.stride() == (0,)
    assert layer.arena.capacity == 256
    assert len(backend.graphs) == 3  # prefill, one token, a chunk
    assert not any(is_append(n) for g in backend.graphs for n in g.graph.nodes)


@INNER
def test_an_unused_append_is_executed(inner):
    layer = Layer()

    def f(layer, x):
        layer.update(x * 1)
        return x + 1

    run, _ = compiled(f, inner)
    for a, b in ((0, 5), (5, 6), (6, 7)):
        run(layer, X[:, :, a:b])
    assert torch.equal(layer.arena.prefix(0), X[:, :, :7])


@INNER
def test_a_recomputed_append_changes_nothing(inner):
    layer = Layer()

    def f(layer, x):
        token = layer.token
        (k,) = layer.update(x * 1)
        layer.token = token
        (again,) = layer.update(x * 1)
        return (k * again).sum(-1)

    run, _ = compiled(f, inner)
    for a, b in ((0, 5), (5, 6), (6, 7)):
        out = run(layer, X[:, :, a:b])
        torch.testing.assert_close(out, X[:, :, :b].square().sum(-1))
    assert layer.arena.length == 7


def test_the_same_step_twice_writes_the_same_positions():
    layer = Layer()
    run, _ = compiled(lambda layer, x: layer.update(x * 1)[0] + 0)
    run(layer, X[:, :, :5])
    before = layer.token
    first = run(layer, X[:, :, 5:6])
    layer.token = before
    assert torch.equal(run(layer, X[:, :, 5:6]), first)
    assert layer.arena.length == 6


def test_inductor_writes_in_place():
    from torch._inductor.utils import run_and_get_code

    layer = Layer()
    run, _ = compiled(lambda layer, x: layer.update(x * 1)[0].sum(), "inductor")
    run(layer, X[:, :, :5])
    _, (code,) = run_and_get_code(run, layer, X[:, :, 5:6])
    body = code[code.index("def call(") : code.index("return (", code.index("def call("))]
    assert body.count("latentscan.arena_write.default(arg") == 1
    sizes = [line for line in body.splitlines() if "empty_strided" in line]
    assert not any("s35" in line or "1 + s" in line for line in sizes), sizes  # no buffer of the cache's length


def test_two_appends_to_one_layer_follow_each_other():
    layer = Layer()

    def f(layer, x):
        (a,) = layer.update(x * 1)
        (b,) = layer.update(x * 2)
        return a.sum(2), b.sum(2)

    run, _ = compiled(f)
    want = X[:, :, :0]
    for a, b in ((0, 5), (5, 6)):
        first, second = run(layer, X[:, :, a:b])
        torch.testing.assert_close(first, torch.cat([want, X[:, :, a:b]], 2).sum(2))
        want = torch.cat([want, X[:, :, a:b], 2 * X[:, :, a:b]], 2)
        torch.testing.assert_close(second, want.sum(2))
    assert torch.equal(layer.arena.prefix(0), want)


def called(graph: fx.Graph, mode, target, *args) -> fx.Node:
    """A new node with its fake value."""
    new = (graph.call_method if isinstance(target, str) else graph.call_function)(target, args)
    values = fx.map_arg(args, lambda n: n.meta["example_value"])
    with mode:
        new.meta["example_value"] = (getattr(torch.Tensor, target) if isinstance(target, str) else target)(*values)
    return new


def cache_one_latent(gm: fx.GraphModule) -> None:
    """What a pass may do: store K and V as one ``[batch, seq, channels]`` tensor."""
    graph = gm.graph
    for node in [n for n in graph.nodes if is_append(n)]:
        token, (k, v), _ = node.args
        call = functools.partial(called, graph, k.meta["example_value"].fake_mode)

        with graph.inserting_before(node):
            flat = [call("flatten", call("transpose", t, 1, 2), 2) for t in (k, v)]
            latent = call(torch.cat, flat, -1)
            append = call(torch.ops.latentscan.cache_append.default, token, [latent], [1])
            full = call(operator.getitem, call(operator.getitem, append, 0), 0)
            halves = [call(operator.getitem, call("chunk", full, 2, -1), i) for i in (0, 1)]
            new = [call("transpose", call("unflatten", half, 2, (3, 4)), 1, 2) for half in halves]
            new_token = call(operator.getitem, append, 1)
        for user in list(node.users):
            if user.args[1] == 1:
                user.replace_all_uses_with(new_token)
            else:
                for item in list(user.users):
                    item.replace_all_uses_with(new[item.args[1]])
                    graph.erase_node(item)
            graph.erase_node(user)
        graph.erase_node(node)
    gm.recompile()


@INNER
def test_a_pass_decides_what_is_stored(inner):
    layer = Layer()

    def f(layer, x):
        k, v = layer.update(x * 1, x * 2)
        return (k - v).sum(-1)

    # Head sizes are static, as in a model.
    run = torch.compile(f, backend=Backend(inner, before=cache_one_latent), fullgraph=True)
    for a, b in ((0, 5), (5, 6), (6, 7)):
        torch.testing.assert_close(run(layer, X[:, :, a:b]), -X[:, :, :b].sum(-1), atol=1e-5, rtol=1e-5)
    assert layer.arena.layouts == (Layout((2, 24), 1, torch.float32, torch.device("cpu")),)
    assert layer.arena.bytes_held() == 2 * 7 * 24 * 4


def test_a_view_of_the_full_tensor_survives_the_arena_strides():
    layer = Layer()
    run, _ = compiled(lambda layer, x: layer.update(x * 1)[0].view(2, -1) * 2)
    run(layer, X[:, :, :5])
    assert torch.equal(run(layer, X[:, :, 5:6]), 2 * X[:, :, :6].reshape(2, -1))


def test_a_write_one_position_off_is_seen():
    """Sabotage: what the tests above compare does depend on the position."""

    def shift(gm):
        for node in gm.graph.nodes:
            if node.target is ARENA_WRITE.op and isinstance(node.args[1], fx.Node):
                with gm.graph.inserting_before(node):
                    node.args = (node.args[0], gm.graph.call_function(operator.sub, (node.args[1], 1)), node.args[2])
        gm.recompile()

    layer = Layer()
    run, _ = compiled(lambda layer, x: layer.update(x * 1)[0] + 0, after=shift)
    run(layer, X[:, :, :5])
    assert not torch.equal(run(layer, X[:, :, 5:6]), X[:, :, :6])


def test_gradients_of_a_first_call_flow_with_grad():
    layer, x = Layer(), X[:, :, :5].clone().requires_grad_()
    run, _ = compiled(lambda layer, x: layer.update(x * 3)[0].square().sum(), "aot")
    run(layer, x).backward()
    torch.testing.assert_close(x.grad, 18 * X[:, :, :5])
    assert torch.equal(layer.arena.prefix(0), 3 * X[:, :, :5])


# -- refusals ------------------------------------------------------------------------------------------------------


def test_gradients_through_cached_positions_are_refused_with_grad():
    layer = Layer()
    run, _ = compiled(lambda layer, x: layer.update(x * 3)[0].sum(), "aot")
    run(layer, X[:, :, :5])
    with pytest.raises(BackendCompilerFailed, match=r"gradients do not flow.*no_grad") as caught:
        run(layer, X[:, :, 5:6].clone().requires_grad_())
    assert isinstance(caught.value.inner_exception, CacheError)


def test_an_append_inside_a_checkpointed_region_is_refused_with_grad():
    from torch.utils.checkpoint import checkpoint

    layer = Layer()

    def f(layer, x):
        def inner(token, x):
            full, _ = torch.ops.latentscan.cache_append(token, [x * 1], [2])
            return full[0].sum()

        return checkpoint(inner, layer.token, x, use_reentrant=False)

    run, _ = compiled(f, "aot")
    with pytest.raises(BackendCompilerFailed, match="gradient checkpointing"):
        run(layer, X[:, :, :5].clone().requires_grad_())


def test_a_node_without_a_fake_value_is_refused_and_the_graph_is_left_alone():
    seen = []

    def drop(gm):
        seen.append(gm)
        for node in gm.graph.nodes:
            if node.target is operator.mul:
                node.meta.pop("example_value")

    run, _ = compiled(lambda layer, x: layer.update(x * 3)[0].sum(), before=drop)
    with pytest.raises(BackendCompilerFailed, match="has no fake value"):
        run(Layer(), X[:, :, :5])
    assert any(is_append(n) for n in seen[0].graph.nodes)


def test_different_things_in_one_layer_are_refused():
    def f(layer, x):
        token = layer.token
        layer.update(x * 1)
        layer.token = token
        return layer.update(x[..., :2] * 1)[0].sum()

    run, _ = compiled(f)
    with pytest.raises(BackendCompilerFailed, match="different things"):
        run(Layer(), X[:, :, :5])


def test_a_computed_token_is_refused():
    run, _ = compiled(lambda token, x: torch.ops.latentscan.cache_append(token + 1, [x * 1], [2])[0][0].sum())
    with pytest.raises(BackendCompilerFailed, match="token is computed by"):
        run(Layer().token, X[:, :, :5])


def test_a_freed_arena_is_an_error():
    run, _ = compiled(lambda token, x: torch.ops.latentscan.cache_append(token, [x * 1], [2])[0][0].sum())
    layer = Layer()
    token = layer.token
    assert arena_of(token) is layer.arena
    del layer
    with pytest.raises(CacheError, match="does not exist"):
        run(token, X[:, :, :5])


def test_more_positions_than_allowed_are_an_error():
    layer = Layer(Arena(max_length=6, where="cache layer 3"))
    run, _ = compiled(lambda layer, x: layer.update(x * 1)[0].sum())
    run(layer, X[:, :, :5])
    assert layer.arena.capacity == 6
    run(layer, X[:, :, 5:6])
    with pytest.raises(CacheError, match=r"cache layer 3: 7 positions do not fit a cache of at most 6.*max_len"):
        run(layer, X[:, :, 6:7])
    assert token_length(layer.token) == 6


def test_another_form_than_what_is_held_is_an_error():
    layer = Layer()
    run, _ = compiled(lambda layer, x: layer.update(x * 1)[0].sum())
    run(layer, X[:, :, :5])
    with pytest.raises(CacheError, match=r"holds \[2, 3, 'seq', 4\] float32 on cpu but .* \[1, 3, 'seq', 4\]"):
        run(layer, X[:1, :, 5:6])


def test_a_token_that_says_more_than_is_held_is_an_error():
    layer = Layer()
    layer.token = make_token(layer.arena, 4)
    with pytest.raises(CacheError, match="reads 4 cached positions but only 0 are held"):
        layer.update(X[:, :, :1])
