"""Tables as pandas, checked against :mod:`.schema` by pandera.

pandas and pandera are imported here and only when a table is read: writing a run needs neither.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dataproto_audit.dump.schema import Column, Table
from dataproto_audit.dump.streams import unreadable

if TYPE_CHECKING:
    import pandas as pd

_PANDAS_KINDS = {"i64": "int64", "i32": "int32", "f64": "float64", "f32": "float32", "bool": "bool"}


def pandas_dtype(column: Column) -> str | None:
    """The pandas dtype of a column; None for text, which is ``str`` or ``object`` by version."""
    if column.is_text:
        return None
    kind = _PANDAS_KINDS[column.kind]
    # Integers with gaps keep their kind: pandas would otherwise turn them into floats.
    return kind.capitalize() if column.nullable and kind.startswith("int") else kind


def to_pandas(table: pa.Table, spec: Table) -> pd.DataFrame:
    """An arrow table as pandas: empty cells are None in text, NaN in floats, NA in integers."""
    import pandas as pd

    nullable = {pa.int32(): pd.Int32Dtype(), pa.int64(): pd.Int64Dtype()}
    columns: dict[str, Any] = {}
    for column in spec.columns:
        values = table.column(column.name)
        dtype = nullable.get(column.arrow) if column.nullable else None
        if dtype is None:
            columns[column.name] = values.to_pandas()
        else:
            columns[column.name] = values.to_pandas(types_mapper=nullable.get)
    return pd.DataFrame(columns)


@cache
def pandera_schema(spec: Table) -> Any:
    """The pandera ``DataFrameSchema`` of a table: dtypes, gaps, closed vocabularies, bounds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandera's own notes at import are not the reader's
        import pandera.pandas as pandera

    columns = {}
    for column in spec.columns:
        checks = []
        if column.choices:
            checks.append(pandera.Check.isin(column.choices))
        if column.at_least is not None:
            checks.append(pandera.Check.ge(column.at_least))
        columns[column.name] = pandera.Column(
            pandas_dtype(column),
            checks,
            nullable=column.nullable or column.is_float,  # NaN counts as empty in pandas
            description=f"{column.meaning} [{column.unit}]",
        )
    return pandera.DataFrameSchema(columns, name=spec.name, strict=True, ordered=True)


def validate(frame: pd.DataFrame, spec: Table, path: Path) -> pd.DataFrame:
    """``frame`` unchanged, or ``UsageError`` DPA803 with the column, the rule and a bad value."""
    import pandera.errors

    try:
        pandera_schema(spec).validate(frame, lazy=True)
    except pandera.errors.SchemaErrors as error:
        first = error.failure_cases.iloc[0]
        where = f"the column {first['column']} breaks the rule {first['check']}"
        more = len(error.failure_cases) - 1
        tail = f", and {more} more cells or rules" if more else ""
        raise unreadable(
            path,
            f"the table {spec.name} does not fit its schema: {where} "
            f"({first['failure_case']!r} at row {first['index']}{tail})",
            "The file was changed or written by another program.",
        ) from error
    return frame
