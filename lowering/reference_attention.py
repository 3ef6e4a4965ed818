"""The attention ops on the reference target: plain torch at good speed, open to autograd, AOTAutograd and Inductor.

Both functions take the arguments of their canonical op (:mod:`latentscan.ir.ops.attention`; shapes and semantics in
:mod:`latentscan.kernels.reference.attention`) and two booleans that the caller decides, because comparing symbolic
lengths here would add guards:

* ``square``: S == T on every run of the graph (prefill without a cache, training);
* ``single``: S == 1 on every run (decoding one token).

Leaving both False is always right, and costs a bool mask; setting one wrongly gives wrong results (KernelError where
the sizes are known).

Measured on one CPU core, torch 2.13: SDPA with ``enable_gqa`` is right and never slower than repeated heads (fp32 and
bf16), for a single query it is up to 12x slower in bf16 than one matrix of the group's queries, and unequal head dims
leave the fused kernel, so that padding the smaller one with zeros is up to 1.5x faster and keeps memory linear.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional

from latentscan.ir.errors import KernelError
from latentscan.kernels.reference.attention import Kind, accumulation_dtype, hidden_by_bias, visible

# Devices that have autocast (torch 2.11's Dynamo cannot trace torch.amp.is_autocast_available).
_AUTOCAST = ("cpu", "cuda", "npu", "xpu")


def attention_sdpa(
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
    square: bool = False,
    single: bool = False,
) -> Tensor:
    """``attention``: q [B,H,S,Dk], k [B,Hkv,T,Dk], v [B,Hkv,T,Dv] -> [B,H,S,Dv].

    By SDPA, or explicitly (scores [B,H,S,T] held whole) where there is a softcap or sinks. The result has the strides
    that SDPA gives, often those of a transposed [B,S,H,Dv]: ``reshape`` it, do not ``view`` it.

    Raises:
        KernelError: ``square`` or ``single`` contradicts sizes that are known.
    """
    _check_flags("attention_sdpa", q.shape[2], k.shape[2], square, single)
    kind = "full" if single else kind  # the only query is the last one: it sees every key
    q, k, v = _autocast(q, k, v)
    with _without_autocast(q.device):
        if square and kind == "causal" and window is None and padding is None and mask is None and cu_seqlens is None:
            if softcap is None and sinks is None:
                return _sdpa(q, k, v, None, True, scale, single)
        allowed = visible(
            q.shape[2],
            k.shape[2],
            q.device,
            kind=kind,
            window=window,
            padding=padding,
            mask=mask,
            cu_seqlens=cu_seqlens,
        )
        additive = mask if mask is not None and mask.is_floating_point() else None
        # A GPU's SDPA takes an additive mask of another dtype, and gives garbage (seen: torch 2.11, fp32 mask on bf16).
        mixed = additive is not None and additive.dtype != q.dtype and q.device.type != "cpu"
        if softcap is not None or sinks is not None or mixed:
            return _explicit(q, k, v, allowed, mask, sinks, scale, softcap)
        alive = None
        if allowed is not None and q.device.type != "cpu":
            # Not every GPU kernel gives zeros for a query that sees nothing: let it see all keys, and drop the result.
            alive = allowed.any(-1, keepdim=True)
            allowed = allowed | ~alive
        if additive is not None and allowed is not None:
            addend = additive if additive.dtype == q.dtype else additive.to(accumulation_dtype(q.dtype))
            allowed = torch.where(allowed, addend.masked_fill(hidden_by_bias(additive), 0), -torch.inf)
        out = _sdpa(q, k, v, allowed, False, scale, single)
        return out if alive is None else out.masked_fill(~alive, 0)


def latent_attention_torch(
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
    square: bool = False,
    single: bool = False,
) -> Tensor:
    """``latent_attention``: q_latent [B,H,S,C], q_rope [B,H,S,R], latent [B,T,C], k_rope [B,G,T,R] -> [B,H,S,C].

    The latent is never repeated per head: all heads' queries are rows of one matrix. Softmax, and the sums for 16-bit
    inputs, are fp32; the scores [B,H,S,T] are held whole.

    Raises:
        KernelError: ``square`` or ``single`` contradicts sizes that are known.
    """
    _check_flags("latent_attention_torch", q_latent.shape[2], latent.shape[1], square, single)
    kind = "full" if single else kind
    q_latent, latent = _autocast(q_latent, latent)
    with _without_autocast(q_latent.device):
        acc = accumulation_dtype(q_latent.dtype)
        batch, heads, q_len, width = q_latent.shape
        kv_len = latent.shape[1]
        rows, keys = q_latent.to(acc).reshape(batch, heads * q_len, width), latent.to(acc)
        if q_rope is not None and k_rope is not None:
            q_rope, k_rope = q_rope.to(q_latent.dtype).to(acc), k_rope.to(q_latent.dtype).to(acc)
            groups = k_rope.shape[1]
            rotary = torch.matmul(
                q_rope.reshape(batch, groups, heads // groups * q_len, q_rope.shape[3]), k_rope.transpose(2, 3)
            )
            rotary = rotary.reshape(batch, heads * q_len, kv_len)
            scores = torch.baddbmm(rotary, rows, keys.transpose(1, 2), beta=scale, alpha=scale)
        else:
            scores = torch.bmm(rows * scale, keys.transpose(1, 2))
        allowed = visible(
            q_len,
            kv_len,
            latent.device,
            kind=kind,
            window=window,
            padding=padding,
            mask=mask,
            cu_seqlens=cu_seqlens,
        )
        p, weight = _softmax(scores.reshape(batch, heads, q_len, kv_len), allowed, mask, sinks, softcap)
        out = torch.bmm(p.reshape(batch, heads * q_len, kv_len), keys).reshape(batch, heads, q_len, width)
        return (out if weight is None else out * weight).to(q_latent.dtype)


def _check_flags(where: str, q_len: int, kv_len: int, square: bool, single: bool) -> None:
    """Raise KernelError if a flag contradicts sizes that are plain ints."""
    if single and type(q_len) is int and q_len != 1:
        raise KernelError(f"single=True with {q_len} queries", where=where, remedy="leave it False")
    if square and type(q_len) is int and type(kv_len) is int and q_len != kv_len:
        raise KernelError(f"square=True with {q_len} queries, {kv_len} keys", where=where, remedy="leave it False")


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the autocast dtype where autocast is on, as the canonical ops cast them (fp64 stays)."""
    device = tensors[0].device.type
    if device not in _AUTOCAST or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off inside: it would cast fp32 scores and the additive mask."""
    if device.type in _AUTOCAST and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float, single: bool) -> Tensor:
    """SDPA with grouped heads and any head dims; a query that sees nothing gives zeros on CPUs."""
    batch, heads, q_len, qk_dim = q.shape
    groups, v_dim = k.shape[1], v.shape[3]
    packed = single and heads != groups
    if packed:  # the queries of a group as rows of one matrix
        q = q.reshape(batch, groups, heads // groups, qk_dim)
        if bias is not None and bias.dim() == 4 and bias.shape[1] != 1:
            bias = bias.reshape(bias.shape[0], groups, heads // groups, bias.shape[3])
        is_causal = False
    if q.device.type == "cpu" and qk_dim != v_dim:  # the fused CPU kernel wants one head dim; zeros change nothing
        if qk_dim > v_dim:
            v = functional.pad(v, (0, qk_dim - v_dim))
        else:
            q, k = functional.pad(q, (0, v_dim - qk_dim)), functional.pad(k, (0, v_dim - qk_dim))
    shared = False
    if not packed and heads != groups:  # a symbol's comparison is no bool, which the call wants
        shared = True
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=is_causal, scale=scale, enable_gqa=shared
    )
    if out.shape[3] != v_dim:
        out = out[..., :v_dim]
    return out.reshape(batch, heads, q_len, v_dim) if packed else out


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention by two matmuls, heads grouped, in fp32 (fp64 for fp64)."""
    acc = accumulation_dtype(q.dtype)
    batch, heads, q_len, dim = q.shape
    groups, kv_len, v_dim = k.shape[1], k.shape[2], v.shape[3]
    rows = heads // groups * q_len
    scores = torch.matmul((q.to(acc) * scale).reshape(batch, groups, rows, dim), k.to(acc).transpose(2, 3))
    p, weight = _softmax(scores.reshape(batch, heads, q_len, kv_len), allowed, mask, sinks, softcap)
    out = torch.matmul(p.reshape(batch, groups, rows, kv_len), v.to(acc)).reshape(batch, heads, q_len, v_dim)
    return (out if weight is None else out * weight).to(q.dtype)


def _softmax(
    scores: Tensor, allowed: Tensor | None, mask: Tensor | None, sinks: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Softmax over the keys of scaled scores [B,H,S,T], and a factor for the output, broadcastable to [B,H,S,1].

    The factor is the keys' share of the softmax with sinks, and zero for a query that sees nothing (whose probabilities
    are uniform here, so that neither they nor their gradients are NaN). None stands for one.
    """
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.to(scores.dtype).masked_fill(hidden_by_bias(mask), 0)
    weight = None
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weight = allowed.any(-1, keepdim=True).to(scores.dtype)
    if sinks is not None:
        share = torch.sigmoid(torch.logsumexp(scores, -1, keepdim=True) - sinks.to(scores.dtype).view(1, -1, 1, 1))
        weight = share if weight is None else share * weight
    return torch.softmax(scores, -1), weight
