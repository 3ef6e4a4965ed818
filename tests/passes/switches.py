"""What the tests of the MLA switches share: padded attention as the library writes it, bytes that training keeps."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import sympy
import torch

from latentscan.ir.cost import evaluate
from latentscan.ir.graph import Graph
from latentscan.ir.kept import total, training
from latentscan.ir.sizes import expression
from latentscan.passes.base import Context, Site
from latentscan.passes.pipeline import PassRecord, parse, run


class _Held:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def kept_bytes(model: Any, of: str = "loss", **inputs: Any) -> int:
    """Device bytes that autograd holds between the forward and the backward of one step, which is then run.

    Args:
        of: the output whose sum's gradients are taken; with "logits" what the loss keeps is left out.

    Each storage counts once, parameters and buffers do not, nor does what a swap put on the host (the hooks are not
    given that).
    """
    mine = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    alive: weakref.WeakSet[_Held] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> _Held:
        held = _Held(tensor)
        alive.add(held)
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        loss = model(**inputs)[of]
    sizes = {}
    for held in list(alive):
        storage = held.tensor.untyped_storage()
        if storage._cdata not in mine:
            sizes[storage._cdata] = storage.nbytes()
    del held
    loss.sum().backward()
    return sum(sizes.values())


def rewritten(graph: Graph, pipeline: str) -> tuple[Graph, list[PassRecord]]:
    """The graph after a pipeline, and what the passes did; the given one stays."""
    program = run(graph.copy(), parse(pipeline), Context(own_parameters=True), strict=False)
    assert program.graph is not None
    return program.graph, program.records


def sizes_of(graph: Graph, batch: int, length: int) -> dict[sympy.Symbol, int]:
    """The graph's symbols for inputs (ids, labels, masks) of [batch, length]."""
    found: dict[sympy.Symbol, int] = {}
    for node in graph.nodes:
        value = graph.value(node)
        if node.op == "placeholder" and node.name not in graph.weights and isinstance(value, torch.Tensor):
            found |= {expression(s): n for s, n in zip(value.shape, (batch, length), strict=True)}
    return found


def predicted(graph: Graph, batch: int, length: int) -> int:
    """Bytes that a training graph keeps, by formula."""
    return evaluate(total(training(graph)), sizes_of(graph, batch, length))


def freed(graph: Graph, records: list[PassRecord], batch: int, length: int) -> int:
    """Bytes that the sites say they free."""
    sites: list[Site] = [s for r in records for s in r.sites]
    return sum(evaluate(sympy.sympify(s.facts.get("freed", 0)), sizes_of(graph, batch, length)) for s in sites)


@contextlib.contextmanager
def padded_attention(to: int | None = None) -> Iterator[None]:
    """The library's SDPA behind zero padding of head dims and trimming, as its flash-attention wrapper does it.

    Args:
        to: pad q, k and v to a multiple of this; None pads v to the width of q and k.
    """
    import torch.nn.functional as F
    from transformers.integrations import sdpa_attention
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    def padded(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, **words: Any) -> Any:
        width, narrow = q.shape[-1], v.shape[-1]
        full = width if to is None else -(-width // to) * to
        q, k = (F.pad(x, [0, full - width]) if full > width else x for x in (q, k))
        v = F.pad(v, [0, full - narrow]) if full > narrow else v
        out, weights = sdpa_attention.sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **words)
        return out[..., :narrow], weights

    before = FUNCTIONS["sdpa"]
    FUNCTIONS["sdpa"] = padded
    try:
        yield
    finally:
        FUNCTIONS["sdpa"] = before
