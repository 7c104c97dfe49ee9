"""A step against the same step of a healthy run."""

from dataclasses import replace
from pathlib import Path

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.replay.bisect import bisect, by_comparison
from dataproto_audit.replay.good import Against
from dataproto_audit.replay.replay import replay
from dataproto_audit.testing.bases import BASES
from dataproto_audit.testing.faults import CATALOGUE
from dataproto_audit.testing.traces import write_simulated

FAULTS = [
    "old_one_column_early", "rewards_one_row_late", "sign_flipped", "uids_one_row_late",
    "mask_on_pad", "reference_one_column_late", "log_probs_one_column_short",
    "mean_of_rank_means", "one_tensor_not_balanced",
]  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_difference_is_where_the_fault_is(tmp_path: Path, name: str) -> None:
    fault = CATALOGUE[name]
    write_simulated(tmp_path / "good", "plain")
    write_simulated(tmp_path / "bad", "plain", [fault])
    against = bisect(tmp_path / "bad", good=tmp_path / "good").against
    assert against.stage in fault.stages, against
    assert against.field.split(".")[-1] in fault.fields or against.field == fault.field


def test_two_healthy_runs_do_not_differ(tmp_path: Path) -> None:
    write_simulated(tmp_path / "a", "plain")
    write_simulated(tmp_path / "b", "plain")
    against = bisect(tmp_path / "a", good=tmp_path / "b").against
    assert (against.stage, against.paired) == (None, 48)


def test_other_samples_prove_nothing(tmp_path: Path) -> None:
    write_simulated(tmp_path / "a", replace(BASES["plain"], vocab=64))
    write_simulated(tmp_path / "b", replace(BASES["plain"], vocab=64), seed=5)
    verdict = bisect(tmp_path / "a", good=tmp_path / "b")
    assert verdict.against.stage is None
    assert verdict.verdict == "healthy"


def test_a_step_that_the_healthy_run_has_not(tmp_path: Path) -> None:
    write_simulated(tmp_path / "a", "plain", steps=1)
    write_simulated(tmp_path / "b", replace(BASES["plain"], step=5), steps=2)
    with pytest.raises(UsageError, match=r"no step 2.*5, 6"):
        bisect(tmp_path / "a", good=tmp_path / "b")


def test_what_only_the_healthy_run_tells_is_named(tmp_path: Path) -> None:
    write_simulated(tmp_path, "plain")
    verdict = bisect(tmp_path)
    verdict.against = Against("differs", "reward", "score", [3], [(3, 1)], boundary="")
    [step] = replay(tmp_path)
    by_comparison(verdict, step)
    said = verdict.to_dict()
    assert (said["verdict"], said["stage"], said["field"]) == ("faulty", "reward", "score")
    assert (said["rows"], said["tokens"]) == ([3], [[3, 1]])
    assert "went wrong at reward" in verdict.story()
    assert "reward" not in {item["stage"] for item in verdict.cleared}
