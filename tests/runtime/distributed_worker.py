"""Two processes train a wrapped model; rank 0 writes what it saw. Started as ``python -m`` by test_distributed_wrap.

Arguments: mode, rank, world size, rendezvous file, result file.
"""

from __future__ import annotations

import copy
import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from latentscan.ir.errors import LatentscanError
from latentscan.runtime.backend import latentscan
from latentscan.runtime.door import session_of
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import distance, in_original_names, tokens

PIPELINE = "mla-mm-split,mla-absorb"
STEPS = 3


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def parallel(mode: str, model: nn.Module, world: int) -> nn.Module:
    if mode in ("ddp", "ddp-unsynchronised"):
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    if mode == "fsdp-layers":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
    if mode == "fsdp-only-layers":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return model
    fully_shard(model, mesh=mesh)
    return model


def train(mode: str, rank: int, world: int) -> dict[str, Any]:
    model, eager = wrap(build("deepseek_v3").train(), PIPELINE), build("deepseek_v3").train()
    runner = parallel(mode, model, world)
    ids = tokens(2 * world, 13)
    mine = ids[rank::world]
    optimizer = torch.optim.AdamW(runner.parameters(), lr=1e-3)
    reference = torch.optim.AdamW(eager.parameters(), lr=1e-3)
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        reference.zero_grad()
        if mode == "ddp-unsynchronised" and step == 0:
            with runner.no_sync():  # type: ignore[operator]
                loss = runner(input_ids=mine, labels=mine, use_cache=False).loss
                loss.backward()
        else:
            loss = runner(input_ids=mine, labels=mine, use_cache=False).loss
            loss.backward()
        want = eager(input_ids=ids, labels=ids, use_cache=False).loss
        want.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(abs(float(mean / world - want.detach())))
        found = in_original_names(model, {n: whole(p.grad) for n, p in model.named_parameters()})
        gradients.append(max(distance(found[n], p.grad) for n, p in eager.named_parameters() if p.grad is not None))
        if mode == "ddp-unsynchronised":
            break
        optimizer.step()
        reference.step()
    result: dict[str, Any] = {"losses": losses, "gradients": gradients}
    state = model.state_dict()
    result["names"] = sorted(state.keys() - eager.state_dict().keys())
    full = in_original_names(model, {n: whole(v) for n, v in state.items()})
    result["same_names"] = full.keys() == eager.state_dict().keys()
    result["weights"] = max(distance(full[n], v) for n, v in eager.state_dict().items())
    if mode == "fsdp":
        missing = model.load_state_dict({n: v.clone() for n, v in state.items()})
        result["loads"] = not missing.missing_keys and not missing.unexpected_keys
    with torch.no_grad():
        model.eval()
        eager.eval()
        result["eval"] = distance(model(ids, use_cache=False).logits, eager(ids, use_cache=False).logits)
    result["graphs"] = len(session_of(model).graphs)  # type: ignore[union-attr]
    return result


def plain_door(split: bool) -> dict[str, Any]:
    """DDP around a module compiled by the plain backend."""
    model = build("deepseek_v3").train()
    eager = copy.deepcopy(model)
    runner = nn.parallel.DistributedDataParallel(model)
    compiled = torch.compile(runner, backend=latentscan, options={"pipeline": PIPELINE})
    ids = tokens(2, 13)
    with torch._dynamo.config.patch(optimize_ddp=split):
        loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    eager(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {
        "gradients": max(distance(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True)
                         if q.grad is not None)
    }  # fmt: skip


def main() -> None:
    mode, rank, world, rendezvous, result = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6]
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    try:
        found = plain_door(mode == "plain-split") if mode.startswith("plain") else train(mode, rank, world)
    except LatentscanError as error:
        found = {"error": type(error).__name__, "text": str(error)}
    if rank == 0:
        with open(result, "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
