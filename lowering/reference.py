"""The reference target: plain torch. Ops that are not named here run as their reference implementation."""

from __future__ import annotations

from torch import fx

from latentscan.ir.graph import Graph
from latentscan.lowering.reference_attention import attention_sdpa, latent_attention_torch
from latentscan.lowering.select import length_flags


def _attention(graph: Graph, node: fx.Node) -> fx.Node:
    flags = length_flags(graph, graph.shape(node.args[0])[2], graph.shape(node.args[1])[2])  # type: ignore[arg-type]
    return graph.call_like(node, attention_sdpa, *node.args, **node.kwargs, **flags)


def _latent_attention(graph: Graph, node: fx.Node) -> fx.Node:
    flags = length_flags(graph, graph.shape(node.args[0])[2], graph.shape(node.args[2])[1])  # type: ignore[arg-type]
    return graph.call_like(node, latent_attention_torch, *node.args, **node.kwargs, **flags)


KERNELS = {"attention": _attention, "latent_attention": _latent_attention}
