"""A batch that was about to enter a stage, at a stage where its fields do not show where it is.

Prompts look the same before and after they are repeated, and a batch that is judged as one that has
left a stage is accused of what that stage had not done yet.
"""

from __future__ import annotations

from typing import Any

from dataproto_audit.auditor import Auditor
from dataproto_audit.checker.api import check
from dataproto_audit.findings import Report
from dataproto_audit.policy import Policy
from dataproto_audit.probes import Settings

EARLY = ("prompts", "rollout")
"""Stages whose input has no responses: its structure is all that can be judged."""


def check_entering(
    stage: str, batch: Any, *, settings: Settings, policy: Policy | None = None
) -> Report:
    """What is wrong with ``batch`` as it enters ``stage``.

    Later than the rollout its fields tell which stages it has passed, and it is checked as one that
    has left them. Raises :class:`UsageError` as :func:`~dataproto_audit.check` does.
    """
    if stage not in EARLY:
        return check(batch, config=settings, policy=policy)
    auditor = Auditor(settings, on_fail="record", policy=policy or Policy())
    auditor.begin_step(None)
    return auditor.boundary(stage, batch, when="before")
