"""Numbers that the losses use are finite on trained tokens (DPA420).

Log-probs and scores have checks of their own (DPA301, DPA407). Looked at are the fields that
stages make of them: one NaN among them is the loss of a whole step. Cells off the mask are free.
These checks come first at their stage: what is made of a NaN differs from every recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView, Block
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.logprobs import named
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.scan import any_of, some

MADE_AT = {
    "token_level_rewards": "advantage",
    "values": "values",
    "advantages": "advantage",
    "returns": "advantage",
    "rollout_is_weights": "advantage",
    "entropys": "old_log_prob",
    "update_log_probs": "update_actor",
    "update_entropys": "update_actor",
    "update_values": "update_critic",
}
"""Field -> the stage behind which it is complete."""


def _odd(field: str) -> Callable[[Block], bool]:
    def compute(block: Block) -> bool:
        values = block[field]
        if np.isfinite(values.sum(dtype=np.float64)):
            return False
        return some(~np.isfinite(values) & block.mask)

    return compute


def uncorrected(view: BatchView, ctx: Context) -> str:
    """Why there are no importance weights. They may be there without rejection; without either
    there is no correction."""
    there = "rollout_is_weights" in view or ctx.settings.rejection is not False
    return "" if there else "no rollout correction"


def without_bonus(view: BatchView, ctx: Context) -> str:
    """Why an update has no entropies: nothing in its loss asks for them."""
    return "no entropy in the loss" if ctx.settings.entropy_coeff == 0 else ""


ABSENT = {"rollout_is_weights": uncorrected, "update_entropys": without_bonus}


def _finite(field: str, stage: str) -> None:
    def run(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
        if stats[f"odd_trained:{field}"]:
            values = view.numpy(field)
            bad = ~np.isfinite(values) & (view.numpy("response_mask") != 0)
            yield ctx.fail(
                field,
                cells=bad,
                expected="finite numbers on trained tokens",
                actual=f"NaN or infinity on {int(bad.sum())} of them",
                evidence={"NaN": int(np.isnan(values[bad]).sum())},
                causes=("non_finite", "bad_row"),
            )

    needs = (field, "response_mask")
    probe(
        "DPA420",
        stages=(stage,),
        needs=needs,
        stats=(any_of(f"odd_trained:{field}", needs, _odd(field)),),
        absent=ABSENT.get(field),
        basic=True,
    )(named(run, f"{field}_finite", f"{field} is finite on trained tokens."))


for _field, _stage in MADE_AT.items():
    _finite(_field, _stage)
