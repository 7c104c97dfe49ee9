"""Row keys and tags of verl's V1 store, kept in ``*.kvmeta.json`` beside a snapshot.

A file holds ``{"keys": [..], "tags": [{..}, ..], "partition_id": ..}``, one key and tag a row. Keys
are ``<uid>_<session>_<output>``. Tags tell staleness: ``global_steps`` is the step that asked for
the row, ``min_global_steps``/``max_global_steps`` the weights that sampled it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dataproto_audit._protocol.safe.explain import explained, read_bytes
from dataproto_audit.dump.readers.saved import Saved

KEY_FIELD = "store_key"
TAG_PREFIX = "tag."
KEY = re.compile(r"(?P<uid>.+)_\d+_\d+")
REMEDY = "Save keys and tags again, or remove the file."


def read_keys(path: Path) -> tuple[list[str], list[dict[str, Any]], dict[str, Any]]:
    """Keys, tags and whatever else the file says.

    Errors: :class:`UsageError` for a file of another form.
    """
    data = read_bytes(path)
    try:
        found = json.loads(data)
        return split_keys(found)
    except Exception as error:  # JSON of unknown origin: also recursion and huge numbers
        raise explained(error, path, data, what="a list of keys and tags", remedy=REMEDY) from error


def split_keys(found: Any) -> tuple[list[str], list[dict[str, Any]], dict[str, Any]]:
    """Take ``{"keys": .., "tags": ..}`` apart."""
    if not isinstance(found, dict) or not isinstance(found.get("keys"), list):
        raise ValueError("it has no list of keys")
    keys, tags = [str(key) for key in found["keys"]], found.get("tags") or []
    if not isinstance(tags, list) or not all(isinstance(tag, dict) for tag in tags):
        raise ValueError("its tags are no list of objects")
    if tags and len(tags) != len(keys):
        raise ValueError(f"it has {len(tags)} tags for {len(keys)} keys")
    return keys, tags, {k: v for k, v in found.items() if k not in ("keys", "tags")}


def columns_of(keys: Sequence[str], tags: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Keys as the column ``store_key``, tags as columns ``tag.<name>``; None where a row has none.

    >>> columns_of(["a_0_0"], [{"status": "success"}])
    {'store_key': ['a_0_0'], 'tag.status': ['success']}
    """
    names = dict.fromkeys(str(name) for tag in tags for name in tag)
    columns: dict[str, list[Any]] = {KEY_FIELD: list(keys)}
    columns.update({TAG_PREFIX + name: [tag.get(name) for tag in tags] for name in names})
    return columns


def with_keys_beside(saved: Saved) -> Saved:
    """Add the keys and tags of the file beside a store snapshot, if one lines up with its rows.

    Tried in this order: the keys that entered the snapshot's own method, then what balancing gave
    out and took in. A list of keys lines up when each key begins with the uid of its row.
    """
    method, call = saved.hint.method, saved.hint.call
    suffix = f".call{call}" if call else ""
    names = [f"v1.{method}.in", "v1._balance_batch.out", "v1._balance_batch.in"]
    beside = [saved.path.with_name(f"{name}{suffix}.kvmeta.json") for name in names]
    for path in (path for path in beside if path.is_file()):
        keys, tags, rest = read_keys(path)
        if _line_up(keys, saved):
            return saved.with_columns(columns_of(keys, tags), **rest, keys_from=path.name)
    return saved


def _line_up(keys: Sequence[str], saved: Saved) -> bool:
    if len(keys) != saved.rows:
        return False
    uids = saved.arrays.get("uid")
    return uids is None or all(
        str(key).startswith(f"{uid}_") for key, uid in zip(keys, uids, strict=True)
    )
