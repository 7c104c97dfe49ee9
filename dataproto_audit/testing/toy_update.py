"""How a healthy step spreads its rows over ranks and micro-batches, and what its losses are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataproto_audit.probes.context import Settings
from dataproto_audit.reference.losses import count_normaliser, policy_loss

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """``mini_batch`` numbers the mini-batch of each row; ``parts[rank][mini]`` lists micro-batches
    as positions within the rank's contiguous chunk.
    """

    lengths: Index
    mini_batch: Index
    parts: tuple[tuple[tuple[Index, ...], ...], ...]

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
                "token_limit": 4 * max(sums), "cpu_s": 0.1, "wall_s": 0.2,
            })  # fmt: skip
        return notes


def plan(lengths: Index, ranks: int, mini_batches: int, micro_rows: int, *, seed: int) -> Plan:
    """Rows of each rank in random order, cut into mini-batches and those into micro-batches."""
    random, chunk = np.random.default_rng(seed), len(lengths) // ranks
    mini_batch = np.zeros(len(lengths), np.int64)
    parts = []
    for rank in range(ranks):
        minis = []
        for number, rows in enumerate(np.array_split(random.permutation(chunk), mini_batches)):
            mini_batch[rank * chunk + rows] = number
            cuts = range(micro_rows, len(rows), micro_rows)
            minis.append(tuple(np.split(np.sort(rows), list(cuts))))
        parts.append(tuple(minis))
    return Plan(lengths, mini_batch, tuple(parts))


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


def _share(tensors: Any, rows: Any, settings: Settings, whole: float) -> dict[str, float]:
    def part(name: str) -> torch.Tensor:
        taken: torch.Tensor = tensors[name][rows]
        return taken

    terms = policy_loss(
        part("update_log_probs"),
        part("old_log_probs"),
        part("advantages"),
        part("response_mask"),
        ref_log_prob=part("ref_log_prob") if settings.use_kl_loss else None,
        entropy=part("update_entropys") if settings.entropy_coeff else None,
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
