"""Metrics of the steps of a run, out of what trackers leave behind. Told apart by content.

=========================  =====================================================================
what                       as
=========================  =====================================================================
verl's file logger         JSONL, ``{"step": 3, "data": {"actor/pg_loss": 0.1, ...}}``
console output of verl     text, ``step:3 - actor/pg_loss:0.1 - ...``, also behind Ray's prefix
TensorBoard                event files, one or a folder of them
W&B                        ``run-*.wandb`` of an offline run, or its history as JSONL
other JSONL, JSON          one object a step, or a list of them
=========================  =====================================================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from dataproto_audit._protocol.safe.explain import one_line, read_bytes
from dataproto_audit.codes import UsageError
from dataproto_audit.dump.readers.event_logs import (
    event_steps,
    is_event_file,
    is_wandb_file,
    wandb_steps,
)
from dataproto_audit.dump.readers.tables import unzipped

Step = Mapping[str, Any]
REMEDY = (
    "Read are verl's file logger and console output, TensorBoard's event files, W&B's .wandb files "
    "and history, and JSONL with one object a step."
)
STEP_NAMES = ("training/global_step", "step", "_step", "global_step", "train/global_step")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(r"(?:^|[\s)])step:(\d{1,12}) - (.+)$")
_NUMBER = re.compile(
    r"(?:np\.\w{1,20}\()?([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf|True|False))\)?"
)
_ENOUGH = 1 << 16


def read_history(path: str | PathLike[str]) -> list[Step]:
    """Metrics of several steps, oldest first, from a file or a folder of event files.

    Raises :class:`UsageError` (``DPA857``) for what is none of the formats.
    """
    place = Path(path)
    if place.is_dir():
        return _of_folder(place)
    try:
        data = read_bytes(place)
    except UsageError as error:
        raise UsageError("DPA857", f"{path}: no history ({error.message})", error.remedy) from error
    try:
        steps = steps_of(data)
    except Exception as error:  # the bytes of a broken file can make a decoder raise anything
        why = one_line(error) or type(error).__name__
        raise UsageError("DPA857", f"{place}: no history ({why}).", REMEDY) from error
    if not steps:
        raise UsageError("DPA857", f"{place}: no history, it holds no metric.", REMEDY)
    return steps


def is_metric_log(data: bytes) -> bool:
    """Whether the bytes are metrics of steps rather than a batch, by their first few lines."""
    if is_wandb_file(data) or is_event_file(data):
        return True
    head = _text(data[:_ENOUGH])
    if head is None:
        return False
    if any(_LINE.search(_COLOUR.sub("", line)) for line in head.split("\n")[:2000]):
        return True
    first = head.lstrip().split("\n", 1)[0]
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return False
    if not isinstance(row, dict):
        return False
    if isinstance(row.get("data"), dict) and set(row) == {"step", "data"}:
        return True
    if isinstance(row.get("_step"), int):  # W&B's own name: histograms and texts may come along
        return True
    numbers = [name for name, value in row.items() if isinstance(value, (int, float))]
    stepped = any(name in row for name in STEP_NAMES)
    return stepped and len(numbers) == len(row) > 1


def steps_of(data: bytes) -> list[Step]:
    """Steps in the bytes of a file. Raises ``ValueError`` and what decoders raise."""
    if is_wandb_file(data):
        return list(wandb_steps(data))
    if is_event_file(data):
        return list(event_steps(data))
    if data.startswith(b"\x1f\x8b"):
        data = unzipped(data)
    text = data.decode("utf-8-sig")
    begin = text.lstrip()[:1]
    if begin == "[":
        return [_row(row, place) for place, row in enumerate(_listed(json.loads(text)), 1)]
    if begin == "{":
        lines = [line for line in text.split("\n") if line.strip()]
        if lines[0].strip() == "{":
            lines = [text]
        elif len(lines) > 1 and not text.endswith("\n") and _cut_off(lines[-1]):
            del lines[-1]  # a killed run; what comes before it is whole
        return [_row(_loaded(line, at), at) for at, line in enumerate(lines, 1)]
    steps = list(_console(text))
    if not steps:
        raise ValueError("no line of it reads step:N - name:value")
    return steps


def _text(data: bytes) -> str | None:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Cut in the middle of a character at the end of what was looked at.
        return data[: error.start].decode("utf-8-sig", "replace") if error.start > 32 else None


def _cut_off(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def _loaded(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error


def _listed(found: Any) -> list[Any]:
    if not isinstance(found, list):
        raise ValueError("it is no list of steps")
    return found


def _row(row: Any, number: int) -> Step:
    if not isinstance(row, dict):
        raise ValueError(f"line {number} is a {type(row).__name__}, not an object")
    inner = row.get("data")
    if isinstance(inner, dict) and "step" in row:
        row = {"step": row["step"], **inner}
    return {n: v for n, v in row.items() if v is None or isinstance(v, (str, int, float))}


def _console(text: str) -> Iterator[Step]:
    for line in text.split("\n"):
        found = _LINE.search(_COLOUR.sub("", line).rstrip())
        if not found:
            continue
        step: dict[str, Any] = {"step": int(found[1])}
        for entry in found[2].split(" - "):
            name, colon, value = entry.rpartition(":")
            number = _NUMBER.fullmatch(value.strip())
            if colon and name and number:
                step[name] = _number(number[1])
        yield step


def _number(text: str) -> float:
    return float(text == "True") if text in ("True", "False") else float(text)


def _of_folder(folder: Path) -> list[Step]:
    """All event files under a folder, as one run wrote them: later values win."""
    steps: dict[Any, dict[str, Any]] = {}
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    for file in files:
        try:
            with file.open("rb") as opened:
                head = opened.read(12)
        except OSError:
            continue  # not to be opened: then it is none that we can read
        if is_event_file(head) or is_wandb_file(head):
            for step in read_history(file):
                steps.setdefault(step["step"], {}).update(step)
    if not steps:
        raise UsageError("DPA857", f"{folder}: no history, no event file is in it.", REMEDY)
    return [steps[step] for step in sorted(steps)]
