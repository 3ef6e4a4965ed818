"""The mesh of a wrapped model: process groups for its axes, and the checks that all ranks do the same."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from latentscan.ir.errors import CheckpointError, MeshError
from latentscan.ir.mesh import AXES, Axis, Mesh, parse_mesh
from latentscan.ir.ops.waiting import ANSWER, late, lost, place_of, plain
from latentscan.ir.ops.watching import watch
from latentscan.ir.order import Collective, check_order
from latentscan.runtime.own import trains_alone

PARALLEL = ("tensor-parallel", "sequence-parallel")  # passes that need a mesh, and leave a rank its part of the weights
SEQUENCE = ("mamba-context-parallel", "ulysses")  # passes that need one, and leave a rank its part of the tokens


def bind_mesh(given: Any, model: torch.nn.Module) -> Mesh | None:
    """The mesh with its process groups, as this rank sees it.

    Args:
        given: None, text such as ``tp=2,cp=2`` (of all ranks of torch.distributed), or a DeviceMesh with named axes.

    Raises:
        MeshError: torch.distributed is not running, the number of ranks is another, or the axes have wrong names.
    """
    if given is None:
        return None
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise MeshError(
            f"mesh {given!r} needs torch.distributed, which is not initialised",
            where="wrap",
            remedy="start the program with torchrun and call torch.distributed.init_process_group() first",
        )
    if isinstance(given, str):
        planned = parse_mesh(given)
        if planned.size != dist.get_world_size():
            raise MeshError(
                f"mesh {given!r} has {planned.size} ranks, torch.distributed has {dist.get_world_size()}",
                where="wrap",
                remedy=f"start {planned.size} processes, or give sizes whose product is {dist.get_world_size()}",
            )
        from torch.distributed.device_mesh import init_device_mesh

        sizes, axes_names = tuple(a.size for a in planned.axes), tuple(a.name for a in planned.axes)
        given = init_device_mesh(device_for(given, model).type, sizes, mesh_dim_names=axes_names)
    names = getattr(given, "mesh_dim_names", None)
    if not names or any(n not in AXES for n in names):
        raise MeshError(
            f"the mesh's axes are named {names}",
            where="wrap",
            remedy="name them dp, tp, cp: init_device_mesh(device, sizes, mesh_dim_names=('tp',))",
        )
    axes = []
    for index, name in enumerate(names):
        group = given.get_group(name)
        axes.append(Axis(name, int(given.size(index)), int(given.get_local_rank(name)), group.group_name))
    return Mesh(tuple(axes))


def axis_names(given: Any) -> tuple[str, ...]:
    """The names of a mesh's axes, as :func:`bind_mesh` takes it."""
    if isinstance(given, str):
        return tuple(a.name for a in parse_mesh(given).axes)
    return () if given is None else tuple(getattr(given, "mesh_dim_names", None) or ("?",))


def device_for(given: Any, model: torch.nn.Module) -> torch.device:
    """Where a model is, or for one on the meta device where it is to be: the mesh's device, or the one that the
    process group's backend serves, where it serves no CPU."""
    device = next(model.parameters()).device
    if device.type != "meta":
        return device
    kind = getattr(given, "device_type", None)
    if kind is None and given is not None:
        served = {d.type for d in torch.distributed.group.WORLD._device_types}  # type: ignore[union-attr]
        kind = None if "cpu" in served else min(served, default=None)
    if kind is None:
        return torch.get_default_device()
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def seen_from_here(given: Any) -> Mesh:
    """A mesh as this rank sees it, for what sends nothing: a Mesh, a DeviceMesh with named axes, or text.

    Raises:
        MeshError: text, and torch.distributed does not run with as many ranks.
    """
    if isinstance(given, Mesh):
        return given
    if not isinstance(given, str):
        sizes = zip(given.mesh_dim_names, given.shape, strict=True)
        return Mesh(tuple(Axis(n, int(s), int(given.get_local_rank(n))) for n, s in sizes))
    import torch.distributed as dist

    planned = parse_mesh(given)
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world != planned.size:
        raise MeshError(
            f"mesh {given!r} has {planned.size} ranks, torch.distributed has {world}",
            remedy="start as many processes, and initialise torch.distributed first",
        )
    left, places = dist.get_rank() if world > 1 else 0, {}
    for axis in reversed(planned.axes):
        left, places[axis.name] = divmod(left, axis.size)
    return planned.at(**places)


def group_of(axis: Axis) -> Any:
    """The process group of an axis."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(axis.group)


def set_timeout(mesh: Mesh, seconds: float) -> None:
    """How long a rank waits in a collective of the mesh; all ranks set the same. Where waits do not hold the host, as
    on GPUs, the group is watched."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    for axis in mesh.axes:
        if axis.size > 1:
            group = group_of(axis)
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
            if dist.get_backend(group) != "gloo":
                answer = min(ANSWER, 0.3 * seconds)
                watch(axis.group, seconds, functools.partial(late, answer=answer), answer)


@contextlib.contextmanager
def one_writes(mesh: Mesh) -> Iterator[bool]:
    """True inside the block on the mesh's first rank; the others wait for it, and raise what it raised.

    Raises:
        CheckpointError: on every other rank, if the first one failed.
    """
    first = all(a.rank == 0 for a in mesh.axes)
    failure: BaseException | None = None
    try:
        yield first
    except BaseException as error:  # noqa: BLE001  told to the others before it goes on
        failure = error
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    for axis in reversed(mesh.axes):
        told = next((t for t in gather_facts(axis, told) if t is not None), None)
    if failure is not None:
        raise failure
    if told is not None:
        raise CheckpointError(f"the first rank could not write: {told}", remedy="see its own error")


def gather_facts(axis: Axis, facts: Any) -> list[Any]:
    """What each rank of an axis says, in order of ranks; also while a graph is compiled.

    A compiler has Python's dispatcher on, which keeps the interpreter's lock while an operator starts. Gloo's thread
    destroys work that is done under the lock that starting takes, and needs the interpreter's lock for it: now and then
    the two waited for each other, for ever.
    """
    import torch.distributed as dist
    from torch._dispatch.python import no_python_dispatcher

    found: list[Any] = [None] * axis.size
    try:
        with no_python_dispatcher():
            dist.all_gather_object(found, facts, group=group_of(axis))
    except RuntimeError as error:
        raise lost(axis.group, f"the comparison of ranks along {axis.name} ({str(facts)[:80]})", error) from error
    return found


def agree_on_order(mesh: Mesh, found: Sequence[Collective], trains: Sequence[tuple[str, bool]] = ()) -> int:
    """The number of a graph's communications, once all ranks have said that they issue the same ones.

    Args:
        trains: of :func:`trained_weights`, for a graph with gradients.

    Raises:
        MeshError: they do not, and would wait for each other for ever; or they compile at different calls; or other
            weights train on them.
    """
    for axis in mesh.axes:
        if axis.size > 1:
            mine = [c.key() for c in found if c.axis == axis.name]
            flags = "".join("01"[trained] for _, trained in trains)
            every = gather_facts(axis, (mine, flags)) if mine else []
            odd = next((rank for rank, (_, other) in enumerate(every) if other != every[0][1]), None)
            if odd is not None:
                raise _other_weights(axis, odd, every[0][1], every[odd][1], trains)
            check_order(dict(enumerate(keys for keys, _ in every)) or {0: []}, axis.name)
    return len(found)


def agree_on_starts(mesh: Mesh, phase: str, starts: Sequence[tuple[str, ...]]) -> None:
    """The same for a graph that a compiler has ordered.

    Args:
        starts: name of each collective and its arguments that are no tensors; the last is the group's name.
    """
    for axis in mesh.axes:
        if axis.size > 1:
            mine = [_as_key(s, phase, axis.name) for s in starts if plain(s[-1]) == axis.group]
            check_order(dict(enumerate(gather_facts(axis, mine))), axis.name)


def _as_key(start: Sequence[str], phase: str, axis: str) -> tuple[str, ...]:
    return start[0], phase, axis, "", "", place_of(start[-1])


def numbers_of(device: torch.device) -> str:
    """The state of the generator from which a device's random numbers come, in short."""
    if device.type == "cpu":
        state = torch.get_rng_state()
    else:
        state = torch.get_device_module(device.type).get_rng_state(device)
    return hashlib.sha256(state.cpu().numpy().tobytes()).hexdigest()[:16]


def agree_on_numbers(mesh: Mesh, device: torch.device) -> None:
    """Raise MeshError, on every rank, unless the ranks of ``tp`` would draw the same random numbers."""
    axis = mesh.axis("tp")
    every = gather_facts(axis, numbers_of(device)) if axis.size > 1 else [""]
    odd = next((rank for rank, other in enumerate(every) if other != every[0]), None)
    if odd is not None:
        raise _other_numbers(odd)


def _other_numbers(rank: int) -> MeshError:
    return MeshError(
        f"rank {rank} of tp would draw other random numbers than rank 0, and drop other elements of the same values",
        where="a call of the model in training",
        remedy="call torch.manual_seed on the ranks of tp with the same seed (another one for each rank of dp), and "
        "draw no numbers on one of them alone; or set dropout to 0 in the configuration",
    )


def _values(x: torch.Tensor) -> str:
    """Tokens, labels and masks on the host, in short; nothing of other values, which are larger."""
    if x.device.type != "cpu" or x.is_floating_point() or x.is_complex() or type(x) is not torch.Tensor:
        return ""
    return f" holding {hashlib.sha256(x.detach().numpy().tobytes()).hexdigest()[:8]}"


def check_call(
    mesh: Mesh, args: Sequence[Any], kwargs: dict[str, Any], training: bool, drawing: torch.device | None = None,
    alone: str = "", trains: Sequence[tuple[str, bool]] = (),
) -> None:  # fmt: skip
    """Raise MeshError, on every rank, if the ranks of ``tp`` call the model with tensors of different forms, or with
    other tokens, labels or masks; or if other weights train on them or on the ranks of ``cp``.

    Args:
        drawing: where the call will draw random numbers, which are compared too; None if it draws none.
        alone: what :func:`alone_in_training` found on this rank; if any did, every rank raises RefusedError.
        trains: of :func:`trained_weights`, for a call with gradients: a weight that one rank has frozen after wrap
            would leave the others to wait for that rank's backward pass.

    Checked where groups run on gloo, which needs no device; elsewhere only what is compiled is compared.
    """
    same: dict[str, Any] = {"training": training, "gradients": torch.is_grad_enabled()}
    if trains:
        same["trained weights"] = "".join("01"[trained] for _, trained in trains)
    facts: dict[str, Any] = {**same, "alone": alone}
    for name, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, torch.Tensor):
            facts[str(name)] = f"{value.dtype} of shape {list(value.shape)}{_values(value)}"
    if drawing is not None:
        facts["random numbers"] = numbers_of(drawing)
    _compare_call(mesh.axis("tp"), facts, trains)
    if trains:
        _compare_call(mesh.axis("cp"), same, trains)


def _compare_call(axis: Axis, facts: dict[str, Any], trains: Sequence[tuple[str, bool]]) -> None:
    import torch.distributed as dist

    if axis.size == 1 or dist.get_backend(group_of(axis)) != "gloo":
        return
    digest = int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7], "big")
    both = torch.tensor([digest, -digest])
    try:
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group_of(axis))
    except RuntimeError as error:
        raise lost(axis.group, f"the start of a call with {facts}", error) from error
    if int(both[0]) == -int(both[1]):
        return
    every = gather_facts(axis, facts)
    if any(f.get("alone") for f in every):
        raise trains_alone(next(f["alone"] for f in every if f.get("alone")))
    for rank, other in enumerate(every):
        for key in sorted({*every[0], *other}):
            if every[0].get(key) != other.get(key):
                if key == "random numbers":
                    raise _other_numbers(rank)
                if key == "trained weights" and every[0].get(key) and other.get(key):
                    raise _other_weights(axis, rank, every[0][key], other[key], trains)
                raise MeshError(
                    f"{key} is {other.get(key)} on rank {rank} of {axis.name} and {every[0].get(key)} on rank 0",
                    where="a call of the model",
                    remedy="give all ranks of tp the same inputs",
                )


def _other_weights(axis: Axis, rank: int, first: str, other: str, trains: Sequence[tuple[str, bool]]) -> MeshError:
    """The error for flags, one a weight, that are not those of the axis' first rank."""
    odd = [name for (name, _), a, b in zip(trains, first, other, strict=False) if a != b]
    which = f"{odd[0]}{f' and {len(odd) - 1} more' if odd[1:] else ''}" if odd else f"{len(other)}, not {len(first)}"
    return MeshError(
        f"other weights train on rank {rank} of {axis.name} than on rank 0: {which}",
        where="a call of the model",
        remedy="freeze (requires_grad_) the same weights on all ranks, between the same two calls",
    )


def check_alike(mesh: Mesh, model: torch.nn.Module, pipeline: str) -> None:
    """Raise MeshError, on every rank, unless all ranks wrap the same model in the same way."""
    weights = sorted((name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters())
    trained = sorted(name for name, p in model.named_parameters() if p.requires_grad)
    facts = {
        "pipeline": pipeline,
        "mesh": mesh.text(),
        "model": type(model).__name__,
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
        "training mode": model.training,
        "weights": hashlib.sha256(repr(weights).encode()).hexdigest()[:16],
        "trained weights": hashlib.sha256(repr(trained).encode()).hexdigest()[:16],
    }
    for axis in mesh.axes:
        if axis.size == 1 or axis.name == "dp":
            continue
        every = gather_facts(axis, facts)
        for rank, other in enumerate(every):
            for key, value in every[0].items():
                if other[key] != value:
                    raise MeshError(
                        f"rank {rank} of {axis.name} has {key} {other[key]!r}, rank 0 has {value!r}",
                        where="wrap",
                        remedy="build the same model in the same dtype on every rank and wrap it in the same way",
                    )
