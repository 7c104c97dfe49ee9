"""``show``: what a saved batch, or a boundary of a trace, holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dataproto_audit.codes import UsageError
from dataproto_audit.commands.output import AsJson, print_json
from dataproto_audit.commands.reduce import decoder

if TYPE_CHECKING:
    from dataproto_audit.dump.readers import Saved

ALL = "all"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(show)


def show(
    path: Annotated[Path, typer.Argument(help="A saved batch, a folder of them, or a trace.")],
    row: Annotated[
        list[int] | None, typer.Option("--row", help="Show this row's tokens; -1: the last.")
    ] = None,
    boundary: Annotated[
        str | None,
        typer.Option(
            "--boundary", help="Of a trace: a stage, a boundary's name, or all; default: list them."
        ),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Of a trace: only this step.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of a tokenizer, to show tokens as text.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what a saved batch holds; nothing of the file is executed."""
    from rich.console import Console

    from dataproto_audit.dump.readers.traces import places_of
    from dataproto_audit.dump.trace import is_trace
    from dataproto_audit.render import show as shown

    decode = decoder(tokenizer) if tokenizer else None
    if is_trace(path) and boundary is None and not as_json:
        places = places_of(path, step=step)
        if len(places) > 1 and row:
            raise UsageError(
                "DPA851", f"{path} holds {len(places)} boundaries, and --row is of one.",
                "Name it with --boundary: "
                f"{', '.join(dict.fromkeys(one.name for one in places))}.",
            )  # fmt: skip
        if len(places) > 1:
            Console().print(shown.listing(path, places))
            return
    for saved in _batches(path, boundary, step):
        if as_json:
            print_json(shown.show_dict(saved, rows=row or (), decode=decode))
        else:
            Console().print(shown.show(saved, rows=row or (), decode=decode))


def _batches(path: Path, boundary: str | None, step: int | None) -> Sequence[Saved]:
    from dataproto_audit.dump.readers import read_batches
    from dataproto_audit.dump.readers.traces import of_trace
    from dataproto_audit.dump.trace import is_trace

    if boundary is None and step is None:
        return read_batches(path)
    if not is_trace(path):
        option = "--boundary" if boundary is not None else "--step"
        raise UsageError(
            "DPA851", f"{path} is no trace, and {option} is of one.", f"Leave {option} out."
        )
    return of_trace(path, step=step, boundary=None if boundary == ALL else boundary)
