"""``check`` and its companions: everything that can be said of a batch at hand.

::

    report = dataproto_audit.check(batch)                         # as far as the batch has come
    report = dataproto_audit.check(after, before=before)          # one boundary, both sides
    report = dataproto_audit.check(None, history=[{"step": 1, "actor/grad_norm": 0.3}, ...])
    print(report); report.ok; report.findings[0].rows

The same auditor as in a live run does the work; a batch is led through the stages that it has
passed, seen as it was then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from dataproto_audit.auditor import Auditor
from dataproto_audit.batch import BatchView
from dataproto_audit.checker.config import settings_from
from dataproto_audit.checker.metrics import as_metrics
from dataproto_audit.checker.names import check_aliases, no_parts, nothing_known, without_source
from dataproto_audit.checker.reached import producer, seen_at, stages_reached
from dataproto_audit.codes import UsageError
from dataproto_audit.contracts.check import Violation, undeclared
from dataproto_audit.contracts.dumped import dump_violations
from dataproto_audit.contracts.merge import concat_violations, union_violations
from dataproto_audit.contracts.stages import PROMPT_SIDE, STAGES
from dataproto_audit.findings import SEVERITIES, Finding, Outcome, Report
from dataproto_audit.policy import Policy
from dataproto_audit.probes import Settings
from dataproto_audit.probes.recompute import beyond, model_of

BETWEEN = "DPA113"


def check(
    batch: Any,
    stage: str | None = None,
    before: Any = None,
    history: Iterable[Any] | None = None,
    model: Any = None,
    config: Any = None,
    *,
    policy: Policy | None = None,
) -> Report:
    """Check a batch, a boundary, or the metrics of several steps.

    Args:
        batch: our or verl's ``DataProto``, a padded or jagged ``TensorDict``, a mapping with the
            keys ``batch``, ``non_tensor_batch`` and ``meta_info`` (what holds no data in it, or
            is no field, is a finding), what
            :func:`~dataproto_audit.dump.readers.read_batches` returns, or None with a history.
        stage: the stage that the batch has just left, checked alone; without it every stage that
            the fields show the batch to have passed (:mod:`dataproto_audit.checker.reached`).
        before: the same batch as it entered ``stage``, or at any earlier boundary.
        history: earlier steps, oldest first: batches, or mappings from metric to value. Names of
            metrics may be ours, verl's or a peer's.
        model: folder of a Hugging Face model, or a model, to recompute log-probs with.
        config: a :class:`Settings`, a mapping with verl's or our names, or the path of a YAML file.
            What it leaves open is taken from the batch's meta entries.
        policy: codes to leave out, severities, tolerances, and names of your own.

    Returns:
        Findings ordered by stage, then severity, ``info`` last; outcomes of all checks, those that
        could not run with what they lack.

    Raises:
        UsageError: ``batch`` is no form of batch, ``stage`` is not declared, ``config`` or
            ``model`` cannot be read, or an alias of ``policy`` would hide a field. What is wrong
            inside a batch never raises.
    """
    policy = policy or Policy()
    check_aliases(policy)
    given = _view(batch)
    view = given and given.under(policy.renamed())
    settings, wrong = settings_from(config, view.meta if view else {})
    # Views are renamed here, once: another time would shift the columns of a field again.
    auditor = Auditor(settings, on_fail="record", policy=replace(policy, aliases={}))
    auditor.model = None if model is None else model_of(model)
    report = Report()
    steps = _listed(history, "history", "steps")
    if view is None and not steps:
        raise UsageError("DPA857", "there is nothing to check.", "Pass a batch or a history.")
    for number, step in enumerate(steps, 1):
        report.extend(_one_step(auditor, step, number, policy))
    if view is not None and given is not None:
        auditor.begin_step(_step_of(view))
        report.extend(_meta(auditor, wrong))
        report.extend(_said(auditor, "batch.parts", "DPA102", no_parts(view), stage="prompts"))
        report.outcomes += without_source(policy, given)
        for unknown in nothing_known(view):
            reason = f"no field that is declared, {unknown.actual}"
            report.outcomes.append(Outcome("fields.known", "DPA101", "not_checkable", reason))
            return report
        if auditor.model is not None:
            strange = beyond(auditor.model, view)
            report.extend(_said(auditor, "model.vocabulary", "DPA852", strange))
        if before is not None:
            report.extend(
                _boundary(auditor, stage, _view(before, policy) or BatchView.of({}), view)
            )
        else:
            report.extend(_stages(auditor, [stage] if stage else None, view))
        if not report.outcomes:
            reason = "there is no field in the batch"
            report.outcomes.append(Outcome("fields.known", "DPA101", "not_checkable", reason))
    report.findings[:] = ordered(report.findings)
    return report


def check_union(left: Any, right: Any, *, config: Any = None) -> Report:
    """What a union of two batches would break: row counts, other values under one name."""
    sides = [_view(side) or BatchView.of({}) for side in (left, right)]
    settings, wrong = settings_from(config, {**sides[1].meta, **sides[0].meta})
    auditor = Auditor(settings, on_fail="record")
    found = union_violations(sides[0], sides[1], factors=settings.factors())
    report = _meta(auditor, wrong)
    report.extend(auditor.judge("union", "union.merge", "DPA114", found))
    return report


def check_concat(parts: Sequence[Any], *, config: Any = None) -> Report:
    """What joining the rows of several batches would break or lose."""
    sides = [_view(part) or BatchView.of({}) for part in _listed(parts, "parts", "batches")]
    settings, wrong = settings_from(config, sides[0].meta if sides else {})
    auditor = Auditor(settings, on_fail="record")
    report = _meta(auditor, wrong)
    report.extend(auditor.judge("dispatch", "dispatch.concat", "DPA116", concat_violations(sides)))
    return report


def check_dump(batch: Any, dumped: Any, *, config: Any = None) -> Report:
    """What a file that was written of ``batch`` lost: rows, and fields that name a sample.

    Findings are ``warn``: the training goes on as it should, and nobody can trace its samples.
    """
    sides = [_view(side) or BatchView.of({}) for side in (batch, dumped)]
    settings, wrong = settings_from(config, sides[0].meta)
    auditor = Auditor(settings, on_fail="record")
    found = dump_violations(sides[0], sides[1], factors=settings.factors())
    report = auditor.judge("dump", "dump.complete", "DPA104", found)
    report.findings[:] = [replace(finding, severity="warn") for finding in report.findings]
    report.extend(_meta(auditor, wrong))
    return report


def _listed(given: Iterable[Any] | None, name: str, of: str) -> list[Any]:
    """What was given as a list, or UsageError."""
    if given is None:
        return []
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise UsageError(
            "DPA857", f"{name} is a {type(given).__name__}.", f"Pass a list of {of}, oldest first."
        )
    return list(given)


def _said(
    auditor: Auditor, check: str, code: str, found: list[Violation], *, stage: str = "rollout"
) -> Report:
    """Findings about what belongs to no stage: nothing checkable, a model of other ids."""
    return auditor.judge(stage, check, code, found) if found else Report()


def _meta(auditor: Auditor, wrong: Mapping[str, str]) -> Report:
    """Findings about meta entries that settings could not be read from."""
    found = [
        Violation("DPA112", f"meta_info.{key}", "a value of the documented kind", problem, {})
        for key, problem in wrong.items()
    ]
    return auditor.judge("prompts", "prompts.meta", "DPA112", found) if found else Report()


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Findings by step, stage in the order of the loop, then severity, each once.

    What is only ``info`` comes last, so that the first finding is the one to look at.
    """
    stages = {name: place for place, name in enumerate(STAGES)}

    def place(finding: Finding) -> tuple[bool, int, int, int]:
        return (
            finding.severity == "info",
            finding.step or 0,
            stages.get(finding.stage, len(stages)),
            SEVERITIES.index(finding.severity),
        )

    told = {(f.step, f.stage, f.code, f.field, f.rows, str(f.columns)): f for f in findings}
    return sorted(told.values(), key=place)


def _view(batch: Any, policy: Policy | None = None) -> BatchView | None:
    if batch is None:
        return None
    if not isinstance(batch, Mapping):
        # A saved batch was made by the readers, and of no other kind is tensordict needed here.
        from dataproto_audit.dump.readers import Saved

        if isinstance(batch, Saved):
            batch = batch.batch
    view = BatchView.of(batch)
    return view.under(policy.renamed()) if policy and policy.aliases else view


def _step_of(view: BatchView) -> int | None:
    step = view.meta.get("global_steps", view.meta.get("global_step"))
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _one_step(auditor: Auditor, step: Any, number: int, policy: Policy) -> Report:
    metrics = as_metrics(step)
    if metrics is None:
        view = _view(step, policy) or BatchView.of({})
        auditor.begin_step(_step_of(view) or number)
        report = _stages(auditor, None, view)
        report.extend(auditor.end_step())
        return report
    told = metrics.get("training/global_step", number)
    whole = isinstance(told, (int, float)) and isfinite(told)
    auditor.begin_step(int(told) if whole else number)
    return auditor.end_step(metrics)


def _stages(auditor: Auditor, stages: Sequence[str] | None, view: BatchView) -> Report:
    report = Report()
    unknown = undeclared(view)
    if unknown:
        reason = f"nothing declares {', '.join(unknown)}; see docs/extending.md"
        report.outcomes.append(Outcome("fields.undeclared", "DPA101", "not_checkable", reason))
    if stages is not None:
        for stage in stages:
            report.extend(auditor.boundary(stage, view))
        return report
    for stage in stages_reached(view, auditor.settings):
        partial = stage != "values"  # reached without values, it is the configuration that says so
        report.extend(auditor.boundary(stage, seen_at(stage, view), partial=partial))
    return report


def _boundary(auditor: Auditor, stage: str | None, before: BatchView, after: BatchView) -> Report:
    """Both sides of a boundary: what ``before`` had passed, then what ``after`` adds to it."""
    if stage is not None:
        report = auditor.boundary(stage, before, when="before")
        report.extend(auditor.boundary(stage, after))
        return report
    passed = stages_reached(before, auditor.settings)
    report = _stages(auditor, passed and None, before)
    new = [s for s in stages_reached(after, auditor.settings) if s not in passed]
    if new:
        for name in new:
            report.extend(auditor.boundary(name, seen_at(name, after), partial=True))
        return report
    last = passed[-1] if passed else "rollout"
    entered = auditor.boundary(last, after, when="before")
    entered.findings[:] = [_at_home(finding) for finding in entered.findings]
    report.extend(entered)
    auditor.begin_step(auditor.step)
    report.extend(_stages(auditor, None, after))
    return report


def _at_home(finding: Finding) -> Finding:
    """A change between two equal boundaries, named at the stage that writes the field."""
    if finding.code != BETWEEN or not finding.field:
        return finding
    name = finding.field.split(".")[-1]
    home = "union" if name in PROMPT_SIDE else producer(name)
    return replace(finding, stage=home)


__all__ = ["Settings", "check", "check_concat", "check_dump", "check_union", "ordered"]
