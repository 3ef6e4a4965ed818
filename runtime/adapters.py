"""Adapters (LoRA and its kin) that are not merged: rewriting the weights below them would leave the adapters behind."""

from __future__ import annotations

import os
from typing import Any

from latentscan.ir.errors import RefusedError

CONFIG = "adapter_config.json"  # peft's, in a directory that holds an adapter
_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
REMEDY = (
    "merge them first: model = PeftModel.from_pretrained(base, adapter).merge_and_unload(); model.save_pretrained(...)"
)


def adapter_in(model: Any) -> str | None:
    """Where a model carries unmerged adapters: a module path, the empty string for the whole model, or None.

    peft itself is not needed: its layers hold the original as ``base_layer`` and name what they add in
    ``adapter_layer_names``; ``add_adapter`` of transformers puts such layers into a plain model. Prompt methods and
    wrappers show on the model itself.
    """
    if getattr(model, "peft_config", None) is not None or hasattr(model, "merge_and_unload"):
        return ""
    for path, module in model.named_modules():
        held = {**module._modules, **module._parameters}
        named = getattr(module, "adapter_layer_names", ())
        if "base_layer" in held or any(n in held for n in (*named, *_PARTS)):
            return path
    return None


def refuse_adapters(model: Any) -> None:
    """Raise RefusedError if a model carries unmerged adapters."""
    path = adapter_in(model)
    if path is not None:
        place = f" (the first at {path})" if path else ""
        raise RefusedError(f"it carries unmerged adapters{place}", where=type(model).__name__, remedy=REMEDY)


def refuse_adapter_directory(folder: str | None, text: str) -> None:
    """Raise RefusedError if a directory holds an adapter, alone or beside a model (transformers would load both)."""
    if folder is not None and os.path.isfile(os.path.join(folder, CONFIG)):
        raise RefusedError(f"the directory holds an unmerged adapter ({CONFIG})", where=text, remedy=REMEDY)
