"""Whether the names of fields mean anything: aliases of a policy, and batches of other things.

Aliases may name fields of one's own that nothing declares; one that is nearly a name of ours is a
slip of the pen, and would leave the real field unchecked.
"""

from __future__ import annotations

from difflib import get_close_matches

from dataproto_audit.batch import BatchView
from dataproto_audit.codes import UsageError
from dataproto_audit.contracts.check import Violation, said
from dataproto_audit.contracts.fields import FIELDS
from dataproto_audit.findings import Outcome
from dataproto_audit.forms import PARTS
from dataproto_audit.policy import Policy


def check_aliases(policy: Policy) -> None:
    """Raise :class:`UsageError` for an alias whose own side is nearly the name of a field."""
    for ours in policy.aliases:
        near = [] if ours in FIELDS else get_close_matches(ours, list(FIELDS), 1, 0.85)
        if near:
            raise UsageError(
                "DPA851", f"aliases.{ours}: no field of ours is called {ours}.",
                f"Write aliases.{near[0]}, or another name for a field of your own.",
            )  # fmt: skip


def without_source(policy: Policy | None, view: BatchView) -> list[Outcome]:
    """An outcome for each alias whose source the batch, as it was given, does not hold."""
    aliases = policy.aliases if policy else {}
    return [
        Outcome(
            f"aliases.{ours}", "DPA101", "not_checkable",
            f"the batch has no field {alias.name}: nothing was read under this alias",
        )
        for ours, alias in aliases.items()
        if alias.name not in view
    ]  # fmt: skip


def nothing_known(view: BatchView) -> list[Violation]:
    """A batch that has fields, and none that any stage declares: checked, it would be ``ok``."""
    names = (*view.names, *(name for name in view.odd if name not in PARTS))
    if not names or any(name in FIELDS for name in names):
        return []
    expected = "fields such as prompts, responses, response_mask, old_log_probs or raw_prompt"
    return [Violation("DPA101", "", expected, f"only {', '.join(names[:8])}", {})]


def no_parts(view: BatchView) -> list[Violation]:
    """Parts of the mapping form that are no mapping from name to field."""
    return [
        Violation("DPA102", part, "a mapping from name to field", said(view.odd[part]), {})
        for part in PARTS
        if part in view.odd
    ]
