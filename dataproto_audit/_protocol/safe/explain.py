"""Turning what goes wrong in a file into one paragraph: the file, the place, the remedy."""

from __future__ import annotations

from pathlib import Path

from dataproto_audit._protocol.safe.errors import RefusedError, TooLargeError
from dataproto_audit.codes import UsageError

UNREADABLE = "DPA810"
REFUSED = "DPA811"
TOO_LARGE = "DPA812"

# How pickle, pickletools, json, gzip and pyarrow say that a file ends too early.
_CUT_OFF = (
    "truncated", "remain", "exhausted", "not enough data in stream", "no newline found",
    "end-of-stream",
)  # fmt: skip


def read_bytes(path: Path) -> bytes:
    """The bytes of a file that holds some.

    Errors: :class:`UsageError` for a file that is missing, no file, or empty.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UsageError(UNREADABLE, f"{path} is no regular file.", "Name a file.")
        data = path.read_bytes()
    except (OSError, ValueError, MemoryError) as error:  # ValueError: a null byte in the path
        why = getattr(error, "strerror", None) or str(error) or "it is larger than the memory"
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            UNREADABLE, f"{path} cannot be read: {why}.", "Check the path and its permissions."
        ) from error
    if not data:
        raise UsageError(
            UNREADABLE,
            f"{path} is empty (0 bytes): its writer failed to write it.",
            "Save it again; verl leaves such a file when a batch holds strided nested tensors, so "
            "convert those to jagged ones first.",
        )
    return data


def explained(error: Exception, path: Path, data: bytes, *, what: str, remedy: str) -> UsageError:
    """What went wrong while ``path`` was read as ``what``, as an error for users."""
    if isinstance(error, UsageError):
        return error
    if isinstance(error, RefusedError):
        return UsageError(
            REFUSED,
            f"{path} asks for {one_line(error)}, which is not on the list of what {what} may "
            "hold. Nothing of it was executed.",
            "If you trust its writer, load it there and save plain arrays and numbers.",
        )
    if isinstance(error, (TooLargeError, MemoryError)):
        return UsageError(
            TOO_LARGE,
            f"{path} is not read: {one_line(error) or 'it needs more memory than there is'}.",
            "A file like this is broken or made to fill memory; save it again.",
        )
    if isinstance(error, EOFError) or any(words in str(error) for words in _CUT_OFF):
        reason = f"it ends in the middle, after {len(data)} bytes"
    else:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}, "
        reason = kind + (one_line(error) or "no further explanation")
    return UsageError(UNREADABLE, f"{path} is no {what.removeprefix('a ')}: {reason}.", remedy)


def one_line(error: object) -> str:
    """The text of an error without what a file could write to a terminal through it."""
    printable = (char if char.isprintable() else " " for char in str(error)[:2000])
    return " ".join("".join(printable).split())[:200]
