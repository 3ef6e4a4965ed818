"""``latentscan heal``: train a converted model to follow its original, in steps that survive a kill."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from latentscan.ir.errors import CheckpointError, PipelineError
from latentscan.runtime.checkpoint import check_target, load, read_description, write
from latentscan.runtime.door import session_of
from latentscan.runtime.heal import Healer, Rows, Settings
from latentscan.runtime.source import MARKER, one_line, quiet, resolve
from latentscan.tools.convert import TOKENIZER
from latentscan.tools.loss_plot import can_draw, draw

NUMBERS, TENSORS, PLOT = "latentscan-heal.json", "latentscan-heal.safetensors", "latentscan-heal.png"

Told = Callable[[dict[str, Any]], None]


def heal(
    directory: Path,
    data: Path,
    settings: Settings,
    *,
    teacher: str | None = None,
    out: Path | None = None,
    every: int = 50,
    device: str = "cpu",
    step: Callable[[str], None] = lambda _: None,
    progress: Told = lambda _: None,
) -> dict[str, Any]:
    """Heal a converted model; the result is a directory like it.

    After every ``every`` steps, and at the end, ``out`` is replaced in one move by the model as it is and all that the
    next steps depend on. Where ``out`` holds an unfinished run with the same settings, that run goes on.

    Args:
        directory: what ``latentscan convert`` wrote.
        data: a text file. Its last twentieth (at most 8 rows) is held out and measured.
        teacher: MODEL as the command takes it; by default what the model was converted from.
        out: by default ``DIRECTORY-healed``.
        step: told what is being done. progress: told every step's numbers.

    Returns:
        "out", "step", "steps", "resumed_at", "trained" (parameters), "loss" (first and last), "nll" (original,
        before, after, on held-out rows), "files".

    Raises:
        CheckpointError: a directory or file cannot be read or written, or ``out`` holds another run.
        PipelineError: a setting or the text does not fit. RefusedError: there is nothing to heal.
    """
    if every < 1:
        raise PipelineError(f"every={every} is below 1", where="heal", remedy="give every >= 1")
    told = read_description(directory)
    out = out if out is not None else directory.with_name(directory.name + "-healed")
    if out.resolve() == directory.resolve():
        raise CheckpointError(
            "is the converted model itself, which a half-finished run would replace", where=str(out),
            remedy="give another --out",
        )  # fmt: skip
    check_target(out)
    _check_device(device)
    original = teacher or told.get("source")
    if not original:
        raise CheckpointError(
            f"does not say what it was converted from ({MARKER} has no source)", where=str(directory),
            remedy="give --teacher MODEL",
        )  # fmt: skip
    text = _text(data)
    run = {
        "settings": settings.to_json(),
        "model": _digest(directory),
        "text": hashlib.sha256(text.encode()).hexdigest(),
        "teacher": original,
    }
    earlier = _earlier(out, run)
    if earlier is not None and earlier["step"] >= settings.steps:
        return _result(out, earlier, earlier["step"])
    step("reading the converted model")
    student = load(directory).to(device)
    session = session_of(student)
    assert session is not None
    step(f"reading the original, {original}")
    source = resolve(original)
    loaded = source.load().to(device=device, dtype=next(student.parameters()).dtype)
    step("reading the text")
    vocabulary = int(student.get_input_embeddings().weight.shape[0])  # type: ignore[operator, union-attr]
    rows = Rows.of(_ids(directory, text, source.family is not None, vocabulary), settings, vocabulary, str(data))
    step("setting up")
    healer = Healer(student, loaded, rows, settings)
    if earlier is not None:
        _resume(out, healer, earlier)
        numbers = earlier
    else:
        step("measuring the held-out rows")
        nll = {"original": healer.nll(loaded), "before": healer.nll(student)}
        numbers = run | {"nll": nll, "trained": sum(v.numel() for v in healer.variables().values())}
    begun = healer.step_number
    for losses in healer.run():
        progress({"step": healer.step_number, "steps": settings.steps} | losses)
        done = healer.step_number == settings.steps
        if done:
            step("measuring the held-out rows")
            numbers["nll"]["after"] = healer.nll(student)
        if done or healer.step_number % every == 0:
            numbers |= healer.numbers()
            student.eval()
            write(session, out, _extra(directory, healer, numbers, done))
    return _result(out, numbers, begun)


def _check_device(name: str) -> None:
    import torch

    try:
        float(torch.zeros((), device=name))
    except Exception as error:  # noqa: BLE001  torch raises many types for a device that is not there
        raise PipelineError(
            f"device={name!r} cannot be used here: {one_line(error)}", where="heal",
            remedy="give a device that this torch was built for and that is there, such as --device cpu",
        ) from None  # fmt: skip


def _result(out: Path, numbers: dict[str, Any], begun: int) -> dict[str, Any]:
    losses = [row["loss"] for row in numbers["losses"]]
    return {
        "out": str(out),
        "step": numbers["step"],
        "steps": numbers["settings"]["steps"],
        "resumed_at": begun,
        "trained": numbers["trained"],
        "loss": [losses[0], losses[-1]],
        "nll": numbers["nll"],
        "plot": str(out / PLOT) if (out / PLOT).is_file() else None,
    }


def text_of(told: dict[str, Any]) -> str:
    """The result for people."""
    nll = told["nll"]
    before, after = nll["before"] - nll["original"], nll["after"] - nll["original"]
    kept = f", {after / before:.0%} of the gap is left" if before > 0 else ""
    plot = told["plot"] or "none (install Pillow for it)"
    return (
        f"{told['out']}: {told['steps']} steps, {told['trained']:,} parameters trained, "
        f"loss {told['loss'][0]:.4f} -> {told['loss'][1]:.4f}\n"
        f"NLL of the held-out rows: original {nll['original']:.4f}, converted {nll['before']:.4f}, "
        f"healed {nll['after']:.4f}{kept}\nloss plot: {plot}"
    )


def _extra(directory: Path, healer: Healer, numbers: dict[str, Any], done: bool) -> Callable[[Path], None]:
    """What puts the run's own files beside the model's: a finished one needs no optimiser any more."""

    def put(folder: Path) -> None:
        from safetensors.torch import save_file

        for name in TOKENIZER:
            if (directory / name).is_file():
                shutil.copyfile(directory / name, folder / name)
        if not done:
            save_file(healer.tensors(), folder / TENSORS)
        (folder / NUMBERS).write_text(json.dumps(numbers, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        if can_draw():
            draw([row["loss"] for row in numbers["losses"]], [row["kl"] for row in numbers["losses"]], folder / PLOT)

    return put


def _earlier(out: Path, run: dict[str, Any]) -> dict[str, Any] | None:
    """An earlier run's numbers in ``out``; None if there is none. Raises CheckpointError if it is another run's."""
    path = out / NUMBERS
    if not path.is_file():
        if (out / MARKER).is_file():
            raise CheckpointError(
                "holds a converted model that no healing wrote", where=str(out), remedy="give another --out"
            )
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        theirs = {key: found[key] for key in run}
        found["step"], found["losses"], found["nll"], found["trained"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"cannot be read: {one_line(error)}", where=str(path), remedy="remove the directory, or give another --out"
        ) from None
    for key, value in run.items():
        if theirs[key] == value:
            continue
        what = f"its {key} differs"
        if key == "settings":
            names = [n for n in value if theirs[key].get(n) != value[n]]
            what = ", ".join(f"its {n} is {theirs[key].get(n)}, not {value[n]}" for n in names)
        elif key == "teacher":
            what = f"its original is {theirs[key]}, not {value}"
        raise CheckpointError(
            f"holds another run: {what}", where=str(out),
            remedy="repeat the command as it was to go on, or give another --out",
        )  # fmt: skip
    return found


def _resume(out: Path, healer: Healer, numbers: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    path = out / TENSORS
    try:
        tensors = load_file(path)
        healer.resume(tensors, numbers)
    except Exception as error:  # noqa: BLE001  safetensors, key and shape errors of many types
        raise CheckpointError(
            f"cannot be read: {type(error).__name__}: {one_line(error)}", where=str(path),
            remedy="remove the directory, or give another --out",
        ) from None  # fmt: skip


def _digest(directory: Path) -> str:
    """Of a converted model's weights and plan."""
    found = hashlib.sha256()
    for path in sorted([*directory.glob("model*.safetensors"), directory / MARKER]):
        found.update(path.name.encode())
        with open(path, "rb") as file:
            while block := file.read(1 << 22):
                found.update(block)
    return found.hexdigest()


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(path), remedy="give a UTF-8 text file") from None
    if not text.strip():
        raise PipelineError("the text is empty", where=str(path), remedy="give text of the kind the model will see")
    return text


def _ids(directory: Path, text: str, tiny: bool, vocabulary: int) -> list[int]:
    """A text's tokens. Bytes are the tokens of a tiny model, which has no tokenizer."""
    if tiny:
        return [byte % vocabulary for byte in text.encode()]
    from transformers import AutoTokenizer

    try:
        with quiet():
            return list(AutoTokenizer.from_pretrained(str(directory), local_files_only=True)(text)["input_ids"])
    except Exception as error:
        raise CheckpointError(
            f"its tokenizer cannot be read: {type(error).__name__}: {one_line(error)}", where=str(directory),
            remedy="convert the model again from a directory with its tokenizer",
        ) from error  # fmt: skip


@contextmanager
def bar(steps: int) -> Iterator[tuple[Callable[[str], None], Told]]:
    """Progress on stderr: a bar with loss and time left on a terminal, else a line now and then.

    Yields:
        what takes a word on what is being done, and what takes a step's numbers.
    """
    import time

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, emoji=False)
    if not console.is_terminal:
        began, last, first = time.monotonic(), 0.0, 0

        def line(told: dict[str, Any]) -> None:
            nonlocal last, first, began
            now = time.monotonic()
            if not first:
                first, began = told["step"], now
            if now - last < 15 and told["step"] < told["steps"]:
                return
            last = now
            left = (now - began) / max(1, told["step"] - first) * (told["steps"] - told["step"])
            console.print(
                f"step {told['step']}/{told['steps']}  loss {told['loss']:.4f}  kl {told['kl']:.4f}"
                + (f"  {left:.0f} s left" if told["step"] > first else ""),
                highlight=False, soft_wrap=True,
            )  # fmt: skip

        yield lambda _: None, line
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as shown:
        task = shown.add_task("healing", total=steps, loss="")

        def tell(told: dict[str, Any]) -> None:
            shown.update(task, completed=told["step"], description="healing", loss=f"loss {told['loss']:.4f}")

        yield lambda what: shown.update(task, description=what), tell
