"""Groups by uid (DPA401 to DPA403)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit.testing import faults
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, audit, check_case, each, own, own_array, where

LAST = Options().prompt_width - 1


def uid_twice(b: Boundary) -> Truth:
    uids = own_array(b, "uid")
    uids[2] = uids[0]
    return Truth("uid", (0, 2))


def one_uid_of_its_own(b: Boundary) -> Truth:
    own_array(b, "uid")[5] = "another"
    return Truth("uid", (4, 5, 6, 7))


def uid_after_repeat(b: Boundary) -> Truth:
    uids = own_array(b, "uid")
    uids[:] = [f"row-{row}" for row in range(len(uids))]
    return Truth("uid", tuple(range(len(uids))))


def swapped_uids(b: Boundary) -> Truth:
    uids = own_array(b, "uid")
    uids[[1, 5]] = uids[[5, 1]]
    prompts = b.batch.batch["prompts"]
    bad = torch.zeros(prompts.shape, dtype=torch.bool)
    # What most rows of a uid have is the measure.
    for row, other in ((1, 4), (5, 0)):
        bad[row] = prompts[row] != prompts[other]
    return where("prompts", bad)


def one_prompt_id(b: Boundary) -> Truth:
    for name in ("prompts", "input_ids"):
        own(b, name)[1, LAST] += 1
    return Truth("prompts", (1,), {1: (LAST,)})


def whole_group_has_another_prompt(b: Boundary) -> Truth:
    for name in ("prompts", "input_ids"):
        own(b, name)[4:8, LAST] += 1
    return Truth("prompts", (4, 5, 6, 7), dict.fromkeys((4, 5, 6, 7), (LAST,)))


def tiled(b: Boundary) -> Truth:
    before = b.batch.non_tensor_batch["uid"].copy()
    faults.FAULTS["tiled_groups"].apply(b.batch)
    assert (before != b.batch.non_tensor_batch["uid"]).any()
    prompts, want = b.batch.batch["prompts"].numpy(), np.zeros((16, LAST + 1), np.int64)
    used = np.zeros(want.shape, bool)
    for row, ids in enumerate(b.batch.non_tensor_batch["prompt_ids"]):  # each row's own prompt
        want[row, LAST + 1 - len(ids) :] = ids
        used[row, LAST + 1 - len(ids) :] = True
    attended = b.batch.batch["attention_mask"][:, : LAST + 1].numpy() != 0
    return where("prompts", (prompts != want) & (used | attended) | (used != attended))


CASES = [
    Case("uid_per_prompt", "DPA403", "prompts", uid_twice, "uid_reused", "4 distinct uids"),
    Case("group_size", "DPA401", "union", one_uid_of_its_own, "split_group", "4 rows per uid",
         also=("DPA404",)),
    Case("group_size", "DPA401", "union", uid_after_repeat, "uid_after_repeat", "16 groups of 1",
         also=("DPA404",), blames="prompts"),
    Case("group_prompt", "DPA402", "union", swapped_uids, "row_permutation",
         "another prompt in 2 of 16 rows", also=("DPA404",)),
    Case("group_prompt", "DPA402", "union", tiled, "tiled_groups", "groups: 4", also=("DPA404",)),
    Case("group_prompt", "DPA402", "rollout", one_prompt_id, "field_overwritten",
         "another prompt in 1 of 16 rows", at="union"),
    Case("group_prompt", "DPA402", "rollout", whole_group_has_another_prompt, "field_overwritten",
         "another prompt in 4 of 16 rows", at="union"),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize(("n", "severity"), [(5, "info"), (8, "fail")])
def test_a_batch_that_is_no_multiple_of_n_is_a_piece_of_one(n: int, severity: str) -> None:
    """16 rows in groups of 4: with n = 5 the batch was cut, with n = 8 the groups are wrong."""
    [finding] = audit(until="union", settings={"n": n}).findings("group_size", "union")
    assert (finding.severity, finding.stage) == (severity, "union")
    assert finding.actual == "4 groups of 4"


def test_a_batch_whose_rows_are_all_groups_of_their_own_is_no_piece() -> None:
    change = {"union": uid_after_repeat}
    [finding] = audit(change=change, until="union", settings={"n": 5}).findings(
        "group_size", "union"
    )
    assert (finding.severity, finding.stage) == ("fail", "prompts")


def test_images_may_make_one_prompt_of_several_lengths() -> None:
    ran = audit(Options(images=True), until="union")
    outcome = ran.outcome("group_prompt", "union")
    assert (outcome.kind, outcome.reason) == ("not_applicable", "image ids may differ in number")


@pytest.mark.parametrize(("n", "severity"), [(None, "info"), (2, "fail")])
def test_a_uid_may_name_a_session_where_no_prompt_comes_twice(n: int | None, severity: str) -> None:
    def sessions(b: Boundary) -> Truth:
        own_array(b, "uid")[:] = [f"session-{row // 2}" for row in range(len(b.batch))]
        return Truth("")

    options = Options(prompts=8, n=1)
    ran = audit(options, {"union": sessions}, until="union", settings={"n": n})
    [finding] = ran.findings("group_prompt", "union")
    assert finding.severity == severity


def test_prompts_with_the_same_text_are_groups_of_their_own() -> None:
    assert not audit(Options(duplicate_prompts=True), until="balance").bad()


def test_a_variable_group_size_is_left_unset() -> None:
    ran = audit(until="union", settings={"n": None})
    outcome = ran.outcome("group_size", "union")
    assert (outcome.kind, outcome.reason) == ("not_checkable", "setting unknown: n")


def test_truncated_prompts_are_not_compared_with_their_ids() -> None:
    def longer(b: Boundary) -> Truth:
        lists = own_array(b, "prompt_ids")
        for row in range(4):
            lists[row] = [9] * (LAST + 3)
        return Truth("")

    ran = audit(change={"union": longer}, until="union")
    assert ran.outcome("group_prompt", "union").kind == "passed"


def test_a_row_with_ids_of_its_own_is_compared_with_them() -> None:
    def other(b: Boundary) -> Truth:
        lists = own_array(b, "prompt_ids")
        lists[6] = [*lists[6][:-1], 3]
        return Truth("")

    ran = audit(change={"union": other}, until="union")
    [finding] = ran.findings("group_prompt", "union")
    assert finding.columns == {6: (LAST,)}


def test_attention_that_starts_elsewhere_is_another_prompt() -> None:
    def first_token_off(b: Boundary) -> Truth:
        own(b, "attention_mask")[12:16, 0] = 0
        return Truth("")

    ran = audit(change={"rollout": first_token_off}, until="union")
    [finding] = ran.findings("group_prompt", "union")
    assert finding.columns == dict.fromkeys((12, 13, 14, 15), (0,))


def test_prompt_ids_that_are_no_ids() -> None:
    def words(b: Boundary) -> Truth:
        own_array(b, "prompt_ids")[3] = ["a", "b"]
        return Truth("")

    outcome = audit(change={"union": words}, until="union").outcome("group_prompt", "union")
    assert outcome.kind == "not_checkable"
    assert outcome.reason == "prompt_ids holds other things than token ids"


@pytest.mark.parametrize("make", [int, lambda row: (row, "a")])
def test_uids_may_be_of_any_kind(make: Any) -> None:
    def other_kind(b: Boundary) -> Truth:
        uids = np.empty(len(b.batch), object)
        uids[:] = [make(row) for row in range(len(uids))]
        b.batch.non_tensor_batch["uid"] = uids
        return Truth("")

    ran = audit(change={"prompts": other_kind}, until="balance")
    assert ran.outcome("uid_per_prompt", "prompts").kind == "passed"
    assert ran.outcome("group_size", "union").kind == "passed"


def test_groups_are_counted_by_size() -> None:
    def uneven(b: Boundary) -> Truth:
        uids = own_array(b, "uid")
        uids[5], uids[9] = "another", uids[0]
        return Truth("")

    [finding] = audit(change={"union": uneven}, until="union").findings("group_size", "union")
    assert finding.actual == "1 groups of 1, 2 groups of 3, 1 groups of 4, 1 groups of 5"
    assert finding.evidence == {"groups": 5, "wrong": 4}
    assert finding.severity == "fail"


def test_uids_that_are_reused_are_counted() -> None:
    def thrice(b: Boundary) -> Truth:
        uids = own_array(b, "uid")
        uids[1] = uids[2] = uids[0]
        return Truth("")

    [finding] = audit(change={"prompts": thrice}, until="prompts").findings(
        "uid_per_prompt", "prompts"
    )
    assert (finding.expected, finding.actual) == ("4 distinct uids", "2")
    assert finding.rows == (0, 1, 2)


def without_ids(b: Boundary) -> None:
    for name in ("prompt_ids", "raw_prompt"):
        b.batch.non_tensor_batch.pop(name, None)


def moved_prompts(b: Boundary, order: list[int]) -> None:
    """Prompts of other rows; their attention comes along."""
    tensors, width = b.batch.batch, LAST + 1
    for name in ("prompts", "input_ids", "attention_mask"):
        own(b, name)[:, :width] = tensors[name][order, :width]


@pytest.mark.parametrize(
    ("order", "cause", "rows"),
    [
        ([0, 1, 2, 7, 4, 5, 6, 3], "row_permutation", (3, 7)),
        ([0, 1, 2, 4, 4, 5, 6, 7], "not_repeated", (3,)),
        ([0, 4] * 4, "tiled_groups", (1, 3, 5, 7)),
    ],
)
def test_where_the_prompts_of_rows_belong(
    order: list[int], cause: str, rows: tuple[int, ...]
) -> None:
    """Most rows of a uid tell its prompt, the first one where two are as many."""

    def change(b: Boundary) -> Truth:
        without_ids(b)
        moved_prompts(b, order)
        return Truth("")

    options = Options(prompts=2, balanced=False)
    [finding] = audit(options, {"union": change}, until="union").findings("group_prompt", "union")
    assert finding.causes[0] == cause
    assert finding.rows == rows
    assert finding.actual == f"another prompt in {len(rows)} of 8 rows"
    assert finding.evidence == {"groups": 2}


def test_the_first_row_of_a_group_may_be_the_wrong_one() -> None:
    def change(b: Boundary) -> Truth:
        without_ids(b)
        moved_prompts(b, [4, 1, 2, 3, 4, 5, 6, 7])
        return Truth("")

    options = Options(prompts=2, balanced=False)
    [finding] = audit(options, {"union": change}, until="union").findings("group_prompt", "union")
    assert finding.rows == (0,)
