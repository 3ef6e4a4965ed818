"""A linear map computed part by part, whose gradients are summed in one tensor each.

Products of one value with several runs of one weight's rows have gradients that autograd adds, pads with zeros and
joins: for the value one pass over it a product more, for the weight three. Here a part's backward takes what the parts
after it have found and adds its own in place. For that, parts are a chain: each gives *tokens* (values without storage
that nobody reads) for the value, the weight and the bias, and takes those of the part before; what flows back in place
of the tokens' gradients are the sums so far. The first part of the chain is the one whose gradients are the whole ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latentscan.ir.ops.orders import first_order

Tokens = tuple[Tensor, ...]  # of the value, the weight and, if there is one, the bias


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, x, weight, bias, to_x, to_weight, to_bias, first: int, count: int, keep: int, again: bool, rest: bool
    ) -> Any:
        ctx.where, ctx.chained = (first, count, keep, again, rest), to_x is not None
        at = 3 if ctx.chained else 0
        of_x, of_weight = ctx.needs_input_grad[at : at + 2]  # each product needs the other factor
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        ctx.shapes = x.shape, weight.shape, None if bias is None else bias.shape
        ctx.kinds = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        rows = weight.narrow(0, first, count)
        out = F.linear(_last(x, keep), rows, None if bias is None else bias.narrow(0, first, count))
        made = [t.new_empty(()).expand(t.shape) for t in (x, weight, bias) if t is not None]
        ctx.mark_non_differentiable(*(t for i, t in enumerate(made) if not ctx.needs_input_grad[at + i]))
        return out, *made

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Any, dx: Any, dweight: Any, dbias: Any = None) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        first, count, keep, again, rest = ctx.where
        dx, dweight, dbias = map(_writable, (dx, dweight, dbias))
        at = 3 if ctx.chained else 0
        wants = ctx.needs_input_grad[at : at + 3]
        if dout is not None:
            flat = dout.flatten(0, -2)
            if wants[0]:
                rows = weight.narrow(0, first, count).to(dout.dtype)
                dx = _add_input(dx, ctx.shapes[0], ctx.kinds[0], flat, rows, keep)
            if wants[1]:
                if dweight is None:
                    made = flat.new_empty if rest else flat.new_zeros
                    dweight = made(ctx.shapes[1], dtype=ctx.kinds[1])
                _add_rows(dweight.narrow(0, first, count), flat, _last(x, keep).flatten(0, -2).to(dout.dtype), again)
            if wants[2]:
                dbias = flat.new_zeros(ctx.shapes[2], dtype=ctx.kinds[2]) if dbias is None else dbias
                dbias.narrow(0, first, count).add_(flat.sum(0))
        elif dweight is not None and not again:
            dweight.narrow(0, first, count).zero_()  # the parts after it left these rows open
        found = [g if wanted else None for g, wanted in zip((dx, dweight, dbias), wants, strict=True)]
        none = [None, None, None]
        return *(none + found if ctx.chained else found + none), None, None, None, None, None


def _writable(grad: Tensor | None) -> Tensor | None:
    """A sum so far is this part's to write to. Dynamo traces a backward with gradients laid out as what the forward
    gave, which for a token is one number expanded."""
    return grad.clone(memory_format=torch.contiguous_format) if grad is not None and 0 in grad.stride() else grad


def _last(x: Tensor, keep: int) -> Tensor:
    return x.narrow(-2, x.shape[-2] - keep, keep) if keep else x


def _add_input(
    dx: Tensor | None, shape: torch.Size, dtype: torch.dtype, flat: Tensor, rows: Tensor, keep: int
) -> Tensor:  # fmt: skip
    """``dx`` with a product's part; in place but for the first."""
    if keep:
        dx = flat.new_zeros(shape, dtype=dtype) if dx is None else dx
        tail = _last(dx, keep)
        tail.add_((flat @ rows).view(tail.shape))
        return dx
    if dx is None:
        return (flat @ rows).view(shape).to(dtype)
    if dx.dtype != flat.dtype:
        return dx.add_((flat @ rows).view(shape))
    dx.view(-1, shape[-1]).addmm_(flat, rows)
    return dx


def _add_rows(place: Tensor, flat: Tensor, x: Tensor, again: bool) -> None:
    """Write, or add ``again``, a product's gradient to rows of the weight's."""
    if place.dtype != flat.dtype:
        place.add_(flat.t() @ x) if again else place.copy_(flat.t() @ x)
    elif again:
        place.addmm_(flat.t(), x)
    else:
        torch.mm(flat.t(), x, out=place)


def linear_part(
    x: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tokens | None,
    first: int, count: int, keep: int, again: bool, rest: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``F.linear`` with ``count`` rows of the weight from ``first`` on, and this part's tokens, two or three.

    Args:
        x: [b, L, D]. weight: [rows, D]. bias: [rows].
        tokens: of the part before, or None for the first part, which alone has gradients of x, weight and bias.
        keep: count the last so many tokens of x only; 0: all.
        again: a later part has the same rows. rest: this is the last part, and those before it together write all
            rows that it does not.
    """
    if tokens is None:
        return _Part.apply(x, weight, bias, None, None, None, first, count, keep, again, rest)
    bias = None if bias is None else bias.detach()
    of_bias = tokens[2] if bias is not None else None
    return _Part.apply(x.detach(), weight.detach(), bias, *tokens[:2], of_bias, first, count, keep, again, rest)
