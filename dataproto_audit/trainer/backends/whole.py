"""A checkpoint of any layout put together: whole tensors under Hugging Face names.

``Whole`` holds them by kind (``model``, the optimizer's ``exp_avg``, ``exp_avg_sq``, ``step``, and
``main``, float32 masters) and name. Made from the files of all ranks, and cut again by each rank of
the new layout; for that time every rank holds the whole model and its moments in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.moments import STATELESS
from dataproto_audit.trainer.backends.shards import ShardSpec, fill

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
            if kind != STATELESS:
                parts.setdefault((kind, name), []).append(value)
    whole: Whole = {}
    for (kind, name), found in parts.items():
        joined = torch.cat(found) if found[0].ndim else found[0]
        whole.setdefault(kind, {})[name] = joined
    return whole


def fsdp_state(
    whole: Whole, pieces: Mapping[str, tuple[Tensor, ShardSpec]], trained: Sequence[str]
) -> dict[str, Tensor]:
    """One FSDP rank's state: its ``pieces`` of the weights, and the optimizer's of ``trained``."""
    state = {
        f"model/{name}": cut(whole, WEIGHTS, name, piece, spec)
        for name, (piece, spec) in pieces.items()
    }
    for name in trained:
        piece, spec = pieces[name]
        kinds = list(moments(whole, name))
        for kind in kinds:
            state[f"optim/{name}/{kind}"] = cut(whole, kind, name, piece, spec)
        if not kinds and any(kind not in (WEIGHTS, MAIN) for kind in whole):
            state[f"optim/{name}/{STATELESS}"] = torch.empty(0)
    return state


def moments(whole: Whole, name: str) -> Iterator[str]:
    """What the optimizer keeps of the weight ``name``."""
    return (kind for kind, by in whole.items() if kind not in (WEIGHTS, MAIN) and name in by)


def cut(whole: Whole, kind: str, name: str, piece: Tensor, spec: ShardSpec) -> Tensor:
    """A new tensor like ``piece`` with its part of a whole; moments keep their own precision.

    Raises DPA804 if the checkpoint has no such tensor, or one of another shape.
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
    dtype = piece.dtype if kind == WEIGHTS else found.dtype
    part = torch.empty(piece.shape, dtype=dtype)
    fill(part, spec, found)
    return part
