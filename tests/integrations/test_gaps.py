"""What an attached run left out stays left out when its trace is replayed."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dataproto_audit import attach
from dataproto_audit.dump.trace import Trace
from dataproto_audit.replay.bisect import bisect
from dataproto_audit.replay.loading import recordings
from dataproto_audit.replay.recording import audit
from dataproto_audit.replay.replay import replay

from .conftest import make


@pytest.mark.parametrize(
    "stages", ["advantage", "rollout,update_actor", "old_log_prob,advantage", "update_actor"]
)
def test_the_trace_of_a_healthy_run_accuses_nobody(verl: ModuleType, stages: str) -> None:
    trainer = make(verl, steps=2)
    with attach(trainer, run_dir="run", stages=stages, trace="all"):
        trainer.fit()
    assert [str(f) for one in replay("run") for f in one.report.findings] == []
    assert bisect("run").verdict != "faulty"
    gaps = [b.gap for b in Trace("run").step(1).boundaries]
    assert gaps[0] is False
    assert any(gaps)
    assert [one for recording in recordings("run") for one in audit(recording)] == []


def test_a_fault_inside_a_chosen_stage_is_still_found(verl: ModuleType) -> None:
    trainer = make(verl)
    update = trainer._update_actor

    def writes(batch: Any) -> Any:
        batch.batch["old_log_probs"] += 1.0
        return update(batch)

    trainer._update_actor = writes
    with attach(trainer, run_dir="run", stages="update_actor", trace="all", on_fail="record"):
        trainer.fit()
    assert {f.field for one in replay("run") for f in one.report.findings} >= {"old_log_probs"}


def test_nothing_left_out_is_no_gap_and_older_traces_have_none(verl: ModuleType) -> None:
    trainer = make(verl)
    with attach(trainer, run_dir="run", trace="all"):
        trainer.fit()
    step = Trace("run").step(1)
    assert not any(boundary.gap for boundary in step.boundaries)
    for path in Path("run/trace").glob("*/*/boundary.json"):
        assert "gap" not in json.loads(path.read_text(encoding="utf-8"))
