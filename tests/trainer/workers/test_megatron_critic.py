"""A critic on Megatron's pipelines and context-parallel ranks against the independent reference:
scored, updated, warmed up with the policy, saved and taken back."""

import pytest
import torch

from dataproto_audit.reference.updates import AdamWState, adamw_step, clip_gradients
from dataproto_audit.reference.values import grad_of_value_loss, load_value_model, token_values
from dataproto_audit.trainer.backends import shards
from dataproto_audit.trainer.backends.base import VALUE_HEAD, ModelSpec, OptimSpec
from dataproto_audit.trainer.backends.megatron.options import MegatronOptions
from dataproto_audit.trainer.compare.critic import drawn_head
from dataproto_audit.trainer.plans import MicroBatching
from dataproto_audit.trainer.workers.actor import TrainWorker
from dataproto_audit.trainer.workers.cluster import cluster
from dataproto_audit.trainer.workers.group import WorkerGroup
from dataproto_audit.trainer.workers.spec import CriticSpec, UpdateOptions, WorkerSpec

pytestmark = pytest.mark.engine

OPTIM = OptimSpec(lr=1e-3, weight_decay=0.1, grad_clip=0.05)
TWO = [
    (MegatronOptions(pp=2), "qwen2"),
    (MegatronOptions(pp=2, vpp=2), "qwen3"),
    (MegatronOptions(cp=2), "llama"),
]
FOUR = [
    (MegatronOptions(tp=2, pp=2, vpp=2, sp=True), "qwen2"),
    (MegatronOptions(pp=2, cp=2), "qwen3"),
    (MegatronOptions(tp=2, cp=2, sp=True), "qwen3"),
    (MegatronOptions(pp=2), "llama"),
]


def probe_worker() -> type[TrainWorker]:
    """A worker that keeps the critic's gradients, under a drawn head; local, so that Ray ships it.

    Its spec can be changed, so that processes are started once for each number of ranks.
    """

    class ProbeWorker(TrainWorker):
        def use(self, spec):
            from dataproto_audit.trainer.backends import shards
            from dataproto_audit.trainer.compare.critic import set_head
            from dataproto_audit.trainer.workers.actor import make_backend

            self.spec, self._version, self.kept = spec, 0, []
            device = torch.device("cpu")
            self.actor = make_backend(spec, device=device, optim=spec.optim)
            self.critic = make_backend(spec, device=device, optim=spec.critic.optim, role="critic")
            set_head(self.critic)
            step = self.critic.optimizer_step

            def keeping():
                found = self.critic.gradients()
                gradients = {name: (grad.clone(), piece) for name, (grad, piece) in found.items()}
                where = {"rank": self.rank, "world_size": self.world_size}
                self.kept.append(shards.pack(gradients, version=0, aliases={}, **where))
                return step()

            self.critic.optimizer_step = keeping
            return self.places()

        def gradients(self):
            return self.kept

        def weights(self):
            return self._payload(self.critic)

    return ProbeWorker


@pytest.fixture(scope="module")
def use(family):
    """``use(ranks, layout, kind, ...)``: fresh models in the processes that are there."""
    running = {}
    with cluster(num_cpus=5):

        def apply(ranks, layout, kind, *, own=None, **more):
            micro = MicroBatching(rows=2, divisible_by=layout.pp if layout.vpp else 1)
            update = UpdateOptions(mini_batch_size=16, micro=micro, seed=5)
            spec = WorkerSpec(
                ModelSpec(str(family(kind))), strategy="megatron", megatron=layout, optim=OPTIM,
                update=update, with_reference=False,
                critic=CriticSpec(optim=OPTIM, update=update, forward_micro=micro, megatron=own),
                **more,
            )  # fmt: skip
            if ranks not in running:
                for other in list(running):
                    running.pop(other).shutdown()
                running[ranks] = WorkerGroup(spec, world_size=ranks, worker_class=probe_worker())
                running[ranks].build()
            group = running[ranks]
            group.spec = spec
            group.take_places(group.call("use", "use", [(spec,)]))
            return group

        yield apply
        for group in running.values():
            group.shutdown()


@pytest.fixture
def batch(ragged_batch):
    made = ragged_batch(rows=16, seed=3)
    random = torch.Generator().manual_seed(2)
    for name in ("values", "returns"):
        made.batch[name] = torch.randn(made.batch["responses"].shape, generator=random)
    return made


def expected_model(folder):
    model = load_value_model(folder)
    model.load_state_dict(drawn_head(model.score.in_features), strict=False)
    return model


def weights_of(group):
    return shards.join(group.call("weights", "weights"))


def close(ours, expected, bound):
    torch.testing.assert_close(ours.double(), expected.double(), atol=bound, rtol=0)


def check(group, folder, batch):
    """Values, loss, norm, every gradient and AdamW's step; then the values once more."""
    model = expected_model(folder)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    assert all(torch.equal(value, start[name]) for name, value in weights_of(group).items())
    expected = token_values(model, batch.batch)
    close(group.compute_values(batch).batch["values"], expected, 1e-5)
    gradients, loss = grad_of_value_loss(model, batch.batch, clip=0.5)
    clipped, norm = clip_gradients(gradients, max_norm=OPTIM.grad_clip)
    assert norm > OPTIM.grad_clip, "the clip must be active for this test to say anything"
    out = group.update_critic(batch, step=0)
    close(out.batch["update_values"], expected, 1e-5)
    (entry,) = out.meta_info["losses"]
    assert entry["vf_loss"] == pytest.approx(float(loss), rel=1e-6)
    assert entry["grad_norm"] == pytest.approx(norm, rel=1e-5)
    kept = group.call("gradients", "gradients")
    joined = shards.join([ranks[0] for ranks in kept])
    assert joined.keys() == gradients.keys()
    for name, gradient in gradients.items():
        close(joined[name], gradient, 1e-6)
    stepped, _ = adamw_step(start, clipped, AdamWState(), lr=1e-3, weight_decay=0.1)
    ours = weights_of(group)
    wrong = sum(float((ours[name] - stepped[name]).square().sum()) for name in start)
    moved = sum(float((stepped[name] - start[name]).square().sum()) for name in start)
    assert (wrong / moved) ** 0.5 <= 1e-3
    model.load_state_dict(ours, strict=False)
    close(group.compute_values(batch).batch["values"], token_values(model, batch.batch), 1e-5)


@pytest.mark.parametrize(("layout", "kind"), TWO)
def test_a_critic_on_two_ranks_equals_the_reference(use, family, batch, layout, kind):
    check(use(2, layout, kind), family(kind), batch)


def test_a_warm_up_gives_the_critic_of_a_pipeline_the_policy_s_layers(use, batch):
    group = use(2, MegatronOptions(pp=2, vpp=2), "qwen3")
    before, head = weights_of(group), VALUE_HEAD[0]
    group.warmup(batch, steps=2, lr=1e-2)
    after, policy = group.weights_checksum(role="critic"), group.weights_checksum()
    shared = after.keys() & policy.keys()
    assert len(shared) == len(after) - 2
    assert {name: after[name] for name in shared} == {name: policy[name] for name in shared}
    assert after[head] == shards.checksum(before[head]), "its own head stays"
    assert any(after[name] != shards.checksum(before[name]) for name in shared)


@pytest.mark.parametrize("layout", [MegatronOptions(pp=2, vpp=2), MegatronOptions(cp=2)])
def test_a_saved_critic_repeats_the_next_step_and_goes_on_elsewhere(use, batch, tmp_path, layout):
    group = use(2, layout, "qwen2")
    group.update_critic(batch, step=0)
    group.save_checkpoint(tmp_path / "c", step=1)
    kept = group.weights_checksum(role="critic")
    expected, after = group.update_critic(batch, step=1), group.weights_checksum(role="critic")
    group = use(2, layout, "qwen2", seed=2)
    group.load_checkpoint(tmp_path / "c")
    again = group.update_critic(batch, step=1)
    assert torch.equal(again.batch["update_values"], expected.batch["update_values"])
    assert group.weights_checksum(role="critic") == after
    group = use(2, MegatronOptions(tp=2), "qwen2", seed=3)
    group.load_checkpoint(tmp_path / "c")
    assert group.weights_checksum(role="critic") == kept
    close(
        group.update_critic(batch, step=1).batch["update_values"],
        expected.batch["update_values"],
        1e-5,
    )


@pytest.mark.parametrize("cut", [True, False])
def test_a_critic_goes_on_when_only_its_optimizer_is_cut_otherwise(use, batch, tmp_path, cut):
    """The actor's layout stays, so that only the critic's own can tell."""
    one, other = (MegatronOptions(distributed_optimizer=on) for on in (cut, not cut))
    group = use(2, MegatronOptions(), "qwen2", own=one)
    group.update_critic(batch, step=0)
    group.save_checkpoint(tmp_path / "c", step=1)
    kept = group.weights_checksum(role="critic")
    expected = group.update_critic(batch, step=1).batch["update_values"]
    after = weights_of(group)
    group = use(2, MegatronOptions(), "qwen2", own=other, seed=2)
    group.load_checkpoint(tmp_path / "c")
    assert group.weights_checksum(role="critic") == kept
    close(group.update_critic(batch, step=1).batch["update_values"], expected, 1e-5)
    for name, value in weights_of(group).items():
        close(value, after[name], 1e-4)  # a tenth of AdamW's step


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind"), FOUR)
def test_a_critic_on_four_ranks_equals_the_reference(use, family, batch, layout, kind):
    check(use(4, layout, kind), family(kind), batch)
