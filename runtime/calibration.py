"""Calibration: moments of layer inputs on a user's text, streamed; interrupted, it goes on where it was."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from latentscan.ir.errors import CheckpointError, PipelineError
from latentscan.runtime.atomic import file_errors

_FORMAT = 1
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_TENSORS = ("covariance", "mean", "attended", "attended_mean", "distances")


@dataclass(frozen=True)
class Calibration:
    """Calibration data and how to go through it; ``wrap`` takes it in place of the data alone.

    Attributes:
        data: a token tensor [N, L] (or [L], one row), a list of strings, or the path of a text file.
        state: a file for what was counted so far: calibration that was interrupted is continued from it if model and
            tokens are the same, else it begins anew. It is left when all is done. None: nothing is written.
        every: seconds between two writes of it.
        rows: how many rows to use; None: all. seed: which ones, drawn without replacement; None: the first ones.
        length: tokens of a row where the data are text. batch: rows of a forward pass.
    """

    data: Any
    state: str | os.PathLike[str] | None = None
    every: float = 30.0
    rows: int | None = None
    seed: int | None = None
    length: int = 512
    batch: int = 4

    def __post_init__(self) -> None:
        for name in ("length", "batch", "rows"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise PipelineError(f"calibration: {name}={value!r} is below 1", remedy=f"give {name} >= 1")


@dataclass
class Moments:
    """Moments of a module's input, in fp64. They take the same memory for any number of tokens.

    Attributes:
        covariance: E[x x^T], [D, D] (not centred). mean: E[x], [D].
        tokens: how many tokens they are the means of.
        length: of the longest row seen.
        attended, attended_mean: the same with tokens weighted by the attention that they receive; None if that is not
            measured. weight: the sum of the weights.
        distances: [heads, length] attention mass by distance between query and key, or None.
    """

    covariance: torch.Tensor
    mean: torch.Tensor
    tokens: int = 0
    length: int = 0
    attended: torch.Tensor | None = None
    attended_mean: torch.Tensor | None = None
    weight: float = 0.0
    distances: torch.Tensor | None = None

    @classmethod
    def empty(cls, width: int, device: Any = None) -> Moments:
        zeros = torch.zeros(width, width, dtype=torch.float64, device=device)
        return cls(zeros, zeros[0].clone())

    def add(self, x: torch.Tensor, weights: torch.Tensor | None = None, distances: torch.Tensor | None = None) -> None:
        """Take in the tokens of x [B, L, D].

        Args:
            weights: [B, L] attention that each token receives. distances: [heads, L] attention mass by distance.
        """
        self.length = max(self.length, x.shape[-2])
        flat = x.detach().reshape(-1, x.shape[-1]).double()
        total = self.tokens + flat.shape[0]
        self.covariance.mul_(self.tokens / total).add_(flat.T @ flat, alpha=1 / total)
        self.mean.mul_(self.tokens / total).add_(flat.sum(0), alpha=1 / total)
        self.tokens = total
        if weights is None or distances is None:
            return
        w = weights.reshape(-1).double()
        if self.attended is None or self.attended_mean is None or self.distances is None:
            self.attended, self.attended_mean = torch.zeros_like(self.covariance), torch.zeros_like(self.mean)
            self.distances = torch.zeros(distances.shape[0], 0, dtype=torch.float64, device=distances.device)
        share = self.weight + float(w.sum())
        self.attended.mul_(self.weight / share).add_(flat.T @ (flat * w[:, None]), alpha=1 / share)
        self.attended_mean.mul_(self.weight / share).add_(w @ flat, alpha=1 / share)
        self.weight = share
        longer = distances.shape[1] - self.distances.shape[1]
        if longer > 0:
            self.distances = torch.nn.functional.pad(self.distances, (0, longer))
        self.distances[:, : distances.shape[1]] += distances.double()


def statistics_for(model: torch.nn.Module, passes: Sequence[Any], calibration: Any) -> dict[str, Moments]:
    """Moments at every attention's key projection, by attention module path.

    Args:
        passes: their options are checked against the model before anything is computed.
        calibration: a :class:`Calibration`, or its data alone.

    Raises:
        PipelineError: nothing given, empty, of a wrong kind; or an option beyond the model's limits.
        CheckpointError: the text or the state file cannot be read or written.
    """
    from latentscan.passes.base import Context
    from latentscan.passes.mha_to_mla_rotary import calibration_points
    from latentscan.runtime.wrap import planning_graph

    given = calibration if isinstance(calibration, Calibration) else Calibration(calibration)
    batches = token_batches(model, given)
    graph = planning_graph(model)
    for current in passes:
        if getattr(current, "wants_statistics", False):
            current.plan(graph, Context(own_parameters=True, meta=True))
    points = calibration_points(graph)
    if not points:
        return {}
    device = next(model.parameters()).device
    mark = _mark(model, {attention: point.mark for attention, point in points.items()}, batches)
    done, moments = _resume(given.state, mark, device)
    handles = []

    def watch(attention: str, weigh: Any) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            if attention not in moments:
                moments[attention] = Moments.empty(x.shape[-1], x.device)
            rows = x.reshape(-1, current_length[0], x.shape[-1]) if x.dim() == 2 else x
            moments[attention].add(rows, *(weigh(rows) if weigh is not None else ()))

        return hook

    modes = {m: m.training for m in model.modules()}
    current_length = [0]
    try:
        for attention, point in points.items():
            hook = watch(attention, point.weigh)
            handles.append(model.get_submodule(point.module).register_forward_pre_hook(hook, with_kwargs=True))
        model.eval()
        written = time.monotonic()
        with torch.no_grad(), progress(batches, done) as steps:
            for number, batch in steps:
                current_length[0] = batch.shape[-1]
                model(input_ids=batch, use_cache=False)
                last = number == len(batches) - 1
                if given.state is not None and (last or time.monotonic() - written >= given.every):
                    _write(given.state, mark, number + 1, moments)
                    written = time.monotonic()
    finally:
        for handle in handles:
            handle.remove()
        for m, training in modes.items():
            m.training = training
    return moments


@contextlib.contextmanager
def progress(batches: Sequence[torch.Tensor], done: int = 0) -> Any:
    """(number, batch) of the batches that are left, with a bar on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, emoji=False)
    columns = (TextColumn("calibrating"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"), TimeRemainingColumn())
    rows = [len(b) for b in batches]
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("calibrating", total=sum(rows), completed=sum(rows[:done]))

        def left() -> Iterable[tuple[int, torch.Tensor]]:
            for number in range(done, len(batches)):
                yield number, batches[number]
                bar.advance(task, rows[number])

        yield left()


# -- the state file ---------------------------------------------------------------------------------------------------


def _mark(model: torch.nn.Module, weights: Mapping[str, str], batches: Sequence[torch.Tensor]) -> str:
    """A text that is the same for the same model on the same tokens in the same batches."""
    made = hashlib.sha256(f"{_FORMAT} {type(model).__name__}".encode())
    made.update(json.dumps(weights, sort_keys=True).encode())
    for batch in batches:
        made.update(f"{tuple(batch.shape)}".encode())
        made.update(batch.cpu().long().numpy().tobytes())
    return made.hexdigest()


def _write(path: str | os.PathLike[str], mark: str, done: int, moments: Mapping[str, Moments]) -> None:
    """Write what was counted so far. The file is there whole, as it was or as it is."""
    from safetensors.torch import save_file

    tensors = {
        f"{attention}/{name}": value.contiguous()
        for attention, one in moments.items()
        for name in _TENSORS
        if (value := getattr(one, name)) is not None
    }
    counts = {a: {"tokens": m.tokens, "length": m.length, "weight": m.weight.hex()} for a, m in moments.items()}
    told = {"latentscan": "calibration", "mark": mark, "done": str(done), "counts": json.dumps(counts)}
    target = Path(path)
    aside = target.with_name(f".{target.name}.{socket.gethostname()}-{os.getpid()}")
    try:
        with file_errors(target, "free some space, or give another place"):
            target.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, str(aside), metadata=told)
            os.replace(aside, target)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


def _resume(path: str | os.PathLike[str] | None, mark: str, device: torch.device) -> tuple[int, dict[str, Moments]]:
    """How many batches are done, and what they gave. A file of other data or another model is begun anew."""
    if path is None or not Path(path).exists():
        return 0, {}
    from safetensors import safe_open

    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            told = file.metadata() or {}
            if told.get("latentscan") != "calibration":
                raise CheckpointError(
                    "is no calibration state of latentscan", where=str(path), remedy="give another state file"
                )
            if told["mark"] != mark:
                return 0, {}
            names, moments = set(file.keys()), {}
            for attention, count in json.loads(told["counts"]).items():
                keys = {n: f"{attention}/{n}" for n in _TENSORS if f"{attention}/{n}" in names}
                tensors = {n: file.get_tensor(key) for n, key in keys.items()}
                found = replace(Moments(tensors["covariance"], tensors["mean"]), **tensors)
                found.tokens, found.length = count["tokens"], count["length"]
                found.weight = float.fromhex(count["weight"])
                moments[attention] = found
            return int(told["done"]), moments
    except CheckpointError:
        raise
    except Exception as error:  # safetensors' own error, and whatever a broken file leads to
        raise CheckpointError(
            f"cannot be read: {type(error).__name__}: {error}", where=str(path), remedy="delete it to begin anew"
        ) from error


# -- the data ---------------------------------------------------------------------------------------------------------


def token_batches(model: torch.nn.Module, calibration: Calibration) -> list[torch.Tensor]:
    """Calibration data as batches of token ids on the model's device."""
    rows = _rows(model, calibration.data, calibration.length)
    if calibration.rows is not None and calibration.rows > len(rows):
        raise PipelineError(
            f"calibration has {len(rows)} rows, {calibration.rows} are asked for", remedy="give more data or fewer rows"
        )
    if calibration.seed is not None:
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(calibration.seed))]
    device = next(model.parameters()).device
    return [t.to(device) for t in rows[: calibration.rows].split(calibration.batch)]


def _rows(model: torch.nn.Module, data: Any, length: int) -> torch.Tensor:
    """Token ids [N, L]."""
    if data is None:
        raise PipelineError(
            "the pipeline needs calibration data",
            remedy="give calibration=<text file, list of strings or token tensor>",
        )
    if isinstance(data, torch.Tensor):
        remedy = "give integer token ids of shape [N, L]"
        if data.numel() == 0:
            raise PipelineError(f"the calibration tensor of shape {list(data.shape)} holds no tokens", remedy=remedy)
        if data.dtype not in _INTEGERS or data.dim() not in (1, 2):
            raise PipelineError(f"calibration is a {data.dtype} tensor of shape {list(data.shape)}", remedy=remedy)
        tokens = data if data.dim() == 2 else data[None]
        top, low = int(tokens.max()), int(tokens.min())
        embedding: Callable[[], Any] = model.get_input_embeddings  # type: ignore[assignment]
        size = embedding().weight.shape[0]
        if top >= size or low < 0:
            raise PipelineError(
                f"calibration holds token {top if top >= size else low}, the vocabulary has {size}",
                remedy="use its own tokenizer",
            )
        return tokens.cpu()
    if isinstance(data, (str, os.PathLike)):
        try:
            with open(data, encoding="utf-8") as file:
                texts = [file.read()]
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"cannot be read: {error}", where=str(data), remedy="give a UTF-8 text file"
            ) from None
    elif isinstance(data, Sequence) and all(isinstance(t, str) for t in data):
        texts = list(data)
    else:
        raise PipelineError(
            f"calibration is a {type(data).__name__}", remedy="give a path, a list of strings or a token tensor"
        )
    text = "\n\n".join(texts)
    if not text.strip():
        raise PipelineError("calibration text is empty", remedy="give some text of the kind that the model will see")
    ids = torch.tensor(_tokenizer(model)(text)["input_ids"], dtype=torch.long)
    if not ids.numel():
        raise PipelineError(
            f"the tokenizer makes no tokens of the calibration text ({len(text)} characters)",
            remedy="repair the model's tokenizer, or give calibration as a token tensor",
        )
    return ids[None] if ids.numel() < length else ids[: ids.numel() // length * length].reshape(-1, length)


def _tokenizer(model: torch.nn.Module) -> Any:
    from transformers import AutoTokenizer

    name = getattr(model.config, "_name_or_path", "")
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception as error:  # noqa: BLE001  the library raises many types for a missing tokenizer
        raise PipelineError(
            f"no tokenizer is found at {name!r} ({type(error).__name__})", remedy="give calibration as a token tensor"
        ) from None
