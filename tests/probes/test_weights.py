"""Importance weights (DPA418) and rows that nothing could score (DPA419)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, at, audit, check_case, each, own, own_array, row_of, where

AFTER, FIELD = "advantage", "rollout_is_weights"
STALE = Options(correction=True, stale_steps=20, step=30, on_policy=False, response_width=8)
CLOSE = 1e-4


def log_ratio(b: Boundary) -> torch.Tensor:
    tensors = b.batch.batch
    return tensors["old_log_probs"].double() - tensors["rollout_log_probs"].double()


def weighted(b: Boundary) -> torch.Tensor:
    return b.batch.batch[FIELD] > 0


def inverted(b: Boundary) -> Truth:
    weights, on = own(b, FIELD), weighted(b)
    weights[on] = 1.0 / weights[on]
    return where(FIELD, on & ((weights - log_ratio(b).exp()).abs() > CLOSE))


def one_weight(b: Boundary) -> Truth:
    row = row_of(b, 8, 2)
    own(b, FIELD)[row, 3] += 0.05
    return at(FIELD, (row, 3))


def unscorable(b: Boundary) -> Truth:
    b.batch.non_tensor_batch["scorable"] = own_array(b, "score").copy()
    advantages = b.batch.batch["advantages"]
    row = int((advantages != 0).any(1).nonzero()[0])
    b.batch.non_tensor_batch["scorable"][:] = [1] * len(b.batch)
    b.batch.non_tensor_batch["scorable"][row] = 0
    cells = (advantages != 0) & (torch.arange(len(advantages)) == row)[:, None]
    return where("advantages", cells)


CASES = [
    Case("importance_weights", "DPA418", AFTER, inverted, "is_weights_inverted",
         "token, inverted", options=STALE),
    Case("importance_weights", "DPA418", AFTER, one_weight, "field_overwritten",
         "exp(old - rollout)", options=STALE),
    Case("unscorable_rows", "DPA419", AFTER, unscorable, "unscorable_counted",
         "an advantage in 1 of 1 such rows", options=Options(response_width=8)),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize("rule", ["token", "row", "row, per token", "batch mean", "two ends"])
def test_every_known_rule_will_do(rule: str) -> None:
    def other(b: Boundary) -> Truth:
        on, ratio = weighted(b), log_ratio(b)
        total = torch.where(on, ratio, 0.0).sum(1, keepdim=True)
        weights = {
            "token": ratio,
            "row": total.clamp(-20, 20).expand_as(ratio),
            "row, per token": (total / on.sum(1, keepdim=True).clamp(min=1)).expand_as(ratio),
            "batch mean": ratio,
            "two ends": ratio,
        }[rule].exp()
        if rule == "batch mean":
            weights = weights.clamp(max=1.5)
            weights = weights / weights[on].mean()
        if rule == "two ends":
            weights = weights.clamp(0.8, 1.2)
        b.batch.batch[FIELD] = torch.where(on, weights, 0.0).float()
        return Truth("")

    ran = audit(STALE, {AFTER: other}, until=AFTER)
    outcome = ran.outcome("importance_weights", AFTER)
    assert (outcome.kind, outcome.reason) == ("passed", "")


def test_a_rule_of_ones_own_is_not_judged() -> None:
    def other(b: Boundary) -> Truth:
        on = weighted(b)
        random = torch.rand(on.shape, generator=torch.Generator().manual_seed(1)) + 0.1
        b.batch.batch[FIELD] = torch.where(on, random, 0.0)
        return Truth("")

    outcome = audit(STALE, {AFTER: other}, until=AFTER).outcome("importance_weights", AFTER)
    assert (outcome.kind, outcome.reason) == (
        "not_checkable", "no known rule explains the weights",
    )  # fmt: skip


def test_weights_of_a_policy_that_agrees_are_1_either_way() -> None:
    options = Options(correction=True, exact=True)
    ran = audit(options, {AFTER: inverted}, until=AFTER)
    assert ran.outcome("importance_weights", AFTER).kind == "passed"


def test_without_correction_there_are_no_weights() -> None:
    outcome = audit(Options(), until=AFTER).outcome("importance_weights", AFTER)
    assert (outcome.kind, outcome.reason) == ("not_applicable", "no rollout correction")


def test_no_token_with_a_weight() -> None:
    def nothing(b: Boundary) -> Truth:
        own(b, FIELD)[:] = 0.0
        return Truth("")

    outcome = audit(STALE, {AFTER: nothing}, until=AFTER).outcome("importance_weights", AFTER)
    assert (outcome.kind, outcome.reason) == ("not_applicable", "no token has a weight")


def test_half_precision_weights_are_no_fault() -> None:
    assert not audit(replace(STALE, dtype="bfloat16"), until=AFTER).bad()


def test_rows_that_are_all_scorable_are_quiet() -> None:
    ran = audit(Options(recorded=True, micro_rows=4), until=AFTER)
    assert ran.outcome("unscorable_rows", AFTER).kind == "passed"
    outcome = audit(Options(), until=AFTER).outcome("unscorable_rows", AFTER)
    assert (outcome.kind, outcome.reason) == (
        "not_applicable", "no row is marked as scorable or not",
    )  # fmt: skip


def test_flags_that_are_no_numbers_are_not_judged() -> None:
    def named(b: Boundary) -> Truth:
        b.batch.non_tensor_batch["scorable"] = own_array(b, "uid").copy()
        return Truth("")

    outcome = audit(Options(), {AFTER: named}, until=AFTER).outcome("unscorable_rows", AFTER)
    assert (outcome.kind, outcome.reason) == ("not_checkable", "scorable is not one flag a row")
