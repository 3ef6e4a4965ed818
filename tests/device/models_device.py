"""Whole models on a GPU, wrapped and compiled: numbers against the library's eager in fp64, tokens, times, traces.

    PYTHONPATH=<folder that holds latentscan> python3 -m latentscan.tests.device.models_device [--only TEXT]

Every job has its own process; all check side by side, then each takes its times alone. Numbers are relative RMS of the
logits, and of the gradients of each parameter: all together, and the worst one.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

BF16, FP32 = torch.bfloat16, torch.float32
BIG = {"vocab_size": 1024}
MIXER = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_chunk_size": 256}
ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 2}
# name -> family, sizes that differ from the tiny model's
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "mamba2",
        {**BIG, "hidden_size": 1024, "num_hidden_layers": 4, "num_heads": 32, "head_dim": 64, "n_groups": 1,
         "state_size": 128, "chunk_size": 256},
    ),
    "bamba": (
        "bamba",
        {**BIG, **ATTENTION, **MIXER, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3},
    ),
    "nemotron_h": (
        "nemotron_h",
        {**BIG, **ATTENTION, "hidden_size": 512, "head_dim": 64, "mamba_num_heads": 16, "mamba_head_dim": 64,
         "n_groups": 4, "ssm_state_size": 128, "chunk_size": 128, "intermediate_size": 1024},
    ),
    "mamba": (
        "mamba",
        {**BIG, "hidden_size": 512, "num_hidden_layers": 3, "state_size": 16, "time_step_rank": 32},
    ),
}  # fmt: skip
OURS = re.compile(r"[a-z_]+_kernel|_[a-z_]+")  # Inductor's end in a number, the libraries' are longer
TIMED = (2, 4096)  # batch, tokens
TOLERANCE = {FP32: 2e-4, BF16: 1e-2}


def model_of(name: str, dtype: torch.dtype = FP32) -> Any:
    from latentscan.runtime.tiny import build

    family, sizes = MODELS[name]
    return build(family, attn_implementation=None, **sizes).to("cuda", dtype)


def ids_of(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 1024, (batch, length), generator=torch.Generator().manual_seed(seed)).cuda()


def rms(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    return out.logits.detach()


def compare(model: Any, exact: Any, ids: torch.Tensor) -> tuple[float, float, float, str]:
    """Logits; all gradients together; the worst parameter's and its name. ``exact`` has its gradients already."""
    logits = step(model, ids)
    grads = {n: p.grad for n, p in model.named_parameters()}
    want = {n: p.grad for n, p in exact.named_parameters()}
    assert grads.keys() == want.keys()
    assert {n for n, g in grads.items() if g is None} == {n for n, g in want.items() if g is None}
    there = [n for n, g in want.items() if g is not None]
    errors = {n: rms(grads[n], want[n]) for n in there}
    worst = max(errors, key=lambda n: (errors[n] != errors[n], errors[n]))
    total = sum(float((grads[n].double() - want[n]).square().sum()) for n in there) ** 0.5
    total /= sum(float(want[n].square().sum()) for n in there) ** 0.5
    return rms(logits, exact.logits), total, errors[worst], worst


def launches(run: Callable[[], Any]) -> tuple[int, dict[str, int]]:
    """Kernels that a run starts on the device, and ours by name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run()
        torch.cuda.synchronize()
    count, named = 0, {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset")):
            count += 1
            named[event.name] = named.get(event.name, 0) + 1
    return count, named


def milliseconds(run: Callable[[], Any], repeats: int = 7) -> float:
    """Median of eager calls, as a user's training loop has them."""
    run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def traces() -> int:
    """How many graphs Dynamo has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def parity(name: str, dtype: torch.dtype, pipeline: str, say: Callable[[str], None], alone: Callable[[], None]) -> None:
    from latentscan.runtime.door import session_of
    from latentscan.runtime.wrap import wrap

    eager = model_of(name, dtype)
    model = wrap(copy.deepcopy(eager), pipeline)
    model.train(), eager.train()
    exact = copy.deepcopy(eager).double()
    for length in (200, 333, 65):  # two lengths may trace, the third may not
        ids = ids_of(2, length, length)
        exact.logits = step(exact, ids)
        began, before = time.time(), traces()
        logits, total, worst, where = compare(model, exact, ids)
        told = f"L {length}: logits {logits:.1e} gradients {total:.1e} worst {worst:.1e} ({where})"
        theirs = compare(eager, exact, ids)
        told += f"; the library's eager {theirs[0]:.1e} {theirs[1]:.1e} {theirs[2]:.1e}"
        # In the library's own precision, or as near as 16 and 32 bits of mantissa come where its order is another.
        bad = not (logits < max(TOLERANCE[dtype], 1.3 * theirs[0]) and total < max(TOLERANCE[dtype], 1.3 * theirs[1]))
        say(f"{told}; {traces() - before} graphs, {time.time() - began:.1f} s{'  WRONG' if bad else ''}")
    ops = [g.operations for g in session_of(model).graphs]
    say(f"graphs of the session: {len(ops)}; {ops[0][0] if ops else None}")
    if dtype == FP32:
        options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        ids = ids_of(2, 37)
        want, got = eager.eval().generate(ids, **options), model.eval().generate(ids, **options)
        same = int((want == got).all(0).int().cumprod(0).sum()) - 37
        say(f"generate: {same} of 24 tokens equal{'' if same == 24 else '  WRONG'}")
    del exact
    model.train(), eager.train()
    ids = ids_of(*TIMED)
    before = traces()
    step(model, ids)
    if traces() != before:
        say(f"a longer sequence: {traces() - before} more graphs  WRONG")
    alone()
    torch.cuda.empty_cache()
    count, named = launches(lambda: step(model, ids))
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    ms = milliseconds(lambda: step(model, ids))
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20
    ours = [f"{k.removesuffix('_kernel')} {v}" for k, v in sorted(named.items()) if OURS.fullmatch(k)]
    say(f"step {TIMED[0]} x {TIMED[1]}: {ms:.2f} ms, {peak:.0f} MiB, {count} launches, of which {', '.join(ours)}")


def plain_door(name: str, say: Callable[[str], None], alone: Callable[[], None]) -> None:
    """``torch.compile(model, backend="latentscan")`` with changing lengths."""
    from latentscan.runtime.backend import latentscan

    eager = model_of(name)
    compiled = torch.compile(copy.deepcopy(eager), backend=latentscan, options={"pipeline": "fuse-mamba"})
    for length in (64, 100, 333, 57, 1024):
        ids = ids_of(2, length, length)
        before, breaks = traces(), sum(torch._dynamo.utils.counters["graph_break"].values())
        logits = step(compiled, ids)
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values()) - breaks
        with torch.no_grad():
            error = rms(logits, eager(input_ids=ids, use_cache=False).logits)
        say(f"L {length}: logits {error:.1e}, {traces() - before} graphs, {breaks} breaks")


def bench_generate(name: str, say: Callable[[str], None], alone: Callable[[], None]) -> None:
    """The command, on a random model of 8 layers of width 2048; one run before it fills the caches."""
    from latentscan.runtime.tiny import tiny_config

    sizes = {"hidden_size": 2048, "num_hidden_layers": 8, "vocab_size": 8192}
    more = (
        MODELS[name][1] | sizes | {"num_heads": 64}
        if name == "mamba2"
        else {**sizes, "state_size": 16, "time_step_rank": 128}
    )
    with tempfile.TemporaryDirectory() as folder:
        tiny_config(name, **more).save_pretrained(folder)
        command = [
            sys.executable,
            "-m",
            "latentscan",
            "bench",
            "generate",
            f"{folder}/config.json",
            "--dtype",
            "bfloat16",
        ]
        command += ["--prompt", "2048", "--new", "32", "--batch", "4", "--pipeline", "fuse-mamba"]
        began = time.time()
        done = subprocess.run(command, capture_output=True, text=True)
        say(f"warm-up {time.time() - began:.0f} s, exit {done.returncode}; beside other jobs:")
        for line in done.stdout.strip().splitlines():
            say(line)
        if done.returncode:
            say(f"FAILED {done.stderr.strip()[-300:]}")
            return
        alone()
        done = subprocess.run(command, capture_output=True, text=True)
        for line in done.stdout.strip().splitlines():
            say(line)


def own_tiles(say: Callable[[str], None], alone: Callable[[], None]) -> None:
    """``wrap(model, tiles=FILE)``: a table of portable tiles takes the place of the shipped choice, in both passes."""
    from latentscan.kernels.triton.chunk_configs import Backward, Forward
    from latentscan.kernels.triton.chunk_tuning import Row, Table, device_name
    from latentscan.runtime.wrap import wrap

    eager = model_of("mamba2", BF16).train()
    exact = copy.deepcopy(eager).double()
    sizes, ids = MODELS["mamba2"][1], ids_of(2, 1024)
    shape = (sizes["num_heads"], sizes["head_dim"], sizes["n_groups"], sizes["state_size"])
    choices = (("forward", Forward(segments=4)), ("backward", Backward(heads=4)))
    rows = [Row(way, device_name(ids.device), "bfloat16", shape, ids.numel(), c, 1.0) for way, c in choices]
    exact.logits = step(exact, ids)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tiles.json"
        file.write_text(Table(tuple(rows)).text())
        for told, path in (("shipped", None), ("a table", file)):
            model = wrap(copy.deepcopy(eager), "fuse-mamba", tiles=path)
            logits, total, _, _ = compare(model, exact, ids)
            named = launches(lambda: step(model, ids))[1]  # noqa: B023
            kernels = ("output_gluon_kernel", "output_kernel", "pulls_kernel", "walk_kernel")
            seen = ", ".join(f"{k.removesuffix('_kernel')} {named.get(k, 0)}" for k in kernels)
            say(f"tiles {told}: logits {logits:.1e} gradients {total:.1e}; {seen}")


def mixer(say: Callable[[str], None], alone: Callable[[], None]) -> None:
    from latentscan.tests.device import mamba_device

    alone()
    mamba_device.mixer_times()


JOBS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "mamba2 fp32 fused": (parity, ("mamba2", FP32, "fuse-mamba")),
    "mamba2 bf16 fused": (parity, ("mamba2", BF16, "fuse-mamba")),
    "mamba2 bf16": (parity, ("mamba2", BF16, "")),
    "bamba fp32 fused": (parity, ("bamba", FP32, "fuse-mamba")),
    "nemotron_h fp32 fused": (parity, ("nemotron_h", FP32, "fuse-mamba")),
    "mamba fp32": (parity, ("mamba", FP32, "fuse-mamba")),
    "mamba bf16": (parity, ("mamba", BF16, "fuse-mamba")),
    "torch.compile mamba2": (plain_door, ("mamba2",)),
    "tiles": (own_tiles, ()),
    "mixer": (mixer, ()),
    "generate mamba2": (bench_generate, ("mamba2",)),
    "generate mamba": (bench_generate, ("mamba",)),
}


def worker(name: str, lock: str) -> None:
    torch._dynamo.config.automatic_dynamic_shapes = True
    began = time.time()
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_SH)

        def alone() -> None:
            fcntl.flock(file, fcntl.LOCK_UN)
            fcntl.flock(file, fcntl.LOCK_EX)

        def say(line: str) -> None:
            print(f"{name:24s} {line}", flush=True)

        function, args = JOBS[name]
        try:
            function(*args, say, alone)
        except Exception as error:  # noqa: BLE001  told; the other jobs still count
            import traceback

            text = " ".join(str(error).split())
            say(f"FAILED {type(error).__name__}: {text[:900]}")
            print("".join(traceback.format_tb(error.__traceback__)[-4:]), file=sys.stderr)
            sys.exit(1)
        say(f"[{time.time() - began:.0f} s]")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="jobs whose name holds one of these texts, a,b")
    parser.add_argument("--limit", type=float, default=110.0, help="seconds of wall time")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("models_device: no CUDA device")
    if args.worker:
        worker(*json.loads(args.worker))
        return
    began = time.time()
    names = [n for n in JOBS if any(text in n for text in args.only.split(","))]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "3",
        "OMP_NUM_THREADS": "2",
        "TORCH_LOGS": "recompiles",
    }
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "lock"
        lock.touch()
        running = []
        for name in names:
            command = [sys.executable, "-m", "latentscan.tests.device.models_device"]
            command += ["--worker", json.dumps([name, str(lock)])]
            log = (Path(folder) / name.replace(" ", "_")).open("w+")
            running.append((name, log, subprocess.Popen(command, stderr=log, env=environment)))  # lines come at once
        for name, log, process in running:
            try:
                process.wait(timeout=max(0.1, args.limit - (time.time() - began)))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                print(f"{name}: stopped after {args.limit:.0f} s")
            log.seek(0)
            lines = [x for x in log.read().splitlines() if x.strip()]
            why = [x.split("[__recompiles]")[1].strip() for x in lines if "[__recompiles]     - " in x]
            for x in why:
                if re.match(r"- \d+/\d+:", x):
                    print(f"{name:24s} traced anew: {x[:160]}")
            if process.returncode:
                print(*[f"    {x[:200]}" for x in lines if "recompiles" not in x][-14:], sep="\n", flush=True)
    print(f"[{time.time() - began:.0f} s]")


if __name__ == "__main__":
    main()
