"""A model of another run is told as one; faults of a stage stay faults with the right model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataproto_audit.dump.trace import TraceWriter
from dataproto_audit.replay.bisect import Verdict, bisect
from dataproto_audit.replay.scorers import Scorers
from dataproto_audit.testing.bases import BASES
from dataproto_audit.testing.faults import CATALOGUE
from dataproto_audit.testing.healthy import boundaries
from dataproto_audit.testing.options import Options
from dataproto_audit.testing.traces import toy_scorers, write_simulated

ROLES = {"policy": "--model", "reference": "--ref-model"}


def judged(folder: Path, base: str, wrong: tuple[str, ...], faults: tuple[str, ...] = (),
           step: int = 2) -> Verdict:  # fmt: skip
    options = replace(BASES[base], step=step)
    for name in faults:
        options = replace(options, **CATALOGUE[name].options)
    made = write_simulated(folder, options, [CATALOGUE[n] for n in faults])
    other = toy_scorers(replace(made.options, step_drift=3.0), step=9)["policy"]
    return bisect(
        folder, scorers=Scorers(**{**toy_scorers(made.options), **dict.fromkeys(wrong, other)})
    )


def without_engine(folder: Path, options: Options) -> None:
    """A healthy step whose engine kept no log-probs."""
    with TraceWriter(folder, retention="all", settings=vars(options.settings())) as writer:
        writer.begin_step(options.step)
        for b in boundaries(options):
            if b.batch.batch is not None and "rollout_log_probs" in b.batch.batch:
                b.batch.pop(batch_keys=["rollout_log_probs"])
            writer.write_boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
        writer.end_step()


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("base", ["plain", "half", "tools"])
def test_another_reference_is_told_and_accuses_nobody(tmp_path: Path, base: str, step: int) -> None:
    verdict = judged(tmp_path, base, ("reference",), step=step)
    assert (verdict.verdict, verdict.stage, verdict.later_faults) == ("undecided", None, [])
    [told] = verdict.to_dict()["not_believed"]
    assert (told["option"], told["field"]) == ("--ref-model", "ref_log_prob")
    assert told["median gap"] > 100 * told["expected"]
    assert told["median gap of the record"] < told["median gap of the model"] / 2
    text = verdict.story()
    assert "other model  --ref-model does not look like the reference of this run" in text
    assert text.count("does not look like") == 1


def test_two_other_models_are_told_each(tmp_path: Path) -> None:
    verdict = judged(tmp_path, "plain", tuple(ROLES))
    assert (verdict.verdict, verdict.stage) == ("undecided", None)
    assert {one["option"] for one in verdict.not_believed} == set(ROLES.values())


def test_where_the_engine_speaks_for_the_trainer_the_step_is_healthy(tmp_path: Path) -> None:
    verdict = judged(tmp_path, "plain", ("policy",))
    assert verdict.verdict == "healthy"
    assert [one["witnessed"] for one in verdict.not_believed] == [True]


def test_another_policy_is_told_without_the_engine(tmp_path: Path) -> None:
    without_engine(tmp_path, BASES["plain"])
    other = toy_scorers(replace(BASES["plain"], step_drift=3.0), step=9)["policy"]
    verdict = bisect(tmp_path, scorers=Scorers(policy=other))
    assert (verdict.verdict, verdict.stage) == ("undecided", None), verdict.story()
    assert [one["field"] for one in verdict.not_believed] == ["old_log_probs"]


@pytest.mark.parametrize("name", [
    "reference_one_column_late", "reference_ignores_temperature", "dropout_in_the_reference",
    "reference_of_another_checkpoint", "reference_follows_the_actor",
])  # fmt: skip
def test_a_fault_of_all_rows_is_found_with_the_right_model(tmp_path: Path, name: str) -> None:
    base = CATALOGUE[name].bases[0]
    options = replace(BASES[base], **CATALOGUE[name].options)
    verdict = judged(tmp_path, base, (), (name,), step=options.step)
    assert (verdict.verdict, verdict.stage) == ("faulty", "ref_log_prob"), verdict.story()
    assert verdict.not_believed == []


def test_another_reference_does_not_hide_a_fault_elsewhere(tmp_path: Path) -> None:
    verdict = judged(tmp_path, "plain", ("reference",), ("sign_flipped",))
    assert (verdict.verdict, verdict.stage) == ("faulty", "advantage")
    assert len(verdict.not_believed) == 1


def test_passes_that_are_shifted_alike_are_no_other_model(tmp_path: Path) -> None:
    """Both fields of the trainer one column late, and nothing of the engine's."""
    without_engine(tmp_path, BASES["long"])
    right = toy_scorers(BASES["long"])

    def late(role: str) -> Any:
        def score(view: Any, temperature: float) -> Any:
            values, entropies = right[role](view, temperature)
            return np.roll(values, -1, 1), entropies

        return score

    verdict = bisect(tmp_path, scorers=Scorers(late("policy"), late("reference")))
    assert verdict.verdict == "faulty"
    assert verdict.not_believed == []


def test_a_model_of_fewer_ids_is_refused_before_any_pass(tmp_path: Path) -> None:
    write_simulated(tmp_path, "plain")

    def score(view: Any, temperature: float) -> Any:
        raise AssertionError

    score.vocabulary = 3  # type: ignore[attr-defined]
    verdict = bisect(tmp_path, scorers=Scorers(policy=score))
    assert (verdict.recomputations, verdict.stage) == (0, None)
    assert any("--model is a model of 3 ids" in text for text in verdict.missing)
