"""Whole or absent."""

import errno
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from dataproto_audit import atomic
from dataproto_audit.codes import RunError


def test_the_content_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    atomic.atomic_write_json(target, {"x": np.arange(3), "y": {"z": np.float32(0.5)}})
    atomic.atomic_write_json(target, {"x": [1]})
    assert json.loads(target.read_text()) == {"x": [1]}
    assert list(tmp_path.iterdir()) == [target]


def test_an_exception_keeps_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "a"
    atomic.atomic_write_bytes(target, b"old")

    def fail_half_way() -> None:
        with atomic.atomic_path(target) as temporary:
            temporary.write_bytes(b"ne")
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail_half_way()
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("number", "fragment"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk is full"),
        (errno.EACCES, "not writable"),
        (errno.EROFS, "not writable"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EIO, "writing failed"),
    ],
)
def test_a_refusing_disk_is_dpa802(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fragment: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(RunError, match=fragment) as caught:
        atomic.atomic_write_bytes(tmp_path / "a", b"x")
    assert caught.value.code == "DPA802"
    assert caught.value.exit_code == 3
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_dpa802(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="DPA802"):
        atomic.atomic_write_bytes(tmp_path / "none" / "a", b"x")


def test_numbers_that_json_lacks_become_words() -> None:
    text = atomic.json_text({"a": math.nan, "b": [math.inf, -math.inf], "c": np.float32("nan")})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert json.loads(text, parse_constant=refuse) == {"a": "nan", "b": ["inf", "-inf"], "c": "nan"}
