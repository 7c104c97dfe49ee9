"""How the rows were spread over ranks and micro-batches (DPA7xx)."""

from __future__ import annotations

from typing import Any

import pytest

from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, audit, check_case, each

STAGES = ("old_log_prob", "ref_log_prob", "update_actor")
THREE = Options(prompts=6, ranks=3)


def rows_lost(b: Boundary) -> Truth:
    rank = b.evidence["ranks"][1]
    rank["rows"] -= 1
    rank["indices"] = [list(range(rank["rows"]))]
    return Truth("ranks")


def uneven_tokens(b: Boundary) -> Truth:
    b.evidence["ranks"][0]["tokens"] *= 3
    return Truth("ranks")


def row_twice(b: Boundary) -> Truth:
    """Rank 1 runs its row 2 twice and its row 5 not at all; ranks hold 8 rows."""
    rank = b.evidence["ranks"][1]
    rank["indices"] = [[2 if row == 5 else row for row in part] for part in rank["indices"]]
    return Truth("ranks", (8 + 2, 8 + 5))


def micro_batch_lost(b: Boundary) -> Truth:
    rank = b.evidence["ranks"][0]
    lost = rank["indices"].pop()
    return Truth("ranks", tuple(sorted(lost)))


def row_of_another_rank(b: Boundary) -> Truth:
    rank = b.evidence["ranks"][0]
    rank["indices"] = [[8 if row == 7 else row for row in part] for part in rank["indices"]]
    return Truth("ranks", (7,))


def too_many_tokens(b: Boundary) -> Truth:
    rank = b.evidence["ranks"][1]
    rank["token_limit"] = rank["peak_token_sum"] - 1
    return Truth("ranks")


def one_more_micro_batch(b: Boundary) -> Truth:
    b.evidence["ranks"][0]["micro_batches"].append(0)
    return Truth("ranks")


def packed(b: Boundary, **changes: Any) -> None:
    for rank in b.evidence["ranks"]:
        rank["packed"] = [
            {"micro_batch": at, "mask": "none", "restarts": [True] * len(rows)} | changes
            for at, rows in enumerate(rank["indices"])
        ]


def positions_go_on(b: Boundary) -> Truth:
    """Of rank 1, which holds rows 8 to 15, all but the first row of its first micro-batch."""
    packed(b)
    first = b.evidence["ranks"][1]["packed"][0]
    first["restarts"] = [True] + [False] * (len(first["restarts"]) - 1)
    rows = b.evidence["ranks"][1]["indices"][0][1:]
    return Truth("position_ids", tuple(sorted(8 + row for row in rows)))


def mask_of_ones(b: Boundary) -> Truth:
    """Micro-batches of one row may have one."""
    packed(b, mask="all ones")
    first, second = (rank["indices"] for rank in b.evidence["ranks"])
    rows = [row for part in first if len(part) > 1 for row in part]
    rows += [8 + row for part in second if len(part) > 1 for row in part]
    return Truth("attention_mask", tuple(sorted(rows)))


def mask_of_responses(b: Boundary) -> Truth:
    """Rows of rank 1 see as many tokens as their responses have."""
    for number, rank in enumerate(b.evidence["ranks"]):
        rank["attended"] = [
            {"micro_batch": at, "lengths": [9] * len(rows),
             "seen": [4 if number else 9] * len(rows)}
            for at, rows in enumerate(rank["indices"])
        ]  # fmt: skip
    return Truth("attention_mask", tuple(range(8, 16)))


CASES = [
    case
    for stage in STAGES
    for case in (
        Case("rank_rows", "DPA701", stage, rows_lost, "rows_lost", "[8, 7]"),
        Case("rank_tokens", "DPA702", stage, uneven_tokens, "unbalanced_ranks",
             "within a factor of 2", severity="info"),
        Case("micro_batch_partition", "DPA703", stage, row_twice, "lost_micro_batch",
             "1 rows too rarely, 1 too often, 0 are none"),
        Case("token_limit", "DPA704", stage, too_many_tokens, "token_limit_exceeded",
             "on rank 1"),
        Case("micro_batch_counts", "DPA705", stage, one_more_micro_batch,
             "unequal_micro_batches", "micro-batches per rank [4, 3]"),
        Case("packed_rows", "DPA706", stage, positions_go_on, "packed_rows_leak",
             "go on from the row before"),
        Case("packed_rows", "DPA706", stage, mask_of_ones, "packed_rows_leak",
             "a mask of ones over"),
        Case("attended_tokens", "DPA707", stage, mask_of_responses, "wrong_attention_mask",
             "4; 8 rows are attended to otherwise"),
    )
] + [
    Case("micro_batch_partition", "DPA703", "old_log_prob", micro_batch_lost, "lost_micro_batch",
         "0 too often"),
    Case("micro_batch_partition", "DPA703", "old_log_prob", row_of_another_rank,
         "lost_micro_batch", "1 are none"),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


def _change(work: Any) -> Any:
    def change(b: Boundary) -> Truth:
        for rank in b.evidence["ranks"]:
            work(rank)
        return Truth("")

    return change


def test_ranks_that_together_hold_too_few_rows() -> None:
    change = _change(lambda rank: rank.update(rows=4, indices=[[0, 1, 2, 3]]))
    ran = audit(change={"old_log_prob": change}, until="old_log_prob")
    [finding] = ran.findings("rank_rows", "old_log_prob")
    assert finding.expected == "8 rows on each of 2 ranks"


def test_every_epoch_holds_every_row() -> None:
    change = _change(lambda rank: rank.update(indices=rank["indices"] * 2))
    ran = audit(change={"update_actor": change}, until="update_actor")
    assert ran.outcome("micro_batch_partition", "update_actor").kind == "passed"


def test_rows_of_a_micro_batch_that_nobody_noted() -> None:
    change = _change(lambda rank: rank.pop("indices"))
    outcome = audit(change={"old_log_prob": change}, until="old_log_prob").outcome(
        "micro_batch_partition", "old_log_prob"
    )
    assert (outcome.kind, outcome.reason) == (
        "not_checkable", "not recorded: indices of micro-batches",
    )  # fmt: skip


def test_micro_batches_that_are_cut_by_rows() -> None:
    change = _change(lambda rank: rank.update(token_limit=None))
    outcome = audit(change={"old_log_prob": change}, until="old_log_prob").outcome(
        "token_limit", "old_log_prob"
    )
    assert (outcome.kind, outcome.reason) == (
        "not_applicable", "micro-batches are cut by rows, not by tokens",
    )  # fmt: skip


def test_packed_rows_that_are_apart_are_fine() -> None:
    def change(b: Boundary) -> Truth:
        packed(b)
        return Truth("")

    ran = audit(change={"update_actor": change}, until="update_actor")
    assert ran.outcome("packed_rows", "update_actor").kind == "passed"
    assert ran.outcome("packed_rows", "old_log_prob").reason == "rows are not packed"


@pytest.mark.parametrize("stage", STAGES)
def test_three_ranks_are_fine(stage: str) -> None:
    ran = audit(THREE, until=stage)
    assert ran.outcome("micro_batch_partition", stage).kind == "passed"
    assert not ran.bad()


def test_the_balance_is_measured() -> None:
    ran = audit(until="old_log_prob")
    ran.auditor.end_step()
    history = ran.auditor.history
    low, high = (history[f"global_seqlen/balanced_{side}"][0] for side in ("min", "max"))
    assert 0 < low <= high < 2 * low


@pytest.mark.parametrize("note", [{}, {"rows": None, "tokens": "many", "micro_batches": 3}])
def test_notes_that_lack_what_a_check_needs(note: dict[str, Any]) -> None:
    def nothing(b: Boundary) -> Truth:
        b.evidence["ranks"][0].clear()
        b.evidence["ranks"][0].update(note)
        return Truth("ranks")

    ran = audit(THREE, {"old_log_prob": nothing}, until="old_log_prob")
    for probe, name in (("rank_rows", "rows"), ("rank_tokens", "tokens"),
                        ("micro_batch_partition", "rows"),
                        ("micro_batch_counts", "micro_batches")):  # fmt: skip
        outcome = ran.outcome(probe, "old_log_prob")
        want = ("not_checkable", f"not recorded: {name} of ranks[0]")
        assert (outcome.kind, outcome.reason) == want
    assert not [f for f in ran.auditor.findings if f.code.startswith("DPA9")]


def test_at_most_sixteen_rows_of_a_rank_are_listed() -> None:
    options = Options(prompts=12, ranks=2)  # 24 rows a rank

    def none(b: Boundary) -> Truth:
        b.evidence["ranks"][1]["indices"] = [[]]
        return Truth("")

    [finding] = audit(options, {"old_log_prob": none}, until="old_log_prob").findings(
        "micro_batch_partition", "old_log_prob"
    )
    assert finding.evidence["rows of the rank"] == list(range(16))
    assert finding.rows == tuple(range(24, 48))
    assert finding.expected == "rows 0..23 of rank 1, 1 times each"
    assert finding.actual == "24 rows too rarely, 0 too often, 0 are none"


def test_rows_below_zero_are_none_of_the_rank() -> None:
    def below(b: Boundary) -> Truth:
        b.evidence["ranks"][0]["indices"][0].append(-1)
        return Truth("")

    [finding] = audit(change={"old_log_prob": below}, until="old_log_prob").findings(
        "micro_batch_partition", "old_log_prob"
    )
    assert finding.actual == "0 rows too rarely, 0 too often, 1 are none"


@pytest.mark.parametrize(
    ("tokens", "found"),
    [([10, 20], False), ([10, 21], True), ([0, 2], False), ([0, 3], True), ([0, 0], False)],
)
def test_twice_as_many_tokens_are_even_enough(tokens: list[int], found: bool) -> None:
    """A rank without tokens counts as one with one."""

    def change(b: Boundary) -> Truth:
        for rank, count in zip(b.evidence["ranks"], tokens, strict=True):
            rank["tokens"] = count
        return Truth("")

    ran = audit(change={"old_log_prob": change}, until="old_log_prob")
    findings = ran.findings("rank_tokens", "old_log_prob")
    assert [f.actual for f in findings] == ([f"tokens per rank {tokens}"] if found else [])


@pytest.mark.parametrize(("over", "found"), [(0, False), (1, True)])
def test_a_micro_batch_may_be_as_large_as_the_limit(over: int, found: bool) -> None:
    def change(b: Boundary) -> Truth:
        for rank in b.evidence["ranks"]:
            rank["token_limit"] = 40
            rank["peak_token_sum"] = 40 + over
        return Truth("")

    ran = audit(change={"old_log_prob": change}, until="old_log_prob")
    findings = ran.findings("token_limit", "old_log_prob")
    assert len(findings) == (2 if found else 0)
    if found:
        assert findings[1].actual == "41 on rank 1"
        assert findings[1].expected == "at most 40 tokens in a micro-batch"


def test_rows_of_one_rank_that_is_alone() -> None:
    def twice(b: Boundary) -> Truth:
        b.evidence["ranks"][:] = [b.evidence["ranks"][0]]
        return Truth("")

    [finding] = audit(change={"old_log_prob": twice}, until="old_log_prob").findings(
        "rank_rows", "old_log_prob"
    )
    assert finding.expected == "16 rows on each of 1 ranks"
    assert finding.actual == "[8]"
