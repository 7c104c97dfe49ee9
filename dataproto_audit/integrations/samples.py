"""A sample of the rows of a step: some prompts with all their rows, the same ones at every stage.

Groups stay whole, so what is true of a group can be checked; what only all rows together show
(normalisation over the batch, division over ranks) cannot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.batch import BatchView

Index = NDArray[np.int64]


class RowSample:
    """About ``rows`` rows of each step, chosen evenly over its prompts."""

    def __init__(self, rows: int, n: int | None) -> None:
        self.rows, self.n = rows, max(1, n or 1)
        self._uids: frozenset[Any] = frozenset()
        self._sent: Index | None = None

    def of(self, stage: str, when: str, batch: Any) -> Any:
        """The sampled part of ``batch``; all of it where there is no sample or no uid."""
        if not self.rows or stage in ("validation", "sync_weights"):
            return batch
        view = BatchView.of(batch)
        uids = view.arrays.get("uid")
        if uids is None:  # the rollout returns the rows in the order in which they were sent
            index = self._sent if stage == "rollout" and self._fits(view) else None
        else:
            if stage == "prompts":
                self._choose(uids.tolist())
            index = np.flatnonzero([uid in self._uids for uid in uids.tolist()])
        if stage == "rollout" and when == "before":
            self._sent = index
        return batch if index is None else picked(view, index)

    def _fits(self, view: BatchView) -> bool:
        return self._sent is not None and (not len(self._sent) or self._sent.max() < view.rows)

    def _choose(self, uids: list[Any]) -> None:
        wanted = min(len(uids), -(-self.rows // self.n))
        places = np.linspace(0, len(uids) - 1, wanted).round().astype(int) if wanted else ()
        self._uids = frozenset(uids[place] for place in places)
        self._sent = None


def picked(view: BatchView, index: Index) -> dict[str, Any]:
    """The rows ``index`` of a batch, and of meta entries with one item for each row."""
    rows = view.rows
    return {
        "batch": {k: t[index] for k, t in view.tensors.items() if len(t) == rows},
        "non_tensor_batch": {k: a[index] for k, a in view.arrays.items() if len(a) == rows},
        "meta_info": {
            k: [v[i] for i in index] if isinstance(v, list) and len(v) == rows else v
            for k, v in view.meta.items()
        },
    }
