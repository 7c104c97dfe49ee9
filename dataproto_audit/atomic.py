"""Files that are either whole or absent, also after a kill or a power cut.

Write to a temporary file beside the target, ``fsync`` it, rename it over the target, ``fsync`` the
folder. A reader sees the old content or the new one, never a part. Not covered: two processes that
write one target at the same time (the last rename wins).
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dataproto_audit.codes import RunError
from dataproto_audit.findings import plain

TMP_SUFFIX = ".tmp"
"""Ends the name of every temporary file; what a kill leaves behind under it may be deleted."""

_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


def storage_error(path: str | os.PathLike[str], error: OSError) -> RunError:
    """``error`` as DPA802: what could not be written, and the remedy that fits the cause."""
    if error.errno in _FULL:
        what, remedy = "the disk is full", "Free space on it or choose another folder."
    elif error.errno in _DENIED:
        what, remedy = "the folder is not writable", "Change its permissions or choose another one."
    elif error.errno == errno.ENOENT:
        what, remedy = "the folder does not exist", "Create it or choose another one."
    elif error.errno == errno.EFBIG:
        what, remedy = "the file-size limit is reached", "Raise it (ulimit -f) or free space."
    else:
        what, remedy = f"writing failed ({error})", "Check the disk or choose another folder."
    saved = "What was written before is intact."
    return RunError("DPA802", f"{os.fspath(path)}: {what}. {saved}", remedy)


def fsync_folder(path: str | os.PathLike[str]) -> None:
    """Make renames and deletions in ``path`` durable; a no-op where folders cannot be synced."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems refuse to sync a folder
            os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path to write to; it becomes ``path`` when the block ends without an exception.

    The block may write with any library, for instance ``save_file``. On an exception the temporary
    file is removed and ``path`` keeps its old content. ``OSError`` becomes ``RunError`` DPA802.
    """
    target = Path(path)
    # The process id keeps two processes from sharing a temporary file; the rename decides.
    temporary = target.with_name(f".{target.name}.{os.getpid()}{TMP_SUFFIX}")
    try:
        yield temporary
        fd = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, target)
        fsync_folder(target.parent)
    except OSError as error:
        raise storage_error(target, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes | memoryview) -> None:
    """Replace ``path`` by ``data``, durably. Raises ``RunError`` DPA802 when the disk refuses."""
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        file.write(data)


def atomic_write_json(path: str | os.PathLike[str], value: Any, *, indent: int | None = 2) -> None:
    """Replace ``path`` by ``value`` as JSON (see :func:`json_text`), durably."""
    atomic_write_bytes(path, (json_text(value, indent=indent) + "\n").encode())


def json_text(value: Any, *, indent: int | None = None) -> str:
    """``value`` as strict JSON; arrays become lists, NaN and infinities "nan", "inf", "-inf".

    JSON has no word for those numbers, and the ``NaN`` that Python writes breaks other readers.
    """
    return json.dumps(_strict(plain(value)), indent=indent)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return value
