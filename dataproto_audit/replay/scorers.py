"""What recomputes log-probs: a model of transformers, or a function of one's own.

A scorer takes a batch and returns log-probs and entropies of its response tokens, both float64
``[rows, response]``; entropies may be None. It is called once for each model stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataproto_audit.batch import BatchView
from dataproto_audit.probes.recompute import beyond, model_of, vocabulary_of
from dataproto_audit.reference.logprobs import token_log_probs

Floats = NDArray[np.float64]
Scorer = Callable[[BatchView, float], tuple[Floats, Floats | None]]
"""``(batch, temperature)`` to log-probs and entropies ``[rows, response]``."""
NEEDS = ("input_ids", "attention_mask", "position_ids", "responses")
OPTION = {"policy": "--model", "reference": "--ref-model"}
"""What names the folder of a role on the command line."""
ROWS = 16
"""Rows of one forward pass; rows of like length go together, without their common padding."""


def scorer_of(given: Any) -> Scorer:
    """The scorer of a model, or of the folder of one. Raises :class:`UsageError`."""
    model = model_of(given)

    def score(view: BatchView, temperature: float) -> tuple[Floats, Floats | None]:
        return _passes(model, view, temperature)

    score.vocabulary = vocabulary_of(model)  # type: ignore[attr-defined] # see Scorers.vocabulary
    return score


def _passes(model: Any, view: BatchView, temperature: float) -> tuple[Floats, Floats]:
    strange = beyond(model, view)
    if strange or (view.numpy("input_ids") < 0).any():
        raise ValueError(strange[0].actual if strange else "input_ids holds negative ids")
    ids, attention, positions = (
        torch.from_numpy(np.ascontiguousarray(view.numpy(name))).long() for name in NEEDS[:3]
    )
    if positions.dim() != 2:
        raise ValueError("position_ids have several axes")
    prompt, width = view.prompt or 0, view.response or 0
    on = attention != 0
    out = torch.zeros((2, len(ids), width), dtype=torch.float64)
    order = torch.argsort(on.sum(1), stable=True)
    for start in range(0, len(ids), ROWS):
        rows = order[start : start + ROWS]
        used = torch.nonzero(on[rows].any(0)).squeeze(1)
        left = min(int(used[0]), prompt - 1) if len(used) else prompt - 1
        right = max(int(used[-1]) + 1, prompt + 1) if len(used) else prompt + 1
        part = slice(max(left, 0), right)
        made = token_log_probs(
            model, ids[rows, part], attention[rows, part], positions[rows, part],
            right - prompt, temperature=temperature,
        )  # fmt: skip
        for place, values in zip(out, made, strict=True):
            place[rows, : right - prompt] = values
    return out[0].numpy(), out[1].numpy()


@dataclass
class Scored:
    """What one pass gave, by row key, so that it serves at every boundary with the same tokens."""

    keys: tuple[str, ...]
    log_probs: Floats
    entropies: Floats | None

    def aligned(self, keys: tuple[str, ...]) -> tuple[Floats, Floats | None, NDArray[np.bool_]]:
        """The same for rows ``keys``, and which of them were scored."""
        if keys == self.keys:
            return self.log_probs, self.entropies, np.ones(len(keys), np.bool_)
        place = {key: row for row, key in enumerate(self.keys)}
        known = np.array([key in place for key in keys], np.bool_)
        rows = np.array([place.get(key, 0) for key in keys], np.int64)
        entropies = None if self.entropies is None else self.entropies[rows]
        return self.log_probs[rows], entropies, known


@dataclass
class Scorers:
    """The models at hand, by role, and how often they were asked."""

    policy: Scorer | None = None
    reference: Scorer | None = None
    sample: int | None = None
    """Rows of a batch that are scored, evenly spread; None scores all."""
    calls: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Why a role could not score, for what is told to the user."""
    _known: dict[str, Scored] = field(default_factory=dict)

    def of(
        self, role: str, view: BatchView, keys: tuple[str, ...], temperature: float | None
    ) -> Scored | None:
        """The pass of ``policy`` or ``reference``, made once; None where it cannot be made."""
        if role in self._known:
            return self._known[role]
        scorer = self.policy if role == "policy" else self.reference
        if scorer is None or role in self.failed:
            return None
        if temperature is None:
            self.failed[role] = "the temperature is unknown"
            return None
        lacking = [name for name in NEEDS if not view.has(name)]
        if lacking:
            self.failed[role] = f"the batch has no {', '.join(lacking)}"
            return None
        rows = self._rows(view.rows)
        part = view if rows is None else rows_of(view, rows)
        self.calls += 1
        try:
            log_probs, entropies = scorer(part, temperature)
        except (ValueError, IndexError, RuntimeError) as error:
            self.failed[role] = f"the model cannot score the batch ({error})"
            return None
        named = keys if rows is None else tuple(keys[row] for row in rows)
        found = self._known[role] = Scored(named, log_probs, entropies)
        return found

    def vocabulary(self, role: str) -> int | None:
        """Ids that the model of a role knows; None where that is not told."""
        known = getattr(self.policy if role == "policy" else self.reference, "vocabulary", None)
        return known if isinstance(known, int) else None

    def compare_vocabulary(self, role: str, size: int | None) -> None:
        """Before any pass: a model of fewer ids than the run's is not the run's."""
        known = self.vocabulary(role)
        if known is not None and size is not None and known < size:
            self.failed.setdefault(
                role, f"{OPTION[role]} is a model of {known} ids, that of this run has {size}: "
                "check the folder",
            )  # fmt: skip

    def _rows(self, count: int) -> list[int] | None:
        if self.sample is None or self.sample >= count:
            return None
        return sorted({round(row) for row in np.linspace(0, count - 1, self.sample).tolist()})

    def forget(self) -> None:
        """Before another step: passes belong to one batch."""
        self._known.clear()
        self.failed.clear()


def rows_of(view: BatchView, rows: list[int]) -> BatchView:
    """Rows of a padded view, with the fields that a scorer needs."""
    index = torch.tensor(rows)
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(view.numpy(name)))[index]
        for name in (*NEEDS, "prompts")
        if view.has(name)
    }
    return BatchView(tensors, {}, view.meta)
