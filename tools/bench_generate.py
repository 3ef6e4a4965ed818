"""``latentscan bench generate``: a prompt and the tokens after it, timed apart, and the bytes kept in between."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from latentscan import __version__
from latentscan.ir.errors import PipelineError
from latentscan.runtime.cache import GraphCache, HybridLayer, LinearLayer, cache_argument
from latentscan.runtime.source import Source, resolve
from latentscan.runtime.tiny import choose_experts
from latentscan.runtime.wrap import wrap

SCHEMA = 1  # of the dict that `generate` returns; raised when a field changes its meaning or goes
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_REPEATS = 3


def generate(
    text: str,
    *,
    prompt: int,
    new: int,
    batch: int = 1,
    pipeline: str = "",
    dtype: str = "auto",
    device: str = "auto",
    step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Time a wrapped model's prefill and greedy decode.

    A first pass over both compiles and is not counted; then the median of three prefills and of the single decode
    steps. Each is timed until the device is done.

    Args:
        text: the model, as the command takes it; a bare configuration gets random weights.
        prompt, new: tokens a row before and after; at least 2 new ones (the first one comes from the prompt).
        batch: rows.

    Returns:
        "schema", "version", "model", "class", "parameters", "dtype", "device", "pipeline", "prompt", "new", "batch";
        "prefill" with ms and tokens_per_second; "decode" with ms_per_step, tokens_per_second and slowest_ms;
        "bytes" with states (recurrent and convolution, fixed), cache (everything, at the end) and states_per_row;
        "peak_bytes" of device memory, None on a CPU. Times are milliseconds.

    Raises:
        PipelineError: an unknown dtype or device. What resolving, loading and wrapping a model raise.
    """
    if dtype != "auto" and dtype not in _DTYPES:
        raise PipelineError(f"there is no dtype {dtype!r}", remedy=f"use auto, {', '.join(_DTYPES)}")
    place = _device(device)
    source = resolve(text)
    step("loading")
    model = _load(source, place, _DTYPES.get(dtype))
    step("wrapping")
    wrap(model, pipeline)
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (batch, prompt), device=place)  # type: ignore[operator,union-attr]
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step("compiling")
    _pass(model, ids, min(new, 3))
    prefills, steps, cache = [], [], None
    for index in range(_REPEATS):
        step(f"run {index + 1} of {_REPEATS}")
        cache = None  # the cache before it goes first
        first, others, cache = _pass(model, ids, new if index == _REPEATS - 1 else 2)
        prefills.append(first)
        steps.extend(others if index == _REPEATS - 1 else [])
    assert cache is not None
    states = sum(x.bytes_held() for x in cache.layers if isinstance(x, LinearLayer)) + sum(
        _recurrent_bytes(x) for x in cache.layers if isinstance(x, HybridLayer)
    )
    prefill, decode = statistics.median(prefills), statistics.median(steps)
    return {
        "schema": SCHEMA,
        "version": __version__,
        "model": text,
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if place.type == "cuda" else "cpu",
        "pipeline": pipeline,
        "notes": list(source.notes) + ([] if source.has_weights else ["random weights"]),
        "prompt": prompt,
        "new": new,
        "batch": batch,
        "prefill": {"ms": prefill, "tokens_per_second": batch * prompt / prefill * 1e3},
        "decode": {
            "ms_per_step": decode,
            "slowest_ms": max(steps),
            "tokens_per_second": batch / decode * 1e3,
        },
        "bytes": {"states": states, "states_per_row": states // batch, "cache": cache.bytes_held()},
        "peak_bytes": torch.cuda.max_memory_allocated() if place.type == "cuda" else None,
    }


def lines(told: dict[str, Any]) -> list[str]:
    """The figures for people."""
    prefill, decode, held = told["prefill"], told["decode"], told["bytes"]
    found = [
        f"{told['class']}, {told['parameters']:,} parameters, {told['dtype']}, {told['device']}"
        + (f", {told['pipeline']}" if told["pipeline"] else ""),
        f"prefill  {told['batch']} x {told['prompt']} tokens: {prefill['ms']:.2f} ms, "
        f"{prefill['tokens_per_second']:,.0f} tokens/s",
        f"decode   {decode['ms_per_step']:.3f} ms a step (slowest {decode['slowest_ms']:.3f}), "
        f"{decode['tokens_per_second']:,.0f} tokens/s",
        f"states   {held['states']:,} bytes, {held['states_per_row']:,} a row; whole cache {held['cache']:,} bytes",
    ]
    if told["peak_bytes"] is not None:
        found.append(f"peak     {told['peak_bytes']:,} bytes of device memory")
    return found + [f"note: {note}" for note in told["notes"]]


def _device(name: str) -> torch.device:
    found = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    if found not in ("cpu", "cuda"):
        raise PipelineError(f"there is no device {name!r} to measure on", remedy="use auto, cpu or cuda")
    if found == "cuda" and not torch.cuda.is_available():
        raise PipelineError("there is no CUDA device here", remedy="use --device cpu")
    return torch.device(found)


def _load(source: Source, device: torch.device, dtype: torch.dtype | None) -> torch.nn.Module:
    if source.has_weights:
        model = source.load().to(device)
        model = model if dtype is None else model.to(dtype)
    else:
        from transformers import AutoModelForCausalLM

        source.on_meta()  # checks the kind of model
        wanted = dtype or getattr(source.config, "dtype", None) or torch.float32
        with device:
            model = AutoModelForCausalLM.from_config(source.config, dtype=wanted).eval()
    choose_experts(model)
    return model


def _recurrent_bytes(layer: HybridLayer) -> int:
    return sum(states[i].numel() * states[i].element_size() for states, i in layer._states())


def _pass(model: Any, ids: torch.Tensor, new: int) -> tuple[float, list[float], GraphCache]:
    """One prompt and ``new`` tokens, the last of which is not fed back: prefill ms, ms of each step, the cache."""
    cache = GraphCache.for_model(model)
    more = {cache_argument(model): cache, "use_cache": True}
    steps: list[float] = []
    with torch.no_grad():
        out, first = _timed(lambda: model(input_ids=ids, logits_to_keep=1, **more), ids.device)
        for _ in range(new - 1):
            step = {"input_ids": out.logits[:, -1:].argmax(-1), "logits_to_keep": 1, **more}
            out, ms = _timed(functools.partial(model, **step), ids.device)
            steps.append(ms)
    return first, steps, cache


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    out = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return out, (time.perf_counter() - start) * 1e3
