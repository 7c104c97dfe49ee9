"""How ranks and driver tell each other things: small files in one folder, none of them verl's.

Evidence does not travel in what verl's workers return: those values are merged over ranks into
verl's metrics and batches, on one path even only from some of the ranks, and a hook that failed to
take ours out again would change the training. A file is there when the worker's call returns, it is
there after a rank has died, too, and notes can be read while a call hangs.

The folder is ``ranks-<job>`` in ``run_dir``, named by Ray's job (``ranks`` without Ray), so that a
run that still goes on in there is not disturbed. Without that option it is one of this machine's
temporary folders; runs on several nodes need ``run_dir`` on a file system that all of them share.
That a second run into ``run_dir`` writes its tables beside it changes nothing here: workers know
the option only. Where ``run_dir`` is the name of a file, the folder is ``<run_dir>-ranks-<job>``.
Files are replaced at once and without waiting for the disk;
:meth:`Exchange.remove` deletes the folder when the run ends.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataproto_audit.integrations.options import Options
from dataproto_audit.progress import Note

NAME = "ranks"
_OPEN = "open.json"
_NOTE = re.compile(r"note-(\d+)-of-(\d+)\.json")


@dataclass(frozen=True)
class Asked:
    """A stage that the driver has begun. ``looks``: its evidence is wanted, not only notes."""

    stage: str
    call: int
    looks: bool


@dataclass(frozen=True)
class Answer:
    """What one rank saw of a stage: plain data, and one array a field."""

    told: Mapping[str, Any]
    arrays: Mapping[str, Any]


def exchange_for(options: Options) -> Exchange:
    """The folder of this run; the same for its driver and its workers."""
    ray: Any = sys.modules.get("ray")
    job = ""
    if ray is not None and ray.is_initialized():
        context = ray.get_runtime_context()
        job = f"{context.gcs_address}-{context.get_job_id()}"
    safe = re.sub(r"[^A-Za-z0-9.]+", "-", job)
    name = f"{NAME}-{safe}".rstrip("-")
    if options.run_dir:
        own = Path(options.run_dir).absolute()
        beside = own.exists() and not own.is_dir()
        return Exchange(own.with_name(f"{own.name}-{name}") if beside else own / name)
    folder = f"dataproto-audit-{os.getuid()}-{safe or 'local'}"
    return Exchange(Path(tempfile.gettempdir()) / folder)


class Exchange:
    """One folder of questions, notes and answers. Errors of the file system are raised."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # -- the driver --------------------------------------------------------------------------------

    def ask(self, asked: Asked) -> None:
        """Stage ``asked`` begins."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self.folder.glob("answer-*.npz"):
            path.unlink(missing_ok=True)
        self._replace(_OPEN, json.dumps(asdict(asked)).encode())

    def close(self) -> None:
        """No stage is open."""
        (self.folder / _OPEN).unlink(missing_ok=True)

    def answers(self, call: int) -> list[Answer]:
        """What ranks told in ``call``, by rank."""
        found = []
        for path in self.folder.glob("answer-*.npz"):
            with np.load(path, allow_pickle=False) as held:
                arrays = {name: held[name] for name in held.files}
            told = json.loads(arrays.pop("told").tobytes())
            if told["call"] == call:
                found.append(Answer(told, arrays))
        return sorted(found, key=lambda answer: int(answer.told["rank"]))

    def notes(self) -> list[Note | None]:
        """The last note of each rank; None for one that has not written any."""
        found: dict[int, Note] = {}
        ranks = 0
        for path in self.folder.glob("note-*.json"):
            match = _NOTE.fullmatch(path.name)
            if match:
                found[int(match[1])] = Note(**json.loads(path.read_bytes()))
                ranks = max(ranks, int(match[2]))
        return [found.get(rank) for rank in range(max([ranks, *(r + 1 for r in found)]))]

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- the workers -------------------------------------------------------------------------------

    def asked(self) -> Asked | None:
        """The open stage, or None."""
        try:
            return Asked(**json.loads((self.folder / _OPEN).read_bytes()))
        except FileNotFoundError:
            return None

    def note(self, note: Note, ranks: int) -> None:
        """Where this rank is."""
        self._replace(f"note-{note.rank}-of-{ranks}.json", json.dumps(asdict(note)).encode())

    def answer(self, answer: Answer) -> None:
        """What this rank saw of the open stage."""
        told = np.frombuffer(json.dumps(answer.told).encode(), np.uint8)
        data = io.BytesIO()
        np.savez(data, told=told, **answer.arrays)
        self._replace(f"answer-{answer.told['rank']}.npz", data.getvalue())

    def _replace(self, name: str, data: bytes) -> None:
        temporary = self.folder / f".{name}.{os.getpid()}"
        temporary.write_bytes(data)
        temporary.replace(self.folder / name)
