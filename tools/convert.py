"""``latentscan convert``: load a model, rewrite it, save it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from latentscan.ir.errors import CheckpointError, PipelineError, RefusedError
from latentscan.ir.weights import bytes_of
from latentscan.runtime.calibration import Calibration
from latentscan.runtime.checkpoint import check_target, load, write
from latentscan.runtime.door import session_of
from latentscan.runtime.export import FORMS, export
from latentscan.runtime.own import get
from latentscan.runtime.session import Session
from latentscan.runtime.source import MARKER, Source, one_line, quiet, resolve
from latentscan.runtime.wrap import wrap
from latentscan.tools.plan import weight_bytes
from latentscan.tools.plan_text import bytes_text, weights_text

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_LENGTH = 512  # tokens of a calibration row


def convert(
    model: str,
    out: Path,
    pipeline: str,
    *,
    calibration: Path | None = None,
    export_as: str | None = None,
    shard: str = "5GB",
    step: Callable[[str], None] = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Rewrite a model and save it to a directory, which appears complete or not at all.

    Args:
        model: MODEL as the command takes it.
        out: a directory that does not exist, is empty, or was written by latentscan.
        calibration: a text file, for passes that measure activations. What was measured is kept beside ``out`` until
            that is written, so that a conversion that was killed goes on from there.
        export_as: ``deepseek-v3``: write the result as such a model, which plain transformers reads too.
        shard: most bytes of one weights file, as Hugging Face writes them.
        step: told what is being done.
        tell: told, before anything is written, what the weights took and will take.

    Returns:
        "out", "pipeline", "files", "bytes", "reads_as_plain_model", and "weights": before, after, made, released bytes.
        Of an export also "elements" (cached per token and layer) and "weight_bytes" of the converted and the exported
        model, "error" of its logits and "tolerance".

    Raises:
        CheckpointError: ``out`` holds something else, or the model cannot be read. RefusedError: it does not fit the
        form that it should be exported to. Every error of ``wrap``.
    """
    target = _check_out(out)
    if export_as is not None:
        _check_form(export_as)
    source = resolve(model)
    if source.folder is not None and Path(source.folder).is_dir():
        _check_apart(target, Path(source.folder))
    step(f"loading {source.text}")
    loaded = source.load()
    data: Any = None
    if calibration is not None:
        step("reading the calibration text")
        data = Calibration(_calibration(source, loaded, calibration), state=_state(target))
    step("rewriting")
    before = sum(bytes_of(t) for t in (*loaded.parameters(), *loaded.buffers()))
    try:
        wrap(loaded, pipeline, calibration=data)
    except (PipelineError, RefusedError):  # no interruption: there is nothing to go on from
        _state(target).unlink(missing_ok=True)
        raise
    session = session_of(loaded)
    assert session is not None
    made = {t: bytes_of(get(loaded, t)) for r in session.plan.recipes for t in r.targets}
    released = {path: bytes_of(get(loaded, path)) for path in session.plan.released}
    weights, by_pass = weight_bytes(before, session.plan, made, released)
    if export_as is None:  # an export tells of its own
        tell(weights_text(weights, by_pass))
    session.source = source.lasting
    if export_as is not None:
        told = _write_export(
            loaded, target, out, lambda folder: _add_tokenizer(source, folder), shard, step, tell, original=before
        )
    else:
        step(f"writing {target}")
        write(session, target, lambda folder: _add_tokenizer(source, folder), max_shard_size=shard)
        told = _told(session, target, out)
    _state(target).unlink(missing_ok=True)
    return told | {"weights": weights}


def export_directory(
    directory: Path,
    out: Path,
    form: str,
    *,
    shard: str = "5GB",
    step: Callable[[str], None] = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Export what ``convert`` or ``heal`` wrote. Arguments, results and errors as :func:`convert`'s."""
    target = _check_out(out)
    _check_form(form)
    _check_apart(target, directory)
    step(f"loading {directory}")
    loaded = load(directory)

    def add_tokenizer(folder: Path) -> None:
        for name in TOKENIZER:
            if (directory / name).is_file():
                shutil.copyfile(directory / name, folder / name)

    return _write_export(loaded, target, out, add_tokenizer, shard, step, tell)


def _check_apart(target: Path, source: Path) -> None:
    """Raise if what is written would replace what it is made from, or lie among its files."""
    new, old = target.resolve(), source.resolve()
    if new == old or new in old.parents or old in new.parents:
        how = "is" if new == old else "holds" if new in old.parents else "lies in"
        raise CheckpointError(
            f"{how} the directory that is read, {source}", where=str(target), remedy="give a directory beside it"
        )


def _check_form(form: str) -> None:
    if form not in FORMS:
        raise PipelineError(f"there is no form {form!r} to export to", remedy=f"the forms are {', '.join(FORMS)}")


def _write_export(
    model: torch.nn.Module,
    target: Path,
    out: Path,
    extra: Callable[[Path], None],
    shard: str,
    step: Callable[[str], None],
    tell: Callable[[str], None],
    original: int | None = None,
) -> dict[str, Any]:
    step("exporting")
    made = export(model)
    before, after = made.weight_bytes
    text = weights_text({"before": before, "after": after}, {f"export to {FORMS[0]}": (after, before)})
    tell(text if original is None else f"{text}; the original has {bytes_text(original)}")
    wrap(made.model, made.pipeline)
    session = session_of(made.model)
    assert session is not None
    step(f"writing {target}")
    write(session, target, extra, max_shard_size=shard)
    return _told(session, target, out) | {
        "elements": list(made.elements),
        "weight_bytes": list(made.weight_bytes),
        "error": made.error,
        "tolerance": made.tolerance,
    }


def _told(session: Session, target: Path, out: Path) -> dict[str, Any]:
    files = [p for p in target.iterdir() if p.is_file()]
    return {
        "out": str(out),
        "pipeline": session.plan.pipeline,
        "files": len(files),
        "bytes": sum(p.stat().st_size for p in files),
        "reads_as_plain_model": all(r.inverse is not None for r in session.plan.recipes),
    }


def _check_out(out: Path) -> Path:
    target = check_target(out)
    if target.is_dir() and not (target / MARKER).is_file() and any(target.iterdir()):
        raise CheckpointError(
            "is not empty, and latentscan did not make it",
            where=str(out),
            remedy="give a directory that does not exist",
        )
    return target


def _state(target: Path) -> Path:
    """Where calibration keeps what it has measured."""
    return target.parent / f".{target.name}.latentscan-calibration"


def _calibration(source: Source, model: torch.nn.Module, path: Path) -> Any:
    """What ``wrap`` takes as calibration. Text becomes tokens here where ``wrap`` cannot find the tokenizer."""
    if source.folder is not None and source.gguf is None:
        return str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(path), remedy="give a UTF-8 text file") from None
    if not text.strip():
        raise CheckpointError(
            "the calibration text is empty", where=str(path), remedy="give text of the kind that the model will see"
        )
    if source.family is not None:  # a tiny model has no tokenizer: bytes are its tokens
        size = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        ids = [byte % size for byte in text.encode()]
    else:
        from transformers import AutoTokenizer

        with quiet():
            ids = AutoTokenizer.from_pretrained(source.folder, gguf_file=source.gguf)(text)["input_ids"]
    tokens = torch.tensor(ids, dtype=torch.long)
    return tokens[: len(tokens) // _LENGTH * _LENGTH].reshape(-1, _LENGTH) if len(tokens) >= _LENGTH else tokens[None]


def _add_tokenizer(source: Source, folder: Path) -> None:
    """The tokenizer's files beside the model's."""
    if source.folder is None:
        return
    if source.gguf is not None:
        from transformers import AutoTokenizer

        try:
            with quiet():
                AutoTokenizer.from_pretrained(source.folder, gguf_file=source.gguf).save_pretrained(str(folder))
        except Exception as error:
            raise CheckpointError(
                f"its tokenizer cannot be read: {one_line(error)}",
                where=source.text,
                remedy="convert the GGUF file first",
            ) from error
        return
    for name in TOKENIZER:
        if (path := _local_file(source.folder, name)) is not None:
            shutil.copyfile(path, folder / name)


def _local_file(folder: str, name: str) -> Path | None:
    """A file of a model directory, or of a hub id in the local cache."""
    path = Path(folder) / name
    if path.is_file():
        return path
    if Path(folder).is_dir():
        return None
    from transformers.utils import cached_file

    found = cached_file(folder, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    return Path(found) if found else None
