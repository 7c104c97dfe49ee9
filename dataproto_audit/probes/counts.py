"""Token counts that travel beside the batch (DPA121)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context
from dataproto_audit.probes.registry import probe
from dataproto_audit.probes.scan import ATTENDED, PROMPT_LENGTH, RESPONSE_LENGTH

NAME = "global_token_num"


@probe(
    "DPA121",
    stages=("balance", "reward", "old_log_prob", "update_actor"),
    needs=ATTENDED,
    stats=(PROMPT_LENGTH, RESPONSE_LENGTH),
    applies=lambda ctx: "" if NAME in ctx.evidence else "no such meta entry",
    severity="warn",
    later=False,
)
def token_counts(view: BatchView, stats: Mapping[str, Any], ctx: Context) -> Iterable[Finding]:
    """meta ``global_token_num`` lists the attended tokens of each row, in order.

    Reported once a step. Throughput and load are computed from it, nothing that is trained on.
    """
    told = np.asarray(ctx.given(NAME))
    if told.shape != (view.rows,) or told.dtype.kind not in "iuf":
        ctx.unknown(f"{NAME} is not one number a row")
    counted = stats["prompt_length"] + stats["response_length"]
    bad = told != counted
    if not bad.any() or ctx.cache.get(NAME) == told.tobytes():
        return
    ctx.cache[NAME] = told.tobytes()
    same = np.array_equal(np.sort(told), np.sort(counted))
    row = int(bad.argmax())
    yield ctx.fail(
        f"meta_info.{NAME}",
        rows=np.flatnonzero(bad),
        expected=f"{int(counted[row])} tokens in row {row}",
        actual=f"{told[row]:g}" + (", the counts of other rows" if same else ""),
        causes=("row_permutation", "stage_meta_leak") if same else ("stage_meta_leak",),
        hint="count again after the rows were reordered" if same else "",
    )
