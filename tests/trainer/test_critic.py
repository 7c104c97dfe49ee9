"""What a configuration asks of a critic and of a KL in the rewards: refused by name, or ready."""

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.checkpoint import SEATS
from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.plans import MicroBatching
from dataproto_audit.trainer.preflight import prepare
from dataproto_audit.trainer.rates import RateSchedule
from dataproto_audit.trainer.run import plan
from dataproto_audit.trainer.validate import validate
from dataproto_audit.trainer.workers.spec import (
    checkpoint_layout,
    megatron_of,
    model_of,
    roles_of,
    strategy_of,
    worker_spec,
)

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TP = "megatron.tensor_model_parallel_size"


def spec(*overrides, name="ppo_quickstart"):
    return worker_spec(load_config(name, list(overrides)), model_path="model")


@pytest.mark.parametrize(
    ("name", "overrides", "code", "fragments"),
    [
        ("quickstart", ["critic.optim.lr=1e-4"], "DPA851",
         ["adv_estimator is grpo", "critic.optim.lr=0.0001", "no critic"]),
        ("quickstart", ["critic.cliprange_value=0.2", "algorithm.lam=0.9"], "DPA851",
         ["algorithm.lam=0.9, critic.cliprange_value=0.2"]),
        ("quickstart", ["trainer.critic_warmup=2"], "DPA851", ["trainer.critic_warmup=2"]),
        ("quickstart", ["algorithm.kl_ctrl.kl_coef=0.1"], "DPA851",
         ["use_kl_in_reward is false", "algorithm.kl_ctrl.kl_coef=0.1"]),
        ("ppo_quickstart", ["algorithm.kl_penalty=k3"], "DPA851", ["algorithm.kl_penalty=k3"]),
        ("ppo_quickstart", ["algorithm.norm_adv_by_std_in_grpo=false"], "DPA851",
         ["adv_estimator is gae", "compares no groups"]),
        ("ppo_quickstart", ["critic.ppo_mini_batch_size=96"], "DPA854",
         ["512 prompts", "critic.ppo_mini_batch_size=96"]),
        ("ppo_quickstart", ["critic.ppo_mini_batch_size=1"], "DPA854", ["1 rows", "2 data-par"]),
        ("ppo_quickstart", ["critic.ppo_micro_batch_size_per_gpu=48"], "DPA854",
         ["128 rows", "critic.ppo_micro_batch_size_per_gpu=48"]),
        ("ppo_quickstart", ["critic.use_dynamic_bsz=true"], "DPA851",
         ["critic.ppo_max_token_len_per_gpu is not set"]),
        ("ppo_quickstart",
         ["critic.use_dynamic_bsz=true", "critic.ppo_max_token_len_per_gpu=64",
          "critic.forward_max_token_len_per_gpu=9"],
         "DPA856", ["critic.forward_max_token_len_per_gpu=9", "10 tokens"]),
        ("ppo_quickstart", ["critic.optim.min_lr=1e-5"], "DPA851",
         ["critic.optim.lr_decay_style is null"]),
        ("ppo_quickstart",
         ["critic.optim.lr_decay_style=cosine", "critic.optim.lr_warmup_steps=90"], "DPA851",
         ["critic.optim.lr_warmup_steps is 90"]),
        ("ppo_quickstart", ["critic.strategy=megatron", f"critic.{TP}=3"], "DPA854",
         [f"critic.{TP}", "2 ranks"]),
        ("ppo_quickstart", [f"critic.{TP}=2"], "DPA851",
         [f"critic.{TP}=2", "the critic's engine is not megatron"]),
        ("ppo_quickstart", ["critic.ppo_max_token_len_per_gpu=640"], "DPA851",
         ["critic.ppo_max_token_len_per_gpu=640", "critic.use_dynamic_bsz is false"]),
        ("ppo_quickstart", ["algorithm.gamma=1.5"], "DPA851", ["algorithm.gamma is 1.5"]),
        ("ppo_quickstart", ["critic.optim.betas=[1,1]"], "DPA851", ["critic.optim.betas"]),
    ],
)  # fmt: skip
def test_what_does_nothing_or_cannot_work_is_refused_by_name(name, overrides, code, fragments):
    with pytest.raises(UsageError) as caught:
        validate(load_config(name, overrides))
    assert caught.value.code == code
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [f"{ROLLOUT}.n=4", "data.train_batch_size=128", f"{ACTOR}.ppo_mini_batch_size=64"],
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.05"],
        ["trainer.critic_warmup=200"],
        ["critic.use_dynamic_bsz=true", "critic.ppo_max_token_len_per_gpu=10"],
        ["critic.strategy=megatron", f"critic.{TP}=2"],
        [f"{ACTOR}.strategy=megatron", f"{ACTOR}.{TP}=2", "critic.strategy=fsdp2"],
    ],
)
def test_what_can_work_passes_up_to_the_first_process(overrides, tmp_path):
    config = load_config("ppo_quickstart", [*overrides, f"trainer.run_dir={tmp_path / 'run'}"])
    assert prepare(config, tmp_path).place.checkpoint is None
    assert plan(config)["critic"]["mini_batches_per_step"] == 2


def test_kl_in_the_rewards_needs_no_critic():
    config = load_config("quickstart", ["algorithm.use_kl_in_reward=true"])
    validate(config)
    assert roles_of(worker_spec(config, model_path="")) == ("actor", "ref")


def test_null_takes_what_the_actor_has():
    made = spec(f"{ACTOR}.ppo_epochs=3", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean")
    critic = made.critic
    assert roles_of(made) == ("actor", "ref", "critic")
    assert (critic.update.epochs, critic.update.mini_batch_size) == (3, 256)
    assert critic.loss.loss_agg_mode == "seq-mean-token-mean"
    assert strategy_of(made, "critic") == "fsdp2"
    assert (model_of(made, "critic").head, model_of(made, "actor").head) == ("value", "lm")
    piped = spec(f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.pipeline_model_parallel_size=2")
    assert megatron_of(piped, "critic") == megatron_of(piped, "actor")
    assert piped.critic.update.micro == MicroBatching(divisible_by=2)


def test_verl_s_keys_arrive_where_they_are_used():
    critic = spec(
        "critic.ppo_epochs=2", "critic.ppo_mini_batch_size=64", "critic.cliprange_value=0.2",
        "critic.optim.lr=3e-4", "critic.optim.lr_decay_style=linear", "critic.grad_clip=0.7",
        "critic.forward_micro_batch_size_per_gpu=8", "critic.shuffle=false",
    ).critic  # fmt: skip
    assert (critic.update.epochs, critic.update.mini_batch_size, critic.update.shuffle) == (
        2, 64, False,
    )  # fmt: skip
    assert (critic.loss.cliprange_value, critic.optim.grad_clip) == (0.2, 0.7)
    assert critic.update.rates == RateSchedule("linear", 3e-4, 90, 10)
    assert critic.forward_micro == MicroBatching(rows=8)
    dynamic = spec("critic.use_dynamic_bsz=true", "critic.ppo_max_token_len_per_gpu=40").critic
    assert dynamic.forward_micro == dynamic.update.micro == MicroBatching(max_tokens=40)


def test_a_checkpoint_says_which_engine_the_critic_had():
    assert checkpoint_layout(spec())["critic_strategy"] == "fsdp2"
    mixed = checkpoint_layout(spec("critic.strategy=megatron", f"critic.{TP}=2"))
    assert (mixed["critic_strategy"], mixed[SEATS]) == ("megatron", True)
    assert "critic_strategy" not in checkpoint_layout(spec(name="quickstart"))
