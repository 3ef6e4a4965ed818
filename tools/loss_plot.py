"""A loss curve as a PNG, drawn with Pillow (the optional extra ``plot``)."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SIZE, _LEFT, _TOP, _RIGHT, _BOTTOM = (960, 540), 90, 50, 30, 60
_INK, _GRID, _PALE, _LINE = (40, 40, 40), (225, 225, 225), (170, 200, 235), (20, 90, 170)
_SMOOTH = 0.9  # of the running mean that the dark line shows


def can_draw() -> bool:
    """Whether Pillow is installed."""
    return importlib.util.find_spec("PIL") is not None


def ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers that cover [low, high]: steps of 1, 2 or 5 times a power of ten."""
    span = max(high - low, 1e-12)
    step = 10.0 ** math.floor(math.log10(span / most))
    step *= next((m for m in (1, 2, 5, 10) if span / (step * m) <= most), 10)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [i * step for i in range(first, last + 1)]


def running_mean(values: Sequence[float]) -> list[float]:
    """Exponential mean, unbiased at the start."""
    found, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = _SMOOTH * mean + (1 - _SMOOTH) * value, _SMOOTH * weight + (1 - _SMOOTH)
        found.append(mean / weight)
    return found


def draw(losses: Sequence[float], divergence: Sequence[float], path: Path) -> None:
    """Draw losses (pale), their running mean (dark) and that of the KL divergence (grey) by step.

    Args:
        losses, divergence: of steps 1, 2, ...; finite.
    """
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", _SIZE, "white")
    pen = ImageDraw.Draw(image)
    font: Any = ImageFont.load_default()
    width, height = _SIZE[0] - _LEFT - _RIGHT, _SIZE[1] - _TOP - _BOTTOM
    rows = ticks(min(0.0, *losses, *divergence), max(*losses, *divergence, 1e-9))
    columns = [t for t in ticks(1, max(len(losses), 2)) if t == int(t) and 1 <= t <= max(len(losses), 2)]

    def at(step: float, value: float) -> tuple[float, float]:
        x = _LEFT + width * (step - 1) / max(1, len(losses) - 1)
        return x, _TOP + height * (rows[-1] - value) / (rows[-1] - rows[0])

    for value in rows:
        (x, y), text = at(1, value), f"{value:.4g}"
        pen.line([(x, y), (x + width, y)], fill=_GRID)
        pen.text((_LEFT - 10 - pen.textlength(text, font=font), y - 6), text, fill=_INK, font=font)
    for step in columns:
        (x, y), text = at(step, rows[0]), f"{step:.0f}"
        pen.line([(x, y), (x, y + 4)], fill=_INK)
        pen.text((x - pen.textlength(text, font=font) / 2, y + 8), text, fill=_INK, font=font)
    grey = (120, 120, 120)
    for values, ink, thick in (
        (losses, _PALE, 1),
        (running_mean(divergence), grey, 2),
        (running_mean(losses), _LINE, 3),
    ):
        points = [at(i + 1, v) for i, v in enumerate(values)]
        if len(points) > 1:
            pen.line(points, fill=ink, width=thick, joint="curve")
        else:
            x, y = points[0]
            pen.ellipse([x - 2, y - 2, x + 2, y + 2], fill=ink)
    for x, ink, text in ((_LEFT, _LINE, "loss (running mean)"), (_LEFT + 190, grey, "KL divergence, nats per token")):
        pen.line([(x, 26), (x + 24, 26)], fill=ink, width=3)
        pen.text((x + 32, 20), text, fill=_INK, font=font)
    pen.text((_LEFT + width / 2 - 12, _SIZE[1] - 24), "step", fill=_INK, font=font)
    image.save(path, format="PNG")
