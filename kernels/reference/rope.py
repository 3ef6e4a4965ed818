"""Rotary position embedding in plain torch, term by term as Hugging Face computes it (bitwise equal in one dtype).

``x`` is [B,H,S,D] with ``unsqueeze_dim`` 1, or [B,S,H,D] with 2. ``cos`` and ``sin`` are [B or 1,S,R] as Hugging Face
makes them, the two halves of R holding the same angles; R, even, is the rotary dim: the first R features rotate, the
rest pass.

Layouts:

* ``"half"``: feature i rotates with i + R/2, in place (Llama's ``rotate_half``);
* ``"interleaved"``: feature 2i rotates with 2i + 1, in place (GPT-J, GLM, Cohere);
* ``"interleaved-to-half"``: pairs (2i, 2i + 1) on input, written to i and i + R/2 (DeepSeek-V3's
  ``apply_rotary_pos_emb_interleave``).

The interleaved layouts read the first half of ``cos`` and ``sin``. Products and sums follow torch's type promotion of
``x`` and ``cos`` (bf16 with fp32 tables: computed in fp32) and the result is rounded to ``x``'s dtype once.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Layout = Literal["half", "interleaved", "interleaved-to-half"]
LAYOUTS: tuple[str, ...] = ("half", "interleaved", "interleaved-to-half")


def _tables(cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """cos and sin of the first and of the second half, [B or 1,1,S,R/2] (or [B or 1,S,1,R/2])."""
    half = cos.shape[-1] // 2
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return cos[..., :half], cos[..., half:], sin[..., :half], sin[..., half:]


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, layout: Layout, unsqueeze_dim: int = 1) -> Tensor:
    """Rotate the first ``cos.shape[-1]`` features of ``x``; see the module's text. Returns a tensor like ``x``."""
    rotary = cos.shape[-1]
    half = rotary // 2
    c1, c2, s1, s2 = _tables(cos, sin, unsqueeze_dim)
    if layout == "half":
        x1, x2 = x[..., :half], x[..., half:rotary]
    else:
        x1, x2 = x[..., 0:rotary:2], x[..., 1:rotary:2]
        c2, s2 = c1, s1
    y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    out = torch.stack((y1, y2), -1).flatten(-2) if layout == "interleaved" else torch.cat((y1, y2), -1)
    out = out.to(x.dtype)
    return torch.cat((out, x[..., rotary:]), -1) if rotary < x.shape[-1] else out.contiguous()


def rope_backward(grad: Tensor, cos: Tensor, sin: Tensor, *, layout: Layout, unsqueeze_dim: int = 1) -> Tensor:
    """Gradient of :func:`rope` with respect to ``x`` (the transposed map), for ``grad`` shaped like ``x``."""
    rotary = cos.shape[-1]
    half = rotary // 2
    c1, c2, s1, s2 = _tables(cos, sin, unsqueeze_dim)
    if layout == "interleaved":
        g1, g2 = grad[..., 0:rotary:2], grad[..., 1:rotary:2]
    else:
        g1, g2 = grad[..., :half], grad[..., half:rotary]
    if layout != "half":
        c2, s2 = c1, s1
    d1, d2 = g1 * c1 + g2 * s2, g2 * c2 - g1 * s1
    out = torch.cat((d1, d2), -1) if layout == "half" else torch.stack((d1, d2), -1).flatten(-2)
    out = out.to(grad.dtype)
    return torch.cat((out, grad[..., rotary:]), -1) if rotary < grad.shape[-1] else out.contiguous()
