"""What is wrong with a file itself, judged from what its reader can tell of it.

* ``dump.samples``: every sample is in the file once (``DPA105``).
* ``dump.advantage``: one advantage for equal rewards of a group (``DPA408``).

:mod:`dataproto_audit.dump.readers.consistent` says what is compared, and in which files.
"""

from __future__ import annotations

from dataclasses import replace

from dataproto_audit.auditor import Auditor
from dataproto_audit.contracts.relations import RowViolation
from dataproto_audit.dump.readers.consistent import Groups, Samples, groups_of, samples_of
from dataproto_audit.dump.readers.saved import Saved
from dataproto_audit.findings import Outcome, Report
from dataproto_audit.policy import Policy

HINTS = {
    "DPA105": "the writer appends: remove what an earlier run left before it writes again",
    "DPA408": "compare the order of the rewards with that of the advantages",
}


def report_of(saved: Saved, *, policy: Policy | None = None) -> Report:
    """Findings and outcomes about the file of ``saved``; empty where neither check applies."""
    policy = replace(policy or Policy(), aliases={})
    auditor = Auditor(on_fail="record", policy=policy)
    report = Report()
    samples, groups = samples_of(saved), groups_of(saved)
    if samples is not None:
        found = _repeated(samples)
        report.extend(auditor.judge("rollout", "dump.samples", "DPA105", found))
    if groups is not None and not groups.total:
        reason = "no uid, and no prompts of several groups: rows cannot be told apart by group"
        report.outcomes.append(Outcome("dump.advantage", "DPA408", "not_checkable", reason))
    elif groups is not None:
        odd = _odd(groups)
        report.extend(auditor.judge("advantage", "dump.advantage", "DPA408", odd))
    report.findings[:] = [
        replace(finding, step=saved.hint.step, hint=HINTS[finding.code])
        for finding in report.findings
    ]
    return report


def _repeated(samples: Samples) -> list[RowViolation]:
    if not samples.repeated:
        return []
    return [
        RowViolation(
            "DPA105", samples.names[-1],
            f"each ({', '.join(samples.names)}) once",
            f"{len(samples.repeated)} of {samples.total} rows repeat an earlier one",
            {"first repeated": samples.first}, ("rows_lost",), samples.repeated,
        )
    ]  # fmt: skip


def _odd(groups: Groups) -> list[RowViolation]:
    if not groups.odd:
        return []
    return [
        RowViolation(
            "DPA408", "advantage",
            "one advantage for equal rewards of a group, 0 where all are equal",
            f"other advantages in {groups.odd} of {groups.total} groups",
            {"rows of a group": groups.size}, ("row_permutation", "wrong_group_normalisation"),
            groups.rows,
        )
    ]  # fmt: skip
