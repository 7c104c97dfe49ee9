import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from dataproto_audit.reference import losses
from dataproto_audit.reference.logprobs import (
    grad_of_loss,
    label_log_probs,
    load_model,
    token_log_probs,
)
from dataproto_audit.reference.masks import (
    joined_ids,
    mask_of_lengths,
    position_ids,
    response_attention,
)

VOCABULARY, PROMPT, RESPONSE = 23, 4, 5


def _tiny_model(seed: int = 0, *, tied: bool = False) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        attn_implementation="eager",
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return _tiny_model()


def _rows(seed: int = 0, rows: int = 4) -> dict[str, Tensor]:
    """Rows with left-padded prompts and right-padded responses; row 0 has no padding at all."""
    generator = torch.Generator().manual_seed(seed)
    prompt_lengths = torch.randint(1, PROMPT + 1, (rows,), generator=generator)
    response_lengths = torch.randint(1, RESPONSE + 1, (rows,), generator=generator)
    prompt_lengths[0], response_lengths[0] = PROMPT, RESPONSE
    mask = torch.cat(
        [
            mask_of_lengths(prompt_lengths, PROMPT, side="left"),
            mask_of_lengths(response_lengths, RESPONSE),
        ],
        dim=1,
    ).long()
    ids = torch.randint(1, VOCABULARY, (rows, PROMPT + RESPONSE), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "position_ids": position_ids(mask)}


def _mini_batch(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    batch = _rows(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    log_probs, _ = token_log_probs(model, **batch, response_width=RESPONSE)
    mask = response_attention(batch["attention_mask"], RESPONSE).bool()

    def noise() -> Tensor:
        return 0.1 * torch.randn(log_probs.shape, generator=generator)

    return batch | {
        "response_mask": mask,
        "old_log_probs": torch.where(mask, log_probs + noise(), 0.0),
        "ref_log_prob": torch.where(mask, log_probs + noise(), 0.0),
        "advantages": 10 * noise() * mask,
    }


# -- log-probs -------------------------------------------------------------------------------------


def test_uniform_logits_share_the_probability() -> None:
    log_probs, entropy = label_log_probs(torch.zeros(1, 2, 8), torch.tensor([[0, 7]]))
    assert log_probs[0].tolist() == pytest.approx([-2.0794415] * 2)
    assert entropy[0].tolist() == pytest.approx([2.0794415] * 2)


def test_entropy_at_the_sampling_temperature() -> None:
    # Forgetting the temperature gives 0.4751 (case B087).
    logits, labels = torch.tensor([[[1.5, 0.0]]]), torch.tensor([[0]])
    log_probs, entropy = label_log_probs(logits, labels, temperature=0.5)
    assert entropy.item() == pytest.approx(0.191, abs=5e-4)
    assert log_probs.item() == pytest.approx(-0.0485874, abs=1e-6)  # -log(1 + exp(-3))
    assert label_log_probs(logits, labels)[1].item() == pytest.approx(0.4751, abs=1e-4)


def test_a_banned_token_has_no_entropy_and_no_nan() -> None:
    logits = torch.tensor([[[0.0, 0.0, -torch.inf]]], requires_grad=True)
    _, entropy = label_log_probs(logits, torch.tensor([[0]]))
    assert entropy.item() == pytest.approx(0.6931472)
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    assert bool(gradient.isfinite().all())


def test_each_column_scores_its_own_token_without_padding(model: Qwen3ForCausalLM) -> None:
    batch = _rows()
    log_probs, entropy = token_log_probs(model, **batch, response_width=RESPONSE, temperature=0.7)
    for row in range(4):
        on = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row][on][None]
        with torch.no_grad():
            table = (model(input_ids=ids).logits[0].double() / 0.7).log_softmax(dim=-1)
        length = int(on[PROMPT:].sum())
        for t in range(length):
            before = ids.shape[1] - length + t - 1  # position of the token before column t
            expected = table[before]
            token = ids[0, before + 1]
            assert log_probs[row, t].item() == pytest.approx(expected[token].item(), abs=2e-6)
            own_entropy = -(expected.exp() * expected).sum().item()
            assert entropy[row, t].item() == pytest.approx(own_entropy, abs=2e-6)
        assert log_probs[row, length:].count_nonzero() == 0
        assert entropy[row, length:].count_nonzero() == 0


def test_the_number_of_rows_at_once_does_not_matter(model: Qwen3ForCausalLM) -> None:
    batch = _rows(1)
    whole = token_log_probs(model, **batch, response_width=RESPONSE)
    for rows in (1, 3, 100):
        parts = token_log_probs(model, **batch, response_width=RESPONSE, rows_per_forward=rows)
        torch.testing.assert_close(parts, whole, rtol=0, atol=2e-6)


def test_rows_do_not_see_each_other(model: Qwen3ForCausalLM) -> None:
    batch = _rows(2)
    order = torch.tensor([2, 0, 3, 1])
    moved = {name: value[order] for name, value in batch.items()}
    first, _ = token_log_probs(model, **batch, response_width=RESPONSE)
    second, _ = token_log_probs(model, **moved, response_width=RESPONSE)
    torch.testing.assert_close(second, first[order], rtol=0, atol=2e-6)


def test_a_token_does_not_see_what_follows(model: Qwen3ForCausalLM) -> None:
    batch = _rows(3)
    before, _ = token_log_probs(model, **batch, response_width=RESPONSE)
    batch["input_ids"][0, PROMPT + 2] = batch["input_ids"][0, PROMPT + 2] % (VOCABULARY - 1) + 1
    after, _ = token_log_probs(model, **batch, response_width=RESPONSE)
    changed = (after != before)[0].tolist()
    assert changed == [False, False, True, True, True]


def test_an_empty_batch_has_no_log_probs(model: Qwen3ForCausalLM) -> None:
    batch = {name: value[:0] for name, value in _rows().items()}
    log_probs, _ = token_log_probs(model, **batch, response_width=RESPONSE)
    assert log_probs.shape == (0, RESPONSE)


def test_bad_settings_are_refused(model: Qwen3ForCausalLM) -> None:
    batch = _rows()
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_log_probs(model, **batch, response_width=RESPONSE, temperature=0.0)
    with pytest.raises(ValueError, match="rows_per_forward must be positive"):
        token_log_probs(model, **batch, response_width=RESPONSE, rows_per_forward=0)
    with pytest.raises(ValueError, match="does not leave room for a prompt"):
        token_log_probs(model, **batch, response_width=PROMPT + RESPONSE)


def test_dropout_is_off_and_the_mode_comes_back() -> None:
    model = _tiny_model()
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.Dropout(0.5))
    model.train()
    first, _ = token_log_probs(model, **_rows(), response_width=RESPONSE)
    second, _ = token_log_probs(model, **_rows(), response_width=RESPONSE)
    assert torch.equal(first, second)
    assert model.training


def test_a_saved_model_is_loaded_as_it_was(model: Qwen3ForCausalLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert not loaded.training
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    expected = token_log_probs(model, **_rows(), response_width=RESPONSE)
    torch.testing.assert_close(
        token_log_probs(loaded, **_rows(), response_width=RESPONSE), expected, rtol=0, atol=0
    )
    coarse = load_model(tmp_path, dtype=torch.bfloat16)
    rounded = token_log_probs(coarse, **_rows(), response_width=RESPONSE)
    gap = (rounded[0] - expected[0]).abs().max().item()
    assert 1e-4 < gap < 0.2


def test_float64_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="do not run in float64"):
        load_model(tmp_path, dtype=torch.float64)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_model(tmp_path / "nowhere")


def test_transformers_is_imported_with_a_model_only() -> None:
    code = (
        "import sys, dataproto_audit.reference.logprobs as m, dataproto_audit.reference.updates;"
        "import dataproto_audit.reference.advantages;"
        "bad = {'transformers', 'ray', 'vllm', 'pandas'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# -- gradients -------------------------------------------------------------------------------------


class _ExactModel(nn.Module):
    """A causal model in true float64: a token sees the mean of the attended ones up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6, dtype=torch.float64)
        self.place = nn.Embedding(PROMPT + RESPONSE, 6, dtype=torch.float64)
        self.head = nn.Linear(6, VOCABULARY, dtype=torch.float64)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *, use_cache: bool
    ) -> SimpleNamespace:
        assert not use_cache
        on = attention_mask[..., None].double()
        seen = (self.embed(input_ids) + self.place(position_ids)) * on
        mean = seen.cumsum(dim=1) / on.cumsum(dim=1).clamp(min=1)
        return SimpleNamespace(logits=self.head(mean.tanh()))


def test_the_gradient_agrees_with_finite_differences() -> None:
    torch.manual_seed(0)
    model = _ExactModel()
    batch = _mini_batch(model)
    options = {"kl_loss_coef": 0.2, "entropy_coeff": 0.1, "temperature": 0.9}
    gradients, _ = grad_of_loss(model, batch, **options)
    for name, parameter in model.named_parameters():
        direction = torch.randn_like(parameter)
        ends = []
        for step in (1e-6, -2e-6):  # from p to p + h, then to p - h
            with torch.no_grad():
                parameter += step * direction
            ends.append(grad_of_loss(model, batch, **options)[1]["total"].item())
        with torch.no_grad():
            parameter += 1e-6 * direction
        expected = (gradients[name] * direction).sum().item()
        assert expected != 0.0
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(expected, rel=1e-5, abs=1e-9), name


def test_the_terms_are_those_of_the_loss(model: Qwen3ForCausalLM) -> None:
    batch = _mini_batch(model)
    log_probs, entropy = token_log_probs(
        model,
        batch["input_ids"],
        batch["attention_mask"],
        batch["position_ids"],
        RESPONSE,
    )
    fields = ("old_log_probs", "advantages", "response_mask", "ref_log_prob")
    expected = losses.policy_loss(
        log_probs, **{name: batch[name] for name in fields}, entropy=entropy, kl_loss_coef=0.3
    )
    _, terms = grad_of_loss(model, batch, kl_loss_coef=0.3)
    for name, value in expected.items():
        torch.testing.assert_close(terms[name], value)
        assert not terms[name].requires_grad


def test_parts_of_a_mini_batch_add_up(model: Qwen3ForCausalLM) -> None:
    batch = _mini_batch(model)
    mode = "token-mean"
    count = losses.count_normaliser(batch["response_mask"], mode)
    whole, _ = grad_of_loss(model, batch, loss_agg_mode=mode)
    parts = [
        grad_of_loss(
            model,
            {name: value[rows] for name, value in batch.items()},
            loss_agg_mode=mode,
            normaliser=count,
        )[0]
        for rows in (slice(0, 1), slice(1, 4))
    ]
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[0][name] + parts[1][name], gradient, rtol=0, atol=1e-6)


def test_no_advantage_moves_nothing(model: Qwen3ForCausalLM) -> None:
    batch = _mini_batch(model)
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    gradients, _ = grad_of_loss(model, batch)
    assert all(value.count_nonzero() == 0 for value in gradients.values())


def test_the_model_is_left_alone(model: Qwen3ForCausalLM) -> None:
    grad_of_loss(model, _mini_batch(model))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_tied_parameter_appears_once_and_an_unreached_one_is_zero() -> None:
    model = _tiny_model(tied=True)
    model.spare = nn.Parameter(torch.ones(2))
    gradients, _ = grad_of_loss(model, _mini_batch(model))
    assert "lm_head.weight" not in gradients
    assert gradients["model.embed_tokens.weight"].count_nonzero() > 0
    assert gradients["spare"].tolist() == [0.0, 0.0]
    assert set(gradients) == {name for name, _ in model.named_parameters()}


def test_the_layout_is_prompt_then_response() -> None:
    batch = _rows()
    ids = batch["input_ids"]
    assert torch.equal(joined_ids(ids[:, :PROMPT], ids[:, PROMPT:]), ids)
