"""Turning a library function into a canonical op while Dynamo traces, for our own traces only.

``torch._dynamo.substitute_in_graph`` is process-wide and may register a function once. So each replacement asks whose
trace it runs in: :func:`traced_by_latentscan` is a constant of the trace; for any other backend the replacement
traces a copy of the original function, which gives that backend the same graph as without latentscan.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch._dynamo

F = TypeVar("F", bound=Callable[..., Any])

# id(function) -> function, for functions that are already substituted (the function is kept alive on purpose).
_SUBSTITUTED: dict[int, Callable[..., Any]] = {}

MARK = "_latentscan_backend"


@torch._dynamo.assume_constant_result
def traced_by_latentscan() -> bool:
    """Whether the current Dynamo trace is for a latentscan backend (an object with a true ``_latentscan_backend``)."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        backend = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:  # no translator: the function runs eagerly
        return False
    for _ in range(8):  # Dynamo wraps a backend several times
        if backend is None:
            return False
        if getattr(backend, MARK, False):
            return True
        backend = (
            getattr(backend, "_torchdynamo_orig_backend", None)
            or getattr(backend, "_torchdynamo_orig_callable", None)
            or getattr(backend, "compiler_fn", None)
            or getattr(backend, "__wrapped__", None)
        )
    return False


def copy_of(function: F) -> F:
    """A copy of a plain Python function under another identity, so that its own substitution does not apply to it."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy  # type: ignore[return-value]


def substitute(function: Callable[..., Any], make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Replace ``function`` in latentscan's traces.

    Args:
        function: a module-level Python function of some library. If it is a decorated one, Dynamo sees the wrapper:
            pass what the calling module's global name is bound to.
        make: called once with a copy of ``function``; returns the replacement, a function with the same parameters
            that Dynamo can trace. It is asked in latentscan's traces only, and may call the copy.

    Returns:
        False if the function was substituted before, or cannot be (not a plain Python function).
    """
    if id(function) in _SUBSTITUTED or not isinstance(function, types.FunctionType):
        return False
    original = copy_of(function)
    ours = make(original)

    # Arguments go on unread: what a trace reads first decides the order of its inputs.
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if traced_by_latentscan():
            return ours(*args, **kwargs)
        return original(*args, **kwargs)

    torch._dynamo.substitute_in_graph(function, skip_signature_check=True)(replacement)
    _SUBSTITUTED[id(function)] = function
    return True
