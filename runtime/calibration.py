"""Calibration: second moments of layer inputs on a user's text, streamed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from latentscan.ir.errors import CheckpointError, PipelineError


@dataclass
class Moments:
    """Second moments of a module's input.

    Attributes:
        covariance: E[x x^T], [D, D] in fp64 (not centred).
        tokens: how many tokens it is the mean of.
        length: of the longest row seen.
    """

    covariance: torch.Tensor
    tokens: int = 0
    length: int = 0

    def add(self, x: torch.Tensor) -> None:
        """Take in the tokens of x [B, L, D]."""
        self.length = max(self.length, x.shape[-2])
        flat = x.detach().reshape(-1, x.shape[-1]).double()
        total = self.tokens + flat.shape[0]
        self.covariance.mul_(self.tokens / total).add_(flat.T @ flat, alpha=1 / total)
        self.tokens = total


def statistics_for(model: torch.nn.Module, passes: Sequence[Any], calibration: Any) -> dict[str, Moments]:
    """Moments at every attention's key projection, by attention module path.

    Args:
        calibration: a token tensor [N, L], a list of strings, or the path of a text file.

    Raises:
        PipelineError: nothing given, empty, or of a wrong kind.
    """
    from latentscan.passes.mha_to_mla import calibration_points
    from latentscan.runtime.wrap import planning_graph

    batches = token_batches(model, calibration)
    points = calibration_points(planning_graph(model))
    if not points:
        return {}
    moments: dict[str, Moments] = {}
    handles = []

    def watch(attention: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            if attention not in moments:
                width = x.shape[-1]
                moments[attention] = Moments(torch.zeros(width, width, dtype=torch.float64, device=x.device))
            moments[attention].add(x)

        return hook

    modes = {m: m.training for m in model.modules()}
    try:
        for attention, module in points.items():
            handles.append(model.get_submodule(module).register_forward_pre_hook(watch(attention), with_kwargs=True))
        model.eval()
        with torch.no_grad():
            for batch in progress(batches):
                model(input_ids=batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
        for m, training in modes.items():
            m.training = training
    return moments


def progress(batches: Sequence[torch.Tensor]) -> Any:
    """A progress bar on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(batches, "calibrating", console=console, disable=not console.is_terminal)


def token_batches(model: torch.nn.Module, calibration: Any, *, length: int = 512, rows: int = 4) -> list[torch.Tensor]:
    """Calibration data as batches of token ids on the model's device."""
    if calibration is None:
        raise PipelineError(
            "the pipeline needs calibration data",
            remedy="give calibration=<text file, list of strings or token tensor>",
        )
    device = next(model.parameters()).device
    if isinstance(calibration, torch.Tensor):
        tokens = calibration if calibration.dim() == 2 else calibration.reshape(1, -1)
        if tokens.numel() == 0:
            raise PipelineError(
                f"the calibration tensor of shape {list(calibration.shape)} holds no tokens",
                remedy="give integer token ids of shape [N, L]",
            )
        if tokens.is_floating_point():
            raise PipelineError(
                f"calibration is a {tokens.dtype} tensor of shape {list(calibration.shape)}",
                remedy="give integer token ids of shape [N, L]",
            )
        top = int(tokens.max())
        size = model.get_input_embeddings().weight.shape[0]
        if top >= size or int(tokens.min()) < 0:
            raise PipelineError(
                f"calibration holds token {top}, the vocabulary has {size}", remedy="use its own tokenizer"
            )
        return [t.to(device) for t in tokens.split(rows)]
    if isinstance(calibration, (str, os.PathLike)):
        try:
            with open(calibration, encoding="utf-8") as file:
                texts = [file.read()]
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"cannot be read: {error}", where=str(calibration), remedy="give a UTF-8 text file"
            ) from None
    elif isinstance(calibration, Sequence) and all(isinstance(t, str) for t in calibration):
        texts = list(calibration)
    else:
        raise PipelineError(
            f"calibration is a {type(calibration).__name__}", remedy="give a path, a list of strings or a token tensor"
        )
    text = "\n\n".join(texts)
    if not text.strip():
        raise PipelineError("calibration text is empty", remedy="give some text of the kind that the model will see")
    ids = torch.tensor(_tokenizer(model)(text)["input_ids"], dtype=torch.long)
    if ids.numel() < length:
        return [ids[None].to(device)]
    whole = ids[: ids.numel() // length * length].reshape(-1, length)
    return [t.to(device) for t in whole.split(rows)]


def _tokenizer(model: torch.nn.Module) -> Any:
    from transformers import AutoTokenizer

    name = getattr(model.config, "_name_or_path", "")
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception as error:  # noqa: BLE001  the library raises many types for a missing tokenizer
        raise PipelineError(
            f"no tokenizer is found at {name!r} ({type(error).__name__})", remedy="give calibration as a token tensor"
        ) from None
