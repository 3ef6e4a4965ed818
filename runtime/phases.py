"""The graphs of a model's phases: prefill, decode and training, traced without computing anything.

A model whose layers all append to a cache has one graph for prefill and decode: it is traced with something cached
and several new tokens, and both phases are values of its symbols. Recurrent states (Mamba) take another road with one
token, so such a model has a graph for each phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch

from latentscan.ir.arena import make_token
from latentscan.ir.capture import capture
from latentscan.ir.errors import LatentscanError
from latentscan.ir.graph import VALUE, Graph
from latentscan.ir.ops import cache as _cache_ops  # noqa: F401  (registers cache_append)
from latentscan.ir.sizes import expression
from latentscan.runtime.cache import GraphCache, HybridLayer, LinearLayer, cache_argument

_PAST, _NEW = 5, 6  # what is cached and what is new while tracing; any other two sizes above 1 would do


@dataclass(frozen=True)
class Phase:
    """One way of calling a model.

    Attributes:
        name: "prefill", "decode" or "train".
        batch, new, past: rows, new tokens a row, and cached tokens a row.
    """

    name: str
    batch: int
    new: int
    past: int

    @property
    def tokens(self) -> int:
        """Tokens that one call computes."""
        return self.batch * self.new


@dataclass(frozen=True)
class Traced:
    """A graph and the phases that it stands for.

    Attributes:
        state_bytes: bytes of recurrent states per batch row (0 if there are none, or before the first call).
    """

    graph: Graph
    phases: tuple[Phase, ...]
    state_bytes: int = 0


def traced_phases(model: torch.nn.Module, *, batch: int, seq: int, train: bool = False) -> list[Traced]:
    """The model's graphs for a prompt of ``seq`` tokens and one token after it, or for a training step.

    Args:
        model: a causal language model; on the meta device if its recurrent states are to be followed for free.

    Raises:
        CaptureError: it does not trace.
    """
    if train:
        return [Traced(_training_graph(model), (Phase("train", batch, seq, 0),))]
    prefill, decode = Phase("prefill", batch, seq, 0), Phase("decode", batch, 1, seq)
    cache = _cache(model)
    if cache is None:
        return [Traced(_graph(model, None, _NEW), (prefill,))]
    if not any(isinstance(layer, (LinearLayer, HybridLayer)) for layer in cache.layers):
        _fill(cache, _PAST)
        return [Traced(_graph(model, cache, _NEW), (prefill, decode))]
    filled = _cache(model)
    assert filled is not None
    with torch.no_grad(), _evaluating(model):
        model(**_inputs(model, filled, _NEW))
    _fill(filled, _NEW)
    states = sum(x.bytes_held() for x in filled.layers if isinstance(x, (LinearLayer, HybridLayer))) // 2
    return [
        Traced(_graph(model, cache, _NEW), (prefill,), states),
        Traced(_graph(model, filled, 1), (decode,), states),
    ]


def _cache(model: torch.nn.Module) -> GraphCache | None:
    try:
        cache_argument(model)
        return GraphCache.for_model(model)
    except LatentscanError:
        return None


def _fill(cache: GraphCache, past: int) -> None:
    """Let every layer hold ``past`` tokens. One token tensor for all, so that one symbol stands for all lengths."""
    token = None
    layers: list[Any] = [x for layer in cache.layers for x in (layer, getattr(layer, "indexer", None))]
    for layer in layers:
        if hasattr(layer, "token"):
            token = make_token(layer.arena, past) if token is None else token
            layer.token = token


class _evaluating:
    """The model in evaluation mode; every module's own mode comes back."""

    def __init__(self, model: torch.nn.Module, training: bool = False) -> None:
        self.model, self.training = model, training

    def __enter__(self) -> None:
        self.modes = {m: m.training for m in self.model.modules()}
        self.model.train(self.training)

    def __exit__(self, *_: Any) -> None:
        for module, training in self.modes.items():
            module.training = training


def _inputs(model: torch.nn.Module, cache: GraphCache | None, new: int) -> dict[str, Any]:
    device = next(model.parameters()).device
    given: dict[str, Any] = {
        "input_ids": torch.ones(2, new, dtype=torch.long, device=device),
        "use_cache": cache is not None,
    }
    if cache is not None:
        given[cache_argument(model)] = cache
    return given


def _graph(model: torch.nn.Module, cache: GraphCache | None, new: int) -> Graph:
    with _evaluating(model):
        return capture(model, inputs=_inputs(model, cache, new))


def _training_graph(model: torch.nn.Module) -> Graph:
    with _evaluating(model, training=True):
        return capture(model, inputs=_inputs(model, None, _NEW), training=True)


def values_of(graph: Graph, phase: Phase) -> dict[sympy.Symbol, int]:
    """What the graph's symbols are in a phase. A size that is none of batch, new and cached tokens stays as traced."""
    appended = {n.args[0] for n in graph.graph.nodes if getattr(n.target, "_opname", "") == "cache_append"}
    found: dict[sympy.Symbol, int] = {}
    plain: dict[sympy.Symbol, int] = {}
    for node in graph.graph.nodes:
        value = node.meta.get(VALUE)
        if isinstance(value, torch.SymInt) and node.op == "placeholder":  # a plain number, such as logits_to_keep
            plain[expression(value)] = int(value.node.hint)
        if node.op != "placeholder" or not isinstance(value, torch.Tensor) or graph.weight(node) is not None:
            continue
        if node in appended or node.name.endswith("token"):
            sizes: tuple[int, ...] = (phase.past + 1,)
        elif value.dim() == 2 and not value.is_floating_point():
            sizes = (phase.batch, phase.new)
        else:
            sizes = (phase.batch,)
        for position, size in enumerate(value.shape):
            expr = expression(size)
            if isinstance(expr, sympy.Symbol):
                known = position < len(sizes)
                found.setdefault(expr, sizes[position] if known else int(size.node.hint))  # type: ignore[union-attr]
    return plain | found
