"""Keys of an engine that no model runs on: refused for every role, and left behind with it."""

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.config import load_config, ready_configs
from dataproto_audit.trainer.idle import engines
from dataproto_audit.trainer.validate import validate

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout"))
TP = "megatron.tensor_model_parallel_size"
NO_REFERENCE = f"{ACTOR}.use_kl_loss=false"


@pytest.mark.parametrize(
    ("name", "overrides", "fragments"),
    [
        ("quickstart", [f"{ACTOR}.{TP}=2"],
         ["no model runs on megatron", f"{ACTOR}.{TP}=2"]),
        ("quickstart", [f"{ACTOR}.megatron.use_distributed_optimizer=false"],
         [f"{ACTOR}.megatron.use_distributed_optimizer=False"]),
        ("quickstart", [f"{REF}.{TP}=2"],
         ["the reference's engine is not megatron", f"{REF}.{TP}=2"]),
        ("ppo_quickstart", [f"critic.{TP}=2"],
         ["the critic's engine is not megatron", f"critic.{TP}=2"]),
        ("megatron_quickstart", [f"{REF}.strategy=fsdp2", f"{REF}.{TP}=2"],
         ["the reference's engine is not megatron"]),
        ("quickstart", [f"{REF}.strategy=megatron", f"{REF}.{TP}=1", f"{ACTOR}.{TP}=2"],
         ["every model on megatron has a value of its own", f"{ACTOR}.{TP}=2"]),
        ("megatron_quickstart", [f"{ACTOR}.fsdp_config.wrap=root"],
         ["no model runs on fsdp2", f"{ACTOR}.fsdp_config.wrap=root"]),
        ("megatron_quickstart", [f"{ACTOR}.ulysses_sequence_parallel_size=2"],
         [f"{ACTOR}.ulysses_sequence_parallel_size=2"]),
        ("quickstart", [NO_REFERENCE, f"{REF}.strategy=megatron"],
         ["neither actor.use_kl_loss nor algorithm.use_kl_in_reward", f"{REF}.strategy=megatron"]),
        ("quickstart", [NO_REFERENCE, f"{REF}.log_prob_micro_batch_size_per_gpu=8"],
         [f"{REF}.log_prob_micro_batch_size_per_gpu=8"]),
        ("quickstart", [f"{ACTOR}.strategy=megatron", f"{ACTOR}.fsdp_config.wrap=root"],
         ["no model runs on fsdp2", f"{ACTOR}.fsdp_config.wrap=root"]),
        ("quickstart", [f"{ACTOR}.ppo_max_token_len_per_gpu=640"],
         [f"{ACTOR}.use_dynamic_bsz is false", f"{ACTOR}.ppo_max_token_len_per_gpu=640"]),
        ("quickstart", [f"{ROLLOUT}.log_prob_max_token_len_per_gpu=640"],
         [f"{ROLLOUT}.log_prob_use_dynamic_bsz is false"]),
        ("quickstart", [f"{REF}.log_prob_max_token_len_per_gpu=640"],
         [f"{REF}.log_prob_use_dynamic_bsz is false"]),
    ],
)  # fmt: skip
def test_a_key_that_nothing_reads_is_refused_by_name(name, overrides, fragments):
    with pytest.raises(UsageError) as caught:
        validate(load_config(name, overrides))
    assert caught.value.code == "DPA851"
    for fragment in [*fragments, "would do nothing"]:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("name", ready_configs())
def test_every_ready_configuration_is_valid(name):
    validate(load_config(name))


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        # Null in the reference's or the critic's layout takes the actor's, which is read then.
        ("quickstart", [f"{REF}.strategy=megatron", f"{ACTOR}.{TP}=2"]),
        ("quickstart", [f"{REF}.strategy=megatron", f"{REF}.{TP}=2"]),
        ("ppo_quickstart", ["critic.strategy=megatron", f"{ACTOR}.{TP}=2"]),
        # FSDP options are those of every role on FSDP.
        ("megatron_quickstart", [f"{REF}.strategy=fsdp2", f"{ACTOR}.fsdp_config.wrap=root"]),
        ("ppo_quickstart", [f"{ACTOR}.strategy=megatron", f"{ACTOR}.{TP}=2",
                            "critic.strategy=fsdp2", f"{ACTOR}.fsdp_config.wrap=root"]),
        ("quickstart", [NO_REFERENCE, "algorithm.use_kl_in_reward=true",
                        f"{REF}.strategy=megatron"]),
        ("quickstart", [NO_REFERENCE]),
    ],
)  # fmt: skip
def test_a_key_that_some_role_reads_is_taken(name, overrides):
    validate(load_config(name, overrides))


def test_another_engine_starts_without_the_keys_of_the_one_before():
    there = load_config("quickstart", [f"{ACTOR}.strategy=megatron", f"{ACTOR}.{TP}=2"])
    validate(there)
    assert engines(there) == {"actor": "megatron", "ref": "megatron"}
    fsdp = there.actor_rollout_ref.actor.fsdp_config
    assert (fsdp.wrap, fsdp.reshard_after_forward) == ("layer", True), "as they come"
    back = load_config("megatron_quickstart", [f"{ACTOR}.strategy=fsdp2"])
    validate(back)
    assert back.actor_rollout_ref.actor.megatron.tensor_model_parallel_size == 1
    # A role that stays keeps its keys.
    mixed = load_config("quickstart", [f"{ACTOR}.strategy=megatron", f"{REF}.strategy=fsdp2"])
    assert mixed.actor_rollout_ref.actor.fsdp_config.wrap == "root"


def test_what_a_file_itself_sets_for_no_engine_is_refused(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "actor_rollout_ref: {actor: {use_kl_loss: true, megatron: {pipeline_model_parallel_size:"
        " 2}}}\ntrainer: {total_training_steps: 1}\n"
    )
    with pytest.raises(UsageError, match=r"DPA851 .*pipeline_model_parallel_size=2 would do"):
        validate(load_config(str(file)))


@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_another_engine_takes_no_key_of_a_reference_that_is_not_held(tmp_path, strategy):
    """Its own engine named once more, or another: the mistake of the file stays one."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "actor_rollout_ref: {actor: {use_kl_loss: false}, ref: {log_prob_micro_batch_size_per_gpu:"
        " 8}}\ntrainer: {total_training_steps: 1}\n"
    )
    with pytest.raises(UsageError, match=r"ref\.log_prob_micro_batch_size_per_gpu=8 would do"):
        validate(load_config(str(file), [f"{ACTOR}.strategy={strategy}"]))


def test_a_role_reads_those_of_the_actor_s_keys_that_it_does_not_set_itself():
    read, own = f"{ACTOR}.megatron.use_distributed_optimizer=false", f"{REF}.{TP}=1"
    validate(load_config("quickstart", [f"{REF}.strategy=megatron", own, read]))
