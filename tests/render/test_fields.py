"""The printed field-evolution table: every name whole at every width."""

import io

import pytest
from rich.console import Console

from dataproto_audit.render.fields import fields_table, print_fields


def printed(width: int) -> str:
    out = io.StringIO()
    print_fields(Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120, 160, 240])
def test_no_name_is_broken(width):
    text, table = printed(width), fields_table()
    words = set(text.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").replace(",", " ").split())
    names = {row["field"] for row in table["fields"]}
    for row in table["stages"]:
        names |= {row["stage"], *row["reads"], *row["adds"], *row["may_add"], *row["drops"]}
    assert names <= words, names - words


def test_a_narrow_terminal_gets_no_line_beyond_its_width():
    assert max(len(line) for line in printed(72).splitlines()) <= 72


def test_a_narrow_terminal_leaves_out_what_is_empty():
    first = printed(80).split("rollout\n")[0]
    assert "adds     uid, raw_prompt" in first
    assert "reads" not in first


@pytest.mark.parametrize("width", [80, 240])
def test_brackets_of_a_meaning_are_printed(width):
    assert "responses[:, t]" in printed(width)
