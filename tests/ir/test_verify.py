"""Every invariant of the verifier, each broken once by a sabotage."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

from latentscan.ir.errors import VerifyError
from latentscan.ir.graph import VALUE, Graph, is_impure, module_path
from latentscan.ir.verify import verify, verify_all
from latentscan.ir.weights import Recipe
from latentscan.runtime.wrap import planning_graph
from latentscan.tests.models import FAMILIES, build


@pytest.fixture(scope="module")
def traced() -> Graph:
    return planning_graph(build("llama"))


@pytest.fixture
def graph(traced) -> Graph:
    return traced.copy()


def linear(graph: Graph, suffix: str = "layers.1.mlp.up_proj"):
    return next(n for n in graph.calls(F.linear, torch._C._nn.linear) if module_path(n).endswith(suffix))


def fails(graph: Graph, traced: Graph, match: str) -> VerifyError:
    with pytest.raises(VerifyError, match=match) as caught:
        verify(graph, before=traced, name="sabotage")
    assert caught.value.where.startswith("sabotage")
    return caught.value


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f in ("llama", "deepseek_v3", "bamba") else pytest.mark.slow) for f in FAMILIES],
)
def test_every_family_traces_to_a_graph_that_verifies(family):
    verify_all(planning_graph(build(family)))


def test_an_unchanged_graph_verifies(graph, traced):
    verify(graph, before=traced, name="nothing")


def test_a_value_that_is_recorded_wrongly_is_named_with_both_forms(graph, traced):
    node = linear(graph)
    with graph.before(node, "sabotage"):
        made = graph.call(torch.neg, node.args[0])
    made.meta[VALUE] = made.meta[VALUE].new_empty((*graph.shape(made)[:2], 63))
    node.replace_input_with(node.args[0], made)
    error = fails(graph, traced, r"neg.* is recorded as \[s\d+, s\d+, 63\] torch.float32 .*computes \[s\d+, s\d+, 64\]")
    assert "model.layers.1.mlp" in error.where


def test_a_dtype_that_changes_is_found(graph, traced):
    node = linear(graph)
    with graph.after(node, "sabotage"):
        made = graph.method("double", node)
    made.meta[VALUE] = graph.value(node)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    fails(graph, traced, "is recorded as .* torch.float32 .* but computes .* torch.float64")


def test_a_call_that_does_not_run_is_found(graph, traced):
    node = linear(graph)
    with graph.before(node, "sabotage"):
        made = graph.call_like(node, torch.matmul, node.args[0], node.args[1])  # 64 against 96 x 64
    graph.replace(node, made)
    fails(graph, traced, "does not run on its recorded inputs")


def test_a_node_without_a_value_is_found(graph, traced):
    node = linear(graph)
    with graph.graph.inserting_after(node):
        made = graph.graph.call_function(torch.neg, (node,))
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    fails(graph, traced, "neg has no recorded value")


def test_a_value_that_is_used_before_it_is_made_is_found(graph, traced):
    node = linear(graph)
    next(iter(node.users)).append(node)
    fails(graph, traced, "malformed")


@pytest.mark.parametrize("which", [0, 1])
def test_a_dropped_cache_append_is_found(graph, traced, which):
    node = [n for n in graph.graph.nodes if getattr(n.target, "_opname", "") == "cache_append"][which]
    tensors, token = node.args[1], node.args[0]
    for user in list(node.users):
        if user.args[1] == 1:
            graph.replace(user, token)
        else:
            for item in list(user.users):
                graph.replace(item, tensors[item.args[1]])
                graph.graph.erase_node(item)
        graph.graph.erase_node(user)
    graph.graph.erase_node(node)
    fails(graph, traced, r"writes changed: lost \['cache_append.default'\], new \[\]")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (lambda g, n: g.method("mul_", n, 2.0), "mul_"),
        (lambda g, n: g.call(torch.relu_, n), "relu_"),
        (lambda g, n: g.call(operator.itruediv, n, 2.0), "itruediv"),
        (lambda g, n: g.call(operator.isub, n, 2.0), "isub"),
        (lambda g, n: g.call(F.relu, n, inplace=True), "relu"),
        (lambda g, n: g.call(torch.add, n, n, out=n), "add"),
        (lambda g, n: g.call(operator.setitem, n, 0, 0.0), "setitem"),
    ],
    ids=["method", "function", "true-division", "subtraction", "inplace", "out", "setitem"],
)
def test_a_new_write_is_found_however_it_is_spelled(graph, traced, kind, name):
    node = linear(graph)
    with graph.after(node, "sabotage"):
        made = kind(graph, node)
    assert is_impure(made)
    graph.clean()
    fails(graph, traced, rf"writes changed: lost \[\], new \['{name}'\]")


def test_a_changed_output_shape_is_found(graph, traced):
    output = next(n for n in graph.graph.nodes if n.op == "output")
    logits = output.all_input_nodes[-1]
    with graph.before(output, "sabotage"):
        last = graph.call(operator.getitem, logits, (slice(None), slice(-1, None)))
    output.replace_input_with(logits, last)
    fails(graph, traced, r"is recorded as \[s\d+, 1, 128\].* but computes \[s\d+, s\d+, 128\]")


def test_a_lost_output_is_found(graph, traced):
    output = next(n for n in graph.graph.nodes if n.op == "output")
    output.args = (output.args[0][1:],)
    fails(graph, traced, "2 outputs instead of 3")


def test_a_new_input_is_found(graph, traced):
    with graph.graph.inserting_before(graph.nodes[0]):
        made = graph.graph.placeholder("smuggled")
    made.meta[VALUE] = graph.value(linear(graph))
    error = fails(graph, traced, r"inputs changed: \['smuggled'\]")
    assert "add_weights" in error.remedy


def test_a_lost_input_is_found(graph, traced):
    node = linear(graph)
    weight = node.args[1]
    node.replace_input_with(weight, linear(graph, "layers.0.mlp.up_proj").args[1])
    graph.graph.erase_node(weight)
    fails(graph, traced, "inputs changed: .*up_proj")


def with_weight(graph: Graph, source: str, *, read: bool):
    node = linear(graph)
    recipe = Recipe((source,), ("model.layers.1.mlp.up_proj.twin",), "sabotage", "model.layers.1.mlp", lambda w: (w,))
    (weight,) = graph.add_weights(recipe, [graph.value(node.args[1])])
    if read:
        node.replace_input_with(node.args[1], weight)


def test_a_new_weight_that_nobody_reads_is_found(graph, traced):
    with_weight(graph, "model.layers.1.mlp.up_proj.weight", read=False)
    fails(graph, traced, "the new weight model.layers.1.mlp.up_proj.twin is never read")


def test_a_new_weight_from_nowhere_is_found(graph, traced):
    with_weight(graph, "model.layers.1.mlp.sideways_proj.weight", read=True)
    fails(graph, traced, "comes from model.layers.1.mlp.sideways_proj.weight, which the model lacks")


def test_a_new_weight_that_is_read_is_fine(graph, traced):
    with_weight(graph, "model.layers.1.mlp.up_proj.weight", read=True)
    verify(graph, before=traced, name="twin")
