"""What is read from verl's configuration and trainer, and what stays unknown."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf

from dataproto_audit.integrations.verl_settings import of_some_rows, settings_of
from dataproto_audit.integrations.verl_versions import VERSIONS, version
from dataproto_audit.probes import Settings

from .conftest import config


def trainer(tokenizer: Any = None, **changes: Any) -> Any:
    return SimpleNamespace(config=config(**changes), tokenizer=tokenizer)


def test_names_of_verl_are_read() -> None:
    found = settings_of(trainer())
    assert (found.n, found.temperature, found.adv_estimator) == (4, 1.0, "grpo")
    assert (found.use_kl_loss, found.use_kl_in_reward) == (True, False)
    assert (found.world_size, found.micro_batch_size) == (2, 4)
    assert (found.trainer_dtype, found.rollout_dtype) == ("float32", "float32")
    assert found.rejection is False
    assert found.multi_turn is False


def test_interpolations_are_resolved() -> None:
    made = config()
    OmegaConf.update(made, "actor_rollout_ref.rollout.n", "${data.n}")
    OmegaConf.update(made, "data.n", 6)
    assert settings_of(SimpleNamespace(config=made)).n == 6


def test_one_unreadable_value_does_not_spoil_the_others() -> None:
    found = settings_of(trainer(actor_rollout_ref__rollout__n="many"))
    assert found.n is None
    assert found.temperature == 1.0


def test_nothing_at_all() -> None:
    assert settings_of(SimpleNamespace()).n is None


def test_rollout_correction() -> None:
    correction = {"bypass_mode": False, "rollout_rs": "token"}
    assert settings_of(trainer(algorithm__rollout_correction=correction)).rejection is True
    bypass = settings_of(trainer(algorithm__rollout_correction={"bypass_mode": True}))
    assert bypass.ref_from_actor is None


def test_half_precision_is_the_default_of_fsdp() -> None:
    found = settings_of(trainer(actor_rollout_ref__actor__fsdp_config__mixed_precision=None))
    assert found.trainer_dtype == "bfloat16"


def test_tools_make_it_multi_turn() -> None:
    assert settings_of(trainer(actor_rollout_ref__rollout__multi_turn__enable=True)).multi_turn
    agent = {"default_agent_loop": "tool_agent"}
    assert settings_of(trainer(actor_rollout_ref__rollout__agent=agent)).multi_turn


def test_the_reference_starts_as_the_actor_only_where_that_is_sure() -> None:
    assert settings_of(trainer()).ref_from_actor is True
    for changes in (
        {"trainer__resume_mode": "auto"},
        {"actor_rollout_ref__ref__fsdp_config__model_dtype": "bf16"},
        {"actor_rollout_ref__model": {"lora_rank": 8}},
        {"actor_rollout_ref__ref__model": {"path": "another"}},
    ):
        assert settings_of(trainer(**changes)).ref_from_actor is None, changes


def test_sequence_parallel_ranks_share_rows() -> None:
    found = settings_of(trainer(actor_rollout_ref__actor__ulysses_sequence_parallel_size=2))
    assert found.world_size == 1
    assert settings_of(trainer(actor_rollout_ref__actor__strategy="megatron")).world_size is None


def test_stop_ids_come_with_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 99, "eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    tokenizer = SimpleNamespace(name_or_path=str(tmp_path), eos_token_id=5, pad_token_id=0)
    found = settings_of(trainer(tokenizer))
    assert (found.stop_ids, found.pad_id, found.vocab_size) == ((5, 7), 0, 99)
    hub = SimpleNamespace(name_or_path="some/model", eos_token_id=5, pad_token_id=0)
    assert settings_of(trainer(hub)).stop_ids is None


def test_a_sample_knows_nothing_of_all_rows() -> None:
    full = Settings(world_size=2, micro_batch_size=4, adv_estimator="gae", n=4)
    part = of_some_rows(full)
    assert (part.world_size, part.micro_batch_size, part.adv_estimator) == (None, None, None)
    assert part.n == 4
    assert of_some_rows(Settings(adv_estimator="grpo")).adv_estimator == "grpo"


def test_versions() -> None:
    assert version("0.7.1").baseline == "second call"
    assert version("0.9.1").syncs_in_warmup
    assert not version("0.8.0").tried
    assert version("").number == "unknown"
    assert set(VERSIONS) == {"0.7.1", "0.9.1"}
