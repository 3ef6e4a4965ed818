"""Rules of the Ascend target that reading the device code can hold; CPU execution cannot show that they are broken.

A line that breaks a rule on purpose says ``# lint: allow RULE``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "kernels" / "triton_ascend"
RULES = {
    "left-operand": "tl.dot may overwrite its left operand: copy it (tile + 0.0) before, or load it again",
    "grid": "a kernel has one grid axis and numbers its units from `first`; only launch() starts it",
    "strided-load": "a one-dimensional load or store with a stride overflows the unified buffer: store it contiguously",
    "forbidden-argument": "the target knows no num_warps, num_stages, None pointers, nor atomics other than add",
    "offset": "an offset is multiplied in 64 bits: start from tl.program_id(0).to(tl.int64)",
}
FORBIDDEN = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@dataclass(frozen=True)
class Finding:
    """A broken rule at a line."""

    path: str
    line: int
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.what}; {RULES[self.rule]}"


def lint_folder(folder: Path = FOLDER) -> list[Finding]:
    """Every finding in the sources of the target."""
    return [f for path in sorted(folder.glob("*.py")) for f in lint_source(path.read_text("utf-8"), path.name)]


def lint_source(text: str, path: str) -> list[Finding]:
    """The findings of one file, by line."""
    tree = ast.parse(text, path)
    lines = text.splitlines()
    found = list(_forbidden(tree, path))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any("kernel" in ast.unparse(d) for d in node.decorator_list):
            found += [*_left_operands(node, path), *_grid(node, path), *Offsets(node, path).findings()]
    allowed = {(i, rule) for i, line in enumerate(lines, 1) for rule in RULES if f"lint: allow {rule}" in line}
    unique = {(f.line, f.rule, f.what): f for f in found if (f.line, f.rule) not in allowed}
    return sorted(unique.values(), key=lambda f: (f.line, f.rule))


def _is(call: ast.AST, *names: str) -> bool:
    return isinstance(call, ast.Call) and ast.unparse(call.func) in names


def _forbidden(tree: ast.AST, path: str) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in FORBIDDEN:
            yield Finding(path, node.value.lineno, "forbidden-argument", f"{node.arg} is given")
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.startswith("tl.atomic_") and name != "tl.atomic_add":
                yield Finding(path, node.lineno, "forbidden-argument", f"{name} is called")
            if name == "launch":
                for keyword in node.keywords:
                    if isinstance(keyword.value, ast.Constant) and keyword.value.value is None:
                        yield Finding(path, node.lineno, "forbidden-argument", f"{keyword.arg} is None")
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and _started(node, tree):
            yield Finding(path, node.lineno, "grid", f"{ast.unparse(node)} starts a kernel")


def _started(node: ast.Subscript, tree: ast.AST) -> bool:
    """Whether ``f[grid]`` is called, outside of launch()."""
    calls = (c for c in ast.walk(tree) if isinstance(c, ast.Call) and c.func is node)
    inside = {
        id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name == "launch" for n in ast.walk(f)
    }
    return any(id(c) not in inside for c in calls)


def _grid(function: ast.FunctionDef, path: str) -> Iterator[Finding]:
    names = [a.arg for a in function.args.args]
    if "first" not in names:
        yield Finding(path, function.lineno, "grid", f"{function.name} has no parameter first")
    for node in ast.walk(function):
        if _is(node, "tl.program_id") and ast.unparse(node) != "tl.program_id(0)":
            yield Finding(path, node.lineno, "grid", f"{ast.unparse(node)} is a second axis")  # type: ignore[attr-defined]


def _left_operands(function: ast.FunctionDef, path: str) -> list[Finding]:
    """Names read again after they were the left operand of a product. Loop bodies are walked twice."""
    found: list[Finding] = []

    def names(node: ast.AST) -> list[ast.Name]:
        return [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]

    def expression(node: ast.AST, spent: set[str]) -> None:
        dots = [n for n in ast.walk(node) if _is(n, "tl.dot")]
        for name in names(node):
            if name.id in spent:
                what = f"{name.id} is read after it was a left operand"
                found.append(Finding(path, name.lineno, "left-operand", what))
        for dot in dots:
            left = dot.args[0]  # type: ignore[attr-defined]
            while _is(left, "tl.trans") or (isinstance(left, ast.Call) and ast.unparse(left.func).endswith(".trans")):
                left = left.args[0]
            if isinstance(left, ast.Name):
                if sum(name.id == left.id for name in names(node)) > 1:
                    what = f"{left.id} is read beside its use as a left operand"
                    found.append(Finding(path, left.lineno, "left-operand", what))
                spent.add(left.id)

    def body(statements: list[ast.stmt], spent: set[str]) -> None:
        for statement in statements:
            if isinstance(statement, ast.For | ast.While):
                expression(statement.iter if isinstance(statement, ast.For) else statement.test, spent)
                body(statement.body, spent)
                body(statement.body, spent)
            elif isinstance(statement, ast.If):
                expression(statement.test, spent)
                other = set(spent)
                body(statement.body, spent)
                body(statement.orelse, other)
                spent |= other
            elif isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
                if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
                    read = ast.copy_location(ast.Name(statement.target.id, ast.Load()), statement.target)
                    expression(read, spent)
                if statement.value is not None:
                    expression(statement.value, spent)
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for target in targets:
                    spent -= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
            else:
                expression(statement, spent)

    body(function.body, set())
    return found


class Offsets:
    """Follows which names are vectors, constants and 64-bit numbers, for the rules on loads and offsets."""

    def __init__(self, function: ast.FunctionDef, path: str) -> None:
        self.function, self.path = function, path
        arguments = function.args.args
        constant = {a.arg for a in arguments if a.annotation is not None and "constexpr" in ast.unparse(a.annotation)}
        self.runtime = {a.arg for a in arguments} - constant
        self.vectors: set[str] = set()
        self.wide: set[str] = set()
        self.made: dict[str, list[ast.expr]] = {}

    def findings(self) -> Iterator[Finding]:
        for node in ast.walk(self.function):
            if _is(node, "tl.program_id"):
                parent = next(
                    (p for p in ast.walk(self.function) if isinstance(p, ast.Attribute) and p.value is node), None
                )
                if parent is None or parent.attr != "to":
                    line = node.lineno  # type: ignore[attr-defined]
                    yield Finding(self.path, line, "offset", "the number of a program is 32 bits wide")
        assignments = [
            (s.targets[0].id, s.value)
            for s in ast.walk(self.function)
            if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)
        ]
        for _ in range(2):  # nested statements are walked last
            for name, value in assignments:
                self._assign(name, value)
        for name, value in assignments:
            self.made.setdefault(name, []).append(value)
        for node in ast.walk(self.function):
            if _is(node, "tl.load", "tl.store", "load_rows"):
                for address in self._written_out(node.args[0], set()):  # type: ignore[attr-defined]
                    yield from self._address(address)

    def _assign(self, name: str, value: ast.expr) -> None:
        if self._vector(value):
            self.vectors.add(name)
        if self._wide(value):
            self.wide.add(name)

    def _vector(self, node: ast.AST) -> bool:
        """Whether an expression is one-dimensional: made of tl.arange without a new axis, and no load."""
        if _is(node, "tl.arange"):
            return True
        if isinstance(node, ast.Name):
            return node.id in self.vectors
        if isinstance(node, ast.BinOp):
            return self._vector(node.left) or self._vector(node.right)
        return False

    def _wide(self, node: ast.AST) -> bool:
        """Whether an expression holds a 64-bit number outside of loads."""
        if isinstance(node, ast.Name):
            return node.id in self.wide
        if isinstance(node, ast.Call):
            return "int64" in ast.unparse(node)
        if isinstance(node, ast.Subscript):
            return self._wide(node.value)
        if isinstance(node, ast.BinOp):
            return self._wide(node.left) or self._wide(node.right)
        return False

    def _written_out(self, address: ast.AST, seen: set[str]) -> Iterator[ast.AST]:
        """An address and the expressions of the names that it is made of."""
        yield address
        for name in ast.walk(address):
            if isinstance(name, ast.Name) and name.id in self.made and name.id not in seen:
                seen.add(name.id)
                for value in self.made[name.id]:
                    yield from self._written_out(value, seen)

    def _address(self, address: ast.AST) -> Iterator[Finding]:
        for node in ast.walk(address):
            if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
                continue
            if self._vector(node.left) or self._vector(node.right):
                what = f"{ast.unparse(node)} spreads a vector"
                if not self._unit(address, node):
                    yield Finding(self.path, node.lineno, "strided-load", what)
            runtime = [
                side for side in (node.left, node.right) if isinstance(side, ast.Name) and side.id in self.runtime
            ]
            other = node.right if runtime and runtime[0] is node.left else node.left
            if runtime and not self._wide(other) and not isinstance(other, ast.Subscript) and not self._vector(other):
                yield Finding(self.path, node.lineno, "offset", f"{ast.unparse(node)} may wrap in 32 bits")

    @staticmethod
    def _unit(address: ast.AST, product: ast.BinOp) -> bool:
        """Whether the product is given a second axis later: ``(row * H + h)[:, None]`` is a tile of rows."""
        return any(isinstance(n, ast.Subscript) and product in ast.walk(n.value) for n in ast.walk(address))
