"""Rows are followed through a step: over the repeat, the balancing, and what faults do to them."""

import numpy as np
import pytest

from dataproto_audit.replay.samples import follow

from ._recorded import healthy, lone, sides


def at(recording, stage, when="after"):
    return next(i for i, p in enumerate(recording.pieces) if (p.stage, p.when) == (stage, when))


def test_a_healthy_step():
    recording = healthy(prompts=6, n=3, step=2)
    found = follow(recording)
    assert found.samples[0] is None
    assert found.prompts[0].tolist() == list(range(6))
    assert found.groups[2] == (6, 7, 8)
    rollout, balance = at(recording, "rollout"), at(recording, "balance")
    assert found.samples[rollout].tolist() == list(range(18))
    moved = found.samples[balance]
    assert sorted(moved.tolist()) == list(range(18))
    before, after = (recording.pieces[i].batch["batch"] for i in (rollout, balance))
    assert (after["responses"] == before["responses"][moved]).all()
    assert found.samples[-2].tolist() == []  # the weight sync carries no rows
    validation = found.samples[-1].tolist()
    assert not set(validation) & set(range(18))
    assert len({found.group_of[sample] for sample in validation}) == len(validation)


def test_rows_that_were_lost_or_doubled():
    bad, _, _ = sides("rows_filtered_in_reward")
    found = follow(bad)
    reward = at(bad, "reward")
    before, after = found.samples[reward - 1], found.samples[reward]
    assert len(after) < len(before)
    assert set(after.tolist()) < set(before.tolist())


def test_wrong_uids_do_not_lead_astray():
    bad, good, _ = sides("uid_per_row")
    assert follow(bad).group_of == follow(good).group_of


@pytest.mark.parametrize("options", [{"counts": (2, 3, 1, 6)}, {"n": 1}, {"pad_rows": 2}])
def test_groups_of_other_sizes(options):
    recording = healthy(prompts=4, ranks=1, step=2, **options)
    found = follow(recording)
    counts = options.get("counts") or (options.get("n", 4),) * 4
    sizes = [len(samples) for samples in found.groups.values()][:4]
    assert sizes == list(counts)
    union = recording.pieces[at(recording, "union")].batch["non_tensor_batch"]["uid"]
    rows = found.samples[at(recording, "union")]
    groups = [found.group_of[sample] for sample in rows.tolist()]
    assert len(set(zip(groups, union, strict=True))) == len(set(groups)) == len(set(union))


def test_one_field_that_was_not_moved_does_not_decide():
    bad, good, _ = sides("one_tensor_not_balanced")
    for ours, theirs in zip(follow(bad).samples, follow(good).samples, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or ours.tolist() == theirs.tolist()


def test_a_batch_alone():
    recording = healthy(prompts=3, n=2)
    found = follow(lone(recording, "advantage"))
    assert len(found.samples[0]) == 6
    assert np.array_equal(found.samples[0], np.arange(6))
    assert len(found.groups) == 3
