"""Reasons are texts; their kinds survive what reports go through."""

import pickle

import pytest

from dataproto_audit import check
from dataproto_audit.reasons import NotRecorded, SettingUnknown
from dataproto_audit.testing.healthy import healthy_step
from dataproto_audit.verdicts import outcome_of


def test_a_reason_reads_as_one_text_with_all_names():
    assert SettingUnknown.of("gamma", "lam") == "setting unknown: gamma, lam"
    told = SettingUnknown.of("adv_estimator", then="no rule in use explains the advantages")
    assert told == "setting unknown: adv_estimator; no rule in use explains the advantages"
    assert NotRecorded.of("losses.vf_loss", "ranks") == "not recorded: losses.vf_loss, ranks"


@pytest.mark.parametrize("reason", [SettingUnknown.of("n"), NotRecorded.of("losses")])
def test_the_kind_survives_another_process(reason):
    """Folders are replayed in worker processes; what they lack is read off their reports."""
    back = pickle.loads(pickle.dumps(outcome_of("any", "DPA101", "not_checkable", reason)))
    assert type(back.reason) is type(reason)
    assert back.reason == reason


def test_no_reason_of_a_report_reads_like_a_kind_without_being_one():
    _, boundaries = healthy_step()
    kinds = {"setting unknown": SettingUnknown, "not recorded": NotRecorded}
    seen = set()
    for outcome in check(boundaries[-1].batch, config={"n": None}).outcomes:
        start = outcome.reason.partition(":")[0]
        if start in kinds:
            assert isinstance(outcome.reason, kinds[start]), outcome
            seen.add(start)
    assert seen == set(kinds)
