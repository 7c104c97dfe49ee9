"""A fault inside each stage of the trainer is found at that stage, in its first step."""

from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from dataproto_audit import AuditError, attach, open_run
from dataproto_audit.findings import Finding
from dataproto_audit.testing.options import Options

from .conftest import make

GAE = {
    "algorithm__adv_estimator": "gae",
    "algorithm__use_kl_in_reward": True,
    "actor_rollout_ref__actor__use_kl_loss": False,
}


def replaced(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Let ``change`` have what ``owner.name`` returns, before the caller gets it."""
    original = getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        changed = change(result)
        return result if changed is None else changed

    setattr(owner, name, faulty)


def in_input(owner: Any, name: str, change: Callable[[Any], None]) -> None:
    """Let ``change`` have the batch that ``owner.name`` was given, after its work."""
    original = getattr(owner, name)

    def faulty(batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(batch, *args, **kwargs)
        change(batch)
        return result

    setattr(owner, name, faulty)


def shifted(name: str) -> Callable[[Any], None]:
    def change(result: Any) -> None:
        batch = (result[0] if isinstance(result, tuple) else result).batch
        batch[name] = torch.roll(batch[name], 1, 1)

    return change


def colder_reference(trainer: Any, _: ModuleType) -> None:
    def change(result: Any) -> None:
        result.batch["ref_log_prob"] = result.batch["ref_log_prob"] * 1.7

    replaced(trainer, "_compute_ref_log_prob", change)


def tiled(trainer: Any, _: ModuleType) -> None:
    def repeated(batch: Any) -> Any:
        return batch.repeat(repeat_times=4, interleave=False)

    trainer.repeated = repeated


def other_uids(trainer: Any, _: ModuleType) -> None:
    """uids drawn again after the repeat."""

    repeat = trainer.repeated

    def repeated(batch: Any) -> Any:
        out = repeat(batch)
        out.non_tensor_batch["uid"] = np.array([f"u{i}" for i in range(len(out))], dtype=object)
        return out

    trainer.repeated = repeated


def swapped_uids(trainer: Any, _: ModuleType) -> None:
    def change(batch: Any) -> None:
        uids = batch.non_tensor_batch["uid"].copy()
        batch.non_tensor_batch["uid"] = np.roll(uids, 1)

    in_input(trainer, "_balance_batch", change)


def lost_rows(trainer: Any, _: ModuleType) -> None:
    def change(batch: Any) -> None:
        batch.batch["responses"][0] = batch.batch["responses"][1]
        batch.batch["input_ids"][0] = batch.batch["input_ids"][1]

    in_input(trainer, "_balance_batch", change)


def mask_on_padding(trainer: Any, _: ModuleType) -> None:
    def change(result: Any) -> None:
        result.batch["response_mask"] = torch.ones_like(result.batch["response_mask"])

    replaced(trainer.async_rollout_manager, "generate_sequences", change)


def reward_on_padding(_: Any, verl: ModuleType) -> None:
    def change(result: Any) -> Any:
        scores, extra = result
        return torch.roll(scores, 1, 1), extra

    replaced(verl, "extract_reward", change)


def rewards_of_others(trainer: Any, verl: ModuleType) -> None:
    def change(result: Any) -> Any:
        scores, extra = result
        return torch.roll(scores, 1, 0), extra

    replaced(verl, "extract_reward", change)


def not_grouped(_: Any, verl: ModuleType) -> None:
    def change(data: Any) -> None:
        scores = data.batch["token_level_rewards"].sum(-1, keepdim=True)
        mask = data.batch["response_mask"]
        data.batch["advantages"] = (scores - scores.mean()) / (scores.std() + 1e-6) * mask

    replaced(verl, "compute_advantage", change)


def penalty_on_padding(_: Any, verl: ModuleType) -> None:
    def change(result: Any) -> None:
        batch = result[0].batch
        batch["token_level_rewards"] = batch["token_level_scores"] - 0.3

    replaced(verl, "apply_kl_penalty", change)


def narrow_values(trainer: Any, _: ModuleType) -> None:
    def change(result: Any) -> None:
        result.batch["values"] = result.batch["values"][:, :-1]

    replaced(trainer, "_compute_values", change)


def overwritten_by(name: str, field: str) -> Callable[[Any, ModuleType], None]:
    def fault(trainer: Any, _: ModuleType) -> None:
        def change(batch: Any) -> None:
            batch.batch[field] = batch.batch[field] + 1.0

        in_input(trainer, name, change)

    return fault


def unmasked_validation(trainer: Any, _: ModuleType) -> None:
    validation = "sim"
    validate = trainer._validate

    def faulty() -> Any:
        sim = getattr(trainer, validation)
        made = sim.validation

        def batch() -> Any:
            out = made()
            out.batch["position_ids"] = out.batch["position_ids"] + 1
            return out

        sim.validation = batch
        return validate()

    trainer._validate = faulty


FAULTS: dict[str, tuple[Callable[[Any, ModuleType], None], str, dict[str, Any]]] = {
    "repeat not interleaved": (tiled, "rollout", {}),
    "uid after the repeat": (other_uids, "rollout", {}),
    "mask on padding": (mask_on_padding, "rollout", {}),
    "uid swapped in balancing": (swapped_uids, "balance", {}),
    "row lost in balancing": (lost_rows, "balance", {}),
    "reward on padding": (reward_on_padding, "reward", {}),
    "reward of another row": (rewards_of_others, "reward", {}),
    "old log-probs shifted": (
        lambda t, _: replaced(t, "_compute_old_log_prob", shifted("old_log_probs")),
        "old_log_prob", {},
    ),
    "reference at another temperature": (colder_reference, "ref_log_prob", {}),
    "values of a token too few": (narrow_values, "values", GAE),
    "KL penalty on padding": (penalty_on_padding, "kl_reward", GAE),
    "advantages over the batch": (not_grouped, "advantage", {}),
    "critic update writes": (overwritten_by("_update_critic", "returns"), "update_critic", GAE),
    "actor update writes": (overwritten_by("_update_actor", "advantages"), "update_actor", {}),
    "validation positions": (unmasked_validation, "validation", {}),
}  # fmt: skip


def findings(verl: ModuleType, name: str, **settings: Any) -> list[Finding]:
    fault, stage, changes = FAULTS[name]
    options = Options(critic=True, kl_in_reward=True, estimator="gae") if changes else Options()
    if stage != "validation":  # which calls some of the faulty functions, too, and comes first
        changes = {**changes, "trainer__val_before_train": False, "trainer__test_freq": 0}
    trainer = make(verl, options=options, **changes)
    fault(trainer, verl)
    with attach(trainer, run_dir="run", **settings), suppress(TypeCheckError):
        trainer.fit()  # which some of the faults bring down in the end
    return open_run("run").findings()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_at_its_stage_in_its_first_step(verl: ModuleType, name: str) -> None:
    stage = FAULTS[name][1]
    failed = [f for f in findings(verl, name) if f.severity == "fail"]
    assert failed, "nothing was found"
    assert failed[0].stage == stage
    assert failed[0].step in (0, 1)


def test_the_default_is_to_warn_and_go_on(
    verl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    assert findings(verl, "reward on padding")
    assert "after reward" in caplog.text


def test_a_finding_raises_where_that_was_asked_for(verl: ModuleType) -> None:
    with pytest.raises(AuditError) as caught:
        findings(verl, "reward on padding", on_fail="raise")
    assert caught.value.findings[0].stage == "reward"
    assert open_run("run").summary["error"].startswith("AuditError")
