"""Embedding and language-model head by rows of the vocabulary; one shard for both where they are tied."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.graph import Graph
from latentscan.ir.layout import linear_of, strip_layout
from latentscan.ir.mesh import Axis, shares
from latentscan.ir.ops.collectives import copy_to, embed_rows, gather_last
from latentscan.passes.base import Refusal, Site
from latentscan.passes.sharding import add_parts, differentiable
from latentscan.passes.shards import weight_recipe

_NAMES = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


def _embedding(node: fx.Node) -> dict[str, Any]:
    return dict(zip(_NAMES, node.args, strict=False)) | dict(node.kwargs)


def vocabularies(graph: Graph, planned: Container[str] = ()) -> list[fx.Node]:
    """The weights that are looked up by the model's token ids, and those that make one logit for each of their rows.

    Args:
        planned: modules whose tables another graph of the model has split: a call with embedded inputs looks up none.
    """
    tables: list[fx.Node] = []
    for node in graph.calls(F.embedding, torch.embedding):
        given = _embedding(node)
        ids, weight = given["input"], given["weight"]
        if strip_layout(ids).op == "placeholder" and graph.weight(weight) is not None and weight not in tables:
            tables.append(weight)
    rows = {graph.shape(t)[0] for t in tables}
    for node in graph.nodes:
        linear = linear_of(graph, node)
        if linear is None or linear.transposed or graph.weight(linear.weight) is None:
            continue
        known = graph.shape(linear.weight)[0] in rows or _module(graph, linear.weight) in planned
        if known and linear.weight not in tables and _is_last(graph, node):
            tables.append(linear.weight)
    return tables


def _module(graph: Graph, weight: fx.Node) -> str:
    return graph.weight(weight).path.rpartition(".")[0]  # type: ignore[union-attr]


def _is_last(graph: Graph, node: fx.Node) -> bool:
    """Whether no linear map comes after a node."""
    seen, stack = set(), list(node.users)
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if linear_of(graph, current) is not None:
            return False
        stack.extend(current.users)
    return True


def vocabulary_site(graph: Graph, weight: fx.Node, axis: Axis, inside: dict[fx.Node, str]) -> Site | Refusal:
    """How a table of the vocabulary is split, or why it is not."""
    path = graph.weight(weight).path  # type: ignore[union-attr]
    module, remedy = _module(graph, weight), "it stays whole on every rank"
    rows = int(graph.shape(weight)[0])
    if rows < axis.size:
        return Refusal(module, "few-rows", f"{rows} rows for {axis.size} ranks", remedy)
    uses = []
    for user in weight.users:
        if user in inside:
            return Refusal(module, "in-a-region", f"{user.name} is part of a region that is split", remedy)
        if user.target in (F.embedding, torch.embedding):
            given = _embedding(user)
            odd = next((n for n in ("max_norm", "scale_grad_by_freq", "sparse") if given.get(n)), None)
            if odd is not None:
                return Refusal(module, "option", f"the embedding has {odd}={given[odd]}", remedy)
            uses.append("embedding")
        elif linear_of(graph, user) is not None:
            uses.append("head")
        else:
            return Refusal(module, "other-reader", f"{path} is also read by {user.name}", remedy)
    counts = shares(rows, axis.size)
    facts = {"rows": rows, "ranks": axis.size, "of_rank": "|".join(map(str, counts))}
    tied = " (tied)" if len(set(uses)) > 1 else ""
    return Site(
        module, "vocabulary", weight.name, facts, f"rows: {', '.join(map(str, counts))}; {' and '.join(uses)}{tied}"
    )


def split_vocabulary(graph: Graph, weight: fx.Node, axis: Axis, maker: str, site: str) -> None:
    """Give this rank its rows, and every reader the collective that it needs."""
    rows = int(graph.shape(weight)[0])
    counts = shares(rows, axis.size)
    start = sum(counts[: axis.rank])
    held = [list(range(sum(counts[:r]), sum(counts[: r + 1]))) for r in range(axis.size)]
    gradients = differentiable(graph)

    def part(node: fx.Node) -> fx.Node:
        recipe = weight_recipe(graph.weight(node), 0, held, axis, maker, site, optional=True)  # type: ignore[arg-type]
        (made,) = add_parts(graph, recipe)
        return made

    shard = part(weight)
    for user in list(weight.users):
        linear = linear_of(graph, user)
        with graph.before(user, maker):
            if linear is None:
                given = _embedding(user)
                padding = given.get("padding_idx")
                padding = padding + rows if padding is not None and padding < 0 else padding
                whole = graph.call(
                    embed_rows, given["input"], shard, start, start + counts[axis.rank], padding, axis.name, axis.group
                )
            else:
                x = linear.x
                if x in gradients:
                    x = graph.call(copy_to, x, axis.name, axis.group)
                own = graph.call(F.linear, x, shard, None if linear.bias is None else part(linear.bias))
                whole = graph.call(gather_last, own, counts, axis.rank, axis.name, axis.group)
        graph.replace(user, whole)
        graph.graph.erase_node(user)
