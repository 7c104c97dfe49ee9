"""``check``: saved batches, histories of metrics, or a file of cases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dataproto_audit.codes import CodedError, UsageError
from dataproto_audit.commands.output import (
    CONFIG,
    AsJson,
    error_document,
    print_json,
    printable,
    say,
)

if TYPE_CHECKING:
    from dataproto_audit.checker.files import Checked
    from dataproto_audit.policy import Policy


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(check)


def check(
    paths: Annotated[list[Path] | None, typer.Argument(help="Saved batches, or folders.")] = None,
    stage: Annotated[str | None, typer.Option(help="Stage that the batch has just left.")] = None,
    before: Annotated[Path | None, typer.Option(help="The batch at an earlier boundary.")] = None,
    history: Annotated[Path | None, typer.Option(help="Metrics of the steps, JSONL.")] = None,
    model: Annotated[str | None, typer.Option(help="Model folder to recompute with.")] = None,
    config: Annotated[str | None, typer.Option(help=CONFIG)] = None,
    policy: Annotated[
        Path | None, typer.Option(help="What to report; default: pyproject.toml here.")
    ] = None,
    cases: Annotated[Path | None, typer.Option(help="Score a file of cases instead.")] = None,
    fail_on: Annotated[str, typer.Option(help="Severity that sets exit code 1.")] = "fail",
    as_json: AsJson = False,
) -> None:
    """Check saved batches; of several, --json prints one line each."""
    if fail_on not in ("fail", "warn"):
        raise UsageError("DPA851", f"--fail-on {fail_on}.", "Choose fail or warn.")
    from dataproto_audit.policy import load_policy

    if cases is not None:
        _check_cases(cases, as_json)
        return
    if not paths and history is None:
        raise UsageError("DPA857", "there is nothing to check.", "Name a file, or --history.")
    wrong, worst = False, 0
    for made in _answers(
        paths or [], stage=stage, before=before, history=history, model=model, config=config,
        policy=load_policy(policy), as_json=as_json,
    ):  # fmt: skip
        if isinstance(made, CodedError):
            worst = max(worst, made.exit_code)
            continue
        counts = made.report.severities()
        wrong |= bool(counts["fail"] or (fail_on == "warn" and counts["warn"]))
        if as_json:
            print_json(made.to_dict())
        else:
            untold = "".join(f"NOT CHECKED: {text}\n" for text in made.untold)
            print(printable(f"{made.label}\n{untold}{made.report}\n"))
    if wrong or worst:
        raise typer.Exit(max(worst, int(wrong)))


def _answers(
    paths: Sequence[Path],
    *,
    history: Path | None,
    config: str | None,
    policy: Policy,
    as_json: bool,
    **how: Any,
) -> Iterator[Checked | CodedError]:
    """One answer a batch. Of several paths, one that cannot be read does not keep the others from
    theirs: its error is told, once, and handed on. A single one raises."""
    from dataproto_audit.checker.files import check_file, check_history

    if not paths:
        yield check_history(history, config=config, policy=policy)
    told: set[str] = set()
    for path in paths:
        try:
            yield from check_file(path, history=history, config=config, policy=policy, **how)
        except CodedError as error:
            if len(paths) == 1:
                raise
            if str(error) not in told:  # what is wrong with a configuration is so for all
                say(str(error))
                if as_json:
                    print_json({"path": str(path), **error_document(error)})
            told.add(str(error))
            yield error


def _check_cases(path: Path, as_json: bool) -> None:
    from dataproto_audit.testing.cases import run_cases

    result = run_cases(path).to_dict()
    if as_json:
        print_json(result)
    else:
        print(f"{result['right']} of {result['cases']} cases right")
        for case in result["wrong"]:
            print(f"{case['id']}: {case['reason']}; expected {case['expected']}, got {case['got']}")
    if result["wrong"]:
        raise typer.Exit(1)
