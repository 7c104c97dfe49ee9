"""Faults of how rows are spread over ranks and micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from dataproto_audit.testing.faults.registry import Truth, seeded
from dataproto_audit.testing.faults.scene import Scene

RANKS = ("ranks", "micro_batches", "indices")


def _notes(scene: Scene) -> list[dict[str, Any]]:
    return copy.deepcopy(list(scene.boundary.evidence["ranks"]))


@seeded("old_log_prob", *RANKS, cause="lost_micro_batch", stages=("ref_log_prob", "update_actor"))
def a_row_in_no_micro_batch(scene: Scene) -> Truth:
    """A row of the last rank is in none of its micro-batches."""
    notes = _notes(scene)
    last = notes[-1]
    lost = last["indices"][0].pop(0)
    last["micro_batches"][0] = max(1, last["micro_batches"][0] - 5)
    scene.tell(ranks=notes)
    return Truth("ranks", (sum(note["rows"] for note in notes[:-1]) + lost,))


@seeded("update_actor", *RANKS, cause="lost_micro_batch")
def a_row_in_two_micro_batches(scene: Scene) -> Truth:
    """A row of the first rank is trained on twice, another not at all."""
    notes = _notes(scene)
    first, second = notes[0]["indices"][:2]
    lost, first[0] = first[0], second[0]
    scene.tell(ranks=notes)
    return Truth("ranks", tuple(sorted((lost, second[0]))))


@seeded("update_actor", *RANKS, cause="token_limit_exceeded", bases=("dynamic",),
        stages=("old_log_prob",), origin=("B106",))  # fmt: skip
def bins_over_the_limit(scene: Scene) -> Truth:
    """The number of bins is total over limit, so one bin holds more than the limit."""
    notes = _notes(scene)
    for note in notes:
        sums, limit = note["micro_batches"], note["token_limit"]
        fewer = max(1, int(np.ceil(sum(sums) / limit)) - 1)
        note["indices"] = [
            [row for part in note["indices"][place::fewer] for row in part]
            for place in range(fewer)
        ]
        note["micro_batches"] = [sum(sums[place::fewer]) for place in range(fewer)]
        note["peak_token_sum"] = max(note["micro_batches"])
    scene.tell(ranks=notes)
    return Truth("ranks")


@seeded("old_log_prob", *RANKS, cause="unequal_micro_batches", stages=("update_actor",),
        bases=("plain", "long"))  # fmt: skip
def ranks_do_not_agree_on_a_count(scene: Scene) -> Truth:
    """Ranks open as many micro-batches as they need themselves: a collective will hang."""
    notes = _notes(scene)
    note = notes[0]
    note["indices"][-2:] = [note["indices"][-2] + note["indices"][-1]]
    note["micro_batches"][-2:] = [sum(note["micro_batches"][-2:])]
    note["peak_token_sum"] = max(note["micro_batches"])
    note["token_limit"] = max(note["token_limit"], note["peak_token_sum"])
    scene.tell(ranks=notes)
    return Truth("ranks")


@seeded("old_log_prob", *RANKS, "batch_size", "rows", cause=("unbalanced_ranks", "rows_lost"),
        stages=("balance",), bases=("plain", "long"), origin=("B006",))  # fmt: skip
def chunks_of_unequal_size(scene: Scene) -> Truth:
    """An indivisible batch is chunked unevenly: one rank gets a row less."""
    notes = _notes(scene)
    first, last = notes[0], notes[-1]
    last["rows"] -= 1
    first["rows"] += 1
    last["indices"] = [[row for row in part if row < last["rows"]] for part in last["indices"]]
    first["indices"][-1] = [*first["indices"][-1], first["rows"] - 1]
    scene.tell(ranks=notes)
    return Truth("ranks")


@seeded("balance", "ranks", "rows", cause="unbalanced_ranks", stages=("old_log_prob",
        "ref_log_prob", "update_actor"), levels=("fail", "warn", "info"),
        bases=("lopsided",))  # fmt: skip
def long_rows_on_one_rank(scene: Scene) -> Truth:
    """Rows are sorted by length and cut in two: one rank has nearly all tokens."""
    lengths = scene.tensors["attention_mask"].sum(1)
    order = torch.argsort(lengths, descending=True, stable=True)
    scene.batch.reorder(order)
    scene.run.order = scene.run.order[order.numpy()]
    scene.meta["global_token_num"] = lengths[order].tolist()
    return Truth("ranks")


@seeded("dispatch", "micro_batch_size", "batch_size", *RANKS, "rows",
        cause=("pad_divisor", "unequal_micro_batches"), where="start",
        stages=("old_log_prob", "balance"), bases=("recorded",), options={"micro_rows": 7},
        origin=("B016",))  # fmt: skip
def micro_batch_does_not_divide(scene: Scene) -> Truth:
    """A fixed micro-batch size is kept that does not divide the rows of a rank."""
    return Truth("micro_batch_size")


@seeded("update_actor", "mini_batch", "ranks", cause=("rows_lost", "lost_micro_batch"),
        bases=("far",))  # fmt: skip
def last_mini_batch_never_trained(scene: Scene) -> Truth:
    """The iterator drops its last, smaller mini-batch."""
    losses = list(scene.boundary.evidence["losses"])[:-1]
    notes = _notes(scene)
    plan = scene.run.plan(scene.batch)
    for note, minis in zip(notes, plan.parts, strict=True):
        gone = len(minis[-1])
        note["indices"], note["micro_batches"] = (
            note["indices"][:-gone], note["micro_batches"][:-gone],
        )  # fmt: skip
    scene.tell(ranks=notes, losses=losses)
    lost = torch.nonzero(scene.tensors["mini_batch"] == len(losses)).squeeze(1)
    return Truth("mini_batch", tuple(lost.tolist()))
