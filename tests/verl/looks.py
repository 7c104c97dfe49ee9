"""What the tests of real runs look at once a run has ended."""

import re
from pathlib import Path

import pytest

from dataproto_audit import open_run

from .runs import Finished, python, toy

STEP = ("prompts.after", "rollout.before", "rollout.after", "union.after")
V1_STEP = {"prompts.after", "rollout.after", "reward.after"}
GRPO = ("balance", "reward", "old_log_prob", "ref_log_prob", "advantage", "update_actor")
CRITIC = ("balance", "reward", "old_log_prob", "ref_log_prob", "values", "kl_reward", "advantage",
          "update_critic", "update_actor")  # fmt: skip
JUDGED = {f"DPA{code}" for code in (501, 502, 503, 701, 702, 703, 704, 705, 706, 707)}
"""Checks of what workers tell."""
LEGACY_UNSEEN = {"DPA503", "DPA704", "DPA706", "DPA707"}
"""Its losses have no normaliser; micro-batches are cut by rows there, and rows are padded as the
batch is."""
PACKED = {"DPA707"}
"""Not applicable where rows run as one, without a mask."""

BY_ROWS = {"DPA704"}
"""Not applicable where micro-batches are cut by rows."""


def boundaries(*stages: str) -> set[str]:
    """Boundaries of a V0 run with these stages."""
    sides = {f"{stage}.{when}" for stage in stages for when in ("before", "after")}
    return {*STEP, *sides, "sync_weights.after", "validation.after"}


def seen_in_v1(*stages: str) -> set[str]:
    """Boundaries of a V1 run: the rollout has no entry, and scores come with its rows."""
    return boundaries(*stages) - {*STEP, "reward.before"} | V1_STEP


def made(version: str, factory: pytest.TempPathFactory, *how: str) -> Path:
    """Model and data, in a folder of their own."""
    assert python(version).exists(), "run `make test-verl`, which makes the environment"
    folder = factory.mktemp(f"toy-{version}-")
    toy(version, folder, *how)
    return folder


def healthy(
    folder: Path, done: Finished, version: str, expected: set[str], *, steps: int = 2
) -> None:
    """The run ended well, was seen wholly, and nothing was said about its first ``steps``."""
    assert done.code == 0, done.log[-5000:]
    audited = open_run(folder)
    said = [str(f) for f in audited.findings() if f.severity != "info" and (f.step or 0) <= steps]
    assert not said, "\n".join(said)
    summary = audited.summary
    observed = summary["observed"]
    assert set(observed) == expected
    each = {observed[name] for name in observed if not name.startswith(("sync", "validation"))}
    assert each == {summary["steps"]}
    assert observed["validation.after"] == summary["steps"] + 1  # before the first one, too
    sent = observed["sync_weights.after"] - summary["steps"]
    assert sent == ("rollout.before" in observed)  # V1 sends before ``fit`` begins
    assert summary["not_hooked"] == []
    assert summary["unseen"] == []
    assert summary["switched_off"] == {}
    assert summary["verl"] == version
    assert 0 < summary["audit_cpu_s"] < summary["run_cpu_s"]
    assert "audit/boundaries" in done.log


def passed(folder: Path, stage: str = "update_actor") -> set[str]:
    """Codes that passed in this update of every step of two."""
    outcomes = open_run(folder).table("outcomes")
    update = outcomes[outcomes["stage"] == stage]
    good = update[update["kind"] == "passed"].groupby("code")["step"].nunique()
    return set(good[good == 2].index)


def failed(folder: Path, step: int) -> list[tuple[str, str]]:
    """Stage and code of what failed in ``step``, in the order of the run."""
    found = open_run(folder).findings()
    return [(f.stage, f.code) for f in found if f.severity == "fail" and f.step == step]


def weights(done: Finished) -> list[str]:
    """Fingerprints of the weights that the rollout engine was sent, in order."""
    return re.findall(r"tiny weights \S+ [0-9a-f]{16}", done.log)
