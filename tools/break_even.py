"""What context parallelism of Mamba-2 layers sends, beside its alternatives: formulas as text, and their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from latentscan.ir.errors import PipelineError
from latentscan.ir.graph import Graph, module_path
from latentscan.ir.ops import exchange, ssm, state_exchange

FORMULAS = {
    "all-gather": "(R - 1) 4 b H (P N + 1)",
    "log-scan": "ceil(log2 R) 4 b H (P N + 1)",
    "tail": "e b (d_conv - 1) (H P + 2 G N)",
    "heads": "e b (L / R) ((R - 1) / R) (3 H P + 2 max(G, R) N + H)",
    "length": "L = R^2 states / ((R - 1) e (3 H P + 2 max(G, R) N + H) b), states as the algorithm sends them",
    "recompute": "volume / (forward FLOP of the layers / FLOP/s): the link that exchanges as fast as recomputing takes",
}


@dataclass(frozen=True)
class Layer:
    """One kind of Mamba-2 layer. Sizes are those of one rank of ``tp``; ``element`` is bytes of an activation."""

    heads: int
    head_dim: int
    groups: int
    d_state: int
    conv: int
    element: int

    def states(self, ranks: int, batch: int, algorithm: str) -> int:
        """Bytes of states that leave a rank, one way."""
        count = state_exchange.steps_of(ranks) if algorithm == "log-scan" else ranks - 1
        return count * 4 * batch * self.heads * (self.head_dim * self.d_state + 1)

    def tail(self, batch: int) -> int:
        channels = self.heads * self.head_dim + 2 * self.groups * self.d_state
        return self.element * batch * (self.conv - 1) * channels

    def _features(self, ranks: int) -> int:
        """Of a token: x, z and y, B and C (which every rank needs), dt."""
        return 3 * self.heads * self.head_dim + 2 * max(self.groups, ranks) * self.d_state + self.heads

    def by_heads(self, ranks: int, batch: int, length: int) -> int:
        """Bytes that an all-to-all of heads against tokens sends instead, one way."""
        return self.element * batch * length * (ranks - 1) * self._features(ranks) // ranks**2

    def break_even(self, ranks: int, algorithm: str) -> int:
        """The length from which on the states are fewer bytes than the heads."""
        per_token = self.element * (ranks - 1) * self._features(ranks)
        return -(-(ranks**2) * self.states(ranks, 1, algorithm) // per_token)


def layers_of(graph: Graph) -> dict[str, Layer]:
    """The Mamba-2 layers of a graph, before or after the rewrite, by module path."""
    conv = {
        module_path(n): int(graph.shape(n.args[1])[1])  # type: ignore[arg-type]
        for n in graph.calls(ssm.causal_conv1d.op)
    }
    found = {}
    for node in graph.calls(ssm.chunk_scan.op):
        (_, _, heads, width), (_, _, groups, d_state) = (graph.shape(node.args[i]) for i in (0, 3))  # type: ignore
        element = graph.value(node.args[0]).element_size()  # type: ignore[arg-type]
        taps = conv.get(module_path(node), 4)
        found[module_path(node)] = Layer(int(heads), int(width), int(groups), int(d_state), taps, element)
    return found


def exchange_plan(graph: Graph, ranks: int, batch: int, length: int, forward_flops: int) -> dict[str, Any] | None:
    """What a rank sends for each kind of layer; None without layers whose states are exchanged.

    Args:
        graph: after the passes. length: of the whole sequence. forward_flops: of one rank's forward pass.
    """
    found = graph.calls(state_exchange.state_start)
    if not found:
        return None
    algorithm = str(found[0].args[1])
    kinds: dict[Layer, int] = {}
    for layer in layers_of(graph).values():
        kinds[layer] = kinds.get(layer, 0) + 1
    rows, total = [], 0
    for layer, count in kinds.items():
        states, tail = layer.states(ranks, batch, algorithm), layer.tail(batch)
        total += 2 * count * (states + tail)
        rows.append(
            {
                "layers": count, "heads": layer.heads, "head_dim": layer.head_dim, "d_state": layer.d_state,
                "state_bytes": states, "tail_bytes": tail, "heads_bytes": layer.by_heads(ranks, batch, length),
                "other_algorithm_bytes": layer.states(
                    ranks, batch, "all-gather" if algorithm == "log-scan" else "log-scan"
                ),
                "break_even_length": layer.break_even(ranks, algorithm),
            }
        )  # fmt: skip
    return {
        "algorithm": algorithm, "ranks": ranks, "rows": rows, "formulas": dict(FORMULAS),
        "bytes": total, "forward_flops": forward_flops,
        "bytes_per_recomputed_tflop": total / max(forward_flops, 1) * 1e12,
    }  # fmt: skip


def sequence_ranks(graph: Graph) -> bool:
    """Whether a graph is that of one rank of a split sequence."""
    return bool(graph.calls(state_exchange.state_start, exchange.to_heads))


def shard_length(graph: Graph, ranks: int, tokens: int) -> int:
    """Tokens of a rank; what the ranks do not divide is filled up, as ``split_batch(pad=True)`` does.

    Raises:
        PipelineError: a rank would have one token, or fewer than the next rank's convolution needs.
    """
    share = -(-tokens // ranks)
    least = max([2] + [int(graph.shape(n.args[1])[1]) - 1 for n in graph.calls(ssm.causal_conv1d.op)])  # type: ignore
    if share < least:
        raise PipelineError(
            f"{tokens} tokens over {ranks} ranks are {share} a rank, and each needs {least} at least",
            remedy=f"plan for {least * ranks} tokens or more, or fewer ranks of cp",
        )
    return share
