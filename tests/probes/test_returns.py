"""Advantages and returns of estimators that walk over tokens (DPA408)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dataproto_audit.reference import advantages as estimators
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, at, audit, check_case, each, own, row_of, where

PROBE, AFTER = "returns_recomputed", "advantage"
GAE = Options(critic=True, prompts=6, response_width=8)
TOOLS = replace(GAE, multi_turn=True)
PLUS = Options(estimator="reinforce_plus_plus", multi_turn=True, response_width=8, prompts=6)
BASELINE = Options(estimator="reinforce_plus_plus_baseline", prompts=6)
REMAX = Options(estimator="remax", prompts=6)
ROUNDING = 2e-5


def parts(b: Boundary) -> tuple[Tensor, ...]:
    tensors = b.batch.batch
    return tuple(tensors[n] for n in ("token_level_rewards", "values", "response_mask"))


def put(b: Boundary, name: str, new: Tensor) -> Truth:
    """Write trained cells of a field; the truth is those that changed by more than rounding."""
    tensors = b.batch.batch
    old, on = tensors[name], tensors["response_mask"] != 0
    tensors[name] = torch.where(on, new.float(), old)
    return where(name, ((tensors[name] - old).abs() > ROUNDING) & on)


def _gae(**how: Any) -> Callable[[Boundary], Truth]:
    """Returns by other discounts, and the advantages that follow from them."""

    def change(b: Boundary) -> Truth:
        advantages, returns = estimators.gae(*parts(b), **how)
        put(b, "advantages", advantages)
        return put(b, "returns", returns)

    change.__name__ = "gae_" + "_".join(map(str, how))
    return change


def over_tool_tokens(b: Boundary) -> Truth:
    rewards, values, mask = parts(b)
    attended = b.batch.batch["attention_mask"][:, -mask.shape[1] :]
    raw, returns = estimators.gae(rewards, values, attended, lam=0.9, whitened=False)
    put(b, "advantages", estimators.whiten(raw, mask))
    return put(b, "returns", returns)


def past_the_end(b: Boundary) -> Truth:
    rewards, values, mask = parts(b)
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    rows = torch.arange(len(mask))
    more = rewards.clone()
    inside = last + 1 < mask.shape[1]
    more[rows[inside], last[inside]] += values[rows[inside], last[inside] + 1]
    advantages, returns = estimators.gae(more, values, mask)
    put(b, "advantages", advantages)
    return put(b, "returns", returns)


def raw_advantages(b: Boundary) -> Truth:
    return put(b, "advantages", estimators.gae(*parts(b), whitened=False)[0])


def whitened_over_padding(b: Boundary) -> Truth:
    raw = estimators.gae(*parts(b), whitened=False)[0]
    return put(b, "advantages", (raw - raw.mean()) / raw.var().sqrt())


def whitened_by_rank(b: Boundary) -> Truth:
    raw, mask = estimators.gae(*parts(b), whitened=False)[0], parts(b)[2]
    pieces = zip(raw.chunk(2), mask.chunk(2), strict=True)
    return put(b, "advantages", torch.cat([estimators.whiten(x, on) for x, on in pieces]))


def other_sign(b: Boundary) -> Truth:
    return put(b, "advantages", -b.batch.batch["advantages"])


def one_advantage(b: Boundary) -> Truth:
    row = row_of(b, 8)
    own(b, "advantages")[row, 2] += 0.1
    return at("advantages", (row, 2))


def one_return(b: Boundary) -> Truth:
    row = row_of(b, 8)
    own(b, "returns")[row, 2] += 0.1
    return at("returns", (row, 2))


def not_finite(b: Boundary) -> Truth:
    row = row_of(b, 8)
    own(b, "advantages")[row, 0] = float("nan")
    return at("advantages", (row, 0))


def returns_of_whitened(b: Boundary) -> Truth:
    tensors = b.batch.batch
    return put(b, "returns", tensors["advantages"] + tensors["values"])


def lost_in_front_of_replies(b: Boundary) -> Truth:
    tensors = b.batch.batch
    rewards, mask = tensors["token_level_rewards"].double(), tensors["response_mask"] != 0
    returns, running = torch.zeros_like(rewards), torch.zeros(len(rewards), dtype=torch.float64)
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(mask[:, t], rewards[:, t] + running, 0.0)
        returns[:, t] = running
    put(b, "advantages", estimators.whiten(returns, tensors["response_mask"]))
    return put(b, "returns", returns)


def without_baseline(b: Boundary) -> Truth:
    return put(b, "advantages", b.batch.batch["returns"])


def not_whitened(b: Boundary) -> Truth:
    tensors = b.batch.batch
    stats = estimators.row_stats(
        tensors["token_level_rewards"], tensors["response_mask"], b.batch.non_tensor_batch["uid"]
    )
    return put(b, "advantages", stats.deviation[:, None].expand(tensors["advantages"].shape))


def rows_exchanged(b: Boundary) -> Truth:
    """Every row holds the returns and advantages of the next one with the same mask."""
    tensors = b.batch.batch
    order, mask = list(range(len(b.batch))), tensors["response_mask"]
    for row in order:
        same = [o for o in range(len(order)) if torch.equal(mask[o], mask[row])]
        order[row] = same[(same.index(row) + 1) % len(same)]
    changed = tensors["advantages"][order]
    return put(b, "advantages", changed)


def _case(change: Any, cause: str, says: str, options: Options, **more: Any) -> Case:
    return Case(PROBE, "DPA408", AFTER, change, cause, says, options=options, **more)


CASES = [
    _case(_gae(gamma=0.95), "wrong_discount", "gamma 0.95, lambda 1: max error", GAE),
    _case(_gae(lam=0.8), "wrong_discount", "gamma 1, lambda 0.8: max error", GAE),
    _case(_gae(lam=0.83), "wrong_discount", "gamma 1, lambda 0.83: max error", TOOLS),
    _case(over_tool_tokens, "gae_over_masked", "walking over masked tokens: max error",
          replace(TOOLS, lam=0.9)),
    _case(over_tool_tokens, "gae_over_masked", "masked tokens with gamma 1, lambda 0.9", TOOLS),
    _case(past_the_end, "gae_over_masked", "the column behind the end", GAE),
    _case(raw_advantages, "wrong_whitening", "not whitened: max error", GAE),
    _case(whitened_over_padding, "wrong_whitening", "of all columns, padding included", GAE),
    _case(whitened_by_rank, "wrong_whitening", "whitened in 2 pieces of the batch", GAE),
    _case(other_sign, "wrong_sign", "with the other sign", GAE),
    _case(one_advantage, "wrong_whitening", "estimator: gae", GAE),
    _case(one_return, "wrong_discount", "estimator: gae", GAE),
    _case(not_finite, "non_finite", "actual    nan", GAE, also=("DPA420",)),
    _case(returns_of_whitened, "wrong_whitening", "whitened advantages plus values", GAE),
    _case(lost_in_front_of_replies, "returns_reset_at_gap", "again at every masked token", PLUS,
          also=("DPA416",)),
    _case(without_baseline, "wrong_group_normalisation", "without the greedy baseline", REMAX),
    _case(not_whitened, "wrong_whitening", "not whitened: max error", BASELINE),
    _case(rows_exchanged, "row_permutation", "rows is another row's", GAE),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize("options", [GAE, TOOLS, PLUS, BASELINE, REMAX, replace(PLUS, gamma=0.9)])
@pytest.mark.parametrize("seed", [0, 5])
def test_every_estimator_is_recomputed(options: Options, seed: int) -> None:
    ran = audit(replace(options, seed=seed), until=AFTER)
    assert not ran.bad()
    assert ran.outcome(PROBE, AFTER).kind == "passed"
    assert ran.outcome("advantage_recomputed", AFTER).kind == "not_applicable"


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.9)])
def test_usual_discounts_are_found_out(gamma: float, lam: float) -> None:
    options = replace(GAE, gamma=gamma, lam=lam)
    ran = audit(options, until=AFTER, settings={"gamma": None, "lam": None})
    assert ran.outcome(PROBE, AFTER).kind == "passed"
    ran = audit(options, {AFTER: raw_advantages}, until=AFTER, settings={"lam": None})
    if lam != 1.0 or gamma != 1.0:
        return  # what `raw_advantages` writes belongs to discounts of 1
    [finding] = ran.findings(PROBE, AFTER)
    assert (finding.field, finding.severity) == ("advantages", "warn")


def test_discounts_that_nobody_uses_are_left_open() -> None:
    options = replace(GAE, gamma=0.77, lam=0.66)
    outcome = audit(options, until=AFTER, settings={"gamma": None, "lam": None}).outcome(
        PROBE, AFTER
    )
    assert outcome.kind == "not_checkable"
    assert outcome.reason.startswith("setting unknown: gamma, lam; no usual value")
    assert audit(options, until=AFTER).outcome(PROBE, AFTER).kind == "passed"


@pytest.mark.parametrize(
    ("options", "field"), [(GAE, "values"), (BASELINE, "uid"), (REMAX, "reward_baselines")]
)
def test_a_field_that_the_estimator_needs_is_missing(options: Options, field: str) -> None:
    def dropped(b: Boundary) -> Truth:
        b.batch.non_tensor_batch.pop(field, None)
        if field in b.batch.batch.keys():  # noqa: SIM118 - a TensorDict iterates rows
            del b.batch.batch[field]
        return Truth("")

    outcome = audit(options, {AFTER: dropped}, until=AFTER).outcome(PROBE, AFTER)
    assert outcome.kind == "not_checkable"
    assert outcome.reason == f"field not in the batch, or not as declared: {field}"


def test_values_that_are_not_finite_are_left_to_others() -> None:
    def broken(b: Boundary) -> Truth:
        own(b, "values")[row_of(b, 8), 1] = float("inf")
        return Truth("")

    outcome = audit(GAE, {AFTER: broken}, until=AFTER).outcome(PROBE, AFTER)
    assert (outcome.kind, outcome.reason) == ("not_checkable", "rewards or values are not finite")


def test_one_trained_token_cannot_be_whitened() -> None:
    def masked(b: Boundary) -> Truth:
        mask = own(b, "response_mask")
        mask[:] = 0
        mask[0, 0] = 1
        return Truth("")

    outcome = audit(GAE, {AFTER: masked}, until=AFTER).outcome(PROBE, AFTER)
    assert outcome.kind == "not_applicable"
    assert outcome.reason.startswith("fewer than two trained tokens")


def test_advantages_are_judged_without_returns_too() -> None:
    def dropped(b: Boundary) -> Truth:
        del b.batch.batch["returns"]
        return whitened_by_rank(b)

    ran = audit(GAE, {AFTER: dropped}, until=AFTER)
    [finding] = ran.findings(PROBE, AFTER)
    assert (finding.field, finding.columns) == ("advantages", ran.truths[0].columns)


def test_a_reward_on_a_tool_token_may_be_counted_or_lost() -> None:
    """Implementations of REINFORCE++ differ: neither is called wrong."""

    def moved(b: Boundary) -> Truth:
        tensors = b.batch.batch
        rewards = own(b, "token_level_rewards")
        mask = tensors["response_mask"] != 0
        inside = torch.cummax(mask.int().flip(1), 1).values.flip(1) != 0
        gaps = inside & ~mask
        row = int(gaps.any(1).nonzero()[0])
        rewards[row, int(gaps[row].int().argmax())] = 0.5
        running = torch.zeros(len(rewards), dtype=torch.float64)
        returns = torch.zeros(rewards.shape, dtype=torch.float64)
        for t in reversed(range(rewards.shape[1])):
            running = running + rewards[:, t].double()
            returns[:, t] = running
        put(b, "returns", returns)
        put(b, "advantages", estimators.whiten(returns, tensors["response_mask"]))
        return Truth("")

    assert not audit(PLUS, {AFTER: moved}, until=AFTER).findings(PROBE, AFTER)


def test_half_precision_values_are_no_fault() -> None:
    def halved(b: Boundary) -> Truth:
        tensors = b.batch.batch
        tensors["values"] = tensors["values"].bfloat16()
        advantages, returns = estimators.gae(*parts(b))
        tensors["advantages"], tensors["returns"] = advantages.bfloat16(), returns.bfloat16()
        return Truth("")

    ran = audit(GAE, {AFTER: halved}, until=AFTER)
    assert ran.outcome(PROBE, AFTER).kind == "passed"


def test_long_rows_in_float32_are_no_fault() -> None:
    options = Options(critic=True, prompts=2, n=2, response_width=600, truncated=4, one_token=0)

    def single(b: Boundary) -> Truth:
        """GAE step by step in float32, as a trainer computes it."""
        rewards, values, mask = (x.float() for x in parts(b))
        running = following = torch.zeros(len(mask))
        columns = []
        for t in reversed(range(mask.shape[1])):
            on = mask[:, t]
            delta = rewards[:, t] + following - values[:, t]
            following = values[:, t] * on + (1 - on) * following
            running = (delta + running) * on + (1 - on) * running
            columns.append(running)
        raw = torch.stack(columns[::-1], 1)
        put(b, "returns", raw + values)
        put(b, "advantages", estimators.whiten(raw, parts(b)[2]))
        return Truth("")

    assert not audit(options, {AFTER: single}, until=AFTER).bad()
