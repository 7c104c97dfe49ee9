"""Tiny models, the sharded exports of a trainer, and the same numbers from transformers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.backends.shards import ShardPayload, ShardSpec, pack
from dataproto_audit.trainer.models import ModelFolder, TinyModel, open_model, write_tiny_model
from dataproto_audit.trainer.prompts import object_array

TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@dataclass
class Model:
    """A model folder, and a transformers model whose weights the tests may change."""

    folder: ModelFolder
    reference: Any

    @property
    def tied(self) -> bool:
        return bool(self.folder.config["tie_word_embeddings"])

    def change(self, seed: int, scale: float = 0.05) -> None:
        """Move every weight, as an update would."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.reference.parameters():
                parameter += scale * torch.randn(parameter.shape, generator=generator)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach() for name, value in self.reference.named_parameters()}

    def exports(self, *, world: int = 3, version: int = 1) -> list[ShardPayload]:
        """What ranks export: rows cut over ranks in FSDP2's way, the last part shorter."""
        payloads = []
        for rank in range(world):
            pieces = {}
            for name, value in self.weights().items():
                rows = -(-value.shape[0] // world)
                start = min(rank * rows, value.shape[0])
                spec = ShardSpec(tuple(value.shape), "float32", start)
                pieces[name] = (value[start : start + rows].clone(), spec)
            aliases = TIED if self.tied else {}
            payloads.append(
                pack(pieces, rank=rank, world_size=world, version=version, aliases=aliases)
            )
        return payloads

    def log_probs(self, batch: DataProto, temperature: float = 1.0) -> torch.Tensor:
        """Log-probs f32[B,R] of the responses by transformers, 0 off the response's attention."""
        tensors = batch.batch
        width = tensors["responses"].shape[1]
        with torch.no_grad():
            logits = self.reference(
                input_ids=tensors["input_ids"],
                attention_mask=tensors["attention_mask"],
                position_ids=tensors["position_ids"],
            ).logits[:, -width - 1 : -1]
        log_probs = torch.log_softmax(logits.float() / temperature, -1)
        chosen = log_probs.gather(-1, tensors["responses"][..., None])[..., 0]
        return chosen * tensors["response_mask"]


def make_model(folder: Any, *, tied: bool) -> Model:
    import transformers

    transformers.logging.disable_progress_bar()
    tiny = TinyModel(tie_word_embeddings=tied, initializer_range=0.2, max_position_embeddings=128)
    write_tiny_model(folder, tiny)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return Model(open_model(folder), reference.eval())


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "untied", tied=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


def rows(prompts: list[list[int]], counts: list[int], **meta: Any) -> DataProto:
    """A generation batch: prompt k repeated ``counts[k]`` times, one uid for each prompt."""
    ids = [p for p, n in zip(prompts, counts, strict=True) for _ in range(n)]
    uids = [f"uid-{k}" for k, n in enumerate(counts) for _ in range(n)]
    return DataProto.from_dict(
        tensors={"dummy_tensor": torch.zeros(len(ids), 1)},
        non_tensors={"prompt_ids": object_array(ids), "uid": object_array(uids)},
        meta_info=meta,
    )


def random_prompts(number: int, *, length: int | None = None, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    sizes = [length or int(rng.integers(3, 9)) for _ in range(number)]
    return [[1, *rng.integers(7, 100, size - 1).tolist()] for size in sizes]
