"""What must hold between configuration values: each refusal names keys, numbers and a remedy."""

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.validate import validate, world_size

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("overrides", "code", "fragments"),
    [
        ([f"{ROLLOUT}.n=1"], "DPA855", ["adv_estimator=grpo", "rollout.n is 1", "2 or more"]),
        ([f"{ACTOR}.ppo_mini_batch_size=7"], "DPA854", ["64 prompts", "7"]),
        (
            ["trainer.n_gpus_per_node=3", f"{ACTOR}.ppo_mini_batch_size=64"],
            "DPA854",
            ["512 rows", "3 ranks"],
        ),
        ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=48"], "DPA854", ["128 rows", "48"]),
        (
            [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=9"],
            "DPA856",
            ["ppo_max_token_len_per_gpu=9", "10 tokens"],
        ),
        (
            [
                f"{ROLLOUT}.log_prob_use_dynamic_bsz=true",
                f"{ROLLOUT}.log_prob_max_token_len_per_gpu=4",
            ],
            "DPA856",
            ["log_prob_max_token_len_per_gpu=4"],
        ),
        ([f"{ACTOR}.use_dynamic_bsz=true"], "DPA851", ["is not set"]),
        (["audit.level=some"], "DPA851", ["audit.level", "off, shape, full"]),
        (["audit.on_fail=panic"], "DPA851", ["raise, warn, record"]),
        ([f"{ACTOR}.loss_agg_mode=mean"], "DPA851", ["token-mean"]),
        ([f"{ROLLOUT}.temperature=0"], "DPA851", ["val_kwargs.temperature"]),
        (["trainer.total_training_steps=0"], "DPA851", ["positive"]),
        (["trainer.resume_mode=path"], "DPA851", ["resume_from_path"]),
        (["algorithm.adv_estimator=gae"], "DPA851", ["grpo"]),
    ],
)
def test_what_cannot_work_is_refused_with_names_and_numbers(overrides, code, fragments):
    with pytest.raises(UsageError) as caught:
        validate(load_config("quickstart", overrides))
    assert caught.value.code == code
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_limits_that_just_fit_are_taken():
    validate(
        load_config(
            "quickstart",
            [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=10"],
        )
    )


def test_world_size_counts_all_nodes():
    config = load_config("quickstart", ["trainer.nnodes=2", "trainer.n_gpus_per_node=4"])
    assert world_size(config) == 8
