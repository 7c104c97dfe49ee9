"""Advantages whose estimator nobody told, and the rule that most rows tell (DPA408)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit.reference.rules import GROUP_RULES
from dataproto_audit.testing.healthy import Boundary, Options, boundaries

from ._corrupt import Case, Truth, audit, check_case, each, own

PROBE, AFTER, FIELD = "advantage_inferred", "advantage", "advantages"
UNTOLD = {"adv_estimator": None}
WIDE = Options(prompts=6)


def _trained(b: Boundary, rows: list[int]) -> Truth:
    mask = b.batch.batch["response_mask"] != 0
    return Truth(FIELD, tuple(rows), {r: tuple(mask[r].nonzero().flatten().tolist()) for r in rows})


def exchanged(b: Boundary) -> Truth:
    """The advantages of two rows with another score."""
    advantages, mask = own(b, FIELD), b.batch.batch["response_mask"]
    of_row = (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
    low, high = int(of_row.argmin()), int(of_row.argmax())
    for row, value in ((low, of_row[high]), (high, of_row[low])):
        advantages[row] = value * mask[row]
    b.batch.batch["returns"] = advantages.clone()
    return _trained(b, sorted((low, high)))


CASES = [Case(PROBE, "DPA408", AFTER, exchanged, "row_permutation", "rule, inferred",
              severity="warn", options=WIDE, settings=UNTOLD)]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


def _verdict(options: Options, change: Any = None) -> tuple[str, str]:
    ran = audit(options, {AFTER: change} if change else {}, until=AFTER, settings=UNTOLD)
    outcome = ran.outcome(PROBE, AFTER)
    return outcome.kind, outcome.reason


@pytest.mark.parametrize(
    "options",
    [
        WIDE,
        Options(norm_by_std=False),
        Options(estimator="rloo", norm_by_std=False),
        Options(critic=True),
        Options(multi_turn=True, response_width=8),
        Options(kl_in_reward=True),
        Options(correction=True),
        Options(dtype="bfloat16", prompts=8),
        Options(duplicate_prompts=True),
        Options(n=2, prompts=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_healthy_advantages_are_explained(options: Options, seed: int) -> None:
    assert _verdict(replace(options, seed=seed)) == ("passed", "")


@pytest.mark.parametrize("name", list(GROUP_RULES))
def test_every_rule_in_use_is_known(name: str) -> None:
    def by_the_rule(b: Boundary) -> Truth:
        from dataproto_audit.reference.groups import stats_of_codes

        tensors = b.batch.batch
        _, codes = np.unique(b.batch.non_tensor_batch["uid"], return_inverse=True)
        scores = tensors["token_level_rewards"].double().sum(1)
        groups = stats_of_codes(
            scores, torch.from_numpy(codes), tensors["response_mask"].double().sum(1)
        )
        of_row = GROUP_RULES[name](groups).float()[:, None]
        tensors[FIELD] = of_row * tensors["response_mask"]
        tensors["returns"] = tensors[FIELD].clone()
        return Truth(FIELD)

    assert _verdict(WIDE, by_the_rule) == ("passed", "")


def test_the_other_sign_is_named() -> None:
    def turned(b: Boundary) -> Truth:
        b.batch.batch[FIELD] = -b.batch.batch[FIELD]
        b.batch.batch["returns"] = b.batch.batch[FIELD].clone()
        return Truth(FIELD)

    ran = audit(WIDE, {AFTER: turned}, until=AFTER, settings=UNTOLD)
    [finding] = ran.findings(PROBE, AFTER)
    assert finding.causes[0] == "wrong_sign"
    assert (finding.severity, len(finding.rows) > 8) == ("warn", True)


def test_a_critic_s_advantages_that_do_not_follow_from_its_returns() -> None:
    def one_row(b: Boundary) -> Truth:
        own(b, FIELD)[1] += 0.5 * b.batch.batch["response_mask"][1]
        return Truth(FIELD)

    options = Options(critic=True, prompts=6)
    ran = audit(options, {AFTER: one_row}, until=AFTER, settings=UNTOLD)
    [finding] = ran.findings(PROBE, AFTER)
    assert finding.evidence["estimator, inferred from the returns"] == "gae"
    assert 1 in finding.rows


@pytest.mark.parametrize("factor", [np.linspace(0.5, 2, 24), np.where(np.arange(24) % 3, 1, 3.0)])
def test_a_rule_of_one_s_own_has_no_verdict(factor: Any) -> None:
    def other(b: Boundary) -> Truth:
        scaled = b.batch.batch[FIELD] * torch.from_numpy(factor).float()[:, None]
        b.batch.batch[FIELD] = scaled
        b.batch.batch["returns"] = scaled.clone()
        return Truth(FIELD)

    kind, reason = _verdict(WIDE, other)
    assert (kind, "no rule in use explains" in reason) == ("not_checkable", True)


def test_without_a_group_s_other_rows_there_is_no_verdict() -> None:
    [after] = [b for b in boundaries(WIDE) if (b.stage, b.when) == (AFTER, "after")]
    part = after.batch[[0, 1, 2, 5, 6, 9, 10, 11, 13]]
    part.batch[FIELD][0] += 1.0

    def part_of_it(b: Boundary) -> Truth:
        b.batch = part
        return Truth(FIELD)

    assert _verdict(WIDE, part_of_it)[0] == "not_checkable"


def test_where_it_is_told_it_is_recomputed_instead() -> None:
    ran = audit(WIDE, until=AFTER)
    assert ran.outcome(PROBE, AFTER).reason == "the estimator is told"


@pytest.mark.parametrize("change", ["some rows", "not whitened", "in halves"])
def test_another_whitening_is_a_choice_and_no_fault(change: str) -> None:
    def whitened_otherwise(b: Boundary) -> Truth:
        tensors = b.batch.batch
        if change == "some rows":
            b.batch = b.batch[:9]
            return Truth(FIELD)
        raw = tensors["returns"] - tensors["values"]
        on = tensors["response_mask"] != 0
        if change == "in halves":
            halves = zip(raw.chunk(2), on.chunk(2), strict=True)
            raw = torch.cat([(part - part[m].mean()) / part[m].std() for part, m in halves])
        tensors[FIELD] = raw * on
        return Truth(FIELD)

    kind, reason = _verdict(Options(critic=True, prompts=6), whitened_otherwise)
    assert (kind, reason[-9:]) == ("not_checkable", "otherwise")
