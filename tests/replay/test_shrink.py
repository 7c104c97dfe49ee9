"""A failing recording becomes a minimal one that fails in the same way; healthy ones do not."""

from dataclasses import replace

import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.replay.cut import Whole
from dataproto_audit.replay.recording import Recording, audit, loud
from dataproto_audit.replay.shrink import Judge, shrink
from dataproto_audit.testing.faults import CATALOGUE
from dataproto_audit.testing.scoring import same_field

from ._recorded import healthy, lone, sides

# One of each family, over all stages; benchmarks/bench_shrink.py runs the catalogue.
FIXED = (
    "grouped_by_stride", "reference_one_column_late", "probabilities", "positions_from_one",
    "mask_cut_from_the_front", "two_rewards_added", "rows_filtered_in_reward", "uid_per_row",
    "divided_by_padded_width", "token_counts_of_before_the_balance", "one_tensor_not_balanced",
    "values_masked_by_other_rows", "kl_penalty_on_tool_tokens", "bins_over_the_limit",
)  # fmt: skip
SMALL = frozenset(FIXED) - {"bins_over_the_limit", "one_tensor_not_balanced"}
"""Of these at most two rows, or one group, and 16 tokens are left; the others need a row more."""


def one(name):
    bad, good, _ = sides(name)
    fault = CATALOGUE[name]
    finding = next(
        s.finding for s in loud(audit(bad))
        if s.finding.stage in fault.stages and same_field(s.finding.field, fault.fields)
    )  # fmt: skip
    return bad, good, finding


def leftovers(judge, cut):
    """Every cut with one thing less."""
    yield from (replace(cut, samples=cut.samples - {sample}) for sample in cut.samples)
    for name in ("pieces", "response", "prompt"):
        kept = getattr(cut, name)
        if len(kept) > 1:
            yield from (replace(cut, **{name: kept[:i] + kept[i + 1 :]}) for i in range(len(kept)))
    for name in judge.whole.names():
        if name not in cut.dropped:
            yield replace(cut, dropped=cut.dropped | {name})


@pytest.mark.parametrize("name", FIXED)
def test_faults_shrink_to_a_minimum(name):
    bad, good, finding = one(name)
    shrunk = shrink(bad, code=finding.code, stage=finding.stage, good=good)
    assert shrunk.finding is not None
    assert (shrunk.finding.code, shrunk.finding.stage) == (finding.code, finding.stage)
    assert shrunk.finding.field == finding.field
    assert shrunk.minimal
    assert 0 < shrunk.calls < 2000
    left = shrunk.sizes
    if name in SMALL:
        assert left["rows"] <= 2 or left["groups"] <= 1
        assert left["tokens"] <= 16
    assert left["rows"] < shrunk.before["rows"]
    judge = Judge.of_finding(bad, finding.code, finding.stage, good)
    assert not any(judge.holds(cut) for cut in leftovers(judge, shrunk.cut))
    # the healthy twin, cut alike, is quiet
    twin = Whole(replace(good, partial=shrunk.recording.partial))
    assert judge.twin is not None
    assert not loud(audit(twin.cut(judge._alike(shrunk.cut))))


def test_without_a_healthy_twin_one_is_made_by_mending():
    bad, _, finding = one("grouped_by_stride")
    shrunk = shrink(bad, code=finding.code, stage=finding.stage)
    assert shrunk.twin == "mended"
    assert shrunk.sizes["rows"] <= 4


def test_a_twin_that_shows_the_finding_too_is_none():
    bad, _, finding = one("grouped_by_stride")
    assert shrink(bad, code=finding.code, stage=finding.stage, good=bad).twin == "none"


def test_a_batch_alone():
    bad, _, _ = sides("probabilities")
    shrunk = shrink(lone(bad, "advantage"), code="DPA302")
    assert shrunk.recording.lone
    assert shrunk.sizes["rows"] == 1
    assert shrunk.finding is not None
    assert shrunk.finding.field == "rollout_log_probs"


def test_the_first_loud_finding_without_a_code():
    bad, _, _ = sides("positions_from_one")
    assert shrink(bad).finding.code == "DPA204"


def test_a_predicate_decides():
    bad = lone(healthy(prompts=8, n=4, step=2), "advantage")
    wanted = int(bad.pieces[0].batch["batch"]["responses"][13, 1])

    def holds(recording):
        return bool((recording.pieces[-1].batch["batch"]["responses"][:, -1] == wanted).any())

    columns = Whole(bad).widths.response
    bad.pieces[0].batch["batch"]["responses"][13, columns - 1] = wanted
    shrunk = shrink(bad, predicate=holds)
    assert shrunk.finding is None
    assert (shrunk.sizes["rows"], len(shrunk.cut.response)) == (1, 1)
    assert list(shrunk.recording.pieces[0].batch["batch"]) == ["responses"]


def test_what_cannot_be_shrunk_is_said():
    fine = healthy(prompts=2, n=2, step=2)
    with pytest.raises(UsageError, match=r"the batch has no finding DPA302.*find nothing"):
        shrink(fine, code="DPA302")
    bad, _, _ = sides("positions_from_one")
    with pytest.raises(UsageError, match="DPA204 at rollout"):
        shrink(bad, code="DPA302", stage="reward")
    with pytest.raises(UsageError, match="not true of the whole batch"):
        shrink(fine, predicate=lambda recording: False)
    with pytest.raises(UsageError, match="predicate raised ZeroDivisionError"):
        shrink(fine, predicate=lambda recording: bool(1 / 0))


def test_predicate_calls_from_a_large_batch_stay_few():
    bad, good, _ = sides("probabilities", prompts=64, response_width=64)
    shrunk = shrink(bad, code="DPA302", good=good)
    assert shrunk.before["rows"] == 256
    assert shrunk.calls < 200


def test_steps_that_the_finding_needs_are_kept():
    recording = healthy(prompts=2, n=2, step=2)
    last = recording.pieces[-3]
    nan = {**last.evidence, "metrics": {"actor/grad_norm": float("nan"), "other": 1.0}}
    pieces = (*recording.pieces[:-3], replace(last, evidence=nan), *recording.pieces[-2:])
    bad = Recording(pieces, recording.settings, nan["metrics"])
    shrunk = shrink(bad, code="DPA601")
    assert set(shrunk.recording.metrics) <= {"actor/grad_norm"}
    assert len(shrunk.recording.pieces) == 1
    assert not any(isinstance(t, torch.Tensor) for t in shrunk.recording.pieces[0].batch["batch"])
