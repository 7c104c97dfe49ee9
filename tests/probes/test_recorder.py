"""What a step leaves in the tables, and what happens when they cannot be written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dataproto_audit as da
from dataproto_audit.auditor import Auditor
from dataproto_audit.codes import RunError
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.dump.tables import TableWriter
from dataproto_audit.testing.healthy import Options, boundaries

OPTIONS = Options(prompts=6, n=4, entropy=True)


def audited(auditor: Auditor, steps: int = 1, change: Any = None) -> Auditor:
    for step in range(1, steps + 1):
        auditor.begin_step(step)
        for b in boundaries(OPTIONS):
            if change is not None:
                change(b)
            auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
        auditor.end_step({"actor/lr": 1e-6, "timing_s/step": np.float32(2), "text": "no number",
                          "tensor": torch.tensor(3.0)})  # fmt: skip
    return auditor


def recorded(folder: Path, change: Any = None, steps: int = 1) -> tuple[Any, Auditor]:
    with TableWriter(folder / "tables") as tables:
        auditor = Auditor(OPTIONS.settings(), tables=tables, on_fail="record")
        audited(auditor, steps, change)
    return da.open_run(folder), auditor


def test_every_table_of_a_healthy_step(tmp_path: Path) -> None:
    run, auditor = recorded(tmp_path, steps=2)
    rows = run.table("rows")
    assert len(rows) == 2 * 24
    assert rows.row_key.nunique() == 24
    assert (rows["flags"] == "").all()
    assert rows.trained_tokens.equals(rows.response_length)
    assert rows.rollout_old_gap_max.between(0, 1e-4).all()
    groups = run.table("groups")
    assert len(groups) == 2 * 6
    assert (groups.rows == 4).all()
    assert len(run.table("outcomes")) == sum(auditor.outcomes.values())
    assert len(run.table("findings")) == 0
    assert set(run.table("ranks").stage) == {"old_log_prob", "ref_log_prob", "update_actor"}
    loss = run.table("loss")
    assert set(loss.term) == {"pg", "kl", "entropy", "total"}
    assert (loss.difference < 1e-5).all()
    steps = run.table("steps").set_index(["step", "metric"]).value
    assert steps[1, "timing_s/step"] == 2.0
    assert steps[2, "tensor"] == 3.0
    assert "text" not in steps.index.get_level_values("metric")
    assert set(run.table("tokens").row) == {0, 1}


def test_fields_are_written_where_they_are_new(tmp_path: Path) -> None:
    run, auditor = recorded(tmp_path)
    fields = run.table("fields")
    new = fields.groupby("stage").field.apply(set)
    assert new["old_log_prob"] == {"old_log_probs", "entropys"}
    assert "balance" not in new.index
    mask = fields[(fields.field == "response_mask") & (fields.stage == "rollout")].iloc[0]
    assert (mask["dtype"], mask["shape"], mask["max"]) == ("i64", "[24,4]", 1.0)
    assert 0 < mask.mask_coverage <= 1
    for stage, seen in auditor.recorder.evolution.items():
        declared = STAGES[stage]
        assert set(seen) <= {*declared.adds, *declared.may_add, *declared.changes}, stage


def test_rows_named_in_a_finding_are_flagged_with_all_their_tokens(tmp_path: Path) -> None:
    def change(b: Any) -> None:
        if (b.stage, b.when) == ("reward", "after"):
            scores = b.batch.batch["token_level_scores"].clone()
            scores[7] = 0.5
            b.batch.batch["token_level_scores"] = scores

    run, auditor = recorded(tmp_path, change)
    [row] = run.table("rows").query("flags != ''").row
    assert row == 7
    flags = run.table("rows").set_index("row")["flags"][7].split()
    assert "DPA405" in flags
    tokens = run.table("tokens").query("row == 7")
    assert set(tokens.flag) == {min(flags)}
    assert auditor.findings[0].rows == (7,)


def test_a_batch_whose_masks_are_broken_still_leaves_its_outcomes(tmp_path: Path) -> None:
    def change(b: Any) -> None:
        fields = b.batch.batch
        if b.when == "after" and fields is not None and b.stage != "prompts":
            fields["response_mask"] = fields["response_mask"].float() * 2

    run, auditor = recorded_only_until_reward(tmp_path, change)
    assert len(run.table("rows")) == 0
    assert len(run.table("outcomes")) == sum(auditor.outcomes.values())
    assert not [f for f in auditor.findings if f.code.startswith("DPA9")]


def recorded_only_until_reward(folder: Path, change: Any) -> tuple[Any, Auditor]:
    with TableWriter(folder / "tables") as tables:
        auditor = Auditor(OPTIONS.settings(), tables=tables, on_fail="record")
        auditor.begin_step(1)
        for b in boundaries(OPTIONS):
            change(b)
            auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
            if (b.stage, b.when) == ("balance", "after"):
                break
        auditor.end_step()
    return da.open_run(folder), auditor


class Refusing(TableWriter):
    """A disk that is full."""

    def flush_step(self, step: int) -> None:
        raise RunError("DPA802", "the disk is full.")


class Faulty(TableWriter):
    """A fault of our own in the writer."""

    def append(self, table: str, columns: Any) -> None:
        raise ZeroDivisionError("a fault")


@pytest.mark.parametrize("kind", [Refusing, Faulty])
def test_training_goes_on_when_tables_cannot_be_written(kind: Any, tmp_path: Path) -> None:
    tables = kind(tmp_path / "tables")
    auditor = audited(Auditor(OPTIONS.settings(), tables=tables), steps=3)
    tables.abandon()
    [finding] = auditor.findings
    assert (finding.code, finding.severity) == ("DPA903", "warn")
    assert auditor.outcomes["passed"] > 200


def test_after_a_fault_what_was_collected_is_kept(tmp_path: Path) -> None:
    with Faulty(tmp_path / "tables") as tables:
        audited(Auditor(OPTIONS.settings(), tables=tables))
    assert len(da.open_run(tmp_path).table("outcomes")) > 100


def test_without_a_step_the_tables_are_those_of_step_0(tmp_path: Path) -> None:
    with TableWriter(tmp_path / "tables") as tables:
        auditor = Auditor(OPTIONS.settings(), tables=tables, on_fail="record")
        for b in boundaries(OPTIONS):
            auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
        auditor.end_step()
    assert set(da.open_run(tmp_path).table("outcomes").step) == {0}
