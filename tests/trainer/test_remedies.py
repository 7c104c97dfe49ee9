"""A failed run is told to go on from a checkpoint only where there is one."""

import pytest
import torch

from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.trainer.backends import checkpoint
from dataproto_audit.trainer.remedies import RESUME, real_remedies


def told(folder, error, save_freq=-1):
    with pytest.raises(type(error)) as caught, real_remedies(folder, save_freq=save_freq):
        raise error
    return caught.value


def test_without_checkpoints_there_is_nothing_to_resume(tmp_path):
    error = told(tmp_path / "checkpoints", RunError("DPA865", "the engine died.", RESUME))
    assert (error.code, error.message) == ("DPA865", "the engine died.")
    assert "no checkpoint" in error.remedy
    assert "trainer.save_freq=-1" in error.remedy
    assert "Resume" not in error.remedy
    early = told(tmp_path, RunError("DPA864", "a rank died.", RESUME), save_freq=5)
    assert "no checkpoint yet" in early.remedy


def test_with_one_the_command_is_told(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    place = folder / "step_000002"
    file = checkpoint.write_rank_file(place, rank=0, tensors={"a": torch.zeros(2)})
    checkpoint.write_index(place, [file], step=2, layout={"strategy": "fsdp2"}, extra={})
    error = told(folder, RunError("DPA863", "raised.", f"Its peers were stopped. {RESUME}"))
    assert error.remedy.startswith("Its peers were stopped. Go on from")
    assert "step_000002" in error.remedy
    assert f"trainer.run_dir={tmp_path / 'run'}" in error.remedy


@pytest.mark.parametrize(
    "error", [RunError("DPA802", "the disk is full.", "Make room."), UsageError("DPA851", "a", "b")]
)
def test_other_errors_pass_as_they_are(tmp_path, error):
    assert told(tmp_path, error) is error
