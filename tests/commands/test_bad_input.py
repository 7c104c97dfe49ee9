"""Bad input of every kind, from the command line: one clear paragraph and an exit code."""

import errno
import json
import os
import shutil

import pytest

from dataproto_audit.testing.traces import write_simulated

SAMPLE = "verl-0.7.1/gae_legacy/compute_advantage.out.pkl"


@pytest.fixture
def sample(tmp_path, request):
    """A saved batch of verl's."""
    path = tmp_path / "batch.pkl"
    shutil.copy(request.path.parents[1] / "data" / "samples" / SAMPLE, path)
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A trace of one healthy step."""
    folder = tmp_path_factory.mktemp("recorded")
    write_simulated(folder, "plain")
    return folder


def one_paragraph(done):
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().count("\n\n") == 0
    assert done.stderr.strip().startswith(("Error", "error", "DPA"))
    return " ".join(done.stderr.split())


@pytest.mark.parametrize("command", ["show", "check", "replay"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty (0 bytes)"),
        (b"\x89PNG\r\n\x1a\n" + bytes(64), "is no saved batch: it is a PNG image"),
        (b"Dear all, see below", "is no saved batch"),
        (None, "ends in the middle, after"),
    ],
    ids=["empty", "wrong kind", "text", "truncated"],
)
def test_files_that_are_no_batch(call, sample, command, content, says):
    sample.write_bytes(sample.read_bytes()[:-2000] if content is None else content)
    text = one_paragraph(call(command, sample, check=2))
    assert says in text
    assert str(sample) in text


SPOILT = {
    "newer schema": ("DPA821", lambda head: head | {"schema": 99}),
    "missing neighbour": ("DPA820", lambda head: head | {
        "fields": [{**entry, "at": "00_gone"} for entry in head["fields"]]}),
    "mixed runs": ("DPA820", lambda head: head | {"config_hash": "0" * 16}),
}  # fmt: skip


@pytest.mark.parametrize("command", ["replay", "bisect"])
@pytest.mark.parametrize("name", SPOILT)
def test_traces_that_do_not_fit_together(call, recorded, tmp_path, command, name):
    code, change = SPOILT[name]
    folder = tmp_path / "run"
    shutil.copytree(recorded, folder)
    [head] = folder.glob("trace/*/*_reward/boundary.json")
    head.write_text(json.dumps(change(json.loads(head.read_text()))))
    text = one_paragraph(call(command, folder, check=2))
    assert code in text
    assert str(folder) in text


def test_a_boundary_that_is_gone(call, recorded, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(recorded, folder)
    [place] = folder.glob("trace/*/*_rollout")
    shutil.rmtree(place)
    assert "DPA820" in one_paragraph(call("bisect", folder, check=2))


@pytest.mark.parametrize("target", ["out.pkl", "out.safetensors", "out"])
@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.ENOSPC, "disk is full"), (errno.EROFS, "not writable")],
    ids=["no space", "read-only"],
)
def test_a_disk_that_refuses(call, sample, tmp_path, monkeypatch, target, number, says):
    """A target without room, or on a file system that is mounted read-only."""

    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refused)
    text = one_paragraph(call("convert", sample, tmp_path / target, check=3))
    assert "DPA802" in text
    assert says in text
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path != sample]
    assert not [path for path in left if path.name == target]
