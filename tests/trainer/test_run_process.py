"""Runs as processes of their own: Ctrl-C, termination, and a disk that fills up."""

import os
import signal
import subprocess
import sys
import time

import pytest

import dataproto_audit as da

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TRAIN = [
    sys.executable, "-m", "dataproto_audit.cli", "train", "quickstart",
    "data.train_batch_size=8", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "warmup.steps=2", "warmup.batch_size=16",
    "actor_rollout_ref.rollout.name=hf",
]  # fmt: skip


def _twice(pid, number):
    """What ``timeout`` does: its child first, then the group."""
    os.kill(pid, number)
    os.killpg(pid, number)


@pytest.mark.parametrize(
    ("send", "number"),
    [
        (os.kill, signal.SIGINT),
        (os.kill, signal.SIGTERM),
        (os.killpg, signal.SIGTERM),
        (_twice, signal.SIGTERM),
        (_twice, signal.SIGINT),
    ],
)
def test_an_interrupted_run_stops_everything_and_keeps_its_tables(
    tmp_path, send, number, no_leftover_processes
):
    folder = tmp_path / "run"
    command = [*TRAIN, "trainer.total_training_steps=10000", f"trainer.run_dir={folder}"]
    log = tmp_path / "stderr"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, start_new_session=True)
        deadline = time.monotonic() + 300
        while "step 1/" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.5)
        shown = len(log.read_text())
        send(process.pid, number)
        code = process.wait(timeout=60)
    text = log.read_text()
    assert code == 130, text
    said = [line for line in text[shown:].splitlines() if not line.startswith("step ")]
    assert said == ["interrupted"]
    assert not (folder / ".lock").exists()
    assert "Traceback" not in text
    opened = da.open_run(folder)
    assert opened.last_step >= 1
    assert not opened.finished
    assert len(opened.table("rows")) == 32 * opened.last_step


def test_a_full_disk_ends_the_run_and_loses_nothing_written(tmp_path, no_leftover_processes):
    mount = tmp_path / "small"
    mount.mkdir()
    folder = mount / "run"
    train = [*TRAIN, "trainer.total_training_steps=9", "trainer.save_freq=1",
             f"trainer.run_dir={folder}"]  # fmt: skip
    report = [sys.executable, "-m", "dataproto_audit.cli", "report", str(folder), "--json"]
    script = (
        f"mount -t tmpfs -o size=4m none {mount} || exit 77\n"
        f"{' '.join(train)}; echo train=$?\n{' '.join(report)}; echo report=$?\n"
        f"ls {folder}/checkpoints"
    )
    spaces = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "-r", "--mount"]
    done = subprocess.run(
        [*spaces, "sh", "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode != 77, "this machine allows no private mounts"
    assert "train=3" in done.stdout, done.stderr
    assert "DPA802" in done.stderr
    assert "Traceback" not in done.stderr
    assert "report=0" in done.stdout
    assert "step_000001" in done.stdout
