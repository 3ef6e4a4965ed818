"""Several sequences in one row, as Hugging Face's DataCollatorWithFlattening packs them: nothing crosses their borders.

A call is packed if it has ``seq_idx``, ``cu_seqlens`` or ``cu_seq_lens_q``/``_k``, or ``position_ids`` that start again
without saying so by a mask or a cache. All that is given counts: a border that any of them tells is a border. A model
whose mixers cannot be told is refused, never run with states that leak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from latentscan.ir.errors import RefusedError
from latentscan.ir.frontends.packing import knows_packing, recurrent_mixers

BORDERS = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
LENGTHS = ("max_length_q", "max_length_k")  # of use to other kernels only


@dataclass(frozen=True)
class Packed:
    """A packed call.

    Attributes:
        segments: int32 [b, L], a number for each sequence: seq_idx's own where that tells every border (a shard of a
            longer row keeps the row's numbers), else counted from 0 in every row.
        changed: arguments to give the model; None stands for one to leave out.
    """

    segments: Tensor
    changed: dict[str, Any]


def packed_call(model: nn.Module, given: dict[str, Any], accepted: set[str], has_cache: bool) -> Packed | None:
    """How to make a call packed, or None if it is not.

    Args:
        given: the call's arguments by name. accepted: names that the model's forward declares.
        has_cache: whether the call brings a cache.

    Raises:
        RefusedError: arguments that contradict packing, or a model that cannot be told of it.
    """
    borders = {name: given[name] for name in BORDERS if given.get(name) is not None}
    positions = given.get("position_ids")
    mixers = recurrent_mixers(model)
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if not borders:
        silent = positions is None or has_cache or given.get("attention_mask") is not None or not mixers
        if silent or not isinstance(tokens, Tensor) or not bool(_jumps(positions).any()):
            return None
    where = type(model).__name__
    if not isinstance(tokens, Tensor):
        raise RefusedError("packed sequences without tokens", where=where, remedy="give input_ids or inputs_embeds")
    told = ", ".join(borders) or "position_ids that start again"
    if has_cache or given.get("use_cache"):
        raise RefusedError(
            f"packed sequences ({told}) and a cache: it would hold one state for several sequences", where=where,
            remedy="leave the cache out and use_cache off, or run the sequences one a row",
        )  # fmt: skip
    mask = given.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask == 1).all())):
        raise RefusedError(
            f"packed sequences ({told}) and an attention_mask that hides tokens", where=where,
            remedy="leave attention_mask out; a packed row has no padding",
        )  # fmt: skip
    for path, mixer in mixers.items():
        if not knows_packing(mixer):
            raise RefusedError(
                f"packed sequences ({told}): {type(mixer).__name__} cannot be told where they start, "
                "and its state would leak from one to the next",
                where=path or where, remedy="run the sequences one a row, padded on the left",
            )  # fmt: skip
    batch, length = tokens.shape[:2]
    segments = _segments(borders, positions, batch, length, tokens.device, where)
    changed: dict[str, Any] = dict.fromkeys((*BORDERS, *LENGTHS, "attention_mask"))
    if "use_cache" in accepted:
        changed["use_cache"] = False
    if positions is None and "position_ids" in accepted:
        changed["position_ids"] = _restarting(segments)
    return Packed(segments, changed)


def _jumps(positions: Tensor) -> Tensor:
    """[b, L], or [1, L] of one row for all: where a position is not the one before it plus one."""
    positions = positions if positions.dim() > 1 else positions[None]
    return positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1


def _segments(
    borders: dict[str, Tensor], positions: Tensor | None, batch: int, length: int, device: torch.device, where: str
) -> Tensor:
    starts = torch.zeros(batch, length, dtype=torch.bool, device=device)
    for name, value in borders.items():
        value = torch.as_tensor(value, device=device)
        if name == "seq_idx":
            if tuple(value.shape) != (batch, length):
                raise RefusedError(
                    f"seq_idx has shape {list(value.shape)}", where=where, remedy=f"give it as {[batch, length]}"
                )
            starts[:, 1:] |= value[:, 1:] != value[:, :-1]
        else:
            if batch != 1 or value.dim() != 1:
                raise RefusedError(
                    f"{name} of shape {list(value.shape)} for {batch} rows", where=where,
                    remedy="cumulative lengths are one-dimensional and for one row; give seq_idx for several",
                )  # fmt: skip
            starts[0] |= torch.isin(torch.arange(length, device=device), value)
    if positions is not None:
        jumps = _jumps(positions)
        if jumps.shape[-1] != length:
            raise RefusedError(
                f"position_ids has shape {list(positions.shape)}", where=where, remedy=f"give {[batch, length]}"
            )
        starts |= jumps.to(device)
    starts[:, 0] = False
    given = borders.get("seq_idx")
    if given is not None:
        given = torch.as_tensor(given, device=device)
        if not bool((starts[:, 1:] & (given[:, 1:] == given[:, :-1])).any()):
            return given.to(torch.int32)
    return starts.cumsum(1, dtype=torch.int32)


def _restarting(segments: Tensor) -> Tensor:
    """Positions [b, L] that begin at 0 in every sequence."""
    places = torch.arange(segments.shape[1], device=segments.device).expand(segments.shape[0], -1)
    starts = segments.diff(dim=-1, prepend=segments[:, :1] - 1) != 0
    return places - torch.where(starts, places, 0).cummax(1).values
