"""A step of verl's run, run again: it gives the record, and faults go on into later stages."""

from pathlib import Path

import pytest
import torch

from dataproto_audit.testing.recorded_steps import boundaries
from dataproto_audit.testing.verl_samples import strays, verl_steps

SAMPLES = Path(__file__).parents[1] / "data" / "samples"
STEPS = {step.name: step for step, _ in verl_steps(SAMPLES)}


@pytest.mark.parametrize("name", STEPS)
def test_a_run_without_a_fault_gives_what_verl_recorded(name):
    assert max(strays(STEPS[name]).values()) < 1e-6


def test_the_boundaries_are_those_of_the_loop():
    step = STEPS["verl-0.7.1/gae_legacy"]
    seen = [f"{b.stage}.{b.when}" for b in boundaries(step.run()) if b.when == "after"]
    assert seen == [
        "prompts.after", "rollout.after", "union.after", "balance.after", "reward.after",
        "old_log_prob.after", "ref_log_prob.after", "values.after", "kl_reward.after",
        "advantage.after", "update_critic.after", "update_actor.after",
    ]  # fmt: skip


def test_later_stages_go_on_from_what_was_changed():
    step = STEPS["verl-0.7.1/gae_legacy"]
    made = {}
    for b in boundaries(step.run()):
        if (b.stage, b.when) == ("reward", "after"):
            b.batch.batch["token_level_scores"] = b.batch.batch["token_level_scores"] + 1.0
        made[b.stage, b.when] = b.batch
    changed, recorded = made["update_actor", "after"].batch, step.final.batch
    on = recorded["response_mask"] != 0
    assert (changed["token_level_rewards"] - recorded["token_level_rewards"])[on].min() > 0.99
    assert not torch.allclose(changed["returns"][on], recorded["returns"][on])


def test_another_prefix_gives_other_log_probs_from_its_first_token_on():
    step = STEPS["verl-0.7.1/gae_legacy"]
    model = step.run().model
    tensors = dict(step.final.batch.items())
    tensors["input_ids"] = tensors["input_ids"].clone()
    width = tensors["prompts"].shape[1]
    row = int((tensors["attention_mask"][:, width:] != 0).sum(1).argmax())
    tensors["input_ids"][row, width + 3] += 1
    old = model.gives("old_log_probs", dict(step.final.batch.items()))
    new = model.gives("old_log_probs", tensors)
    assert torch.equal(old[:, :3], new[:, :3])
    assert not torch.equal(old[row, 3:], new[row, 3:])
    others = [at for at in range(len(old)) if at != row]
    assert torch.equal(old[others], new[others])
