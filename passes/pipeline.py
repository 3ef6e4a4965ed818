"""Pipelines: text to passes, their order, and running them over a graph."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import sympy
import torch.nn.functional as F
from torch import fx

from latentscan.ir.axes import DRAWS
from latentscan.ir.errors import LatentscanError, PipelineError, RefusedError, VerifyError
from latentscan.ir.graph import Graph, module_path
from latentscan.ir.verify import verify
from latentscan.passes.base import Choice, Context, Pass, Refusal, Site

# name -> module:class. One line registers a pass; the module is imported when the pass is asked for.
REGISTRY: dict[str, str] = {
    "mla-fa-without-pad": "latentscan.passes.mla_fa_without_pad:MlaFaWithoutPad",
    "mha-to-mla": "latentscan.passes.mha_to_mla:MhaToMla",
    "mla-mm-split": "latentscan.passes.mla_mm_split:MlaMmSplit",
    "latent-cache": "latentscan.passes.latent_cache:LatentCache",
    "mla-absorb": "latentscan.passes.mla_absorb:MlaAbsorb",
    "tensor-parallel": "latentscan.passes.tensor_parallel:TensorParallel",
    "sequence-parallel": "latentscan.passes.sequence_parallel:SequenceParallel",
    "fuse-mamba": "latentscan.lowering.fuse_mamba:FuseMamba",
    "sparse-attention": "latentscan.passes.sparse_attention:SparseAttention",
    "mla-swap-core-attn-out": "latentscan.passes.mla_swap_core_attn_out:MlaSwapCoreAttnOut",
    "mla-zero-memory": "latentscan.passes.mla_zero_memory:MlaZeroMemory",
    "mamba-context-parallel": "latentscan.passes.mamba_context_parallel:MambaContextParallel",
    "ulysses": "latentscan.passes.ulysses:Ulysses",
    "overlap-collectives": "latentscan.passes.overlap_collectives:OverlapCollectives",
}


def pass_class(name: str) -> type[Pass]:
    """The class of a pass. Raises PipelineError with the nearest name for an unknown one."""
    if name not in REGISTRY:
        raise PipelineError(
            f"there is no pass {name!r}", remedy=f"the passes are {', '.join(REGISTRY)}{nearest(name, REGISTRY)}"
        )
    module, attribute = REGISTRY[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {found[0]}?" if found else ""


_ITEM = re.compile(r"\s*([^,{}\s]+)\s*(?:\{([^{}]*)\})?\s*(?:,|$)")


def parse(text: str) -> tuple[Pass, ...]:
    """Passes from a text such as ``mha-to-mla{rank=128,rope_dim=32},latent-cache,mla-absorb``.

    Raises:
        PipelineError: bad syntax, an unknown pass or option, a value of the wrong type, or a wrong order.
    """
    passes = []
    position = 0 if text.strip() else len(text)
    while position < len(text):
        match = _ITEM.match(text, position)
        if match is None:
            raise PipelineError(
                f"cannot read the pipeline at character {position}: {text[position:][:40]!r}",
                remedy="write pass{option=value,option=value},pass",
            )
        name, options = match.group(1), match.group(2)
        given: dict[str, str] = {}
        for part in (options or "").split(","):
            if not part.strip():
                continue
            key, equals, value = part.partition("=")
            if not equals:
                raise PipelineError(f"pass {name}: option {part.strip()!r} has no value", remedy="write option=value")
            if key.strip() in given:
                raise PipelineError(f"pass {name}: option {key.strip()!r} is given twice", remedy="give it once")
            given[key.strip()] = value.strip()
        passes.append(pass_class(name).from_options(given))
        position = match.end()
        if position == len(text) and text.rstrip().endswith(","):
            raise PipelineError("the pipeline ends with a comma", remedy="remove it or add a pass")
    check_order(passes)
    return tuple(passes)


def to_text(passes: Sequence[Pass]) -> str:
    """The inverse of :func:`parse`."""
    return ",".join(p.text() for p in passes)


def check_order(passes: Sequence[Pass]) -> None:
    """Raise PipelineError unless declared orders and needs hold; the message names the pair and the right order."""
    names = [p.name for p in passes]
    for name in names:
        if names.count(name) > 1:
            raise PipelineError(f"pass {name} is in the pipeline twice", remedy="name it once")
    declared = nx.DiGraph()
    declared.add_nodes_from(names)
    for p in passes:
        for other in p.needs:
            if other not in names:
                raise PipelineError(f"pass {p.name} needs {other}", remedy=f"put {other} before {p.name}")
        declared.add_edges_from((o, p.name) for o in (*p.after, *p.needs) if o in names)
        declared.add_edges_from((p.name, o) for o in p.before if o in names)
    if not nx.is_directed_acyclic_graph(declared):
        cycle = " -> ".join(a for a, _ in nx.find_cycle(declared))
        raise PipelineError(
            f"the passes' declared order is a cycle: {cycle}", remedy="one of the declarations is wrong"
        )
    at = {name: i for i, name in enumerate(names)}
    for first, second in declared.edges:
        if at[first] > at[second]:
            right = ",".join(nx.lexicographical_topological_sort(declared, key=lambda n: at[n]))
            raise PipelineError(f"pass {first} must come before {second}", remedy=f"write {right}")


@dataclass
class PassRecord:
    """What one pass did to one graph."""

    name: str
    text: str
    tier: str
    sites: list[Site] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    nodes_before: int = 0
    nodes_after: int = 0
    seconds: float = 0.0
    choice: Choice | None = None
    error: float | None = None  # worst relative difference to the graph before, if it was checked
    tolerance: float | None = None


@dataclass
class Program:
    """A graph after a pipeline: either finished, or waiting for a choice between two forms.

    Attributes:
        graph: the finished graph, or None if there is a choice.
        choice: which form pays for which shapes.
        yes, no: make the two forms; each is run at most once.
        records: what the passes did so far.
    """

    records: list[PassRecord]
    graph: Graph | None = None
    choice: Choice | None = None
    yes: Callable[[], Program] | None = None
    no: Callable[[], Program] | None = None
    symbols: dict[sympy.Symbol, str] = field(default_factory=dict)

    def forced(self, absorb: bool) -> Program:
        """The form that the choice would take; a finished program is its own."""
        if self.choice is None:
            return self
        made = self.yes if absorb else self.no
        assert made is not None
        return made().forced(absorb)


@dataclass(frozen=True)
class Hooks:
    """Called between passes: dumps, timing and numerics hang here, never inside a pass.

    Attributes:
        before, after: ``(pass index, pass, graph, record)``.
    """

    before: Callable[[int, Pass, Graph, PassRecord], None] | None = None
    after: Callable[[int, Pass, Graph, PassRecord], None] | None = None


def run(
    graph: Graph,
    passes: Sequence[Pass],
    context: Context,
    *,
    strict: bool = True,
    one_phase: bool = False,
    hooks: Hooks = Hooks(),
    start: int = 0,
    records: list[PassRecord] | None = None,
) -> Program:
    """Run passes over a graph, which is changed in place.

    Args:
        strict: a pass that finds no site raises (unless it declares otherwise). Off for graphs in which a phase
            simply has nothing to do, such as training with a pass on caches.
        one_phase: the graph may be of a phase without a cache; a strict run then lets a pass on caches find nothing.

    Raises:
        RefusedError: a pass found no site; the message carries its refusals.
        VerifyError and any error of a pass: the graph is then as it was before that pass.
    """
    records = list(records or [])
    context = dataclasses.replace(context, pipeline=tuple(p.name for p in passes), passes=tuple(passes))
    for index in range(start, len(passes)):
        current = passes[index]
        record = PassRecord(current.name, current.text(), current.tier.value, nodes_before=len(graph.nodes))
        records.append(record)
        if hooks.before:
            hooks.before(index, current, graph, record)
        began = time.perf_counter()
        for found in current.plan(graph, context):
            (record.sites if isinstance(found, Site) else record.refusals).append(found)  # type: ignore[arg-type]
        record.nodes_after = record.nodes_before
        record.seconds = time.perf_counter() - began
        check_facts(current, record, context, graph)
        if not record.sites:
            idle = one_phase and current.phases == "cached" and not is_cached(graph) and not record.refusals
            if strict and not current.allows_nothing(record.refusals) and not idle:
                raise RefusedError(no_site_text(current, record), where=current.name, remedy=first_remedy(record))
            if hooks.after:
                hooks.after(index, current, graph, record)
            continue
        record.choice = current.choice(graph, record.sites)
        condition = record.choice.condition if record.choice else sympy.true
        if condition not in (sympy.true, sympy.false):
            return _branch(graph, passes, context, (strict, one_phase), hooks, index, records)
        if condition == sympy.true:
            apply_pass(graph, current, record, context)
        if hooks.after:
            hooks.after(index, current, graph, record)
    return Program(records, graph)


def _branch(
    graph: Graph,
    passes: Sequence[Pass],
    context: Context,
    how: tuple[bool, bool],
    hooks: Hooks,
    index: int,
    records: list[PassRecord],
) -> Program:
    """A program with both forms of pass ``index``, each made when it is first wanted."""
    made: dict[bool, Program] = {}
    current, record = passes[index], records[-1]

    def form(applied: bool) -> Callable[[], Program]:
        def make() -> Program:
            if applied not in made:
                copy = graph.copy()
                own = PassRecord(**record.__dict__)
                if applied:
                    apply_pass(copy, current, own, context)
                if hooks.after:
                    hooks.after(index, current, copy, own)
                strict, one_phase = how
                made[applied] = run(
                    copy, passes, context, strict=strict, one_phase=one_phase, hooks=hooks, start=index + 1,
                    records=[*records[:-1], own],
                )  # fmt: skip
            return made[applied]

        return make

    return Program(records, None, record.choice, form(True), form(False), graph.symbols())


def apply_pass(graph: Graph, current: Pass, record: PassRecord, context: Context) -> None:
    """Apply a pass to all its sites, or leave the graph as it was and raise."""
    began = time.perf_counter()
    saved, fixed = graph.copy(), graph.specialized()
    try:
        for site in record.sites:
            current.apply(graph, site, context)
        newly = graph.specialized() - fixed
        if newly:
            raise VerifyError(
                f"the pass fixed the sizes {', '.join(sorted(map(str, newly)))}, which must stay dynamic",
                where=current.name,
                remedy="compare sizes by latentscan.ir.sizes instead of Python's ==",
            )
        graph.clean()
        verify(graph, before=saved, name=current.name)
    except LatentscanError:
        graph.restore(saved)
        raise
    except Exception as error:
        graph.restore(saved)
        raise VerifyError(
            f"the pass failed: {type(error).__name__}: {error}", where=current.name, remedy="report it with a dump"
        ) from error
    record.nodes_after = len(graph.nodes)
    record.seconds += time.perf_counter() - began
    graph.events.append(f"{current.text()}: {len(record.sites)} sites")


def check_facts(current: Pass, record: PassRecord, context: Context, graph: Graph) -> None:
    """Every graph of one model comes to the same facts at the same module, and rewrites what has lost its weights."""
    at = {site.module for site in record.sites}
    required = set(context.required)
    if current.phases == "cached" and is_cached(graph):  # every graph must store the same form
        required |= set(context.facts)
    for name, module in sorted(required):
        if name == current.name and module not in at:
            near = [r for r in record.refusals if not module or not r.module or f"{module}.".startswith(f"{r.module}.")]
            near.sort(key=lambda r: r.module not in (module, ""))  # its own first, then those of what it is in
            parts = [r.reason for r in record.refusals if module and r.module.startswith(f"{module}.")]
            why = near[0].reason if near else "; ".join(dict.fromkeys(parts)) or "it is not in this graph"
            remedy = "other graphs of this model were rewritten here; call it as it was wrapped, or unwrap it"
            if DRAWS in why:
                remedy = "set this dropout to 0 in the configuration; evaluation and generation do not need it"
            dropped = written_out_dropout(graph, module)
            if dropped is not None and not {module, ""} & {r.module for r in record.refusals}:
                why = (
                    f"its attention is written out with a dropout of {dropped}, in which no pass finds keys and values"
                )
                remedy = (
                    "set the attention dropout to 0 in the configuration, or load it with attn_implementation='sdpa'"
                )
            raise VerifyError(
                f"this graph cannot be rewritten as planned: {why}", where=f"{current.name} at {module}", remedy=remedy
            )
    for site in record.sites:
        planned = context.facts.get((current.name, site.module))
        if planned is None:
            continue
        for key, value in planned.items():
            if key in site.facts and isinstance(value, (int, float, str, bool)) and site.facts[key] != value:
                raise VerifyError(
                    f"planned with {key} = {value!r}, but this graph gives {site.facts[key]!r}",
                    where=f"{current.name} at {site.module}",
                    remedy="the model changed after it was wrapped: wrap it again",
                )


def is_cached(graph: Graph) -> bool:
    """Whether the graph appends to a cache of ours."""
    return any(getattr(n.target, "_opname", "") == "cache_append" for n in graph.graph.nodes)


def written_out_dropout(graph: Graph, module: str) -> float | None:
    """The probability with which a module's attention, in plain operations, drops weights; None if there is none."""
    for node in graph.calls(F.dropout):
        source: Any = node.args[0]
        for _ in range(2):  # a cast may lie between
            if getattr(source.target, "__name__", source.target) == "softmax":
                p = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else 0.5)
                if f"{module_path(node)}.".startswith(f"{module}."):
                    return float(p)  # type: ignore[arg-type]
            source = source.args[0] if source.args and isinstance(source.args[0], fx.Node) else source
    return None


def no_site_text(current: Pass, record: PassRecord) -> str:
    if not record.refusals and current.phases == "cached":
        return "the pass found no cache that keys and values are appended to: no attention here keeps any"
    if not record.refusals:
        return "the pass found nothing to match in this graph"
    groups: dict[tuple[str, str], list[str]] = {}
    for refusal in record.refusals:
        groups.setdefault((refusal.rule, refusal.reason), []).append(refusal.module)
    parts = [f"{rule} at {_modules(modules)}: {reason}" for (rule, reason), modules in list(groups.items())[:3]]
    return "the pass refused every place: " + "; ".join(parts)


def first_remedy(record: PassRecord) -> str:
    if record.refusals:
        return record.refusals[0].remedy
    return "see `latentscan explain` for its preconditions, or leave it out of the pipeline"


def _modules(modules: list[str]) -> str:
    return modules[0] if len(modules) == 1 else f"{modules[0]} and {len(modules) - 1} more"


def facts_of(records: Iterable[PassRecord]) -> dict[tuple[str, str], dict[str, Any]]:
    """The facts that later graphs of the same model must agree with (shape-dependent ones left out)."""
    return {
        (r.name, s.module): {k: v for k, v in s.facts.items() if isinstance(v, (int, float, str, bool))}
        for r in records
        for s in r.sites
    }
