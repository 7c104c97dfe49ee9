"""Token counts that travel beside the batch (DPA121)."""

from __future__ import annotations

from typing import Any

import pytest

from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, audit, check_case, each

PROBE, NAME = "token_counts", "global_token_num"


def counted(b: Boundary) -> list[int]:
    tokens: list[int] = b.batch.batch["attention_mask"].sum(1).tolist()
    return tokens


def of_other_rows(b: Boundary) -> Truth:
    tokens = counted(b)
    b.batch.meta_info[NAME] = tokens[::-1]
    rows = tuple(r for r, (a, t) in enumerate(zip(tokens, tokens[::-1], strict=True)) if a != t)
    return Truth(f"meta_info.{NAME}", rows)


def one_more(b: Boundary) -> Truth:
    tokens = counted(b)
    tokens[3] += 1
    b.batch.meta_info[NAME] = tokens
    return Truth(f"meta_info.{NAME}", (3,))


CASES = [
    Case(PROBE, "DPA121", "balance", of_other_rows, "row_permutation",
         "count again after the rows were reordered", severity="warn"),
    Case(PROBE, "DPA121", "old_log_prob", one_more, "stage_meta_leak", "tokens in row 3",
         severity="warn"),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


def test_it_is_said_once_a_step() -> None:
    ran = audit(change={"balance": of_other_rows}, until="update_actor")
    assert [f.stage for f in ran.bad() if f.check == PROBE] == ["balance"]


def test_a_batch_without_counts_has_none_to_check() -> None:
    outcome = audit(Options(balanced=False), until="reward").outcome(PROBE, "reward")
    assert (outcome.kind, outcome.reason) == ("not_applicable", "no such meta entry")


@pytest.mark.parametrize("value", [[1, 2, 3], "many", [["a"]]])
def test_what_is_no_list_of_counts_is_not_judged(value: Any) -> None:
    def other(b: Boundary) -> Truth:
        b.batch.meta_info[NAME] = value
        return Truth("")

    outcome = audit(change={"reward": other}, until="reward").outcome(PROBE, "reward")
    assert (outcome.kind, outcome.reason) == (
        "not_checkable", f"{NAME} is not one number a row",
    )  # fmt: skip
