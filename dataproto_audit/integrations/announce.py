"""The one line that an attached run says when it starts, the one when it ends, and faults of ours.

They are no warnings, and most training scripts show warnings only; a line that nobody sees would
leave open whether anything is audited at all. So what no handler of the log would show goes to
standard error.
"""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import suppress

log = logging.getLogger("dataproto_audit")


def say(text: str) -> None:
    """Log ``text`` as news, or write it to standard error where the log shows no news."""
    if log.isEnabledFor(logging.INFO) and _shown():
        log.info("%s", text)
        return
    with suppress(OSError, ValueError, AttributeError):  # a stream that is closed, or none
        sys.stderr.write(f"dataproto-audit: {text}\n")
        sys.stderr.flush()


def _shown() -> bool:
    """True where a handler takes records of level INFO."""
    at: logging.Logger | None = log
    while at is not None:
        if any(handler.level <= logging.INFO for handler in at.handlers):
            return True
        at = at.parent if at.propagate else None
    return False


def text_of(error: BaseException) -> str:
    """What an error says; '' where it cannot say it. Errors of others may fail at that, too."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - whatever it is, it must not take the error's place
        return ""


class Faults:
    """Errors of our own that were logged: one that meets many boundaries is told once."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str, int]] = set()

    def are_news(self, error: Exception) -> bool:
        """True for the first error of its type from its line."""
        at = traceback.extract_tb(error.__traceback__)[-1:]
        key = (type(error).__name__, *((at[0].filename, at[0].lineno or 0) if at else ("", 0)))
        news = key not in self._seen
        self._seen.add(key)
        return news
