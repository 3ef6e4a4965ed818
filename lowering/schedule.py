"""Order of a graph's nodes such that collectives start early and are waited for late; the values stay the same ones.

Works on the forward and backward graphs of AOTAutograd, in which every collective is a ``_c10d_functional`` start and a
``wait_tensor``. List scheduling (moving single nodes gains nothing): what leads to the next start goes first, then any
other work, and a wait when nothing else is left. Three things never change: the order of the starts, which all ranks
share; the order of nodes that draw random numbers or have another effect; what is before and after a write in place.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from latentscan.ir.errors import VerifyError
from latentscan.ir.sizes import hint_of

_NAMESPACE = "_c10d_functional"
_VIEWS = {
    "view", "reshape", "transpose", "t", "permute", "unsqueeze", "squeeze", "expand", "getitem", "slice", "select",
    "_unsafe_view", "detach", "alias", "as_strided", "sym_size", "view_as", "unflatten", "split", "chunk",
    "split_with_sizes",
}  # fmt: skip


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return node.op == "call_function" and _name(node) == "wait_tensor" and _space(node) == _NAMESPACE


def is_start(node: fx.Node) -> bool:
    """Whether a node starts one."""
    return node.op == "call_function" and _space(node) == _NAMESPACE and _name(node) != "wait_tensor"


def is_compute(node: fx.Node) -> bool:
    """Whether a node does work that a transfer can hide behind: neither a view nor a collective nor a size."""
    if node.op != "call_function" or is_start(node) or is_wait(node) or _name(node) in _VIEWS:
        return False
    return isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def _space(node: fx.Node) -> str:
    return getattr(node.target, "namespace", "")


def _name(node: fx.Node) -> str:
    name = str(getattr(node.target, "__name__", node.target))
    return name.partition(".")[0]


def place_of(start: fx.Node) -> tuple[str, str]:
    """What a start does, and the module that it does it for, which the name of its group carries."""
    group = next((a for a in reversed(start.args) if isinstance(a, str)), "")
    return _name(start).removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single"), _module(group)


def _module(group: str) -> str:
    return group.partition("@")[2]


def waits_of(start: fx.Node) -> list[fx.Node]:
    """The waits for a start; a view may lie between."""
    found, left = [], list(start.users)
    while left:
        node = left.pop()
        if is_wait(node):
            found.append(node)
        elif node.op == "call_function" and _name(node) in _VIEWS:
            left += node.users
    return found


@dataclass(frozen=True)
class Moved:
    """One collective of a scheduled graph.

    Attributes:
        phase: forward or backward. name, module: what it does, and for whom.
        before, after: nodes that compute between its start and its wait, as traced and as scheduled.
    """

    phase: str
    name: str
    module: str
    before: int
    after: int


@dataclass(frozen=True)
class Scheduled:
    """What scheduling did to one graph.

    Attributes:
        collectives: one entry each, in order.
        peak_before, peak_after: bytes of values alive at once, inputs left out; sizes that vary as traced.
        ahead: how many collectives ahead work was taken from; 0: the graph was left as it was.
        kept: nodes whose order among themselves was kept (random numbers, effects, writes in place).
    """

    phase: str
    collectives: tuple[Moved, ...]
    peak_before: int
    peak_after: int
    ahead: int
    kept: int


def overlap(graph: fx.Graph, phase: str, *, growth: float = 0.1, ahead: int = 2) -> Scheduled:
    """Order the nodes of a graph anew, in place.

    Args:
        growth: by how much the bytes alive at once may grow, as a part of what they were.
        ahead: how many collectives ahead work may be taken from, so that not all of a model's weights are cast at its
            first gather. Fewer are tried while the growth is too large.

    Raises:
        VerifyError: the new order breaks a rule (an error of this module).
    """
    old = list(graph.nodes)
    before, peak = distances(old), peak_bytes(old)
    new, used, grown = old, 0, peak
    for tried in range(ahead, 0, -1) if any(map(is_start, old)) else ():
        order = list_schedule(old, tried)
        bytes_ = peak_bytes(order)
        if bytes_ <= peak * (1 + growth):
            new, used, grown = order, tried, bytes_
            break
    check_order(old, new)
    if new is not old:
        put(graph, new)
    after = distances(new)
    found = tuple(Moved(phase, *place_of(n), before[n], after[n]) for n in old if is_start(n))
    return Scheduled(phase, found, peak, grown, used, sum(map(_is_kept, old)))


def put(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Let a graph's nodes stand in the given order."""
    end = next(n for n in graph.nodes if n.op == "output")
    for node in order:
        if node is not end:
            end.prepend(node)
    graph.lint()


def list_schedule(nodes: Sequence[fx.Node], ahead: int) -> list[fx.Node]:
    """The new order; see the module's text."""
    fixed = [n for n in nodes if n.op in ("placeholder", "get_attr")]
    out: list[fx.Node] = list(fixed)
    part: list[fx.Node] = []
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        if node.op == "output" or _writes(node):  # nothing passes a write in place
            out += _part(part, ahead)
            out.append(node)
            part = []
        else:
            part.append(node)
    return out


def _part(nodes: list[fx.Node], ahead: int) -> list[fx.Node]:
    index = {n: i for i, n in enumerate(nodes)}
    starts = [n for n in nodes if is_start(n)]
    if not starts:
        return nodes
    number = {n: i for i, n in enumerate(starts)}
    sources = {n: [a for a in n.all_input_nodes if a in index] for n in nodes}
    kept = [n for n in nodes if _ordered(n)]
    for first, second in itertools.pairwise(kept):
        sources[second].append(first)
    for first, second in itertools.pairwise(starts):
        sources[second].append(first)
    readers: dict[fx.Node, list[fx.Node]] = {n: [] for n in nodes}
    for node, given in sources.items():
        for source in set(given):
            readers[source].append(node)
    none = len(starts)
    leads: dict[fx.Node, int] = {}  # the first start that a node leads to
    for node in reversed(nodes):
        own = number.get(node, none)
        leads[node] = min([own, *(leads[r] for r in readers[node])])
    ends = [max([index[w] for w in waits_of(s) if w in index], default=len(nodes)) for s in starts]
    missing = {n: len(set(given)) for n, given in sources.items()}
    leading: list[tuple[int, int]] = []  # (number of the start that it leads to, place)
    others: list[int] = []
    waits: list[int] = []
    done: set[int] = set()
    begun = 0
    out: list[fx.Node] = []

    def ready(node: fx.Node) -> None:
        at = index[node]
        if is_wait(node):
            heapq.heappush(waits, at)
            return
        heapq.heappush(leading, (leads[node], at))
        if not is_start(node):
            heapq.heappush(others, at)

    def top(heap: list[Any], at: Any) -> Any:
        while heap and at(heap[0]) in done:
            heapq.heappop(heap)
        return heap[0] if heap else None

    for node in nodes:
        if not missing[node]:
            ready(node)
    while len(out) < len(nodes):
        lead, other, wait = top(leading, lambda x: x[1]), top(others, int), top(waits, int)
        limit = ends[begun - 1 + ahead] if begun and begun - 1 + ahead < none else len(nodes)
        if lead is not None and lead[0] <= begun and lead[0] < none:
            at = lead[1]
        elif other is not None and (wait is None or other < limit):
            at = other
        elif wait is not None:
            at = wait
        else:
            raise VerifyError("the graph's nodes wait for each other", remedy="report it with a dump")
        node = nodes[at]
        done.add(at)
        out.append(node)
        begun += is_start(node)
        for reader in readers[node]:
            missing[reader] -= 1
            if not missing[reader]:
                ready(reader)
    return out


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable and not is_wait(node)


def _ordered(node: fx.Node) -> bool:
    """Whether a node draws random numbers or has an effect that its inputs and outputs do not show."""
    if node.op != "call_function" or is_start(node) or is_wait(node):
        return False
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags or isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    schema = getattr(node.target, "_schema", None)
    return not node.users and (schema is None or not schema.returns)


def _is_kept(node: fx.Node) -> bool:
    return _ordered(node) or _writes(node)


def check_order(old: Sequence[fx.Node], new: Sequence[fx.Node]) -> None:
    """Raise VerifyError unless ``new`` holds the nodes of ``old`` in an order that computes the same on every rank."""
    at = {n: i for i, n in enumerate(new)}
    if len(at) != len(new) or at.keys() != set(old):
        raise VerifyError("the new order has other nodes than the graph", where="overlap-collectives")
    for node in new:
        for source in node.all_input_nodes:
            if at[source] > at[node]:
                raise VerifyError(f"{node.name} would run before {source.name}, which it reads", where=_where(node))
    for what, kind in (("collectives", is_start), ("random numbers and effects", lambda n: _ordered(n) or _writes(n))):
        for a, b in zip(filter(kind, old), filter(kind, new), strict=True):
            if a is not b:
                raise VerifyError(
                    f"the order of {what} changed: {b.name} would come where {a.name} was", where=_where(b)
                )
    before = {n: i for i, n in enumerate(old)}
    for write in filter(_writes, old):
        for node in old:
            if node.op not in ("placeholder", "get_attr") and (before[node] < before[write]) != (at[node] < at[write]):
                raise VerifyError(f"{node.name} would pass {write.name}, which writes in place", where=_where(write))


def _where(node: fx.Node) -> str:
    return f"overlap-collectives at {place_of(node)[1]}" if is_start(node) else "overlap-collectives"


def distances(order: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For each start: nodes that compute between it and its first wait (or the graph's end, if another graph waits)."""
    count, at = 0, {}
    for node in order:
        at[node] = count
        count += is_compute(node)
    found = {}
    for node in filter(is_start, order):
        found[node] = min([at[w] for w in waits_of(node)], default=count) - at[node]
    return found


def starts_of(graph: fx.Graph) -> list[tuple[str, ...]]:
    """What has to be the same on every rank: each start with the arguments that are no tensors."""
    return [
        (_name(n), *(str(a) for a in n.args if isinstance(a, (str, int)))) for n in graph.nodes if is_start(n)
    ]  # fmt: skip


def peak_bytes(order: Sequence[fx.Node]) -> int:
    """Bytes of storages alive at once, the graph's inputs left out. Sizes that vary are taken as they were traced."""
    size: dict[Any, int] = {}
    holds: dict[fx.Node, list[Any]] = {}
    last: dict[Any, int] = {}
    given: set[Any] = set()
    for at, node in enumerate(order):
        keys = []
        for value in _tensors(node.meta.get("val")):
            key = value.untyped_storage()._cdata
            keys.append(key)
            if node.op in ("placeholder", "get_attr"):
                given.add(key)
            size.setdefault(key, hint_of(value.untyped_storage().nbytes()))
        holds[node] = keys
        for source in (node, *node.all_input_nodes):
            for key in holds.get(source, ()):
                last[key] = at
    frees: dict[int, list[Any]] = {}
    for key, at in last.items():
        frees.setdefault(at, []).append(key)
    alive, live, peak = set(given), 0, 0
    for at, node in enumerate(order):
        for key in holds[node]:
            if key not in alive:
                alive.add(key)
                live += size[key]
        peak = max(peak, live)
        for key in frees.get(at, ()):
            if key not in given:
                live -= size[key]
    return peak


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (tuple, list)) else []
