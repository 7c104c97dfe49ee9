"""What ranks of the stand-ins tell, and that the usual checks find what is wrong with them."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from . import _workers
from ._workers import actor_config, batch_of, stage_of

STAGES = ("old_log_prob", "ref_log_prob", "update_actor")
KINDS = ("legacy", "engine-fsdp", "megatron", "engine-megatron")
COUNTED = {"DPA701", "DPA702", "DPA703", "DPA705"}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_healthy_ranks_are_quiet(
    kind: str, dynamic: bool, stage: str, verl: ModuleType, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = actor_config(use_dynamic_bsz=dynamic, ppo_mini_batch_size=2)
    told = stage_of(kind, stage, tmp_path, monkeypatch, config=config)
    assert told.findings == {}
    passed = {code for code, outcome in told.outcomes.items() if outcome.kind == "passed"}
    expected = COUNTED | ({"DPA704"} if dynamic else set())
    if kind == "engine-fsdp":
        expected |= {"DPA706"}
    if stage == "update_actor" and kind in ("legacy", "engine-fsdp"):
        expected |= {"DPA501", "DPA502"}
        expected |= {"DPA503"} if kind == "engine-fsdp" else set()
    assert passed == expected
    assert not (tmp_path / "run" / "ranks").exists()


@pytest.mark.parametrize("size", [4, 8])
def test_packed_legacy_rows_are_quiet_with_one_mini_batch_and_with_several(
    size: int, verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = actor_config(use_remove_padding=True, ppo_mini_batch_size=size)
    told = stage_of("legacy", "update_actor", tmp_path, monkeypatch, ranks=1, config=config)
    assert told.findings == {}
    assert told.outcomes["DPA706"].kind == told.outcomes["DPA502"].kind == "passed"
    assert told.evidence["losses"][0]["old"] == ("new" if size == 8 else "stored")
    assert told.tensors["mini_batch"].tolist() == [row // size for row in range(8)]


def test_micro_batches_are_told_by_row(
    verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = stage_of("legacy", "update_actor", tmp_path, monkeypatch)
    first, second = told.evidence["ranks"]
    assert first["indices"] == second["indices"] == [[0, 1], [2, 3]]
    assert (first["first_row"], second["first_row"]) == (0, 4)
    lengths = batch_of().batch["attention_mask"].sum(1)
    assert first["micro_batches"] == [int(lengths[:2].sum()), int(lengths[2:4].sum())]
    torch.testing.assert_close(
        told.tensors["update_log_probs"] * batch_of().batch["response_mask"],
        batch_of().batch["old_log_probs"] * batch_of().batch["response_mask"],
    )


def test_rows_with_the_same_ids_are_no_fault(
    verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of()
    for name in batch.batch.keys():  # noqa: SIM118 - a TensorDict
        batch.batch[name][1] = batch.batch[name][0]
    assert stage_of("legacy", "update_actor", tmp_path, monkeypatch, batch=batch).findings == {}


# -- faults ----------------------------------------------------------------------------------------


def only_rank_1(change: Any) -> Any:
    return lambda rank, worker: change(worker) if rank == 1 else None


def last_dropped(worker: Any) -> None:
    worker.run_of = lambda parts: parts[:-1]


def times_micro_batches(worker: Any) -> None:
    worker.scaled = lambda loss: loss * 2


@pytest.mark.parametrize("kind", ["legacy", "engine-fsdp"])
def test_a_dropped_micro_batch_is_found_in_its_rank(
    kind: str, verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = stage_of(kind, "update_actor", tmp_path, monkeypatch, change=only_rank_1(last_dropped))
    assert told.findings["DPA703"].rows == (6, 7)
    assert told.findings["DPA703"].evidence["rank"] == 1
    assert "DPA705" in told.findings


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", ["old_log_prob", "update_actor"])
def test_unequal_counts_are_found(
    kind: str, stage: str, verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-ins agree on nothing, as verl 0.7.1's legacy actor does not."""
    batch = batch_of()
    batch.batch["attention_mask"][4:, 5:] = 0  # short rows on rank 1
    batch.batch["response_mask"][4:, 1:] = 0
    config = actor_config(use_dynamic_bsz=True)
    told = stage_of(kind, stage, tmp_path, monkeypatch, batch=batch, config=config)
    assert set(told.findings) == {"DPA705"}
    assert "micro-batches per rank" in told.findings["DPA705"].actual


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_that_was_not_kept_is_found(
    kind: str, verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {
        "legacy": "verl.workers.actor.dp_actor", "megatron": "verl.workers.actor.megatron_actor",
        "engine-fsdp": "verl.workers.engine.fsdp.transformer_impl",
        "engine-megatron": "verl.workers.engine.fsdp.transformer_impl",
    }  # fmt: skip
    module = importlib.import_module(names[kind])
    cut = module.cut
    monkeypatch.setattr(module, "cut", lambda b, rows, tokens: cut(b, rows=rows, tokens=tokens * 2))
    config = actor_config(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=12)
    told = stage_of(kind, "update_actor", tmp_path, monkeypatch, config=config)
    assert "at most 12 tokens" in told.findings["DPA704"].expected
    assert set(told.findings) <= {"DPA704", "DPA705"}


@pytest.mark.parametrize("kind", ["legacy", "engine-fsdp"])
def test_a_loss_that_is_too_large_is_found(
    kind: str, verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "engine-fsdp":
        loss = _workers.engine_loss
        monkeypatch.setattr(_workers, "engine_loss", lambda out, micro: loss(out, micro) * 2)
        change = None
    else:
        change = lambda rank, worker: times_micro_batches(worker)  # noqa: E731
    told = stage_of(kind, "update_actor", tmp_path, monkeypatch, ranks=1, change=change)
    assert set(told.findings) == {"DPA502"}
    assert told.findings["DPA502"].evidence["factor"] == pytest.approx(2.0, rel=1e-4)


def not_restarted(positions: Any) -> Any:
    return torch.arange(positions.shape[-1]).expand_as(positions)


@pytest.mark.parametrize("kind", ["legacy", "engine-fsdp"])
def test_packed_rows_that_go_on_counting_are_found(
    kind: str, verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(rank: int, worker: Any) -> None:
        if kind == "legacy":
            worker.actor_module.register_forward_pre_hook(
                lambda m, a, k: (a, {**k, "position_ids": not_restarted(k["position_ids"])}),
                with_kwargs=True,
            )

    if kind == "engine-fsdp":
        module = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
        inputs = module.FSDPEngineWithLMHead.prepare_model_inputs

        def counted(self: Any, micro_batch: Any) -> Any:
            found, more = inputs(self, micro_batch)
            return {**found, "position_ids": not_restarted(found["position_ids"])}, more

        monkeypatch.setattr(module.FSDPEngineWithLMHead, "prepare_model_inputs", counted)
    config = actor_config(use_remove_padding=True)
    told = stage_of(kind, "update_actor", tmp_path, monkeypatch, config=config, change=change)
    assert told.findings["DPA706"].causes[0] == "packed_rows_leak"
    assert told.findings["DPA706"].rows == (1, 3, 5, 7)
    assert told.outcomes["DPA501"].kind == "failed"


def test_shifted_old_log_probs_show_in_the_first_mini_batch(
    verl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of()
    batch.batch["old_log_probs"] = batch.batch["old_log_probs"].roll(1, 1)
    told = stage_of("engine-fsdp", "update_actor", tmp_path, monkeypatch, batch=batch)
    assert told.outcomes["DPA501"].kind == "failed"
    assert told.outcomes["DPA502"].kind == "passed"  # the loss is right for what it was given
