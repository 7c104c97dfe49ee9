"""What attaching to the V1 trainer hooks into is there in the wheel, and in the stand-in."""

import ast
from pathlib import Path

import pytest

from dataproto_audit.integrations import verl_v1

from .test_wheels import calls, functions, tree

pytestmark = pytest.mark.verl

BASE = "verl/trainer/ppo/v1/trainer_base.py"
TRAINER = {*verl_v1.STAGES, "_submit_batch_to_rollout", "_step_once", "_validate", "fit"}
FAKE = Path(__file__).parents[1] / "integrations" / "fake_verl"


def trainer_of(module: ast.Module) -> dict[str, ast.FunctionDef]:
    """Methods of the trainer."""
    [trainer] = [n for n in module.body if isinstance(n, ast.ClassDef) and n.name == "PPOTrainer"]
    return functions(trainer)


def positional(node: ast.FunctionDef) -> list[str]:
    """Names of the arguments that may be passed by position."""
    return [argument.arg for argument in node.args.args]


def test_every_call_exists() -> None:
    module = tree("0.9.1", BASE)
    assert set(trainer_of(module)) >= TRAINER
    names = {alias.asname or alias.name for n in module.body
             if isinstance(n, ast.Import | ast.ImportFrom) for alias in n.names}  # fmt: skip
    assert names >= {"apply_kl_penalty", "compute_data_metrics", "tq"}
    queue = functions(tree("0.9.1", "transfer_queue/interface.py"))
    assert positional(queue["kv_batch_get"]) == ["keys", "partition_id", "select_fields"]


def test_a_step_makes_the_calls_in_our_order() -> None:
    made = calls(trainer_of(tree("0.9.1", BASE))["_step_once"])
    places = [made.index(name) for name in ("sample", *verl_v1.STAGES)]
    assert places == sorted(places)


def test_the_stand_in_has_the_calls_of_the_wheel() -> None:
    real = trainer_of(tree("0.9.1", BASE))
    fake = trainer_of(ast.parse((FAKE / "verl/trainer/ppo/v1/trainer_base.py").read_text()))
    assert set(fake) >= TRAINER
    for name in TRAINER - {"_validate", "fit"}:
        assert positional(fake[name]) == positional(real[name]), name
