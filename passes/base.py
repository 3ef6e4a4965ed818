"""What a pass is: it plans sites or refuses them with reasons, and applies one site at a time."""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import sympy

from latentscan.ir.errors import PipelineError
from latentscan.ir.graph import Graph
from latentscan.ir.mesh import Mesh


class Tier(enum.Enum):
    """How far a pass may move the numbers."""

    EXACT = "exact"  # bitwise equal
    REASSOCIATING = "reassociating"  # equal up to rounding; tolerance from dtype and reduction length
    APPROXIMATE = "approximate"  # needs to be asked for; its error is measured and reported


@dataclass(frozen=True)
class Site:
    """One place where a pass applies.

    Attributes:
        module: path of the module, such as ``model.layers.0.self_attn``.
        rule: name of the rule that decided, in kebab-case.
        anchor: name of the node that the site hangs on (valid in the planned graph only).
        facts: the sizes and choices that make up the decision; must agree in every graph of one model.
        note: one line for people.
    """

    module: str
    rule: str
    anchor: str
    facts: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Refusal:
    """One place where a pass does not apply, and why.

    Attributes:
        module: path of the module.
        rule: name of the rule that refused, in kebab-case.
        reason: what stands in the way, with the actual values.
        remedy: what the user can do about it.
    """

    module: str
    rule: str
    reason: str
    remedy: str


def foreign_cache(module: str, given: str = "") -> Refusal:
    """Why a pass leaves an attention alone whose keys and values a cache of the library holds.

    Args:
        given: name of the graph's input that holds them; empty where the graph fills a new cache.
    """
    reason = "the model fills a cache of the library's own, which takes keys and values as they are"
    if given:
        reason = f"keys and values are joined with {given}, which a cache of the library's own holds as they were"
    return Refusal(
        module,
        "foreign-cache",
        reason,
        "use latentscan.wrap(model, ...), or give the model a latentscan.GraphCache",
    )


@dataclass(frozen=True)
class Choice:
    """A pass that pays only for some shapes: apply it where ``condition`` holds.

    Attributes:
        condition: sympy relation over the graph's shape symbols.
        rule: the formula as text, for reports.
        yes, no: names of the two forms.
    """

    condition: sympy.logic.boolalg.Boolean
    rule: str
    yes: str = "applied"
    no: str = "not applied"


@dataclass(frozen=True)
class Context:
    """What a pass may ask of the run it is part of.

    Attributes:
        facts: (pass name, module path) -> the facts that an earlier graph of the same model was given.
        statistics: calibration results by module path, handed in by the runtime; None if there are none.
        own_parameters: new weights may become Parameters of the model (``wrap``); otherwise every recipe must be
            differentiable in place (the plain backend).
        required: (pass name, module path) that must be rewritten in this graph, because old weights are gone.
        meta: weights hold no numbers (planning on the meta device).
        pipeline: names of all passes of the run, in order. passes: they themselves, with their options.
        mesh: what parallel passes split the model over, and which rank this is; None: one process.
    """

    facts: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    statistics: dict[str, Any] | None = None
    own_parameters: bool = False
    required: frozenset[tuple[str, str]] = frozenset()
    meta: bool = False
    mesh: Mesh | None = None
    pipeline: tuple[str, ...] = ()
    passes: tuple[Pass, ...] = ()


@dataclass(frozen=True)
class Pass:
    """A graph rewrite. Subclasses are frozen dataclasses whose fields are the pass's options.

    Class attributes:
        name: kebab-case name, as written in a pipeline.
        tier: how far the numbers may move.
        summary: one line.
        math: the formula or the section that it comes from, and the preconditions.
        after, before: names of passes that must come earlier or later if they are in the pipeline at all.
        needs: names of passes that must be in the pipeline.
        may_be_empty: finding no site is no error.
        phases: in which traced graphs it has something to do: "any", "cached" (a cache is appended to).
    """

    name: ClassVar[str] = ""
    tier: ClassVar[Tier] = Tier.EXACT
    summary: ClassVar[str] = ""
    math: ClassVar[str] = ""
    after: ClassVar[tuple[str, ...]] = ()
    before: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()
    may_be_empty: ClassVar[bool] = False
    phases: ClassVar[str] = "any"

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        """Sites and refusals in ``graph``, in its order. Read-only."""
        raise NotImplementedError

    def allows_nothing(self, refusals: Sequence[Refusal]) -> bool:
        """Whether finding no site, for these reasons, is no error."""
        return self.may_be_empty

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        """Rewrite one site. New weights go through ``graph.add_weights``."""
        raise NotImplementedError

    def choice(self, graph: Graph, sites: list[Site]) -> Choice | None:
        """For which shapes the pass pays; None if it always applies."""
        return None

    # -- options --------------------------------------------------------------------------------------------------

    @classmethod
    def options(cls) -> dict[str, dataclasses.Field[Any]]:
        return {f.name: f for f in dataclasses.fields(cls)}

    @classmethod
    def from_options(cls, given: dict[str, str]) -> Pass:
        """A pass from option texts; every error names the pass, the option and what would be right."""
        known = cls.options()
        types = typing.get_type_hints(cls)
        values = {}
        for key, text in given.items():
            if key not in known:
                from latentscan.passes.pipeline import nearest

                have = ", ".join(known) or "none"
                raise PipelineError(
                    f"pass {cls.name} has no option {key!r}", remedy=f"its options are: {have}{nearest(key, known)}"
                )
            values[key] = _parse(cls.name, key, types[key], text, known[key])
        made = cls(**values)
        made.check_options()
        return made

    def check_options(self) -> None:
        """Raise PipelineError for values that can never work."""

    def text(self) -> str:
        """The pass as written in a pipeline, with the options that differ from their defaults."""
        parts = []
        for name, spec in self.options().items():
            value = getattr(self, name)
            if value != spec.default:
                parts.append(f"{name}={_print(value)}")
        return self.name + ("{" + ",".join(parts) + "}" if parts else "")


def _print(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "|".join(str(v) for v in value)
    return "none" if value is None else str(value)


def _parse(pass_name: str, key: str, kind: Any, text: str, spec: dataclasses.Field[Any]) -> Any:
    allowed = spec.metadata.get("choices")
    if allowed and text not in allowed:
        raise PipelineError(
            f"pass {pass_name}: option {key}={text!r} is not one of {', '.join(allowed)}", remedy="use one of these"
        )
    options = typing.get_args(kind)
    if type(None) in options:
        if text == "none":
            return None
        kind = next(o for o in options if o is not type(None))
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return tuple(_parse(pass_name, key, item, part, spec) for part in text.split("|"))
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if kind in (int, float, str):
            return kind(text)
    except (KeyError, ValueError):
        pass
    want = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, str(kind))
    raise PipelineError(f"pass {pass_name}: option {key}={text!r} is not {want}", remedy=f"give {key} as {want}")
