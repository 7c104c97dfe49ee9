"""The critic's update against one unsplit recomputation (DPA505, DPA506)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataproto_audit.reference.values import value_loss
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, at, audit, check_case, each, loner, own

AFTER = "update_critic"
CRITIC = Options(critic=True)
MINI = Options(critic=True, mini_batches=2)


def other_value(b: Boundary) -> Truth:
    row = loner(b)
    own(b, "update_values")[row, 1] -= 0.3
    return at("values", (row, 1))


def shifted(b: Boundary) -> Truth:
    """The stored values were those behind each token."""
    mask = b.batch.batch["response_mask"] != 0
    values = b.batch.batch["values"].clone()
    own(b, "update_values")[:] = torch.roll(values, 1, 1)
    b.batch.batch["update_values"][:, 0] = 7.0  # nothing of the other end
    cells = mask & (torch.roll(values, 1, 1) != values)
    return at("values", *map(tuple, cells.nonzero().tolist()))


def rows_swapped(b: Boundary) -> Truth:
    own(b, "update_values")[:] = b.batch.batch["values"].roll(1, 0)
    mask = b.batch.batch["response_mask"] != 0
    return at("values", *map(tuple, mask.nonzero().tolist()))


def _told(name: str, factor: float, number: int = 0) -> Any:
    def change(b: Boundary) -> Truth:
        b.evidence["losses"][number][name] *= factor
        return Truth("losses")

    change.__name__ = f"{name}_times_{factor}_of_{number}"
    return change


def _computed_with(**how: Any) -> Any:
    def change(b: Boundary) -> Truth:
        names = {"values": "update_values", "old_values": "values", "returns": "returns",
                 "response_mask": "response_mask"}  # fmt: skip
        fields = {k: b.batch.batch[name] for k, name in names.items()}
        b.evidence["losses"][0]["vf_loss"] = float(value_loss(**fields, **{"clip": 0.05, **how}))
        b.evidence["losses"][0]["cliprange_value"] = 0.05
        return Truth("losses")

    return change


def far(b: Boundary) -> None:
    """Values of all rows far from the old ones, in a later mini-batch."""
    own(b, "update_values")[:] += 1.0
    b.batch.batch["value_mini_batch"][:] = 0


CASES = [
    Case("first_values", "DPA505", AFTER, other_value, "dropout_on",
         "as before the first step", also=("DPA506",), options=CRITIC),
    Case("value_loss_recomputed", "DPA506", AFTER, _told("vf_loss", 2.0), "loss_depends_on_split",
         "evidence  factor: 2", options=CRITIC),
    Case("value_loss_recomputed", "DPA506", AFTER, _told("vf_loss", 0.5, 1),
         "loss_depends_on_split", "of mini-batch 1, unsplit", options=MINI),
    Case("value_loss_recomputed", "DPA506", AFTER, _told("normaliser", 2.0), "wrong_normaliser",
         "normaliser", options=CRITIC),
    Case("value_loss_recomputed", "DPA506", AFTER,
         _computed_with(loss_agg_mode="seq-mean-token-mean"), "wrong_normaliser", "vf_loss",
         options=CRITIC),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize(
    ("change", "cause", "says"),
    [(shifted, "shift", "shift by -1"), (rows_swapped, "row_permutation", "rows matched anew")],
)
def test_what_explains_the_values_is_tried_out(change: Any, cause: str, says: str) -> None:
    options = Options(critic=True, one_token=0, truncated=99, response_width=8)
    ran = audit(options, {AFTER: change}, until=AFTER)
    [finding] = ran.findings("first_values", AFTER)
    assert finding.causes[0] == cause
    assert says in str(finding)


def test_a_loss_without_its_clip_is_told_from_one_of_another_split() -> None:
    def change(b: Boundary) -> Truth:
        far(b)
        return Truth(str(_computed_with(clip=float("inf"))(b).field))

    ran = audit(CRITIC, {AFTER: change}, until=AFTER)
    [finding] = ran.findings("value_loss_recomputed", AFTER)
    assert finding.causes[0] == "wrong_clip"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b.evidence["losses"][0].pop("cliprange_value"), "losses.cliprange_value"),
        (lambda b: b.evidence["losses"][0].update(loss_agg_mode="x"), "unknown aggregation x"),
        (lambda b: own(b, "value_mini_batch").fill_(7), "no row of the reported mini-batches"),
    ],
)
def test_what_was_not_told_leaves_the_verdict_open(change: Any, reason: str) -> None:
    ran = audit(CRITIC, {AFTER: change}, until=AFTER)
    outcome = ran.outcome("value_loss_recomputed", AFTER)
    assert (outcome.kind, reason in outcome.reason) == ("not_checkable", True)


def _moved_by(share: float, cells: int = 0) -> Any:
    """Normal noise of ``share`` of the values' root mean square on all cells, or on a few."""

    def change(b: Boundary) -> Truth:
        values, mask = own(b, "update_values"), b.batch.batch["response_mask"] != 0
        noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(3))
        if cells:
            few = torch.zeros_like(mask)
            few[tuple(mask.nonzero()[:cells].T)] = True
            noise = few.float()
        values += share * values[mask].square().mean().sqrt() * noise
        return Truth("values")

    return change


@pytest.mark.parametrize(
    ("dtype", "share", "cells", "silent"),
    [
        ("float32", 0.01, 0, False),
        ("bfloat16", 0.01, 0, True),
        ("bf16", 0.01, 0, True),
        ("bfloat16", 0.3, 2, True),  # single tokens have no bound
        ("bfloat16", 0.35, 0, False),  # what dropout of 0.1 did in a run of verl
        ("fp32", 0.0, 0, True),
    ],
)
def test_the_tolerance_is_that_of_the_precision(
    dtype: str, share: float, cells: int, silent: bool
) -> None:
    change = {AFTER: _moved_by(share, cells)}
    ran = audit(CRITIC, change, until=AFTER, settings={"trainer_dtype": dtype})
    found = ran.findings("first_values", AFTER)
    assert (not found) is silent
    assert all("noise model" in finding.evidence for finding in found)


def test_values_that_are_not_finite_are_for_the_finite_checks() -> None:
    def change(b: Boundary) -> Truth:
        for name in ("values", "update_values"):
            own(b, name)[0, 0] = float("nan")
        return Truth("values")

    ran = audit(CRITIC, {AFTER: change}, until=AFTER)
    assert not ran.findings("first_values", AFTER)


def test_the_loss_table_holds_the_value_loss() -> None:
    ran = audit(MINI, until=AFTER)
    table = ran.auditor._cache["value_loss_table"]
    assert [(number, term) for number, term, *_ in table] == [(0, "vf_loss"), (1, "vf_loss")]
