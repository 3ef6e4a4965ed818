"""A wrapped model in training, and its optimiser, on disk: saved by all ranks at once, read on any mesh.

The files are those of ``torch.distributed.checkpoint``, under the names and shapes of whole weights: a rank's part of
a weight is written as the rectangles of the whole that it is, so that what another mesh, or one process, needs is found
again. ``latentscan-training.json`` beside them says that they are complete.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from latentscan import __version__
from latentscan.ir.errors import CheckpointError
from latentscan.ir.weights import Part
from latentscan.runtime.atomic import files_in, replaced_directory
from latentscan.runtime.door import session_of
from latentscan.runtime.source import one_line

MARKER = "latentscan-training.json"
FORMAT = 1
_AGAIN = "save again, or give an earlier directory"
_NUMBERS = (int, float, bool)


@dataclass(frozen=True)
class Piece:
    """A tensor of this rank as a part of a whole one.

    Attributes:
        value: the tensor here.
        shape: of the whole.
        places: for each dimension the index in the whole of every index here.
        others: along dimension ``dim``, indices that an earlier rank holds (and writes) too.
    """

    value: torch.Tensor
    shape: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    dim: int = 0
    others: frozenset[int] = frozenset()

    def boxes(self, *, mine: bool) -> Iterator[tuple[torch.Size, torch.Tensor]]:
        """Where each contiguous piece lies in the whole, and a view of it; ``mine``: only what this rank writes."""
        if not self.shape:
            yield torch.Size(()), self.value
            return
        along = []
        for dim, indices in enumerate(self.places):
            found: list[list[int]] = []  # index in the whole, index here, length
            for here, index in enumerate(indices):
                if mine and dim == self.dim and index in self.others:
                    continue
                last = found[-1] if found else None
                if last is not None and last[0] + last[2] == index and last[1] + last[2] == here:
                    last[2] += 1
                else:
                    found.append([index, here, 1])
            along.append(found)
        for box in itertools.product(*along):
            view = self.value
            for dim, (_, here, length) in enumerate(box):
                view = view.narrow(dim, here, length)
            yield torch.Size(index for index, _, _ in box), view


def piece_of(value: torch.Tensor, part: Part | None) -> Piece | None:
    """A tensor of the form of a weight of which this rank holds ``part``; also if it is cut again (``fully_shard``).

    None if nothing of it is here.
    """
    rows: range | None = None
    local: Any = value.detach()
    if hasattr(local, "__create_chunk_list__"):  # a DTensor, cut along its first dimension
        chunks = local.__create_chunk_list__()
        local = local.to_local()
        if not chunks or not local.numel():
            return None
        if tuple(chunks[0].sizes[1:]) != tuple(value.shape[1:]):
            raise CheckpointError("a weight is sharded along another dimension than its first", remedy="shard rows")
        rows = range(chunks[0].offsets[0], chunks[0].offsets[0] + chunks[0].sizes[0])
    shape = tuple(value.shape) if part is None else part.shape
    places = [tuple(range(n)) for n in shape]
    dim, others = 0, frozenset[int]()
    if part is not None and part.dim is not None:
        dim, places[part.dim] = part.dim, part.held[part.rank]
        others = frozenset(i for held in part.held[: part.rank] for i in held)
    if rows is not None:
        places[0] = tuple(places[0][i] for i in rows)
    return Piece(local, shape, tuple(places), dim, others)


class _State:
    """Everything that is saved, by name: ``model.WEIGHT`` and ``optimizer.WEIGHT.KEY``."""

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        model = getattr(model, "module", model) if _is_ddp(model) else model
        self.model, self.optimizer = model, getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's own
        session = session_of(model)
        recipes = [] if session is None else [r for r in session.plan.recipes if r.group]
        parts = {t: (s, p) for r in recipes for t, s, p in zip(r.targets, r.sources, r.parts, strict=False)}
        self.elsewhere = {f"model.{s}" for r in recipes for s in r.sources}  # of which this rank may hold nothing
        self.names: dict[int, tuple[str, Part | None]] = {}
        self.pieces: dict[str, Piece] = {}
        held = [*model.named_parameters(), *_persistent_buffers(model)]
        for path, value in held:
            name, part = parts.get(path, (path, None))
            self.names[id(value)] = name, part
            self.add(f"model.{name}", value, part)
        self.wanted = {f"model.{name}" for name, _ in self.names.values()} | self.elsewhere

    def add(self, key: str, value: torch.Tensor, part: Part | None) -> None:
        piece = piece_of(value, part)
        if piece is not None:
            self.pieces[key] = piece

    def parameters(self) -> Iterator[tuple[torch.Tensor, str, Part | None]]:
        """What the optimiser steps, with its name."""
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            for parameter in group["params"]:
                if id(parameter) not in self.names:
                    raise CheckpointError(
                        f"the optimiser steps a tensor of shape {list(parameter.shape)} that is no weight of the model",
                        remedy="build the optimiser after wrap (and after fully_shard), from model.parameters()",
                    )
                yield parameter, *self.names[id(parameter)]

    def add_optimizer(self) -> None:
        for parameter, name, part in self.parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                where = f"optimizer.{name}.{key}"
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    self.add(where, value, part)
                elif isinstance(value, _NUMBERS) or (isinstance(value, torch.Tensor) and not value.dim()):
                    self.add(where, torch.as_tensor(value), None)
                elif value is not None:
                    raise CheckpointError(
                        f"{key} of {name} is neither a number nor of the weight's form, and cannot be shared out again",
                        where=type(self.optimizer).__name__, remedy="use one whose state has that form",
                    )  # fmt: skip

    def groups(self) -> list[dict[str, Any]]:
        if self.optimizer is None:
            return []
        return [_plain({k: v for k, v in g.items() if k != "params"}) for g in self.optimizer.param_groups]


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()}


def _is_ddp(model: Any) -> bool:
    return isinstance(model, torch.nn.parallel.DistributedDataParallel)


def _persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, value in module._buffers.items():
            if value is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, value


# -- saving -----------------------------------------------------------------------------------------------------------


def save_training(directory: Any, model: torch.nn.Module, optimizer: Any = None, *, extra: Any = None) -> None:
    """Save a model and its optimiser as they are in the middle of training. Every rank calls it.

    The directory appears complete or not at all, and takes the place of an earlier one.

    Args:
        model: wrapped, or not; DistributedDataParallel around it, or ``fully_shard`` on it, may be.
        optimizer: built from ``model.parameters()``; a ZeroRedundancyOptimizer too. Saved by weights: the state of a
            weight has the weight's form, or is a number.
        extra: what else the run needs, such as the number of the step and a scheduler's state: anything for JSON.

    Raises:
        CheckpointError: on every rank: the directory holds something else, or cannot be written.
    """
    target = Path(directory)
    with contextlib.ExitStack() as stack:
        with _together("save"):
            state = _State(model, optimizer)
            state.add_optimizer()
            told = {
                "format": FORMAT, "latentscan": __version__, "torch": torch.__version__,
                "class": type(state.model).__name__, "groups": state.groups(), "extra": extra,
            }  # fmt: skip
            text = _json(told)
            aside = stack.enter_context(_aside(target)) if _rank() == 0 else None
        path = _told_by_first(None if aside is None else str(aside))
        with _together("save"):
            _write(path, state)
        with _together("save"):
            if aside is not None:
                sizes = {name: (aside / name).stat().st_size for name in files_in(aside)}
                (aside / MARKER).write_text(json.dumps(json.loads(text) | {"files": sizes}, indent=1) + "\n")
                stack.close()  # the directory takes its name now


def _json(told: dict[str, Any]) -> str:
    try:
        return json.dumps(told)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"extra cannot be written as JSON: {error}", remedy="give numbers, text, lists") from None


@contextlib.contextmanager
def _aside(target: Path) -> Iterator[Path]:
    if target.is_dir() and any(target.iterdir()) and not (target / MARKER).is_file():
        raise CheckpointError(
            "holds something else, and would be overwritten", where=str(target), remedy="give a directory of its own"
        )
    with replaced_directory(target, lambda name: False) as aside:
        yield aside


def _write(path: str, state: _State) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    class Planner(checkpoint.DefaultSavePlanner):
        """Writes boxes of whole tensors; what several ranks would write is written once."""

        def create_local_plan(self) -> Any:
            self.views: dict[Any, torch.Tensor] = {}
            items = []
            for key, piece in state.pieces.items():
                for offsets, view in piece.boxes(mine=True):
                    index = MetadataIndex(key, offsets)
                    self.views[index] = view
                    chunk = ChunkStorageMetadata(offsets=offsets, sizes=view.size())
                    data = TensorWriteData(chunk, TensorProperties(dtype=view.dtype), torch.Size(piece.shape))
                    items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            self.plan = SavePlan(items)
            return self.plan

        def lookup_object(self, index: Any) -> Any:
            return self.views[index]

    planner = Planner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    with _unwarned():
        checkpoint.save({}, storage_writer=checkpoint.FileSystemWriter(path), planner=planner, no_dist=_world() == 1)


# -- loading ----------------------------------------------------------------------------------------------------------


def load_training(directory: Any, model: torch.nn.Module, optimizer: Any = None) -> Any:
    """Read what :func:`save_training` wrote into a model and an optimiser of the same kind. Every rank calls it.

    The mesh may be another one, and so may the numbers of processes and what is sharded by ``fully_shard``; passes that
    make new weights must be the same.

    Args:
        optimizer: its options (learning rate, ...) are set too; None: the stored state is not wanted.

    Returns:
        ``extra``.

    Raises:
        CheckpointError: on every rank, before anything is read: the directory is incomplete, or holds other weights.
    """
    folder = Path(directory)
    with _together("load"):
        told = _read_description(folder)
        state = _State(model, optimizer)
        metadata = _metadata(folder)
        _check_weights(folder, state, metadata)
        states = _empty_states(state, metadata)
        _check_groups(folder, state, told)
    with _together("load"):
        _read(folder, state, metadata)
    for parameter, values in states:
        state.optimizer.state[parameter] = values
    if state.optimizer is not None:
        for group, options in zip(state.optimizer.param_groups, told["groups"], strict=True):
            group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in options.items()})
    return told["extra"]


def _read_description(folder: Path) -> dict[str, Any]:
    path = folder / MARKER
    if not path.is_file():
        what = f"holds no {MARKER}: it was not written to the end" if folder.is_dir() else "there is no such directory"
        raise CheckpointError(what, where=str(folder), remedy=_AGAIN)
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        version, files = told["format"], dict(told["files"])
        told["groups"], told["extra"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot be read: {one_line(error)}", where=str(path), remedy=_AGAIN) from None
    if version != FORMAT:
        raise CheckpointError(
            f"has format {version}, this latentscan ({__version__}) reads {FORMAT}", where=str(path),
            remedy=f"use latentscan {told.get('latentscan', '')}",
        )  # fmt: skip
    for name, size in files.items():
        have = (folder / name).stat().st_size if (folder / name).is_file() else None
        if have != size:
            what = "is missing" if have is None else f"has {have} bytes instead of {size}"
            raise CheckpointError(f"{name} {what}", where=str(folder), remedy=_AGAIN)
    return told


def _metadata(folder: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemReader

    try:
        return FileSystemReader(str(folder)).read_metadata()
    except Exception as error:
        raise CheckpointError(f"cannot be read: {one_line(error)}", where=str(folder), remedy=_AGAIN) from error


def _check_weights(folder: Path, state: _State, metadata: Any) -> None:
    stored = {k: tuple(v.size) for k, v in metadata.state_dict_metadata.items() if k.startswith("model.")}
    for problem, names in (("lacks", state.wanted - stored.keys()), ("holds unknown", stored.keys() - state.wanted)):
        if names:
            raise CheckpointError(
                f"{problem} {len(names)} weights, {min(names).removeprefix('model.')} first", where=str(folder),
                remedy="wrap the same model with the same passes as when it was saved; only the mesh may be another",
            )  # fmt: skip
    for key, piece in state.pieces.items():
        if stored[key] != piece.shape:
            raise CheckpointError(
                f"{key.removeprefix('model.')} has shape {list(stored[key])}, the model's has {list(piece.shape)}",
                where=str(folder), remedy="build the same model",
            )  # fmt: skip


def _check_groups(folder: Path, state: _State, told: dict[str, Any]) -> None:
    if state.optimizer is not None and len(told["groups"]) != len(state.optimizer.param_groups):
        raise CheckpointError(
            f"holds an optimiser of {len(told['groups'])} groups, this one has {len(state.optimizer.param_groups)}",
            where=str(folder), remedy="build the optimiser as it was built",
        )  # fmt: skip


def _empty_states(state: _State, metadata: Any) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """The optimiser's state to be read into, by weight; its pieces join those of the model."""
    keys: dict[str, list[str]] = {}
    for key in metadata.state_dict_metadata:
        if key.startswith("optimizer."):
            name, _, last = key.removeprefix("optimizer.").rpartition(".")
            keys.setdefault(name, []).append(last)
    groups = state.optimizer.param_groups if state.optimizer is not None else ()
    on_device = {id(p) for g in groups if g.get("capturable") or g.get("fused") for p in g["params"]}
    found = []
    for parameter, name, part in state.parameters():
        values: dict[str, Any] = {}
        for last in keys.get(name, ()):
            key = f"optimizer.{name}.{last}"
            entry = metadata.state_dict_metadata[key]
            whole = tuple(parameter.shape) if part is None else part.shape
            if tuple(entry.size) == whole:
                values[last] = torch.zeros_like(parameter, dtype=entry.properties.dtype)
                state.add(key, values[last], part)
            else:
                device = parameter.device if id(parameter) in on_device else torch.device("cpu")
                values[last] = torch.zeros((), dtype=entry.properties.dtype, device=device)
                state.add(key, values[last], None)
        found.append((parameter, values))
    return found


def _read(folder: Path, state: _State, metadata: Any) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import LoadPlan
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    class Planner(checkpoint.DefaultLoadPlanner):
        """Reads boxes of whole tensors, from whatever boxes were written."""

        def create_local_plan(self) -> Any:
            self.views: dict[Any, torch.Tensor] = {}
            items = []
            for key, piece in state.pieces.items():
                chunks = []
                for offsets, view in piece.boxes(mine=False):
                    self.views[MetadataIndex(key, offsets)] = view
                    chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=view.size()))
                items += create_read_items_for_chunk_list(key, metadata.state_dict_metadata[key], chunks)
            return LoadPlan(items)

        def lookup_tensor(self, index: Any) -> torch.Tensor:
            return self.views[index]

    planner = Planner(flatten_state_dict=False)
    with torch.no_grad(), _unwarned():
        checkpoint.load(
            {}, storage_reader=checkpoint.FileSystemReader(str(folder)), planner=planner, no_dist=_world() == 1
        )


# -- the other ranks --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """Without the library's warning that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if _world() > 1 else 0


def _told_by_first(value: str | None) -> str:
    found = [value]
    if _world() > 1:
        dist.broadcast_object_list(found, src=0)
    assert found[0] is not None
    return found[0]


@contextlib.contextmanager
def _together(what: str) -> Iterator[None]:
    """The block ends on every rank in the same way: an error of one is an error of all."""
    failure: BaseException | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  told to the others before it goes on
        failure = error
    told = None if failure is None else f"rank {_rank()}: {one_line(failure)}"
    every: list[Any] = [told]
    if _world() > 1:
        every = [None] * _world()
        dist.all_gather_object(every, told)
    if isinstance(failure, CheckpointError):
        raise failure
    first = next((t for t in every if t is not None), None)
    if failure is not None:
        raise CheckpointError(f"cannot {what}: {one_line(failure)}", remedy="see the error above") from failure
    if first is not None:
        raise CheckpointError(f"cannot {what}: {first}", remedy="see that rank's own error")


__all__ = ["MARKER", "load_training", "save_training"]
