"""Attention by loops over batch, head, query and key, from the definition: what the attention tests compare with.

Shares no code with latentscan. Also draws random cases for hypothesis.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor


def sees(i: int, j: int, q_len: int, kv_len: int, kind: str, window: int | None) -> bool:
    """Whether query i sees key j, lengths aligned at their ends."""
    position = i + kv_len - q_len
    return not ((kind == "causal" and j > position) or (window is not None and j <= position - window))


def sequence_of(token: int, cu_seqlens: list[int]) -> int | None:
    """The packed sequence that holds a token, None if none does."""
    for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens)):
        if start <= token < end:
            return n
    return None


def loop_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    padding: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    kind: str,
    window: int | None = None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """q [B,H,S,Dk], k [B,Hkv,T,Dk], v [B,Hkv,T,Dv] -> [B,H,S,Dv], differentiable, one query at a time."""
    batch, heads, q_len, _ = q.shape
    groups, kv_len = k.shape[1], k.shape[2]
    dense = None if mask is None else mask.expand(batch, heads, q_len, kv_len)
    packed = None if cu_seqlens is None else [sequence_of(t, cu_seqlens.tolist()) for t in range(kv_len)]
    rows = []
    for b in range(batch):
        for h in range(heads):
            kv = h * groups // heads
            for i in range(q_len):
                logits, values = [], []
                for j in range(kv_len):
                    ok = sees(i, j, q_len, kv_len, kind, window)
                    ok = ok and (padding is None or bool(padding[b, j]))
                    ok = ok and (packed is None or (packed[i] is not None and packed[i] == packed[j]))
                    if dense is not None and ok:
                        entry = dense[b, h, i, j]
                        ok = bool(entry) if dense.dtype == torch.bool else bool(entry > torch.finfo(dense.dtype).min)
                    if not ok:
                        continue
                    x = (q[b, h, i] * k[b, kv, j]).sum() * scale
                    if softcap is not None:
                        x = softcap * torch.tanh(x / softcap)
                    if dense is not None and dense.dtype != torch.bool:
                        x = x + dense[b, h, i, j].to(x.dtype)
                    logits.append(x)
                    values.append(v[b, kv, j])
                if not logits:
                    rows.append(0 * v[b, kv, 0])
                    continue
                if sinks is not None:
                    logits.append(sinks[h].to(q.dtype))
                p = torch.softmax(torch.stack(logits), 0)[: len(values)]
                rows.append((p[:, None] * torch.stack(values)).sum(0))
    return torch.stack(rows).reshape(batch, heads, q_len, v.shape[3])


def loop_latent_attention(
    q_latent: Tensor, q_rope: Tensor | None, latent: Tensor, k_rope: Tensor | None, *structure: Any, **options: Any
) -> Tensor:
    """The absorbed form by definition: every head attends to keys [latent | its k_rope] with the latent as value."""
    heads = q_latent.shape[1]
    v = latent[:, None].repeat(1, heads, 1, 1)
    if q_rope is None or k_rope is None:
        return loop_attention(q_latent, v, v, *structure, **options)
    rotary = k_rope.repeat_interleave(heads // k_rope.shape[1], 1)
    return loop_attention(torch.cat((q_latent, q_rope), -1), torch.cat((v, rotary), -1), v, *structure, **options)


@dataclass
class Case:
    """One random call: the tensors before the structure, mask, padding, sinks, cu_seqlens, and the options."""

    tensors: tuple[Tensor | None, ...]
    structure: tuple[Tensor | None, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def leaves(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Fresh leaves that want gradients (in order), and all arguments with them in place."""
        arguments = [
            x.clone().requires_grad_() if x is not None and x.is_floating_point() else x
            for x in (*self.tensors, *self.structure)
        ]
        return [x for x in arguments if x is not None and x.requires_grad], arguments


@st.composite
def cases(draw: Any, *, latent: bool) -> Case:
    """Small fp64 cases over batch, heads, groups, ragged lengths (also S > T) and every kind of structure."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    batch, groups, per = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads, q_len, kv_len = groups * per, draw(st.integers(1, 5)), draw(st.integers(1, 6))
    dk, dv = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    cu_seqlens = None
    if draw(st.integers(0, 3)) == 0:
        batch, q_len = 1, kv_len
        cuts = sorted(draw(st.lists(st.integers(0, kv_len), min_size=2, max_size=4)))
        cu_seqlens = torch.tensor(cuts, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    padding = None
    if draw(st.booleans()):
        padding = torch.randint(0, 2, (batch, kv_len), generator=g).to(draw(st.sampled_from([torch.bool, torch.int64])))
    mask = None
    what = draw(st.sampled_from(["none", "none", "bool", "float"]))
    shape = (draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), q_len, kv_len)
    if what == "bool":
        mask = torch.rand(shape, generator=g) < 0.7
    elif what == "float":
        mask = randn(*shape).masked_fill(torch.rand(shape, generator=g) < 0.2, torch.finfo(torch.float64).min)
        mask = mask.masked_fill(torch.rand(shape, generator=g) < 0.2, -math.inf)
    options = {
        "kind": draw(st.sampled_from(["causal", "full"])),
        "window": draw(st.sampled_from([None, None, 1, 2, 3, 9])),
        "scale": draw(st.sampled_from([0.3, 1.0])),
        "softcap": draw(st.sampled_from([None, None, 1.5])),
    }
    sinks = randn(heads) if draw(st.booleans()) else None
    tensors: tuple[Tensor | None, ...]
    if latent:
        rope = draw(st.sampled_from([0, 1, groups]))
        rotary = (randn(batch, heads, q_len, dv), randn(batch, rope, kv_len, dv)) if rope else (None, None)
        tensors = (randn(batch, heads, q_len, dk), rotary[0], randn(batch, kv_len, dk), rotary[1])
    else:
        tensors = (
            randn(batch, heads, q_len, dk),
            randn(batch, groups, kv_len, dk),
            randn(batch, groups, kv_len, dv),
        )
    return Case(tensors, (mask, padding, sinks, cu_seqlens), options)


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of a fixed random projection of ``out``; zeros for a leaf that it does not depend on."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(out.dtype)
    return list(torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True, materialize_grads=True))
