"""The checking environment: a virtual environment of its own, made on demand from pinned packages.

The vendor's Triton owns the import name ``triton``, so it never shares an environment with latentscan.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
MACHINES = ("x86_64", "aarch64")


class UnavailableError(Exception):
    """The check cannot be run on this machine; the text says what is missing. Not a failure of a kernel."""


def default_folder() -> Path:
    """Where the environment and what was compiled are kept."""
    import os

    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "latentscan" / "ascend"


@dataclass(frozen=True)
class Environment:
    """A folder with the environment (``venv``), a link to our package (``link``) and the results (``cache``)."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def binaries(self) -> Path:
        (found,) = (self.folder / "venv" / "lib").glob("python3*/site-packages/ascendnpuir/bin")
        return found

    @property
    def whole(self) -> bool:
        """Whether Python, the vendor's Triton and the vendor's compiler are there."""
        packages = list((self.folder / "venv" / "lib").glob("python3*/site-packages"))
        inside = ("triton/backends/ascend", "ascendnpuir/bin/bishengir-compile", "ascendnpuir/bin/bishengir-opt")
        return self.python.exists() and len(packages) == 1 and all((packages[0] / path).exists() for path in inside)

    @property
    def packages(self) -> Path:
        """The folder whose child ``latentscan`` is our package, without the packages that lie beside it."""
        return self.folder / "link"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"


def ensure(folder: Path, pip_args: Sequence[str] = (), say: Callable[[str], None] = lambda text: None) -> Environment:
    """The environment in ``folder``, made or brought up to date first if it has to be.

    Raises:
        UnavailableError: the machine, its Python or the packages do not allow it.
    """
    environment = Environment(folder.absolute())
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        raise UnavailableError(f"the vendor's compiler runs on Linux ({', '.join(MACHINES)}), not here")
    if shutil.which("gcc") is None:
        raise UnavailableError("gcc, which links what is run on the CPU, is not installed")
    try:
        _make(environment, pip_args, say)
    except OSError as error:
        raise UnavailableError(f"its environment cannot be made in {environment.folder}: {error}") from error
    return environment


def _make(environment: Environment, pip_args: Sequence[str], say: Callable[[str], None]) -> None:
    stamp = environment.folder / "installed"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()
    if not (stamp.exists() and stamp.read_text() == wanted and environment.whole):
        stamp.unlink(missing_ok=True)
        environment.folder.mkdir(parents=True, exist_ok=True)
        say("making the checking environment (about 230 MB are fetched once)")
        venv.create(environment.folder / "venv", with_pip=True, clear=True)
        command = [environment.python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*map(str, command), *pip_args, "-r", str(REQUIREMENTS)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
            version = ".".join(map(str, sys.version_info[:2]))
            raise UnavailableError(f"its packages cannot be had for Python {version}: {lines[-1]}")
        stamp.write_text(wanted)
    environment.cache.mkdir(exist_ok=True)
    environment.packages.mkdir(exist_ok=True)
    link = environment.packages / "latentscan"
    root = HERE.parents[1]
    if not link.is_symlink() or link.resolve() != root.resolve():
        link.unlink(missing_ok=True)
        link.symlink_to(root, target_is_directory=True)
