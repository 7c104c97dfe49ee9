"""A part of a recording: some samples, some columns, some fields, consistent in itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.batch import BatchView
from dataproto_audit.probes import Settings
from dataproto_audit.replay import update_evidence
from dataproto_audit.replay.axes import (
    Widths,
    columns_kept,
    padded,
    rows_kept,
    side_of,
    take,
    widths_of,
)
from dataproto_audit.replay.dependents import (
    MADE,
    SCORES,
    Rule,
    alike,
    last_attended,
    rule_of,
    text_positions,
    with_positions,
    with_scores_moved,
)
from dataproto_audit.replay.recording import Parts, Piece, Recording
from dataproto_audit.replay.samples import Followed, follow

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Cut:
    """What stays. ``dropped`` are names such as ``field.values``, ``meta.n``, ``setting.n``,
    ``evidence.ranks``; ``changed`` are settings with the value that they get."""

    pieces: tuple[int, ...]
    samples: frozenset[int]
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    dropped: frozenset[str] = frozenset()
    changed: tuple[tuple[str, Any], ...] = ()


class Whole:
    """A recording with everything that cutting it needs, found out once."""

    def __init__(self, recording: Recording) -> None:
        self.recording = replace(recording, pieces=tuple(map(padded, recording.pieces)))
        self.followed: Followed = follow(self.recording)
        self.views = [BatchView.of(piece.batch) for piece in self.recording.pieces]
        self.widths: Widths = widths_of(self.recording.view)
        self._agreed: dict[int, dict[str, Tensor]] = {}
        self._lost: dict[int, Tensor] = {}

    @property
    def everything(self) -> Cut:
        """The cut that leaves nothing out."""
        return Cut(
            tuple(range(len(self.views))), frozenset(self.followed.group_of),
            tuple(range(self.widths.prompt)), tuple(range(self.widths.response)),
        )  # fmt: skip

    @cached_property
    def rule(self) -> Rule | None:
        """How the advantages were made, as far as that is known."""
        for view in reversed(self.views):
            if "advantages" in view.tensors:
                return rule_of(self.recording.settings, view.tensors, view.arrays.get("uid"))
        return None

    def names(self) -> list[str]:
        """Everything that may be dropped, as in :attr:`Cut.dropped`."""
        fields = dict.fromkeys(name for view in self.views for name in view.names)
        meta = dict.fromkeys(str(name) for view in self.views for name in view.meta)
        beside = dict.fromkeys(name for p in self.recording.pieces for name in p.evidence)
        known = [n for n in Settings.known() if getattr(self.recording.settings, n) is not None]
        return [
            *(f"evidence.{name}" for name in beside), *(f"metric.{m}" for m in
              self.recording.metrics), *(f"setting.{name}" for name in known),
            *(f"meta.{name}" for name in meta), *(f"field.{name}" for name in fields),
        ]  # fmt: skip

    def agreed(self, number: int) -> dict[str, Tensor]:
        """Cells of advantages and returns that are as the rule says, of a piece."""
        if number not in self._agreed:
            view = self.views[number]
            made = self.rule.made(view.tensors, view.arrays.get("uid")) if self.rule else None
            self._agreed[number] = {
                name: alike(view.tensors[name], made[name])
                for name in MADE if made and name in view.tensors
            }  # fmt: skip
        return self._agreed[number]

    def cut(self, cut: Cut) -> Recording:
        """The part of the recording that ``cut`` names."""
        made: dict[tuple[Any, ...], Tensor] = {}
        pieces = tuple(self._piece(number, cut, made) for number in cut.pieces)
        settings = self.recording.settings
        gone = {name.partition(".")[2] for name in cut.dropped if name.startswith("setting.")}
        if settings.max_response_length == self.widths.response:
            settings = replace(settings, max_response_length=len(cut.response))
        settings = replace(settings, **{**dict(cut.changed), **dict.fromkeys(gone)})
        metrics = _without(self.recording.metrics, "metric.", cut)
        return replace(self.recording, pieces=pieces, settings=settings, metrics=metrics)

    def rows(self, number: int, samples: frozenset[int]) -> Index:
        """Positions in a piece of the rows that stay."""
        own, prompts = self.followed.samples[number], self.followed.prompts[number]
        if own is not None:
            return np.flatnonzero([sample in samples for sample in own.tolist()])
        group_of = self.followed.group_of
        groups = {group_of[sample] for sample in samples if sample in group_of}
        listed = prompts.tolist() if prompts is not None else []
        return np.flatnonzero([group in groups for group in listed])

    def _piece(self, number: int, cut: Cut, made: dict[tuple[Any, ...], Tensor]) -> Piece:
        piece, view = self.recording.pieces[number], self.views[number]
        rows = self.rows(number, cut.samples)
        own = widths_of(view)
        same = own == self.widths or "responses" not in view
        widths = self.widths if same else own
        prompt = np.array(cut.prompt if same else range(own.prompt), np.int64)
        response = np.array(cut.response if same else range(own.response), np.int64)
        part = _Part(view, rows, widths, prompt, response, made)
        tensors = part.tensors()
        arrays = {name: part.objects(name, array) for name, array in view.arrays.items()}
        self._follow_on(number, part, tensors, arrays)
        meta = part.meta(tensors.get("attention_mask"))
        evidence = part.evidence(piece.evidence, tensors, self.recording.settings)
        batch: Parts = {
            "batch": _without(tensors, "field.", cut),
            "non_tensor_batch": _without(arrays, "field.", cut),
            "meta_info": _without(meta, "meta.", cut),
        }
        return replace(piece, batch=batch, evidence=_without(evidence, "evidence.", cut))

    def _follow_on(
        self, number: int, part: _Part, tensors: dict[str, Tensor], arrays: Mapping[str, Any]
    ) -> None:
        """Advantages and returns of the rows and columns that stay."""
        agreed = {} if part.untouched else self.agreed(number)
        made = self.rule.made(tensors, arrays.get("uid")) if self.rule and agreed else None
        for name, cells in agreed.items():
            old = tensors[name]
            key = (id(part.view.tensors[name]), "made")
            if made is not None and made[name].shape == old.shape:
                kept = part.cells(name, cells)
                new = torch.where(kept, made[name].to(old.dtype), old)
                # One object for equal values, as in the recording itself.
                earlier = part.made.get(key)
                tensors[name] = part.made[key] = (
                    earlier if earlier is not None and torch.equal(earlier, new) else new
                )


def _of_critic(told: Any) -> bool:
    return isinstance(told, Mapping) and "vf_loss" in told


def _without(entries: Mapping[str, Any], prefix: str, cut: Cut) -> dict[str, Any]:
    return {name: value for name, value in entries.items() if f"{prefix}{name}" not in cut.dropped}


class _Part:
    """Some rows and columns of one batch."""

    def __init__(
        self, view: BatchView, rows: Index, widths: Widths, prompt: Index, response: Index,
        made: dict[tuple[Any, ...], Tensor],
    ) -> None:  # fmt: skip
        self.view, self.rows, self.widths = view, rows, widths
        self.prompt, self.response, self.made = prompt, response, made
        self.attention = view.tensors.get("attention_mask")
        if self.attention is not None and self.attention.dim() != 2:
            self.attention = None

    @property
    def untouched(self) -> bool:
        """True where every row and column stays."""
        return (
            len(self.rows) == self.view.rows
            and len(self.prompt) == self.widths.prompt
            and len(self.response) == self.widths.response
        )

    def cells(self, name: str, tensor: Tensor) -> Tensor:
        """``tensor``, which has the axes of the field ``name``, cut."""
        if not tensor.dim():
            return tensor
        out = tensor
        side = side_of(name, tensor.shape, self.widths)
        if side is not None:
            index = columns_kept(
                side[0], tensor.shape[side[1]], self.widths, self.prompt, self.response
            )
            if len(index) != tensor.shape[side[1]]:
                out = take(out, side[1], index)
        kept = rows_kept(int(tensor.size(0)), self.view.rows, self.rows)
        return take(out, 0, kept) if len(kept) != tensor.size(0) else out

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, with the fields that follow from others computed anew."""
        out = {}
        for name, tensor in self.view.tensors.items():
            key = (id(tensor), self.rows.tobytes(), name)
            if key not in self.made:
                self.made[key] = self.cells(name, tensor)
            out[name] = self.made[key]
        attention = out.get("attention_mask")
        if self.attention is None or attention is None or attention.shape == self.attention.shape:
            return out
        for name in ("position_ids", *SCORES, "token_level_rewards"):
            if name in out:
                follows = (id(self.view.tensors[name]), self.rows.tobytes(), name, "follows")
                if follows not in self.made:
                    self.made[follows] = self._following(name, out, attention)
                out[name] = self.made[follows]
        return out

    def _following(self, name: str, out: Mapping[str, Tensor], attention: Tensor) -> Tensor:
        assert self.attention is not None
        if name == "position_ids":
            text = self.cells("attention_mask", text_positions(self.attention))
            return with_positions(out[name], text, text_positions(attention))
        prompt, width = self.widths.prompt, len(self.prompt)
        before = last_attended(self.attention.numpy(), prompt)
        after = last_attended(attention.numpy(), width)
        old = self.view.tensors[name]
        if name == "token_level_rewards" and "token_level_scores" in out:
            scores = self.view.tensors["token_level_scores"]
            if old.shape == scores.shape:  # what the KL took off stays with its token
                taken = out[name] - self.cells(name, scores)
                return taken + out["token_level_scores"]
        return with_scores_moved(old, out[name], before, after, self.rows, self.response)

    def objects(self, name: str, array: Any) -> Any:
        """Rows of a non-tensor field; prompt ids without the columns that were cut."""
        kept = rows_kept(len(array), self.view.rows, self.rows)
        out = array[kept]
        if name == "prompt_ids" and len(self.prompt) != self.widths.prompt:
            stays = set(self.prompt.tolist())
            made = np.empty(len(out), object)
            for row, ids in enumerate(out):
                made[row] = ids
                if isinstance(ids, (list, tuple)) and len(ids) <= self.widths.prompt:
                    first = self.widths.prompt - len(ids)
                    made[row] = [one for at, one in enumerate(ids) if first + at in stays]
            return made
        return out

    def meta(self, attention: Tensor | None) -> dict[str, Any]:
        """Meta entries: token counts beside the batch, and the length that was asked for."""
        out = dict(self.view.meta)
        counts = out.get("global_token_num")
        if isinstance(counts, list) and self.attention is not None and attention is not None:
            before = self.attention.sum(1).tolist()
            if len(counts) == len(before):
                after = attention.sum(1).tolist()
                out["global_token_num"] = [
                    counts[row] - before[row] + new
                    for row, new in zip(self.rows.tolist(), after, strict=True)
                ]
        sampling = out.get("sampling")
        if isinstance(sampling, Mapping) and sampling.get("max_tokens") == self.widths.response:
            out["sampling"] = {**sampling, "max_tokens": len(self.response)}
        return out

    def evidence(
        self, given: Mapping[str, Any], tensors: Mapping[str, Tensor], settings: Settings
    ) -> dict[str, Any]:
        """Rank notes, loss terms and metrics of the update for what stays."""
        out = dict(given)
        attention = tensors.get("attention_mask")
        if self.untouched:
            return out
        if isinstance(out.get("ranks"), Sequence) and self.attention is not None:
            assert attention is not None
            before, after = (a.sum(1).numpy() for a in (self.attention, attention))
            out["ranks"] = update_evidence.cut_ranks(out["ranks"], self.rows, before, after)
        losses = out.get("losses")
        if isinstance(losses, Sequence) and any(map(_of_critic, losses)):
            out["losses"] = update_evidence.cut_value_losses(losses, self.view.tensors, tensors)
        elif isinstance(losses, Sequence):
            out["losses"] = update_evidence.cut_losses(
                losses, self.view.tensors, tensors, settings,
                ranks=(given.get("ranks"), out.get("ranks")),
            )  # fmt: skip
            if isinstance(out.get("metrics"), Mapping):
                out["metrics"] = update_evidence.cut_metrics(
                    out["metrics"], given["losses"], out["losses"]
                )
        return out


def sizes(recording: Recording) -> dict[str, int]:
    """Rows, groups and attended tokens of the largest batch of a recording.

    Of a batch that was shrunk to less than ids and masks, the cells of its largest field count.
    """
    view = recording.view
    groups = len({str(uid) for uid in view.arrays["uid"]}) if "uid" in view.arrays else view.rows
    attention = view.attention
    if attention is None:
        tokens = sum(int(view.numpy(n).size) for n in ("prompts", "responses") if n in view)
        flat = [int(view.numpy(n).size) for n, t in view.tensors.items() if t.dim() > 1]
        tokens = tokens or max(flat, default=0)
    else:
        tokens = int(np.count_nonzero(attention))
    return {"rows": view.rows, "groups": groups, "tokens": tokens}
