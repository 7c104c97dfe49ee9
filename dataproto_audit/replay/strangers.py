"""Whether a model that contradicts the record is that of the run at all.

Log-probs of another model lie far from every recorded token, while what was recorded agrees among
itself: engine with trainer, policy with reference. A fault of one stage is the other way round: its
field lies far from the model *and* from its neighbours. So a model is a stranger when

* it agrees with no field of its role, and most tokens of nearly every row differ from each;
* no shift, permutation or temperature makes them agree (what one wrong path does to all fields);
* each lies nearer to a field beside it than the model's values do, by far.

Not told apart: a stranger and two passes of the trainer that are wrong alike, where the engine's
log-probs were not recorded; and the policy in the reference's place, which is told as a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataproto_audit.probes import repairs, shapes
from dataproto_audit.probes.noise import noise_between
from dataproto_audit.replay.compared import Compared
from dataproto_audit.replay.replay import Replayed
from dataproto_audit.replay.scorers import OPTION, Scored

FIELDS = {
    "policy": ("rollout_log_probs", "old_log_probs", "update_log_probs"),
    "reference": ("ref_log_prob",),
}
"""What each role writes."""
MISFIT = 0.5
"""Share of the tokens of a row that differ from a stranger."""
NEARLY_ALL = 0.9
"""Share of the rows that do."""
NEARER = 0.5
"""Recorded fields lie nearer to each other than to a stranger when their gap is this much less."""


@dataclass(frozen=True)
class Stranger:
    """Why a model is not believed, for a person and as numbers."""

    text: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True)
class _Apart:
    """Median gaps in nats over the tokens that were compared: of a field to its model's values, of
    the field and of those to the nearest field beside it."""

    field: str
    model: float
    beside: str
    own: float
    stranger: float
    tokens: int
    rows: int


def stranger(
    step: Replayed, role: str, own: Sequence[Compared], scored: Scored, *,
    vocabulary: int | None = None,
) -> Stranger | None:  # fmt: skip
    """Why the model of ``role`` is not that of the run; None where it may be.

    ``own`` is what became of the fields of the role, ``scored`` the pass. ``vocabulary`` is the
    number of ids that the model knows, which only explains: vocabularies are padded.
    """
    judged = [c for c in own if c.verdict != "unknown" and c.field in FIELDS[role]]
    if not judged or not all(map(_everywhere, judged)):
        return None
    found = [_apart(step, one, scored) for one in judged]
    if not found or not all(found):
        return None
    worst = max((one for one in found if one), key=lambda one: one.model)
    return Stranger(_said(step, role, worst, vocabulary), {
        "option": OPTION[role], "field": worst.field, "witnessed": _witnessed(judged),
        "median gap": worst.model,
        "expected": _expected(step, worst.field), "beside": worst.beside,
        "median gap of the record": worst.own, "median gap of the model": worst.stranger,
    })  # fmt: skip


def _witnessed(judged: Sequence[Compared]) -> bool:
    """True where engine and trainer both contradict the model, so that the record stands."""
    return {one.field for one in judged} >= {"rollout_log_probs", "old_log_probs"}


def _everywhere(one: Compared) -> bool:
    if one.verdict != "differs" or one.cells is None or one.looked is None:
        return False
    rows = one.looked.any(1)
    shares = one.cells[rows].sum(1) / one.looked[rows].sum(1)
    return bool(rows.any() and (shares >= MISFIT).mean() >= NEARLY_ALL)


def _apart(step: Replayed, one: Compared, scored: Scored) -> _Apart | None:
    """How far all lie from each other; None where no field beside convicts the model."""
    best: _Apart | None = None
    for view, name, values, looked in _beside(step, one, scored):
        recorded, other = (view.numpy(n).astype(np.float64) for n in (one.field, name))
        on = looked & np.isfinite(recorded) & np.isfinite(other) & np.isfinite(values)
        if not on.any() or _undone(step, recorded, values, on):
            return None
        gaps = [float(np.median(np.abs(a - b)[on]))
                for a, b in ((recorded, values), (recorded, other), (values, other))]  # fmt: skip
        if _copied(step, one.field, name, recorded, other, on):
            continue
        if gaps[1] <= NEARER * gaps[2] and (best is None or gaps[1] < best.own):
            best = _Apart(one.field, gaps[0], name, gaps[1], gaps[2], int(on.sum()),
                          int(on.any(1).sum()))  # fmt: skip
    return best


def _beside(step: Replayed, one: Compared, scored: Scored) -> Iterator[tuple[Any, str, Any, Any]]:
    """Other log-probs of the same tokens: the batch, their name, the model's values, and cells."""
    told: set[str] = set()
    for seen in step.seen:
        view = seen.view
        if seen.boundary.when != "after" or one.field not in view.tensors:
            continue
        if "response_mask" not in view.tensors:
            continue
        values, _, known = scored.aligned(seen.boundary.row_keys)
        mask = view.numpy("response_mask") != 0
        for name in (name for names in FIELDS.values() for name in names):
            if name == one.field or name in told or name not in view.tensors:
                continue
            if not view.numpy(name).shape == view.numpy(one.field).shape == values.shape:
                continue
            looked = mask & known[:, None]
            if "update_log_probs" in (name, one.field):
                if "mini_batch" not in view.tensors:
                    continue
                looked = looked & (view.numpy("mini_batch") == 0)[:, None]
            told.add(name)
            yield view, name, values, looked


def _undone(step: Replayed, recorded: Any, values: Any, on: Any) -> bool:
    """True where one wrong path explains that all tokens differ from the right model's."""
    dtype = step.settings.trainer_dtype or "bfloat16"
    wrong, right = np.where(on, recorded, 0.0), np.where(on, values, 0.0)
    sides = repairs.Sides(wrong, right, on, on, noise_between(dtype, "float32"))
    tests = (repairs.shift, repairs.row_permutation, repairs.placeholder, shapes.uniform)
    if any(test(sides) for test in tests):
        return True
    sloped = shapes.sloped(sides)
    if sloped is None:
        return False
    # Unrelated numbers have a slope, too; a temperature leaves the order of the tokens.
    alike = np.corrcoef(wrong[on], right[on])[0, 1]
    return bool(alike >= ALIKE)


ALIKE = 0.9
"""Correlation from which one field is the other under another temperature."""


def _copied(step: Replayed, field: str, name: str, recorded: Any, other: Any, on: Any) -> bool:
    """True where policy and reference are equal though the policy has moved: one of them is the
    other's copy, and says nothing of the model."""
    if "ref_log_prob" not in (field, name):
        return False
    number = getattr(step.step, "number", 0)
    return number > 1 and bool(np.array_equal(recorded[on], other[on]))


def _expected(step: Replayed, field: str) -> float:
    """What the median gap to a pass of the right model is at most."""
    settings = step.settings
    dtype = settings.rollout_dtype if field == "rollout_log_probs" else settings.trainer_dtype
    model = noise_between(dtype, "float32")
    return float(model.token if model.token is not None else model.mean)


def _said(step: Replayed, role: str, one: _Apart, vocabulary: int | None) -> str:
    wanted, size = _expected(step, one.field), step.settings.vocab_size
    whose = "policy" if role == "policy" else "reference"
    other = (
        f" Its vocabulary is {vocabulary}, the run's {size}."
        if vocabulary is not None and size is not None and vocabulary != size
        else ""
    )
    return (
        f"{OPTION[role]} does not look like the {whose} of this run, and is not believed: "
        f"{one.field} lies a median of {one.model:.3g} nats from it over {one.tokens} tokens in "
        f"{one.rows} rows, where up to {wanted:.2g} is expected, and {one.own:.3g} from "
        f"{one.beside}, which is {one.stranger:.3g} from that model.{other} Check the folder; if "
        f"it is the right one, the passes behind {one.field} and {one.beside} are wrong alike."
    )
