"""One kernel through the vendor's tools: its IR, the verdict of the compiler for a chip, a library for the CPU.

Everything is kept in the environment's cache under a hash of the sources and of the request.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from latentscan.kernels.triton_ascend.launch import Kernel
from latentscan.tools.ascend_check.environment import HERE, REQUIREMENTS, Environment
from latentscan.tools.ascend_check.host_ir import for_the_host

TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
    torch.int8: "i8", torch.uint8: "u8",
}  # fmt: skip
TARGETS = {"910B3": ("Ascend910B3", ""), "950": ("Ascend950PR_9579", "-a5")}
OPTIONS = (
    "--enable-auto-multi-buffer=true", "--enable-auto-bind-sub-block=true", "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true", "--enable-triton-kernel-compile=true",
)  # fmt: skip
OWN_FILES = ("frontend.py", "host_ir.py", "runtime.c", "toolchain.py")  # what the results depend on
# --memref-expand and the second --lower-affine clear away what the passes before them made.
LOWERING = (
    "--inline", "--convert-elementwise-to-linalg", "--eliminate-empty-tensors", "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true", "--convert-linalg-to-loops", "--lower-affine",
    "--expand-strided-metadata", "--lower-affine", "--convert-scf-to-cf", "--convert-cf-to-llvm",
    "--convert-math-to-llvm", "--convert-math-to-libm", "--arith-expand", "--convert-arith-to-llvm",
    "--convert-vector-to-llvm", "--convert-index-to-llvm", "--memref-expand", "--finalize-memref-to-llvm",
    "--convert-func-to-llvm", "--lower-affine", "--convert-arith-to-llvm", "--reconcile-unrealized-casts",
)  # fmt: skip


class CheckError(Exception):
    """A kernel does not pass a stage; the text is the tool's."""


@dataclass(frozen=True)
class Call:
    """A kernel with the types of its arguments and its constants: what one compilation is made of."""

    kernel: Kernel
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]

    @staticmethod
    def of(kernel: Kernel, arguments: dict[str, Any]) -> Call:
        """Raises CheckError if the arguments are not the kernel's, or of a kind that the target does not take."""
        signature, constants = [], []
        parameters = kernel.parameters
        if set(parameters) != set(arguments):
            wrong = sorted(set(parameters) ^ set(arguments))
            raise CheckError(f"{kernel.name}: arguments missing or unknown: {', '.join(wrong)}")
        for name, constant in parameters.items():
            value = arguments[name]
            if constant:
                constants.append((name, value))
            else:
                signature.append((name, _type(kernel, name, value)))
        return Call(kernel, tuple(signature), tuple(constants))

    @property
    def tile(self) -> str:
        return " ".join(f"{k}{int(v) if isinstance(v, bool) else v}" for k, v in self.constants)


def _type(kernel: Kernel, name: str, value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.dtype in TYPES:
            return f"*{TYPES[value.dtype]}"
    elif isinstance(value, float):
        return "fp32"
    elif isinstance(value, int) and not isinstance(value, bool):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    what = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
    raise CheckError(f"{kernel.name}: argument {name} is {what}; the target takes tensors, integers and floats")


@dataclass(frozen=True)
class Verdict:
    """What the vendor's compiler says of a kernel for a chip.

    ok: it planned memory and synchronisation and only its closed code generator is missing. buffers: whether with
    buffers doubled ("double"), or only without ("single"). errors: what it said otherwise.
    """

    ok: bool
    buffers: str = "double"
    errors: tuple[str, ...] = field(default=())


class Toolchain:
    """The vendor's tools in an environment."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.compiled = 0
        self._process: subprocess.Popen[str] | None = None
        self._turn = threading.Lock()
        files = [REQUIREMENTS, *(HERE / name for name in OWN_FILES)]
        self._sources = hashlib.sha256(b"".join(path.read_bytes() for path in files))

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=60)
            self._process = None

    def ir(self, call: Call, chip: str) -> Path:
        """The file with the kernel's IR.

        Raises:
            CheckError: the frontend refuses the kernel.
        """
        request = {
            "do": "ttadapter", "module": f"latentscan.kernels.triton_ascend.{call.kernel.module}",
            "name": call.kernel.name, "signature": dict(call.signature), "constants": dict(call.constants),
            "target": TARGETS[chip][0],
        }  # fmt: skip
        key = self._sources.copy()
        for path in (call.kernel.path, call.kernel.path.with_name("common.py")):
            key.update(path.read_bytes())
        key.update(json.dumps(request, sort_keys=True).encode())
        path = self.environment.cache / f"{call.kernel.name}-{key.hexdigest()[:24]}.ttadapter.mlir"
        if not path.exists():
            self._ask({**request, "out": str(path)})
            self.compiled += 1
        return path

    def verdict(self, ir: Path, chip: str) -> Verdict:
        """The vendor's compiler on a kernel, up to its closed code generator."""
        kept = ir.with_suffix(f".{chip}.json")
        if kept.exists():
            found = json.loads(kept.read_text())
            return Verdict(found["ok"], found["buffers"], tuple(found["errors"]))
        target, suffix = TARGETS[chip]
        source = ir.with_suffix(f".{chip}.in.mlir")
        source.write_text(re.sub(r', mix_mode = "\w+"', "", ir.read_text()))
        temporaries = ir.with_suffix(f".{chip}.d")
        temporaries.mkdir(exist_ok=True)
        planned = temporaries / "module.hivm.opt.mlir"
        planned.unlink(missing_ok=True)
        done = subprocess.run(
            [str(self.environment.binaries / f"bishengir-compile{suffix}"), str(source), f"--target={target}", *OPTIONS,
             f"--save-temps={temporaries}", "-o", str(temporaries / "out")],
            capture_output=True, text=True, check=False, cwd=temporaries,
        )  # fmt: skip
        self.compiled += 1
        text = done.stdout + done.stderr
        errors = tuple(dict.fromkeys(_errors(text)))
        verdict = Verdict(
            planned.exists() and not errors, "single" if "enable-auto-multi-buffer to false" in text else "double",
            errors or (() if planned.exists() else (f"no plan, exit status {done.returncode}",)),
        )  # fmt: skip
        shutil.rmtree(temporaries, ignore_errors=True)
        source.unlink()
        aside = kept.with_suffix(".tmp")
        aside.write_text(json.dumps({"ok": verdict.ok, "buffers": verdict.buffers, "errors": verdict.errors}))
        aside.replace(kept)
        return verdict

    def library(self, ir: Path) -> Path:
        """A shared library of this machine that runs the IR.

        Raises:
            CheckError: a stage refuses it.
        """
        library = ir.with_suffix(".so")
        if library.exists():
            return library
        host, lowered, code = ir.with_suffix(".host.mlir"), ir.with_suffix(".llvm.mlir"), ir.with_suffix(".o")
        host.write_text(for_the_host(ir.read_text()))
        _run([str(self.environment.binaries / "bishengir-opt"), *LOWERING, str(host), "-o", str(lowered)])
        triple = f"{platform.machine()}-unknown-linux-gnu"
        self._ask({"do": "object", "source": str(lowered), "triple": triple, "out": str(code)})
        made = ir.with_suffix(".so.tmp")
        _run(["gcc", "-O2", "-fPIC", "-shared", "-Wl,--wrap=malloc,--wrap=free", str(code), str(HERE / "runtime.c"),
              "-lm", "-o", str(made)])  # fmt: skip
        made.rename(library)
        for path in (host, lowered, code):
            path.unlink()
        return library

    def _ask(self, request: dict[str, Any]) -> None:
        with self._turn:
            self._answer(request)

    def _answer(self, request: dict[str, Any]) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                [str(self.environment.python), "-s", str(HERE / "frontend.py")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env={"PYTHONPATH": str(self.environment.packages), "PATH": "/usr/bin:/bin", "PYTHONSAFEPATH": "1"},
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            code, self._process = self._process.wait(), None
            raise CheckError(f"the vendor's Triton ended with status {code} on {request.get('name', request['do'])}")
        found = json.loads(answer)
        if not found["ok"]:
            raise CheckError(found["error"])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckError(f"{Path(command[0]).name} ends with status {done.returncode}: {done.stderr[:1500]}")


def _errors(text: str) -> list[str]:
    """The errors that are not about the closed code generator being absent."""
    found = []
    for line in text.splitlines():
        if "hivmc" in line or "Failed to run BiShengIR pipeline" in line:
            continue
        if (match := re.search(r"error: (.*)", line)) or (match := re.search(r"\[ERROR\] (.*)", line)):
            found.append(match[1].strip())
    return found
