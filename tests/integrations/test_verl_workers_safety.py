"""Looking into workers: what is missing is said, and nothing of theirs is changed."""

import importlib
import json
import random
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit import attach, open_run
from dataproto_audit.integrations import verl_workers_legacy
from dataproto_audit.integrations.options import Options
from dataproto_audit.integrations.rank_evidence import RankEvidence
from dataproto_audit.integrations.verl_workers import Workers, mask_of, restarts_of
from dataproto_audit.integrations.worker_files import Exchange
from dataproto_audit.integrations.worker_record import Place

from ._workers import CODES, actor_config, batch_of, call, hooked, stage_of
from .conftest import make


def test_ranks_that_told_nothing_are_not_checkable(
    verl: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = RankEvidence(Options(run_dir=str(tmp_path), workers=True), {})
    for _ in range(2):
        ranks.enter("update_actor", looks=True)
        assert ranks.leave("update_actor", batch_of()) == ({}, {})
    ranks.finish()
    assert caplog.text.count("no worker told anything") == 1


def test_a_rank_that_is_missing_is_said(
    verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(RankEvidence, "_losses", None)  # not reached
    chosen = Options(run_dir=str(tmp_path), workers=True, hang_timeout_s=0)
    monkeypatch.setattr(verl_workers_legacy, "here", lambda splits=1: Place(0, 2, 0, 2))
    ranks = RankEvidence(chosen, {})
    with hooked(chosen):
        ranks.enter("update_actor", looks=True)
        call("legacy", "update_actor", actor_config())(batch_of(4))
    assert ranks.leave("update_actor", batch_of()) == ({}, {})
    ranks.finish()
    assert "1 of 2 ranks told something" in caplog.text
    assert ranks.cpu_s > 0  # what the hooks took is known all the same


def test_processes_of_one_rank_both_count(
    verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actor and reference in processes of their own are rank 0 each; what one tells grows."""
    told = [("a:1", 1.0), ("a:2", 0.5), ("a:1", 1.25)]
    answers = [
        SimpleNamespace(told={"rank": 0, "dp_rank": 0, "dp_size": 2, "process": process,
                              "hooks_cpu_s": spent})
        for process, spent in told
    ]  # fmt: skip
    monkeypatch.setattr(Exchange, "answers", lambda *_: answers)
    ranks = RankEvidence(Options(run_dir=str(tmp_path), workers=True, hang_timeout_s=0), {})
    ranks.enter("update_actor", looks=True)
    ranks.leave("update_actor", batch_of())
    ranks.finish()
    assert ranks.cpu_s == 1.75


def test_a_stage_that_is_left_out_has_no_answer_and_needs_no_batch(
    verl: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = RankEvidence(Options(run_dir=str(tmp_path), workers=True, hang_timeout_s=0), {})
    ranks.enter("update_actor", looks=False)
    assert ranks.leave("update_actor", None) == ({}, {})
    ranks.finish()
    assert caplog.text == ""


@pytest.mark.parametrize("mode", ["clip_cov", "scaled"])
def test_a_loss_of_another_kind_is_not_recomputed(
    mode: str, verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor: dict[str, Any] = {"policy_loss": {"loss_mode": mode}}
    if mode == "scaled":
        actor = {"loss_scale_factor": 100}
    told = stage_of("engine-fsdp", "update_actor", tmp_path, monkeypatch, actor=actor)
    assert "losses" not in told.evidence
    assert told.outcomes["DPA502"].kind == "not_checkable"
    assert told.findings == {}


def test_a_sample_of_rows_has_no_ranks(
    verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = stage_of("legacy", "update_actor", tmp_path, monkeypatch, rows=4)
    assert told.evidence == {}
    assert set(told.tensors) == {"update_log_probs", "mini_batch"}


def test_calls_outside_of_a_stage_are_passed_by(verl: ModuleType, tmp_path: Path) -> None:
    with hooked(Options(run_dir=str(tmp_path / "run"), workers=True)) as workers:
        call("legacy", "update_actor", actor_config())(batch_of())
        assert workers.record is None
    assert not (tmp_path / "run").exists()


def test_every_original_comes_back(verl: ModuleType, tmp_path: Path) -> None:
    owners = [
        getattr(importlib.import_module(module), name)
        for module, name in (
            ("verl.workers.actor.dp_actor", "DataParallelPPOActor"),
            ("verl.workers.actor.megatron_actor", "MegatronPPOActor"),
            ("verl.workers.engine_workers", "TrainingWorker"),
            ("verl.workers.engine.fsdp.transformer_impl", "FSDPEngine"),
            ("verl.workers.engine.fsdp.transformer_impl", "FSDPEngineWithLMHead"),
            ("verl.workers.engine.megatron.transformer_impl", "MegatronEngine"),
        )
    ]
    owners += [torch.Tensor]
    before = [dict(vars(owner)) for owner in owners]
    with hooked(Options(run_dir=str(tmp_path), workers=True)):
        assert [dict(vars(owner)) for owner in owners] != before
    assert [dict(vars(owner)) for owner in owners] == before


@pytest.mark.parametrize("kind", ["legacy", "engine-fsdp"])
def test_nothing_is_changed_by_looking(
    kind: str, verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of()
    held = {name: (id(t), t._version, t.clone()) for name, t in batch.batch.items()}
    backward = torch.Tensor.backward
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    config = actor_config(use_remove_padding=True)
    grads = []
    keep = lambda rank, w: grads.append(  # noqa: E731
        (w.actor_module if kind == "legacy" else w.module).table
    )
    stage_of(kind, "update_actor", tmp_path, monkeypatch, batch=batch, ranks=1, config=config,
             change=keep)  # fmt: skip
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.Tensor.backward is backward
    for name, tensor in batch.batch.items():
        assert tensor._version == held[name][1]
        assert torch.equal(tensor, held[name][2])
    call(kind, "update_actor", config, lambda w: keep(0, w))(batch)
    assert torch.equal(grads[0].grad, grads[1].grad)


def test_an_error_of_ours_is_told_once_and_ends_the_hooks(
    verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def broken(*_: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(verl_workers_legacy, "row_keys", broken)
    for _ in range(2):
        told = stage_of("legacy", "update_actor", tmp_path, monkeypatch)
        assert told.evidence == {}
    errors = [r for r in caplog.records if "DPA904" in r.message]
    assert len(errors) == 2  # once for each attachment


def test_an_error_of_verl_passes_and_leaves_nothing_behind(
    verl: ModuleType, tmp_path: Path
) -> None:
    chosen = Options(run_dir=str(tmp_path), workers=True, hang_timeout_s=0)
    ranks, backward = RankEvidence(chosen, {}), torch.Tensor.backward

    def failing(worker: Any) -> None:
        worker.scaled = lambda loss: loss / 0 if isinstance(loss, int) else _raise()

    with hooked(chosen) as workers:
        ranks.enter("update_actor", looks=True)
        with pytest.raises(RuntimeError, match="out of memory"):
            call("legacy", "update_actor", actor_config(), failing)(batch_of())
        assert workers.record is None
        assert torch.Tensor.backward is backward
    [note] = [json.loads(p.read_text()) for p in (tmp_path / "ranks").glob("note-*.json")]
    assert (note["stage"], note["state"], note["count"]) == ("update_actor", "running", 1)
    ranks.finish()


def _raise() -> None:
    raise RuntimeError("out of memory")


def test_positions_and_masks_are_read() -> None:
    assert restarts_of(torch.tensor([[0, 1, 2, 0, 1]]), [3, 2]) == [True, True]
    assert restarts_of(torch.tensor([[0, 1, 2, 3, 4]]), [3, 2]) == [True, False]
    assert restarts_of(torch.tensor([[[0, 1, 0]], [[5, 5, 5]]]), [2, 1]) == [True, True]
    assert [mask_of(m) for m in (None, torch.ones(1, 4), torch.tensor([[1, 0]]))] == [
        "none", "all ones", "given",
    ]  # fmt: skip


def test_without_the_option_nothing_is_hooked(verl: ModuleType) -> None:
    with attach(level="full") as attached:
        assert attached._workers is None
    with attach(workers=True) as attached:
        assert isinstance(attached._workers, Workers)
    with attach(workers=True, level="off") as attached:
        assert attached._workers is None


def test_codes_are_those_of_our_own_trainer() -> None:
    from dataproto_audit.codes import CODES as KNOWN

    assert set(KNOWN) >= CODES


def test_a_trainer_whose_workers_tell_nothing_is_audited_as_before(
    verl: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(verl)
    with attach(trainer, workers=True, run_dir=str(tmp_path / "run")) as attached:
        trainer.fit()
    assert attached.observed["update_actor.after"] == 1
    assert caplog.text.count("no worker told anything") == 1
    audited = open_run(tmp_path / "run")
    assert [f for f in audited.findings() if f.severity != "info"] == []
    assert audited.summary["switched_off"] == {}
    assert not (tmp_path / "run" / "ranks").exists()


def test_a_driver_whose_exchange_fails_trains_on(
    verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def full(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(Exchange, "ask", full)
    trainer = make(verl)
    with attach(trainer, workers=True, run_dir=str(tmp_path / "run")):
        trainer.fit()
    assert caplog.text.count("DPA904") == 1
    assert len(trainer.trained) == 1


def test_a_bypassed_stage_is_not_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"algorithm": {"rollout_correction": {"bypass_mode": True}}}
    ranks = RankEvidence(Options(run_dir=str(tmp_path), workers=True), config)
    ranks.enter("old_log_prob", looks=True)
    assert ranks.leave("old_log_prob", None) == ({}, {})
    assert caplog.text == ""
