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
    device = [
        (node, _kind(node)) for node in tree.body if isinstance(node, ast.FunctionDef) and _kind(node) is not None
    ]
    products = {node.name: _left_parameters(node) for node, _ in device}
    for node, kind in device:
        found += [
            *LeftOperands(node, path, products).findings(), *_grid(node, path, kind == "kernel"),
            *Offsets(node, path).findings(),
        ]  # fmt: skip
    allowed = {(i, rule) for i, line in enumerate(lines, 1) for rule in RULES if f"lint: allow {rule}" in line}
    unique = {(f.line, f.rule, f.what): f for f in found if (f.line, f.rule) not in allowed}
    return sorted(unique.values(), key=lambda f: (f.line, f.rule))


def _kind(function: ast.FunctionDef) -> str | None:
    """ "kernel", "helper" (device code that kernels call), or None for code of the host."""
    names = [ast.unparse(d).split("(")[0].split(".")[-1] for d in function.decorator_list]
    return "kernel" if "kernel" in names else "helper" if "jit" in names else None


def _is(call: ast.AST, *names: str) -> bool:
    """Whether a node calls a function of one of these names, by whatever module it is reached."""
    return isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] in names


def _argument(call: ast.Call, place: int, *names: str) -> ast.expr | None:
    """An argument by place or by name."""
    if len(call.args) > place:
        return call.args[place]
    return next((k.value for k in call.keywords if k.arg in names), None)


def _left(call: ast.AST) -> ast.expr | None:
    """The left operand of a product."""
    return _argument(call, 0, "input", "a", "lhs") if _is(call, "dot", "dot_scaled") else None  # type: ignore[arg-type]


def _forbidden(tree: ast.AST, path: str) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in FORBIDDEN:
            yield Finding(path, node.value.lineno, "forbidden-argument", f"{node.arg} is given")
        elif isinstance(node, ast.Dict):
            for key in node.keys:
                if isinstance(key, ast.Constant) and key.value in FORBIDDEN:
                    yield Finding(path, key.lineno, "forbidden-argument", f"{key.value} is given")
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).split(".")[-1]
            if name.startswith("atomic_") and name != "atomic_add":
                yield Finding(path, node.lineno, "forbidden-argument", f"{name} is called")
            if name == "launch":
                for value in _nones([*node.args, *(k.value for k in node.keywords)]):
                    yield Finding(path, value.lineno, "forbidden-argument", "an argument is None, or may be")
            if isinstance(node.func, ast.Subscript) and _started(node.func, tree):
                yield Finding(path, node.lineno, "grid", f"{ast.unparse(node.func)} starts a kernel")


def _nones(values: list[ast.expr]) -> Iterator[ast.expr]:
    """Each None among what expressions may be; what they compare with is no such."""
    for value in values:
        if isinstance(value, ast.Constant) and value.value is None:
            yield value
        elif isinstance(value, ast.IfExp):
            yield from _nones([value.body, value.orelse])
        elif isinstance(value, ast.BoolOp | ast.Dict):
            yield from _nones(value.values)


def _started(node: ast.Subscript, tree: ast.AST) -> bool:
    """Whether ``f[grid](...)`` stands outside of launch()."""
    inside = (f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name == "launch")
    return not any(node is n for f in inside for n in ast.walk(f))


def _grid(function: ast.FunctionDef, path: str, is_kernel: bool) -> Iterator[Finding]:
    names = [a.arg for a in function.args.args]
    if is_kernel and "first" not in names:
        yield Finding(path, function.lineno, "grid", f"{function.name} has no parameter first")
    for node in ast.walk(function):
        if _is(node, "program_id"):
            axis = _argument(node, 0, "axis")  # type: ignore[arg-type]
            if not is_kernel:
                what = f"{function.name}, which is no @kernel, asks for its number"
                yield Finding(path, node.lineno, "grid", what)  # type: ignore[attr-defined]
            if not (isinstance(axis, ast.Constant) and axis.value == 0):
                yield Finding(path, node.lineno, "grid", f"{ast.unparse(node)} is a second axis")  # type: ignore[attr-defined]


# What may be the same memory as what it is made of; a cast is, where the types are the same.
VIEWS = ("trans", "permute", "reshape", "view", "ravel", "expand_dims", "broadcast_to", "to", "cast", "T")


def _seen_through(node: ast.AST) -> ast.Name | None:
    """The name whose memory an expression may be, or None if it is made anew."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute) and node.attr in VIEWS or isinstance(node, ast.Subscript):
            node = node.value
        elif _is(node, *VIEWS):
            assert isinstance(node, ast.Call)
            by_module = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in (
                "tl",
                "triton.language",
            )
            if by_module or isinstance(node.func, ast.Name):
                given = _argument(node, 0, "input", "x")
                if given is None:
                    return None
                node = given
            else:
                node = node.func.value  # type: ignore[attr-defined]
        else:
            return None
    return node


def _left_parameters(function: ast.FunctionDef) -> set[int]:
    """Which parameters of a helper are left operands within it."""
    names = [a.arg for a in function.args.args]
    roots = {n.id for call in ast.walk(function) if (left := _left(call)) and (n := _seen_through(left))}
    return {i for i, name in enumerate(names) if name in roots}


class LeftOperands:
    """Follows values (not names) through a function: one that was a left operand must not be read again.

    Names of one value are one; loop bodies are walked twice, so that the next round is seen.
    """

    def __init__(self, function: ast.FunctionDef, path: str, products: dict[str, set[int]]) -> None:
        self.function, self.path, self.products = function, path, products
        self.values: dict[str, set[int]] = {}
        self.spent: set[int] = set()
        self.made = 0
        self.found: list[Finding] = []

    def findings(self) -> list[Finding]:
        self._body(self.function.body)
        return self.found

    def _fresh(self) -> set[int]:
        self.made += 1
        return {self.made}

    def _of(self, name: str) -> set[int]:
        return self.values.setdefault(name, self._fresh())

    def _expression(self, node: ast.AST) -> None:
        names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        for name in names:
            if self._of(name.id) & self.spent:
                self._tell(name, "is read after it was a left operand")
        for call in ast.walk(node):
            lefts = [_left(call)]
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                lefts += [call.args[i] for i in self.products.get(call.func.id, ()) if i < len(call.args)]
            for left in lefts:
                root = _seen_through(left) if left is not None else None
                if root is not None:
                    if sum(bool(self._of(n.id) & self._of(root.id)) for n in names) > 1:
                        self._tell(root, "is read beside its use as a left operand")
                    self.spent |= self._of(root.id)

    def _tell(self, name: ast.Name, what: str) -> None:
        self.found.append(Finding(self.path, name.lineno, "left-operand", f"{name.id} {what}"))

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            parts = value.elts if isinstance(value, ast.Tuple | ast.List) else [None] * len(target.elts)
            for one, part in zip(target.elts, parts, strict=False):
                self._assign(one, part)
        elif isinstance(target, ast.Name):
            root = _seen_through(value) if value is not None else None
            self.values[target.id] = self._fresh() if root is None else set(self._of(root.id))

    def _body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, ast.For | ast.While):
                self._expression(statement.iter if isinstance(statement, ast.For) else statement.test)
                for _ in range(2):
                    if isinstance(statement, ast.For):
                        self._assign(statement.target, None)
                    self._body(statement.body)
            elif isinstance(statement, ast.If):
                self._expression(statement.test)
                values, spent = dict(self.values), set(self.spent)
                self._body(statement.body)
                after, self.values = self.values, values
                other, self.spent = self.spent, spent
                self._body(statement.orelse)
                self.spent |= other
                for name, found in after.items():
                    self.values[name] = self.values.get(name, set()) | found
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                if statement.value is not None:
                    self._expression(statement.value)
                for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                    self._assign(target, statement.value)
            elif isinstance(statement, ast.AugAssign):
                if isinstance(statement.target, ast.Name):
                    read = ast.Name(statement.target.id, ast.Load())
                    self._expression(ast.copy_location(read, statement.target))
                self._expression(statement.value)
                self._assign(statement.target, None)
            else:
                self._expression(statement)


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
            if _is(node, "program_id"):
                parent = next(
                    (p for p in ast.walk(self.function) if isinstance(p, ast.Attribute) and p.value is node), None
                )
                if parent is None or parent.attr != "to":
                    line = node.lineno  # type: ignore[attr-defined]
                    yield Finding(self.path, line, "offset", "the number of a program is 32 bits wide")
        assignments = [pair for s in ast.walk(self.function) for pair in self._assigned(s)]
        for _ in range(2):  # nested statements are walked last
            for name, value in assignments:
                self._assign(name, value)
        for name, value in assignments:
            self.made.setdefault(name, []).append(value)
        for node in ast.walk(self.function):
            if _is(node, "make_block_ptr", "make_tensor_descriptor", "advance"):
                what = f"{ast.unparse(node)[:40]}: only written addresses are followed"
                yield Finding(self.path, node.lineno, "strided-load", what)  # type: ignore[attr-defined]
            if _is(node, "load", "store", "load_rows", "atomic_add"):
                pointer = _argument(node, 0, "pointer", "ptr")  # type: ignore[arg-type]
                for address in self._written_out(pointer, set()) if pointer is not None else ():
                    yield from self._address(address)

    @staticmethod
    def _assigned(statement: ast.AST) -> Iterator[tuple[str, ast.expr]]:
        """(name, value) of each assignment; ``a += b`` is ``a = a + b``."""
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            read = ast.copy_location(ast.Name(statement.target.id, ast.Load()), statement.target)
            both = ast.BinOp(read, statement.op, statement.value)
            yield statement.target.id, ast.copy_location(both, statement)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            yield statement.target.id, statement.value
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    yield target.id, statement.value
                elif isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                    for one, value in zip(target.elts, statement.value.elts, strict=False):
                        if isinstance(one, ast.Name):
                            yield one.id, value

    def _assign(self, name: str, value: ast.expr) -> None:
        if self._vector(value):
            self.vectors.add(name)
        if self._wide(value):
            self.wide.add(name)

    def _vector(self, node: ast.AST) -> bool:
        """Whether an expression is one-dimensional: made of tl.arange without a new axis, and no load."""
        if _is(node, "arange"):
            return True
        if _is(node, "to", "cast"):  # of the same shape
            return any(self._vector(n) for n in (*node.args[:1], getattr(node.func, "value", node.func)))  # type: ignore[attr-defined]
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
            if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.LShift)):
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
