"""A replay says what the live audit said; recomputation agrees with healthy steps."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dataproto_audit.auditor import Auditor
from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.dump.trace import Trace, TraceWriter
from dataproto_audit.replay.answers import Wanted, Work, answers, summed, work_of
from dataproto_audit.replay.jobs import attempted, replayed
from dataproto_audit.replay.recompute import recomputed
from dataproto_audit.replay.replay import Seen, replay, settings_of
from dataproto_audit.replay.scorers import Scorers
from dataproto_audit.testing.bases import BASES
from dataproto_audit.testing.faults import CATALOGUE
from dataproto_audit.testing.healthy import boundaries
from dataproto_audit.testing.options import Options
from dataproto_audit.testing.traces import toy_scorers, write_simulated


def said(report):
    findings = [(f.code, f.stage, f.field, f.rows, f.row_keys) for f in report.findings]
    return [(o.check, o.kind, o.reason) for o in report.outcomes], findings


@pytest.mark.parametrize("name", ["plain", "tools", "recorded", "half"])
@pytest.mark.parametrize("fault", [None, "uids_one_row_late", "old_one_column_early"])
def test_a_replay_says_what_the_run_said(tmp_path: Path, name: str, fault: str | None) -> None:
    options = replace(BASES[name], one_token=3)
    live = []
    with TraceWriter(tmp_path / "trace", retention="all", settings=asdict(options.settings())) as t:
        auditor = Auditor(options.settings(), on_fail="record", trace=t)
        for step in (1, 2):
            auditor.begin_step(step)
            metrics = {}
            for b in boundaries(replace(options, step=step)):
                if fault and (b.stage, b.when) == (CATALOGUE[fault].stage, "after"):
                    from dataproto_audit.testing.faults.scene import Scene

                    CATALOGUE[fault].apply(Scene(None, b, 0))
                live.append(
                    said(auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence))
                )
                metrics |= b.evidence.get("metrics", {})
            live.append(said(auditor.end_step(metrics)))
    again = []
    for step in replay(tmp_path):
        again += [said(one.report) for one in step.seen]
        again.append(said(step.ended))
    assert again == live
    kept = Trace(tmp_path).step(1).boundaries[-3]
    assert kept.outcomes
    assert settings_of(kept.settings) == options.settings()


@pytest.mark.parametrize("name", ["plain", "critic_tools", "kl_reward", "corrected", "passk"])
def test_a_healthy_step_agrees_with_its_recomputation(tmp_path: Path, name: str) -> None:
    made = write_simulated(tmp_path, name)
    [step] = replay(tmp_path)
    scorers = Scorers(**toy_scorers(made.options))
    found = {c.field: c.verdict for c in recomputed(step, scorers)}
    assert "differs" not in found.values()
    assert found["old_log_probs"] == found["advantages"] == found["pg_loss"] == "agrees"
    assert scorers.calls == 2


def test_a_changed_cell_is_found_in_its_row_and_column(tmp_path: Path) -> None:
    made = write_simulated(tmp_path, "critic", [CATALOGUE["lambda_of_another_configuration"]])
    [step] = replay(tmp_path)
    truth = made.truths["lambda_of_another_configuration"]
    assert truth is not None
    differ = {c.field: c for c in recomputed(step) if c.verdict == "differs"}
    assert set(differ) <= {"advantages", "returns"}
    assert set(differ["advantages"].rows) == set(truth.rows)


def test_without_a_model_it_says_what_to_pass(tmp_path: Path) -> None:
    write_simulated(tmp_path, "plain")
    [step] = replay(tmp_path)
    missing = {c.field: c.missing for c in recomputed(step) if c.verdict == "unknown"}
    assert "--model DIR" in missing["old_log_probs"]
    assert "--ref-model DIR" in missing["ref_log_prob"]


def test_two_runs_in_one_step_are_refused(tmp_path: Path) -> None:
    write_simulated(tmp_path, Options())
    head = tmp_path / "trace/step_000001/08_reward/boundary.json"
    told = json.loads(head.read_text())
    told["config_hash"] = "0" * 16
    head.write_text(json.dumps(told))
    with pytest.raises(UsageError, match="two runs"):
        list(replay(tmp_path))


def test_a_field_that_was_changed_since_is_refused(tmp_path: Path) -> None:
    write_simulated(tmp_path, Options())
    head = tmp_path / "trace/step_000001/08_reward/boundary.json"
    told = json.loads(head.read_text())
    [entry] = [e for e in told["fields"] if e["name"] == "token_level_scores"]
    entry["fingerprint"] = "0" * 16
    head.write_text(json.dumps(told))
    with pytest.raises(UsageError, match="not what was recorded"):
        list(replay(tmp_path))


def test_answers_of_a_trace_and_of_a_file(tmp_path: Path) -> None:
    write_simulated(tmp_path, "plain", steps=3)
    work = work_of(tmp_path, parts=2)
    assert [piece.steps for piece in work] == [(2, 3), (4,)]
    made = list(replayed(work, Wanted(recompute=True)))
    assert [answer["step"] for _, answer in made] == [2, 3, 4]
    whole = summed(str(tmp_path), [answer for _, answer in made])
    assert whole["ok"]
    assert whole["steps"] == 3
    after = Trace(tmp_path).step(2).find("advantage")
    assert after is not None
    view = after.view()
    file = tmp_path / "batch.pkl"
    from dataproto_audit.protocol import DataProto

    DataProto.from_dict(view.tensors, dict(view.arrays), {"adv_estimator": "grpo"}).save_to_disk(
        file
    )
    [answer] = answers(work_of(file)[0], Wanted(recompute=True))
    found = {c["field"]: c["verdict"] for c in answer["recomputed"]}
    assert found["advantages"] == "agrees"
    with pytest.raises(UsageError, match="no trace"):
        work_of(file, [1])


def test_a_scorer_that_fails_is_missing_knowledge(tmp_path: Path) -> None:
    write_simulated(tmp_path, "plain")
    [step] = replay(tmp_path)

    def broken(view, temperature):
        raise IndexError("index out of range in self")

    found = {c.field: c for c in recomputed(step, Scorers(policy=broken, reference=broken))}
    assert found["old_log_probs"].verdict == "unknown"
    assert "cannot score" in found["old_log_probs"].missing
    assert np.isfinite(found["advantages"].evidence["max |difference|"])


def test_a_trace_that_cannot_be_written_costs_the_trace_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args, **kwargs):
        raise RunError("DPA802", "the disk is full.", "Free space.")

    monkeypatch.setattr(TraceWriter, "write_boundary", refuse)
    options = Options()
    auditor = Auditor(options.settings(), trace=TraceWriter(tmp_path / "t"))
    auditor.begin_step(1)
    for b in boundaries(options):
        auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
    assert auditor.end_step().ok
    assert [(f.code, f.severity) for f in auditor.findings] == [("DPA905", "warn")]


def test_a_rollout_without_a_mask_and_a_stage_of_the_user(tmp_path: Path) -> None:
    made = write_simulated(tmp_path, "plain")
    [step] = replay(tmp_path)
    rollout = step.after("rollout")
    assert rollout is not None
    del rollout.view.tensors["response_mask"]
    found = {c.field: c for c in recomputed(step, Scorers(**toy_scorers(made.options)))}
    if "rollout_log_probs" in rollout.view.tensors:
        assert "record response_mask" in found["rollout_log_probs"].missing
    for part, stage in (("", "my_filter"), ("left", "rollout")):
        beside = SimpleNamespace(stage=stage, when="after", part=part, gap=False)
        step.seen.insert(0, Seen(beside, rollout.view, rollout.report))
        assert step.before("prompts") is None
        step.seen.pop(0)


def test_several_jobs_need_a_ray_that_runs():
    work = [Work("a"), Work("b")]
    with pytest.raises(UsageError, match=r"DPA851 .*Ray that runs"):
        list(attempted(work, Wanted(), jobs=2))
