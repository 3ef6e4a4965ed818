"""Train a causal language model on several processes: data, tensor and context parallelism, and going on after a stop.

    torchrun --nproc-per-node 4 examples/train_parallel.py MODEL --mesh dp=2,tp=2 --data text.txt --out run

MODEL is a directory of safetensors files, of which each rank reads its part, or tiny:FAMILY. Weights are kept in
fp32 and computed with in bfloat16 (autocast). The same command goes on from the last state in OUT, and so does one with
another mesh. At the end OUT/model holds the whole model as transformers reads it.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import latentscan
from latentscan.runtime.source import resolve


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory, or tiny:FAMILY")
    parser.add_argument("--mesh", default="tp=2", help="axes dp, tp, cp: dp=2,tp=2")
    parser.add_argument("--pipeline", default="tensor-parallel", help="passes; for cp: mamba-context-parallel, ulysses")
    parser.add_argument("--data-parallel", choices=("ddp", "fsdp"), default="ddp", help="what holds dp together")
    parser.add_argument("--data", default=__file__, help="a text file")
    parser.add_argument("--out", type=Path, required=True, help="states, losses.jsonl, and the model at the end")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="rows of all ranks together")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="norm of all gradients")
    parser.add_argument("--save-every", type=int, default=5)
    return parser.parse_args()


def make_mesh(text: str) -> Any:
    """A DeviceMesh with named axes, over all processes that torchrun started."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    axes = dict(part.split("=") for part in text.split(","))
    return init_device_mesh("cuda" if cuda else "cpu", tuple(map(int, axes.values())), mesh_dim_names=tuple(axes))


def make_model(given: argparse.Namespace, mesh: Any) -> torch.nn.Module:
    """The wrapped model, in fp32. Of a directory only this rank's part is ever read."""
    source = resolve(given.model)
    if source.folder is None:
        model = source.load().to(mesh.device_type).train()
        return latentscan.wrap(model, given.pipeline, mesh=mesh)
    model = source.on_meta().float().train()
    return latentscan.wrap(model, given.pipeline, mesh=mesh, weights=source.folder)


def read_tokens(given: argparse.Namespace, vocabulary: int) -> torch.Tensor:
    """The text as token ids; its bytes if the model has no tokenizer."""
    text = Path(given.data).read_text(encoding="utf-8")
    if not (Path(given.model) / "tokenizer_config.json").is_file():
        return torch.tensor(list(text.encode())) % vocabulary
    from transformers import AutoTokenizer

    return torch.tensor(AutoTokenizer.from_pretrained(given.model)(text)["input_ids"])


def batch_at(tokens: torch.Tensor, step: int, given: argparse.Namespace, device: str) -> dict[str, torch.Tensor]:
    """The batch of a step, the same on every rank and after every start."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(tokens) - given.length, (given.batch,), generator=draw)
    ids = torch.stack([tokens[s : s + given.length] for s in starts.tolist()]).to(device)
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    given = arguments()
    mesh = make_mesh(given.mesh)
    device, first = mesh.device_type, dist.get_rank() == 0
    model = make_model(given, mesh)
    runner: Any = model
    if "dp" in mesh.mesh_dim_names:
        if given.data_parallel == "fsdp":
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=mesh["dp"])
        else:
            runner = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)  # after wrap: it holds this rank's weights
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=given.steps)
    tokens = read_tokens(given, model.config.vocab_size)
    state, start = given.out / "state", 0
    if (state / "latentscan-training.json").is_file():
        extra = latentscan.load_training(state, runner, optimizer)
        start = extra["step"]
        scheduler.load_state_dict(extra["scheduler"])
    for step in range(start, given.steps):
        batch = latentscan.split_batch(batch_at(tokens, step, given, device), mesh)
        with torch.autocast(device, torch.bfloat16):
            loss = runner(**batch, use_cache=False).loss
        loss.backward()
        norm = latentscan.clip_grad_norm_(runner, given.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if "dp" in mesh.mesh_dim_names:
            dist.all_reduce(mean, group=mesh["dp"].get_group())
            mean /= mesh["dp"].size()
        if first:
            line = json.dumps({"step": step, "loss": float(mean), "norm": float(norm)})
            print(line, flush=True)
            given.out.mkdir(parents=True, exist_ok=True)
            with open(given.out / "losses.jsonl", "a", encoding="utf-8") as file:
                file.write(line + "\n")
        if (step + 1) % given.save_every == 0 or step + 1 == given.steps:
            extra = {"step": step + 1, "scheduler": scheduler.state_dict()}
            latentscan.save_training(state, runner, optimizer, extra=extra)
    model.save_pretrained(given.out / "model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
