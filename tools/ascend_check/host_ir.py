"""The vendor's linalg-level IR made runnable on the CPU: annotations go, functions of its library get a body."""

from __future__ import annotations

import re


def for_the_host(text: str) -> str:
    """The same program for ``bishengir-opt`` to lower: its entry has a C interface, ``triton_cumsum`` a body."""
    text = "\n".join(line for line in text.splitlines() if "annotation.mark" not in line)
    text = text.replace(" {hivm.unlikely_condition}", "")
    text = re.sub(r'\{input_precison = "\w+"\} ', "", text)
    text = re.sub(r"(func\.func @\w+\(.*\)) attributes \{[^}]*\} \{", r"\1 attributes {llvm.emit_c_interface} {", text)
    axes = dict(re.findall(r"call @(triton_cumsum\w*)\(%\w+, %c(\d)_i32,", text))
    return re.sub(
        r"func\.func private @(triton_cumsum\w*)\(tensor<([\dx]+)x(\w+)>, i32, i1\) -> tensor<[\dx]+x\w+>",
        lambda m: _cumsum(m[1], [int(n) for n in m[2].split("x")], m[3], int(axes[m[1]])),
        text,
    )


def _cumsum(name: str, shape: list[int], element: str, axis: int) -> str:
    """A running sum over one axis (not reversed), element by element."""
    kind = f"tensor<{'x'.join(map(str, shape))}x{element}>"
    loops, at = [], []
    sizes = "\n".join(f"    %n{i} = arith.constant {n} : index" for i, n in enumerate(shape))
    outer = "%e"
    for i in range(len(shape)):
        at.append(f"%i{i}")
        loops.append(f"    %r{i} = scf.for %i{i} = %c0 to %n{i} step %c1 iter_args(%t{i} = {outer}) -> ({kind}) {{")
        outer = f"%t{i}"
    index = ", ".join(at)
    before = ", ".join("%before" if i == axis else a for i, a in enumerate(at))
    closing = "".join(f"      scf.yield %r{i + 1} : {kind}\n    }}\n" for i in reversed(range(len(shape) - 1)))
    head = "\n".join(loops)
    return f"""func.func private @{name}(%a: {kind}, %d: i32, %r: i1) -> {kind} {{
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %zero = arith.constant 0.0 : {element}
{sizes}
    %e = tensor.empty() : {kind}
{head}
      %v = tensor.extract %a[{index}] : {kind}
      %is_first = arith.cmpi eq, %i{axis}, %c0 : index
      %sum = scf.if %is_first -> ({element}) {{
        scf.yield %v : {element}
      }} else {{
        %before = arith.subi %i{axis}, %c1 : index
        %p = tensor.extract {outer}[{before}] : {kind}
        %s = arith.addf %p, %v : {element}
        scf.yield %s : {element}
      }}
      %out = tensor.insert %sum into {outer}[{index}] : {kind}
      scf.yield %out : {kind}
    }}
{closing}    return %r0 : {kind}
  }}"""
