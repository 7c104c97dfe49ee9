"""Errors of the batch type, and the sentence that explains two row counts by a factor."""

from typing import Any

from dataproto_audit.codes import ProtocolError


class RowIndexError(ProtocolError, IndexError):
    """A row outside the batch; an ``IndexError`` too, so that iteration over a batch ends."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.remedy)


class FieldKeyError(ProtocolError, KeyError):
    """A field that the batch does not have; a ``KeyError`` too."""

    __str__ = Exception.__str__  # KeyError would show the message quoted

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.remedy)


def factor_note(left: int, right: int, *, left_name: str, right_name: str) -> str:
    """Say which side lacks a repetition when one count is a multiple of the other.

    >>> factor_note(3, 12, left_name="the left side", right_name="the right side")
    '12 = 4 x 3: the left side was not repeated by 4.'
    """
    small, large, name = (left, right, left_name) if left < right else (right, left, right_name)
    if small == 0 or small == large or large % small:
        return ""
    factor = large // small
    return f"{large} = {factor} x {small}: {name} was not repeated by {factor}."


def missing_field(kind: str, key: Any, present: Any) -> FieldKeyError:
    """Build the error for ``key``, which the mapping ``present`` of this kind does not have."""
    names = ", ".join(map(str, present)) or "none"
    return FieldKeyError(f"{kind} has no field {key!r}.", f"It has: {names}.")
