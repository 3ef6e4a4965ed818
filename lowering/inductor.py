"""What Inductor is told wherever it compiles a graph of ours."""

from __future__ import annotations

from typing import Any


def inductor_options() -> dict[str, Any]:
    """How Inductor compiles a graph of any length.

    It would fuse reductions over rows and columns where the tensor is large, and so guard on how large: the first long
    sequence would be compiled anew.
    """
    import torch._inductor.config as config

    return {"triton.mix_order_reduction": False} if hasattr(config.triton, "mix_order_reduction") else {}
