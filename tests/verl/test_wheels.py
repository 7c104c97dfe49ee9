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


def classes(module: ast.Module) -> dict[str, ast.ClassDef]:
    return {n.name: n for n in module.body if isinstance(n, ast.ClassDef)}


def arguments(function: ast.FunctionDef) -> list[str]:
    return [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]


ENGINE_WORKERS, FSDP = "verl/workers/engine_workers.py", "verl/workers/engine/fsdp"
WORKERS = {
    "0.7.1": [
        ("verl/workers/actor/dp_actor.py", "DataParallelPPOActor", {
            "compute_log_prob": "data", "update_policy": "data",
            "_forward_micro_batch": "micro_batch", "_optimizer_step": "self"}),
        ("verl/workers/actor/megatron_actor.py", "MegatronPPOActor", {
            "compute_log_prob": "data", "make_minibatch_iterator": "data",
            "update_policy": "dataloader", "forward_backward_batch": "data"}),
    ],
    "0.9.1": [],
}  # fmt: skip
BOTH = [
    (ENGINE_WORKERS, "TrainingWorker", {"infer_batch": "data", "train_mini_batch": "data"}),
    (f"{FSDP}/transformer_impl.py", "FSDPEngine", {
        "forward_backward_batch": "data", "optimizer_step": "self",
        "get_data_parallel_rank": "self", "get_data_parallel_size": "self"}),
    (f"{FSDP}/transformer_impl.py", "FSDPEngineWithLMHead", {
        "prepare_model_inputs": "micro_batch", "forward_step": "micro_batch"}),
    ("verl/workers/engine/megatron/transformer_impl.py", "MegatronEngine", {
        "forward_backward_batch": "data", "get_data_parallel_rank": "self",
        "get_data_parallel_size": "self"}),
]  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_what_workers_are_hooked_at_exists_and_takes_what_we_read(version: str) -> None:
    for path, owner, methods in (*WORKERS[version], *BOTH):
        found = functions(classes(tree(version, path))[owner])
        for name, first in methods.items():
            assert arguments(found[name])[0 if first == "self" else 1] == first, (owner, name)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_splits_are_looked_up_on_their_modules(version: str) -> None:
    for kind in ("fsdp", "megatron"):
        path = f"verl/workers/engine/{kind}/transformer_impl.py"
        assert "prepare_micro_batches" in imported(tree(version, path))
        assert "prepare_micro_batches" in calls(tree(version, path))


def imported(module: ast.Module) -> set[str]:
    return {a.name for n in ast.walk(module) if isinstance(n, ast.ImportFrom) for a in n.names}


def test_the_legacy_actors_call_in_our_order() -> None:
    """An argument's position is what the hook reads where it is not named."""
    update = functions(
        classes(tree("0.7.1", "verl/workers/actor/dp_actor.py"))["DataParallelPPOActor"]
    )["update_policy"]
    made = calls(update)
    order = ["split", "_forward_micro_batch", "backward", "_optimizer_step"]
    assert [made.index(name) for name in order] == sorted(made.index(name) for name in order)
    module = tree("0.7.1", "verl/workers/actor/megatron_actor.py")
    assert "rearrange_micro_batches" in imported(module)
    takes = arguments(functions(classes(module)["MegatronPPOActor"])["forward_backward_batch"])
    assert (takes[5], takes[6], takes[7]) == (
        "use_dynamic_bsz",
        "micro_batch_size",
        "max_token_len",
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_ulysses_exchanges_in_flash_attention_only(version: str) -> None:
    """DPA707 relies on it; for another kernel the slices of a row stay alone (D14)."""
    module = tree(version, "verl/models/transformers/monkey_patch.py")
    replaced = {
        target.attr: ast.unparse(node.value)
        for node in ast.walk(module) if isinstance(node, ast.Assign)
        for target in node.targets if isinstance(target, ast.Attribute)
    }  # fmt: skip
    exchanging = {name for name, value in replaced.items() if "ulysses" in value}
    assert "_flash_attention_forward" in exchanging
    assert not [name for name in exchanging if "sdpa" in name or "eager" in name]


def test_the_engine_of_0_7_1_builds_its_mask_from_the_loss_mask() -> None:
    """D13; the hook reads the mask that goes into the model."""
    inputs = functions(classes(tree("0.7.1", f"{FSDP}/transformer_impl.py"))[
        "FSDPEngineWithLMHead"])["prepare_model_inputs"]  # fmt: skip
    assert "for t in loss_mask" in ast.unparse(inputs)
    later = functions(classes(tree("0.9.1", f"{FSDP}/transformer_impl.py"))[
        "FSDPEngineWithLMHead"])["prepare_model_inputs"]  # fmt: skip
    assert "for t in loss_mask" not in ast.unparse(later)
    assert "'attention_mask'" in ast.unparse(later)
