"""A trace after its writer was killed: whole steps only, and the next run goes on from there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 20


@pytest.mark.slow
def test_what_a_killed_writer_leaves_is_whole_or_told_to_be_torn(tmp_path: Path) -> None:
    script = Path(__file__).with_name("_kills.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(KILLS)],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["kills"] == told["went_on"] == KILLS
    assert told["whole"] >= KILLS // 2
