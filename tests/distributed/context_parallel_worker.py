"""One rank of a context-parallel training run, compared with one process; started as torchrun does.

    python -m latentscan.tests.distributed.context_parallel_worker FAMILY OUT [packed] [pad] [mask] [double] [drop=N] ..

Writes what differs to OUT (json) on rank 0. ``pad`` trains on rows that the ranks do not divide, ``mask`` gives an
attention mask, ``double`` computes in fp64. ``drop=N`` leaves one kind of collective out: a sabotage. ``set`` changes
the tiny model's configuration. A mesh with ``dp`` wraps the model in DistributedDataParallel, two rows a rank.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from latentscan.ir.mesh import parse_mesh
from latentscan.ir.ops import collectives, exchange, state_exchange
from latentscan.runtime.batch import IGNORED, shifted, split_batch
from latentscan.runtime.door import session_of
from latentscan.runtime.wrap import wrap
from latentscan.tests.models import build

STEPS, BATCH, LENGTH = 5, 2, 24


def batches(
    vocabulary: int, packed: bool, length: int = LENGTH, mask: bool = False, rows: int = BATCH
) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(5)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(3, vocabulary, (rows, length), generator=g)
        labels = ids.masked_fill(torch.rand(rows, length, generator=g) < 0.2, -100)
        batch = {"input_ids": ids, "labels": labels}
        if mask:
            batch["attention_mask"] = torch.ones_like(ids)
        if packed:
            starts = torch.rand(rows, length, generator=g) < 0.2
            starts[0, length // dist.get_world_size()] = True  # exactly at a shard's edge
            batch["seq_idx"] = starts.int().cumsum(1).int()
        found.append(batch)
    return found


def whole(model: torch.nn.Module, grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients by their original names, of whole weights. Communicates."""
    session = session_of(model)
    assert session is not None
    for recipe in reversed(session.plan.recipes):
        if any(t not in grads for t in recipe.targets):  # of a buffer
            continue
        made = recipe.inverse(*[grads.pop(t) for t in recipe.targets])  # type: ignore[misc]
        grads.update(zip(recipe.sources, made, strict=True))
    return grads


def apart(model: torch.nn.Module) -> Any:
    """The definition of packing: every sequence of a row in a call of its own."""

    def call(input_ids: Any, labels: Any, seq_idx: Any, **kwargs: Any) -> Any:
        moved = shifted(labels, seq_idx)
        count, total = (moved != IGNORED).sum(), 0.0
        for ids, row_labels, row in zip(input_ids, moved, seq_idx, strict=True):
            for number in row.unique():
                mine = row == number
                given = {"input_ids": ids[mine][None], "shift_labels": row_labels[mine][None]}
                out = model(**given, labels=given["shift_labels"], num_items_in_batch=count, **kwargs)
                total = total + out.loss
        out.loss = total
        return out

    return call


def train(
    model: torch.nn.Module, call: Any, given: list[dict[str, Any]]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the steps, and all gradients of the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in given:
        optimizer.zero_grad()
        loss = call(**batch, use_cache=False).loss
        loss.backward()
        losses.append(float(loss.detach()))
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, grads


def main() -> None:
    family, out, *words = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    dropped = next((w.removeprefix("drop=") for w in words if w.startswith("drop=")), "")
    if dropped:
        sabotage(dropped)
    changed = json.loads(next((w.removeprefix("set=") for w in words if w.startswith("set=")), "{}"))
    one, many = build(family, **changed).train(), build(family, **changed).train()
    if "double" in words:
        one, many = one.double(), many.double()
    pad = "pad" in words
    mesh: Any = next((w.removeprefix("mesh=") for w in words if w.startswith("mesh=")), f"cp={size}")
    rows = BATCH * parse_mesh(mesh).axis("dp").size
    given = batches(one.config.vocab_size, "packed" in words, LENGTH - pad, "mask" in words, rows)
    want, want_grads = train(one, apart(one) if "packed" in words else one, given)
    pipeline = next((w.removeprefix("pipeline=") for w in words if w.startswith("pipeline=")), "mamba-context-parallel")
    call: Any = many
    if "dp" in mesh:
        sizes = dict(part.split("=") for part in mesh.split(","))
        mesh = init_device_mesh("cpu", tuple(map(int, sizes.values())), mesh_dim_names=tuple(sizes))
        wrap(many, pipeline, mesh=mesh)
        call = DistributedDataParallel(many, process_group=mesh["dp"].get_group())
    else:
        wrap(many, pipeline, mesh=mesh)
    got, grads = train(many, call, [split_batch(b, mesh, pad=pad) for b in given])
    if call is not many:  # each is the mean over its own rows, weighted by their tokens
        losses = torch.tensor(got)
        dist.all_reduce(losses, group=mesh["dp"].get_group())
        got = (losses / mesh["dp"].size()).tolist()
    known = {id(p): n for n, p in one.named_parameters()}  # weights that layers share have several names
    names = {n: known[id(p)] for n, p in one.named_parameters(remove_duplicate=False)}
    grads = {names.get(n, n): g for n, g in whole(many, grads).items()}
    # A gradient near zero is a sum that cancels: its rounding counts against 1e-6 of the largest gradient at least.
    floor = 1e-6 * max(float(g.norm()) for g in want_grads.values())
    worst = {n: float((grads[n] - g).norm() / max(float(g.norm()), floor)) for n, g in want_grads.items()}
    told = {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True)),
        "gradient": max(worst.values()), "where": max(worst, key=worst.get),
        "names": sorted(grads) == sorted(want_grads),
    }  # fmt: skip
    every: list[Any] = [None] * size
    dist.all_gather_object(every, told)
    if rank == 0:
        with open(out, "w") as file:
            json.dump(every, file)
    dist.barrier()
    dist.destroy_process_group()


def sabotage(name: str) -> None:
    """Let one kind of collective do nothing but its local part."""
    if name == "copy_to":
        collectives.sum_over = lambda x, group: x
    elif name == "sum_partial":
        exchange.sum_over = lambda x, group: x
    elif name == "tail":
        exchange.ring = lambda x, step, size, rank, group: exchange._OPS.all_reduce(x.reshape(-1) * 0, "sum", group)
    elif name == "state":
        state_exchange.goes_on = lambda ids, rank: 1
        forward = state_exchange._forward
        state_exchange._forward = lambda messages, upto, start, head_dim: forward(messages, 0, start, head_dim)
        state_exchange._back = lambda decays, into, rank, last, *, initial: [None] * (len(decays) + initial)


if __name__ == "__main__":
    main()
