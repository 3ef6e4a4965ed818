"""Attention and latent attention in plain torch: the reference of the canonical ops, and in fp64 their oracle.

Shapes (B batch, H query heads, Hkv key/value heads with ``H % Hkv == 0``, S queries, T keys, Dk/Dv head dims, C latent,
R rotary features, G = 1 or Hkv heads of the rotary key):

    attention         q [B,H,S,Dk], k [B,Hkv,T,Dk], v [B,Hkv,T,Dv] -> [B,H,S,Dv]
    latent_attention  q_latent [B,H,S,C], q_rope [B,H,S,R], latent [B,T,C], k_rope [B,G,T,R] -> [B,H,S,C]

Which key a query sees is the conjunction of

* ``kind``: ``"causal"``, aligned bottom-right (query i sees key j iff ``j <= i + T - S``: the last query sees every
  key), or ``"full"``;
* ``window`` W: ``j > i + T - S - W``, a lower bound only, for both kinds;
* ``padding`` [B,T], bool or int: nonzero marks a real token;
* ``cu_seqlens`` [N+1], batch 1 and S == T: only keys of the query's own sequence. Tokens outside
  ``[cu_seqlens[0], cu_seqlens[-1])`` belong to no sequence: they see nothing and nobody sees them;
* ``mask``, broadcastable to [B,H,S,T]: bool (True = attend), or floating and added to the scores. A floating entry at
  or below the smallest finite number of its dtype (that is how libraries write "masked") hides the key altogether.

``softcap`` c replaces the scaled score x by ``c * tanh(x / c)`` before any mask. ``sinks`` [H] adds one logit per head
to the softmax's denominator; it has no value, so the probabilities sum to less than one. Scores, softmax and sums are
fp32 for 16-bit inputs and in the inputs' dtype otherwise; results have the dtype of the query (gradients: of their
tensor).

A query that sees nothing gives zeros, and zero gradients. Hugging Face's eager attention gives the mean of all values
there: it adds the smallest finite number to every score, which leaves them equal. So the rows of left padding differ
from eager attention (logits by tenths of their size); no other token sees these rows, and valid rows agree.

All functions are differentiable by ordinary autograd and return fresh, contiguous tensors. The ``*_backward``
functions are the explicit gradients, which recompute the probabilities.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["causal", "full"]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores, softmax and sums are computed: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def alignment(q_len: int, kv_len: int) -> int:
    """Position of query 0 on the key axis: the last query stands at the last key (bottom-right alignment)."""
    return kv_len - q_len


def hidden_by_bias(mask: Tensor) -> Tensor:
    """Where a floating additive mask means "masked": at or below its dtype's smallest finite number, same shape."""
    return mask <= torch.finfo(mask.dtype).min


def visible(
    q_len: int,
    kv_len: int,
    device: torch.device,
    *,
    kind: Kind,
    window: int | None = None,
    padding: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor | None:
    """Which key each query sees: a bool tensor broadcastable to [B,H,S,T] with True = attend, or None if all do.

    ``mask`` may be bool or floating (see the module's text for what is hidden then). Adds no guard on symbolic lengths.
    """
    terms: list[Tensor] = []
    if kind == "causal" or window is not None:
        queries = torch.arange(q_len, device=device)[:, None] + alignment(q_len, kv_len)
        keys = torch.arange(kv_len, device=device)[None, :]
        if kind == "causal":
            terms.append((keys <= queries)[None, None])
        if window is not None:
            terms.append((keys > queries - window)[None, None])
    if cu_seqlens is not None:
        keys = torch.arange(kv_len, device=device)
        number = torch.searchsorted(cu_seqlens.to(torch.int64), keys, right=True)
        inside = (number > 0) & (number < cu_seqlens.shape[0])
        terms.append(((number[:, None] == number[None, :]) & inside[:, None])[None, None])
    if padding is not None:
        terms.append((padding != 0)[:, None, None, :])
    if mask is not None:
        terms.append(mask if mask.dtype == torch.bool else ~hidden_by_bias(mask))
    if not terms:
        return None
    allowed = terms[0]
    for term in terms[1:]:
        allowed = allowed & term
    return allowed


def causal_mask(
    like: Tensor,
    padding: Tensor | None,
    batch: int,
    q_len: int,
    kv_len: int,
    window: int | None,
    *,
    additive: bool,
) -> Tensor:
    """The dense form of the causal structured mask, [B,1,S,T] on ``like``'s device.

    Returns:
        bool (True = attend), or with ``additive`` floating in ``like``'s dtype: 0, or the dtype's smallest number.
    """
    allowed = visible(q_len, kv_len, like.device, kind="causal", window=window, padding=padding)
    assert allowed is not None
    allowed = allowed.expand(batch, 1, q_len, kv_len).contiguous()
    if not additive:
        return allowed
    zeros = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
    return zeros.masked_fill(~allowed, torch.finfo(like.dtype).min)


def _probabilities(
    scores: Tensor, allowed: Tensor | None, mask: Tensor | None, sinks: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Softmax of scaled scores [B,H,S,T].

    Returns:
        probabilities [B,H,S,T]; the sinks' share [B,H,S,1] or None; the softcap's slope d(capped)/d(score) or None.
    """
    slope = None
    if softcap is not None:
        unit = torch.tanh(scores / softcap)
        slope = 1 - unit * unit
        scores = softcap * unit
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.to(scores.dtype).masked_fill(hidden_by_bias(mask), 0)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    top = scores.detach().amax(-1, keepdim=True)
    extra = None
    if sinks is not None:
        extra = sinks.to(scores.dtype).view(1, -1, 1, 1)
        top = torch.maximum(top, extra.detach())
    top = top.masked_fill(top == -torch.inf, 0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    share = None
    if extra is not None:
        share = torch.exp(extra - top)
        total = total + share
    total = total.masked_fill(total == 0, 1)
    return weights / total, None if share is None else share / total, slope


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[B,H,S,D] -> [B,groups,(H/groups)*S,D]: queries that share a key head become rows of one matrix."""
    batch, heads, length, dim = x.shape
    return x.reshape(batch, groups, heads // groups * length, dim)


def _score(q: Tensor, k: Tensor) -> Tensor:
    """q [B,H,S,D], k [B,G,T,D] -> unscaled scores [B,H,S,T], without repeating k per head."""
    batch, heads, length, _ = q.shape
    return torch.matmul(_grouped(q, k.shape[1]), k.transpose(2, 3)).reshape(batch, heads, length, k.shape[2])


def _weigh(p: Tensor, v: Tensor) -> Tensor:
    """p [B,H,S,T], v [B,G,T,D] -> sum over keys [B,H,S,D], without repeating v per head."""
    batch, heads, length, _ = p.shape
    return torch.matmul(_grouped(p, v.shape[1]), v).reshape(batch, heads, length, v.shape[3])


def _gather(p: Tensor, x: Tensor, groups: int) -> Tensor:
    """Transposed: p [B,H,S,T], x [B,H,S,D] -> sum over queries and over the heads of a group [B,groups,T,D]."""
    return torch.matmul(_grouped(p, groups).transpose(2, 3), _grouped(x, groups))


def _softmax_backward(
    dp: Tensor,
    p: Tensor,
    share: Tensor | None,
    slope: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """From d(probabilities) to d(scaled scores) [B,H,S,T], d(mask) and d(sinks) (empty where there is none)."""
    delta = (p * dp).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    if mask_grad and mask is not None:
        dmask = ds.sum_to_size(mask.shape).to(mask.dtype).clone(memory_format=torch.contiguous_format)
    else:
        dmask = p.new_empty(0)
    if sinks is not None and share is not None:
        dsinks = -(share * delta).sum((0, 2, 3)).to(sinks.dtype)
    else:
        dsinks = p.new_empty(0)
    return ds if slope is None else ds * slope, dmask, dsinks


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    padding: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    kind: Kind,
    window: int | None = None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Softmax attention with grouped heads; shapes and semantics as in the module's text. Returns [B,H,S,Dv]."""
    acc = accumulation_dtype(q.dtype)
    allowed = visible(
        q.shape[2], k.shape[2], q.device, kind=kind, window=window, padding=padding, mask=mask, cu_seqlens=cu_seqlens
    )
    p, _, _ = _probabilities(_score(q.to(acc), k.to(acc)) * scale, allowed, mask, sinks, softcap)
    return _weigh(p, v.to(acc)).to(q.dtype).contiguous()


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    padding: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    kind: Kind,
    window: int | None = None,
    scale: float,
    softcap: float | None = None,
    mask_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`attention` for ``grad`` [B,H,S,Dv].

    Returns:
        dq, dk, dv like q, k, v; dmask like mask if ``mask_grad`` (then mask is floating); dsinks like sinks. An empty
        [0] tensor stands for one that does not exist.
    """
    acc, groups = accumulation_dtype(q.dtype), k.shape[1]
    grad_, q_, k_, v_ = (x.to(acc) for x in (grad, q, k, v))
    allowed = visible(
        q.shape[2], k.shape[2], q.device, kind=kind, window=window, padding=padding, mask=mask, cu_seqlens=cu_seqlens
    )
    p, share, slope = _probabilities(_score(q_, k_) * scale, allowed, mask, sinks, softcap)
    dv = _gather(p, grad_, groups)
    ds, dmask, dsinks = _softmax_backward(_score(grad_, v_), p, share, slope, mask, sinks, mask_grad)
    ds = ds * scale
    dq, dk = _weigh(ds, k_), _gather(ds, q_, groups)
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous(), dmask, dsinks


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor | None,
    latent: Tensor,
    k_rope: Tensor | None,
    mask: Tensor | None = None,
    padding: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    kind: Kind,
    window: int | None = None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Absorbed attention: keys ``[latent | k_rope]``, value ``latent``, both shared by all heads. Returns [B,H,S,C].

    ``q_rope`` and ``k_rope`` are given together or not at all.
    """
    acc = accumulation_dtype(q_latent.dtype)
    keys = latent.to(acc)[:, None]
    scores = _score(q_latent.to(acc), keys)
    if q_rope is not None and k_rope is not None:
        scores = scores + _score(q_rope.to(acc), k_rope.to(acc))
    allowed = visible(
        q_latent.shape[2],
        latent.shape[1],
        latent.device,
        kind=kind,
        window=window,
        padding=padding,
        mask=mask,
        cu_seqlens=cu_seqlens,
    )
    p, _, _ = _probabilities(scores * scale, allowed, mask, sinks, softcap)
    return _weigh(p, keys).to(q_latent.dtype).contiguous()


def latent_attention_backward(
    grad: Tensor,
    q_latent: Tensor,
    q_rope: Tensor | None,
    latent: Tensor,
    k_rope: Tensor | None,
    mask: Tensor | None = None,
    padding: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    kind: Kind,
    window: int | None = None,
    scale: float,
    softcap: float | None = None,
    mask_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`latent_attention` for ``grad`` [B,H,S,C].

    Returns:
        dq_latent, dq_rope, dlatent, dk_rope, dmask, dsinks; an empty [0] tensor stands for one that does not exist.
    """
    acc = accumulation_dtype(q_latent.dtype)
    grad_, q_, keys = grad.to(acc), q_latent.to(acc), latent.to(acc)[:, None]
    scores = _score(q_, keys)
    if q_rope is not None and k_rope is not None:
        scores = scores + _score(q_rope.to(acc), k_rope.to(acc))
    allowed = visible(
        q_latent.shape[2],
        latent.shape[1],
        latent.device,
        kind=kind,
        window=window,
        padding=padding,
        mask=mask,
        cu_seqlens=cu_seqlens,
    )
    p, share, slope = _probabilities(scores * scale, allowed, mask, sinks, softcap)
    ds, dmask, dsinks = _softmax_backward(_score(grad_, keys), p, share, slope, mask, sinks, mask_grad)
    ds = ds * scale
    dq_latent = _weigh(ds, keys).to(q_latent.dtype).contiguous()
    dlatent = (_gather(p, grad_, 1) + _gather(ds, q_, 1))[:, 0].to(latent.dtype).contiguous()
    if q_rope is not None and k_rope is not None:
        dq_rope = _weigh(ds, k_rope.to(acc)).to(q_rope.dtype).contiguous()
        dk_rope = _gather(ds, q_rope.to(acc), k_rope.shape[1]).to(k_rope.dtype).contiguous()
    else:
        dq_rope, dk_rope = p.new_empty(0), p.new_empty(0)
    return dq_latent, dq_rope, dlatent, dk_rope, dmask, dsinks
