"""Context parallelism on two GPUs: memory, step time beside data parallelism, exposed communication, scaling.

    torchrun --standalone --nproc-per-node 2 -m latentscan.tests.device.context_parallel_device [--inductor]

A Mamba-2 of the 2.7B class, random weights, bf16, an AdamW in fp32 whose states are sharded over all data- and
context-parallel ranks. The gradients of both kinds of rank go through the same reduce-scatter, so what differs between
DP2 x CP1 and DP1 x CP2 is what the sequence's ranks tell each other. Times are medians of steps by CUDA events, of the
slower rank. ``activations`` is the most memory of a forward and backward above what is held between steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from latentscan.runtime.batch import split_batch
from latentscan.runtime.door import session_of
from latentscan.runtime.wrap import wrap
from latentscan.tools.bench_models import builder, config_of
from latentscan.tools.bench_parallel import silence

CP = "mamba-context-parallel{gradients=partial}"
GIB = 1 << 30


class ShardedAdamW:
    """AdamW with fp32 states and master weights, a part of them on each of ``group``'s ranks (all of them if None)."""

    def __init__(self, model: torch.nn.Module, group: Any, scale: float) -> None:
        self.group, self.scale = group, scale
        self.size, self.rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        weights = list(model.parameters())
        count = sum(p.numel() for p in weights)
        padded = count + -count % (64 * self.size)
        like = weights[0]
        self.weights, self.grads = (torch.zeros(padded, dtype=like.dtype, device=like.device) for _ in range(2))
        at = 0
        for p in weights:
            here = slice(at, at + p.numel())
            self.weights[here].copy_(p.detach().flatten())
            p.data = self.weights[here].view(p.shape)
            p.grad = self.grads[here].view(p.shape)
            at += p.numel()
        self.part = slice(self.rank * padded // self.size, (self.rank + 1) * padded // self.size)
        self.master = self.weights[self.part].float()
        self.first, self.second, self.count = torch.zeros_like(self.master), torch.zeros_like(self.master), 0

    def step(self) -> None:
        mine = self.grads[self.part]
        if self.group is not None:
            mine = torch.empty_like(mine)
            dist.reduce_scatter_tensor(mine, self.grads, group=self.group)
        self.count += 1
        grad = mine.float().mul_(self.scale)
        self.first.lerp_(grad, 0.1)
        self.second.lerp_(grad.square_(), 0.05)
        root = self.second.div(1 - 0.95**self.count).sqrt_().add_(1e-8)
        self.master.addcdiv_(self.first, root, value=-1e-4 / (1 - 0.9**self.count))
        if self.group is None:
            self.weights.copy_(self.master)
        else:
            dist.all_gather_into_tensor(self.weights, self.master.to(self.weights.dtype), group=self.group)
        self.grads.zero_()


class Trainer:
    """One model under one kind of parallelism; its compiled graphs serve all lengths."""

    def __init__(self, args: Any, how: str, device: torch.device, *, silent: bool = False) -> None:
        self.how, self.device = how, device
        model = builder(config_of(args.model, args.layers), args.dtype, device)()
        if how == "recompute":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.mesh = None
        group = None if how == "one" else dist.group.WORLD
        self.optimizer = ShardedAdamW(model, group, 1 / dist.get_world_size() if how in ("dp", "recompute") else 1.0)
        if how == "cp":
            from torch.distributed.device_mesh import init_device_mesh

            self.mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
        wrap(model, CP if self.mesh is not None else "", mesh=self.mesh, inductor=args.inductor)
        if silent:
            session = session_of(model)
            assert session is not None
            silence(session)
        self.model, self.vocabulary = model, model.config.vocab_size

    def batch(self, rows: int, length: int, seed: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, self.vocabulary, (rows, length), generator=g).to(self.device)
        whole = {"input_ids": ids, "labels": ids}
        return whole if self.mesh is None else split_batch(whole, self.mesh)

    def run(self, rows: int, length: int, steps: int, seed: int = 0) -> dict[str, float]:
        """Rows and tokens as they are before the mesh's axis cp cuts them; every data-parallel rank has as many."""
        cuda = self.device.type == "cuda"
        times: list[float] = []
        active, total, loss = 0.0, 0.0, torch.zeros(())
        own = seed + (dist.get_rank() if self.how in ("dp", "recompute") else 0)
        given = self.batch(rows, length, own)
        began = time.time()
        for number in range(steps + 2):
            if cuda:
                torch.cuda.synchronize()
                dist.barrier()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
            loss = self.model(**given, use_cache=False).loss
            loss.backward()
            if cuda:
                active = max(active, torch.cuda.max_memory_allocated() - held)
            self.optimizer.step()
            if cuda:
                last.record()
                torch.cuda.synchronize()
                total = max(total, torch.cuda.max_memory_allocated())
                if number >= 2:
                    times.append(first.elapsed_time(last))
        ms = statistics.median(times) if times else 0.0
        worst = torch.tensor([ms, active, total], dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        ms, active, total = worst.tolist()
        return {
            "ms": round(ms, 2), "activations_gib": round(active / GIB, 3), "peak_gib": round(total / GIB, 3),
            "loss": round(float(loss.detach()), 4), "seconds": round(time.time() - began, 1),
            "spread": round((max(times) - min(times)) / ms, 3) if times else 0.0,
        }  # fmt: skip


def parity(args: Any, device: torch.device) -> dict[str, float]:
    """Loss and all gradients of one step, against one process."""
    found = {}
    for dtype in (args.dtype,):
        grads = {}
        for how in ("one", "cp"):
            given = argparse.Namespace(**{**vars(args), "layers": 2, "dtype": dtype, "inductor": False})
            trainer = Trainer(given, how, device)
            loss = trainer.model(**trainer.batch(2, args.check, 7), use_cache=False).loss
            loss.backward()
            flat = trainer.optimizer.grads.float().clone()
            if how == "cp":
                dist.all_reduce(flat)
            count = sum(p.numel() for p in trainer.model.parameters())
            grads[how] = (float(loss.detach()), flat[:count])
            forget(trainer)
        (a, x), (b, y) = grads["one"], grads["cp"]
        name = str(dtype).removeprefix("torch.")
        found[f"loss {name}"] = abs(a - b) / abs(a)
        found[f"gradients {name}"] = float((x - y).norm() / x.norm())
    return found


def forget(trainer: Trainer) -> None:
    del trainer.model, trainer.optimizer
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="mamba2-2.7b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--check", type=int, default=2048, help="tokens of the parity check; 0: none")
    parser.add_argument("--only", default="", help="some of cp,one,dp,silent,recompute")
    parser.add_argument("--lengths", default="8192,16384", help="more lengths for one and two GPUs")
    parser.add_argument("--inductor", action="store_true")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    args.dtype = torch.bfloat16 if cuda else torch.float32
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    ranks, told, began = dist.get_world_size(), {}, time.time()

    def say(name: str, value: Any) -> None:
        told[name] = value
        if dist.get_rank() == 0:
            print(f"{time.time() - began:6.1f} s  {name}: {json.dumps(value)}", flush=True)

    only = set(args.only.split(",")) if args.only else {"cp", "one", "dp", "silent", "recompute"}
    lengths = [int(n) for n in args.lengths.split(",") if n]
    say(
        "case", {k: str(v) for k, v in vars(args).items()} | {"device": torch.cuda.get_device_name() if cuda else "cpu"}
    )
    if args.check:
        say("parity", parity(args, device))
    if "cp" in only:
        trainer = Trainer(args, "cp", device)
        say("cp2 1 x L", trainer.run(1, args.seq, args.steps))
        say("cp2 1 x 2L (weak)", trainer.run(1, ranks * args.seq, args.steps))
        for n in lengths:
            say(f"cp2 1 x {n}", trainer.run(1, n, args.steps))
        say("dp1 cp2 2 x L", trainer.run(ranks, args.seq, args.steps))
        forget(trainer)
    if "silent" in only:
        trainer = Trainer(args, "cp", device, silent=True)
        say("silent 1 x 2L", trainer.run(1, ranks * args.seq, args.steps))
        say("silent 2 x L", trainer.run(ranks, args.seq, args.steps))
        say("silent 1 x L", trainer.run(1, args.seq, args.steps))
        forget(trainer)
    if "one" in only:
        trainer = Trainer(args, "one", device)
        say("cp1 1 x L", trainer.run(1, args.seq, args.steps))
        for n in lengths:
            say(f"cp1 1 x {n}", trainer.run(1, n, args.steps))
        if "dp" in only:  # the same compiled graphs
            trainer.how, trainer.optimizer = "dp", ShardedAdamW(trainer.model, dist.group.WORLD, 1 / ranks)
            say("dp2 cp1 1 x L each", trainer.run(1, args.seq, args.steps))
        forget(trainer)
    if "recompute" in only:
        trainer = Trainer(args, "recompute", device)
        say("dp2 recompute 1 x L each", trainer.run(1, args.seq, args.steps))
        forget(trainer)
    say("summary", summary(told))
    dist.barrier()
    dist.destroy_process_group()


def summary(told: dict[str, Any]) -> dict[str, float]:
    """The bars, as far as they were measured."""

    def of(name: str, key: str) -> float | None:
        return told[name][key] if name in told else None

    found: dict[str, float] = {}

    def compare(name: str, a: tuple[str, str], b: tuple[str, str], text: Any) -> None:
        x, y = of(*a), of(*b)
        if x and y:
            found[name] = round(text(x, y), 4)

    less = lambda x, y: 1 - x / y  # noqa: E731
    compare("activation peak lower", ("cp2 1 x L", "activations_gib"), ("cp1 1 x L", "activations_gib"), less)
    compare("total peak lower", ("cp2 1 x L", "peak_gib"), ("cp1 1 x L", "peak_gib"), less)
    compare("DP1xCP2 / DP2xCP1", ("dp1 cp2 2 x L", "ms"), ("dp2 cp1 1 x L each", "ms"), lambda x, y: x / y)
    compare("exposed 2 x L", ("silent 2 x L", "ms"), ("dp1 cp2 2 x L", "ms"), less)
    compare("exposed 1 x 2L", ("silent 1 x 2L", "ms"), ("cp2 1 x 2L (weak)", "ms"), less)
    compare("exposed 1 x L", ("silent 1 x L", "ms"), ("cp2 1 x L", "ms"), less)
    compare("weak scaling", ("dp2 cp1 1 x L each", "ms"), ("cp2 1 x 2L (weak)", "ms"), lambda x, y: x / y)
    compare("recompute / CP2", ("dp2 recompute 1 x L each", "ms"), ("dp1 cp2 2 x L", "ms"), lambda x, y: x / y)
    return found


if __name__ == "__main__":
    main()
