"""What a written file lost of a batch (DPA104, DPA107)."""

from typing import Any

import numpy as np
import pytest

from dataproto_audit import check_dump
from dataproto_audit.batch import BatchView
from dataproto_audit.contracts.dumped import IDENTITY, dump_violations


def held(rows: int, *names: str) -> dict[str, Any]:
    arrays = {name: np.array([f"{name} {i}" for i in range(rows)], object) for name in names}
    return {"non_tensor_batch": arrays, "meta_info": {"dp_size": 2}}


@pytest.mark.parametrize("name", IDENTITY)
def test_an_identity_that_no_line_has(name: str) -> None:
    [found] = dump_violations(BatchView.of(held(4, "score", name)), BatchView.of(held(4, "score")),
                              factors={})  # fmt: skip
    assert (found.code, found.field, found.evidence) == ("DPA107", name, {})


def test_other_fields_may_be_left_out_and_added() -> None:
    both = [BatchView.of(held(4, "uid", other)) for other in ("score", "output")]
    assert dump_violations(both[0], both[1], factors={}) == []


@pytest.mark.parametrize(
    ("rows", "said"), [(2, {"explained": "4 = 2 x dp (dp=2)"}), (3, {}), (1, {"explained":
                                                                            "4 = 1 x 4"})],
)  # fmt: skip
def test_rows_that_were_not_written(rows: int, said: dict[str, str]) -> None:
    report = check_dump(held(4, "uid"), held(rows, "uid"))
    [finding] = report.findings
    assert (finding.code, finding.severity, finding.stage, finding.field) == (
        "DPA104", "warn", "dump", "samples",
    )  # fmt: skip
    assert dict(finding.evidence) == said
    assert report.ok
    assert [(o.check, o.kind) for o in report.outcomes] == [("dump.complete", "failed")]


def test_a_complete_dump_passes() -> None:
    report = check_dump(held(4, "uid"), held(4, "uid", "output"))
    assert (report.findings, [o.kind for o in report.outcomes]) == ([], ["passed"])
