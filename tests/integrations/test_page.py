"""docs/attaching.md says what the code does."""

import re
from pathlib import Path

from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.integrations import verl_v0
from dataproto_audit.integrations.options import KNOWN, Options
from tests.verl.looks import CRITIC, GRPO, boundaries, seen_in_v1

PAGE = (Path(__file__).parents[2] / "docs" / "attaching.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, list[str]]:
    """Cells of the table under a heading, by what the first one holds in backquotes."""
    part = PAGE.partition(f"## {heading}")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("| `")]
    return {cells[0].strip().strip("`"): [c.strip() for c in cells[1:]] for cells in lines}


def test_every_setting_is_listed_with_its_default() -> None:
    table = rows("Settings")
    assert list(table) == list(KNOWN)
    for name, (default, _) in table.items():
        value = getattr(Options(), name)
        told = default.strip("`")
        if str(value) in ("()", "", "0"):
            assert told in ("all", "none") or "reports/" in told, name
        else:
            assert told == str(value).lower() if isinstance(value, bool) else told == str(value)


def test_every_call_is_listed_at_its_stage() -> None:
    table = rows("Which call is which stage")
    assert set(table) <= set(STAGES)
    for calls in (verl_v0.TRAINER, verl_v0.FUNCTIONS, verl_v0.CORRECTIONS):
        for name, (stage, _) in calls.items():
            assert f"`{name}`" in table[stage][0]
    assert re.search(r"0\.7\.1.*0\.9\.1", PAGE, re.DOTALL)


def test_the_table_of_runs_is_what_the_runs_are_held_to() -> None:
    table = rows("What was run")
    columns = [boundaries(*GRPO), boundaries(*CRITIC), seen_in_v1(*GRPO), seen_in_v1(*CRITIC)]
    for place, expected in enumerate(columns):
        assert {name for name, cells in table.items() if cells[place] != "-"} == expected
    for place, before_the_first_step in ((0, {"sync_weights.after"}), (2, set())):
        once_more = {name for name, cells in table.items() if cells[place] == "3"}
        assert once_more == {"validation.after", *before_the_first_step}
