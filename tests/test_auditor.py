"""Where boundaries are checked: levels, policies, totals, own faults, seeded faults."""

import logging
import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import dataproto_audit as da
from dataproto_audit.auditor import Auditor, Settings
from dataproto_audit.codes import UsageError
from dataproto_audit.dump.tables import TableWriter
from dataproto_audit.findings import OUTCOME_KINDS, AuditError
from dataproto_audit.probes import PROBES
from dataproto_audit.probes.logprobs import PRODUCERS
from dataproto_audit.probes.registry import Probe
from dataproto_audit.testing.faults import FAULTS, parse_injection
from dataproto_audit.testing.healthy import Options, boundaries

CONFIGURATIONS = {
    "plain": Options(),
    "one mini-batch of many": Options(prompts=8, n=4, mini_batches=4),
    "two samples": Options(prompts=6, n=2),
    "unbalanced": Options(balanced=False),
    "four ranks": Options(ranks=4, prompts=8),
    "one rank": Options(ranks=1),
    "no reference": Options(reference=False),
    "entropy bonus": Options(entropy=True),
    "kl in reward": Options(kl_in_reward=True),
    "critic": Options(critic=True),
    "tool turns": Options(multi_turn=True, response_width=8),
    "half precision": Options(dtype="bfloat16", prompts=8, n=8),
    "duplicate prompts": Options(duplicate_prompts=True, prompts=6),
    "equal groups": Options(equal_groups=True),
    "mean only": Options(norm_by_std=False),
    "sequence mean": Options(loss_agg_mode="seq-mean-token-mean"),
    "all rows end at once": Options(one_token=16),
    "no row ends": Options(one_token=0, truncated=16),
    "cold": Options(temperature=0.5),
}


def audited(options, auditor, *, steps=1):
    for step in range(1, steps + 1):
        auditor.begin_step(step)
        metrics = {}
        for b in boundaries(replace(options, step=step)):
            auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
            metrics |= b.evidence.get("metrics", {})
        auditor.end_step(metrics)
    return auditor


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_healthy_steps_stay_quiet(name):
    options = CONFIGURATIONS[name]
    auditor = audited(options, Auditor(options.settings()), steps=2)
    assert [str(f) for f in auditor.findings if f.severity != "info"] == []
    assert auditor.outcomes["failed"] == auditor.severities["info"]
    assert auditor.outcomes["passed"] > 60


def test_totals_add_up_and_nothing_is_silent(tmp_path):
    options = Options()
    with TableWriter(tmp_path / "tables") as tables:
        auditor = Auditor(options.settings(), tables=tables)
        seen = Counter()
        auditor.begin_step(1)
        for b in boundaries(options):
            report = auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
            seen.update(outcome.kind for outcome in report.outcomes)
            assert all(o.reason for o in report.outcomes if o.kind.startswith("not_"))
            assert sum(report.counts().values()) == len(report.outcomes)
        seen.update(outcome.kind for outcome in auditor.end_step().outcomes)
    assert seen == +auditor.outcomes
    assert set(seen) <= set(OUTCOME_KINDS)


def test_levels():
    options = Options()
    off = audited(options, Auditor(options.settings(), level="off"))
    assert (off.boundaries, off.outcomes) == (0, Counter())
    shape = audited(options, Auditor(options.settings(), level="shape"))
    full = audited(options, Auditor(options.settings(), level="full"))
    assert 0 < shape.outcomes["passed"] < full.outcomes["passed"]
    assert not shape.fired & set(PROBES)


def test_every_probe_that_fits_the_loop_fires_on_healthy_steps():
    fired = set()
    for options in (Options(entropy=True), Options(kl_in_reward=True), Options(ranks=4)):
        fired |= audited(options, Auditor(options.settings()), steps=22).fired
    recorded = Options(recorded=True, micro_rows=4)
    for options in (
        replace(recorded, multi_turn=True, critic=True, response_width=12, mini_batches=2),
        replace(recorded, prompts=3, pad_rows=4),
        replace(recorded, max_token_len=40),
        Options(images=True),
        Options(exact=True, step_drift=0.0),
        Options(dtype="bfloat16"),
        Options(correction=True),
        Options(entropy=True, prompts=12, n=8, response_width=12),
    ):
        fired |= audited(options, Auditor(options.settings()), steps=4).fired
    fired |= audited(Options(prompts=6), Auditor(Settings(n=4)), steps=2).fired
    with_a_model = {f"{field}_recomputed" for field in PRODUCERS}
    assert set(PROBES) - fired <= {
        "token_limit", "packed_rows", "engine_scores_alike", *with_a_model,
    }  # fmt: skip


def seeded(name, options, on_fail="record"):
    """One step with the fault: the auditor, what the fault changed, and the reports by stage."""
    fault = FAULTS[name]
    auditor = Auditor(options.settings(), on_fail=on_fail)
    truth, reports = None, {}
    hooks = {}
    if fault.where == "sampling":
        hooks["sampling"] = fault.apply
    if fault.where == "before_sync":
        hooks["sent"] = fault.apply
    auditor.begin_step(2)
    for b in boundaries(replace(options, step=2), **hooks):
        if fault.where == "after_stage" and (b.stage, b.when) == (fault.stage, "after"):
            truth = fault.apply(b.batch)
        reports[b.stage, b.when] = auditor.boundary(
            b.stage, b.batch, when=b.when, evidence=b.evidence
        )
    return auditor, truth, reports


CODE_OF = {
    "log_prob_shift": "DPA304",
    "mask_on_pad": "DPA205",
    "tiled_groups": "DPA404",
    "reward_on_pad": "DPA405",
    "stale_rollout_weights": "DPA605",
    "other_temperature": "DPA111",
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_the_first_finding_with_exact_cells(name, seed):
    options = Options(prompts=24, n=4, response_width=5, seed=seed)
    auditor, truth, _ = seeded(name, options)
    first = auditor.findings[0]
    fault = FAULTS[name]
    assert (first.code, first.stage, first.field) == (CODE_OF[name], fault.stage, fault.field)
    assert first.severity == "fail"
    assert first.causes
    if truth is not None:
        assert sorted(first.rows) == sorted(truth.rows)
        assert dict(first.columns) == truth.columns
        assert len(first.row_keys) == len(first.rows)


def test_raise_stops_at_the_boundary_and_survives_pickling(tmp_path):
    with pytest.raises(AuditError) as caught:
        seeded("mask_on_pad", Options(prompts=8), on_fail="raise")
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.findings == caught.value.findings
    assert error.exit_code == 1
    text = str(error)
    for fragment in ("DPA205", "response_mask", "after rollout", "columns", "explain DPA205"):
        assert fragment in text


def test_warn_logs_and_goes_on(caplog):
    with caplog.at_level(logging.WARNING, logger="dataproto_audit"):
        auditor, _, _ = seeded("reward_on_pad", Options(prompts=24), on_fail="warn")
    assert "DPA405" in caplog.text
    assert auditor.severities["fail"] >= 1


@pytest.mark.parametrize("name", [n for n in FAULTS if FAULTS[n].where == "after_stage"])
def test_what_a_raised_finding_saw_is_in_the_tables(name, tmp_path):
    options, fault = Options(prompts=24), FAULTS[name]
    with TableWriter(tmp_path / "tables") as tables:
        auditor = Auditor(options.settings(), tables=tables)
        auditor.begin_step(1)

        def step():
            for b in boundaries(options):
                if (b.stage, b.when) == (fault.stage, "after"):
                    fault.apply(b.batch)
                auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)

        with pytest.raises(AuditError) as caught:
            step()
    run = da.open_run(tmp_path)
    finding = caught.value.findings[0]
    assert finding.code in set(run.table("findings").code)
    rows = run.table("rows")
    assert set(rows[rows["flags"].str.contains(finding.code)].row) == set(finding.rows)
    tokens = run.table("tokens")
    assert set(tokens[tokens.flag != ""].row) >= set(finding.rows)


def test_an_error_of_our_own_is_reported_once_and_training_goes_on(caplog):
    def broken(view, stats, ctx):
        raise ZeroDivisionError("not your fault")

    probes = {**PROBES, "broken": Probe("broken", "X1", broken, ("reward",))}
    options = Options()
    auditor = audited(options, Auditor(options.settings(), probes=probes), steps=3)
    [finding] = auditor.findings
    assert (finding.code, finding.check, finding.severity) == ("DPA901", "broken", "warn")
    assert "not your fault" in finding.actual
    assert auditor.boundaries == 3 * len(list(boundaries(options)))


def test_a_probe_with_every_runs_at_its_steps_only():
    ran = []

    def rare(view, stats, ctx):
        ran.append(ctx.step)
        return []

    probes = {"rare": Probe("rare", "X2", rare, ("reward",), every=3)}
    options = Options()
    auditor = audited(options, Auditor(options.settings(), probes=probes), steps=7)
    assert ran == [1, 4, 7]
    assert auditor.outcomes["not_applicable"] >= 4


def test_an_unknown_stage_or_batch_is_a_usage_error():
    auditor = Auditor()
    auditor.begin_step(1)
    with pytest.raises(UsageError, match="DPA"):
        auditor.boundary("no_such_stage", None)
    with pytest.raises(UsageError, match="DPA857"):
        auditor.boundary("rollout", 3)


def test_injections_are_parsed_strictly():
    fault, step = parse_injection("tiled_groups@12")
    assert (fault.name, step) == ("tiled_groups", 12)
    for text in ("tiled_groups", "tiled_groups@0", "tiled@3", "tiled_groups@x"):
        with pytest.raises(UsageError, match="Faults: log_prob_shift"):
            parse_injection(text)


def test_auditing_changes_neither_the_batch_nor_the_random_state():
    options = Options(prompts=8)
    auditor = Auditor(options.settings())
    auditor.begin_step(1)
    for b in boundaries(options):
        before = pickle.dumps(b.batch)
        versions = (
            {} if b.batch.batch is None else {n: t._version for n, t in b.batch.batch.items()}
        )
        state = np.random.get_state()[1].copy()
        auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
        assert pickle.dumps(b.batch) == before
        assert (np.random.get_state()[1] == state).all()
        if b.batch.batch is not None:
            assert {n: t._version for n, t in b.batch.batch.items()} == versions
