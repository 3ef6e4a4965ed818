"""Pipelines: text, order, atomic application, refusals, facts, and that nothing is shared or ignored."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from latentscan.ir.errors import PipelineError, RefusedError, VerifyError
from latentscan.ir.graph import Graph, module_path
from latentscan.ir.printer import text as printed
from latentscan.ir.weights import Recipe
from latentscan.passes import pipeline
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier
from latentscan.passes.pipeline import (
    REGISTRY,
    Hooks,
    check_order,
    facts_of,
    parse,
    pass_class,
    run,
    to_text,
)
from latentscan.runtime.wrap import planning_graph
from latentscan.tests.models import build


@pytest.fixture(scope="module")
def traced() -> Graph:
    return planning_graph(build("deepseek_v3"))


@pytest.fixture
def graph(traced) -> Graph:
    return traced.copy()


def state_of(graph: Graph) -> list[Any]:
    """Everything that a pass can change of a graph."""
    nodes = [
        (n.op, n.name, str(n.target), str(n.args), str(n.kwargs), sorted(n.users, key=lambda u: u.name), dict(n.meta))
        for n in graph.graph.nodes
    ]
    plain = [(*n[:5], [u.name for u in n[5]], {k: id(v) for k, v in n[6].items()}) for n in nodes]
    added = [(a.path, a.placeholder, a.index, id(a.recipe)) for a in graph.added]
    return [plain, graph.module.code, list(graph.inputs), added, dict(graph.weights), list(graph.events)]


# -- text -------------------------------------------------------------------------------------------------------------


def options_of(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Values of the right types for a pass's options, defaults among them."""
    kind = pass_class(name)
    hints = typing.get_type_hints(kind)

    def values(spec: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
        if spec.metadata.get("choices"):
            return st.sampled_from(spec.metadata["choices"])
        wanted = hints[spec.name]
        allowed = typing.get_args(wanted) or (wanted,)
        known = {
            bool: st.booleans(),
            int: st.integers(-3, 10**6),
            float: st.floats(allow_nan=False, allow_infinity=False),
            type(None): st.none(),
        }
        return st.one_of(*(known[a] for a in allowed))

    return st.fixed_dictionaries({}, optional={n: values(s) for n, s in kind.options().items()})


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Pass, ...]:
    passes = []
    for name in REGISTRY:  # registered in an order that holds
        if draw(st.booleans()):
            made = pass_class(name)(**draw(options_of(name)))
            try:
                made.check_options()
            except PipelineError:
                assume(False)
            passes.append(made)
    names = {p.name for p in passes}
    return tuple(p for p in passes if names.issuperset(p.needs))


@given(pipelines())
def test_a_pipeline_is_its_text(passes):
    text = to_text(passes)
    assert parse(text) == passes
    assert to_text(parse(text)) == text


@given(pipelines(), st.sampled_from([" ", "  ", "\n "]))
def test_white_space_and_defaults_do_not_matter(passes, space):
    text = to_text(passes).replace(",", f"{space},{space}").replace("{", "{" + space).replace("}", space + "}")
    assert parse(text) == passes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mla-absrob", "there is no pass 'mla-absrob'.*did you mean mla-absorb"),
        ("quantise", "there is no pass 'quantise'. The passes are mla-fa-without-pad, mha-to-mla"),
        ("mla-absorb{wen=always}", "pass mla-absorb has no option 'wen'.*did you mean when"),
        ("latent-cache{rank=3}", "pass latent-cache has no option 'rank'. Its options are: none"),
        ("mla-absorb{when=sometimes}", "when='sometimes' is not one of flops, always, never"),
        ("mha-to-mla{rank=many}", "rank='many' is not a whole number"),
        ("mha-to-mla{rank=12.5}", "rank='12.5' is not a whole number"),
        ("mha-to-mla{rank=8,balance=perhaps}", "balance='perhaps' is not true or false"),
        ("mla-absorb{when}", "option 'when' has no value"),
        ("mla-absorb{when=always,when=never}", "option 'when' is given twice"),
        ("mla-absorb,", "ends with a comma"),
        (",mla-absorb", "cannot read the pipeline at character 0"),
        ("latent-cache,mla-absorb{when=always", "cannot read the pipeline at character 13: 'mla-absorb"),
        ("mla-absorb}", "cannot read the pipeline at character 0: 'mla-absorb}'"),
        ("mla-absorb latent-cache", "cannot read the pipeline"),
        ("mla-absorb,mla-absorb", "pass mla-absorb is in the pipeline twice"),
        ("mla-absorb,latent-cache", "pass latent-cache must come before mla-absorb. Write latent-cache,mla-absorb"),
        ("mla-absorb,mla-mm-split,mha-to-mla", "Write mha-to-mla,mla-mm-split,mla-absorb"),
    ],
)
def test_a_wrong_text_is_one_clear_error(text, message):
    with pytest.raises(PipelineError, match=message) as caught:
        parse(text)
    assert caught.value.remedy


def test_the_empty_pipeline_is_fine():
    assert parse("") == parse("  ") == ()


# -- declared order ---------------------------------------------------------------------------------------------------


def declared(name: str, **facts: Any) -> Pass:
    return dataclass(frozen=True)(type(name, (Pass,), {"name": name, "__annotations__": {}, **facts}))()


def test_a_cycle_of_declarations_is_named():
    first, second = declared("first", after=("second",)), declared("second", after=("first",))
    with pytest.raises(PipelineError, match=r"cycle: (first -> second|second -> first)"):
        check_order([first, second])


def test_a_pass_that_needs_another_says_so():
    needy = declared("needy", needs=("base",))
    with pytest.raises(PipelineError, match=r"needy needs base\. Put base before needy"):
        check_order([needy])
    with pytest.raises(PipelineError, match=r"base must come before needy\. Write base,needy"):
        check_order([needy, declared("base")])
    check_order([declared("base"), needy])


def test_all_registered_passes_have_one_order_and_say_what_they_are():
    kinds = [pass_class(name) for name in REGISTRY]
    check_order([object.__new__(kind) for kind in kinds])
    for name, kind in zip(REGISTRY, kinds, strict=True):
        assert kind.name == name
        assert kind.summary
        assert len(kind.math) > 60
        assert dataclasses.is_dataclass(kind)
        assert vars(kind)["__dataclass_params__"].frozen, "a pass holds no state"
        for other in (*kind.after, *kind.before, *kind.needs):
            assert other in REGISTRY, f"{name} speaks of {other}"


# -- running ----------------------------------------------------------------------------------------------------------


def sites(graph: Graph) -> list[Site]:
    return [
        Site(module_path(n), "projection", n.name, {"width": int(graph.shape(n)[-1])})
        for n in graph.calls(F.linear, torch._C._nn.linear)
        if module_path(n).endswith("o_proj")
    ]


@dataclass(frozen=True)
class Sabotage(Pass):
    """Strikes at every output projection; subclasses say how."""

    name: ClassVar[str] = "sabotage"
    tier: ClassVar[Tier] = Tier.EXACT

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        return [*sites(graph)]


@dataclass(frozen=True)
class RaisesMidway(Sabotage):
    """Rewrites one site, adds a weight, and fails on the second."""

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        if graph.added:
            raise ZeroDivisionError("the second site")
        node = graph.node(site.anchor)
        path = graph.weight(node.args[1]).path
        recipe = Recipe((path,), (path + "_twin",), self.name, site.module, lambda w: (w.clone(),))
        (weight,) = graph.add_weights(recipe, [graph.value(node.args[1])])
        with graph.before(node, self.name):
            graph.replace(node, graph.call(F.linear, node.args[0], weight, None))
        graph.graph.erase_node(node)
        graph.events.append("half done")


@dataclass(frozen=True)
class WritesInPlace(Sabotage):
    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        node = graph.node(site.anchor)
        with graph.after(node, self.name):
            graph.method("mul_", node, 1.0)


@dataclass(frozen=True)
class ChangesTheOutput(Sabotage):
    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        output = next(n for n in graph.graph.nodes if n.op == "output")
        logits = output.all_input_nodes[-1]
        with graph.before(output, self.name):
            output.replace_input_with(logits, graph.method("half", logits))


@dataclass(frozen=True)
class FixesASize(Sabotage):
    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        if graph.shape(graph.node(site.anchor))[1] == 6:  # the traced length: from now on the graph is for 6 tokens
            return


@dataclass(frozen=True)
class Guards(Sabotage):
    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        torch._check(graph.shape(graph.node(site.anchor))[1] == 6)


@dataclass(frozen=True)
class ForgetsItsWeight(Sabotage):
    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        path = site.module + ".weight"
        recipe = Recipe((path,), (path + "_unread",), self.name, site.module, lambda w: (w,))
        graph.add_weights(recipe, [graph.value(graph.node(site.anchor).args[1])])


@dataclass(frozen=True)
class DropsAnAppend(Sabotage):
    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        append = next((n for n in graph.graph.nodes if getattr(n.target, "_opname", "") == "cache_append"), None)
        if append is None:
            return
        for user in list(append.users):
            if user.args[1] == 1:
                graph.replace(user, append.args[0])
            for item in list(user.users):
                graph.replace(item, append.args[1][item.args[1]])
        for node in (*[i for u in append.users for i in u.users], *append.users, append):
            graph.graph.erase_node(node)


@dataclass(frozen=True)
class Raises(Sabotage):
    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        raise PipelineError("an error of ours", where="inside")


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (RaisesMidway, VerifyError, "sabotage: the pass failed: ZeroDivisionError: the second site"),
        (WritesInPlace, VerifyError, r"sabotage: writes changed: lost \[\], new \['mul_'\]"),
        (ChangesTheOutput, VerifyError, "torch.float16"),
        (ForgetsItsWeight, VerifyError, "o_proj.weight_unread is never read"),
        (DropsAnAppend, VerifyError, r"writes changed: lost \['cache_append.default'\]"),
        (Raises, PipelineError, "an error of ours"),
    ],
)
def test_a_pass_that_goes_wrong_leaves_the_graph_bitwise_as_it_was(graph, kind, error, message):
    first = parse("mla-mm-split")[0]
    run(graph, [first], Context(own_parameters=True))
    before, code = state_of(graph), printed(graph)
    with pytest.raises(error, match=message):
        run(graph, [kind()], Context())
    assert state_of(graph) == before
    assert printed(graph) == code
    graph.graph.lint()
    run(graph, parse("mla-absorb{when=always}"), Context())  # and it still works


@pytest.mark.parametrize("kind", [FixesASize, Guards])
def test_a_pass_that_fixes_a_dynamic_size_is_caught(kind):
    graph = planning_graph(build("llama"))  # of its own: what the shape environment believes stays
    with pytest.raises(VerifyError, match=r"fixed the sizes s\d+, which must stay dynamic") as caught:
        run(graph, [kind()], Context())
    assert "latentscan.ir.sizes" in caught.value.remedy


@dataclass(frozen=True)
class FindsNothing(Sabotage):
    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        return []


@dataclass(frozen=True)
class RefusesAll(Sabotage):
    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        return [Refusal(s.module, "too-wide", f"it is {s.facts['width']} wide", "make it narrow") for s in sites(graph)]


def test_a_pass_that_matches_nothing_is_an_error_with_its_reasons(graph):
    """pytorch#190886, vllm-ascend#5253: a pass drops from n matches to 0 and nobody notices."""
    with pytest.raises(RefusedError, match="sabotage: the pass found nothing to match") as caught:
        run(graph, [FindsNothing()], Context())
    assert caught.value.remedy
    with pytest.raises(RefusedError) as caught:
        run(graph, [RefusesAll()], Context())
    text = str(caught.value)
    assert "too-wide at model.layers.0.self_attn.o_proj and 1 more: it is 64 wide" in text
    assert text.endswith("Make it narrow")
    allowed = dataclass(frozen=True)(type("Optional", (FindsNothing,), {"may_be_empty": True}))()
    assert run(graph, [allowed], Context()).records[0].sites == []
    assert run(graph, [RefusesAll()], Context(), strict=False).records[0].refusals


def test_models_with_one_and_with_many_attentions_are_served_alike():
    """TensorRT-LLM#10358: a pass asserts exactly one match and dies on a hybrid."""
    for family, overrides, count in (
        ("nemotron_h", {"num_key_value_heads": 4}, 1),
        ("nemotron_h", {"num_key_value_heads": 4, "layers_block_type": ["attention", "mamba", "attention"]}, 2),
        ("gpt_neox", {"num_hidden_layers": 5}, 5),
    ):
        torch._dynamo.reset()
        graph = planning_graph(build(family, **overrides))
        records = run(graph, parse("latent-cache,mla-absorb{when=always}"), Context()).records
        assert [len(r.sites) for r in records] == [count, count]


def test_two_graphs_share_no_state(traced):
    """TensorRT-LLM#11928: two graphs share a pass's state."""
    passes = parse("mla-mm-split,mla-absorb{when=always}")
    context = Context(own_parameters=True)
    before = state_of(traced)
    alone = printed(run(traced.copy(), passes, context).graph)
    other = planning_graph(build("minicpm3", num_hidden_layers=3))
    left, right = traced.copy(), traced.copy()
    for index in range(len(passes)):  # interleaved, with the same objects
        for graph in (left, other, right):
            run(graph, passes[index : index + 1], context)
    assert printed(left) == printed(right) == alone
    assert state_of(traced) == before
    assert len(left.added) == len(right.added) == len(run(traced.copy(), passes, context).graph.added)
    assert left.events == right.events
    assert left.events is not right.events


def test_a_copy_and_its_original_do_not_feel_each_other(traced):
    before = state_of(traced)
    copy = traced.copy()
    run(copy, parse("mla-mm-split"), Context(own_parameters=True))
    assert state_of(traced) == before
    assert state_of(copy) != before
    assert not traced.added


# -- facts ------------------------------------------------------------------------------------------------------------


def planned(graph: Graph) -> dict[tuple[str, str], dict[str, Any]]:
    return facts_of(
        run(graph.copy(), parse("mla-mm-split,mla-absorb{when=always}"), Context(own_parameters=True)).records
    )


def test_a_graph_that_comes_to_other_facts_than_planned_raises(graph):
    facts = planned(graph)
    run(graph.copy(), parse("mla-absorb{when=always}"), Context(facts=facts))
    facts["mla-absorb", "model.layers.1.self_attn"] |= {"d_c": 17}
    before = state_of(graph)
    with pytest.raises(
        VerifyError, match=r"mla-absorb at model.layers.1.self_attn: planned with d_c = 17, .* gives 16"
    ):
        run(graph, parse("mla-absorb{when=always}"), Context(facts=facts))
    assert state_of(graph) == before


def test_a_site_that_must_be_rewritten_and_is_not_there_raises(graph):
    context = Context(required=frozenset({("mla-absorb", "model.layers.7.self_attn")}))
    with pytest.raises(VerifyError, match=r"model.layers.7.self_attn: this graph cannot be rewritten as planned"):
        run(graph, parse("mla-absorb{when=always}"), context)


def test_facts_hold_for_every_graph_so_they_hold_no_sizes_of_a_call(graph):
    for facts in planned(graph).values():
        assert all(isinstance(value, (int, float, str, bool)) for value in facts.values())
        assert "s" not in facts
        assert "t" not in facts


# -- hooks and choices ------------------------------------------------------------------------------------------------


def test_hooks_see_every_pass_before_and_after(graph):
    seen: list[tuple[str, int, str, int]] = []
    hooks = Hooks(
        before=lambda i, p, g, r: seen.append(("before", i, p.name, len(g.nodes))),
        after=lambda i, p, g, r: seen.append(("after", i, p.name, len(g.nodes))),
    )
    records = run(graph, parse("mla-mm-split,mla-absorb{when=always}"), Context(), hooks=hooks).records
    names = ["mla-mm-split", "mla-absorb"]
    assert [s[:3] for s in seen] == [(when, i, name) for i, name in enumerate(names) for when in ("before", "after")]
    assert [s[3] for s in seen] == [n for r in records for n in (r.nodes_before, r.nodes_after)]


@dataclass(frozen=True)
class OnlyLong(Sabotage):
    """A rewrite that pays for long inputs only."""

    name: ClassVar[str] = "only-long"

    def choice(self, graph: Graph, sites: list[Site]) -> pipeline.Choice | None:
        length = graph.shape(graph.node(sites[0].anchor))[1].node.expr
        return pipeline.Choice(length > 100, "length > 100", "doubled", "single")

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        node = graph.node(site.anchor)
        with graph.after(node, self.name):
            made = graph.call(torch.add, node, 0.0)
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def test_two_forms_are_made_when_they_are_wanted_and_passes_go_on_in_both(graph):
    begun: list[str] = []
    hooks = Hooks(before=lambda i, p, g, r: begun.append(p.name))
    passes = [OnlyLong(), *parse("mla-absorb{when=always}")]
    program = run(graph, passes, Context(), hooks=hooks)
    assert program.graph is None
    assert str(program.choice.rule) == "length > 100"
    assert begun == ["only-long"], "neither form is made yet"
    long, short = program.forced(True), program.forced(False)
    assert begun == ["only-long", "mla-absorb", "mla-absorb"]
    assert program.forced(True).graph is long.graph, "each form is made once"
    assert len(long.graph.calls(torch.add)) == len(short.graph.calls(torch.add)) + 2
    assert [r.nodes_after - r.nodes_before for r in long.records] != [
        r.nodes_after - r.nodes_before for r in short.records
    ]
    for form in (long, short):
        assert "latent_attention" in printed(form.graph)


# -- options ----------------------------------------------------------------------------------------------------------

# (pass, option) -> a family, a pipeline with the option's default and one with another value: what comes out differs,
# or the other value is refused where it would mean nothing.
MHA = ("llama", {"num_key_value_heads": 4})  # full rotation, as many key heads as query heads
OPTIONS: dict[tuple[str, str], tuple[Any, str, str]] = {
    ("mla-absorb", "when"): ("deepseek_v3", "mla-absorb", "mla-absorb{when=always}"),
    ("mha-to-mla", "rank"): ("llama", "mha-to-mla", "mha-to-mla{rank=16,rope_dim=16}"),
    ("mha-to-mla", "rope_dim"): ("llama", "mha-to-mla{rank=16}", "mha-to-mla{rank=16,rope_dim=16}"),
    ("mha-to-mla", "method"): ("llama", "mha-to-mla", "mha-to-mla{method=pca}"),
    ("mha-to-mla", "balance"): ("llama", "mha-to-mla", "mha-to-mla{balance=false}"),
    ("mha-to-mla", "allocation"): ("llama", "mha-to-mla", "mha-to-mla{allocation=energy}"),
    ("mha-to-mla", "full_rope"): ("olmo2", "mha-to-mla", "mha-to-mla{full_rope=auto}"),
    ("mha-to-mla", "max_condition"): (
        MHA,
        "mha-to-mla{full_rope=auto,max_condition=1}",
        "mha-to-mla{full_rope=auto,max_condition=1000000000}",
    ),
    ("mla-swap-core-attn-out", "keep_last"): (
        "llama",
        "mla-swap-core-attn-out",
        "mla-swap-core-attn-out{keep_last=false}",
    ),
    ("mla-zero-memory", "until"): ("llama", "mla-zero-memory", "mla-zero-memory{until=attention}"),
}


# Options that change nothing in the graph that a pass is given, and the test that shows what they do change.
ELSEWHERE = {
    ("overlap-collectives", "growth"): "tests/lowering/test_schedule.py::test_memory_may_not_grow_beyond_what_was_said",
    ("mamba-context-parallel", "algorithm"):
        "tests/passes/test_context_parallel.py::test_states_go_by_the_algorithm_that_sends_fewer",
    ("mamba-context-parallel", "gradients"):
        "tests/passes/test_context_parallel.py::"
        "test_every_layer_exchanges_tail_and_state_and_every_weight_is_summed_once",
    ("tensor-parallel", "experts"): "tests/passes/test_experts.py::test_ranks_hold_whole_experts_or_features_of_all",
    ("ulysses", "gradients"): "tests/passes/test_context_parallel.py::test_ulysses_leaves_partial_gradients_if_asked",
}  # fmt: skip


def outcome(family: Any, text: str) -> str:
    from latentscan.runtime.calibration import statistics_for

    try:
        passes = parse(text)
        name, overrides = (family, {}) if isinstance(family, str) else family
        model = build(name, **overrides)
        tokens = torch.arange(64).remainder(101).reshape(2, 32)
        wants = any(getattr(p, "wants_statistics", False) for p in passes)
        statistics = statistics_for(model, passes, tokens) if wants else None
        program = run(planning_graph(model), passes, Context(statistics=statistics, own_parameters=True))
    except (PipelineError, RefusedError) as error:
        return f"{type(error).__name__}: {error}"
    return "".join(f"{r.sites} {r.refusals} {r.choice}\n" for r in program.records) + printed(
        program.forced(True).graph
    )


@pytest.mark.parametrize(("name", "option"), [(n, o) for n in REGISTRY for o in pass_class(n).options()])
def test_no_option_is_ignored(name, option):
    """torchtitan#3223: options that are silently ignored. An option that is declared needs a line in ``OPTIONS``."""
    if (name, option) in ELSEWHERE:
        path, _, test = ELSEWHERE[name, option].partition("::")
        assert f"def {test}(" in (Path(__file__).parents[2] / path).read_text(encoding="utf-8")
        return
    assert (name, option) in OPTIONS, f"say in OPTIONS what {name}{{{option}=...}} changes"
    family, default, other = OPTIONS[name, option]
    assert outcome(family, default) != outcome(family, other)


def test_both_values_of_balance_give_other_weights():
    """balance changes numbers only: the weights that the recipes make."""
    from latentscan.runtime.calibration import statistics_for
    from latentscan.runtime.numerics import Probe

    made = []
    model = build("llama")
    with torch.no_grad():
        for layer in model.model.layers:  # keys far larger than values, as in trained models
            layer.self_attn.k_proj.weight.mul_(8)
    graph = planning_graph(model)
    tokens = torch.arange(256).remainder(101).reshape(4, 64)
    for balance in ("true", "false"):
        passes = parse(f"mha-to-mla{{method=pca,rank=16,rope_dim=16,balance={balance}}}")
        statistics = statistics_for(model, passes, tokens)
        after = run(graph.copy(), passes, Context(statistics=statistics, own_parameters=True)).graph
        made.append(Probe(model, graph)._made(after, {}))
    assert made[0].keys() == made[1].keys()
    assert any(not torch.allclose(made[0][path], made[1][path], atol=1e-4) for path in made[0])
