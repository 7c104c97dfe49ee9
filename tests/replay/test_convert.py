"""Batches in other forms hold the same; what a form cannot hold is said."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from dataproto_audit._protocol.safe.errors import Opaque
from dataproto_audit.checker.files import check_file
from dataproto_audit.codes import UsageError
from dataproto_audit.dump.readers import read_batches
from dataproto_audit.dump.readers.saved import Saved, parts
from dataproto_audit.dump.trace import Trace, write_step
from dataproto_audit.protocol import DataProto
from dataproto_audit.replay.bisect import bisect
from dataproto_audit.replay.convert import convert
from dataproto_audit.replay.loading import recordings
from dataproto_audit.replay.replay import replay
from dataproto_audit.replay.scorers import Scorers

from ..dump.readers.test_malicious import COMMAND, archive, name, text


@pytest.fixture(scope="module")
def samples():
    return Path(__file__).parents[1] / "data" / "samples"


def same(one, other):
    assert one.tensors.keys() == other.tensors.keys()
    for field, tensor in one.tensors.items():
        for a, b in zip(tensor.unbind(), other.tensors[field].unbind(), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), field
    for field, array in one.arrays.items():
        assert str(array.tolist()) == str(other.arrays[field].tolist()), field


@pytest.mark.parametrize(
    "path",
    [
        "verl-0.7.1/grpo_n4_engine_dyn/compute_advantage.out.pkl",
        "verl-0.9.1/files_torch/jagged.pkl",
        "slime/healthy/train_data/0.pt",
        "open_instruct/healthy/run1_rollouts_000000.jsonl",
    ],
)
@pytest.mark.parametrize("target", ["out.pkl", "out.safetensors", "out"])
def test_every_form_holds_the_same(path, target, samples, tmp_path):
    answer = convert(samples / path, tmp_path / target)
    assert answer["batches"] == 1
    [before], [after] = read_batches(samples / path), read_batches(tmp_path / target)
    same(before, after)
    assert answer["form"] == after.kind
    if target.endswith(".pkl"):
        assert len(DataProto.load_from_disk(tmp_path / target)) == before.rows


def test_boundaries_keep_their_stage_in_a_trace(samples, tmp_path):
    convert(samples / "verl-0.7.1/gae_legacy", tmp_path / "t")
    trace = Trace(tmp_path / "t")
    assert trace.steps == [1, 2] or trace.steps == [1]
    stages = [b.stage for b in trace.step(1).boundaries]
    assert "advantage" in stages
    assert "rollout" in stages


@pytest.mark.parametrize(
    "run",
    ["gae_legacy", "grpo_kl_in_reward", "grpo_n4_engine_dyn", "inter_legacy", "padeos", "rpp"],
)
def test_files_of_a_healthy_step_are_not_held_against_each_other(run, samples, tmp_path):
    convert(samples / "verl-0.7.1" / run, tmp_path / "t")
    replayed = list(replay(tmp_path / "t"))
    assert [str(f) for r in replayed for f in r.report.findings if f.severity == "fail"] == []
    told = bisect(tmp_path / "t", scorers=Scorers()).to_dict()
    assert told["stage"] is None
    assert told["later_faults"] == []


def test_a_fault_in_one_file_of_a_step_is_found_there(samples, tmp_path):
    convert(samples / "verl-0.7.1-wrong/rpp_multiturn_returns_lost", tmp_path / "t")
    told = bisect(tmp_path / "t", scorers=Scorers()).to_dict()
    assert (told["stage"], told["field"]) == ("advantage", "returns")
    assert told["rows"] == [1, 2, 3, 4, 5, 6, 7]
    assert told["later_faults"] == []


def test_one_of_several(samples, tmp_path):
    path = samples / "openrlhf/healthy/experiences.pt"
    with pytest.raises(UsageError, match="holds 4 batches and a dataproto file one"):
        convert(path, tmp_path / "x.pkl")
    assert convert(path, tmp_path / "x.pkl", place=2)["batches"] == 1
    assert convert(path, tmp_path / "all")["batches"] == 4
    with pytest.raises(UsageError, match="--place 4"):
        convert(path, tmp_path / "y.pkl", place=4)


def test_what_is_refused(samples, tmp_path):
    path = samples / "slime/healthy/train_data/0.pt"
    (tmp_path / "there.pkl").write_text("mine")
    with pytest.raises(UsageError, match="there already"):
        convert(path, tmp_path / "there.pkl")
    with pytest.raises(UsageError, match="no such form is written"):
        convert(path, tmp_path / "x.csv")
    assert (tmp_path / "there.pkl").read_text() == "mine"


def test_objects_that_nobody_knows_are_left_out_of_a_pickle(tmp_path):
    evil = name("subprocess", "Popen") + b"(" + text(COMMAND) + b"t\x81"
    torch.save({"old_log_probs": torch.zeros(2, 3)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as file:
        members = {n.partition("/")[2]: file.read(n) for n in file.namelist()}
    body = members.pop("data.pkl")[2:-1]
    members.pop("byteorder")
    (tmp_path / "e.pt").write_bytes(archive(body + text("handle") + evil + b"s", **members))
    answer = convert(tmp_path / "e.pt", tmp_path / "x.pkl")
    assert "meta_info.handle" in answer["left_out"]
    [saved] = read_batches(tmp_path / "x.pkl")
    assert "handle" not in saved.meta
    assert np.array_equal(saved.tensors["old_log_probs"], torch.zeros(2, 3))
    assert "subprocess.Popen" in convert(tmp_path / "e.pt", tmp_path / "x.safetensors")["left_out"]


FINDINGS = ("code", "severity", "stage", "field", "rows")


def told(report):
    return {tuple(getattr(finding, name) for name in FINDINGS) for finding in report.findings}


@pytest.mark.parametrize(
    "path",
    [
        "verl-0.9.1/files_torch/jagged.pkl",
        "slime/healthy/train_data/0.pt",
        "slime/fault_log_probs_shifted/train_data/0.pt",
        "openrlhf/healthy/experiences.pt",
        "trl/healthy/completions/completions_00002.parquet",
    ],
)
def test_a_replay_of_the_trace_says_what_check_says_of_the_file(path, samples, tmp_path):
    checked = set().union(*(told(one.report) for one in check_file(samples / path)))
    convert(samples / path, tmp_path / "t")
    assert set().union(*(told(step.report) for step in replay(tmp_path / "t"))) == checked


def test_a_batch_is_recorded_at_the_last_stage_that_it_has_passed(tmp_path):
    tensors = {"old_log_probs": torch.zeros(2, 3), "response_mask": torch.ones(2, 3).long(),
               "responses": torch.zeros(2, 3).long()}  # fmt: skip
    DataProto.from_dict(tensors, meta_info={"global_steps": 7}).save_to_disk(tmp_path / "x.pkl")
    convert(tmp_path / "x.pkl", tmp_path / "t")
    trace = Trace(tmp_path / "t")
    assert trace.steps == [7]
    [boundary] = trace.step(7).boundaries
    assert (boundary.stage, boundary.when) == ("old_log_prob", "after")
    [recording] = recordings(tmp_path / "t")
    assert recording.lone


def test_what_nobody_knows_keeps_its_name_through_a_trace(tmp_path):
    batch = parts({"values": torch.zeros(1, 2)}, {}, {"handle": Opaque("a.b.C")})
    saved = Saved(tmp_path / "x", "", "dataproto", batch)
    write_step(tmp_path / "t", 1, [("values", saved.batch, {})])
    [again] = read_batches(tmp_path / "t")
    assert again.meta["handle"] == Opaque("a.b.C")
    answer = convert(tmp_path / "t", tmp_path / "y.pkl")
    assert "meta_info.handle" in answer["left_out"]
