"""The catalogue of codes: what each one means, what usually causes it, how it is mended.

Codes are stable and never reused. Families: ``DPA1xx`` structure, ``2xx`` masks and ids, ``3xx``
log-probs, ``4xx`` groups, rewards and advantages, ``5xx`` loss, ``6xx`` dynamics over steps,
``7xx`` ranks, ``8xx`` files, configuration and the run itself, ``9xx`` faults of this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataproto_audit.catalogue import CAUSES, ENTRIES, EXAMPLES, REPORTS

__all__ = [
    "CAUSES", "CODES", "Code", "CodedError", "InternalError", "ProtocolError", "RunError",
    "UsageError",
]  # fmt: skip


class CodedError(ValueError):
    """An error meant for a user: a code, one paragraph, and the remedy.

    ``exit_code`` is what the command line returns: 2 for wrong usage or unreadable input, 3 when
    the run itself failed, 4 for a fault of this package.
    """

    exit_code = 2

    def __init__(self, code: str, message: str, remedy: str = "") -> None:
        self.code = code
        self.message = message
        self.remedy = remedy
        super().__init__(f"{code} {message}" + (f" {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.message, self.remedy)


class UsageError(CodedError):
    """Wrong configuration or unreadable input: nothing was started."""


class RunError(CodedError):
    """The run itself failed: a worker died, a reward function raised."""

    exit_code = 3


class InternalError(CodedError):
    """A fault of this package."""

    exit_code = 4


class ProtocolError(CodedError, AssertionError):
    """Misuse of :class:`~dataproto_audit.DataProto`; an ``AssertionError`` too, as verl raises."""

    def __init__(self, message: str, remedy: str = "", *, code: str = "DPA110") -> None:
        super().__init__(code, message, remedy)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_protocol_error, (self.message, self.remedy, self.code)


def _rebuild_protocol_error(message: str, remedy: str, code: str) -> ProtocolError:
    return ProtocolError(message, remedy, code=code)


@dataclass(frozen=True)
class Code:
    """One entry of the catalogue. ``causes`` is ranked, most frequent first.

    ``reports`` are threads on github.com where people met it, as ``owner/name/issues/number``.
    """

    code: str
    title: str
    meaning: str
    causes: tuple[str, ...] = ()
    fix: str = ""
    example: str = ""
    reports: tuple[str, ...] = ()


CODES: dict[str, Code] = {
    entry[0]: Code(*entry, example=EXAMPLES.get(entry[0], ""), reports=REPORTS.get(entry[0], ()))
    for entry in ENTRIES
}
