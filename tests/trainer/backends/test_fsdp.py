"""One rank in this process; two ranks are in tests/trainer/workers/test_group.py."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dataproto_audit.codes import UsageError
from dataproto_audit.reference.logprobs import grad_of_loss, load_model, token_log_probs
from dataproto_audit.reference.updates import AdamWState, adamw_step, clip_gradients, sgd_step
from dataproto_audit.trainer.backends.base import FSDPOptions, ModelSpec, OptimSpec
from dataproto_audit.trainer.backends.fsdp import FSDPBackend
from dataproto_audit.trainer.plans import MicroBatching, plan_update
from dataproto_audit.trainer.workers.inputs import micro_batch, scatter
from dataproto_audit.trainer.workers.spec import LossOptions
from dataproto_audit.trainer.workers.update import train_mini_batch, train_supervised

CPU = torch.device("cpu")
SGD = OptimSpec(name="sgd", lr=0.1, weight_decay=0.0, grad_clip=0.5)
ADAMW = OptimSpec(name="adamw", lr=1e-3, weight_decay=0.1, grad_clip=0.5)
LOSS = LossOptions(use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01)
REFERENCE_LOSS = {"kl_loss_coef": 0.1, "entropy_coeff": 0.01}


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(folder, optim=SGD, *, packed=False, fused=False, **options) -> FSDPBackend:
    model = ModelSpec(str(folder), remove_padding=packed, fused_kernels=fused)
    return FSDPBackend(model, device=CPU, optim=optim, options=FSDPOptions(**options))


def log_probs(backend, batch, parts, *, entropy=True, temperature=1.0):
    micros = [micro_batch(batch.batch, rows, device=CPU) for rows in parts]
    outputs = backend.infer(micros, temperature=temperature, entropy=entropy)
    found = torch.zeros(2, *batch.batch["responses"].shape)
    scatter(found[0], parts, [out.log_probs_BR for out in outputs])
    if entropy:
        scatter(found[1], parts, [out.entropy_BR for out in outputs])
    return found


def expected_log_probs(folder, batch, temperature=1.0):
    fields = (batch.batch[name] for name in ("input_ids", "attention_mask", "position_ids"))
    width = batch.batch["responses"].shape[1]
    return token_log_probs(load_model(folder), *fields, width, temperature=temperature)


def plan_of(batch, micro=MicroBatching()):  # noqa: B008 - frozen
    lengths = batch.batch["attention_mask"].sum(-1).numpy()
    trained = batch.batch["response_mask"].sum(-1).numpy()
    plan = plan_update(lengths, trained, ranks=1, mini_batch_size=len(batch), width=5, micro=micro)
    return plan.ranks[0][0]


def train(backend, batch, plan, options=LOSS, temperature=1.0):
    return train_mini_batch(
        backend, batch.batch, plan, options=options, temperature=temperature, before=lambda _: None
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("wrap", ["root", "layer"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropies_equal_the_reference(
    tiny_model, ragged_batch, tied, wrap, temperature
):
    folder, batch = tiny_model(tied=tied), ragged_batch()
    parts = [np.array([5, 0, 2]), np.array([1]), np.array([7, 6, 4, 3])]
    backend = build(folder, wrap=wrap)
    found = log_probs(backend, batch, parts, temperature=temperature)
    expected = expected_log_probs(folder, batch, temperature)
    torch.testing.assert_close(found[0].double(), expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1].double(), expected[1], atol=1e-5, rtol=0)
    plain = log_probs(backend, batch, parts, entropy=False, temperature=temperature)
    torch.testing.assert_close(plain[0].double(), expected[0], atol=1e-5, rtol=0)


def test_a_frozen_model_scores_twice_and_has_no_optimizer(tiny_model, ragged_batch):
    frozen, batch = build(tiny_model(), optim=None), ragged_batch()
    parts = [np.arange(len(batch))]
    assert torch.equal(log_probs(frozen, batch, parts), log_probs(frozen, batch, parts))
    assert not any(key.startswith("optim/") for key in frozen.state())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "micro", [MicroBatching(), MicroBatching(rows=3), MicroBatching(max_tokens=14)]
)
def test_terms_gradients_and_an_sgd_step_equal_the_unsplit_reference(
    tiny_model, ragged_batch, tied, micro
):
    folder, batch = tiny_model(tied=tied), ragged_batch()
    backend, model = build(folder), load_model(folder)
    result = train(backend, batch, plan_of(batch, micro))
    gradients, terms = grad_of_loss(model, dict(batch.batch.items()), **REFERENCE_LOSS)
    for name, value in result.sums.items():
        assert value == pytest.approx(float(terms[name]), abs=1e-5), name
    clipped, norm = clip_gradients(gradients, max_norm=0.5)
    assert norm > 0.5, "the clip must be active for this test to say anything"
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    expected = sgd_step(dict(model.named_parameters()), clipped, lr=0.1)
    for name, (weights, _) in backend.shards().items():
        torch.testing.assert_close(weights.data, expected[name].detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("wrap", "packed", "fused"),
    [
        ("root", False, False), ("layer", False, False), ("root", True, False),
        ("layer", False, True), ("layer", True, True),
    ],
)  # fmt: skip
def test_accumulated_gradients_equal_the_reference(tiny_model, ragged_batch, wrap, packed, fused):
    folder, batch = tiny_model(tied=packed), ragged_batch(seed=4)
    backend = build(folder, wrap=wrap, packed=packed, fused=fused)
    model = load_model(folder)
    seen = {}
    step = backend.optimizer_step

    def spy():
        seen.update({name: grad.clone() for name, (grad, _) in backend.gradients().items()})
        return step()

    backend.optimizer_step = spy
    train(backend, batch, plan_of(batch, MicroBatching(rows=3)))
    gradients, _ = grad_of_loss(model, dict(batch.batch.items()), **REFERENCE_LOSS)
    assert seen.keys() == gradients.keys()
    for name, expected in gradients.items():
        torch.testing.assert_close(seen[name], expected, atol=1e-5, rtol=0)


def test_adamw_moves_in_the_reference_s_direction_over_two_steps(tiny_model, ragged_batch):
    folder, batch = tiny_model(), ragged_batch()
    backend, model = build(folder, optim=ADAMW), load_model(folder)
    state, start = AdamWState(), {n: p.detach().clone() for n, p in model.named_parameters()}
    weights = start
    for _ in range(2):
        train(backend, batch, plan_of(batch))
        model.load_state_dict(weights)
        gradients, _ = grad_of_loss(model, dict(batch.batch.items()), **REFERENCE_LOSS)
        clipped, _ = clip_gradients(gradients, max_norm=0.5)
        weights, state = adamw_step(weights, clipped, state, lr=1e-3, weight_decay=0.1)
    ours = {name: piece.data for name, (piece, _) in backend.shards().items()}
    wrong = sum(float((ours[n] - weights[n]).square().sum()) for n in weights)
    moved = sum(float((weights[n] - start[n]).square().sum()) for n in weights)
    assert (wrong / moved) ** 0.5 <= 1e-3


def test_the_learning_rate_is_used_from_the_next_step_on(tiny_model, ragged_batch):
    backend, batch = build(tiny_model(), optim=ADAMW), ragged_batch()
    before = {name: piece.data.clone() for name, (piece, _) in backend.shards().items()}
    backend.set_rates(0.0)
    train(backend, batch, plan_of(batch))
    assert all(torch.equal(piece, before[name]) for name, (piece, _) in backend.shards().items())


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(tiny_model, ragged_batch):
    backend, batch = build(tiny_model()), ragged_batch()
    batch.batch["advantages"][0, 0] = float("nan")
    before = {name: piece.data.clone() for name, (piece, _) in backend.shards().items()}
    result = train(backend, batch, plan_of(batch))
    assert not result.stepped
    assert all(torch.equal(piece, before[name]) for name, (piece, _) in backend.shards().items())
    assert all(not grad.any() for grad, _ in backend.gradients().values())


def test_log_probs_see_weights_written_from_outside(tiny_model, ragged_batch):
    one, other = build(tiny_model(seed=1)), build(tiny_model(seed=2))
    batch, parts = ragged_batch(), [np.arange(8)]
    before = log_probs(one, batch, parts)
    one.copy_weights(other)
    after = log_probs(one, batch, parts)
    assert not torch.equal(before, after)
    assert torch.equal(after, log_probs(other, batch, parts))


def test_supervised_steps_lower_the_loss(tiny_model, ragged_batch):
    backend, batch = build(tiny_model()), ragged_batch()
    backend.reset_optimizer(OptimSpec(lr=1e-2, weight_decay=0.0, grad_clip=0.0))
    plan = plan_of(batch)
    losses = [train_supervised(backend, batch.batch, plan, before=lambda _: None) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("optim", [SGD, ADAMW])
def test_state_restores_the_next_step_bit_for_bit(tiny_model, ragged_batch, optim):
    batch, later = ragged_batch(seed=1), ragged_batch(seed=2)
    first = build(tiny_model(seed=1), optim=optim)
    train(first, batch, plan_of(batch))
    kept = {name: value.clone() for name, value in first.state().items()}
    train(first, later, plan_of(later))
    second = build(tiny_model(seed=2), optim=optim)
    second.load_state(kept)
    train(second, later, plan_of(later))
    mine, theirs = first.state(), second.state()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_state_of_another_model_is_refused(tiny_model):
    backend = build(tiny_model())
    state = backend.state()
    state["model/model.norm.weight"] = torch.zeros(3)
    with pytest.raises(UsageError, match=r"DPA804 .*model.norm.weight is \(3,\)"):
        backend.load_state(state)
    del state["model/model.norm.weight"]
    with pytest.raises(UsageError, match=r"DPA804 .*missing"):
        backend.load_state(state)


def test_tied_weights_are_exported_once_with_their_second_name(tiny_model):
    tied, untied = build(tiny_model(tied=True)), build(tiny_model(tied=False))
    assert tied.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in tied.shards()
    assert untied.aliases == {}
    assert "lm_head.weight" in untied.shards()


def test_lower_precision_compute_keeps_float32_weights_and_stays_close(tiny_model, ragged_batch):
    backend, batch = build(tiny_model(), param_dtype="bfloat16"), ragged_batch()
    found = log_probs(backend, batch, [np.arange(8)])
    expected = expected_log_probs(tiny_model(), batch)[0]
    assert 0 < (found[0] - expected).abs().max() < 0.2
    train(backend, batch, plan_of(batch))
    assert all(piece.dtype == torch.float32 for piece, _ in backend.shards().values())


@pytest.mark.parametrize("options", [{"wrap": "none"}, {"param_dtype": "float8"}])
def test_unknown_options_are_refused(tiny_model, options):
    with pytest.raises(UsageError, match="DPA851"):
        build(tiny_model(), **options)


@pytest.mark.parametrize("fused", [False, True])
def test_a_frozen_model_scores_packed_rows_and_notes_them(tiny_model, ragged_batch, fused):
    frozen, batch = build(tiny_model(), optim=None, packed=True, fused=fused), ragged_batch()
    batch.batch["position_ids"][2] += 3
    parts = [np.array([5, 0, 2]), np.array([1, 3, 4, 6, 7])]
    found = log_probs(frozen, batch, parts, temperature=0.7)
    expected = expected_log_probs(tiny_model(), batch, 0.7)
    torch.testing.assert_close(found[0].double(), expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1].double(), expected[1], atol=1e-5, rtol=0)
    assert frozen.packed_notes() == [
        {"restarts": [True, True, False], "mask": "none"},
        {"restarts": [True] * 5, "mask": "none"},
    ]
    assert frozen.packed_notes() == []


def test_an_unknown_optimizer_is_refused(tiny_model):
    with pytest.raises(UsageError, match=r"DPA851 .*adagrad"):
        build(tiny_model(), optim=OptimSpec(name="adagrad"))


def test_a_state_without_the_moments_of_one_weight_is_refused(tiny_model, ragged_batch):
    backend, batch = build(tiny_model(), optim=ADAMW), ragged_batch()
    backend.load_state(backend.state())  # before the first step there are none
    train(backend, batch, plan_of(batch))
    norm = "optim/model.norm.weight/"
    kept = {name: value for name, value in backend.state().items() if not name.startswith(norm)}
    with pytest.raises(UsageError, match=r"DPA804 .*exp_avg.* of parameter model.norm.weight"):
        backend.load_state(kept)
    frozen = build(tiny_model(), optim=ADAMW)
    frozen.load_state(kept | {f"{norm}none": torch.empty(0)})
    assert f"{norm}none" in frozen.state()
