"""Attention by torch_npu's fused operators, where they are present and compute what is asked.

Signatures are those of torch_npu's public documentation. They have not been run: no NPU was there. The tests compare
what is handed over with a stand-in that computes by the definition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latentscan.kernels.triton_ascend import latent_decode
from latentscan.kernels.triton_ascend.tiles import DEFAULT_CHIP
from latentscan.lowering.npu import vendor
from latentscan.lowering.reference_attention import attention_sdpa, latent_attention_torch

MLA_WIDTHS = (512, 64)  # latent and rotary part that the fused decode operator takes
CAUSAL = 3  # sparse_mode: the last query sees every key
MASK_SIZE = 2048  # of the compressed mask that this mode reads


def serves(q: Tensor, *structure: Any) -> bool:
    """Whether a fused operator computes such an attention: 16-bit, and causal or full without further structure."""
    return all(value is None for value in structure) and q.dtype in (torch.float16, torch.bfloat16)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, padding: Tensor | None = None,
    sinks: Tensor | None = None, cu_seqlens: Tensor | None = None, *, kind: Any, scale: float,
    window: int | None = None, softcap: float | None = None, square: bool = False, single: bool = False,
) -> Tensor:  # fmt: skip
    """The canonical attention, by npu_fusion_attention if it is present and serves the call."""
    module = vendor()
    served = q.shape[-1] == v.shape[-1] and serves(q, mask, padding, sinks, cu_seqlens, window, softcap)
    if not (served and hasattr(module, "npu_fusion_attention")):
        return attention_sdpa(
            q, k, v, mask, padding, sinks, cu_seqlens, kind=kind, scale=scale, window=window, softcap=softcap,
            square=square, single=single,
        )  # fmt: skip
    causal = kind == "causal" and q.shape[2] > 1
    extra: dict[str, Any] = {}
    if causal:
        hidden = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=q.device).triu(1)
        extra = {"sparse_mode": CAUSAL, "atten_mask": hidden}
    return module.npu_fusion_attention(q, k, v, q.shape[1], "BNSD", scale=scale, **extra)[0]


def latent_attention(
    q_latent: Tensor, q_rope: Tensor | None, latent: Tensor, k_rope: Tensor | None, mask: Tensor | None = None,
    padding: Tensor | None = None, sinks: Tensor | None = None, cu_seqlens: Tensor | None = None, *, kind: Any,
    scale: float, window: int | None = None, softcap: float | None = None, chip: str = DEFAULT_CHIP,
) -> Tensor:  # fmt: skip
    """The canonical latent attention: one query token by the vendor's operator or our kernel, else plain torch."""
    one = q_rope is not None and k_rope is not None and q_latent.shape[2] == 1
    if one and serves(q_latent, mask, sinks, cu_seqlens, window, softcap):
        assert q_rope is not None and k_rope is not None
        module, widths = vendor(), (latent.shape[2], k_rope.shape[3])
        fused = hasattr(module, "npu_fused_infer_attention_score") and widths == MLA_WIDTHS
        if fused and padding is None and k_rope.shape[1] == 1:
            keys = latent[:, None]
            return module.npu_fused_infer_attention_score(
                q_latent, keys, keys, query_rope=q_rope, key_rope=k_rope, num_heads=q_latent.shape[1],
                num_key_value_heads=1, input_layout="BNSD", scale=scale,
            )[0]  # fmt: skip
        if latent_decode.refusal(q_latent, q_rope, latent, k_rope, chip) is None:
            return latent_decode.latent_decode(q_latent, q_rope, latent, k_rope, padding, scale=scale, chip=chip)
    return latent_attention_torch(
        q_latent, q_rope, latent, k_rope, mask, padding, sinks, cu_seqlens, kind=kind, window=window, scale=scale,
        softcap=softcap,
    )  # fmt: skip
