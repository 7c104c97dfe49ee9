"""What must hold between configuration values: each refusal names keys, numbers and a remedy."""

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.sizes import world_size
from dataproto_audit.trainer.validate import validate

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
        (["algorithm.adv_estimator=rloo"], "DPA851", ["grpo", "gae"]),
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


@pytest.mark.parametrize(
    ("overrides", "code", "fragments"),
    [
        ([f"{ROLLOUT}.max_model_len=5"], "DPA851", ["max_model_len is 5", "= 10", "10 or more"]),
        (["data.max_response_length=100000"], "DPA851", ["max_model_len is 32", "100006"]),
        (
            ["data.max_response_length=90", f"{ROLLOUT}.max_model_len=null"],
            "DPA851",
            ["max_position_embeddings is 64", "= 96"],
        ),
        (["actor_rollout_ref.model.tiny.max_position_embeddings=4"], "DPA851", ["is 4"]),
        ([f"{ROLLOUT}.max_model_len=65"], "DPA851", ["65", "max_position_embeddings, 64"]),
        (["data.train_files=5"], "DPA851", ["data.train_files is 5", "a list"]),
        (["data.val_files=[[a]]"], "DPA851", ["data.val_files"]),
        (["data.train_files=[a.parquet, 3]"], "DPA851", ["data.train_files"]),
        (["data.train_files=nowhere.parquet"], "DPA857", ["nowhere.parquet", "data.train_files"]),
        (["warmup.batch_size=63"], "DPA854", ["warmup.batch_size=63", "2 ranks"]),
        (["trainer.experiment_name=../../x"], "DPA851", ["experiment_name", "run_dir"]),
        (["trainer.experiment_name=''"], "DPA851", ["experiment_name"]),
        (["actor_rollout_ref.model.tiny.charset=''"], "DPA851", ["charset is empty"]),
        (["trainer.resume_mode=auto"], "DPA851", ["trainer.run_dir", "not set"]),
    ],
)
def test_values_that_only_together_cannot_work(overrides, code, fragments):
    with pytest.raises(UsageError) as caught:
        validate(load_config("quickstart", overrides))
    assert caught.value.code == code
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_files_that_are_there_are_taken(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("")
    for value in (str(file), f"[{file}]", "[]", "null"):
        validate(load_config("quickstart", [f"data.train_files={value}"]))


def test_warm_up_rows_need_not_divide_where_there_is_no_warm_up():
    validate(load_config("quickstart", ["warmup.steps=0", "warmup.batch_size=63"]))
