"""``replay`` and ``bisect``: recorded steps checked again, and the stage that broke one."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
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
from dataproto_audit.commands.reduce import named_function

if TYPE_CHECKING:
    from dataproto_audit.replay.answers import Work

Model = Annotated[str | None, typer.Option("--model", help="Policy of the step, a model folder.")]
RefModel = Annotated[str | None, typer.Option("--ref-model", help="Reference, a model folder.")]
Sample = Annotated[int | None, typer.Option(help="Rows that the models score; default: all.")]
Config = Annotated[str | None, typer.Option(help=CONFIG)]
PolicyFile = Annotated[
    Path | None, typer.Option("--policy", help="What to report; default: pyproject.toml here.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    for command in (replay, bisect):
        app.command()(command)


def replay(
    paths: Annotated[list[Path], typer.Argument(help="Traces, run folders, or saved batches.")],
    step: Annotated[list[int] | None, typer.Option("--step", help="Only this step.")] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute each stage again from its inputs.")
    ] = False,
    model: Model = None,
    ref_model: RefModel = None,
    sample: Sample = None,
    jobs: Annotated[int, typer.Option("--jobs", help="Processes, over Ray.")] = 1,
    config: Config = None,
    policy: PolicyFile = None,
    fail_on: Annotated[str, typer.Option(help="Severity that sets exit code 1.")] = "fail",
    as_json: AsJson = False,
) -> None:
    """Check recorded boundaries again; of several paths, --json prints one line each.

    What cannot be read is told on stderr and sets exit code 2, after all the rest was checked.
    """
    from dataproto_audit.policy import load_policy
    from dataproto_audit.replay.answers import Wanted, summed
    from dataproto_audit.replay.jobs import attempted

    if fail_on not in ("fail", "warn"):
        raise UsageError("DPA851", f"--fail-on {fail_on}.", "Choose fail or warn.")
    wanted = Wanted(
        recompute or bool(model or ref_model), model, ref_model, sample, config,
        load_policy(policy),
    )  # fmt: skip
    owned = [(str(path), piece) for path in paths for piece in _work(path, step, 4 * jobs)]
    left = Counter(path for path, _ in owned)
    told: dict[str, list[dict[str, Any]]] = {path: [] for path in left}
    lost: dict[str, list[CodedError]] = {path: [] for path in left}
    wrong = False
    with _processes(jobs, len(owned)):
        made = attempted([piece for _, piece in owned], wanted, jobs=jobs)
        for (path, _), (_, found) in zip(owned, made, strict=True):
            for answer in found:
                if isinstance(answer, CodedError):
                    lost[path].append(answer)
                    say(str(answer))
                    continue
                loud = {finding["severity"] for finding in answer["findings"]}
                wrong |= not answer["ok"] or (fail_on == "warn" and "warn" in loud)
                if as_json:
                    told[path].append(answer)
                else:
                    print(printable(_text(answer)), flush=True)
            left[path] -= 1
            if as_json and not left[path]:
                if told[path]:
                    unreadable = [str(error) for error in lost[path]]
                    print_json(summed(path, told.pop(path), unreadable=unreadable))
                elif lost[path]:
                    print_json({"path": path, **error_document(lost[path][0])})
    errors = [error.exit_code for of_path in lost.values() for error in of_path]
    if errors or wrong:
        raise typer.Exit(max(errors, default=1))


def _work(path: Path, step: list[int] | None, parts: int) -> list[Work]:
    """The pieces of a path; one that cannot be opened does not keep the others from it."""
    from dataproto_audit.replay.answers import Work, work_of

    try:
        return work_of(path, step, parts=parts)
    except UsageError as error:
        return [Work(str(path), errors=(error,))]


def bisect(
    path: Annotated[Path, typer.Argument(help="A trace, or a run folder that holds one.")],
    step: Annotated[
        int | None, typer.Option("--step", help="Default: the first that is not quiet.")
    ] = None,
    model: Model = None,
    ref_model: RefModel = None,
    sample: Sample = None,
    good: Annotated[Path | None, typer.Option("--good", help="Trace of a healthy run.")] = None,
    predicate: Annotated[
        str | None,
        typer.Option(help="module:function that says whether a part of the batch still fails."),
    ] = None,
    config: Config = None,
    policy: PolicyFile = None,
    as_json: AsJson = False,
) -> None:
    """Name the stage that broke a step, then the rows, then the tokens."""
    from dataproto_audit.checker.config import settings_from
    from dataproto_audit.policy import load_policy
    from dataproto_audit.replay.bisect import bisect as found

    verdict = found(
        path, step=step, policy_model=model, reference_model=ref_model, sample=sample, good=good,
        predicate=None if predicate is None else named_function(predicate),
        config=None if config is None else settings_from(config, {})[0],
        policy=load_policy(policy),
    )  # fmt: skip
    if as_json:
        print_json(verdict.to_dict())
    else:
        print(printable(verdict.story()), flush=True)
    if verdict.verdict == "faulty":
        raise typer.Exit(1)


def _processes(jobs: int, pieces: int) -> Any:
    """The Ray that the trainer starts, which leaves no process behind; none for one job."""
    if jobs < 2 or pieces < 2:
        return nullcontext()
    try:
        from dataproto_audit.trainer.workers.cluster import cluster
    except ImportError as error:
        raise UsageError(
            "DPA858", "several jobs need ray.", "Install dataproto-audit[trainer], or --jobs 1."
        ) from error
    return cluster(num_cpus=jobs)


def _text(answer: dict[str, Any]) -> str:
    from dataproto_audit.findings import counted, finding_lines, listed

    counts = counted(answer["outcomes"], ok=answer["ok"])
    where = f" step {answer['step']}" if "step" in answer else ""
    lines = [f"{answer['path']}{where}: {'ok' if answer['ok'] else 'NOT OK'}: {counts}"]
    for finding in answer["findings"]:
        at = f"{finding['code']} {finding['severity']} at {finding['stage']}"
        lines += [f"  {at}", *(f"    {name:9} {text}" for name, text in finding_lines(finding))]
    for item in answer.get("recomputed", ()):
        gap = item["evidence"].get("max |difference|")
        said = item["missing"] or f"max |difference| {gap:.3g}"
        rows = f", rows {listed(item['rows'])}" if item["rows"] else ""
        lines.append(
            f"  recomputed {item['stage']}.{item['field']}: {item['verdict']} ({said}{rows})"
        )
    return "\n".join(lines)
