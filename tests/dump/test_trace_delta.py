"""References between boundaries of different numbers of rows."""

from pathlib import Path

import numpy as np
import torch

from dataproto_audit.dump.trace import Trace, write_step


def batch(rows: list[int], *names: str) -> dict[str, dict[str, object]]:
    at = torch.tensor(rows)[:, None]
    fields = {name: torch.ones(len(rows), 2) * at * (1 + i) for i, name in enumerate(names)}
    uids = np.array([f"u{row}" for row in rows], dtype=object)
    return {
        "batch": {"responses": at.expand(-1, 3).long(), **fields},
        "non_tensor_batch": {"uid": uids},
    }


def test_a_field_that_comes_back_with_more_rows_is_new(tmp_path: Path) -> None:
    """Stages in between did not carry it, and rows moved at the boundary where it comes back."""
    steps = [batch([1, 2], "x"), batch([3, 4, 1, 2]), batch([1, 2, 4, 3], "x")]
    steps[0]["non_tensor_batch"]["extra"] = np.array(["a", "b"], dtype=object)
    steps[2]["non_tensor_batch"]["extra"] = np.array(["a", "b", "d", "c"], dtype=object)
    write_step(tmp_path, 1, [("reward", made, {}) for made in steps])
    last = Trace(tmp_path).step(1).boundaries[2]
    assert torch.equal(last.tensor("x"), torch.as_tensor(steps[2]["batch"]["x"]))
    assert last.array("extra").tolist() == ["a", "b", "d", "c"]
