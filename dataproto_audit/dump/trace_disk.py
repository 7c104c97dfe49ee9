"""Boundaries and steps on disk, each whole or absent.

Files of a boundary are written one by one (temporary file, fsync, rename, fsync of the folder),
``boundary.json`` last; a step is whole once its ``step.json`` is there, which names its boundaries.
A kill at any point leaves steps without that file, and readers pass them over.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dataproto_audit.atomic import (
    TMP_SUFFIX,
    atomic_path,
    atomic_write_bytes,
    fsync_folder,
    json_text,
    storage_error,
)
from dataproto_audit.dump.trace_delta import Snapshot
from dataproto_audit.dump.trace_format import (
    BOUNDARY,
    KIND,
    OBJECTS,
    SCHEMA,
    STEP,
    TENSORS,
    Stored,
    narrowed,
    step_folder,
    step_of_name,
    sum_of,
)
from dataproto_audit.dump.trace_json import Encoder
from dataproto_audit.dump.trace_meta import MetaWriter

_ERRNO = re.compile(r"os error (\d+)")
_VERSIONS = ("dataproto-audit", "torch", "numpy", "tensordict", "transformers", "vllm", "verl")


class StepFiles:
    """Writes the boundaries of one step, ``after`` those that a whole step has or in its place.

    Raises ``RunError`` DPA802 where the disk refuses.
    """

    def __init__(self, trace: Path, step: int, *, after: bool = False) -> None:
        self.folder = step_folder(trace, step)
        self.step = step
        self.names: list[str] = []
        self._texts: dict[str, tuple[str, str]] = {}
        self._moved: dict[tuple[str, str], tuple[str, str]] = {}
        self._before: dict[str, Any] = {}
        self._meta = MetaWriter()
        if after:
            self._before = whole_step(trace, step)
            self.names += self._before.get("boundaries", ())
        if self._before:
            return
        try:
            remove_step(trace, step)
            self.folder.mkdir(parents=True)
            fsync_folder(trace)
        except OSError as error:
            raise storage_error(self.folder, error) from error

    def write(self, snapshot: Snapshot) -> None:
        """Write one boundary."""
        place = self.folder / snapshot.name
        columns, encode = Encoder(prefix="#column"), Encoder(prefix="#value")
        meta = self._meta(snapshot.name, snapshot.meta)
        objects = {
            name: text
            for name, text in ((n, _column(a, columns)) for n, a in snapshot.columns.items())
            if self._is_new(snapshot.name, name, text)
        }
        tensors = {name: narrowed(tensor) for name, tensor in snapshot.tensors.items()}
        if snapshot.order is not None:
            tensors["#order"] = narrowed(torch.from_numpy(snapshot.order))
        head = self._head(snapshot, meta.said, encode)
        head["opaque"] = sorted({*snapshot.opaque, *columns.opaque, *meta.opaque, *encode.opaque})
        try:
            place.mkdir()
            fsync_folder(self.folder)
        except OSError as error:
            raise storage_error(place, error) from error
        tensors |= columns.tensors | meta.tensors | encode.tensors
        text = json.dumps(objects).encode()
        head["sums"] = {OBJECTS: sum_of(text), **{n: sum_of(t) for n, t in tensors.items()}}
        _save(tensors, place / TENSORS)
        atomic_write_bytes(place / OBJECTS, text)
        atomic_write_bytes(place / BOUNDARY, json_text(head, indent=1).encode())
        self.names.append(snapshot.name)

    def finish(self, ended: str, *, failed: bool, metrics: Mapping[str, Any]) -> None:
        """Declare the step whole. ``ended`` is ``finished``, ``broken_off`` or ``kept``."""
        said = {
            "schema": SCHEMA, "step": self.step, "ended": ended,
            "failed": failed or bool(self._before.get("failed")), "boundaries": self.names,
            "metrics": {**self._before.get("metrics", {}), **metrics},
        }  # fmt: skip
        atomic_write_bytes(self.folder / STEP, (json_text(said, indent=1) + "\n").encode())
        self._before = said

    def _is_new(self, here: str, name: str, encoded: Any) -> bool:
        """False where an equal column was written before: it is referred to."""
        text = json.dumps(encoded)
        mark = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        if '"#column' in text:  # hoisted numbers are not in the text
            return True
        known = self._texts.setdefault(mark, (here, name))
        if known == (here, name):
            return True
        self._moved[here, name] = known
        return False

    def _at_home(self, stored: Stored) -> dict[str, Any]:
        at, key = self._moved.get((stored.at, stored.key), (stored.at, stored.key))
        return replace(stored, at=at, key=key).to_dict()

    def _head(self, snapshot: Snapshot, meta: Any, encode: Encoder) -> dict[str, Any]:
        rows, prompt, response = snapshot.sizes
        settings = {k: v for k, v in snapshot.settings.items() if v is not None}
        report = snapshot.report
        return {
            "kind": KIND,
            "schema": SCHEMA,
            "step": self.step,
            "stage": snapshot.stage,
            "when": snapshot.when,
            "part": snapshot.part,
            **({"gap": True} if snapshot.gap else {}),
            "rows": rows,
            "prompt": prompt,
            "response": response,
            "fields": [self._at_home(stored) for stored in snapshot.fields],
            "row_keys": None if snapshot.row_keys is None else list(snapshot.row_keys()),
            "row_keys_at": snapshot.keys_at,
            "settings": settings,
            "config_hash": hash_of(settings),
            "versions": versions(),
            "meta": meta,
            "evidence": encode(snapshot.evidence),
            "outcomes": [[o.check, o.code, o.kind, o.reason] for o in report.outcomes],
            "findings": [finding.to_dict() for finding in report.findings],
        }


def _column(array: Any, encode: Encoder) -> Any:
    """A non-tensor field: each distinct object once, and which one each row has."""
    if array.dtype != object or array.ndim != 1:
        return {"whole": encode(array)}
    place: dict[int, int] = {}
    unique: list[Any] = []
    index = []
    for item in array.tolist():
        if id(item) not in place:
            place[id(item)] = len(unique)
            unique.append(item)
        index.append(place[id(item)])
    encoded = [encode(item) for item in unique]
    return {"unique": encoded, "index": index if len(unique) < len(index) else None}


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        with atomic_path(path) as temporary:
            save_file(dict(tensors), temporary)
    except SafetensorError as error:
        found = _ERRNO.search(str(error))
        cause = OSError(int(found[1]) if found else errno.EIO, str(error))
        raise storage_error(path, cause) from error


def remove_step(trace: Path, step: int) -> None:
    """Remove a step: first what declares it whole, then the rest. Raises ``OSError``."""
    folder = step_folder(trace, step)
    if not folder.is_dir():
        return
    with suppress(FileNotFoundError):
        (folder / STEP).unlink()
        fsync_folder(folder)
    shutil.rmtree(folder)


def whole_step(trace: Path, step: int) -> dict[str, Any]:
    """What ``step.json`` of a step says; empty where it is not whole."""
    try:
        said = json.loads((step_folder(trace, step) / STEP).read_bytes())
    except (OSError, ValueError):  # none, or not ours: nothing to add to
        return {}
    return said if isinstance(said, dict) and isinstance(said.get("boundaries"), list) else {}


def listed(trace: Path) -> list[int]:
    """Numbers of the steps that have a folder. Raises ``OSError``."""
    found = (step_of_name(path.name) for path in trace.iterdir())
    return sorted(step for step in found if step is not None)


def remove_leftovers(trace: Path) -> None:
    """Remove temporary files that a kill left behind. Raises ``OSError``."""
    for path in trace.rglob(f".*{TMP_SUFFIX}"):
        path.unlink()


def hash_of(settings: Mapping[str, Any]) -> str:
    """Equal for equal settings: 16 hex digits."""
    text = json_text(dict(sorted(settings.items())))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions of what made the batch, as far as it is installed."""
    found = {"python": sys.version.split()[0]}
    for name in _VERSIONS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
