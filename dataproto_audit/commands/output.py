"""What commands print: documents on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from dataproto_audit.codes import CodedError

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
CONFIG = "YAML with verl's or our names, or 'adv_estimator=grpo n=8'."

printed: list[None] = []
"""One entry for each document on stdout, so that an error is not a second one of one command."""


def print_json(value: Any) -> None:
    """One JSON document, as one line on stdout."""
    printed.append(None)
    print(json.dumps(value), flush=True)


def wants_json() -> bool:
    """Whether the command line asks for JSON; also where it cannot be parsed."""
    given = sys.argv[1:]
    return "--json" in (given[: given.index("--")] if "--" in given else given)


def printable(text: str) -> str:
    """``text`` without what names of files and fields could write to a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)


def say(text: str) -> None:
    """A line for people, on stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def error_document(error: CodedError) -> dict[str, Any]:
    """An error as data. ``error`` tells it from the answers of the commands."""
    return {
        "error": True, "code": error.code, "message": getattr(error, "message", str(error)),
        "remedy": error.remedy, "exit_code": error.exit_code,
    }  # fmt: skip


def stop(error: CodedError) -> int:
    """Say what ended a command and return its exit code; as JSON where it has answered nothing."""
    say(str(error))
    if wants_json() and not printed:
        print_json(error_document(error))
    return error.exit_code
