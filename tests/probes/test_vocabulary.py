"""Ids that exist, and nothing behind the end of a response (DPA215, DPA216)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit import check
from dataproto_audit.testing.healthy import Boundary, Options
from dataproto_audit.testing.toy_policy import STOP

from ._corrupt import Case, Truth, at, audit, check_case, each, own, row_of

WIDE = Options(response_width=8, balanced=False)
VOCABULARY = WIDE.vocab


def _write(b: Boundary, row: int, column: int, value: int) -> None:
    prompt = b.batch.batch["prompts"].shape[1]
    own(b, "responses")[row, column] = value
    own(b, "input_ids")[row, prompt + column] = value


def _id(value: int) -> Any:
    def change(b: Boundary) -> Truth:
        row = row_of(b, 8)
        _write(b, row, 3, value)
        return at("input_ids", (row, b.batch.batch["prompts"].shape[1] + 3))

    change.__name__ = f"id_{value}"
    return change


def goes_on(b: Boundary) -> Truth:
    """A stop id in the middle of a full row."""
    row = row_of(b, 8)
    _write(b, row, 2, STOP)
    ids = b.batch.batch["responses"][row]
    return at("responses", *((row, c) for c in range(3, 8) if int(ids[c]) != STOP))


CASES = [
    Case("ids_in_vocabulary", "DPA215", "rollout", _id(VOCABULARY), "wrong_dtype",
         f"ids from 0 to {VOCABULARY - 1}", options=WIDE),
    Case("ids_in_vocabulary", "DPA215", "rollout", _id(-7), "wrong_dtype", "-7 at row",
         options=WIDE),
    Case("nothing_after_stop", "DPA216", "rollout", goes_on, "wrong_stop_token",
         "tokens after a stop id in 1 rows", options=WIDE),
    Case("nothing_after_stop", "DPA216", "rollout", goes_on, "wrong_stop_token",
         "say multi_turn=True", options=WIDE, settings={"multi_turn": None}, severity="warn"),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


def verdict(probe: str, change: Any = None, **more: Any) -> tuple[str, str]:
    ran = audit(more.pop("options", WIDE), {"rollout": change} if change else {},
                until="rollout", **more)  # fmt: skip
    outcome = ran.outcome(probe, "rollout")
    return outcome.kind, outcome.reason


# -- ids -------------------------------------------------------------------------------------------


def test_negative_ids_are_found_without_a_vocabulary() -> None:
    unknown = {"settings": {"vocab_size": None}}
    assert verdict("ids_in_vocabulary", _id(-1), **unknown)[0] == "failed"
    assert verdict("ids_in_vocabulary", **unknown) == (
        "not_checkable", "setting unknown: vocab_size",
    )  # fmt: skip


def test_padding_may_hold_any_id() -> None:
    def padded(b: Boundary) -> Truth:
        own(b, "input_ids")[b.batch.batch["attention_mask"] == 0] = -100
        return Truth("")

    assert verdict("ids_in_vocabulary", padded)[0] == "passed"


@given(st.integers(0, VOCABULARY - 1))
def test_every_id_of_the_vocabulary_is_fine(value: int) -> None:
    assert verdict("ids_in_vocabulary", _id(value))[0] == "passed"


# -- stop ids --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    WIDE, replace(WIDE, multi_turn=True), replace(WIDE, truncated=99), replace(WIDE, one_token=99),
    replace(WIDE, aborted=2),
])  # fmt: skip
def test_healthy_rows_end_with_their_stop_id(options: Options) -> None:
    said, reason = verdict("nothing_after_stop", options=options)
    assert said == ("not_applicable" if options.multi_turn else "passed"), reason


def test_turns_may_end_in_a_stop_id() -> None:
    several = {"settings": {"multi_turn": True}}
    reason = "each of several turns may end in a stop id"
    assert verdict("nothing_after_stop", goes_on, **several) == ("not_applicable", reason)


def test_a_mask_with_holes_tells_of_several_turns() -> None:
    def turns(b: Boundary) -> Truth:
        goes_on(b)
        own(b, "response_mask")[row_of(b, 8), 3:5] = 0
        return Truth("")

    assert verdict("nothing_after_stop", turns, settings={"multi_turn": None}) == (
        "not_applicable", "several turns: the response mask leaves tokens out",
    )  # fmt: skip


def test_an_engine_may_be_told_to_go_on() -> None:
    def ignoring(b: Boundary) -> Truth:
        b.batch.meta_info["sampling"] = {**b.batch.meta_info["sampling"], "ignore_eos": True}
        return goes_on(b)

    assert verdict("nothing_after_stop", ignoring) == (
        "not_applicable", "the engine was told to ignore stop ids",
    )  # fmt: skip


@pytest.mark.parametrize("then", [STOP, 0])
def test_stop_and_pad_ids_behind_a_stop_are_for_other_checks(then: int) -> None:
    def padded(b: Boundary) -> Truth:
        row = row_of(b, 8)
        _write(b, row, 2, STOP)
        for column in range(3, 8):
            _write(b, row, column, then)
        return Truth("")

    assert verdict("nothing_after_stop", padded)[0] == "passed"


def test_any_of_several_stop_ids_ends_a_response() -> None:
    settings = {"stop_ids": (STOP, 31)}

    def other(b: Boundary) -> Truth:
        _write(b, row_of(b, 8), 0, 31)
        return Truth("")

    assert verdict("nothing_after_stop", other, settings=settings)[0] == "failed"
    assert verdict("nothing_after_stop", settings={"stop_ids": ()})[0] == "passed"


def test_the_row_is_named_in_a_batch_at_hand() -> None:
    responses = torch.tensor([[5, 9, 0], [9, 6, 9]])
    attention = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    fields = {"prompts": torch.ones(2, 1, dtype=torch.int64), "responses": responses,
              "input_ids": torch.cat([torch.ones(2, 1, dtype=torch.int64), responses], 1),
              "attention_mask": attention, "response_mask": attention[:, 1:]}  # fmt: skip
    found = [f for f in check({"batch": fields}, "rollout", config={"stop_ids": [9]}).findings
             if f.code == "DPA216"]  # fmt: skip
    [finding] = found
    assert (finding.severity, dict(finding.columns)) == ("warn", {1: (1,)})
    assert np.array(finding.rows).tolist() == [1]


def test_the_first_stop_id_of_a_row_is_named() -> None:
    def twice(b: Boundary) -> Truth:
        row = row_of(b, 8)
        for column in (2, 5):
            _write(b, row, column, STOP)
        for column in (3, 4, 6, 7):
            _write(b, row, column, 9)
        return at("responses", *((row, column) for column in (3, 4, 6, 7)))

    ran = audit(WIDE, {"rollout": twice}, until="rollout")
    [finding] = ran.findings("nothing_after_stop", "rollout")
    assert finding.expected.startswith(f"no token after the stop id {STOP} at column 2 of row")
    assert finding.actual == "4 tokens after a stop id in 1 rows"
    assert finding.columns == ran.truths[0].columns


def test_tokens_outside_the_vocabulary_are_counted() -> None:
    def two(b: Boundary) -> Truth:
        row = row_of(b, 8)
        _write(b, row, 3, VOCABULARY)
        _write(b, row, 4, -1)
        return Truth("")

    [finding] = audit(WIDE, {"rollout": two}, until="rollout").findings(
        "ids_in_vocabulary", "rollout"
    )
    assert finding.actual.startswith(f"{VOCABULARY} at row")
    assert finding.actual.endswith("; 2 such tokens")
    unknown = audit(WIDE, {"rollout": two}, until="rollout", settings={"vocab_size": None})
    [finding] = unknown.findings("ids_in_vocabulary", "rollout")
    assert finding.expected == "ids from 0 on"
    assert finding.actual.endswith("; 1 such tokens")


def test_a_stop_id_in_the_last_column_ends_the_row() -> None:
    def last(b: Boundary) -> Truth:
        _write(b, row_of(b, 8), 7, STOP)
        return Truth("")

    assert verdict("nothing_after_stop", last)[0] == "passed"
