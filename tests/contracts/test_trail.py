"""The trail of a step: which boundaries are compared, with what, and what is said where none is."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dataproto_audit.auditor import Auditor
from dataproto_audit.batch import BatchView
from dataproto_audit.contracts.dims import Rows
from dataproto_audit.contracts.stages import STAGES, Stage
from dataproto_audit.contracts.trail import Trail
from dataproto_audit.probes import Settings
from dataproto_audit.testing.healthy import Options, boundaries

OPTIONS = Options(prompts=6, n=3)


def prompts(rows=4):
    uids = np.array([f"u{row}" for row in range(rows)], object)
    return BatchView.of({"non_tensor_batch": {"uid": uids, "raw_prompt": uids.copy()}})


def repeated(n, rows=4, order=None):
    order = np.arange(rows).repeat(n) if order is None else order
    view = prompts(rows)
    return BatchView.of({"non_tensor_batch": {k: a[order] for k, a in view.arrays.items()}})


def sampled(rows):
    return BatchView.of({"batch": {"responses": torch.ones(rows, 2, dtype=torch.int64)}})


def cross(trail, stage, view, when="after"):
    return trail.cross(STAGES[stage], view, when)


@pytest.mark.parametrize("n", [2, None])
def test_the_first_boundary_has_nothing_to_be_compared_with(n):
    crossing = cross(Trail(Settings(n=n)), "reward", sampled(8))
    assert (crossing.kind, crossing.reason) == ("not_checkable", "the boundary before was not seen")
    assert crossing.changed == frozenset()


def test_batches_of_their_own_are_not_compared_and_leave_the_trail_alone():
    trail = Trail(Settings(n=2))
    cross(trail, "prompts", prompts())
    state = trail.state
    for stage in ("sync_weights", "validation"):
        for when in ("before", "after"):
            crossing = cross(trail, stage, sampled(3), when)
            assert (crossing.kind, crossing.violations) == ("not_applicable", ())
    assert trail.state is state is trail.origin


def test_the_input_of_the_rollout_may_be_the_prompts_or_their_repeat():
    for view in (prompts(), repeated(2)):
        trail = Trail(Settings(n=2))
        cross(trail, "prompts", prompts())
        assert cross(trail, "rollout", view, "before").violations == []
        assert cross(trail, "rollout", sampled(8)).violations == []


def test_a_tiled_repeat_is_seen_before_the_rollout():
    trail = Trail(Settings(n=2))
    cross(trail, "prompts", prompts())
    tiled = np.arange(8) % 4
    [violation] = cross(trail, "rollout", repeated(2, order=tiled), "before").violations
    assert (violation.code, violation.causes[0]) == ("DPA404", "tiled_groups")


def test_the_rollout_may_get_a_selection_of_the_fields():
    trail = Trail(Settings(n=2))
    cross(trail, "prompts", prompts())
    some = BatchView.of({"non_tensor_batch": {"uid": prompts().arrays["uid"]}})
    assert cross(trail, "rollout", some, "before").violations == []


def test_without_n_the_repeat_cannot_be_checked():
    trail = Trail(Settings())
    cross(trail, "prompts", prompts())
    assert cross(trail, "rollout", repeated(2), "before").reason == "setting unknown: n"
    assert cross(trail, "rollout", sampled(8)).reason == "setting unknown: n"


def test_too_few_samples_say_which_factor_is_missing():
    trail = Trail(Settings(n=2))
    cross(trail, "prompts", prompts())
    [violation] = cross(trail, "rollout", sampled(4)).violations
    assert violation.code == "DPA104"
    assert "n=2" in str(violation.evidence["factor"])


def test_entropies_may_be_consumed_between_stages_and_nothing_else():
    trail, fields = Trail(Settings()), {"entropys": torch.ones(3, 2), "values": torch.ones(3, 2)}
    cross(trail, "old_log_prob", BatchView.of({"batch": dict(fields)}))
    assert cross(trail, "advantage", BatchView.of({"batch": {"values": fields["values"]}}),
                 "before").violations == []  # fmt: skip
    [violation] = cross(trail, "update_actor", BatchView.of({"batch": {}}), "before").violations
    assert violation.causes == ("rows_lost", "changed_between_stages")


def test_what_changed_on_the_way_in_is_not_held_against_the_stage():
    auditor = Auditor(OPTIONS.settings(), on_fail="record")
    auditor.begin_step(1)
    for b in boundaries(OPTIONS):
        if (b.stage, b.when) == ("advantage", "before"):
            mask = b.batch.batch["response_mask"].clone()
            mask[0] = 0
            b.batch.batch["response_mask"] = mask
        auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
    structural = [f for f in auditor.findings if f.code.startswith("DPA1")]
    assert [(f.code, f.stage, f.when) for f in structural] == [("DPA113", "advantage", "before")]


@pytest.mark.parametrize(
    ("rejection", "trained", "codes"),
    [
        (True, 0, set()),
        (False, 0, {"DPA106"}),
        (None, 0, set()),  # only lost tokens, as a rejection would have it
        (None, 1, {"DPA106"}),
        (True, 1, set()),
    ],
)
def test_rejection_may_change_the_mask_where_it_is_configured_or_may_be(rejection, trained, codes):
    auditor = Auditor(replace(OPTIONS.settings(), rejection=rejection), on_fail="record",
                      level="shape")  # fmt: skip
    auditor.begin_step(1)
    for b in boundaries(OPTIONS):
        if (b.stage, b.when) == ("advantage", "after"):
            mask = b.batch.batch["response_mask"].clone()
            assert mask.min() == 0
            mask[mask.min(1).values.argmin()] = trained
            b.batch.batch["response_mask"] = mask
        auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
    assert {f.code for f in auditor.findings} == codes


def test_a_lost_trail_is_taken_up_again():
    trail = Trail(Settings())
    cross(trail, "reward", sampled(4))
    trail.lose()
    assert cross(trail, "old_log_prob", sampled(4)).reason
    assert cross(trail, "advantage", sampled(4)).violations == []


def test_row_keys_come_from_the_prompts_until_the_batch_has_uids():
    trail = Trail(Settings(n=2))
    cross(trail, "prompts", prompts(2))
    state = cross(trail, "rollout", sampled(4)).state
    assert [key.partition("/")[0] for key in trail.keys(state)] == ["u0", "u0", "u1", "u1"]


@pytest.mark.parametrize("stage", ["union", "reward", "balance"])
def test_meta_entries_of_the_run_are_kept(stage):
    trail, fields = Trail(Settings()), {"batch": {"responses": torch.ones(3, 2)}}
    cross(trail, "rollout", BatchView.of({**fields, "meta_info": {"temperature": 0.7, "x": 1}}))
    crossing = cross(trail, stage, BatchView.of({**fields, "meta_info": {"x": 1}}))
    [found] = crossing.violations
    assert (found.code, found.field) == ("DPA107", "meta_info.temperature")
    assert found.causes[0] == "meta_lost"


def test_a_batch_that_carries_no_meta_entries_lost_none():
    trail, fields = Trail(Settings()), {"batch": {"responses": torch.ones(3, 2)}}
    cross(trail, "rollout", BatchView.of({**fields, "meta_info": {"temperature": 0.7}}))
    assert cross(trail, "reward", BatchView.of(fields)).violations == []


def test_a_fresh_batch_may_bring_its_own_meta_entries():
    trail = Trail(Settings(n=1))
    view = prompts(3)
    cross(trail, "prompts", BatchView(view.tensors, view.arrays, {"temperature": 0.7}))
    assert cross(trail, "rollout", sampled(3)).violations == []


def test_what_the_rows_show_goes_before_what_is_supposed():
    trail = Trail(Settings())
    fields = {"responses": torch.arange(6).reshape(3, 2), "uid": np.array(["a", "b", "c"], object)}
    cross(trail, "reward", BatchView.of(fields))
    turned = {**fields, "uid": fields["uid"][::-1]}
    [found] = cross(trail, "advantage", BatchView.of(turned), "before").violations
    assert (found.code, found.causes[0]) == ("DPA113", "row_permutation")
    assert "changed_between_stages" in found.causes


def test_a_relation_that_is_not_followed_is_said_and_not_passed():
    class Filtered(Stage):
        """Groups without a difference are dropped."""

        name = "filtered"
        rows = Rows("drop")

    try:
        trail = Trail(Settings(n=2))
        cross(trail, "reward", sampled(8))
        crossing = cross(trail, "filtered", sampled(24))
        assert (crossing.kind, crossing.reason) == (
            "not_checkable", "rows that drop are not followed",
        )  # fmt: skip
    finally:
        del STAGES["filtered"]


def test_which_stages_get_a_batch_of_their_own():
    """What the loop hands on is compared; prompts, weight sync and validation are no part of it."""
    assert [name for name, stage in STAGES.items() if stage.own_input] == [
        "prompts", "sync_weights", "validation",
    ]  # fmt: skip
    assert [name for name, stage in STAGES.items() if stage.fresh][:2] == ["prompts", "rollout"]
    crossing = cross(Trail(Settings(n=2)), "prompts", prompts())
    assert (crossing.kind, crossing.reason) == ("not_applicable", "a batch of its own")


def test_prompts_of_a_new_step_are_not_compared_with_the_step_before():
    trail = Trail(Settings(n=2))
    cross(trail, "prompts", prompts())
    cross(trail, "rollout", sampled(8))
    crossing = cross(trail, "prompts", prompts(3))
    assert crossing.violations == ()
    assert trail.state is trail.origin
    assert cross(trail, "rollout", sampled(6)).violations == []
