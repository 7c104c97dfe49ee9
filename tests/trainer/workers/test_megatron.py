"""Megatron layouts on two and four ranks against the independent single-process reference.

One group of processes for each number of ranks; every layout is built anew inside of them.
"""

import pytest
import ray
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.reference.logprobs import grad_of_loss, load_model, token_log_probs
from dataproto_audit.reference.updates import AdamWState, adamw_step, clip_gradients, sgd_step
from dataproto_audit.trainer.backends import shards
from dataproto_audit.trainer.backends.base import FSDPOptions, ModelSpec, OptimSpec
from dataproto_audit.trainer.backends.megatron.options import MegatronOptions
from dataproto_audit.trainer.plans import MicroBatching
from dataproto_audit.trainer.workers.actor import TrainWorker
from dataproto_audit.trainer.workers.cluster import cluster
from dataproto_audit.trainer.workers.group import WorkerGroup
from dataproto_audit.trainer.workers.spec import LossOptions, UpdateOptions, WorkerSpec

pytestmark = pytest.mark.engine

SGD = OptimSpec(name="sgd", lr=0.1, weight_decay=0.0, grad_clip=0.5)
ADAMW = OptimSpec(lr=1e-3, weight_decay=0.1, grad_clip=0.5)
LOSS = LossOptions(use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01)
TERMS = {"kl_loss_coef": 0.1, "entropy_coeff": 0.01}


def plain(**sizes):
    return MegatronOptions(distributed_optimizer=False, **sizes)


#: Layout, family: together they cover every layout, every family and every switch.
TWO = [
    (plain(), "qwen3"),
    (MegatronOptions(), "qwen2"),
    (plain(tp=2), "qwen3"),
    (MegatronOptions(tp=2, sp=True, recompute="full"), "qwen2"),
    (plain(tp=2, sp=True), "llama"),
    (plain(pp=2), "qwen2"),
    (plain(pp=2, vpp=2), "qwen3"),
    (MegatronOptions(pp=2, vpp=2, recompute="selective"), "qwen2"),
    (plain(cp=2), "llama"),
]
#: The same with the switches of the model.
PACKED, FUSED = "remove_padding", "fused_kernels"
SWITCHED = [
    (plain(tp=2, sp=True), "qwen3", (PACKED, FUSED)),
    (MegatronOptions(pp=2, vpp=2, recompute="full"), "qwen2", (PACKED,)),
    (plain(pp=2), "llama", (PACKED,)),
    (MegatronOptions(tp=2), "qwen2", (FUSED,)),
    (plain(cp=2), "llama", (FUSED,)),
]
FOUR = [
    (plain(tp=2, pp=2), "qwen2"),
    (MegatronOptions(tp=2), "qwen3"),
    (MegatronOptions(pp=2), "qwen2"),
    (MegatronOptions(tp=2, pp=2, vpp=2, sp=True), "llama"),
    (plain(tp=2, cp=2, sp=True), "qwen3"),
]


def probe_worker() -> type[TrainWorker]:
    """A worker whose spec can be changed and that keeps gradients; local, so that Ray ships it."""

    class ProbeWorker(TrainWorker):
        def use(self, spec):
            from dataproto_audit.trainer.backends import shards
            from dataproto_audit.trainer.workers.actor import make_backend

            self.spec = spec
            if spec.model.fused_kernels:
                from dataproto_audit.trainer.backends.megatron import outputs

                outputs.CHUNK_ELEMENTS = 300  # a few tokens at a time
            device = torch.device("cpu")
            self.actor = make_backend(spec, device=device, optim=spec.optim)
            self.reference = make_backend(spec, device=device, optim=None, role="ref")
            self._reference_moved, self._version = False, 0
            self.kept = []
            step = self.actor.optimizer_step

            def keeping():
                gradients = {
                    name: (gradient.clone(), piece)
                    for name, (gradient, piece) in self.actor.gradients().items()
                }
                where = {"rank": self.rank, "world_size": self.world_size}
                self.kept.append(
                    shards.pack(gradients, version=len(self.kept), aliases={}, **where)
                )
                return step()

            self.actor.optimizer_step = keeping
            return self.places()

        def gradients(self):
            return self.kept

    return ProbeWorker


@pytest.fixture(scope="module")
def groups(tiny_model):
    """``groups(ranks)``: a started group; another number of ranks ends the one before."""
    spec = WorkerSpec(ModelSpec(str(tiny_model())), strategy="megatron")
    running = {}
    with cluster(num_cpus=5):

        def get(ranks):
            if ranks not in running:
                for other in list(running):
                    running.pop(other).shutdown()
                group = WorkerGroup(spec, world_size=ranks, worker_class=probe_worker())
                running[ranks] = group
                group.build()
            return running[ranks]

        yield get
        for group in running.values():
            group.shutdown()


@pytest.fixture
def use(groups, family):
    """``use(ranks, layout, kind, ...)``: fresh models in the processes that are there."""

    def apply(
        ranks,
        layout,
        kind="qwen3",
        *,
        seed=1,
        optim=SGD,
        micro=None,
        update=None,
        switches=(),
        **more,
    ):
        micro = micro or MicroBatching(divisible_by=layout.pp if layout.vpp else 1, rows=2)
        spec = WorkerSpec(
            ModelSpec(str(family(kind, seed)), **dict.fromkeys(switches, True)),
            optim=optim,
            loss=LOSS,
            update=update or UpdateOptions(mini_batch_size=16, micro=micro, seed=5),
            megatron=layout,
            **{"strategy": "megatron", "fsdp": FSDPOptions(wrap="root"), **more},
        )
        group = groups(ranks)
        group.spec = spec
        group.take_places(group.call("use", "use", [(spec,)]))
        return group

    return apply


def reference_log_probs(model, batch):
    fields = [batch.batch[name] for name in ("input_ids", "attention_mask", "position_ids")]
    width = batch.batch["responses"].shape[1]
    return token_log_probs(model, *fields, width, temperature=batch.meta_info["temperature"])


def weights_of(group):
    return shards.join(ray.get(group.export_weights()))


def close(ours, expected, bound):
    torch.testing.assert_close(ours.double(), expected.double(), atol=bound, rtol=0)


def check_against_reference(group, folder, batch, optim):
    """Log-probs of both roles, every term, every gradient and the step; then once more a pass."""
    model = load_model(folder)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    assert all(torch.equal(value, start[name]) for name, value in weights_of(group).items())
    expected = reference_log_probs(model, batch)
    old, ref = group.compute_log_prob(batch), group.compute_ref_log_prob(batch)
    close(old.batch["old_log_probs"], expected[0], 1e-5)
    close(old.batch["entropys"], expected[1], 1e-5)
    close(ref.batch["ref_log_prob"], expected[0], 1e-5)
    out = group.update_actor(batch, step=0)
    kept = group.call("gradients", "gradients")
    at_1 = reference_log_probs(model, batch.select_idxs(range(len(batch))))
    close(out.batch["update_log_probs"], at_1[0], 1e-5)
    gradients, terms = grad_of_loss(model, dict(batch.batch.items()), **TERMS)
    entry = out.meta_info["losses"][0]
    for name, value in terms.items():
        assert entry[name] == pytest.approx(float(value), rel=1e-6, abs=1e-6), name
    joined = shards.join([ranks[0] for ranks in kept])
    assert joined.keys() == gradients.keys()
    for name, gradient in gradients.items():
        close(joined[name], gradient, 1e-6)
    clipped, norm = clip_gradients(gradients, max_norm=0.5)
    assert norm > 0.5, "the clip must be active for this test to say anything"
    assert entry["grad_norm"] == pytest.approx(norm, rel=1e-5)
    ours = weights_of(group)
    if optim.name == "sgd":
        stepped = sgd_step(dict(model.named_parameters()), clipped, lr=0.1)
        for name, value in stepped.items():
            close(ours[name], value.detach(), 1e-6)
    else:
        stepped, _ = adamw_step(start, clipped, AdamWState(), lr=1e-3, weight_decay=0.1)
        wrong = sum(float((ours[n] - stepped[n]).square().sum()) for n in start)
        moved = sum(float((stepped[n] - start[n]).square().sum()) for n in start)
        assert (wrong / moved) ** 0.5 <= 1e-3
    assert group.weights_checksum() == {n: shards.checksum(t) for n, t in ours.items()}
    model.load_state_dict(ours, strict=False)
    close(
        group.compute_log_prob(batch).batch["old_log_probs"],
        reference_log_probs(model, batch)[0],
        1e-5,
    )
    return old, out


def check_bubble(done, layout):
    """(p - 1) / (v m + p - 1) for m micro-batches on p stages of v chunks, trained or not."""
    for out in done:
        for note in out.meta_info["ranks"]:
            micros = len(note["micro_batches"])
            if layout.vpp:
                micros += -micros % layout.pp
            ahead = layout.pp - 1
            expected = ahead / ((layout.vpp or 1) * micros + ahead)
            assert note["bubble"] == pytest.approx(expected, abs=1e-9)


def optimizer_for(layout):
    return ADAMW if layout.distributed_optimizer or layout.cp > 1 else SGD


def name_of(value):
    if isinstance(value, str):
        return value
    names = ("tp", "pp", "vpp", "cp", "sp", "distributed_optimizer", "recompute")
    said = [
        f"{n[:4]}{getattr(value, n)}" for n in names if getattr(value, n) not in (1, None, False)
    ]
    return "-".join(said) or "dp"


@pytest.mark.parametrize(("layout", "kind"), TWO, ids=name_of)
def test_two_ranks_equal_the_reference(use, family, ragged_batch, layout, kind):
    optim = optimizer_for(layout)
    group = use(2, layout, kind, optim=optim)
    check_bubble(
        check_against_reference(group, family(kind), ragged_batch(rows=16, seed=3), optim), layout
    )


@pytest.mark.parametrize(("layout", "kind", "switches"), SWITCHED)
def test_packed_and_fused_equal_the_reference(use, family, ragged_batch, layout, kind, switches):
    group = use(2, layout, kind, optim=optimizer_for(layout), switches=switches)
    batch = ragged_batch(rows=16, seed=3)
    check_against_reference(group, family(kind), batch, optimizer_for(layout))
    notes = group.compute_log_prob(batch).meta_info["ranks"]
    packed = "remove_padding" in switches
    assert all(("packed" in note) == packed for note in notes)
    assert not packed or all(all(entry["restarts"]) for entry in notes[0]["packed"])


@pytest.mark.parametrize(
    "micro", [MicroBatching(rows=3), MicroBatching(max_tokens=14, divisible_by=2)]
)
def test_micro_batches_of_any_size_equal_the_reference(use, family, ragged_batch, micro):
    layout = plain(pp=2)
    batch = ragged_batch(rows=16, seed=7, temperature=0.8)
    group = use(2, layout, "qwen3", micro=micro, log_prob_micro=micro, ref_micro=micro)
    expected = reference_log_probs(load_model(family("qwen3")), batch)
    close(group.compute_log_prob(batch).batch["old_log_probs"], expected[0], 1e-5)
    batch.meta_info["temperature"] = 1.0
    check_against_reference(group, family("qwen3"), batch, SGD)


def test_an_interleaved_pipeline_scores_any_number_of_micro_batches(use, family, ragged_batch):
    batch = ragged_batch(rows=16, seed=2)
    group = use(2, plain(pp=2, vpp=2), log_prob_micro=MicroBatching(rows=6))
    expected = reference_log_probs(load_model(family("qwen3")), batch)
    close(group.compute_log_prob(batch).batch["old_log_probs"], expected[0], 1e-5)


@pytest.mark.parametrize(
    "layout", [MegatronOptions(), MegatronOptions(pp=2, vpp=2), MegatronOptions(tp=2)]
)
def test_a_checkpoint_reproduces_the_next_step_bit_for_bit(use, ragged_batch, tmp_path, layout):
    first, later = ragged_batch(rows=16, seed=1), ragged_batch(rows=16, seed=2)
    update = UpdateOptions(mini_batch_size=8, micro=MicroBatching(rows=2), seed=3)
    group = use(2, layout, "qwen2", optim=ADAMW, update=update)
    group.warmup(first, steps=2, lr=1e-2)
    group.update_actor(first, step=0)
    group.save_checkpoint(tmp_path / "c", step=1)
    expected = group.update_actor(later, step=1)
    sums, reference = group.weights_checksum(), group.weights_checksum(role="ref")
    group = use(2, layout, "qwen2", optim=ADAMW, update=update, seed=2)
    assert group.weights_checksum() != sums
    group.load_checkpoint(tmp_path / "c")
    again = group.update_actor(later, step=1)
    assert group.weights_checksum() == sums
    assert group.weights_checksum(role="ref") == reference
    assert torch.equal(again.batch["update_log_probs"], expected.batch["update_log_probs"])
    assert again.meta_info["losses"] == expected.meta_info["losses"]


@pytest.mark.parametrize(
    ("kind", "wrote", "takes"),
    [
        ("qwen2", ("megatron", MegatronOptions(tp=2)), ("fsdp2", plain())),
        ("qwen2", ("fsdp2", plain()), ("megatron", MegatronOptions(pp=2, vpp=2))),
        ("qwen3", ("megatron", MegatronOptions()), ("megatron", plain(tp=2, sp=True))),
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(use, ragged_batch, tmp_path, kind, wrote, takes):
    """Weights and moments are taken over bit for bit; the next step differs by rounding alone."""
    first, later = ragged_batch(rows=16, seed=1), ragged_batch(rows=16, seed=2)
    group = use(2, wrote[1], kind, optim=ADAMW, strategy=wrote[0])
    group.warmup(first, steps=2, lr=1e-2)
    group.update_actor(first, step=0)
    group.save_checkpoint(tmp_path / "c", step=1)
    sums, reference = group.weights_checksum(), group.weights_checksum(role="ref")
    group.update_actor(later, step=1)
    expected = weights_of(group)
    group = use(2, takes[1], kind, optim=ADAMW, strategy=takes[0], seed=2)
    index = group.load_checkpoint(tmp_path / "c")
    assert index.layout["strategy"] == wrote[0]
    assert group.weights_checksum() == sums
    assert group.weights_checksum(role="ref") == reference
    start = weights_of(group)
    group.update_actor(later, step=1)
    ours = weights_of(group)
    wrong = sum(float((ours[n] - value).square().sum()) for n, value in expected.items())
    moved = sum(float((start[n] - value).square().sum()) for n, value in expected.items())
    assert moved > 0
    assert (wrong / moved) ** 0.5 <= 1e-3


@pytest.mark.parametrize(
    ("wrote", "takes"),
    [
        (plain(pp=2, vpp=2), plain(pp=2)),  # pieces of the same sizes: nothing but the index tells
        (MegatronOptions(tp=2), MegatronOptions(pp=2)),
        (plain(pp=2), plain(pp=2)),
    ],
)
def test_a_reference_on_megatron_beside_fsdp_goes_on_in_another_layout(
    use, ragged_batch, tmp_path, wrote, takes
):
    rows = ragged_batch(rows=16, seed=1)
    engines = {"strategy": "fsdp2", "ref_strategy": "megatron", "optim": ADAMW}
    group = use(2, wrote, "qwen3", **engines)
    group.warmup(rows, steps=2, lr=1e-2)
    group.save_checkpoint(tmp_path / "c", step=1)
    sums = group.weights_checksum(role="ref")
    expected = group.compute_ref_log_prob(rows).batch["ref_log_prob"]
    group = use(2, takes, "qwen3", **engines, seed=2)
    group.load_checkpoint(tmp_path / "c")
    assert group.weights_checksum(role="ref") == sums == group.weights_checksum()
    close(group.compute_ref_log_prob(rows).batch["ref_log_prob"], expected, 1e-5)


@pytest.mark.parametrize(
    ("actor", "ref", "layout"),
    [("fsdp2", "megatron", plain(tp=2)), ("megatron", "fsdp2", MegatronOptions(pp=2))],
)
def test_roles_on_two_engines_agree_before_and_after_the_warm_up(
    use, ragged_batch, actor, ref, layout
):
    rows = ragged_batch(rows=8, seed=6).repeat(6, interleave=False)
    group = use(2, layout, "qwen2", optim=ADAMW, strategy=actor, ref_strategy=ref)
    for _ in range(2):
        old, frozen = group.compute_log_prob(rows), group.compute_ref_log_prob(rows)
        close(old.batch["old_log_probs"], frozen.batch["ref_log_prob"], 1e-5)
        losses = group.warmup(rows, steps=6, lr=1e-2)
    assert losses[-1] < losses[0]


def test_metrics_of_a_step_equal_those_of_fsdp(use, ragged_batch):
    batch = ragged_batch(rows=16, seed=9)
    found = [
        use(2, layout, "qwen3", optim=ADAMW, strategy=strategy).update_actor(batch, step=0)
        for strategy, layout in (("fsdp2", plain()), ("megatron", plain(tp=2)))
    ]
    theirs, ours = (out.meta_info["metrics"] for out in found)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, abs=1e-5), name
    assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-5)


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(use, ragged_batch):
    batch = ragged_batch(rows=16, seed=4)
    batch.batch["advantages"][0, 0] = float("nan")
    group = use(2, plain(pp=2))
    before = group.weights_checksum()
    group.update_actor(batch, step=0)
    assert group.weights_checksum() == before


def test_positions_that_rope_would_not_count_are_a_usage_error(groups, use, ragged_batch):
    batch = ragged_batch(rows=16, seed=4)
    batch.batch["position_ids"][0] += 1
    with pytest.raises(UsageError, match=r"DPA851 .*position_ids"):
        use(2, plain(tp=2)).compute_log_prob(batch)


@pytest.mark.parametrize(("layout", "kind"), FOUR, ids=name_of)
def test_four_ranks_equal_the_reference(use, family, ragged_batch, layout, kind):
    optim = optimizer_for(layout)
    group = use(4, layout, kind, optim=optim)
    check_bubble(
        check_against_reference(group, family(kind), ragged_batch(rows=16, seed=3), optim), layout
    )
