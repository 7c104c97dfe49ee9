"""What OmegaConf refuses, in words of our own: which key, what was given, what the key takes."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.schema import Config

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
REMEDY = "Correct the value."


def refused(error: OmegaConfBaseException, origin: str) -> UsageError:
    """DPA851 for a value that does not fit its key; ``origin`` is an override or a file."""
    given_key, equals, value = origin.partition("=")
    key = getattr(error, "full_key", None) or (given_key if equals else "")
    if isinstance(error, (InterpolationKeyError, InterpolationResolutionError)):
        text = str(getattr(error, "msg", None) or error).splitlines()[0].rstrip(".")
        return UsageError("DPA851", f"{origin}: {key}: {text}.", "Refer to a key that is there.")
    hint = hint_of(key)
    if hint is None:
        return UsageError("DPA851", f"{origin} cannot be merged.", REMEDY)
    takes, remedy = wanted(key, hint)
    given = f" is {value[:200] or 'empty'}" if equals and key == given_key else f" in {origin}"
    return UsageError("DPA851", f"{key}{given}, but takes {takes}.", remedy)


def hint_of(key: str) -> Any:
    """The annotation of a dotted key of the schema; None where it has none."""
    hint: Any = Config
    for part in key.partition("[")[0].split("."):
        sections = [one for one in (hint, *typing.get_args(hint)) if is_dataclass(one)]
        if not sections:
            return None
        hint = typing.get_type_hints(sections[0]).get(part)
    return hint


def wanted(key: str, hint: Any) -> tuple[str, str]:
    """What a key takes, and the remedy."""
    inner = [one for one in typing.get_args(hint) if one is not type(None)]
    optional = isinstance(hint, types.UnionType) and len(inner) < len(typing.get_args(hint))
    kind = inner[0] if isinstance(hint, types.UnionType) else hint
    if is_dataclass(kind):
        return "keys of its own", f"Give them one by one: {key}.NAME=value."
    origin = typing.get_origin(kind) or kind
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping", f"Give its entries one by one: {key}.NAME=value."
    if isinstance(origin, type) and issubclass(origin, Sequence) and origin is not str:
        return "a list", f"Write {key}=[FIRST,SECOND]."
    words = _WORDS.get(kind, "another kind of value")
    return (f"{words} or null" if optional else words), REMEDY
