"""Names of files say stage, side, call and step."""

from pathlib import Path

import pytest

from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.dump.readers.names import METHODS, STAGE_ORDER, hint_of
from dataproto_audit.dump.readers.saved import Hint


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_update_actor.in.pkl", Hint("update_actor", "before", 0, 1, "_update_actor")),
        (
            "_compute_old_log_prob.out.call2.pkl",
            Hint("old_log_prob", "after", 2, 3, "_compute_old_log_prob"),
        ),
        ("_get_gen_batch.in.pkl", Hint("prompts", "after", 0, 1, "_get_gen_batch")),
        ("_get_gen_batch.out.pkl", Hint("rollout", "before", 0, 1, "_get_gen_batch")),
        (
            "v1.tq_all_before._compute_values.call1.td.pt",
            Hint("values", "before", 1, 2, "_compute_values"),
        ),
        (
            "v1._balance_batch.out.call1.kvmeta.json",
            Hint("balance", "after", 1, 2, "_balance_batch"),
        ),
        ("something.in.pkl", Hint(call=0, method="something")),
        ("rollout_dump/12.jsonl", Hint("reward", "after", step=12)),
        ("completions/completions_00004.parquet", Hint(step=4)),
        ("run/9/gen_batch.dp", Hint("rollout", "after", step=9)),
        ("plain.pkl", Hint()),
    ],
)
def test_hints(name, expected):
    assert hint_of(Path("run") / name) == expected


def test_stages_are_those_of_the_contracts():
    assert set(METHODS.values()) <= set(STAGES)
    assert set(STAGE_ORDER) <= set(STAGES)
    assert list(STAGE_ORDER) == [stage for stage in STAGES if stage in STAGE_ORDER]
