"""latentscan: checked graph transformations for long-sequence models.

``wrap`` rewrites and compiles a Hugging Face model, ``torch.compile(model, backend="latentscan")`` is the plain door,
and the ``latentscan`` command plans, dumps and converts. Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "wrap": "latentscan.runtime.wrap",
    "unwrap": "latentscan.runtime.wrap",
    "refresh": "latentscan.runtime.wrap",
    "load": "latentscan.runtime.checkpoint",
    "GraphCache": "latentscan.runtime.cache",
    "split_batch": "latentscan.runtime.batch",
    "clip_grad_norm_": "latentscan.runtime.gradients",
    "save_training": "latentscan.runtime.training_state",
    "load_training": "latentscan.runtime.training_state",
    "attention": "latentscan.ir.ops.functional",
    "latent_attention": "latentscan.ir.ops.functional",
    "chunk_scan": "latentscan.lowering.functional",
    "causal_conv1d": "latentscan.ir.ops.functional",
    "state_update": "latentscan.ir.ops.functional",
    "gated_rms_norm": "latentscan.ir.ops.functional",
    "LatentscanError": "latentscan.ir.errors",
    "CaptureError": "latentscan.ir.errors",
    "PipelineError": "latentscan.ir.errors",
    "RefusedError": "latentscan.ir.errors",
    "VerifyError": "latentscan.ir.errors",
    "NumericsError": "latentscan.ir.errors",
    "MeshError": "latentscan.ir.errors",
    "CacheError": "latentscan.ir.errors",
    "KernelError": "latentscan.ir.errors",
    "CheckpointError": "latentscan.ir.errors",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'latentscan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
