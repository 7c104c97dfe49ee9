"""Cutting a batch over ranks and joining what they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.plans import UpdatePlan
from dataproto_audit.trainer.workers.update import TERMS


@dataclass(frozen=True)
class Place:
    """A rank's part in batches: it gets chunk ``dp_rank`` of ``dp_size``, as do its tensor-,
    pipeline- and context-parallel peers; of those one ``collects``, the others' outputs are
    dropped."""

    rank: int
    dp_rank: int
    dp_size: int
    collects: bool = True


def spread(chunks: Sequence[Any], places: Sequence[Place]) -> list[Any]:
    """What each rank gets, of one item per data-parallel chunk."""
    return [chunks[place.dp_rank] for place in places]


def kept(answers: Sequence[Any], places: Sequence[Place]) -> list[Any]:
    """The answers of collecting ranks, in the order of chunks."""
    chosen = sorted((place.dp_rank, place.rank) for place in places if place.collects)
    return [answers[rank] for _, rank in chosen]


def dispatch(
    batch: DataProto, *, fields: Sequence[str], meta: Sequence[str], ranks: int
) -> list[DataProto]:
    """Contiguous equal chunks of the rows, with the named fields and meta entries alone.

    Raises DPA854 if the rows do not divide, DPA851 if a field or meta entry is missing.
    """
    missing = [name for name in fields if name not in batch.batch]
    missing += [name for name in meta if name not in batch.meta_info]
    if missing:
        raise UsageError(
            "DPA851", f"the batch lacks {', '.join(missing)}.", "An earlier stage writes them."
        )
    if len(batch) % ranks:
        raise UsageError(
            "DPA854",
            f"{len(batch)} rows cannot be cut over {ranks} ranks.",
            "Make train_batch_size * rollout.n a multiple of the number of ranks.",
        )
    chosen = batch.select(
        batch_keys=list(fields), non_tensor_batch_keys=[], meta_info_keys=list(meta)
    )
    return chosen.chunk(ranks)


def collect(parts: Sequence[DataProto]) -> DataProto:
    """Rows of all ranks in rank order; ``meta_info["ranks"]`` holds the ranks' notes."""
    names = list(parts[0].batch.keys())
    tensors = {name: torch.cat([part.batch[name] for part in parts]) for name in names}
    first_row, notes = 0, []
    for part in parts:
        notes.append({**part.meta_info["rank"], "first_row": first_row})
        first_row += len(part)
    return DataProto.from_dict(tensors, meta_info={"ranks": notes})


def merge_losses(
    parts: Sequence[DataProto], plan: UpdatePlan, *, mode: str, terms: Sequence[str] = TERMS
) -> list[dict[str, Any]]:
    """One entry per mini-batch: ``terms`` summed over ranks, and what they were divided by.

    ``normaliser`` is the count of tokens or sequences of all ranks; in the mode
    ``seq-mean-token-sum-norm`` sums were divided by ``loss_scale_factor``, too.
    """
    entries = []
    for position, mini in enumerate(plan.ranks[0]):
        steps = [part.meta_info["steps"][position] for part in parts]
        sums = {name: sum(step["sums"][name] for step in steps) for name in terms}
        entries.append(
            {
                "mini_batch": mini.index,
                "epoch": mini.epoch,
                **sums,
                "normaliser": mini.counts.normaliser(mode),
                "loss_scale_factor": mini.counts.scale_factor(mode),
                "tokens": mini.counts.tokens,
                "sequences": mini.counts.sequences,
                "grad_norm": steps[0]["grad_norm"],
                "lr": steps[0]["lr"],
            }
        )
    return entries


def update_metrics(
    losses: Sequence[Mapping[str, Any]], *, with_kl: bool, with_entropy: bool
) -> dict[str, float]:
    """verl's metric names, each the mean over the mini-batches of an update."""
    names = {
        "actor/pg_loss": "pg_loss",
        "actor/ppo_kl": "ppo_kl",
        "actor/pg_clipfrac": "pg_clipfrac",
        "actor/pg_clipfrac_lower": "pg_clipfrac_lower",
        "actor/grad_norm": "grad_norm",
        "actor/lr": "lr",
    }
    if with_kl:
        names["actor/kl_loss"] = "kl_loss"
    if with_entropy:
        names["actor/entropy"] = "entropy_loss"
    return _means(losses, names)


def value_metrics(losses: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """verl's metric names of a critic's update, each the mean over its mini-batches."""
    names = ("vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr")
    return _means(losses, {f"critic/{name}": name for name in names})


def _means(losses: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> dict[str, float]:
    count = len(losses)
    return {metric: sum(entry[name] for entry in losses) / count for metric, name in names.items()}
