"""A failing recording fit for a public issue: shrunk, renamed, checked again, with versions."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.dump.trace_disk import versions
from dataproto_audit.render.text import many
from dataproto_audit.replay.anonymous import Renamer
from dataproto_audit.replay.recording import Recording, audit
from dataproto_audit.replay.shrink import Shrunk, shrink
from dataproto_audit.replay.written import (
    make_folder,
    refuse_no_parent,
    refuse_taken,
    write_json,
    write_shrunk,
)

_ISSUE = """# {code}: {title}

    {finding}

Shrunk from {before} to {left}. Token ids were renamed one to one and
text was taken out ({removed}); the finding was checked again after that.

* `{test}` shows it: `pytest {test}`
* `config.json` holds the settings that it needs, `environment.json` the versions
"""


def write_bundle(
    recording: Recording,
    out: Path,
    *,
    code: str | None = None,
    stage: str | None = None,
    keep_text: bool = False,
) -> dict[str, Any]:
    """Write the bundle of a finding as a folder, or as one file where ``out`` ends in ``.zip``.

    Returns the answer of ``bundle --json``. Raises :class:`UsageError` where there is no such
    finding, where it is gone once text is taken out, or where ``out`` is there; ``RunError`` where
    the disk refuses.
    """
    packed = out.suffix == ".zip"
    if packed:
        if out.exists():
            raise UsageError("DPA851", f"{out} is there already.", "Name a new file.")
        refuse_no_parent(out)
    if not packed:
        refuse_taken(out)
    shrunk = shrink(recording, code=code, stage=stage)
    renamed, renamer = renamed_of(shrunk, keep_text=keep_text)
    try:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "bundle"
            answer = _fill(folder, renamed, renamer)
            if packed:
                _zip(folder, out)
            else:
                make_folder(out)
                shutil.copytree(folder, out, dirs_exist_ok=True)
    except OSError as error:
        raise RunError(
            "DPA802", f"{out} cannot be written: {error.strerror}.", "Name another place."
        ) from error
    return {**answer, "out": str(out)}


def size(of: Mapping[str, int]) -> str:
    """``1 row and 4 tokens``."""
    return f"{many(of['rows'], 'row')} and {many(of['tokens'], 'token')}"


def renamed_of(shrunk: Shrunk, *, keep_text: bool) -> tuple[Shrunk, Renamer]:
    """The shrunk recording under other names, with the finding as it is made there.

    Raises :class:`UsageError` (``DPA851``) where the finding depends on what was taken out.
    """
    assert shrunk.finding is not None
    renamer = Renamer(shrunk.recording.settings, keep_text=keep_text)
    recording = renamer.recording(shrunk.recording)
    wanted = (shrunk.finding.code, shrunk.finding.stage, shrunk.finding.field)
    found = [s.finding for s in audit(recording) if s.target == wanted]
    if not found:
        raise UsageError(
            "DPA851", f"{shrunk.finding.code} is gone once ids are renamed and text is taken out "
            f"({', '.join(renamer.removed) or 'ids'}).",
            "Pass --keep-text if the text may be published, or share the output of shrink.",
        )  # fmt: skip
    return replace(shrunk, recording=recording, finding=found[0]), renamer


def _fill(folder: Path, shrunk: Shrunk, renamer: Renamer) -> dict[str, Any]:
    assert shrunk.finding is not None
    answer = write_shrunk(shrunk, folder)
    test = Path(answer["test_file"]).name
    answer |= {
        "out_dir": None, "test_file": test, "renamed_ids": renamer.tokens,
        "removed": list(renamer.removed), "verified": True, "versions": versions(),
    }  # fmt: skip
    write_json(folder / "shrink.json", answer)
    write_json(folder / "environment.json", versions())
    text = _ISSUE.format(
        code=shrunk.finding.code, title=shrunk.finding.title, test=test,
        finding=str(shrunk.finding).replace("\n", "\n    "), before=size(shrunk.before),
        left=size(shrunk.sizes),
        removed=", ".join(renamer.removed) or "there was none",
    )  # fmt: skip
    (folder / "ISSUE.md").write_text(text, encoding="utf-8")
    return answer


def _zip(folder: Path, out: Path) -> None:
    """One file with a fixed order and date, so that equal bundles are equal files."""
    part = out.with_name(f"{out.name}.part")
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as file:
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                info = zipfile.ZipInfo(path.relative_to(folder).as_posix(), (1980, 1, 1, 0, 0, 0))
                info.compress_type = zipfile.ZIP_DEFLATED
                file.writestr(info, path.read_bytes())
        part.replace(out)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
