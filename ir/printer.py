"""The text form of a graph, and the difference between two.

One line a value, grouped by module; weights by their paths; sizes as s0, s1, ... in the order in which they appear.
Layers that are the same but for their number (and long lists of indices) are shown once. Names are Dynamo's without
their running numbers, counted anew in each layer, so that equal layers have equal texts. A :class:`Printer` remembers
the names that it gave: what a pass left alone keeps its name in the text after the pass.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from latentscan.ir.capture import source_name
from latentscan.ir.graph import PRODUCED_BY, VALUE, Graph, module_path, normal_path
from latentscan.ir.sizes import expression
from latentscan.ir.weights import bytes_of

_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip
_WIDTH = 84  # column of the types
_BEFORE = "the layer before"
_INDICES = re.compile(r"\[\d+(?:, \d+){7,}\]")
_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=[.:]|$)")


def text(graph: Graph) -> str:
    """The text form of a graph; the same for every run of the same model."""
    return Printer().text(graph)


def diff(before: Graph, after: Graph) -> str:
    """What changed from ``before`` to ``after``, a graph made from it by passes: a unified diff of each module.

    Layers that changed in the same way are shown once. Empty if nothing changed.
    """
    return Printer().diff(before, after)


@dataclass
class Unit:
    """A layer (up to its number, such as ``model.layers.3``), or a module that lies outside all layers.

    Attributes:
        path: its module path.
        family: the path without the number, such as ``model.layers``; None outside layers.
        number: of the layer.
        nodes: its nodes in order.
        body: its text, the same for equal layers.
        takes: where the values come from that are named in0, in1, ... in the body.
    """

    path: str
    family: str | None
    number: int | None
    nodes: list[fx.Node] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    takes: list[str] = field(default_factory=list)


class Printer:
    """Prints graphs that come from each other, with names that stay."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}  # (unit, node name) -> name in the text
        self._taken: set[tuple[str, str]] = set()  # (unit, name in the text)
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}

    # -- texts ----------------------------------------------------------------------------------------------------

    def text(self, graph: Graph) -> str:
        units = self._units(graph)
        parts = ["\n".join(self._head(graph))]
        for run in _runs(units, lambda a, b: _elided(a.body) == _elided(b.body) and _follows(a.takes, b.takes)):
            parts.append("\n".join([_title(run), *self._takes(run), *run[0].body]))
        parts.append("\n".join(["outputs", *self._outputs(graph, _owners(units))]))
        return "\n\n".join(parts) + "\n"

    def diff(self, before: Graph, after: Graph) -> str:
        old_head, old, old_end = self._sections(before)
        new_head, new, new_end = self._sections(after)
        parts = _unified("graph", old_head, new_head)
        keys = list(new)
        for index, key in enumerate(old):  # a unit that is gone keeps its place
            if key not in new:
                keys.insert(min(index, len(keys)), key)
        pairs = [(key, old.get(key), new.get(key)) for key in keys]
        position = 0
        while position < len(pairs):
            _, was, now = pairs[position]
            last = position
            while last + 1 < len(pairs) and _same_change(pairs[last][1:], pairs[last + 1][1:]):
                last += 1
            run = [p[2] or p[1] for p in pairs[position : last + 1]]
            title = _title([u for u in run if u is not None])
            parts += _unified(title, [] if was is None else was.body, [] if now is None else now.body)
            position = last + 1
        parts += _unified("outputs", old_end, new_end)
        return "\n".join(parts) + ("\n" if parts else "")

    def _sections(self, graph: Graph) -> tuple[list[str], dict[tuple[str, int], Unit], list[str]]:
        units = self._units(graph)
        found: dict[tuple[str, int], Unit] = {}
        seen: dict[str, int] = {}
        for unit in units:
            seen[unit.path] = seen.get(unit.path, -1) + 1
            found[unit.path, seen[unit.path]] = unit
        return self._head(graph)[1:], found, self._outputs(graph, _owners(units))

    def _head(self, graph: Graph) -> list[str]:
        cached = any(getattr(n.target, "_opname", "") == "cache_append" for n in graph.graph.nodes)
        kinds = ("training" if graph.training else "evaluation") + (", cached" if cached else "")
        read = {w.path: w.value for w in graph.weights.values() if graph.node(w.placeholder).users}
        calls = sum(n.op.startswith("call") for n in graph.graph.nodes)
        size = sum(bytes_of(t) for t in read.values())
        lines = [f"graph ({kinds}): {calls} calls, {len(read)} weights of {size:,} bytes", "inputs"]
        inputs = []
        for node in graph.graph.nodes:
            if node.op == "placeholder" and node.name not in graph.weights and _is_value(node):
                inputs.append(_column(f"  {_input_name(node)}", self.type(node.meta.get(VALUE))))
        lines += _fold_lines(inputs)
        if graph.added:
            made = []
            for added in graph.added:
                kind = self.type(graph.value(graph.node(added.placeholder)))
                made.append(_column(f"  {added.path}", f"{kind} from {', '.join(added.recipe.sources)}"))
            lines += ["new weights", *_fold_lines(made)]
        return lines

    def _takes(self, run: Sequence[Unit]) -> list[str]:
        lines = []
        for index, origin in enumerate(run[0].takes):
            later = run[-1].takes[index]
            then = f", then {later}" if later != origin else ""
            lines.append(f"  in{index} is {origin}{then}")
        return lines

    def _outputs(self, graph: Graph, owners: dict[fx.Node, Unit]) -> list[str]:
        output = next(n for n in graph.graph.nodes if n.op == "output")
        lines = []
        for node in output.all_input_nodes:
            owner = owners.get(node)
            where = "" if owner is None or owner.family is None else f"{owner.path}: "
            name = graph.weights[node.name].path if node.name in graph.weights else self._global_name(node, owner)
            lines.append(_column(f"  {where}{name}", self.type(node.meta.get(VALUE))))
        return _fold_lines(lines)

    # -- units ----------------------------------------------------------------------------------------------------

    def _units(self, graph: Graph) -> list[Unit]:
        units: list[Unit] = []
        for node in graph.graph.nodes:
            if node.op in ("placeholder", "output") or not _is_value(node):
                continue
            path, family, number = _unit_of(module_path(node))
            if not units or units[-1].path != path:
                units.append(Unit(path, family, number))
            units[-1].nodes.append(node)
        owners = _owners(units)
        for unit in units:
            for node in unit.nodes:
                self._name(node, "" if unit.family is None else unit.path)
        for unit in units:
            self._write(graph, unit, owners)
        return units

    def _write(self, graph: Graph, unit: Unit, owners: dict[fx.Node, Unit]) -> None:
        inside = ""
        taken: dict[fx.Node, str] = {}

        def alias(node: fx.Node, origin: str) -> str:
            if node not in taken:
                taken[node] = f"in{len(taken)}"
                unit.takes.append(origin)
            return taken[node]

        def name(node: fx.Node) -> str:
            value = node.meta.get(VALUE)
            if not _is_value(node):
                return self.size(value)
            if node.name in graph.weights:
                path = graph.weights[node.name].path
                return path.removeprefix(unit.path) if unit.family and path.startswith(unit.path + ".") else path
            if node.op == "placeholder":
                shown = _numbered(_input_name(node), unit)
                if "{i}" in shown or unit.family is None or not _only_for(node, unit, owners):
                    return shown
                return alias(node, f"{shown} of the inputs")
            owner = owners.get(node)
            if owner is None or owner.path == unit.path or (owner.family is None and unit.family is None):
                return self._global_name(node, owner)
            if unit.family is not None and (owner.family is not None or _only_for(node, unit, owners)):
                before = owner.family == unit.family and owner.number == unit.number - 1  # type: ignore[operator]
                whose = _BEFORE if before else owner.path or "the model itself"
                return alias(node, f"{self._global_name(node, owner)} of {whose}")
            where = f"{owner.path}: " if owner.family is not None else ""
            return f"{where}{self._global_name(node, owner)}"

        for node in unit.nodes:
            path = module_path(node)
            path = path.removeprefix(unit.path) if unit.family else ""
            if path != inside:
                unit.body.append(f"  {path or '(the layer itself)'}")
                inside = path
            mark = node.meta.get(PRODUCED_BY)
            line = f"    {self._global_name(node, unit)} = {self._call(node, name)}"
            unit.body.append(_column(line, self.type(node.meta.get(VALUE)) + (f"  <- {mark}" if mark else "")))

    # -- names ----------------------------------------------------------------------------------------------------

    def _name(self, node: fx.Node, scope: str) -> str:
        """The node's name in the text: Dynamo's without its number, numbered anew within ``scope``."""
        known = self._names.get((scope, node.name))
        if known is not None:
            return known
        base = re.sub(r"(_\d+)+$", "", node.name) or node.name
        name, count = base, 0
        while (scope, name) in self._taken:
            count += 1
            name = f"{base}.{count}"
        self._taken.add((scope, name))
        self._names[scope, node.name] = name
        return name

    def _global_name(self, node: fx.Node, owner: Unit | None) -> str:
        if node.op == "placeholder":
            return _input_name(node)
        return self._name(node, "" if owner is None or owner.family is None else owner.path)

    # -- calls, values and sizes ----------------------------------------------------------------------------------

    def _call(self, node: fx.Node, name: Any) -> str:
        def show(value: Any) -> str:
            if isinstance(value, fx.Node):
                return name(value)
            if isinstance(value, (tuple, list)):
                inner = ", ".join(map(show, value))
                comma = "," if len(value) == 1 else ""
                return f"({inner}{comma})" if isinstance(value, tuple) else f"[{inner}]"
            if isinstance(value, slice):
                ends = ["" if v is None else show(v) for v in (value.start, value.stop)]
                return ":".join(ends) + ("" if value.step is None else f":{show(value.step)}")
            if isinstance(value, dict):
                return "{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}"
            return self._constant(value)

        if node.op == "get_attr":
            return str(node.target)
        if node.target is operator.getitem:
            index = node.args[1]
            items = index if isinstance(index, tuple) else (index,)
            return f"{show(node.args[0])}[{', '.join(map(show, items))}]"
        arguments = list(map(show, node.args))
        arguments += [f"{key}={show(value)}" for key, value in node.kwargs.items()]
        if node.op == "call_method":
            return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
        return f"{_function(node.target)}({', '.join(arguments)})"

    def _constant(self, value: Any) -> str:
        if value is Ellipsis:
            return "..."
        if isinstance(value, torch.dtype):
            return _DTYPES.get(value, str(value).removeprefix("torch."))
        if isinstance(value, (torch.device, str)):
            return repr(str(value))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.size(value)
        return repr(value) if isinstance(value, (int, float, bool, type(None), complex)) else _plain(value)

    def size(self, value: Any) -> str:
        """A dimension, or a tuple of them, with normalised symbols."""
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(self.size, value))})"
        if not isinstance(value, torch.SymInt):
            return repr(value) if not isinstance(value, (torch.SymFloat, torch.SymBool)) else str(value)
        expr = expression(value)
        for symbol in sorted(expr.free_symbols, key=lambda s: s.name):
            if symbol not in self._symbols:
                self._symbols[symbol] = sympy.Symbol(f"s{len(self._symbols)}", integer=True, positive=True)
        return str(expr.xreplace(self._symbols)).replace(" ", "")

    def type(self, value: Any) -> str:
        """A value's dtype and shape, such as ``f32[s0, s1, 64]``."""
        if isinstance(value, torch.Tensor):
            dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
            return f"{dtype}[{', '.join(map(self.size, value.shape))}]"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(self.type, value))})"
        return "" if value is None else type(value).__name__


def _is_value(node: fx.Node) -> bool:
    """Whether a node has a line of its own; sizes are written where they are used."""
    value = node.meta.get(VALUE)
    if isinstance(value, (tuple, list)) and value:
        return not all(isinstance(v, (int, torch.SymInt)) for v in value)
    return not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool)


def _unit_of(path: str) -> tuple[str, str | None, int | None]:
    """``model.layers.3.mlp.up_proj`` -> (``model.layers.3``, ``model.layers``, 3); outside layers the path itself."""
    found = _NUMBER.search(path)
    if found is None or found.start() == 0:
        return path, None, None
    return path[: found.end()], path[: found.start() - 1], int(found.group())


def _owners(units: Iterable[Unit]) -> dict[fx.Node, Unit]:
    return {node: unit for unit in units for node in unit.nodes}


def _only_for(node: fx.Node, unit: Unit, owners: dict[fx.Node, Unit]) -> bool:
    """Whether, of all layers, only this one reads a value; it is then what the layer works on, not shared context."""
    return {owners[u].path for u in node.users if u in owners and owners[u].family is not None} == {unit.path}


def _input_name(node: fx.Node) -> str:
    source = source_name(node)
    whole = re.fullmatch(
        r"""L\[['"](\w+)['"]\](?:\[(\d+)\])?""", source
    )  # an argument itself: nothing follows its name
    if whole is not None:
        return ".".join(part for part in whole.groups() if part)
    return normal_path(source) or str(node.name)


def _numbered(name: str, unit: Unit) -> str:
    """An input's name with the layer's own number as {i}, if it has one."""
    if unit.number is None:
        return name
    return _NUMBER.sub(lambda m: "{i}" if int(m.group()) == unit.number else m.group(), name)


def _function(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}"
    return str(getattr(target, "__name__", None) or target)


def _plain(value: Any) -> str:
    """An odd constant without addresses of objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _column(left: str, right: str) -> str:
    return f"{left:<{_WIDTH}} {right}".rstrip()


def _follows(first: list[str], second: list[str]) -> bool:
    """Whether the second of two equal layers takes its inputs as the first or from the layer before it."""
    if len(first) != len(second):
        return False
    pairs = zip(first, second, strict=True)
    return all(a == b or (b.endswith(_BEFORE) and not a.endswith(_BEFORE)) for a, b in pairs)


def _runs(units: Sequence[Unit], same: Any) -> list[list[Unit]]:
    """Consecutive layers of one family that are the same."""
    runs: list[list[Unit]] = []
    for unit in units:
        last = runs[-1][-1] if runs else None
        next_one = last is not None and unit.family is not None and unit.family == last.family
        if next_one and unit.number == last.number + 1 and same(last, unit):  # type: ignore[union-attr,operator]
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return runs


def _same_change(first: Sequence[Unit | None], second: Sequence[Unit | None]) -> bool:
    """Whether two neighbouring layers changed in the same way."""
    bodies = [None if u is None else _elided(u.body) for u in (*first, *second)]
    changed = [p[0] is None or p[1] is None or p[0].body != p[1].body for p in (first, second)]
    a, b = first[1] or first[0], second[1] or second[0]
    assert a is not None and b is not None
    neighbours = a.family is not None and a.family == b.family and b.number == a.number + 1  # type: ignore[operator]
    return neighbours and bodies[:2] == bodies[2:] and changed[0] == changed[1]


def _title(run: Sequence[Unit]) -> str:
    first = run[0]
    if first.family is None:
        return first.path or "(the model itself)"
    if len(run) == 1:
        return first.path
    but = "their number" if all(unit.body == first.body for unit in run) else "their number and the lists of indices"
    return f"{first.family}.{first.number}..{run[-1].number} ({len(run)} layers, the same but for {but})"


def _elided(body: list[str]) -> list[str]:
    """A body without its long lists of indices: each layer keeps features of its own, say."""
    return [_INDICES.sub(lambda m: f"[{m.group().count(',') + 1} indices]", line) for line in body]


def _fold_lines(lines: Sequence[str]) -> list[str]:
    """Lines that differ only in a layer's number, which counts up, become one."""
    folded: list[tuple[str, list[int], str]] = []  # (pattern, numbers, first line)
    for line in lines:
        found = _NUMBER.search(line)
        pattern = line if found is None else re.sub(rf"(?<=\.){found.group()}(?=[.:])", "#", line)
        pattern = re.sub(r" +", " ", pattern)
        for known, numbers, _ in folded:
            if found is not None and known == pattern and int(found.group()) == numbers[-1] + 1:
                numbers.append(int(found.group()))
                break
        else:
            folded.append((pattern, [int(found.group())] if found else [], line))
    result = []
    for _, numbers, line in folded:
        if len(numbers) > 1:
            line = re.sub(rf"(?<=\.){numbers[0]}(?=[.:])", f"{{{numbers[0]}..{numbers[-1]}}}", line)
            left, _, right = line.rstrip().rpartition("  ")
            line = _column(left.rstrip(), right) if left.strip() else line
        result.append(line)
    return result


def _unified(title: str, before: list[str], after: list[str]) -> list[str]:
    """A unified diff of one unit, or nothing."""
    if before == after:
        return []
    lines = list(difflib.unified_diff(before, after, lineterm="", n=2))[2:]
    return ["", f"=== {title}"] + lines
