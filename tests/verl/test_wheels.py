"""What attaching hooks into is there in the installed wheels, read without importing them."""

import ast

import pytest

from dataproto_audit.integrations import verl_v0
from dataproto_audit.integrations.verl_versions import VERSIONS

from .runs import python

pytestmark = pytest.mark.verl

TRAINER = {*verl_v0.TRAINER, "_get_gen_batch", "_compute_reward_colocate", "_validate",
           "init_workers", "fit"}  # fmt: skip
MODULE = {*verl_v0.FUNCTIONS, "compute_response_mask"}
IMPORTED = {"extract_reward", "compute_data_metrics", "DataProto"}


def tree(version: str, path: str) -> ast.Module:
    [site] = (python(version).parents[1] / "lib").glob("python3*/site-packages")
    return ast.parse((site / path).read_text(encoding="utf-8"))


def functions(node: ast.Module | ast.ClassDef) -> dict[str, ast.FunctionDef]:
    found = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return {n.name: n for n in found}  # type: ignore[misc]


def calls(node: ast.AST) -> list[str]:
    """Names that are called, in the order of the source."""
    found = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    found.sort(key=lambda n: (n.lineno, n.col_offset))
    return [n.func.attr if isinstance(n.func, ast.Attribute) else getattr(n.func, "id", "")
            for n in found]  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_every_call_exists(version: str) -> None:
    module = tree(version, "verl/trainer/ppo/ray_trainer.py")
    [trainer] = [
        n for n in module.body if isinstance(n, ast.ClassDef) and n.name == "RayPPOTrainer"
    ]
    assert set(functions(trainer)) >= TRAINER
    assert set(functions(module)) >= MODULE
    imports = {
        alias.name for n in module.body if isinstance(n, ast.ImportFrom) for alias in n.names
    }
    assert imports >= IMPORTED
    helper = functions(tree(version, "verl/trainer/ppo/rollout_corr_helper.py"))
    assert set(helper) >= {*verl_v0.CORRECTIONS, "compute_rollout_correction_and_add_to_batch"}
    managers = tree(version, "verl/checkpoint_engine/base.py")
    assert any(
        "update_weights" in functions(n) for n in managers.body if isinstance(n, ast.ClassDef)
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_fit_makes_the_calls_in_our_order(version: str) -> None:
    module = tree(version, "verl/trainer/ppo/ray_trainer.py")
    [trainer] = [
        n for n in module.body if isinstance(n, ast.ClassDef) and n.name == "RayPPOTrainer"
    ]
    made = calls(functions(trainer)["fit"])
    order = ["_get_gen_batch", "repeat", "generate_sequences", "_balance_batch", "extract_reward",
             "apply_bypass_mode", "_compute_old_log_prob", "_compute_ref_log_prob",
             "_compute_values", "apply_kl_penalty", "compute_rollout_correction_and_add_to_batch",
             "compute_advantage", "_update_critic", "_update_actor",
             "compute_data_metrics"]  # fmt: skip
    places = [made.index(name) for name in order]
    assert places == sorted(places)
