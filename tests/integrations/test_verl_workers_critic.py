"""The engine's critic: its values before the first step, and its loss, from what ranks tell."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dataproto_audit import attach, open_run
from dataproto_audit.integrations.critic_evidence import looks_at_critics
from dataproto_audit.integrations.rank_evidence import RankEvidence
from dataproto_audit.protocol import DataProto
from dataproto_audit.testing.options import Options
from tests.integrations import _workers
from tests.integrations._workers import (
    CLIP,
    PROMPT,
    RESPONSE,
    Told,
    batch_of,
    critic_loss,
    stage_of,
)

from .conftest import make

CRITIC = {"cliprange_value": CLIP, "loss_agg_mode": "token-mean"}
BOTH = {"DPA505", "DPA506"}
Run = Callable[..., Told]


def scored() -> DataProto:
    """Rows with the values that the stand-ins' critic gives, and returns that lie elsewhere."""
    from verl.workers.tiny import Toy

    batch = batch_of()
    fields, made = batch.batch, torch.Generator().manual_seed(1)
    with torch.no_grad():
        logits = Toy()(fields["input_ids"], position_ids=fields["position_ids"])
    values = logits[:, PROMPT - 1 : PROMPT - 1 + RESPONSE, 0] * fields["response_mask"]
    fields["values"] = values
    fields["returns"] = values + torch.randn(values.shape, generator=made)
    return batch


@pytest.fixture
def told(verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``told(kind=...)``: what the audit says of the critic's update."""

    def run(kind: str = "engine-fsdp", **changes: Any) -> Told:
        more = {"critic": CRITIC} | changes.pop("more", {})
        batch = changes.pop("batch", None)
        return stage_of(kind, "update_critic", tmp_path, monkeypatch, more=more,
                        batch=scored() if batch is None else batch, **changes)  # fmt: skip

    return run


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_healthy_critic_is_quiet(told: Run, ranks: int, by_name: bool) -> None:
    """V1's is handed names of rows, which verl fetches behind the hook."""
    result = told(ranks=ranks, by_name=by_name)
    assert result.findings == {}
    assert {code for code in BOTH if result.outcomes[code].kind == "passed"} == BOTH
    assert set(result.tensors) == {"update_values", "value_mini_batch"}
    assert [entry["mini_batch"] for entry in result.evidence["losses"]] == [0, 1][: 3 - ranks]


def test_means_of_micro_batches_that_are_added_are_found(
    told: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As verl 0.7.1 computes it (D11)."""
    monkeypatch.setattr(_workers, "critic_loss", partial(critic_loss, local=True))
    result = told(ranks=1)
    assert set(result.findings) == {"DPA506"}
    assert result.findings["DPA506"].causes[0] == "loss_depends_on_split"
    assert result.findings["DPA506"].evidence["factor"] > 1.5


def test_values_of_another_column_are_found(told: Run) -> None:
    batch = scored()
    batch.batch["values"] = torch.roll(batch.batch["values"], 1, 1)
    result = told(ranks=1, batch=batch)
    assert result.findings["DPA505"].causes[0] == "shift"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"critic": {**CRITIC, "loss_agg_mode": "seq-mean-token-mean"}},
         "seq-mean-token-mean, whose count no micro-batch holds"),
        ({"critic": {"loss_agg_mode": "token-mean"}}, "critic.cliprange_value is not set"),
        ({"critic": {**CRITIC, "loss_scale_factor": 100}}, "critic.loss_scale_factor is set"),
    ],
    ids=["rows", "no clip", "scaled"],
)  # fmt: skip
def test_a_loss_of_another_kind_is_not_recomputed(
    told: Run, caplog: pytest.LogCaptureFixture, more: dict[str, Any], said: str
) -> None:
    result = told(more=more)
    assert "losses" not in result.evidence
    assert {result.outcomes[code].kind for code in BOTH} == {"not_checkable"}
    assert result.findings == {}
    assert said in caplog.text


def test_a_critic_in_half_precision_beside_a_full_actor_is_not_judged(
    told: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import verl.workers.engine.fsdp.transformer_impl as engine

    whole = engine.FSDPEngineWithValueHead.of_tokens
    monkeypatch.setattr(
        engine.FSDPEngineWithValueHead, "of_tokens", lambda self, *of: whole(self, *of).bfloat16()
    )
    actor = {"fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}}}
    result = told(actor=actor)
    assert "losses" not in result.evidence
    assert result.tensors == {}
    assert "half precision" in caplog.text


def test_padded_values_of_0_7_1_are_passed_over(
    told: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without remove-padding its critic gives a column for each token."""
    import verl.workers.engine.fsdp.transformer_impl as engine

    whole = engine.FSDPEngineWithValueHead.of_tokens
    monkeypatch.setattr(
        engine.FSDPEngineWithValueHead, "of_tokens", lambda self, *of: whole(self, *of)[:, None]
    )
    monkeypatch.setattr(_workers, "critic_loss", lambda *_: torch.ones(1, requires_grad=True).sum())
    result = told()
    assert "losses" not in result.evidence
    assert "DPA904" not in caplog.text


@pytest.mark.parametrize(
    ("config", "looked"),
    [
        ({}, True),
        ({"trainer": {"use_legacy_worker_impl": "disable"}}, True),
        ({"trainer": {"use_legacy_worker_impl": "auto"}}, False),
        ({"critic": {"strategy": "fsdp2"}}, True),
        ({"critic": {"strategy": "megatron"}}, False),
    ],
)
def test_which_critics_are_looked_into(config: dict[str, Any], looked: bool) -> None:
    assert looks_at_critics(config) is looked


def test_what_a_critic_told_is_not_missed_by_the_actor(
    verl: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is in verl's own batch."""

    def leave(self: Any, stage: str, batch: Any) -> Any:
        if stage != "update_critic":
            return {}, {}
        values = batch["batch"]["values"] if isinstance(batch, dict) else batch.batch["values"]
        numbers = torch.zeros(len(values), dtype=torch.int64)
        return {}, {"update_values": values.clone(), "value_mini_batch": numbers}

    monkeypatch.setattr(RankEvidence, "leave", leave)
    options = Options(critic=True, kl_in_reward=True, estimator="gae")
    changes = {"algorithm__adv_estimator": "gae", "algorithm__use_kl_in_reward": True,
               "actor_rollout_ref__actor__use_kl_loss": False}  # fmt: skip
    trainer = make(verl, options=options, steps=2, **changes)
    with attach(trainer, run_dir="run", workers=True, hang_timeout_s=0):
        trainer.fit()
    run = open_run("run")
    assert run.findings() == []
    outcomes = run.table("outcomes")
    assert "passed" in set(outcomes[outcomes["code"] == "DPA505"]["kind"])


def test_a_legacy_critic_is_not_asked(told: Run, caplog: pytest.LogCaptureFixture) -> None:
    result = told(more={"trainer": {"use_legacy_worker_impl": "auto"}})
    assert (result.evidence, result.tensors) == ({}, {})
    assert caplog.text == ""
