"""Runs in the checking environment, where ``triton`` is the vendor's: kernels to its IR, lowered IR to machine code.

It reads one JSON request a line and answers each with one JSON line:

    {"do": "ttadapter", "module": ..., "name": ..., "signature": {...}, "constants": {...}, "target": ..., "out": path}
    {"do": "object", "source": path of LLVM dialect text, "out": path}
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any


def ttadapter(request: dict[str, Any]) -> None:
    """Write the vendor's linalg-level IR of a kernel, made without a driver or CANN."""
    from triton._C.libtriton import ir
    from triton.backends.ascend.compiler import AscendBackend
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(request["module"]), request["name"])
    target = GPUTarget("npu", request["target"], 0)
    backend = AscendBackend(target)
    options = backend.parse_options({})
    source = ASTSource(fn=function, signature=request["signature"], constants=request["constants"])
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {**options.__dict__, "target": target, "hash": "none"}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    for stage in ("ttir", "ttadapter"):
        module = stages[stage](module, metadata)
    _write(request["out"], str(module).encode())


def machine_code(request: dict[str, Any]) -> None:
    """Write an object file of this machine from text in the LLVM dialect."""
    from triton._C.libtriton import ir, llvm

    context = ir.context()
    ir.load_dialects(context)
    module = ir.parse_mlir_module(request["source"], context)
    module.context = context
    llvm.init_targets()
    module = llvm.to_module(module, llvm.context())
    llvm.attach_datalayout(module, request["triple"], "", "")
    llvm.optimize_module(module, llvm.OPTIMIZE_O2)
    code = llvm.translate_to_asm(str(module), request["triple"], "", "", [], False, True)
    _write(request["out"], code)


def _write(path: str, content: bytes) -> None:
    """The whole file or none: it is kept as a result."""
    with open(f"{path}.tmp", "wb") as file:
        file.write(content)
    os.replace(f"{path}.tmp", path)


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        try:
            {"ttadapter": ttadapter, "object": machine_code}[request["do"]](request)
            answer: dict[str, Any] = {"ok": True}
        except Exception as error:  # noqa: BLE001  (the compiler may raise anything; it is the answer)
            text = getattr(error, "stderr", None) or b""
            answer = {"ok": False, "error": f"{type(error).__name__}: {error} {text.decode(errors='replace')}".strip()}
            traceback.print_exc()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
