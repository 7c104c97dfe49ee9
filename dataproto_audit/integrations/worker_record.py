"""What one rank did in one stage: which rows each micro-batch really held, and what came of them.

Rows are told apart by their ids, so that micro-batches are compared with what the rank was given
and not with verl's own index lists. Rows with the same ids count as one another: each is taken once
before one is taken twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from dataproto_audit.integrations.worker_files import Answer, Asked, Exchange
from dataproto_audit.progress import UNKNOWN, Note

Key = bytes
NOBODY = -1
"""In place of a row: none of the rank's rows has these ids."""


@dataclass(frozen=True)
class Place:
    """Who a rank is. Ranks of one ``dp_rank`` run the same rows."""

    rank: int = 0
    ranks: int = 1
    dp_rank: int = 0
    dp_size: int = 1


def here(splits: int = 1) -> Place:
    """This process; ``splits`` consecutive ranks share their rows (sequence parallelism)."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return Place()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return Place(rank, ranks, rank // splits, max(1, ranks // splits))


def row_keys(ids: Any, mask: Any = None) -> tuple[list[Key], list[int]]:
    """A digest of the ids of each row, and their number.

    ``ids`` is padded i64[B,T] with its attention ``mask``, or jagged.
    """
    rows = ids.unbind() if ids.is_nested else [row[keep != 0] for row, keep in
                                              zip(ids.cpu(), mask.cpu(), strict=True)]  # fmt: skip
    held = [row.detach().cpu().numpy() for row in rows]
    digests = [blake2b(np.ascontiguousarray(row).tobytes(), digest_size=12).digest()
               for row in held]  # fmt: skip
    return digests, [len(row) for row in held]


class Record:
    """One call of a rank; :meth:`answer` is what the driver is told."""

    def __init__(
        self, asked: Asked, place: Place, exchange: Exchange, *, keys: Sequence[Key],
        lengths: Sequence[int], token_limit: int | None = None,
    ) -> None:  # fmt: skip
        self.asked, self.place = asked, place
        self.lengths = list(lengths)
        self.token_limit = token_limit
        self.mini_batch = 0
        self.about: dict[str, Any] = {}
        """More plain data for the driver."""
        self.losses: list[dict[str, Any]] = []
        self._exchange = exchange
        self._rows: dict[Key, list[int]] = {}
        for row, key in enumerate(keys):
            self._rows.setdefault(key, []).append(row)
        self._times = [0] * len(self.lengths)
        self._micros: list[list[int]] = []
        self._sums: list[int] = []
        self._minis: list[int] = []
        self._packed: list[dict[str, Any]] = []
        self._attended: list[dict[str, Any]] = []
        self._fields: dict[str, dict[int, Any]] = {}
        self._in_mini: dict[int, int] = {}
        self._latest: list[int] = []
        self.started = time.process_time()
        self._note(0)

    def micro_batch(self, keys: Sequence[Key], lengths: Sequence[int], of: int = UNKNOWN) -> None:
        """A micro-batch of these rows begins; ``of`` is their number in the mini-batch."""
        rows = []
        for key in keys:
            known = self._rows.get(key)
            row = min(known, key=lambda r: (self._times[r], r)) if known else NOBODY
            if row != NOBODY:
                self._times[row] += 1
                self._in_mini.setdefault(row, self.mini_batch)
            rows.append(row)
        number = self._minis.count(self.mini_batch)
        self._latest = rows
        self._micros.append(rows)
        self._sums.append(int(sum(lengths)))
        self._minis.append(self.mini_batch)
        self._note(number, of)

    def output(self, name: str, rows: Sequence[Any]) -> None:
        """Values f[R_i] of the rows of the last micro-batch, kept for a row's first time."""
        for row, values in zip(self._latest, rows, strict=True):
            if row != NOBODY and self._times[row] == 1:
                self._fields.setdefault(name, {})[row] = values.detach().float().cpu().numpy()

    def packed(self, restarts: Sequence[bool], mask: str) -> None:
        """Rows of a micro-batch went into the model as one: whether positions begin anew at each,
        and the mask over them: ``none``, or how it looks."""
        self._packed.append({"micro_batch": len(self._micros) - 1, "mask": mask,
                             "restarts": [bool(r) for r in restarts]})  # fmt: skip

    def attended(self, lengths: Sequence[int], seen: Sequence[int]) -> None:
        """How many tokens each row of the micro-batch has, and how many of them attend to each
        other: of a row that is cut over ranks, those of the largest part."""
        self._attended.append({"micro_batch": len(self._micros) - 1,
                               "lengths": [int(n) for n in lengths],
                               "seen": [int(n) for n in seen]})  # fmt: skip

    def loss(self, value: float, more: dict[str, Any]) -> None:
        """``value`` was added to the loss of the mini-batch, on this rank."""
        while len(self.losses) <= self.mini_batch:
            self.losses.append({"total": 0.0, **more})
        self.losses[self.mini_batch]["total"] += value

    def stepped(self) -> None:
        """The optimizer stepped: the mini-batch is over."""
        self.mini_batch += 1

    def finish(self) -> None:
        """The call is over: tell."""
        self._note(0, 0, state="finished", more=1)
        if self.asked.looks:
            self._exchange.answer(self.answer())

    def answer(self) -> Answer:
        """The rank's note as probes read it, its losses, and outputs f32[rows, longest]."""
        arrays: dict[str, Any] = {name: self._padded(rows) for name, rows in self._fields.items()}
        if self.asked.stage.startswith("update"):
            arrays["mini_batch"] = np.array(
                [self._in_mini.get(row, NOBODY) for row in range(len(self.lengths))], np.int64
            )
        note = {
            "rank": self.place.dp_rank,
            "rows": len(self.lengths),
            "tokens": sum(self.lengths),
            "micro_batches": self._sums,
            "indices": self._micros,
            "mini_batches": self._minis,
            "peak_token_sum": max(self._sums, default=0),
            "token_limit": self.token_limit,
            "cpu_s": time.process_time() - self.started,
            **({"packed": self._packed} if self._packed else {}),
            **({"attended": self._attended} if self._attended else {}),
        }
        told = {
            "call": self.asked.call, "stage": self.asked.stage, "rank": self.place.rank,
            "dp_rank": self.place.dp_rank, "dp_size": self.place.dp_size, "note": note,
            "losses": self.losses, **self.about,
        }  # fmt: skip
        return Answer(told, arrays)

    def _padded(self, held: dict[int, Any]) -> Any:
        width = max((len(values) for values in held.values()), default=0)
        out = np.zeros((len(self.lengths), width), np.float32)
        for row, values in held.items():
            out[row, : len(values)] = values
        return out

    def _note(self, number: int, of: int = 0, state: str = "running", more: int = 0) -> None:
        self._exchange.note(
            Note(
                self.place.rank, self.asked.call, self.asked.stage, len(self._micros) + more,
                self.mini_batch, number, of, state, time.time(),
            ),
            self.place.ranks,
        )  # fmt: skip
