"""A saved batch in another form: verl's file, safetensors with JSON, or a trace.

In a trace, a batch that is alone in its step is recorded at the last stage that
:func:`dataproto_audit.check` leads it through, and marked so that a replay leads it through all of
them, too, and says the same of it; what is wrong with the file itself is recorded as found, and
said again. Several batches of one step are recorded where the names of their files say, else at
that last stage, as boundaries of one loop; they are marked as partial: what they lack is missing
knowledge, and no finding.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from dataproto_audit._protocol.safe.errors import Opaque
from dataproto_audit.batch import BatchView
from dataproto_audit.checker.config import settings_from
from dataproto_audit.checker.own_file import report_of
from dataproto_audit.checker.reached import stages_reached
from dataproto_audit.codes import CodedError, UsageError
from dataproto_audit.dump.portable import SUFFIX, write_portable
from dataproto_audit.dump.readers import Saved, is_folder, read_batches, read_folder
from dataproto_audit.dump.trace import write_step
from dataproto_audit.protocol import DataProto
from dataproto_audit.replay.recording import LONE, PARTIAL
from dataproto_audit.replay.written import refuse_no_parent

PICKLES = frozenset({".pkl", ".pickle", ".dp", ".pt"})
VERSION = re.compile(r"\.v?\d+")
"""The end of a folder's name that is no suffix, as of ``run.v2``."""
STEP = ("global_steps", "global_step")
FORMS = "Name a file .pkl (as verl saves a DataProto) or .safetensors, or a folder for a trace."


def convert(
    path: str | PathLike[str], to: str | PathLike[str], *, place: int | None = None
) -> dict[str, Any]:
    """Write the batches of ``path`` as ``to`` says by its suffix; returns what was done.

    ``place`` chooses one of several batches; a trace takes all of them. Raises
    :class:`UsageError` for a form that is not written, a target that is there, or several batches
    for a file that holds one; ``RunError`` where the disk refuses. Files of a folder that cannot be
    read are told in ``left_out``, and the others are written.
    """
    target = Path(to)
    found, unread = _read(path)
    if target.exists():
        raise UsageError("DPA851", f"{target} is there already.", "Name a new file or folder.")
    if place is not None:
        if place >= len(found):
            raise UsageError(
                "DPA851", f"--place {place}: {path} holds {len(found)} batches.", "Count from 0."
            )
        found = [found[place]]
    form = _form(target)
    if form != "trace":
        refuse_no_parent(target)
    if form != "trace" and len(found) > 1:
        raise UsageError(
            "DPA851", f"{path} holds {len(found)} batches and a {form} file one.",
            "Choose one with --place, or name a folder for a trace.",
        )  # fmt: skip
    left_out = unread + sorted({name for saved in found for name in saved.opaque})
    if form == "trace":
        _as_trace(found, target)
    elif form == "safetensors":
        left_out += write_portable(target, found[0].batch)
    else:
        left_out += _as_dataproto(found[0], target)
    return {
        "path": str(path), "to": str(target), "form": form, "batches": len(found),
        "left_out": list(dict.fromkeys(left_out)), "notes": list(found[0].notes),
    }  # fmt: skip


def _read(path: str | PathLike[str]) -> tuple[list[Saved], list[str]]:
    """The batches of a path, and what of a folder is no file that can be read."""
    if not is_folder(Path(path)):
        return read_batches(path), []
    folder = read_folder(path)
    if folder.unreadable and not folder.saved:
        raise folder.unreadable[0]
    return list(folder.saved), [f"unreadable: {error.message}" for error in folder.unreadable]


def _form(target: Path) -> str:
    if target.suffix in PICKLES:
        return "dataproto"
    if target.suffix == SUFFIX:
        return "safetensors"
    if target.suffix and not VERSION.fullmatch(target.suffix):
        raise UsageError("DPA851", f"{target}: no such form is written.", FORMS)
    return "trace"


def _as_dataproto(saved: Saved, target: Path) -> list[str]:
    """verl's own file. Objects that nobody here knows cannot be in it."""
    opaque = [
        f"{part}.{name}" for part, entries in (("non_tensor_batch", saved.arrays),
        ("meta_info", saved.meta)) for name, value in entries.items() if _has_opaque(value)
    ]  # fmt: skip
    arrays = {n: v for n, v in saved.arrays.items() if f"non_tensor_batch.{n}" not in opaque}
    meta = {n: v for n, v in saved.meta.items() if f"meta_info.{n}" not in opaque}
    try:
        batch = DataProto.from_dict(saved.tensors or None, arrays, meta_info=meta)
    except CodedError:
        raise
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            "DPA851", f"{saved.label} cannot be a DataProto ({error}).",
            "Its fields differ in rows; name a .safetensors file.",
        ) from error  # fmt: skip
    batch.save_to_disk(target)
    return opaque


def _has_opaque(value: Any) -> bool:
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, Opaque):
            return True
        if isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo += item
        elif isinstance(item, np.ndarray) and item.dtype == object:
            todo += item.reshape(-1).tolist()
    return False


def _as_trace(found: list[Saved], target: Path) -> None:
    for step, batches in sorted(_by_step(found).items()):
        alone = len(batches) == 1
        settings, _ = settings_from(None, batches[0].meta)
        boundaries: list[Any] = []
        taken: set[tuple[str, str]] = set()
        for saved in batches:
            view = BatchView.of(saved.batch)
            passed = stages_reached(view, settings) or [saved.hint.stage or "rollout"]
            at = passed[-1], "after"
            if not alone:
                at = saved.hint.stage or passed[-1], saved.hint.when or "after"
            part = str(len(boundaries)) if at in taken else ""
            taken.add(at)
            options = {
                "when": at[1], "part": part, "evidence": {LONE if alone else PARTIAL: True},
                "report": report_of(saved),
            }  # fmt: skip
            boundaries.append((at[0], saved.batch, options))
        told = {name: value for name, value in asdict(settings).items() if value is not None}
        write_step(target, step, boundaries, settings=told)


def _by_step(found: list[Saved]) -> dict[int, list[Saved]]:
    """Batches by step: as the file or its batch says, else each in a step of its own."""
    steps: dict[int, list[Saved]] = {}
    unknown = []
    for saved in found:
        told = saved.hint.step
        if told is None:
            told = next((v for n in STEP if type(v := saved.meta.get(n)) is int), None)
        if told is None:
            unknown.append(saved)
        else:
            steps.setdefault(told, []).append(saved)
    for saved in unknown:
        steps[max(steps, default=-1) + 1] = [saved]
    return steps
