"""Asking a user's predicate about a part of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dataproto_audit.codes import UsageError


def asked(predicate: Callable[[Any], Any], part: Any, *, whole: bool) -> bool:
    """What ``predicate`` says of ``part``. An error of it is a no: parts lose fields and rows.

    Raises :class:`UsageError` DPA851 where it raises for the ``whole`` batch.
    """
    try:
        return bool(predicate(part))
    except Exception as error:  # a user's own code, which may raise anything
        if not whole:
            return False
        raise UsageError(
            "DPA851", f"the predicate raised {type(error).__name__}: {error}.",
            "It gets a mapping with batch, non_tensor_batch and meta_info.",
        ) from error  # fmt: skip
