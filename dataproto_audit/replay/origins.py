"""Where the values that a check names were first seen, in steps that were saved file by file.

A file of one stage may hold its own fields and nothing that they are checked with (verl's
``_compute_old_log_prob`` returns ``old_log_probs`` and ``entropys``). What is wrong in it shows at
the next file that holds all fields; there it was read, and not made. So a suspect goes back to the
earliest boundary that holds its field with the same values in its rows and could not check them.

Rows are paired by prompt and response where both boundaries tell these, else in place where the
whole field is the same, else by their values. Bits are compared, so that NaN equals itself.

Not covered: non-tensor fields, and a field that was padded to another width in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.probes import PROBES
from dataproto_audit.replay.recording import PARTIAL
from dataproto_audit.replay.replay import Replayed, Seen

OLD, REF, SAMPLED, MASK = "old_log_probs", "ref_log_prob", "rollout_log_probs", "response_mask"
FROM_ENGINE = frozenset({"DPA303", "DPA310"})
"""Codes that compare the trainer's log-probs with the engine's, row by row."""
CLOSE = 0.1
"""Part of the distance to the engine's log-probs that the one to the reference may be."""
NOT_RUN = ("not_checkable", "not_applicable")


@dataclass(frozen=True)
class Origin:
    """Boundary number, stage, and which of its rows each traced row is."""

    boundary: int
    stage: str
    rows: Mapping[int, int]


def is_partial(seen: Seen) -> bool:
    """True for a boundary that was converted from one file of several of its step."""
    return seen.boundary.evidence.get(PARTIAL) is True


def origin_of(
    step: Replayed, number: int, check: str, name: str, rows: Sequence[int]
) -> Origin | None:
    """The earliest boundary before ``number`` with these values of a field in ``rows`` (all rows
    where none is named) at which ``check`` could not run; None where there is none."""
    if number >= len(step.seen) or check not in PROBES:
        return None
    if not is_partial(step.seen[number]):
        return None
    return made_at(
        step, number, name, rows, lambda seen: is_partial(seen) and not _ran(seen, check)
    )


def made_at(
    step: Replayed, number: int, name: str, rows: Sequence[int],
    counts: Callable[[Seen], bool] = lambda seen: True,
) -> Origin | None:  # fmt: skip
    """The earliest boundary before ``number`` with the values that a field has there in ``rows``.

    Looked for back to the first one that holds the field and has other values, or that does not
    count; None where there is none.
    """
    here = step.seen[number]
    field = here.view.tensors.get(name)
    if field is None:
        return None
    found: Origin | None = None
    for place in range(number - 1, -1, -1):
        there = step.seen[place]
        held = there.view.tensors.get(name)
        if held is None or there.boundary.part:
            continue
        if not counts(there):
            break
        pairs = _pairs(here, there, field, held, rows)
        if pairs is None:
            break
        # What entered a stage was made by one of which no file is there: which is not known.
        if there.boundary.when == "after" and there.boundary.stage in STAGES:
            found = Origin(place, there.boundary.stage, pairs)
    return found


def _ran(seen: Seen, check: str) -> bool:
    return any(o.check == check and o.kind not in NOT_RUN for o in seen.report.outcomes)


def _pairs(
    here: Seen, there: Seen, field: Tensor, held: Tensor, rows: Sequence[int]
) -> dict[int, int] | None:
    """Rows there of ``rows`` here; None where the values of one are not the same."""
    if field.dtype != held.dtype:
        return None
    ours, theirs = _rows(field), _rows(held)
    if not rows:
        return {} if sorted(ours) == sorted(theirs) else None
    if max(rows) >= len(ours):
        return None
    mine, other = _identities(here, len(ours)), _identities(there, len(theirs))
    if mine and {mine[row] for row in rows} <= set(other):
        # Two rows of one prompt and response are told apart by their values.
        pairs = _matched(
            [one.encode() + bits for one, bits in zip(mine, ours, strict=True)],
            [one.encode() + bits for one, bits in zip(other, theirs, strict=True)], rows,
        )  # fmt: skip
    elif ours == theirs:
        pairs = {row: row for row in rows}
    else:
        pairs = _matched(ours, theirs, rows)
    if pairs is None or any(ours[row] != theirs[to] for row, to in pairs.items()):
        return None
    return pairs


def _matched(
    ours: Sequence[bytes], theirs: Sequence[bytes], rows: Sequence[int]
) -> dict[int, int] | None:
    """Of equal ones the first here is the first there, and so on."""
    where: dict[bytes, list[int]] = {}
    for place, one in enumerate(theirs):
        where.setdefault(one, []).append(place)
    met: dict[bytes, int] = {}
    pairs: dict[int, int] = {}
    for row, one in enumerate(ours):
        met[one] = met.get(one, 0) + 1
        if row in rows:
            if met[one] > len(where.get(one, ())):
                return None
            pairs[row] = where[one][met[one] - 1]
    return pairs


def _identities(seen: Seen, rows: int) -> list[str]:
    """Prompt and response of each row; empty where the batch has none of them."""
    parts = [key.rsplit("/", 2) for key in seen.boundary.row_keys]
    told = len(parts) == rows and all(len(part) == 3 for part in parts)
    return [part[1] for part in parts] if told else []


def _rows(field: Tensor) -> list[bytes]:
    parts = field.unbind() if field.is_nested or field.ndim else [field]
    return [
        f"{tuple(part.shape)}".encode()
        + part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for part in parts
    ]


def unread(seen: Seen) -> bool:
    """True for a partial boundary where no check of a field that its stage makes could run.

    That a file has its columns clears nothing: fields and rows of the boundary do not count.
    """
    stage = STAGES.get(seen.boundary.stage)
    if stage is None or not is_partial(seen):
        return False
    made = {name for name in (*stage.adds, *stage.may_add) if name in seen.view.tensors}
    return not any(
        o.kind == "passed" and o.check in PROBES and made & set(PROBES[o.check].fields)
        for o in seen.report.outcomes
    )


def odd_one(step: Replayed, number: int, check: str, name: str, rows: Sequence[int]) -> str:
    """The field that is wrong of the log-probs of engine, trainer and reference.

    A check that compares two of them names one. The third tells: where the trainer's differ from
    the reference and, in the same rows, from the engine's, too, the trainer's are wrong; where they
    differ from the engine's in some rows and are there what the reference has, the engine's are.
    ``name`` itself for other fields, and where nothing tells.
    """
    if number >= len(step.seen) or check not in PROBES or not rows:
        return name
    here, read = step.seen[number], set(PROBES[check].fields)
    if not is_partial(here) or OLD not in read:
        return name
    if name == REF:
        engine = {
            row for finding in here.report.findings
            if finding.code in FROM_ENGINE and finding.field.endswith(OLD) for row in finding.rows
        }  # fmt: skip
        return OLD if set(rows) <= engine else name
    if name != OLD or SAMPLED not in read or 2 * len(rows) > here.boundary.rows:
        return name
    held = [here.view.tensors.get(one) for one in (OLD, REF, SAMPLED, MASK)]
    if any(one is None or one.is_nested or one.dim() != 2 for one in held):
        return name
    old, ref, sampled, mask = (one[list(rows)].double() for one in held if one is not None)
    if not old.shape == ref.shape == sampled.shape == mask.shape:
        return name
    on = mask != 0
    near, far = (torch.where(on, (old - one).abs(), 0.0).sum(1) for one in (ref, sampled))
    return SAMPLED if bool((near <= CLOSE * far).all()) else name
