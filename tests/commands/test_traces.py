"""`replay` and `bisect` on the command line."""

import json
import subprocess
import sys
from pathlib import Path

from dataproto_audit.testing.faults import CATALOGUE
from dataproto_audit.testing.traces import write_simulated


def dpa(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dataproto_audit.cli", *map(str, args)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_bisect_names_the_stage_and_exits_with_1(tmp_path: Path) -> None:
    write_simulated(tmp_path, "plain", [CATALOGUE["old_one_column_early"]])
    ran = dpa("bisect", tmp_path, "--json")
    said = json.loads(ran.stdout)
    assert (ran.returncode, said["stage"], said["cause"]) == (1, "old_log_prob", "shift")
    assert "old_log_prob WRONG" in dpa("bisect", tmp_path).stdout


def test_replay_of_a_healthy_trace_is_quiet(tmp_path: Path) -> None:
    write_simulated(tmp_path, "plain")
    ran = dpa("replay", tmp_path, "--recompute", "--json")
    said = json.loads(ran.stdout)
    assert (ran.returncode, said["ok"], said["steps"]) == (0, True, 1)
    assert said["answers"][0]["recomputations"] == 0


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    for command in ("replay", "bisect"):
        ran = dpa(command, tmp_path / "absent")
        assert ran.returncode == 2
        assert "Traceback" not in ran.stderr
        assert len(ran.stderr.strip().splitlines()) == 1


def test_an_unreadable_path_does_not_lose_the_answers_of_others(tmp_path: Path) -> None:
    write_simulated(tmp_path / "good", "plain")
    ran = dpa("replay", tmp_path / "absent", tmp_path / "good", "--json")
    assert ran.returncode == 2
    assert json.loads(ran.stdout)["ok"]
    assert "absent" in ran.stderr
