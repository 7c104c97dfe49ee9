"""What a reader can tell of a file itself: samples that are there twice, groups that differ."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataproto_audit.checker.files import check_file, evidence_level
from dataproto_audit.dump.readers import read_batches
from dataproto_audit.dump.readers.consistent import groups_of, samples_of
from dataproto_audit.dump.readers.saved import Saved, parts


def codes(path):
    return {(f.code, f.stage, f.field) for c in check_file(path) for f in c.report
            if f.severity != "info"}  # fmt: skip


def test_a_task_that_was_written_twice(samples):
    wrong = samples / "areal/fault_task_written_twice/rollout/3/1.jsonl"
    assert codes(wrong) == {("DPA105", "rollout", "sample_idx")}
    assert samples_of(read_batches(wrong)[0]).repeated == (4, 5, 6, 7)
    for healthy in (samples / "areal/healthy").rglob("*.jsonl"):
        assert codes(healthy) == set()


@pytest.mark.parametrize("name", ["completions_00002", "completions_00004"])
def test_advantages_of_another_group(name, samples):
    wrong = samples / f"trl/fault_adv_not_from_rewards/completions/{name}.parquet"
    assert codes(wrong) == {("DPA408", "advantage", "advantage")}
    healthy = samples / f"trl/healthy/completions/{name}.parquet"
    assert codes(healthy) == set()
    told = groups_of(read_batches(healthy)[0])
    assert told.total
    assert not told.odd


def completions(path, **changed):
    rows = {
        "step": [1] * 8, "prompt": ["a"] * 4 + ["b"] * 4, "completion": ["x"] * 8,
        "right": [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        "advantage": [-0.9, -0.9, 0.9, 0.9, 0.0, 0.0, 0.0, 0.0], **changed,
    }  # fmt: skip
    pq.write_table(pa.table(rows), path)
    return path


def test_healthy_forms_of_completions_stay_quiet(tmp_path):
    one = {"prompt": ["a"] * 8}  # one prompt: it may be two groups
    halves = [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    for changed in ({}, one, {"right": halves, "advantage": [0.0] * 8},
                    {"other": [0.1, 0.2, 0.1, 0.2, None, 0.0, 0.0, 0.0],
                     "advantage": [-1.0, -0.8, 0.8, 1.0, 0.0, 0.0, 0.0, 0.0]}):  # fmt: skip
        assert codes(completions(tmp_path / "completions_00001.parquet", **changed)) == set()


def test_dead_groups_with_advantages(tmp_path):
    path = completions(tmp_path / "completions_00001.parquet",
                       advantage=[-0.9, -0.9, 0.9, 0.9, 0.5, 0.5, -0.5, -0.5])  # fmt: skip
    [checked] = check_file(path)
    [finding] = [f for f in checked.report if f.code == "DPA408"]
    assert finding.rows == (4, 5, 6, 7)


def test_a_line_of_open_instruct_that_is_there_twice(samples, tmp_path):
    [path] = (samples / "open_instruct/healthy").glob("*rollouts*")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, [*rows, rows[0]])))
    assert ("DPA105", "rollout", "sample_idx") in codes(tmp_path / "x.jsonl")
    assert codes(path) == set()


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("areal/healthy/rollout/3/0.jsonl", "text"),
        ("trl/healthy/completions/completions_00002.parquet", "text"),
        ("slime/healthy/train_data/0.pt", "full"),
    ],
)
def test_what_a_file_lets_be_checked_is_stated(name, level, samples):
    [saved] = read_batches(samples / name)
    assert evidence_level(saved) == level
    [checked] = check_file(samples / name)
    assert checked.evidence_level == level
    assert checked.report.not_checkable


def test_ids_alone_are_a_level_of_their_own(tmp_path):
    row = {"prompt_tokens": [1, 2], "response_tokens": [3], "reward": 1.0, "sample_idx": 0}
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    [checked] = check_file(tmp_path / "x.jsonl")
    assert checked.evidence_level == "ids"


def scored(framework, uid, score, advantage, **meta):
    columns = {"uid": uid, "score": score, "advantage": advantage}
    saved = Saved(Path("x"), "", "jsonl", parts({}, {}, meta), framework=framework)
    return groups_of(saved.with_columns(columns))


def test_groups_need_not_be_contiguous():
    rows = (list("aaba"), [1.0, 1.0, 0.0, 0.0], [0.58, 0.58, 0.0, -1.15])
    assert scored("open_instruct", *rows).rows == ()
    assert scored("open_instruct", *rows[:2], [0.58, -1.15, 0.0, 0.58]).rows == (0, 1, 3)


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "gae"])
def test_rules_that_do_not_compare_with_the_group_are_not_judged(estimator):
    rows = (list("aabb"), [1.0, 1.0, 0.0, 0.0], [0.9, 0.9, -0.9, -0.9])
    assert scored("verl", *rows, adv_estimator=estimator) is None
    assert scored("verl", *rows) is None
    assert scored("verl", *rows, adv_estimator="grpo").odd == 2
