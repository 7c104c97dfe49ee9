"""Faults in traces of verl's own runs, as bisect sees them."""

from dataclasses import replace
from pathlib import Path

import pytest

from dataproto_audit.replay.bisect import bisect
from dataproto_audit.replay.scorers import Scorers
from dataproto_audit.testing.faults import CATALOGUE, Truth
from dataproto_audit.testing.recorded_faults import NotHere, score_recorded, write_recorded
from dataproto_audit.testing.recorded_steps import copied
from dataproto_audit.testing.verl_samples import verl_steps

SAMPLES = Path(__file__).parents[1] / "data" / "samples"
STEPS = {step.name: step for step, _ in verl_steps(SAMPLES)}
GRPO, GAE = "verl-0.7.1/grpo_n4_engine_dyn", "verl-0.7.1/gae_legacy"
TOOLS, LATER = "verl-0.7.1/tool_legacy", "verl-0.9.1/v0_grpo_n4"
ALONE = [
    ("two_prompts_share_a_uid", GRPO), ("sampled_list_too_short", GRPO), ("mask_on_pad", LATER),
    ("attention_one_column_long", GRPO), ("tiled_groups", GRPO), ("only_tensors_balanced", LATER),
    ("rewards_one_row_late", GRPO), ("old_one_column_early", GRPO),
    ("reference_overflows", LATER), ("values_masked_by_other_rows", GAE),
    ("divided_by_batch_std", GRPO), ("whitening_forgotten", GAE), ("tool_tokens_trained", TOOLS),
]  # fmt: skip


def judged(folder, names, name, *, model):
    faults, step = [CATALOGUE[one] for one in names], STEPS[name]
    made = write_recorded(folder, step, faults)
    scorer = step.run().model.scorer("rollout_log_probs")
    verdict = bisect(folder, scorers=Scorers(scorer, scorer) if model else Scorers())
    return verdict, score_recorded(verdict.to_dict(), faults, made) if faults else None


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("model", [True, False])
def test_a_healthy_step_is_called_healthy(tmp_path, name, model):
    verdict, _ = judged(tmp_path, (), name, model=model)
    assert verdict.verdict == "healthy", verdict.story()


@pytest.mark.parametrize("model", [True, False])
@pytest.mark.parametrize(("fault", "name"), ALONE)
def test_a_fault_is_found_where_it_was_made(tmp_path, fault, name, model):
    verdict, score = judged(tmp_path, (fault,), name, model=model)
    assert score.stage, verdict.story()
    assert False not in (score.rows, score.tokens), verdict.story()


def test_a_second_fault_is_told_too(tmp_path):
    verdict, score = judged(tmp_path, ("mask_on_pad", "sign_flipped"), GRPO, model=False)
    assert (score.stage, score.second) == (True, True), verdict.story()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("noise_divided_by_its_std", "StopIteration"), ("clip_sides_swapped", "KeyError"),
     ("scores_depend_on_padding", "within the precision of the run")],
)  # fmt: skip
def test_what_a_step_cannot_hold_is_said(tmp_path, fault, reason):
    with pytest.raises(NotHere, match=reason):
        write_recorded(tmp_path, STEPS[GRPO], [CATALOGUE[fault]])


def test_a_fault_that_changes_nothing_is_none(tmp_path):
    idle = replace(CATALOGUE["sign_flipped"], apply=lambda scene: Truth("advantages"))
    with pytest.raises(NotHere, match="nothing changed"):
        write_recorded(tmp_path, STEPS[GRPO], [idle])


def test_of_two_log_probs_none_is_known_to_be_right(tmp_path):
    """Without the engine's log-probs, old and reference contradict each other."""
    step = STEPS[GRPO]
    sampled, final = copied(step.sampled), copied(step.final)
    for batch in (sampled, final):
        del batch.batch["rollout_log_probs"]
    bare = replace(step, sampled=sampled, final=final)
    write_recorded(tmp_path, bare, [CATALOGUE["old_one_column_early"]])
    asked = "nothing recorded tells which of the two is wrong"
    assert any(asked in text for text in bisect(tmp_path).missing)
    scorer = step.run().model.scorer("rollout_log_probs")
    verdict = bisect(tmp_path, scorers=Scorers(scorer, scorer))
    assert verdict.stage == "old_log_prob"
    assert not any(asked in text for text in verdict.missing)
