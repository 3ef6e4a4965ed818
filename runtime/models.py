"""Which models are served."""

from __future__ import annotations

from typing import Any

import torch

from latentscan.ir.errors import RefusedError


def check_model(model: Any) -> None:
    """Raise RefusedError unless ``model`` is a causal language model in plain weights."""
    kind = type(model).__name__
    if not isinstance(model, torch.nn.Module):
        raise RefusedError(f"this is a {kind}, not a model", where="wrap", remedy="give a torch.nn.Module")
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) is None:
        raise RefusedError(
            "it is not a Hugging Face language model (it has no config)",
            where=kind,
            remedy="use torch.compile(model, backend='latentscan') for other modules",
        )
    if getattr(config, "is_encoder_decoder", False):
        raise RefusedError("it is an encoder-decoder model", where=kind, remedy="only causal models are served")
    if not hasattr(model, "generate") or _head(model) is None:
        raise RefusedError("it has no language-model head", where=kind, remedy="load it with AutoModelForCausalLM")
    if hasattr(model, "peft_config") or hasattr(model, "merge_and_unload"):
        raise RefusedError("it carries unmerged adapters", where=kind, remedy="call merge_and_unload() first")
    if next(iter(model.parameters()), None) is None:
        raise RefusedError("it has no parameters", where=kind, remedy="give a model with weights")


def _head(model: Any) -> Any:
    """The module that makes logits, or None."""
    head = getattr(model, "lm_head", None)
    return head if head is not None else model.get_output_embeddings()
