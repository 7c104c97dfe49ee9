"""A checkpoint of any layout put together: whole tensors under Hugging Face names.

``Whole`` holds them by kind (``model``, the optimizer's ``exp_avg``, ``exp_avg_sq``, ``step``,
``main``, float32 masters, and ``none``, marks of weights without state) and name. Made from the
files of all ranks, and cut again by each rank of the new layout; for that time every rank holds the
whole model and its moments in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.moments import STATELESS, lost
from dataproto_audit.trainer.backends.shards import ShardSpec, dtype_name, fill

Whole = dict[str, dict[str, Tensor]]
WEIGHTS, MAIN = "model", "main"


def whole_of_fsdp(files: Sequence[Mapping[str, Tensor]], *, ranks: int) -> Whole:
    """From the state of each rank in their order; ``ranks`` of them hold one copy of the weights.

    Pieces are runs of rows in the order of ranks; what has no dimension is the same on all.
    """
    parts: dict[tuple[str, str], list[Tensor]] = {}
    for file in files[:ranks]:
        for key, value in file.items():
            kind, _, name = key.partition("/")
            if kind == "optim":
                name, _, kind = name.rpartition("/")
            parts.setdefault((kind, name), []).append(value)
    whole: Whole = {}
    for (kind, name), found in parts.items():
        joined = torch.cat(found) if found[0].ndim else found[0]
        whole.setdefault(kind, {})[name] = joined
    return whole


def fsdp_state(
    whole: Whole, pieces: Mapping[str, tuple[Tensor, ShardSpec]], trained: Sequence[str]
) -> dict[str, Tensor]:
    """One FSDP rank's state: its ``pieces`` of the weights, and the optimizer's of ``trained``.

    Raises DPA804 for what :func:`moments` and :func:`cut` refuse.
    """
    state = {
        f"model/{name}": cut(whole, WEIGHTS, name, piece, spec)
        for name, (piece, spec) in pieces.items()
    }
    for name in trained:
        piece, spec = pieces[name]
        for kind in moments(whole, [name]):
            state[f"optim/{name}/{kind}"] = (
                torch.empty(0) if kind == STATELESS else cut(whole, kind, name, piece, spec)
            )
    return state


def moments(whole: Whole, names: Sequence[str]) -> list[str]:
    """What the optimizer keeps of a parameter that is made of the weights ``names``.

    Nothing before the first step; :data:`STATELESS` alone if none of them ever had a gradient.
    Raises DPA804 if one lacks what others have, and is not marked as stateless.
    """
    wanted = sorted(whole.keys() - {WEIGHTS, MAIN, STATELESS})
    idle = 0
    for name in names:
        lacks = [kind for kind in wanted if name not in whole[kind]]
        if not lacks:
            continue
        if lacks != wanted or name not in whole.get(STATELESS, {}):
            raise lost(name, lacks)
        idle += 1
    return [STATELESS] if wanted and idle == len(names) else wanted


def cut(whole: Whole, kind: str, name: str, piece: Tensor, spec: ShardSpec) -> Tensor:
    """A new tensor like ``piece`` with its part of a whole; moments keep their own precision.

    Raises DPA804 if the checkpoint has no such tensor, one of another shape, or a weight of another
    precision: rounded, the next step would be another.
    """
    found = whole.get(kind, {}).get(name)
    if found is not None and kind != WEIGHTS and not found.ndim:
        return found.clone()
    if found is not None and spec.replicated:  # every rank's file held it
        found = found[: spec.shape[0]] if spec.shape else found
    if found is None or tuple(found.shape) != spec.shape:
        raise UsageError(
            "DPA804",
            f"the checkpoint does not fit the model: {kind} of {name} is "
            f"{'missing' if found is None else tuple(found.shape)}, the model has {spec.shape}.",
            "Resume with the model it was written with.",
        )
    if kind == WEIGHTS and found.dtype != piece.dtype:
        raise UsageError(
            "DPA804",
            f"the checkpoint does not fit the model: weight {name} is {dtype_name(found.dtype)}, "
            f"the model has {dtype_name(piece.dtype)}.",
            "Resume with the actor_rollout_ref.model.dtype it was written with.",
        )
    part = torch.empty(piece.shape, dtype=found.dtype)
    fill(part, spec, found)
    return part
