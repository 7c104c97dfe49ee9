"""The first wrong stage, later ones, rows and tokens; healthy traces; what is missing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.dump.trace import Trace, TraceWriter
from dataproto_audit.replay.bisect import Verdict, bisect
from dataproto_audit.replay.scorers import Scorers
from dataproto_audit.testing.bases import BASES
from dataproto_audit.testing.faults import CATALOGUE
from dataproto_audit.testing.healthy import boundaries
from dataproto_audit.testing.options import Options
from dataproto_audit.testing.trace_scoring import score_verdict
from dataproto_audit.testing.traces import toy_scorers, write_simulated

ALONE = [
    ("uid_per_row", "plain"), ("mask_on_pad", "plain"), ("responses_decoded_again", "plain"),
    ("one_tensor_not_balanced", "plain"), ("rewards_one_row_late", "plain"),
    ("some_rows_shifted", "tools"), ("reference_one_column_late", "long"),
    ("values_masked_by_other_rows", "critic"), ("kl_penalty_on_tool_tokens", "kl_reward_tools"),
    ("whitening_forgotten", "critic"), ("sign_flipped", "plain"),
    ("clip_sides_swapped", "far"), ("one_tensor_not_sent", "plain"),
    ("aborted_rows_dropped", "plain"), ("packed_rows_attend_to_their_neighbours", "plain"),
    ("rows_do_not_divide_over_the_ranks", "recorded"),
]  # fmt: skip
NO_ROWS = ("clip_sides_swapped", "one_tensor_not_sent", "aborted_rows_dropped",
           "rows_do_not_divide_over_the_ranks")  # fmt: skip
NO_TOKENS = ("uid_per_row", "one_tensor_not_balanced", "rewards_one_row_late")
"""Faults whose truth is of no rows, and those of whole rows."""
PAIRS = [
    ("mask_on_pad", "sign_flipped", "plain"),
    ("old_one_column_early", "rewards_one_row_late", "plain"),
    ("responses_decoded_again", "dropout_in_the_reference", "plain"),
    ("one_tensor_not_balanced", "old_two_columns_late", "plain"),
    ("attention_from_ids", "sequence_mean_instead", "plain"),
    ("reference_overflows", "not_divided_by_std", "plain"),
]  # fmt: skip
HEALTHY = ["plain", "tools", "critic", "kl_reward", "half", "recorded", "padded_rows", "images"]


def judged(
    folder: Path, names: tuple[str, ...], base: str, *, model: bool
) -> tuple[Verdict, Any, Any]:
    faults = [CATALOGUE[name] for name in names]
    options = BASES[base]
    for fault in faults:
        options = replace(options, **fault.options)
    made = write_simulated(folder, options, faults)
    scorers = Scorers(**toy_scorers(made.options)) if model else Scorers()
    verdict = bisect(folder, scorers=scorers)
    return verdict, score_verdict(verdict.to_dict(), faults, made), scorers


@pytest.mark.parametrize("model", [True, False])
@pytest.mark.parametrize(("name", "base"), ALONE)
def test_a_fault_is_found_where_it_was_made(
    tmp_path: Path, name: str, base: str, model: bool
) -> None:
    verdict, score, scorers = judged(tmp_path, (name,), base, model=model)
    assert score.faulty
    assert score.stage, verdict.story()
    assert score.rows is (None if name in NO_ROWS else True), verdict.story()
    assert score.tokens is (None if name in (*NO_ROWS, *NO_TOKENS) else True), verdict.story()
    assert verdict.later_faults == []
    assert scorers.calls == verdict.recomputations <= 2  # policy and reference, once each


@pytest.mark.parametrize("model", [True, False])
@pytest.mark.parametrize(("first", "second", "base"), PAIRS)
def test_a_second_fault_is_told_too(
    tmp_path: Path, first: str, second: str, base: str, model: bool
) -> None:
    verdict, score, _ = judged(tmp_path, (first, second), base, model=model)
    assert (score.stage, score.second) == (True, True), verdict.story()
    assert score.rows is True, verdict.story()


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_step_is_called_healthy(tmp_path: Path, name: str) -> None:
    made = write_simulated(tmp_path, name)
    for scorers in (Scorers(), Scorers(**toy_scorers(made.options))):
        verdict = bisect(tmp_path, scorers=scorers)
        assert verdict.verdict == "healthy", verdict.story()
        assert (verdict.stage, verdict.rows, verdict.later_faults) == (None, [], [])
        assert {item["stage"] for item in verdict.cleared} >= {"rollout", "reward", "advantage"}


def test_the_answer_has_stable_keys_and_the_story_says_it(tmp_path: Path) -> None:
    verdict, _, _ = judged(tmp_path, ("some_rows_shifted", "sign_flipped"), "long", model=True)
    said = json.loads(json.dumps(verdict.to_dict()))
    assert {
        "verdict", "stage", "field", "rows", "tokens", "cause", "cleared", "later_faults",
        "evidence", "recomputations", "missing",
    } <= said.keys()  # fmt: skip
    assert (said["verdict"], said["stage"], said["cause"]) == ("faulty", "old_log_prob", "shift")
    assert [one["stage"] for one in said["later_faults"]] == ["advantage"]
    assert all(len(cell) == 2 for cell in said["tokens"])
    assert len(said["row_keys"]) == len(said["rows"])
    text = verdict.story()
    assert "rollout ok · union ok" in text
    assert "old_log_prob WRONG: 16 rows (shift)" in text
    assert "then, by itself: advantage" in text


def test_the_first_step_that_is_not_quiet_is_taken(tmp_path: Path) -> None:
    options = Options(step=1)
    with TraceWriter(tmp_path / "trace", retention="all", settings=vars(options.settings())) as w:
        for step in (1, 2, 3):
            w.begin_step(step)
            for b in boundaries(replace(options, step=step)):
                if (step, b.stage, b.when) == (2, "advantage", "after"):
                    b.batch.batch["advantages"] = -b.batch.batch["advantages"]
                w.write_boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
            w.end_step()
    verdict = bisect(tmp_path)
    assert (verdict.step, verdict.stage) == (2, "advantage")
    assert bisect(tmp_path, step=3).verdict == "healthy"
    with pytest.raises(UsageError, match="no step 9"):
        bisect(tmp_path, step=9)


def test_what_was_not_recorded_is_asked_for(tmp_path: Path) -> None:
    options = Options()
    with TraceWriter(tmp_path / "trace", retention="all", settings=vars(options.settings())) as w:
        w.begin_step(1)
        for b in boundaries(options):
            if b.stage in ("prompts", "rollout"):
                w.write_boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
    verdict = bisect(tmp_path)
    assert verdict.verdict == "undecided"
    assert any("record whole steps" in text for text in verdict.missing)
    assert any("--model DIR" in text for text in verdict.missing)


def test_a_model_of_other_weights_is_not_believed(tmp_path: Path) -> None:
    made = write_simulated(tmp_path, "plain")
    other = toy_scorers(replace(made.options, step_drift=1.0), step=9)
    verdict = bisect(tmp_path, scorers=Scorers(policy=other["policy"]))
    assert verdict.verdict == "healthy", verdict.story()
    assert any("not look like the policy of this run" in text for text in verdict.missing)


def test_rows_that_fail_together_are_found_by_halving(tmp_path: Path) -> None:
    write_simulated(tmp_path, "plain")
    uids = Trace(tmp_path).step(2).find("advantage", "before")
    assert uids is not None
    wanted = uids.array("uid")[17]

    def fails(part: Any) -> bool:
        rows = part["non_tensor_batch"]["uid"].tolist()
        return rows.count(wanted) >= 2

    verdict = bisect(tmp_path, predicate=fails)
    assert verdict.meeting is not None
    found = verdict.meeting["rows"]
    assert len(found) == 2


def test_a_sample_of_rows_bounds_what_the_model_scores(tmp_path: Path) -> None:
    made = write_simulated(tmp_path, "plain", [CATALOGUE["old_one_column_early"]])
    seen = []
    policy = toy_scorers(made.options)["policy"]

    def counted(view: Any, temperature: float) -> Any:
        seen.append(view.rows)
        return policy(view, temperature)

    verdict = bisect(tmp_path, scorers=Scorers(policy=counted, sample=8))
    assert verdict.stage == "old_log_prob"
    assert seen == [8]


def test_a_torn_step_that_is_asked_for_is_the_one_that_is_judged(tmp_path: Path) -> None:
    write_simulated(tmp_path, "plain", steps=2)
    (tmp_path / "trace/step_000003/step.json").unlink()
    assert (Trace(tmp_path).steps, Trace(tmp_path).torn) == ([2], [3])
    assert bisect(tmp_path, step=3).step == 3


def test_an_error_of_the_predicate_is_coded(tmp_path: Path) -> None:
    write_simulated(tmp_path, "plain")

    def fails(part: Any) -> bool:
        return bool(part["batch"]["absent"].sum() > 0)

    with pytest.raises(UsageError, match=r"DPA851 the predicate raised KeyError"):
        bisect(tmp_path, predicate=fails)


@pytest.mark.parametrize("name", ["values", "update_values"])
def test_a_value_that_is_not_finite_has_one_place(name: str, tmp_path: Path) -> None:
    options = Options(critic=True)
    with TraceWriter(tmp_path, retention="all", settings=vars(options.settings())) as writer:
        writer.begin_step(1)
        for b in boundaries(options):
            tensors = b.batch.batch
            if tensors is not None and name in tensors:
                tensors[name] = tensors[name].clone()
                tensors[name][0, 0] = float("nan")
            writer.write_boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
        writer.end_step()
    told = bisect(tmp_path, scorers=Scorers()).to_dict()
    assert told["stage"] == {"values": "values", "update_values": "update_critic"}[name]
    assert told["later_faults"] == []
