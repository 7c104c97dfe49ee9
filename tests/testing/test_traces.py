"""Recorded simulated steps: the truth of each fault, and models that score the healthy step."""

from pathlib import Path

import numpy as np

from dataproto_audit.dump.trace import Trace
from dataproto_audit.testing.bases import BASES
from dataproto_audit.testing.faults import CATALOGUE
from dataproto_audit.testing.traces import toy_scorers, write_simulated


def test_two_faults_in_one_step_each_have_their_truth(tmp_path: Path) -> None:
    faults = [CATALOGUE["mask_on_pad"], CATALOGUE["sign_flipped"]]
    made = write_simulated(tmp_path, "plain", faults, steps=2)
    assert Trace(tmp_path).steps == [2, 3]
    assert made.crash == ""
    assert all(made.truths[fault.name].rows for fault in faults)
    assert sorted(map(made.row_after, range(48))) == list(range(48))


def test_what_dies_of_a_fault_leaves_a_step_that_is_broken_off(tmp_path: Path) -> None:
    made = write_simulated(tmp_path, "plain", [CATALOGUE["aborted_rows_dropped"]])
    assert made.crash
    assert Trace(tmp_path).step(2).ended == "broken_off"


def test_the_models_score_what_a_healthy_step_recorded(tmp_path: Path) -> None:
    made = write_simulated(tmp_path, BASES["plain"])
    after = Trace(tmp_path).step(2).find("ref_log_prob")
    assert after is not None
    view, scorers = after.view(), toy_scorers(made.options)
    mask = view.numpy("response_mask") != 0
    for name, role in (("old_log_probs", "policy"), ("ref_log_prob", "reference")):
        log_probs, _ = scorers[role](view, 1.0)
        assert np.abs(log_probs - view.numpy(name))[mask].max() < 1e-5
