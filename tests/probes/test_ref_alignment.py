"""The reference's log-probs in their places, after the policy has moved (DPA304, DPA310)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit import check
from dataproto_audit.findings import Report
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, audit, check_case, each, where

PROBE, FIELD = "ref_in_place", "ref_log_prob"
MOVED = Options(step=30, response_width=16)


def shifted(b: Boundary) -> Truth:
    tensors = b.batch.batch
    tensors[FIELD] = torch.cat([tensors[FIELD][:, 1:], tensors[FIELD][:, -1:]], 1)
    assert (tensors["response_mask"].sum(1) < 8).any()  # short rows say nothing by themselves
    return where(FIELD, tensors["response_mask"] != 0)


CASES = [Case(PROBE, "DPA304", FIELD, shifted, "shift", "they follow those of other columns",
              also=("DPA306", "DPA307"), options=MOVED)]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


def batch(
    rows: int = 32, width: int = 40, *, moved: float = 0.2, seed: int = 0, short: bool = True
) -> dict[str, Any]:
    """Log-probs of a reference, and of a policy that has moved by that many nats."""
    random = np.random.default_rng(seed)
    ref = -random.exponential(1.0, (rows, width))
    old = np.minimum(ref + moved * random.standard_normal((rows, width)), -1e-6)
    length = random.integers(width // 4, width + 1, (rows, 1)) if short else width
    mask = np.broadcast_to(np.arange(width) < length, (rows, width))
    fields = {"old_log_probs": old, FIELD: ref}
    return {
        name: np.where(mask, value, 0.0).astype(np.float32) for name, value in fields.items()
    } | {
        "response_mask": mask.astype(np.int64),
        "responses": random.integers(5, 5000, (rows, width)),
    }


def judged(fields: dict[str, Any], **config: Any) -> tuple[Report, list[Any]]:
    report = check({"batch": fields}, stage=FIELD, config=config)
    return report, [f for f in report.findings if f.check == PROBE]


@pytest.mark.parametrize("by", [1, -1, 2, -2])
@pytest.mark.parametrize("moved", [0.1, 0.3])
def test_a_shift_of_all_rows_is_undone(by: int, moved: float) -> None:
    fields = batch(moved=moved)
    fields[FIELD] = np.roll(fields[FIELD], by, 1)
    _, [finding] = judged(fields)
    assert (finding.code, finding.causes, len(finding.rows)) == ("DPA304", ("shift",), 32)
    assert f"shift by {-by:+d}" in finding.evidence


def test_rows_that_are_shifted_among_others_are_named() -> None:
    fields = batch(rows=64, width=120)
    fields[FIELD][[5, 17, 40]] = np.roll(fields[FIELD][[5, 17, 40]], 1, 1)
    _, [finding] = judged(fields)
    assert (finding.code, finding.rows) == ("DPA304", (5, 17, 40))


def test_a_few_shifted_rows_of_many_long_ones_are_found_by_their_gap() -> None:
    fields = batch(rows=300, width=1500)
    fields[FIELD][[7, 150]] = np.roll(fields[FIELD][[7, 150]], 1, 1)
    _, [finding] = judged(fields)
    assert finding.rows == (7, 150)


def test_rows_that_are_exchanged_are_named() -> None:
    fields = batch()
    fields[FIELD][[3, 8, 20]] = fields[FIELD][[8, 20, 3]]
    _, [finding] = judged(fields)
    assert (finding.code, finding.causes[0], finding.rows) == (
        "DPA310",
        "row_permutation",
        (3, 8, 20),
    )
    mask = fields["response_mask"][3] != 0
    assert finding.columns[3] == tuple(np.flatnonzero(mask))


def test_a_whole_order_that_was_not_undone_is_named() -> None:
    fields = batch(rows=24, short=False)
    fields[FIELD] = np.roll(fields[FIELD], 5, 0)
    _, [finding] = judged(fields)
    assert (finding.causes[0], len(finding.rows)) == ("row_permutation", 24)


@pytest.mark.parametrize("moved", [0.05, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("shape", [(2, 3), (8, 12), (256, 4), (64, 200), (1, 400)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_policy_that_has_moved_is_no_fault(
    moved: float, shape: tuple[int, int], seed: int
) -> None:
    report, found = judged(batch(*shape, moved=moved, seed=seed))
    assert not found
    assert next(o for o in report.outcomes if o.check == PROBE).kind == "passed"


@pytest.mark.parametrize("seed", range(4))
def test_what_all_tokens_of_a_column_have_in_common_is_no_order(seed: int) -> None:
    """A policy that learned a form: its second token is as certain as the reference's first."""
    random = np.random.default_rng(seed)
    sure = iter(-0.05 * random.random((4, 256, 1)))
    unsure = iter(-1.5 - random.random((2, 256, 1)))
    fields = batch(256, 3, short=False)
    fields[FIELD] = np.hstack([next(sure), next(unsure), next(sure)]).astype(np.float32)
    fields["old_log_probs"] = np.hstack([next(unsure), next(sure), next(sure)]).astype(np.float32)
    assert not judged(fields)[1]
    fields["old_log_probs"] = np.roll(fields[FIELD].mean(0, keepdims=True), 1, 1).repeat(256, 0)
    assert not judged(fields)[1]


@pytest.mark.parametrize("value", [-0.5, 0.0])
def test_log_probs_that_do_not_vary_follow_nothing(value: float) -> None:
    fields = batch()
    fields[FIELD] = np.full_like(fields[FIELD], value)
    assert not judged(fields)[1]


def test_equal_texts_can_be_exchanged() -> None:
    fields = batch(short=False)
    for name in ("old_log_probs", FIELD):
        fields[name][1::2] = fields[name][::2]
    assert not judged(fields)[1]


def test_cells_that_are_not_finite_are_left_out() -> None:
    fields = batch()
    fields[FIELD][4] = np.nan
    fields["old_log_probs"][5, :3] = -np.inf
    assert not judged(fields)[1]
    fields[FIELD] = np.roll(fields[FIELD], 1, 1)
    assert judged(fields)[1]


def test_the_first_step_is_judged_by_equality() -> None:
    fields = batch()
    fields[FIELD] = np.roll(fields[FIELD], 1, 1)
    ran = audit(Options(step=1), until=FIELD)
    assert ran.outcome(PROBE, FIELD).kind == "not_applicable"
