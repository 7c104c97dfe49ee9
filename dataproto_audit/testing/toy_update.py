"""How a healthy step spreads its rows over ranks and micro-batches, and what its losses are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataproto_audit.probes.context import Settings
from dataproto_audit.reference.losses import count_normaliser, policy_loss
from dataproto_audit.reference.values import value_loss

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """``mini_batch`` numbers the mini-batch of each row; ``parts[rank][mini]`` lists micro-batches
    as positions within the rank's contiguous chunk.
    """

    lengths: Index
    mini_batch: Index
    parts: tuple[tuple[tuple[Index, ...], ...], ...]
    limit: int | None = None
    packed: bool = False
    """Micro-batches run as one sequence each, and ranks note where positions begin anew and how
    many tokens of each row attend to each other."""

    @property
    def chunk(self) -> int:
        """Rows of a rank."""
        return len(self.lengths) // len(self.parts)

    def notes(self) -> list[dict[str, Any]]:
        """What each rank notes about a pass over its rows."""
        notes = []
        for rank, minis in enumerate(self.parts):
            own = self.lengths[rank * self.chunk : (rank + 1) * self.chunk]
            micros = [micro for mini in minis for micro in mini]
            sums = [int(own[micro].sum()) for micro in micros]
            notes.append({
                "rank": rank, "rows": len(own), "tokens": int(own.sum()), "micro_batches": sums,
                "indices": [micro.tolist() for micro in micros], "peak_token_sum": max(sums),
                "token_limit": self.limit or 4 * max(sums), "cpu_s": 0.1, "wall_s": 0.2,
            })  # fmt: skip
            if self.packed:
                notes[-1]["packed"] = [
                    {"micro_batch": number, "restarts": [True] * len(micro), "mask": "none"}
                    for number, micro in enumerate(micros)
                ]
                notes[-1]["attended"] = [
                    {"micro_batch": number, "lengths": seen, "seen": seen}
                    for number, seen in enumerate(own[micro].tolist() for micro in micros)
                ]
        return notes


def plan(
    lengths: Index,
    ranks: int,
    mini_batches: int,
    micro_rows: int,
    *,
    seed: int,
    limit: int | None = None,
    packed: bool = False,
) -> Plan:
    """Rows of each rank in random order, cut into mini-batches and those into micro-batches.

    With a ``limit`` of tokens, micro-batches are cut by tokens, and all ranks open as many.
    """
    random, chunk = np.random.default_rng(seed), len(lengths) // ranks
    mini_batch = np.zeros(len(lengths), np.int64)
    parts: list[list[list[Index]]] = []
    for rank in range(ranks):
        minis = []
        for number, rows in enumerate(np.array_split(random.permutation(chunk), mini_batches)):
            mini_batch[rank * chunk + rows] = number
            own = lengths[rank * chunk : (rank + 1) * chunk]
            if limit is None:
                cuts = range(micro_rows, len(rows), micro_rows)
                minis.append(np.split(np.sort(rows), list(cuts)))
            else:
                minis.append(_bins(np.sort(rows), own, limit))
        parts.append(minis)
    if limit is not None:
        for number in range(mini_batches):
            most = max(len(minis[number]) for minis in parts)
            for minis in parts:
                minis[number] = _split_to(minis[number], most)
    frozen = tuple(tuple(tuple(mini) for mini in minis) for minis in parts)
    return Plan(lengths, mini_batch, frozen, limit, packed)


def _bins(rows: Index, lengths: Index, limit: int) -> list[Index]:
    """Micro-batches of at most ``limit`` tokens: each row into the first that has room."""
    bins: list[list[int]] = []
    for row in rows.tolist():
        room = (b for b in bins if int(lengths[b].sum()) + int(lengths[row]) <= limit)
        found = next(room, None)
        if found is None:
            bins.append([row])
        else:
            found.append(row)
    return [np.asarray(b, np.int64) for b in bins]


def _split_to(bins: list[Index], count: int) -> list[Index]:
    """As many micro-batches as the other ranks have: the fullest ones are cut in two."""
    out = list(bins)
    while len(out) < count:
        out.sort(key=len, reverse=True)
        out[:1] = [out[0][: len(out[0]) // 2], out[0][len(out[0]) // 2 :]]
    return out


def losses(tensors: Any, plan: Plan, settings: Settings) -> list[dict[str, float]]:
    """Loss terms of each mini-batch, summed over the shares of all ranks and micro-batches."""
    mode = settings.loss_agg_mode or "token-mean"
    out = []
    for number in range(int(plan.mini_batch.max()) + 1):
        rows = torch.from_numpy(np.flatnonzero(plan.mini_batch == number))
        whole = float(count_normaliser(tensors["response_mask"][rows], mode))
        total = dict.fromkeys(("pg_loss", "kl_loss", "entropy_loss", "total"), 0.0)
        for rank, minis in enumerate(plan.parts):
            for micro in minis[number]:
                part = torch.from_numpy(micro + rank * plan.chunk)
                for name, value in _share(tensors, part, settings, whole).items():
                    total[name] += value
        out.append({**total, "normaliser": whole})
    return out


def value_losses(tensors: Any, plan: Plan, *, clip: float = 0.5) -> list[dict[str, Any]]:
    """The critic's loss of each mini-batch, averaged over all its trained tokens."""
    out = []
    for number in range(int(plan.mini_batch.max()) + 1):
        rows = torch.from_numpy(np.flatnonzero(plan.mini_batch == number))
        names = ("update_values", "values", "returns", "response_mask")
        fields = [tensors[name][rows] for name in names]
        loss = value_loss(*fields, clip=clip)
        told = {"cliprange_value": clip, "loss_agg_mode": "token-mean"}
        count = float(count_normaliser(fields[-1], "token-mean"))
        out.append({"vf_loss": float(loss), "normaliser": count, **told})
    return out


def _share(tensors: Any, rows: Any, settings: Settings, whole: float) -> dict[str, float]:
    def part(name: str) -> torch.Tensor:
        taken: torch.Tensor = tensors[name][rows]
        return taken

    fields = tensors.keys()
    terms = policy_loss(
        part("update_log_probs"),
        part("old_log_probs"),
        part("advantages"),
        part("response_mask"),
        ref_log_prob=part("ref_log_prob") if settings.use_kl_loss else None,
        entropy=part("update_entropys") if settings.entropy_coeff else None,
        rollout_is_weights=part("rollout_is_weights") if "rollout_is_weights" in fields else None,
        clip_ratio_low=settings.clip_ratio_low,
        clip_ratio_high=settings.clip_ratio_high,
        clip_ratio_c=settings.clip_ratio_c,
        loss_agg_mode=settings.loss_agg_mode or "token-mean",
        kl_loss_coef=settings.kl_loss_coef or 0.0,
        kl_loss_type=settings.kl_loss_type or "low_var_kl",
        entropy_coeff=settings.entropy_coeff or 0.0,
        normaliser=whole,
    )
    return {
        "pg_loss": float(terms["pg_loss"]),
        "kl_loss": float(terms["kl_loss"]),
        "entropy_loss": float(terms["entropy_loss"]),
        "total": float(terms["total"]),
    }
