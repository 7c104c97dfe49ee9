"""Images among the tokens: rotary positions on several axes, token types (DPA213, DPA214).

Positions ``[B,A,T]`` count text (A = 4 only), time, height and width (Qwen2-VL, arXiv 2409.12191,
2.1): a text token advances all axes together; the pieces of an image of grid ``t, h, w`` (in units
of ``merge_size`` patches) count from where the text stood, and the text goes on after the largest
of them. Not covered: videos with timestamps, audio.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView, Block
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.coverage import is_in
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.scan import ATTENDED

NEEDS = ("input_ids", *ATTENDED, "settings.image_ids")
PICTURES = ("image_grid_thw", "mm_token_type_ids")


def _no_images(view: BatchView, ctx: Context) -> str:
    """Why a batch has no images: text positions, no fields of images, and no ids of theirs."""
    positions = view.tensors.get("position_ids")
    flat = positions is not None and positions.dim() == 2
    if ctx.settings.image_ids is None and flat and not any(name in view for name in PICTURES):
        return "no images: text positions, no image ids"
    return ""


@probe(
    "DPA213",
    stages=("rollout",),
    needs=("position_ids", "image_grid_thw", *NEEDS),
    absent=_no_images,
)
def image_positions(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """position_ids [B,A,T] follow the image grid on attended tokens.

    With three axes nothing says whether the text axis was never there or was lost, so that is not
    checkable.
    """
    found = view.numpy("position_ids")
    if found.ndim != 3:
        ctx.unknown(f"position_ids with {found.ndim} axes: no positions of images to look at")
    if found.shape[1] == 3:
        ctx.unknown("position_ids has no text axis, or the first axis was lost")
    merge = max(ctx.settings.merge_size or 1, 1)
    attended = Block(view, slice(None)).attended
    images = is_in(view.numpy("input_ids"), ctx.settings.image_ids) & attended
    bad = np.zeros(attended.shape, bool)
    for row in range(view.rows):
        grids = _grids(view.numpy("image_grid_thw")[row])
        want = None if grids is None else _expected(attended[row], images[row], grids, merge)
        if want is None:
            ctx.unknown(f"row {row}: image ids and image_grid_thw do not fit together")
        bad[row] = ((found[row, -3:] != want) & attended[row]).any(0)
    if bad.any():
        yield ctx.fail(
            "position_ids",
            cells=bad,
            expected="time, height and width counted over the image grid",
            actual=f"other positions on {int(bad.sum())} tokens in {int(bad.any(1).sum())} rows",
            causes=("text_positions", "wrong_position_ids"),
        )


def _grids(entry: Any) -> Any:
    """The grids of one row ``[images, 3]``; None where the entry holds no such thing."""
    try:
        grids = np.asarray(entry, np.int64).reshape(-1, 3)
    except (TypeError, ValueError, OverflowError):
        return None
    return grids if (grids > 0).all() else None


def _expected(attended: Any, images: Any, grids: Any, merge: int) -> Any:
    """Positions ``[3,T]`` of one row; None when ids and grids do not fit."""
    want = np.zeros((3, len(attended)), np.int64)
    columns = np.flatnonzero(attended)
    at, following, waiting = 0, 0, list(grids)
    while at < len(columns):
        if not images[columns[at]]:
            want[:, columns[at]] = following
            at, following = at + 1, following + 1
            continue
        if not waiting:
            return None
        t, h, w = (int(size) for size in waiting.pop(0))
        shape = (t, h // merge, w // merge)
        size = prod(shape)
        piece = columns[at : at + size]
        if len(piece) < size or not images[piece].all():
            return None
        want[:, piece] = following + np.indices(shape).reshape(3, -1)
        at, following = at + size, following + max(shape)
    return want if not waiting else None


@probe("DPA214", stages=("rollout",), needs=("mm_token_type_ids", *NEEDS), absent=_no_images)
def token_types(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """mm_token_type_ids [B,T] are 1 exactly on image ids (2, on video ids, is not judged)."""
    types = view.numpy("mm_token_type_ids")
    ids = view.numpy("input_ids")
    if types.shape != ids.shape:
        ctx.unknown("mm_token_type_ids does not have the shape of input_ids")
    images = is_in(ids, ctx.settings.image_ids)
    bad = ((types == 1) != images) & Block(view, slice(None)).attended
    if bad.any():
        yield ctx.fail(
            "mm_token_type_ids",
            cells=bad,
            expected="1 exactly on image ids",
            actual=f"{int(bad.sum())} tokens in {int(bad.any(1).sum())} rows differ",
            causes=("left_right_padding", "shift"),
        )
