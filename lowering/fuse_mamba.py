"""fuse-mamba: a state-space mixer's region as few kernels as it takes, and fewer bytes, in training and inference."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.graph import Graph, module_path
from latentscan.ir.ops import ssm_mixer as _mixer  # noqa: F401  (registers the op)
from latentscan.ir.sizes import same
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier

_SCAN = torch.ops.latentscan.chunk_scan.default
_CONV = torch.ops.latentscan.causal_conv1d.default
_NORM = torch.ops.latentscan.gated_rms_norm.default
_STEP = torch.ops.latentscan.state_update.default
_SELECTIVE = torch.ops.latentscan.selective_scan.default
_SHAPES = ("view", "reshape", "unflatten", "flatten")


class _NotMatched(Exception):  # noqa: N818  control flow, told as a Refusal
    def __init__(self, rule: str, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.rule, self.reason, self.remedy = rule, reason, remedy


@dataclass(frozen=True)
class Mixer:
    """The nodes of one Mamba-2 mixer that become one op.

    Attributes:
        projected: output of the in-projection, [z | x B C | dt].
        conv, scan: the two ops. last: what the region ends in: the gated norm, or the gate's product.
        norm: the gated norm, or None for a plain gate.
    """

    projected: fx.Node
    conv: fx.Node
    scan: fx.Node
    last: fx.Node
    norm: fx.Node | None
    heads: int
    head_dim: int
    groups: int
    d_state: int


@dataclass(frozen=True)
class FuseMamba(Pass):
    """Turn what a state-space mixer does between its projections into the fewest kernels and bytes (KERNELS).

    Two rules. ``mixer``: convolution, scan and gated norm (or plain gate) of a Mamba-2 mixer become one op; training
    keeps the projection's and the scan's output only, computes the convolution again, and writes one gradient in the
    projection's layout instead of joining pieces. ``delta-channels-last``: Mamba-1's time step is projected to the
    layout that its scan reads.
    """

    name: ClassVar[str] = "fuse-mamba"
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    after: ClassVar[tuple[str, ...]] = ("mha-to-mla", "mla-mm-split", "latent-cache", "mla-absorb")
    summary: ClassVar[str] = "a state-space mixer between its projections becomes one op that keeps little for backward"
    math: ClassVar[str] = (
        "out = norm(scan(conv(xBC), dt), z) of [z | x B C | dt]. Kept for backward: that row and the scan's output; "
        "the convolution is computed again. matmul(W, t^T) = linear(t, W)^T."
    )

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        found: list[Site | Refusal] = []
        for scan in graph.calls(_SCAN):
            module = module_path(scan)
            try:
                mixer = _match(graph, scan)
            except _NotMatched as why:
                found.append(Refusal(module, why.rule, why.reason, why.remedy))
            else:
                facts = {name: getattr(mixer, name) for name in ("heads", "head_dim", "groups", "d_state")}
                facts["gate"] = "norm" if mixer.norm is not None else "plain"
                end = "gated norm" if mixer.norm is not None else "gate"
                found.append(Site(module, "mixer", scan.name, facts, f"convolution, scan and {end} as one op"))
        for scan in graph.calls(_SELECTIVE):
            found.append(_plan_delta(graph, scan))
        found.extend(
            Refusal(
                module_path(step),
                "single-step",
                "a decode step is one launch for convolution, state and norm each",
                "nothing to do: the lowering writes the states in place",
            )
            for step in graph.calls(_STEP)
        )
        return found

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        if site.rule == "mixer":
            self._apply_mixer(graph, graph.node(site.anchor))
        else:
            self._apply_delta(graph, graph.node(site.anchor))

    def _apply_mixer(self, graph: Graph, scan: fx.Node) -> None:
        m = _match(graph, scan)
        _, weight, bias, _, seq_idx = _five(m.conv)
        _, _, A, _, _, D, _, dt_bias = (*scan.args, *[None] * 8)[:8]
        options: dict[str, Any] = {
            "heads": m.heads, "head_dim": m.head_dim, "groups": m.groups, "d_state": m.d_state,
            "activation": m.conv.kwargs["activation"], **scan.kwargs,
        }  # fmt: skip
        norm_weight = None
        if m.norm is None:
            options |= {"eps": 0.0, "group_size": m.heads * m.head_dim, "norm_before_gate": False}
        else:
            norm_weight = m.norm.args[2]
            options |= m.norm.kwargs
        with graph.before(m.last, self.name):
            op = torch.ops.latentscan.mamba_mixer.default
            made = graph.call(op, m.projected, weight, bias, A, D, dt_bias, norm_weight, seq_idx, **options)
            out, final = graph.call(operator.getitem, made, 0), graph.call(operator.getitem, made, 1)
        state = _result(scan, 1)
        if state is not None:
            _move_after(final, state)
            graph.replace(state, final)
        graph.replace(m.last, out)

    def _apply_delta(self, graph: Graph, scan: fx.Node) -> None:
        product = scan.args[1]
        assert isinstance(product, fx.Node)
        weight, steps = product.args
        assert isinstance(steps, fx.Node)
        with graph.before(product, self.name):
            linear = graph.call(F.linear, steps.args[0], weight, None)
            graph.replace(product, graph.method("transpose", linear, 1, 2))


# --- matching --------------------------------------------------------------------------------------------------------


def _peel(graph: Graph, node: Any) -> Any:
    """Go up through what gives the same numbers at the same places: pairs of transposes, whole slices, no-op casts."""
    while isinstance(node, fx.Node):
        above = node.args[0] if node.args else None
        if not isinstance(above, fx.Node) or not isinstance(graph.value(above), torch.Tensor):
            return node
        if node.target == "transpose" and above.target == "transpose" and node.args[1:] == above.args[1:]:
            node = above.args[0]
        elif node.target == "transpose" and _is_whole_slice(graph, above) and _twice(node, above):
            node = above.args[0].args[0]  # type: ignore[union-attr]
        elif (node.target in ("to", "float", "contiguous") or _is_whole_slice(graph, node)) and _alike(
            graph, node, above
        ):
            node = above
        else:
            return node
    return node


def _twice(node: fx.Node, inner: fx.Node) -> bool:
    first = inner.args[0]
    return isinstance(first, fx.Node) and first.target == "transpose" and first.args[1:] == node.args[1:]


def _alike(graph: Graph, a: fx.Node, b: fx.Node) -> bool:
    x, y = graph.value(a), graph.value(b)
    return x.dtype == y.dtype and x.dim() == y.dim() and all(map(same, x.shape, y.shape))


def _is_whole_slice(graph: Graph, node: Any) -> bool:
    """``x[:, :, -L:]`` of an x that has L there."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem or not isinstance(node.args[1], tuple):
        return False
    above = node.args[0]
    if not isinstance(above, fx.Node) or not isinstance(graph.value(above), torch.Tensor):
        return False
    return all(isinstance(i, slice) and i.step is None for i in node.args[1]) and _alike(graph, node, above)


def _pieces_of(node: Any) -> tuple[fx.Node, int] | None:
    """(what is split along its last axis, which piece) of a piece of a split."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem or not isinstance(node.args[1], int):
        return None
    split = node.args[0]
    if not isinstance(split, fx.Node) or split.target not in ("split", torch.split, torch.functional.split):
        return None
    axis = split.kwargs.get("dim", split.args[2] if len(split.args) > 2 else 0)
    return (split, node.args[1]) if axis == -1 else None


def _sizes(split: fx.Node) -> list[Any]:
    sizes = split.args[1]
    return list(sizes) if isinstance(sizes, (list, tuple)) else [sizes]


def _result(node: fx.Node, index: int) -> fx.Node | None:
    return next((u for u in node.users if u.target is operator.getitem and u.args[1] == index), None)


def _five(conv: fx.Node) -> tuple[Any, ...]:
    return (*conv.args, *[None] * 5)[:5]


def _need(condition: Any, rule: str, reason: str, remedy: str = "nothing to do: the parts stay separate ops") -> None:
    if not condition:
        raise _NotMatched(rule, reason, remedy)


def _match(graph: Graph, scan: fx.Node) -> Mixer:
    x, dt, _, B, C, _, z, _, init, seq_idx, cu_seqlens = (*scan.args, *[None] * 11)[:11]
    _need(init is None, "continued", "the scan starts from a state of before")
    _need(
        cu_seqlens is None, "cumulative-lengths", "the scan is told of packed sequences by cu_seqlens",
        "give seq_idx (latentscan.wrap does)",
    )  # fmt: skip
    _need(z is None, "gate-in-scan", "the scan is gated already")
    shape = graph.shape(x)  # type: ignore[arg-type]
    heads, head_dim, (groups, d_state) = shape[2], shape[3], graph.shape(B)[2:]  # type: ignore[arg-type]
    # Upwards: x, B and C are the pieces of the convolution's output, in this order.
    mixed = None
    for place, part in enumerate((x, B, C)):
        while isinstance(part, fx.Node) and part.target in _SHAPES:
            part = part.args[0]
        piece = _pieces_of(_peel(graph, part))
        _need(
            piece is not None and piece[1] == place, "not-split",
            f"{'xBC'[place]} is not piece {place} of one split of the convolution's output",
        )  # fmt: skip
        assert piece is not None
        _need(mixed is None or piece[0] is mixed, "not-split", "x, B and C come from several splits")
        mixed = piece[0]
    assert mixed is not None
    inner, wide = heads * head_dim, groups * d_state
    _need(_sizes(mixed) == [inner, wide, wide], "not-split", f"the split is {_sizes(mixed)}, not {[inner, wide, wide]}")
    y = _peel(graph, mixed.args[0])
    conv = y.args[0] if isinstance(y, fx.Node) and y.target is operator.getitem else None
    _need(
        isinstance(conv, fx.Node) and conv.target is _CONV and y.args[1] == 0, "no-convolution",
        "x, B and C are not the output of one causal convolution (padding is masked between them, or it has another "
        "activation)",
    )  # fmt: skip
    assert isinstance(conv, fx.Node)
    _need(_result(conv, 1) is None, "conv-state", "the convolution's final state is used")
    source, _, _, conv_init, conv_seq = _five(conv)
    _need(conv_init is None, "continued", "the convolution starts from inputs of before")
    _need(conv_seq is seq_idx, "packing", "convolution and scan are told of packed sequences by different tensors")
    # Upwards again: the convolution's input, dt and z are pieces of one row.
    row, dt_row = _pieces_of(_peel(graph, source)), _pieces_of(_peel(graph, dt))
    _need(
        row is not None and dt_row is not None and row[0] is dt_row[0] and (row[1], dt_row[1]) == (1, 2),
        "no-projection", "the convolution's input and dt are not pieces 1 and 2 of one split of a projection",
    )  # fmt: skip
    assert row is not None
    split = row[0]
    sizes = [inner, inner + 2 * wide, heads]
    _need(_sizes(split) == sizes, "no-projection", f"the projection is split as {_sizes(split)}, not {sizes}")
    # Downwards: one gated norm, or one product with silu(z).
    result = _result(scan, 0)
    while result is not None and len(result.users) == 1 and next(iter(result.users)).target in _SHAPES:
        result = next(iter(result.users))
    _need(result is not None and len(result.users) == 1, "other-uses", "the scan's output has other uses than one gate")
    assert result is not None
    (last,) = result.users

    def is_gate(node: Any) -> bool:
        piece = _pieces_of(_peel(graph, node))
        return piece is not None and piece == (split, 0)

    norm = None
    if last.target is _NORM:
        _need(
            last.args[0] is result and is_gate(last.args[1]), "other-gate", "the norm's gate is not the projection's z"
        )
        norm = last
    else:
        product = last.target in (operator.mul, torch.mul, "mul") and len(last.args) == 2
        other = last.args[1] if product and last.args[0] is result else last.args[0]
        silu = product and isinstance(other, fx.Node) and other.target in (F.silu, torch.nn.functional.silu)
        _need(silu and is_gate(other.args[0]), "no-gate", f"the scan's output goes to {last.target}, which is no gate")  # type: ignore[union-attr]
        _need(graph.value(last).dtype == graph.value(result).dtype, "no-gate", "the gate changes the dtype")
    _need(len(graph.shape(last)) == 3, "other-uses", "the gate is not applied to [b, L, D]")
    projected = split.args[0]
    assert isinstance(projected, fx.Node)
    return Mixer(projected, conv, scan, last, norm, int(heads), int(head_dim), int(groups), int(d_state))


def _plan_delta(graph: Graph, scan: fx.Node) -> Site | Refusal:
    module = module_path(scan)
    product = scan.args[1]
    if isinstance(product, fx.Node) and product.target in (torch.matmul, operator.matmul, "matmul"):
        weight, steps = product.args
        shapes = graph.weight(weight) is not None and len(graph.shape(weight)) == 2  # type: ignore[arg-type]
        if shapes and isinstance(steps, fx.Node) and steps.target == "transpose" and steps.args[1:] == (1, 2):
            return Site(module, "delta-channels-last", scan.name, {}, "the time step is projected channels last")
    return Refusal(
        module, "delta-layout", "the scan's time step is not a weight times a transposed tensor", "nothing to do"
    )


def _move_after(node: fx.Node, old: fx.Node) -> None:
    """What depends on ``old`` and comes before ``node`` goes after it, in the same order."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    late: set[fx.Node] = set()
    waiting = list(old.users)
    while waiting:
        user = waiting.pop()
        if user not in late and order[user] < order[node]:
            late.add(user)
            waiting.extend(user.users)
    place = node
    for moved in sorted(late, key=order.__getitem__):
        place.append(moved)
        place = moved
