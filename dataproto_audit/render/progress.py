"""What a training run shows while it goes, on stderr.

On a terminal one line is redrawn in place; elsewhere (a file, CI) every k-th step prints a line.
The line is drawn by hand: a redraw through rich's ``Live`` costs a millisecond and more, a hundred
times as much as this, and the audit's budget is counted in milliseconds per step. There is no
background thread: the line changes when something happens, at most every ``MIN_INTERVAL_S``.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TextIO

from dataproto_audit.render.text import (
    ASCII_BARS,
    BARS,
    counts,
    duration,
    number,
    reward_of,
    sparkline,
    visible,
)

MIN_INTERVAL_S = 0.1
PLAIN_LINES = 20
"""Lines that a whole run prints where there is no terminal, unless ``every`` says otherwise."""

_CLEAR = "\r\x1b[2K"
_CURVE = 24


class Progress:
    """The progress of one run. All methods may be called before ``start`` and after ``stop``.

    ``live`` redraws one line (default: when ``file`` is a terminal and ``CI`` is not set);
    otherwise every ``every``-th step prints a line, and so does each step with new findings.
    """

    def __init__(
        self, *, file: TextIO | None = None, live: bool | None = None, every: int | None = None
    ) -> None:
        self._file = sys.stderr if file is None else file
        self.live = _is_terminal(self._file) if live is None else live
        self.cpu_s = 0.0
        """CPU seconds of the calling thread spent here."""
        self._bars = BARS if _takes(self._file, BARS) else ASCII_BARS
        self._every = every
        self._total = 0
        self._step = 0
        self._stage = ""
        self._stages: Sequence[str] = ()
        self._reward: float | None = None
        self._curve: deque[float] = deque(maxlen=5 * _CURVE)  # the shape of the last steps
        self._findings: Mapping[str, int] | int = 0
        self._eta: float | None = None
        self._started = self._drawn = 0.0
        self._first = 1
        self._active = False

    def start(self, total_steps: int, stages: Sequence[str], *, first_step: int = 1) -> None:
        """A run of ``total_steps`` begins, at ``first_step`` when it was resumed."""
        self._total, self._stages, self._first = total_steps, stages, first_step
        self._started, self._active = time.monotonic(), True
        if self._every is None:
            self._every = max(1, total_steps // PLAIN_LINES)
        if not self.live:
            self._print(f"{total_steps} steps of {len(stages)} stages: {', '.join(stages)}")

    def stage(self, step: int, name: str) -> None:
        """Step ``step`` enters the stage ``name``."""
        before = time.thread_time()
        self._step, self._stage = step, name
        if self.live:
            self._draw()
        self.cpu_s += time.thread_time() - before

    def step_done(
        self,
        step: int,
        metrics: Mapping[str, float],
        findings_count: Mapping[str, int] | int = 0,
        eta: float | None = None,
    ) -> None:
        """Step ``step`` is done. ``findings_count`` counts the run so far, by severity or in all.

        ``eta`` is in seconds; None estimates it from the mean time of the steps so far.
        """
        before = time.thread_time()
        self._step, self._stage = step, ""
        self._reward = reward_of(metrics)
        if self._reward is not None:
            self._curve.append(self._reward)
        news = findings_count != self._findings
        self._findings = findings_count
        per_step = (time.monotonic() - self._started) / max(step - self._first + 1, 1)
        self._eta = max(self._total - step, 0) * per_step if eta is None else eta
        if self.live:
            self._draw()
        elif news or step in (self._first, self._total) or step % (self._every or 1) == 0:
            self._print(f"{self._line()}  {per_step:.2f} s/step")
        self.cpu_s += time.thread_time() - before

    def message(self, text: str) -> None:
        """Print a line of its own above the progress line."""
        self._print(visible(text))
        if self.live and self._active:
            self._draw(now=True)

    def stop(self) -> None:
        """The run is over: the live line is wiped."""
        if self.live and self._active:
            self._write(_CLEAR)
        self._active = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _line(self) -> str:
        parts = [f"step {self._step}/{self._total}"]
        if self._stage:
            parts.append(self._stage)
        if self._reward is not None:
            parts.append(f"reward {number(self._reward)}")
        if self.live and len(self._curve) > 1:
            parts.append(sparkline(list(self._curve), width=_CURVE, bars=self._bars))
        parts.append(f"findings {counts(self._findings)}")
        parts.append(f"eta {duration(self._eta)}")
        return "  ".join(parts)

    def _draw(self, *, now: bool = False) -> None:
        clock = time.monotonic()
        if not self._active or (not now and clock - self._drawn < MIN_INTERVAL_S):
            return
        self._drawn = clock
        width = shutil.get_terminal_size().columns
        self._write(_CLEAR + self._line()[: width - 1])  # a full line would wrap and stay

    def _print(self, line: str) -> None:
        self._write((_CLEAR if self.live and self._active else "") + line + "\n")

    def _write(self, text: str) -> None:
        # A closed or broken stderr must not end a training run.
        with suppress(OSError, ValueError):
            self._file.write(text)
            self._file.flush()


def _is_terminal(file: TextIO) -> bool:
    quiet = os.environ.get("CI") or os.environ.get("TERM") == "dumb"
    return file.isatty() and not quiet


def _takes(file: TextIO, text: str) -> bool:
    try:
        text.encode(getattr(file, "encoding", None) or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True
