"""The simulated step is what it claims to be: consistent in itself and with its configuration."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dataproto_audit.reference import advantages
from dataproto_audit.testing.healthy import Boundary, Options, boundaries, healthy_step
from dataproto_audit.testing.toy_policy import STOP, ToyPolicy, extended, prompt_hash

LOOP = ["prompts", "rollout", "union", "balance", "reward", "old_log_prob", "ref_log_prob",
        "advantage", "update_actor", "sync_weights", "validation"]  # fmt: skip


def after(stage: str, options: Options) -> Boundary:
    return next(b for b in boundaries(options) if (b.stage, b.when) == (stage, "after"))


def test_stages_in_the_order_of_the_loop_with_both_sides() -> None:
    settings, step = healthy_step()
    assert [b.stage for b in step if b.when == "after"] == LOOP
    assert [b.stage for b in step if b.when == "before"] == LOOP[1:-2]
    assert settings == Options().settings()
    assert settings.ref_from_actor
    assert settings.on_policy


@pytest.mark.parametrize(
    ("options", "added", "gone"),
    [
        (Options(balanced=False), set(), {"balance"}),
        (Options(reference=False), set(), {"ref_log_prob"}),
        (Options(kl_in_reward=True), {"kl_reward"}, set()),
        (Options(critic=True), {"values", "update_critic"}, set()),
    ],
)
def test_options_add_and_remove_stages(options: Options, added: set, gone: set) -> None:
    stages = {b.stage for b in boundaries(options)}
    assert stages == (set(LOOP) | added) - gone


def test_the_same_seed_is_the_same_step_and_another_is_not() -> None:
    def ids(options: Options) -> torch.Tensor:
        return after("rollout", options).batch.batch["responses"]

    assert torch.equal(ids(Options()), ids(Options()))
    assert not torch.equal(ids(Options(seed=1)), ids(Options()))
    assert not torch.equal(ids(Options(step=2)), ids(Options()))


def test_boundaries_keep_what_they_held() -> None:
    step = list(boundaries())
    names = [set() if b.batch.batch is None else set(b.batch.batch.keys()) for b in step]
    for (b, fields), later in zip(zip(step, names, strict=True), names[1:], strict=False):
        if b.when == "before":
            assert fields <= later or b.stage in ("rollout", "sync_weights")
    assert "advantages" not in names[[b.stage for b in step].index("reward")]


def test_a_change_of_the_batch_flows_on() -> None:
    seen = {}
    for b in boundaries():
        if (b.stage, b.when) == ("reward", "after"):
            b.batch.batch["token_level_scores"] = torch.zeros(16, 4)
        seen[b.stage] = b.batch
    assert not seen["update_actor"].batch["advantages"].any()


def test_rows_of_all_lengths() -> None:
    batch = after("rollout", Options(prompts=8, truncated=3, one_token=5)).batch
    lengths = batch.batch["response_mask"].sum(1)
    reasons = batch.non_tensor_batch["finish_reason"].tolist()
    assert lengths[:3].tolist() == [4, 4, 4]
    assert reasons[:3] == ["length"] * 3
    assert lengths[3:8].tolist() == [1] * 5
    assert (batch.batch["responses"][3:8, 0] == STOP).all()


def test_tool_tokens_are_attended_and_not_trained_on() -> None:
    tensors = after("rollout", Options(multi_turn=True, response_width=9, truncated=4)).batch.batch
    holes = (tensors["attention_mask"][:, -9:] != 0) & (tensors["response_mask"] == 0)
    assert holes[0].tolist() == [False, True, True, False, False, True, True, False, False]
    assert not holes[1].any()
    assert not tensors["rollout_log_probs"][holes].any()


def test_log_probs_are_those_of_the_policy() -> None:
    options = Options(prompts=8, temperature=0.6)
    tensors = after("old_log_prob", options).batch.batch
    used = tensors["attention_mask"][:, :6].numpy() != 0
    hashes = prompt_hash(tensors["prompts"].numpy(), used)
    exact, entropy = ToyPolicy(temperature=0.6).score(hashes, tensors["responses"].numpy())
    on = tensors["response_mask"].numpy() != 0
    for name in ("old_log_probs", "rollout_log_probs"):
        assert np.abs(tensors[name].numpy() - exact)[on].max() < 5e-6
        assert not tensors[name].numpy()[~on].any()
    assert (entropy >= 0).all()
    assert (entropy <= np.log(32)).all()


def test_precision_and_staleness_are_as_told() -> None:
    half = after("old_log_prob", Options(dtype="bfloat16")).batch.batch
    assert half["old_log_probs"].dtype == torch.bfloat16
    mask = half["response_mask"] != 0
    gap = (half["old_log_probs"].float() - half["rollout_log_probs"])[mask].abs()
    assert 1e-3 < gap.mean() < 0.05
    stale = after("old_log_prob", Options(stale_steps=40)).batch.batch
    mask = stale["response_mask"] != 0
    assert (stale["old_log_probs"] - stale["rollout_log_probs"])[mask].abs().mean() > 0.05


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_losses_do_not_depend_on_the_split(mode: str) -> None:
    options = Options(prompts=8, loss_agg_mode=mode, entropy=True)

    def losses(**split: int) -> dict[str, float]:
        [loss] = after("update_actor", replace(options, **split)).evidence["losses"]
        return loss

    one, many = losses(ranks=1, micro_rows=99), losses(ranks=1, micro_rows=1)
    assert one == pytest.approx(many, abs=1e-9)
    ranks = [note["rows"] for note in after("update_actor", options).evidence["ranks"]]
    assert ranks == [16, 16]


def test_every_row_is_in_one_mini_batch_and_one_micro_batch() -> None:
    b = after("update_actor", Options(prompts=8, mini_batches=2, ranks=2, micro_rows=3))
    assert np.bincount(b.batch.batch["mini_batch"].numpy()).tolist() == [16, 16]
    for note in b.evidence["ranks"]:
        held = sorted(row for part in note["indices"] for row in part)
        assert held == list(range(16))
        assert sum(note["micro_batches"]) == note["tokens"]


def test_duplicate_prompts_and_equal_groups() -> None:
    batch = after("union", Options(duplicate_prompts=True)).batch
    prompts = batch.batch["prompts"]
    assert torch.equal(prompts[0], prompts[4])
    assert batch.non_tensor_batch["uid"][0] != batch.non_tensor_batch["uid"][4]
    equal = after("advantage", Options(equal_groups=True)).batch.batch
    assert not equal["advantages"].any()


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "gpg", "grpo_passk"])
def test_advantages_are_those_of_the_estimator(estimator: str) -> None:
    batch = after("advantage", Options(estimator=estimator, prompts=8)).batch
    tensors = batch.batch
    want = getattr(advantages, estimator)(
        tensors["token_level_rewards"], tensors["response_mask"], batch.non_tensor_batch["uid"]
    )[0]
    assert torch.equal(tensors["advantages"], want.float())


def test_hooks_change_what_is_sampled_with_and_sent() -> None:
    step = list(boundaries(sampling=lambda s: {**s, "temperature": 0.5}, sent=lambda new, old: old))
    rollout = next(b for b in step if (b.stage, b.when) == ("rollout", "after"))
    assert rollout.batch.meta_info["sampling"]["temperature"] == 0.5
    sync = next(b for b in step if b.stage == "sync_weights").evidence
    assert sync["trainer_checksum"] != sync["engine_checksum"]


def test_the_policy_is_a_distribution_over_what_may_be_sampled() -> None:
    policy, prefix = ToyPolicy(vocab=12), np.arange(50, dtype=np.uint64)
    log_p = policy.log_probs(prefix)
    assert np.allclose(np.exp(log_p).sum(1), 1.0)
    assert (log_p[:, :STOP] < -30).all()
    assert np.allclose(policy.log_probs(prefix), log_p)
    near, far = (np.abs(policy.at(v).log_probs(prefix) - log_p)[:, STOP:].max() for v in (0.01, 1))
    assert 0 < near < 0.1 < far
    tokens = np.full(50, 7)
    assert len(set(extended(prefix, tokens).tolist())) == 50
