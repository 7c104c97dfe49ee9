"""The files of a trace: tensors read lazily, JSON of a known version, one error for all."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dataproto_audit.codes import UsageError
from dataproto_audit.dump.trace_format import SCHEMA, sum_of, widened
from dataproto_audit.storage import jagged_of_parts

NOT_AS_RECORDED = "it is not what was recorded"


def broken(path: Path, why: str) -> UsageError:
    """DPA820 for a part of a trace that cannot be read."""
    return UsageError(
        "DPA820", f"{path}: {why}.", "Record the step again, or name another step of the trace."
    )


def reason(error: Exception) -> str:
    """What an error says, without the code and the remedy of one of ours."""
    return str(getattr(error, "message", error))


class File(Mapping[str, Tensor]):
    """A safetensors file, opened when it is first asked. Raises DPA820 for a broken one.

    ``sums`` are the checksums of its tensors by key; one that is read whole is compared with its
    own. Traces of earlier versions have none.
    """

    def __init__(self, path: Path, sums: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._sums = dict(sums or {})

    @cached_property
    def _open(self) -> Any:
        refuse_special(self.path)
        try:
            return safe_open(self.path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise broken(self.path, f"it cannot be read ({error})") from error

    def __getitem__(self, key: str) -> Tensor:
        return self.rows(key, None)

    def __iter__(self) -> Any:
        return iter(self._open.keys())

    def __len__(self) -> int:
        return len(self._open.keys())

    def rows(self, key: str, rows: NDArray[np.int64] | None) -> Tensor:
        """A tensor, or rows of it in this order, read in runs of neighbours."""
        try:
            if rows is None:
                return self._whole(key)
            part = self._open.get_slice(key)
            count = int(part.get_shape()[0])
            if len(rows) and not (rows.min() >= 0 and rows.max() < count):
                raise IndexError(f"{count} rows, row {int(rows.max())} is asked for")
            if 4 * len(rows) > count:
                return self._whole(key)[torch.from_numpy(rows)]
            runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if len(rows) else []
            read = [part[int(run[0]) : int(run[-1]) + 1] for run in runs]
            return torch.cat(read) if read else part[0:0]
        except SafetensorError as error:
            raise KeyError(str(error)) from error

    def _whole(self, key: str) -> Tensor:
        whole: Tensor = self._open.get_tensor(key)
        want = self._sums.pop(key, None)
        if want is not None and want != sum_of(whole):
            raise ValueError(NOT_AS_RECORDED)
        return whole

    def jagged(self, key: str, rows: NDArray[np.int64] | None, dtype: str) -> Tensor:
        """A nested tensor, or rows of it."""
        values, offsets = self._open.get_slice(f"{key}.values"), self[f"{key}.offsets"].long()
        total = int(values.get_shape()[0])
        steps = offsets.diff()
        if not len(offsets) or int(offsets[0]) or int(offsets[-1]) != total or (steps < 0).any():
            raise ValueError("its offsets do not fit its values")
        if rows is None:
            return jagged_of_parts(widened(self[f"{key}.values"], dtype), offsets)
        parts = [values[int(offsets[row]) : int(offsets[row + 1])] for row in rows.tolist()]
        lengths = torch.tensor([0, *map(len, parts)])
        joined = torch.cat(parts) if parts else values[0:0]
        return jagged_of_parts(widened(joined, dtype), lengths.cumsum(0))


def refuse_special(path: Path) -> None:
    """Raise DPA820 for what is no file of its own: a link, a pipe or a device may never end."""
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise broken(path, f"it cannot be read ({error})") from error
    if not stat.S_ISREG(mode):
        raise broken(path, "it is a link or a device, and no file")


def read_json(path: Path, *, checksum: Any = None) -> Any:
    """The JSON of a file of the trace, with this checksum where one is known. Raises DPA820."""
    refuse_special(path)
    try:
        data = path.read_bytes()
        if checksum not in (None, sum_of(data)):
            raise ValueError(NOT_AS_RECORDED)
        return json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise broken(path, f"it cannot be read ({error})") from error


def check_schema(path: Path, said: Any) -> Mapping[str, Any]:
    """``said`` when it is of a version that is read; DPA821 for a newer one, DPA820 for others."""
    version = said.get("schema") if isinstance(said, dict) else None
    if type(version) is not int or version < 1:
        raise broken(path, "it does not say of which version it is")
    if version > SCHEMA:
        raise UsageError(
            "DPA821", f"{path}: the trace is of schema {version}, this version reads {SCHEMA}.",
            "Update dataproto-audit, or record with the version that reads it.",
        )  # fmt: skip
    known: Mapping[str, Any] = said
    return known
