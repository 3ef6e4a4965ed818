"""Which models are served."""

from __future__ import annotations

from typing import Any

import torch

from latentscan.ir.errors import RefusedError
from latentscan.runtime.adapters import refuse_adapters


def check_model(model: Any) -> None:
    """Raise RefusedError unless ``model`` is a causal language model in plain weights."""
    kind = type(model).__name__
    if not isinstance(model, torch.nn.Module):
        raise RefusedError(f"this is a {kind}, not a model", where="wrap", remedy="give a torch.nn.Module")
    refuse_adapters(model)
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        raise RefusedError(
            "it is compiled already, by torch.compile",
            where=type(model._orig_mod).__name__,
            remedy="give the model itself, which wrap compiles (here: model._orig_mod)",
        )
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
    if next(iter(model.parameters()), None) is None:
        raise RefusedError("it has no parameters", where=kind, remedy="give a model with weights")


def make_tables(model: torch.nn.Module) -> None:
    """Let LongRoPE's modules make their second table of angles now, as their first call would: on the meta device that
    cannot be traced."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        table = getattr(module, "inv_freq", None)
        if getattr(module, "rope_type", None) != "longrope" or not isinstance(table, torch.Tensor):
            continue
        if not table.is_meta or getattr(module, "long_inv_freq", None) is not None:
            continue
        config: Any = module.config
        length = config.rope_parameters.get("original_max_position_embeddings", config.max_position_embeddings) + 1
        made, _ = ROPE_INIT_FUNCTIONS["longrope"](config, table.device, seq_len=length)
        module.long_inv_freq = made


def drop_input_hook(model: torch.nn.Module) -> bool:
    """Take off the hook that the library's gradient checkpointing puts on the embedding so that its output requires
    gradients: only reentrant checkpointing needs it, ours is not, and Dynamo cannot trace it where the embedding's
    weight was replaced, nor at all before torch 2.13. Returns whether there was one."""
    if getattr(model, "_require_grads_hook", None) is None:
        return False
    model.disable_input_require_grads()  # type: ignore[operator]
    model._require_grads_hook = None  # type: ignore[assignment]
    return True


FSDP_FLAG = "_is_fsdp_managed_module"


def prepare_sharded(model: torch.nn.Module) -> None:
    """Make a model that ``fully_shard`` has taken ready to be traced.

    Sharding as a whole gathers all parameters before the forward and needs nothing of us, but Dynamo takes every number
    on a module with this mark for a variable, so the mark goes (nothing else reads it).

    Raises:
        RefusedError: submodules are sharded on their own.
    """
    refuse_inner_shards(model)
    for module in model.modules():
        if getattr(module, FSDP_FLAG, False):
            setattr(module, FSDP_FLAG, False)


def refuse_inner_shards(model: torch.nn.Module) -> None:
    """Raise RefusedError if submodules are sharded: their hooks gather parameters in the middle of the graph."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    inner = [name for name, module in model.named_modules() if module is not model and isinstance(module, FSDPModule)]
    if inner:
        raise RefusedError(
            f"{len(inner)} submodules are sharded on their own ({inner[0]}, ...), which breaks the graph",
            where=type(model).__name__,
            remedy="call fully_shard(model) once, on the whole model",
        )


def _head(model: Any) -> Any:
    """The module that makes logits, or None."""
    head = getattr(model, "lm_head", None)
    return head if head is not None else model.get_output_embeddings()
