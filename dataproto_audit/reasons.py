"""Why a check has no verdict: reasons are texts, and those that a user can change have a kind.

Other reasons are plain texts. A trace stores all of them as text: there the kind is lost.
"""

from __future__ import annotations


class SettingUnknown(str):
    """Reason of a check that has no verdict for want of settings: to tell them turns it on."""

    __slots__ = ()

    @classmethod
    def of(cls, *names: str, then: str = "") -> SettingUnknown:
        """The settings that nobody told; ``then`` says what was tried without them."""
        return cls(f"setting unknown: {', '.join(names)}" + (f"; {then}" if then else ""))


class NotRecorded(str):
    """Reason of a check that has no verdict for want of a record: to keep it turns it on."""

    __slots__ = ()

    @classmethod
    def of(cls, *what: str) -> NotRecorded:
        """What the producer of the batch did not pass along."""
        return cls(f"not recorded: {', '.join(what)}")
