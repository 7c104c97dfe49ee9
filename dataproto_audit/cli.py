"""The command line: thin, every command in the module that does the work.

Exit codes: 0 fine, 1 findings, 2 usage or unreadable input, 3 the run itself failed, 4 a fault of
this package, 130 interrupted. With ``--json`` stdout carries one JSON document and nothing else.
"""

from __future__ import annotations

import json
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from dataproto_audit import __version__
from dataproto_audit.codes import CODES, CodedError, InternalError

app = typer.Typer(
    name="dataproto-audit",
    help="Shape contracts and value probes for RL post-training loops.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
INTERRUPTED = 130
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def main() -> None:
    """Entry point of ``dataproto-audit`` and ``dpa``: runs a command, prints errors as text."""
    try:
        code = app(standalone_mode=False)
    except CodedError as error:
        _say(str(error))
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:  # noqa: BLE001 - the last stop: reported, exit code 4
        if hasattr(error, "format_message"):  # click's own usage errors
            _say(f"{error.format_message()} See dataproto-audit --help.")
            sys.exit(2)
        place = traceback.extract_tb(error.__traceback__)[-1]
        fault = InternalError(
            "DPA901",
            f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno}).",
            "This is a fault of dataproto-audit; please report it with the command line.",
        )
        _say(str(fault))
        sys.exit(fault.exit_code)
    if code:  # what a command raised as typer.Exit, and 130 for Ctrl-C
        if code == INTERRUPTED:
            _say("interrupted")
        sys.exit(code)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_json(value: Any) -> None:
    print(json.dumps(value), flush=True)


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
    """Run the audited loop: GRPO with every stage boundary checked and written down."""
    from dataproto_audit.trainer.config import load_config
    from dataproto_audit.trainer.validate import validate

    listed = [*(overrides or ()), *(["trainer.overwrite=true"] if overwrite else [])]
    loaded = load_config(config, listed)
    validate(loaded)
    if dry_run:
        from dataproto_audit.trainer.run import plan

        planned = plan(loaded)
        if as_json:
            _print_json(planned)
        else:
            from dataproto_audit.render.plan import print_plan

            print_plan(planned)
        return
    from dataproto_audit.trainer.workers.cluster import cluster_ahead, ray_options

    with (
        redirect_stdout(sys.stderr),  # libraries print; stdout belongs to the JSON document
        cluster_ahead(**ray_options(loaded)) as ray_cluster,  # while the rest is imported
    ):
        from dataproto_audit.trainer.run import run

        result = run(loaded, callbacks=_injected(loaded.audit.inject), ray_cluster=ray_cluster)
    if as_json:
        _print_json(result.summary)
    if result.stopped_by:
        raise result.stopped_by
    from dataproto_audit.render.terminal import final_summary

    final_summary(result.summary)
    if result.summary["findings"]["fail"]:
        raise typer.Exit(1)


def _injected(text: str | None) -> Any:
    """Callbacks that make the asked-for fault at its step; the loop does not know about it."""
    from dataproto_audit.trainer.callbacks import Callbacks

    callbacks = Callbacks()
    if text is None:
        return callbacks
    from dataproto_audit.testing.faults import parse_injection

    fault, at = parse_injection(text)
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
def fields(as_json: AsJson = False) -> None:
    """Print the field-evolution table: what each stage reads, adds, changes and drops."""
    from dataproto_audit.render.fields import fields_table, print_fields

    if as_json:
        _print_json(fields_table())
    else:
        print_fields()


@app.command()
def explain(name: Annotated[str, typer.Argument(help="A code, a field or a stage.")]) -> None:
    """Explain a code, a field or a stage."""
    from dataproto_audit.render.explain import explanation

    print(explanation(name))


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="A run folder, or the newest in reports/.")],
    as_json: AsJson = False,
) -> None:
    """Sum up a run folder; tables that a killed run left are compacted first."""
    from dataproto_audit.dump.run import open_run
    from dataproto_audit.dump.run_folder import compact_run
    from dataproto_audit.render.terminal import render_report

    compact_run(run_dir)
    opened = open_run(run_dir)
    if as_json:
        _print_json({"run_dir": str(run_dir), "summary": opened.summary, "ok": opened.ok})
    else:
        from rich.console import Console

        Console().print(render_report(opened))
    if not opened.ok:
        raise typer.Exit(1)


@app.command()
def codes(as_json: AsJson = False) -> None:
    """List all codes with their one-line meaning."""
    if as_json:
        _print_json({code: entry.title for code, entry in CODES.items()})
        return
    for code, entry in CODES.items():
        print(f"{code}  {entry.title}")


if __name__ == "__main__":
    main()
