"""Files that verl wrote, value for value as verl's own loader reads them, in its environments."""

import json
import subprocess
from pathlib import Path

import pytest

from dataproto_audit.dump.readers.metric_logs import read_history
from dataproto_audit.integrations.verl_versions import VERSIONS

from .runs import python

pytestmark = pytest.mark.verl

SCRIPT = Path(__file__).parent / "same_values.py"
SAMPLES = Path(__file__).parents[1] / "data" / "samples"


def run(version: str, *args: object) -> str:
    done = subprocess.run(
        [str(python(version)), str(SCRIPT), *map(str, args)],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_files_that_verl_writes_are_read_as_verl_reads_them(version: str, tmp_path: Path) -> None:
    run(version, "--make", tmp_path)
    told = json.loads(run(version, tmp_path).splitlines()[-1])
    assert (told["different"], told["unreadable"]) == ({}, {})
    assert told["files"] == told["same"] == 11


@pytest.mark.parametrize("version", VERSIONS)
def test_samples_of_real_runs_are_read_as_verl_reads_them(version: str) -> None:
    told = json.loads(run(version, SAMPLES / f"verl-{version}").splitlines()[-1])
    assert (told["different"], told["unreadable"]) == ({}, {})
    assert told["files"] == told["same"] > 10


@pytest.mark.parametrize("version", VERSIONS)
def test_logs_of_tensorboard_and_wandb_are_read(version: str, tmp_path: Path) -> None:
    """By their own writers, in the versions that verl brings; we need neither to read them."""
    done = subprocess.run(
        [str(python(version)), str(SCRIPT.with_name("write_logs.py")), str(tmp_path)],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    [wandb] = tmp_path.rglob("run-*.wandb")
    for path in (tmp_path / "tensorboard", wandb):
        steps = read_history(path)
        assert [step["step"] for step in steps] == list(range(1, 11)), path
        for number, step in enumerate(steps, 1):
            assert step["actor/grad_norm"] == pytest.approx(0.5 + number)
            assert step["actor/pg_loss"] == pytest.approx(-0.01 * number)
