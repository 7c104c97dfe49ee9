"""Scores of findings made by hand."""

from typing import Any

import pytest

from dataproto_audit.findings import Finding
from dataproto_audit.testing.faults import Fault, Truth
from dataproto_audit.testing.scoring import MEASURES, Sighting, in_order, same_field, score

FAULT = Fault(
    "toy", "reward", "after_stage", "score", "A toy.", lambda scene: None,
    stages=("reward", "union"), fields=("score", "rewards"), causes=("shift", "precision"),
)  # fmt: skip
TRUTH = Truth("score", (1, 2), {1: (0,), 2: (3, 4)}, also=(Truth("rewards", (1, 2, 5)),))


def found(boundary: int = 0, **what: Any) -> Sighting:
    usual: dict[str, Any] = {
        "code": "DPA405", "severity": "fail", "stage": "reward", "check": "toy", "field": "score",
        "rows": (1, 2), "columns": {1: (0,), 2: (3, 4)}, "causes": ("shift",),
    }  # fmt: skip
    return Sighting(boundary, Finding(**{**usual, **what}))


def wrong(*sightings: Sighting, truth: Truth | None = TRUTH, **how: Any) -> tuple[str, ...]:
    return score(FAULT, truth, sightings, **how).misses()


def test_all_right() -> None:
    assert wrong(found()) == ()


def test_nothing_found_is_nothing_right() -> None:
    assert wrong() == MEASURES
    assert wrong(found(severity="info")) == MEASURES


@pytest.mark.parametrize(
    ("what", "misses"),
    [
        ({"stage": "union"}, ()),
        ({"field": "batch.rewards"}, ()),
        ({"rows": (1, 2, 5), "columns": {}}, ()),  # the other answer, which has no columns
        ({"rows": (1,), "columns": {1: (0,)}}, ("row_right", "column_right")),
        ({"columns": {1: (0,)}, "rows": (2, 1)}, ("column_right",)),
        ({"causes": ("precision",)}, ()),
        ({"causes": ("x", "y", "shift")}, ("cause_top1",)),
        ({"causes": ("x", "y", "z", "shift")}, ("cause_top1", "cause_top3")),
        ({"stage": "rollout"}, ("stage_right", "row_right", "column_right")),
        ({"field": "uid"}, ("field_right", "row_right", "column_right")),
    ],
)
def test_each_measure_alone(what: dict[str, Any], misses: tuple[str, ...]) -> None:
    assert wrong(found(**what)) == misses


def test_columns_must_be_exact_where_only_they_are_the_truth() -> None:
    alone = Truth("score", (1, 2), {1: (0,), 2: (3, 4)})
    assert wrong(found(columns={1: (0,), 2: (3,)}), truth=alone) == ("column_right",)


def test_the_earliest_boundary_counts_then_the_severity() -> None:
    late, early = found(4, stage="update_actor"), found(3)
    worse, milder = found(3), found(3, severity="warn", stage="rollout")
    assert wrong(late, early) == ()
    assert wrong(milder, worse) == ()
    assert [s.finding.severity for s in in_order([milder, worse])] == ["fail", "warn"]
    assert "stage_right" in wrong(found(2, stage="rollout"), early)


def test_rows_may_be_spread_over_findings_on_one_field() -> None:
    first = found(rows=(1,), columns={1: (0,)})
    second = found(rows=(2,), columns={2: (3, 4)})
    elsewhere = found(1, rows=(2,), columns={2: (3, 4)})
    assert wrong(first, second) == ()
    assert wrong(first, elsewhere) == ("row_right", "column_right")


def test_a_later_hit_may_have_the_rows() -> None:
    assert wrong(found(rows=(7,), columns={}), found(5)) == ()


def test_what_is_not_defined_counts_as_right() -> None:
    assert wrong(found(rows=(9,), columns={}), truth=Truth("score")) == ()
    assert wrong(found(stage="x", field="y"), truth=None) == ("stage_right", "field_right")


def test_rows_that_moved_are_followed() -> None:
    moved = found(rows=(11, 12), columns={11: (0,), 12: (3, 4)})
    assert wrong(moved, moved=lambda row, sighting: row + 10) == ()


def test_names_with_a_prefix() -> None:
    assert same_field("non_tensor_batch.uid", ("uid",))
    assert same_field("sampling.top_p", ("sampling.top_p",))
    assert not same_field("uid", ("prompts",))
