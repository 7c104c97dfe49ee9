"""A small step that puts rows into every table."""

from collections.abc import Callable

import numpy as np
import pytest

from dataproto_audit.dump.tables import TableWriter
from dataproto_audit.findings import Finding

ROWS_PER_STEP = {
    "steps": 2, "fields": 2, "outcomes": 3, "findings": 1, "groups": 2, "rows": 4, "tokens": 3,
    "ranks": 2, "loss": 2,
}  # fmt: skip


def append_step(tables: TableWriter, step: int) -> None:
    keys = [f"s{step}:r{row}" for row in range(4)]
    tables.append("steps", {"metric": ["critic/score/mean", "lr"], "value": [step / 10, 1e-3]})
    tables.append_rows("fields", [
        ("rollout", "after", "responses", "i64", "[4,8]", 4, 0.0, 9.0, 4.5, 0, 0, 0.5, f"{step:x}"),
        ("rollout", "after", "raw_prompt", "object", "[4]", 4, *(None,) * 7),
    ])  # fmt: skip
    tables.append_rows("outcomes", [("rollout", "after", "eos", "DPA206", "passed", "")])
    tables.append_rows("outcomes", [
        ("rollout", "after", "gap", "DPA303", "not_checkable", "no rollout_log_probs"),
        ("rollout", "after", "mask", "DPA205", "failed", None),
    ])  # fmt: skip
    tables.append_findings([
        Finding("DPA205", "warn", "rollout", "mask", field="response_mask", rows=(1,),
                row_keys=(keys[1],), columns={1: (6, 7)}, expected="0", actual="1",
                evidence={"cells": 2}, causes=("mask_on_padding",), hint="Mask padding.")
    ])  # fmt: skip
    tables.append("groups", {
        "uid": ["a", "b"], "rows": 2, "score_mean": [0.5, 1.0], "score_std": [0.7, 0.0],
        "score_min": [0.0, 1.0], "score_max": 1.0, "advantage_mean": 0.0, "length_mean": [3.0, 4.0],
        "degenerate": np.array([False, True]),
    })  # fmt: skip
    tables.append("rows", {
        "row": np.arange(4), "row_key": keys, "uid": ["a", "a", "b", "b"], "prompt_length": 2,
        "response_length": np.array([1, 2, 3, 4]), "trained_tokens": [1, 2, 3, 4],
        "score": np.array([0.0, 1.0, 1.0, 1.0]), "rollout_old_gap_max": np.full(4, 1e-6),
        "finish_reason": "stop", "flags": ["", "DPA205", "", ""],
    })  # fmt: skip
    tables.append("tokens", {
        "row": 1, "row_key": keys[1], "column": np.arange(3), "token_id": [5, 6, 7],
        "mask": np.array([1, 1, 0]), "old_log_prob": np.float32([-0.5, -1.0, 0.0]),
        "flag": "DPA205",
    })  # fmt: skip
    tables.append("ranks", {
        "stage": "update_actor", "rank": [0, 1], "rows": 2, "tokens": [7, 9], "micro_batches": 1,
        "peak_token_sum": [7, 9], "bubble": [0.2, 0.0], "cpu_s": 0.5,
    })  # fmt: skip
    tables.append("loss", {
        "mini_batch": 0, "term": ["pg", "total"], "value": [0.1, 0.2], "normaliser": 10,
    })  # fmt: skip


@pytest.fixture
def write_step() -> Callable[[TableWriter, int], None]:
    """Append one step to every table and flush it."""

    def write(tables: TableWriter, step: int) -> None:
        append_step(tables, step)
        tables.flush_step(step)

    return write


@pytest.fixture
def fill_step() -> Callable[[TableWriter, int], None]:
    """Append one step to every table without flushing it."""
    return append_step


@pytest.fixture
def rows_per_step() -> dict[str, int]:
    """Rows that one written step adds to each table."""
    return dict(ROWS_PER_STEP)
