"""Sizes of symbolic dimensions as plain numbers, for comparing shapes without adding guards."""

from __future__ import annotations

from typing import Any

import sympy
import torch

# Distinct large primes: two expressions that agree on them are the same for our purposes.
_PRIMES = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079, 10091, 10093, 10099, 10103, 10111, 10133)


def expression(size: Any) -> sympy.Expr:
    """A dimension as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def number(size: Any) -> int:
    """A plain number that stands for a dimension: itself, or its expression with each symbol a distinct prime."""
    if isinstance(size, int):
        return size
    expr = expression(size)
    values = {s: _PRIMES[int("".join(c for c in s.name if c.isdigit()) or 0) % len(_PRIMES)] for s in expr.free_symbols}
    if len(set(values.values())) < len(values):  # two symbols on one prime: spread them by name
        values = {s: _PRIMES[i % len(_PRIMES)] for i, s in enumerate(sorted(values, key=lambda s: s.name))}
    return int(expr.subs(values))


def numbers(shape: Any) -> tuple[int, ...]:
    return tuple(number(s) for s in shape)


def same(a: Any, b: Any) -> bool:
    """Whether two dimensions are the same expression, without adding a guard."""
    return bool(expression(a) == expression(b))


def is_static(size: Any) -> bool:
    return isinstance(size, int) or not expression(size).free_symbols


def hint_of(size: Any) -> int:
    """A dimension as it was traced (0 where nothing is known); adds no guard."""
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else 0
    return int(hint)


def is_symbol(size: Any) -> bool:
    """Whether a size is one symbol by itself."""
    return isinstance(expression(size), sympy.Symbol)
