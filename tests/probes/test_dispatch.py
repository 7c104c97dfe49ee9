"""Whether the rows can be cut as configured (DPA117 to DPA120, DPA211)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dataproto_audit
from dataproto_audit.testing.healthy import Boundary, Options
from dataproto_audit.testing.recipes import cook

from ._corrupt import Case, Truth, audit, check_case, each, own, own_array, where

PLAIN = Options(recorded=True, micro_rows=4)
PADDED = Options(recorded=True, prompts=3, pad_rows=4, micro_rows=4)
WIDTH = PLAIN.prompt_width + PLAIN.response_width


def _lengths(b: Boundary) -> Any:
    return b.batch.batch["attention_mask"].sum(1).numpy()


def as_it_is(b: Boundary) -> Truth:
    return Truth("batch_size")


def some_are_short(b: Boundary) -> Truth:
    return Truth("attention_mask", tuple(np.flatnonzero(_lengths(b) < 6).tolist()))


def some_are_long(b: Boundary) -> Truth:
    return Truth("attention_mask", tuple(np.flatnonzero(_lengths(b) > 7).tolist()))


def padding_is_long(b: Boundary) -> Truth:
    return Truth("attention_mask")


def other_size(b: Boundary) -> Truth:
    b.batch.meta_info["micro_batch_size"] = 16
    return Truth("meta_info.micro_batch_size")


def trained_padding(b: Boundary) -> Truth:
    rows = np.flatnonzero(b.batch.non_tensor_batch["is_padding"].astype(bool))
    mask = own(b, "response_mask")
    before = mask.clone()
    mask[rows[:2], 0] = 1
    return where("response_mask", mask != before)


CASES = [
    Case("rows_over_ranks", "DPA117", "dispatch", as_it_is, "pad_divisor", "rows to add: 2",
         options=PLAIN, settings={"world_size": 3, "micro_batch_size": None}),
    Case("rows_over_micro_batches", "DPA117", "dispatch", as_it_is, "pad_divisor",
         "a multiple of micro_batch_size = 3 on each of 2 ranks", options=PLAIN,
         settings={"micro_batch_size": 3}),
    Case("long_enough_to_split", "DPA118", "dispatch", some_are_short, "short_for_split",
         "at least 6 tokens a row", options=PLAIN, settings={"cp_size": 3, "tp_size": 2},
         severity="warn"),
    Case("row_fits_token_limit", "DPA119", "dispatch", some_are_long, "token_limit_exceeded",
         "at most max_token_len = 7 tokens a row", options=PLAIN, settings={"max_token_len": 7}),
    Case("row_fits_token_limit", "DPA119", "dispatch", padding_is_long, "padded_width",
         "padded width 14, longest row", options=Options(recorded=True, micro_rows=4,
                                                         prompt_width=10),
         settings={"max_token_len": 13}, severity="info"),
    Case("own_micro_batch_size", "DPA120", "update_actor", other_size, "stage_meta_leak",
         "16 (left by another stage)", options=PLAIN),
    Case("padding_rows_untrained", "DPA211", "dispatch", trained_padding, "mask_on_padding",
         "are on such rows", options=PADDED, also=("DPA106",)),  # dispatch keeps all fields
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


def test_a_batch_that_divides_is_quiet() -> None:
    for options in (PLAIN, PADDED, Options(recorded=True, max_token_len=WIDTH)):
        assert not audit(options, until="dispatch").bad()


@pytest.mark.parametrize("size", [1, 2, 4, 8, 9, 100])
def test_rows_that_all_fit_into_one_micro_batch_need_not_divide(size: int) -> None:
    ran = audit(PLAIN, until="dispatch", settings={"micro_batch_size": size})
    assert ran.outcome("rows_over_micro_batches", "dispatch").kind == "passed"


def test_rows_as_long_as_the_limit_fit() -> None:
    longest: list[int] = []

    def measured(b: Boundary) -> Truth:
        longest.append(int(_lengths(b).max()))
        return Truth("")

    audit(PLAIN, {"dispatch": measured}, until="dispatch")
    ran = audit(PLAIN, until="dispatch", settings={"max_token_len": longest[0]})
    assert not ran.bad()


@pytest.mark.parametrize(
    ("probe", "settings", "reason"),
    [
        ("rows_over_micro_batches", {"max_token_len": 40}, "micro-batches are cut by tokens"),
        ("long_enough_to_split", {"cp_size": 1}, "no split"),
        ("padding_rows_untrained", {}, "no padding rows"),
    ],
)
def test_what_does_not_apply_says_why(probe: str, settings: dict[str, Any], reason: str) -> None:
    outcome = audit(PLAIN, until="dispatch", settings=settings).outcome(probe, "dispatch")
    assert (outcome.kind, outcome.reason) == ("not_applicable", reason)


def test_a_batch_without_such_a_meta_entry_leaks_none() -> None:
    ran = audit(Options(), until="update_actor", settings={"actor_micro_batch_size": 4})
    outcome = ran.outcome("own_micro_batch_size", "update_actor")
    assert (outcome.kind, outcome.reason) == ("not_applicable", "no such meta entry")


def test_a_row_of_flags_without_rows_is_not_judged() -> None:
    """Two flags a row: which one counts is not said."""

    def doubled(b: Boundary) -> Truth:
        flags = own_array(b, "is_padding")
        wide = np.stack([flags, flags], 1)
        b.batch.non_tensor_batch["is_padding"] = wide
        return Truth("")

    ran = audit(PADDED, {"dispatch": doubled}, until="dispatch")
    outcome = ran.outcome("padding_rows_untrained", "dispatch")
    assert outcome.kind == "not_checkable"
    assert outcome.reason == "is_padding does not have one entry a row"


def test_the_older_name_of_the_flag_is_read_too() -> None:
    flag = {"op": "nt", "k": "is_pad", "v": [False] * 5 + [True]}
    [finding] = dataproto_audit.check(cook("T", [flag])).findings[:1]
    assert (finding.code, finding.rows) == ("DPA211", (5,))
    assert finding.columns == {5: (0, 1, 2, 3)}


@given(rows=st.integers(1, 12), ranks=st.integers(1, 5))
def test_rows_are_padded_to_the_next_multiple(rows: int, ranks: int) -> None:
    batch = {"batch": {"responses": np.ones((rows, 2), np.int64)}}
    report = dataproto_audit.check(batch, config={"world_size": ranks})
    found = [f for f in report if f.check == "rows_over_ranks"]
    assert bool(found) == bool(rows % ranks)
    for finding in found:
        padded = finding.evidence["rows after padding"]
        assert padded % ranks == 0 and rows < padded < rows + ranks  # noqa: PT018
        assert finding.evidence["rows to add"] == padded - rows


def test_trained_padding_is_found_where_it_enters_and_said_once() -> None:
    def trained(b: Boundary) -> Truth:
        mask = own(b, "response_mask")
        flags = torch.from_numpy(b.batch.non_tensor_batch["is_padding"].astype(bool))
        mask[flags, 0] = 1
        return Truth("")

    ran = audit(PADDED, {"rollout": trained}, until="dispatch")
    found = [f for f in ran.bad() if f.check == "padding_rows_untrained"]
    assert [f.stage for f in found] == ["rollout"]


@pytest.mark.parametrize("left", [1, 3, 5, 16])
def test_a_smaller_size_that_was_left_is_another_one_too(left: int) -> None:
    def other(b: Boundary) -> Truth:
        b.batch.meta_info["micro_batch_size"] = left
        return Truth("")

    ran = audit(PLAIN, {"update_actor": other}, until="update_actor",
                settings={"actor_micro_batch_size": 4})  # fmt: skip
    [finding] = ran.findings("own_micro_batch_size", "update_actor")
    assert finding.expected == "4 (configured for the actor)"
    assert finding.actual == f"{left} (left by another stage)"


def test_trained_padding_is_counted_against_all_trained_tokens() -> None:
    trained: list[int] = []

    def change(b: Boundary) -> Truth:
        truth = trained_padding(b)
        trained.append(int((b.batch.batch["response_mask"] != 0).sum()))
        return truth

    ran = audit(PADDED, {"dispatch": change}, until="dispatch")
    [finding] = ran.findings("padding_rows_untrained", "dispatch")
    assert finding.actual == f"2 of {trained[0]} trained tokens are on such rows"
