"""Opening a trace: what is listed at once, what is read when it is asked for.

Nothing of a trace is executed: JSON and safetensors are parsed, and every name, size and reference
is checked before it is used. Fields are read lazily, whole or some rows of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.batch import BatchView
from dataproto_audit.dump.trace_file import File, broken, check_schema, read_json, reason
from dataproto_audit.dump.trace_format import (
    BOUNDARY,
    KIND,
    MAX_BOUNDARIES,
    OBJECTS,
    STEP,
    TENSORS,
    TRACE_DIR,
    Stored,
    is_boundary_name,
    step_of_name,
    widened,
)
from dataproto_audit.dump.trace_head import (
    refuse_head,
    refuse_rows,
    refuse_step,
    stored_field,
    too_large,
)
from dataproto_audit.dump.trace_json import Decoder
from dataproto_audit.dump.trace_meta import place_of
from dataproto_audit.findings import When

REMEDY = (
    "Name a trace folder, a run folder that holds one, or one of its steps; "
    "`dataproto-audit convert FILE FOLDER` makes a trace of saved batches."
)
Rows = Sequence[int] | None
_NOT_FINITE: dict[str, float] = {word: float(word) for word in ("nan", "inf", "-inf")}


@dataclass
class Boundary:
    """One recorded boundary. ``fields`` is its table; fields themselves are read on demand."""

    step: Step
    name: str
    head: Mapping[str, Any] = field(repr=False)
    fields: Mapping[str, Stored] = field(repr=False)

    @property
    def stage(self) -> str:
        """The stage that the batch entered or left."""
        return str(self.head["stage"])

    @property
    def when(self) -> When:
        """``before`` or ``after`` the stage."""
        return "before" if self.head["when"] == "before" else "after"

    @property
    def part(self) -> str:
        """Which of several batches at this boundary, '' for the only one."""
        return str(self.head.get("part") or "")

    @property
    def gap(self) -> bool:
        """True where something was left out between this boundary and the one before; traces of
        earlier versions do not tell."""
        return self.head.get("gap") is True

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.head["rows"])

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the run was checked with, as far as they were known."""
        return dict(self.head.get("settings") or {})

    @property
    def outcomes(self) -> list[tuple[str, str, str, str]]:
        """(check, code, kind, reason) of what the run checked here."""
        return [tuple(map(str, outcome)) for outcome in self.head.get("outcomes") or ()]  # type: ignore[misc] # four each

    @property
    def findings(self) -> list[dict[str, Any]]:
        """What the run found here, as :meth:`Finding.to_dict` has it."""
        return list(self.head.get("findings") or ())

    @property
    def sums(self) -> Mapping[str, Any]:
        """Checksums of what lies here, by key; empty in traces of earlier versions."""
        told = self.head.get("sums")
        return told if isinstance(told, Mapping) else {}

    @cached_property
    def meta(self) -> dict[str, Any]:
        """Meta entries of the batch, those that lie at an earlier boundary among them."""
        told = self.head.get("meta") or {}
        if all(place_of(entry) is None for entry in told.values()):
            return self._decoded("meta")
        return {str(name): self.step.meta(self.name, name) for name in told}

    @cached_property
    def evidence(self) -> dict[str, Any]:
        """What the producer knew beside the batch."""
        return self._decoded("evidence")

    def _decoded(self, key: str) -> dict[str, Any]:
        try:
            value = Decoder(self.step.file(self.name))(self.head.get(key) or {})
        except (ValueError, RecursionError) as error:
            raise broken(
                self.step.folder / self.name, f"{key} cannot be read ({reason(error)})"
            ) from error
        return value if isinstance(value, dict) else {}

    @cached_property
    def row_keys(self) -> tuple[str, ...]:
        """Identity of each row through the step."""
        keys = self.head.get("row_keys")
        if keys is None and self.head.get("row_keys_at") in self.step:
            keys = self.step[self.head["row_keys_at"]].head.get("row_keys")
            if keys and len(keys) != self.rows:
                why = f"its row keys lie in {self.head['row_keys_at']!r}, which has {len(keys)}"
                raise broken(self.step.folder / self.name, why)
        return tuple(map(str, keys or ()))

    def tensor(self, name: str, rows: Rows = None) -> Tensor:
        """A tensor field as it was, padded or nested; of some ``rows`` only those are read."""
        return self.step.tensor(self.fields[name], rows)

    def array(self, name: str, rows: Rows = None) -> NDArray[Any]:
        """A non-tensor field, one entry a row."""
        return self.step.array(self.fields[name], rows)

    def view(self, rows: Rows = None, names: Iterable[str] | None = None) -> BatchView:
        """The batch, or ``rows`` and fields ``names`` of it. Raises :class:`UsageError`."""
        wanted = set(self.fields if names is None else names)
        tensors, arrays = {}, {}
        for name, stored in self.fields.items():
            if name in wanted:
                if stored.kind == "objects":
                    arrays[name] = self.array(name, rows)
                else:
                    tensors[name] = self.tensor(name, rows)
        return BatchView(tensors, arrays, self.meta)


def intact(boundary: Boundary, view: BatchView) -> None:
    """Raise DPA820 where a field is not what its fingerprint says."""
    for name, stored in boundary.fields.items():
        if stored.kind == "objects" or not stored.fingerprint:
            continue
        mark = f"{int(view.row_hashes(name).sum(dtype=np.uint64)):016x}"
        if mark != stored.fingerprint:
            raise broken(boundary.step.folder / boundary.name, f"{name} is not what was recorded")


class Step:
    """The boundaries of one step, in order. Fields read whole are kept until :meth:`forget`."""

    def __init__(self, folder: Path, number: int, names: Sequence[str], said: Mapping[str, Any]):
        self.folder = folder
        self.number = number
        self.ended = str(said.get("ended", "unfinished"))
        self.failed = bool(said.get("failed"))
        told = said.get("metrics") or {}
        if not isinstance(told, dict) or any(map(too_large, told.values())):
            raise broken(folder, "its metrics are no numbers by name")
        self.metrics: dict[str, Any] = {str(k): _NOT_FINITE.get(str(v), v) for k, v in told.items()}
        """What the run measured in the step; NaN and infinities as numbers."""
        self._names = list(names)
        self._boundaries: dict[str, Boundary] = {}
        self._files: dict[str, File] = {}
        self._objects: dict[str, dict[str, Any]] = {}
        self._whole: dict[tuple[Any, ...], Any] = {}
        self._entries: dict[tuple[str, str], Any] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Boundary:
        if name not in self._names:
            raise broken(self.folder, f"the boundary {name!r} is missing")
        if name not in self._boundaries:
            self._boundaries[name] = _boundary(self, name)
        return self._boundaries[name]

    @property
    def boundaries(self) -> list[Boundary]:
        """All boundaries in the order of the loop."""
        return [self[name] for name in self._names]

    def find(self, stage: str, when: When = "after") -> Boundary | None:
        """The boundary of a stage; of several, the first."""
        found = (b for b in self.boundaries if b.stage == stage and b.when == when)
        return next(found, None)

    def forget(self) -> None:
        """Let go of fields that were read."""
        self._whole.clear()
        self._entries.clear()
        self._objects.clear()
        self._files.clear()

    def file(self, name: str) -> File:
        """The tensors of a boundary, by key."""
        if name not in self._names:
            raise broken(self.folder, f"a field lies in {name!r}, which is missing")
        if name not in self._files:
            self._files[name] = File(self.folder / name / TENSORS, self[name].sums)
        return self._files[name]

    def tensor(self, stored: Stored, rows: Rows) -> Tensor:
        """A field, or rows of it; see :meth:`Boundary.tensor`."""
        mark = (stored.at, stored.key, stored.orders, stored.dtype)
        if mark in self._whole and rows is None:
            found: Tensor = self._whole[mark]
            return _sized(found, stored, self.file(stored.at).path)
        wanted = self._origins(stored, rows)
        file, key = self.file(stored.at), stored.key
        try:
            if stored.kind == "jagged":
                read = file.jagged(key, wanted, stored.dtype)
            else:
                read = widened(file.rows(key, wanted), stored.dtype)
        except (ValueError, IndexError, KeyError, RuntimeError) as error:
            raise broken(
                file.path, f"the field {stored.name!r} cannot be read ({reason(error)})"
            ) from error
        if rows is None:
            self._whole[mark] = _sized(read, stored, file.path)
        return read

    def array(self, stored: Stored, rows: Rows) -> NDArray[Any]:
        """A non-tensor field, or rows of it."""
        mark = (stored.at, stored.key, stored.orders)
        if mark not in self._whole:
            path = self.folder / stored.at / OBJECTS
            try:
                column = self._column(stored.at)[stored.key]
                array = _array(column, Decoder(self.file(stored.at)))
                order = self._origins(stored, None)
                self._whole[mark] = array if order is None else array[order]
            except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
                raise broken(
                    path, f"the field {stored.name!r} cannot be read ({reason(error)})"
                ) from error
        found: NDArray[Any] = self._whole[mark]
        if found.shape != stored.shape:
            raise broken(
                self.folder / stored.at, f"{stored.name!r} is {found.shape} and not {stored.shape}"
            )
        return found if rows is None else found[list(rows)]

    def meta(self, at: str, name: str) -> Any:
        """One meta entry of boundary ``at``; where that only refers to one, what it refers to."""
        entry = self[at].head["meta"][name]
        home = place_of(entry)
        if home is not None:
            at, told = home, self[home].head.get("meta") or {}
            if name not in told:
                raise broken(self.folder / at, f"the meta entry {name!r} is missing")
            entry = told[name]
        if (at, name) not in self._entries:
            try:
                self._entries[at, name] = Decoder(self.file(at))(entry)
            except (ValueError, RecursionError) as error:
                raise broken(
                    self.folder / at, f"the meta entry {name!r} cannot be read ({reason(error)})"
                ) from error
        return self._entries[at, name]

    def _column(self, name: str) -> dict[str, Any]:
        if name not in self._objects:
            checksum = self[name].sums.get(OBJECTS)
            self._objects[name] = read_json(self.folder / name / OBJECTS, checksum=checksum)
        return self._objects[name]

    def _origins(self, stored: Stored, rows: Rows) -> NDArray[np.int64] | None:
        """Rows to read, in order; None for all as they lie."""
        wanted = None if rows is None else np.asarray(rows, np.int64)
        for name in reversed(stored.orders):
            try:
                order = self.file(name).rows("#order", None).numpy().astype(np.int64)
                wanted = order if wanted is None else order[wanted]
            except (ValueError, IndexError, KeyError) as error:
                raise broken(
                    self.folder / name, f"its order of rows is unusable ({reason(error)})"
                ) from error
        return wanted


def _sized(read: Tensor, stored: Stored, path: Path) -> Tensor:
    """``read`` where it has the shape that the table of fields says; else DPA820."""
    expected = stored.shape[:1] if stored.kind == "jagged" else stored.shape
    actual = (read.size(0),) if stored.kind == "jagged" else tuple(read.shape)
    if expected != actual:
        raise broken(path, f"{stored.name!r} is {actual} and not {expected}")
    return read


def _array(column: Any, decode: Decoder) -> NDArray[Any]:
    if "whole" in column:
        whole: NDArray[Any] = decode(column["whole"])
        if not isinstance(whole, np.ndarray):
            raise ValueError("it is no array")
        return whole
    unique = [decode(item) for item in column["unique"]]
    index = column["index"]
    index = range(len(unique)) if index is None else index
    out = np.empty(len(index), dtype=object)
    for row, place in enumerate(index):
        if not 0 <= place < len(unique):
            raise IndexError(f"entry {place} of {len(unique)}")
        out[row] = unique[place]
    return out


def _boundary(step: Step, name: str) -> Boundary:
    path = step.folder / name / BOUNDARY
    head = check_schema(path, read_json(path))
    try:
        if head["kind"] != KIND:
            raise ValueError(f"it is of the kind {str(head['kind'])[:40]!r}")
        if head["step"] != step.number:
            raise ValueError(f"it is of step {head['step']}, in the folder of step {step.number}")
        refuse_head(head, name, step)
        fields = [stored_field(step, entry) for entry in head["fields"]]
        if len({stored.name for stored in fields}) < len(fields):
            raise ValueError("a field is there twice")
        refuse_rows(head, fields)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise broken(path, f"it is no boundary ({reason(error)})") from error
    return Boundary(step, name, head, {stored.name: stored for stored in fields})


def listed_steps(folder: Path) -> dict[int, tuple[Path, bool]]:
    """Folders of steps and whether each is whole, by step."""
    found = {}
    for path in folder.iterdir():
        number = step_of_name(path.name)
        if number is not None and path.is_dir():
            found[number] = (path, (path / STEP).is_file())
    return dict(sorted(found.items()))


def open_step(folder: Path, number: int, *, whole: bool) -> Step:
    """A step of a trace; one that is not whole has the boundaries that were finished."""
    if whole:
        said = check_schema(folder / STEP, read_json(folder / STEP))
        names = said.get("boundaries")
    else:
        said = {}
        names = sorted(p.parent.name for p in folder.glob(f"*/{BOUNDARY}"))
    if not isinstance(names, list) or len(names) > MAX_BOUNDARIES:
        raise broken(folder, "it does not list its boundaries")
    if not all(map(is_boundary_name, names)):
        raise broken(folder, "a boundary has a name that is none")
    if whole:
        try:
            refuse_step(said, number)
        except ValueError as error:
            raise broken(folder / STEP, f"it is no step ({reason(error)})") from error
    return Step(folder, number, names, said)


__all__ = [
    "REMEDY",
    "TRACE_DIR",
    "Boundary",
    "Step",
    "broken",
    "intact",
    "listed_steps",
    "open_step",
]
