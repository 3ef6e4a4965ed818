"""Runs a graph through AOTAutograd with its forward and backward scheduled for overlap (overlap-collectives)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from latentscan.ir.ops.waiting import wait
from latentscan.lowering.inductor import inductor_options
from latentscan.lowering.schedule import Scheduled, is_start, overlap, place_of, starts_of, waits_of

Tell = Callable[[Scheduled], None]
Agree = Callable[[str, "list[tuple[str, ...]]"], None]


def compile_overlapped(
    module: fx.GraphModule, *, growth: float, inductor: bool, tell: Tell, agree: Agree | None = None
) -> Callable[..., Any]:
    """A callable that computes what ``module`` does, with collectives started early and waited for late.

    Args:
        growth: by how much the bytes alive at once may grow.
        inductor: let Inductor compile the scheduled graphs, with its own reordering set to keep them so.
        tell: called with what was done to each graph, when it is compiled.
        agree: called with (phase, starts) of each graph, to compare them over the ranks; raises if they differ.
    """
    if inductor:
        return torch.compile(module, dynamic=True, fullgraph=True, options=_inductor_options(growth, tell, agree))
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition

    def compiler(phase: str) -> Callable[..., Any]:
        def compile_one(made: fx.GraphModule, _: Any) -> Callable[..., Any]:
            _schedule(made.graph, phase, growth, tell, agree)
            guard_waits(made.graph)
            return boxed(made)

        return compile_one

    backend = aot_autograd(
        fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), inference_compiler=compiler("forward"),
        partition_fn=default_partition,
    )  # fmt: skip

    return torch.compile(module, backend=backend, dynamic=True, fullgraph=True)


def boxed(made: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A graph as a function of a list, which it empties: what the forward kept is freed as the backward goes."""
    from torch.fx.graph import _BoxedCodeGen

    made.graph.set_codegen(_BoxedCodeGen())
    made.recompile()
    forward = made.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _schedule(graph: fx.Graph, phase: str, growth: float, tell: Tell, agree: Agree | None) -> None:
    drop_unread(graph)
    done = overlap(graph, phase, growth=growth)
    tell(done)
    if agree is not None:
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily():
            agree(phase, starts_of(graph))


def drop_unread(graph: fx.Graph) -> int:
    """Erase calls of ops that write nothing and whose results nobody reads, collectives among them; returns how many.

    AOTAutograd's partitioner takes a wait for a write. A wait of the forward pass whose inputs are all kept for the
    backward pass it repeats there, with the collective and all that leads to it, though nothing reads the result.
    """
    found = 0
    for node in reversed(list(graph.nodes)):
        op = node.target
        if node.users or node.op != "call_function" or not isinstance(op, torch._ops.OpOverload):
            continue
        if op.namespace != "_c10d_functional" and (op._schema.is_mutable or node.is_impure()):
            continue
        graph.erase_node(node)
        found += 1
    return found


def guard_waits(graph: fx.Graph) -> int:
    """Let every wait of a graph that Python runs hold what is sent until then (Inductor does so by itself), and say
    what it waited for, should it fail. Returns their number."""
    found = 0
    for node in list(graph.nodes):
        if not is_start(node):
            continue
        group = next(a for a in reversed(node.args) if isinstance(a, str))
        for one in waits_of(node):
            one.target, one.args = wait, (one.args[0], group, place_of(node)[0], node.args[0])
            found += 1
    return found


def _inductor_options(growth: float, tell: Tell, agree: Agree | None) -> dict[str, Any]:
    """Inductor's options: our order after its own graph passes, and a scheduler that does not undo it."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Scheduling(CustomGraphPass):  # type: ignore[misc]
        def __call__(self, graph: fx.Graph) -> None:
            backward = any(n.name.startswith("tangents") for n in graph.nodes if n.op == "placeholder")
            _schedule(graph, "backward" if backward else "forward", growth, tell, agree)

        def uuid(self) -> Any:
            return (
                None  # no cached graph: a rank that found one would leave out the comparison that the others wait for
            )

    return {
        **inductor_options(),
        "post_grad_custom_post_pass": Scheduling(),
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
        "reorder_for_peak_memory": False,
    }
