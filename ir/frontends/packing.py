"""Which packed sequence each token of the traced call belongs to.

Not every model hands ``seq_idx`` on to its mixers (the language model class of Mamba-2 drops it), and attention layers
are told of packing in other words. So a call with packed sequences is traced inside :func:`packed_forward`, and the
replacements of the library's functions read ``CURRENT``. It is set and reset by the traced code itself: outside a trace
it is always empty.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class _Current:
    segments: Tensor | None = None  # [b, L] integers that change where a new sequence starts


CURRENT = _Current()


def packed_forward(self: nn.Module, latentscan_segments: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward of a model, with packed sequences."""
    CURRENT.segments = latentscan_segments
    try:
        return type(self).forward(self, *args, **kwargs)
    finally:
        CURRENT.segments = None


def jumping_positions(segments: Tensor) -> Tensor:
    """[b, L] positions that do not follow on where a new sequence starts; see ``packing_mask``."""
    return segments.long() + torch.arange(segments.shape[1], device=segments.device)


def recurrent_mixers(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that mix tokens other than by attention: those that own a depthwise convolution over tokens."""
    found = {}
    for path, module in model.named_modules():
        children = [c for c in module.children() if isinstance(c, nn.Conv1d)]
        if any(c.groups == c.in_channels and c.groups > 1 for c in children):
            found[path] = module
    return found


def knows_packing(mixer: nn.Module) -> bool:
    """Whether the mixer's convolution and scan become ops of ours, which can be told where sequences start."""
    from latentscan.ir.frontends.huggingface_ssm import is_substituted

    name = type(mixer).__module__
    module = sys.modules.get(name) or importlib.import_module(name)
    return all(is_substituted(module, function) for function in ("causal_conv1d_fn", "mamba2_chunk_scan"))
