"""Two ranks against the independent single-process reference."""

from dataclasses import replace

import numpy as np
import pytest
import ray
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.reference.logprobs import grad_of_loss, load_model, token_log_probs
from dataproto_audit.reference.updates import AdamWState, adamw_step, clip_gradients, sgd_step
from dataproto_audit.reference.values import grad_of_value_loss, load_value_model, token_values
from dataproto_audit.trainer.backends import shards
from dataproto_audit.trainer.backends.base import FSDPOptions, ModelSpec, OptimSpec
from dataproto_audit.trainer.compare.critic import drawn_head
from dataproto_audit.trainer.plans import MicroBatching
from dataproto_audit.trainer.workers.cluster import cluster
from dataproto_audit.trainer.workers.group import WorkerGroup
from dataproto_audit.trainer.workers.spec import (
    CriticSpec,
    LossOptions,
    UpdateOptions,
    ValueLossOptions,
    WorkerSpec,
)

from .probing import probe_worker

pytestmark = pytest.mark.engine

MICROS = [MicroBatching(), MicroBatching(rows=3), MicroBatching(max_tokens=14)]
SGD = OptimSpec(name="sgd", lr=0.1, weight_decay=0.0, grad_clip=0.5)
ADAMW = OptimSpec(lr=1e-3, weight_decay=0.1, grad_clip=0.5)


@pytest.fixture(scope="module")
def workers(tiny_model):
    spec = WorkerSpec(ModelSpec(str(tiny_model())))
    with cluster(num_cpus=4), WorkerGroup(spec, world_size=2, worker_class=probe_worker()) as group:
        built = group.build()
        assert (built["device"], built["world_size"]) == ("cpu", 2)
        yield group


@pytest.fixture
def use(workers, tiny_model):
    """``use(...)``: the same processes with another spec and fresh models."""

    def apply(*, tied=False, seed=1, optim=SGD, loss=None, update=None, wrap="root", **options):
        spec = WorkerSpec(
            ModelSpec(str(tiny_model(tied=tied, seed=seed))),
            optim=optim,
            loss=loss or LossOptions(use_kl_loss=True, kl_loss_coef=0.1),
            update=update or UpdateOptions(mini_batch_size=8, seed=5),
            fsdp=FSDPOptions(wrap=wrap),
            **options,
        )
        workers.spec = spec
        workers.call("use", "use", [(spec,)])
        return workers

    return apply


def fields_of(batch):
    return [batch.batch[name] for name in ("input_ids", "attention_mask", "position_ids")]


def reference_log_probs(model, batch):
    width = batch.batch["responses"].shape[1]
    return token_log_probs(
        model, *fields_of(batch), width, temperature=batch.meta_info["temperature"]
    )


def weights_of(group):
    return shards.join(ray.get(group.export_weights()))


def close(ours, expected, bound):
    torch.testing.assert_close(ours.double(), expected.double(), atol=bound, rtol=0)


@pytest.mark.parametrize("micro", MICROS)
@pytest.mark.parametrize(("tied", "wrap"), [(False, "root"), (True, "layer")])
def test_log_probs_of_both_roles_equal_the_reference(
    use, tiny_model, ragged_batch, micro, tied, wrap
):
    batch = ragged_batch(rows=16, seed=3, temperature=0.8)
    group = use(tied=tied, wrap=wrap, log_prob_micro=micro, ref_micro=micro)
    expected = reference_log_probs(load_model(tiny_model(tied=tied)), batch)
    old = group.compute_log_prob(batch)
    close(old.batch["old_log_probs"], expected[0], 1e-5)
    close(old.batch["entropys"], expected[1], 1e-5)
    ref = group.compute_ref_log_prob(batch)
    close(ref.batch["ref_log_prob"], expected[0], 1e-5)
    assert set(ref.batch.keys()) == {"ref_log_prob"}
    check_notes(old.meta_info["ranks"], batch, micro)


def check_notes(notes, batch, micro):
    lengths = batch.batch["attention_mask"].sum(-1).numpy()
    assert len({len(note["micro_batches"]) for note in notes}) == 1
    for rank, note in enumerate(notes):
        assert (note["rank"], note["first_row"], note["rows"]) == (rank, 8 * rank, 8)
        mine = lengths[8 * rank : 8 * rank + 8]
        assert note["tokens"] == mine.sum()
        assert sorted(np.concatenate(note["indices"]).tolist()) == list(range(8))
        assert note["micro_batches"] == [int(mine[rows].sum()) for rows in note["indices"]]
        assert note["peak_token_sum"] == max(note["micro_batches"])
        if micro.max_tokens:
            assert note["peak_token_sum"] <= micro.max_tokens
        assert note["cpu_s"] > 0


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("micro", MICROS)
def test_every_mini_batch_of_an_update_equals_the_unsplit_reference(
    use, tiny_model, ragged_batch, micro, mode
):
    tied = mode == "token-mean"
    batch = ragged_batch(rows=16, seed=7)
    loss = LossOptions(use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01, loss_agg_mode=mode)
    update = UpdateOptions(mini_batch_size=8, micro=micro, seed=11)
    group = use(tied=tied, loss=loss, update=update)
    out = group.update_actor(batch, step=0)
    kept = group.call("gradients", "gradients")
    model = load_model(tiny_model(tied=tied))
    for index in range(2):
        rows = (out.batch["mini_batch"] == index).nonzero().flatten()
        assert len(rows) == 8
        part = batch.select_idxs(rows)
        expected = reference_log_probs(model, part)
        close(out.batch["update_log_probs"][rows], expected[0], 1e-5)
        close(out.batch["update_entropys"][rows], expected[1], 1e-5)
        gradients, terms = grad_of_loss(
            model,
            dict(part.batch.items()),
            kl_loss_coef=0.1,
            entropy_coeff=0.01,
            loss_agg_mode=mode,
        )
        entry = out.meta_info["losses"][index]
        for name, value in terms.items():
            assert entry[name] == pytest.approx(float(value), abs=1e-5), name
        joined = shards.join([ranks[index] for ranks in kept])
        for name, gradient in gradients.items():
            close(joined[name], gradient, 1e-5)
        clipped, norm = clip_gradients(gradients, max_norm=0.5)
        assert entry["grad_norm"] == pytest.approx(norm, rel=1e-4)
        stepped = sgd_step(dict(model.named_parameters()), clipped, lr=0.1)
        model.load_state_dict({n: p.detach() for n, p in stepped.items()}, strict=False)
    ours = weights_of(group)
    for name, expected in model.named_parameters():
        close(ours[name], expected.detach(), 2e-6 if mode == "token-mean" else 1e-5)


def test_one_sgd_step_over_two_ranks_gives_the_reference_s_weights(use, tiny_model, ragged_batch):
    batch = ragged_batch(rows=16, seed=8)
    group = use(update=UpdateOptions(mini_batch_size=16, micro=MicroBatching(rows=3)))
    group.update_actor(batch, step=0)
    model = load_model(tiny_model())
    gradients, _ = grad_of_loss(model, dict(batch.batch.items()), kl_loss_coef=0.1)
    clipped, norm = clip_gradients(gradients, max_norm=0.5)
    assert norm > 0.5
    expected = sgd_step(dict(model.named_parameters()), clipped, lr=0.1)
    ours = weights_of(group)
    assert ours.keys() == expected.keys()
    for name in expected:
        close(ours[name], expected[name].detach(), 1e-6)


def test_adamw_over_two_ranks_moves_in_the_reference_s_direction(use, tiny_model, ragged_batch):
    batch = ragged_batch(rows=16, seed=9)
    group = use(optim=ADAMW, update=UpdateOptions(mini_batch_size=16, lr_warmup_steps=2))
    metrics = group.update_actor(batch, step=0).meta_info["metrics"]
    assert metrics["actor/lr"] == pytest.approx(5e-4)
    model = load_model(tiny_model())
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    gradients, _ = grad_of_loss(model, dict(batch.batch.items()), kl_loss_coef=0.1)
    clipped, _ = clip_gradients(gradients, max_norm=0.5)
    expected, _ = adamw_step(start, clipped, AdamWState(), lr=5e-4, weight_decay=0.1)
    ours = weights_of(group)
    wrong = sum(float((ours[n] - expected[n]).square().sum()) for n in start)
    moved = sum(float((expected[n] - start[n]).square().sum()) for n in start)
    assert (wrong / moved) ** 0.5 <= 1e-3


def test_the_first_epoch_is_what_an_update_reports(use, ragged_batch):
    batch = ragged_batch(rows=16, seed=2)
    update = UpdateOptions(mini_batch_size=8, epochs=2, seed=3)
    out = use(update=update).update_actor(batch, step=0)
    assert sorted(out.batch["mini_batch"].tolist()) == [0] * 8 + [1] * 8
    assert [entry["epoch"] for entry in out.meta_info["losses"]] == [0, 0, 1, 1]
    assert out.meta_info["ranks"][0]["mini_batches"] == [0, 1, 2, 3]
    old = use(update=update).compute_log_prob(batch).batch["old_log_probs"]
    first = out.batch["mini_batch"] == 0
    close(out.batch["update_log_probs"][first], old[first], 1e-5)
    assert "update_entropys" not in out.batch
    assert {"actor/pg_loss", "actor/kl_loss", "actor/ppo_kl", "actor/grad_norm"} <= set(
        out.meta_info["metrics"]
    )


def test_a_checkpoint_reproduces_the_next_step_bit_for_bit(use, ragged_batch, tmp_path):
    first, later = ragged_batch(rows=16, seed=1), ragged_batch(rows=16, seed=2)
    group = use(optim=ADAMW)
    group.warmup(first, steps=2, lr=1e-2)
    group.update_actor(first, step=0)
    group.save_checkpoint(tmp_path / "c", step=1, extra={"seen": 16})
    expected = group.update_actor(later, step=1)
    sums, reference = group.weights_checksum(), group.weights_checksum(role="ref")
    group = use(optim=ADAMW, seed=2)
    assert group.weights_checksum() != sums
    index = group.load_checkpoint(tmp_path / "c")
    assert (index.step, index.extra) == (1, {"seen": 16})
    again = group.update_actor(later, step=1)
    assert group.weights_checksum() == sums
    assert group.weights_checksum(role="ref") == reference
    assert torch.equal(again.batch["update_log_probs"], expected.batch["update_log_probs"])
    assert again.meta_info["losses"] == expected.meta_info["losses"]


def test_a_checkpoint_of_other_ranks_is_refused_and_the_group_lives_on(use, ragged_batch, tmp_path):
    group = use()
    group.save_checkpoint(tmp_path, step=1)
    (tmp_path / "rank_0001.safetensors").rename(tmp_path / "rank_0007.safetensors")
    with pytest.raises(UsageError, match=r"DPA804 .*rank_0001"):
        group.load_checkpoint(tmp_path)
    assert group.compute_log_prob(ragged_batch(rows=16)).batch["old_log_probs"].any()


def test_warm_up_learns_and_the_reference_follows(use, ragged_batch):
    group, rows = use(), ragged_batch(rows=8, seed=6)
    rows = rows.repeat(6, interleave=False)
    losses = group.warmup(rows, steps=6, lr=1e-2)
    assert losses[-1] < losses[0] - 0.3
    old, ref = group.compute_log_prob(rows), group.compute_ref_log_prob(rows)
    assert torch.equal(old.batch["old_log_probs"], ref.batch["ref_log_prob"])


def test_checksums_are_those_of_the_exported_weights(use, ragged_batch):
    group = use(tied=True)
    group.update_actor(ragged_batch(rows=16), step=0)
    payloads = ray.get(group.export_weights())
    assert {payload.version for payload in payloads} == {2}
    joined = shards.join(payloads)
    assert group.weights_checksum() == {n: shards.checksum(t) for n, t in joined.items()}
    assert "lm_head.weight" in shards.join(payloads, aliases=True)


def test_usage_errors_found_by_the_driver_leave_the_group_alone(use, ragged_batch):
    group, batch = use(log_prob_micro=MicroBatching(max_tokens=3)), ragged_batch(rows=16)
    with pytest.raises(UsageError, match="DPA856"):
        group.compute_log_prob(batch)
    with pytest.raises(UsageError, match="DPA854"):
        group.update_actor(ragged_batch(rows=10), step=0)
    with pytest.raises(UsageError, match="DPA854"):
        group.warmup(batch, steps=3, lr=1e-3)
    group.spec = replace(group.spec, log_prob_micro=MicroBatching())
    assert group.compute_log_prob(batch).batch["old_log_probs"].any()
    assert [note.stage for note in group.notes()] == ["old_log_prob"] * 2


CRITIC = CriticSpec(
    optim=ADAMW, loss=ValueLossOptions(cliprange_value=0.5), update=UpdateOptions(mini_batch_size=8)
)
"""One rank's AdamW steps are compared in test_critic.py."""


def valued(batch, seed=4):
    random = torch.Generator().manual_seed(seed)
    for name in ("values", "returns"):
        batch.batch[name] = torch.randn(batch.batch["responses"].shape, generator=random)
    return batch


def reference_critic(folder):
    model = load_value_model(folder)
    model.load_state_dict(drawn_head(model.score.in_features), strict=False)
    return model


@pytest.mark.parametrize("micro", MICROS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_over_two_ranks_equals_the_reference(use, tiny_model, ragged_batch, micro, tied):
    update = UpdateOptions(mini_batch_size=8, micro=micro, seed=3)
    critic = replace(CRITIC, optim=SGD, update=update, forward_micro=micro)
    group = use(tied=tied, wrap="layer" if tied else "root", critic=critic)
    batch = valued(ragged_batch(rows=16, seed=5))
    model = reference_critic(tiny_model(tied=tied))
    scored = group.compute_values(batch)
    close(scored.batch["values"], token_values(model, batch.batch), 1e-5)
    check_notes(scored.meta_info["ranks"], batch, micro)
    out = group.update_critic(batch, step=0)
    kept = group.call("gradients", "gradients")
    for index in range(2):
        rows = (out.batch["value_mini_batch"] == index).nonzero().flatten()
        assert len(rows) == 8
        part = batch.select_idxs(rows)
        close(out.batch["update_values"][rows], token_values(model, part.batch), 1e-5)
        gradients, loss = grad_of_value_loss(model, part.batch, clip=0.5)
        entry = out.meta_info["losses"][index]
        assert entry["vf_loss"] == pytest.approx(float(loss), rel=1e-6)
        assert entry["normaliser"] == int(part.batch["response_mask"].sum())
        assert 0 < entry["vf_clipfrac"] < 1
        joined = shards.join([ranks[index] for ranks in kept])
        assert joined.keys() == gradients.keys()
        for name, gradient in gradients.items():
            close(joined[name], gradient, 1e-6)
        clipped, norm = clip_gradients(gradients, max_norm=0.5)
        assert entry["grad_norm"] == pytest.approx(norm, rel=1e-4)
        stepped = sgd_step(dict(model.named_parameters()), clipped, lr=0.1)
        model.load_state_dict({n: p.detach() for n, p in stepped.items()}, strict=False)
    ours = shards.join(group.call("critic_weights", "critic_weights"))
    for name, expected in model.named_parameters():
        close(ours[name], expected.detach(), 1e-6)
    assert out.meta_info["metrics"]["critic/lr"] == 0.1


def test_the_critic_learns_and_its_checkpoint_repeats_the_next_step(use, ragged_batch, tmp_path):
    batch, later = valued(ragged_batch(rows=16, seed=1)), valued(ragged_batch(rows=16, seed=2))
    group = use(critic=CRITIC)
    losses = [group.update_critic(batch, step=k).meta_info["metrics"]["critic/vf_loss"]
              for k in range(3)]  # fmt: skip
    assert losses[-1] < losses[0]
    group.save_checkpoint(tmp_path / "c", step=3)
    values, expected = group.compute_values(later), group.update_critic(later, step=3)
    group = use(critic=CRITIC)
    group.load_checkpoint(tmp_path / "c")
    assert torch.equal(group.compute_values(later).batch["values"], values.batch["values"])
    again = group.update_critic(later, step=3)
    assert again.meta_info["losses"] == expected.meta_info["losses"]
    assert torch.equal(again.batch["update_values"], expected.batch["update_values"])


def test_after_a_warm_up_the_critic_has_the_policy_s_layers_and_its_own_head(use, ragged_batch):
    group = use(critic=CRITIC)
    head = shards.join(group.call("critic_weights", "critic_weights"))
    group.warmup(ragged_batch(rows=8, seed=6), steps=1, lr=1e-2)
    policy, critic = weights_of(group), shards.join(group.call("critic_weights", "critic_weights"))
    for name, weight in critic.items():
        assert torch.equal(weight, head[name] if name.startswith("score.") else policy[name]), name


def test_values_without_a_critic_are_refused_before_any_rank_is_asked(use, ragged_batch):
    with pytest.raises(UsageError, match=r"DPA851 there is no critic.*adv_estimator=gae"):
        use().compute_values(ragged_batch(rows=16))
