"""``shrink``, ``bundle`` and ``convert``: less of a batch, or the same in another form."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dataproto_audit.codes import UsageError
from dataproto_audit.commands.output import CONFIG, AsJson, print_json

Source = Annotated[Path, typer.Argument(help="A trace, a run folder, or a saved batch.")]


def _code(given: str | None) -> str | None:
    """A code as the catalogue writes it; codes of a user's own checks stay what they are."""
    return given.upper() if given and given.upper().startswith("DPA") else given


Code = Annotated[
    str | None,
    typer.Option(help="Finding to keep; default: the first loud one.", callback=_code),
]
Stage = Annotated[str | None, typer.Option(help="Stage of the finding.")]
Config = Annotated[str | None, typer.Option(help=CONFIG)]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    for command in (shrink, bundle, convert):
        app.command()(command)


def shrink(
    path: Source,
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder for the result.")],
    code: Code = None,
    stage: Stage = None,
    good: Annotated[
        Path | None, typer.Option(help="The same of a healthy run; must stay quiet when cut.")
    ] = None,
    before: Annotated[Path | None, typer.Option(help="The batch at an earlier boundary.")] = None,
    predicate: Annotated[
        str | None, typer.Option(help="module:function that says whether a batch still fails.")
    ] = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Reduce a failing batch to a minimal one that still fails in the same way."""
    from dataproto_audit.replay import loading
    from dataproto_audit.replay.bundle import size
    from dataproto_audit.replay.shrink import shrink as reduced
    from dataproto_audit.replay.written import refuse_taken, write_shrunk

    if predicate is not None and code is not None:
        raise UsageError("DPA851", "both --code and --predicate are given.", "Name one of them.")
    for option, given in (("--stage", stage), ("--before", before)):
        if predicate is not None and given is not None:
            raise UsageError(
                "DPA851", f"both --predicate and {option} are given.",
                f"Leave {option} out: a predicate is asked about the first batch, and it alone.",
            )  # fmt: skip
    refuse_taken(out)
    healthy = loading.first_of(good, config=config) if good else None
    if predicate is not None:
        function = named_function(predicate)
        recording = loading.first_of(path, config=config)
        shrunk = reduced(recording, good=healthy, predicate=loading.predicate_of(function))
    else:
        recording = loading.recording_with(
            path, code=code, stage=stage, config=config, before=before
        )
        shrunk = reduced(recording, code=code, stage=stage, good=healthy)
    answer = write_shrunk(shrunk, out)
    if as_json:
        print_json(answer)
        return
    print(
        f"{answer['code'] or predicate}: {size(answer['before'])} shrunk to {answer['rows']} and "
        f"{answer['tokens']}, in {answer['predicate_calls']} tries\n"
        f"  batch  {out}\n  test   {answer['test_file'] or 'none: a predicate is code of yours'}"
    )


def bundle(
    path: Source,
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder, or a .zip file.")],
    code: Code = None,
    stage: Stage = None,
    config: Config = None,
    keep_text: Annotated[
        bool, typer.Option("--keep-text", help="Leave prompts and other text in it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a failing batch fit for a public issue: shrunk, ids renamed, text taken out."""
    from dataproto_audit.replay import loading
    from dataproto_audit.replay.bundle import size, write_bundle

    recording = loading.recording_with(path, code=code, stage=stage, config=config)
    answer = write_bundle(recording, out, code=code, stage=stage, keep_text=keep_text)
    if as_json:
        print_json(answer)
        return
    print(f"{answer['code']} in {size(answer)}: {out}")
    for line in answer["removed"]:
        print(f"  taken out  {line}")


def convert(
    path: Annotated[Path, typer.Argument(help="A saved batch of any format, or a trace.")],
    to: Annotated[Path, typer.Argument(help=".pkl (DataProto), .safetensors, or a folder.")],
    place: Annotated[int, typer.Option(help="Which batch, where the file holds several.")] = -1,
    as_json: AsJson = False,
) -> None:
    """Write a saved batch in another form; nothing of the file is executed."""
    from dataproto_audit.replay.convert import convert as converted

    answer = converted(path, to, place=None if place < 0 else place)
    if as_json:
        print_json(answer)
        return
    print(f"{answer['batches']} batch(es) as {answer['form']}: {answer['to']}")
    for line in answer["left_out"]:
        print(f"  left out  {line}")


def named_function(name: str) -> Callable[[Any], Any]:
    """``module:function``, also of a module in the working folder."""
    module, colon, attribute = name.partition(":")
    remedy = "Write it as module:function; the module must be importable from here."
    if not colon or not module or not attribute:
        raise UsageError("DPA851", f"--predicate {name} is no module:function.", remedy)
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError("DPA851", f"--predicate {name}: {error}.", remedy) from error
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise UsageError("DPA851", f"--predicate {name} is no function.", remedy)
    function: Callable[[Any], Any] = found
    return function


def decoder(folder: Path) -> Callable[[int], str]:
    """Text of a token id by the tokenizer in ``folder``. Raises :class:`UsageError`."""
    from dataproto_audit.trainer.tokenizer import load_tokenizer

    if not folder.is_dir():
        raise UsageError("DPA852", f"there is no folder {folder}.", "Check the path.")
    found = load_tokenizer(folder)
    return lambda token: str(found.decode([token]))
