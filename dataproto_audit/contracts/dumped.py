"""What was written of a batch against the batch: rows, and what its lines can be traced by."""

from collections.abc import Mapping

from dataproto_audit.batch import BatchView
from dataproto_audit.contracts.dims import factor_story
from dataproto_audit.contracts.relations import RowViolation

IDENTITY = ("request_id", "uid", "index", "session_id", "trajectory_id")
"""Fields that tell which sample a line is; a dump keeps those that the batch has."""


def dump_violations(
    held: BatchView, dumped: BatchView, *, factors: Mapping[str, int]
) -> list[RowViolation]:
    """Rows that are missing in the dump (DPA104), and identities that it lost (DPA107).

    ``factors`` are known counts that may explain a quotient, ranks above all. Values are not
    compared: text and rounding differ by design.
    """
    found = []
    if held.rows != dumped.rows:
        story = factor_story(held.rows, dumped.rows, factors)
        found.append(
            RowViolation(
                "DPA104",
                "samples",
                f"{held.rows} rows",
                f"{dumped.rows} rows",
                {"explained": story.partition(":")[0]} if story else {},
                ("rows_lost",),
            )
        )
    found += [
        RowViolation("DPA107", name, "in every line", "in none", {}, ("field_forgotten",))
        for name in IDENTITY
        if name in held and name not in dumped
    ]
    return found
