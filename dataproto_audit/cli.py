"""The command line: thin, every command in the module that does the work.

Exit codes: 0 fine, 1 findings, 2 usage or unreadable input, 3 the run itself failed, 4 a fault of
this package, 130 interrupted. With ``--json`` stdout carries one JSON document and nothing else.
"""

from __future__ import annotations

import difflib
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from dataproto_audit import __version__
from dataproto_audit.codes import CODES, CodedError, InternalError, UsageError
from dataproto_audit.commands import check, compare_backends, reduce, show, traces
from dataproto_audit.commands.output import AsJson, print_json, printed, say, stop

app = typer.Typer(
    name="dataproto-audit",
    help="Shape contracts and value probes for RL post-training loops.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
INTERRUPTED = 130


def main() -> None:
    """Entry point of ``dataproto-audit`` and ``dpa``: runs a command, prints errors as text.

    With ``--json`` an error is a document on stdout, too, unless the command has answered already.
    """
    printed.clear()
    try:
        code = app(standalone_mode=False)
    except CodedError as error:
        sys.exit(stop(error))
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:  # noqa: BLE001 - the last stop: reported, exit code 4
        if hasattr(error, "format_message"):  # click's own usage errors
            said = UsageError("DPA851", error.format_message(), "See dataproto-audit --help.")
            sys.exit(stop(said))
        place = traceback.extract_tb(error.__traceback__)[-1]
        fault = InternalError(
            "DPA901",
            f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno}).",
            "This is a fault of dataproto-audit; please report it with the command line.",
        )
        sys.exit(stop(fault))
    if code:  # what a command raised as typer.Exit, and 130 for Ctrl-C
        if code == INTERRUPTED:
            say("interrupted")
        sys.exit(code)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="A ready configuration by name, or a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, start nothing.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run folder.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the audited loop: GRPO or PPO, every stage boundary checked and written down."""
    from dataproto_audit.trainer.config import load_config
    from dataproto_audit.trainer.validate import validate

    listed = [*(overrides or ()), *(["trainer.overwrite=true"] if overwrite else [])]
    loaded = load_config(config, listed)
    validate(loaded)  # before the imports that a run needs, which take longer than this
    callbacks = _injected(loaded.audit.inject, last_step=loaded.trainer.total_training_steps)
    if dry_run:
        from dataproto_audit.trainer.run import plan

        planned = plan(loaded)
        if as_json:
            print_json(planned)
        else:
            from dataproto_audit.render.plan import print_plan

            print_plan(planned)
        return
    with redirect_stdout(sys.stderr):  # libraries print; stdout belongs to the JSON document
        from dataproto_audit.trainer.run import run

        result = run(loaded, callbacks=callbacks)
    if as_json:
        print_json(result.summary)
    if result.stopped_by:
        raise result.stopped_by
    from dataproto_audit.render.terminal import final_summary

    final_summary(result.summary)
    if result.summary["findings"]["fail"]:
        raise typer.Exit(1)


def _injected(text: str | None, *, last_step: int | None = None) -> Any:
    """Callbacks that make the asked-for fault at its step; the loop does not know about it."""
    from dataproto_audit.trainer.callbacks import Callbacks

    callbacks = Callbacks()
    if text is None:
        return callbacks
    from dataproto_audit.testing.faults import parse_injection

    fault, at = parse_injection(text)
    if last_step is not None and at > last_step:
        raise UsageError(
            "DPA851",
            f"audit.inject={text}: the run ends after step {last_step}, so nothing would happen.",
            f"Name a step from 1 to {last_step}.",
        )
    if fault.where == "after_stage":
        callbacks.after_stage.append(
            lambda step, stage, batch: (
                fault.apply(batch) if (step, stage) == (at, fault.stage) else None
            )
        )
    elif fault.where == "sampling":
        callbacks.sampling.append(lambda step, used: fault.apply(used) if step == at else used)
    else:
        sent: list[Any] = []

        def weights_hook(step: int, weights: Any) -> Any:
            sent.append(weights)
            del sent[:-2]
            return fault.apply(weights, sent[0]) if step == at else weights

        callbacks.before_sync.append(weights_hook)
    return callbacks


@app.command()
def selftest(
    seed: Annotated[int, typer.Option(help="Seed of the simulated batches.")] = 0,
    misses: Annotated[bool, typer.Option("--misses", help="List what was missed.")] = False,
    fault: Annotated[
        list[str] | None,
        typer.Option("--fault", help="Only this fault (repeatable), and no healthy batches."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run every seeded fault and every healthy configuration (minutes), and print the score."""
    from dataproto_audit.testing.bench import run_bench
    from dataproto_audit.testing.faults import CATALOGUE
    from dataproto_audit.testing.matrix import matrix, shown
    from dataproto_audit.testing.matrix import misses as missed

    unknown = next((name for name in fault or () if name not in CATALOGUE), None)
    if unknown:
        near = ", ".join(difflib.get_close_matches(unknown, CATALOGUE, 3, cutoff=0.4))
        raise UsageError("DPA851", f"there is no fault {unknown!r}.", f"Near it are {near or '-'}.")
    result = run_bench(seed=seed, faults=fault, healthy=() if fault else None)
    answer = result.to_dict()
    if as_json:
        print_json(answer)
    else:
        if fault:
            print("\n".join(shown(result)) + "\n")
        print(matrix(result))
        if misses:
            print("\n".join(missed(result)))
    if answer["false_fail"]:
        raise typer.Exit(1)


@app.command()
def fields(as_json: AsJson = False) -> None:
    """Print the field-evolution table: what each stage reads, adds, changes and drops."""
    from dataproto_audit.render.fields import fields_table, print_fields

    if as_json:
        print_json(fields_table())
    else:
        print_fields()


@app.command()
def explain(
    name: Annotated[str, typer.Argument(help="A code, a field or a stage.")],
    as_json: AsJson = False,
) -> None:
    """Explain a code, a field or a stage."""
    from dataproto_audit.render.explain import explained, explanation

    if as_json:
        print_json(explained(name))
    else:
        print(explanation(name))


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="A run folder.")],
    as_json: AsJson = False,
) -> None:
    """Sum up a run folder; tables that a killed run left are compacted first, where they can be."""
    from dataproto_audit.dump.run import open_run
    from dataproto_audit.dump.run_folder import compact_run
    from dataproto_audit.render.terminal import render_report

    try:
        compact_run(run_dir)
    except CodedError as error:
        if error.code not in ("DPA801", "DPA802"):  # a run that writes, a disk that does not take
            raise
        typer.echo(f"the tables are read as they lie there: {error.message}", err=True)
    opened = open_run(run_dir)
    if as_json:
        print_json({"run_dir": str(run_dir), "summary": opened.summary, "ok": opened.ok})
    else:
        from rich.console import Console

        Console().print(render_report(opened))
    if not opened.ok:
        raise typer.Exit(1)


@app.command()
def doctor(
    overrides: Annotated[list[str] | None, typer.Argument(help="a.b=c, with --config.")] = None,
    config: Annotated[
        str | None, typer.Option(help="verl's YAML, or a configuration of train.")
    ] = None,
    verl: Annotated[
        str | None, typer.Option(help="The verl version that is to run it; default: as installed.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what is installed and can be checked, or what a configuration would run into."""
    from dataproto_audit.doctor import report as said

    if config is None and (overrides or verl):
        raise UsageError("DPA851", "overrides and --verl need --config.", "Name a configuration.")
    if config is None:
        answer, text = said.examine_environment(), said.environment_text
    else:
        answer, text = said.examine(config, overrides or (), verl=verl), said.config_text
    if as_json:
        print_json(answer)
    else:
        print(text(answer))
    if not answer["ok"]:
        raise typer.Exit(1)


@app.command()
def codes(as_json: AsJson = False) -> None:
    """List all codes with their one-line meaning."""
    if as_json:
        print_json({code: entry.title for code, entry in CODES.items()})
        return
    for code, entry in CODES.items():
        print(f"{code}  {entry.title}")


check.register(app)
reduce.register(app)
show.register(app)
traces.register(app)
compare_backends.register(app)


if __name__ == "__main__":
    main()
