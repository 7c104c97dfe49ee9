"""Rows of any framework as batches, by the table of ``framework_table.py``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dataproto_audit.batch import FULL_FIELDS, PROMPT_FIELDS, RESPONSE_FIELDS
from dataproto_audit.dump.readers import unfold
from dataproto_audit.dump.readers.framework_table import (
    FRAMEWORKS,
    Framework,
    Ids,
    Tokens,
)
from dataproto_audit.dump.readers.keys import KEY, KEY_FIELD
from dataproto_audit.dump.readers.names import hint_of
from dataproto_audit.dump.readers.saved import Hint, Kind, Saved, parts
from dataproto_audit.dump.readers.tables import (
    Row,
    column,
    floats_if_whole,
    is_numbers,
    jagged_of,
)

_OURS = frozenset({*PROMPT_FIELDS, *FULL_FIELDS, *RESPONSE_FIELDS})


def of_rows(path: Path, kind: Kind, rows: Sequence[Row]) -> list[Saved]:
    """Batches of the rows of a file, one for each step that they name."""
    if {"traces", "env"} <= rows[0].keys():
        rows = list(unfold.prime_rows(rows))
    elif {"token_ids", "token_loss_mask", "input_lengths"} <= rows[0].keys():
        rows = list(unfold.nemo_rows(rows))
    if not rows:
        raise ValueError("it holds no row")
    return list(_batches(path, kind, rows, ""))


def of_dict(path: Path, place: str, saved: Mapping[Any, Any]) -> list[Saved]:
    """Batches of a dictionary that a framework saved with ``torch.save``; none if it is unknown."""
    if {"sequences", "attention_mask", "action_mask"} <= saved.keys():
        masks = [saved[name] for name in ("sequences", "attention_mask", "action_mask")]
        if not all(isinstance(mask, Tensor) and mask.dim() == 2 for mask in masks):
            raise ValueError("an Experience whose ids and masks are no tensors of two axes")
        rows = list(unfold.experience_rows(saved))
    elif isinstance(saved.get("samples"), list) and "rollout_id" in saved:
        rows = list(unfold.sample_rows(saved))
    else:
        return []
    if not rows:
        raise ValueError("it holds no row")
    meta = {k: v for k, v in saved.items() if isinstance(v, (int, float, str))}
    found = _batches(path, "tensors", rows, place)
    return [_with_meta(one, meta) for one in found]


def _with_meta(saved: Saved, meta: Mapping[Any, Any]) -> Saved:
    return replace(saved, batch=parts(saved.tensors, saved.arrays, {**meta, **saved.meta}))


def framework_of(row: Mapping[str, Any]) -> Framework | None:
    """The format that a row's keys belong to."""
    return next((known for known in FRAMEWORKS if known.needs <= row.keys()), None)


def _batches(path: Path, kind: Kind, rows: Sequence[Row], place: str) -> Iterator[Saved]:
    known = framework_of(rows[0])
    for step, part in _by_step(rows, known.step if known else None):
        at = f"{place}step {step}" if step is not None and len(part) < len(rows) else place
        tensors, arrays, notes = mapped(part, known)
        hint = hint_of(path)
        if known:
            hint = Hint(known.stage, known.when, hint.call, hint.step, hint.method)
            notes = [*known.notes, *notes]
        if step is not None:
            hint = replace(hint, step=step)
        meta = {"framework": known.name} if known else {}
        yield Saved(
            path, at, kind, parts(tensors, arrays, meta), hint,
            framework=known.name if known else "unknown", notes=tuple(notes),
        )  # fmt: skip


def _by_step(rows: Sequence[Row], key: str | None) -> Iterable[tuple[int | None, list[Row]]]:
    """Rows by the step they name; all in one where any names none."""
    if key is None or not all(type(row.get(key)) is int for row in rows):
        return [(None, list(rows))]
    steps: dict[int, list[Row]] = {}
    for row in rows:
        steps.setdefault(row[key], []).append(row)
    return list(steps.items())


def mapped(
    rows: Sequence[Row], known: Framework | None
) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """Tensors, columns and notes of these rows; jagged, so that wrong lengths stay visible."""
    tensors: dict[str, Tensor] = {}
    notes: list[str] = []
    used: set[str] = set()
    if known and known.ids:
        starts, ends = _token_ids(rows, known.ids, tensors)
        used |= {known.ids.tokens, known.ids.other or ""}
        for tokens in known.tokens:
            if _token_field(rows, tokens, starts, ends, tensors, notes):
                used.add(tokens.source)
    names = dict.fromkeys(name for row in rows for name in row)
    arrays: dict[str, Any] = {}
    for name in names:
        values = [row.get(name) for row in rows]
        target = known.renamed.get(name, name) if known else name
        if name in used:
            continue
        lists = [value for value in values if is_numbers(value)]
        if known is None and name in _OURS and len(lists) == len(rows):
            tensors[name] = jagged_of(lists)
        elif target in tensors:
            arrays[f"{name}_saved"] = column(values)
        else:
            arrays[target] = column(values)
    if known and known.name == "verl":
        _store_keys(arrays)
    return tensors, arrays, notes


def _store_keys(arrays: dict[str, Any]) -> None:
    """Take the uid out of the store keys that V1 writes as uid of its text dump."""
    found = [KEY.fullmatch(str(key)) for key in arrays.get("uid", ())]
    if found and all(found):
        arrays[KEY_FIELD] = arrays["uid"]
        arrays["uid"] = column([match["uid"] for match in found if match])


def _ids(row: Row, name: str, place: int) -> list[int]:
    value = row.get(name)
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError(f"row {place}: {name} is no list of token ids")
    return value


def _token_ids(
    rows: Sequence[Row], ids: Ids, tensors: dict[str, Tensor]
) -> tuple[list[int], list[int]]:
    """Write prompts, responses and input_ids; returns where each response starts and ends."""
    prompts, responses = [], []
    for place, row in enumerate(rows):
        tokens = _ids(row, ids.tokens, place)
        if ids.how == "split":
            prompt, response = tokens, _ids(row, ids.other or "", place)
        else:
            length = len(tokens) if ids.other is None else row.get(ids.other)
            if not isinstance(length, (int, float)) or not 0 <= length <= len(tokens):
                raise ValueError(f"row {place}: {ids.other} is no length of {ids.tokens}")
            if ids.how == "length":
                cut = len(tokens) - int(length)
            else:
                tokens, cut = tokens[: int(length)], min(1, int(length))
            prompt, response = tokens[:cut], tokens[cut:]
        prompts.append(prompt)
        responses.append(response)
    tensors["prompts"], tensors["responses"] = jagged_of(prompts), jagged_of(responses)
    sequences = [p + r for p, r in zip(prompts, responses, strict=True)]
    tensors["input_ids"] = jagged_of(sequences)
    return [len(prompt) for prompt in prompts], [len(sequence) for sequence in sequences]


def _token_field(
    rows: Sequence[Row],
    tokens: Tokens,
    starts: Sequence[int],
    ends: Sequence[int],
    tensors: dict[str, Tensor],
    notes: list[str],
) -> bool:
    """Write one field; False if the file's own lists have to stay, too."""
    values = [value for row in rows if is_numbers(value := row.get(tokens.source))]
    if len(values) < len(rows):
        return False
    if tokens.zero_is_missing and not any(any(value) for value in values if value):
        notes.append(f"{tokens.source} is 0 everywhere: not computed, so not taken over")
        return False
    move = {"response": None, "sequence": 0, "next": 1}[tokens.at]
    cut, whole = [], True
    for value, start, end in zip(values, starts, ends, strict=True):
        taken = value if move is None else value[max(0, start - move) : max(0, end - move)]
        rest = [] if move is None else value[: max(0, start - move)] + value[max(0, end - move) :]
        whole = whole and not any(rest)
        cut.append(taken)
    tensors[tokens.target] = floats_if_whole(jagged_of(cut), floats=tokens.floats)
    if not whole:
        notes.append(f"{tokens.source} is not 0 outside the response; its own lists are kept")
    return whole


__all__ = ["framework_of", "mapped", "of_dict", "of_rows"]
