"""What one rank of a mesh would run, on one machine: its graphs in a job whose other ranks are not there.

The fake process group of torch.distributed stands for the others; tensors hold no numbers. The graphs are those that
AOTAutograd makes, with sizes as plain numbers, so that what they compute and send can be counted and timed.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from latentscan.ir.cost import evaluate
from latentscan.ir.errors import MeshError
from latentscan.ir.graph import VALUE, Graph
from latentscan.ir.mesh import Axis, Mesh
from latentscan.ir.ops.base import REGISTRY
from latentscan.ir.ops.waiting import plain
from latentscan.ir.order import check_order, ranks_to_try
from latentscan.ir.sizes import expression
from latentscan.lowering.checkpoint import outline_checkpoints
from latentscan.lowering.places import name_groups
from latentscan.lowering.schedule import Scheduled, is_start, overlap, place_of, waits_of
from latentscan.passes.base import Context, Pass
from latentscan.passes.pipeline import run
from latentscan.runtime.phases import Phase, values_of


@contextlib.contextmanager
def alone_in(mesh: Mesh) -> Iterator[Mesh]:
    """The mesh with groups of a job in which only this rank is there.

    Raises:
        MeshError: torch.distributed runs in this process already.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise MeshError("torch.distributed runs here already", remedy="count ranks in a process of its own")
    place = 0
    for axis in mesh.axes:
        place = place * axis.size + axis.rank
    dist.init_process_group("fake", rank=place, world_size=mesh.size, store=FakeStore())
    try:
        sizes, names = tuple(a.size for a in mesh.axes), tuple(a.name for a in mesh.axes)
        made = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        yield Mesh(tuple(replace(a, group=made.get_group(a.name).group_name) for a in mesh.axes))
    finally:
        dist.destroy_process_group()


class _SeenError(Exception):
    """Both graphs are there; nothing has to run."""


def graphs_of(graph: Graph, passes: Sequence[Pass], mesh: Mesh, phase: Phase) -> list[tuple[str, fx.Graph, Scheduled]]:
    """Forward and, of a training graph, backward graph of one rank, ordered as the pipeline says.

    Args:
        graph: before any pass; it is copied. mesh: of :func:`alone_in`. phase: sizes of the whole batch.

    Returns:
        (name, graph, what scheduling did); sizes are numbers.
    """
    program = run(graph.copy(), passes, Context(own_parameters=True, meta=True, mesh=mesh), strict=False)
    end = program.forced(True).graph
    assert end is not None
    end = end.copy()
    growth = end.overlap
    name_groups(end, {a.group: a.group for a in mesh.axes})
    outline_checkpoints(end, higher_order=True)
    end.clean()
    share = replace(phase, batch=max(1, phase.batch // mesh.axis("dp").size), new=-(-phase.new // mesh.axis("cp").size))
    inputs = _inputs(end, share if phase.new > 1 else phase)
    made = _traced(end.module, inputs, training=end.training)
    found = []
    for name, module in made:
        done = overlap(module.graph, name, growth=growth or 0.0, ahead=2 if growth is not None else 0)
        found.append((name, module.graph, done))
    return found


def _inputs(graph: Graph, phase: Phase) -> list[Any]:
    """What the graph is called with, without numbers in it."""
    values, found = values_of(graph, phase), []
    for node in graph.graph.nodes:
        if node.op != "placeholder":
            continue
        value, weight = node.meta.get(VALUE), graph.weight(node)
        if isinstance(value, torch.SymInt):
            found.append(evaluate(expression(value), values))
        elif isinstance(value, torch.Tensor):
            sizes = [evaluate(expression(s), values) for s in value.shape]
            made = torch.empty(sizes, dtype=value.dtype, device="meta")
            trained = weight is not None and made.is_floating_point() and graph.training
            found.append(made.requires_grad_(trained))
        else:
            found.append(value)
    return found


def _traced(module: fx.GraphModule, inputs: list[Any], *, training: bool) -> list[tuple[str, fx.GraphModule]]:
    from functorch.compile import aot_function
    from torch._functorch.partitioners import default_partition

    found: list[tuple[str, fx.GraphModule]] = []

    def split(joint: fx.GraphModule, given: Any, **more: Any) -> Any:
        forward, backward = default_partition(joint, given, **more)
        found.extend([("forward", forward), ("backward", backward)])
        return forward, backward

    def keep(made: fx.GraphModule, _: Any) -> Callable[..., Any]:
        if not found:
            found.append(("forward", made))

        def stop(*args: Any) -> Any:
            raise _SeenError

        return stop

    def call(*args: Any) -> list[torch.Tensor]:
        out = module.forward(*args)
        return [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, torch.Tensor)]

    with contextlib.suppress(_SeenError), torch.set_grad_enabled(training), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        aot_function(call, fw_compiler=keep, bw_compiler=keep, partition_fn=split)(*inputs)
    return found


# -- counting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    """One collective of one rank: name, axis, module, and the bytes that leave the rank by ring algorithms."""

    phase: str
    name: str
    axis: str
    module: str
    bytes: int

    def key(self) -> tuple[str, ...]:
        """What has to be the same on all ranks of the axis (as :func:`latentscan.ir.order.check_order` takes it)."""
        return self.name, self.phase, self.axis, str(self.bytes), "bytes", self.module


def sent(graph: fx.Graph, phase: str, mesh: Mesh) -> list[Sent]:
    """The collectives of a graph in order."""
    return [_sent(n, phase, mesh) for n in graph.nodes if is_start(n)]


def _sent(start: fx.Node, phase: str, mesh: Mesh) -> Sent:
    name, module = place_of(start)
    axis = _axis(start, mesh)
    given: Any = start.args[0]
    whole, mine = _bytes(given.meta.get("val")), _bytes(start.meta.get("val"))
    part = (axis.size - 1) / axis.size
    count = {
        "all_reduce": 2 * whole * part, "all_gather": whole * (axis.size - 1), "reduce_scatter": mine * (axis.size - 1)
    }.get(name, whole * part if not _to_one(start) else whole)  # fmt: skip
    return Sent(phase, name, axis.name, module, round(count))


def _to_one(start: fx.Node) -> bool:
    """Whether an all-to-all sends everything to one rank: a step along a ring."""
    counts = next((a for a in reversed(start.args) if isinstance(a, (list, tuple))), ())
    return sum(bool(c) for c in counts) == 1


def _axis(start: fx.Node, mesh: Mesh) -> Axis:
    group = plain(next(a for a in reversed(start.args) if isinstance(a, str)))
    return next(a for a in mesh.axes if a.group == group)


def _bytes(value: Any) -> int:
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def everywhere(graph: Graph, passes: Sequence[Pass], mesh: Mesh, phase: Phase, most: int = 4) -> dict[str, Any]:
    """What ranks all over a mesh send in one step, and the check that they do so in the same order.

    Args:
        most: ranks to try along each axis; the first and last ones are among them.

    Returns:
        "ranks" that were tried (places by axis), and for forward and backward "collectives", "bytes_sent" (least and
        most of a rank), "by_kind", and "between": computing nodes between start and wait, as traced and as scheduled.

    Raises:
        MeshError: two ranks would wait for each other for ever.
    """
    tried = [ranks_to_try(mesh, a.name, most) for a in mesh.axes]
    found: dict[tuple[int, ...], list[tuple[str, list[Sent], Scheduled]]] = {}
    for place in itertools.product(*tried):
        with alone_in(mesh.at(**dict(zip((a.name for a in mesh.axes), place, strict=True)))) as here:
            made = graphs_of(graph, passes, here, phase)
            found[place] = [(name, sent(g, name, here), done) for name, g, done in made]
    told: dict[str, Any] = {"ranks": [dict(zip((a.name for a in mesh.axes), p, strict=True)) for p in found]}
    for index, (name, first, done) in enumerate(next(iter(found.values()))):
        for axis in mesh.axes:
            orders = {n: [s.key() for s in m[index][1] if s.axis == axis.name] for n, m in enumerate(found.values())}
            check_order(orders, axis.name)
        sums = [sum(s.bytes for s in m[index][1]) for m in found.values()]
        told[name] = {
            "collectives": len(first),
            "bytes_sent": [min(sums), max(sums)],
            "by_kind": dict(Counter(f"{s.name} {s.axis}" for s in first)),
            "between": [sum(c.before for c in done.collectives), sum(c.after for c in done.collectives)],
        }
    return told


@dataclass(frozen=True)
class Times:
    """A graph on a time line of two: the device computes, and the links send, in order. Seconds.

    Attributes:
        compute: products, convolutions, scans and attention, at the stated rate; the rest is left out, so that less is
            taken to be hidden than would be.
        sending: of all collectives. exposed: what the device waits of it.
    """

    compute: float = 0.0
    sending: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: Times) -> Times:
        return Times(self.compute + other.compute, self.sending + other.sending, self.exposed + other.exposed)


def timed(graph: fx.Graph, mesh: Mesh, *, bandwidth: float, flops: float) -> Times:
    """What of a graph's communication is hidden behind what it computes.

    Args:
        bandwidth: bytes a second that leave a rank. flops: operations a second.
    """
    clock = links = compute = sending = exposed = 0.0
    ends: dict[fx.Node, float] = {}
    for node in graph.nodes:
        if is_start(node):
            takes = _sent(node, "", mesh).bytes / bandwidth
            links = max(links, clock) + takes
            sending += takes
            for wait in waits_of(node):
                ends[wait] = links
        elif node in ends:
            exposed += max(0.0, ends[node] - clock)
            clock = max(clock, ends[node])
        else:
            takes = operations(node) / flops
            clock, compute = clock + takes, compute + takes
    return Times(compute, sending, exposed)


def operations(node: fx.Node) -> int:
    """Floating point operations of a node of a graph whose sizes are numbers; 0 for what is not counted."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return 0
    from torch.utils.flop_counter import flop_registry

    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    info = REGISTRY.get(node.target)
    if info is not None:
        return int(info.cost(*args, **kwargs).flops)
    count = flop_registry.get(node.target.overloadpacket)
    return int(count(*args, **kwargs, out_val=node.meta.get("val"))) if count is not None else 0
