"""Write the pages that follow from the code: codes, fields and stages, configuration.

Usage: python docs/generate.py [FOLDER]. A test compares the committed pages with what this writes.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from dataproto_audit.codes import CAUSES, CODES
from dataproto_audit.render.fields import fields_table
from dataproto_audit.trainer.ranges import taken
from dataproto_audit.trainer.schema import Config

NOTE = "<!-- written by docs/generate.py -->"


def codes_page() -> str:
    """All codes with meaning, causes and remedy, then the vocabulary of causes."""
    lines = [NOTE, "# Codes", "", "`dataproto-audit explain CODE` prints the same.", ""]
    for code in CODES.values():
        lines += [
            f"## {code.code}",
            "",
            f"**{code.title[0].upper()}{code.title[1:]}.** {code.meaning}",
        ]
        if code.example:
            lines += ["", f"Example: {code.example}"]
        if code.causes:
            lines += ["", "Causes, most frequent first:", ""]
            lines += [f"* `{cause}`: {CAUSES[cause]}" for cause in code.causes]
        if code.fix:
            lines += ["", f"What to do: {code.fix}"]
        if code.reports:
            links = (f"[{r}](https://github.com/{r})" for r in code.reports)
            lines += ["", f"Met by others: {', '.join(links)}"]
        lines.append("")
    lines += ["# Causes", "", "| cause | meaning |", "| --- | --- |"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in CAUSES.items()]
    return "\n".join(lines) + "\n"


def fields_page() -> str:
    """The field-evolution table as declared."""
    table = fields_table()
    lines = [
        NOTE,
        "# Fields and stages",
        "",
        "`dataproto-audit fields` prints the same. Everything",
    ]
    lines += ["that a stage does not name is kept: equal, row key by row key.", "", "## Stages", ""]
    keys = ("reads", "adds", "may_add", "changes", "drops")
    lines += ["| stage | rows | " + " | ".join(k.replace("_", " ") for k in keys) + " |"]
    lines += ["| --- " * (len(keys) + 2) + "|"]
    for row in table["stages"]:
        cells = [", ".join(f"`{name}`" for name in row[key]) for key in keys]
        lines.append(f"| {row['stage']} | {row['rows']} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Fields",
        "",
        "Column `t` of a response field belongs to `responses[:, t]`.",
        "",
    ]
    lines += ["| field | kind | axes | written by | meaning |", "| --- | --- | --- | --- | --- |"]
    for row in table["fields"]:
        cells = (f"`{row['field']}`", row["kind"], row["axes"], row["producer"], row["meaning"])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def configuration_page() -> str:
    """Every configuration key with its type, its default and what it takes."""
    lines = [NOTE, "# Configuration", "", "Keys follow verl's names. `dataproto-audit train CONFIG"]
    lines += ["key=value ...` overrides single ones; an unknown key is an error that names the"]
    lines += ["nearest one. `--dry-run` checks everything and starts nothing.", ""]
    lines += ["A value that its key does not take is refused before anything starts, and what must"]
    lines += [
        "hold between values is checked then too: rows divide over mini-batches and ranks, and"
    ]
    lines += ["`rollout.max_model_len` holds a prompt and a response. Nothing of a run is replaced"]
    lines += [
        "unless `trainer.overwrite` (`--overwrite`) is set: `trainer.resume_mode=auto` goes on"
    ]
    lines += [
        "from the newest checkpoint in `trainer.run_dir`, starts where no run is, and refuses a"
    ]
    lines += [
        "run that it cannot go on with: after other data, with another model, vocabulary, precision"
    ]
    lines += [
        "or optimizer than the checkpoint's. A newer checkpoint that cannot be read is passed over,"
    ]
    lines += ["which the plan and the first lines of the run say. A run that is refused leaves its"]
    lines += ["folder as it was. Another `reward.custom_reward_function.path` starts with the name"]
    lines += [
        "`compute_score`, another `data.generator` without arguments.",
        "",
    ]
    _section(Config(), "", lines)
    return "\n".join(lines) + "\n"


def _section(section: Any, prefix: str, lines: list[str]) -> None:
    rows: list[str] = []
    nested = []
    meanings = _meanings(type(section))
    for field in dataclasses.fields(section):
        value = OmegaConf.structured(section)
        missing = OmegaConf.is_missing(value, field.name) or field.default == MISSING
        inner = None if missing else getattr(value, field.name)
        kind = OmegaConf.get_type(inner) if inner is not None else None
        if dataclasses.is_dataclass(kind):
            inner = getattr(section, field.name)  # a role may have defaults of its own
            nested.append((inner, f"{prefix}.{field.name}" if prefix else field.name))
            continue
        shown = "required" if missing else f"`{_plain(inner)}`"
        kinds = str(field.type).replace("|", "or")
        takes = taken(f"{prefix}.{field.name}")
        meaning = meanings.get(field.name, "")
        rows.append(f"| `{field.name}` | {meaning} | {kinds} | {shown} | {takes} |")
    if rows:
        lines += [f"## {prefix}", "", " ".join((section.__doc__ or "").split()), ""]
        lines += ["| key | meaning | type | default | takes |", f"{'| --- ' * 5}|", *rows, ""]
    for inner, name in nested:
        _section(inner, name, lines)


def _meanings(section: type) -> dict[str, str]:
    """The line below each key of a section, by name of the key."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for above, below in zip(body.body, body.body[1:], strict=False):
        text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name) and text:
            found[above.target.id] = str(below.value.value)  # type: ignore[attr-defined]
    return found


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


PAGES = {
    "codes.md": codes_page,
    "fields.md": fields_page,
    "configuration.md": configuration_page,
}


def main(folder: Path) -> None:
    """Write all pages into ``folder``."""
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
