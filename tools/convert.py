"""``latentscan convert``: load a model, rewrite it, save it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from latentscan.ir.errors import CheckpointError
from latentscan.runtime.checkpoint import check_target, write
from latentscan.runtime.door import session_of
from latentscan.runtime.source import MARKER, Source, one_line, quiet, resolve
from latentscan.runtime.wrap import wrap

_TOKENIZER = (
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
    shard: str = "5GB",
    step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Rewrite a model and save it to a directory, which appears complete or not at all.

    Args:
        model: MODEL as the command takes it.
        out: a directory that does not exist, is empty, or was written by latentscan.
        calibration: a text file, for passes that measure activations.
        shard: most bytes of one weights file, as Hugging Face writes them.
        step: told what is being done.

    Returns:
        "out", "pipeline", "files", "bytes" and "reads_as_plain_model".

    Raises:
        CheckpointError: ``out`` holds something else, or the model cannot be read. Every error of ``wrap``.
    """
    target = _check_out(out)
    source = resolve(model)
    step(f"loading {source.text}")
    loaded = source.load()
    data: Any = None
    if calibration is not None:
        step("reading the calibration text")
        data = _calibration(source, loaded, calibration)
    step("rewriting")
    wrap(loaded, pipeline, calibration=data)
    session = session_of(loaded)
    assert session is not None
    step(f"writing {target}")
    write(session, target, lambda folder: _add_tokenizer(source, folder), max_shard_size=shard)
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
    for name in _TOKENIZER:
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
