"""``doctor --config`` on the configuration that a wheel ships, in its environment; and what no run
shows of the defects that it names, on the wheel itself.

D9 and D4 are met in test_real_defects.py. ReMax of 0.7.1 fails before its baseline is used (D15),
so that D3 is behind it.
"""

import ast
import json
import subprocess
from pathlib import Path

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.doctor import examine, keys

from .config_keys import OTHERS, configurations, listed
from .configs import ENGINE
from .runs import ROLES, python
from .test_wheels import classes, functions, tree

pytestmark = pytest.mark.verl

ACTOR, CRITIC = f"{ROLES}.actor", "critic"
STARTS = (
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=16",
    f"{ROLES}.rollout.log_prob_micro_batch_size_per_gpu=16",
    f"{ROLES}.ref.log_prob_micro_batch_size_per_gpu=16",
    f"{CRITIC}.ppo_micro_batch_size_per_gpu=16",
    f"{ROLES}.rollout.n=4", "algorithm.adv_estimator=grpo",
)  # fmt: skip
"""What a user has to add so that verl starts at all."""
REMAX, MODEL = "algorithm.adv_estimator=remax", "reward.reward_model.enable=True"
GAE_ENGINE = ("algorithm.adv_estimator=gae", ENGINE[0])


def doctor(version: str, *overrides: str) -> dict[str, str]:
    """Number and level of the defects that this configuration would hit, and no other trouble."""
    [site] = (python(version).parents[1] / "lib").glob("python3*/site-packages/verl")
    shipped = site / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    done = subprocess.run(
        [str(python(version).with_name("dataproto-audit")), "doctor", "--config", str(shipped),
         "--json", *STARTS, *overrides],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert told["for"].startswith(f"verl {version} ")
    assert [p for p in told["problems"] if not p["defect"]] == []
    return {problem["defect"]: problem["level"] for problem in told["problems"]}


@pytest.mark.parametrize(
    ("hit", "overrides", "neighbour"),
    [
        ({"D2", "D3", "D15"}, (REMAX,), ("algorithm.adv_estimator=rloo",)),
        ({"D2", "D3", "D4"}, (REMAX, MODEL),
         (REMAX, MODEL, "reward.reward_model.enable_resource_pool=True")),
        ({"D9", "D10"}, (f"{ACTOR}.use_dynamic_bsz=True",),
         (f"{ACTOR}.use_dynamic_bsz=True", ENGINE[0])),
        ({"D11", "D18"}, GAE_ENGINE, (*GAE_ENGINE, f"{CRITIC}.ppo_micro_batch_size_per_gpu=128")),
    ],
    ids=["D3", "D4", "D9", "D11"],
)  # fmt: skip
def test_defects_that_a_configuration_would_hit_are_named(
    hit: set[str],
    overrides: tuple[str, ...],
    neighbour: tuple[str, ...],
    request: pytest.FixtureRequest,
) -> None:
    number = request.node.callspec.id
    assert set(doctor("0.7.1", *overrides)) == hit
    assert number not in doctor("0.7.1", *neighbour)
    assert number not in doctor("0.9.1", *(o for o in overrides if "legacy" not in o))


def test_the_known_keys_are_those_of_the_wheels() -> None:
    """Otherwise ``python -m tests.verl.config_keys`` writes them again."""
    assert keys.FILE.read_text(encoding="utf-8") == listed()


@pytest.mark.parametrize("version", ["0.7.1", "0.9.1"])
def test_no_configuration_of_a_wheel_has_an_unknown_or_impossible_key(version: str) -> None:
    """Of its trainers; those of other programs are refused."""
    for path in configurations(version):
        if path.name in OTHERS:
            with pytest.raises(UsageError, match="a configuration of verl's"):
                examine(str(path), verl=version)
            continue
        problems = examine(str(path), verl=version)["problems"]
        impossible = [
            p for p in problems if p["code"] == "DPA851" and "takes its place" in p["text"]
        ]
        assert [p for p in problems if p["code"] == "DPA850"] + impossible == [], path.name


@pytest.mark.parametrize("version", ["0.7.1", "0.9.1"])
def test_the_known_names_are_those_of_the_wheels(version: str) -> None:
    """Estimators as enumerated, losses as registered, aggregations and penalties as compared."""
    module = tree(version, "verl/trainer/ppo/core_algos.py")
    enum = classes(module)["AdvantageEstimator"]
    assert {n.value.value for n in enum.body if isinstance(n, ast.Assign)} == set(keys.ESTIMATORS)  # type: ignore[attr-defined] # constants
    losses = {
        d.args[0].value  # type: ignore[attr-defined] # a constant, as the assertion shows
        for function in functions(module).values()
        for d in function.decorator_list
        if isinstance(d, ast.Call) and getattr(d.func, "id", "") == "register_policy_loss"
    }
    values = keys.values(version)
    assert losses == set(values[f"{ACTOR}.policy_loss.loss_mode"])

    def compared(name: str, with_what: str) -> set[str]:
        found = set()
        for node in ast.walk(functions(module)[name]):
            if isinstance(node, ast.Compare) and getattr(node.left, "id", "") == with_what:
                texts = ast.walk(node.comparators[0])
                found |= {n.value for n in texts if isinstance(n, ast.Constant)}
        return found

    assert compared("agg_loss", "loss_agg_mode") == set(values[f"{ACTOR}.loss_agg_mode"])
    penalties = compared("kl_penalty_forward", "kl_penalty") - {"full"}  # which raises
    assert {p.rstrip("+") for p in values["algorithm.kl_penalty"]} == penalties


def test_no_agent_loop_of_0_7_1_reads_what_makes_a_baseline_greedy() -> None:
    """D3: ``fit`` sets it in the batch's meta."""
    loops = ("agent_loop", "single_turn_agent_loop", "tool_agent_loop")

    def reads(version: str, text: str) -> bool:
        files = [tree(version, f"verl/experimental/agent_loop/{name}.py") for name in loops]
        return any(
            isinstance(node, ast.Constant) and node.value == text
            for file in files for node in ast.walk(file)
        )  # fmt: skip

    trainer = classes(tree("0.7.1", "verl/trainer/ppo/ray_trainer.py"))["RayPPOTrainer"]
    assert "meta_info['do_sample'] = False" in ast.unparse(functions(trainer)["fit"])
    assert not reads("0.7.1", "do_sample")
    assert reads("0.9.1", "__do_sample__")


@pytest.mark.parametrize(("version", "grows"), [("0.7.1", True), ("0.9.1", False)])
def test_the_critics_loss_grows_with_micro_batches_in_0_7_1_only(version: str, grows: bool) -> None:
    """D11: one mini-batch of rows of one length, cut in 1, 2 and 4."""
    script = Path(__file__).with_name("value_losses.py")
    done = subprocess.run(
        [str(python(version)), str(script)], capture_output=True, text=True, timeout=300, check=True
    )
    added = json.loads(done.stdout.splitlines()[-1])
    for parts, total in added.items():
        assert total == pytest.approx(added["1"] * (int(parts) if grows else 1))


def test_the_engine_of_0_7_1_leaves_the_dropout_of_a_critic_on() -> None:
    """D18: both others set it to 0."""
    engine = "verl/workers/engine/fsdp/transformer_impl.py"
    off = "classifier_dropout = 0.0"
    assert off not in ast.unparse(tree("0.7.1", engine))
    assert off in ast.unparse(tree("0.7.1", "verl/workers/fsdp_workers.py"))
    assert off in ast.unparse(tree("0.9.1", engine))
