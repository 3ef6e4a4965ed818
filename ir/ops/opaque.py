"""``only_if``: a value or zeros, so that no compiler sees which.

A closed ring is masked at its wrong end, on one rank alone. A compiler that knows a value to be zeros takes it for one
that needs no gradient: Inductor put the backward's exchange of such zeros into the forward graph, on that rank alone,
and the ranks waited for each other.
"""

from __future__ import annotations

import torch

from latentscan.ir.ops.base import Cost, define


def _only_if(x: torch.Tensor, here: bool) -> torch.Tensor:
    return (
        x.clone(memory_format=torch.contiguous_format)
        if here
        else torch.zeros_like(x, memory_format=torch.contiguous_format)
    )


only_if = define(
    "only_if(Tensor x, bool here) -> Tensor",
    reference=_only_if,
    fake=lambda x, here: torch.empty_like(x, memory_format=torch.contiguous_format),
    cost=lambda x, here: Cost(),
    axes={"x": ("...",), "out": ("...",)},
    tags=(torch.Tag.pt2_compliant_tag,),
).op
