"""Rank notes of a part of a batch: what is wrong stays wrong at its row, and nothing else is."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from dataproto_audit.replay.cut import Whole
from dataproto_audit.replay.recording import audit, loud, with_settings
from dataproto_audit.replay.update_evidence import cut_ranks

from ._recorded import healthy

LAYOUT = dict.fromkeys(
    ("n", "world_size", "cp_size", "micro_batch_size", "actor_micro_batch_size", "max_token_len")
)
BEFORE = np.array([9, 8, 7, 6])
NOTE = {
    "rank": 0, "rows": 4, "indices": [[2, 0], [3, 1]], "micro_batches": [16, 14],
    "attended": [
        {"micro_batch": 0, "lengths": [7, 9], "seen": [7, 4]},
        {"micro_batch": 1, "lengths": [6, 8], "seen": [6, 8]},
    ],
}  # fmt: skip


def test_what_rows_see_is_cut_by_position():
    rows = np.array([0, 1])
    [note] = cut_ranks([NOTE], rows, BEFORE, BEFORE[rows])
    assert note["indices"] == [[0], [1]]
    assert note["attended"] == [
        {"micro_batch": 0, "lengths": [9], "seen": [4]},
        {"micro_batch": 1, "lengths": [8], "seen": [8]},
    ]


def test_a_micro_batch_that_is_gone_takes_its_note_along():
    rows = np.array([1, 3])
    [note] = cut_ranks([NOTE], rows, BEFORE, BEFORE[rows])
    assert note["indices"] == [[1, 0]]
    assert note["attended"] == [{"micro_batch": 0, "lengths": [6, 8], "seen": [6, 8]}]


def test_columns_that_are_gone_are_neither_had_nor_seen():
    [note] = cut_ranks([NOTE], np.arange(4), BEFORE, BEFORE - np.array([3, 1, 0, 2]))
    assert note["attended"] == [
        {"micro_batch": 0, "lengths": [7, 6], "seen": [7, 1]},
        {"micro_batch": 1, "lengths": [4, 7], "seen": [4, 7]},
    ]
    [note] = cut_ranks([NOTE], np.arange(4), BEFORE, BEFORE - np.array([5, 0, 0, 0]))
    assert note["attended"][0] == {"micro_batch": 0, "lengths": [7, 4], "seen": [7, 0]}


def test_rows_of_a_second_rank_and_rows_of_nobody():
    first = {**NOTE, "attended": []}
    second = {
        "rank": 1, "rows": 2, "indices": [[-1, 1, 0]],
        "attended": [{"micro_batch": 0, "lengths": [3, 5, 4], "seen": [3, 5, 2]}],
    }  # fmt: skip
    before = np.array([9, 8, 7, 6, 4, 5])
    rows = np.array([3, 4, 5])
    _, note = cut_ranks([first, second], rows, before, np.array([5, 3, 5]))
    assert note["indices"] == [[-1, 1, 0]]
    assert note["attended"] == [{"micro_batch": 0, "lengths": [3, 5, 3], "seen": [3, 5, 1]}]


def test_a_row_of_nobody_is_not_the_last_row_of_the_rank_before():
    """-1 on the second rank, whose first row is row 4 of the batch; row 3 is cut."""
    first = {"rank": 0, "rows": 4, "indices": [[0, 1, 2, 3]], "micro_batches": [30]}
    second = {"rank": 1, "rows": 2, "indices": [[-1, 1, 0]], "micro_batches": [9]}
    before = np.array([9, 8, 7, 6, 4, 5])
    for rows in ([2, 4, 5], [3, 4, 5]):
        kept = np.array(rows)
        _, note = cut_ranks([first, second], kept, before, before[kept])
        assert note["indices"] == [[-1, 1, 0]]
        assert note["micro_batches"] == [9]


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_the_check_finds_the_same_row_after_a_cut(wrong, columns):
    recording = deepcopy(healthy(prompts=6, n=4, response_width=8, ranks=2, recorded=True))
    [update] = [p for p in recording.pieces if p.stage == "update_actor" and p.when == "after"]
    note = update.evidence["ranks"][1]
    row = note["indices"][-1][-1]
    if wrong:
        told = note["attended"][-1]
        told["seen"] = [*told["seen"][:-1], told["seen"][-1] - 1]
    whole = Whole(with_settings(recording, **LAYOUT))
    number = [p is update for p in recording.pieces].index(True)
    samples = whole.followed.samples[number]
    assert samples is not None
    own = [int(samples[at]) for at in (0, 1, 5, 12 + row, 12 + (row + 1) % 12, 12 + (row + 5) % 12)]
    prompt = whole.everything.prompt[:-1] if columns else whole.everything.prompt
    made = whole.cut(replace(whole.everything, samples=frozenset(own), prompt=prompt))
    at = np.flatnonzero(whole.rows(number, frozenset(own)) == 12 + row).tolist()
    found = [s.finding for s in loud(audit(made)) if s.finding.code == "DPA707"]
    assert [list(f.rows) for f in found] == ([at] if wrong else [])
