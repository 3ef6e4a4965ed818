"""A rank's view of a batch: its rows along ``dp``, and along ``cp`` consecutive tokens of all that runs along the
sequence."""

from __future__ import annotations

from typing import Any

import torch

from latentscan.ir.errors import MeshError
from latentscan.runtime.mesh import seen_from_here

IGNORED = -100  # the label that a loss leaves out


def split_batch(batch: dict[str, Any], mesh: Any, *, pad: bool = False) -> dict[str, Any]:
    """This rank's part of a batch that all ranks know: its rows along the mesh's axis ``dp``, its tokens along ``cp``.

    Along ``dp`` each rank has rows of its own, and gradients are to be averaged, as DistributedDataParallel and
    ``fully_shard`` do: ``num_items_in_batch`` counts the trained tokens of all ranks, divided by their number, so that
    averages over ranks are averages over tokens, however these are spread (the loss too, if it is averaged).

    Along ``cp`` labels are shifted by one before they are cut (as ``shift_labels``), so a shard's last token is trained
    on the next shard's first; ``num_items_in_batch`` counts the trained tokens of all ranks, so the ranks' losses add
    up to the mean over all of them. Position ids are those of the whole sequence.

    Args:
        batch: ``input_ids`` or ``inputs_embeds`` [b, L, ...], and whatever else goes with them: tensors whose first
            dimension is b and whose second is L are cut, others are passed on. ``seq_idx`` [b, L] numbers packed
            sequences.

        mesh: a wrapped model's, a DeviceMesh with named axes, or text such as ``cp=2``.
        pad: fill rows up at their end to a length that ``cp`` divides: ids, embeddings and masks with zeros, labels
            with -100, positions counting on, packed sequences going on. In a causal model no token before sees these,
            and none of them is trained, so loss and gradients stay as they are; there are that many more logits.

    Returns:
        A new dictionary; what is cut is contiguous.

    Raises:
        MeshError: b is not divisible by the size of ``dp``, or L by that of ``cp``; what cannot be padded is in it.
    """
    seen = seen_from_here(mesh)
    axis, rows_axis = seen.axis("cp"), seen.axis("dp")
    first = next((batch[k] for k in ("input_ids", "inputs_embeds") if batch.get(k) is not None), None)
    if first is None:
        raise MeshError("the batch holds neither input_ids nor inputs_embeds", where="split_batch")
    rows, length = first.shape[:2]
    if pad and length % axis.size:
        batch = _padded(batch, rows, length, -length % axis.size)
        length += -length % axis.size
    if length % axis.size:
        raise MeshError(
            f"{length} tokens cannot be shared evenly by {axis.size} ranks",
            where="split_batch",
            remedy=f"pad the batch to {length + -length % axis.size} tokens, labels with {IGNORED}: "
            "split_batch(..., pad=True) does",
        )
    if rows % rows_axis.size:
        raise MeshError(
            f"{rows} rows cannot be shared evenly by {rows_axis.size} ranks",
            where="split_batch",
            remedy=f"give {rows + -rows % rows_axis.size} rows, those to fill up with labels of {IGNORED} only",
        )
    tokens_apart = "cp" in (a.name for a in seen.axes)
    batch = _counted(batch, rows, length, rows_axis.size, tokens_apart)
    share = rows // rows_axis.size
    mine = slice(rows_axis.rank * share, (rows_axis.rank + 1) * share)
    batch = {k: _rows(v, rows, length, mine) for k, v in batch.items()} if rows_axis.size > 1 else dict(batch)
    if not tokens_apart and "dp" in (a.name for a in seen.axes):
        return batch
    rows = share
    whole = dict(batch)
    seq_idx = whole["seq_idx"] = numbered(whole, rows, length)
    if seq_idx is None:
        del whole["seq_idx"]
    if whole.get("labels") is not None and whole.get("shift_labels") is None:
        whole["shift_labels"] = shifted(whole["labels"], seq_idx)
    if whole.get("shift_labels") is not None and whole.get("num_items_in_batch") is None:
        whole["num_items_in_batch"] = (whole["shift_labels"] != IGNORED).sum()
    if (
        whole.get("position_ids") is None and seq_idx is not None
    ):  # otherwise the passes count on from the shards before
        whole["position_ids"] = positions(rows, length, seq_idx, first.device)
    share = length // axis.size
    part = slice(axis.rank * share, (axis.rank + 1) * share)
    return {k: _cut(v, length, part) for k, v in whole.items()}


def _counted(batch: dict[str, Any], rows: int, length: int, ranks: int, borders: bool) -> dict[str, Any]:
    """The batch with the number of trained tokens a rank of ``dp``, before it is cut.

    Args:
        borders: labels behind the end of a packed sequence are left out, as they are along ``cp`` (models do not).
    """
    count = batch.get("num_items_in_batch")
    if ranks == 1 or (count is None and batch.get("labels") is None and batch.get("shift_labels") is None):
        return batch
    if count is None:
        moved = batch.get("shift_labels")
        if moved is None:
            moved = shifted(batch["labels"], numbered(dict(batch), rows, length) if borders else None)
        count = (moved != IGNORED).sum()
    return {**batch, "num_items_in_batch": count / ranks}


def _padded(batch: dict[str, Any], rows: int, length: int, more: int) -> dict[str, Any]:
    """The batch with ``more`` tokens at the end of every row that change nothing before them.

    Raises:
        MeshError: a tensor has the sequence along another dimension than its second.
    """
    seq_idx = numbered(batch, rows, length)
    whole = dict(batch) if seq_idx is None else {**batch, "seq_idx": seq_idx}
    for name, value in whole.items():
        if not isinstance(value, torch.Tensor):
            continue
        if length in value.shape[2:] and name != "inputs_embeds":
            raise MeshError(
                f"{name} of shape {list(value.shape)} cannot be padded along the sequence", where="split_batch",
                remedy=f"give it for a length that the ranks divide, such as {length + more}",
            )  # fmt: skip
        if value.dim() < 2 or value.shape[1] != length:
            continue
        end = value[:, -1:].expand(-1, more, *value.shape[2:])
        if name == "position_ids":
            end = end + torch.arange(1, more + 1, device=value.device)
        elif name in ("labels", "shift_labels"):
            end = torch.full_like(end, IGNORED)
        elif name != "seq_idx":
            end = torch.zeros_like(end)
        whole[name] = torch.cat([value, end], 1)
    return whole


def _rows(value: Any, rows: int, length: int, part: slice) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() >= 2 and tuple(value.shape[:2]) == (rows, length):
        return value[part].contiguous()
    return value


def numbered(batch: dict[str, Any], rows: int, length: int) -> torch.Tensor | None:
    """Numbers of the packed sequences over whole rows, int32 [b, L], so that shards agree on what goes on at an edge;
    None if nothing is packed. ``seq_idx`` and position ids that start again both tell borders.

    Raises:
        MeshError: cumulative lengths, which count from a row's start.
    """
    for name in ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k"):
        if batch.get(name) is not None:
            raise MeshError(f"{name} counts from a row's start", where="split_batch", remedy="give seq_idx instead")
    seq_idx, places = batch.get("seq_idx"), batch.get("position_ids")
    if seq_idx is None and places is None:
        return None
    starts = torch.zeros(rows, length, dtype=torch.bool)
    if seq_idx is not None:
        starts = starts.to(seq_idx.device)
        starts[:, 1:] |= seq_idx[:, 1:] != seq_idx[:, :-1]
    if places is not None:
        starts = starts.to(places.device)
        starts[:, 1:] |= places[:, 1:] != places[:, :-1] + 1
    return None if seq_idx is None and not bool(starts.any()) else starts.cumsum(1, dtype=torch.int32)


def _cut(value: Any, length: int, part: slice) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == length:
        return value[:, part].contiguous()
    return value


def shifted(labels: torch.Tensor, seq_idx: torch.Tensor | None) -> torch.Tensor:
    """The label of the next token at each token, [b, L]; none behind the last, or across packed sequences."""
    moved = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
    if seq_idx is not None:
        moved[:, :-1] = moved[:, :-1].masked_fill(seq_idx[:, 1:] != seq_idx[:, :-1], IGNORED)
    return moved


def positions(rows: int, length: int, seq_idx: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Places in the whole sequence, [b, L]; from 0 in every packed sequence."""
    place = torch.arange(length, device=device).expand(rows, length)
    if seq_idx is None:
        return place
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return place - torch.where(starts, place, 0).cummax(1).values
