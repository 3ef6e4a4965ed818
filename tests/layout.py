"""The house rules that a script can hold: who may import whom, what is imported late, long files, the package list.

Run as a script (``python tests/layout.py``) it needs nothing but Python: it prints what it finds and exits 1 if that is
anything. With ``--write`` it first makes missing ``__init__.py`` files and lists all packages in setup.cfg.
tests/test_layout.py runs it on the repository and on deliberate mistakes.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "latentscan"
ROOT = Path(__file__).resolve().parents[1]
LONGEST_FILE = 600  # lines

_BELOW_TOOLS = ("runtime", "lowering", "passes", "ir", "kernels")

# Room -> the rooms it may import, by dotted name below the package. The longest room that holds a file is its room.
ARROWS: dict[str, tuple[str, ...]] = {
    "kernels.reference": ("kernels.reference",),
    "kernels": ("kernels",),
    "ir": ("ir", "kernels.reference"),
    "passes": ("passes", "ir"),
    "lowering": ("lowering", "passes.base", "ir", "kernels"),
    "runtime": _BELOW_TOOLS,
    "tools": ("tools", *_BELOW_TOOLS),
    "tests": ("tests", "tools", *_BELOW_TOOLS),
    "": ("tools", *_BELOW_TOOLS),  # the root's own __init__.py, lazily
}
ROOMS = tuple(room for room in ARROWS if room and "." not in room)
# Rooms that may also use the public names of the root. Everybody may ask for the version.
USERS_OF_THE_ROOT = ("tools", "tests")

# Library -> where it may be imported at the top level of a module (paths or folders); elsewhere inside functions only.
LATE: dict[str, tuple[str, ...]] = {
    "transformers": ("runtime/cache.py", "tests/"),  # the cache subclasses transformers.Cache
    "triton": ("kernels/triton/", "kernels/triton_ascend/", "tests/"),
    "torch_npu": ("tests/",),
}


@dataclass(frozen=True)
class Violation:
    """One broken rule: the file (relative to the root), the line, and what to do."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def sources(root: Path = ROOT) -> Iterator[Path]:
    """Every Python file of the package, in order: the root's own and those of its rooms."""
    yield from sorted(root.glob("*.py"))
    for room in ROOMS:
        yield from sorted((root / room).rglob("*.py"))


def check_tree(root: Path = ROOT) -> list[Violation]:
    """Every violation below ``root``; empty when the house is in order."""
    found = []
    for path in sources(root):
        found += check_source(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())
    for folder in _folders_without_init(root):
        where = folder.relative_to(root).as_posix()
        found.append(Violation(where, 1, "holds Python files but no __init__.py: run `make packages`"))
    return found + check_rooms(root) + check_packages(root)


def check_source(text: str, path: str) -> list[Violation]:
    """The violations of one file.

    Args:
        text: its source.
        path: its place relative to the root, with slashes; it decides which rules apply.
    """
    found = []
    if (length := text.count("\n")) > LONGEST_FILE:
        message = f"{length} lines; a file has at most {LONGEST_FILE}: split it by job"
        found.append(Violation(path, LONGEST_FILE + 1, message))
    tree = ast.parse(text, path)
    room = _room_of(path)
    top_level = {id(node) for node in _top_level(tree)}
    for node in ast.walk(tree):
        for target in _targets(node):
            problem = _problem(target, room) or (_late(target, path) if id(node) in top_level else None)
            if problem:
                found.append(Violation(path, node.lineno, problem))  # type: ignore[attr-defined]
    return found


def check_rooms(root: Path = ROOT) -> list[Violation]:
    """Folders at the top level that hold a package but are no room of the house."""
    return [
        Violation(init.parent.name, 1, f"is no room of the house: {', '.join(ROOMS)}")
        for init in sorted(root.glob("[!.]*/__init__.py"))
        if init.parent.name not in ROOMS
    ]


def check_packages(root: Path = ROOT) -> list[Violation]:
    """The differences between the package list of setup.cfg and the folders that have an ``__init__.py``."""
    listed, there = listed_packages(root), packages(root)
    messages = [f"does not list {name}" for name in there if name not in listed]
    messages += [f"lists {name}, which is no package" for name in listed if name not in there]
    return [Violation("setup.cfg", 1, f"{message}: run `make packages`") for message in messages]


def packages(root: Path = ROOT) -> list[str]:
    """The packages that exist, by dotted name."""
    inits = [init for room in ROOMS for init in (root / room).rglob("__init__.py")]
    return [PACKAGE, *sorted(".".join((PACKAGE, *init.parent.relative_to(root).parts)) for init in inits)]


def listed_packages(root: Path = ROOT) -> list[str]:
    """The packages that setup.cfg lists."""
    config = configparser.ConfigParser()
    config.read(root / "setup.cfg", encoding="utf-8")
    return config["options"]["packages"].split()


def write_packages(root: Path = ROOT) -> None:
    """Make every folder that holds Python files a package, and list all packages in setup.cfg."""
    for folder in _folders_without_init(root):
        (folder / "__init__.py").touch()
    setup = root / "setup.cfg"
    lines = "".join(f"    {name}\n" for name in packages(root))
    text = setup.read_text(encoding="utf-8")
    text, count = re.subn(r"(?m)^packages =\n(?:[ \t]+\S+\n)*", f"packages =\n{lines}", text)
    if count != 1:
        raise SystemExit("setup.cfg: expected one list `packages =`")
    setup.write_text(text, encoding="utf-8")


def _folders_without_init(root: Path) -> list[Path]:
    """Folders with Python files that no wheel would contain, and those between them and the root."""
    folders = {folder for path in sources(root) for folder in path.parents if root in folder.parents}
    return sorted(folder for folder in folders if not (folder / "__init__.py").exists())


def _room_of(path: str) -> str:
    module = ".".join(Path(path).with_suffix("").parts)
    return max((room for room in ARROWS if room == "" or _within(module, room)), key=len)


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _targets(node: ast.AST) -> Iterator[str]:
    """What a node imports, by dotted name; relative imports begin with a dot."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and node.args:
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
        if function in ("import_module", "__import__") and isinstance(name, str):
            yield name


def _problem(target: str, room: str) -> str | None:
    """Why a file of ``room`` must not import ``target``; None if it may."""
    first, _, rest = target.partition(".")
    if first == "":
        return f"imports {target} relatively: imports are absolute (from {PACKAGE}.… import …)"
    if first in ROOMS:
        return f"imports {first} as a top-level package: write {PACKAGE}.{first}"
    if first != PACKAGE or rest == "__version__":
        return None
    if rest.partition(".")[0] not in ROOMS:
        if room in USERS_OF_THE_ROOT:
            return None
        return f"imports {target} through the root package: import it from where it is defined"
    if any(_within(rest, allowed) for allowed in ARROWS[room]):
        return None
    may = ", ".join(f"{PACKAGE}.{allowed}" for allowed in ARROWS[room])
    return f"imports {target}; {room or 'the root'} may import only {may}"


def _late(target: str, path: str) -> str | None:
    """Why ``target`` must not be imported at the top level of ``path``; None if it may."""
    library = target.partition(".")[0]
    if library not in LATE:
        return None
    if any(path.startswith(place) if place.endswith("/") else path == place for place in LATE[library]):
        return None
    return f"imports {library} when it is itself imported: import it inside the function that needs it"


def _top_level(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: not function bodies, not ``if TYPE_CHECKING:``."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the house rules.")
    parser.add_argument(
        "--write", action="store_true", help="first make __init__.py files and list the packages in setup.cfg"
    )
    if parser.parse_args().write:
        write_packages()
    found = check_tree()
    print("\n".join(map(str, found)) if found else "the house is in order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
