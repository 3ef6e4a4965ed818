"""Export: a converted model as a dense DeepSeek-V3 model, which plain transformers reads and whose cache is the latent.

DeepSeek-V3 normalises its latent (RMS norm), a converted model does not. The norm is made neutral: one more latent
feature is the constant M (a bias), so that the mean square is (|c|^2 + M^2) / n, constant up to
|c|^2 / M^2; the layer's input is itself normalised, |x_hat|^2 <= D, so |c| <= s sqrt(D) with s the largest singular
value of W_DKV diag(gamma). M is the first power of two for which |c|^2 / M^2 is below the dtype's unit roundoff, and
the norm's weight and W_UK, W_UV undo the constant. The norm makes that feature 1, and biases of keys and values are
what W_UK and W_UV read from it; the rotated key's bias is one of ``kv_a_proj_with_mqa``.

Layers may differ in latent width and in rotated pairs: what a layer lacks are zeros. The exported model's logits are
compared with the converted model's before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from latentscan.ir.errors import RefusedError
from latentscan.ir.frontends import register_all
from latentscan.ir.mla import attentions
from latentscan.passes.base import Context
from latentscan.passes.pipeline import parse, run
from latentscan.runtime.door import session_of
from latentscan.runtime.export_parts import DIRECT, INDIRECT, Parts, parts_of
from latentscan.runtime.source import quiet
from latentscan.runtime.wrap import planning_graph

FORMS = ("deepseek-v3",)
_KEPT = ("mla-mm-split", "mla-absorb")  # passes of the old pipeline that the exported model is read with
_FIXED_TABLES = ("default", "linear", "llama3")  # rotations whose angles depend on nothing but the position
_LONGEST = 8.0  # tolerated logit error, in units of sqrt(layers x longest reduction) x unit roundoff


@dataclass(frozen=True)
class Exported:
    """A DeepSeek-V3 model and what it costs.

    Attributes:
        model: in evaluation mode, on the CPU, in the converted model's dtype.
        pipeline: what latentscan reads it with.
        elements: cached per token and layer: [converted model's, exported model's].
        weight_bytes: [converted model's, exported model's].
        error: largest difference of logits from the converted model's, relative to the largest logit.
        tolerance: of that error.
    """

    model: nn.Module
    pipeline: str
    elements: tuple[int, int]
    weight_bytes: tuple[int, int]
    error: float
    tolerance: float


def export(model: nn.Module) -> Exported:
    """Make a DeepSeek-V3 model that computes what a wrapped model computes.

    Raises:
        RefusedError: the architecture does not fit, with the first reason; or the logits are not the same.
    """
    session = session_of(model)
    if session is None:
        raise RefusedError("the model is not converted", where=type(model).__name__, remedy="wrap or convert it first")
    config: Any = model.config
    _check_config(config)
    graph = _converted_graph(model)
    try:
        parts = [parts_of(model, graph, node) for node in attentions(graph)]
    except RefusedError as refusal:
        low_rank = any("rank" in r.keep and r.inverse is None for r in session.plan.recipes)
        if low_rank and refusal.remedy == INDIRECT:
            raise RefusedError(refusal.what, where=refusal.where, remedy=DIRECT) from None
        raise
    layers = int(config.num_hidden_layers)
    by_module = {p.module: p for p in parts}
    wanted = [f"model.layers.{i}.self_attn" for i in range(layers)]
    if sorted(by_module) != sorted(wanted):
        raise RefusedError(
            f"its attentions are {', '.join(sorted(by_module)[:2])}, ..., DeepSeek-V3's {wanted[0]}, ...",
            where=type(model).__name__, remedy=DIRECT,
        )  # fmt: skip
    parts = [by_module[name] for name in wanted]
    slots = pair_slots(parts)
    made = _skeleton(config, parts, slots)
    dtype = next(model.parameters()).dtype
    made.to(dtype)
    state = _state(model, made, parts, slots, dtype)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(state[name])
    if getattr(model, "generation_config", None) is not None:
        made.generation_config = model.generation_config
    made.eval()
    error, tolerance = _parity(model, made)
    converted = max(p.down.shape[0] + p.key_rope.shape[0] * 2 for p in parts)
    sizes = [sum(p.numel() * p.element_size() for p in m.parameters()) for m in (model, made)]
    kept = ",".join(t for t in _texts(session.plan.pipeline) if t.split("{")[0] in _KEPT)
    new: Any = made.config
    elements = (converted, new.kv_lora_rank + new.qk_rope_head_dim)
    return Exported(made, kept, elements, (sizes[0], sizes[1]), error, tolerance)


def _texts(pipeline: str) -> list[str]:
    from latentscan.passes.pipeline import to_text

    return [to_text([p]) for p in parse(pipeline)]


def _check_config(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else None
    if kind not in _FIXED_TABLES:
        told = f"rope_type {kind!r}" if isinstance(kind, str) else "rotations that differ between layers"
        raise RefusedError(
            f"{told}: the exported configuration holds one fixed table of angles", where=config.model_type,
            remedy=f"it works for rope_type {', '.join(_FIXED_TABLES)}; {DIRECT}",
        )  # fmt: skip
    for name in ("rms_norm_eps", "hidden_act", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if getattr(config, name, None) is None:
            raise RefusedError(
                f"its configuration has no {name}: it is not of the Llama kind that DeepSeek-V3's dense layers are of",
                where=config.model_type,
                remedy="read it with latentscan.load instead",
            )


def _converted_graph(model: nn.Module) -> Any:
    """The planning graph of a model without weights, after mha-to-mla if that made new ones."""
    session = session_of(model)
    assert session is not None
    register_all()
    with quiet(), torch.device("meta"):
        skeleton = type(model)._from_config(model.config).eval()  # type: ignore[attr-defined]
    makers = {r.maker for r in session.plan.recipes if r.inverse is None}
    passes = [p for p in parse(session.plan.pipeline) if p.name in makers]
    context = Context(facts=session.plan.facts, own_parameters=True, meta=True)
    program = run(planning_graph(skeleton), passes, context)
    return program.graph if program.choice is None else program.forced(True).graph


def pair_slots(parts: Sequence[Parts]) -> list[tuple[float, int]]:
    """The rotated pairs of the exported model: (frequency, KV head), fast pairs first; every layer's fit in.

    A frequency that one layer has several times for one KV head is there as often.
    """
    most: dict[tuple[float, int], int] = {}
    for part in parts:
        count: dict[tuple[float, int], int] = {}
        for pair in _pairs(part):
            count[pair] = count.get(pair, 0) + 1
        for pair, n in count.items():
            most[pair] = max(n, most.get(pair, 0))
    order = sorted(most, key=lambda p: (p[1], -p[0]))
    return [pair for pair in order for _ in range(most[pair])]


def _pairs(part: Parts) -> list[tuple[float, int]]:
    return list(zip(part.frequencies.tolist(), part.group.tolist(), strict=True))


def rope_parameters(slots: Sequence[tuple[float, int]], longest: int) -> dict[str, Any]:
    """A configuration whose table of angles is that of ``slots``.

    Where they are theta^(-2 j / d_r) that is the default one; else LongRoPE's explicit factors, equal for short and
    long sequences, with base 1: 1 / factor, correctly rounded twice (2^-23 relative at most).
    """
    table = torch.tensor([f for f, _ in slots], dtype=torch.float32)
    count = len(slots)
    theta = float(table[1].double() ** -count) if count > 1 else 10000.0
    if float(table[0]) == 1.0 and theta > 1:
        for base in (float(round(theta)), theta):
            if torch.equal(1.0 / (base ** (torch.arange(0, 2 * count, 2, dtype=torch.float) / (2 * count))), table):
                return {"rope_type": "default", "rope_theta": base}
    factors = (1.0 / table.double()).tolist()
    return {
        "rope_type": "longrope", "rope_theta": 1.0, "short_factor": factors, "long_factor": factors, "factor": 1.0,
        "attention_factor": 1.0, "original_max_position_embeddings": longest,
    }  # fmt: skip


def _skeleton(config: Any, parts: Sequence[Parts], slots: Sequence[tuple[float, int]]) -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    heads = {p.query.shape[0] for p in parts}
    d_v = {p.value_up.shape[1] for p in parts}
    if len(heads) > 1 or len(d_v) > 1:
        raise RefusedError("its layers differ in heads or value width", where=config.model_type, remedy=DIRECT)
    longest = int(getattr(config, "max_position_embeddings", 4096))
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
            "rms_norm_eps", "initializer_range", "tie_word_embeddings", "attention_dropout", "bos_token_id",
            "eos_token_id", "pad_token_id", "use_cache")  # fmt: skip
    words = {name: getattr(config, name) for name in kept if hasattr(config, name)}
    new = DeepseekV3Config(
        **words,
        num_key_value_heads=heads.pop(),
        max_position_embeddings=longest,
        q_lora_rank=None,
        kv_lora_rank=max(p.down.shape[0] for p in parts) + 1,
        qk_rope_head_dim=2 * len(slots),
        qk_nope_head_dim=max(p.query.shape[1] for p in parts),
        v_head_dim=d_v.pop(),
        first_k_dense_replace=config.num_hidden_layers,
        n_routed_experts=1, n_shared_experts=1, num_experts_per_tok=1, n_group=1, topk_group=1,
        moe_intermediate_size=config.intermediate_size,
        rope_interleave=False,
        attention_bias=True,
        rope_parameters=rope_parameters(slots, longest),
        **({"num_mtp_layers": 0} if hasattr(DeepseekV3Config, "num_mtp_layers") else {}),
    )  # fmt: skip
    new.architectures = ["DeepseekV3ForCausalLM"]
    with quiet():
        return DeepseekV3ForCausalLM._from_config(new)


def _state(
    model: nn.Module, made: nn.Module, parts: Sequence[Parts], slots: Sequence[tuple[float, int]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Every parameter of the exported model. Refuses where the two do not correspond name by name."""
    state: dict[str, Tensor] = {}
    read = {part.module for part in parts}
    mine = dict(model.named_parameters())
    for name, parameter in made.named_parameters():
        if name.rpartition(".self_attn.")[0] + ".self_attn" in read:
            continue
        if name not in mine or mine[name].shape != parameter.shape:
            raise RefusedError(
                f"DeepSeek-V3's {name} {list(parameter.shape)} has no counterpart", where=type(model).__name__,
                remedy="read it with latentscan.load instead",
            )  # fmt: skip
        state[name] = mine[name].detach()
    for name in mine:
        if name not in state and not any(name.startswith(m + ".") for m in read):
            raise RefusedError(
                f"{name} has no place in DeepSeek-V3", where=type(model).__name__,
                remedy="read it with latentscan.load instead",
            )  # fmt: skip
    for part in parts:
        layer = part.module.rpartition(".")[0]
        gain = state[f"{layer}.input_layernorm.weight"]
        output = mine.get(f"{part.module}.o_proj.weight")
        bias = mine.get(f"{part.module}.o_proj.bias")
        if output is None:
            raise RefusedError("it has no o_proj", where=part.module, remedy="read it with latentscan.load instead")
        attention = attention_state(part, slots, made.config, gain, dtype)  # type: ignore[arg-type]
        attention["o_proj.weight"] = output.detach()
        attention["o_proj.bias"] = output.new_zeros(output.shape[0]) if bias is None else bias.detach()
        state.update({f"{part.module}.{name}": value for name, value in attention.items()})
    return state


def attention_state(
    part: Parts, slots: Sequence[tuple[float, int]], config: Any, gain: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """One attention's parameters under DeepSeek-V3's names, all but the output projection's.

    Args:
        gain: [D], weight of the norm before it.
    """
    heads, own_n, hidden = part.query.shape
    d_n, d_r, d_v, width = (
        config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank
    )  # fmt: skip
    d_c = part.down.shape[0]
    half = d_r // 2
    rescale = part.scale * math.sqrt(d_n + d_r)
    query = part.down.new_zeros(heads, d_n + d_r, hidden)
    query[:, :own_n] = part.query * rescale
    down, bias = part.down.new_zeros(width + d_r, hidden), part.down.new_zeros(width + d_r)
    down[:d_c] = part.down
    free: dict[tuple[float, int], list[int]] = {}
    for index, slot in enumerate(slots):
        free.setdefault(slot, []).append(index)
    for index, pair in enumerate(_pairs(part)):
        at = free[pair].pop(0)
        for member, place in enumerate((at, at + half)):
            query[:, d_n + place] = part.query_rope[:, index, member] * rescale
            down[width + place] = part.key_rope[index, member]
            bias[width + place] = part.key_rope_bias[index, member]
    constant, weight, undo = neutral_norm(part.down, gain, width, dtype)
    bias[width - 1] = constant
    norm = part.down.new_zeros(width)
    norm[:d_c] = weight
    one = weight * undo / constant  # the norm's weight for which its feature is 1
    norm[-1] = float(torch.tensor(one, dtype=torch.float64).to(dtype))
    up = part.down.new_zeros(heads, d_n + d_v, width)
    up[:, :own_n, :d_c] = part.key_up * undo
    up[:, d_n:, :d_c] = part.value_up * undo
    up[:, :own_n, -1] = part.key_bias * (one / norm[-1])
    up[:, d_n:, -1] = part.value_bias * (one / norm[-1])
    made = {
        "q_proj.weight": query.flatten(0, 1),
        "kv_a_proj_with_mqa.weight": down,
        "kv_a_proj_with_mqa.bias": bias,
        "kv_a_layernorm.weight": norm,
        "kv_b_proj.weight": up.flatten(0, 1),
    }
    return {name: value.to(dtype) for name, value in made.items()}


def neutral_norm(down: Tensor, gain: Tensor, width: int, dtype: torch.dtype) -> tuple[float, float, float]:
    """What makes an RMS norm over a latent c = ``down`` (gain * x_hat) and a constant the identity.

    Args:
        down: [d_c, D] fp64. gain: [D]. width: features that the norm runs over, the constant among them.

    Returns:
        the constant M; the norm's weight (rounded to ``dtype``); what W_UK and W_UV are multiplied by.

    Raises:
        RefusedError: the dtype does not hold M.
    """
    bound = float(torch.linalg.matrix_norm(down * gain.double(), 2)) * math.sqrt(down.shape[1])
    unit = torch.finfo(dtype).eps / 2
    constant = 2.0 ** math.ceil(math.log2(max(bound, 2.0**-10) / math.sqrt(unit)))
    if constant > torch.finfo(dtype).max / 2:
        raise RefusedError(
            f"the constant {constant:g} that makes the latent's norm neutral is beyond {dtype}", where="export",
            remedy="export it in bfloat16 or float32",
        )  # fmt: skip
    rms = math.sqrt(constant**2 / width + 1e-6)
    weight = float(torch.tensor(rms, dtype=torch.float64).to(dtype))
    return constant, weight, rms / weight


def _parity(model: nn.Module, made: nn.Module) -> tuple[float, float]:
    """Logit error and its tolerance on two seeded rows, one padded. Raises RefusedError beyond it."""
    config: Any = made.config
    device = next(model.parameters()).device
    ids = torch.randint(0, config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    with torch.no_grad():
        want = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits.float().cpu()
        got = made(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    seen = mask.bool()
    largest = float(want[seen].abs().max())
    error = float((got - want)[seen].abs().max()) / max(largest, 1e-30)
    unit = torch.finfo(next(made.parameters()).dtype).eps / 2
    longest = max(config.hidden_size, config.intermediate_size)
    tolerance = _LONGEST * math.sqrt(config.num_hidden_layers * longest) * unit
    if not error <= tolerance:
        raise RefusedError(
            f"as DeepSeek-V3 its logits would differ by {error:.1e} of the largest (rounding: {tolerance:.1e}), "
            "so it computes something that DeepSeek-V3 does not",
            where=type(model).__name__,
            remedy="read it with latentscan.load instead",
        )
    return error, tolerance


__all__ = ["FORMS", "Exported", "attention_state", "export", "neutral_norm", "pair_slots", "rope_parameters"]
