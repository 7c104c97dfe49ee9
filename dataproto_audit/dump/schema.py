"""The nine tables of a run folder, declared once: columns, types, units, and what may be missing.

The arrow schema (what is written), the pandera schema (what is checked on reading, in
:mod:`.frames`) and the tables of ``reports/README.md`` are all made from :data:`TABLES`. To refresh
the README after a change: ``python -m dataproto_audit.dump.schema reports/README.md``.

Reading rule: a newer package reads older folders (columns added since come out empty); an older
package refuses newer folders. So columns may be added under the same version when nullable, and
:data:`SCHEMA_VERSION` goes up when one is removed, renamed or changes its meaning.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import pyarrow as pa

from dataproto_audit.findings import OUTCOME_KINDS, SEVERITIES

SCHEMA_VERSION = 1
VERSION_KEY = b"dataproto_audit.schema"
"""Key of the schema version in the metadata of every stream and Parquet file."""

Kind = Literal["i64", "i32", "f64", "f32", "str", "json", "bool"]

ARROW_TYPES: dict[str, pa.DataType] = {
    "i64": pa.int64(),
    "i32": pa.int32(),
    "f64": pa.float64(),
    "f32": pa.float32(),
    "str": pa.string(),
    "json": pa.string(),
    "bool": pa.bool_(),
}


@dataclass(frozen=True)
class Column:
    """One column. ``nullable``: empty where it does not apply or was not measured.

    A float may always be NaN, because finding NaNs is part of the job; NaN is a value, null is not.
    ``choices`` lists all values of a closed vocabulary, ``at_least`` is a lower bound.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    nullable: bool = False
    choices: tuple[str, ...] = ()
    at_least: float | None = None

    @property
    def arrow(self) -> pa.DataType:
        """The arrow type the column is stored with."""
        return ARROW_TYPES[self.kind]

    @property
    def repeats(self) -> bool:
        """True for text that takes few values, which Parquet stores as a dictionary."""
        return self.kind == "str" and self.name not in ("row_key", "fingerprint")

    @property
    def is_float(self) -> bool:
        """True for floating-point columns."""
        return self.kind in ("f32", "f64")

    @property
    def is_text(self) -> bool:
        """True for columns of strings, JSON included."""
        return self.kind in ("str", "json")


@dataclass(frozen=True)
class Table:
    """One table: what a row of it is, its columns, and how to read it in a line of pandas."""

    name: str
    row: str
    columns: tuple[Column, ...]
    example: str

    @cached_property
    def arrow(self) -> pa.Schema:
        """The arrow schema, with the schema version in its metadata."""
        fields = [pa.field(c.name, c.arrow, nullable=c.nullable) for c in self.columns]
        return pa.schema(fields, metadata={VERSION_KEY: str(SCHEMA_VERSION)})

    @cached_property
    def schema_message(self) -> bytes:
        """The arrow schema as the message that starts a stream."""
        return bytes(self.arrow.serialize())

    @cached_property
    def given(self) -> tuple[Column, ...]:
        """The columns that a caller gives: all but ``step``, which the writer fills in."""
        return tuple(column for column in self.columns if column.name != "step")

    @cached_property
    def step_at(self) -> int:
        """Position of ``step`` among the columns."""
        return [column.name for column in self.columns].index("step")

    @cached_property
    def by_name(self) -> dict[str, Column]:
        """Columns by name, in order."""
        return {column.name: column for column in self.columns}


def _i(name: str, unit: str, meaning: str, *, null: bool = False, big: bool = False) -> Column:
    return Column(name, "i64" if big else "i32", unit, meaning, null, at_least=0)


def _f(name: str, unit: str, meaning: str, *, null: bool = True, small: bool = False) -> Column:
    return Column(name, "f32" if small else "f64", unit, meaning, null)


def _s(
    name: str, meaning: str, *, null: bool = False, choices: tuple[str, ...] = (), unit: str = "-"
) -> Column:
    return Column(name, "str", unit, meaning, null, choices)


def _json(name: str, meaning: str) -> Column:
    return Column(name, "json", "JSON", meaning)


_STEP = Column("step", "i64", "step", "training step, from 1; 0 is before training", at_least=0)
_STAGE = _s("stage", "stage of the loop, or 'end of step'")
_WHEN = _s("when", "side of the stage", choices=("before", "after"))
_ROW = _i("row", "index", "position in the batch that the policy was trained on")
_KEY = _s("row_key", "identity of the row through the step")
_UID = _s("uid", "identity of the group: one prompt and its n samples")

_TABLES = (
    Table("steps", "one metric of one step", (
        _STEP,
        _s("metric", "name; peers' names where they exist (`rollout_corr/k3_kl`)"),
        _f("value", "by metric", "value; seconds for `timing_s/*`, tokens for `*seqlen*`",
           null=False),
    ), "steps.pivot_table(index='step', columns='metric', values='value')"),
    Table("fields", "one field of the batch at one boundary", (
        _STEP, _STAGE, _WHEN,
        _s("field", "name of the field"),
        _s("dtype", "kind of number, `f32`, `i64`, `object`"),
        _s("shape", "shape as text, `[64,128]`; a star for a ragged axis"),
        _i("rows", "rows", "length of the first axis", null=True),
        _f("min", "the field's", "smallest finite value"),
        _f("max", "the field's", "largest finite value"),
        _f("mean", "the field's", "mean over finite values"),
        _i("nan", "cells", "number of NaNs", null=True, big=True),
        _i("inf", "cells", "number of infinities, both signs", null=True, big=True),
        _f("mask_coverage", "share 0..1",
           "non-zero cells over cells: for a mask what it covers, for others how dense they are"),
        _s("fingerprint", "hash of the content; equal means unchanged", null=True, unit="hex"),
    ), "fields[fields.field == 'advantages'].plot(x='step', y=['min', 'max'])"),
    Table("outcomes", "what one check did at one boundary", (
        _STEP, _STAGE, _WHEN,
        _s("check", "name of the check"),
        _s("code", "code it reports under; see `dataproto-audit explain CODE`"),
        _s("kind", "what happened", choices=OUTCOME_KINDS),
        _s("reason", "why it could not or need not run", null=True),
    ), "outcomes.groupby(['stage', 'kind']).size().unstack(fill_value=0)"),
    Table("findings", "one failed check", (
        _s("code", "stable code"),
        _s("severity", "how bad; a run is ok without `fail`", choices=SEVERITIES),
        _STEP, _STAGE, _WHEN,
        _s("check", "name of the check"),
        _s("field", "field at fault, empty when it is no single one"),
        _json("rows", "list of row positions at this boundary"),
        _json("row_keys", "list of the row keys of `rows`"),
        _json("columns", "row position -> list of positions on the field's own last axis"),
        _s("expected", "what should be there"),
        _s("actual", "what is there"),
        _json("evidence", "numbers behind the verdict, tolerances included"),
        _json("causes", "list of causes, most likely first"),
        _s("hint", "what to do"),
        _s("docs", "where the code is explained"),
    ), "findings.value_counts(['code', 'severity'])"),
    Table("groups", "one group (prompt) of one step", (
        _STEP, _UID,
        _i("rows", "rows", "samples in the group"),
        _f("score_mean", "score", "mean score"),
        _f("score_std", "score", "unbiased standard deviation; empty for one row"),
        _f("score_min", "score", "lowest score"),
        _f("score_max", "score", "highest score"),
        _f("advantage_mean", "advantage", "mean over the group's trained tokens"),
        _f("length_mean", "tokens", "mean response length"),
        Column("degenerate", "bool", "-", "all scores equal, so the group teaches nothing"),
    ), "groups.groupby('step').degenerate.mean()"),
    Table("rows", "one row (sample) of one step", (
        _STEP, _ROW, _KEY, _UID,
        _i("prompt_length", "tokens", "attended prompt tokens"),
        _i("response_length", "tokens", "attended response tokens"),
        _i("trained_tokens", "tokens", "cells of the response mask"),
        _f("score", "score", "scalar score of the reward function"),
        _f("advantage", "advantage", "mean over the row's trained tokens"),
        _f("rollout_old_gap_max", "nats",
           "largest absolute difference of rollout and old log-probs on trained tokens"),
        _f("old_ref_gap_max", "nats",
           "largest absolute difference of old and reference log-probs on trained tokens"),
        _s("finish_reason", "the engine's reason to stop", null=True),
        _s("flags", "words set by checks, blank-separated; empty for none"),
    ), "rows.nlargest(5, 'rollout_old_gap_max')"),
    Table("tokens", "one response token of a row named in a finding, or of a sampled row", (
        _STEP, _ROW, _KEY,
        _i("column", "index", "position in the response"),
        _i("token_id", "id", "token id"),
        _s("text", "decoded token; unsafe characters are escaped", null=True),
        Column("mask", "bool", "-", "response mask: the token is trained on"),
        _f("rollout_log_prob", "nats", "log-prob from the rollout engine", small=True),
        _f("old_log_prob", "nats", "log-prob from the trainer before the update", small=True),
        _f("ref_log_prob", "nats", "log-prob from the reference model", small=True),
        _f("reward", "score", "token-level reward", small=True),
        _f("advantage", "advantage", "advantage", small=True),
        _s("flag", "why the token is here: a code, or empty for the sample"),
    ), "tokens[tokens.flag != ''].sort_values(['step', 'row', 'column'])"),
    Table("ranks", "what one rank did in one stage of one step", (
        _STEP, _STAGE,
        _i("rank", "index", "data-parallel rank"),
        _i("rows", "rows", "rows it was given"),
        _i("tokens", "tokens", "attended tokens in them", big=True),
        _i("micro_batches", "count", "micro-batches it ran"),
        _i("peak_token_sum", "tokens", "tokens of its largest micro-batch, padding included",
           big=True),
        _f("bubble", "share 0..1", "share of the stage that it waited for its peers"),
        _f("cpu_s", "seconds", "CPU time of the rank in the stage"),
    ), "ranks.groupby(['step', 'stage']).tokens.agg(['min', 'max'])"),
    Table("loss", "one term of the loss of one mini-batch", (
        _STEP,
        _i("mini_batch", "index", "mini-batch within the step, from 0, over all epochs"),
        _s("term", "`pg`, `kl`, `entropy`, `total`; `vf` of a critic"),
        _f("value", "loss", "what the trainer optimised", null=False),
        _f("normaliser", "tokens or rows", "global count it was divided by"),
        _f("recomputed", "loss", "the same term recomputed from the whole mini-batch, unsplit"),
        _f("difference", "loss", "absolute difference of value and recomputed"),
    ), "loss.groupby('term').difference.max()"),
)  # fmt: skip

TABLES: dict[str, Table] = {table.name: table for table in _TABLES}

README_BEGIN = "<!-- made from dataproto_audit/dump/schema.py: begin -->"
README_END = "<!-- made from dataproto_audit/dump/schema.py: end -->"


def markdown() -> str:
    """The section of ``reports/README.md`` that explains every column, markers included."""
    lines = [README_BEGIN, f"Schema version {SCHEMA_VERSION}."]
    for table in TABLES.values():
        lines += ["", f"### {table.name}", "", f"A row is {table.row}.", ""]
        lines += [
            "| column | type | unit | may be empty | meaning |",
            "| --- | --- | --- | --- | --- |",
        ]
        for c in table.columns:
            choices = f": {', '.join(f'`{choice}`' for choice in c.choices)}" if c.choices else ""
            empty = "yes" if c.nullable else "no"
            lines.append(f"| `{c.name}` | {c.kind} | {c.unit} | {empty} | {c.meaning}{choices} |")
        lines += [
            "",
            "```python",
            f'{table.name} = run.table("{table.name}")',
            table.example,
            "```",
        ]
    return "\n".join([*lines, "", README_END])


def refreshed(readme: str) -> str:
    """``readme`` with the section between the two markers made anew."""
    head, begin, rest = readme.partition(README_BEGIN)
    _, end, tail = rest.partition(README_END)
    if not (begin and end):
        raise ValueError(f"the text lacks the markers {README_BEGIN!r} and {README_END!r}")
    return head + markdown() + tail


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(refreshed(target.read_text(encoding="utf-8")), encoding="utf-8")
