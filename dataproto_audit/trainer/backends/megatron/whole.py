"""Between the state of Megatron ranks and whole tensors under Hugging Face names.

Needs no megatron-core: a rank's file says where it sat (:data:`SEAT`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataproto_audit.trainer.backends import shards
from dataproto_audit.trainer.backends.megatron.weights import Seat, pieces
from dataproto_audit.trainer.backends.moments import STATELESS, lost
from dataproto_audit.trainer.backends.whole import MAIN, WEIGHTS, Whole, cut, moments

SEAT = "seat"
"""i64: tensor-parallel rank and ranks, rank among the copies of the same weights, then the place of
each chunk's first layer in the model."""


def whole_of_megatron(files: Sequence[Mapping[str, Tensor]], model: Mapping[str, Any]) -> Whole:
    """From the state of all ranks; ``model`` is the parsed ``config.json``.

    Ranks of the distributed optimizer each hold a run of every parameter's moments; those of the
    copies are put together first. Raises DPA804 if a parameter lacks state that others have.
    """
    seats = [[int(x) for x in file[SEAT]] for file in files]
    payloads: dict[str, list[shards.ShardPayload]] = {}
    steps: dict[str, Tensor] = {}
    idle: dict[str, Tensor] = {}
    kinds = [WEIGHTS, *sorted(_kinds(files))]
    for rank, (seat, file) in enumerate(zip(seats, files, strict=True)):
        rest = (seat[:2], seat[3:])
        peers = [
            other
            for theirs, other in zip(seats, files, strict=True)
            if (theirs[:2], theirs[3:]) == rest
        ]
        found: dict[str, dict[str, tuple[Tensor, shards.ShardSpec]]] = {kind: {} for kind in kinds}
        for key in (key for key in file if key.startswith("model/")):
            param = key.removeprefix("model/")
            chunk, name = param.split("/", 1)
            first = seat[3 + int(chunk)]
            where = Seat(rank=seat[0], ranks=seat[1], copy=seat[2] > 0)
            for kind in kinds:
                tensor = file[key] if kind == WEIGHTS else _gathered(peers, kind, param, file[key])
                like = tensor if tensor is not None and tensor.ndim else file[key]
                for hf, view, spec in pieces(
                    name, like, first_layer=first, model=model, seat=where
                ):
                    if tensor is None:
                        idle[hf] = torch.empty(0)
                    elif not tensor.ndim:
                        steps[hf] = tensor
                    else:
                        found[kind][hf] = (view, spec)
        for kind, entries in found.items():
            packed = shards.pack(entries, rank=rank, world_size=len(files), version=0, aliases={})
            payloads.setdefault(kind, []).append(packed)
    whole = {kind: joined for kind, packed in payloads.items() if (joined := shards.join(packed))}
    marks = {"step": steps, STATELESS: idle}
    return whole | {kind: by_name for kind, by_name in marks.items() if by_name}


def _kinds(files: Sequence[Mapping[str, Tensor]]) -> set[str]:
    found = {key.rpartition("/")[2] for file in files for key in file if key.startswith("optim/")}
    return found - {STATELESS} | (
        {MAIN} if any(key.startswith("main/") for file in files for key in file) else set()
    )


def _gathered(
    peers: Sequence[Mapping[str, Tensor]], kind: str, param: str, like: Tensor
) -> Tensor | None:
    """A parameter's moment in its shape; a scalar as it is; None if it is marked as stateless.

    Raises DPA804 if the ranks hold none of it, or their runs do not make up the parameter.
    """
    key = f"main/{param}" if kind == MAIN else f"optim/{param}/{kind}"
    holders = [peer for peer in peers if key in peer]
    if not holders:
        if kind != MAIN and any(f"optim/{param}/{STATELESS}" in peer for peer in peers):
            return None
        raise lost(param, [kind])
    if f"range/{param}" not in holders[0] or not holders[0][key].ndim:
        return holders[0][key].view(like.shape) if holders[0][key].ndim else holders[0][key]
    flat = torch.zeros(like.numel(), dtype=holders[0][key].dtype)
    filled = 0
    for peer in holders:
        start, end = (int(x) for x in peer[f"range/{param}"])
        flat[start:end] = peer[key].flatten()
        filled += end - start
    if filled != flat.numel():
        raise lost(param, [f"{kind} ({filled} of {flat.numel()} values)"])
    return flat.view(like.shape)


@dataclass(frozen=True)
class Held:
    """A parameter of this rank: ``key`` is chunk and name, ``part`` the run of its moments that the
    distributed optimizer keeps here (None: all; empty: nothing)."""

    key: str
    param: Tensor
    first_layer: int
    part: tuple[int, int] | None


def megatron_state(
    whole: Whole, held: Sequence[Held], model: Mapping[str, Any], seat: Seat, *, masters: bool
) -> dict[str, Tensor]:
    """One Megatron rank's state. ``masters`` of a bfloat16 model come from the weights where the
    checkpoint has none. Raises DPA804 for what :func:`.moments` and :func:`.cut` refuse."""
    state: dict[str, Tensor] = {}
    for one in held:
        state[f"model/{one.key}"] = _filled(whole, WEIGHTS, one, model, seat)
        if one.part is not None and one.part[0] >= one.part[1]:
            continue
        for kind in moments(whole, list(_names(one, model, seat))):
            if kind == STATELESS:
                state[f"optim/{one.key}/{kind}"] = torch.empty(0)
                continue
            moment = _filled(whole, kind, one, model, seat)
            state[f"optim/{one.key}/{kind}"] = _run(moment, one) if moment.ndim else moment
        if masters:
            kind = MAIN if MAIN in whole else WEIGHTS
            state[f"main/{one.key}"] = _run(_filled(whole, kind, one, model, seat).float(), one)
    return state


def _names(one: Held, model: Mapping[str, Any], seat: Seat) -> Iterator[str]:
    name = one.key.split("/", 1)[1]
    for hf, _, _ in pieces(name, one.param, first_layer=one.first_layer, model=model, seat=seat):
        yield hf


def _filled(whole: Whole, kind: str, one: Held, model: Mapping[str, Any], seat: Seat) -> Tensor:
    """A tensor like the parameter, filled from the whole tensors it is made of.

    Moments of a part that never had a gradient are 0, which is what Megatron counts for it.
    """
    name = one.key.split("/", 1)[1]
    where: dict[str, Any] = {"first_layer": one.first_layer, "model": model, "seat": seat}
    idle = {} if kind in (WEIGHTS, MAIN) else whole.get(STATELESS, {})
    parts = {
        hf: cut(whole, kind, hf, view, spec)
        for hf, view, spec in pieces(name, one.param, **where)
        if hf in whole.get(kind, {}) or hf not in idle
    }
    first = next(iter(parts.values()))
    if not first.ndim:
        return first
    made = torch.zeros(one.param.shape, dtype=first.dtype)
    for hf, view, _ in pieces(name, made, **where):
        if hf in parts:
            view.copy_(parts[hf])
    return made


def _run(moment: Tensor, one: Held) -> Tensor:
    return moment if one.part is None else moment.flatten()[one.part[0] : one.part[1]].clone()
