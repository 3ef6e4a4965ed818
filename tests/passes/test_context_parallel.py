"""Context parallelism as a plan: what is exchanged, what is refused and why; and what each rank gets of a batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from latentscan.ir.capture import capture
from latentscan.ir.errors import MeshError, RefusedError
from latentscan.ir.graph import Graph
from latentscan.ir.mesh import Axis, Mesh, parse_mesh
from latentscan.ir.ops import exchange, state_exchange
from latentscan.ir.ops.collectives import copy_to
from latentscan.ir.ops.mask import as_many_tokens
from latentscan.ir.order import check_order, collectives
from latentscan.ir.tokens import follow_tokens
from latentscan.lowering import overlap
from latentscan.lowering.schedule import is_start, place_of, waits_of
from latentscan.passes.base import Context
from latentscan.passes.context_parallel import whole_graph
from latentscan.passes.pipeline import parse, run
from latentscan.runtime.batch import IGNORED, split_batch
from latentscan.runtime.cache import GraphCache, cache_argument
from latentscan.runtime.wrap import planning_graph
from latentscan.tests.models import build

BOTH = "mamba-context-parallel,ulysses"


def step(family: str, *, labels: bool = True, **overrides):
    """The graph of a training step on one rank's part of a batch."""
    model = build(family, num_hidden_layers=overrides.pop("num_hidden_layers", 1), **overrides).train()
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    batch = split_batch({"input_ids": ids, "labels": ids} if labels else {"input_ids": ids}, parse_mesh("cp=2"))
    return capture(model, inputs={**batch, "use_cache": False}, training=True)


def planned(graph, pipeline: str, mesh: Mesh):
    return run(graph, parse(pipeline), Context(mesh=mesh))


def test_every_layer_exchanges_tail_and_state_and_every_weight_is_summed_once():
    graph = step("mamba2", num_hidden_layers=2)
    weights = sum(w.value.requires_grad for w in graph.weights.values())
    program = planned(graph, "mamba-context-parallel", parse_mesh("cp=2"))
    rules = [s.rule for s in program.records[0].sites]
    assert rules == ["tail-exchange"] * 2 + ["state-exchange"] * 2 + ["sums"]
    scan = program.records[0].sites[2]
    assert scan.facts["bytes_per_row"] == 4 * 8 * (16 * 16 + 1)  # heads, P N and the decay, fp32
    names = [getattr(n.target, "__name__", "") for n in program.graph.nodes]
    assert names.count("tail_start") == names.count("tail_wait") == names.count("state_start") == 2
    assert names.count("copy_to") == weights
    assert names.count("sum_partial") == 1  # the loss
    starts = [n for n in names if n in ("tail_start", "tail_wait", "state_start", "state_wait")]
    assert starts == ["tail_start", "tail_wait", "state_start", "state_wait"] * 2
    for begin, end in (("tail_start", "tail_wait"), ("state_start", "state_wait")):
        between = names[names.index(begin) : names.index(end)]
        assert "linear" in between  # a projection hides each exchange
    partial = planned(graph_again(), "mamba-context-parallel{gradients=partial}", parse_mesh("cp=2"))
    assert not partial.graph.calls(copy_to)
    assert "each rank's part" in partial.records[0].sites[-1].note


MADE: dict[str, Graph] = {}


def graph_again():
    """One layer of Mamba-2; traced once."""
    if "graph" not in MADE:
        MADE["graph"] = step("mamba2")
    return MADE["graph"].copy()


@pytest.mark.parametrize(("ranks", "steps"), [(3, 2), (8, 3), (64, 6)])
def test_states_go_by_the_algorithm_that_sends_fewer(ranks, steps):
    """The formula in the note, the collectives in the graph, and the choice are one; all ranks agree on the order."""
    size, mesh = 8 * (16 * 16 + 1), parse_mesh(f"cp={ranks}")
    sent = {"all-gather": [(ranks - 1) * 4 * size], "log-scan": [4 * size] * steps}
    want = "log-scan" if steps < ranks - 1 else "all-gather"
    orders = {}
    for rank in {0, 1, ranks - 1}:
        program = planned(graph_again(), "mamba-context-parallel", mesh.at(cp=rank))
        orders[rank] = [c.key() for c in collectives(program.graph)]
    found = [c for c in collectives(program.graph) if c.caller in ("state_start", "state_wait")]
    rows = next(iter(found[0].elements.free_symbols))
    assert [int(c.sent(ranks).subs({rows: 1})) for c in found] == sent[want]
    site = program.records[0].sites[1]
    assert site.facts["algorithm"] == want
    assert site.facts["sent_per_row"] == sum(sent[want]) == min(map(sum, sent.values()))
    assert f"ceil(log2 {ranks}) = {steps} {'<' if steps < ranks - 1 else '>='} R - 1 = {ranks - 1}" in site.note
    check_order(orders, "cp")
    other = "all-gather" if want == "log-scan" else "log-scan"
    program = planned(graph_again(), f"mamba-context-parallel{{algorithm={other}}}", mesh)
    assert program.records[0].sites[1].facts["sent_per_row"] == sum(sent[other])
    with pytest.raises(MeshError, match="they would wait"):  # ranks that chose differently
        check_order({0: orders[0], 1: [c.key() for c in collectives(program.graph)]}, "cp")


@pytest.fixture
def fake_ranks():
    """A process group of which this process is rank 1, and which sends nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(size: int) -> str:
        dist.init_process_group("fake", rank=1, world_size=size, store=FakeStore())
        return dist.group.WORLD.group_name

    yield start
    dist.destroy_process_group()


def arguments(graph) -> list:
    """Weights and a batch of ones, of two rows of 12 tokens, in the order of a graph's placeholders."""
    values = [(n, graph.value(n)) for n in graph.graph.nodes if n.op == "placeholder"]
    sizes: dict[str, int] = {}
    for node, value in values:
        if isinstance(value, torch.Tensor) and graph.weight(node) is None and value.dim() == 2:
            sizes |= {str(value.shape[0]): 2, str(value.shape[1]): 12}
    given = []
    for node, value in values:
        weight = graph.weight(node)
        if weight is not None:
            given.append(nn.Parameter(torch.randn(weight.value.shape)))
        elif isinstance(value, torch.Tensor):
            given.append(torch.ones([sizes[str(n)] for n in value.shape], dtype=value.dtype))
        else:
            given.append(sizes[str(value)])
    return given


@pytest.mark.parametrize(("ranks", "algorithm"), [(2, "all-gather"), (3, "log-scan")])
def test_in_aots_graphs_each_exchange_starts_before_and_is_waited_for_after_local_work(fake_ranks, ranks, algorithm):
    """In the forward and in the backward: products lie between a start and its wait."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition

    group = fake_ranks(ranks)
    graph = graph_again()
    mesh = Mesh((Axis("cp", ranks, 1, group),))
    program = planned(graph, f"mamba-context-parallel{{algorithm={algorithm},gradients=partial}}", mesh)
    seen: dict[str, list[tuple[str, int]]] = {}  # for each start: what it is, and the products before its wait

    def keep(phase: str):
        from functorch.compile import make_boxed_func

        def compiler(made, _):
            nodes = list(made.graph.nodes)
            at = {n: i for i, n in enumerate(nodes)}
            products = [at[n] for n in nodes if "aten.mm" in str(n.target) or "aten.addmm" in str(n.target)]
            seen[phase] = []
            for start in filter(is_start, nodes):
                (wait,) = waits_of(start)
                between = sum(at[start] < i < at[wait] for i in products)
                seen[phase].append((place_of(start)[0], between))
            return make_boxed_func(made.forward)

        return compiler

    backend = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"), partition_fn=default_partition)
    given = arguments(program.graph)
    out = torch.compile(program.graph.module, backend=backend, dynamic=True, fullgraph=True)(*given)
    out[0].backward()
    # Of a log-scan's two steps the first has something to hide behind. The tail's exchange is the first of the forward
    # and the last of the backward.
    forward, backward = seen["forward"], seen["backward"]
    there, back = (forward[1], backward[-2]) if algorithm == "all-gather" else (forward[1], backward[-3])
    wanted = ["all_gather", "reduce_scatter"] if algorithm == "all-gather" else ["all_to_all"] * 2
    assert [there[0], back[0]] == wanted
    assert forward[0][0] == backward[-1][0] == "all_to_all"
    for _, products in (there, back, forward[0], backward[-1]):
        assert products > 0, seen


@pytest.mark.parametrize(("ranks", "algorithm"), [(2, "all-gather"), (3, "log-scan")])
def test_no_exchange_of_the_forward_graph_is_repeated_in_the_backward_graph(fake_ranks, monkeypatch, ranks, algorithm):
    """Scheduled graphs: one exchange of the tail and one of the states each. Without the removal of what nobody reads
    (sabotage) AOT's partitioner repeats a log-scan's first step."""
    group = fake_ranks(ranks)
    steps = 1 if algorithm == "all-gather" else (ranks - 1).bit_length()
    for removed in (True, False)[: 1 + (algorithm == "log-scan")]:
        if not removed:
            monkeypatch.setattr(overlap, "drop_unread", lambda graph: 0)
        program = planned(
            graph_again(), f"mamba-context-parallel{{algorithm={algorithm},gradients=partial}}",
            Mesh((Axis("cp", ranks, 1, group),)),
        )  # fmt: skip
        seen: dict[str, int] = {}
        run = overlap.compile_overlapped(
            program.graph.module, growth=0.5, inductor=False,
            tell=lambda done: seen.update({done.phase: len(done.collectives)}),  # noqa: B023
        )  # fmt: skip
        run(*arguments(program.graph))[0].backward()
        torch._dynamo.reset()
        loss = 1
        assert seen["forward"] == 1 + steps + loss
        assert seen["backward"] == 1 + steps + (not removed)


@pytest.mark.parametrize(("ranks", "algorithm"), [(2, "all-gather"), (3, "log-scan")])
def test_inductor_sees_no_rank_s_masked_exchange_as_zeros(fake_ranks, monkeypatch, ranks, algorithm):
    """Its passes over forward and backward together leave all ranks the same collectives in each. With masks that it
    can read (sabotage) the first rank's backward exchange of zeros moves to its forward graph, and the ranks hang."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    group = fake_ranks(ranks)

    def orders(rank: int) -> list[list[str]]:
        found: list[list[str]] = []
        mesh = Mesh((Axis("cp", ranks, rank, group),))
        program = planned(graph_again(), f"mamba-context-parallel{{algorithm={algorithm},gradients=partial}}", mesh)

        def keep(made, _):
            from functorch.compile import make_boxed_func

            overlap.drop_unread(made.graph)  # as overlap-collectives does
            found.append([place_of(n)[0] for n in made.graph.nodes if is_start(n)])
            made.recompile()
            return make_boxed_func(made.forward)

        def partition(joint, *args, **kwargs):
            joint_graph_passes(joint)
            return min_cut_rematerialization_partition(joint, *args, **kwargs)

        run = torch.compile(
            program.graph.module, dynamic=True, fullgraph=True, backend=aot_autograd(
                fw_compiler=keep, bw_compiler=keep, partition_fn=partition, decompositions=select_decomp_table()
            ),
        )  # fmt: skip
        run(*arguments(program.graph))[0].backward()
        torch._dynamo.reset()
        return found

    first, last = orders(0), orders(ranks - 1)
    assert first == last
    assert len(first[0]) == (2 if algorithm == "all-gather" else 3) + 1  # the loss
    assert len(first[1]) == len(first[0]) - 1
    for module in (exchange, state_exchange):
        monkeypatch.setattr(module, "only_if", lambda x, here: x * here)
    assert orders(0) != last


def test_attention_needs_ulysses_and_gets_it():
    with pytest.raises(RefusedError, match=r"attention at model.layers.1.self_attn: .* Add ulysses"):
        planned(step("bamba", num_hidden_layers=2), "mamba-context-parallel", parse_mesh("cp=2"))
    program = planned(step("bamba", num_hidden_layers=2), BOTH, parse_mesh("cp=2"))
    sites = {s.rule: s for r in program.records for s in r.sites}
    wanted = {"ranks": 2, "heads": 2, "kv_heads": 1, "whole_kv_heads": 2, "latent": False}
    assert sites["heads-for-tokens"].facts == wanted
    swaps = program.graph.calls(exchange.to_heads, exchange.to_tokens)
    assert len(swaps) == 4
    names = [getattr(n.target, "__name__", "") for n in program.graph.nodes]
    assert names.count("sum_partial") == 1  # once, by the last of the two passes


def test_ulysses_leaves_partial_gradients_if_asked():
    graph = step("llama")
    summed = planned(graph.copy(), "ulysses", parse_mesh("cp=2")).graph.calls(copy_to)
    partial = planned(graph, "ulysses{gradients=partial}", parse_mesh("cp=2"))
    assert len(summed) == sum(w.value.requires_grad for w in graph.weights.values())
    assert not partial.graph.calls(copy_to)


def test_passes_that_disagree_on_gradients_are_refused():
    """The last one would sum what the first was told to leave to an optimiser, which sums it again."""
    graph = step("bamba", num_hidden_layers=2)
    why = r"mamba-context-parallel gradients=partial and ulysses gradients=sum cannot both be.*the same"
    with pytest.raises(RefusedError, match=why):
        planned(graph.copy(), "mamba-context-parallel{gradients=partial},ulysses", parse_mesh("cp=2"))
    both = planned(graph, "mamba-context-parallel{gradients=partial},ulysses{gradients=partial}", parse_mesh("cp=2"))
    assert not both.graph.calls(copy_to)


@pytest.mark.parametrize(
    ("family", "pipeline", "mesh", "rule"),
    [
        ("llama", "ulysses", "cp=3", "heads-not-divisible at .*: 4 heads and 2 KV heads cannot be shared by 3 ranks"),
        ("llama", "ulysses", "tp=2", "one rank along cp"),
    ],
)
def test_what_cannot_be_split_says_why(family, pipeline, mesh, rule):
    with pytest.raises(RefusedError, match=rule):
        planned(step(family, num_hidden_layers=2), pipeline, parse_mesh(mesh)).forced(True)


def test_labels_that_the_model_shifts_and_averages_are_refused():
    model = build("mamba2", num_hidden_layers=1).train()
    ids = torch.ones(2, 6, dtype=torch.long)
    graph = capture(model, inputs={"input_ids": ids, "labels": ids, "use_cache": False}, training=True)
    with pytest.raises(RefusedError, match=r"tokens-moved|loss-averaged") as error:
        planned(graph, "mamba-context-parallel", parse_mesh("cp=2"))
    assert "split_batch" in str(error.value)  # the remedy


def test_a_shard_of_one_token_says_so():
    """The library takes one token for a step of decoding."""
    ids = torch.ones(2, 2, dtype=torch.long)
    batch = split_batch({"input_ids": ids, "labels": ids}, parse_mesh("cp=2"))
    model = build("mamba2", num_hidden_layers=1).train()
    graph = capture(model, inputs={**batch, "use_cache": False}, training=True)
    with pytest.raises(RefusedError, match=r"length-fixed at .*: the graph was traced for 1 tokens? alone"):
        planned(graph, "mamba-context-parallel", parse_mesh("cp=2"))


def masked(longer: int = 0, rows: int = 1, family: str = "bamba"):
    """A step's graph with an attention mask, ``longer`` than the ids."""
    ids = torch.ones(rows, 12, dtype=torch.long)
    batch = split_batch({"input_ids": ids, "labels": ids}, parse_mesh("cp=2"))
    batch["attention_mask"] = torch.ones(rows, 6 + longer, dtype=torch.long)
    model = build(family, num_hidden_layers=2).train()
    return capture(model, inputs={**batch, "use_cache": False}, training=True)


def test_one_row_s_mask_is_checked_at_run_time_to_be_as_long_as_the_ids():
    """The library cuts mask[:, -L:], and of one row nothing else ties the mask's length to L."""
    program = planned(masked(), BOTH, parse_mesh("cp=2"))
    (check,) = program.graph.calls(as_many_tokens.op)
    mask, ids = check.args
    assert (mask.name, ids.name) == ("l_kwargs_attention_mask_", "l_kwargs_input_ids_")
    assert list(mask.users) == [check]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_mask_longer_than_the_ids_is_refused(rows):
    with pytest.raises(RefusedError, match=r"attention_mask_ has 9 tokens a row, .*input_ids_ has 6.*as many tokens"):
        planned(masked(longer=3, rows=rows, family="mamba2"), "mamba-context-parallel", parse_mesh("cp=2"))


def test_a_graph_that_fills_a_cache_is_refused():
    graph = planning_graph(build("bamba", num_hidden_layers=2).eval())
    with pytest.raises(RefusedError, match="the graph fills a cache"):
        planned(graph, BOTH, parse_mesh("cp=2"))


class Mixing(nn.Module):
    def __init__(self, how) -> None:
        super().__init__()
        self.embed, self.how = nn.Embedding(20, 6), how

    def forward(self, input_ids):
        return self.how(self.embed(input_ids))


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        (lambda x: x.flip(1), "tokens-moved"),
        (lambda x: x.cumsum(1), "mixes-tokens"),
        (lambda x: x[:, 1:], "tokens-moved"),
        (lambda x: x - x.mean(1, keepdim=True), "mixes-tokens"),
        (lambda x: torch.softmax(x @ x.mT, -1) @ x, "mixes-tokens"),
        (lambda x: x * torch.linspace(0, 1, x.shape[1])[:, None], "length-fixed"),
        (lambda x: x * torch.arange(0, 2 * x.shape[1], 2)[:, None], "positions-from-length"),
        (lambda x: torch.sort(x, 1).values, "mixes-tokens"),
        (lambda x: torch.topk(x, 2, 1).values, "mixes-tokens"),
        (lambda x: torch.einsum("bld,bmd->blm", x, x), "mixes-tokens"),
        (lambda x: torch.bucketize(x, x.new_ones(3)), "unknown-node"),
        (lambda x: x.sum(1) ** 2, "not-a-sum"),
        (lambda x: x.repeat(1, 2, 1), "tokens-moved"),
    ],
)
def test_whatever_looks_beyond_its_own_token_is_an_end(how, rule):
    graph = capture(Mixing(how), inputs={"input_ids": torch.ones(2, 6, dtype=torch.long)})
    ends = follow_tokens(graph, set()).ends
    assert rule in {e.rule for e in ends}


@pytest.mark.parametrize(
    "how",
    [
        lambda x: torch.nn.functional.silu(x) * 2 + x.mean(-1, keepdim=True),
        lambda x: x.reshape(-1, 6).square(),
        lambda x: torch.cat(x.chunk(2, -1)[::-1], -1).unflatten(-1, (2, 3)).transpose(1, 2),
        lambda x: (x @ x.new_ones(6, 4)).softmax(-1),
        lambda x: x.transpose(0, 1).reshape(-1, 6),  # a token has a place for each row, side by side
        lambda x: x.reshape(-1, 6).repeat_interleave(2, 0).view(-1, 2, 6).sum(1),  # two experts a token
        lambda x: torch.topk(x, 2, -1).values,
        lambda x: x.new_ones(3, 6)[torch.topk(x, 2, -1).indices.reshape(-1).clamp(max=2)],  # weights of its experts
        lambda x: torch.einsum("bld,dk->blk", x, x.new_ones(6, 4)),
        lambda x: x * torch.arange(x.shape[1])[:, None],  # the passes count on from the shard's first token
    ],
)
def test_whatever_keeps_tokens_apart_passes(how):
    graph = capture(Mixing(how), inputs={"input_ids": torch.ones(2, 6, dtype=torch.long)})
    assert not follow_tokens(graph, set()).ends


# -- the batch --------------------------------------------------------------------------------------------------------


def test_the_ranks_parts_put_together_are_the_batch():
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (2, 12), generator=g)
    labels = ids.masked_fill(torch.rand(2, 12, generator=g) < 0.3, IGNORED)
    seq_idx = (torch.rand(2, 12, generator=g) < 0.3).int().cumsum(1)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones(2, 12), "seq_idx": seq_idx, "scale": 2.0}
    parts = [split_batch(batch, parse_mesh("cp=3").at(cp=r)) for r in range(3)]
    numbers = torch.cat([p["seq_idx"] for p in parts], 1)  # over the whole row: a shard's edge is no border by itself
    assert torch.equal(numbers.diff(dim=1) != 0, seq_idx.diff(dim=1) != 0)
    for key in ("input_ids", "attention_mask"):
        assert torch.equal(torch.cat([p[key] for p in parts], 1), batch[key])
    assert all(p["scale"] == 2.0 for p in parts)
    moved = torch.cat([p["shift_labels"] for p in parts], 1)
    for row in range(2):
        for t in range(12):
            same = t + 1 < 12 and seq_idx[row, t] == seq_idx[row, t + 1]
            assert moved[row, t] == (labels[row, t + 1] if same else IGNORED)
    assert {int(p["num_items_in_batch"]) for p in parts} == {int((moved != IGNORED).sum())}
    places = torch.cat([p["position_ids"] for p in parts], 1)
    assert all(places[r, t] == (seq_idx[r, :t] == seq_idx[r, t]).sum() for r in range(2) for t in range(12))


def test_padding_fills_rows_up_and_trains_nothing():
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 90, (2, 13), generator=g)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "scale": torch.ones(13)}
    packed = {**batch, "position_ids": torch.tensor([[*range(6), *range(7)]] * 2)}
    for given in (batch, packed):
        parts = [split_batch(given, parse_mesh("cp=3").at(cp=r), pad=True) for r in range(3)]
        whole = {k: torch.cat([p[k] for p in parts], 1) for k in parts[0] if parts[0][k].dim() == 2}
        assert all(v.shape == (2, 15) for v in whole.values())
        assert torch.equal(whole["input_ids"][:, :13], ids)
        assert bool((whole["input_ids"][:, 13:] == 0).all() and (whole["attention_mask"][:, 13:] == 0).all())
        assert bool((whole["shift_labels"][:, 12:] == IGNORED).all())
        trained = (whole["shift_labels"] != IGNORED).sum()
        assert {int(p["num_items_in_batch"]) for p in parts} == {int(trained)} == {2 * (12 if given is batch else 11)}
    assert whole["position_ids"][0, 10:].tolist() == [4, 5, 6, 7, 8]  # no border before what is filled up
    assert bool((whole["seq_idx"][:, 6:] == whole["seq_idx"][:, 6:7]).all())
    with pytest.raises(MeshError, match=r"attention_mask of shape \[2, 1, 13, 13\] cannot be padded"):
        split_batch({**batch, "attention_mask": torch.ones(2, 1, 13, 13)}, parse_mesh("cp=3"), pad=True)


@pytest.mark.parametrize("family", ["mamba2", "llama"])
def test_a_model_gives_the_same_loss_and_gradients_with_padded_rows(family):
    """fp64, whole rows; where the filled-up tokens are trained too (sabotage), they differ."""
    model = build(family, num_hidden_layers=1).double()
    ids = torch.randint(3, 90, (2, 13), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "labels": ids}
    given = split_batch(batch, parse_mesh("cp=2"), pad=True)
    both = [split_batch(batch, parse_mesh("cp=2").at(cp=r), pad=True) for r in range(2)]
    padded = {k: torch.cat([p[k] for p in both], 1) if v.dim() == 2 else v for k, v in given.items()}
    wrong = {**padded, "shift_labels": padded["shift_labels"].masked_fill(padded["shift_labels"] == IGNORED, 0)}
    found = []
    for one in (batch, padded, wrong):
        loss = model(**one).loss
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for want, got in zip(found[0], found[1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    assert abs(float((found[2][0] - found[0][0]).detach())) > 1e-3


def test_positions_that_start_again_tell_borders_on_every_rank():
    """Also on ranks whose own part shows none; else they would run other programs than the rest."""
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    ids = torch.ones(1, 8, dtype=torch.long)
    parts = [
        split_batch({"input_ids": ids, "labels": ids, "position_ids": places}, parse_mesh("cp=2").at(cp=r))
        for r in (0, 1)
    ]
    assert [p["seq_idx"].tolist() for p in parts] == [[[0, 0, 0, 1]], [[1, 1, 1, 1]]]
    assert parts[0]["shift_labels"][0, 2] == IGNORED
    assert "seq_idx" not in split_batch({"input_ids": ids, "position_ids": torch.arange(8)[None]}, parse_mesh("cp=2"))
    with pytest.raises(MeshError, match="cu_seqlens counts from a row's start"):
        split_batch({"input_ids": ids, "cu_seqlens": torch.tensor([0, 4, 8])}, parse_mesh("cp=2"))


def test_what_cannot_be_shared_evenly_says_what_to_do():
    ids = torch.ones(2, 13, dtype=torch.long)
    with pytest.raises(MeshError, match=r"13 tokens cannot be shared evenly by 2 ranks.*the batch to 14.*pad=True"):
        split_batch({"input_ids": ids}, parse_mesh("cp=2"))
    with pytest.raises(MeshError, match="neither input_ids nor inputs_embeds"):
        split_batch({"labels": ids}, parse_mesh("cp=2"))
    with pytest.raises(MeshError, match=r"has 2 ranks, torch\.distributed has 1"):
        split_batch({"input_ids": ids}, "cp=2")
    with pytest.raises(MeshError, match="shard of 2 tokens is shorter than the 3"):
        exchange.last_tokens(torch.zeros(1, 2, 4), 3, "cp")


class Writing(nn.Module):
    """One layer, and what is written in place."""

    def __init__(self, write) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(4, 4), write
        self.register_buffer("held", torch.zeros(4))

    def forward(self, x: torch.Tensor):
        return self.write(self.layer(x), self)


def into_new(y, model):
    t = torch.empty_like(y)
    t.copy_(y)
    return t * 2


def into_wider(y, model):
    t = torch.zeros(y.shape, dtype=torch.float64)
    t.copy_(y)
    return t * 2


def by_index(y, model):
    t = torch.zeros_like(y)
    t[:] = y
    return t * 2


def a_feature(y, model):
    t = y.clone()
    t[..., 0] = 1.0
    return t * 2


def by_mask(y, model):
    t = y.clone()
    t[y > 0] = 0.0
    return t * 2


def into_buffer(y, model):
    model.held.copy_(y.detach().sum((0, 1)))
    return y * 2


def into_result(y, model):
    t = torch.empty_like(y)
    t.copy_(y)
    return y * 2, t


def first_token(y, model):
    t = y.clone()
    t[:, 0] = 1.0
    return t * 2


def first_token_copied(y, model):
    t = y.clone()
    t[:, 0].copy_(torch.ones(4))
    return t * 2


def every_second(y, model):
    t = y.clone()
    t[:, ::2] = 0.0
    return t * 2


def across(y, model):
    t = torch.zeros(y.shape[0], y.shape[1], y.shape[1])
    t[:] = y.sum(-1)[:, None]
    return t * 2


def by_number(y, model):
    t = y.clone()
    t[:, y[0, :2, 0].long()] = 1.0
    return t * 2


def new_and_counted(y, model):
    t = torch.zeros(y.shape[1])
    t[0] = 1.0
    return y * t[None, :, None]


WRITES = {
    into_new: None, into_wider: None, by_index: None, a_feature: None, by_mask: None,
    into_buffer: "cached", into_result: "cached",
    first_token: "tokens-moved", first_token_copied: "tokens-moved", every_second: "tokens-moved",
    across: "tokens-moved", by_number: "tokens-moved", new_and_counted: "tokens-moved",
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_what_is_written_in_place_is_no_cache_and_must_be_of_every_token(write):
    """A cache is memory that the graph was given or gives back. ``x[:, 0] = 1`` on every rank would be another's."""
    graph = capture(Writing(write).train(), inputs={"x": torch.randn(2, 6, 4)}, training=True)
    found = [r.rule for r in whole_graph(graph, Context(pipeline=("ulysses",)))]
    assert found[:1] == [WRITES[write]] if WRITES[write] else found == []


@pytest.mark.parametrize("filled", [False, True])
def test_states_of_a_cache_are_still_seen(filled):
    """New ones, which the graph gives back, and filled ones, which it was given."""
    model, ids = build("mamba2", num_hidden_layers=1).eval(), torch.ones(2, 6, dtype=torch.long)
    words = {"use_cache": True, cache_argument(model): GraphCache.for_model(model)}
    with torch.no_grad():
        if filled:
            model(input_ids=ids, **words)
        graph = capture(model, inputs={"input_ids": ids[:, :1] if filled else ids, **words})
    assert [r.rule for r in whole_graph(graph, Context(pipeline=("mamba-context-parallel",)))] == ["cached"]
