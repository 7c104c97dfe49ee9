"""Ctrl-C and termination end a run alike: everything is stopped and closed on the way out."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONE_INTERRUPT_S = 2.0


class Interrupts:
    """A block in which SIGINT and SIGTERM raise ``KeyboardInterrupt`` in the main thread.

    The same interrupt often comes twice: ``timeout`` signals its child and then the whole group.
    Whatever follows the first within :data:`ONE_INTERRUPT_S` is dropped, so that cleaning up is
    not cut short; a later one, of a person who will not wait, is not. Does nothing outside the
    main thread, and leaves SIGINT to a caller who handles it otherwise.
    """

    def __init__(self) -> None:
        self._before: dict[int, object] = {}
        self._first: float | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if number == signal.SIGTERM or handler is signal.default_int_handler:
                    self._before[number] = handler
            self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None is a handler that was not set from Python, which cannot be put back.
            signal.signal(number, handler or signal.SIG_DFL)  # type: ignore[arg-type] # as it was
        self._before.clear()

    def take(self) -> None:
        """Set the handlers, once more after a library has set its own."""
        for number in self._before:
            signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and now - self._first < ONE_INTERRUPT_S:
            return
        self._first = now
        raise KeyboardInterrupt
