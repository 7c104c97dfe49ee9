"""Declaring probes, and what is derived from a declaration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit.auditor import Auditor
from dataproto_audit.batch import BatchView
from dataproto_audit.codes import CAUSES, CODES
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.findings import SEVERITIES
from dataproto_audit.probes import PROBES, Context, Settings, probe
from dataproto_audit.probes import context as contexts
from dataproto_audit.probes.registry import AT_END, Probe
from dataproto_audit.probes.scan import sum_of
from dataproto_audit.testing.healthy import Options, boundaries

FIELDS = {"responses": torch.ones((2, 3), dtype=torch.int64)}


@pytest.fixture
def registry() -> Iterator[dict[str, Probe]]:
    before = dict(PROBES)
    yield PROBES
    PROBES.clear()
    PROBES.update(before)


def _context(**known: Any) -> Context:
    return Context(1, "reward", "after", known.pop("settings", Settings()), **known)


def _probe(**declared: Any) -> Probe:
    return Probe("mine", "MY1", lambda view, stats, ctx: [], ("reward",), **declared)


@pytest.mark.parametrize("name", list(PROBES))
def test_every_probe_is_declared_well(name: str) -> None:
    made = PROBES[name]
    assert made.name == name
    assert made.code in CODES
    assert made.severity in SEVERITIES
    assert set(made.stages) <= {*STAGES, AT_END}
    assert (made.run.__doc__ or "").strip()
    for need in made.needs:
        source, dot, rest = need.partition(".")
        assert not dot or source in ("settings", "evidence", "history")
        assert source != "settings" or rest in Settings.known()


def test_a_code_of_the_catalogue_must_be_in_it(registry: dict[str, Probe]) -> None:
    with pytest.raises(ValueError, match="DPA999 is not in the catalogue"):
        probe("DPA999", stages=("reward",))
    assert probe("MY100", stages=("reward",))(lambda view, stats, ctx: [])


def test_a_name_is_taken_once(registry: dict[str, Probe]) -> None:
    def mask_values(view: Any, stats: Any, ctx: Any) -> list[Any]:
        return []

    with pytest.raises(ValueError, match="a probe named 'mask_values' exists already"):
        probe("MY1", stages=("reward",))(mask_values)


def test_a_probe_of_ones_own_runs_at_its_stage(registry: dict[str, Probe]) -> None:
    @probe("MY1", stages=("reward",), needs=("responses",), severity="warn")
    def no_sevens(view: BatchView, stats: Any, ctx: Context) -> Any:
        bad = view.numpy("responses") == 7
        if bad.any():
            yield ctx.fail("responses", cells=bad, expected="no 7")

    auditor = Auditor(Options().settings(), on_fail="raise")
    auditor.begin_step(4)
    responses = FIELDS["responses"].clone()
    responses[1, 2] = 7
    report = auditor.boundary("reward", {"responses": responses, "token_level_scores":
                                         torch.zeros((2, 3))})  # fmt: skip
    [finding] = [f for f in report if f.check == "no_sevens"]
    assert (finding.code, finding.severity, finding.stage, finding.step) == (
        "MY1", "warn", "reward", 4,
    )  # fmt: skip
    assert finding.columns == {1: (2,)}
    assert "no_sevens" in auditor.fired


def test_an_error_of_a_probe_is_told_once_and_the_probe_is_left_off() -> None:
    def broken(view: Any, stats: Any, ctx: Any) -> Any:
        raise RuntimeError("oops")

    made = {"broken": Probe("broken", "MY1", broken, ("reward",))}
    auditor = Auditor(Options().settings(), on_fail="record", probes=made)
    kinds = []
    for step in (1, 2):
        auditor.begin_step(step)
        report = auditor.boundary("reward", FIELDS)  # fields are missing, too
        kinds.append([f.code for f in report if f.code.startswith("DPA9")])
        outcome = next(o for o in report.outcomes if o.check == "broken")
        assert outcome.kind == "not_checkable"
    assert kinds == [["DPA901"], []]
    assert outcome.reason == "switched off after an error of its own"


def test_a_probe_may_run_now_and_then() -> None:
    made = {"rare": _probe(every=3)}
    auditor = Auditor(Options().settings(), on_fail="record", probes={"mine": made["rare"]})
    kinds = []
    for step in range(1, 6):
        auditor.begin_step(step)
        report = auditor.boundary("reward", FIELDS)
        kinds.append(next(o for o in report.outcomes if o.check == "mine").kind)
    assert kinds == ["passed", "not_applicable", "not_applicable", "passed", "not_applicable"]


def test_needs_are_fields_and_what_is_beside_them() -> None:
    stat = sum_of("s", ("values",), lambda block: 0)
    made = _probe(needs=("responses", "settings.n", "evidence.losses", "history.a/b"),
                  stats=(stat,))  # fmt: skip
    assert made.fields == ("responses", "values")
    view = BatchView.of({**FIELDS, "values": torch.zeros((2, 3))})
    nothing, some = _context(), _context(settings=Settings(n=2))
    notes = {"losses": [{"number": 1}]}
    full = _context(settings=Settings(n=2), evidence=notes, history={"a/b": [1.0]})
    noted = _context(settings=Settings(n=2), evidence=notes)
    assert made.missing(BatchView.of({}), nothing) == "field not in the batch: responses, values"
    assert made.missing(view, nothing) == "setting unknown: n"
    assert made.missing(view, some) == "not recorded: losses"
    assert made.missing(view, noted) == "no earlier steps of a/b"
    assert made.missing(view, full) == ""


@pytest.mark.parametrize("nothing", [None, [], (), {}])
def test_empty_evidence_is_none(nothing: Any) -> None:
    made = _probe(needs=("evidence.ranks",))
    context = _context(evidence={"ranks": nothing})
    assert made.missing(BatchView.of(FIELDS), context) == "not recorded: ranks"
    zero = _context(evidence={"weights": np.zeros(2)})
    assert _probe(needs=("evidence.weights",)).missing(BatchView.of(FIELDS), zero) == ""


@pytest.mark.parametrize("name", ["ranks", "losses", "metrics", "sampling", "sync_probe"])
@pytest.mark.parametrize("value", [3, "x", [1], ["x"], float("nan"), np.ones(2), object()])
def test_a_meta_entry_that_only_shares_the_name_is_no_evidence(name: str, value: Any) -> None:
    made = _probe(needs=(f"evidence.{name}",))
    context = _context(evidence={name: value})
    assert made.missing(BatchView.of(FIELDS), context) == f"not recorded: {name}"
    assert context.given(name) is None


def test_broken_and_empty_fields_are_not_read() -> None:
    made = _probe(needs=("responses",))
    context = _context()
    context.broken = {"responses": "is float32"}
    assert made.missing(BatchView.of(FIELDS), context) == (
        "field breaks its declaration: responses is float32"
    )
    empty = BatchView.of({"responses": torch.zeros((0, 3), dtype=torch.int64)})
    assert made.missing(empty, _context()) == "field without values: responses"


def test_too_many_cells_are_counted_and_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "MAX_CELLS", 3)
    finding = _context().fail("x", cells=np.ones((2, 2), bool))
    assert finding.rows == (0, 1)
    assert finding.columns == {}
    assert finding.evidence == {"cells": 4, "cells listed": "none, too many"}


def test_causes_of_a_finding_are_named_once() -> None:
    finding = _context().fail("x", causes=("shift", "precision", "shift"))
    assert finding.causes == ("shift", "precision")
    assert set(finding.causes) <= set(CAUSES)


def test_a_probe_runs_again_where_what_it_reads_has_changed_unless_told(
    registry: dict[str, Probe],
) -> None:
    """By default; ``later=False`` keeps it at home."""
    seen: list[tuple[str, str]] = []

    def watch(name: str, **declared: Any) -> None:
        def run(view: Any, stats: Any, ctx: Any) -> list[Any]:
            seen.append((name, ctx.stage))
            return []

        run.__name__ = name
        probe("MY1", stages=("rollout",), needs=("response_mask",), **declared)(run)

    watch("everywhere")
    watch("at_home", later=False)
    options = Options()
    auditor = Auditor(replace(options.settings(), rejection=True), on_fail="record")
    auditor.begin_step(1)
    for b in boundaries(options):
        if b.stage == "advantage" and b.when == "after":
            b.batch.batch["response_mask"] = b.batch.batch["response_mask"] * 0
        auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
        if b.stage == "advantage" and b.when == "after":
            break
    assert seen == [
        ("everywhere", "rollout"), ("at_home", "rollout"), ("everywhere", "advantage"),
    ]  # fmt: skip


def test_declared_defaults(registry: dict[str, Probe]) -> None:
    probe("MY2", stages=("reward",))(lambda view, stats, ctx: [])
    made = registry["<lambda>"]
    assert (made.severity, made.every, made.later) == ("fail", 1, True)
    assert (made.needs, made.stats, made.applies, made.absent) == ((), (), None, None)


@pytest.mark.parametrize(
    ("settings", "filtered"),
    [
        ({}, False), ({"top_p": 1.0, "top_k": -1}, False), ({"top_k": 0}, False),
        ({"top_p": 0.99}, True), ({"top_k": 1}, True), ({"top_p": 1.0, "top_k": 50}, True),
    ],
)  # fmt: skip
def test_whether_a_filter_leaves_tokens_out(settings: dict[str, Any], filtered: bool) -> None:
    assert Settings(**settings).filtered is filtered


def test_sizes_of_one_explain_nothing() -> None:
    assert Settings(n=4, world_size=1, tp_size=2).factors() == {"n": 4, "tp": 2}
    assert Settings().factors() == {}
