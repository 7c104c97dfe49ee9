"""Names the rank that the others wait for, when a stage of the workers does not move any more.

The driver waits in the stage's call meanwhile, so a thread looks at the notes. SIGUSR1 makes the
driver's process say the same at any time.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from dataproto_audit.integrations.worker_files import Exchange
from dataproto_audit.progress import Note, describe, uneven

log = logging.getLogger("dataproto_audit")


class HangWatch:
    """Follows the notes of one stage after the other. ``timeout_s`` 0 waits for signals only."""

    def __init__(self, exchange: Exchange, *, timeout_s: float) -> None:
        self._exchange, self._timeout_s = exchange, timeout_s
        self._call, self._stage = 0, ""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._previous: Any = None
        self._handles = False

    # -- on request --------------------------------------------------------------------------------

    def on_signal(self) -> None:
        """From now on SIGUSR1 makes the log say where ranks are, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGUSR1, self._asked)
            self._handles = True

    def _asked(self, number: int, frame: FrameType | None) -> None:
        # a thread, because the log's lock may be held by what the signal interrupted
        threading.Thread(target=self.report, args=("asked by SIGUSR1",), daemon=True).start()

    # -- by time -----------------------------------------------------------------------------------

    def begin(self, call: int, stage: str) -> None:
        """Ranks are at work in ``stage`` from now on."""
        self.end()
        self._call, self._stage = call, stage
        if self._timeout_s > 0:
            self._over = threading.Event()
            self._thread = threading.Thread(
                target=self._follow, args=(self._over,), name="dataproto-audit-hang", daemon=True
            )
            self._thread.start()

    def _follow(self, over: threading.Event) -> None:
        began = time.time()
        while not over.wait(self._timeout_s / 4):
            moved = max([began, *(note.at for note in self._notes() if note is not None)])
            if time.time() - moved > self._timeout_s:
                self.report(f"nothing moved for {time.time() - moved:.0f} s")
                return

    def end(self) -> None:
        """The stage is over."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            self._thread = None

    def finish(self) -> None:
        """Watch no longer; the signal is what it was."""
        self.end()
        if self._handles:
            self._handles = False
            if signal.getsignal(signal.SIGUSR1) == self._asked:
                signal.signal(signal.SIGUSR1, self._previous or signal.SIG_DFL)

    # -- what is said ------------------------------------------------------------------------------

    def report(self, why: str) -> None:
        """Write to the log who waits for whom."""
        notes = self._notes()
        told = uneven(notes, call=self._call) or "no rank has written a note"
        log.error("%s of the workers, %s: %s.\n%s",
                  self._stage or "no stage", why, told, describe(notes))  # fmt: skip

    def _notes(self) -> Sequence[Note | None]:
        try:
            return self._exchange.notes()
        except (OSError, ValueError, TypeError) as error:  # a note that is just being replaced
            log.debug("notes cannot be read: %s", error)
            return []
