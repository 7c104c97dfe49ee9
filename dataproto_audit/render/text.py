"""Small pieces of text for terminals: numbers, durations, sparklines, safe strings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*#@"

REWARD_METRICS = ("critic/score/mean", "critic/rewards/mean", "reward/mean")
"""Metrics that count as the reward, first match first (verl's names)."""


def visible(text: object) -> str:
    """``text`` with control characters escaped.

    Prompts, responses and messages come from models and users: raw escape sequences in them could
    move the cursor, recolour or retitle the terminal. Line breaks and tabs stay.
    """
    if (clean := str(text)).isprintable():
        return clean
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in clean
    )


def number(value: Any) -> str:
    """Four significant digits; whole numbers in full; a dash for what is missing."""
    if value is None:
        return "-"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"
    return visible(value)


def many(count: int, noun: str) -> str:
    """``1 row``, ``16 rows``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def duration(seconds: float | None) -> str:
    """``0:32``, ``1:02:03``; a dash when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def counts(by_kind: Mapping[str, int] | int | None) -> str:
    """``2 fail, 1 warn`` without the zeros; ``none`` for none."""
    if not isinstance(by_kind, Mapping):
        return str(by_kind) if by_kind else "none"
    return ", ".join(f"{n} {visible(kind)}" for kind, n in by_kind.items() if n) or "none"


def reward_of(metrics: Mapping[str, float]) -> float | None:
    """The reward among the metrics of a step, None when there is none."""
    return next((metrics[name] for name in REWARD_METRICS if name in metrics), None)


def sparkline(values: Sequence[float], *, width: int = 40, bars: str = BARS) -> str:
    """The curve in at most ``width`` characters: means of equal stretches, scaled to their range.

    A stretch without a finite value is a blank.
    """
    if not values or width < 1:
        return ""
    cells = min(width, len(values))
    edges = [round(i * len(values) / cells) for i in range(cells + 1)]
    means: list[float | None] = []
    for start, end in pairwise(edges):
        finite = [v for v in values[start:end] if v is not None and math.isfinite(v)]
        means.append(sum(finite) / len(finite) if finite else None)
    known = [mean for mean in means if mean is not None]
    low = min(known, default=0.0)
    span = max(known, default=0.0) - low
    top = len(bars) - 1
    return "".join(
        " " if mean is None else bars[round((mean - low) / span * top) if span > 0 else top // 2]
        for mean in means
    )
