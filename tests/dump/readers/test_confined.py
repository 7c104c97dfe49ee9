"""Large pickles are opened by a child with limits first."""

import sys

import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.dump.readers import read_batches
from dataproto_audit.dump.readers.confined import SMALL, SWITCH, Limits, confine, limits_of


@pytest.fixture
def large(tmp_path):
    path = tmp_path / "large.pt"
    torch.save({"old_log_probs": torch.zeros(64, SMALL // 128)}, path)
    return path


def test_a_small_file_needs_no_child(tmp_path, monkeypatch):
    monkeypatch.setattr("dataproto_audit.dump.readers.confined.get_context", None)
    torch.save({"old_log_probs": torch.zeros(2, 2)}, tmp_path / "small.pt")
    assert read_batches(tmp_path / "small.pt")[0].rows == 2


def test_large_files_within_the_limits_are_read(large):
    assert large.stat().st_size > SMALL
    main = sys.modules["__main__"]
    assert read_batches(large)[0].rows == 64
    assert sys.modules["__main__"] is main


@pytest.mark.parametrize(
    ("limits", "said"), [(Limits(60.0, 1 << 18), "needed more than 0 MB"), (Limits(0.0, 1 << 30),
                                                                            "took more than 0 s")]
)  # fmt: skip
def test_a_limit_that_is_reached_is_a_coded_error(large, limits, said):
    with pytest.raises(UsageError, match="DPA813") as error:
        confine(large, large.stat().st_size, limits)
    assert said in str(error.value)
    assert str(large) in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_wrong_with_a_large_file_is_said_by_its_reader(tmp_path):
    (tmp_path / "broken.pkl").write_bytes(b"\x80\x04]" + b"N" * (SMALL + 10))
    with pytest.raises(UsageError, match="DPA810"):
        read_batches(tmp_path / "broken.pkl")


def test_it_can_be_switched_off(large, monkeypatch):
    monkeypatch.setenv(SWITCH, "off")
    monkeypatch.setattr("dataproto_audit.dump.readers.confined.get_context", None)
    assert read_batches(large)[0].rows == 64


def test_limits_grow_with_the_file():
    assert limits_of(0) == Limits(20.0, 1 << 30)
    assert limits_of(10**8).seconds == 120.0
    assert limits_of(10**8).bytes == (1 << 30) + 24 * 10**8


def test_a_platform_without_limits_opens_the_file_at_once(large, monkeypatch):
    monkeypatch.setattr("dataproto_audit.dump.readers.confined.resource", None)
    monkeypatch.setattr("dataproto_audit.dump.readers.confined.get_context", None)
    assert read_batches(large)[0].rows == 64


def test_a_child_that_cannot_start_is_not_called_too_large(large, monkeypatch):
    def refuse(child):
        raise OSError("too many open files")

    monkeypatch.setattr("dataproto_audit.dump.readers.confined._start", refuse)
    with pytest.raises(UsageError, match=r"DPA810 .* did not start \(too many open files\)"):
        confine(large, large.stat().st_size)
