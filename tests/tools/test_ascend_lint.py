"""The Ascend lint is silent about the shipped kernels and finds each rule broken in a kernel made for it."""

from __future__ import annotations

import pytest

from latentscan.tools.ascend_check.lint import FOLDER, RULES, lint_folder, lint_source

GOOD = """
@kernel
def scale_kernel(x, y, first, n, x_sl, P: tl.constexpr, Q: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64) + first
    q = tl.arange(0, Q)
    p = tl.arange(0, P)
    tile = tl.load(x + pid * Q * x_sl + q[:, None] * x_sl + p[None, :], mask=(q < n)[:, None])
    out = tl.dot(tile + 0.0, tl.trans(tile))
    tl.store(y + pid * Q + q, tl.sum(out, 1))
"""

DOT, STORE = "tl.dot(tile + 0.0, tl.trans(tile))", "    tl.store(y + pid * Q + q,"
KERNEL = GOOD.split("@kernel\n")[1]

SABOTAGES = {
    "read after the product": ("left-operand", "tl.dot(tile + 0.0, tl.trans(tile))", "tl.dot(tile, w) + tl.sum(tile)"),
    "both operands": ("left-operand", "tl.dot(tile + 0.0, tl.trans(tile))", "tl.dot(tile, tl.trans(tile))"),
    "transposed": ("left-operand", "tl.sum(out, 1)", "tl.sum(tl.dot(tl.trans(out), out), 1)"),
    "in the next round of a loop": (
        "left-operand",
        "    out = tl.dot(tile + 0.0, tl.trans(tile))\n",
        "    out = 0.0\n    for k in range(n):\n        out += tl.dot(tile, p)\n",
    ),
    "second axis": ("grid", "    q = tl", "    i = tl.program_id(1).to(tl.int64)\n    q = tl"),
    "no first": ("grid", "first, n", "n"),
    "strided": ("strided-load", "tl.store(y + pid * Q + q,", "tl.store(y + pid + q * n,"),
    "strided, by a name": ("strided-load", "    tl.store(y + pid * Q + q,", "    at = y + q * n\n    tl.store(at,"),
    "32 bits": ("offset", ".to(tl.int64) + first", " + first"),
    "a product in 32 bits": ("offset", "x + pid * Q * x_sl", "x + n * x_sl"),
    "atomics": ("forbidden-argument", "tl.store(y", "tl.atomic_max(y"),
    "by another name": (
        "left-operand", "    out = " + DOT, "    other = tile\n    out = tl.dot(tile, w) + tl.sum(other)",
    ),
    "by another name, before": (
        "left-operand", "    out = " + DOT, "    other = tile\n    out = tl.dot(other, w)\n    out += tl.sum(tile)",
    ),
    "a cast may copy nothing": ("left-operand", DOT, "tl.dot(tile.to(tl.float16), w) + tl.sum(tile)"),
    "given by name": ("left-operand", DOT, "tl.dot(input=tile, other=w) + tl.sum(tile)"),
    "transposed by a method": ("left-operand", DOT, "tl.dot(tile.trans(), w) + tl.sum(tile)"),
    "reshaped": ("left-operand", DOT, "tl.dot(tl.reshape(tile, (P, Q)), w) + tl.sum(tile)"),
    "an attribute": ("left-operand", DOT, "tl.dot(tile.T, w) + tl.sum(tile)"),
    "the whole name": ("left-operand", DOT, "triton.language.dot(tile, w) + tl.sum(tile)"),
    "in a helper": (
        "left-operand", "@kernel", "@triton.jit\ndef twice(a, b):\n    return tl.dot(a, b) + tl.sum(a)\n\n\n@kernel",
    ),
    "by a helper": (
        "left-operand", "@kernel\n" + KERNEL,
        "@triton.jit\ndef times(a, b):\n    return tl.dot(a, b)\n\n\n@kernel\n"
        + KERNEL.replace(DOT, "times(tile, w) + tl.sum(tile)"),
    ),
    "in one branch": (
        "left-operand", "    out = " + DOT,
        "    out = 0.0\n    if n:\n        out = tl.dot(tile, w)\n    out += tl.sum(tile)",
    ),
    "a kernel without @kernel": (
        "grid", "@kernel", "@triton.jit\ndef other(a):\n    return a + tl.program_id(0).to(tl.int64)\n\n\n@kernel",
    ),
    "second axis by name": ("grid", "    q = tl", "    i = tl.program_id(axis=1).to(tl.int64)\n    q = tl"),
    "block pointer": ("strided-load", STORE, "    tl.store(tl.make_block_ptr(y, (n,), (n,), 0, 1, 0),"),
    "strided, pointer by name": ("strided-load", STORE + " tl.sum(out, 1))", "    tl.load(pointer=y + q * n)"),
    "strided in a pair": ("strided-load", STORE, "    at, b = y + q * n, 1\n    tl.store(at,"),
    "strided by a shift": ("strided-load", "tl.store(y + pid * Q + q,", "tl.store(y + (q << 3),"),
    "strided in 64 bits": (
        "strided-load", "tl.store(y + pid * Q + q,", "tl.store(y + tl.arange(0, Q).to(tl.int64) * n,",
    ),
    "strided in steps": ("strided-load", STORE, "    at = y\n    at += q * n\n    tl.store(at,"),
    "narrowed again": ("offset", "x + pid * Q * x_sl", "x + pid.to(tl.int32) * x_sl"),
}  # fmt: skip
HOST = {
    "num_warps": ("forbidden-argument", "launch(SCALE, 4, x=x, num_warps=4)"),
    "num_stages": ("forbidden-argument", "for k in tl.range(0, 4, num_stages=2):\n    pass"),
    "optional pointer": ("forbidden-argument", "launch(SCALE, 4, x=x, z=None)"),
    "two axes": ("grid", "scale_kernel[(4, 2)](x)"),
    "one axis": ("grid", "scale_kernel[(4,)](x)"),
    "a grid by name": ("grid", "SCALE.load()[grid](x)"),
    "perhaps no pointer": ("forbidden-argument", "launch(SCALE, 4, x=x, z=z if z is not None else None)"),
    "no pointer in a dict": ("forbidden-argument", "launch(SCALE, 4, **{'z': None})"),
    "num_warps in a dict": ("forbidden-argument", "launch(SCALE, 4, **{'num_warps': 4})"),
}


def test_the_shipped_kernels_keep_the_rules():
    assert len(list(FOLDER.glob("*_kernels.py"))) >= 4
    assert [str(f) for f in lint_folder()] == []


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_broken_rule_is_found(name: str):
    assert lint_source(GOOD, "good.py") == []
    rule, old, new = SABOTAGES[name]
    assert old in GOOD
    found = lint_source(GOOD.replace(old, new, 1), "bad.py")
    assert rule in {f.rule for f in found}, found
    assert found[0].what in str(found[0]) and str(found[0]).startswith("bad.py:")


@pytest.mark.parametrize("name", HOST)
def test_a_broken_rule_of_the_host_is_found(name: str):
    rule, text = HOST[name]
    assert [f.rule for f in lint_source(text, "host.py")] == [rule]


@pytest.mark.parametrize(
    "text",
    [
        "launch(SCALE, 4, x=x, z=x if z is None else z, HAS_Z=z is not None)",
        "def launch(kernel):\n    kernel.load()[(4,)](1)",
        GOOD.replace(DOT, "tl.dot(tile, w)\n    tile = w\n    out += tl.sum(tile)"),
        GOOD.replace(DOT, "tl.dot(w, tile) + tl.sum(tile)"),
    ],
)
def test_what_keeps_the_rules_is_not_told(text: str):
    assert lint_source(text, "good.py") == []


def test_every_rule_has_a_sabotage_and_a_line_can_be_excused():
    assert {r for r, *_ in SABOTAGES.values()} | {r for r, _ in HOST.values()} == set(RULES)
    bad = GOOD.replace("y + pid * Q + q,", "y + pid + q * n,")
    excused = bad.replace("tl.sum(out, 1))", "tl.sum(out, 1))  # lint: allow strided-load")
    assert {f.rule for f in lint_source(bad, "bad.py")} == {"strided-load"}
    assert lint_source(excused, "bad.py") == []


def test_the_excused_line_of_the_control_is_the_only_one():
    excused = [p.name for p in FOLDER.glob("*.py") for line in p.read_text().splitlines() if "lint: allow" in line]
    assert excused == ["control_kernels.py"]
