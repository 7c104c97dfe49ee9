"""The entries of the catalogue, family by family; :mod:`dataproto_audit.codes` reads them.

Plain data: an entry is a code, a title, what it means, its causes and how it is mended.
"""

from dataproto_audit.catalogue import log_probs, rewards, runs, steps, structure, tokens
from dataproto_audit.catalogue.causes import CAUSES
from dataproto_audit.catalogue.entry import Entry
from dataproto_audit.catalogue.examples import EXAMPLES
from dataproto_audit.catalogue.reports import REPORTS

ENTRIES: tuple[Entry, ...] = (
    *structure.ENTRIES,
    *tokens.ENTRIES,
    *log_probs.ENTRIES,
    *rewards.ENTRIES,
    *steps.ENTRIES,
    *runs.ENTRIES,
)

__all__ = ["CAUSES", "ENTRIES", "EXAMPLES", "REPORTS", "Entry"]
