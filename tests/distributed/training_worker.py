"""One rank of training on a mesh, compared with one process. Started as ``python -m`` by :mod:`launch`.

Arguments: rank, world size, rendezvous file, result file, and a JSON list of cases. A case is a dict:

    family, overrides   of the tiny model
    pipeline            what it is wrapped with
    mesh                such as ``dp=2,tp=2``
    parallel            what holds the axis dp together: "ddp", "zero1", "fsdp2", "fsdp3", or nothing
    start, stop         numbers of the first step and of the one after the last; one process begins at 0
    load, save          folders of :func:`load_training` before the first step and :func:`save_training` after the last
    clip                clip gradients to this norm
    export              a folder: save_pretrained there after the last step
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import latentscan
from latentscan.ir.mesh import parse_mesh
from latentscan.runtime.door import session_of
from latentscan.tests.distributed.launch import serve
from latentscan.tests.distributed.worker import gathered, perturbed, worst
from latentscan.tests.models import build
from latentscan.tests.runtime.helpers import tokens

torch.set_num_threads(1)
ROWS, LENGTH = 4, 12


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Four rows of which very different numbers of tokens are trained: a mean of the ranks' means would be another."""
    ids = tokens(ROWS, LENGTH, 100 + step)
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, : 3 * row] = -100
    return {"input_ids": ids, "labels": labels}


def optimizer_for(model: torch.nn.Module, parallel: str, group: Any = None) -> Any:
    if parallel == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=1e-2, eps=1e-4)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)  # eps lest rounding of tiny gradients be lifted


def train_one(case: dict[str, Any]) -> tuple[list[float], list[dict[str, Any]], list[float], torch.nn.Module]:
    """One process: losses, gradients before clipping and their norms of every step."""
    one = perturbed(build(case["family"], **case.get("overrides", {}))).train()
    optimizer = optimizer_for(one, "")
    losses, gradients, norms = [], [], []
    for step in range(case["stop"]):
        optimizer.zero_grad()
        loss = one(**batch_of(step), use_cache=False).loss
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in one.named_parameters()})
        norms.append(float(torch.nn.utils.clip_grad_norm_(one.parameters(), case.get("clip", 1e9))))
        optimizer.step()
    return losses, gradients, norms, one


def run(case: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    wanted, gradients, norms, one = train_one(case)
    planned = parse_mesh(case["mesh"])
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", tuple(a.size for a in planned.axes), mesh_dim_names=tuple(a.name for a in planned.axes)
    )
    parallel = case.get("parallel", "")
    model = perturbed(build(case["family"], **case.get("overrides", {}))).train()
    latentscan.wrap(model, case.get("pipeline", ""), mesh=mesh)
    runner: Any = model
    if parallel in ("ddp", "zero1"):
        runner = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    elif parallel:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=parallel == "fsdp3")
    optimizer = optimizer_for(model, parallel, mesh["dp"].get_group() if parallel == "zero1" else None)
    extra = latentscan.load_training(case["load"], runner, optimizer) if "load" in case else None
    found: dict[str, Any] = {"losses": [], "gradients": [], "norms": [], "extra": extra}
    for step in range(case.get("start", 0), case["stop"]):
        optimizer.zero_grad()
        loss = runner(**latentscan.split_batch(batch_of(step), mesh), use_cache=False).loss
        loss.backward()
        mean = loss.detach().clone()
        if "dp" in mesh.mesh_dim_names:
            dist.all_reduce(mean, group=mesh["dp"].get_group())
            mean /= mesh["dp"].size()
        found["losses"].append(abs(float(mean) - wanted[step]))
        mine = {n: None if p.grad is None else whole(p.grad) for n, p in model.named_parameters()}
        found["gradients"].append(worst(gathered(model, mine), gradients[step]))
        naive = sum(whole(p.grad).square().sum() for p in model.parameters() if p.grad is not None)
        found["naive"] = abs(float(naive) ** 0.5 - norms[step]) / norms[step]  # type: ignore[arg-type]
        norm = float(latentscan.clip_grad_norm_(runner, case.get("clip", 1e9)))
        found["norms"].append(abs(norm - norms[step]) / norms[step])
        optimizer.step()
    mine = gathered(model, {n: whole(p.detach()) for n, p in model.named_parameters()})
    found["weights"] = max(float((mine[n] - p).abs().max()) for n, p in one.named_parameters())
    found["bytes"] = memory(model, optimizer)
    found["bytes_of_one"] = memory(one, optimizer_for(one, "")), sum(p.nbytes for p in one.parameters())
    found["split"] = split_bytes(model)
    if "save" in case:
        latentscan.save_training(case["save"], runner, optimizer, extra={"step": case["stop"]})
    if "export" in case:
        model.save_pretrained(case["export"])  # type: ignore[operator]
        plain = type(one).from_pretrained(case["export"]).state_dict()  # type: ignore[attr-defined]
        found["exported"] = max(float((plain[n] - v).abs().max()) for n, v in one.state_dict().items())
    return found


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_bytes(tensor: Any) -> int:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes


def memory(model: torch.nn.Module, optimizer: Any) -> dict[str, int]:
    """Bytes here of parameters, gradients and the optimiser's state (numbers left out)."""
    states = getattr(optimizer, "optim", optimizer).state
    return {
        "parameters": sum(local_bytes(p) for p in model.parameters()),
        "gradients": sum(local_bytes(p.grad) for p in model.parameters() if p.grad is not None),
        "optimizer": sum(local_bytes(v) for s in states.values() for v in s.values() if v.dim()),
    }


def split_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """Bytes of the weights that ranks of tp hold parts of: of the whole, and of this rank's parts."""
    recipes = [r for r in session_of(model).plan.recipes if r.group]  # type: ignore[union-attr]
    parts = [p for r in recipes for p in r.parts if p.dim is not None]
    total = sum(4 * torch.Size(p.shape).numel() for p in parts)
    return total, sum(4 * torch.Size(p.shape).numel() * len(p.own or ()) // p.shape[p.dim] for p in parts)  # type: ignore


if __name__ == "__main__":
    serve(run)
