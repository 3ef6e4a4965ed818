"""Token-sparse latent attention in plain torch: each query attends to the keys that an index names, and to no other.

Shapes (B batch, H heads, S queries, T keys, C latent, R rotary features, K chosen keys per query):

    sparse_latent_attention  q_latent [B,H,S,C], q_rope [B,H,S,R], latent [B,T,C], k_rope [B,1,T,R], indices [B,S,K]
                             -> [B,H,S,C]

``indices`` are positions in 0..T-1, distinct within a query. ``allowed`` [B,S,K], bool, hides chosen keys (a causal
query that sees fewer than K keys is given hidden ones as well). A query that sees nothing gives zeros, and zero
gradients. Scores, softmax and sums are fp32 for 16-bit inputs and in the inputs' dtype otherwise. Only the chosen rows
are read: memory [B,S,K,C + R], work 2 B H S K (2 C + R).

Definition: DeepSeek-V3.2 (sparse attention over the top-k tokens of an indexer), with MLA in its absorbed form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latentscan.kernels.reference.attention import accumulation_dtype


def chosen(rows: Tensor, indices: Tensor) -> Tensor:
    """Rows [B,T,D] at ``indices`` [B,S,K] -> [B,S,K,D]."""
    batch, keys, width = rows.shape
    first = torch.arange(batch, device=rows.device).view(-1, 1, 1) * keys
    return rows.reshape(batch * keys, width)[indices.long() + first]


def scattered(grads: Tensor, indices: Tensor, keys: int) -> Tensor:
    """The transpose of :func:`chosen`: grads [B,S,K,D] summed into [B,T,D]."""
    batch, width = grads.shape[0], grads.shape[3]
    first = torch.arange(batch, device=grads.device).view(-1, 1, 1) * keys
    out = grads.new_zeros(batch * keys, width)
    return out.index_add(0, (indices.long() + first).flatten(), grads.reshape(-1, width)).view(batch, keys, width)


def _probabilities(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Softmax over K of scores [B,H,S,K]; zeros where nothing is seen."""
    if allowed is None:
        return torch.softmax(scores, -1)
    seen = allowed[:, None]
    p = torch.softmax(scores.masked_fill(~seen, torch.finfo(scores.dtype).min), -1)
    return torch.where(seen, p, torch.zeros_like(p))


def sparse_probabilities(
    q_latent: Tensor,
    q_rope: Tensor | None,
    latent: Tensor,
    k_rope: Tensor | None,
    indices: Tensor,
    allowed: Tensor | None = None,
    *,
    scale: float,
) -> Tensor:
    """The attention's probabilities on the chosen keys, [B,H,S,K] in the accumulation dtype."""
    acc = accumulation_dtype(q_latent.dtype)
    scores = torch.einsum("bhsc,bskc->bhsk", q_latent.to(acc), chosen(latent, indices).to(acc))
    if q_rope is not None and k_rope is not None:
        scores = scores + torch.einsum("bhsr,bskr->bhsk", q_rope.to(acc), chosen(k_rope[:, 0], indices).to(acc))
    return _probabilities(scores * scale, allowed)


def sparse_latent_attention(
    q_latent: Tensor,
    q_rope: Tensor | None,
    latent: Tensor,
    k_rope: Tensor | None,
    indices: Tensor,
    allowed: Tensor | None = None,
    *,
    scale: float,
) -> Tensor:
    """Attention of every query over its chosen keys. Returns [B,H,S,C]."""
    p = sparse_probabilities(q_latent, q_rope, latent, k_rope, indices, allowed, scale=scale)
    out = torch.einsum("bhsk,bskc->bhsc", p, chosen(latent, indices).to(p.dtype))
    return out.to(q_latent.dtype).contiguous()


def sparse_latent_attention_backward(
    grad: Tensor,
    q_latent: Tensor,
    q_rope: Tensor | None,
    latent: Tensor,
    k_rope: Tensor | None,
    indices: Tensor,
    allowed: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq_latent, dq_rope, dlatent, dk_rope for ``grad`` [B,H,S,C]; an empty [0] tensor for one that does not exist."""
    acc, keys = accumulation_dtype(q_latent.dtype), latent.shape[1]
    grad_, rows = grad.to(acc), chosen(latent, indices).to(acc)
    p = sparse_probabilities(q_latent, q_rope, latent, k_rope, indices, allowed, scale=scale)
    dp = torch.einsum("bhsc,bskc->bhsk", grad_, rows)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    dq = torch.einsum("bhsk,bskc->bhsc", ds, rows)
    drows = torch.einsum("bhsk,bhsc->bskc", p, grad_) + torch.einsum("bhsk,bhsc->bskc", ds, q_latent.to(acc))
    dlatent = scattered(drows, indices, keys)
    if q_rope is None or k_rope is None:
        dqr = dkr = p.new_empty(0)
    else:
        dqr = torch.einsum("bhsk,bskr->bhsr", ds, chosen(k_rope[:, 0], indices).to(acc)).to(q_rope.dtype)
        dkr = torch.einsum("bhsk,bhsr->bskr", ds, q_rope.to(acc))
        dkr = scattered(dkr, indices, keys)[:, None].to(k_rope.dtype)
    return dq.to(q_latent.dtype).contiguous(), dqr, dlatent.to(latent.dtype), dkr
