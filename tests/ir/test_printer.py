"""The text form of graphs: golden texts, folded layers, stable names, diffs (EXPECTTEST_ACCEPT=1 takes new texts)."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from latentscan.ir.capture import capture
from latentscan.ir.graph import Graph
from latentscan.ir.printer import Printer, diff, text
from latentscan.ir.weights import Recipe
from latentscan.passes.base import Context
from latentscan.passes.pipeline import parse, run
from latentscan.runtime.wrap import planning_graph
from latentscan.tests.models import build


class Layer(nn.Module):
    def __init__(self, width: int, *, gate: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width)
        self.gate = gate

    def forward(self, x, scale):
        y = self.down(torch.relu(self.up(x))) * scale
        return x + (y.sigmoid() if self.gate else y)


class Stack(nn.Module):
    def __init__(self, gates) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(4, gate=g) for g in gates)
        self.norm = nn.LayerNorm(4)

    def forward(self, input):
        scale = input.flatten(0, 1).mean(0, dtype=torch.float32)
        x = input
        for layer in self.layers:
            x = layer(x, scale)
        return self.norm(x)[:, -1:, ..., :2]


def traced(*gates: bool) -> Graph:
    return capture(Stack(gates), inputs={"input": torch.randn(2, 3, 4)})


def squeezed(body: str) -> str:
    """The text without its columns."""
    return re.sub(r" {2,}(?=\S)", "  ", re.sub(r"(?m)^ +", lambda m: "\t" * (len(m.group()) // 2), body)).expandtabs(2)


def test_equal_layers_are_shown_once():
    assert_expected_inline(
        squeezed(text(traced(False, False, False))),
        """\
graph (evaluation): 19 calls, 11 weights of 848 bytes
inputs
  input  f32[s0, s1, 4]

(the model itself)
    flatten = input.flatten(0, 1)  f32[s0*s1, 4]
    scale = flatten.mean(0, dtype=f32)  f32[4]

layers.0..2 (3 layers, the same but for their number)
  in0 is input of the inputs, then x of the layer before
  .up
    linear = linear(in0, .up.weight, None)  f32[s0, s1, 8]
  (the layer itself)
    relu = relu(linear)  f32[s0, s1, 8]
  .down
    linear.1 = linear(relu, .down.weight, .down.bias)  f32[s0, s1, 4]
  (the layer itself)
    y = mul(linear.1, scale)  f32[s0, s1, 4]
    x = add(in0, y)  f32[s0, s1, 4]

norm
    layer_norm = layer_norm(layers.2: x, (4,), norm.weight, norm.bias, 1e-05)  f32[s0, s1, 4]

(the model itself)
    getitem = layer_norm[:, -1:, ..., :2]  f32[s0, 1, 2]

outputs
  getitem  f32[s0, 1, 2]
""",
    )


def test_a_layer_that_differs_is_shown():
    shown = text(traced(False, False, True, False))
    titles = re.findall(r"(?m)^layers\S*.*", shown)
    assert titles == ["layers.0..1 (2 layers, the same but for their number)", "layers.2", "layers.3"]


def gated(graph: Graph, numbers) -> Graph:
    """A copy in which a negation follows the activation of the layers with these numbers."""
    after = graph.copy()
    for number, node in enumerate(after.calls(torch.relu)):
        if number in numbers:
            with after.after(node, "negate"):
                made = after.call(torch.neg, node)
            node.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
    after.clean()
    return after


def test_a_diff_shows_the_same_change_of_several_layers_once():
    graph = traced(False, False, False)
    assert_expected_inline(
        squeezed(diff(graph, gated(graph, {0, 1, 2}))),
        """\

=== layers.0..2 (3 layers, the same but for their number)
@@ -3,6 +3,7 @@
  (the layer itself)
    relu = relu(linear)  f32[s0, s1, 8]
+  neg = neg(relu)  f32[s0, s1, 8]  <- negate
  .down
-  linear.1 = linear(relu, .down.weight, .down.bias)  f32[s0, s1, 4]
+  linear.1 = linear(neg, .down.weight, .down.bias)  f32[s0, s1, 4]
  (the layer itself)
    y = mul(linear.1, scale)  f32[s0, s1, 4]
""",
    )


def test_a_diff_tells_changed_layers_from_unchanged_ones():
    graph = traced(*[False] * 5)
    titles = re.findall(r"=== (.*)", diff(graph, gated(graph, {1, 2, 4})))
    assert titles == ["layers.1..2 (2 layers, the same but for their number)", "layers.4"]
    assert diff(graph, graph.copy()) == ""


def test_new_weights_are_listed_with_their_sources():
    graph = traced(False, False)
    after = graph.copy()
    for number, node in enumerate(after.calls(torch.nn.functional.linear)[::2]):
        path = f"layers.{number}.up.weight"
        recipe = Recipe((path,), (f"layers.{number}.up.weight_half",), "halve", path, lambda w: (w / 2,))
        (weight,) = after.add_weights(recipe, [after.value(node.args[1])])
        with after.before(node, "halve"):
            made = after.call(torch.nn.functional.linear, node.args[0], weight)
        after.replace(node, made)
    after.clean()
    assert_expected_inline(
        squeezed(diff(graph, after)),
        """\

=== graph
@@ -1,2 +1,4 @@
inputs
  input  f32[s0, s1, 4]
+new weights
+  layers.{0..1}.up.weight_half  f32[8, 4] from layers.{0..1}.up.weight

=== layers.0..1 (2 layers, the same but for their number)
@@ -1,6 +1,6 @@
  .up
-  linear = linear(in0, .up.weight, None)  f32[s0, s1, 8]
+  linear.2 = linear(in0, .up.weight_half)  f32[s0, s1, 8]  <- halve
  (the layer itself)
-  relu = relu(linear)  f32[s0, s1, 8]
+  relu = relu(linear.2)  f32[s0, s1, 8]
  .down
    linear.1 = linear(relu, .down.weight, .down.bias)  f32[s0, s1, 4]
""",
    )


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma3", "mamba2", "zamba2", "gpt_neox"])
def test_two_traces_of_a_model_have_one_text_without_addresses(family):
    model = build(family)
    first = text(planning_graph(model))
    torch._dynamo.reset()
    assert text(planning_graph(model)) == first
    assert "0x" not in first
    assert not re.search(r"\bs\d{2,}\b", first), "symbols are numbered anew"
    assert "l_self_" not in first, "weights and inputs go by their paths"


def test_a_deep_model_is_as_long_as_a_shallow_one():
    shallow, deep = (text(planning_graph(build("llama", num_hidden_layers=n))) for n in (2, 6))
    assert len(deep.splitlines()) == len(shallow.splitlines())
    assert "model.layers.0..5 (6 layers, the same but for their number)" in deep
    assert re.search(r"\.layers\.\{0\.\.5\}\.token ", deep)  # the argument is called cache or past_key_values


def test_what_a_pass_left_alone_keeps_its_name():
    graph = planning_graph(build("minicpm3"))
    printer = Printer()
    before = printer.text(graph)
    after = run(graph.copy(), parse("mla-mm-split"), Context(own_parameters=True)).graph
    assert set(before.splitlines()) & set(printer.text(after).splitlines()) >= {
        line for line in before.splitlines() if ".mlp" in line or "layernorm" in line
    }
    changed = [line for line in printer.diff(graph, after).splitlines() if line.startswith(("-", "+"))]
    assert changed
    assert not [line for line in changed if ".mlp" in line]
    assert any(line.endswith("<- mla-mm-split") for line in changed)


def test_sizes_are_written_where_they_are_used():
    class Flat(nn.Module):
        def forward(self, input):
            return input.reshape(input.shape[0] * input.shape[1], -1) + input.shape[1] // 2

    shown = text(capture(Flat(), inputs={"input": torch.randn(2, 3, 4)}))
    assert "input.reshape(s0*s1, -1)" in shown
    assert "f32[s0*s1, s2]" in shown
    assert "(s1//2)" in shown


def test_a_training_graph_and_its_outputs_are_named():
    graph = capture(Stack([False]), inputs={"input": torch.randn(2, 3, 4)}, training=True)
    shown = text(graph)
    assert shown.startswith("graph (training): ")
    assert shown.rstrip().splitlines()[-2:][0] == "outputs"


class Picks(nn.Module):
    """Reads some features of its input, other ones in each layer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.features = [(i * 3 + number) % 16 for i in range(16)]

    def forward(self, x):
        return x[..., self.features] * 2


def test_layers_that_read_other_features_are_folded_and_the_title_says_so():
    graph = capture(nn.Sequential(*map(Picks, range(3))), inputs={"input": torch.randn(2, 16)})
    for number, node in enumerate(n for n in graph.nodes if n.op == "call_function"):
        path = f"model.layers.{number // 2}"
        node.meta["nn_module_stack"] = {path: (path, Picks)}
    shown = text(graph)
    assert "model.layers.0..2 (3 layers, the same but for their number and the lists of indices)" in shown
    after = graph.copy()
    second = [n for n in after.nodes if "getitem" in n.name][1]
    second.args = (second.args[0], (Ellipsis, list(range(16))))
    assert re.findall(r"=== (.*)", diff(graph, after)) == ["model.layers.1"]
