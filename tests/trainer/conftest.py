"""Tiny models and ragged batches for tests of the trainer."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.models import TinyModel, write_tiny_model

PROMPT, RESPONSE = 6, 5
SCORER = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 6
"""


@pytest.fixture(scope="module")
def ray_for_all() -> Iterator[None]:
    """One Ray for the runs of a module."""
    from dataproto_audit.trainer.workers.cluster import cluster

    with cluster():
        yield


@pytest.fixture(scope="session")
def scored_by_letters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for rewards that a model without training gets, too, different within a group."""
    file = tmp_path_factory.mktemp("scorer") / "scorer.py"
    file.write_text(SCORER)
    key = "reward.custom_reward_function"
    return [f"{key}.path={file}", f"{key}.name=compute_score"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model(tied=..., seed=...)``: the folder of a tiny Qwen3, made once each."""
    made: dict[tuple[bool, int], Path] = {}

    def make(*, tied: bool = False, seed: int = 1) -> Path:
        if (tied, seed) not in made:
            sizes = TinyModel(
                charset="arithmetic",
                tie_word_embeddings=tied,
                max_position_embeddings=64,
                initializer_range=0.2,
                seed=seed,
            )
            folder = tmp_path_factory.mktemp(f"tiny-{tied}-{seed}")
            made[tied, seed] = write_tiny_model(folder, sizes)
        return made[tied, seed]

    return make


@pytest.fixture(scope="session")
def ragged_batch() -> Callable[..., DataProto]:
    """``ragged_batch(rows, seed)``: left-padded prompts, right-padded responses, one of them
    without a trained token; log-probs and advantages as an update reads them."""

    def make(rows: int = 8, seed: int = 0, temperature: float = 1.0) -> DataProto:
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(1, PROMPT + 1, (rows,), generator=generator)
        response = torch.randint(1, RESPONSE + 1, (rows,), generator=generator)
        columns = torch.arange(PROMPT + RESPONSE)[None]
        attended = (columns >= PROMPT - prompt[:, None]) & (columns < PROMPT + response[:, None])
        ids = torch.randint(3, 40, (rows, PROMPT + RESPONSE), generator=generator) * attended
        response_mask = attended[:, PROMPT:].long()
        response_mask[-1] = 0

        def noise() -> torch.Tensor:
            return torch.randn(rows, RESPONSE, generator=generator)

        tensors = {
            "input_ids": ids,
            "attention_mask": attended.long(),
            "position_ids": (attended.long().cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, PROMPT:].clone(),
            "response_mask": response_mask,
            "old_log_probs": (noise() - 4) * attended[:, PROMPT:],
            "ref_log_prob": (noise() - 4) * attended[:, PROMPT:],
            "advantages": noise()[:, :1] * response_mask,
        }
        return DataProto.from_dict(tensors, meta_info={"temperature": temperature})

    return make


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``family(kind, seed)``: a folder with four layers, norms and biases that are not trivial,
    and a vocabulary that no number of ranks divides. Qwen2 ties its embeddings."""
    made: dict[tuple[str, int], Path] = {}

    def make(kind: str, seed: int = 1) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        if (kind, seed) in made:
            return made[kind, seed]
        sizes = {"head_dim": 32} if kind == "qwen3" else {}
        config = AutoConfig.for_model(
            kind,
            vocab_size=43,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=kind == "qwen2",
            pad_token_id=5,  # sampled now and then: transformers keeps its embedding still
            **sizes,
        )
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                width = 0.1 if weight.ndim > 1 else 0.3
                weight.copy_(torch.randn_like(weight) * width + ("norm" in name))
        folder = tmp_path_factory.mktemp(f"{kind}-{seed}")
        model.save_pretrained(folder)
        made[kind, seed] = folder
        return folder

    return make
