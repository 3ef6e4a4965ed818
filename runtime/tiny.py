"""Tiny random Hugging Face models, one of every family that latentscan is tried on: ``tiny:FAMILY`` and the tests.

``build(family)`` gives the same fp32 weights every time and leaves the global random state alone. The sizes are as
small as they can be while every dimension differs in meaning: grouped heads, several groups of B and C, two kinds of
layer in the hybrids, a chunk length that the tests' sequences exceed.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from latentscan.ir.errors import CheckpointError
from latentscan.passes.pipeline import nearest

_LM: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_IDS: dict[str, Any] = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT: dict[str, Any] = {**_IDS, "n_embd": 64, "n_layer": 2, "n_head": 4}
_DECODER: dict[str, Any] = {**_LM, "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 256}
_GQA: dict[str, Any] = {**_DECODER, "num_key_value_heads": 2}
_MLA: dict[str, Any] = {
    **_LM,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_DEEPSEEK_MOE: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MAMBA1: dict[str, Any] = {**_LM, "state_size": 8, "time_step_rank": 4}
# The mixer of the hybrids that call its parameters mamba_*.
_MIXER: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}

# family -> (model type of transformers, configuration)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GQA),
    "qwen2": ("qwen2", _GQA),
    "qwen3": ("qwen3", {**_GQA, "head_dim": 16}),
    "mistral": ("mistral", {**_GQA, "sliding_window": None}),
    "phi3": ("phi3", _GQA),
    "gemma2": ("gemma2", {**_GQA, "head_dim": 16, "sliding_window": 8}),
    "gemma3": ("gemma3_text", {**_GQA, "head_dim": 16, "sliding_window": 8}),
    "gpt2": ("gpt2", {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "gpt_neox": ("gpt_neox", _DECODER),
    "opt": (
        "opt",
        {
            **_LM,
            "num_attention_heads": 4,
            "ffn_dim": 96,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 64,
        },
    ),
    "gptj": ("gptj", {**_GPT, "n_positions": 256, "rotary_dim": 8}),
    "phi": ("phi", _DECODER),
    "stablelm": ("stablelm", {**_DECODER, "num_key_value_heads": 4}),
    "bloom": ("bloom", {**_IDS, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "falcon": ("falcon", _DECODER),
    "mpt": ("mpt", {"vocab_size": 128, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}),
    "olmo2": ("olmo2", _DECODER),
    # A head dim that makes the layer's input narrower than K and V together, as it is where nothing is rotated.
    "smollm3": ("smollm3", {**_GQA, "head_dim": 24, "no_rope_layers": [1, 0]}),
    "cohere2": (
        "cohere2",
        {**_GQA, "head_dim": 24, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_GQA,
            "head_dim": 16,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v2": ("deepseek_v2", {**_MLA, **_DEEPSEEK_MOE, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", {**_MLA, **_DEEPSEEK_MOE}),
    "deepseek_v32": (
        "deepseek_v32",
        {**_MLA, **_DEEPSEEK_MOE, "index_topk": 5, "index_head_dim": 16, "index_n_heads": 2},
    ),
    "minicpm3": ("minicpm3", _MLA),
    "kimi_linear": ("kimi_linear", {**_MLA, "layer_types": ["linear_attention", "full_attention"]}),
    "olmo_hybrid": ("olmo_hybrid", _GQA),
    "qwen3_next": (
        "qwen3_next",
        {
            **_GQA,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "mamba": ("mamba", _MAMBA1),
    "falcon_mamba": ("falcon_mamba", _MAMBA1),
    "jamba": (
        "jamba",
        {
            **_GQA,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "mamba2": (
        "mamba2",
        {**_LM, "num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 2, "state_size": 16, "chunk_size": 16},
    ),
    "bamba": ("bamba", {**_GQA, **_MIXER, "mamba_expand": 2, "attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", {**_GQA, **_MIXER, "mamba_d_ssm": 128}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_GQA,
            **_MIXER,
            "mamba_expand": 2,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 16,
            "intermediate_size": 96,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_mamba_heads": 8,
            "mamba_d_state": 16,
            "mamba_ngroups": 2,
            "chunk_size": 16,
            "intermediate_size": 96,
            "num_mem_blocks": 1,
            "use_mem_rope": True,
            "adapter_rank": 8,
            "max_position_embeddings": 256,
        },
    ),
}

# The families by the kind of mixer in them.
SSD_FAMILIES = ("mamba2", "bamba", "falcon_h1", "nemotron_h", "zamba2", "granitemoehybrid")
MAMBA1_FAMILIES = ("mamba", "falcon_mamba", "jamba")


def tiny_config(family: str, **overrides: Any) -> Any:
    """The configuration of a tiny model.

    Args:
        family: a key of ``FAMILIES``.
        overrides: configuration values to change.

    Raises:
        CheckpointError: an unknown family, or one that the installed transformers lacks.
    """
    from transformers import AutoConfig
    from transformers import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if family not in FAMILIES:
        raise CheckpointError(
            f"there is no tiny model {family!r}",
            remedy=f"the families are {', '.join(FAMILIES)}{nearest(family, FAMILIES)}",
        )
    model_type, settings = FAMILIES[family]
    try:
        return AutoConfig.for_model(model_type, **{**settings, **overrides})
    except ValueError as error:
        raise CheckpointError(
            f"the installed transformers does not know the model type {model_type!r}",
            where=f"tiny:{family}",
            remedy="install a newer transformers",
        ) from error


def build(family: str, *, attn_implementation: str | None = None, **overrides: Any) -> torch.nn.Module:
    """A tiny fp32 causal language model in eval mode with fixed random weights.

    Args:
        family: a key of ``FAMILIES``.
        attn_implementation: "sdpa" or "eager"; the library's choice if None.
        overrides: configuration values to change.

    Raises:
        CheckpointError: see :func:`tiny_config`.
    """
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, **overrides)
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, **options).float().eval()
    choose_experts(model)
    return model


def choose_experts(model: torch.nn.Module) -> None:
    """An implementation of mixtures of experts that traces as one graph and runs on the model's device.

    The library's default grouped matmul wants bfloat16 and does not survive AOT on a CPU; the plain loop breaks graphs.
    """
    if not any("experts" in name for name, _ in model.named_modules()):
        return
    first = next(model.parameters())
    if first.device.type == "cpu" or first.dtype != torch.bfloat16:
        model.set_experts_implementation("batched_mm")  # type: ignore[operator]


__all__ = ["FAMILIES", "MAMBA1_FAMILIES", "SSD_FAMILIES", "build", "choose_experts", "tiny_config"]
