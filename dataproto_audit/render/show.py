"""What a saved batch holds: a table of fields, and single rows token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dataproto_audit.batch import RESPONSE_FIELDS, BatchView
from dataproto_audit.codes import UsageError
from dataproto_audit.dump.readers.saved import Saved
from dataproto_audit.dump.readers.traces import Place
from dataproto_audit.render.brief import dtype_name, shape_text, short
from dataproto_audit.render.row_table import row_table
from dataproto_audit.render.text import number, visible

MAX_TOKENS = 400
"""Tokens of a row that are shown; the rest is counted."""


_NOISY = frozenset({
    "rollout_log_probs", "old_log_probs", "ref_log_prob", "update_log_probs", "values", "entropys",
    "update_entropys",
})  # fmt: skip


Decode = Callable[[int], str]


def show_dict(
    saved: Saved, *, rows: Sequence[int] = (), decode: Decode | None = None
) -> dict[str, Any]:
    """The same as :func:`show`, as a document for JSON: what is not finite is None.

    Errors: :class:`UsageError` (``DPA857``) for a row outside the batch.
    """
    view, hint = BatchView.of(saved.batch), saved.hint
    return {
        "path": str(saved.path),
        "place": saved.place,
        "kind": saved.kind,
        "framework": saved.framework,
        "stage": hint.stage,
        "when": hint.when,
        "step": hint.step,
        "call": hint.call,
        "rows": view.rows,
        "prompt": view.prompt,
        "response": view.response,
        "layout": view.layout,
        "fields": [_tensor_entry(name, tensor) for name, tensor in view.tensors.items()],
        "objects": [_array_entry(name, array) for name, array in view.arrays.items()],
        "meta": {str(name): short(value) for name, value in view.meta.items()},
        "opaque": list(saved.opaque),
        "notes": list(saved.notes),
        "tokens": [_row_entry(view, row, decode) for row in rows],
    }


def show(saved: Saved, *, rows: Sequence[int] = (), decode: Decode | None = None) -> RenderableType:
    """What a batch holds, for a terminal; ``rows`` are shown token by token.

    ``decode`` gives the text of a token id; without it tokens are shown by their ids.

    Errors: :class:`UsageError` (``DPA857``) for a row outside the batch.
    """
    about = show_dict(saved, rows=rows, decode=decode)
    parts: list[RenderableType] = [_headline(about), _tensor_table(about["fields"])]
    if about["objects"]:
        parts.append(_object_table("one object a row", about["objects"]))
    if about["meta"]:
        entries = [{"name": name, "example": value} for name, value in about["meta"].items()]
        parts.append(_object_table("meta", entries))
    if about["opaque"]:
        parts.append(Text(f"not read, only named: {visible(', '.join(about['opaque']))}"))
    parts += [Text(f"note: {visible(note)}") for note in about["notes"]]
    for row in about["tokens"]:
        parts += _row_parts(row)
    return Group(*parts)


def listing(path: object, places: Sequence[Place]) -> RenderableType:
    """The boundaries of a trace, one a line, and how to look at one."""
    table = Table(title="boundaries", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("step", justify="right")
    table.add_column("boundary", overflow="fold")
    table.add_column("batch")
    table.add_column("rows", justify="right")
    table.add_column("fields", justify="right")
    for one in places:
        about = (str(one.step), one.name, f"{one.when} {one.stage}", str(one.rows), str(one.fields))
        table.add_row(*_texts(*about))
    steps = len({one.step for one in places})
    head = f"{path}: {len(places)} boundaries in {steps} step{'s' * (steps != 1)}"
    how = "--boundary NAME shows one" + (", of one step with --step N" if steps > 1 else "")
    return Group(Text(visible(head)), table, Text(f"{how}; --boundary all shows each."))


def _headline(about: dict[str, Any]) -> Text:
    place = f" {about['place']}" if about["place"] else ""
    words = [f"{about['rows']} rows"]
    words += [f"{side} {about[side]}" for side in ("prompt", "response") if about[side] is not None]
    words += [str(about["layout"]), about["kind"]]
    if about["framework"] not in ("verl", "unknown"):
        words.append(about["framework"])
    if about["stage"]:
        words.append(f"{about['when']} {about['stage']}")
    if about["step"] is not None:
        words.append(f"step {about['step']}")
    return Text(visible(f"{about['path']}{place}: {', '.join(words)}"))


def _tensor_entry(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Shape, range and, of a mask, coverage; range over finite values only."""
    entry: dict[str, Any] = {
        "name": name, "dtype": dtype_name(tensor), "shape": shape_text(tensor),
        "min": None, "mean": None, "max": None, "not_finite": 0, "coverage": None,
    }  # fmt: skip
    nested: Any = tensor
    whole = tensor.layout is torch.jagged and nested.lengths() is None
    flat = nested.values() if whole else tensor
    if flat.is_nested and flat.size(0):
        flat = torch.cat([row.flatten() for row in flat.unbind()])
    if flat.is_nested or flat.is_complex() or not flat.numel():
        return entry
    values = flat.detach().to(torch.float64)
    finite = values[torch.isfinite(values)]
    entry["not_finite"] = values.numel() - finite.numel()
    if finite.numel():
        entry |= {
            "min": float(finite.min()), "mean": float(finite.mean()), "max": float(finite.max())
        }  # fmt: skip
    if name.endswith("mask"):
        entry["coverage"] = float((values != 0).double().mean())
    return entry


def _array_entry(name: str, array: Any) -> dict[str, Any]:
    example = array.flat[0] if array.size else None
    kind = type(example).__name__ if array.dtype == object else str(array.dtype)
    return {
        "name": name, "type": kind, "shape": str(list(array.shape)), "example": short(example)
    }  # fmt: skip


def _tensor_table(entries: Sequence[dict[str, Any]]) -> Table:
    """Fits 80 columns: columns that say nothing of any field are left out."""
    table = Table(title="tensors" if entries else "no tensors", box=box.SIMPLE_HEAD,
                  padding=(0, 0, 0, 1))  # fmt: skip
    for column in ("field", "dtype", "shape"):
        table.add_column(column, overflow="fold")
    broken = any(entry["not_finite"] for entry in entries)
    masks = any(entry["coverage"] is not None for entry in entries)
    more = ("min", "mean", "max", *(["not finite"] * broken), *(["covered"] * masks))
    for column in more:
        table.add_column(column, justify="right", no_wrap=True)
    for entry in entries:
        covered = "" if entry["coverage"] is None else f"{entry['coverage']:.1%}"
        cells = [entry["name"], entry["dtype"], entry["shape"]]
        cells += [number(entry[key]) for key in ("min", "mean", "max")]
        cells += [str(entry["not_finite"] or "")] * broken + [covered] * masks
        table.add_row(*_texts(*cells))
    return table


def _texts(*cells: str) -> list[Text]:
    return [Text(visible(cell)) for cell in cells]  # Text: no markup out of a file


def _object_table(title: str, entries: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    columns = [key for key in ("name", "type", "shape", "example") if key in entries[0]]
    for column in columns:
        table.add_column(column, overflow="fold")
    for entry in entries:
        table.add_row(*_texts(*(entry[key] for key in columns)))
    return table


def _row_entry(view: BatchView, row: int, decode: Decode | None) -> dict[str, Any]:
    """The prompt of a row, its response column by column, and its objects."""
    if not -view.rows <= row < view.rows:
        raise UsageError(
            "DPA857", f"row {row} is outside a batch of {view.rows} rows.", "Rows count from 0."
        )
    row %= view.rows
    columns: dict[str, list[Any]] = {}
    for name in (name for name in RESPONSE_FIELDS if name in view.tensors):
        values = view.numpy(name)
        if values.ndim == 2 and len(values) > row:
            columns[name] = [_plain(value) for value in values[row]]
    attention, width = view.attention, max(map(len, columns.values()), default=0)
    if attention is not None and width:
        columns["attention"] = [_plain(bit) for bit in attention[row][view.prompt or 0 :]]
        # Log-probs and values on padding are noise; anything else there is worth a look.
        telling = [column for name, column in columns.items() if name not in _NOISY]
        used = [t for t in range(width) if any(len(c) > t and c[t] for c in telling)]
        width = max(used, default=-1) + 1
    if decode and "responses" in columns:
        columns["text"] = [_decoded(decode, token) for token in columns["responses"][:MAX_TOKENS]]
    prompts = view.numpy("prompts") if "prompts" in view.tensors else np.zeros((0, 0))
    prompt = prompts[row] if prompts.ndim == 2 and len(prompts) > row else np.zeros(0)
    if attention is not None and len(prompt) <= attention.shape[1]:
        prompt = prompt[attention[row][: len(prompt)] != 0]
    ids = [_plain(token) for token in prompt[-MAX_TOKENS:]]
    return {
        "row": row,
        "prompt": ids,
        **({"prompt_text": "".join(_decoded(decode, token) for token in ids)} if decode else {}),
        "left_out": max(0, width - MAX_TOKENS),
        "columns": {name: values[: min(width, MAX_TOKENS)] for name, values in columns.items()},
        "objects": {
            name: short(array[row]) for name, array in view.arrays.items() if len(array) > row
        },
    }


def _decoded(decode: Decode, token: Any) -> str:
    """The text of a token id; the id itself where it has none."""
    try:
        return decode(int(token))
    except (TypeError, ValueError, IndexError, OverflowError, KeyError):
        return f"<{token}>"


def _plain(value: Any) -> Any:
    """A number for JSON; None for what is not finite."""
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, complex):
        return short(plain)
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain


def _row_parts(row: dict[str, Any]) -> list[RenderableType]:
    prompt = " ".join(str(token) for token in row["prompt"]) or "none"
    parts: list[RenderableType] = [Text(f"row {row['row']}: prompt ids {prompt}")]
    if "prompt_text" in row:
        parts.append(Text(f"  prompt: {visible(row['prompt_text'])}"))
    parts += [Text(f"  {visible(name)}: {value}") for name, value in row["objects"].items()]
    if row["columns"]:
        parts += row_table(row["row"], row["columns"])
    if row["left_out"]:
        parts.append(Text(f"  ... and {row['left_out']} more tokens"))
    return parts
