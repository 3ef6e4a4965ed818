"""Model classes for ``bench parallel``: the shapes of public models, filled with random weights, at any depth."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from latentscan.ir.errors import PipelineError
from latentscan.runtime.source import resolve
from latentscan.runtime.tiny import choose_experts

_NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_BLOCKS = {"M": "mamba", "-": "mlp", "*": "attention"}
# name -> (model type, configuration)
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-7b": (
        "llama",
        {
            "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 131072,
        },
    ),
    "mamba2-2.7b": (
        "mamba2",
        {
            "hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "head_dim": 64, "expand": 2, "n_groups": 1,
            "state_size": 128, "chunk_size": 256, "vocab_size": 50288,
        },
    ),
    "nemotron-h-8b": (
        "nemotron_h",
        {
            "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
            "chunk_size": 128, "vocab_size": 131072, "max_position_embeddings": 131072,
            "layers_block_type": [_BLOCKS[c] for c in _NEMOTRON],
        },
    ),
}  # fmt: skip


def config_of(text: str, layers: int | None) -> Any:
    """The configuration of a class above, or of any model that the command takes, with its first ``layers`` layers.

    Raises:
        PipelineError: more layers than there are. CheckpointError: no such model.
    """
    if text not in CLASSES:
        source = resolve(text)
        source.on_meta()  # checks the kind of model
        return cut(source.config, layers)
    from transformers import AutoConfig

    kind, given = CLASSES[text]
    given = dict(given)
    blocks = given.get("layers_block_type")
    if blocks and layers:
        given["layers_block_type"] = blocks[:layers]
    config = AutoConfig.for_model(kind, **given)
    return config if blocks else cut(config, layers)


def cut(config: Any, layers: int | None) -> Any:
    """A configuration with its first layers only."""
    if layers is None:
        return config
    there = config.num_hidden_layers
    if layers > there:
        raise PipelineError(f"the model has {there} layers, not {layers}", remedy=f"give at most {there}")
    for name in ("layers_block_type", "layer_types"):
        if isinstance(getattr(config, name, None), list):
            with contextlib.suppress(AttributeError):  # of some classes it is made from the number of layers
                setattr(config, name, getattr(config, name)[:layers])
    if config.num_hidden_layers != layers:
        config.num_hidden_layers = layers
    return config


def builder(config: Any, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Callable[[], Any]:
    """A function that makes the model, with the same random weights every time."""

    def build() -> Any:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        choose_experts(model)
        return model.train()

    return build
