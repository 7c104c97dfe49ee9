"""Samples of one prompt that repeat each other (DPA415)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.probes.seeds import SURE
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import Case, Truth, audit, check_case, each, own

LONG = Options(prompts=3, response_width=24, one_token=0, truncated=12, balanced=False)
TOKENS = ("responses", "input_ids", "attention_mask", "position_ids", "response_mask",
          "rollout_log_probs")  # fmt: skip


def _copied(b: Boundary, pairs: dict[int, int]) -> None:
    for name in TOKENS:
        fields = own(b, name)
        for target, source in pairs.items():
            fields[target] = fields[source].clone()


def same_seed_in_one_group(b: Boundary) -> Truth:
    _copied(b, {1: 0, 3: 0})
    return Truth("responses", (0, 1, 3))


def same_seed_everywhere(b: Boundary) -> Truth:
    """Two engines with one seed: each sample occurs twice."""
    pairs = {first + 2 + i: first + i for first in range(0, 12, 4) for i in range(2)}
    _copied(b, pairs)
    return Truth("responses", tuple(range(12)))


CASES = [
    Case("samples_differ", "DPA415", "rollout", same_seed_in_one_group, "same_seed",
         "3 rows repeat another one", options=LONG),
    Case("samples_differ", "DPA415", "rollout", same_seed_everywhere, "same_seed",
         "give each request, or each engine, a seed of its own", options=LONG),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


def _outcome(change: Any = None, options: Options = LONG, **settings: Any) -> Any:
    ran = audit(options, change and {"rollout": change}, until="rollout", settings=settings)
    return ran.outcome("samples_differ", "rollout")


@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 14),
    vocab=st.sampled_from([4, 8, 32]),
    n=st.sampled_from([2, 8, 16]),
    temperature=st.sampled_from([0.3, 1.0]),
)
def test_groups_that_were_sampled_are_quiet(
    seed: int, width: int, vocab: int, n: int, temperature: float
) -> None:
    """Also where short or likely responses come twice."""
    options = Options(seed=seed, response_width=width, vocab=vocab, n=n, temperature=temperature)
    assert _outcome(options=options).kind == ("passed" if width >= 10 else "not_applicable")


def test_short_responses_are_sampled_twice() -> None:
    outcome = _outcome(options=Options(response_width=9))
    assert (outcome.kind, outcome.reason) == (
        "not_applicable", "responses this short are sampled twice in good health",
    )  # fmt: skip


def test_a_likely_response_comes_twice() -> None:
    def likely(b: Boundary) -> Truth:
        _copied(b, {1: 0})
        own(b, "rollout_log_probs")[:2] *= 0.05
        return Truth("")

    assert _outcome(likely).kind == "passed"


def test_one_improbable_token_is_no_long_coincidence() -> None:
    """A forced token counts as two nats at most."""

    def forced(b: Boundary) -> Truth:
        _copied(b, {1: 0})
        values = own(b, "rollout_log_probs")
        values[:2] = torch.where(values[:2] != 0, -0.1, 0.0)
        values[:2, 3] = 10 * SURE
        return Truth("")

    assert _outcome(forced).kind == "passed"


def test_one_response_to_two_prompts_is_no_repeat() -> None:
    def across(b: Boundary) -> Truth:
        _copied(b, {4: 0})
        tensors = b.batch.batch
        own(b, "input_ids")[4, : LONG.prompt_width] = tensors["prompts"][4]
        return Truth("")

    assert _outcome(across).kind == "passed"


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_greedy_decoding_repeats_itself(temperature: float) -> None:
    outcome = _outcome(same_seed_everywhere, temperature=temperature)
    assert (outcome.kind, outcome.reason) == ("not_applicable", "greedy decoding repeats itself")


@pytest.mark.parametrize("name", ["is_pad", "is_padding"])
def test_rows_that_fill_the_batch_up_repeat_others(name: str) -> None:
    def filled(b: Boundary) -> Truth:
        same_seed_in_one_group(b)
        b.batch.batch[name] = torch.tensor([row in (1, 3) for row in range(12)])
        return Truth("")

    assert _outcome(filled).kind == "passed"


def test_the_likeliest_of_the_repeated_responses_is_told() -> None:
    """Below ``SURE``, whatever other rows of the batch are likely to say."""

    def change(b: Boundary) -> Truth:
        same_seed_in_one_group(b)
        values = own(b, "rollout_log_probs")
        values[:4] = torch.where(values[:4] != 0, -1.5, 0.0)
        values[4:] *= 0.01
        return Truth("")

    [finding] = audit(LONG, {"rollout": change}, until="rollout").findings(
        "samples_differ", "rollout"
    )
    assert finding.evidence["log-probability of such a response"] == pytest.approx(-1.5 * 24)


def test_two_nats_a_token_are_twenty_in_ten_columns() -> None:
    """As many columns as it takes for ``SURE``; a response of exactly that is sampled twice."""
    options = Options(prompts=3, response_width=10, one_token=0, truncated=12, balanced=False)

    def exactly(nats: float) -> Any:
        def change(b: Boundary) -> Truth:
            _copied(b, {1: 0})
            own(b, "rollout_log_probs")[:2] = nats
            return Truth("")

        return change

    assert _outcome(exactly(-2.0), options).kind == "passed"
    longer = Options(prompts=3, response_width=11, one_token=0, truncated=12, balanced=False)
    assert _outcome(exactly(-2.0), longer).kind == "failed"
    assert _outcome(exactly(SURE / 11 + 1e-4), longer).kind == "passed"
