"""A directory that appears complete or not at all, whatever kills the process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from latentscan.ir.errors import CheckpointError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_TAG = "latentscan-aside"


@contextlib.contextmanager
def replaced_directory(target: Path, keep: Callable[[str], bool]) -> Iterator[Path]:
    """Yields an empty directory beside ``target`` that takes its place at the end; on an error it is removed.

    Files of an existing ``target`` that ``keep`` accepts, by their path in it (``folder/file``), move along (as hard
    links, so that a file that somebody appends to stays the same file). The exchange is one system call where the file
    system knows it; elsewhere two renames, between which the old directory lies beside under the name
    ``.NAME.latentscan-aside-...-old``.

    Raises:
        CheckpointError: ``target`` is a file, or the file system refuses.
    """
    target = target.resolve()
    if target.exists() and not target.is_dir():
        raise CheckpointError("is a file", where=str(target), remedy="give a directory")
    aside = _beside(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        aside.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"cannot be written: {error}", where=str(target), remedy="choose another place"
        ) from error
    try:
        with file_errors(target, "free some space, or choose another place"):
            yield aside
            _usual_modes(aside)
            if target.is_dir():
                _take_along(target, aside, keep)
            _to_disk(aside)
            _move(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # after an exchange: the old one


@contextlib.contextmanager
def file_errors(target: Path, remedy: str) -> Iterator[None]:
    """Let what the file system refuses, to Python or to safetensors (which has a type of its own), be our error.

    Raises:
        CheckpointError: such a refusal; every other error passes.
    """
    try:
        yield
    except Exception as error:
        # safetensors tells of a full disk as "I/O error: ... (os error 28)", torch.save by its writer's name
        told = type(error).__name__ == "SafetensorError" or "PytorchStreamWriter" in str(error)
        if not told and not isinstance(error, OSError):
            raise
        what = " ".join(str(error).split())
        raise CheckpointError(f"cannot be written: {what}", where=str(target), remedy=remedy) from error


def _usual_modes(folder: Path) -> None:
    """Give files the mode that new files have here (umask, ACLs); some libraries write theirs for the owner alone."""
    probe = folder / f".{_TAG}"
    probe.touch(exist_ok=False)
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            runs = path.stat().st_mode & 0o100  # a script stays one, for whoever may read it
            path.chmod(mode | (mode & 0o444) >> 2 if runs else mode)


def _beside(target: Path) -> Path:
    """Where this process writes what will be ``target``."""
    return target.parent / f".{target.name}.{_TAG}-{socket.gethostname()}-{os.getpid()}"


def _sweep(target: Path) -> None:
    """Remove what killed processes of this machine left beside ``target``."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{_TAG}-{re.escape(socket.gethostname())}-(\d+)")
    for path in target.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match and not _alive(int(match.group(1))):
            shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    if process == os.getpid():
        return False  # ours, from an earlier save that could not clean up
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _take_along(target: Path, aside: Path, keep: Callable[[str], bool]) -> None:
    """Link what ``target`` holds beside our files; what was written anew wins."""
    for folder, names, files in os.walk(target):
        inside = Path(folder).relative_to(target)
        linked = [n for n in names if (target / inside / n).is_symlink()]  # a link to a folder is a file of its own
        for name in files + linked:
            new = aside / inside / name
            if not keep((inside / name).as_posix()) or new.exists() or new.is_symlink() or _in_a_file(new, aside):
                continue
            new.parent.mkdir(parents=True, exist_ok=True)
            _link(str(target / inside / name), str(new))
        if not names and not files and not (aside / inside).exists() and keep(inside.as_posix()):
            (aside / inside).mkdir(parents=True)


def _in_a_file(path: Path, root: Path) -> bool:
    """Whether something between ``root`` and ``path`` is a file, so that ``path`` cannot be."""
    return any(p.exists() and not p.is_dir() for p in path.parents if p.is_relative_to(root))


def files_in(folder: Path) -> list[str]:
    """The paths of all files in a folder, in order, as ``folder/file``."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir() or p.is_symlink())


def check_writable(path: Path) -> None:
    """Try to make a file where ``path`` is to be, or in the nearest folder above it that exists.

    Raises:
        CheckpointError: it cannot be made.
    """
    try:
        place = next((p for p in path.absolute().parents if p.exists()), Path("/"))
        with tempfile.TemporaryFile(dir=place, prefix=f".{_TAG}-"):
            (place / f"{_beside(path).name}-old").exists()  # raises if the name is too long
    except OSError as error:
        raise CheckpointError(
            f"cannot be written: {error.strerror or error}", where=str(path)[:200], remedy="choose another place"
        ) from error


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target, follow_symlinks=False)


def _to_disk(folder: Path) -> None:
    """Let the disk hold all of a directory before its name says so."""
    for path in (*(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EROFS):
                raise
        finally:
            os.close(handle)


def _move(aside: Path, target: Path) -> None:
    if not target.exists():
        os.rename(aside, target)
    elif not exchange(aside, target):
        old = aside.with_name(aside.name + "-old")
        os.rename(target, old)
        os.rename(aside, target)
        shutil.rmtree(old, ignore_errors=True)


def exchange(a: Path, b: Path) -> bool:
    """Let two paths change places in one step. False if this system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0
