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
