"""`replay` and `bisect` on the command line."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dataproto_audit.dump.trace import TraceWriter
from dataproto_audit.reference.logprobs import token_log_probs
from dataproto_audit.testing.faults import CATALOGUE
from dataproto_audit.testing.traces import write_simulated

SCORED = ("union", "balance", "reward", "old_log_prob", "ref_log_prob")
WRONG, STEP = (2, 5), 5


def dpa(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dataproto_audit.cli", *map(str, args)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_bisect_names_the_stage_and_exits_with_1(tmp_path: Path) -> None:
    write_simulated(tmp_path, "plain", [CATALOGUE["old_one_column_early"]])
    ran = dpa("bisect", tmp_path, "--json")
    said = json.loads(ran.stdout)
    assert (ran.returncode, said["stage"], said["cause"]) == (1, "old_log_prob", "shift")
    assert "old_log_prob WRONG" in dpa("bisect", tmp_path).stdout


def test_replay_of_a_healthy_trace_is_quiet(tmp_path: Path) -> None:
    write_simulated(tmp_path, "plain")
    ran = dpa("replay", tmp_path, "--recompute", "--json")
    said = json.loads(ran.stdout)
    assert (ran.returncode, said["ok"], said["steps"]) == (0, True, 1)
    assert said["answers"][0]["recomputations"] == 0


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    for command in ("replay", "bisect"):
        ran = dpa(command, tmp_path / "absent")
        assert ran.returncode == 2
        assert "Traceback" not in ran.stderr
        assert len(ran.stderr.strip().splitlines()) == 1


def test_an_unreadable_path_does_not_lose_the_answers_of_others(tmp_path: Path) -> None:
    write_simulated(tmp_path / "good", "plain")
    ran = dpa("replay", tmp_path / "absent", tmp_path / "good", "--json")
    assert ran.returncode == 2
    error, good = map(json.loads, ran.stdout.splitlines())
    assert (error["path"], error["code"], error["exit_code"]) == (
        str(tmp_path / "absent"), "DPA810", 2)  # fmt: skip
    assert good["ok"]
    assert "absent" in ran.stderr


@pytest.fixture(scope="module")
def modelled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A tiny model of transformers, another one, and a trace whose log-probs are theirs."""
    from dataproto_audit.reference.logprobs import load_model
    from dataproto_audit.testing.bases import BASES
    from dataproto_audit.testing.healthy import boundaries
    from dataproto_audit.trainer.models import TinyModel, write_tiny_model

    folder = tmp_path_factory.mktemp("models")
    options = replace(BASES["plain"], prompts=4, n=2, response_width=6, step=STEP)
    policy, reference = (
        write_tiny_model(folder / name, TinyModel(seed=seed, initializer_range=0.2))
        for name, seed in (("policy", 1), ("reference", 2))
    )
    write_trace(folder / "trace", options, boundaries(options),
                {"policy": load_model(policy), "reference": load_model(reference)})  # fmt: skip
    return folder / "trace", policy, reference


def write_trace(folder: Path, options: Any, made: Any, models: dict[str, Any]) -> None:
    """The step up to the reference's log-probs, scored by real models; two rows of these wrong."""
    settings = {**asdict(options.settings()), "vocab_size": models["policy"].config.vocab_size}
    with TraceWriter(folder, retention="all", settings=settings) as writer:
        writer.begin_step(STEP)
        for boundary in made:
            if boundary.when == "after" and boundary.stage in ("rollout", *SCORED):
                tensors = boundary.batch.batch
                for name, role in (("rollout_log_probs", "policy"), ("old_log_probs", "policy"),
                                   ("ref_log_prob", "reference")):  # fmt: skip
                    if name in tensors:
                        found = scored(models[role], tensors, options.temperature)
                        tensors[name] = found[0]
                        if name == "old_log_probs" and "entropys" in tensors:
                            tensors["entropys"] = found[1]
                if "ref_log_prob" in tensors:
                    for row in WRONG:
                        tensors["ref_log_prob"][row] = tensors["ref_log_prob"][row].roll(1)
                writer.write_boundary(boundary.stage, boundary.batch, when="after")
            if (boundary.stage, boundary.when) == ("ref_log_prob", "after"):
                break
        writer.end_step()


def scored(model: Any, tensors: Any, temperature: float) -> list[torch.Tensor]:
    found = token_log_probs(
        model, tensors["input_ids"], tensors["attention_mask"], tensors["position_ids"],
        tensors["responses"].shape[1], temperature=temperature,
    )  # fmt: skip
    return [values.float() * tensors["response_mask"] for values in found]


def test_models_of_transformers_find_a_fault_of_the_reference(
    modelled: tuple[Path, Path, Path],
) -> None:
    trace, policy, reference = modelled
    args = ("--model", policy, "--ref-model", reference, "--json")
    said = json.loads(dpa("bisect", trace, *args).stdout)
    assert (said["verdict"], said["stage"], said["field"]) == (
        "faulty", "ref_log_prob", "ref_log_prob")  # fmt: skip
    assert said["rows"] == list(WRONG)
    assert said["recomputations"] == 2
    assert "old_log_prob" in [one["stage"] for one in said["cleared"]]
    alone = json.loads(dpa("bisect", trace, "--model", policy, "--json").stdout)
    assert alone["recomputations"] == 1


@pytest.mark.engine
def test_files_are_replayed_in_several_processes(tmp_path: Path) -> None:
    for number in range(3):
        faults = [CATALOGUE["old_one_column_early"]] if number == 1 else []
        write_simulated(tmp_path / str(number), "plain", faults)
    paths = [tmp_path / str(number) for number in range(3)]
    one = dpa("replay", *paths, tmp_path / "absent", "--json")
    two = dpa("replay", *paths, tmp_path / "absent", "--json", "--jobs", 2)
    assert (one.returncode, two.returncode) == (2, 2)
    told = [json.loads(line) for line in two.stdout.splitlines()]
    assert told == [json.loads(line) for line in one.stdout.splitlines()]
    assert [answer.get("ok") for answer in told] == [True, False, True, None]
