"""A healthy twin made from the faulty recording itself: the field that a finding names, mended.

What a field should hold is computed from the others with ``reference/``, or taken from one that
holds the same quantity. Where the mended recording still shows the finding, there is no twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dataproto_audit.batch import BatchView
from dataproto_audit.replay.axes import padded
from dataproto_audit.replay.dependents import MADE, last_attended, rule_of, text_positions
from dataproto_audit.replay.recording import Recording, Sighting, audit, loud

Fields = Mapping[str, Tensor]
LOG_PROBS = ("rollout_log_probs", "old_log_probs", "ref_log_prob", "update_log_probs")


def mended(recording: Recording, sighting: Sighting) -> Recording | None:
    """The recording without the finding's cause, as far as the other fields tell; or None."""
    name = sighting.finding.field.rpartition(".")[2]
    whole = replace(recording, pieces=tuple(map(padded, recording.pieces)))
    for mend in _mends(name, whole):
        pieces = []
        for piece in whole.pieces:
            tensors = piece.batch["batch"]
            made = mend(tensors, piece.batch["non_tensor_batch"]) if name in tensors else None
            batch = piece.batch if made is None else {
                **piece.batch, "batch": {**tensors, name: made.to(tensors[name].dtype)}
            }  # fmt: skip
            pieces.append(replace(piece, batch=batch))
        tried = replace(whole, pieces=tuple(pieces))
        if sighting.target not in {one.target for one in loud(audit(tried))}:
            return tried
    return None


Mend = Callable[[Fields, Mapping[str, Any]], Tensor | None]


def _mends(name: str, recording: Recording) -> Iterator[Mend]:
    if name in MADE:
        view = BatchView.of(recording.pieces[-1].batch)
        rule = rule_of(recording.settings, view.tensors, view.arrays.get("uid"))

        def by_rule(tensors: Fields, arrays: Mapping[str, Any]) -> Tensor | None:
            made = rule.made(tensors, arrays.get("uid")) if rule else None
            return None if made is None else made[name]

        yield by_rule
    if name == "position_ids":
        yield _positions
    if name == "input_ids":
        yield lambda tensors, _: _joined(tensors)
    if name == "response_mask":
        yield lambda tensors, _: _response_attention(tensors)
    if name == "token_level_scores":
        yield _scores
    if name == "token_level_rewards":
        yield lambda tensors, _: tensors.get("token_level_scores")
    if name in LOG_PROBS:
        for other in LOG_PROBS:
            if other != name:
                yield lambda tensors, _, other=other: tensors.get(other)  # type: ignore[misc]  # the default binds the loop's name
        yield lambda tensors, _: tensors[name].nan_to_num(0.0, 0.0, 0.0).clamp(max=0.0)


def _positions(tensors: Fields, _: Mapping[str, Any]) -> Tensor | None:
    attention, old = tensors.get("attention_mask"), tensors["position_ids"]
    if attention is None:
        return None
    text = text_positions(attention)
    return text if old.dim() == 2 else text[:, None].expand(old.shape)


def _joined(tensors: Fields) -> Tensor | None:
    sides = [tensors.get("prompts"), tensors.get("responses")]
    return torch.cat([s for s in sides if s is not None], 1) if None not in sides else None


def _response_attention(tensors: Fields) -> Tensor | None:
    attention, responses = tensors.get("attention_mask"), tensors.get("responses")
    if attention is None or responses is None:
        return None
    return attention[:, -responses.shape[1] :]


def _scores(tensors: Fields, arrays: Mapping[str, Any]) -> Tensor | None:
    old, attention, score = tensors["token_level_scores"], tensors.get("attention_mask"), None
    if "score" in arrays and attention is not None:
        score = arrays["score"]
    if score is None or len(score) != len(old) or attention is None:
        return None
    last = last_attended(attention.numpy(), attention.shape[1] - old.shape[1])
    out = torch.zeros_like(old)
    for row, column in enumerate(last.tolist()):
        out[row, column] = float(score[row])
    return out
