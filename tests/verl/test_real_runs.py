"""Real runs of verl on a CPU, audited by environment only; ``make test-verl`` makes what they need.

The models are random and tiny; what the runs show is that every boundary is seen, that nothing is
said about a healthy run, that its trace is healthy, too, and that the trained weights are the same
bit by bit with the audit on.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataproto_audit.dump.trace import Trace

from .configs import BYPASS, CORRECTION, DYNAMIC_V1, GAE, LEGACY, TOOLS, V0, V1, VALIDATES
from .looks import (
    BY_ROWS,
    CRITIC,
    GRPO,
    JUDGED,
    PACKED,
    boundaries,
    failed,
    healthy,
    made,
    passed,
    seen_in_v1,
    weights,
)
from .runs import ROLES, run

pytestmark = [pytest.mark.verl, pytest.mark.engine]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and data for 0.7.1."""
    return made("0.7.1", tmp_path_factory)


def trace_is_healthy(folder: Path, call: Callable[..., Any], *steps: int) -> None:
    """The run's trace is whole, checks as the run did, and accuses no stage of these steps."""
    assert Trace(folder).steps == [0, *steps]  # 0 is the validation before the training
    assert Trace(folder).torn == []
    answer = json.loads(call("replay", folder, "--json").stdout)
    assert (answer["ok"], answer["steps"]) == (True, 1 + len(steps))
    assert answer["outcomes"]["passed"] > 100
    for step in steps:
        accuses_nothing(folder, call, step)


def accuses_nothing(folder: Path, call: Callable[..., Any], step: int) -> None:
    """Bisecting this step of the trace ends without a stage."""
    answer = json.loads(call("bisect", folder, "--step", step, "--json").stdout)
    assert answer["verdict"] == "healthy"


def test_grpo_with_legacy_workers_is_seen_and_healthy(data: Path, call: Any) -> None:
    folder = data / "grpo"
    done = run(
        "0.7.1", data, *VALIDATES,
        DATAPROTO_AUDIT_RUN_DIR=str(folder), DATAPROTO_AUDIT_TRACE="all",
    )  # fmt: skip
    healthy(folder, done, "0.7.1", boundaries(*GRPO))
    trace_is_healthy(folder, call, 1, 2)


@pytest.mark.parametrize(
    ("version", "overrides", "stages"),
    [
        ("0.7.1", (*GAE, *LEGACY), CRITIC),
        ("0.9.1", (*V0, *GAE), CRITIC),
    ],
    ids=["0.7.1-gae-legacy", "0.9.1-v0-gae"],
)
def test_runs_with_a_critic_are_seen_and_healthy(
    version: str,
    overrides: tuple[str, ...],
    stages: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = made(version, tmp_path_factory)
    done = run(
        version, folder, *VALIDATES, *overrides, f"critic.model.path={folder}/model",
        DATAPROTO_AUDIT_RUN_DIR=str(folder / "run"),
    )  # fmt: skip
    healthy(folder / "run", done, version, boundaries(*stages))


def test_an_agent_with_tools_is_healthy_until_their_tokens_are_trained(
    data: Path, call: Any
) -> None:
    """The mask of step 3 covers what the tool said."""
    folder = data / "tools"
    done = run(
        "0.7.1", data, *VALIDATES, *TOOLS, steps=3,
        DATAPROTO_AUDIT_RUN_DIR=str(folder), SEEDED="3:mask_tools",
        DATAPROTO_AUDIT_TRACE="all",
    )  # fmt: skip
    healthy(folder, done, "0.7.1", boundaries(*GRPO), steps=2)
    assert failed(folder, 3)[0][0] == "rollout"
    for step in (1, 2):
        accuses_nothing(folder, call, step)
    answer = json.loads(call("bisect", folder, "--step", 3, "--json", check=1).stdout)
    assert (answer["stage"], answer["field"]) == ("rollout", "response_mask")
    union = Trace(folder).step(3).find("union")
    assert union is not None
    assert set(union.array("__num_turns__").tolist()) == {2, 4}  # the tool was called by some


@pytest.mark.parametrize(
    ("overrides", "stages"),
    [((*V1, *GAE, *DYNAMIC_V1), CRITIC), ((*V1, *BYPASS), GRPO),
     ((*V1, *TOOLS, *CORRECTION), GRPO)],
    ids=["0.9.1-v1-gae-dynamic", "0.9.1-v1-bypass", "0.9.1-v1-tools-correction"],
)  # fmt: skip
def test_the_v1_trainer_is_seen_and_healthy(
    overrides: tuple[str, ...],
    stages: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
    call: Any,
) -> None:
    folder = made("0.9.1", tmp_path_factory)
    trains = stages is CRITIC
    critic = (f"critic.model.path={folder}/model",) if trains else ()
    done = run(
        "0.9.1", folder, *VALIDATES, *overrides, *critic,
        DATAPROTO_AUDIT_RUN_DIR=str(folder / "run"), DATAPROTO_AUDIT_TRACE="all",
        DATAPROTO_AUDIT_WORKERS=str(int(trains)),
    )  # fmt: skip
    healthy(folder / "run", done, "0.9.1", seen_in_v1(*stages))
    if trains:
        assert passed(folder / "run", "update_critic") >= {"DPA505", "DPA506"}
    trace_is_healthy(folder / "run", call, 1, 2)


def test_weights_are_the_same_without_the_audit(data: Path) -> None:
    """One row a prompt, so that what is sampled for a row does not depend on who asks first, and no
    critic, whose last layer verl draws without a seed."""
    overrides = (
        *VALIDATES, "algorithm.adv_estimator=reinforce_plus_plus", f"{ROLES}.rollout.n=1",
        f"{ROLES}.actor.ppo_micro_batch_size_per_gpu=2",
    )  # fmt: skip
    audited = run("0.7.1", data, *overrides, DATAPROTO_AUDIT_RUN_DIR=str(data / "rpp"))
    plain = run("0.7.1", data, *overrides, audit=False)
    healthy(data / "rpp", audited, "0.7.1", boundaries(*GRPO))
    assert plain.code == 0, plain.log[-5000:]
    assert "audit/" not in plain.log
    assert len(weights(audited)) == 3
    assert weights(plain) == weights(audited)


def test_weights_of_v1_are_the_same_without_the_audit(
    tmp_path_factory: pytest.TempPathFactory, call: Any
) -> None:
    """With rows in the order of their ids: which of them arrives first differs from run to run."""
    folder = made("0.9.1", tmp_path_factory)
    audited = run(
        "0.9.1", folder, *VALIDATES, *V1, IN_ORDER="1",
        DATAPROTO_AUDIT_RUN_DIR=str(folder / "run"), DATAPROTO_AUDIT_WORKERS="1",
        DATAPROTO_AUDIT_TRACE="all",
    )  # fmt: skip
    healthy(folder / "run", audited, "0.9.1", seen_in_v1(*GRPO))
    assert passed(folder / "run") & JUDGED == JUDGED - BY_ROWS - PACKED
    trace_is_healthy(folder / "run", call, 1, 2)
    plain = run("0.9.1", folder, *VALIDATES, *V1, audit=False, IN_ORDER="1")
    assert plain.code == 0, plain.log[-5000:]
    assert "audit/" not in plain.log
    assert len(weights(audited)) == 3
    assert weights(plain) == weights(audited)
