"""What a boundary says of itself is refused where no recorder wrote it."""

import json

import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.dump.trace import Trace, write_step
from dataproto_audit.dump.trace_read import intact


@pytest.fixture
def recorded(tmp_path):
    batch = {"batch": {"values": torch.rand(4, 6), "twin": torch.ones(4, 2)},
             "non_tensor_batch": {}, "meta_info": {}}  # fmt: skip
    write_step(
        tmp_path / "t", 1, [("rollout", batch, {}), ("reward", batch, {})], settings={"n": 4}
    )
    return tmp_path / "t"


def opened(trace):
    for boundary in Trace(trace).step(1).boundaries:
        intact(boundary, boundary.view())
        assert len(boundary.row_keys) == 4


def edited(trace, change, name="01_reward"):
    path = trace / "step_000001" / name / "boundary.json"
    head = json.loads(path.read_text())
    change(head)
    path.write_text(json.dumps(head))


def test_what_was_recorded_opens(recorded):
    opened(recorded)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["fields"][0].update(shape=[10**18, 10**18]),
        lambda h: h["fields"][0].update(shape=[-1, 6]),
        lambda h: h["fields"][0].update(shape=[4, 5]),
        lambda h: h["fields"][0].update(shape=[4.0, 6]),
        lambda h: h["fields"][0].update(name=["a"]),
        lambda h: h["fields"][0].update(orders=["00_rollout"] * 100_000),
        lambda h: h["fields"][0].update(at="../00_rollout"),
        lambda h: h["fields"].append(h["fields"][0]),
        lambda h: h.update(row_keys=None, row_keys_at="../x"),
        lambda h: h.update(row_keys=None, row_keys_at=["00_rollout"]),
        lambda h: h["settings"].update(n=10**400),
        lambda h: h["settings"].update(n=[1, {"a": -(10**400)}]),
        lambda h: h.update(stage="nothing_known"),
        lambda h: h.update(stage="../reward"),
        lambda h: h.update(when="later"),
        lambda h: h.update(part="left"),
        lambda h: h.update(kind="step"),
        lambda h: h.update(rows=3),
        lambda h: h.update(rows=10**9),
        lambda h: h.update(prompt=-3),
        lambda h: h.update(prompt="x"),
        lambda h: h.update(response=[1]),
        lambda h: h.update(row_keys=["a"]),
        lambda h: h.update(rows=3, row_keys=["a", "b", "c"], row_keys_at=None),
    ],
)
def test_every_name_size_and_reference_is_checked(recorded, change):
    edited(recorded, change)
    with pytest.raises(UsageError) as error:
        opened(recorded)
    assert error.value.code == "DPA820"
    assert len(str(error.value)) < 700


def test_a_stage_of_a_users_own_is_read(tmp_path):
    batch = {"batch": {"values": torch.rand(4, 6)}, "non_tensor_batch": {}, "meta_info": {}}
    write_step(tmp_path / "t", 1, [("my/own stage", batch, {"part": "2"})], settings={})
    assert [b.stage for b in Trace(tmp_path / "t").step(1).boundaries] == ["my/own stage"]


@pytest.mark.parametrize("claim", [{"step": 7}, {"step": "1"}, {"ended": 5}, {"ended": "well"}])
def test_what_a_whole_step_says_of_itself_is_checked(recorded, claim):
    path = recorded / "step_000001" / "step.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | claim))
    with pytest.raises(UsageError, match=r"DPA820.*it is no step"):
        opened(recorded)


def test_row_keys_at_another_boundary_are_as_many_as_rows(recorded):
    edited(recorded, lambda h: h.update(rows=3, row_keys=["a", "b", "c"]), name="00_rollout")
    path = recorded / "step_000001" / "00_rollout" / "boundary.json"
    head = json.loads(path.read_text())
    head["fields"][-1]["shape"] = [3, 2]
    path.write_text(json.dumps(head))
    with pytest.raises(UsageError, match=r"DPA820.*its row keys lie in '00_rollout', which has 3"):
        _ = Trace(recorded).step(1)["01_reward"].row_keys


def test_rows_of_fields_that_cannot_be_kept_are_believed(tmp_path):
    """Most fields are of a kind that no trace keeps, and of another number of rows."""
    odd = torch.ones(5, 2, dtype=torch.complex64)
    batch = {"batch": {"a": odd, "b": odd, "values": torch.rand(4, 6)},
             "non_tensor_batch": {}, "meta_info": {}}  # fmt: skip
    write_step(tmp_path / "t", 1, [("rollout", batch, {})], settings={})
    [boundary] = Trace(tmp_path / "t").step(1).boundaries
    assert boundary.rows == 5
    assert list(boundary.fields) == ["values"]
