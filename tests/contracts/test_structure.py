"""Declarations and row relations, broken one at a time at the boundary of a healthy step."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dataproto_audit.auditor import Auditor
from dataproto_audit.contracts.dims import factor_story
from dataproto_audit.contracts.fields import FIELDS, declare
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.testing.healthy import Options, boundaries

OPTIONS = Options(prompts=8, n=4)


def found(stage, change, *, when="after", options=OPTIONS):
    """Findings at the boundary where ``change(batch)`` was made."""
    auditor = Auditor(options.settings(), level="shape", on_fail="record")
    auditor.begin_step(1)
    for b in boundaries(options):
        here = (b.stage, b.when) == (stage, when)
        if here:
            change(b.batch)
        report = auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
        if here:
            return report.findings
        assert not report.findings
    raise AssertionError(f"no boundary {when} {stage}")


def setter(name, value):
    def change(batch):
        old = batch.batch[name]
        new = value(old)
        if new.shape[0] != old.shape[0]:  # a TensorDict checks its rows, so go around it
            batch.batch = dict(batch.batch.items()) | {name: new}
        else:
            batch.batch[name] = new

    return change


def test_a_missing_field_is_named_with_its_producer():
    [finding] = found("old_log_prob", lambda b: b.batch.pop("old_log_probs"))
    assert (finding.code, finding.field) == ("DPA101", "old_log_probs")
    assert "float[rows,response], written by old_log_prob" in finding.expected


def test_a_field_that_a_stage_reads_is_missing_before_it():
    findings = found("advantage", lambda b: b.batch.pop("token_level_scores"), when="before")
    assert ("DPA101", "token_level_scores") in {(f.code, f.field) for f in findings}


def test_another_kind_of_number():
    [finding] = found("advantage", setter("advantages", lambda t: t.long()))
    assert (finding.code, finding.field) == ("DPA102", "advantages")
    assert finding.expected == "float[rows=32,response=4]"
    assert finding.actual == "i64[32,4]"


def test_another_width_shows_the_bindings():
    [finding] = found("old_log_prob", setter("old_log_probs", lambda t: t[:, :-1].clone()))
    assert (finding.code, finding.field) == ("DPA103", "old_log_probs")
    assert finding.evidence["response"] == 4
    assert finding.causes[0] == "wrong_width"


def test_a_field_that_was_not_repeated_says_by_which_factor():
    findings = found("old_log_prob", setter("old_log_probs", lambda t: t[:8].clone()))
    [finding] = [f for f in findings if f.field == "old_log_probs"]
    assert finding.code == "DPA103"
    assert "n=4" in str(finding.evidence["factor"])
    assert finding.causes[0] == "not_repeated"


def test_non_tensor_fields_need_one_entry_a_row():
    def change(batch):
        batch.non_tensor_batch["score"] = np.array([0.0] * 8, object)

    findings = found("reward", change)
    assert ("DPA109", "score") in {(f.code, f.field) for f in findings}


def test_rows_that_were_not_repeated():
    def change(batch):
        batch.batch = batch.batch[:8]
        batch.non_tensor_batch = {k: v[:8] for k, v in batch.non_tensor_batch.items()}

    findings = found("rollout", change)
    [finding] = [f for f in findings if f.code == "DPA104"]
    assert "n=4" in str(finding.evidence["factor"])


@pytest.mark.parametrize("name", ["old_log_probs", "responses", "uid"])
def test_a_kept_field_that_changed_is_named_with_its_rows(name):
    def change(batch):
        if name == "uid":
            uids = batch.non_tensor_batch["uid"].copy()
            uids[3] = "another"
            batch.non_tensor_batch["uid"] = uids
        else:
            changed = batch.batch[name].clone()
            changed[5, 0] += 1
            batch.batch[name] = changed

    [finding] = found("advantage", change)
    assert (finding.code, finding.field) == ("DPA106", name)
    assert finding.rows == ((3,) if name == "uid" else (5,))
    if name != "uid":
        assert finding.columns == {5: (0,)}


def test_a_write_in_place_is_seen_too():
    def change(batch):
        batch.batch["old_log_probs"][2, 1] = -9.0

    [finding] = found("advantage", change)
    assert (finding.code, finding.rows) == ("DPA106", (2,))


def test_a_dropped_field():
    [finding] = found("reward", lambda b: b.batch.pop("rollout_log_probs"))
    assert (finding.code, finding.field) == ("DPA107", "rollout_log_probs")


def test_a_change_between_two_stages():
    def change(batch):
        moved = batch.batch["response_mask"].clone()
        moved[4] = 0
        batch.batch["response_mask"] = moved

    [finding] = found("reward", change, when="before")
    assert (finding.code, finding.field, finding.rows) == ("DPA113", "response_mask", (4,))


def test_balancing_may_permute_whole_rows_only():
    def whole(batch):
        order = torch.arange(len(batch) - 1, -1, -1)
        batch.reorder(order)

    assert found("balance", whole) == []

    def torn(batch):
        scores = batch.batch["rollout_log_probs"]
        batch.batch["rollout_log_probs"] = scores.flip(0)

    [finding] = found("balance", torn)
    assert (finding.code, finding.field) == ("DPA106", "rollout_log_probs")
    assert finding.causes[0] == "row_permutation"

    def lost(batch):
        batch.reorder(torch.tensor([0, *range(len(batch) - 1)]))

    codes = {f.code for f in found("balance", lost)}
    assert "DPA105" in codes


def test_identical_rows_and_reloaded_objects_raise_no_alarm():
    def reloaded(batch):
        for name, array in batch.non_tensor_batch.items():
            if isinstance(array[0], str):
                fresh = np.array(["".join(list(text)) for text in array], object)
                batch.non_tensor_batch[name] = fresh
        for name in list(batch.batch.keys()):
            batch.batch[name] = batch.batch[name].clone()

    for stage in ("balance", "reward", "advantage"):
        assert found(stage, reloaded) == []


def test_unknown_fields_are_allowed_and_listed():
    options = OPTIONS
    auditor = Auditor(options.settings(), level="full")
    auditor.begin_step(1)
    for b in boundaries(options):
        if (b.stage, b.when) == ("union", "after"):
            b.batch.batch["my_field"] = torch.zeros(len(b.batch), 7)
        auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
        if b.stage == "union" and b.when == "after":
            break
    assert "my_field" in auditor.undeclared
    assert not auditor.findings


def test_one_signature_is_checked_once_but_missing_fields_always():
    options = replace(OPTIONS)
    for _ in range(2):
        [finding] = found("old_log_prob", lambda b: b.batch.pop("old_log_probs"), options=options)
        assert finding.code == "DPA101"


@pytest.mark.parametrize(
    ("actual", "expected", "fragment"),
    [
        (12, 4, "12 = 4 x n (n=3)"),
        (4, 12, "not repeated"),
        (8, 4, "8 = 4 x 2"),
        (7, 4, ""),
        (0, 4, ""),
    ],
)
def test_factor_stories(actual, expected, fragment):
    story = factor_story(actual, expected, {"n": 3})
    assert fragment in story
    assert bool(story) == bool(fragment)


def test_declarations_are_consistent():
    for stage in STAGES.values():
        assert (stage.__doc__ or "").strip()
        for name in stage.declared():
            assert name in FIELDS, f"{stage.name} names {name}"
    produced = {n for s in STAGES.values() for n in (*s.adds, *s.may_add)}
    for name, field in FIELDS.items():
        assert field.producer in STAGES
        assert field.meaning
        assert name in produced, f"{name} is written by no stage"
    with pytest.raises(ValueError, match="declared already"):
        declare("uid", None, "prompts", "again")
