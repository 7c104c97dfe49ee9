"""Which steps of a run a trace keeps: the words of ``audit.trace``. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from dataproto_audit.codes import UsageError

DEFAULT = "last:1"
MODES = "last:K, every:N, failing or all"


@dataclass(frozen=True)
class Retention:
    """What is kept; the table is in :mod:`.trace_write`."""

    mode: str
    number: int = 0

    @classmethod
    def parse(cls, text: str, *, key: str = "the retention of a trace") -> Retention:
        """``last:2``, ``every:10``, ``failing`` or ``all``; :class:`UsageError` for others."""
        mode, _, number = str(text).partition(":")
        if mode in ("failing", "all") and text == mode:
            return cls(mode)
        if mode in ("last", "every") and number.isdigit() and int(number) > 0:
            return cls(mode, int(number))
        raise UsageError(
            "DPA851", f"{key} is {text!r}.", f"Choose {MODES}; K and N are numbers from 1."
        )

    def streams(self, step: int) -> bool:
        """True for steps that are written while they run."""
        return self.mode == "all" or (self.mode == "every" and step % self.number == 0)
