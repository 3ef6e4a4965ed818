"""mla-fa-without-pad: attention on the head dims that there are, without zeros before it and trimming after it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.graph import Graph, module_path
from latentscan.ir.mla import attention_like
from latentscan.ir.normalize import ATTENTION
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier

_PADS = {F.pad, torch._C._nn.pad, torch.constant_pad_nd}
_ZEROS = {torch.zeros, torch.zeros_like, "new_zeros"}
_MOVES = {"contiguous", "clone", "transpose", "permute", "swapaxes", torch.transpose, torch.permute, torch.clone}
_RESHAPES = {"reshape", "view", torch.reshape}


class _Unfit(Exception):  # noqa: N818  a reason, not a failure
    def __init__(self, rule: str, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.rule, self.remedy = rule, remedy


@dataclass(frozen=True)
class Padded:
    """An attention operand that was padded with zeros.

    Attributes:
        source: the value before padding. steps: moves of dimensions between padding and attention, in order.
        width: features before padding.
    """

    source: fx.Node
    steps: tuple[fx.Node, ...]
    width: int


@dataclass(frozen=True)
class MlaFaWithoutPad(Pass):
    """Take the padding of head dims, and the trimming of the output, from around an attention (MATH 4)."""

    name: ClassVar[str] = "mla-fa-without-pad"
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    before: ClassVar[tuple[str, ...]] = ("mha-to-mla", "mla-mm-split", "latent-cache", "mla-absorb")
    summary: ClassVar[str] = "drops zero padding of head dims before attention and the trimming after it"
    math: ClassVar[str] = (
        "q and k padded with zeros give the same scores, v padded with zeros gives an output whose last columns are "
        "zeros and are trimmed: without both the result is the same as long as the scale stays, which was made from "
        "the widths that the model's code saw. (A kernel may sum in another order.) Work per pair of query and key "
        "goes from the padded d_qk + d_v to the plain one, 1.6x less for 256 + 256 -> 192 + 128. A target whose "
        "kernel wants one head dim pads for itself; the CPU's does."
    )

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        found: list[Site | Refusal] = []
        for attention in attention_like(graph):
            module = module_path(attention)
            try:
                padded = padding_of(graph, attention)
                trims = trimmed(graph, attention, padded[2].width if padded[2] else None)
            except _Unfit as error:
                found.append(Refusal(module, error.rule, str(error), error.remedy))
                continue
            qk, v = (int(graph.shape(attention.args[i])[-1]) for i in (1, 2))  # type: ignore[arg-type]
            plain_qk = padded[0].width if padded[0] else qk
            plain_v = padded[2].width if padded[2] else v
            facts = {"qk_before": qk, "qk_after": plain_qk, "v_before": v, "v_after": plain_v}
            ratio = (qk + v) / (plain_qk + plain_v)
            note = f"{qk} + {v} -> {plain_qk} + {plain_v} multiply-adds per pair and head, {ratio:.2f}x less"
            note += f"; {len(trims)} trims go" if trims else ""
            found.append(Site(module, "zero-padded", attention.name, facts, note))
        return found

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        attention = graph.node(site.anchor)
        padded = padding_of(graph, attention)
        trims = trimmed(graph, attention, padded[2].width if padded[2] else None)
        kwargs = dict(attention.kwargs)
        if attention.target != ATTENTION and kwargs.get("scale") is None:  # the library's default, of the padded width
            kwargs["scale"] = int(graph.shape(attention.args[1])[-1]) ** -0.5  # type: ignore[arg-type]
        with graph.before(attention, self.name):
            operands = [
                attention.args[i] if p is None else _replay(graph, p.source, p.steps) for i, p in enumerate(padded)
            ]
            new = graph.call(attention.target, *operands, *attention.args[3:], **kwargs)  # type: ignore[arg-type]
        if padded[2] is None:
            graph.replace(attention, new)
        for steps, trim in trims:
            with graph.before(trim, self.name):
                whole = _replay(graph, new, steps)
                width = _trim_width(trim)
                if width is not None and width < int(graph.shape(whole)[-1]):
                    whole = graph.call(operator.getitem, whole, (Ellipsis, slice(0, width)))
            graph.replace(trim, whole)


def padding_of(graph: Graph, attention: fx.Node) -> list[Padded | None]:
    """How query, key and value were padded. Raises _Unfit if none was, or not in a way that can be taken back."""
    found = [_padded(graph, attention.args[i]) for i in range(3)]  # type: ignore[arg-type]
    query, key, _ = found
    if (query is None) != (key is None) or (query and key and query.width != key.width):
        widths = " and ".join(str(p.width if p else "nothing") for p in (query, key))
        raise _Unfit(
            "one-side-padded",
            f"query and key were padded from {widths}: the columns of one are multiplied by zeros of the other",
            "pad both alike, or neither",
        )
    if not any(found):
        have = [int(graph.shape(attention.args[i])[-1]) for i in range(3)]  # type: ignore[arg-type]
        raise _Unfit(
            "nothing-padded",
            f"query, key and value, of widths {have}, are not padded with zeros in this graph",
            "nothing to do: leave the pass out",
        )
    return found


def _padded(graph: Graph, node: fx.Node) -> Padded | None:
    steps: list[fx.Node] = []
    width = graph.shape(node)[-1]
    while _keeps_last(graph, node):
        steps.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    if node.target in _PADS:
        given = dict(zip(("input", "pad", "mode", "value"), node.args, strict=False)) | dict(node.kwargs)
        if node.target is torch.constant_pad_nd:
            given = dict(zip(("input", "pad", "value"), node.args, strict=False)) | dict(node.kwargs)
        pad = tuple(given["pad"])
        if not all(isinstance(p, int) for p in pad) or pad[0] != 0 or any(pad[2:]) or pad[1] <= 0:
            return None
        if given.get("mode", "constant") != "constant" or given.get("value") not in (None, 0, 0.0):
            raise _Unfit(
                "padding-not-zero",
                f"{node.name} pads with {given.get('value')!r} in mode {given.get('mode', 'constant')!r}",
                "nothing to do: such columns take part in the result",
            )
        return Padded(given["input"], tuple(steps), width - pad[1])
    if node.target in (torch.cat, torch.concat):
        parts: Any = node.args[0]
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        if dim in (-1, len(graph.shape(node)) - 1) and len(parts) == 2 and parts[1].target in _ZEROS:
            return Padded(parts[0], tuple(steps), int(graph.shape(parts[0])[-1]))
    return None


def _keeps_last(graph: Graph, node: fx.Node) -> bool:
    """Whether a node moves, narrows or regroups dimensions and leaves the last one as it is."""
    if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target is operator.getitem and isinstance(node.args[1], tuple):
        parts = [p for p in node.args[1] if p is not Ellipsis]
        whole = Ellipsis not in node.args[1] and len(parts) == len(graph.shape(node.args[0]))
        return whole and all(isinstance(p, slice) for p in parts) and parts[-1] == slice(None)
    rank = len(graph.shape(node))
    if node.target in _RESHAPES:
        sizes, before = _reshape(node), graph.shape(node.args[0])
        return rank > 1 and isinstance(sizes[-1], int) and sizes[-1] == before[-1]
    if node.target not in _MOVES:
        return False
    if node.target in ("contiguous", "clone", torch.clone):
        return True
    dims: Any = node.args[1:] if len(node.args) > 1 else tuple(node.kwargs.values())
    if node.target in ("permute", torch.permute):
        dims = dims[0] if isinstance(dims[0], (tuple, list)) else dims
        return dims[-1] % rank == rank - 1
    return all(isinstance(d, int) and d % rank != rank - 1 for d in dims)


def _reshape(node: fx.Node) -> tuple[Any, ...]:
    """The sizes that a reshape asks for."""
    sizes: Any = node.args[1:]
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else tuple(sizes)


def trimmed(graph: Graph, attention: fx.Node, width: int | None) -> list[tuple[tuple[fx.Node, ...], fx.Node]]:
    """Every trim of an attention's output, with the moves before it; none if the value is not padded.

    Raises _Unfit if columns that come from the padding are read.
    """
    if width is None:
        return []
    found: list[tuple[tuple[fx.Node, ...], fx.Node]] = []
    stack: list[tuple[fx.Node, tuple[fx.Node, ...]]] = [(attention, ())]
    while stack:
        node, steps = stack.pop()
        for user in node.users:
            cut = _trim_width(user)
            if cut is not None and cut <= width:
                found.append((steps, user))
            elif _keeps_last(graph, user):
                stack.append((user, (*steps, user)))
            else:
                raise _Unfit(
                    "not-trimmed",
                    f"{user.name} reads the output of {attention.name} with its padded columns"
                    + (f" ({cut} of them, {width} are real)" if cut is not None else ""),
                    "trim the output to the value's width right after the attention",
                )
    return found


def _trim_width(node: fx.Node) -> int | None:
    """How many leading features a node takes of its input; None if it does something else."""
    if node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[1], tuple):
        *lead, last = node.args[1]
        whole = all(part is Ellipsis or part == slice(None) for part in lead)
        rank = len(tensor.shape) if isinstance(tensor := node.args[0].meta.get("example_value"), torch.Tensor) else 0  # type: ignore[union-attr]
        reaches = Ellipsis in lead or len(lead) == rank - 1
        if whole and reaches and isinstance(last, slice) and last.start in (None, 0) and last.step in (None, 1):
            return last.stop if isinstance(last.stop, int) and last.stop > 0 else None
    if node.target in ("narrow", torch.narrow) and not node.kwargs:
        _, dim, start, length = node.args
        if dim in (-1, len(node.meta["example_value"].shape) - 1) and start == 0 and isinstance(length, int):
            return length
    return None


def _replay(graph: Graph, node: fx.Node, steps: tuple[fx.Node, ...]) -> fx.Node:
    """The same moves of dimensions on a value of another width."""
    for step in steps:
        if step.target in _RESHAPES:
            node = graph.method("reshape", node, *_reshape(step)[:-1], int(graph.shape(node)[-1]))
        elif step.op == "call_method":
            node = graph.method(str(step.target), node, *step.args[1:], **step.kwargs)
        else:
            node = graph.call(step.target, node, *step.args[1:], **step.kwargs)  # type: ignore[arg-type]
    return node
