"""Attention that a model writes out as matmul, softmax and matmul becomes the canonical op.

Followed from each softmax over the keys, up to the product of queries and keys and down to the product with the
values. On the way up only what the canonical op can say is taken: one number times the scores, terms added to them
(ALiBi, masks), a fill with the most negative number where a mask says so, ``softcap * tanh(x / softcap)``, casts and
views. Anything else leaves the model's own nodes as they are.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from latentscan.ir.errors import LatentscanError
from latentscan.ir.graph import Graph
from latentscan.ir.ops import attention as _attention  # noqa: F401  (registers the op)
from latentscan.ir.sizes import same

ATTENTION = torch.ops.latentscan.attention.default

_CASTS = {"to", "float", "type", "type_as", "half", "bfloat16"}
_VIEWS = {"view", "reshape", "contiguous"}
_SOFTMAX: tuple[Any, ...] = (F.softmax, torch.softmax, "softmax")
_MATMUL: tuple[Any, ...] = (torch.matmul, operator.matmul, torch.bmm, "matmul", "bmm", "__matmul__")
_MUL: tuple[Any, ...] = (operator.mul, torch.mul, "mul", "mul_", operator.imul)
_DIV: tuple[Any, ...] = (operator.truediv, torch.div, "div", operator.itruediv)
_ADD: tuple[Any, ...] = (operator.add, torch.add, "add", operator.iadd)


class _NotAttentionError(Exception):
    """What stands in the way."""


@dataclass
class _Scores:
    """What was found above a softmax: ``softcap(scale q k) + terms``, or filled where a mask is True."""

    query: fx.Node
    key: fx.Node  # [.., T, D]
    scale: float
    softcap: float | None = None
    terms: list[tuple[str, Any]] = field(default_factory=list)  # ("add", node) or ("fill", (mask, number)), inner first


def canonical_eager(graph: Graph) -> None:
    """Replace every attention that is written out. Those with dropout that draws stay."""
    for node in graph.calls(*_SOFTMAX):
        try:
            _replace(graph, node)
        except (_NotAttentionError, LatentscanError, RuntimeError):  # the last two: shapes that the op cannot take
            continue


def _replace(graph: Graph, softmax: fx.Node) -> None:
    shape = graph.shape(softmax)
    dim = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    if dim not in (-1, len(shape) - 1) or len(shape) not in (3, 4):
        raise _NotAttentionError
    product = _down(graph, softmax)
    scores = _up(graph, softmax.args[0], 0)
    value: Any = product.args[1]
    heads = _heads(graph, scores, value, product, shape)
    with graph.before(product, "normalize"):
        q, k, v = (_four(graph, x, heads) for x in (scores.query, scores.key, value))
        mask = _mask(graph, scores, heads, q)
        out = graph.call(ATTENTION, q, k, v, mask, kind="full", scale=scores.scale, softcap=scores.softcap)
        if len(graph.shape(product)) == 3:
            out = graph.method("flatten", out, 0, 1)
    if len(graph.shape(out)) != len(graph.shape(product)):
        raise _NotAttentionError
    product.replace_all_uses_with(out)
    dead: Any = product
    while dead is not softmax:  # dropout that draws nothing would stay
        above = dead.args[0]
        graph.graph.erase_node(dead)
        dead = above


def _down(graph: Graph, node: fx.Node) -> fx.Node:
    """The product of probabilities and values."""
    while True:
        if len(node.users) != 1:
            raise _NotAttentionError  # somebody wants the probabilities
        user = next(iter(node.users))
        if user.target in (F.dropout, torch.dropout, "dropout"):
            p = user.kwargs.get("p", user.args[1] if len(user.args) > 1 else 0.5)
            training = user.kwargs.get("training", user.args[2] if len(user.args) > 2 else True)
            if p != 0 and training is not False:
                raise _NotAttentionError
        elif user.target in _MATMUL:
            if user.args[0] is not node or not isinstance(user.args[1], fx.Node):
                raise _NotAttentionError
            return user
        elif not (user.op == "call_method" and user.target in _CASTS | _VIEWS and user.args[0] is node):
            raise _NotAttentionError
        node = user


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _up(graph: Graph, node: Any, depth: int) -> _Scores:
    if not isinstance(node, fx.Node) or depth > 24:
        raise _NotAttentionError
    if node.op == "call_method" and node.target in _CASTS | _VIEWS:
        return _up(graph, node.args[0], depth + 1)
    if node.target in _MATMUL:
        key = _transposed(node.args[1])
        return _Scores(node.args[0], key, 1.0)  # type: ignore[arg-type]
    if node.target in (torch.baddbmm, "baddbmm"):
        names = ("input", "batch1", "batch2")
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        alpha, beta = _number(given.get("alpha", 1)), _number(given.get("beta", 1))
        if alpha is None or beta not in (0.0, 1.0):
            raise _NotAttentionError
        found = _Scores(given["batch1"], _transposed(given["batch2"]), alpha)
        found.terms += [("add", given["input"])] if beta else []
        return found
    if node.target in _MUL or node.target in _DIV:
        left, right = node.args[:2]
        by = _number(right)
        if by is None and node.target in _MUL:
            left, by = right, _number(left)
        if by is None or not by > 0:
            raise _NotAttentionError
        factor = by if node.target in _MUL else 1.0 / by
        if isinstance(left, fx.Node) and left.target in (torch.tanh, "tanh") and node.target in _MUL:
            found = _up(graph, left.args[0], depth + 1)
            if found.terms or found.softcap is not None:
                raise _NotAttentionError
            found.softcap, found.scale = by, found.scale * by  # c tanh(s q k): the op divides by c itself
            return found
        found = _up(graph, left, depth + 1)
        if found.terms or found.softcap is not None:
            raise _NotAttentionError
        found.scale *= factor
        return found
    if node.target in _ADD and "alpha" not in node.kwargs:
        tries = [(a, b) for a, b in (node.args[:2], node.args[1::-1]) if isinstance(a, fx.Node)]
        for scores, term in tries:
            try:
                found = _up(graph, scores, depth + 1)
            except _NotAttentionError:
                continue
            if not isinstance(graph.value(term), torch.Tensor):
                raise _NotAttentionError
            found.terms.append(("add", term))
            return found
        raise _NotAttentionError
    if node.target in ("masked_fill", torch.masked_fill):
        number = _number(node.args[2])
        if number is None or number > -1e4:
            raise _NotAttentionError
        found = _up(graph, node.args[0], depth + 1)
        found.terms.append(("fill", (node.args[1], number)))
        return found
    raise _NotAttentionError


def _transposed(node: Any) -> fx.Node:
    """K of a node that is K^T."""
    if not isinstance(node, fx.Node) or node.target not in ("transpose", torch.transpose, "swapaxes"):
        raise _NotAttentionError
    rank = node.meta["example_value"].dim()
    if {d % rank for d in node.args[1:3]} != {rank - 2, rank - 1}:  # type: ignore[operator]
        raise _NotAttentionError
    return node.args[0]  # type: ignore[return-value]


def _heads(graph: Graph, scores: _Scores, value: fx.Node, product: fx.Node, shape: tuple[Any, ...]) -> Any:
    """None if everything is [B, H, S, D] already, else the number of heads that [B H, S, D] is made of."""
    ranks = {len(graph.shape(x)) for x in (scores.query, scores.key, value, product)}
    if ranks == {4}:
        q, k, v = (graph.shape(x)[1] for x in (scores.query, scores.key, value))
        if not (same(q, k) and same(k, v)):
            raise _NotAttentionError
        return None
    if ranks != {3}:
        raise _NotAttentionError
    # The number of heads is in the scores' or the values' shape, wherever they are seen with four dimensions.
    for node in (scores.query, scores.key, value):
        above: Any = node
        while isinstance(above, fx.Node) and above.op == "call_method" and above.target in _VIEWS:
            above = above.args[0]
            four = graph.shape(above)
            if len(four) == 4 and isinstance(four[1], int) and same(four[0] * four[1], graph.shape(node)[0]):
                return four[1]
    raise _NotAttentionError


def _four(graph: Graph, node: fx.Node, heads: int | None) -> fx.Node:
    """[B H, ...] -> [B, H, ...]; the value before the flattening where there is one."""
    if heads is None:
        return node
    above: Any = node
    while isinstance(above, fx.Node) and above.op == "call_method" and above.target in _VIEWS:
        above = above.args[0]
        if len(graph.shape(above)) == 4 and graph.shape(above)[1] == heads:
            return above
    return graph.method("unflatten", node, 0, (-1, heads))


def _mask(graph: Graph, scores: _Scores, heads: int | None, q: fx.Node) -> fx.Node | None:
    mask: fx.Node | None = None
    for kind, what in scores.terms:
        if kind == "add":
            term = what
            if heads is not None and len(graph.shape(term)) == 3:
                term = graph.method("unflatten", term, 0, (-1, heads))
            mask = term if mask is None else graph.call(operator.add, mask, term)
        else:
            where, number = what
            if mask is None:
                zero = graph.method("new_zeros", q, ())
                mask = graph.call(torch.where, where, number, zero)
            else:
                mask = graph.method("masked_fill", mask, where, number)
    if mask is not None and len(graph.shape(mask)) > 4:
        raise _NotAttentionError
    return mask


def canonical_linear(graph: Graph) -> None:
    """``x @ W.T`` (and ``+ b``) with a weight of the model's becomes ``F.linear``."""
    for node in graph.calls(torch.matmul, operator.matmul, "matmul"):
        weight = _stored_out_in(graph, node.args[1])
        if weight is None:
            continue
        end, bias = node, None
        user = next(iter(node.users), None)
        if len(node.users) == 1 and user is not None and user.target in (operator.add, torch.add) and not user.kwargs:
            other = user.args[1] if user.args[0] is node else user.args[0]
            if isinstance(other, fx.Node) and graph.weight(other) is not None and len(graph.shape(other)) == 1:
                end, bias = user, other
        with graph.before(end, "normalize"):
            new = graph.call(F.linear, node.args[0], weight, bias)
        end.replace_all_uses_with(new)


def _stored_out_in(graph: Graph, node: Any) -> fx.Node | None:
    """The weight [out, in] whose transpose a node is."""
    if not isinstance(node, fx.Node) or not node.args:
        return None
    weight: Any = node.args[0]
    if graph.weight(weight) is None or len(graph.shape(weight)) != 2:
        return None
    if node.target is getattr:
        return weight if node.args[1] in ("T", "mT") else None
    if node.target in ("t", torch.t):
        return weight
    if node.target in ("transpose", torch.transpose):
        return weight if {int(d) % 2 for d in node.args[1:3]} == {0, 1} else None  # type: ignore[call-overload]
    return None
