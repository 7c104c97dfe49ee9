"""NaN and infinity in the numbers that losses use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dataproto_audit import check
from dataproto_audit.probes.finite import MADE_AT
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, at, audit, check_case, each, own, row_of


def _odd(field: str, value: float) -> Callable[[Boundary], Truth]:
    def change(b: Boundary) -> Truth:
        row = row_of(b, 3)
        own(b, field)[row, 1] = value
        return at(field, (row, 1))

    return change


CRITIC = Options(critic=True)
CASES = [
    Case("advantages_finite", "DPA420", "advantage", _odd("advantages", float("nan")),
         "non_finite", "NaN: 1"),
    Case("advantages_finite", "DPA420", "advantage", _odd("advantages", float("inf")),
         "non_finite", "NaN: 0"),
    Case("values_finite", "DPA420", "values", _odd("values", float("nan")), "non_finite",
         "NaN or infinity on 1 of them", options=CRITIC),
    Case("returns_finite", "DPA420", "advantage", _odd("returns", float("nan")), "non_finite",
         "finite numbers on trained tokens", options=CRITIC, also=("DPA408",)),
    Case("token_level_rewards_finite", "DPA420", "advantage",
         _odd("token_level_rewards", float("nan")), "non_finite", "NaN: 1"),
    Case("rollout_is_weights_finite", "DPA420", "advantage",
         _odd("rollout_is_weights", float("nan")), "non_finite", "NaN: 1",
         options=Options(correction=True)),
    Case("entropys_finite", "DPA420", "old_log_prob", _odd("entropys", float("nan")),
         "non_finite", "NaN: 1", also=("DPA604",)),
    Case("update_log_probs_finite", "DPA420", "update_actor",
         _odd("update_log_probs", float("nan")), "non_finite", "NaN: 1"),
    Case("update_entropys_finite", "DPA420", "update_actor",
         _odd("update_entropys", float("inf")), "non_finite", "NaN: 0",
         options=Options(entropy=True)),
    Case("update_values_finite", "DPA420", "update_critic", _odd("update_values", float("nan")),
         "non_finite", "NaN: 1", options=CRITIC),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize("field", ["advantages", "returns"])
def test_cells_off_the_mask_are_free(field: str) -> None:
    def off(b: Boundary) -> Truth:
        row = row_of(b, 2)
        own(b, field)[row, 3] = float("nan")
        return Truth("")

    ran = audit(change={"advantage": off}, until="advantage")
    assert ran.outcome(f"{field}_finite", "advantage").kind == "passed"


def test_a_sum_that_overflows_is_no_infinity() -> None:
    def huge(b: Boundary) -> Truth:
        own(b, "returns").double()
        b.batch.batch["returns"] = own(b, "returns").double().fill_(1e308)
        return Truth("")

    ran = audit(change={"advantage": huge}, until="advantage")
    assert ran.outcome("returns_finite", "advantage").kind == "passed"


def batch(**changes: Any) -> dict[str, Any]:
    """Two responses with advantages of an estimator that nobody told."""
    import torch

    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    fields = {name: torch.ones(2, 3) * mask for name in MADE_AT}
    return {"batch": {"responses": mask + 3, "response_mask": mask, **fields, **changes}}


@pytest.mark.parametrize("field", MADE_AT)
def test_nan_is_found_whatever_the_estimator(field: str) -> None:
    given = batch()
    assert not [f for f in check(given) if f.code == "DPA420"]
    given["batch"][field][1, 2] = float("nan")
    [finding] = [f for f in check(given) if f.code == "DPA420"]
    assert (finding.field, finding.rows, finding.columns) == (field, (1,), {1: (2,)})
    assert (finding.severity, finding.causes[0]) == ("fail", "non_finite")


@pytest.mark.parametrize("field", ["advantages", "update_log_probs", "rollout_is_weights"])
def test_what_is_not_finite_is_said_first_at_its_stage(field: str) -> None:
    """What is made of a NaN differs from its recomputation, and nothing but the NaN is wrong."""
    options = Options(correction=field == "rollout_is_weights")
    stage = MADE_AT[field]
    for value in (float("nan"), float("inf")):
        ran = audit(options, {stage: _odd(field, value)}, until="update_actor")
        first = ran.report(stage).findings[0]
        assert (first.code, first.field) == ("DPA420", field)
        assert not ran.findings("loss_recomputed", "update_actor")


def test_weights_are_looked_at_without_rejection_too() -> None:
    """Importance weights alone leave the mask as it is."""
    ran = audit(Options(correction=True), {"advantage": _odd("rollout_is_weights", float("nan"))},
                until="advantage", settings={"rejection": False})  # fmt: skip
    assert ran.findings("rollout_is_weights_finite", "advantage")


def test_without_rollout_correction_there_are_no_weights() -> None:
    outcome = audit(until="advantage").outcome("rollout_is_weights_finite", "advantage")
    assert (outcome.kind, outcome.reason) == ("not_applicable", "no rollout correction")


@pytest.mark.parametrize(
    ("coefficient", "kind"), [(0.0, "not_applicable"), (0.01, "not_checkable")]
)
def test_an_update_without_a_bonus_has_no_entropies(coefficient: float, kind: str) -> None:
    def gone(b: Boundary) -> None:
        b.batch.batch.pop("update_entropys", None)

    ran = audit(change={"update_actor": gone}, settings={"entropy_coeff": coefficient})
    assert ran.outcome("update_entropys_finite", "update_actor").kind == kind
