"""Real runs of verl whose workers are looked into, too."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dataproto_audit import open_run

from .configs import BYPASS, CORRECTION, ENGINE, FP32, QUIET, TWO, V0, V1_FSDP2, VALIDATES
from .looks import (
    BY_ROWS,
    GRPO,
    JUDGED,
    LEGACY_UNSEEN,
    PACKED,
    boundaries,
    healthy,
    made,
    passed,
    seen_in_v1,
)
from .runs import run

pytestmark = [pytest.mark.verl, pytest.mark.engine]


@pytest.mark.parametrize(
    ("version", "overrides", "unseen", "seen"),
    [
        ("0.7.1", CORRECTION, LEGACY_UNSEEN, boundaries),
        ("0.7.1", BYPASS, LEGACY_UNSEEN, boundaries),
        ("0.7.1", ENGINE, PACKED, boundaries),
        ("0.9.1", (*V0, *FP32), BY_ROWS | PACKED, boundaries),
        ("0.9.1", ("trainer.use_v1=False",), BY_ROWS | {"DPA706"}, boundaries),
        ("0.9.1", V1_FSDP2, BY_ROWS | PACKED, seen_in_v1),
    ],
    ids=["0.7.1-legacy-correction", "0.7.1-legacy-bypass", "0.7.1-engine-dynamic", "0.9.1-v0-fp32",
         "0.9.1-v0-padded", "0.9.1-v1-fsdp2-two-processes"],
)  # fmt: skip
def test_workers_that_are_looked_into_are_healthy(
    version: str,
    overrides: tuple[str, ...],
    unseen: set[str],
    seen: Callable[..., set[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = made(version, tmp_path_factory)
    done = run(
        version, folder, *VALIDATES, *overrides,
        DATAPROTO_AUDIT_RUN_DIR=str(folder / "run"), DATAPROTO_AUDIT_WORKERS="1",
    )  # fmt: skip
    healthy(folder / "run", done, version, seen(*GRPO))
    assert passed(folder / "run") & JUDGED == JUDGED - unseen
    assert not (folder / "run" / "ranks").exists()


def test_two_ranks_tell_of_their_own_rows(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = made("0.7.1", tmp_path_factory)
    done = run(
        "0.7.1", folder, *TWO, *QUIET,
        DATAPROTO_AUDIT_RUN_DIR=str(folder / "two"), DATAPROTO_AUDIT_WORKERS="1",
    )  # fmt: skip
    assert done.code == 0, done.log[-5000:]
    assert passed(folder / "two") & JUDGED == JUDGED - LEGACY_UNSEEN
    assert not [f for f in open_run(folder / "two").findings() if f.severity != "info"]
