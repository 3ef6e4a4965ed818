"""Gradients of a model whose weights are spread over ranks: the norm of all of them, and clipping to it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from latentscan.ir.errors import RefusedError
from latentscan.runtime.door import session_of
from latentscan.runtime.mesh import group_of


def clip_grad_norm_(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients of a wrapped model so that the 2-norm of all of them together is at most ``max_norm``.

    What ``torch.nn.utils.clip_grad_norm_`` does in one process: ranks of ``tp`` each know the gradients of their parts,
    and of weights that all of them hold, which count once. Gradients that ``fully_shard`` has cut are summed up over
    its ranks. Every rank calls it, after the backward pass.

    Args:
        model: wrapped; DistributedDataParallel may be around it.
        max_norm: more than 0.

    Returns:
        the norm before clipping (fp32, or fp64 for gradients in fp64), the same on every rank.

    Raises:
        RefusedError: the model is not wrapped.
    """
    model = getattr(model, "module", model) if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    session = session_of(model)
    if session is None:
        raise RefusedError(
            "the model is not wrapped", where=type(model).__name__, remedy="use torch.nn.utils.clip_grad_norm_"
        )
    axis = None if session.mesh is None else session.mesh.axis("tp")
    parts = {t: p for r in session.plan.recipes if r.group for t, p in zip(r.targets, r.parts, strict=False)}
    sums: dict[Any, torch.Tensor] = {}  # squares, by the mesh that a gradient is sharded over
    gradients, widest = [], torch.float32
    for path, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        if gradient is None:
            continue
        part = parts.get(path)
        mesh = gradient.device_mesh if hasattr(gradient, "device_mesh") else None
        local = gradient.to_local() if mesh is not None else gradient
        gradients.append(local)
        wide = torch.float64 if local.dtype == torch.float64 else torch.float32
        values = local.detach().to(wide)
        widest = wide if wide == torch.float64 else widest
        if part is not None and part.dim is not None:
            values = values * _counted(part, gradient, values).to(wide)
        elif part is None and axis is not None and axis.rank > 0:
            continue  # the first rank counts what all hold
        sums[mesh] = sums.get(mesh, values.new_zeros(())) + values.square().sum()
    first = next(iter(gradients), torch.zeros(()))
    total = torch.zeros((), dtype=widest, device=first.device)
    for mesh in _meshes(model):
        mine = sums.get(mesh, torch.zeros_like(total)).to(widest)
        if mesh is not None:
            dist.all_reduce(mine, group=mesh.get_group())
        total = total + mine
    if axis is not None and axis.size > 1:
        dist.all_reduce(total, group=group_of(axis))
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for local in gradients:
        local.mul_(scale.to(local.dtype))
    return norm


def _meshes(model: torch.nn.Module) -> list[Any]:
    """The meshes that gradients are sharded over, in the same order on every rank; None for those that are not."""
    found: list[Any] = []
    for parameter in model.parameters():
        mesh = getattr(parameter.grad, "device_mesh", None)
        if parameter.grad is not None and mesh not in found:
            found.append(mesh)
    return found


def _counted(part: Any, gradient: Any, values: torch.Tensor) -> torch.Tensor:
    """1 for indices that this rank is the first to hold, 0 for the others, along the part's dimension."""
    before = {i for held in part.held[: part.rank] for i in held}
    mine = torch.tensor([float(i not in before) for i in part.held[part.rank]], device=values.device)
    if part.dim == 0 and hasattr(gradient, "__create_chunk_list__") and values.shape[0] != mine.numel():
        start = gradient.__create_chunk_list__()[0].offsets[0] if values.numel() else 0
        mine = mine[start : start + values.shape[0]]
    return mine.reshape([-1 if d == part.dim else 1 for d in range(values.dim())])


__all__ = ["clip_grad_norm_"]
