"""Saved files, and the answer as plain data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dataproto_audit.checker.files import check_file, check_history, read_history
from dataproto_audit.codes import UsageError
from dataproto_audit.policy import Policy
from dataproto_audit.protocol import DataProto
from dataproto_audit.testing.healthy import Options, boundaries
from dataproto_audit.testing.recipes import cook

from ._forms import FORMS

EARLY = [{"op": "shift", "f": "token_level_scores", "by": -1}]
KEYS = {"path", "ok", "outcomes", "findings", "not_checkable", "evidence_level", "notes",
        "untold"}  # fmt: skip


def save(path: Path, ops: Any = ()) -> Path:
    batch = FORMS["our DataProto"](cook("T", list(ops)))
    assert isinstance(batch, DataProto)
    batch.save_to_disk(path)
    return path


def history(path: Path, *steps: Any) -> Path:
    path.write_text("\n".join(json.dumps(step) for step in steps) + "\n\n")
    return path


def test_a_saved_batch(tmp_path: Path) -> None:
    [checked] = check_file(save(tmp_path / "step_1.pkl", EARLY))
    assert checked.label.endswith("step_1.pkl")
    assert (checked.evidence_level, checked.report.ok) == ("full", False)
    assert checked.report.findings[0].code == "DPA405"
    said = json.loads(json.dumps(checked.to_dict()))
    assert set(said) == KEYS
    assert (said["path"], said["ok"]) == (checked.label, False)


def _advantages_times(path: Path, *factors: float) -> Path:
    """A step's batch whose first rows' advantages are multiplied."""
    made = boundaries(Options())
    [after] = [b for b in made if (b.stage, b.when) == ("advantage", "after")]
    tensors = after.batch.batch
    tensors["advantages"] = tensors["advantages"].clone()
    tensors["advantages"][: len(factors)] *= torch.tensor(factors)[:, None]
    after.batch.save_to_disk(path)
    return path


def test_advantages_that_nobody_can_recompute_are_named(tmp_path: Path) -> None:
    path = _advantages_times(tmp_path / "other.pkl", *(1.1**i for i in range(16)))
    [checked] = check_file(path)
    assert checked.report.ok
    [text] = checked.to_dict()["untold"]
    assert "--config adv_estimator=grpo" in text
    [checked] = check_file(path, config="adv_estimator=grpo")
    assert (checked.report.ok, checked.untold) == (False, ())
    [checked] = check_file(save(tmp_path / "early.pkl", EARLY))
    assert checked.untold == ()  # the batch says its estimator


def test_the_rule_is_inferred_where_most_rows_tell_it(tmp_path: Path) -> None:
    [checked] = check_file(_advantages_times(tmp_path / "few.pkl", -3.0, 2.0))
    [finding] = [f for f in checked.report.findings if f.check == "advantage_inferred"]
    assert (finding.severity, set(finding.rows) <= {0, 1}) == ("warn", True)
    assert "std_unbiased_eps_1e-6" in finding.evidence["rule, inferred"]
    assert checked.untold == ()


def test_a_folder_has_an_answer_for_each_batch(tmp_path: Path) -> None:
    save(tmp_path / "step_1.pkl")
    save(tmp_path / "step_2.pkl", EARLY)
    answers = {Path(c.label).name: c.report.ok for c in check_file(tmp_path)}
    assert answers == {"step_1.pkl": True, "step_2.pkl": False}


def test_the_batch_as_it_was_earlier(tmp_path: Path) -> None:
    moved = [{"op": "take", "f": "old_log_probs", "idx": [1, 0, 2, 3, 4, 5]}]
    before, after = save(tmp_path / "before.pkl"), save(tmp_path / "after.pkl", moved)
    [checked] = check_file(after, before=before)
    assert checked.evidence_level == "boundary"
    assert "DPA113" in {f.code for f in checked.report}


def test_what_it_had_to_go_by(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pkl")
    steps = history(tmp_path / "h.jsonl", {"step": 0, "loss": 0.1})
    [checked] = check_file(path, history=steps)
    assert checked.evidence_level == "history"
    [checked] = check_file(path, stage="reward")
    assert {o.check for o in checked.report.outcomes} >= {"reward.fields", "reward_placement"}


def test_a_configuration_and_a_policy_are_passed_on(tmp_path: Path) -> None:
    path, config = save(tmp_path / "a.pkl", EARLY), tmp_path / "c.yaml"
    config.write_text("n: 2\n")
    [checked] = check_file(path, config=str(config))
    assert {f.code for f in checked.report if f.severity == "fail"} >= {"DPA401", "DPA405"}
    [checked] = check_file(path, policy=Policy(ignore=("DPA4",)))
    assert checked.report.ok


def test_metrics_alone(tmp_path: Path) -> None:
    path = history(tmp_path / "h.jsonl", {"trained_tokens": 5}, {"trained_tokens": 0})
    checked = check_history(path)
    assert (checked.label, checked.evidence_level) == (str(path), "history")
    assert [(f.code, f.step) for f in checked.report] == [("DPA608", 2)]


@pytest.mark.parametrize(
    "text", ["", "\n", "{", "[1]", '{"a": 1}\n3', '{"a": ' + "9" * 5000 + "}", "[" * 100_000]
)
def test_a_file_that_is_no_history(tmp_path: Path, text: str) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match="no history"):
        read_history(path)


def test_a_history_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("nowhere", "binary", ""):
        with pytest.raises(UsageError, match="DPA857"):
            read_history(tmp_path / name)


def test_before_is_one_batch(tmp_path: Path) -> None:
    for name in ("a.pkl", "b.pkl"):
        save(tmp_path / name)
    with pytest.raises(UsageError, match="holds 2 batches"):
        list(check_file(tmp_path / "a.pkl", before=tmp_path))


def test_what_cannot_be_read_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "cut.pkl").write_bytes(save(tmp_path / "a.pkl").read_bytes()[:100])
    for name in ("cut.pkl", "nowhere.pkl"):
        with pytest.raises(UsageError, match="DPA8"):
            list(check_file(tmp_path / name))


def test_a_broken_file_does_not_hide_the_others_of_its_folder(tmp_path: Path) -> None:
    save(tmp_path / "x.pkl", EARLY)
    (tmp_path / "y.pkl").write_bytes(b"junk")
    answers = check_file(tmp_path)
    assert not next(answers).report.ok
    with pytest.raises(UsageError, match=r"DPA810 .*y.pkl"):
        next(answers)


def test_a_file_without_a_known_field_is_no_clean_batch(tmp_path: Path) -> None:
    other = history(tmp_path / "metrics.jsonl", {"a": 1, "name": "package"})
    for path in (other, tmp_path):
        with pytest.raises(UsageError, match=r"DPA857 .*only a, name.*--history"):
            list(check_file(path))
    save(tmp_path / "a.pkl")
    [checked] = check_file(tmp_path)
    assert (Path(checked.label).name, checked.report.ok) == ("a.pkl", True)


def test_a_batch_without_any_field_is_checked_as_far_as_it_goes(tmp_path: Path) -> None:
    DataProto(meta_info={"metrics": {}}).save_to_disk(tmp_path / "m.pkl")
    [checked] = check_file(tmp_path / "m.pkl")
    assert str(checked.report).startswith("nothing checked")
