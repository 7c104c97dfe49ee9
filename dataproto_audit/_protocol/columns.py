"""Selecting, popping and renaming columns. Names are checked before anything is changed."""

from collections.abc import Iterable, Mapping
from typing import Any

from tensordict import TensorDict

from dataproto_audit._protocol.errors import missing_field
from dataproto_audit.codes import ProtocolError


def check_names(kind: str, have: Mapping[str, Any] | TensorDict | None, keys: list[str]) -> None:
    """Refuse names that the mapping does not have."""
    names = [] if have is None else list(have.keys())
    for key in keys:
        if key not in names:
            raise missing_field(kind, key, names)


def select_tensors(batch: TensorDict | None, keys: Iterable[str] | None) -> TensorDict | None:
    """Keep these tensors; all of them (the same TensorDict) for None."""
    if keys is None:
        return batch
    keys = list(keys)
    check_names("the tensor batch", batch, keys)
    return None if batch is None else batch.select(*keys)


def select_entries(have: dict[str, Any], keys: Iterable[str] | None) -> dict[str, Any]:
    """Keep these entries, those that are there; all of them (the same dict) for None."""
    if keys is None:
        return have
    wanted = set(keys)
    return {key: value for key, value in have.items() if key in wanted}


def pop_all(
    parts: tuple[TensorDict | None, dict[str, Any], dict[str, Any]],
    names: tuple[Iterable[str] | None, Iterable[str] | None, Iterable[str] | None],
) -> list[dict[str, Any]]:
    """Take named entries out of tensors, arrays and meta; all names must be there."""
    kinds = ("the tensor batch", "the non-tensor batch", "meta_info")
    wanted = [list(keys or ()) for keys in names]
    for kind, part, keys in zip(kinds, parts, wanted, strict=True):
        check_names(kind, part, keys)
    return [
        {} if part is None else {key: part.pop(key) for key in dict.fromkeys(keys)}
        for part, keys in zip(parts, wanted, strict=True)
    ]


def rename_tensors(batch: TensorDict | None, old_keys: Any, new_keys: Any) -> None:
    """Rename tensors in place; a string stands for a list of one."""
    pairs = []
    for keys in (old_keys, new_keys):
        if not isinstance(keys, (str, list)):
            raise TypeError(f"keys must be a list or a string, but got {type(keys)}")
        pairs.append([keys] if isinstance(keys, str) else keys)
    old, new = pairs
    if len(old) != len(new):
        raise ProtocolError(f"{len(old)} old names for {len(new)} new names.")
    check_names("the tensor batch", batch, old)
    if batch is not None:
        values = [batch.pop(key) for key in old]  # all out first: names may be swapped
        for key, value in zip(new, values, strict=True):
            batch[key] = value
