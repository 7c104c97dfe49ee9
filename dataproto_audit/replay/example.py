"""A recording as a test that reads as an example: every number in the source, nothing beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataproto_audit.findings import Finding
from dataproto_audit.render.text import many
from dataproto_audit.replay.recording import Recording
from dataproto_audit.replay.shrink import Shrunk

_HEAD = '''"""{title}.

{what}
Run it with ``pytest {name}``. It passes as long as the batch shows the finding.
"""

import torch

{imports}

{special}{settings}

{batches}

def test_{function}():
{body}
    named = [(f.code, f.stage, f.field) for f in found]
    assert {target} in named
'''


def test_source(shrunk: Shrunk, *, name: str) -> str:
    """The source of a pytest file ``name`` that shows the finding on the shrunk recording."""
    assert shrunk.finding is not None
    recording, finding, before = shrunk.recording, shrunk.finding, shrunk.before
    left = shrunk.sizes
    kept = [f"{left[of]} of {many(before[of], of[:-1])}" for of in ("rows", "tokens")]
    target = (finding.code, finding.stage, finding.field)
    where = _plain(finding.stage) + (f", in {_plain(finding.field)}" if finding.field else "")
    what = f"Shrunk to {', '.join(kept)}. Found after {where}.\n{_said(finding)}"
    settings = {k: v for k, v in asdict(recording.settings).items() if v is not None}
    if recording.lone:
        imports = "from dataproto_audit import check"
        told = f"SETTINGS = {_literal(settings)}"
        batches, body = _lone(recording)
    else:
        imports = "from dataproto_audit.auditor import Auditor, Settings"
        inner = ", ".join(f"{k}={_literal(v)}" for k, v in settings.items())
        told = f"SETTINGS = Settings({inner})"
        batches, body = _boundaries(recording)
    special = 'NAN, INF = float("nan"), float("inf")\n'
    used = any(word in batches + told for word in ("NAN", "INF"))
    return _HEAD.format(
        title=_plain(f"{finding.code}: {finding.title}"), what=what, name=_plain(name),
        imports=imports, special=special if used else "", settings=told, batches=batches,
        function=re.sub(r"\W", "_", finding.code.lower()), body=body, target=_literal(target),
    )  # fmt: skip


def _said(finding: Finding) -> str:
    lines = [f"Expected: {finding.expected}", f"Actual: {finding.actual}"]
    return "\n".join(_plain(line) for line in lines if not line.endswith(": ")) + "\n"


def _plain(text: str) -> str:
    """A text of the file as it may stand in a docstring: nothing in it ends or escapes that."""
    return "".join(c if c.isprintable() else "?" for c in text).replace("\\", "/").replace('"', "'")


def _lone(recording: Recording) -> tuple[str, str]:
    *earlier, last = recording.pieces
    text = f"BATCH = {_batch(last.batch)}\n"
    before = ""
    if earlier:
        text = f"BEFORE = {_batch(earlier[-1].batch)}\n{text}"
        before = ", before=BEFORE"
    stage = f", stage={_literal(last.stage)}" if last.stage else ""
    return text, f"    found = check(BATCH{stage}{before}, config=SETTINGS).findings"


def _boundaries(recording: Recording) -> tuple[str, str]:
    text, gaps = ["BOUNDARIES = ["], any(piece.gap for piece in recording.pieces)
    for piece in recording.pieces:
        text.append(
            f"    ({_literal(piece.stage)}, {_literal(piece.when)}, {_batch(piece.batch, 1)},"
        )
        evidence = _literal(dict(piece.evidence))
        text.append(f"     {evidence}, {piece.gap})," if gaps else f"     {evidence}),")
    text += ["]", f"METRICS = {_literal(dict(recording.metrics))}\n"]
    body = [
        '    auditor = Auditor(SETTINGS, on_fail="record")',
        f"    auditor.begin_step({_literal(recording.pieces[0].step)})",
        "    found = []",
        f"    for stage, when, batch, evidence{', gap' if gaps else ''} in BOUNDARIES:",
        *(["        if gap:", "            auditor.unseen()"] if gaps else []),
        "        found += auditor.boundary(stage, batch, when=when, evidence=evidence"
        + (", partial=True)" if recording.partial else ")"),
        "    found += auditor.end_step(METRICS)",
    ]
    return "\n".join(text), "\n".join(body)


def _batch(batch: Mapping[str, Any], depth: int = 0) -> str:
    pad = "    " * (depth + 1)
    lines = ["{"]
    for part in ("batch", "non_tensor_batch", "meta_info"):
        if batch[part]:
            lines.append(f"{pad}{_text(part)}: {{")
            lines += [f"{pad}    {_text(n)}: {_literal(v)}," for n, v in batch[part].items()]
            lines.append(f"{pad}}},")
    return "\n".join([*lines, "    " * depth + "}"])


def _literal(value: Any) -> str:
    """Source that gives ``value`` again; what has none becomes its text."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype)
        rows = value.detach()
        listed = rows.double().tolist() if rows.is_floating_point() else rows.tolist()
        if rows.numel() == 0:
            return f"torch.zeros({list(rows.shape)}, dtype={dtype})"
        usual = rows.dtype in (torch.float32, torch.int64, torch.bool)
        return f"torch.tensor({_numbers(listed)}{'' if usual else f', dtype={dtype}'})"
    if isinstance(value, np.ndarray):
        return _literal(value.tolist())
    if isinstance(value, np.generic):
        return _literal(value.item())
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_literal, value))
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, float):
        return _named(value) or repr(value)
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, (bool, int, bytes)):
        return repr(value)
    return _text(str(value))


def _text(value: str) -> str:
    """A text in double quotes, where its own characters allow it."""
    plain = value.isprintable() and '"' not in value and "\\" not in value
    return f'"{value}"' if plain else repr(value)


def _named(value: float) -> str:
    if value != value:
        return "NAN"
    return "" if abs(value) != float("inf") else "INF" if value > 0 else "-INF"


def _numbers(value: Any) -> str:
    """Numbers of a tensor; each float as the shortest text that is the same float32."""
    if isinstance(value, list):
        return f"[{', '.join(map(_numbers, value))}]"
    return (_named(value) or _short(value)) if isinstance(value, float) else repr(value)


def _short(value: float) -> str:
    single = np.float32(value)
    if float(single) != value:
        return repr(value)
    text = str(single)
    return text if any(c in text for c in ".e") else f"{text}.0"
