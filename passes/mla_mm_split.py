"""mla-mm-split: one contiguous matmul per consumer instead of a fused up-projection that is split per head."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.graph import VALUE, Graph, module_path
from latentscan.ir.layout import LayoutError, Linear, is_layout, linear_of, trace
from latentscan.ir.mla import attention_like, latent_source
from latentscan.ir.ops.rope import ROPE
from latentscan.ir.sizes import numbers
from latentscan.ir.weights import Recipe
from latentscan.passes.base import Context, Pass, Refusal, Site, Tier


@dataclass(frozen=True)
class Piece:
    """One consumer's part of a fused up-projection: a node of the split and the weight rows it reads."""

    node: fx.Node
    rows: torch.Tensor  # [features in the piece's own order]


@dataclass(frozen=True)
class MlaMmSplit(Pass):
    """Split fused up-projections into one matmul per consumer (MATH 4)."""

    name: ClassVar[str] = "mla-mm-split"
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    after: ClassVar[tuple[str, ...]] = ("mha-to-mla",)
    before: ClassVar[tuple[str, ...]] = ("latent-cache", "mla-absorb")
    summary: ClassVar[str] = "fused up-projections become one contiguous matmul per consumer"
    math: ClassVar[str] = (
        "Rows of q_b are per head [nope|rope], of kv_b per head [k_nope|v]. The rows are taken apart per head into one "
        "weight per consumer, so that no consumer reads a strided view of a fused result. The new weights hold the "
        "same numbers; the old one is released where latentscan owns the parameters. Biases are split along. A "
        "projection whose parts are whole blocks of rows (fused qkv) is no up-projection of this kind and is refused."
    )

    def plan(self, graph: Graph, context: Context) -> list[Site | Refusal]:
        found: list[Site | Refusal] = []
        seen: set[fx.Node] = set()
        for attention in attention_like(graph):
            before = len(seen)
            for position, role in ((0, "query"), (1, "key"), (2, "value")):
                for linear in _linears_above(graph, attention.args[position]):  # type: ignore[arg-type]
                    if linear.node not in seen:
                        seen.add(linear.node)
                        found.append(self._plan_one(graph, linear, role))
            if len(seen) == before and not _linears_above(graph, attention.args[0]):  # type: ignore[arg-type]
                found.append(
                    Refusal(
                        module_path(attention),
                        "no-up-projection",
                        "no linear map feeds query, key or value through views and rotations alone",
                        "nothing to split here",
                    )
                )
        return [f if isinstance(f, Refusal) else self._as_planned(f, context) for f in found]

    def _as_planned(self, site: Site, context: Context) -> Site | Refusal:
        """New weights are made once, for the graph that the model's decisions were made on; other graphs make none."""
        if not context.own_parameters or not context.facts or (self.name, site.module) in context.facts:
            return site
        why = "the graph that decisions were made on reads this projection whole, so it has no weights in parts"
        return Refusal(site.module, "not-planned", why, "nothing to do")

    def _plan_one(self, graph: Graph, linear: Linear, role: str) -> Site | Refusal:
        module = module_path(linear.node)
        weight = graph.weight(linear.weight)
        if weight is None:
            return Refusal(
                module, "no-plain-weight", f"{linear.weight.name} is not a parameter of the model", "dequantise first"
            )
        try:
            pieces = _pieces(graph, linear)
        except LayoutError as error:
            return Refusal(module, "not-split", str(error), "nothing to do: this projection has one consumer")
        blocks = [_is_block(p.rows) for p in pieces]
        if all(blocks):
            sizes = [int(p.rows.numel()) for p in pieces]
            return Refusal(
                module,
                "whole-blocks",
                f"its parts are whole blocks of rows, {sizes}, which the fused matmul gives side by side",
                "leave it fused",
            )
        facts = {"rows": int(graph.shape(linear.weight)[1 if linear.transposed else 0]), "parts": len(pieces)}
        note = f"{role}: {facts['rows']} rows into " + " + ".join(str(int(p.rows.numel())) for p in pieces)
        return Site(module, "split-per-head", linear.node.name, facts, note)

    def apply(self, graph: Graph, site: Site, context: Context) -> None:
        linear = linear_of(graph, graph.node(site.anchor))
        assert linear is not None
        pieces = _pieces(graph, linear)
        sources = [linear.weight] + ([linear.bias] if linear.bias is not None else [])
        weights = [graph.weight(s) for s in sources]
        assert all(w is not None for w in weights)
        paths = [w.path for w in weights]  # type: ignore[union-attr]
        rows = [p.rows for p in pieces]
        function, inverse = split_functions(rows, linear.transposed, len(sources))
        targets = tuple(f"{path}_part{i}" for path in paths for i in range(len(rows)))
        recipe = Recipe(tuple(paths), targets, self.name, site.module, function, inverse)
        inner = graph.shape(linear.weight)[0 if linear.transposed else 1]
        values = [
            graph.value(source).new_empty((r.numel(), inner) if i == 0 else (r.numel(),))
            for i, source in enumerate(sources)
            for r in rows
        ]
        nodes = graph.add_weights(recipe, values)
        for index, piece in enumerate(pieces):
            bias = nodes[len(rows) + index] if linear.bias is not None else None
            shape = graph.value(piece.node).shape
            with graph.after(linear.node, self.name):
                made = graph.call(F.linear, latent_source(graph, linear.x), nodes[index], bias)
                heads, width = int(shape[1]), int(shape[3])
                # [B, S, heads * width] (or [B, 1, S, ...]) -> [B, heads, S, width] as the piece was
                if len(graph.shape(made)) == 4:
                    made = graph.method("squeeze", made, 1)
                made = graph.method("unflatten", made, -1, (heads, width))
                made = graph.method("transpose", made, 1, 2)
            graph.replace(piece.node, made)


def _linears_above(graph: Graph, node: fx.Node) -> list[Linear]:
    """Linear maps that feed an attention operand through layout, rope and concatenation only."""
    found, stack, seen = [], [node], set()
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        linear = linear_of(graph, current)
        if linear is not None:
            found.append(linear)
        elif is_layout(current):
            stack.extend(
                n for n in current.all_input_nodes if isinstance(n.meta.get(VALUE), (torch.Tensor, tuple, list))
            )
        elif current.op == "call_function" and current.target is ROPE.op:
            stack.append(current.args[0])  # type: ignore[arg-type]
        elif getattr(current.target, "_opname", "") == "cache_append":
            stack.extend(current.args[1])  # type: ignore[arg-type]
    return found[::-1]


def _pieces(graph: Graph, linear: Linear) -> list[Piece]:
    """The parts [B, heads, S, width] into which a projection's result is split along the features of a head.

    A part is an item of one split, or an index of features (a slice, or a list as mha-to-mla makes of the query).

    Raises LayoutError if there is no such split, or its parts do not cover all rows exactly once, or the projection's
    input has its tokens in one dimension from the start.
    """
    latent_source(graph, linear.x)
    splits: list[fx.Node] = []
    items: list[fx.Node] = []
    stack, seen = [linear.node], set()
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        for user in current.users:
            if user.target in (torch.split, torch.functional.split, torch.chunk) or user.target in ("split", "chunk"):
                splits.append(user)
            elif (
                is_layout(user)
                and user.op == "call_method"
                and user.target in ("view", "reshape", "transpose", "unflatten")
            ):
                stack.append(user)
            elif user.op == "call_function" and user.target is operator.getitem and is_layout(user):
                items.append(user)
            else:
                raise LayoutError(f"its whole result is read by {user.name}")
    if len(splits) + bool(items) != 1:
        raise LayoutError(f"its result is split {len(splits)} times and indexed {len(items)} times")
    pieces = []
    for item in items or splits[0].users:
        if item.target is not operator.getitem:
            raise LayoutError(f"the split is read by {item.name}")
        if len(graph.value(item).shape) != 4:
            raise LayoutError(f"{item.name} has shape {numbers(graph.value(item).shape)}, not [B, heads, S, width]")
        features = trace(graph, item, batch_dim=0, seq_dim=2, feature_dims=(1, 3))
        if [features.sources[i] for i in features.used()] != [linear.node]:
            raise LayoutError(f"{item.name} has other sources too")
        pieces.append(Piece(item, features.feature.flatten()))
    if len(pieces) < 2:
        raise LayoutError("only one part of the split is read")
    every = torch.cat([p.rows for p in pieces])
    total = int(graph.shape(linear.weight)[1 if linear.transposed else 0])
    if every.numel() != total or every.unique().numel() != total:
        raise LayoutError(f"the parts read {every.unique().numel()} of {total} rows, {every.numel()} in all")
    return pieces


def _is_block(rows: torch.Tensor) -> bool:
    return bool((rows == rows[0] + torch.arange(rows.numel())).all())


def split_functions(
    rows: list[torch.Tensor], transposed: bool, sources: int
) -> tuple[Callable[..., tuple[torch.Tensor, ...]], Callable[..., tuple[torch.Tensor, ...]]]:
    """``(weight[, bias]) -> parts`` and back. Weights become [out, in] parts whatever they were."""
    order = torch.cat(rows)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel())

    def split(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts: list[torch.Tensor] = []
        for index, tensor in enumerate(given):
            tensor = tensor.t() if index == 0 and transposed else tensor
            parts.extend(tensor.index_select(0, r.to(tensor.device)) for r in rows)
        return tuple(parts)

    def join(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        joined: list[torch.Tensor] = []
        for index in range(sources):
            mine = parts[index * len(rows) : (index + 1) * len(rows)]
            tensor = torch.cat(mine).index_select(0, back.to(mine[0].device))
            joined.append(tensor.t().contiguous() if index == 0 and transposed else tensor)
        return tuple(joined)

    return split, join


__all__: list[Any] = ["MlaMmSplit"]
