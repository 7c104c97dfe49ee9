"""The bench on a sample, and its arithmetic."""

import json

import pytest

from dataproto_audit.testing.bases import BASES, Healthy, healthy_configurations
from dataproto_audit.testing.bench import (
    BenchResult,
    FaultRun,
    HealthyRuns,
    clopper_pearson,
    run_bench,
    run_fault,
    run_healthy,
)
from dataproto_audit.testing.faults import CATALOGUE, FAULTS
from dataproto_audit.testing.layouts import jagged
from dataproto_audit.testing.matrix import matrix, misses
from dataproto_audit.testing.options import Options
from dataproto_audit.testing.scoring import MEASURES, Score

SAMPLE = (*FAULTS, "uid_per_row", "population_std", "negated", "rows_filtered_in_reward",
          "a_row_in_two_micro_batches", "engine_holds_other_weights")  # fmt: skip
COUNTS = {"faults", *MEASURES}
RIGHT = dict.fromkeys(MEASURES, True)


@pytest.fixture(scope="module")
def result() -> BenchResult:
    return run_bench(bases=["plain"], faults=SAMPLE, healthy=[Healthy("small", Options(), 2)])


def test_the_document_has_exactly_these_keys(result: BenchResult) -> None:
    document = json.loads(json.dumps(result.to_dict()))
    assert set(document) == COUNTS | {"healthy_batches", "healthy_checks", "false_fail",
                                      "false_warn", "untouched"}  # fmt: skip
    assert set(document["untouched"]) == COUNTS
    assert document["faults"] == len(SAMPLE)
    assert document["untouched"]["faults"] == sum(not CATALOGUE[n].tuned for n in SAMPLE)
    assert document["healthy_batches"] == 6
    assert document["healthy_checks"] > 300
    assert (document["false_fail"], document["false_warn"]) == (0, 0)


def test_the_sample_is_found_where_it_is(result: BenchResult) -> None:
    assert set(result.right("detected")) == set(SAMPLE)
    assert set(FAULTS) <= set(result.right("stage_right")) & set(result.right("row_right"))


def test_the_text_names_every_fault_and_every_probe(result: BenchResult) -> None:
    text = matrix(result)
    assert all(name in text for name in SAMPLE)
    assert all(name in text for name, *_ in result.probes())
    assert f"all faults ({len(SAMPLE)})" in text
    assert "rarely executed" in text
    assert len(matrix(result, only_misses=True)) < len(text)
    assert all(isinstance(line, str) for line in misses(result))


def test_a_fault_counts_only_if_right_on_every_base() -> None:
    fault, other = CATALOGUE["negated"], CATALOGUE["tiled_groups"]
    runs = [FaultRun(fault, "plain", Score(**RIGHT)), FaultRun(fault, "long", Score(detected=True)),
            FaultRun(other, "plain", Score(**RIGHT))]  # fmt: skip
    counts = BenchResult(runs, HealthyRuns()).to_dict()
    assert (counts["faults"], counts["detected"], counts["stage_right"]) == (2, 2, 1)
    assert counts["untouched"]["stage_right"] == 0
    legend, *lines = matrix(BenchResult(runs, HealthyRuns())).splitlines()
    assert legend.startswith("det: detected")
    marks = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert marks["negated"] == [".", *["x"] * 6]
    assert marks["tiled_groups"] == ["t", *["."] * 7]


def test_a_loud_fault_is_scored_by_what_was_found_before() -> None:
    run = run_fault(CATALOGUE["gathered_twice"], "plain")
    assert run.crash.startswith("AttributeError")
    assert run.score.detected


def test_rows_are_followed_through_the_balance() -> None:
    """The row is named at the rollout and found after the old log-probs, in another order."""
    run = run_fault(CATALOGUE["engine_wrong_on_one_row"], "plain")
    assert run.score.row_right
    assert run.score.hit is not None
    assert run.score.hit.stage == "old_log_prob"


def test_the_same_seed_gives_the_same_result() -> None:
    chosen = CATALOGUE["dropout_while_scoring"]
    assert run_fault(chosen, "plain").score == run_fault(chosen, "plain").score
    assert run_fault(chosen, "plain", seed=1).score != run_fault(chosen, "plain").score


def test_healthy_configurations_are_all_different_and_quiet_on_a_sample() -> None:
    every = healthy_configurations()
    assert len({one.name for one in every}) == len(every) > 60
    assert {one.options.settings().adv_estimator for one in every} >= {
        "grpo", "gae", "rloo", "opo", "gpg", "grpo_passk", "remax", "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
    }  # fmt: skip
    chosen = [one for one in every if one.name in ("jagged, tool turns, gae", "top-p", "images",
                                                   "different n, gae, dynamic")]  # fmt: skip
    total = run_healthy(chosen)
    assert len(chosen) == 4
    assert total.alarms == []
    assert total.batches == 3 * sum(one.steps for one in chosen)
    assert sum(total.executed.values()) == total.checks


@pytest.mark.parametrize("name", ["filler rows", "rejection, gae, nothing told"])
def test_the_last_batch_is_checked_in_one_piece(name: str) -> None:
    """What later stages write is there from the first one on, and says why a mask is cut."""
    [saved] = [one for one in healthy_configurations() if one.name == f"{name}, as saved"]
    ran = run_healthy([saved])
    assert (ran.alarms, ran.batches) == ([], 6)
    assert ran.executed["sampled_tokens_trained"] + ran.executed["mask_complete"] >= 6


def test_jagged_batches_have_rows_of_their_own_lengths() -> None:
    from dataproto_audit.testing.healthy import boundaries

    batch = next(b.batch for b in boundaries(BASES["plain"]) if b.stage == "reward")
    ragged = jagged(batch)["batch"]
    lengths = batch.batch["response_mask"].sum(1).tolist()
    assert [len(row) for row in ragged["responses"].unbind()] == lengths
    assert "attention_mask" not in ragged


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [(0, 30, 0.0, 0.11570), (1, 100, 0.000253, 0.05446), (5, 10, 0.18709, 0.81291),
     (10, 10, 0.69150, 1.0), (0, 0, 0.0, 1.0), (0, 3000, 0.0, 0.001229)],
)  # fmt: skip
def test_interval_against_published_values(hits: int, trials: int, low: float, high: float) -> None:
    assert clopper_pearson(hits, trials) == pytest.approx((low, high), abs=2e-5)
