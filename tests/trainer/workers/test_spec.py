import pytest
from omegaconf import OmegaConf

from dataproto_audit.trainer.backends.base import OptimSpec
from dataproto_audit.trainer.plans import MicroBatching
from dataproto_audit.trainer.schema import Config
from dataproto_audit.trainer.workers.spec import UpdateOptions, WorkerSpec, lr_at, worker_spec


def spec(*overrides: str) -> WorkerSpec:
    config = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.from_dotlist(list(overrides)))
    return worker_spec(config, model_path="model")


def test_verl_s_keys_arrive_where_they_are_used():
    made = spec(
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.actor.fsdp_config.wrap=root",
        "trainer.collective_timeout_s=7",
    )
    assert made.update.mini_batch_size == 256
    assert (made.loss.clip_ratio_low, made.loss.clip_ratio_high) == (0.2, 0.28)
    assert made.with_reference
    assert made.optim.lr == 3e-4
    assert made.fsdp.wrap == "root"
    assert made.collective_timeout_s == 7.0


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), MicroBatching()),
        (("actor.ppo_micro_batch_size_per_gpu=4",), MicroBatching(rows=4)),
        (
            ("actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=99"),
            MicroBatching(max_tokens=99),
        ),
    ],
)
def test_micro_batches_are_static_or_bounded_by_tokens(overrides, expected):
    made = spec(*(f"actor_rollout_ref.{override}" for override in overrides))
    assert made.update.micro == expected


def test_the_passes_have_micro_batches_of_their_own():
    made = spec(
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=50",
    )
    assert made.log_prob_micro == MicroBatching(rows=3)
    assert made.ref_micro == MicroBatching(max_tokens=50)


def test_the_rate_rises_linearly_and_stays():
    rates = [lr_at(OptimSpec(lr=1.0), UpdateOptions(lr_warmup_steps=4), step=s) for s in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert lr_at(OptimSpec(lr=1.0), UpdateOptions(), step=0) == 1.0
