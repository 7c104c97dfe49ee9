"""One declaration, three uses."""

from pathlib import Path

import pyarrow as pa
import pytest

from dataproto_audit.dump import schema
from dataproto_audit.dump.frames import pandera_schema
from dataproto_audit.findings import Finding

README = Path(__file__).parents[2] / "reports" / "README.md"


def test_the_readme_is_made_from_the_schema() -> None:
    text = README.read_text(encoding="utf-8")
    hint = "run: python -m dataproto_audit.dump.schema reports/README.md"
    assert schema.refreshed(text) == text, hint


def test_the_readme_names_every_table_and_column() -> None:
    text = README.read_text(encoding="utf-8")
    for table in schema.TABLES.values():
        section = text.partition(f"\n### {table.name}\n")[2].partition("\n### ")[0]
        for column in table.columns:
            assert f"| `{column.name}` | {column.kind} | {column.unit} |" in section


def test_refreshing_needs_the_markers() -> None:
    with pytest.raises(ValueError, match="lacks the markers"):
        schema.refreshed("no markers here")


def test_the_nine_tables_of_the_design() -> None:
    assert list(schema.TABLES) == [
        "steps", "fields", "outcomes", "findings", "groups", "rows", "tokens", "ranks", "loss",
    ]  # fmt: skip


@pytest.mark.parametrize("table", schema.TABLES.values(), ids=list(schema.TABLES))
def test_declarations_are_complete(table: schema.Table) -> None:
    names = [column.name for column in table.columns]
    assert len(set(names)) == len(names)
    assert table.by_name["step"].kind == "i64"
    assert table.columns[table.step_at].name == "step"
    assert [c.name for c in table.given] == [n for n in names if n != "step"]
    for column in table.columns:
        assert column.unit, column.name
        assert column.meaning, column.name
        assert "|" not in column.meaning + column.unit  # it would break the table in the README
    assert table.example


@pytest.mark.parametrize("table", schema.TABLES.values(), ids=list(schema.TABLES))
def test_arrow_and_pandera_agree_with_the_declaration(table: schema.Table) -> None:
    assert table.arrow.names == [column.name for column in table.columns]
    assert table.arrow.metadata[schema.VERSION_KEY] == str(schema.SCHEMA_VERSION).encode()
    assert pa.ipc.read_schema(pa.py_buffer(table.schema_message)).equals(table.arrow)
    checked = pandera_schema(table)
    for column in table.columns:
        assert table.arrow.field(column.name).nullable == column.nullable
        assert checked.columns[column.name].nullable == (column.nullable or column.is_float)


def test_the_findings_table_holds_every_key_of_a_finding() -> None:
    finding = Finding("DPA101", "fail", "rollout", "fields")
    assert [c.name for c in schema.TABLES["findings"].columns] == list(finding.to_dict())
