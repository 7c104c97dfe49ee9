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


def negative(b: Boundary) -> Truth:
    row = row_of(b, 8, 2)
    own(b, FIELD)[row, 3] = -0.5
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
    Case("weights_nonnegative", "DPA418", AFTER, negative, "wrong_sign", "-0.5 at the least",
         options=STALE),
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


@pytest.mark.parametrize(("share", "kind"), [(0.15, "failed"), (0.25, "not_checkable")])
def test_one_rule_has_to_explain_four_of_five_weights(share: float, kind: str) -> None:
    def some(b: Boundary) -> Truth:
        weights = own(b, FIELD)
        cells = weighted(b).nonzero()
        inner = [tuple(c) for c in cells.tolist()]
        for at_, (row, column) in enumerate(inner):
            if at_ < share * len(inner):
                weights[row, column] *= 1.3 + 0.01 * (at_ % 7)
        return Truth("")

    ran = audit(STALE, {AFTER: some}, until=AFTER)
    outcome = ran.outcome("importance_weights", AFTER)
    assert outcome.kind == kind
    if kind == "failed":
        [finding] = ran.findings("importance_weights", AFTER)
        assert finding.evidence["rule that fits"] == "token, at most tokens"
        assert finding.causes == ("field_overwritten", "row_permutation")
    else:
        assert outcome.reason == "no known rule explains the weights"


def test_unscorable_rows_are_counted() -> None:
    def two(b: Boundary) -> Truth:
        advantages = own(b, "advantages")
        flags = own_array(b, "score")
        flags[:] = [1] * len(flags)
        rows = (advantages != 0).any(1).nonzero().flatten().tolist()[:2]
        for row in rows:
            flags[row] = 0
        empty = next(row for row in range(len(flags)) if row not in rows)
        flags[empty] = 0
        advantages[empty] = 0
        b.batch.non_tensor_batch["scorable"] = flags.copy()
        return Truth("", tuple(rows))

    ran = audit(Options(response_width=8), {AFTER: two}, until=AFTER)
    [finding] = ran.findings("unscorable_rows", AFTER)
    assert finding.actual == "an advantage in 2 of 3 such rows"
    assert finding.rows == ran.truths[0].rows


@pytest.mark.parametrize("flag", ["yes", None, [1]])
def test_flags_that_are_no_numbers(flag: object) -> None:
    def odd(b: Boundary) -> Truth:
        flags = own_array(b, "score")
        flags[:] = [1] * len(flags)
        flags[3] = flag
        b.batch.non_tensor_batch["scorable"] = flags.copy()
        return Truth("")

    outcome = audit(Options(response_width=8), {AFTER: odd}, until=AFTER).outcome(
        "unscorable_rows", AFTER
    )
    assert (outcome.kind, outcome.reason) == (
        "not_checkable", "scorable is not one flag a row",
    )  # fmt: skip
